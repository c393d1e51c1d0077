/// \file
/// ddp-perf under ddprun, which it starts itself.
#pragma once

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include <unistd.h>

namespace ddp_perf {

/// Becomes "ddprun -n N --prefix none -- ddp-perf …": the ddprun that is beside this program, or else on PATH.
/// Returns only by throwing.
[[noreturn]] inline void continue_under_ddprun(int ranks, int argc, char const* const* argv) {
    char own[4096];
    ssize_t const length = ::readlink("/proc/self/exe", own, sizeof own);
    std::string const self = length > 0 && length < static_cast<ssize_t>(sizeof own)
                                 ? std::string(own, static_cast<std::size_t>(length))
                                 : argv[0];
    std::string const beside = self.substr(0, self.rfind('/') + 1) + "ddprun";
    bool const is_beside = beside != "ddprun" && ::access(beside.c_str(), X_OK) == 0;

    std::vector<std::string> words{
        is_beside ? beside : "ddprun", "-n", std::to_string(ranks), "--prefix", "none", "--", self};
    words.insert(words.end(), argv + 1, argv + argc);
    std::vector<char*> pointers;
    pointers.reserve(words.size() + 1);
    for (std::string& word : words) pointers.push_back(word.data());
    pointers.push_back(nullptr);
    ::execvp(pointers.front(), pointers.data());
    throw std::runtime_error("ddprun, which starts ranks that are processes, is neither beside " + self +
                             " nor on PATH (" + std::strerror(errno) +
                             "). Put it there, or start the ranks by another "
                             "launcher, or say --transport inproc.");
}

}  // namespace ddp_perf
