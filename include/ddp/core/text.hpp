/// \file
/// concat: a text made of pieces and numbers, in one call; and what is needed to show texts from outside.
#pragma once

#include <ddp/core/language.hpp>  // first

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <type_traits>

#include <ddp/core/separate.hpp>

namespace ddp::detail {

/// One piece of a text: characters that somebody else holds, or an integer. Lives as long as the call it is given to.
class text_piece {
public:
    constexpr text_piece(std::string_view text) noexcept : data_(text.data()), number_(text.size()) {}
    constexpr text_piece(char const* text) noexcept : text_piece(std::string_view(text)) {}
    text_piece(std::string const& text) noexcept : data_(text.data()), number_(text.size()) {}
    template <std::integral I>
        requires(!std::same_as<I, bool> && !std::same_as<I, char>)
    constexpr text_piece(I number) noexcept : data_(&plus), number_(static_cast<std::uint64_t>(number)) {
        if constexpr (std::is_signed_v<I>)
            if (number < 0) data_ = &minus;
    }

    void append_to(std::string& text) const;

private:
    static constexpr char plus = '+', minus = '-';
    char const* data_;  // &plus, &minus: number_ is a number of that sign; else the characters, and number_ of them
    std::uint64_t number_;
};

/// All pieces in a row. Cost: one call. A chain of operator+ expands to a page of code per message, which takes compilers
/// longer than the program itself.
[[nodiscard]] std::string concat(std::initializer_list<text_piece> pieces);

/// Nine significant digits, without trailing zeros: "0.1".
[[nodiscard]] std::string decimal(double number);
/// As few digits as another float would not have: "1e-05".
[[nodiscard]] std::string decimal(float number);

/// Where to cut `text`, longer than `most` bytes: at `most`, or before the UTF-8 sequence that it would split.
[[nodiscard]] std::size_t whole_characters(std::string_view text, std::size_t most) noexcept;

/// Text from outside, for messages: at most `most` bytes. Control characters (C0 but for line feeds and tabs, DEL, C1) and
/// bytes that are not valid UTF-8 are written as \xNN, so that no terminal obeys them.
[[nodiscard]] std::string printable(std::string_view text, std::size_t most = 4096);

/// Bytes of the valid UTF-8 sequence that `text` begins with, 1 to 4; 0 if there is none: overlong, surrogate, too large.
[[nodiscard]] std::size_t utf8_length(std::string_view text) noexcept;

/// A name from outside for an error message: in quotes, on one line, of bounded length.
[[nodiscard]] std::string in_quotes(std::string_view name);

/// Prints lines on stderr, at most 4,096 bytes, unless that might wait: for a reader that stands still, or for a program's thread
/// that holds the stream. For threads that others wait for.
void print_if_ready(std::string_view lines) noexcept;

/// Whether all of `text` is valid UTF-8.
[[nodiscard]] bool is_utf8(std::string_view text) noexcept;

}  // namespace ddp::detail

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/core/impl/text.ipp>
#endif
