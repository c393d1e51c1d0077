/// \file
/// sampler: which samples this rank takes in each step. All ranks together follow one order, which is the same for
/// any number of ranks.
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

/// How an epoch is divided into global batches. The same on every rank.
struct sampler_options {
    std::size_t samples;       ///< in the data set, over all ranks
    std::size_t global_batch;  ///< samples in each step, over all ranks
    std::uint64_t seed = 0;    ///< of the shuffles, which also depend on the epoch
    bool shuffle = true;       ///< false: samples in ascending order, as for evaluation
    bool drop_last = false;    ///< true: the last batch is left out if it would be smaller than the others
};

/// A half-open range of positions [begin, end).
struct sample_range {
    std::size_t begin;  ///< the first
    std::size_t end;    ///< one past the last
    [[nodiscard]] constexpr std::size_t size() const noexcept { return end - begin; }
    friend constexpr bool operator==(sample_range, sample_range) = default;
};

/// The contiguous share of `count` samples that rank `rank` takes: from floor(count * rank / ranks) to where the share of
/// the next rank begins. Shares differ by at most one sample and may be empty. The shares of 2P ranks are halves of the
/// shares of P ranks. Throws usage_error unless 0 <= rank < ranks. It can be used without a sampler, for samples in an
/// order of your own:
///
///     std::span<std::uint32_t const> const batch = my_order.subspan(step * 128, 128);  // the same on every rank
///     auto const [begin, end] = ddp::share_of(batch.size(), comm.rank(), comm.size());
///     trainer.step(load(batch.subspan(begin, end - begin)));  // load: for example a batch_loader
[[nodiscard]] constexpr sample_range share_of(std::size_t count, int rank, int ranks) {
    DDP_EXPECTS(ranks > 0 && rank >= 0 && rank < ranks, "share_of: the rank must be in [0, ranks)");
    auto const r = static_cast<std::size_t>(rank);
    auto const p = static_cast<std::size_t>(ranks);
    // count * rank / ranks without the product, which could overflow
    std::size_t const whole = count / p, rest = count % p;
    return {whole * r + rest * r / p, whole * (r + 1) + rest * (r + 1) / p};
}

/// Fills `order` with a permutation of 0 .. order.size() - 1 that depends only on its size, on `seed` and on `epoch`.
/// Cost: one random number (about 10 ns) for each sample. Source: the Fisher-Yates shuffle in Durstenfeld's form, CACM
/// 7(7), 1964.
void shuffled_order(std::span<std::uint32_t> order, std::uint64_t seed, std::uint64_t epoch);

/// Hands out this rank's share of each global batch:
///
///     ddp::sampler batches{{.samples = data.size(), .global_batch = 128, .seed = 7}, comm};
///     for (int epoch = 0; epoch < 5; ++epoch)
///         while (auto const batch = batches.next()) train(*batch);  // indices of samples
///
///  Order   The shares of all ranks, concatenated step by step, are the order of the epoch: every sample exactly once
///          (except for those that `drop_last` leaves out), and none twice to fill a batch. This order does not depend on
///          the number of ranks.
///  Epochs  After next() has returned nothing, the next call begins the following epoch, with a new order. A program that
///          counts epochs itself calls set_epoch(); the orders are the same.
///  Steps   The number of steps is the same on every rank, so that collectives match; shares of a small last batch may be
///          empty.
///  Cost    4 bytes for each sample, allocated by the constructor; a shuffle in the first step of each epoch.
class sampler {
public:
    /// This rank's sampler, for a job of `ranks` ranks. Throws usage_error if there are no samples, or 2^32 or more; if
    /// the global batch is 0, or larger than the data set while `drop_last` is set; or if the rank is outside [0, ranks).
    sampler(sampler_options options, int rank, int ranks);

    /// The same for an object with rank and size, such as a communicator. It is read here and not kept.
    template <class Comm>
        requires requires(Comm const& comm) {
            { comm.rank() } -> std::convertible_to<int>;
            { comm.size() } -> std::convertible_to<int>;
        }
    sampler(sampler_options options, Comm const& comm) : sampler(options, comm.rank(), comm.size()) {}

    /// Hands out the samples in `list` instead of 0 .. options.samples - 1; a shuffle permutes the positions in the list.
    /// This is for a part of a data set, such as a fold, and for samples that occur several times. The list must be the
    /// same on every rank, and when a training is resumed. Cost: another 4 bytes for each sample. Throws usage_error
    /// unless options.samples is the size of the list.
    sampler(sampler_options options, std::vector<std::uint32_t> list, int rank, int ranks);
    template <class Comm>
        requires requires(Comm const& comm) {
            { comm.rank() } -> std::convertible_to<int>;
            { comm.size() } -> std::convertible_to<int>;
        }
    sampler(sampler_options options, std::vector<std::uint32_t> list, Comm const& comm)
        : sampler(options, std::move(list), comm.rank(), comm.size()) {}

    /// The indices of this rank's samples in the next step, which may be none; nullopt when the epoch is over, after
    /// which epoch() is the following one. The span is valid until the next call of a function that is not const.
    [[nodiscard]] std::optional<std::span<std::uint32_t const>> next();

    /// Continues with the first step of this epoch.
    void set_epoch(std::uint64_t epoch) { seek(epoch, 0); }

    /// Continues from the position that epoch() and position() returned, here or in another process with the same options
    /// and any number of ranks: the steps that follow are the same. Throws usage_error for a position beyond the epoch's end.
    void seek(std::uint64_t epoch, std::size_t position);

    /// The number of the current epoch, from 0.
    [[nodiscard]] std::uint64_t epoch() const noexcept { return epoch_; }
    /// The number of steps of this epoch that have been handed out.
    [[nodiscard]] std::size_t position() const noexcept { return position_; }
    /// The number of steps in an epoch, the same on every rank.
    [[nodiscard]] std::size_t steps_per_epoch() const noexcept {
        // not (samples + global_batch - 1) / global_batch: a batch of "everything" may be the greatest number there is
        std::size_t const whole = options_.samples / options_.global_batch;
        return whole + (options_.samples % options_.global_batch != 0 && !options_.drop_last ? 1 : 0);
    }
    /// The number of samples in an epoch, over all ranks.
    [[nodiscard]] std::size_t samples_per_epoch() const noexcept {
        return options_.drop_last ? steps_per_epoch() * options_.global_batch : options_.samples;
    }
    /// The largest number of samples that this rank can get in a step, for reserving memory. It is rounded up, because
    /// the share of a rank can be larger in a smaller batch.
    [[nodiscard]] std::size_t largest_share() const noexcept {
        std::size_t const batch = std::min(options_.global_batch, options_.samples);
        auto const p = static_cast<std::size_t>(ranks_);
        return batch / p + (batch % p != 0 ? 1 : 0);
    }
    [[nodiscard]] sampler_options const& options() const noexcept { return options_; }
    /// A digest of the list of samples; 0 without one, and for the equivalent list 0, 1, 2, …. Checkpoints keep it.
    [[nodiscard]] std::uint64_t digest_of_list() const noexcept { return digest_of_list_; }
    /// A digest of how a loader changes the samples that this sampler lists: in prefetch_loader::place(), one of the
    /// loader's normalisation and augmentation. 0: unknown. Checkpoints keep it.
    [[nodiscard]] std::uint64_t digest_of_preparation() const noexcept { return digest_of_preparation_; }
    void set_digest_of_preparation(std::uint64_t digest) noexcept { digest_of_preparation_ = digest; }

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
    std::uint64_t digest_of_list_ = 0;
    std::uint64_t digest_of_preparation_ = 0;
    std::vector<std::uint32_t> order_;
    std::uint64_t ordered_ = std::numeric_limits<std::uint64_t>::max();  // the epoch whose order order_ holds
};

}  // namespace ddp

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/data/impl/sampler.ipp>
#endif
