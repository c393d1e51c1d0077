/// \file
/// What core/text.hpp declares.
#pragma once

#include <sys/select.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

#include <ddp/core/text.hpp>

namespace ddp::detail {

[[gnu::cold]] DDP_DECL void text_piece::append_to(std::string& text) const {
    if (data_ != &plus && data_ != &minus) {
        text.append(data_, number_);
        return;
    }
    char digits[20];
    std::size_t first = sizeof digits;
    std::uint64_t rest = data_ == &minus ? std::uint64_t{0} - number_ : number_;
    do digits[--first] = static_cast<char>('0' + rest % 10);
    while ((rest /= 10) != 0);
    if (data_ == &minus) text += '-';
    text.append(digits + first, sizeof digits - first);
}

[[gnu::cold, gnu::noinline]] DDP_DECL std::string concat(std::initializer_list<text_piece> pieces) {
    std::string text;
    for (text_piece const& piece : pieces) piece.append_to(text);
    return text;
}

[[gnu::cold]] DDP_DECL void print_if_ready(std::string_view lines) noexcept {
    ::fd_set ready{};
    FD_SET(STDERR_FILENO, &ready);
    ::timeval now{};
    if (lines.empty() || ::select(STDERR_FILENO + 1, nullptr, &ready, nullptr, &now) != 1) return;
    std::size_t const most = 4096;  // as many as a pipe that is ready takes at least
    [[maybe_unused]] auto const written = ::write(STDERR_FILENO, lines.data(), std::min(lines.size(), most));
}

[[gnu::cold]] DDP_DECL std::string decimal(double number) {
    char digits[32];  // not printf, which asks the locale how a point looks
    auto const [end, error] = std::to_chars(digits, digits + sizeof digits, number, std::chars_format::general, 9);
    return {digits, end};
}
[[gnu::cold]] DDP_DECL std::string decimal(float number) {
    char digits[32];
    auto const [end, error] = std::to_chars(digits, digits + sizeof digits, number);
    return {digits, end};
}

[[gnu::cold]] DDP_DECL std::size_t whole_characters(std::string_view text, std::size_t most) noexcept {
    for (std::size_t at = most; at > 0 && most - at < 4; --at)
        if ((static_cast<unsigned char>(text[at]) & 0xC0) != 0x80) return at;
    return most;  // not UTF-8
}

/// Whether the sequence of `length` bytes that `text` begins with, 0 if it is not valid, is shown as it is.
[[nodiscard]] inline bool shows_as_it_is(std::string_view text, std::size_t length) noexcept {
    unsigned const first = static_cast<unsigned char>(text[0]);
    bool const c1 = length == 2 && first == 0xC2 && static_cast<unsigned char>(text[1]) < 0xA0;
    return length != 0 && first >= 0x20 && first != 0x7F && !c1;
}

[[gnu::cold]] DDP_DECL std::string printable(std::string_view text, std::size_t most) {
    constexpr char digits[] = "0123456789abcdef";
    std::string clean;
    std::string_view left = text.substr(0, text.size() > most ? whole_characters(text, most) : most);
    while (!left.empty()) {
        std::size_t const length = utf8_length(left);
        bool const shown = shows_as_it_is(left, length) || left[0] == '\n' || left[0] == '\t';
        for (char const c : left.substr(0, shown ? 0 : std::max<std::size_t>(1, length))) {
            unsigned const code = static_cast<unsigned char>(c);
            clean.append("\\x").append({digits[code / 16], digits[code % 16]});
        }
        if (shown) clean += left.substr(0, length);
        left.remove_prefix(std::max<std::size_t>(1, length));
    }
    if (text.size() > most) clean += " (cut)";
    return clean;
}

[[gnu::cold]] DDP_DECL std::size_t utf8_length(std::string_view text) noexcept {
    auto const byte = [&](std::size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
    auto const in = [](unsigned b, unsigned low, unsigned high) { return b >= low && b <= high; };
    unsigned const a = byte(0), b = byte(1);
    if (text.empty()) return 0;
    if (a < 0x80) return 1;
    if (in(a, 0xC2, 0xDF)) return in(b, 0x80, 0xBF) ? 2 : 0;
    unsigned const low = a == 0xE0 ? 0xA0 : a == 0xF0 ? 0x90 : 0x80, high = a == 0xED ? 0x9F : a == 0xF4 ? 0x8F : 0xBF;
    if (!in(a, 0xE0, 0xF4) || !in(b, low, high) || !in(byte(2), 0x80, 0xBF)) return 0;
    if (a < 0xF0) return 3;
    return in(byte(3), 0x80, 0xBF) ? 4 : 0;
}

[[gnu::cold]] DDP_DECL std::string in_quotes(std::string_view name) {
    std::string text = "'";
    while (!name.empty() && text.size() < 80) {
        std::size_t const length = std::max<std::size_t>(1, utf8_length(name));
        text += shows_as_it_is(name, utf8_length(name)) ? name.substr(0, length) : "?";
        name.remove_prefix(length);
    }
    return text + (name.empty() ? "'" : "…'");
}

[[gnu::cold]] DDP_DECL bool is_utf8(std::string_view text) noexcept {
    while (std::size_t const length = utf8_length(text)) text.remove_prefix(length);
    return text.empty();
}

}  // namespace ddp::detail
