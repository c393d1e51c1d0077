/// \file
/// hierarchical_allreduce: ranks add up inside their hosts first, so that hosts exchange sums only.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ddp/collective/concepts.hpp>
#include <ddp/collective/host_role.hpp>
#include <ddp/comm/communicator.hpp>
#include <ddp/comm/host.hpp>
#include <ddp/comm/small_gather.hpp>
#include <ddp/core/contract.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/kernel/combine.hpp>

namespace ddp {

namespace detail {

/// Where the ranks of a group are, and what this one does there.
struct host_plan {
    host_plan(group const& of, std::span<std::uint64_t const> places);

    [[nodiscard]] bool belongs_to(group const& of) const noexcept {
        return std::ranges::equal(of.members(), members) && static_cast<std::size_t>(of.rank()) == role.me;
    }
    /// Of this host.
    [[nodiscard]] std::span<std::size_t const> ranks() const noexcept { return role.trees.ranks_of(role.here); }
    /// The ranks whose slices the rank at that place on this host adds up there, itself last.
    [[nodiscard]] std::span<std::size_t const> owners(std::size_t at) const noexcept { return owners_[at]; }

    std::vector<int> members;        // ranks of the job
    std::vector<std::size_t> hosts;  // of each rank, its number
    host_role role;
    std::size_t place;   // of this rank among those of its host
    std::uint64_t hash;  // of `hosts`

private:
    std::vector<std::vector<std::size_t>> owners_;
};

}  // namespace detail

/// Reduce-scatter inside each host, reduce-scatter and all-gather between hosts, all-gather inside each host.
///
///     ddp::hierarchical_allreduce const by_hosts(comm);  // collective
///     ddp::allreduce(comm, data, by_hosts);
///
/// Each rank owns a slice of the data. On each host one rank collects, for each slice, what the ranks of the host have there,
/// adds up the subtrees of the canonical tree whose ranks are all on this host, and sends these sums to the owner, if the owner
/// is elsewhere. The owner joins the sums of all hosts and returns the result the same way. All four stages run at once, on one
/// chunk after the other.
///
/// data     n elements (S bytes), the same n on every rank; on return every rank holds the same bits.
/// Cost     4 steps of latency. Between hosts a host of g ranks that form k subtrees sends S (k (P-g) + (H-1) g) / P bytes.
///          With H hosts of equal size, ranks numbered host by host and g a power of two, k = 1 and this is 2S(H-1)/H, where
///          direct_allreduce sends g times as much. With other numbers of ranks k is up to about 2 log2 g, and with ranks
///          placed round-robin k = g. On hosts of equal size each rank sends an equal share of these bytes, in k + 1
///          messages for each chunk_bytes of a slice and other host. Inside its host a rank sends about 2S(g-1)/g bytes.
///          Scratch: `window` chunks of each other rank of the host for each slice that is added up here, and of each
///          subtree of another host.
/// Sums     the canonical tree over ranks; other operations likewise.
/// Group    the one that it was made for, or any of the same ranks in the same order, such as that of a trainer. With any
///          other, calls throw usage_error before anything is sent.
/// Throws   collective_aborted inside the scheduler, comm_error to the caller; data is then unspecified.
/// Source   Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19(1), 2005,
///          for the stages; sums inside hosts first as in Horovod's and NCCL's hierarchical allreduce. That only subtrees are
///          added inside a host, for the canonical order, is an addition of this library.
class hierarchical_allreduce {
public:
    static constexpr char const* name = "hierarchical";
    static constexpr bool canonical = true;

    std::size_t chunk_bytes = std::size_t{256} << 10;  ///< bytes of a chunk: one is added while others are on their way
    std::size_t window = 4;                            ///< chunks of a slice that may be under way to this rank

    /// Collective: ranks tell each other on which host they run, by an all-gather of 8 bytes per rank. Throws comm_error.
    template <Transport T>
    explicit hierarchical_allreduce(communicator<T> const& comm)
        : hierarchical_allreduce(comm, host_of(comm.transport())) {}
    /// The same with `place` instead of the host: ranks that pass the same number count as near (one rack, one socket).
    template <Transport T>
    hierarchical_allreduce(communicator<T> const& comm, std::uint64_t place)
        : hierarchical_allreduce(comm.members(), places(comm, place)) {}
    /// The same if the places of all ranks are known: every rank passes the same list. Sends nothing. `ranks` is
    /// communicator::members().
    hierarchical_allreduce(group const& ranks, std::span<std::uint64_t const> places)
        : plan_(std::make_shared<detail::host_plan const>(ranks, places)) {}

    /// The number of each rank's host: 0 is that of rank 0, the others follow in the order of their lowest ranks.
    [[nodiscard]] std::span<std::size_t const> hosts() const noexcept { return plan_->hosts; }
    [[nodiscard]] static bool everywhere(std::size_t /*bytes*/, int ranks) noexcept { return ranks == 1; }
    /// Of the options that shape the messages; ranks compare it.
    [[nodiscard]] std::uint64_t hash() const noexcept { return policy_hash(name, chunk_bytes, plan_->hash); }
    [[nodiscard]] std::string hash_words() const { return policy_words(name, {{"chunk_bytes", chunk_bytes}}); }
    /// Throws usage_error if made for other ranks.
    void check_group(group const& ranks) const {
        DDP_EXPECTS(plan_->belongs_to(ranks),
                    "hierarchical_allreduce: it was made for other ranks than those of this group; make one from the "
                    "communicator that it is used with");
    }

    template <Transport T, Number E>
    static task<> sum(hierarchical_allreduce self, lane<T> over, std::span<E> data) {
        return combine(std::move(self), over, data, ddp::sum{});
    }
    template <Transport T, Number E, OperationOn<E> Op>
    static task<> combine(hierarchical_allreduce self, lane<T> over, std::span<E> data, Op /*op*/) {
        self.check_group(*over.of);
        return whole<T, E, Op>(std::move(self), over, data);
    }
    template <Transport T, Number E, OperationOn<E> Op>
    static task<> reduce(hierarchical_allreduce self, lane<T> over, reduction<E, Op> what) {
        self.check_group(*over.of);
        return run(std::move(self), over, what, false);
    }
    template <Transport T, Number E>
    static task<> all_gather(hierarchical_allreduce self, lane<T> over, std::span<E> data,
                             std::span<std::size_t const> cuts) {
        self.check_group(*over.of);
        return spread(std::move(self), over, data, cuts);
    }

private:
    // Phases of the messages. Stages of one kind have the same order on both ends: chunk after chunk, in each the slices as
    // host_plan::owners lists them.
    static constexpr std::uint32_t addends = 0, sums = 1, results = 2, copies = 3;

    /// The data in slices, and these in chunks.
    template <Number E>
    struct pieces {
        std::span<E> data;
        std::span<std::size_t const> cuts;
        std::size_t chunk;

        [[nodiscard]] std::size_t slice(std::size_t r) const noexcept { return cuts[r + 1] - cuts[r]; }
        [[nodiscard]] std::size_t count(std::size_t r) const noexcept { return (slice(r) + chunk - 1) / chunk; }
        /// Of all slices in a list.
        [[nodiscard]] std::size_t count(std::span<std::size_t const> owners) const noexcept {
            std::size_t all = 0;
            for (std::size_t const r : owners) all += count(r);
            return all;
        }
        /// Of the longest slice.
        [[nodiscard]] std::size_t most() const noexcept {
            std::size_t most = 0;
            for (std::size_t r = 0; r + 1 < cuts.size(); ++r) most = std::max(most, count(r));
            return most;
        }
        [[nodiscard]] std::span<E> at(std::size_t r, std::size_t c) const noexcept {
            return data.subspan(cuts[r] + c * chunk, std::min(chunk, slice(r) - c * chunk));
        }
    };
    template <Number E>
    [[nodiscard]] pieces<E> cut(std::span<E> data, std::span<std::size_t const> cuts) const noexcept {
        return {data, cuts, std::max<std::size_t>(1, chunk_bytes / sizeof(E))};
    }
    /// Chunks that the other ranks of the host add up and bring back.
    template <Number E>
    [[nodiscard]] std::size_t elsewhere(pieces<E> const& all) const noexcept {
        std::size_t count = 0;
        for (std::size_t p = 0; p < plan_->ranks().size(); ++p)
            if (p != plan_->place) count += all.count(plan_->owners(p));
        return count;
    }
    /// Calls f(chunk, rank) for each of them, in the order of the messages.
    template <Number E, class F>
    void for_elsewhere(pieces<E> const& all, F const& f) const {
        std::size_t const here = plan_->ranks().size();
        for (std::size_t c = 0; c < all.most(); ++c)
            for (std::size_t d = 1; d < here; ++d) {
                std::size_t const p = (plan_->place + d) % here;
                for (std::size_t const owner : plan_->owners(p))
                    if (c < all.count(owner)) f(all.at(owner, c), static_cast<int>(plan_->ranks()[p]));
            }
    }
    /// Sends a piece to the other ranks of the host.
    template <Transport T, Number E>
    void send_inside(lane<T> const& over, operations& out, std::size_t& posted, std::span<E> piece) const {
        std::size_t const here = plan_->ranks().size();
        for (std::size_t d = 1; d < here; ++d)
            over.send(out[posted++], static_cast<int>(plan_->ranks()[(plan_->place + d) % here]),
                      as_const_bytes(piece));
    }
    template <Transport T, Number E>
    void send_across(lane<T> const& over, operations& out, std::size_t& posted, std::span<E> piece) const {
        for (std::size_t const peer : plan_->role.counterparts)
            over.send(out[posted++], static_cast<int>(peer), as_const_bytes(piece));
    }

    template <Transport T>
    static std::vector<std::uint64_t> places(communicator<T> const& comm, std::uint64_t mine) {
        std::vector<std::uint64_t> all(static_cast<std::size_t>(comm.size()));
        all[static_cast<std::size_t>(comm.rank())] = mine;
        operation_info what;
        what.name = "hierarchical_allreduce";
        what.detail = "making one";
        what.fingerprint = detail::agree(what.name, 0, "", what.detail);
        comm.run([&] {
            lane<T> const over = comm.enter(what);
            return comm.size() == 1 ? detail::nothing() : all_gather_small(over, std::span<std::uint64_t>(all));
        });
        return all;
    }

    template <Transport T, Number E, class Op>
    static task<> whole(hierarchical_allreduce self, lane<T> over, std::span<E> data) {
        detail::slice_cuts<E> const cuts(data.size(), over.size());
        co_await run(self, over, reduction<E, Op>{data, cuts.get()}, true);
    }
    template <Transport T, Number E, class Op>
    static task<> run(hierarchical_allreduce self, lane<T> over, reduction<E, Op> what, bool forward);
    template <Transport T, Number E>
    static task<> spread(hierarchical_allreduce self, lane<T> over, std::span<E> data,
                         std::span<std::size_t const> cuts);

    std::shared_ptr<detail::host_plan const> plan_;
};

namespace detail {

inline host_plan::host_plan(group const& of, std::span<std::uint64_t const> places)
    : members(of.members().begin(), of.members().end()),
      hosts(host_numbers(places)),
      role(hosts, static_cast<std::size_t>(of.rank())),
      place(static_cast<std::size_t>(std::ranges::find(ranks(), role.me) - ranks().begin())),
      hash(digest().add(std::span<std::size_t const>(hosts)).value()) {
    for (std::size_t const r : ranks()) {
        owners_.push_back(role.trees.stands_for(r));
        owners_.back().push_back(r);
    }
}

}  // namespace detail

template <Transport T, Number E, class Op>
task<> hierarchical_allreduce::run(hierarchical_allreduce self, lane<T> over, reduction<E, Op> what, bool forward) {
    detail::host_plan const& plan = *self.plan_;
    host_role const& role = plan.role;
    std::size_t const me = role.me, here = plan.ranks().size(), others = here - 1, trees = role.senders.size(),
                      foreign = role.foreign_trees(), ours = role.ours.size();
    std::span<std::size_t const> const owners = plan.owners(plan.place);
    pieces<E> const all = self.cut(what.data, what.cuts);
    std::size_t const chunks = all.most(), window = std::min(chunks, std::max<std::size_t>(1, self.window)),
                      mine = all.count(me), carried = all.count(owners) - mine;
    // A chunk's sums are joined this many chunks after those of its host, and copied as many after that: messages take time.
    std::size_t const behind = window / 2;

    constexpr std::size_t line = 64 / sizeof(E);
    std::size_t longest = 0;
    for (std::size_t const r : owners) longest = std::max(longest, all.slice(r));
    std::size_t const room = std::min(all.chunk, (longest + line - 1) / line * line);  // elements of a chunk
    scratch memory(window * (owners.size() * others + foreign) * room * sizeof(E));
    scratch table(std::max(here, trees) * sizeof(E const*));
    std::span<E> const space = memory.as<E>();
    std::span<E const*> const sources = table.as<E const*>();

    lane<T> const in_sums = over.phase(sums), in_results = over.phase(results), in_copies = over.phase(copies);
    operations addends_in((mine + carried) * others), addends_out(self.elsewhere(all));
    operations sums_in(mine * foreign), sums_out(carried * ours);
    operations results_in(forward ? carried : 0), results_out(forward ? mine * role.counterparts.size() : 0);
    operations copies_in(forward ? addends_out.size() : 0), copies_out(forward ? addends_in.size() : 0);

    // Chunk c of the j-th slice of this rank as the rank at place p has it; and the sum of a subtree of another host.
    auto const of_rank = [&](std::size_t j, std::size_t c, std::size_t p) {
        std::span<E> const own = all.at(owners[j], c);
        if (p == plan.place) return own;
        std::size_t const d = (p + here - plan.place) % here - 1;
        return space.subspan((((c % window) * owners.size() + j) * others + d) * room, own.size());
    };
    auto const of_tree = [&](std::size_t c, std::size_t k) {
        return space.subspan((window * owners.size() * others + (c % window) * foreign + k) * room,
                             all.at(me, c).size());
    };
    std::size_t addends_expected = 0, sums_expected = 0;
    auto const expect = [&](std::size_t c) {
        for (std::size_t j = 0; j < owners.size(); ++j)
            for (std::size_t d = 1; d < here && c < all.count(owners[j]); ++d) {
                std::size_t const p = (plan.place + d) % here;
                over.receive(addends_in[addends_expected++], static_cast<int>(plan.ranks()[p]),
                             as_mutable_bytes(of_rank(j, c, p)));
            }
        if (c >= mine) return;
        for (std::size_t t = 0, k = 0; t < trees; ++t)
            if (role.senders[t] != me)
                in_sums.receive(sums_in[sums_expected++], static_cast<int>(role.senders[t]),
                                as_mutable_bytes(of_tree(c, k++)));
    };
    /// Leaves the sum of each subtree of this host where its first rank's addend is.
    auto const add_inside = [&](std::size_t j, std::size_t c) {
        for (std::size_t k = 0; k < ours; ++k) {
            std::size_t const first = role.firsts[k], count = role.ours[k].size();
            for (std::size_t p = 0; p < count; ++p) sources[p] = of_rank(j, c, first + p).data();
            combine_tree<Op>(of_rank(j, c, first), std::span<E const* const>(sources.first(count)));
        }
    };
    auto const join = [&](std::size_t c) {
        for (std::size_t t = 0, k = 0, n = 0; t < trees; ++t)
            sources[t] =
                role.senders[t] == me ? of_rank(owners.size() - 1, c, role.firsts[n++]).data() : of_tree(c, k++).data();
        role.trees.combine<Op>(all.at(me, c), std::span<E const* const>(sources.first(trees)),
                               what.factor != nullptr ? *what.factor : E(1));
    };

    for (std::size_t c = 0; c < window; ++c) expect(c);
    if (what.go != nullptr) co_await *what.go;

    std::size_t posted = 0;
    self.for_elsewhere(all, [&](std::span<E> piece, int peer) {
        over.send(addends_out[posted], peer, as_const_bytes(piece));
        // A result overwrites this rank's addend. There is no result before the peer has received that.
        if (forward) in_copies.receive(copies_in[posted], peer, as_mutable_bytes(piece), &addends_out[posted]);
        ++posted;
    });

    std::size_t added = 0, sent = 0, settled = 0, joined = 0, returned = 0, expected = 0, come = 0, copied = 0;
    for (std::size_t step = 0; step < chunks + 2 * behind; ++step) {
        for (std::size_t j = 0, c = step; j < owners.size(); ++j) {
            std::size_t const owner = owners[j];
            if (c >= all.count(owner)) continue;
            for (std::size_t d = 0; d < others; ++d) co_await addends_in[added++];
            add_inside(j, c);
            if (owner == me) continue;
            operation* reader = nullptr;
            for (std::size_t k = 0; k < ours; ++k) {
                if (role.firsts[k] == plan.place) reader = &sums_out[sent];
                in_sums.send(sums_out[sent++], static_cast<int>(owner), as_const_bytes(of_rank(j, c, role.firsts[k])));
            }
            if (forward)
                in_results.receive(results_in[expected++], static_cast<int>(owner), as_mutable_bytes(all.at(owner, c)),
                                   reader);
        }
        if (step >= behind) {
            std::size_t const c = step - behind;
            if (c < mine) {
                for (std::size_t k = 0; k < foreign; ++k) co_await sums_in[joined++];
                join(c);
                if (forward) self.send_across(in_results, results_out, returned, all.at(me, c));
            }
            for (std::size_t const owner : owners)  // another chunk needs their scratch
                if (owner != me && c < all.count(owner))
                    for (std::size_t k = 0; k < ours; ++k) co_await sums_out[settled++];
            if (c + window < chunks) expect(c + window);
        }
        if (forward && step >= 2 * behind) {
            std::size_t const c = step - 2 * behind;
            for (std::size_t const owner : owners) {
                if (c >= all.count(owner)) continue;
                if (owner != me) co_await results_in[come++];
                self.send_inside(in_copies, copies_out, copied, all.at(owner, c));
            }
        }
    }
    for (std::size_t i = 0; i < copies_in.size(); ++i) co_await copies_in[i];
    for (std::size_t i = 0; i < addends_out.size(); ++i) co_await addends_out[i];
    for (std::size_t i = 0; i < results_out.size(); ++i) co_await results_out[i];
    for (std::size_t i = 0; i < copies_out.size(); ++i) co_await copies_out[i];
}

template <Transport T, Number E>
task<> hierarchical_allreduce::spread(hierarchical_allreduce self, lane<T> over, std::span<E> data,
                                      std::span<std::size_t const> cuts) {
    detail::host_plan const& plan = *self.plan_;
    std::size_t const me = plan.role.me, others = plan.ranks().size() - 1;
    std::span<std::size_t const> const owners = plan.owners(plan.place);
    pieces<E> const all = self.cut(data, cuts);
    std::size_t const chunks = all.most(), mine = all.count(me), carried = all.count(owners) - mine;
    lane<T> const in_results = over.phase(results), in_copies = over.phase(copies);
    operations results_in(carried), results_out(mine * plan.role.counterparts.size());
    operations copies_in(self.elsewhere(all)), copies_out((mine + carried) * others);

    std::size_t expected = 0, copied = 0, come = 0, returned = 0, posted = 0;
    for (std::size_t c = 0; c < chunks; ++c)
        for (std::size_t const owner : owners)
            if (owner != me && c < all.count(owner))
                in_results.receive(results_in[expected++], static_cast<int>(owner), as_mutable_bytes(all.at(owner, c)));
    self.for_elsewhere(all, [&](std::span<E> piece, int peer) {
        in_copies.receive(copies_in[posted++], peer, as_mutable_bytes(piece));
    });
    for (std::size_t c = 0; c < mine; ++c) self.send_across(in_results, results_out, returned, all.at(me, c));
    for (std::size_t c = 0; c < chunks; ++c)
        for (std::size_t const owner : owners) {
            if (c >= all.count(owner)) continue;
            if (owner != me) co_await results_in[come++];
            self.send_inside(in_copies, copies_out, copied, all.at(owner, c));
        }
    for (std::size_t i = 0; i < copies_in.size(); ++i) co_await copies_in[i];
    for (std::size_t i = 0; i < results_out.size(); ++i) co_await results_out[i];
    for (std::size_t i = 0; i < copies_out.size(); ++i) co_await copies_out[i];
}

}  // namespace ddp
