/// \file
/// What rendezvous/bootstrap.hpp declares.
#pragma once

#include <fcntl.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <ddp/comm/cores.hpp>
#include <ddp/comm/host.hpp>
#include <ddp/core/contract.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/core/environment_flag.hpp>
#include <ddp/core/text.hpp>
#include <ddp/rendezvous/bootstrap.hpp>
#include <ddp/rendezvous/environment.hpp>
#include <ddp/rendezvous/flight_memory.hpp>
#include <ddp/rendezvous/job_secret.hpp>
#include <ddp/rendezvous/port_holder.hpp>
#include <ddp/rendezvous/rank_settings.hpp>
#include <ddp/rendezvous/tcp_memory_paths.hpp>
#include <ddp/rendezvous/tcp_mesh.hpp>
#include <ddp/rendezvous/tcp_ports.hpp>
#include <ddp/rendezvous/tcp_socket.hpp>
#include <ddp/rendezvous/tcp_store.hpp>
#include <ddp/rendezvous/tcp_store_server.hpp>
#include <ddp/transport/framed/framed.hpp>
#include <ddp/transport/framed/tcp.hpp>

namespace ddp {

namespace detail {

/// From the system's generator.
[[gnu::cold]] DDP_DECL std::uint64_t random_number() {
    std::uint64_t number = 0;
    if (::getentropy(&number, sizeof number) != 0)
        throw rendezvous_error("the system gives no random numbers (getentropy)");
    return number;
}

[[gnu::cold]] DDP_DECL std::vector<std::uint16_t> master_ports(job const& j) {
    if (!j.port_is_launchers) return {j.master_port};
    std::vector<std::uint16_t> ports;
    for (unsigned i = 1; i <= 16; ++i)  // unprivileged ones, spread so that neighbouring jobs seldom ask for the same
        ports.push_back(static_cast<std::uint16_t>(1024 + (j.master_port + 97 * i) % (65536 - 1024)));
    return ports;
}

/// A cluster's name service may learn of rank 0's host after this rank has started. (One question may take longer than until
/// `until`: the system's resolver has times of its own.)
[[gnu::cold]] DDP_DECL std::vector<tcp_endpoint> resolve_master(job const& j, time_point until) {
    // Not Asio's resolver: it would compile a thread pool and its handlers into every program.
    ::addrinfo wanted{};
    wanted.ai_socktype = SOCK_STREAM;
    ::addrinfo* found = nullptr;
    int problem = 0;
    for (std::chrono::milliseconds pause{50};; pause = std::min(pause * 2, std::chrono::milliseconds{1000})) {
        problem = ::getaddrinfo(j.master_addr.c_str(), nullptr, &wanted, &found);
        bool const may_come = problem == EAI_AGAIN || problem == EAI_NONAME || problem == EAI_NODATA;
        if (!may_come || monotonic_clock::now() + pause >= until) break;
        std::this_thread::sleep_for(pause);
    }
    std::vector<tcp_endpoint> all;
    for (::addrinfo const* one = problem == 0 ? found : nullptr; one != nullptr; one = one->ai_next) {
        tcp_endpoint at;
        if (one->ai_family != AF_INET && one->ai_family != AF_INET6) continue;
        std::memcpy(at.data(), one->ai_addr, one->ai_addrlen);
        for (std::uint16_t const port : master_ports(j)) {
            at.port(port);
            all.push_back(at);
        }
    }
    if (problem == 0) ::freeaddrinfo(found);
    if (all.empty())
        throw rendezvous_error(detail::concat(
            {"MASTER_ADDR \"", j.master_addr,
             "\" has no address: ", problem == 0 ? "none that is an internet address" : ::gai_strerror(problem),
             ". Expected the name or address of rank 0's host"}));
    return all;
}

[[gnu::cold]] DDP_DECL void expect_reachable(job const& j, std::vector<boost::asio::ip::address> const& at) {
    if (!j.several_hosts || is_loopback(j.master_addr) || at.empty()) return;
    for (boost::asio::ip::address const& one : at)
        if (!one.is_loopback()) return;
    throw rendezvous_error(concat(
        {"MASTER_ADDR \"", j.master_addr, "\" is ", at.front().to_string(), " on host ", this_host_name(),
         " (look at /etc/hosts there; Debian writes such a line for a host's own name), which other hosts cannot "
         "reach, and this job seems to have ranks on several: ",
         j.source,
         ". Set MASTER_ADDR to a numeric address of rank 0's host that all can reach, or to 127.0.0.1 "
         "if all ranks are on this machine"}));
}

/// Whether ranks prove the secret; otherwise they show it, or there is none. Throws if that is not allowed for addresses that
/// other hosts reach, or would be shown at ports that are not known to be rank 0's.
[[gnu::cold]] DDP_DECL bool must_prove(job const& j, std::vector<tcp_endpoint> const& at, job_secret const& secret,
                                       tcp_options const& options) {
    auto const open = std::find_if(at.begin(), at.end(), [](auto const& a) { return !a.address().is_loopback(); });
    bool const capable = options.security != nullptr && secret.given();
    std::string const lack = options.security == nullptr
                                 ? "this program was built without OpenSSL: use ddp::secure_tcp, link ddp::secure"
                                 : "there is no secret: set DDP_SECRET_FILE to the same file on all hosts";
    if ((options.encrypt || options.prove) && !capable)
        throw environment_error(
            concat({options.encrypt ? "DDP_TLS=1 (run_options.encrypt, tcp_options.encrypt)" : "tcp_options.prove",
                    " asks for what this rank cannot do: ", lack}));
    if (options.encrypt || options.prove) return true;
    if (open == at.end() && secret.given() && !capable && j.port_is_launchers)
        throw environment_error(
            "there is a secret, but the launcher itself listens at MASTER_PORT: ranks look for rank 0 at several "
            "ports, and this program, which cannot prove the secret, would show it to whatever listens at one of them. "
            "Instead, use ddp::secure_tcp, link ddp::secure; or start the job with ddprun; or, if you trust all users "
            "of this machine, unset DDP_SECRET_FILE and DDP_SECRET_FD");
    if (open == at.end() || (options.insecure && !capable)) return false;
    if (capable) return true;
    throw rendezvous_error(
        concat({"MASTER_ADDR \"", j.master_addr, "\" is ", text_of(*open), ", which other hosts can reach, and ", lack,
                ". Or use 127.0.0.1, or, on a network where you trust everybody, set DDP_INSECURE=1, "
                "run_options.insecure or tcp_options.insecure"}));
}

/// Asio opens a few of its own with the first socket of a process.
[[gnu::cold]] DDP_DECL void expect_descriptors(job const& j) {
    try {
        tcp_socket const first(tcp_context());
    } catch (boost::system::system_error const& e) {
        if (!out_of_descriptors(e.code())) throw;
        throw too_many_files(j.rank, j.size, "any socket", e.code().value());
    }
}

[[gnu::cold]] DDP_DECL tcp_acceptor listen_as_master(job const& j, std::vector<tcp_endpoint> const& at, int inherited,
                                                     bool anywhere) {
    tcp_acceptor acceptor(tcp_context());
    boost::system::error_code error;
    if (inherited >= 0) {
        ::sockaddr_storage name{};
        ::socklen_t size = sizeof name;
        int listening = 0;
        ::socklen_t flag = sizeof listening;
        if (::getsockname(inherited, reinterpret_cast<::sockaddr*>(&name), &size) != 0 ||
            ::getsockopt(inherited, SOL_SOCKET, SO_ACCEPTCONN, &listening, &flag) != 0 || listening == 0)
            throw rendezvous_error(detail::concat(
                {"descriptor ", inherited, " (DDP_LISTEN_FD) is not a listening socket; rank 0 must inherit it open"}));
        ::fcntl(inherited, F_SETFD, FD_CLOEXEC);
        acceptor.assign(name.ss_family == AF_INET6 ? tcp::tcp::v6() : tcp::tcp::v4(), inherited, error);
        if (!error && !anywhere && !acceptor.local_endpoint().address().is_loopback())
            throw rendezvous_error(
                detail::concat({"the inherited socket listens on ", text_of(acceptor.local_endpoint()),
                                ", which other hosts can reach, but MASTER_ADDR is loopback. Give the address of that "
                                "interface, with a secret (DDP_SECRET_FILE) or DDP_INSECURE=1"}));
        if (!error) return acceptor;
    } else {
        for (tcp_endpoint const& one : at) {
            if (one.address() != at.front().address()) break;
            error = listen_at(acceptor, one);
            if (!error) return acceptor;
            if (error != boost::asio::error::address_in_use) break;
        }
    }
    std::string const where = text_of(at.front());
    if (out_of_descriptors(error))
        throw too_many_files(0, j.size, concat({"a socket that listens at ", where}), error.value());
    if (error == boost::asio::error::address_in_use)
        throw rendezvous_error(detail::concat(
            {"port ", at.front().port(), j.port_is_launchers ? " and all others that rank 0 may take are" : " is",
             " in use by another program on ", where, port_holder(at.front().data()),
             ", or by another process with RANK=0. Choose another MASTER_PORT, or start the job with ddprun, which "
             "finds a free one"}));
    throw rendezvous_error(detail::concat({"rank 0 cannot listen on ", where, ": ", error.message(),
                                           ". MASTER_ADDR must be an address of the host that runs rank 0 (with "
                                           "ddprun, --node-rank 0)"}));
}

[[gnu::cold]] DDP_DECL void choose_congestion_control(int fd, std::string const& wanted, bool same_host) {
    auto const set = [&](std::string_view name) {
        return ::setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name.data(), static_cast<::socklen_t>(name.size())) == 0;
    };
    if (wanted.empty()) {
        if (same_host) set("cubic");  // not there: the system's own will do
        return;
    }
    if (!set(wanted))
        throw rendezvous_error(
            detail::concat({"this host refuses TCP congestion control \"", wanted,
                            "\" (tcp_options.congestion, DDP_TCP_CONGESTION): ", std::strerror(errno),
                            ". sysctl net.ipv4.tcp_available_congestion_control lists what it has, "
                            "net.ipv4.tcp_allowed_congestion_control what any program may choose"}));
}

}  // namespace detail

[[gnu::cold]] DDP_DECL std::unique_ptr<tcp_transport> connect_tcp(job const& j, tcp_options options) {
    DDP_EXPECTS(j.size >= 1 && j.rank >= 0 && j.rank < j.size, "connect_tcp: job.rank must be in [0, job.size)");
    options.times.validate();
    detail::use_flight_memory();
    framed_options framing{.times = options.times, .early_bytes = options.early_bytes, .spin = options.spin};
    std::vector<framed_peer<tcp_stream>> peers;
    auto const variable = [](char const* name) {
        char const* const value = std::getenv(name);
        return std::string(value != nullptr ? value : "");
    };
    if (j.size == 1) {  // it needs neither the secret nor the socket, and programs that it starts inherit neither
        for (char const* const name : {"DDP_SECRET_FD", "DDP_LISTEN_FD"})
            if (int const fd = std::atoi(variable(name).c_str()); fd > STDERR_FILENO) ::fcntl(fd, F_SETFD, FD_CLOEXEC);
        return std::make_unique<tcp_transport>(0, 1, std::move(peers), framing);
    }

    options.insecure = detail::environment_flag("DDP_INSECURE", false) || options.insecure;
    options.encrypt = detail::environment_flag("DDP_TLS", false) || options.encrypt;
    if (std::string const fd = variable("DDP_LISTEN_FD"); j.rank == 0 && options.listen_descriptor < 0 && !fd.empty())
        options.listen_descriptor =
            detail::environment_number("DDP_LISTEN_FD", fd, 0, 1 << 20, "an inherited descriptor");

    if (options.ports.empty()) options.ports = variable("DDP_PORTS");
    if (options.congestion.empty()) options.congestion = variable("DDP_TCP_CONGESTION");
    bool const in_memory = detail::environment_flag("DDP_SHARE_MEMORY", true) && options.share_memory;
    framing.host = host_named(options.host);
    std::uint64_t const machine = options.host.empty() && variable("DDP_HOST").empty() ? this_machine() : 0;

    std::pair<int, int> const ports = detail::port_range(options.ports);
    std::uint64_t const id = j.id.empty() ? 0 : digest{}.add(std::string_view(j.id)).value();
    time_point const joined = monotonic_clock::now() + options.times.join;  // one deadline for all that follows
    std::vector<detail::tcp_endpoint> servers = detail::resolve_master(j, joined);
    std::vector<boost::asio::ip::address> addresses_of_0;
    for (detail::tcp_endpoint const& one : servers) addresses_of_0.push_back(one.address());
    detail::expect_reachable(j, addresses_of_0);
    detail::kept_secret secret{job_secret::from_environment()};
    auto const is_local = [](detail::tcp_endpoint const& at) { return at.address().is_loopback(); };
    bool const local = std::all_of(servers.begin(), servers.end(), is_local);
    // Another program may own rank 0's port, on loopback too: a rank that can prove the secret does not show it there. The
    // nonce that it gets in return is then enough between the ranks of one machine.
    bool const proves = detail::must_prove(j, servers, secret, options);
    std::shared_ptr<tcp_security> const security =
        options.security != nullptr && secret.given() ? options.security(secret, options.encrypt) : nullptr;
    tcp_security const* const between_ranks = proves ? security.get() : nullptr;
    bool const anywhere = proves || options.insecure;
    if (security != nullptr || !local) secret.wipe();  // shown only where no one else can read it
    if (!local && !proves && j.rank == 0)
        std::fprintf(stderr,
                     "ddp: warning: connections between hosts are neither authenticated nor encrypted "
                     "(insecure was asked for): whoever reaches %s can join this job and read what it sends\n",
                     detail::text_of(servers.front()).c_str());
    detail::expect_descriptors(j);
    std::unique_ptr<tcp_store_server> server;
    // Ranks come at different times: the server's deadline is the one for all; this one counts only if the server fails.
    time_point const until = joined + 2 * options.times.handshake;
    if (j.rank == 0) {
        std::uint64_t const nonce = detail::random_number();
        detail::tcp_acceptor acceptor = detail::listen_as_master(j, servers, options.listen_descriptor, anywhere);
        servers = {acceptor.local_endpoint()};
        try {
            server = std::make_unique<tcp_store_server>(std::move(acceptor), j.size, id, nonce, options.times, secret,
                                                        security, joined);
        } catch (std::system_error const& e) {
            if (!detail::out_of_descriptors(e.code().value())) throw;
            throw detail::too_many_files(0, j.size, "what serves the other ranks", e.code().value());
        }
    }
    auto const said = [&](std::exception const& e) {
        error const* const ours = dynamic_cast<error const*>(&e);
        return ours != nullptr ? detail::text_without_code(*ours)
                               : detail::concat({"rank ", j.rank, " (", detail::this_process(),
                                                 ") failed during start-up: ", std::string_view(e.what())});
    };
    tcp_store store = [&] {
        try {
            return tcp_store(servers, j.rank, j.size, id, joined, j.port_is_launchers && j.rank != 0, secret,
                             options.times, security.get());
        } catch (std::exception const& e) {
            if (server != nullptr) server->fail(said(e));
            throw;
        }
    }();
    framing.job = store.nonce();
    std::vector<detail::peer_address> addresses(static_cast<std::size_t>(j.size));
    std::vector<detail::tcp_mesh::connection> met;
    std::optional<detail::tcp_acceptor> acceptor;  // it and its connections stay open until all ranks know of a failure
    std::optional<detail::tcp_mesh> mesh;
    try {
        acceptor = detail::listen_as_rank(j.rank, j.size, store.local_address(), ports);
        std::string const number = detail::concat({j.rank});
        store.put("rank/" + number, detail::peer_address{acceptor->local_endpoint(), detail::this_process()}.text(),
                  until);
        for (auto const& [key, value] : store.all("rank/", static_cast<std::uint32_t>(j.size), until))
            addresses[static_cast<std::size_t>(detail::environment_number(
                "a published rank", detail::printable(key.substr(5), 20), 0, j.size - 1, "a rank"))] =
                detail::peer_address::parse(value);
        for (detail::peer_address const& one : addresses)
            if (!anywhere && !is_local(one.at))
                throw rendezvous_error(detail::concat({one.who, " published the address ", detail::text_of(one.at),
                                                       ", which is not on this machine, although MASTER_ADDR is "
                                                       "loopback"}));

        detail::peer_hello mine;
        mine.from = j.rank;
        mine.size = j.size;
        mine.nonce = store.nonce();
        mine.host = framing.host;
        mine.early_bytes = options.early_bytes;
        mesh.emplace(mine, addresses, *acceptor, store, options.times, between_ranks, until).connect(met);
        mesh.reset();
        acceptor.reset();
        detail::memory_paths paths(j.rank, met, framing.host, machine, in_memory);
        paths.exchange(store, j.size, until);
        store.stop_beating();
        detail::core_set cores = detail::cores_of_process();
        communication_thread const thread = detail::chosen_thread(options.thread, false);  // as over TCP
        std::string const own = detail::rank_settings(options.times, options.congestion, in_memory, thread);
        store.put("done/" + number, detail::concat({cores.text(), ";", own, ";", paths.news()}), until);
        std::vector<std::string> settings(addresses.size());
        for (auto const& [key, value] : store.all("done/", static_cast<std::uint32_t>(j.size), until)) {
            int const who = detail::environment_number("a published rank", detail::printable(key.substr(5), 20), 0,
                                                       j.size - 1, "a rank");
            std::string_view rest = value;
            std::string_view const its_cores = detail::take_field(rest, ';');
            settings[static_cast<std::size_t>(who)] = detail::take_field(rest, ';');
            paths.hear(who, rest);
            bool const here =
                std::any_of(met.begin(), met.end(), [&](auto const& c) { return c.rank == who && c.same_host; });
            if (here) cores.add(detail::core_set::parse(std::string(its_cores)));
        }
        framing.paths = paths.groups();
        paths.tell();
        settings[static_cast<std::size_t>(j.rank)] = own;
        if (j.rank == 0) detail::tell_different_settings(settings);
        long const here = 1 + std::count_if(met.begin(), met.end(), [](auto const& c) { return c.same_host; });
        if (here > detail::usable_cores(cores, detail::core_quota())) framing.looks = 0;
        auto const name_of = [&](int rank) {
            detail::peer_address const& a = addresses[static_cast<std::size_t>(rank)];
            return a.who + ", " + detail::text_of(a.at);
        };
        framing.name = name_of(j.rank);
        for (auto& c : met) {
            detail::choose_congestion_control(c.stream.descriptor(), options.congestion, c.same_host);
            peers.push_back({c.rank, std::move(c.stream), name_of(c.rank),
                             between_ranks == nullptr && !c.same_host});  // a channel finds changed bytes itself
        }
        if (server != nullptr) server->finish();  // the last answers may still be on their way
        framing.keeps = std::move(server);
    } catch (std::exception const& e) {
        // The other ranks wait for this one.
        std::string const told = store.fail(said(e), monotonic_clock::now() + options.times.handshake);
        if (told.empty()) throw;
        throw rendezvous_error(told);
    }
    return std::make_unique<tcp_transport>(j.rank, j.size, std::move(peers), framing);
}

}  // namespace ddp
