/// \file
/// verdict: the description of a fault, and the error that every rank throws.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include <ddp/comm/fault.hpp>
#include <ddp/comm/transport.hpp>
#include <ddp/core/error.hpp>
#include <ddp/core/separate.hpp>
#include <ddp/core/text.hpp>

namespace ddp {

/// The job has failed: the verdict, the same on every rank. what() says who is at fault, in which operation, and why; code()
/// says what kind of failure it was (docs/errors.md).
class comm_error : public error {
public:
    explicit comm_error(failure const& verdict)
        : error(verdict.code, detail::printable(verdict.text.view())), verdict_(verdict) {}

    /// The verdict as a record.
    [[nodiscard]] failure const& verdict() const noexcept { return verdict_; }
    /// The rank that is at fault, the first of several, or one of two that disagree (errc::mismatch) or have lost their
    /// connection; -1 if it is not known, or if all ranks are.
    [[nodiscard]] int culprit() const noexcept { return verdict_.peer; }

private:
    failure verdict_;
};

/// Describes a fault. `reports` are those in which it was found.
[[nodiscard]] std::string describe(fault const& found, std::span<report const> reports);

/// Turns the reports of all ranks into the verdict that every rank throws: culprit, code and text.
[[nodiscard]] failure decide(std::span<report const> reports, nanoseconds collective);

namespace detail {
/// Adds to a verdict's text which process its culprit is, if the text begins with that rank (not where ranks disagree, or
/// a connection is lost), there is room, and the text does not say so already.
void name_process(failure& verdict, std::string_view process);

/// The line that a rank prints after a long wait. `mine` is its wait, `absent` are the ranks that have not entered the
/// same operation, `named` is the first of them (or, if there are none, the rank that is awaited), `last` is what
/// `named` has entered, and `process` its process (see process_of). `on_request`: whether SIGUSR2 makes it say what it does.
/// `occupied`: whether some rank is in a long_operation.
[[nodiscard]] std::string straggler_text(int rank, failure const& mine, std::span<int const> absent, int named,
                                         mark const& last, nanoseconds collective, bool on_request, bool occupied,
                                         std::string_view process = {});
}  // namespace detail

}  // namespace ddp

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/comm/impl/verdict.ipp>
#endif
