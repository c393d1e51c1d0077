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
    /// Its gradient is +0 in an assigning pass, and stays what it is in an accumulating one. A parameter that no rank has reported
    /// in the step is left as it is: value, optimizer's state, weight decay. Costs a bit a parameter to each rank, and no
    /// value is stepped before backward has ended on all ranks. So parameters are frozen by a model that leaves them out.
    allowed,
};

/// Backward left a gradient out, or reported one twice. The text names the parameter.
class gradient_error : public error {
public:
    explicit gradient_error(std::string complaint)
        : error(errc::gradient, complaint), complaint_(std::move(complaint)) {}
    [[nodiscard]] std::string const& complaint() const noexcept { return complaint_; }

private:
    std::string complaint_;
};

namespace detail {

/// One byte a parameter. add() is what a model's ready(i) reaches: it never throws, whatever i is.
class ready_reports {
public:
    explicit ready_reports(std::size_t parameters) : times_(parameters) {}

    void start_pass() noexcept { std::fill(times_.begin(), times_.end(), std::uint8_t{0}); }
    /// Returns whether `i` is a parameter that is reported for the first time.
    bool add(std::size_t i) noexcept {
        if (i >= times_.size()) {
            stray_ = i;
            return false;
        }
        if (times_[i] < 2) ++times_[i];
        return times_[i] == 1;
    }
    [[nodiscard]] bool missing(std::size_t i) const noexcept { return times_[i] == 0; }
    [[nodiscard]] bool each_once() const noexcept {
        return !stray_ && std::all_of(times_.begin(), times_.end(), [](std::uint8_t times) { return times == 1; });
    }

    /// What to say where not each_once().
    /// `name_of(i)`: of parameter i.
    [[nodiscard]] std::string complaint(function_ref<std::string_view(std::size_t)> name_of) const;

private:
    std::vector<std::uint8_t> times_;   // of parameter i; 2 means too many
    std::optional<std::size_t> stray_;  // an index that is no parameter's
};

}  // namespace detail
}  // namespace ddp

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/train/impl/ready_reports.ipp>
#endif
