/// \file
/// connect_tcp: from an environment's job to a tcp_transport that reaches every rank.
#pragma once

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ddp/comm/timing.hpp>
#include <ddp/core/contract.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/rendezvous/environment.hpp>
#include <ddp/rendezvous/tcp_mesh.hpp>
#include <ddp/rendezvous/tcp_socket.hpp>
#include <ddp/rendezvous/tcp_store.hpp>
#include <ddp/rendezvous/tcp_store_server.hpp>
#include <ddp/transport/framed/framed.hpp>
#include <ddp/transport/framed/tcp.hpp>

namespace ddp {

struct tcp_options {
    timing times = {};
    bool insecure = false;                             ///< allows addresses that other hosts reach; also DDP_INSECURE=1
    std::size_t early_bytes = 0;                       ///< see framed_options; the same on every rank
    nanoseconds spin = std::chrono::microseconds{50};  ///< see framed_options
    int listen_descriptor = -1;  ///< rank 0: an inherited listening socket instead of a port; also DDP_LISTEN_FD
};

namespace detail {

/// Equal for two processes exactly if they share a kernel and a network namespace.
[[nodiscard]] inline std::uint64_t host_identity() {
    std::string boot;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
    char space[128] = {};
    ssize_t const n = ::readlink("/proc/self/ns/net", space, sizeof space - 1);
    if (boot.empty() || n <= 0) return std::random_device{}() | std::uint64_t{1} << 63;  // nobody's
    return digest{}.add(std::string_view(boot)).add(std::string_view(space)).value();
}

/// The addresses of rank 0. Only loopback, unless the caller has said insecure.
[[nodiscard]] inline std::vector<tcp_endpoint> resolve_master(job const& j, bool insecure) {
    boost::asio::ip::tcp::resolver resolver(tcp_context());
    boost::system::error_code error;
    auto const found = resolver.resolve(j.master_addr, std::to_string(j.master_port), error);
    std::vector<tcp_endpoint> all;
    if (!error)
        for (auto const& entry : found) all.push_back(entry.endpoint());
    if (all.empty())
        throw rendezvous_error("MASTER_ADDR \"" + j.master_addr + "\" has no address: " + error.message() +
                               ". Expected the name or address of rank 0's host");
    for (tcp_endpoint const& at : all)
        if (!insecure && !at.address().is_loopback())
            throw rendezvous_error("MASTER_ADDR \"" + j.master_addr + "\" is " + text_of(at) +
                                   ", which other hosts can reach, and this connection is neither authenticated nor "
                                   "encrypted. Use 127.0.0.1, or, on a network where you trust everybody, "
                                   "tcp_options.insecure = true or DDP_INSECURE=1");
    return all;
}

[[nodiscard]] inline tcp_acceptor listen_as_master(job const& j, std::vector<tcp_endpoint> const& at, int inherited,
                                                   bool insecure) {
    tcp_acceptor acceptor(tcp_context());
    boost::system::error_code error;
    if (inherited >= 0) {
        ::sockaddr_storage name{};
        ::socklen_t size = sizeof name;
        int listening = 0;
        ::socklen_t flag = sizeof listening;
        if (::getsockname(inherited, reinterpret_cast<::sockaddr*>(&name), &size) != 0 ||
            ::getsockopt(inherited, SOL_SOCKET, SO_ACCEPTCONN, &listening, &flag) != 0 || listening == 0)
            throw rendezvous_error("descriptor " + std::to_string(inherited) +
                                   " (DDP_LISTEN_FD) is no listening socket; rank 0 must inherit it open");
        ::fcntl(inherited, F_SETFD, FD_CLOEXEC);
        acceptor.assign(name.ss_family == AF_INET6 ? tcp::tcp::v6() : tcp::tcp::v4(), inherited, error);
        if (!error && !insecure && !acceptor.local_endpoint().address().is_loopback())
            throw rendezvous_error("the inherited socket listens on " + text_of(acceptor.local_endpoint()) +
                                   ", which other hosts can reach: that needs tcp_options.insecure or DDP_INSECURE=1");
        if (!error) return acceptor;
    } else {
        error = listen_at(acceptor, at.front());
        if (!error) return acceptor;
    }
    std::string const where = text_of(at.front());
    if (error == boost::asio::error::address_in_use)
        throw rendezvous_error("port " + std::to_string(j.master_port) + " is in use by another program on " + where +
                               ". Choose another MASTER_PORT, or start the job with ddprun, which finds a free one");
    throw rendezvous_error("rank 0 cannot listen on " + where + ": " + error.message() +
                           ". MASTER_ADDR must be an address of the host that runs rank 0");
}

}  // namespace detail

/// Brings the job together and connects every rank to every other. Collective: all ranks call it, or all fail.
///
/// Rank 0 listens at the job's address while the others come; each publishes a port of its own there, on the interface
/// that reaches rank 0; every pair shakes hands and compares version and configuration.
/// Throws  environment_error or rendezvous_error, on every rank that came, with the same cause; after timing.join at
///         the latest.
[[nodiscard]] inline std::unique_ptr<tcp_transport> connect_tcp(job const& j, tcp_options options = {}) {
    DDP_EXPECTS(j.size >= 1 && j.rank >= 0 && j.rank < j.size, "connect_tcp: job.rank must be in [0, job.size)");
    options.times.validate();
    framed_options framing{options.times, 0, options.early_bytes, options.spin};
    std::vector<framed_peer<tcp_stream>> peers;
    if (j.size == 1) return std::make_unique<tcp_transport>(0, 1, std::move(peers), framing);

    auto const variable = [](char const* name) {
        char const* const value = std::getenv(name);
        return std::string(value != nullptr ? value : "");
    };
    bool const insecure = options.insecure || variable("DDP_INSECURE") == "1";
    if (std::string const fd = variable("DDP_LISTEN_FD"); j.rank == 0 && options.listen_descriptor < 0 && !fd.empty())
        options.listen_descriptor =
            detail::environment_number("DDP_LISTEN_FD", fd, 0, 1 << 20, "an inherited descriptor");

    std::vector<detail::tcp_endpoint> servers = detail::resolve_master(j, insecure);
    std::unique_ptr<tcp_store_server> server;
    // Ranks come at different times: the server's deadline speaks for all, ours only if it cannot.
    time_point const until = clock::now() + options.times.join + 2 * options.times.handshake;
    if (j.rank == 0) {
        std::random_device random;
        std::uint64_t const nonce = std::uint64_t{random()} << 32 | random();
        detail::tcp_acceptor acceptor = detail::listen_as_master(j, servers, options.listen_descriptor, insecure);
        servers = {acceptor.local_endpoint()};
        server = std::make_unique<tcp_store_server>(std::move(acceptor), j.size, nonce, options.times);
    }
    tcp_store store(servers, j.rank, j.size, clock::now() + options.times.join);
    framing.job = store.nonce();
    try {
        detail::tcp_acceptor acceptor(tcp_context());
        if (auto const error = detail::listen_at(acceptor, {store.local_address(), 0}))
            throw rendezvous_error("rank " + std::to_string(j.rank) + " cannot listen on " +
                                   store.local_address().to_string() + ": " + error.message());
        std::string const number = std::to_string(j.rank);
        store.put("rank/" + number, detail::peer_address{acceptor.local_endpoint(), detail::this_process()}.text(),
                  until);
        std::vector<detail::peer_address> addresses(static_cast<std::size_t>(j.size));
        for (auto const& [key, value] : store.all("rank/", static_cast<std::uint32_t>(j.size), until))
            addresses[static_cast<std::size_t>(detail::environment_number(
                "a published rank", key.substr(5), 0, j.size - 1, "a rank"))] = detail::peer_address::parse(value);

        detail::peer_hello mine;
        mine.from = j.rank;
        mine.size = j.size;
        mine.nonce = store.nonce();
        mine.host = detail::host_identity();
        mine.early_bytes = options.early_bytes;
        for (auto& c : detail::tcp_mesh(mine, addresses, acceptor, options.times).connect()) {
            detail::peer_address const& a = addresses[static_cast<std::size_t>(c.rank)];
            peers.push_back(
                {c.rank, tcp_stream(std::move(c.socket)), a.who + ", " + detail::text_of(a.at), !c.same_host});
        }
        store.put("done/" + number, {}, until);
        static_cast<void>(store.all("done/", static_cast<std::uint32_t>(j.size), until));
    } catch (rendezvous_error const& e) {
        try {  // the others wait for us: they get the cause; if they had it first, theirs is the one thrown here
            std::string text = e.what();
            text.erase(0, text.find(": ") + 2);
            store.fail(text, clock::now() + options.times.handshake);
        } catch (rendezvous_error const&) {
        }
        throw;
    }
    return std::make_unique<tcp_transport>(j.rank, j.size, std::move(peers), framing);
}

}  // namespace ddp
