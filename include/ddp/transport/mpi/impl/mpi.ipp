/// \file
/// What transport/mpi/mpi.hpp declares.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <exception>
#include <limits>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include <ddp/comm/cores.hpp>
#include <ddp/comm/host.hpp>
#include <ddp/core/bytes.hpp>
#include <ddp/core/contract.hpp>
#include <ddp/transport/mpi/mpi.hpp>

#include <mpi.h>

namespace ddp {

DDP_DECL mpi_transport::mpi_transport(MPI_Comm users, mpi_options const& options)
    : options_(options),
      self_(detail::mpi::place_in(users)),
      life_(static_cast<std::size_t>(self_.size), options_.times) {
    options_.times.validate();
    if (options_.host == 0) options_.host = this_host();
    DDP_EXPECTS(options_.piece_bytes > 0 && options_.piece_bytes <= std::numeric_limits<int>::max(),
                "mpi_options::piece_bytes must be between 1 and INT_MAX, the largest MPI count");
    auto const ranks = static_cast<std::size_t>(size());
    reports_.resize(ranks);
    gone_.resize(ranks);
    next_tag_.resize(ranks);
    linger_.resize(ranks);
    gone_[static_cast<std::size_t>(rank())] = 1;
    session_->slots.add(3 * ranks);  // abort() finds some
    session_->requests.make_room(64 + 3 * ranks);
    try {
        auto const here = session_->open(users, self_, options_.piece_bytes, options_.times.join);
        int const cores = detail::usable_cores(here.cores, detail::core_quota());
        shares_cores_ = 2 * here.ranks > cores;
        waiter_.share_core(may_own_thread() ? shares_cores_ : here.ranks > cores);
    } catch (...) {
        detail::mpi::keep_for_good(std::move(session_));  // a collective call that has not ended may still write there
        throw;
    }
}

DDP_DECL mpi_transport::~mpi_transport() {
    int finalised = 0;
    MPI_Finalized(&finalised);
    bool clean = finalised != 0;
    if (finalised == 0) {
        try {
            leave();
        } catch (...) {  // MPI is broken: release what is there, and keep the memory
        }
        clean = session_->close(std::count(gone_.begin(), gone_.end(), char{1}) == size());
    }
    if (!clean) detail::mpi::keep_for_good(std::move(session_));
    for (int peer = 0; peer < size(); ++peer) end_receives(peer, op_status::aborted);
    while (completion* const node = active_.front()) {
        active_.erase(*node);
        finish(*node, op_status::aborted);
    }
    while (!ended_.empty()) run_ended(ended_count_);
}

DDP_DECL void mpi_transport::prepare(completion& done, int peer, tag const& what, std::byte const* data,
                                     std::size_t bytes, bool sends) {
    DDP_EXPECTS(peer >= 0 && peer < size() && peer != rank(), "post to another rank of this communicator");
    session_->requests.make_room(1 + pieces(bytes));
    done.post(peer, what, data, bytes, sends);  // here, done.moved counts the MPI requests still in flight
}

/// If `out` fits an envelope, it is sent before this returns; the completion still runs in progress().
DDP_DECL void mpi_transport::post_send(int peer, tag what, const_bytes out, completion& done) {
    prepare(done, peer, what, out.data(), out.size(), true);
    if (aborted_) return finish(done, op_status::aborted);
    auto const to = static_cast<std::size_t>(peer);
    if (gone_[to]) return finish(done, op_status::closed);
    slot& head = session_->slots.take();
    head.peer = peer;
    bool const fits = out.size() <= head.what.body.size();
    if (!fits) next_tag_[to] = next_tag_[to] + 1 >= self_.group_tag() ? 1 : next_tag_[to] + 1;
    head.what.id = what.id;
    head.what.fingerprint = what.fingerprint;
    head.what.length = out.size();
    head.what.payload = fits ? 0 : next_tag_[to];
    head.what.kind = kind::message;
    if (fits && !out.empty()) std::memcpy(head.what.body.data(), out.data(), out.size());
    int const payload = head.what.payload;
    done.moved = 1 + (fits ? 0 : pieces(out.size()));
    active_.push_back(done);
    if (!send_envelope(head, fits ? out.size() : 0, &done) || fits) return;
    for (std::size_t at = 0; at < out.size(); at += options_.piece_bytes) {
        int const count = static_cast<int>(std::min(options_.piece_bytes, out.size() - at));
        bool const started = start({.node = &done, .peer = peer, .tag = payload}, [&](MPI_Request* request) {
            return MPI_Isend(out.data() + at, count, MPI_BYTE, peer, payload, session_->comm, request);
        });
        if (!started) return;
    }
}

DDP_DECL void mpi_transport::post_receive(int peer, tag what, mutable_bytes in, completion& done) {
    prepare(done, peer, what, in.data(), in.size(), false);
    if (aborted_) return finish(done, op_status::aborted);
    if (slot* const early = matching_.take_early(peer, what.id)) {
        match(done, early->what);
        return session_->slots.give_back(*early);
    }
    if (gone_[static_cast<std::size_t>(peer)]) return finish(done, op_status::closed);
    matching_.wait(done);
}

/// Returns whether reports() has changed.
DDP_DECL bool mpi_transport::progress(time_point until) {
    time_point since = now();
    for (time_point at = since;; at = now()) {
        bool const moved = pass();
        look_at_the_time(at, moved);  // after receiving: a rank that was stopped has messages waiting
        bool const done = !ended_.empty() || changed_;
        run_ended(ended_count_);
        bool const woken = waiter_.take_wake();
        if (done || woken || at >= until) return std::exchange(changed_, false);
        if (moved) since = at;
        pause(until, since);
    }
}

/// Sends heartbeats that are due, and finds ranks that are late; without heartbeats, tells what this rank waits in.
DDP_DECL void mpi_transport::look_at_the_time(time_point at, bool moved) {
    if (aborted_ || size() == 1) return;
    if (!may_own_thread()) {
        if (life_.is_to_tell(at, moved))
            for (int peer = 0; peer < size(); ++peer) beat(peer, kind::mark);
        return;
    }
    if (!life_.has_come(at)) return;
    overdue_ = -1;
    for (int peer = size() - 1; peer >= 0; --peer) {
        if (watched(peer) && life_.is_late(rank(), peer, process_of(peer), at)) overdue_ = peer;
        beat(peer, kind::heartbeat);
    }
}

DDP_DECL void mpi_transport::beat(int peer, kind as) {
    if (gone_[static_cast<std::size_t>(peer)] || life_.under_way(peer)) return;
    slot& out = session_->slots.take();
    out.peer = peer;
    send_envelope(out, life_.write(peer, as, out.what), nullptr);
}

DDP_DECL void mpi_transport::pause(time_point until, time_point since) {
    // a payload on its way moves only during calls of MPI
    waiter_.pause(until, since, std::chrono::microseconds(session_->requests.empty() ? 1000 : 100));
}

DDP_DECL void mpi_transport::abort(failure const& record) {
    reports_[static_cast<std::size_t>(rank())] = {.is = report::state::spoke, .record = record};
    for (int peer = 0; peer < size(); ++peer) tell(peer, kind::record, bytes_of(record));
    if (!std::exchange(aborted_, true)) {
        for (int peer = 0; peer < size(); ++peer) {
            end_receives(peer, op_status::aborted);
            end_active(peer, true, op_status::aborted);
        }
        session_->requests.cancel_receives();
        matching_.drop_early(session_->slots);
    }
    while (!ended_.empty()) run_ended(ended_count_);
}

/// Starts one MPI operation. If MPI refuses, the peer is closed, with every operation that involves it.
template <class Call>
bool mpi_transport::start(transfer what, Call const& call) {
    int const peer = what.peer;
    slot* const out = what.out;
    int const code = session_->requests.start(std::move(what), call);
    if (code == MPI_SUCCESS) return true;
    if (out != nullptr) session_->slots.give_back(*out);
    gone(peer, report::state::closed, detail::mpi::words_of(code).view());
    return false;
}

DDP_DECL bool mpi_transport::send_envelope(slot& out, std::size_t body, completion* node) {
    return start({.node = node, .out = &out, .peer = out.peer}, [&](MPI_Request* request) {
        return MPI_Isend(&out.what, static_cast<int>(detail::mpi::head_bytes + body), MPI_BYTE, out.peer, 0,
                         session_->comm, request);
    });
}

/// Sends GOODBYE or ABORT. A peer that has left still listens, because it waits for this rank's goodbye.
DDP_DECL void mpi_transport::tell(int peer, kind what, const_bytes body) {
    if (peer == rank() || reports_[static_cast<std::size_t>(peer)].is == report::state::closed) return;
    slot& out = session_->slots.take();
    out.peer = peer;
    out.what.kind = what;
    out.what.id = {};
    out.what.fingerprint = 0;
    out.what.payload = 0;
    out.what.length = body.size();
    if (!body.empty()) std::memcpy(out.what.body.data(), body.data(), body.size());
    send_envelope(out, body.size(), nullptr);
}

/// Completes a receive whose envelope has arrived: copies the bytes from it, or receives them by MPI.
DDP_DECL void mpi_transport::match(completion& done, envelope const& what) {
    done.fingerprint = what.fingerprint;
    done.length = what.length;
    int const peer = done.peer;
    auto const length = static_cast<std::size_t>(what.length);
    if (length != done.size) {
        finish(done, op_status::length);
        if (what.payload == 0) return;
        return session_->requests.start_drain(session_->comm, peer, what.payload, length, options_.piece_bytes);
    }
    if (what.payload == 0) {
        if (length > 0) std::memcpy(done.data, what.body.data(), length);
        return finish(done, op_status::ok);
    }
    done.moved = pieces(length);
    active_.push_back(done);
    for (std::size_t at = 0; at < length; at += options_.piece_bytes) {
        int const count = static_cast<int>(std::min(options_.piece_bytes, length - at));
        bool const started =
            start({.node = &done, .peer = peer, .receives = true, .tag = what.payload}, [&](MPI_Request* request) {
                return MPI_Irecv(done.data + at, count, MPI_BYTE, peer, what.payload, session_->comm, request);
            });
        if (!started) return;
    }
}

/// Tests everything once; returns whether anything moved.
DDP_DECL bool mpi_transport::pass() {
    bool const finished = test_requests();
    bool const came = take_envelopes();
    if (lingering_ == 0) return finished || came;
    time_point const at = now();
    bool over = false;
    for (int peer = 0; peer < size(); ++peer) {
        time_point& until = linger_[static_cast<std::size_t>(peer)];
        if (until == time_point{} || (at < until && has_sends(peer))) continue;
        end_active(peer, false, op_status::closed);
        until = {};
        --lingering_;
        over = true;
    }
    return finished || came || over;
}

/// Processes the envelopes that have arrived, in the order of the ring, which is the order in which MPI matched them.
DDP_DECL bool mpi_transport::take_envelopes() {
    for (std::size_t taken = 0; taken < session_->ring.size(); ++taken) {
        int ready = 0;
        MPI_Status status;
        int const code = MPI_Test(&session_->ring_requests[head_], &ready, &status);
        if (code != MPI_SUCCESS && hear_of_failures() && ready == 0) return true;  // the receive is still active
        if (ready == 0 || !detail::mpi::tells_of_failure(code)) check(code, "MPI_Test");
        if (ready == 0) return taken > 0;
        // A receive that a failure has kept waiting has that code also when a message completes it later.
        if (status.MPI_SOURCE >= 0 && code != detail::mpi::process_failed)  // else there is no message
            take(status.MPI_SOURCE, session_->ring[head_]);
        check(MPI_Start(&session_->ring_requests[head_]), "MPI_Start");
        head_ = (head_ + 1) % session_->ring.size();
    }
    return true;
}

DDP_DECL void mpi_transport::take(int peer, envelope const& what) {
    life_.heard(peer);
    if (what.kind == kind::heartbeat || what.kind == kind::mark) {
        life_.heard(peer, what);
        changed_ |= what.kind == kind::mark;
    } else if (what.kind == kind::record) {
        report& told = reports_[static_cast<std::size_t>(peer)];
        told.is = report::state::spoke;
        std::memcpy(&told.record, what.body.data(), sizeof(failure));
        changed_ = true;
    } else if (what.kind == kind::goodbye) {
        gone(peer, report::state::left, {});
    } else if (!aborted_) {
        if (completion* const node = matching_.take_receive(peer, what.id)) return match(*node, what);
        slot& early = session_->slots.take();
        early.what = what;
        early.peer = peer;
        matching_.keep(early);
    }
}

DDP_DECL bool mpi_transport::test_requests() {
    bool moved = false;
    auto const ended = [this](transfer& over, int how) {
        slot* const out = std::exchange(over.out, nullptr);
        completion* const node = std::exchange(over.node, nullptr);
        if (out != nullptr) {
            if (out->what.kind == kind::heartbeat || out->what.kind == kind::mark) life_.has_gone(over.peer);
            session_->slots.give_back(*out);
        }
        if (how != MPI_SUCCESS) {
            if (node == nullptr && out == nullptr) return;  // a receive that no operation waits for
            gone(over.peer, report::state::closed, detail::mpi::words_of(how).view());  // ends `node`, which is active
        } else if (node != nullptr && --node->moved == 0) {
            active_.erase(*node);
            finish(*node, op_status::ok);
        }
    };
    int const code = session_->requests.test(session_->comm, options_.piece_bytes, moved, ended);
    if (code == MPI_SUCCESS || !hear_of_failures()) check(code, "MPI_Testsome");
    return moved;
}

/// Closes the peers whose processes MPI knows to have failed. Returns whether MPI had not told of all of them before.
DDP_DECL bool mpi_transport::hear_of_failures() {
    std::vector<int> const failed = detail::mpi::failed_ranks(session_->comm);
    for (int const peer : failed) gone(peer, report::state::closed, "MPI reports that its process has failed");
    return failed.size() > std::exchange(failed_, failed.size());
}

/// Ends the operations with `peer` that MPI works on; their requests continue without them.
DDP_DECL void mpi_transport::end_active(int peer, bool receives_too, op_status how) noexcept {
    session_->requests.forget(peer, receives_too);
    for (completion* node = active_.front(); node != nullptr;) {
        completion* const next = node->next;
        if (node->peer == peer && (receives_too || node->sends)) {
            active_.erase(*node);
            finish(*node, how);
        }
        node = next;
    }
}

/// A peer that said goodbye receives nothing more, but what it sent may still be on its way. So may MPI's confirmation that it
/// has received what this rank sent, which is not ordered with messages: sends wait a little longer for that.
DDP_DECL void mpi_transport::gone(int peer, report::state how, std::string_view text) {
    auto const at = static_cast<std::size_t>(peer);
    if (reports_[at].is == report::state::silent) {
        reports_[at].is = how;
        if (how == report::state::closed) {
            reports_[at].record = {
                .kind = failure_kind::closed, .code = errc::peer_closed, .rank = rank(), .peer = peer};
            reports_[at].record.text = text;
        }
        changed_ = true;
    }
    gone_[at] = how == report::state::closed || gone_[at] == 2 ? 2 : 1;
    end_receives(peer, op_status::closed);
    if (how == report::state::closed) {
        end_active(peer, true, op_status::closed);
    } else if (linger_[at] == time_point{}) {
        linger_[at] = now() + options_.times.end_of_file;
        ++lingering_;
    }
}

DDP_DECL bool mpi_transport::has_sends(int peer) const noexcept {
    for (completion const* node = active_.front(); node != nullptr; node = node->next)
        if (node->peer == peer && node->sends) return true;
    return false;
}

/// At most `most`: what a callback posts and what ends at once waits for the next round.
DDP_DECL void mpi_transport::run_ended(std::size_t most) noexcept {
    for (; most > 0 && !ended_.empty(); --most) {
        completion& node = *ended_.pop_front();
        --ended_count_;
        node.run(node);
    }
}

/// Says goodbye once no message of a peer is being read from that peer's memory, so that MPI does not touch the memory of a
/// rank that has received this goodbye.
DDP_DECL void mpi_transport::leave() {
    if (std::uncaught_exceptions() > exceptions_ && !aborted_) {
        failure record{.kind = failure_kind::threw, .code = errc::remote_exception, .rank = rank()};
        record.text = std::string_view("its program left the transport by an exception");
        abort(record);
    }
    for (int peer = 0; peer < size(); ++peer) end_receives(peer, op_status::aborted);
    time_point const until = now() + options_.times.shutdown;
    time_point since = now();
    auto const drive = [&](auto const& over) {
        while (!over() && now() < until) {
            if (pass()) since = now();
            if (!over()) pause(until, since);
        }
    };
    drive([&] {
        if (may_own_thread()) look_at_the_time(now(), true);  // no longer after the goodbye
        return !session_->requests.receives();
    });
    for (int peer = 0; peer < size(); ++peer) tell(peer, kind::goodbye, {});
    drive([&] { return lingering_ == 0 && std::find(gone_.begin(), gone_.end(), char{0}) == gone_.end(); });
    test_requests();
}

}  // namespace ddp
