/// \file
/// Byte sources: the readers of data sets read from these, so that formats and compression are independent.
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

/// A file that is read once, from front to back.
///
///  read(out)  fills `out` and returns out.size(); returns less only at the end of the file, and 0 from then on. Throws
///             data_error
///  name()     the name of the file in error messages
///
/// Optional: expect_more(bytes), which throws data_error unless that many more bytes can follow. Readers call it before
/// they allocate the memory that a header asks for.
///
/// Models: file_source; gzip_source (data/gzip.hpp, needs zlib).
template <class S>
concept ByteSource = requires(S& source, S const& fixed, mutable_bytes out) {
    { source.read(out) } -> std::same_as<std::size_t>;
    { fixed.name() } -> std::convertible_to<std::string const&>;
};

/// A ByteSource that is constructed from the path of a file. `suffixes` is a static array of string views: the endings
/// that a file may have in addition to its usual name. A loader that looks for "data_batch_1.bin" tries each of them in
/// order, "" for the name itself.
template <class S>
concept FileSource = ByteSource<S> && std::constructible_from<S, std::string> && requires {
    { std::string_view(S::suffixes.front()) };
};

namespace detail {

/// A descriptor that the destructor closes.
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

/// Reads a regular file without decoding it. Its one suffix is "": loaders find files under their exact names.
/// Throws  data_error (errc::file) if `path` is missing, cannot be read (with the reason that the system gives), or is a
///         directory, pipe or device.
class file_source {
public:
    static constexpr std::array<std::string_view, 1> suffixes{""};

    explicit file_source(std::string path);

    /// See ByteSource. Throws data_error (errc::file) if the system reports an error.
    [[nodiscard]] std::size_t read(mutable_bytes out);

    /// Throws data_error (errc::format) unless at least `bytes` bytes follow what has been read.
    void expect_more(std::uint64_t bytes) const;

    [[nodiscard]] std::string const& name() const noexcept { return name_; }
    /// The size of the file in bytes when it was opened.
    [[nodiscard]] std::uint64_t size() const noexcept { return bytes_; }

private:
    struct closer {
        void operator()(std::FILE* file) const noexcept { std::fclose(file); }  // was only read: errors do not matter
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
