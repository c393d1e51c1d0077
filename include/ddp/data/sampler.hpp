/// \file
/// sampler: which samples this rank looks at in each step, so that all ranks together walk one order that is the same
/// for any number of ranks.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <ddp/core/contract.hpp>
#include <ddp/core/separate.hpp>

namespace ddp {

/// How an epoch is cut into global batches. Give every rank the same options.
struct sampler_options {
    std::size_t samples;       ///< in the data set, over all ranks
    std::size_t global_batch;  ///< samples a step, over all ranks
    std::uint64_t seed = 0;    ///< of the shuffles, together with the epoch
    bool shuffle = true;       ///< false: samples in their own order, as for evaluation
    bool drop_last = false;    ///< true: the last batch is left out where it would be short
};

/// Half-open positions [begin, end).
struct sample_range {
    std::size_t begin;  ///< the first
    std::size_t end;    ///< one past the last
    [[nodiscard]] constexpr std::size_t size() const noexcept { return end - begin; }
    friend constexpr bool operator==(sample_range, sample_range) = default;
};

/// Rank `rank`'s contiguous share of `count` samples: floor(count * rank / ranks) up to the next rank's begin. Shares
/// differ by at most one and may be empty. Cut this way, the shares of 2P ranks are halves of the shares of P ranks.
/// Throws usage_error unless 0 <= rank < ranks. With it, samples are taken in an order of one's own:
///
///     std::span<std::uint32_t const> const batch = my_order.subspan(step * 128, 128);  // the same on every rank
///     auto const [begin, end] = ddp::share_of(batch.size(), comm.rank(), comm.size());
///     trainer.step(load(batch.subspan(begin, end - begin)));                           // load: a batch_loader, say
[[nodiscard]] constexpr sample_range share_of(std::size_t count, int rank, int ranks) {
    DDP_EXPECTS(ranks > 0 && rank >= 0 && rank < ranks, "share_of: the rank must be in [0, ranks)");
    auto const r = static_cast<std::size_t>(rank);
    auto const p = static_cast<std::size_t>(ranks);
    // count * rank / ranks without the product, which could overflow
    std::size_t const whole = count / p, rest = count % p;
    return {whole * r + rest * r / p, whole * (r + 1) + rest * (r + 1) / p};
}

/// Fills `order` with a permutation of 0 .. order.size() - 1 that depends on its size, `seed` and `epoch` alone.
/// Cost: one draw (about 10 ns) a sample. Source: Fisher and Yates in Durstenfeld's form, CACM 7(7), 1964.
void shuffled_order(std::span<std::uint32_t> order, std::uint64_t seed, std::uint64_t epoch);

/// Hands out this rank's share of each global batch:
///
///     ddp::sampler batches{{.samples = data.size(), .global_batch = 128, .seed = 7}, comm};
///     for (int epoch = 0; epoch < 5; ++epoch)
///         while (auto const batch = batches.next()) train(*batch);  // indices of samples
///
///  Order    The concatenation of all ranks' shares, step by step, is the epoch's order: every sample exactly once (but
///           for drop_last), none repeated to fill up. It does not depend on the number of ranks.
///  Epochs   Once next() has returned nothing, the next call begins the following epoch with a new order; set_epoch()
///           is for those who count themselves. Both agree.
///  Steps    The same number on every rank, so that collectives match; shares of a short batch may be empty.
///  Cost     4 bytes a sample, allocated at construction, nothing afterwards; a shuffle at the first step of an epoch.
class sampler {
public:
    /// Throws usage_error for no samples, a global batch of zero or one that drop_last would always drop, 2^32 samples
    /// or more, or a rank outside [0, ranks).
    sampler(sampler_options options, int rank, int ranks);

    /// The same for anything that knows its rank and size, such as a communicator; it is asked now and not kept.
    template <class Comm>
        requires requires(Comm const& comm) {
            { comm.rank() } -> std::convertible_to<int>;
            { comm.size() } -> std::convertible_to<int>;
        }
    sampler(sampler_options options, Comm const& comm) : sampler(options, comm.rank(), comm.size()) {}

    /// Hands out the samples in `list` instead of 0 .. options.samples - 1, shuffled as positions in it: part of a data set, a
    /// fold, or samples that stand there more than once. The same list on every rank, and when a training is resumed. Cost:
    /// another 4 bytes a sample. Throws usage_error unless options.samples is the list's size.
    sampler(sampler_options options, std::vector<std::uint32_t> list, int rank, int ranks);
    template <class Comm>
        requires requires(Comm const& comm) {
            { comm.rank() } -> std::convertible_to<int>;
            { comm.size() } -> std::convertible_to<int>;
        }
    sampler(sampler_options options, std::vector<std::uint32_t> list, Comm const& comm)
        : sampler(options, std::move(list), comm.rank(), comm.size()) {}

    /// This rank's samples of the next step, possibly none of them; nullopt once the epoch is over, after which epoch()
    /// is the following one. The span holds until the next call of a function that is not const.
    [[nodiscard]] std::optional<std::span<std::uint32_t const>> next();

    /// Goes to the start of an epoch, from wherever it is.
    void set_epoch(std::uint64_t epoch) { seek(epoch, 0); }

    /// Goes to the place that epoch() and position() told, here or in another process with the same options and any
    /// number of ranks: what comes next is what would have come.
    void seek(std::uint64_t epoch, std::size_t position);

    [[nodiscard]] std::uint64_t epoch() const noexcept { return epoch_; }
    /// Steps of this epoch that were handed out.
    [[nodiscard]] std::size_t position() const noexcept { return position_; }
    [[nodiscard]] std::size_t steps_per_epoch() const noexcept {
        // not (samples + global_batch - 1) / global_batch: a batch of "everything" may be the greatest number there is
        std::size_t const whole = options_.samples / options_.global_batch;
        return whole + (options_.samples % options_.global_batch != 0 && !options_.drop_last ? 1 : 0);
    }
    /// Samples of an epoch over all ranks.
    [[nodiscard]] std::size_t samples_per_epoch() const noexcept {
        return options_.drop_last ? steps_per_epoch() * options_.global_batch : options_.samples;
    }
    /// The most samples a step may give a rank: what to reserve. Rounded up, since a rank's share of a shorter batch
    /// can be the larger one.
    [[nodiscard]] std::size_t largest_share() const noexcept {
        std::size_t const batch = std::min(options_.global_batch, options_.samples);
        auto const p = static_cast<std::size_t>(ranks_);
        return batch / p + (batch % p != 0 ? 1 : 0);
    }
    [[nodiscard]] sampler_options const& options() const noexcept { return options_; }

private:
    /// Where the global batch of a step lies in the epoch's order.
    [[nodiscard]] sample_range batch_at(std::size_t step) const noexcept {
        std::size_t const begin = step * options_.global_batch;
        return {begin, begin + std::min(options_.global_batch, options_.samples - begin)};
    }

    sampler_options options_;
    int rank_;
    int ranks_;
    std::uint64_t epoch_ = 0;
    std::size_t position_ = 0;
    std::vector<std::uint32_t> list_;  // empty: 0 .. samples - 1
    std::vector<std::uint32_t> order_;
    std::uint64_t ordered_ = std::numeric_limits<std::uint64_t>::max();  // the epoch whose order order_ holds
};

}  // namespace ddp

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/data/impl/sampler.ipp>
#endif
