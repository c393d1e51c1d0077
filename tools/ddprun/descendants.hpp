/// \file
/// Ends what the ranks have started and left behind.
#pragma once

#include <cctype>
#include <charconv>
#include <csignal>
#include <fstream>
#include <string>
#include <vector>

#include <dirent.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

namespace ddprun {

/// The parent of a process; 0 if it has gone.
[[nodiscard]] inline pid_t parent_of(std::string const& pid) {
    std::ifstream file("/proc/" + pid + "/stat");
    std::string stat;
    std::getline(file, stat, '\0');  // all of it; without throwing where the process has gone since it was opened
    std::size_t const name_end = stat.rfind(')');  // "pid (name) state parent …"; a name may have blanks
    if (name_end == std::string::npos || name_end + 4 > stat.size()) return 0;
    pid_t parent = 0;
    std::from_chars(stat.data() + name_end + 4, stat.data() + stat.size(), parent);
    return parent;
}

/// The processes whose parent is this one: those that lost theirs too, as ddprun is a subreaper.
[[nodiscard]] inline std::vector<pid_t> children() {
    std::vector<pid_t> found;
    DIR* const directory = ::opendir("/proc");
    if (directory == nullptr) return found;
    while (dirent const* const entry = ::readdir(directory)) {
        if (std::isdigit(static_cast<unsigned char>(entry->d_name[0])) == 0) continue;
        if (parent_of(entry->d_name) == ::getpid()) found.push_back(static_cast<pid_t>(std::stol(entry->d_name)));
    }
    ::closedir(directory);
    return found;
}

/// Kills and reaps every child but `spared`, then the children that they leave to us, until none is left or about a
/// second has passed (a process in the middle of a disk or driver call does not die sooner).
inline void end_descendants(pid_t spared) {
    for (int attempt = 0; attempt < 100; ++attempt) {
        bool any = false;
        for (pid_t const child : children()) {
            if (child == spared) continue;
            ::kill(child, SIGKILL);
            if (::waitpid(child, nullptr, WNOHANG) == 0) ::poll(nullptr, 0, 10);
            any = true;
        }
        if (!any) return;
    }
}

}  // namespace ddprun
