/// \file
/// on_threads: a function on several threads, and what each call returns or throws. std::async would do it too, but compiles
/// some 25 functions for each function that it is given.
#pragma once

#include <cstddef>
#include <exception>
#include <optional>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <ddp/core/function_ref.hpp>

namespace ddp::test {

/// body(rank) for each rank below `ranks`, at once. Waits for all; then throws the first rank's exception, if any threw.
inline void run_on_threads(int ranks, function_ref<void(int)> body) {
    std::vector<std::exception_ptr> errors(static_cast<std::size_t>(ranks));
    std::vector<std::thread> running;
    for (int rank = 0; rank < ranks; ++rank)
        running.emplace_back([&errors, body, rank] {
            try {
                body(rank);
            } catch (...) {
                errors[static_cast<std::size_t>(rank)] = std::current_exception();
            }
        });
    for (std::thread& one : running) one.join();
    for (std::exception_ptr const& error : errors)
        if (error) std::rethrow_exception(error);
}
/// The same, and returns what each rank's body has returned.
template <class Body>
auto on_threads(int ranks, Body const& body) {
    using result = std::remove_cvref_t<decltype(body(0))>;
    if constexpr (std::is_void_v<result>) {
        run_on_threads(ranks, [&](int rank) { body(rank); });
    } else {
        std::vector<std::optional<result>> each(static_cast<std::size_t>(ranks));
        run_on_threads(ranks, [&](int rank) { each[static_cast<std::size_t>(rank)].emplace(body(rank)); });
        std::vector<result> all;
        for (std::optional<result>& one : each) all.push_back(std::move(*one));
        return all;
    }
}

}  // namespace ddp::test
