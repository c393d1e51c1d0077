/// \file
/// connect_tcp: makes a tcp_transport that reaches every rank of a job.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ddp/comm/communication_thread.hpp>
#include <ddp/comm/timing.hpp>
#include <ddp/comm/transport.hpp>
#include <ddp/core/separate.hpp>
#include <ddp/rendezvous/environment.hpp>
#include <ddp/rendezvous/job_secret.hpp>
#include <ddp/rendezvous/rendezvous_error.hpp>
#include <ddp/transport/framed/tcp.hpp>
#include <ddp/transport/framed/tcp_channel.hpp>

namespace ddp {

/// How connect_tcp connects the ranks of a job.
struct tcp_options {
    timing times = {};      ///< time limits; `join` is that of connect_tcp as a whole
    bool insecure = false;  ///< without a secret, allows addresses that other hosts reach; also DDP_INSECURE=1
    bool encrypt = false;   ///< TLS 1.3 on all connections, loopback too; needs `security` and a secret; also DDP_TLS=1
    bool prove = false;  ///< proofs on loopback between all ranks, not only with rank 0; needs `security` and a secret
    std::size_t early_bytes = 0;                       ///< see framed_options; the same on every rank
    nanoseconds spin = std::chrono::microseconds{50};  ///< see framed_options
    int listen_descriptor = -1;  ///< rank 0: an inherited listening socket instead of a port; also DDP_LISTEN_FD
    /// TCP congestion control by the system's name for it ("cubic", "bbr", "dctcp"); also DDP_TCP_CONGESTION. Empty: cubic
    /// between ranks of one host, where BBR, some systems' default, took 1.7 times as long; between hosts the system's own
    /// choice, which may have been made for that network.
    std::string congestion = {};
    /// Where ranks may listen for each other, "20000-20063" or one port, for firewalls; also DDP_PORTS. A rank takes the first
    /// that is free, so allow one for each rank of every job on the host. Empty: the system chooses. Rank 0 also
    /// listens at the job's port.
    std::string ports = {};
    /// Ranks of one host exchange messages through memory; DDP_SHARE_MEMORY=0 turns that off too. Pairs of ranks that cannot
    /// do so use TCP, and one line on stderr says that.
    bool share_memory = true;
    /// Ranks that give different names count as ranks of different hosts, even on one machine; also DDP_HOST. Ranks of
    /// different machines are never on one host.
    std::string host = {};
    /// What this rank's communicators ask for. Only compared: rank 0 says on which ranks it differs.
    communication_thread thread = communication_thread::automatic;
    /// Proves the job's secret, or encrypts with it: make_tcp_security (rendezvous/secure_channel.hpp), which needs OpenSSL.
    /// Used between hosts if there is a secret. If this is null, connections are neither authenticated nor encrypted.
    std::unique_ptr<tcp_security> (*security)(job_secret const& secret, bool encrypts) = nullptr;
};

namespace detail {
/// The ports at which rank 0 may listen: the job's; if that is the launcher's own, the first of these that is free.
[[nodiscard]] std::vector<std::uint16_t> master_ports(job const& j);
/// The addresses of rank 0's host, each with all of master_ports(). A name that has no address yet is looked up again until
/// `until`. Throws rendezvous_error.
[[nodiscard]] std::vector<boost::asio::ip::tcp::endpoint> resolve_master(job const& j, time_point until);
/// Throws if the name of rank 0's host is a name for this machine only, although ranks run on other hosts. `at`: its
/// addresses.
void expect_reachable(job const& j, std::vector<boost::asio::ip::address> const& at);
/// See tcp_options::congestion. Throws rendezvous_error if the system refuses the algorithm.
void choose_congestion_control(int fd, std::string const& wanted, bool same_host);
}  // namespace detail

/// Connects every rank of the job to every other. Collective: all ranks call it, or all fail.
///
/// Rank 0 listens at the job's address while the others connect to it. Each publishes a port of its own there, on the interface
/// that reaches rank 0; then every pair connects, and compares version and configuration.
///
/// Cost    a connection for every pair of ranks. Each rank makes 2 MiB of shared memory, and maps that of every other rank of
///         its host. Rank 0 also serves the rendezvous until every rank has its last answer, which may be after this call;
///         the transport's destructor waits for that, for at most timing.dead (or timing.handshake, if that is longer).
/// Secret  the job's (job_secret::from_environment). Between hosts, both sides of every connection prove that they know
///         it before any other byte is looked at; afterwards no byte can be changed on the way. On loopback, each rank
///         and rank 0 prove it to each other, and between ranks the number that rank 0 then gives them is enough;
///         without options.security the rank sends the secret itself, unless the launcher has rank 0's port (torchrun),
///         which is an error then. Without options.security, or without a secret, addresses that other hosts reach need
///         options.insecure.
/// Throws  rendezvous_error (DDP-E201) or environment_error (DDP-E101), on every rank that took part, with the same
///         cause, after timing.join and two timing.handshake at the latest, and then timing.dead if a rank does not
///         take the error (if the system's resolver answers in time); usage_error unless 0 <= j.rank < j.size.
[[nodiscard]] std::unique_ptr<tcp_transport> connect_tcp(job const& j, tcp_options options = {});

}  // namespace ddp

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/rendezvous/impl/bootstrap.ipp>
#endif
