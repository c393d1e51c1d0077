/// \file
/// virtual_cluster: runs the programs of hundreds of ranks, written as coroutines, in one thread on virtual time.
#pragma once

#include <ddp/core/language.hpp>  // first

#include <algorithm>
#include <coroutine>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ddp/comm/lane.hpp>
#include <ddp/comm/timing.hpp>
#include <ddp/core/contract.hpp>
#include <ddp/core/task.hpp>
#include <ddp/transport/virtual/virtual.hpp>

namespace ddp {

/// The outcome of one rank's program.
struct rank_outcome {
    bool finished = false;           ///< it ran to its end without an exception
    bool dead = false;               ///< killed by the script
    std::exception_ptr error;        ///< what its own code threw
    std::optional<failure> verdict;  ///< if the job failed: what this rank's calls would throw
    nanoseconds ended{-1};           ///< when its program ended, or its verdict was known; from the start
};

/// The outcome for the whole cluster.
struct cluster_outcome {
    nanoseconds elapsed{0};           ///< virtual time until the last rank's program had ended
    std::vector<rank_outcome> ranks;  ///< of each rank, by number
};

/// A simulated cluster: a virtual_world, and a scheduler for each rank.
///
///     ddp::virtual_cluster cluster(256, {.latency = 10us});
///     auto const outcome = cluster.run([&](int rank, auto& on) { return my_program(rank, &on, &cluster); });
///
/// Each rank is run when something has happened for it: messages, its deadlines, its timers. Faults are scripted on
/// world(). After a failure every living rank is driven on until its verdict is known.
/// Cost: a message takes about a microsecond of real time and no memory after the first of its kind.
class virtual_cluster {
public:
    using scheduler_type = scheduler<virtual_transport>;

    explicit virtual_cluster(int ranks, network_model const& network = {}, timing const& times = {})
        : world_(virtual_world::create(ranks, network)) {
        world_->progress_advances(false);
        for (int r = 0; r < ranks; ++r) nodes_.push_back(std::make_unique<node>(*world_, r, times));
    }
    virtual_cluster(virtual_cluster const&) = delete;
    virtual_cluster& operator=(virtual_cluster const&) = delete;

    [[nodiscard]] int size() const noexcept { return world_->size(); }
    [[nodiscard]] virtual_world& world() noexcept { return *world_; }
    [[nodiscard]] scheduler_type& scheduler_of(int rank) noexcept { return nodes_[static_cast<std::size_t>(rank)]->on; }

    /// Awaitable: the rank computes for this long. Like user code it is not interrupted by a failure of the job.
    [[nodiscard]] auto compute(int rank, nanoseconds length) { return sleeper{*this, rank, world_->now() + length}; }

    /// Runs `program(rank, scheduler)`, a task<>, on every rank until all have ended. Throws ddp::error if the ranks wait
    /// for things that will never happen. May be called again as long as nothing has failed: the clock continues.
    template <class Program>
    cluster_outcome run(Program const& program) {
        cluster_outcome outcome;
        for (std::unique_ptr<node> const& n : nodes_) {
            n->outcome = {};
            n->over = false;
            frame_pool_scope const pool(n->on.frames());
            n->body = root(program(n->on.rank(), n->on), n.get());
        }
        programs const guard{*this};  // they refer to what the caller owns, however this ends
        unfinished_ = nodes_.size();
        for (std::size_t r = 0; r < nodes_.size(); ++r) {
            if (!world_->dead(static_cast<int>(r))) {
                frame_pool_scope const pool(nodes_[r]->on.frames());
                nodes_[r]->body.start();
            }
            drive(static_cast<int>(r));
        }
        while (unfinished_ > 0) {
            if (world_->moved().empty()) world_->advance();
            going_ = world_->moved();
            world_->settled();
            due_.swap(world_->timers());
            for (virtual_world::timer const& t : due_)
                if (t.cookie != deadline && !world_->dead(t.rank)) wake(t);
            due_.clear();
            for (int const rank : going_) drive(rank);
        }
        for (std::unique_ptr<node> const& n : nodes_) {
            outcome.elapsed = std::max(outcome.elapsed, n->outcome.ended);
            outcome.ranks.push_back(n->outcome);
        }
        return outcome;
    }

private:
    static constexpr std::uint32_t deadline = ~std::uint32_t{0};  // the cookie of a scheduler's own timer

    struct sleeper {
        virtual_cluster& of;
        int rank;
        time_point until;
        std::coroutine_handle<> handle = {};
        [[nodiscard]] bool await_ready() const noexcept { return false; }
        void await_suspend(std::coroutine_handle<> self) {
            handle = self;
            of.world_->wake_at(rank, until, of.keep(this));
        }
        void await_resume() const noexcept {}
    };
    struct node {
        node(virtual_world& world, int rank, timing const& times)
            : transport(world.connect(rank)), on(*transport, times) {}
        /// The program goes first, then the transport lets go of its memory, then the pool goes.
        ~node() {
            drop();
            transport.reset();
        }
        /// Ends the program where it stands: destructors run, nothing else does.
        void drop() noexcept {
            if (!body.done()) on.fail(failure_kind::idle, errc::peer_closed, -1, "the simulation has ended");
            body = {};
        }
        std::unique_ptr<virtual_transport> transport;
        scheduler_type on;
        task<> body;
        rank_outcome outcome;
        time_point armed = never;  // when a timer of the scheduler goes off next
        bool over = false;
    };

    struct programs {
        virtual_cluster& of;
        ~programs() {
            for (std::unique_ptr<node> const& n : of.nodes_) n->drop();
        }
    };

    static task<> root(task<> program, node* n) {
        std::exception_ptr error;
        try {
            co_await program;
            n->outcome.finished = true;
        } catch (collective_aborted const&) {
        } catch (...) {
            error = std::current_exception();
        }
        program = {};
        n->outcome.error = error;
        if (error) n->on.fail(error);
    }

    std::uint32_t keep(sleeper* s) {
        if (vacant_.empty()) {
            sleepers_.push_back(s);
            return static_cast<std::uint32_t>(sleepers_.size() - 1);
        }
        std::uint32_t const cookie = vacant_.back();
        vacant_.pop_back();
        sleepers_[cookie] = s;
        return cookie;
    }
    void wake(virtual_world::timer const& t) {
        sleeper* const s = sleepers_[t.cookie];
        vacant_.push_back(t.cookie);
        frame_pool_scope const pool(nodes_[static_cast<std::size_t>(t.rank)]->on.frames());
        s->handle.resume();
    }

    /// Runs a rank until it waits again. One whose program has ended still answers: a verdict needs every rank's word.
    void drive(int rank) {
        node& n = *nodes_[static_cast<std::size_t>(rank)];
        if (n.outcome.dead || world_->frozen(rank)) return;
        for (bool moved = true; moved && !world_->dead(rank);) {
            n.on.pump();
            moved = n.transport->has_moved();
            n.on.progress(never);  // tells the scheduler, too, that it sleeps until its next deadline
        }
        n.outcome.dead = world_->dead(rank);
        if (!n.outcome.dead && n.on.failed() && !n.outcome.verdict && n.on.settle()) n.outcome.verdict = n.on.verdict();
        bool const over = n.outcome.dead || (n.body.done() && (!n.on.failed() || n.outcome.verdict));
        if (over && !n.over) n.outcome.ended = world_->elapsed();
        unfinished_ = unfinished_ + (n.over ? 1 : 0) - (over ? 1 : 0);  // a failure may come after the end
        n.over = over;
        if (!n.outcome.dead) arm(n, rank);
    }
    void arm(node& n, int rank) {
        time_point const next = n.on.next_deadline();
        if (n.armed <= world_->now()) n.armed = never;
        if (next >= n.armed) return;
        n.armed = std::max(next, world_->now());
        world_->wake_at(rank, n.armed, deadline);
    }

    std::shared_ptr<virtual_world> world_;
    std::vector<sleeper*> sleepers_;
    std::vector<std::uint32_t> vacant_;
    std::vector<int> going_;
    std::vector<virtual_world::timer> due_;
    std::size_t unfinished_ = 0;
    std::vector<std::unique_ptr<node>> nodes_;  // last: programs unwind while the rest is there
};

}  // namespace ddp
