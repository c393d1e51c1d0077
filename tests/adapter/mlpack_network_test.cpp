// A network of mlpack, trained by several ranks, beside one process with the whole batch.
#include <cstddef>
#include <mlpack/methods/ann/ffn.hpp>
#include <mlpack/methods/ann/layer/linear.hpp>
#include <mlpack/methods/ann/layer/log_softmax.hpp>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include <ddp/adapter/flat_model.hpp>
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

constexpr std::size_t features = 3, samples = 61;  // shares of 2, 3 and 4 ranks differ in size
constexpr double rate = 0.1, momentum = 0.5;
constexpr int steps = 40;

using regression = mlpack::FFN<mlpack::MeanSquaredError>;
using classification = mlpack::FFN<mlpack::NegativeLogLikelihood>;  // FFN's own default

struct dataset {
    arma::mat points, targets;  // a column a sample
    explicit dataset(bool classes) : points(features, samples) {
        random_stream const drawn{5, random_use::user};
        for (arma::uword i = 0; i < points.n_elem; ++i) points[i] = drawn.at(i).symmetric<double>();
        targets = points.row(0) - 2 * points.row(1) % points.row(2);
        if (classes) targets.transform([](double value) { return value > 0.3 ? 2. : value > -0.3 ? 1. : 0.; });
    }
};

template <class Network>
Network started() {
    Network net;
    net.template Add<mlpack::Linear>(6);
    net.template Add<mlpack::TanH>();
    net.template Add<mlpack::Linear>(std::is_same_v<Network, classification> ? 3 : 1);
    if (std::is_same_v<Network, classification>) net.template Add<mlpack::LogSoftMax>();
    net.Reset(features);
    random_stream const drawn{9, random_use::initial_values};
    arma::mat& values = net.Parameters();
    for (arma::uword i = 0; i < values.n_elem; ++i) values[i] = drawn.at(i).symmetric<double>();
    return net;
}

/// Gradient descent with momentum and the whole batch, written out.
template <class Network>
std::vector<double> trained_alone(dataset const& data, double& first_loss, double& last_loss) {
    Network net = started<Network>();
    arma::mat answers, gradient, velocity(arma::size(net.Parameters()), arma::fill::zeros);
    for (int step = 0; step < steps; ++step) {
        net.Forward(data.points, answers);
        last_loss = net.Backward(data.points, data.targets, gradient);
        if (step == 0) first_loss = last_loss;
        velocity = momentum * velocity + gradient / samples;
        net.Parameters() -= rate * velocity;
    }
    return {net.Parameters().begin(), net.Parameters().end()};
}

void agrees(std::vector<std::vector<double>> const& got, std::vector<double> const& expected) {
    for (auto const& values : got) {
        REQUIRE(values.size() == expected.size());
        for (std::size_t i = 0; i < values.size(); ++i)
            CHECK(values[i] == Approx(expected[i]).epsilon(0).margin(1e-12));
    }
    CHECK(got == std::vector(got.size(), got.front()));
}

}  // namespace

TEST_CASE("a network of mlpack trains as one process with the whole batch trains it", "[adapter]") {
    dataset const data(false);
    double first_loss = 0, last_loss = 0;
    auto const expected = trained_alone<regression>(data, first_loss, last_loss);
    CHECK(last_loss < first_loss / 2);  // it has learnt something

    auto const [ranks, tcp] = GENERATE(ways_to_run());
    CAPTURE(ranks, tcp);
    auto const got = ranks_over(
        tcp, ranks,
        [&](auto& comm) {
            auto net = started<regression>();
            std::span<double> const values(net.Parameters().memptr(), net.Parameters().n_elem);
            std::vector<double> slopes(values.size());
            // of the vector's memory, and strict: Armadillo must not put other memory in its place
            arma::mat answers, gradient(slopes.data(), slopes.size(), 1, false, true);
            flat_model model{values, std::span(slopes), [&](sample_range mine) {
                                 arma::mat const x = data.points.cols(mine.begin, mine.end - 1);
                                 net.Forward(x, answers);
                                 double const loss =
                                     net.Backward(x, data.targets.cols(mine.begin, mine.end - 1), gradient);
                                 gradient /= static_cast<double>(mine.size());  // only the loss is a mean already
                                 return loss;
                             }};
            data_parallel trainer{model, sgd{.lr = rate, .momentum = momentum}, comm};
            for (int step = 0; step < steps; ++step) trainer.step(share_of(samples, comm.rank(), comm.size()));
            return std::vector<double>(values.begin(), values.end());
        },
        patient());
    agrees(got, expected);
}

TEST_CASE("with mlpack's NegativeLogLikelihood both loss and gradient are divided", "[adapter]") {
    dataset const data(true);
    double first_loss = 0, last_loss = 0;
    auto const expected = trained_alone<classification>(data, first_loss, last_loss);
    CHECK(last_loss < 0.7 * first_loss);

    auto const [ranks, tcp] = GENERATE(ways_to_run());
    CAPTURE(ranks, tcp);
    auto const got = ranks_over(
        tcp, ranks,
        [&](auto& comm) {
            auto net = started<classification>();
            arma::mat& all = net.Parameters();
            arma::mat gradient(arma::size(all), arma::fill::zeros), answers;
            flat_model model{std::span(all.memptr(), all.n_elem), std::span(gradient.memptr(), gradient.n_elem),
                             [&](sample_range mine) {
                                 arma::mat const x = data.points.cols(mine.begin, mine.end - 1);
                                 net.Forward(x, answers);
                                 double const sum =
                                     net.Backward(x, data.targets.cols(mine.begin, mine.end - 1), gradient);
                                 gradient /= static_cast<double>(mine.size());
                                 return sum / static_cast<double>(mine.size());
                             }};
            data_parallel trainer{model, sgd{.lr = rate, .momentum = momentum}, comm};
            for (int step = 0; step < steps; ++step) trainer.step(share_of(samples, comm.rank(), comm.size()));
            return std::vector<double>(all.begin(), all.end());
        },
        patient());
    agrees(got, expected);
}

TEST_CASE("passes of mlpack keep the rules of a model, if the gradient is that of the loss", "[adapter]") {
    // MeanSquaredError returns the mean loss, and leaves the sum over the samples as the gradient.
    auto const found = []<class Network>(Network net, bool divide_loss, bool divide_gradient) {
        dataset const data(std::is_same_v<Network, classification>);
        arma::mat gradient(arma::size(net.Parameters()), arma::fill::zeros), answers;
        flat_model model{std::span(net.Parameters().memptr(), gradient.n_elem),
                         std::span(gradient.memptr(), gradient.n_elem), [&](sample_range mine) {
                             arma::mat const x = data.points.cols(mine.begin, mine.end - 1);
                             auto const count = static_cast<double>(mine.size());
                             net.Forward(x, answers);
                             double const loss = net.Backward(x, data.targets.cols(mine.begin, mine.end - 1), gradient);
                             if (divide_gradient) gradient /= count;
                             return divide_loss ? loss / count : loss;
                         }};
        return testing::check_model(model, sample_range{3, 20});
    };
    CHECK(found(started<regression>(), false, true) == std::vector<std::string>{});
    CHECK(found(started<regression>(), false, false) != std::vector<std::string>{});
    CHECK(found(started<classification>(), true, true) == std::vector<std::string>{});
    CHECK(found(started<classification>(), true, false) != std::vector<std::string>{});
}
