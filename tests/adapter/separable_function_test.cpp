// A function as ensmallen's optimizers take it, trained by several ranks. ensmallen itself is not used (Debian 12 does not
// have it): its interface and the rule of its MomentumSGD are written out.
#include <armadillo>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
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

constexpr arma::uword features = 5, samples = 61;  // shares of 2, 3 and 4 ranks differ in size

/// Logistic regression with regularisation, a differentiable separable function in ensmallen's words: Evaluate... adds up
/// `count` samples from `begin` on, each with its part of the penalty. The first parameter is the intercept.
class logistic_regression {
public:
    logistic_regression() : points_(features, samples), labels_(samples) {
        random_stream const drawn{3, random_use::user};
        for (arma::uword i = 0; i < points_.n_elem; ++i) points_[i] = drawn.at(i).symmetric<double>();
        for (arma::uword i = 0; i < samples; ++i)
            labels_[i] = points_(0, i) - 2 * points_(3, i) + 0.5 * drawn.at(10000 + i).symmetric<double>() > 0 ? 1 : 0;
    }
    [[nodiscard]] std::size_t NumFunctions() const { return points_.n_cols; }
    double EvaluateWithGradient(arma::mat const& at, std::size_t begin, arma::mat& gradient, std::size_t count) const {
        auto const x = points_.cols(begin, begin + count - 1);
        auto const y = labels_.subvec(begin, begin + count - 1);
        arma::rowvec const guess = 1 / (1 + arma::exp(-(at[0] + at.tail_cols(features) * x)));
        double const part = penalty * static_cast<double>(count) / samples;
        gradient.set_size(1, 1 + features);
        gradient[0] = arma::accu(guess - y);
        gradient.tail_cols(features) = (guess - y) * x.t() + part * at.tail_cols(features);
        return part / 2 * arma::dot(at.tail_cols(features), at.tail_cols(features)) -
               arma::accu(arma::log(1 - y + guess % (2 * y - 1)));
    }

private:
    static constexpr double penalty = 0.3;
    arma::mat points_;  // a column a sample
    arma::rowvec labels_;
};

/// What ensmallen's MomentumSGD does with all samples in one batch: its gradient is the batch's sum.
arma::mat trained_alone(double step_size, double momentum, int steps) {
    logistic_regression const function;
    arma::mat at(1, 1 + features, arma::fill::zeros), velocity = at, gradient = at;
    for (int step = 0; step < steps; ++step) {
        function.EvaluateWithGradient(at, 0, gradient, function.NumFunctions());
        velocity = momentum * velocity - step_size * gradient;
        at += velocity;
    }
    return at;
}

/// All parameters as one matrix that looks into the trainer's memory.
class one_matrix {
public:
    using element = double;
    static constexpr bool contiguous = true;  // one array, in the order of parameters()

    one_matrix() { look_at(own_values_, own_gradient_); }
    std::vector<parameter<double>> parameters() {
        return {part("intercept", 0, 1), part("near", 1, 2), part("far", 3, features - 2)};
    }
    void bind(storage<double> memory) {
        owner_ = memory.owner;
        look_at(memory.all_values, memory.all_gradients);
    }
    double forward(sample_range mine) {
        count_ = static_cast<double>(mine.size());
        return function_.EvaluateWithGradient(*at_, mine.begin, sum_, mine.size()) / count_;
    }
    template <class Ready>
    void backward(pass<double> how, Ready const& ready) {
        if (how.accumulate)
            *gradient_ += sum_ * (how.scale / count_);
        else
            *gradient_ = sum_ * (how.scale / count_);
        for (std::size_t i = 3; i-- > 0;) ready(i);
    }

private:
    parameter<double> part(char const* name, std::size_t begin, std::size_t count) {
        return {name, {count}, {at_->memptr() + begin, count}, {gradient_->memptr() + begin, count}};
    }
    void look_at(std::span<double> values, std::span<double> gradient) {  // strict: no other memory in its place
        at_.emplace(values.data(), 1, values.size(), false, true);
        gradient_.emplace(gradient.data(), 1, gradient.size(), false, true);
    }

    logistic_regression function_;
    std::vector<double> own_values_ = std::vector<double>(1 + features),
                        own_gradient_ = std::vector<double>(1 + features);
    std::optional<arma::mat> at_, gradient_;
    std::shared_ptr<void> owner_;
    arma::mat sum_;  // of the gradients of the last batch
    double count_ = 0;
};

}  // namespace

TEST_CASE("one matrix in the trainer's memory is trained without copies, as the separable function is", "[adapter]") {
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    CAPTURE(ranks, tcp);
    arma::mat const expected = trained_alone(0.5 / samples, 0.5, 40);
    auto const got = ranks_over(
        tcp, ranks,
        [](auto& comm) {
            one_matrix model;
            double const* const before = model.parameters()[0].value.data();
            data_parallel trainer{model, sgd{.lr = 0.5, .momentum = 0.5}, comm};
            std::span<double> const values(model.parameters()[0].value.data(), 1 + features);  // all three
            for (int step = 0; step < 40; ++step) {
                sample_range const mine = share_of(samples, comm.rank(), comm.size());
                if (step % 2 == 0) {
                    trainer.step(mine);
                    continue;
                }
                trainer.forward(sample_range{mine.begin, mine.begin + 3});
                trainer.accumulate();
                trainer.forward(sample_range{mine.begin + 3, mine.end});
                trainer.backward();
                trainer.finish();
            }
            bool const bound = values.data() != before && trainer.parameters()[2].value.data() == values.data() + 3 &&
                               model.parameters()[1].value.data() == values.data() + 1;
            return bound ? std::vector<double>(values.begin(), values.end()) : std::vector<double>();
        },
        patient());
    for (auto const& values : got) {
        REQUIRE(values.size() == expected.n_elem);
        for (std::size_t i = 0; i < values.size(); ++i) CHECK(values[i] == Approx(expected[i]).epsilon(1e-10));
    }
    CHECK(got == std::vector(got.size(), got.front()));
}

TEST_CASE("a separable function trains as its own library's optimizer trains it", "[adapter]") {
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    double const momentum = GENERATE(0.0, 0.5);
    CAPTURE(ranks, tcp, momentum);
    arma::mat const expected = trained_alone(0.5 / samples, momentum, 40);
    auto const got = ranks_over(
        tcp, ranks,
        [&](auto& comm) {
            logistic_regression function;
            std::vector<double> values(1 + features), slopes(1 + features);
            // of the vectors' memory, and strict: Armadillo must not put other memory in its place
            arma::mat const at(values.data(), 1, values.size(), false, true);
            arma::mat gradient(slopes.data(), 1, slopes.size(), false, true);
            flat_model model{values, slopes, [&](sample_range mine) {
                                 double const sum =
                                     function.EvaluateWithGradient(at, mine.begin, gradient, mine.size());
                                 gradient /= static_cast<double>(mine.size());
                                 return sum / static_cast<double>(mine.size());
                             }};
            data_parallel trainer{model, sgd{.lr = 0.5, .momentum = momentum}, comm};
            for (int step = 0; step < 40; ++step)
                trainer.step(share_of(function.NumFunctions(), comm.rank(), comm.size()));
            return values;
        },
        patient());
    for (auto const& values : got)
        for (std::size_t i = 0; i < values.size(); ++i) CHECK(values[i] == Approx(expected[i]).epsilon(1e-10));
    CHECK(got == std::vector(got.size(), got.front()));
    CHECK(std::abs(expected[4]) > 1);  // it has learnt something
}
