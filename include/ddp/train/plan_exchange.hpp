/// \file
/// plan_exchange: what an exchange is told about its buckets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <ddp/core/separate.hpp>
#include <ddp/exchange/exchange.hpp>
#include <ddp/model/layout.hpp>
#include <ddp/model/model.hpp>
#include <ddp/train/bucket.hpp>

namespace ddp::detail {

/// Slices of ranks are cut at multiples of `grain` elements of a parameter.
template <Element E>
[[gnu::cold]] exchange_plan<E> plan_exchange(layout const& where, bucket_map const& buckets,
                                             std::span<parameter<E> const> parameters, int rank, int ranks,
                                             bool sharded, std::size_t grain) {
    exchange_plan<E> plan{.rank = rank, .ranks = ranks, .sharded = sharded, .parameters = {}, .buckets = {}};
    for (parameter<E> const& p : parameters) plan.parameters.push_back({p.name, p.shape});
    for (std::size_t b = 0; b < buckets.count(); ++b) {
        exchange_bucket one{.begin = buckets.begin(b), .count = buckets.end(b) - buckets.begin(b)};
        where.for_each_in(buckets.begin(b), buckets.end(b), [&](std::size_t i, std::size_t from, std::size_t to) {
            one.pieces.push_back({i, from - where.begin(i), from - buckets.begin(b), to - from});
        });
        one.cuts = where.slices(buckets.begin(b), buckets.end(b), static_cast<std::size_t>(ranks), grain);
        for (std::size_t& cut : one.cuts) cut -= buckets.begin(b);
        plan.buckets.push_back(std::move(one));
    }
    return plan;
}

/// What has to be exchanged of a bucket while parameters i with frozen[i] != 0 are frozen: from the first to the last
/// element of the others. Slices are what lies there of those of the whole bucket, which is returned if all are frozen.
[[nodiscard]] exchange_bucket without_frozen_ends(exchange_bucket const& whole, std::span<std::uint8_t const> frozen);

/// The slices of a bucket, counted in blocks of statistics (layout::block_at) from the first one of the bucket.
struct block_cuts {
    std::size_t first = 0;
    std::vector<std::size_t> cuts;
};
/// By bucket, for slices that are cut where blocks begin.
template <Element E>
[[gnu::cold]] std::vector<block_cuts> cut_in_blocks(layout const& where, bucket_map const& buckets,
                                                    exchange_plan<E> const& plan) {
    std::vector<block_cuts> all;
    for (std::size_t b = 0; b < buckets.count(); ++b) {
        block_cuts& one = all.emplace_back();
        one.first = where.block_at(buckets.begin(b));
        for (std::size_t const cut : plan.buckets[b].cuts)
            one.cuts.push_back(where.block_at(buckets.begin(b) + cut) - one.first);
    }
    return all;
}

}  // namespace ddp::detail

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/train/impl/plan_exchange.ipp>
#endif
