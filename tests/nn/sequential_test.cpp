#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ddp/core/error.hpp>
#include <ddp/nn/activation.hpp>
#include <ddp/nn/batch_norm.hpp>
#include <ddp/nn/conv2d.hpp>
#include <ddp/nn/dropout.hpp>
#include <ddp/nn/gelu.hpp>
#include <ddp/nn/layer_norm.hpp>
#include <ddp/nn/linear.hpp>
#include <ddp/nn/loss.hpp>
#include <ddp/nn/pool2d.hpp>
#include <ddp/nn/sequential.hpp>

#include "gradients.hpp"
#include "support/catch.hpp"

using namespace ddp;

namespace {

template <class E>
struct samples {
    std::vector<E> inputs;
    std::vector<std::uint32_t> labels;
    std::size_t features;

    samples(std::size_t rows, std::size_t width, std::size_t classes, std::uint64_t part = 1)
        : inputs(test::random_numbers<E>(rows * width, part)), labels(rows), features(width) {
        for (std::size_t r = 0; r < rows; ++r) labels[r] = static_cast<std::uint32_t>((r + part) % classes);
    }
    [[nodiscard]] classification_batch<E> rows(std::size_t first, std::size_t count) const {
        return {std::span(inputs).subspan(first * features, count * features), std::span(labels).subspan(first, count),
                count, features};
    }
    [[nodiscard]] classification_batch<E> all() const { return rows(0, labels.size()); }
};

template <class E>
auto classifier() {
    nn::sequential net{nn::linear<E>(7, 12), nn::relu<E>(),       nn::linear<E>(12, 9),
                       nn::tanh<E>(),        nn::linear<E>(9, 4), nn::softmax_cross_entropy<E>()};
    net.initialize(3);
    return net;
}

auto const nobody = [](std::size_t) {};

template <class M>
auto gradients(M& net) {
    std::vector<element_of<M>> all;
    for (auto const& p : net.parameters()) all.insert(all.end(), p.gradient.begin(), p.gradient.end());
    return all;
}

template <class M>
auto values(M& net) {
    std::vector<element_of<M>> all;
    for (auto const& p : net.parameters()) all.insert(all.end(), p.value.begin(), p.value.end());
    return all;
}

template <class M, class Batch>
auto gradients_of(M& net, Batch const& batch, pass<element_of<M>> how = {}) {
    net.forward(batch);
    net.backward(how, nobody);
    return gradients(net);
}

template <class M, class Batch>
double worst_model_gradient_error(M& net, Batch const& batch, double scale) {
    auto const said = gradients_of(net, batch, {.scale = scale});
    double worst = 0;
    std::size_t at = 0;
    for (auto const& p : net.parameters())
        for (double& value : p.value)
            worst =
                std::max(worst, std::abs(test::slope(value, [&] { return scale * net.forward(batch); }) - said[at++]));
    return worst;
}

/// The memory that a trainer would hand to bind: values copied, gradients full of noise.
template <class M>
storage<element_of<M>> arena_for(M& net) {
    using E = element_of<M>;
    auto const all = net.parameters();
    auto memory = std::make_shared<std::vector<nn::buffer<E>>>(2 * all.size());
    storage<E> arena;
    for (std::size_t i = 0; i < all.size(); ++i) {
        std::size_t const n = all[i].value.size();
        arena.values.push_back((*memory)[2 * i].take(n));
        arena.gradients.push_back((*memory)[2 * i + 1].take(n));
        std::copy(all[i].value.begin(), all[i].value.end(), arena.values.back().begin());
        std::fill(arena.gradients.back().begin(), arena.gradients.back().end(), std::numeric_limits<E>::quiet_NaN());
    }
    arena.owner = memory;
    return arena;
}

template <class M, class Batch>
void train(M& net, Batch const& batch, int steps) {
    for (int s = 0; s < steps; ++s) {
        net.forward(batch);
        net.backward({}, nobody);
        for (auto const& p : net.parameters())
            for (std::size_t i = 0; i < p.value.size(); ++i) p.value[i] -= element_of<M>(0.1) * p.gradient[i];
    }
}

template <class F>
std::string refusal(F const& f) {
    try {
        f();
    } catch (usage_error const& error) {
        return error.what();
    }
    return {};
}

/// A layer with the least that is asked of one; tells whether it was trained or used.
struct witness {
    using element = double;
    std::shared_ptr<std::vector<bool>> seen = std::make_shared<std::vector<bool>>();
    nn::buffer<double> y;

    nn::matrix_view<double> forward(nn::const_matrix_view<double> x, nn::forward_mode mode) {
        seen->push_back(mode.training);
        auto out = y.take(nn::rows_of(x), nn::columns_of(x));
        out = x;
        return out;
    }
    nn::matrix_view<double> backward(nn::matrix_view<double> dy, nn::backward_mode) { return dy; }
};

/// Tells how it was called.
struct listener {
    using element = double;
    std::shared_ptr<std::vector<nn::forward_mode>> heard;
    nn::matrix_view<double> forward(nn::const_matrix_view<double> x, nn::forward_mode mode) {
        heard->push_back(mode);
        return y.take(nn::rows_of(x), nn::columns_of(x)).setZero();
    }
    nn::matrix_view<double> backward(nn::matrix_view<double> dy, nn::backward_mode) { return dy; }
    nn::buffer<double> y = {};
};

}  // namespace

TEST_CASE("sequential's gradients are the slopes of its loss", "[nn][gradient]") {
    auto const rows = GENERATE(std::size_t{1}, std::size_t{6}, std::size_t{40});
    CAPTURE(rows);
    SECTION("classification") {
        auto net = classifier<double>();
        samples<double> const data(rows, 7, 4);
        REQUIRE(worst_model_gradient_error(net, data.all(), 1) < 1e-8);
        REQUIRE(worst_model_gradient_error(net, data.all(), 2.5) < 1e-8);
    }
    SECTION("regression") {
        nn::sequential net{nn::linear<double>(5, 8), nn::tanh<double>(), nn::linear<double>(8, 2),
                           nn::mean_squared_error<double>()};
        auto const inputs = test::random_numbers<double>(rows * 5, 1),
                   targets = test::random_numbers<double>(rows * 2, 2);
        REQUIRE(worst_model_gradient_error(net, regression_batch<double>{inputs, targets, rows, 5}, 1) < 1e-8);
    }
    SECTION("an activation first and last") {
        // tanh twice: were the second one put in place of the first one's result, gradients would differ.
        nn::sequential net{nn::tanh<double>(), nn::relu<double>(), nn::linear<double>(6, 3),
                           nn::tanh<double>(), nn::tanh<double>(), nn::softmax_cross_entropy<double>()};
        net.initialize(1);
        samples<double> const data(rows, 6, 3);
        REQUIRE(worst_model_gradient_error(net, data.all(), 1) < 1e-8);
        REQUIRE(data.inputs == samples<double>(rows, 6, 3).inputs);
    }
}

TEST_CASE("parameters are named as PyTorch's Sequential names them, and shaped (outputs, inputs)", "[nn]") {
    auto net = classifier<float>();
    std::vector<std::string> names;
    for (auto const& p : net.parameters()) names.push_back(p.name);
    REQUIRE(names == std::vector<std::string>{"0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias"});
    REQUIRE(net.parameters()[2].shape == std::vector<std::size_t>{9, 12});
    REQUIRE(net.parameters()[3].shape == std::vector<std::size_t>{9});
}

TEST_CASE("every gradient is reported once, last parameter first, and final by then", "[nn]") {
    auto const rows = GENERATE(std::size_t{0}, std::size_t{5});
    auto net = classifier<float>();
    samples<float> const data(rows, 7, 4);
    auto const expected = gradients_of(net, data.all());
    auto const all = net.parameters();
    for (auto const& p : all) std::fill(p.gradient.begin(), p.gradient.end(), 99.0f);

    std::vector<std::size_t> order;
    std::vector<std::vector<float>> when_reported(all.size());
    net.forward(data.all());
    net.backward({}, [&](std::size_t i) {
        order.push_back(i);
        when_reported[i].assign(all[i].gradient.begin(), all[i].gradient.end());
    });
    REQUIRE(order == std::vector<std::size_t>{5, 4, 3, 2, 1, 0});
    std::vector<float> joined;
    for (auto const& g : when_reported) joined.insert(joined.end(), g.begin(), g.end());
    REQUIRE(joined == expected);
}

TEST_CASE("a value that changes once it was reported changes no gradient", "[nn]") {
    auto net = classifier<float>();
    samples<float> const data(5, 7, 4);
    auto const expected = gradients_of(net, data.all());
    auto const all = net.parameters();
    net.forward(data.all());
    net.backward({}, [&](std::size_t i) {
        std::fill(all[i].value.begin(), all[i].value.end(), std::numeric_limits<float>::quiet_NaN());
    });
    REQUIRE(gradients(net) == expected);
    STATIC_REQUIRE(ready_releases<decltype(net)>);
}

TEST_CASE("the parts of a batch, scaled by their sizes and accumulated, give the sum over all samples", "[nn]") {
    auto net = classifier<double>();
    samples<double> const data(11, 7, 4);
    auto const whole = gradients_of(net, data.all(), {.scale = 11});
    gradients_of(net, data.rows(0, 4), {.scale = 4});
    gradients_of(net, data.rows(4, 0), {.scale = 0, .accumulate = true});
    auto const parts = gradients_of(net, data.rows(4, 7), {.scale = 7, .accumulate = true});
    for (std::size_t i = 0; i < whole.size(); ++i) REQUIRE(parts[i] == Approx(whole[i]).epsilon(1e-12).margin(1e-13));
}

TEST_CASE("backward may be repeated, and assigns over anything", "[nn]") {
    auto net = classifier<double>();
    samples<double> const data(6, 7, 4);
    for (auto const& p : net.parameters()) std::fill(p.gradient.begin(), p.gradient.end(), std::nan(""));
    auto const once = gradients_of(net, data.all());
    for (double const g : once) REQUIRE(std::isfinite(g));
    net.backward({}, nobody);
    REQUIRE(gradients(net) == once);
    net.backward({.accumulate = true}, nobody);
    auto const twice = gradients(net);
    for (std::size_t i = 0; i < once.size(); ++i) REQUIRE(twice[i] == Approx(2 * once[i]).epsilon(1e-13));
}

TEST_CASE("a batch without rows has loss 0 and gradients of +0, and adds nothing", "[nn]") {
    auto net = classifier<float>();
    samples<float> const data(5, 7, 4);
    auto const before = gradients_of(net, data.all());
    REQUIRE(net.forward(data.rows(0, 0)) == 0.0);
    net.backward({.scale = 0, .accumulate = true}, nobody);
    REQUIRE(gradients(net) == before);
    net.backward({.scale = 0}, nobody);
    for (float const g : gradients(net)) REQUIRE((g == 0.0f && !std::signbit(g)));
    REQUIRE(net.forward(classification_batch<float>{}) == 0.0);  // not even a width
    REQUIRE(net.evaluate(data.rows(0, 0)).weight == 0);
    REQUIRE(gradients_of(net, data.all()) == before);
}

TEST_CASE("backward goes through the latest forward, whatever size the batches have", "[nn]") {
    auto net = classifier<float>();
    samples<float> const small(3, 7, 4, 1), large(50, 7, 4, 2);
    auto fresh = classifier<float>();
    auto const expected_small = gradients_of(fresh, small.all()), expected_large = gradients_of(fresh, large.all());
    net.forward(large.all());
    REQUIRE(gradients_of(net, small.all()) == expected_small);
    net.forward(small.all());
    REQUIRE(gradients_of(net, large.all()) == expected_large);
    REQUIRE(gradients_of(net, small.all()) == expected_small);
}

TEST_CASE("a bound model trains to the same bits as one in its own memory", "[nn][bind]") {
    samples<float> const data(33, 7, 4);
    auto own = classifier<float>(), bound = classifier<float>();
    auto arena = arena_for(bound);
    std::weak_ptr<void> const owner = arena.owner;
    auto const seat = arena.values[2].data();
    bound.bind(std::move(arena));
    arena = {};
    REQUIRE_FALSE(owner.expired());  // the model shares the memory
    REQUIRE(bound.parameters()[2].value.data() == seat);
    REQUIRE(values(bound) == values(own));
    auto const start = values(own);
    train(own, data.all(), 5);
    train(bound, data.all(), 5);
    REQUIRE(values(bound) == values(own));
    REQUIRE(gradients(bound) == gradients(own));
    REQUIRE(values(own) != start);

    bound.bind(arena_for(bound));
    REQUIRE(owner.expired());
    train(bound, data.all(), 1);
    train(own, data.all(), 1);
    REQUIRE(values(bound) == values(own));
}

TEST_CASE("the alignment of the inputs changes no bit", "[nn]") {
    auto const rows = GENERATE(std::size_t{1}, std::size_t{2}, std::size_t{9}, std::size_t{64});
    auto const outputs = GENERATE(std::size_t{1}, std::size_t{2}, std::size_t{10});
    auto const features = GENERATE(std::size_t{3}, std::size_t{37}, std::size_t{300});
    CAPTURE(rows, outputs, features);
    nn::sequential net{nn::linear(features, outputs), nn::softmax_cross_entropy()};
    samples<float> const data(rows, features, outputs);
    nn::buffer<float> memory;
    std::vector<std::vector<float>> results;
    for (std::size_t shift = 0; shift < 16; ++shift) {
        std::span<float> const inputs = memory.take(data.inputs.size() + 16).subspan(shift, data.inputs.size());
        std::copy(data.inputs.begin(), data.inputs.end(), inputs.begin());
        results.push_back(gradients_of(net, classification_batch<float>{inputs, data.labels, rows, features}));
        REQUIRE(results.back() == results.front());
    }
}

TEST_CASE("a sequential learns", "[nn]") {
    auto net = classifier<float>();
    samples<float> const data(32, 7, 4);
    double const before = net.forward(data.all());
    train(net, data.all(), 600);
    REQUIRE(net.forward(data.all()) < 0.5 * before);
}

TEST_CASE("evaluating sums losses and right answers, and leaves nothing to go back through", "[nn]") {
    auto net = classifier<double>();
    samples<double> const data(20, 7, 4);
    double const mean = net.forward(data.all());
    nn::evaluation const all = net.evaluate(data.all());
    REQUIRE(all.weight == 20);
    REQUIRE(all.loss() == Approx(mean));
    REQUIRE(all.correct <= 20);
    nn::evaluation parts = net.evaluate(data.rows(0, 13));
    parts += net.evaluate(data.rows(13, 7));
    REQUIRE(parts.weight == 20);
    REQUIRE(parts.correct == all.correct);
    REQUIRE(all.correct_in_top == 20);  // of the top five of four classes
    REQUIRE(parts.top_accuracy() == 1);
    REQUIRE(parts.loss_sum == Approx(all.loss_sum));
    REQUIRE(refusal([&] { net.backward({}, nobody); }).find("call forward") != std::string::npos);

    train(net, data.all(), 2000);
    REQUIRE(net.evaluate(data.all()).accuracy() > 0.9);
}

TEST_CASE("a prediction is what the last layer gives, in evaluation mode", "[nn]") {
    nn::sequential net{nn::linear(2, 2), nn::relu(), nn::linear(2, 3), nn::dropout(0.5), nn::softmax_cross_entropy()};
    auto const parameters = net.parameters();
    std::vector<std::vector<float>> const by_hand = {{1, 2, -1, 1}, {0.5f, -1}, {1, 0, 0, 1, 2, -1}, {0, 1, -2}};
    for (std::size_t i = 0; i < by_hand.size(); ++i)
        std::copy(by_hand[i].begin(), by_hand[i].end(), parameters[i].value.begin());
    // x = (1, 2): W x + b = (1 + 4 + 0.5, -1 + 2 - 1) = (5.5, 0); then (5.5, 0 + 1, 11 - 0 - 2).
    // x = (-1, 3): (-1 + 6 + 0.5, 1 + 3 - 1) = (5.5, 3); then (5.5, 3 + 1, 11 - 3 - 2).
    std::vector<float> const inputs = {1, 2, -1, 3};
    auto const z = net.predict(classification_batch<float>{.inputs = inputs, .labels = {}, .rows = 2, .features = 2});
    REQUIRE(std::vector<float>(z.data(), z.data() + z.size()) == std::vector<float>{5.5f, 1, 9, 5.5f, 4, 6});
    REQUIRE((z.rows() == 2 && z.cols() == 3 && z(1, 2) == 6));

    std::vector<std::uint32_t> const labels = {2, 2};
    classification_batch<float> const batch{
        .inputs = inputs, .labels = labels, .rows = 2, .features = 2, .samples = labels};
    (void)net.forward(batch);
    REQUIRE(net.predict(batch)(0, 0) == 5.5f);
    REQUIRE(refusal([&] { net.backward({}, nobody); }).find("call forward") != std::string::npos);
    REQUIRE(net.training());
    auto const none = net.predict(classification_batch<float>{.inputs = {}, .labels = {}, .rows = 0, .features = 2});
    REQUIRE((none.rows() == 0 && none.cols() == 3));
    REQUIRE(refusal([&] {
                (void)net.predict(
                    classification_batch<float>{.inputs = inputs, .labels = {}, .rows = 1, .features = 4});
            }).find("the model takes 2") != std::string::npos);
}

TEST_CASE("initial values are a function of the seed", "[nn][random]") {
    auto a = classifier<float>(), b = classifier<float>();
    REQUIRE(values(a) == values(b));
    b.initialize(4);
    REQUIRE(values(a) != values(b));
    REQUIRE(values(b.initialize(3)) == values(a));
    nn::linear<float> alone(12, 9);
    alone.initialize(3, 2);  // the net's parameter 2
    auto const w = alone.parameters()[0].value();
    auto const in_net = a.parameters()[2].value;
    REQUIRE(std::vector<float>(w.begin(), w.end()) == std::vector<float>(in_net.begin(), in_net.end()));
}

TEST_CASE("layers hear whether they are trained or used", "[nn]") {
    witness layer;
    auto const seen = layer.seen;
    nn::sequential net{std::move(layer), nn::linear<double>(3, 2), nn::softmax_cross_entropy<double>()};
    samples<double> const data(4, 3, 2);
    net.forward(data.all());
    (void)net.evaluate(data.all());
    net.training(false);
    net.forward(data.all());
    net.training(true);
    net.forward(data.all());
    REQUIRE(*seen == std::vector<bool>{true, false, false, true});
}

TEST_CASE("layers hear seed, step, their place and the samples' numbers", "[nn][random]") {
    auto const heard = std::make_shared<std::vector<nn::forward_mode>>();
    nn::sequential net{listener{heard}, nn::tanh<double>(), listener{heard}, nn::softmax_cross_entropy<double>()};
    samples<double> const data(2, 3, 3);
    std::vector<std::uint32_t> const numbers{40, 2};
    auto batch = data.all();
    net.forward(batch);
    batch.samples = numbers;
    net.initialize(6).begin_step(17);
    net.forward(batch);
    REQUIRE(heard->size() == 4);
    for (std::size_t i = 0; i < 4; ++i) {
        nn::forward_mode const& mode = (*heard)[i];
        REQUIRE(mode.layer == i % 2 * 2);
        REQUIRE(mode.seed == (i < 2 ? 0 : 6));
        REQUIRE(mode.step == (i < 2 ? 0 : 17));
        REQUIRE(mode.samples.data() == (i < 2 ? nullptr : numbers.data()));
    }
}

TEST_CASE("sequential says what does not fit", "[nn][bad-input]") {
    REQUIRE(refusal([] {
                nn::sequential net{nn::linear(4, 8), nn::relu(), nn::linear(7, 3), nn::softmax_cross_entropy()};
            }).find("layer 2 takes 7 features, the layers before it give 8") != std::string::npos);

    auto net = classifier<float>();
    REQUIRE(refusal([&] { net.backward({}, nobody); }).find("call forward") != std::string::npos);
    samples<float> const wide(5, 8, 4), data(5, 7, 4), classes(5, 7, 6);
    REQUIRE(refusal([&] { net.forward(wide.all()); }).find("8 features a sample, the model takes 7") !=
            std::string::npos);
    REQUIRE(refusal([&] {
                net.forward(classification_batch<float>{data.inputs, data.labels, 4, 7});
            }).find("4 rows of 7 features, but holds 35") != std::string::npos);
    net.forward(data.all());
    REQUIRE(refusal([&] { net.forward(classes.all()); }).find("label 4 at position 3") != std::string::npos);
    REQUIRE_THROWS_WITH(net.backward({}, nobody),
                        Catch::Contains("backward: there is no forward pass to go back through; call forward(batch) "
                                        "first"));  // not through the forward before the one that failed

    auto arena = arena_for(net);
    auto const before = net.parameters()[0].value.data();
    arena.gradients[3] = arena.gradients[3].first(1);
    REQUIRE(refusal([&] {
                net.bind(arena);
            }).find("bind: parameter 2.bias has 9 elements, its storage 9 and 1; lay it out by") != std::string::npos);
    arena.values.pop_back();
    REQUIRE(refusal([&] {
                net.bind(arena);
            }).find("bind: the model has 6 parameters, the storage 5 values and 6 gradients") != std::string::npos);
    REQUIRE(net.parameters()[0].value.data() == before);
}

TEST_CASE("layers that differ in kind or settings have other hashes, and the seed counts where one of them draws",
          "[nn]") {
    using namespace ddp::nn;
    image_shape const image{1, 6, 6};
    std::set<std::uint64_t> hashes;
    std::set<std::string> words;
    auto const add = [&](auto const&... layers) {
        (hashes.insert(layers.hash()), ...);
        (words.insert(layers.hash_words()), ...);
        return sizeof...(layers);
    };
    std::size_t const kinds = add(
        relu(), ddp::nn::tanh(), gelu(), gelu_erf(), layer_norm(3), layer_norm(3, 1e-3), batch_norm(3),
        batch_norm(3, {.momentum = 0.2}), batch_norm(3, {.epsilon = 1e-3}),
        batch_norm(3, {.statistics = batch_statistics::synchronised}), dropout(0.5), dropout(0.4), conv2d(image, {}),
        conv2d(image, {.padding = 1}), conv2d(image, {.stride = 2}), conv2d({1, 4, 9}, {}), max_pool2d(image),
        max_pool2d(image, {.padding = 1}), max_pool2d(image, {.stride = 1}), average_pool2d(image));
    REQUIRE(hashes.size() == kinds);
    REQUIRE(words.size() == kinds);
    REQUIRE_FALSE(hashes.contains(0));
    REQUIRE_FALSE(words.contains(""));
    REQUIRE(words.contains("conv2d(images of " + to_string(image) + ", kernel 3, stride 2, padding 0)"));

    sequential mixed(linear(4, 4), batch_norm(4), relu(), dropout(0.25), layer_norm(4), mean_squared_error());
    REQUIRE(mixed.initialize(3).hash_words() ==
            "layer 1: batch_norm(local, momentum 0.1, epsilon 1e-05); layer 2: relu; layer 3: dropout(0.25); "
            "layer 4: layer_norm(epsilon 1e-05); seed 3");
    REQUIRE(sequential(linear(4, 4), relu(), mean_squared_error()).hash_words() == "layer 1: relu");
    REQUIRE(sequential(linear(4, 4), mean_squared_error()).hash_words().empty());

    auto const hash = [](std::uint64_t seed, auto layer) {
        sequential net(linear(4, 4), std::move(layer), mean_squared_error());
        return net.initialize(seed).hash();
    };
    REQUIRE(hash(1, relu()) == hash(2, relu()));
    REQUIRE(hash(1, batch_norm(4)) == hash(2, batch_norm(4)));
    REQUIRE(hash(1, relu()) != hash(1, gelu()));
    REQUIRE(hash(1, dropout()) != hash(2, dropout()));
    REQUIRE(hash(1, dropout()) == hash(1, dropout()));
    REQUIRE(hash(1, linear(4, 4)) == 0);
}
