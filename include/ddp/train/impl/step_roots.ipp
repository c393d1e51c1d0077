/// \file
/// What train/step_roots.hpp declares.
#pragma once

#include <cstddef>
#include <exception>
#include <utility>

#include <ddp/comm/operation.hpp>
#include <ddp/train/step_roots.hpp>

namespace ddp::detail {

DDP_DECL void step_roots::start(std::size_t slot, task<> body, stage& of) {
    roots_[slot] = {};  // so that the new one can reuse its frame
    roots_[slot] = root(std::move(body), of);
    roots_[slot].start();
}
DDP_DECL task<> step_roots::root(task<> body, stage& of) {
    std::exception_ptr error;
    try {
        co_await body;
    } catch (collective_aborted const&) {
    } catch (...) {
        error = std::current_exception();
    }
    body = {};
    if (error) on_.fail_and_keep(error);
    if (--of.left == 0 && !on_.failed()) owner_.over(of);
}

}  // namespace ddp::detail
