/// \file
/// rendezvous_error: the ranks did not find each other.
#pragma once

#include <string_view>

#include <ddp/core/error.hpp>

namespace ddp {

/// The text says who is missing, where it was tried, and what to look at.
class rendezvous_error : public error {
public:
    explicit rendezvous_error(std::string_view text) : error(errc::rendezvous, text) {}
};

}  // namespace ddp
