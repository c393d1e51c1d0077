/// \file
/// Byte sources: where the readers of data sets pull from, so that formats and compression know nothing of each other.
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include <ddp/core/bytes.hpp>
#include <ddp/core/separate.hpp>

namespace ddp {

/// A file, read once from front to back.
///
///  read(out)  fills out and returns its size; less only at the end, and zero from then on. Throws data_error.
///  name()     what errors call it.
///
/// Optional: expect_more(bytes), which throws data_error unless so many more bytes can follow. Readers call it before
/// they take memory for what a header claims.
///
/// Models: file_source; gzip_source (data/gzip.hpp, needs zlib).
template <class S>
concept ByteSource = requires(S& source, S const& fixed, mutable_bytes out) {
    { source.read(out) } -> std::same_as<std::size_t>;
    { fixed.name() } -> std::convertible_to<std::string const&>;
};

/// A ByteSource that opens files by path. `suffixes` are the endings under which it can read a file called `stem`.
template <class S>
concept FileSource = ByteSource<S> && std::constructible_from<S, std::string> && requires {
    { std::string_view(S::suffixes.front()) };
};

namespace detail {

/// A descriptor that is closed at the end.
struct open_file {
    int number = -1;
    std::uint64_t bytes = 0;  ///< how long the file was when it was opened
    open_file() = default;
    open_file(open_file&& other) noexcept : number(std::exchange(other.number, -1)), bytes(other.bytes) {}
    ~open_file();
};

/// Opens a regular file for reading. Throws data_error (errc::file) for anything else: a pipe may never have a writer,
/// and a device never ends.
[[nodiscard]] open_file open_regular_file(std::string const& name);

}  // namespace detail

/// Reads a regular file as it is. Throws data_error: errc::file with the system's reason, or if it is a directory, pipe or
/// device.
class file_source {
public:
    static constexpr std::array<std::string_view, 1> suffixes{""};

    explicit file_source(std::string path);

    [[nodiscard]] std::size_t read(mutable_bytes out);

    /// Throws data_error (errc::format) unless the file is so much longer than what was read.
    void expect_more(std::uint64_t bytes) const;

    [[nodiscard]] std::string const& name() const noexcept { return name_; }
    /// Of the file, when it was opened.
    [[nodiscard]] std::uint64_t size() const noexcept { return bytes_; }

private:
    struct closer {
        void operator()(std::FILE* file) const noexcept { std::fclose(file); }  // was only read: nothing to lose
    };

    std::string name_;
    std::uint64_t bytes_ = 0, read_ = 0;
    std::unique_ptr<std::FILE, closer> file_;
};

static_assert(FileSource<file_source>);

}  // namespace ddp

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/data/impl/source.ipp>
#endif
