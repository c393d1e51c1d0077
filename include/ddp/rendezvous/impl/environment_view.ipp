/// \file
/// What rendezvous/environment_view.hpp declares.
#pragma once

#include <charconv>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>

#include <ddp/core/error.hpp>
#include <ddp/core/text.hpp>
#include <ddp/rendezvous/environment_view.hpp>

namespace ddp::detail {

[[gnu::cold]] DDP_DECL std::optional<std::string> environment_variable(std::string const& name) {
    char const* const value = std::getenv(name.c_str());
    if (value == nullptr) return std::nullopt;
    return std::string(value);
}

[[gnu::cold]] DDP_DECL int environment_number(std::string_view name, std::string_view text, int least, int most,
                                              std::string_view meaning) {
    int value = 0;
    auto const [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc{} || end != text.data() + text.size() || value < least || value > most)
        throw environment_error(concat({name, " is \"", printable(text.substr(0, 80)), "\"; expected ", meaning,
                                        ", a whole number from ", least, " to ", most}));
    return value;
}

}  // namespace ddp::detail
