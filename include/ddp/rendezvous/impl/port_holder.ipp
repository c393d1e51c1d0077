/// \file
/// What rendezvous/port_holder.hpp declares.
#pragma once

#include <arpa/inet.h>
#include <dirent.h>
#include <netinet/in.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string_view>
#include <utility>
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

/// An address as /proc/net/tcp and tcp6 write it, and its port.
[[gnu::cold]] DDP_DECL std::pair<std::string, unsigned> address_in_proc(::sockaddr const* address) {
    std::array<std::uint32_t, 4> words = {};
    std::size_t count = 1;
    unsigned port = 0;
    if (address->sa_family == AF_INET6) {
        ::sockaddr_in6 v6;
        std::memcpy(&v6, address, sizeof v6);
        std::memcpy(words.data(), &v6.sin6_addr, sizeof words);
        count = words.size();
        port = ntohs(v6.sin6_port);
    } else {
        ::sockaddr_in v4;
        std::memcpy(&v4, address, sizeof v4);
        words[0] = v4.sin_addr.s_addr;
        port = ntohs(v4.sin_port);
    }
    char text[33] = "";
    for (std::size_t k = 0; k < count; ++k) std::snprintf(text + 8 * k, 9, "%08X", words[k]);
    return {text, port};
}

/// The sockets that listen there, as links in /proc/PID/fd name them; if there are none, those of connections from there.
[[gnu::cold]] DDP_DECL std::vector<std::string> sockets_at(::sockaddr const* address) {
    auto const [wanted, port] = address_in_proc(address);
    std::vector<std::string> listening, others;
    for (char const* const table : {"/proc/net/tcp", "/proc/net/tcp6"}) {
        std::unique_ptr<std::FILE, int (*)(std::FILE*)> const lines(std::fopen(table, "re"), std::fclose);
        char line[512], at[33];
        while (lines && std::fgets(line, sizeof line, lines.get()) != nullptr) {
            unsigned its_port = 0, state = 0;
            unsigned long inode = 0;
            if (std::sscanf(line, " %*u: %32[0-9A-F]:%X %*s %X %*s %*s %*s %*u %*u %lu", at, &its_port, &state,
                            &inode) != 4)
                continue;
            bool const everywhere = std::string_view(at).find_first_not_of('0') == std::string_view::npos;
            if (its_port != port || inode == 0 || (!everywhere && at != wanted)) continue;
            constexpr unsigned listens = 0x0A;
            (state == listens ? listening : others).push_back(concat({"socket:[", inode, "]"}));
        }
    }
    return listening.empty() ? others : listening;
}

[[gnu::cold]] DDP_DECL std::string port_holder(::sockaddr const* address) {
    std::vector<std::string> const sockets = sockets_at(address);
    if (sockets.empty()) return "";
    for (std::string const& pid : numbers_in("/proc"))
        for (std::string const& fd : numbers_in(concat({"/proc/", pid, "/fd"}))) {
            char target[64];
            ssize_t const n = ::readlink(concat({"/proc/", pid, "/fd/", fd}).c_str(), target, sizeof target);
            std::string_view const link(target, static_cast<std::size_t>(std::max<ssize_t>(n, 0)));
            if (std::find(sockets.begin(), sockets.end(), link) == sockets.end()) continue;
            std::unique_ptr<std::FILE, int (*)(std::FILE*)> const name(
                std::fopen(concat({"/proc/", pid, "/comm"}).c_str(), "re"), std::fclose);
            char words[64] = "";
            if (name && std::fgets(words, sizeof words, name.get()) == nullptr) words[0] = '\0';
            std::string_view const called(words);
            return concat(
                {" (pid ", pid, called.empty() ? "" : ", ", printable(called.substr(0, called.find('\n'))), ")"});
        }
    return "";
}

}  // namespace ddp::detail
