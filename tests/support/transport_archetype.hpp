/// \file
/// transport_archetype: the least that is a Transport, and one for every operation that may be missing.
#pragma once

#include <span>

#include <ddp/comm/transport.hpp>

namespace ddp::test {

enum class without { nothing, rank, size, post_send, post_receive, progress, abort, reports, wake, now };

/// Declarations only: nothing here can run.
template <without Missing = without::nothing>
struct transport_archetype {
    int rank() const noexcept
        requires(Missing != without::rank);
    int size() const noexcept
        requires(Missing != without::size);
    void post_send(int, tag, const_bytes, completion&)
        requires(Missing != without::post_send);
    void post_receive(int, tag, mutable_bytes, completion&)
        requires(Missing != without::post_receive);
    bool progress(time_point)
        requires(Missing != without::progress);
    void abort(failure const&)
        requires(Missing != without::abort);
    std::span<report const> reports()
        requires(Missing != without::reports);
    void wake()
        requires(Missing != without::wake);
    time_point now()
        requires(Missing != without::now);
};

static_assert(Transport<transport_archetype<>>);
static_assert(!Transport<transport_archetype<without::rank>>);
static_assert(!Transport<transport_archetype<without::size>>);
static_assert(!Transport<transport_archetype<without::post_send>>);
static_assert(!Transport<transport_archetype<without::post_receive>>);
static_assert(!Transport<transport_archetype<without::progress>>);
static_assert(!Transport<transport_archetype<without::abort>>);
static_assert(!Transport<transport_archetype<without::reports>>);
static_assert(!Transport<transport_archetype<without::wake>>);
static_assert(!Transport<transport_archetype<without::now>>);
static_assert(!TimedTransport<transport_archetype<>>);

}  // namespace ddp::test
