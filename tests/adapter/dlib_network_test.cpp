// A network of dlib's deep-learning library, trained by several ranks, beside dlib's own solver with the whole batch.
#include <cmath>
#include <cstddef>
#include <string>
#include <vector>

#include <dlib/dnn.h>

#include <ddp/adapter/accumulating.hpp>
#include <ddp/core/random.hpp>
#include <ddp/data/sampler.hpp>
#include <ddp/optim/sgd.hpp>
#include <ddp/testing/check_model.hpp>
#include <ddp/train/data_parallel.hpp>

#include "support/catch.hpp"
#include "support/on_ranks.hpp"
#include "train/patience.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

using network = dlib::loss_multiclass_log<dlib::fc<3, dlib::htan<dlib::fc<8, dlib::input<dlib::matrix<float>>>>>>;

constexpr std::size_t samples = 61;  // shares of 2, 3 and 4 ranks differ in size

struct dataset {
    std::vector<dlib::matrix<float>> points;
    std::vector<unsigned long> labels;
    dataset() {
        random_stream const drawn{5, random_use::user};
        for (std::size_t i = 0; i < samples; ++i) {
            dlib::matrix<float> x(2, 1);
            for (long k = 0; k < 2; ++k) x(k) = drawn.at(2 * i + static_cast<std::size_t>(k)).symmetric<float>();
            points.push_back(x);
            labels.push_back(x(0) + x(1) > 0.4F ? 2 : x(0) > x(1) ? 1 : 0);
        }
    }
};

/// dlib's passes: they assign gradients of the mean loss. accumulating makes a model of them.
struct dlib_passes {
    using element = float;
    network net;
    dataset const& data;
    dlib::resizable_tensor input;

    dlib_passes(network const& start, dataset const& all) : net(start), data(all) {}
    dlib_passes(dlib_passes const&) = delete;

    std::vector<parameter<float>> parameters() {
        std::vector<parameter<float>> all;
        dlib::visit_layer_parameters(net, [&](std::size_t i, dlib::tensor& values) {
            all.push_back({"layer " + std::to_string(i), {values.size()}, {values.host(), values.size()}, {}});
        });
        dlib::visit_layer_parameter_gradients(
            net, [&](std::size_t i, dlib::tensor& gradient) { all[i].gradient = {gradient.host(), gradient.size()}; });
        std::erase_if(all, [](parameter<float> const& one) { return one.value.empty(); });
        return all;
    }
    double forward(sample_range batch) {
        auto const at = static_cast<std::ptrdiff_t>(batch.begin), count = static_cast<std::ptrdiff_t>(batch.size());
        net.to_tensor(data.points.begin() + at, data.points.begin() + at + count, input);
        return net.compute_loss(input, data.labels.begin() + at);
    }
    void backward() { net.subnet().back_propagate_error(input); }
};

/// dlib allocates parameters and gradients in the first two passes.
network started(dataset const& data) {
    network net;
    net.compute_parameter_gradients(data.points.begin(), data.points.begin() + 1, data.labels.begin());
    random_stream const drawn{9, random_use::initial_values};
    std::size_t k = 0;
    dlib::visit_layer_parameters(net, [&](std::size_t, dlib::tensor& values) {
        for (std::size_t i = 0; i < values.size(); ++i) values.host()[i] = drawn.at(k++).symmetric<float>();
    });
    return net;
}

std::vector<float> values_of(network& net) {
    std::vector<float> all;
    dlib::visit_layer_parameters(net, [&](std::size_t, dlib::tensor& values) {
        all.insert(all.end(), values.host(), values.host() + values.size());
    });
    return all;
}

}  // namespace

TEST_CASE("a network of dlib trains as dlib's own solver trains it", "[adapter]") {
    constexpr double rate = 0.5, momentum = 0.5;
    constexpr int steps = 40;
    dataset const data;
    network const start = started(data);

    network alone = start;
    double first_loss = 0, last_loss = 0;
    std::vector<dlib::sgd> solvers(network::num_computational_layers, dlib::sgd(0, momentum));
    for (int step = 0; step < steps; ++step) {
        last_loss = alone.compute_parameter_gradients(data.points.begin(), data.points.end(), data.labels.begin());
        if (step == 0) first_loss = last_loss;
        alone.update_parameters(dlib::make_sstack(solvers), rate);
    }
    CHECK(last_loss < first_loss / 2);  // it has learnt something

    auto const [ranks, tcp] = GENERATE(ways_to_run());
    CAPTURE(ranks, tcp);
    auto const got = ranks_over(
        tcp, ranks,
        [&](auto& comm) {
            accumulating<dlib_passes> model(start, data);
            data_parallel trainer{model, ddp::sgd{.lr = rate, .momentum = momentum}, comm};
            for (int step = 0; step < steps; ++step) trainer.step(share_of(samples, comm.rank(), comm.size()));
            return values_of(model.net);
        },
        patient());
    std::vector<float> const expected = values_of(alone);
    for (auto const& values : got) {
        REQUIRE(values.size() == expected.size());
        for (std::size_t i = 0; i < values.size(); ++i)
            CHECK(std::abs(values[i] - expected[i]) < 2e-5F * (1 + std::abs(expected[i])));
    }
    CHECK(got == std::vector(got.size(), got.front()));
}

TEST_CASE("passes of dlib keep the rules of a model", "[adapter]") {
    dataset const data;
    accumulating<dlib_passes> model(started(data), data);
    CHECK(model.parameters().size() == 2);
    CHECK(testing::check_model(model, sample_range{3, 20}) == std::vector<std::string>{});
}
