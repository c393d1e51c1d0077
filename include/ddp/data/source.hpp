/// \file
/// Byte sources: where the readers of data sets pull from, so that formats and compression know nothing of each other.
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdio>
#include <memory>
#include <string>
#include <string_view>

#include <ddp/core/bytes.hpp>
#include <ddp/core/separate.hpp>

namespace ddp {

/// A file, read once from front to back.
///
///  read(out)  fills out and returns its size; less only at the end, and zero from then on. Throws data_error.
///  name()     what errors call it.
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

/// Reads a file as it is. Throws data_error (errc::file) with the system's reason.
class file_source {
public:
    static constexpr std::array<std::string_view, 1> suffixes{""};

    explicit file_source(std::string path);

    [[nodiscard]] std::size_t read(mutable_bytes out);

    [[nodiscard]] std::string const& name() const noexcept { return name_; }

private:
    struct closer {
        void operator()(std::FILE* file) const noexcept { std::fclose(file); }  // was only read: nothing to lose
    };

    std::string name_;
    std::unique_ptr<std::FILE, closer> file_;
};

static_assert(FileSource<file_source>);

}  // namespace ddp

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/data/impl/source.ipp>
#endif
