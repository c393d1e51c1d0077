/// \file
/// What data/json_reader.hpp declares.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <utility>

#include <ddp/core/error.hpp>
#include <ddp/core/text.hpp>
#include <ddp/data/json_reader.hpp>

namespace ddp::detail {

[[gnu::cold]] DDP_DECL void json_reader::fail(std::string const& what) const {
    throw data_error(errc::format, concat({file_, ": byte ", std::min(at_, text_.size()), " of the ", kind_,
                                           inside_.empty() ? "" : ", " + inside_, ": ", what}));
}
[[gnu::cold]] DDP_DECL char json_reader::peek() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t' || text_[at_] == '\r'))
        ++at_;
    if (at_ == text_.size()) fail(concat({"the ", kind_, " ends too early"}));
    return text_[at_];
}
[[gnu::cold]] DDP_DECL void json_reader::expect(char c) {
    if (peek() != c) fail(concat({"expected '", std::string_view(&c, 1), "'"}));
    ++at_;
}
[[gnu::cold]] DDP_DECL bool json_reader::opens(char open, char close) {
    expect(open);
    if (peek() != close) return true;
    ++at_;
    return false;
}
[[gnu::cold]] DDP_DECL bool json_reader::another(char close) {
    char const c = peek();
    if (c != ',' && c != close) fail(concat({"expected ',' or '", std::string_view(&close, 1), "'"}));
    ++at_;
    return c == ',';
}
[[gnu::cold]] DDP_DECL void json_reader::expect_end(std::string_view padding) {
    std::size_t const end = text_.find_first_not_of(padding, at_);
    if (end == text_.npos) return;
    at_ = end;
    fail(concat({"there is something after the ", kind_, "'s last '}'"}));
}

[[gnu::cold]] DDP_DECL std::string json_reader::string() {
    expect('"');
    std::string result;
    for (;;) {
        if (at_ == text_.size()) fail(concat({"the ", kind_, " ends within a string"}));
        char const c = text_[at_];
        if (c == '"') break;
        if (c == '\\') {
            ++at_;
            escape(result);
            continue;
        }
        if (static_cast<unsigned char>(c) < 0x20) fail("a control character within a string");
        std::size_t const length = utf8_length(text_.substr(at_));
        if (length == 0) fail("a string that is not UTF-8");
        result += text_.substr(at_, length);
        at_ += length;
    }
    ++at_;
    return result;
}
[[gnu::cold]] DDP_DECL void json_reader::escape(std::string& to) {
    constexpr std::string_view letters = "\"\\/bfnrt", meanings = "\"\\/\b\f\n\r\t";
    if (at_ == text_.size()) fail(concat({"the ", kind_, " ends within a string"}));
    char const c = text_[at_];
    if (std::size_t const i = letters.find(c); i != letters.npos) {
        ++at_;
        to += meanings[i];
        return;
    }
    if (c != 'u') fail("an escape that JSON does not define");
    std::uint32_t code = utf16();
    if (code >= 0xD800 && code < 0xDC00 && text_.substr(at_, 2) == "\\u") {
        ++at_;
        std::uint32_t const low = utf16();
        if (low < 0xDC00 || low >= 0xE000) fail("half a surrogate pair");
        code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
    }
    if (code >= 0xD800 && code < 0xE000) fail("half a surrogate pair");
    auto const put = [&](std::uint32_t byte) { to += static_cast<char>(byte); };
    if (code < 0x80) return put(code);
    if (code < 0x800) {
        put(0xC0 | code >> 6);
    } else {
        if (code < 0x10000) {
            put(0xE0 | code >> 12);
        } else {
            put(0xF0 | code >> 18);
            put(0x80 | (code >> 12 & 0x3F));
        }
        put(0x80 | (code >> 6 & 0x3F));
    }
    put(0x80 | (code & 0x3F));
}
/// The four digits after a 'u'.
[[gnu::cold]] DDP_DECL std::uint32_t json_reader::utf16() {
    std::uint32_t code = 0;
    for (std::size_t i = 1; i <= 4; ++i) {
        std::size_t const digit =
            at_ + i < text_.size() ? std::string_view("0123456789abcdefABCDEF").find(text_[at_ + i]) : text_.npos;
        if (digit == text_.npos) fail("\\u takes four hexadecimal digits");
        code = code << 4 | static_cast<std::uint32_t>(digit < 16 ? digit : digit - 6);
    }
    at_ += 5;
    return code;
}
[[gnu::cold]] DDP_DECL std::uint64_t json_reader::number() {
    constexpr std::uint64_t greatest = std::numeric_limits<std::uint64_t>::max();
    auto const is_digit = [&](std::size_t i) { return i < text_.size() && text_[i] >= '0' && text_[i] <= '9'; };
    (void)peek();
    if (!is_digit(at_)) fail("expected a whole number that is not negative");
    if (text_[at_] == '0' && is_digit(at_ + 1)) fail("a number begins with 0");
    std::uint64_t value = 0;
    for (; is_digit(at_); ++at_) {
        std::uint64_t const digit = static_cast<std::uint64_t>(text_[at_] - '0');
        if (value > (greatest - digit) / 10) fail("a number is larger than 2^64 - 1");
        value = 10 * value + digit;
    }
    if (at_ < text_.size() && std::string_view(".eE").find(text_[at_]) != std::string_view::npos)
        fail("expected a whole number");
    return value;
}
[[gnu::cold]] DDP_DECL bool json_reader::boolean() {
    (void)peek();
    for (bool const value : {false, true}) {
        std::string_view const word = value ? "true" : "false";
        if (!text_.substr(at_).starts_with(word)) continue;
        at_ += word.size();
        return value;
    }
    fail("expected true or false");
}
[[gnu::cold]] DDP_DECL string_map json_reader::strings(std::string_view what) {
    string_map all;
    for (bool more = opens('{', '}'); more; more = another('}')) {
        std::string key = string();
        expect(':');
        std::string value = string();
        if (all.contains(key)) fail(concat({what, " has ", in_quotes(key), " twice"}));
        all.emplace(std::move(key), std::move(value));
    }
    return all;
}

[[gnu::cold]] DDP_DECL void append_json_string(std::string& json, std::string_view text) {
    constexpr std::string_view hex = "0123456789abcdef", letters = "\b\f\n\r\t", short_forms = "bfnrt";
    json += '"';
    for (char const c : text) {
        if (c == '"' || c == '\\')
            (json += '\\') += c;
        else if (std::size_t const i = letters.find(c); i != letters.npos)
            (json += '\\') += short_forms[i];
        else if (static_cast<unsigned char>(c) < 0x20)
            ((json += "\\u00") += hex[static_cast<std::size_t>(c) >> 4]) += hex[static_cast<std::size_t>(c) & 15];
        else
            json += c;
    }
    json += '"';
}

}  // namespace ddp::detail
