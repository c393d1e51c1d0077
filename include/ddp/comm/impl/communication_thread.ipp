/// \file
/// What comm/communication_thread.hpp declares.
#pragma once

#include <pthread.h>
#include <time.h>

#include <chrono>
#include <cstdlib>
#include <string_view>
#include <thread>

#include <ddp/comm/communication_thread.hpp>
#include <ddp/core/error.hpp>
#include <ddp/core/text.hpp>

namespace ddp::detail {

[[gnu::cold]] DDP_DECL communication_thread chosen_thread(communication_thread asked, bool crowded) {
    using enum communication_thread;
    char const* const value = std::getenv("DDP_COMMUNICATION_THREAD");
    if (std::string_view const said = value != nullptr ? value : ""; !said.empty()) {
        asked = said == name_of(drives) ? drives : said == name_of(rests) ? rests : automatic;
        if (said != name_of(asked))
            throw environment_error(concat(
                {"DDP_COMMUNICATION_THREAD is \"", printable(said, 40), "\"; expected automatic, drives or rests"}));
    }
    if (asked != automatic) return asked;
    return crowded ? rests : drives;
}
DDP_DECL std::chrono::nanoseconds processor_time(std::thread& of) noexcept {
    ::clockid_t clock{};
    ::timespec spent{};
    if (::pthread_getcpuclockid(of.native_handle(), &clock) != 0 || ::clock_gettime(clock, &spent) != 0) return {};
    return std::chrono::seconds(spent.tv_sec) + std::chrono::nanoseconds(spent.tv_nsec);
}

}  // namespace ddp::detail
