/// \file
/// tcp_store_server: the small key-value store that rank 0 serves during start-up.
#pragma once

#include <poll.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ddp/comm/timing.hpp>
#include <ddp/core/text.hpp>
#include <ddp/core/thread.hpp>
#include <ddp/core/version.hpp>
#include <ddp/rendezvous/job_secret.hpp>
#include <ddp/rendezvous/tcp_socket.hpp>
#include <ddp/rendezvous/tcp_store_protocol.hpp>
#include <ddp/rendezvous/tcp_store_visitor.hpp>
#include <ddp/rendezvous/tcp_visitors.hpp>
#include <ddp/transport/framed/frame_doorbell.hpp>
#include <ddp/transport/framed/tcp.hpp>
#include <ddp/transport/framed/tcp_channel.hpp>

namespace ddp {

/// Serves in a thread of its own from construction until finish() or destruction. It knows which ranks have connected,
/// so it alone decides what all ranks are told about missing, duplicate and contradicting ranks.
///
/// Strangers     see tcp_visitors.hpp. If the job has a secret, a connection that does not send or prove it is closed
///               without an answer, and nothing else that it sends is read.
/// Failure       the first one is sent to every rank at once, and to those that connect within 1.5 s of rank 0's end. A
///               rank that closes its connection, or sends nothing for timing.dead, is a failure. What a rank reports
///               about others is held back for timing.verdict, because one of these may be the cause.
class tcp_store_server {
public:
    tcp_store_server(detail::tcp_acceptor acceptor, int size, std::uint64_t job, std::uint64_t nonce,
                     timing const& times, job_secret const& secret = {},
                     std::shared_ptr<tcp_security const> security = nullptr, time_point until = never)
        : acceptor_(std::move(acceptor)),
          security_(std::move(security)),
          size_(size),
          job_(job),
          nonce_(reinterpret_cast<char const*>(&nonce), sizeof nonce),
          secret_{secret},
          times_(times),
          until_(std::min(until, monotonic_clock::now() + times.join)),
          present_(static_cast<std::size_t>(size)),
          came_(present_.size()) {
        boost::system::error_code ignored;
        acceptor_.non_blocking(true, ignored);
        local_ = acceptor_.local_endpoint(ignored).address().is_loopback();
        thread_ = detail::start_thread("the thread of the rendezvous store", [this] { serve(); });
    }
    tcp_store_server(tcp_store_server const&) = delete;
    tcp_store_server& operator=(tcp_store_server const&) = delete;
    /// Waits until the thread has ended: see finish().
    [[gnu::cold]] ~tcp_store_server() {
        stopping_ = true;
        bell_.ring();
        thread_.join();
    }

    /// Call it once all ranks are connected. Returns once the server no longer listens. The thread ends later, once
    /// every rank has all its answers or, as its packets may be lost, has sent nothing for timing.dead.
    [[gnu::cold]] void finish() noexcept {
        together_ = true;  // first: the thread reads it after the other
        stopping_ = true;
        bell_.ring();
        closed_.wait(false);
    }
    /// The job cannot start: sends `why` to all ranks, including those that connect later.
    [[gnu::cold]] void fail(std::string why) {
        std::scoped_lock const lock(failing_);
        own_failure_ = std::move(why);
        bell_.ring();
    }

private:
    using visitor = detail::store_visitor;

    /// How long a failed job waits for ranks that have not connected: rank 0 reports its own error after that, and
    /// ddprun ends the other ranks of a failed job after 2 s.
    static constexpr std::chrono::milliseconds late_rank{1500};

    [[gnu::cold]] void serve() noexcept {
        time_point give_up = never, nobody_comes = never;
        boost::system::error_code ignored;
        while (monotonic_clock::now() < give_up) {
            try {
                bool const stopping = stopping_;  // read before the failure, which fail() sets first
                if (stopping && give_up == never) {
                    std::chrono::milliseconds const most = std::max(times_.dead, times_.handshake);
                    give_up = monotonic_clock::now() + most;
                    nobody_comes = monotonic_clock::now() + std::min(most, late_rank);
                    if (together_) acceptor_.close(ignored);
                    closed_ = true;
                    closed_.notify_all();
                }
                take_own_failure();
                auto const owed = [this](visitor const& v) {
                    if (v.rank < 0) return false;
                    if (failure_.empty() && v.needs_nothing()) return false;
                    return monotonic_clock::now() - v.heard < times_.dead;  // a stopped rank stays connected
                };
                if (stopping && all_told(nobody_comes) && std::none_of(visitors_.begin(), visitors_.end(), owed)) break;
                turn();
            } catch (std::exception const& e) {
                failure_ = detail::concat({"the rendezvous failed: ", e.what()});
            }
        }
        acceptor_.close(ignored);
        visitors_.clear();
    }
    [[gnu::cold]] void take_own_failure() {
        if (std::scoped_lock const lock(failing_); failure_.empty()) failure_ = own_failure_;
    }
    /// After an early failure, ranks that connect later are told as well, until `nobody_comes`.
    [[nodiscard, gnu::cold]] bool all_told(time_point nobody_comes) const {
        return failure_.empty() || monotonic_clock::now() >= std::min(until_, nobody_comes) ||
               std::count(came_.begin(), came_.end(), true) == size_;
    }
    [[gnu::cold]] void turn() {
        bool const full = monotonic_clock::now() < full_until_;
        std::vector<::pollfd> polls{{full ? -1 : acceptor_.native_handle(), POLLIN, 0},
                                    {bell_.descriptor(), POLLIN, 0}};
        for (visitor const& v : visitors_) polls.push_back({v.stream.descriptor(), v.events(), 0});
        if (bell_.fall_asleep()) {
            ::poll(polls.data(), polls.size(), 50);  // exact enough: the shortest deadline is a handshake
            bell_.wake_up(polls[1].revents != 0);
        }
        static_cast<void>(bell_.answered());
        take_own_failure();  // ranks that connect after fail() are told as well
        for (std::size_t i = 2; auto& v : visitors_) {
            v.silent = v.silent && polls[i].revents == 0;
            if (polls[i++].revents != 0) read(v);
        }
        forget_gone();
        if (polls[0].revents != 0)
            if (int const error = detail::welcome(
                    acceptor_, security_.get(), visitors_, times_, [](visitor const& v) { return v.rank < 0; },
                    [this](visitor& v) { read(v); });
                error != 0)
                no_room(error);
        time_point const now = monotonic_clock::now();
        if (failure_.empty() && now >= until_) name_missing();
        watch(now);
        for (bool const zero : {false, true})  // rank 0 is last: see others_are_told()
            for (visitor& v : visitors_) {
                if ((v.rank == 0) != zero) continue;
                answer(v);
                write(v);
                if (v.rank < 0 && now >= v.until) v.gone = true;
            }
        forget_gone();
    }
    [[gnu::cold]] void forget_gone() {
        for (visitor const& v : visitors_) strangers_ += v.gone && v.rank < 0 && !v.done;
        visitors_.remove_if([](visitor const& v) { return v.gone; });
    }
    /// No descriptor is left for the next rank: ranks are told this one by one, over a descriptor that was kept for it.
    [[gnu::cold]] void no_room(int error) {
        if (spare_)
            spare_.reset();
        else
            full_until_ = monotonic_clock::now() + std::chrono::milliseconds(10);  // the socket stays readable
        if (failure_.empty())
            failure_ = detail::text_without_code(detail::too_many_files(0, size_, "the sockets of all ranks", error));
    }
    [[nodiscard, gnu::cold]] bool done(int rank) const { return data_.count(detail::concat({"done/", rank})) != 0; }
    [[nodiscard, gnu::cold]] std::string name(visitor const& v) const {
        return detail::concat({"rank ", v.rank, " (", present_[static_cast<std::size_t>(v.rank)], ")"});
    }
    /// Finds ranks that have been silent for too long, and sends heartbeats.
    [[gnu::cold]] void watch(time_point now) {
        bool const slept = now - std::exchange(last_turn_, now) > times_.dead / 2;
        for (visitor& v : visitors_) {
            if (v.rank < 0) continue;
            if (slept) v.heard = now;  // this process was stopped: no rank is late
            if (failure_.empty() && !done(v.rank) && now - v.heard >= times_.dead)
                failure_ = detail::concat({name(v), " has sent nothing for ", times_.dead.count(),
                                           " ms during start-up. Its process is stopped or swapped out, or its host is "
                                           "unreachable",
                                           local_ ? "" : ", or large packets are lost on the way (MTU)"});
            if (v.out.empty() && !v.done && now - v.spoken >= times_.heartbeat) {
                detail::append(v.out, bytes_of(detail::store_head{detail::store_op::alive, 0, 0, 0}));
                v.spoken = now;
            }
        }
        if (failure_.empty() && !accusation_.empty() && now >= accused_at_ + times_.verdict) failure_ = accusation_;
        if (failure_.empty()) return;
        for (visitor& v : visitors_) {
            if (v.rank < 0 || v.done || std::exchange(v.told, true)) continue;
            v.waits = false;
            v.reply(detail::store_op::refused, failure_);
        }
    }
    [[gnu::cold]] void read(visitor& v) {
        std::array<std::byte, 8192> buffer;
        mutable_bytes const all = buffer;
        for (int turn = 0; !v.gone && (turn < 16 || v.stream.buffered()); ++turn) {
            stream_result const r = v.stream.read_some({&all, 1});
            if (r.status == stream_status::would_block) break;
            if (r.status != stream_status::ok) return hang_up(v);
            detail::append(v.in, all.first(r.bytes));
            v.heard = monotonic_clock::now();
            if (!parse(v)) hang_up(v, " sent bytes during start-up that ddp did not write");
        }
    }
    [[gnu::cold]] void hang_up(visitor& v, char const* why = " ended during start-up; its own output says why") {
        if (v.rank >= 0 && failure_.empty() && !v.accused && !done(v.rank)) failure_ = name(v) + why;
        v.gone = true;
    }
    /// Returns false if these are not the bytes of a rank.
    [[gnu::cold]] bool parse(visitor& v) {
        if (v.done) {
            v.in.clear();
            return true;
        }
        if (v.rank < 0) {
            detail::store_hello hello;
            std::size_t const part = std::min(v.in.size(), sizeof hello.magic);
            if (std::memcmp(v.in.data(), &hello.magic, part) != 0) return false;
            if (v.in.size() < sizeof hello) return true;
            std::memcpy(&hello, v.in.data(), sizeof hello);
            v.in.erase(0, sizeof hello);
            if (!secret_.matches(hello.secret)) return false;
            if (hello.version == version_number && hello.job != job_) return false;  // looks for another server
            greet(v, hello);
        }
        while (v.rank >= 0 && v.in.size() >= sizeof(detail::store_head)) {
            detail::store_head head;
            std::memcpy(&head, v.in.data(), sizeof head);
            if (head.op == detail::store_op::alive) {
                v.in.erase(0, sizeof head);
                continue;
            }
            if (v.waits && head.op != detail::store_op::fail) break;  // which ends the wait
            if (head.key > head.max_key || head.value > head.max_value) return false;
            std::size_t const whole = sizeof head + head.key + head.value;
            if (v.in.size() < whole) return true;
            std::string key = v.in.substr(sizeof head, head.key);
            std::string value = v.in.substr(sizeof head + head.key, head.value);
            v.in.erase(0, whole);
            if (head.op == detail::store_op::put) {
                if (data_.size() >= 4 * static_cast<std::size_t>(size_) + 1024) return false;
                data_[std::move(key)] = std::move(value);
                v.reply(detail::store_op::ok, {});
            } else if (head.op == detail::store_op::fail) {
                v.accused = true;
                if (accusation_.empty()) {
                    accusation_ = detail::printable(value);
                    accused_at_ = monotonic_clock::now();
                }
                v.waits = true;  // for what all ranks are told
                v.count = ~std::uint32_t{0};
                v.told = false;  // it may have been told before: it is told again, and does not wait
            } else if (head.op == detail::store_op::all) {
                v.waits = true;
                v.prefix = std::move(key);
                v.count = head.count;
            } else {
                return false;
            }
        }
        return v.in.size() <= sizeof(detail::store_head) + detail::store_head::max_key + detail::store_head::max_value;
    }
    [[gnu::cold]] void greet(visitor& v, detail::store_hello const& hello) {
        std::string const who = detail::printable(hello.who.view());
        std::string refusal;
        if (hello.rank >= 0 && hello.rank < size_) came_[static_cast<std::size_t>(hello.rank)] = true;
        if (hello.version != version_number || hello.record_bytes != sizeof(failure)) {
            refusal = detail::concat({"rank ", hello.rank, " (", who,
                                      ") was built with another version of ddp: ", hello.version, ", rank 0 has ",
                                      version_number, ". All ranks must run the same program"});
            if (refused_.size() < 1000) refused_ += detail::concat({refused_.empty() ? "; " : ", ", refusal});
        } else if (hello.size != size_) {
            refusal = detail::concat(
                {"rank ", hello.rank, " (", who, ") has WORLD_SIZE ", hello.size, ", rank 0 has ", size_,
                 ". All ranks must be started with the same; two jobs at once need different MASTER_PORTs"});
            if (failure_.empty()) failure_ = refusal;
            refusal = failure_;  // all hear of the first
        } else if (hello.rank < 0 || hello.rank >= size_) {
            refusal = detail::concat({"rank ", hello.rank, " (", who, ") does not exist in a job of ", size_});
        } else if (std::string& holder = present_[static_cast<std::size_t>(hello.rank)]; !holder.empty()) {
            refusal = detail::concat({"rank ", hello.rank, " (", who, ") connected a second time: ", holder,
                                      " already has that rank. Give every process a RANK of its own, and every job a "
                                      "MASTER_PORT of its own"});
        } else {
            v.rank = hello.rank;
            holder = who.empty() ? "?" : who;
            if (failure_.empty()) return v.reply(detail::store_op::ok, nonce_);
            refusal = failure_;
        }
        v.done = true;
        v.reply(detail::store_op::refused, refusal);
    }
    [[gnu::cold]] void name_missing() {
        std::string missing;
        int count = 0;
        for (int r = 0; r < size_; ++r)
            if (present_[static_cast<std::size_t>(r)].empty())
                missing += detail::concat({missing.empty() ? "" : ", ", r});
            else
                ++count;
        if (missing.empty()) {
            until_ = never;
            return;
        }
        if (strangers_ > 0)
            refused_ += detail::concat({"; connections with another secret, DDP_TLS or DDP_JOB_ID: ", strangers_});
        failure_ = detail::concat(
            {"ranks {", missing, "} never joined (", count, " of ", size_, " present after ",
             times_.join.count() / 1000,
             " s). Check that they were started, with this MASTER_ADDR and MASTER_PORT, and look at their output; "
             "if fewer were started on purpose, set WORLD_SIZE to their number",
             refused_});
    }
    /// Rank 0 continues once the others no longer need the store: if it ends after that, they are connected and see it
    /// on their links. It does not wait for a rank that has been silent for long, because packets of that rank may be
    /// lost several times, and the ranks that have their answers expect heartbeats of rank 0.
    [[nodiscard, gnu::cold]] bool others_are_told() const {
        timing::milliseconds const patience = std::min(times_.handshake, times_.dead / 4);
        return std::all_of(visitors_.begin(), visitors_.end(), [&](visitor const& v) {
            return v.rank <= 0 || v.needs_nothing() || monotonic_clock::now() - v.heard >= patience;
        });
    }
    [[gnu::cold]] void answer(visitor& v) {
        if (!v.waits) return;
        if (!failure_.empty()) return;  // all ranks are told the failure
        auto const from = data_.lower_bound(v.prefix);
        auto to = from;
        std::uint32_t count = 0;
        for (; to != data_.end() && to->first.compare(0, v.prefix.size(), v.prefix) == 0; ++to) ++count;
        if (count < v.count) return;
        bool const last = v.prefix == "done/";
        if (last && v.rank == 0 && !others_are_told()) return;
        v.waits = false;
        v.dismissed = last;
        std::string all;
        for (auto at = from; at != to; ++at) {
            detail::store_head const head{detail::store_op::ok, static_cast<std::uint32_t>(at->first.size()),
                                          static_cast<std::uint32_t>(at->second.size()), 0};
            detail::append(all, bytes_of(head));
            all.append(at->first).append(at->second);
        }
        v.reply(detail::store_op::ok, all);
    }
    [[gnu::cold]] void write(visitor& v) {
        while (!v.gone && v.unsent()) {
            const_bytes const out = as_const_bytes(std::span<char const>(v.out));
            stream_result const r = out.empty() ? v.stream.flush() : v.stream.write_some({&out, 1});
            v.out.erase(0, r.bytes);
            if (r.status == stream_status::would_block) return;
            if (r.status != stream_status::ok) return hang_up(v);
        }
        if (v.done && !v.gone && v.out.empty()) v.stream.shutdown_send();  // it closes its end once it has read that
    }

    detail::tcp_acceptor acceptor_;
    bool local_;
    std::shared_ptr<tcp_security const> security_;
    int size_;
    std::uint64_t job_;
    std::string nonce_;
    detail::kept_secret secret_;
    timing times_;
    time_point until_;
    std::vector<std::string> present_;  // by rank: its process and host, or empty
    std::vector<bool> came_;            // by rank: has sent its hello, accepted or not
    std::map<std::string, std::string> data_;
    std::list<visitor> visitors_;
    std::string failure_, refused_;
    std::ptrdiff_t strangers_ = 0;
    std::string accusation_;  // what a rank has reported, and when
    time_point accused_at_ = {};
    time_point last_turn_ = monotonic_clock::now();
    doorbell bell_;
    std::optional<doorbell> spare_{std::in_place};  // never rung: a descriptor to close when none is left
    time_point full_until_ = {};
    std::atomic<bool> stopping_{false}, together_{false}, closed_{false};  // closed: finish() may return
    std::mutex failing_;
    std::string own_failure_;  // of rank 0, under failing_
    std::thread thread_;
};

}  // namespace ddp
