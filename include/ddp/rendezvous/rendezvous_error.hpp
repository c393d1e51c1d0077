/// \file
/// rendezvous_error: the ranks did not find each other.
#pragma once

#include <string>
#include <string_view>

#include <ddp/core/error.hpp>

namespace ddp {

/// Ranks did not find each other (DDP-E201). The text says who is missing, what was tried, and what to check.
class rendezvous_error : public error {
public:
    explicit rendezvous_error(std::string_view text) : error(errc::rendezvous, text) {}
};

namespace detail {
/// "DDP-E201 rendezvous: rank 1 ..." without the part before and including the first ": ".
[[nodiscard, gnu::cold]] inline std::string text_without_code(error const& e) {
    std::string const text = e.what();
    return text.substr(text.find(": ") + 2);
}
}  // namespace detail

}  // namespace ddp
