/// \file
/// send, receive, send_receive: values from one rank to another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include <ddp/collective/call.hpp>

namespace ddp {

namespace detail {

template <Transport T>
task<> send_one(lane<T> over, const_bytes out, int peer) {
    operation done;
    over.send(done, peer, out);
    co_await done;
}
template <Transport T>
task<> receive_one(lane<T> over, mutable_bytes in, int peer) {
    operation done;
    over.receive(done, peer, in);
    co_await done;
}
template <Transport T>
task<> send_and_receive(lane<T> there, const_bytes out, int to, lane<T> here, mutable_bytes in, int from) {
    operation received, sent;
    here.receive(received, from, in);
    there.send(sent, to, out);
    co_await received;
    co_await sent;
}
inline task<> copy_to_self(const_bytes out, mutable_bytes in) {
    if (!out.empty()) std::memcpy(in.data(), out.data(), out.size());
    co_return;
}

template <Transport T>
void expect_peer(communicator<T> const& comm, int peer) {
    DDP_EXPECTS(peer >= 0 && peer < comm.size() && peer != comm.rank(),
                concat({"send, receive: the peer must be another rank of these ", comm.size(), ", and rank ",
                        comm.rank(), " passes ", peer}));
}

/// The lane of messages between two ranks. They are no collectives, so they are not part of the group's history. Messages of
/// one tag and one peer match in order. The fingerprint is the type; the length is always compared.
template <Movable V, Transport T>
lane<T> lane_between(communicator<T> const& comm, std::uint32_t tag) {
    std::uint64_t const type = agree("message", sizeof(V), value_name<V>(), "");
    identity const id{.group = comm.members().id(), .channel = channel::p2p, .index = tag};
    return {comm.tasks(), comm.members(), id, type};
}

template <class How, Transport T, Movable V>
auto send_by(communicator<T> const& comm, std::span<V const> data, int peer, std::uint32_t tag) {
    expect_peer(comm, peer);
    return How::task(comm, [&] { return send_one(lane_between<V>(comm, tag), as_const_bytes(data), peer); });
}
template <class How, Transport T, Movable V>
auto receive_by(communicator<T> const& comm, std::span<V> data, int peer, std::uint32_t tag) {
    expect_peer(comm, peer);
    return How::task(comm, [&] { return receive_one(lane_between<V>(comm, tag), as_mutable_bytes(data), peer); });
}
template <class How, Transport T, Movable S, Movable V>
auto send_receive_by(communicator<T> const& comm, std::span<S const> out, int to, std::span<V> in, int from,
                     std::uint32_t tag) {
    bool const copies = to == comm.rank() && from == to;
    if (copies) {
        DDP_EXPECTS(out.size_bytes() == in.size_bytes(),
                    "send_receive: what a rank sends to itself it receives, so both need the same size");
    } else {
        expect_peer(comm, to);
        expect_peer(comm, from);
    }
    return How::task(comm, [&] {
        if (copies) return copy_to_self(as_const_bytes(out), as_mutable_bytes(in));
        return send_and_receive(lane_between<S>(comm, tag), as_const_bytes(out), to, lane_between<V>(comm, tag),
                                as_mutable_bytes(in), from);
    });
}

}  // namespace detail

/// Sends values to rank `peer`, which receives as many of the same type with the same tag.
///
/// data    n values of any trivially copyable type (Source), or a single one.
/// tag     messages of one tag from one rank to another arrive in the order in which they were sent; those of different tags
///         are independent.
/// Returns when `data` may be changed, which may be before or after the peer has received it. Two ranks that both send to
///         each other before they receive may wait for each other until the deadline: use send_receive.
/// Cost    1 message of n values. Other ranks take no part, and collectives may be under way.
/// Throws  comm_error (the same verdict on every rank; DDP-E205 if the peer expects another length or type, DDP-E204 if it
///         does not receive within timing.collective); usage_error if `peer` is not another rank.
template <Transport T, Source S>
void send(communicator<T> const& comm, S const& data, int peer, std::uint32_t tag = 0) {
    detail::send_by<detail::blocking>(comm, detail::source_of(data), peer, tag);
}

/// Receives what rank `peer` sends with the same tag.
///
/// data    n values (Target), or a single one: as many as are sent.
/// Cost    sends nothing.
/// Throws  comm_error (the same verdict on every rank; DDP-E205, with what was expected and what was sent, if the message has
///         another length or type); data is then unspecified. usage_error if `peer` is not another rank.
template <Transport T, Target D>
void receive(communicator<T> const& comm, D&& data, int peer, std::uint32_t tag = 0) {
    detail::receive_by<detail::blocking>(comm, std::span<value_in<D>>(detail::span_of(data)), peer, tag);
}

/// Sends `out` to rank `to` and receives `in` from rank `from`, at the same time. They may be the same rank; with
/// to == from == rank() this is a copy, and both have the same size. `out` and `in` must not overlap. Otherwise as send and
/// receive.
template <Transport T, Source S, Target D>
void send_receive(communicator<T> const& comm, S const& out, int to, D&& in, int from, std::uint32_t tag = 0) {
    detail::send_receive_by<detail::blocking>(comm, detail::source_of(out), to,
                                              std::span<value_in<D>>(detail::span_of(in)), from, tag);
}

/// Starts a send. Data and errors: see request. Any number may be under way; those with the same peer and tag match in order.
template <Transport T, LastingSource S>
[[nodiscard]] request start_send(communicator<T> const& comm, S&& data, int peer, std::uint32_t tag = 0) {
    return detail::send_by<detail::starting>(comm, detail::source_of(data), peer, tag);
}

/// Starts a receive. Data and errors: see request.
template <Transport T, Target D>
[[nodiscard]] request start_receive(communicator<T> const& comm, D&& data, int peer, std::uint32_t tag = 0) {
    return detail::receive_by<detail::starting>(comm, std::span<value_in<D>>(detail::span_of(data)), peer, tag);
}

/// Starts a send and a receive; the request ends when both have ended. Data and errors: see request.
template <Transport T, LastingSource S, Target D>
[[nodiscard]] request start_send_receive(communicator<T> const& comm, S&& out, int to, D&& in, int from,
                                         std::uint32_t tag = 0) {
    return detail::send_receive_by<detail::starting>(comm, detail::source_of(out), to,
                                                     std::span<value_in<D>>(detail::span_of(in)), from, tag);
}

}  // namespace ddp
