/// \file
/// narrow_exchange: gradients are sent as numbers of 16 or 8 bits, and added in the model's own type.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <ddp/comm/lane.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/core/task.hpp>
#include <ddp/exchange/compression.hpp>
#include <ddp/exchange/exchange.hpp>
#include <ddp/exchange/int8_groups.hpp>
#include <ddp/exchange/sixteen_bit.hpp>
#include <ddp/kernel/sum.hpp>

namespace ddp {

namespace detail {

/// How elements are sent. encode and decode work on any number of them; cutting an array at multiples of narrow_block does not
/// change the result.
inline constexpr std::size_t narrow_block = 1024;

template <class Format>
struct sixteen_bit_wire {
    static constexpr char const* name = Format::name;
    static constexpr bool feedback = false;
    static constexpr std::size_t bytes(std::size_t count) noexcept { return count * sizeof(std::uint16_t); }
    template <Element E>
    static void encode(E const* in, std::byte* out, std::size_t count) {
        kernels::narrow<Format>(in, reinterpret_cast<std::uint16_t*>(out), count);
    }
    template <Element E>
    static void decode(std::byte const* in, E* out, std::size_t count) {
        kernels::widen<Format>(reinterpret_cast<std::uint16_t const*>(in), out, count);
    }
};
struct int8_wire {
    static constexpr char const* name = "int8";
    static constexpr bool feedback = true;
    static constexpr std::size_t bytes(std::size_t count) noexcept { return kernels::int8_bytes(count); }
    template <Element E>
    static void encode(E const* in, std::byte* out, std::size_t count) {
        kernels::to_int8(in, out, count);
    }
    template <Element E>
    static void decode(std::byte const* in, E* out, std::size_t count) {
        kernels::from_int8(in, out, count);
    }
};
static_assert(narrow_block % kernels::int8_group == 0);

}  // namespace detail

/// Each rank rounds its contribution to the mean (its gradient / samples of all ranks) to a narrow form, and sends each slice
/// to its owner. The owner adds the contributions in the model's own type, rounds the mean to the narrow form, and sends it
/// to all.
///
/// Cost    a slice of n elements is b(n) bytes in the narrow form: 2 n, or n + 4 ceil(n / 256) for int8, whose groups begin anew
///         in each slice. A rank sends for each bucket b of the slice of each other rank, and with update::replicated P-1
///         times b of its own: 2 b (P-1)/P where slices are equal, with b for the whole bucket. With update::sharded the means
///         stay with their owners, and new values are sent in the model's type. 2 steps of latency; scratch of about 3 b bytes
///         (sharded: 2 b).
/// Error   two roundings for any P. With feedback, a rank's rounding error is added to its next contribution, and the
///         owner's rounding error to its next mean, so nothing is lost over many steps.
/// Sums    the canonical tree over the ranks' decoded contributions. Both updates give the same bits, which differ from those
///         without this exchange, and, if the format has groups (int8), between bucket plans. A single rank rounds as well.
/// NaN     a contribution that is not finite makes the mean of that element (int8: of its group of 256) NaN or
///         infinite; the residuals for later steps stay finite.
/// Source  sending 16 bits: PyTorch's fp16_compress_hook and bf16_compress_hook, which add in the narrow type; the two steps:
///         ByteGrad (Gan et al., "Bagua", VLDB 2021); feedback: Tang et al., "DoubleSqueeze", ICML 2019.
template <class Wire>
struct narrow_exchange {
    static constexpr char const* name = Wire::name;

    /// Keeps rounding errors: memory for n elements per rank, and n/P more for the means that it owns.
    bool feedback = Wire::feedback;

    [[nodiscard]] std::uint64_t hash() const { return policy_hash(name, feedback); }
    [[nodiscard]] std::string hash_words() const { return policy_words(name, {{"feedback", feedback}}); }

    template <Element E>
    class state {
    public:
        state(exchange_plan<E> const& plan, bool feedback) : own_(plan, feedback), left_of_mean_(plan.buckets.size()) {
            if (!feedback) return;
            for (std::size_t b = 0; b < plan.buckets.size(); ++b) {
                std::span<std::size_t const> const cuts = plan.buckets[b].cuts;
                std::size_t const me = static_cast<std::size_t>(plan.rank);
                left_of_mean_[b].resize(cuts[me + 1] - cuts[me]);
            }
        }
        void for_each_state(state_visitor visit) {
            own_.for_each_state(visit);
            std::size_t const me = static_cast<std::size_t>(own_.plan().rank);
            for (std::size_t b = 0; b < left_of_mean_.size(); ++b)
                if (!left_of_mean_[b].empty())
                    own_.show(own_.plan(), b, "residual_of_mean", left_of_mean_[b], own_.bucket(b).cuts[me],
                              own_.bucket(b).cuts[me + 1], false, visit);
        }
        [[nodiscard]] exchange_statistics statistics() const noexcept { return own_.statistics(); }

    private:
        friend struct narrow_exchange;
        detail::compression<E> own_;
        std::vector<std::vector<E>> left_of_mean_;  // of this rank's slice, by bucket
    };

    template <Element E>
    [[nodiscard]] state<E> prepare(exchange_plan<E> const& plan) const {
        return {plan, feedback};
    }
    template <Element E>
    [[nodiscard]] bool everywhere(exchange_plan<E> const& plan, std::size_t /*bucket*/) const noexcept {
        return !plan.sharded;
    }

    template <Transport T, Element E>
    static task<> exchange(narrow_exchange /*self*/, lane<T> over, state<E>& kept, bucket_exchange<E> what) {
        std::size_t const ranks = static_cast<std::size_t>(over.size()), me = static_cast<std::size_t>(over.rank());
        std::span<std::size_t const> const cuts = what.cuts;
        auto const bytes_of = [&](std::size_t r) { return Wire::bytes(cuts[r + 1] - cuts[r]); };
        std::size_t total = 0;
        for (std::size_t r = 0; r < ranks; ++r) total += bytes_of(r);
        bool const returns = !kept.own_.plan().sharded;
        scratch outgoing(total), incoming(ranks * bytes_of(me)), results(returns ? total : bytes_of(me)),
            blocks((ranks + 2) * detail::narrow_block * sizeof(E)), table(ranks * sizeof(std::byte const*)),
            starts(ranks * sizeof(std::size_t));
        std::span<std::size_t> const start = starts.as<std::size_t>();
        for (std::size_t r = 0, at = 0; r < ranks; at += bytes_of(r++)) start[r] = at;
        auto const out = [&](std::size_t r) { return outgoing.bytes().subspan(start[r], bytes_of(r)); };
        auto const in = [&](std::size_t r) {
            return r == me ? out(me) : incoming.bytes().subspan(r * bytes_of(me), bytes_of(me));
        };
        auto const mean = [&](std::size_t r) { return results.bytes().subspan(returns ? start[r] : 0, bytes_of(r)); };
        operations receives(ranks), sends(ranks), returned(returns ? ranks : 0), forwards(returns ? ranks : 0);
        lane<T> const back = over.phase(1);
        for (std::size_t d = 1; d < ranks; ++d) {
            std::size_t const r = (me + d) % ranks;
            over.receive(receives[r], static_cast<int>(r), in(r));
            if (returns) back.receive(returned[r], static_cast<int>(r), mean(r));
        }
        co_await *what.go;

        bool const used = *what.factor != 0;
        if (used) {
            kept.own_.begin(what.bucket, total - bytes_of(me) + (returns ? (ranks - 1) * bytes_of(me) : 0));
        } else {  // not what the memory held before
            std::ranges::fill(outgoing.bytes(), std::byte{0});
            std::ranges::fill(mean(me), std::byte{0});
        }
        for (std::size_t d = 1; d <= ranks; ++d) {  // its own last
            std::size_t const r = (me + d) % ranks;
            if (used) encode(kept, what, r, out(r), blocks.as<E>());
            if (r != me) over.send(sends[r], static_cast<int>(r), out(r));
        }
        for (std::size_t r = 0; r < ranks; ++r)
            if (r != me) co_await receives[r];
        if (used) {
            for (std::size_t r = 0; r < ranks; ++r) table.as<std::byte const*>()[r] = in(r).data();
            add_up(kept, what, table.as<std::byte const*>(), mean(me), blocks.as<E>());
        }
        if (returns) {
            for (std::size_t d = 1; d < ranks; ++d) {
                std::size_t const r = (me + d) % ranks;
                back.send(forwards[r], static_cast<int>(r), mean(me));
            }
            for (std::size_t d = 1; d < ranks; ++d) {
                std::size_t const r = (me + d) % ranks;
                co_await returned[r];
                if (used) decode(kept, what, r, mean(r));
            }
            for (std::size_t r = 0; r < ranks; ++r)
                if (r != me) co_await forwards[r];
        }
        if (used) kept.own_.clear_gaps(what.bucket, what.data);  // a group that became NaN extends into the gaps
        for (std::size_t r = 0; r < ranks; ++r)
            if (r != me) co_await sends[r];
    }
    template <Transport T, Element E>
    static task<> gather(narrow_exchange /*self*/, lane<T> /*over*/, state<E>& /*kept*/, bucket_exchange<E> /*what*/) {
        co_return;  // every rank has the mean already
    }

private:
    /// This rank's contribution to slice r.
    template <Element E>
    static void encode(state<E>& kept, bucket_exchange<E> const& what, std::size_t r, mutable_bytes out,
                       std::span<E> space) {
        typename detail::compression<E>::stopwatch const time(kept.own_);
        std::byte* to = out.data();
        for (std::size_t at = what.cuts[r]; at < what.cuts[r + 1]; at += detail::narrow_block) {
            std::size_t const count = std::min(detail::narrow_block, what.cuts[r + 1] - at);
            std::span<E> const wanted = space.first(count), sent = space.subspan(detail::narrow_block, count);
            kept.own_.contribution(what.bucket, what.data.data(), *what.factor, at, wanted);
            Wire::encode(wanted.data(), to, count);
            if (kept.own_.asks(what.bucket)) {
                Wire::decode(to, sent.data(), count);
                kept.own_.sent(what.bucket, at, wanted, sent);
            }
            to += Wire::bytes(count);
        }
    }
    /// The mean of this rank's slice, rounded, from all contributions.
    template <Element E>
    static void add_up(state<E>& kept, bucket_exchange<E> const& what, std::span<std::byte const* const> from,
                       mutable_bytes out, std::span<E> space) {
        typename detail::compression<E>::stopwatch const time(kept.own_);
        std::size_t const ranks = from.size(), me = static_cast<std::size_t>(kept.own_.plan().rank);
        std::vector<E>& left = kept.left_of_mean_[what.bucket];
        scratch table(ranks * sizeof(E const*));
        std::span<E const*> const sources = table.as<E const*>();
        std::span<E> const mean = what.data.subspan(what.cuts[me], what.cuts[me + 1] - what.cuts[me]);
        std::byte* to = out.data();
        for (std::size_t at = 0; at < mean.size(); at += detail::narrow_block) {
            std::size_t const count = std::min(detail::narrow_block, mean.size() - at);
            std::span<E> const wanted = space.subspan(ranks * detail::narrow_block, count),
                               part = mean.subspan(at, count);
            for (std::size_t r = 0; r < ranks; ++r) {
                E* const decoded = space.data() + r * detail::narrow_block;
                Wire::decode(from[r] + Wire::bytes(at), decoded, count);
                sources[r] = decoded;
            }
            sum_tree(wanted, std::span<E const* const>(sources));
            if (!left.empty())
                detail::kernels::contribution(wanted.data(), E(1), left.data() + at, wanted.data(), count);
            Wire::encode(wanted.data(), to, count);
            Wire::decode(to, part.data(), count);
            if (!left.empty()) detail::kernels::leave_out(wanted.data(), part.data(), left.data() + at, count);
            to += Wire::bytes(count);
        }
    }
    template <Element E>
    static void decode(state<E>& kept, bucket_exchange<E> const& what, std::size_t r, const_bytes in) {
        typename detail::compression<E>::stopwatch const time(kept.own_);
        Wire::decode(in.data(), what.data.data() + what.cuts[r], what.cuts[r + 1] - what.cuts[r]);
    }
};

/// 2 bytes per element, with the range of float and 8 bits of precision: the first exchange to try.
using bfloat16_exchange = narrow_exchange<detail::sixteen_bit_wire<bfloat16>>;
/// 2 bytes per element, 11 bits of precision. Contributions of magnitude 65520 or more become infinite, those of 2^-25
/// or less zero.
using half_exchange = narrow_exchange<detail::sixteen_bit_wire<half>>;
/// 1 byte per element, and 4 for the scale of each group of 256. Feedback is on by default.
using int8_exchange = narrow_exchange<detail::int8_wire>;

}  // namespace ddp
