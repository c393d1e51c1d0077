/// \file
/// descriptors_left: a process that may open few more descriptors, for a while.
#pragma once

#include <sys/resource.h>
#include <unistd.h>

#include <stdexcept>
#include <vector>

namespace ddp::test {

/// While it lives, this process may open only so many more descriptors.
class descriptors_left {
public:
    explicit descriptors_left(int count) {
        std::vector<int> next;
        while (static_cast<int>(next.size()) <= count) next.push_back(::dup(STDERR_FILENO));
        for (int const fd : next) ::close(fd);
        ::getrlimit(RLIMIT_NOFILE, &before_);
        ::rlimit const few{static_cast<::rlim_t>(next.back()), before_.rlim_max};
        if (next.back() < 0 || ::setrlimit(RLIMIT_NOFILE, &few) != 0) throw std::runtime_error("no limit");
    }
    descriptors_left(descriptors_left const&) = delete;
    descriptors_left& operator=(descriptors_left const&) = delete;
    ~descriptors_left() { ::setrlimit(RLIMIT_NOFILE, &before_); }

private:
    ::rlimit before_{};
};

}  // namespace ddp::test
