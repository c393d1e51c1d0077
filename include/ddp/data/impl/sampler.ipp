/// \file
/// What data/sampler.hpp declares.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <ddp/core/contract.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/core/random.hpp>
#include <ddp/core/text.hpp>
#include <ddp/data/sampler.hpp>

namespace ddp {

DDP_DECL void shuffled_order(std::span<std::uint32_t> order, std::uint64_t seed, std::uint64_t epoch) {
    random_stream const draws{seed, random_use::shuffle, epoch};
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::uint32_t>(i);
    for (std::size_t i = order.size(); i > 1; --i)
        std::swap(order[i - 1], order[static_cast<std::size_t>(draws.at(i - 1).below(i))]);
}

[[gnu::cold]] DDP_DECL sampler::sampler(sampler_options options, int rank, int ranks)
    : options_(options), rank_(rank), ranks_(ranks) {
    DDP_EXPECTS(ranks > 0 && rank >= 0 && rank < ranks,
                detail::concat({"sampler: rank ", rank, " of ", ranks, " ranks: ranks are numbered from 0"}));
    DDP_EXPECTS(options.samples > 0, "sampler: there are no samples; load a data set that holds some");
    DDP_EXPECTS(options.samples <= std::numeric_limits<std::uint32_t>::max(),
                "sampler: indices have 32 bits; split a data set of 2^32 samples or more");
    DDP_EXPECTS(options.global_batch > 0, "sampler: global_batch is zero; it counts samples a step over all ranks");
    DDP_EXPECTS(!options.drop_last || options.global_batch <= options.samples,
                detail::concat({"sampler: drop_last leaves no batch: global_batch is ", options.global_batch,
                                " and there are ", options.samples, " samples; make global_batch smaller"}));
    order_.resize(options.samples);
    for (std::size_t i = 0; i < order_.size(); ++i) order_[i] = static_cast<std::uint32_t>(i);
}

[[gnu::cold]] DDP_DECL sampler::sampler(sampler_options options, std::vector<std::uint32_t> list, int rank, int ranks)
    : sampler(options, rank, ranks) {
    DDP_EXPECTS(list.size() == options.samples,
                detail::concat({"sampler: the list has ", list.size(), " samples and options.samples is ",
                                options.samples, "; give the list's size"}));
    if (list != order_) digest_of_list_ = digest().add(std::span<std::uint32_t const>(list)).value();
    list_ = std::move(list);
    order_ = list_;
}

DDP_DECL std::optional<std::span<std::uint32_t const>> sampler::next() {
    if (position_ == steps_per_epoch()) {
        set_epoch(epoch_ + 1);
        return std::nullopt;
    }
    if (options_.shuffle && ordered_ != epoch_) {
        shuffled_order(order_, options_.seed, epoch_);
        if (!list_.empty())
            for (std::uint32_t& place : order_) place = list_[place];
        ordered_ = epoch_;
    }
    sample_range const batch = batch_at(position_++);
    sample_range const share = share_of(batch.size(), rank_, ranks_);
    return std::span<std::uint32_t const>(order_).subspan(batch.begin + share.begin, share.size());
}

[[gnu::cold]] DDP_DECL void sampler::seek(std::uint64_t epoch, std::size_t position) {
    DDP_EXPECTS(epoch >> 48 == 0, "sampler: epochs are numbered from zero, below 2^48");
    DDP_EXPECTS(position <= steps_per_epoch(), "sampler::seek: past the epoch's end; were the options the same?");
    epoch_ = epoch;
    position_ = position;
}

}  // namespace ddp
