/// \file
/// verdict: a fault in words, and the error that every rank throws.
#pragma once

#include <span>
#include <string>

#include <ddp/comm/fault.hpp>
#include <ddp/comm/transport.hpp>
#include <ddp/core/error.hpp>
#include <ddp/core/separate.hpp>
#include <ddp/core/text.hpp>

namespace ddp {

/// A peer, or the way to it, failed: the verdict of all ranks. what() says who, in which operation, and why.
class comm_error : public error {
public:
    explicit comm_error(failure const& verdict)
        : error(verdict.code, detail::printable(verdict.text.view())), verdict_(verdict) {}

    [[nodiscard]] failure const& verdict() const noexcept { return verdict_; }
    /// The rank that is at fault; -1 where it cannot be told.
    [[nodiscard]] int culprit() const noexcept { return verdict_.peer; }

private:
    failure verdict_;
};

/// What to tell people about a fault. `reports` are those it was found in.
[[nodiscard]] std::string describe(fault const& found, std::span<report const> reports);

/// From each rank's report to the verdict that all ranks throw: the culprit, the code, and the words.
[[nodiscard]] failure decide(std::span<report const> reports, nanoseconds collective);

}  // namespace ddp

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/comm/impl/verdict.ipp>
#endif
