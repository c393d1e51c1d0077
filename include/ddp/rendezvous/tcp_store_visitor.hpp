/// \file
/// A connection to the store: what it has sent, what it waits for, and what still has to be sent to it.
#pragma once

#include <poll.h>

#include <cstdint>
#include <string>

#include <ddp/comm/timing.hpp>
#include <ddp/core/bytes.hpp>
#include <ddp/rendezvous/tcp_store_protocol.hpp>
#include <ddp/transport/framed/tcp.hpp>

namespace ddp::detail {

struct store_visitor {
    tcp_stream stream;
    time_point until = never;  // for its hello
    bool silent = true;        // until bytes have come
    int rank = -1;             // after its hello
    std::string in = {}, out = {};
    bool waits = false;      // for an answer to `prefix`, `count`
    bool done = false;       // close when `out` is written
    bool told = false;       // of the failure
    bool dismissed = false;  // it has had its last answer: all ranks are done
    bool accused = false;    // it has reported a failure of its own
    bool gone = false;       // the connection is over
    time_point heard = monotonic_clock::now();
    time_point spoken = monotonic_clock::now();  // when it was sent something
    std::string prefix = {};                     // of the keys it asks for
    std::uint32_t count = 0;

    [[nodiscard]] bool unsent() const { return !out.empty() || stream.unsent(); }
    /// Whether the kernel has its last answer, which then arrives even if this process ends.
    [[nodiscard]] bool needs_nothing() const { return dismissed && !unsent(); }
    [[nodiscard]] short events() const { return static_cast<short>(POLLIN | (unsent() ? POLLOUT : 0)); }
    [[gnu::cold]] void reply(store_op op, std::string const& text) {
        store_head const head{op, 0, static_cast<std::uint32_t>(text.size()), 0};
        append(out, bytes_of(head));
        out += text;
    }
};

}  // namespace ddp::detail
