/// \file
/// no_room_for_stacks: a process that can start no thread, for a while.
#pragma once

#include <pthread.h>

#include <cstddef>
#include <stdexcept>

namespace ddp::test {

/// While it lives, this process can start no thread: each would need a stack of a petabyte.
class no_room_for_stacks {
public:
    no_room_for_stacks() {
        ::pthread_attr_t huge;
        if (::pthread_getattr_default_np(&before_) != 0 || ::pthread_getattr_default_np(&huge) != 0 ||
            ::pthread_attr_setstacksize(&huge, std::size_t{1} << 50) != 0 || ::pthread_setattr_default_np(&huge) != 0)
            throw std::runtime_error("the size of stacks cannot be set");
    }
    no_room_for_stacks(no_room_for_stacks const&) = delete;
    no_room_for_stacks& operator=(no_room_for_stacks const&) = delete;
    ~no_room_for_stacks() { ::pthread_setattr_default_np(&before_); }

private:
    ::pthread_attr_t before_{};
};

}  // namespace ddp::test
