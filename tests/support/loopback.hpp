/// \file
/// loopback_world: ends of a job whose ranks are threads, over TCP on loopback. See on_ranks.hpp for a test's body on all of them.
#pragma once

#include <chrono>
#include <memory>

#include <ddp/comm/communicator.hpp>
#include <ddp/rendezvous/bootstrap.hpp>
#include <ddp/transport/any.hpp>
#include <ddp/transport/framed/tcp.hpp>

#include "support/listener.hpp"

namespace ddp::test {

inline timing loopback_patience() {
    timing times = timing::for_tests();
    times.dead = std::chrono::seconds(20);  // eight ranks, two cores, a sanitizer
    times.collective = std::chrono::seconds(60);
    times.join = std::chrono::seconds(30);
    times.handshake = std::chrono::seconds(20);
    return times;
}

/// Ranks of one job, each connecting on its own thread.
class loopback_world {
public:
    explicit loopback_world(int ranks, tcp_options const& with = {}) : ranks_(ranks), with_(with) {}
    loopback_world(int ranks, bool memory) : ranks_(ranks) { with_.share_memory = memory; }

    std::unique_ptr<tcp_transport> connect(int rank) const {
        job where;
        where.rank = where.local_rank = rank;
        where.size = where.local_size = ranks_;
        where.master_port = at_.port;
        tcp_options options = with_;
        options.times = loopback_patience();
        if (rank == 0) options.listen_descriptor = at_.inherit();
        return connect_tcp(where, options);
    }

private:
    int ranks_;
    tcp_options with_;
    listener at_;
};

}  // namespace ddp::test
