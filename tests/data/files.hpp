/// \file
/// Small data files for tests: directories that vanish, IDX bytes, and what a reader threw.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ddp/core/bytes.hpp>
#include <ddp/core/error.hpp>
#include <ddp/data/source.hpp>

namespace test {

using bytes = std::vector<std::uint8_t>;

/// An empty directory of this process's own, removed at the end.
class scratch_directory {
public:
    scratch_directory() {
        static int count = 0;
        path_ = std::filesystem::temp_directory_path() /
                ("ddp-test-" + std::to_string(::getpid()) + "-" + std::to_string(count++));
        std::filesystem::create_directory(path_);
    }
    scratch_directory(scratch_directory const&) = delete;
    scratch_directory& operator=(scratch_directory const&) = delete;
    ~scratch_directory() {
        std::error_code ignored;
        std::filesystem::remove_all(path_, ignored);
    }

    [[nodiscard]] std::filesystem::path const& path() const noexcept { return path_; }

    /// Writes a file and returns its path.
    std::string write(std::string const& name, bytes const& content) const {
        std::ofstream out(path_ / name, std::ios::binary);
        out.write(reinterpret_cast<char const*>(content.data()), static_cast<std::streamsize>(content.size()));
        return (path_ / name).string();
    }

private:
    std::filesystem::path path_;
};

/// An IDX header for `shape`.
inline bytes idx_header(std::vector<std::uint32_t> const& shape, std::uint8_t type = 0x08) {
    bytes header{0, 0, type, static_cast<std::uint8_t>(shape.size())};
    for (std::uint32_t const extent : shape)
        for (int shift = 24; shift >= 0; shift -= 8) header.push_back(static_cast<std::uint8_t>(extent >> shift));
    return header;
}

inline bytes joined(bytes head, bytes const& tail) {
    head.insert(head.end(), tail.begin(), tail.end());
    return head;
}

inline bytes ramp(std::size_t count) {
    bytes data(count);
    for (std::size_t i = 0; i < count; ++i) data[i] = static_cast<std::uint8_t>(i * 7 + i / 256);
    return data;
}

/// The smallest ByteSource: bytes in memory. Remembers what was asked of it.
struct memory_source {
    bytes content;
    std::string called = "memory";
    std::size_t at = 0;
    std::size_t largest_request = 0;

    std::size_t read(ddp::mutable_bytes out) {
        largest_request = std::max(largest_request, out.size());
        std::size_t const count = std::min(out.size(), content.size() - at);
        std::copy_n(ddp::as_const_bytes(std::span<std::uint8_t const>(content)).data() + at, count, out.data());
        at += count;
        return count;
    }
    [[nodiscard]] std::string const& name() const { return called; }
};
static_assert(ddp::ByteSource<memory_source>);

/// What a call threw, if it was one of the library's errors.
struct caught {
    std::optional<ddp::errc> code;
    std::string text = "nothing was thrown";

    [[nodiscard]] bool says(std::string_view words) const { return text.find(words) != std::string::npos; }
};

template <class F>
caught catch_error(F call) {
    try {
        call();
    } catch (ddp::error const& e) {
        return {e.code(), e.what()};
    }
    return {};
}

/// A source that counts the bytes that its reader asks for.
template <class Source>
struct watched_source {
    Source file;
    std::size_t asked_for = 0;
    std::size_t read(ddp::mutable_bytes out) {
        asked_for += out.size();
        return file.read(out);
    }
    void expect_more(std::uint64_t count) const { file.expect_more(count); }
    std::string const& name() const { return file.name(); }
};

}  // namespace test
