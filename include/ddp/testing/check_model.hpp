/// \file
/// check_model: tests what a model must do beyond what its types show; compares gradients with slopes of the loss.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ddp/core/text.hpp>
#include <ddp/model/model.hpp>
#include <ddp/train/ready_reports.hpp>

namespace ddp::testing {

/// Options of check_model.
struct model_check_options {
    std::size_t slopes = 25;  ///< number of elements of each parameter whose gradient is compared
    double step = 0;          ///< step of the central differences; 0: the cube root of the element type's epsilon
    double tolerance = 0;     ///< allowed error relative to a parameter's largest gradient; 0: 1e-2 float, 1e-5 double
    std::uint64_t step_number = 0;  ///< argument of begin_step, if the model has it
};

namespace detail {

template <class M, class Batch>
class model_checker {
public:
    using E = element_of<M>;
    using arrays = std::vector<std::vector<E>>;

    model_checker(M& model, Batch const& samples, model_check_options options)
        : model_(model), batch_(samples), options_(options), parameters_(model.parameters()) {
        bool const single = sizeof(E) == sizeof(float);
        if (options_.step == 0) options_.step = std::cbrt(static_cast<double>(std::numeric_limits<E>::epsilon()));
        if (options_.tolerance == 0) options_.tolerance = single ? 1e-2 : 1e-5;
    }

    /// The gradients of one pass, as they are.
    arrays one_pass() { return gradients({.scale = 1}); }

    std::vector<std::string> run() {
        check_list();
        if (!complaints_.empty()) return complaints_;  // the rest would read memory that is not there
        check_passes();
        if constexpr (BindableModel<M>) {
            move();
            check_passes();
        }
        return complaints_;
    }

private:
    static constexpr std::size_t none = std::numeric_limits<std::size_t>::max();

    void expect(bool good, std::string const& otherwise) {
        if (!good) complaints_.push_back(when_ + otherwise);
    }
    [[nodiscard]] std::string named(std::size_t i) const { return "parameter '" + parameters_[i].name + "'"; }

    void check_list() {
        expect(!parameters_.empty(), "parameters() returns none");
        std::vector<parameter<E>> const again = model_.parameters();
        expect(again.size() == parameters_.size(), "parameters() returns another number the second time");
        if (!complaints_.empty()) return;
        for (std::size_t i = 0; i < parameters_.size(); ++i) {
            parameter<E> const& p = parameters_[i];
            std::size_t count = 1;
            for (std::size_t const extent : p.shape) count *= extent;
            expect(p.value.size() == count && p.gradient.size() == count,
                   named(i) + ": value and gradient must have as many elements as its shape says");
            expect(again[i].name == p.name && again[i].value.data() == p.value.data() &&
                       again[i].gradient.data() == p.gradient.data(),
                   named(i) + " is another one, or elsewhere, when parameters() is called again");
            for (std::size_t k = 0; k < i; ++k) expect(parameters_[k].name != p.name, named(i) + " is listed twice");
        }
    }

    double loss() {
        if constexpr (requires { model_.begin_step(std::uint64_t{}); }) model_.begin_step(options_.step_number);
        return static_cast<double>(model_.forward(batch_));
    }
    [[nodiscard]] arrays copies(std::span<E> parameter<E>::* which) const {
        arrays all;
        for (parameter<E> const& p : parameters_) all.emplace_back((p.*which).begin(), (p.*which).end());
        return all;
    }
    void restore(std::size_t i, std::vector<E> const& value) {
        std::copy(value.begin(), value.end(), parameters_[i].value.begin());
        if constexpr (requires { model_.stepped(i); }) model_.stepped(i);
    }

    /// The gradients after one forward and backward. The value of parameter `poisoned` turns into NaN when it is released.
    arrays gradients(pass<E> how, std::size_t poisoned = none) {
        std::vector<int> reports(parameters_.size());  // down to the first element
        arrays reported = copies(&parameter<E>::gradient);
        std::vector<std::size_t> left;  // elements that are not reported: the first so many
        for (parameter<E> const& p : parameters_) left.push_back(p.gradient.size());
        arrays const values = copies(&parameter<E>::value);
        std::size_t stray = 0;
        std::string misplaced;
        auto const final = [&](std::size_t i, std::size_t first) {
            std::span<E const> const now = parameters_[i].gradient;
            std::copy_n(now.begin() + std::ptrdiff_t(first), left[i] - first,
                        reported[i].begin() + std::ptrdiff_t(first));
            if (i == poisoned)
                std::fill_n(parameters_[i].value.begin() + std::ptrdiff_t(first), left[i] - first,
                            std::numeric_limits<E>::quiet_NaN());
            left[i] = first;
            if (first == 0) ++reports[i];
        };
        loss();
        auto const all = [&](std::size_t i) { i < reports.size() ? final(i, 0) : void(++stray); };
        auto const some = [&](std::size_t i, std::size_t first, std::size_t count) {
            if (i >= reports.size()) return void(++stray);
            if (count != 0 && count <= left[i] && first == left[i] - count) return final(i, first);
            if (misplaced.empty())
                misplaced = "backward calls ready(" + std::to_string(i) + ", " + std::to_string(first) + ", " +
                            std::to_string(count) + ") for " + named(i) + ", of which the first " +
                            std::to_string(left[i]) +
                            " elements are left; ranges have to come from the end backwards, without gaps";
        };
        model_.backward(how, ddp::detail::ready_calls{all, some});
        expect(stray == 0, "backward calls ready(i) with an i that is not a parameter's");
        expect(misplaced.empty(), misplaced);
        for (std::size_t i = 0; i < reports.size(); ++i) {
            if (i == poisoned) restore(i, values[i]);
            bool const partly = reports[i] == 0 && left[i] < reported[i].size();
            expect(!partly, "backward never reports the first " + std::to_string(left[i]) + " elements of " + named(i) +
                                "; ready(i) reports all that ranges have left");
            expect(partly || reports[i] == 1, "backward calls ready(" + std::to_string(i) + ") " +
                                                  std::to_string(reports[i]) + " times for " + named(i) +
                                                  "; it has to be once");
            expect(std::equal(reported[i].begin() + std::ptrdiff_t(left[i]), reported[i].end(),
                              parameters_[i].gradient.begin() + std::ptrdiff_t(left[i]), alike),
                   named(i) + ": its gradient changes after ready(" + std::to_string(i) + ")");
        }
        expect(copies(&parameter<E>::value) == values, "forward or backward changes values");
        return copies(&parameter<E>::gradient);
    }
    static bool alike(E a, E b) { return a == b || (std::isnan(a) && std::isnan(b)); }
    static double largest(std::vector<E> const& all) {
        double most = 0;
        for (E const g : all) most = std::max(most, std::abs(static_cast<double>(g)));
        return most;
    }
    /// Whether `got` is `factor` times `expected` but for rounding.
    void compare(arrays const& got, arrays const& expected, double factor, char const* otherwise) {
        double const close = 64 * static_cast<double>(std::numeric_limits<E>::epsilon());
        for (std::size_t i = 0; i < got.size(); ++i) {
            double const most = factor * largest(expected[i]);
            for (std::size_t k = 0; k < got[i].size(); ++k) {
                double const difference = static_cast<double>(got[i][k]) - factor * static_cast<double>(expected[i][k]);
                if (std::abs(difference) <= close * most) continue;  // NaN is not
                expect(false, named(i) + ", element " + std::to_string(k) + ": " + otherwise);
                break;
            }
        }
    }

    void check_passes() {
        double const before = loss();
        expect(std::isfinite(before), "the loss is not finite");
        expect(loss() == before, "forward gives another loss the second time");
        arrays const once = gradients({.scale = 1});
        for (parameter<E> const& p : parameters_) std::fill(p.gradient.begin(), p.gradient.end(), E(1000));
        compare(gradients({.scale = 1}), once, 1, "a pass that does not accumulate must overwrite what was there");
        compare(gradients({.scale = 1, .accumulate = true}), once, 2, "a pass that accumulates must add");
        compare(gradients({.scale = 3}), once, 3, "a pass of scale 3 must give 3 times the gradient");
        if (ready_releases<M>)
            for (std::size_t i = 0; i < parameters_.size(); ++i) check_release(i, once);
        if constexpr (NeedingModel<M, Batch>)
            for (std::size_t i = 0; i < parameters_.size(); ++i) check_need(i, before);
        check_slopes(once);
    }
    /// The value of parameter `late` is NaN until forward has asked for it.
    void check_need(std::size_t late, double expected) {
        std::vector<E> const value(parameters_[late].value.begin(), parameters_[late].value.end());
        restore(late, std::vector<E>(value.size(), std::numeric_limits<E>::quiet_NaN()));
        if constexpr (requires { model_.begin_step(std::uint64_t{}); }) model_.begin_step(options_.step_number);
        bool stray = false;
        double const got = static_cast<double>(model_.forward(batch_, [&](std::size_t i) {
            stray = stray || i >= parameters_.size();
            if (i == late) restore(late, value);
        }));
        restore(late, value);
        expect(!stray, "forward(batch, needed) calls needed(i) with an i that is not a parameter's");
        expect(got == expected,
               named(late) + " is read before forward(batch, needed) has called needed(" + std::to_string(late) + ")");
    }
    /// What is computed from a value that is read too late shows in the gradients of others.
    void check_release(std::size_t released, arrays const& once) {
        arrays const got = gradients({.scale = 1}, released);
        for (std::size_t i = 0; i < got.size(); ++i)
            if (!std::equal(got[i].begin(), got[i].end(), once[i].begin(), alike))
                return expect(false, named(released) + " is read after ready(" + std::to_string(released) +
                                         "), although the model declares ready_releases: the gradient of " + named(i) +
                                         " depends on it");
    }
    void check_slopes(arrays const& gradient) {
        for (std::size_t i = 0; i < parameters_.size(); ++i) {
            std::vector<E> const value(parameters_[i].value.begin(), parameters_[i].value.end());
            std::size_t const count = value.size(), tries = std::min(count, options_.slopes);
            auto const loss_at = [&](std::size_t k, double x) {
                std::vector<E> moved = value;
                moved[k] = static_cast<E>(x);
                restore(i, moved);
                return std::pair(loss(), static_cast<double>(moved[k]));
            };
            for (std::size_t t = 0; t < tries; ++t) {
                std::size_t const k = t * count / tries;
                double const at = static_cast<double>(value[k]), h = options_.step * std::max(1.0, std::abs(at));
                auto const [above, right] = loss_at(k, at + h);
                auto const [below, left] = loss_at(k, at - h);
                double const slope = (above - below) / (right - left), said = static_cast<double>(gradient[i][k]);
                double const noise = 16 * static_cast<double>(std::numeric_limits<E>::epsilon()) *
                                     (std::abs(above) + std::abs(below)) / (right - left);
                double const size = std::max(largest(gradient[i]), std::abs(slope));
                if (std::abs(slope - said) <= options_.tolerance * size + noise) continue;
                expect(false, named(i) + ", element " + std::to_string(k) + ": backward says " +
                                  ::ddp::detail::decimal(said) + ", but the loss has a slope of " +
                                  ::ddp::detail::decimal(slope));
                break;
            }
            restore(i, value);
        }
    }

    /// Into memory like a trainer's; what the model had is filled with NaN, in case it still looks there.
    void move() {
        std::size_t count = 0;
        for (parameter<E> const& p : parameters_) count += p.value.size();
        auto const memory = std::make_shared<std::vector<E>>(2 * count);
        storage<E> all{memory, {}, {}};
        std::size_t at = 0;
        for (parameter<E>& p : parameters_) {
            std::span<E> const value(memory->data() + at, p.value.size());
            std::copy(p.value.begin(), p.value.end(), value.begin());
            std::fill(p.value.begin(), p.value.end(), std::numeric_limits<E>::quiet_NaN());
            p.value = value;
            p.gradient = std::span<E>(memory->data() + count + at, value.size());
            at += value.size();
            all.values.push_back(p.value);
            all.gradients.push_back(p.gradient);
        }
        if constexpr (contiguous<M>) {
            all.all_values = std::span<E>(memory->data(), count);
            all.all_gradients = std::span<E>(memory->data() + count, count);
        }
        when_ = "after bind: ";
        model_.bind(std::move(all));
        if constexpr (requires { model_.stepped(at); })
            for (std::size_t i = 0; i < parameters_.size(); ++i) model_.stepped(i);
        expect(memory.use_count() > 1, "bind must keep storage.owner: the memory lives as long as that does");
        kept_ = memory;
    }

    M& model_;
    Batch const& batch_;
    model_check_options options_;
    std::vector<parameter<E>> parameters_;
    std::vector<std::string> complaints_;
    std::string when_;
    std::shared_ptr<void> kept_;
};

}  // namespace detail

/// Checks a model on one rank with one batch, which must not be empty. Returns what is wrong; an empty list if nothing
/// was found. It checks that
///
///  - parameters() is stable, names are unique, and sizes match shapes
///  - forward is repeatable, and gradients are the slopes of its loss, by central differences (a wrong result is possible
///    at a kink of the loss, such as that of a rectifier at 0, or of max-pooling where two inputs are nearly equal; slopes
///    in float have two digits)
///  - backward reports each parameter once, when its gradient is final, ranges from the end backwards without gaps; it
///    assigns or adds as its argument says, multiplied by the scale
///  - values do not change, and, if the model declares ready_releases, are not read after ready(i)
///  - forward(batch, needed), if the model has it, gives the same loss and reads no value before it has asked for it
///  - all of this also holds after bind, when the memory that the model had before is overwritten
///
/// Leaves the model with the values that it had, but bound to other memory: pass a model that is made for this purpose.
/// check_model_placement checks whether gradients depend on where the model's own memory begins.
/// Cost: about 2 * slopes forward passes for each parameter.
template <class M, class Batch>
    requires ModelFor<M, Batch>
[[nodiscard]] std::vector<std::string> check_model(M& model, Batch const& batch,
                                                   model_check_options const& options = {}) {
    return detail::model_checker<M, Batch>(model, batch, options).run();
}

/// Checks whether gradients depend on the address at which a model's memory begins, as they may in vectorised code if
/// it is not a multiple of 64 bytes: two runs of a program then differ in the last bits. For models without bind.
/// `make()` returns a model by value, an equal one each time; it is called nine times, and all nine models are kept,
/// with other memory between them. Returns what was found; an empty list if gradients are the same.
template <class Make, class Batch>
    requires ModelFor<std::remove_cvref_t<std::invoke_result_t<Make const&>>, Batch>
[[nodiscard]] std::vector<std::string> check_model_placement(Make const& make, Batch const& batch) {
    using M = std::remove_cvref_t<decltype(make())>;
    std::vector<std::unique_ptr<M>> models;
    std::vector<std::unique_ptr<char[]>> between;
    typename detail::model_checker<M, Batch>::arrays first;
    for (std::size_t k = 0; k <= 8; ++k) {
        between.push_back(std::make_unique<char[]>(16 * (k + 1)));
        models.push_back(std::unique_ptr<M>(new M(make())));  // it may be neither copied nor moved
        auto const got = detail::model_checker<M, Batch>(*models.back(), batch, {}).one_pass();
        if (k == 0) first = got;
        for (std::size_t i = 0; i < got.size(); ++i)
            if (!std::equal(got[i].begin(), got[i].end(), first[i].begin(), first[i].end()))
                return {
                    "parameter '" + models.back()->parameters()[i].name +
                    "': equal models give other gradients. If only their last bits differ, they depend on where the "
                    "model's memory begins: give it bind(), or memory that begins at multiples of 64 bytes "
                    "(ddp::make_arena)"};
    }
    return {};
}

}  // namespace ddp::testing
