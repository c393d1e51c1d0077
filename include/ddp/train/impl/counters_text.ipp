/// \file
/// What train/counters_text.hpp declares.
#pragma once

#include <charconv>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <system_error>

#include <ddp/core/error.hpp>
#include <ddp/core/text.hpp>
#include <ddp/train/counters_text.hpp>

namespace ddp::detail {

[[gnu::cold]] DDP_DECL std::string counters_text(std::string_view of, std::span<named_number const> numbers) {
    std::string text(of);
    for (named_number const& one : numbers) {
        char digits[40];
        auto const [end, what] = one.real != nullptr
                                     ? std::to_chars(digits, digits + sizeof digits, *one.real, std::chars_format::hex)
                                     : std::to_chars(digits, digits + sizeof digits, *one.whole);
        text += concat({" ", one.name, "=", std::string_view(digits, static_cast<std::size_t>(end - digits))});
    }
    return text;
}

[[gnu::cold]] DDP_DECL void counters_from(std::string_view of, std::string_view text,
                                          std::span<named_number const> numbers) {
    std::string_view rest = text;
    auto const take = [&](std::string_view word) {
        bool const there = rest.starts_with(word);
        if (there) rest.remove_prefix(word.size());
        return there;
    };
    bool right = take(of);
    for (named_number const& one : numbers) {
        right = right && take(concat({" ", one.name, "="}));
        if (!right) break;
        char const *const begin = rest.data(), *const end = begin + rest.size();
        auto const [at, what] = one.real != nullptr ? std::from_chars(begin, end, *one.real, std::chars_format::hex)
                                                    : std::from_chars(begin, end, *one.whole);
        right = what == std::errc();
        rest.remove_prefix(static_cast<std::size_t>(at - begin));
    }
    if (!right || !rest.empty())
        throw data_error(errc::format, concat({of, ": cannot restore from ", in_quotes(text),
                                               "; give restore() the line that text() has returned, unchanged"}));
}

}  // namespace ddp::detail
