/// \file
/// no_sync_guard: a scope in which backward only adds up.
#pragma once

#include <ddp/core/language.hpp>  // first

namespace ddp {

/// What data_parallel::no_sync returns. Guards may be nested; each is destroyed before its trainer, on its thread.
class no_sync_guard {
public:
    explicit no_sync_guard(int& depth) noexcept : depth_(depth) { ++depth_; }
    no_sync_guard(no_sync_guard const&) = delete;
    no_sync_guard& operator=(no_sync_guard const&) = delete;
    ~no_sync_guard() { --depth_; }

private:
    int& depth_;
};

}  // namespace ddp
