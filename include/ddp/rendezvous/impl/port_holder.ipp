/// \file
/// What rendezvous/port_holder.hpp declares.
#pragma once

#include <dirent.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string_view>
#include <vector>

#include <ddp/core/text.hpp>
#include <ddp/rendezvous/port_holder.hpp>

namespace ddp::detail {

/// The names in a directory that are numbers; none if it cannot be read.
[[gnu::cold]] DDP_DECL std::vector<std::string> numbers_in(std::string const& directory) {
    std::vector<std::string> found;
    std::unique_ptr<::DIR, int (*)(::DIR*)> const open(::opendir(directory.c_str()), ::closedir);
    while (::dirent const* const one = open ? ::readdir(open.get()) : nullptr)
        if (std::string_view(one->d_name).find_first_not_of("0123456789") == std::string_view::npos)
            found.emplace_back(one->d_name);
    return found;
}

[[gnu::cold]] DDP_DECL std::string port_holder(std::uint16_t port) {
    using file = std::unique_ptr<std::FILE, int (*)(std::FILE*)>;
    std::vector<std::string> sockets;  // as links in /proc/PID/fd name them; those that listen first
    for (char const* const table : {"/proc/net/tcp", "/proc/net/tcp6"}) {
        file const lines(std::fopen(table, "re"), std::fclose);
        char line[512];
        while (lines && std::fgets(line, sizeof line, lines.get()) != nullptr) {
            unsigned local = 0, state = 0;
            unsigned long inode = 0;
            if (std::sscanf(line, " %*u: %*[0-9A-F]:%X %*s %X %*s %*s %*s %*u %*u %lu", &local, &state, &inode) != 3)
                continue;
            if (local != port || inode == 0) continue;
            constexpr unsigned listens = 0x0A;
            sockets.insert(state == listens ? sockets.begin() : sockets.end(), concat({"socket:[", inode, "]"}));
        }
    }
    if (sockets.empty()) return "";
    auto best = sockets.end();
    std::string holder;
    for (std::string const& pid : numbers_in("/proc"))
        for (std::string const& fd : numbers_in("/proc/" + pid + "/fd")) {
            char target[64];
            ssize_t const n = ::readlink(("/proc/" + pid + "/fd/" + fd).c_str(), target, sizeof target);
            std::string_view const link(target, static_cast<std::size_t>(std::max<ssize_t>(n, 0)));
            auto const at = std::find(sockets.begin(), best, link);
            if (at == best) continue;
            best = at;
            file const name(std::fopen(("/proc/" + pid + "/comm").c_str(), "re"), std::fclose);
            char words[64] = "";
            if (name && std::fgets(words, sizeof words, name.get()) == nullptr) words[0] = '\0';
            std::string_view const called(words);
            holder = concat(
                {" (pid ", pid, called.empty() ? "" : ", ", printable(called.substr(0, called.find('\n'))), ")"});
        }
    return holder;
}

}  // namespace ddp::detail
