/// \file
/// What data/npy.hpp declares.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <ddp/core/error.hpp>
#include <ddp/core/text.hpp>
#include <ddp/data/idx.hpp>
#include <ddp/data/npy.hpp>

namespace ddp::detail {

/// The header: a Python dictionary of three entries, padded with blanks, ended by a line feed.
class npy_header {
public:
    /// `offset`: of the text in the file.
    npy_header(std::string const& name, std::string_view text, std::size_t offset)
        : name_(name), text_(text), offset_(offset) {
        take('{');
        while (!comes('}')) {
            std::size_t const key_at = at_;
            std::string_view const key = word();
            take(':');
            bool const twice =
                (key == "descr" && type) || (key == "fortran_order" && fortran_) || (key == "shape" && shaped_);
            if (twice) fail(key_at, concat({in_quotes(key), " occurs twice"}));
            if (key == "descr")
                type = descr();
            else if (key == "fortran_order")
                fortran_ = boolean();
            else if (key == "shape")
                tuple();
            else
                fail(key_at,
                     concat({"unknown key ", in_quotes(key), ", expected 'descr', 'fortran_order' and 'shape'"}));
            if (!comes(',')) break;
            take(',');
        }
        take('}');
        skip_blanks();
        if (at_ + 1 != text_.size() || text_[at_] != '\n')
            fail(at_, "expected blanks and one line feed to end the header");
        if (!type || !fortran_ || !shaped_)
            fail(at_, concat({"the header has no ", !type ? "'descr'" : !fortran_ ? "'fortran_order'" : "'shape'"}));
        if (*fortran_ && shape.size() > 1)
            throw data_error(errc::format,
                             concat({name_, ": is in Fortran order; save numpy.ascontiguousarray(array)"}));
    }

    std::optional<element_type> type;
    std::vector<std::size_t> shape;

private:
    [[noreturn, gnu::cold]] void fail(std::size_t at, std::string const& what) const {
        throw data_error(errc::format, concat({name_, ": byte ", offset_ + at, " of its header: ", what}));
    }
    void skip_blanks() {
        while (at_ < text_.size() && text_[at_] == ' ') ++at_;
    }
    bool comes(char c) {
        skip_blanks();
        return at_ < text_.size() && text_[at_] == c;
    }
    void take(char c) {
        if (!comes(c)) fail(at_, concat({"expected ", std::string(1, c), at_ < text_.size() ? "" : ", but it ends"}));
        ++at_;
    }
    std::string_view word() {
        if (!comes('\'') && !comes('"')) fail(at_, "expected a text in quotes; arrays of records are not read");
        char const quote = text_[at_];
        std::size_t const end = text_.find(quote, at_ + 1);
        if (end == text_.npos) fail(at_, "the quote is not closed");
        std::string_view const inside = text_.substr(at_ + 1, end - at_ - 1);
        at_ = end + 1;
        return inside;
    }
    element_type descr() {
        skip_blanks();
        std::size_t const from = at_;
        std::string_view const code = word();
        if (code == "<f4") return element_type::f32;
        if (code == "<f8") return element_type::f64;
        if (code == "|u1") return element_type::u8;
        if (code == "<i4") return element_type::i32;
        if (code == "<i8") return element_type::i64;
        bool const turned = code == ">f4" || code == ">f8" || code == ">i4" || code == ">i8";
        fail(from,
             concat({"elements of type ", in_quotes(code),
                     ", expected '<f4', '<f8', '|u1', '<i4' or '<i8'; save array.astype('<",
                     turned ? code.substr(1) : std::string_view("f4"), turned ? "'), little endian" : "')", ", say"}));
    }
    bool boolean() {
        skip_blanks();
        for (bool const value : {false, true}) {
            std::string_view const written = value ? "True" : "False";
            if (!text_.substr(at_).starts_with(written)) continue;
            at_ += written.size();
            return value;
        }
        fail(at_, "expected True or False");
    }
    void tuple() {
        shaped_ = true;
        take('(');
        while (!comes(')')) {
            std::size_t const from = at_;
            std::size_t extent = 0;
            for (; at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9'; ++at_) {
                std::size_t const digit = static_cast<std::size_t>(text_[at_] - '0');
                if (extent > (std::numeric_limits<std::size_t>::max() - digit) / 10)
                    fail(from, "the number is too large");
                extent = 10 * extent + digit;
            }
            if (at_ == from) fail(at_, "expected a size or ')'");
            if (shape.size() == 64) fail(from, "more than 64 dimensions");
            shape.push_back(extent);
            if (!comes(',')) {
                if (shape.size() == 1) fail(at_, "expected ',': a tuple of one size is written (3,)");
                break;
            }
            take(',');
        }
        take(')');
    }

    std::string const& name_;
    std::string_view text_;
    std::size_t offset_, at_ = 0;
    std::optional<bool> fortran_;
    bool shaped_ = false;
};

[[gnu::cold]] DDP_DECL npy_array read_npy(function_ref<std::size_t(mutable_bytes)> read,
                                          function_ref<bool(std::uint64_t)> expect, std::string const& name,
                                          std::size_t max_bytes) {
    auto const refuse = [&](std::string const& what) { throw data_error(errc::format, concat({name, ": ", what})); };
    std::array<std::uint8_t, 8> magic{};
    std::size_t const got = read(bytes_of(magic));
    if (got < magic.size() || std::string_view(reinterpret_cast<char const*>(magic.data()), 6) != "\x93NUMPY")
        refuse("is not an NPY file: it does not begin with the bytes 93 'NUMPY' and a version");
    if (magic[6] < 1 || magic[6] > 3 || magic[7] != 0)
        refuse(concat({"byte 6: has format ", magic[6], ".", magic[7], ", expected 1.0, 2.0 or 3.0"}));
    std::array<std::uint8_t, 4> length{};
    std::size_t const width = magic[6] == 1 ? 2 : 4;
    if (read(bytes_of(length).first(width)) < width) refuse("is truncated: it ends within the length of its header");
    std::size_t const bytes_of_header = std::size_t{length[0]} | std::size_t{length[1]} << 8 |
                                        std::size_t{length[2]} << 16 | std::size_t{length[3]} << 24;
    if (bytes_of_header > 65535)
        refuse(concat({"byte 8: promises a header of ", bytes_of_header, " bytes, more than the limit of 65535"}));
    std::string text(bytes_of_header, '\0');
    if (std::size_t const count = read(as_mutable_bytes(std::span(text))); count < text.size())
        refuse(concat({"is truncated: it ends after ", magic.size() + width + count, " bytes, its header takes ",
                       magic.size() + width + text.size()}));
    npy_header const header(name, text, magic.size() + width);

    npy_array array{*header.type, header.shape, {}};
    std::size_t bytes = bits_of(array.type) / 8;
    bool const empty = std::find(array.shape.begin(), array.shape.end(), std::size_t{0}) != array.shape.end();
    bool fits = bytes <= max_bytes;
    for (std::size_t const extent : array.shape) {
        fits = fits && (extent == 0 || bytes <= max_bytes / extent);
        if (fits && extent != 0) bytes *= extent;
    }
    if (empty) bytes = 0;
    if (!empty && !fits)
        refuse(concat({"promises ", shape_text(array.shape), " elements of ", name_of(array.type),
                       ", more than the limit of ", max_bytes, " bytes; raise the limit if that is what it holds"}));
    std::size_t const first_piece = expect(bytes) ? bytes : std::size_t{1} << 20;
    while (array.data.size() < bytes) {
        std::size_t const before = array.data.size();
        array.data.resize(std::min(bytes, before + std::max(before, first_piece)));
        std::size_t const count = read(as_mutable_bytes(std::span(array.data).subspan(before)));
        if (before + count < array.data.size())
            refuse(concat({"is truncated: it holds ", before + count, " bytes of data, its header promises ", bytes}));
    }
    std::byte one_more{};
    if (read({&one_more, 1}) != 0)
        refuse(concat({"continues after the ", bytes, " bytes of data that its header promises"}));
    return array;
}

}  // namespace ddp::detail
