/// \file
/// Hosts of -H and --hostfile: how the ddprun here tells the one there what to start, and that the job is over.
///
/// Over ssh goes only "ddprun --agent": what is to be started, the environment and the job's secret follow on its standard
/// input, so nothing of it is seen in a list of processes or read by a shell. After that each byte is a signal for the
/// ranks, and the end of the input ends the job.
#pragma once

#include <cerrno>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <ddp/core/version.hpp>

#include "listener.hpp"
#include "options.hpp"
#include "posix.hpp"
#include "secret.hpp"

extern char** environ;

namespace ddprun {

inline constexpr std::size_t longest_orders = std::size_t{4} << 20;

/// As a shell has to read it.
[[nodiscard]] inline std::string quoted(std::string const& word) {
    std::string_view constexpr plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./=:,+@%";
    if (!word.empty() && word.find_first_not_of(plain) == std::string::npos) return word;
    std::string result = "'";
    for (char const c : word) result += c == '\'' ? std::string("'\\''") : std::string(1, c);
    return result + "'";
}

[[nodiscard]] inline std::string own_path() {
    char path[PATH_MAX];
    ssize_t const n = ::readlink("/proc/self/exe", path, sizeof path);
    if (n <= 0) throw_errno("/proc/self/exe");
    return {path, static_cast<std::size_t>(n)};
}

/// Whether `name` is one of this machine's: one of its addresses is loopback, or an interface here has it.
[[nodiscard]] inline bool is_this_host(std::string const& name) {
    char own[256] = {};
    ::gethostname(own, sizeof own - 1);
    if (name == "localhost" || name == "127.0.0.1" || name == "::1" || name == own) return true;  // asks nobody

    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    addrinfo* found = nullptr;
    if (::getaddrinfo(name.c_str(), nullptr, &hints, &found) != 0) return false;  // ssh may know it
    std::unique_ptr<addrinfo, void (*)(addrinfo*)> const names(found, ::freeaddrinfo);
    ifaddrs* interfaces = nullptr;
    if (::getifaddrs(&interfaces) != 0) interfaces = nullptr;
    std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> const own_ones(interfaces, [](ifaddrs* all) {
        if (all != nullptr) ::freeifaddrs(all);
    });
    auto const same = [](sockaddr const* a, sockaddr const* b) {
        if (b == nullptr || a->sa_family != b->sa_family) return false;
        if (a->sa_family == AF_INET)
            return reinterpret_cast<sockaddr_in const*>(a)->sin_addr.s_addr ==
                   reinterpret_cast<sockaddr_in const*>(b)->sin_addr.s_addr;
        return a->sa_family == AF_INET6 &&
               std::memcmp(&reinterpret_cast<sockaddr_in6 const*>(a)->sin6_addr,
                           &reinterpret_cast<sockaddr_in6 const*>(b)->sin6_addr, sizeof(in6_addr)) == 0;
    };
    for (addrinfo const* at = found; at != nullptr; at = at->ai_next) {
        sockaddr_storage where{};
        std::memcpy(&where, at->ai_addr, at->ai_addrlen);
        if (is_loopback(where)) return true;
        for (ifaddrs const* one = interfaces; one != nullptr; one = one->ifa_next)
            if (same(at->ai_addr, one->ifa_addr)) return true;
    }
    return false;
}

/// What to run here so that a ddprun there waits for its orders. `here`: whether the host is this one.
[[nodiscard]] inline std::vector<std::string> agent_command(options const& with, std::string const& host, bool here) {
    std::string const self = own_path();
    if (with.launch_agent.empty() && here) return {self, "--agent"};
    std::vector<std::string> command = with.launch_agent;
    if (command.empty()) command = {"ssh", "-x", "-T", "-o", "BatchMode=yes"};  // nobody is there to type a password
    command.push_back(host);
    command.push_back(quoted(self) + " --agent");
    return command;
}

/// Variables of ours that ranks elsewhere get: those of the library and of OpenMP, and those that -x names.
[[nodiscard]] inline std::vector<std::string> carried_variables(options const& with) {
    std::vector<std::string> result;
    for (char** entry = environ; *entry != nullptr; ++entry) {
        std::string_view const text = *entry;
        std::string_view const name = text.substr(0, text.find('='));
        bool carried = name.starts_with("OMP_") || (name.starts_with("DDP_") && !name.ends_with("_FD") &&
                                                    name != "DDP_JOB_ID" && name != "DDP_TTY");
        for (std::string const& one : with.carried) carried = carried || one == name;
        if (carried) result.emplace_back(text);
    }
    for (std::string const& one : with.carried)
        if (one.find('=') != std::string::npos) result.push_back(one);
    return result;
}

struct orders {
    options with;
    secret_bytes secret{};
    std::string job_id;
    int restarts = 0;
    std::string token = {};  ///< of reports
};

/// "ddprun 0.1.0 LENGTH\n", then LENGTH bytes: texts, each ended by a zero byte.
[[nodiscard]] inline std::string write_orders(orders const& all, std::string const& directory) {
    std::string text;
    auto const put = [&](std::string const& item) { text.append(item).push_back('\0'); };
    options const& with = all.with;
    for (long long const number : {static_cast<long long>(with.local_size), static_cast<long long>(with.nodes),
                                   static_cast<long long>(with.node_rank), static_cast<long long>(with.first_rank),
                                   static_cast<long long>(with.total), static_cast<long long>(with.master_port),
                                   static_cast<long long>(with.prefix), static_cast<long long>(with.grace.count()),
                                   static_cast<long long>(with.bind), static_cast<long long>(with.max_restarts),
                                   static_cast<long long>(with.in_files), static_cast<long long>(with.shown),
                                   static_cast<long long>(with.verbose), static_cast<long long>(all.restarts)})
        put(std::to_string(number));
    for (std::string const& item : {with.master_addr, with.log_dir, with.flight_dir, all.job_id, all.token, directory})
        put(item);
    std::string secret;
    for (unsigned char const byte : all.secret) secret += hexadecimal(byte);
    put(secret);
    for (auto const* list : {&with.carried, &with.command}) {
        put(std::to_string(list->size()));
        for (std::string const& item : *list) put(item);
    }
    if (text.size() > longest_orders)
        throw launch_error(exit_launcher, "the command and its environment are too long to send to another host");
    return "ddprun " + std::to_string(ddp::version_major) + "." + std::to_string(ddp::version_minor) + "." +
           std::to_string(ddp::version_patch) + " " + std::to_string(text.size()) + "\n" + text;
}

/// Reads them from standard input, and goes to the directory that they name.
[[nodiscard]] inline orders read_orders() {
    auto const refuse = [](std::string const& why) -> launch_error {
        return {exit_launcher, "--agent is for ddprun itself, which starts it with -H: " + why};
    };
    auto const read_byte = [&] {
        char byte = 0;
        ssize_t n;
        while ((n = ::read(STDIN_FILENO, &byte, 1)) < 0 && errno == EINTR) {
        }
        if (n != 1) throw refuse("no orders on standard input");
        return byte;
    };
    std::string line;
    for (char c; (c = read_byte()) != '\n' && line.size() < 64;) line += c;
    std::string const mine = "ddprun " + std::to_string(ddp::version_major) + "." + std::to_string(ddp::version_minor) +
                             "." + std::to_string(ddp::version_patch) + " ";
    if (!line.starts_with(mine))
        throw refuse("another version gave the orders; install the same ddprun, under the same path, on every host");
    std::size_t left = static_cast<std::size_t>(
        detail::parse_integer("orders", line.substr(mine.size()), 0, static_cast<int>(longest_orders)));
    std::string text(left, '\0');
    for (std::size_t got = 0; got < left;) {
        ssize_t const n = ::read(STDIN_FILENO, text.data() + got, left - got);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) throw refuse("the orders end early");
        got += static_cast<std::size_t>(n);
    }

    std::string_view rest = text;
    auto const take = [&] {
        auto const end = rest.find('\0');
        if (end == std::string_view::npos) throw refuse("the orders are malformed");
        std::string item(rest.substr(0, end));
        rest.remove_prefix(end + 1);
        return item;
    };
    auto const number = [&](int least, int most) { return detail::parse_integer("orders", take(), least, most); };
    orders all;
    options& with = all.with;
    with.agent = true;
    with.local_size = number(1, 4096);
    with.nodes = number(1, 65536);
    with.node_rank = number(0, 65535);
    with.first_rank = number(0, 65535);
    with.total = number(1, 65536);
    with.master_port = static_cast<std::uint16_t>(number(0, 65535));
    with.prefix = static_cast<prefix_mode>(number(0, 2));
    with.grace = std::chrono::milliseconds(number(0, 3600000));
    with.bind = number(0, 1) != 0;
    with.max_restarts = number(0, 1000000);
    with.in_files = static_cast<unsigned>(number(0, 3));
    with.shown = static_cast<unsigned>(number(0, 3));
    with.verbose = number(0, 1) != 0;
    all.restarts = number(0, 1000000);
    with.master_addr = take();
    with.log_dir = take();
    with.flight_dir = take();
    all.job_id = take();
    all.token = take();
    std::string const directory = take();
    std::string const secret = take();
    if (secret.size() != 2 * all.secret.size()) throw refuse("the orders are malformed");
    for (std::size_t i = 0; i < all.secret.size(); ++i)
        all.secret[i] = static_cast<unsigned char>(std::stoul(secret.substr(2 * i, 2), nullptr, 16));
    for (auto* list : {&with.carried, &with.command})
        for (int left_of_list = number(0, 100000); left_of_list > 0; --left_of_list) list->push_back(take());
    if (with.command.empty()) throw refuse("the orders are malformed");
    if (::chdir(directory.c_str()) != 0) throw_errno("cannot change to " + directory + " on this host");
    return all;
}

}  // namespace ddprun
