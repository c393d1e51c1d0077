// A line that shows how far training is: redrawn in place on a terminal, plain lines elsewhere.
#pragma once

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

class progress_bar {
public:
    // Only rank 0 shows anything. A launcher that stands between us and the terminal says so in DDP_TTY.
    progress_bar(bool shown, std::size_t steps) : shown_(shown), steps_(steps) {
        char const* const launcher = std::getenv("DDP_TTY");
        // mpirun gives its ranks a terminal whether it has one or not.
        bool const direct = std::getenv("OMPI_COMM_WORLD_SIZE") == nullptr;
        terminal_ = launcher != nullptr ? std::string_view(launcher) == "1" : direct && isatty(STDOUT_FILENO) != 0;
    }

    // `step` of all steps are done; `text` says the rest.
    void show(std::size_t step, double samples_per_second, std::string_view text) {
        if (!shown_ || !terminal_) return;
        auto const now = monotonic_clock::now();
        if (step != steps_ && now - last_ < std::chrono::milliseconds(100)) return;
        last_ = now;
        constexpr std::size_t width = 30;
        std::size_t const filled = steps_ == 0 ? width : width * step / steps_;
        double const spent = std::chrono::duration<double>(now - began_).count();
        double const left = step == 0 ? 0 : spent / static_cast<double>(step) * static_cast<double>(steps_ - step);
        std::printf("\r[%s%s] %3.0f%%  %s  %.0f samples/s  %.0f s left \033[K", std::string(filled, '#').c_str(),
                    std::string(width - filled, '.').c_str(),
                    100.0 * static_cast<double>(step) / static_cast<double>(steps_ == 0 ? 1 : steps_),
                    std::string(text).c_str(), samples_per_second, left);
        std::fflush(stdout);
    }
    // A line that stays.
    void line(std::string_view text) {
        if (!shown_) return;
        std::printf("%s%.*s\n", terminal_ ? "\r\033[K" : "", static_cast<int>(text.size()), text.data());
        std::fflush(stdout);
    }

private:
    using monotonic_clock = std::chrono::steady_clock;
    bool shown_;
    bool terminal_ = false;
    std::size_t steps_;
    monotonic_clock::time_point began_ = monotonic_clock::now();
    monotonic_clock::time_point last_ = {};
};
