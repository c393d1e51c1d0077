/// \file
/// A running rank, as ddprun sees it.
#pragma once

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include <unistd.h>

#include "flight_memory.hpp"
#include "options.hpp"
#include "output.hpp"
#include "posix.hpp"
#include "report.hpp"
#include "verdict.hpp"

namespace ddprun {

/// What stands before the lines of `rank` in `to`.
[[nodiscard]] inline std::string prefix_for(prefix_mode mode, int rank, sink const& to) {
    if (mode == prefix_mode::none || (mode == prefix_mode::others && rank == 0)) return "";
    std::string const plain = "[" + std::to_string(rank) + "]";
    char const* const no_colour = std::getenv("NO_COLOR");
    if (!to.terminal() || (no_colour != nullptr && *no_colour != '\0')) return plain + " ";
    return "\x1b[3" + std::to_string(1 + rank % 6) + "m" + plain + "\x1b[0m ";
}

/// One of a rank's two streams: its pipe, where that is shown and written, and what was said last.
class output_of_rank {
public:
    /// What the first rank writes to a terminal is shown at once: it is the one that draws a progress bar.
    /// `token`: it is another ddprun that writes here, and begins its reports with that; empty: it is a rank.
    output_of_rank(unique_fd pipe, sink& to, std::string prefix, bool first_rank, bool shown, unique_fd file,
                   std::string const& token = "")
        : pipe_(std::move(pipe)),
          to_(&to),
          printer_(to, std::move(prefix), first_rank && to.terminal()),
          words_(!token.empty()),
          shown_(shown),
          file_(std::move(file)) {
        if (!token.empty()) reports_.emplace(token);
    }

    [[nodiscard]] bool open() const noexcept { return static_cast<bool>(pipe_); }
    [[nodiscard]] last_words const& words() const noexcept { return words_; }
    /// What another ddprun has reported of its ranks: see report_lines::of.
    [[nodiscard]] flight_reports const& reports_of(int question) const { return reports_.value().of(question); }
    [[nodiscard]] int file_problem() const noexcept { return file_problem_; }  ///< errno of a write, or 0

    /// To poll, or -1: where the reader of our output lags, ranks wait in their pipes.
    [[nodiscard]] int wanted_fd() const noexcept { return to_->congested() ? -1 : pipe_.get(); }

    /// Moves what is there. Returns false when the pipe is empty, or has ended, which closes it.
    bool move_some() {
        char buffer[1 << 16];
        ssize_t const n = ::read(pipe_.get(), buffer, sizeof buffer);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) return false;
        if (n <= 0) {
            pipe_.reset();
            return false;
        }
        std::string_view const bytes(buffer, static_cast<std::size_t>(n));
        show(reports_ ? std::string_view(others_ = reports_->feed(bytes)) : bytes);
        return true;
    }

    /// Moves what the pipe holds, and closes it. (No pipe holds more; somebody who is none of ours may go on writing.)
    void finish() {
        for (int i = 0; i < 32 && pipe_ && move_some(); ++i) {
        }
        pipe_.reset();
        if (reports_) show(reports_->finish());
        printer_.finish();
        words_.finish();
    }

private:
    void show(std::string_view bytes) {
        if (shown_) printer_.feed(bytes);
        words_.feed(bytes);
        keep(bytes);
    }
    void keep(std::string_view bytes) {
        while (file_ && !bytes.empty()) {
            ssize_t const n = ::write(file_.get(), bytes.data(), bytes.size());
            if (n < 0 && errno == EINTR) continue;
            if (n < 0) {
                file_problem_ = errno;
                file_.reset();
                return;
            }
            bytes.remove_prefix(static_cast<std::size_t>(n));
        }
    }

    unique_fd pipe_;
    sink* to_;
    stream_printer printer_;
    last_words words_;
    std::optional<report_lines> reports_;
    std::string others_;  // what came between reports
    bool shown_;
    unique_fd file_;
    int file_problem_ = 0;
};

/// A rank, or a host with its ranks where ddprun has those started elsewhere.
struct running_rank {
    running_rank(int number, pid_t process, output_of_rank stdout_pipe, output_of_rank stderr_pipe)
        : rank(number), pid(process), out(std::move(stdout_pipe)), err(std::move(stderr_pipe)) {}

    int rank;
    pid_t pid;  // its process group's number too
    std::chrono::steady_clock::time_point since = std::chrono::steady_clock::now();
    output_of_rank out, err;
    std::optional<ending> end;
    bool group_lives = true;                   // some process of its group does
    bool asked = true;                         // it was sent the last SIGUSR2
    std::string host = {};                     // see ending::host
    std::optional<flight_memory> flight = {};  // of a rank here
    std::string own_record = {};               // once it has ended: the file that it may have written itself
    unique_fd control = {};                    // a host's: what its ddprun is told
    std::string unsent = {};
};

}  // namespace ddprun
