/// \file
/// run_user_code: the user's code within a trainer's step or meeting, for which the other ranks wait.
#pragma once

#include <ddp/core/language.hpp>  // first

#include <exception>
#include <utility>

namespace ddp::detail {

/// Runs f(), the user's code. If it throws, passes the exception to fail(), which tells the other ranks, and rethrows
/// it.
template <class F, class Fail>
decltype(auto) run_user_code(F&& f, Fail&& fail) {
    std::exception_ptr thrown;
    try {
        return std::forward<F>(f)();
    } catch (...) {
        thrown = std::current_exception();
    }
    fail(thrown);  // not within the handler: it may wait
    std::rethrow_exception(thrown);
}

}  // namespace ddp::detail
