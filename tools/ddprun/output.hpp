/// \file
/// What the ranks print, shown so that lines of different ranks never mix.
#pragma once

#include <algorithm>
#include <cerrno>
#include <string>
#include <string_view>
#include <utility>

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include "posix.hpp"

namespace ddprun {

/// One of ddprun's own outputs. Takes whole lines at once, and hands them to the descriptor as that takes them: a
/// reader that stands still (a pager) must not keep ddprun from its signals.
class sink {
public:
    explicit sink(int fd) : fd_(fd), terminal_(::isatty(fd) == 1) {
        struct stat info;
        if (::fstat(fd, &info) == 0) regular_ = S_ISREG(info.st_mode);
        if (!terminal_) return;
        own_ = unique_fd(
            ::open(("/proc/self/fd/" + std::to_string(fd)).c_str(), O_WRONLY | O_NOCTTY | O_NONBLOCK | O_CLOEXEC));
        if (own_) fd_ = own_.get();
    }
    sink(sink const&) = delete;
    sink& operator=(sink const&) = delete;

    [[nodiscard]] int fd() const noexcept { return fd_; }
    [[nodiscard]] bool terminal() const noexcept { return terminal_; }
    [[nodiscard]] bool idle() const noexcept { return pending_.empty(); }
    [[nodiscard]] bool congested() const noexcept { return pending_.size() > congestion_bytes; }
    [[nodiscard]] void const* owner() const noexcept { return owner_; }
    [[nodiscard]] int problem() const noexcept { return problem_; }  ///< errno of what ended writing, or 0

    void line(std::string_view prefix, std::string_view text) {
        close_open_line();
        append(prefix);
        append(text);
        append("\n");
    }

    /// Bytes that may end in the middle of a line. That line stays `owner`'s until it ends or somebody else writes.
    void live(void const* owner, std::string_view bytes) {
        if (bytes.empty()) return;
        if (owner_ != owner) close_open_line();
        append(bytes);
        std::size_t const last_end = bytes.rfind('\n');
        std::string_view const open = last_end == std::string_view::npos ? bytes : bytes.substr(last_end + 1);
        bool const same_line = last_end == std::string_view::npos && owner_ == owner;
        redraws_ = open.find('\r') != std::string_view::npos || (same_line && redraws_);
        owner_ = open.empty() ? nullptr : owner;
    }

    /// Writes what can be written without blocking: after POLLOUT a pipe takes PIPE_BUF bytes. A terminal may take fewer, so it
    /// is opened again. (Making the descriptor non-blocking would do so for everybody who shares it, the user's shell too.)
    void pump() {
        std::size_t written = 0;
        while (written < pending_.size()) {
            pollfd ready{fd_, POLLOUT, 0};
            if (::poll(&ready, 1, 0) <= 0) break;
            std::size_t const size = pending_.size() - written;
            ssize_t const n = ::write(fd_, pending_.data() + written, regular_ ? size : std::min(size, chunk_bytes));
            if (n < 0 && (errno == EAGAIN || errno == EINTR)) break;
            if (n < 0) {
                problem_ = errno;  // the reader is gone: the ranks' work is worth more than their output
                written = pending_.size();
                break;
            }
            written += static_cast<std::size_t>(n);
        }
        pending_.erase(0, written);
    }

private:
    static constexpr std::size_t chunk_bytes = 4096;
    static constexpr std::size_t congestion_bytes = std::size_t{1} << 18;

    void append(std::string_view text) {
        if (problem_ == 0) pending_ += text;
    }
    void close_open_line() {
        if (owner_ == nullptr) return;
        append(redraws_ ? "\r\x1b[K" : "\n");  // a progress bar comes back by itself
        owner_ = nullptr;
        redraws_ = false;
    }

    int fd_;
    unique_fd own_;  // of a terminal
    bool terminal_;
    bool regular_ = false;
    int problem_ = 0;
    std::string pending_;
    void const* owner_ = nullptr;  // of the line that has not ended yet
    bool redraws_ = false;         // that line has a carriage return in it
};

/// Whether two descriptors lead to one place, as after 2>&1: then one sink keeps the order of both.
[[nodiscard]] inline bool same_place(int a, int b) {
    struct stat first, second;
    return ::fstat(a, &first) == 0 && ::fstat(b, &second) == 0 && first.st_dev == second.st_dev &&
           first.st_ino == second.st_ino;
}

/// One stream of one rank on its way to a sink: line by line, or at once (`live`) where somebody may watch a progress
/// bar.
class stream_printer {
public:
    stream_printer(sink& to, std::string prefix, bool live) : to_(&to), prefix_(std::move(prefix)), live_(live) {}

    void feed(std::string_view bytes) {
        if (live_) return feed_live(bytes);
        while (!bytes.empty()) {
            std::size_t const end = bytes.find('\n');
            std::size_t const room = longest_line - line_.size();
            if (end != std::string_view::npos && end <= room) {
                line_ += bytes.substr(0, end);
                bytes.remove_prefix(end + 1);
                emit();
            } else if (bytes.size() <= room && end == std::string_view::npos) {
                line_ += bytes;
                return;
            } else {  // a line without end: shown in pieces
                line_ += bytes.substr(0, room);
                bytes.remove_prefix(room);
                emit();
            }
        }
    }

    void finish() {
        if (live_ && to_->owner() == this) to_->live(this, "\n");
        if (!line_.empty()) emit();
    }

private:
    static constexpr std::size_t longest_line = std::size_t{1} << 16;

    void emit() {
        std::string_view text = line_;
        if (to_->terminal()) {  // only the last redraw: a carriage return would wipe out the prefix
            while (text.ends_with('\r')) text.remove_suffix(1);
            if (auto const redraw = text.rfind('\r'); redraw != std::string_view::npos) text.remove_prefix(redraw + 1);
        }
        to_->line(prefix_, text);
        line_.clear();
    }

    void feed_live(std::string_view bytes) {
        if (to_->owner() != this) state_ = at::line_start;
        std::string shown;
        for (char const byte : bytes) {
            if (byte == '\r') {
                shown += byte;
                state_ = at::redraw;
                continue;
            }
            if (state_ == at::line_start || (state_ == at::redraw && byte != '\n')) shown += prefix_;
            shown += byte;
            state_ = byte == '\n' ? at::line_start : at::text;
        }
        to_->live(this, shown);
    }

    enum class at { line_start, redraw, text };

    sink* to_;
    std::string prefix_;
    bool live_;
    std::string line_;
    at state_ = at::line_start;
};

/// A rank's last line on stderr, preferring one of the library's own errors. Of another ddprun, for its host: the line
/// that names its culprit.
class last_words {
public:
    explicit last_words(bool of_ddprun) : of_ddprun_(of_ddprun) {}

    void feed(std::string_view bytes) {
        for (char const byte : bytes) {
            if (byte == '\n' || byte == '\r')
                finish();
            else if (line_.size() < longest_kept)
                line_ += byte;
        }
    }
    void finish() {
        std::string_view line = line_;
        line.remove_prefix(std::min(line.find_first_not_of(" \t"), line.size()));
        if (!line.empty()) keep(line);
        line_.clear();
    }
    [[nodiscard]] std::string const& text() const noexcept { return kept_; }

    /// Whether they accuse a rank other than this one: not found (201), closed (202), silent (203), late (204), threw (206).
    [[nodiscard]] bool accuse_a_peer(int rank) const {
        std::string const itself = "rank " + std::to_string(rank) + " failed in its own code";
        if (kept_.find("DDP-E206") != std::string::npos && kept_.find(itself) != std::string::npos) return false;
        for (std::string_view const code : {"DDP-E201", "DDP-E202", "DDP-E203", "DDP-E204", "DDP-E206"})
            if ((of_ddprun_ ? culprits_ : kept_).find(code) != std::string::npos) return true;
        return false;
    }

private:
    static constexpr std::size_t longest_kept = 1000;

    void keep(std::string_view line) {
        bool const matters = of_ddprun_ ? line.starts_with("ddprun: ") : line.find("DDP-E") != std::string_view::npos;
        if (of_ddprun_ && line.starts_with("its last error line: ")) culprits_ = line;
        if (goes_on_ && !matters) kept_.append(" ").append(line);
        if (matters || !found_) kept_ = line;
        goes_on_ = matters && line.ends_with(':');
        found_ = found_ || matters;
    }

    bool of_ddprun_;
    std::string line_;
    std::string kept_;
    std::string culprits_;  // what another ddprun has shown of its culprit's
    bool found_ = false;
    bool goes_on_ = false;  // the last line was kept, and ends in a colon: the first of a list follows
};

}  // namespace ddprun
