/// \file
/// What core/text.hpp declares.
#pragma once

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

[[gnu::cold]] DDP_DECL std::string printable(std::string_view text, std::size_t most) {
    constexpr char digits[] = "0123456789abcdef";
    std::string clean;
    for (char const c : text.substr(0, most)) {
        unsigned const code = static_cast<unsigned char>(c);
        if ((code >= 0x20 && code != 0x7f) || c == '\n' || c == '\t')
            clean += c;
        else
            clean.append("\\x").append({digits[code / 16], digits[code % 16]});
    }
    if (text.size() > most) clean += " (cut)";
    return clean;
}

}  // namespace ddp::detail
