/// \file
/// Which gradients a model's backward has reported in this pass, and what is wrong with that.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ddp/core/error.hpp>
#include <ddp/core/function_ref.hpp>
#include <ddp/core/separate.hpp>

namespace ddp {

/// What to do about a parameter that backward does not report.
enum class unused : std::uint8_t {
    error,  ///< the step fails on all ranks, and the error names up to ten of the parameters
    /// Its gradient is +0 in an assigning pass, and stays what it is in an accumulating one. A parameter that no rank
    /// has reported in the step is left as it is: value, optimizer's state, weight decay. Costs one bit per parameter,
    /// sent to each rank, and no value is stepped before backward has ended on all ranks. A model can thus freeze
    /// parameters by leaving them out.
    allowed,
};

/// Backward left a gradient out, or reported one twice or in ranges that do not fit. The text names the parameter.
/// Thrown by replica::backward; from a trainer, every rank gets a comm_error with errc::gradient instead.
class gradient_error : public error {
public:
    explicit gradient_error(std::string complaint)
        : error(errc::gradient, complaint), complaint_(std::move(complaint)) {}
    [[nodiscard]] std::string const& complaint() const noexcept { return complaint_; }

private:
    std::string complaint_;
};

namespace detail {

/// How much of each gradient is left to report. A parameter's ranges come from its end backwards, without gaps: so one
/// number per parameter suffices, and nothing is allocated. A model's ready calls add(), which never throws, whatever
/// its arguments are.
class ready_reports {
public:
    /// `counts[i]`: elements of parameter i.
    explicit ready_reports(std::vector<std::size_t> counts)
        : counts_(std::move(counts)), left_(counts_), states_(counts_.size()) {}

    void start_pass() noexcept {
        std::copy(counts_.begin(), counts_.end(), left_.begin());
        std::fill(states_.begin(), states_.end(), state::none);
        stray_.reset();
        misplaced_.reset();
    }
    /// The number of elements of gradient i that are not reported yet. These are its first ones.
    [[nodiscard]] std::size_t left(std::size_t i) const noexcept { return i < left_.size() ? left_[i] : 0; }
    /// All that is left of gradient i. Returns whether `i` is a parameter, and not reported to its first element before.
    bool add(std::size_t i) noexcept {
        if (!open(i)) return false;
        left_[i] = 0;
        states_[i] = state::whole;
        return true;
    }
    /// Elements [first, first + count) of gradient i. Returns whether they end where those that are left do.
    bool add(std::size_t i, std::size_t first, std::size_t count) noexcept {
        if (!open(i)) return false;
        if (count == 0 || count > left_[i] || first != left_[i] - count) {
            if (!misplaced_) misplaced_ = range{i, first, count, left_[i]};
            return false;
        }
        left_[i] = first;
        states_[i] = first == 0 ? state::whole : state::partly;
        return true;
    }
    /// Nothing of parameter i was reported.
    [[nodiscard]] bool missing(std::size_t i) const noexcept { return states_[i] == state::none; }
    [[nodiscard]] bool each_once() const noexcept {
        return !stray_ && !misplaced_ &&
               std::all_of(states_.begin(), states_.end(), [](state one) { return one == state::whole; });
    }

    /// The message if not each_once(). `name_of(i)`: the name of parameter i. `owner`: the type that has the option
    /// `unused`.
    [[nodiscard]] std::string complaint(function_ref<std::string_view(std::size_t)> name_of,
                                        std::string_view owner) const;

private:
    enum class state : std::uint8_t { none, partly, whole, twice };
    struct range {
        std::size_t parameter, first, count, left;
    };

    bool open(std::size_t i) noexcept {
        if (i >= states_.size()) {
            stray_ = i;
            return false;
        }
        if (states_[i] >= state::whole) states_[i] = state::twice;
        return states_[i] < state::whole;
    }

    std::vector<std::size_t> counts_, left_;
    std::vector<state> states_;         // of parameter i
    std::optional<std::size_t> stray_;  // an index that is no parameter's
    std::optional<range> misplaced_;    // the first that does not end where the last one began
};

/// What a model's backward is handed: one callable for ready(i), one for ready(i, first, count).
template <class All, class Range>
struct ready_calls : All, Range {
    using All::operator();
    using Range::operator();
};

}  // namespace detail
}  // namespace ddp

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/train/impl/ready_reports.ipp>
#endif
