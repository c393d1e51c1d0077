/// \file
/// json_reader: the pieces of JSON that the library's files are made of, read strictly; without a tree, without recursion.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include <ddp/core/separate.hpp>
#include <ddp/data/string_map.hpp>

namespace ddp::detail {

/// Reads a text from front to back. Who uses it knows which value comes next, so that nothing nests deeper than it may, and
/// no value is of an unexpected kind.
///
///     for (bool more = json.opens('{', '}'); more; more = json.another('}')) {
///         std::string const key = json.string();
///         json.expect(':');
///         …
///
/// Throws  data_error (errc::format) with the file, the position and what was expected.
class json_reader {
public:
    /// `kind`: what errors call the text, "header". Text and name are the caller's, and outlive this.
    json_reader(std::string_view text, std::string const& file, std::string_view kind)
        : text_(text), file_(file), kind_(kind) {}

    /// `what` is wrong here.
    [[noreturn]] void fail(std::string const& what) const;
    /// What errors call the part that is being read, until they are told otherwise.
    void within(std::string part) { inside_ = std::move(part); }

    /// The next character, white space skipped.
    [[nodiscard]] char peek();
    void expect(char c);
    /// Eats an opening bracket: whether something comes before the closing one, which is eaten otherwise.
    [[nodiscard]] bool opens(char open, char close);
    /// After a member: whether there is another.
    [[nodiscard]] bool another(char close);
    /// Nothing may follow but these characters.
    void expect_end(std::string_view padding);

    /// UTF-8.
    [[nodiscard]] std::string string();
    /// Whole, not negative, below 2^64.
    [[nodiscard]] std::uint64_t number();
    [[nodiscard]] bool boolean();
    /// An object of strings. `what`: its name in errors.
    [[nodiscard]] string_map strings(std::string_view what);

    /// Bytes read so far.
    [[nodiscard]] std::size_t position() const noexcept { return at_; }

private:
    void escape(std::string& to);
    [[nodiscard]] std::uint32_t utf16();

    std::string_view text_;
    std::string const& file_;
    std::string_view kind_;
    std::size_t at_ = 0;
    std::string inside_;
};

/// Appends a string in quotes, with all escapes that JSON asks for. UTF-8 is written as it is.
void append_json_string(std::string& json, std::string_view text);

}  // namespace ddp::detail

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/data/impl/json_reader.ipp>
#endif
