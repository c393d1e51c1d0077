/// \file
/// ring_allreduce: slices travel round a ring, summed on the first lap and handed out on the second.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <string>

#include <ddp/collective/concepts.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/kernel/combine.hpp>

namespace ddp {

/// Ring reduce-scatter and all-gather, in place, in segments: a segment goes on to the next rank while the one behind it
/// arrives. Each rank exchanges messages with two others only. (reduce leaves partial sums in the slices that are not this
/// rank's.)
///
/// data    n elements (S bytes), the same n on every rank; on return every rank holds the same bits.
/// Cost    2(P-1) steps of latency. Rank r sends all slices but its own on the first lap, and all but rank r+1's on the
///         second: 2S(P-1)/P bytes where slices are equal; slice k goes in ceil(S_k / segment_bytes) messages, none
///         where it is empty. Scratch: `window` segments. `reduce` is the first lap, `all_gather` the second.
/// Sums    slice k in the order of the ring: ranks k+1, k+2, …, P-1, 0, …, k, one after the other. Repeatable for a given
///         P and given slices, but not the canonical order: other bits than the canonical algorithms.
/// Throws  collective_aborted inside the scheduler, comm_error to the caller; data is then unspecified.
/// Source  Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69(2), 2009.
struct ring_allreduce {
    static constexpr char const* name = "ring";
    static constexpr bool canonical = false;

    std::size_t segment_bytes = std::size_t{1} << 20;  ///< fits the L2 cache, and takes longer than a message's latency
    std::size_t window = 4;                            ///< segments that may be under way to each rank on the first lap

    [[nodiscard]] static bool everywhere(std::size_t /*bytes*/, int ranks) noexcept { return ranks == 1; }
    [[nodiscard]] std::uint64_t hash() const noexcept { return policy_hash(name, segment_bytes); }
    [[nodiscard]] std::string hash_words() const { return policy_words(name, {{"segment_bytes", segment_bytes}}); }

    template <Transport T, Number E>
    static task<> sum(ring_allreduce self, lane<T> over, std::span<E> data) {
        return combine(self, over, data, ddp::sum{});
    }
    template <Transport T, Number E, OperationOn<E> Op>
    static task<> combine(ring_allreduce self, lane<T> over, std::span<E> data, Op /*op*/) {
        detail::slice_cuts<E> const cuts(data.size(), over.size());
        co_await run(self, over, reduction<E, Op>{.data = data, .cuts = cuts.get()}, true);
    }
    template <Transport T, Number E, OperationOn<E> Op>
    static task<> reduce(ring_allreduce self, lane<T> over, reduction<E, Op> what) {
        co_await run(self, over, what, false);
    }
    template <Transport T, Number E>
    static task<> all_gather(ring_allreduce self, lane<T> over, std::span<E> data, std::span<std::size_t const> cuts) {
        if (over.size() == 1) co_return;
        std::size_t const me = static_cast<std::size_t>(over.rank());
        second_lap<T, E> lap(over.phase(1), data, route{cuts, self.segment<E>()});
        lap.expect();
        for (walk own(lap.path(), me, 1); !own.done();) lap.pass_on(own.next());
        co_await second_lap<T, E>::run(lap);
    }

private:
    template <Number E>
    [[nodiscard]] std::size_t segment() const noexcept {
        return std::max<std::size_t>(1, segment_bytes / sizeof(E));
    }

    struct piece {
        std::size_t slice;
        std::size_t begin;  // in data
        std::size_t count;
    };

    /// How slices fall into segments; the same on every rank.
    struct route {
        std::span<std::size_t const> cuts;
        std::size_t segment;  // elements

        [[nodiscard]] std::size_t ranks() const noexcept { return cuts.size() - 1; }
        [[nodiscard]] std::size_t before(std::size_t slice, std::size_t steps) const noexcept {
            return (slice + ranks() - steps % ranks()) % ranks();
        }
        /// Segments of every slice but this one.
        [[nodiscard]] std::size_t all_but(std::size_t slice) const noexcept {
            std::size_t count = 0;
            for (std::size_t k = 0; k < ranks(); ++k)
                if (k != slice) count += (cuts[k + 1] - cuts[k] + segment - 1) / segment;
            return count;
        }
    };

    /// The segments of `slices` slices, slice by slice backwards round the ring: the order in which they are sent.
    class walk {
    public:
        walk(route const& path, std::size_t slice, std::size_t slices) noexcept
            : path_(path), slice_(slice), left_(slices), at_(path.cuts[slice]) {
            settle();
        }
        [[nodiscard]] bool done() const noexcept { return left_ == 0; }
        piece next() noexcept {
            piece const p{slice_, at_, std::min(path_.segment, path_.cuts[slice_ + 1] - at_)};
            at_ += p.count;
            settle();
            return p;
        }

    private:
        void settle() noexcept {  // onto the next slice that has something left
            while (left_ > 0 && at_ == path_.cuts[slice_ + 1]) {
                --left_;
                slice_ = path_.before(slice_, 1);
                at_ = path_.cuts[slice_];
            }
        }
        route path_;
        std::size_t slice_;
        std::size_t left_;
        std::size_t at_;
    };

    /// Finished slices on their way round: received in place, sent on as they come.
    template <Transport T, Number E>
    class second_lap {
    public:
        second_lap(lane<T> over, std::span<E> data, route const& path)
            : over_(over),
              data_(data),
              path_(path),
              me_(static_cast<std::size_t>(over.rank())),
              in_(path.all_but(me_)),
              out_(path.all_but((me_ + 1) % path.ranks())) {}

        [[nodiscard]] route const& path() const noexcept { return path_; }
        /// `partial`: in the same call of run, the sends of the first lap, which walk the same segments in the same order.
        void expect(operations* partial = nullptr) {
            std::size_t posted = 0;
            int const left = static_cast<int>(path_.before(me_, 1));
            for (walk theirs(path_, path_.before(me_, 1), path_.ranks() - 1); !theirs.done();) {
                piece const p = theirs.next();
                over_.receive(in_[posted], left, as_mutable_bytes(data_.subspan(p.begin, p.count)),
                              partial == nullptr ? nullptr : &(*partial)[posted]);
                ++posted;
            }
        }
        void pass_on(piece const& p) {
            int const right = static_cast<int>((me_ + 1) % path_.ranks());
            over_.send(out_[sent_++], right, as_const_bytes(data_.subspan(p.begin, p.count)));
        }
        /// Everything that is left once this rank's own slice has been passed on.
        static task<> run(second_lap& self) {
            walk theirs(self.path_, self.path_.before(self.me_, 1), self.path_.ranks() - 1);
            for (std::size_t i = 0; i < self.in_.size(); ++i) {
                piece const p = theirs.next();
                co_await self.in_[i];
                if (p.slice != (self.me_ + 1) % self.path_.ranks()) self.pass_on(p);  // that is where it came from
            }
            for (std::size_t i = 0; i < self.out_.size(); ++i) co_await self.out_[i];
        }

    private:
        lane<T> over_;
        std::span<E> data_;
        route path_;
        std::size_t me_;
        operations in_, out_;
        std::size_t sent_ = 0;
    };

    template <Transport T, Number E, class Op>
    static task<> run(ring_allreduce self, lane<T> over, reduction<E, Op> what, bool forward) {
        route const path{what.cuts, self.segment<E>()};
        std::size_t const ranks = path.ranks(), me = static_cast<std::size_t>(over.rank());
        if (ranks == 1) {
            if (what.go != nullptr) co_await *what.go;
            if (what.factor != nullptr) scale(what.data, *what.factor);
            co_return;
        }
        int const left = static_cast<int>(path.before(me, 1)), right = static_cast<int>((me + 1) % ranks);

        operations receives(path.all_but(path.before(me, 1))), sends(path.all_but(me));
        std::size_t longest = 0;
        for (std::size_t k = 0; k < ranks; ++k) longest = std::max(longest, what.cuts[k + 1] - what.cuts[k]);
        std::size_t const room = std::min(longest, path.segment),
                          window = std::min(receives.size(), std::max<std::size_t>(1, self.window));
        scratch memory(window * room * sizeof(E));
        std::span<E> const space = memory.template as<E>();

        // The last slice to come is this rank's own: by then all others have added to it.
        walk expected(path, path.before(me, 2), ranks - 1), arriving = expected;
        std::size_t posted = 0;
        auto const expect = [&] {
            std::size_t const i = posted++;
            over.receive(receives[i], left,
                         as_mutable_bytes(space.subspan((i % window) * room, expected.next().count)));
        };
        while (posted < window) expect();
        // Without the second lap no message belongs to it: an empty route.
        static constexpr std::size_t no_cuts[] = {0, 0};
        second_lap<T, E> lap(over.phase(1), what.data, forward ? path : route{no_cuts, 1});
        if (what.go != nullptr) co_await *what.go;

        // A result overwrites a partial sum of its slice. There is no result before that has gone round the ring.
        if (forward) lap.expect(&sends);
        std::size_t sent = 0;
        for (walk first(path, path.before(me, 1), 1); !first.done();) {
            piece const p = first.next();
            over.send(sends[sent++], right, as_const_bytes(what.data.subspan(p.begin, p.count)));
        }
        for (std::size_t i = 0; i < receives.size(); ++i) {
            piece const p = arriving.next();
            std::span<E> const mine = what.data.subspan(p.begin, p.count);
            co_await receives[i];
            E const* const both[] = {space.data() + (i % window) * room, mine.data()};
            bool const finished = p.slice == me;
            combine_tree_scaled<Op>(mine, both, finished && what.factor != nullptr ? *what.factor : E(1));
            if (posted < receives.size()) expect();
            if (!finished)
                over.send(sends[sent++], right, as_const_bytes(mine));
            else if (forward)
                lap.pass_on(p);
        }
        if (forward) co_await second_lap<T, E>::run(lap);
        for (std::size_t i = 0; i < sends.size(); ++i) co_await sends[i];
    }
};

}  // namespace ddp
