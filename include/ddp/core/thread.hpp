/// \file
/// start_thread: a thread of the library's own, or an error that says what to do.
#pragma once

#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include <ddp/core/error.hpp>
#include <ddp/core/text.hpp>

namespace ddp::detail {

/// `whose` names it in the environment_error that is thrown where the system has no thread left.
template <class F>
[[nodiscard]] std::thread start_thread(std::string_view whose, F&& body) {
    try {
        return std::thread(std::forward<F>(body));
    } catch (std::system_error const& e) {
        throw environment_error(concat({whose, " did not start: ", std::string_view(e.what()),
                                        ". Raise the limit on threads (ulimit -u) or memory (ulimit -v)"}));
    }
}

}  // namespace ddp::detail
