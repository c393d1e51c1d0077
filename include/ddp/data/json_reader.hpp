/// \file
/// json_reader: strictly reads the parts of JSON that the library's files use, without a tree and without recursion.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include <ddp/core/separate.hpp>
#include <ddp/data/string_map.hpp>

namespace ddp::detail {

/// Reads a text from front to back. Its caller asks for the value that must come next, so that nothing nests too deep
/// and no value has an unexpected type.
///
///     for (bool more = json.opens('{', '}'); more; more = json.another('}')) {
///         std::string const key = json.string();
///         json.expect(':');
///         …
///
/// Throws  data_error (errc::format) with the file, the position and what was expected.
class json_reader {
public:
    /// `kind`: what errors call the text, for example "header". `text` and `file` must outlive this.
    json_reader(std::string_view text, std::string const& file, std::string_view kind)
        : text_(text), file_(file), kind_(kind) {}

    /// Throws the error `what` for the current position.
    [[noreturn]] void fail(std::string const& what) const;
    /// Sets what errors call the part that is read from now on.
    void within(std::string part) { inside_ = std::move(part); }

    /// The next character after white space.
    [[nodiscard]] char peek();
    void expect(char c);
    /// Consumes an opening bracket. Returns false, and consumes the closing one, if nothing is between them.
    [[nodiscard]] bool opens(char open, char close);
    /// Call it after a member: returns whether there is another; consumes the comma or the closing bracket.
    [[nodiscard]] bool another(char close);
    /// Throws if anything but these characters follows.
    void expect_end(std::string_view padding);

    /// UTF-8.
    [[nodiscard]] std::string string();
    /// A whole number that is not negative and below 2^64.
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

/// Appends a string in quotes, with all escapes that JSON requires. UTF-8 is written unchanged.
void append_json_string(std::string& json, std::string_view text);

}  // namespace ddp::detail

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/data/impl/json_reader.ipp>
#endif
