/// \file
/// top_k_exchange, random_k_exchange: a few elements of each bucket are sent, the others later.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include <ddp/collective/algorithms/direct_allreduce.hpp>
#include <ddp/comm/lane.hpp>
#include <ddp/core/contract.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/core/random.hpp>
#include <ddp/core/task.hpp>
#include <ddp/core/text.hpp>
#include <ddp/exchange/compression.hpp>
#include <ddp/exchange/exchange.hpp>
#include <ddp/exchange/largest.hpp>
#include <ddp/kernel/finite.hpp>

namespace ddp {

namespace detail {

/// The number of elements of the bucket's parameters, without the gaps between them.
[[nodiscard]] inline std::size_t elements_of(exchange_bucket const& bucket) noexcept {
    std::size_t elements = 0;
    for (exchange_piece const& piece : bucket.pieces) elements += piece.count;
    return elements;
}
/// How many elements of a bucket are sent: ratio times its elements, rounded to the nearest, and at least one.
[[nodiscard]] inline std::size_t sparse_count(exchange_bucket const& bucket, double ratio) {
    std::size_t const elements = elements_of(bucket);
    if (elements == 0) return 0;
    auto const wanted = static_cast<std::size_t>(std::llround(ratio * static_cast<double>(elements)));
    return std::clamp<std::size_t>(wanted, 1, elements);
}
inline void expect_ratio(char const* name, double ratio) {
    DDP_EXPECTS(ratio > 0 && ratio <= 1,
                std::string(name) + ": ratio is " + detail::decimal(ratio) +
                    "; it is the share of each bucket's elements that is sent, above 0 and at most 1");
}

/// Why buckets are too large for indices of 32 bits; empty if none is.
template <Element E>
[[nodiscard]] std::string sparse_refusal(char const* name, exchange_plan<E> const& plan) {
    for (exchange_bucket const& bucket : plan.buckets)
        if (bucket.count > 0xffffffffu)
            return std::string(name) + ": a bucket of 2^32 elements or more; choose smaller buckets";
    return {};
}

}  // namespace detail

/// Each rank sends to all ranks, from each bucket, the k elements of largest magnitude in its contribution to the mean,
/// with their indices. What it does not send is added to its next contribution.
///
/// Cost    k (4 + sizeof(E)), rounded up to a multiple of 8 (by zeros), times P-1 bytes sent per rank and bucket of n elements, with
///         k = ratio n: more than a sum of all elements as soon as ratio P (4 + sizeof(E)) > 2 sizeof(E). 1 step of latency. 5
///         passes over the bucket if ratio is at most 1/8; otherwise, for very small buckets, and where the largest elements
///         cannot be guessed from a sample (most are equal, or the large ones are next to each other) 7 passes in float
///         and 10 in double. Scratch for n elements, 2 k candidates and all messages. With update::sharded the same, and
///         new values are sent as well.
/// Error   with feedback everything is sent sooner or later; without it, an element that is never large is never sent.
/// Sums    in the order of the ranks, from 0. Both updates give the same bits; other bucket plans give other bits.
/// NaN     counts as largest, so it is sent and stays visible.
/// Throws  usage_error when a trainer is made: ratio not in (0, 1]; buckets of 2^32 elements or more.
/// Source  Aji and Heafield, EMNLP 2017; Lin et al., "Deep gradient compression", ICLR 2018 (without its momentum
///         correction).
struct top_k_exchange {
    static constexpr char const* name = "top_k";

    double ratio = 0.01;   ///< share of each bucket's elements that is sent, rounded to a whole number, at least one
    bool feedback = true;  ///< keeps what is not sent: memory for n elements per rank

    [[nodiscard]] std::uint64_t hash() const { return policy_hash(name, ratio, feedback); }
    [[nodiscard]] std::string hash_words() const {
        return policy_words(name, {{"ratio", ratio}, {"feedback", feedback}});
    }
    void validate(std::span<exchange_parameter const> /*parameters*/) const { detail::expect_ratio(name, ratio); }

    template <Element E>
    struct state {
        detail::compression<E> own;
        std::vector<std::size_t> k = {};  // by bucket

        [[nodiscard]] std::string refusal() const { return detail::sparse_refusal(name, own.plan()); }
        void for_each_state(state_visitor visit) { own.for_each_state(visit); }
        [[nodiscard]] exchange_statistics statistics() const noexcept { return own.statistics(); }
    };

    template <Element E>
    [[nodiscard]] state<E> prepare(exchange_plan<E> const& plan) const {
        state<E> all{detail::compression<E>(plan, feedback)};
        for (exchange_bucket const& bucket : plan.buckets) all.k.push_back(detail::sparse_count(bucket, ratio));
        return all;
    }
    template <Element E>
    [[nodiscard]] bool everywhere(exchange_plan<E> const& /*plan*/, std::size_t /*bucket*/) const noexcept {
        return true;
    }

    template <Transport T, Element E>
    static task<> exchange(top_k_exchange /*self*/, lane<T> over, state<E>& kept, bucket_exchange<E> what) {
        std::size_t const ranks = static_cast<std::size_t>(over.size()), me = static_cast<std::size_t>(over.rank());
        std::size_t const k = kept.k[what.bucket], room = message<E>(k);
        std::size_t const candidates = largest_elements_room(what.data.size(), k);
        scratch messages(ranks * room), space(what.data.size() * sizeof(E)),
            indices(candidates * sizeof(std::uint32_t)), values(candidates * sizeof(E));
        auto const part = [&](std::size_t r) { return messages.bytes().subspan(r * room, room); };
        operations receives(ranks), sends(ranks);
        for (std::size_t d = 1; d < ranks; ++d)
            over.receive(receives[(me + d) % ranks], static_cast<int>((me + d) % ranks), part((me + d) % ranks));
        co_await *what.go;

        bool const used = *what.factor != 0;
        if (used)
            select(kept, what, k, part(me), space.as<E>(), indices.as<std::uint32_t>(), values.as<E>());
        else
            std::ranges::fill(part(me), std::byte{0});  // not what the memory held before
        for (std::size_t d = 1; d < ranks; ++d)
            over.send(sends[(me + d) % ranks], static_cast<int>((me + d) % ranks), part(me));
        for (std::size_t r = 0; r < ranks; ++r)
            if (r != me) co_await receives[r];
        if (used) add_up(kept, what, k, messages.bytes(), ranks);
        for (std::size_t r = 0; r < ranks; ++r)
            if (r != me) co_await sends[r];
    }
    template <Transport T, Element E>
    static task<> gather(top_k_exchange /*self*/, lane<T> /*over*/, state<E>& /*kept*/, bucket_exchange<E> /*what*/) {
        co_return;  // exchange has left the mean everywhere
    }

private:
    /// The values, then their indices: aligned for both. A multiple of 8 bytes, where the next message begins.
    template <Element E>
    static std::size_t message(std::size_t k) noexcept {
        return (k * (sizeof(E) + sizeof(std::uint32_t)) + 7) / 8 * 8;
    }
    template <Element E>
    static std::span<E> values(mutable_bytes message, std::size_t k) noexcept {
        return {reinterpret_cast<E*>(message.data()), k};
    }
    template <Element E>
    static std::span<std::uint32_t> indices(mutable_bytes message, std::size_t k) noexcept {
        return {reinterpret_cast<std::uint32_t*>(message.data() + k * sizeof(E)), k};
    }

    template <Element E>
    static void select(state<E>& kept, bucket_exchange<E> const& what, std::size_t k, mutable_bytes out,
                       std::span<E> wanted, std::span<std::uint32_t> candidates, std::span<E> of_candidates) {
        typename detail::compression<E>::stopwatch const time(kept.own);
        kept.own.begin(what.bucket, static_cast<std::size_t>(kept.own.plan().ranks - 1) * out.size());
        kept.own.contribution(what.bucket, what.data.data(), *what.factor, 0, wanted);
        std::span<E> const values = top_k_exchange::values<E>(out, k);
        std::span<std::uint32_t> const at = indices<E>(out, k);
        std::ranges::fill(out.subspan(k * (sizeof(E) + sizeof(std::uint32_t))), std::byte{0});  // up to 8 bytes
        largest_elements(std::span<E const>(wanted), at, candidates, of_candidates);
        for (std::size_t i = 0; i < k; ++i) values[i] = wanted[at[i]];
        if (!kept.own.asks(what.bucket)) return;
        std::fill(what.data.begin(), what.data.end(), E(0));  // what this rank sends; the mean overwrites it
        for (std::size_t i = 0; i < k; ++i) what.data[at[i]] = values[i];
        kept.own.sent(what.bucket, 0, wanted, what.data);
    }
    template <Element E>
    static void add_up(state<E>& kept, bucket_exchange<E> const& what, std::size_t k, mutable_bytes messages,
                       std::size_t ranks) {
        typename detail::compression<E>::stopwatch const time(kept.own);
        std::fill(what.data.begin(), what.data.end(), E(0));
        for (std::size_t r = 0; r < ranks; ++r) {
            mutable_bytes const one = messages.subspan(r * message<E>(k), message<E>(k));
            std::span<E const> const values = top_k_exchange::values<E>(one, k);
            std::span<std::uint32_t const> const at = indices<E>(one, k);
            for (std::size_t i = 0; i < k; ++i)
                if (at[i] < what.data.size()) what.data[at[i]] += values[i];
        }
    }
};

/// In each step, ranks sum k elements of each bucket, which are the same on all ranks and drawn anew. What a rank does not
/// send is added to its next contribution.
///
/// Cost    the sum of k elements by direct_allreduce per bucket of n elements, with k = ratio n: cut into slices of whole lines
///         of 64 bytes, a rank sends those of all other ranks once and its own P-1 times, 2 k sizeof(E) (P-1)/P bytes where
///         they are equal. 2 steps of latency; 3 passes over the bucket. With update::sharded the same, and new values are
///         sent as well.
/// Draws   element j of k is one of the bucket's elements n j / k to n (j + 1) / k, all equally likely, counted without the
///         gaps between parameters. The random stream is random_use::compression with `seed` and the bucket as part; its
///         index is derived from the trainer's updates so far and j.
/// Error   with feedback everything is sent sooner or later; without it, elements that are not drawn in a step are
///         lost.
/// NaN     and infinities are sent in place of the element drawn from their equal part, and their sum becomes the mean of that
///         whole part, so they stay visible.
/// Sums    the canonical tree over ranks. Both updates give the same bits; other bucket plans give other bits.
/// Throws  usage_error when a trainer is made: ratio not in (0, 1]; buckets of 2^32 elements or more.
/// Source  Stich, Cordonnier and Jaggi, "Sparsified SGD with memory", NeurIPS 2018; here one draw for each of k equal parts.
struct random_k_exchange {
    static constexpr char const* name = "random_k";

    double ratio = 0.05;     ///< share of each bucket's elements that is sent, rounded to a whole number, at least one
    bool feedback = true;    ///< keeps what is not sent: memory for n elements per rank
    std::uint64_t seed = 0;  ///< of the draws; the same on all ranks

    [[nodiscard]] std::uint64_t hash() const { return policy_hash(name, ratio, feedback, seed); }
    [[nodiscard]] std::string hash_words() const {
        return policy_words(name, {{"ratio", ratio}, {"feedback", feedback}, {"seed", seed}});
    }
    void validate(std::span<exchange_parameter const> /*parameters*/) const { detail::expect_ratio(name, ratio); }

    template <Element E>
    struct state {
        detail::compression<E> own;
        std::vector<std::size_t> elements = {}, k = {};  // by bucket; k of the elements are sent

        [[nodiscard]] std::string refusal() const { return detail::sparse_refusal(name, own.plan()); }
        void for_each_state(state_visitor visit) { own.for_each_state(visit); }
        [[nodiscard]] exchange_statistics statistics() const noexcept { return own.statistics(); }
    };

    template <Element E>
    [[nodiscard]] state<E> prepare(exchange_plan<E> const& plan) const {
        state<E> all{detail::compression<E>(plan, feedback)};
        for (exchange_bucket const& bucket : plan.buckets) {
            all.elements.push_back(detail::elements_of(bucket));
            all.k.push_back(detail::sparse_count(bucket, ratio));
        }
        return all;
    }
    template <Element E>
    [[nodiscard]] bool everywhere(exchange_plan<E> const& /*plan*/, std::size_t /*bucket*/) const noexcept {
        return true;
    }

    template <Transport T, Element E>
    static task<> exchange(random_k_exchange self, lane<T> over, state<E>& kept, bucket_exchange<E> what) {
        std::size_t const k = kept.k[what.bucket];
        scratch drawn(k * sizeof(std::size_t)), chosen(k * sizeof(E)), space(what.data.size() * sizeof(E));
        co_await *what.go;
        bool const used = *what.factor != 0;
        if (used)
            select(self, kept, what, drawn.as<std::size_t>(), chosen.as<E>(), space.as<E>());
        else
            std::ranges::fill(chosen.as<E>(), E(0));  // not what the memory held before
        co_await direct_allreduce::sum({}, over, chosen.as<E>());
        if (used) spread(kept, what, drawn.as<std::size_t>(), chosen.as<E>());
    }
    template <Transport T, Element E>
    static task<> gather(random_k_exchange /*self*/, lane<T> /*over*/, state<E>& /*kept*/,
                         bucket_exchange<E> /*what*/) {
        co_return;  // exchange has left the mean everywhere
    }

private:
    template <Element E>
    static void select(random_k_exchange const& self, state<E>& kept, bucket_exchange<E> const& what,
                       std::span<std::size_t> at, std::span<E> out, std::span<E> wanted) {
        typename detail::compression<E>::stopwatch const time(kept.own);
        kept.own.begin(what.bucket, detail::direct_bytes<E>(out.size(), kept.own.plan().rank, kept.own.plan().ranks));
        kept.own.contribution(what.bucket, what.data.data(), *what.factor, 0, wanted);
        random_stream const draws{self.seed, random_use::compression, what.bucket};
        std::uint64_t const n = kept.elements[what.bucket], k = at.size();
        auto piece = kept.own.bucket(what.bucket).pieces.begin();
        for (std::uint64_t j = 0, before = 0; j < k; ++j) {  // before: elements in the pieces before this one
            std::uint64_t const begin = n / k * j + n % k * j / k, end = n / k * (j + 1) + n % k * (j + 1) / k;
            std::uint64_t const element = begin + draws.at(what.updates << 32 | j).below(end - begin);
            for (; element - before >= piece->count; ++piece) before += piece->count;
            at[j] = piece->begin + static_cast<std::size_t>(element - before);
            out[j] = wanted[at[j]];
        }
        if (first_nonfinite(std::span<E const>(wanted)) != wanted.size())
            show_nonfinite(kept, what.bucket, out, wanted);
        if (!kept.own.asks(what.bucket)) return;
        std::fill(what.data.begin(), what.data.end(), E(0));
        for (std::size_t j = 0; j < k; ++j) what.data[at[j]] = out[j];
        kept.own.sent(what.bucket, 0, wanted, what.data);
    }
    /// Each of the k equal parts that has an element that is not finite sends that element.
    template <Element E>
    [[gnu::cold]] static void show_nonfinite(state<E> const& kept, std::size_t bucket, std::span<E> out,
                                             std::span<std::type_identity_t<E> const> wanted) {
        for_each_in_parts(kept, bucket, out.size(), [&](std::size_t at, std::size_t j) {
            if (!std::isfinite(wanted[at])) out[j] = wanted[at];
        });
    }
    template <Element E>
    static void spread(state<E>& kept, bucket_exchange<E> const& what, std::span<std::size_t const> at,
                       std::span<std::type_identity_t<E> const> sums) {
        typename detail::compression<E>::stopwatch const time(kept.own);
        std::fill(what.data.begin(), what.data.end(), E(0));
        for (std::size_t j = 0; j < at.size(); ++j) what.data[at[j]] = sums[j];
        if (first_nonfinite(sums) != sums.size()) spread_nonfinite(kept, what, sums);
    }
    /// Copies a sum that is not finite to all elements of its part, because the element that was drawn may be one that nobody steps.
    template <Element E>
    [[gnu::cold]] static void spread_nonfinite(state<E> const& kept, bucket_exchange<E> const& what,
                                               std::span<std::type_identity_t<E> const> sums) {
        for_each_in_parts(kept, what.bucket, sums.size(), [&](std::size_t at, std::size_t j) {
            if (!std::isfinite(sums[j])) what.data[at] = sums[j];
        });
    }
    /// Calls f(place in the bucket, part) for each element of the bucket, cut into k equal parts.
    template <Element E, class F>
    static void for_each_in_parts(state<E> const& kept, std::size_t bucket, std::uint64_t k, F&& f) {
        std::uint64_t const n = kept.elements[bucket];
        std::uint64_t j = 0, element = 0;
        for (exchange_piece const& piece : kept.own.bucket(bucket).pieces)
            for (std::size_t i = 0; i < piece.count; ++i, ++element) {
                while (element >= n / k * (j + 1) + n % k * (j + 1) / k) ++j;
                f(piece.begin + i, static_cast<std::size_t>(j));
            }
    }
};

}  // namespace ddp
