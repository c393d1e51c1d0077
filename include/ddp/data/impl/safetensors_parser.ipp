/// \file
/// What data/safetensors_parser.hpp declares.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include <ddp/core/bytes.hpp>
#include <ddp/core/element_type.hpp>
#include <ddp/core/error.hpp>
#include <ddp/core/text.hpp>
#include <ddp/data/safetensors_header.hpp>
#include <ddp/data/safetensors_parser.hpp>

namespace ddp {

namespace detail {

/// Reads the one kind of JSON that a header may be: an object of objects of known members. So nothing nests deeper than
/// it may, no value is of an unexpected kind, and there is no recursion.
class header_parser {
public:
    header_parser(std::string_view text, std::string const& file, safetensors_limits const& limits)
        : text_(text), file_(file), limits_(limits) {}

    safetensors_header parse() {
        safetensors_header header;
        bool described = false;
        if (!text_.starts_with('{')) fail("a header begins with '{'");
        ++at_;
        for (bool more = begins('}'); more; more = another('}')) {
            std::string name = string();
            expect(':');
            if (name == "__metadata__") {
                if (std::exchange(described, true)) fail("__metadata__ is there twice");
                header.metadata = metadata();
            } else {
                header.tensors.push_back(tensor(std::move(name)));
            }
        }
        std::size_t const end = text_.find_first_not_of(' ', at_);
        if (end != text_.npos) {
            at_ = end;
            fail("there is something after the header's last '}'");
        }
        return header;
    }

private:
    [[noreturn]] void fail(std::string const& what) const {
        throw data_error(errc::format, concat({file_, ": byte ", std::min(at_, text_.size()), " of the header",
                                               inside_.empty() ? "" : ", tensor " + inside_, ": ", what}));
    }
    [[nodiscard]] char peek() {
        while (at_ < text_.size() &&
               (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t' || text_[at_] == '\r'))
            ++at_;
        if (at_ == text_.size()) fail("the header ends too early");
        return text_[at_];
    }
    void expect(char c) {
        if (peek() != c) fail(concat({"expected '", std::string_view(&c, 1), "'"}));
        ++at_;
    }
    /// After an opening bracket: whether something comes before the closing one, which is eaten.
    [[nodiscard]] bool begins(char close) {
        if (peek() != close) return true;
        ++at_;
        return false;
    }
    /// After a member: whether there is another.
    [[nodiscard]] bool another(char close) {
        char const c = peek();
        if (c != ',' && c != close) fail(concat({"expected ',' or '", std::string_view(&close, 1), "'"}));
        ++at_;
        return c == ',';
    }

    std::string string() {
        expect('"');
        std::string result;
        for (;;) {
            if (at_ == text_.size()) fail("the header ends within a string");
            char const c = text_[at_];
            if (c == '"') break;
            if (c == '\\') {
                ++at_;
                escape(result);
                continue;
            }
            if (static_cast<unsigned char>(c) < 0x20) fail("a control character within a string");
            std::size_t const length = utf8_length(text_.substr(at_));
            if (length == 0) fail("a string that is no UTF-8");
            result += text_.substr(at_, length);
            at_ += length;
        }
        ++at_;
        return result;
    }
    void escape(std::string& to) {
        constexpr std::string_view letters = "\"\\/bfnrt", meanings = "\"\\/\b\f\n\r\t";
        if (at_ == text_.size()) fail("the header ends within a string");
        char const c = text_[at_];
        if (std::size_t const i = letters.find(c); i != letters.npos) {
            ++at_;
            to += meanings[i];
            return;
        }
        if (c != 'u') fail("an escape that JSON does not know");
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
    std::uint32_t utf16() {
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

    std::uint64_t number() {
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
    std::vector<std::size_t> numbers(std::size_t at_most) {
        static_assert(sizeof(std::size_t) == sizeof(std::uint64_t));
        std::vector<std::size_t> all;
        expect('[');
        for (bool more = begins(']'); more; more = another(']')) {
            if (all.size() == at_most) fail(concat({"more than ", at_most, " numbers"}));
            all.push_back(number());
        }
        return all;
    }

    string_map metadata() {
        string_map all;
        expect('{');
        for (bool more = begins('}'); more; more = another('}')) {
            std::string key = string();
            expect(':');
            std::string value = string();
            if (all.contains(key)) fail(concat({"__metadata__ has ", in_quotes(key), " twice"}));
            all.emplace(std::move(key), std::move(value));
        }
        return all;
    }
    tensor_info tensor(std::string name) {
        tensor_info info;
        info.name = std::move(name);
        inside_ = in_quotes(info.name);
        bool typed = false, shaped = false, placed = false;
        expect('{');
        for (bool more = begins('}'); more; more = another('}')) {
            std::string const key = string();
            expect(':');
            bool* known = key == "dtype"          ? &typed
                          : key == "shape"        ? &shaped
                          : key == "data_offsets" ? &placed
                                                  : nullptr;
            if (known == nullptr) fail("expected dtype, shape and data_offsets, found " + in_quotes(key));
            if (std::exchange(*known, true)) fail(in_quotes(key) + " is there twice");
            if (known == &typed) {
                std::string const type = string();
                auto const found = element_type_named(type);
                if (!found) fail(concat({"dtype ", in_quotes(type), " is none that the format knows"}));
                info.type = *found;
            } else if (known == &shaped) {
                info.shape = numbers(limits_.dimensions);
            } else {
                std::vector<std::size_t> const ends = numbers(2);
                if (ends.size() != 2) fail("data_offsets takes two numbers");
                info.begin = ends[0], info.end = ends[1];
            }
        }
        if (!typed || !shaped || !placed) fail("dtype, shape or data_offsets is missing");
        auto const bytes = bytes_of_tensor(info.type, info.shape);
        if (info.begin > info.end || !bytes || info.end - info.begin != *bytes)
            fail(concat({type_and_shape(info.type, info.shape), " takes ",
                         bytes ? concat({*bytes}) : "no possible number of", " bytes, data_offsets are ", info.begin,
                         " and ", info.end}));
        inside_.clear();
        return info;
    }

    std::string_view text_;
    std::string const& file_;
    safetensors_limits const& limits_;
    std::size_t at_ = 0;
    std::string inside_;  // the tensor that is being read
};

/// Sorts tensors as they lie in the file, and insists that they cover all its bytes, each once.
[[gnu::cold]] DDP_DECL void expect_cover(std::vector<tensor_info>& tensors, std::uint64_t data_bytes,
                                         std::string const& file) {
    auto const refuse = [&](std::string const& text) { throw data_error(errc::format, concat({file, ": ", text})); };
    std::sort(tensors.begin(), tensors.end(), [](auto const& a, auto const& b) { return a.name < b.name; });
    for (std::size_t i = 1; i < tensors.size(); ++i)
        if (tensors[i - 1].name == tensors[i].name)
            refuse(concat({"tensor ", in_quotes(tensors[i].name), " is there twice"}));
    std::sort(tensors.begin(), tensors.end(), [](auto const& a, auto const& b) {
        return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
    });
    std::uint64_t end = 0;
    for (tensor_info const& t : tensors) {
        std::string const which = concat({"tensor ", in_quotes(t.name), " begins at byte ", t.begin, " of the data"});
        if (t.begin < end) refuse(concat({which, " and overlaps the one before it, which ends at ", end}));
        if (t.begin > end) refuse(concat({which, ", and nothing fills the hole from ", end}));
        end = t.end;
    }
    if (end != data_bytes)
        refuse(concat({end > data_bytes ? "is truncated: " : "goes on after its last tensor: ", "the header promises ",
                       end, " bytes of data, there are ", data_bytes}));
}

}  // namespace detail

[[gnu::cold]] DDP_DECL safetensors_header parse_safetensors_header(std::string_view text, std::uint64_t data_bytes,
                                                                   std::string const& file,
                                                                   safetensors_limits const& limits) {
    safetensors_header header = detail::header_parser(text, file, limits).parse();
    detail::expect_cover(header.tensors, data_bytes, file);
    header.data_offset = 8 + text.size();
    return header;
}

[[gnu::cold]] DDP_DECL safetensors_header read_safetensors_header(std::uint64_t file_bytes,
                                                                  function_ref<void(std::uint64_t, mutable_bytes)> read,
                                                                  std::string const& file,
                                                                  safetensors_limits const& limits) {
    auto const refuse = [&](std::string const& text) {
        throw data_error(errc::format, detail::concat({file, ": ", text}));
    };
    if (file_bytes < 8)
        refuse(detail::concat({"is no safetensors file: it has ", file_bytes, " bytes, a header takes at least 8"}));
    std::array<std::uint8_t, 8> prefix{};
    read(std::uint64_t{0}, bytes_of(prefix));
    std::uint64_t length = 0;
    for (std::size_t i = 8; i-- > 0;) length = length << 8 | prefix[i];
    if (length > limits.header_bytes)
        refuse(detail::concat({"is no safetensors file, or one with too large a header: it would be ", length,
                               " bytes long, at most ", limits.header_bytes, " are accepted"}));
    if (length > file_bytes - 8)
        refuse(detail::concat(
            {"is truncated: its header should be ", length, " bytes long, but only ", file_bytes - 8, " follow"}));
    std::string text(static_cast<std::size_t>(length), '\0');
    read(std::uint64_t{8}, as_mutable_bytes(std::span<char>(text)));
    return parse_safetensors_header(text, file_bytes - 8 - length, file, limits);
}

}  // namespace ddp
