/// \file
/// environment_flag: a variable of the environment that is 0 or 1.
#pragma once

#include <cstdlib>
#include <string_view>

#include <ddp/core/error.hpp>
#include <ddp/core/text.hpp>

namespace ddp::detail {

/// Whether the variable is 1; `otherwise` if it is not set, or empty. Throws environment_error (DDP-E101) if it is
/// anything but 0 or 1: a typo must not leave the default in force.
[[nodiscard]] inline bool environment_flag(char const* name, bool otherwise) {
    char const* const value = std::getenv(name);
    std::string_view const text = value == nullptr ? "" : value;
    if (text.empty()) return otherwise;
    if (text != "0" && text != "1")
        throw environment_error(concat({name, " is \"", printable(text.substr(0, 80)), "\"; expected 0 or 1"}));
    return text == "1";
}

}  // namespace ddp::detail
