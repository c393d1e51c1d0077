/// \file
/// gzip_source reads gzipped files (RFC 1952) by zlib, and others as they are. Link with ddp::gzip.
#pragma once

#include <ddp/core/language.hpp>  // first

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include <ddp/core/bytes.hpp>
#include <ddp/core/error.hpp>
#include <ddp/core/text.hpp>
#include <ddp/data/source.hpp>

#include <zlib.h>

namespace ddp {

/// Reads a file that may be gzipped: its first two bytes decide, not its name. Its suffixes are "" and ".gz": loaders
/// look for a file under its exact name first, then with ".gz". Several gzip streams in a row are one file, as in RFC
/// 1952.
///
/// read() decompresses only as much as it returns, so a file that would decompress to more than its reader expects (a
/// "bomb") costs neither memory nor time. The checksum is verified when the end of a stream is reached: readers must
/// ask for one byte more than they expect, as read_idx does. expect_more() rejects a size of more than `most_expansion`
/// times that of a gzipped file if it also exceeds `expansion_slack` bytes: deflate can reach a factor of 1000, data
/// sets do not.
///
/// Memory  64 KiB and zlib's window (about 40 KiB), allocated by the constructor.
/// Throws  data_error: errc::file if the file cannot be read; errc::format if it ends early, is damaged (the text
///         contains zlib's message), fails its checksum, or is followed by bytes that are not a gzip stream.
class gzip_source {
public:
    static constexpr std::array<std::string_view, 2> suffixes{"", ".gz"};
    static constexpr std::uint64_t most_expansion = 100;
    static constexpr std::uint64_t expansion_slack = std::uint64_t{16} << 20;

    explicit gzip_source(std::string path) : file_(std::move(path)), buffer_(std::make_unique<std::byte[]>(capacity)) {
        refill();
        gzipped_ = starts_gzip();
        if (gzipped_) stream_ = std::make_unique<inflater>(file_.name());
    }

    [[nodiscard]] std::size_t read(mutable_bytes out) {
        std::size_t done = 0;
        while (done < out.size()) {
            std::size_t const got = gzipped_ ? inflate_some(out.subspan(done)) : copy_some(out.subspan(done));
            if (got == 0) break;
            done += got;
        }
        return done;
    }

    /// Throws data_error (errc::format) if the file cannot contain `bytes` more bytes, or if that many are not plausible
    /// (see above).
    void expect_more(std::uint64_t bytes) const {
        if (!gzipped_) {
            if (bytes > left()) file_.expect_more(bytes - left());
        } else if (bytes > expansion_slack && bytes / most_expansion > file_.size()) {
            throw data_error(
                errc::format,
                detail::concat({name(), ": promises ", bytes, " bytes, more than ", most_expansion, " times the ",
                                file_.size(), " of the gzipped file; unpack it with gunzip if that is what it holds"}));
        }
    }

    [[nodiscard]] std::string const& name() const noexcept { return file_.name(); }

private:
    static constexpr std::size_t capacity = std::size_t{1} << 16;

    /// zlib keeps a pointer to its z_stream: it stays where it is, behind a unique_ptr.
    struct inflater {
        explicit inflater(std::string const& name) {
            int const status = inflateInit2(&z, 15 + 16);  // the widest window; gzip header and trailer, nothing else
            if (status != Z_OK)
                throw data_error(errc::file,
                                 detail::concat({name, ": zlib cannot start (", status,
                                                 "): out of memory, or zlib.h and libz are of different versions"}));
        }
        inflater(inflater const&) = delete;
        inflater& operator=(inflater const&) = delete;
        ~inflater() { inflateEnd(&z); }

        z_stream z{};
        bool ended = false;  // a stream's trailer was read and is correct
    };

    [[nodiscard]] std::size_t left() const noexcept { return end_ - at_; }

    /// Fills the buffer, unless the file ends first.
    void refill() {
        std::memmove(buffer_.get(), buffer_.get() + at_, left());
        end_ -= std::exchange(at_, 0);
        end_ += file_.read({buffer_.get() + end_, capacity - end_});
    }
    [[nodiscard]] bool starts_gzip() const noexcept {
        return left() >= 2 && buffer_[at_] == std::byte{0x1f} && buffer_[at_ + 1] == std::byte{0x8b};
    }

    [[nodiscard]] std::size_t copy_some(mutable_bytes out) {
        if (left() == 0) refill();
        std::size_t const count = std::min(left(), out.size());
        std::copy_n(buffer_.get() + at_, count, out.data());
        at_ += count;
        return count;
    }

    /// Decompresses at least one byte, or none at the end of the last stream.
    [[nodiscard]] std::size_t inflate_some(mutable_bytes out) {
        for (;;) {
            if (stream_->ended && !begin_next_stream()) return 0;
            if (left() == 0) refill();
            if (left() == 0)
                throw data_error(errc::format, name() +
                                                   ": the gzip stream breaks off before its end; the file is "
                                                   "truncated, fetch it again");
            z_stream& z = stream_->z;
            auto const room = static_cast<uInt>(std::min<std::size_t>(out.size(), std::numeric_limits<int>::max()));
            z.next_in = reinterpret_cast<Bytef*>(buffer_.get() + at_);
            z.avail_in = static_cast<uInt>(left());
            z.next_out = reinterpret_cast<Bytef*>(out.data());
            z.avail_out = room;
            int const status = ::inflate(&z, Z_NO_FLUSH);
            at_ = end_ - z.avail_in;
            if (status == Z_STREAM_END)
                stream_->ended = true;
            else if (status != Z_OK)
                fail(status);
            if (z.avail_out < room) return room - z.avail_out;
        }
    }

    /// Returns false at the end of the file.
    [[nodiscard]] bool begin_next_stream() {
        if (left() < 2) refill();
        if (left() == 0) return false;
        if (!starts_gzip())
            throw data_error(errc::format, name() +
                                               ": bytes that are not gzip follow the end of the gzip stream; the file "
                                               "was appended to or damaged, fetch it again");
        inflateReset(&stream_->z);
        stream_->ended = false;
        return true;
    }

    [[noreturn]] void fail(int status) const {
        std::string_view const found = stream_->z.msg != nullptr ? stream_->z.msg : ::zError(status);
        std::string what = ": the gzip stream is damaged (zlib: " + std::string(found) + ")";
        if (found == "incorrect data check")
            what = ": the CRC-32 of the unpacked data is not the one in the gzip trailer";
        if (found == "incorrect length check") what = ": the unpacked length is not the one in the gzip trailer";
        throw data_error(status == Z_MEM_ERROR ? errc::file : errc::format,
                         detail::concat({name(), what, "; fetch it again"}));
    }

    file_source file_;
    std::unique_ptr<std::byte[]> buffer_;  // compressed (or plain) bytes [at_, end_) wait to be used
    std::size_t at_ = 0;
    std::size_t end_ = 0;
    bool gzipped_ = false;
    std::unique_ptr<inflater> stream_;
};

static_assert(FileSource<gzip_source>);

}  // namespace ddp
