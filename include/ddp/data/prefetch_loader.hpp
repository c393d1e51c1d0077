/// \file
/// prefetch_loader: a thread that copies, augments and normalises the next batches while the model trains on the
/// current one.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <concepts>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include <ddp/core/contract.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/core/math.hpp>
#include <ddp/core/text.hpp>
#include <ddp/core/thread.hpp>
#include <ddp/data/augment.hpp>
#include <ddp/data/batch.hpp>
#include <ddp/data/batch_loader.hpp>
#include <ddp/data/classification.hpp>
#include <ddp/data/sampler.hpp>

namespace ddp {

/// Options of prefetch_loader. The same on all ranks, except for `depth`.
struct prefetch_options {
    std::size_t depth = 2;  ///< batches that are prepared in advance; at least 1
    /// One for all numbers, or one for each channel (the first of three dimensions); empty: to [0, 1].
    std::vector<normalisation> normalise = {};
    ddp::augmentation augment = {};  ///< for samples of height x width, or of channels x height x width
};

/// Hands out this rank's batches, in the order of a sampler, from a queue that a thread of its own fills:
///
///     ddp::prefetch_loader<float> load{data,
///                                      ddp::sampler{{.samples = data.size(), .global_batch = 128}, comm},
///                                      {.augment = {.crop_padding = 4, .flip = true}}};
///     for (int epoch = 0; epoch < 5; ++epoch)
///         while (auto const batch = load.next()) trainer.step(*batch);
///
///  Order   the sampler's, epoch after epoch. The numbers depend on data, options, epoch and sample only: not on the
///          rank, on the number of ranks, or on how far the thread is ahead. Without augmentation, batches have the same
///          bits as those of batch_loader.
///  Errors  An exception in the thread, such as usage_error for an index that is not in the data set, is thrown by next()
///          in place of the batch that failed, and by every further call until seek().
///  Memory  depth + 1 batches, and 8 bytes for each sample in two samplers; all of it is allocated by the constructor.
///  Ending  The destructor waits until the thread has finished the sample that it is preparing, not the batch.
///
/// To be called by one thread at a time. It can neither be copied nor moved.
template <std::floating_point E>
class prefetch_loader {
public:
    /// `data` must outlive the loader and must not change. Begins at the current epoch and position of the sampler.
    /// Throws usage_error for a depth of 0; for a normalisation whose mean is not finite or whose deviation is not
    /// positive; for a number of normalisations that is neither 1 nor the number of channels; for augmentation of samples
    /// that are not images, or with a padding of more than 4,096 pixels; and if the product of sample_shape is not
    /// `features`.
    prefetch_loader(classification_data const& data, sampler batches, prefetch_options options = {})
        : data_(&data), options_(std::move(options)), batches_(std::move(batches)), place_(batches_) {
        DDP_EXPECTS(options_.depth > 0,
                    "prefetch_loader: depth counts batches that are prepared ahead, and is at least 1");
        bool const changes = options_.augment.crop_padding > 0 || options_.augment.flip;
        auto const& shape = data.sample_shape;
        DDP_EXPECTS(!changes || shape.size() == 2 || shape.size() == 3,
                    "prefetch_loader: only samples of height x width or channels x height x width can be augmented");
        DDP_EXPECTS(options_.augment.crop_padding <= 4096,
                    "prefetch_loader: crop_padding is a number of pixels, at most 4,096; 4 is usual");
        std::size_t product = 1;
        for (std::size_t const extent : shape) product *= extent;
        DDP_EXPECTS(product == data.features && product > 0,
                    detail::concat({"prefetch_loader: the data set's sample_shape has ", product,
                                    " bytes and features is ", data.features, "; make them one number above 0"}));
        channels_ = shape.size() == 3 ? shape[0] : 1;
        width_ = changes ? shape.back() : 0;
        height_ = changes ? shape[shape.size() - 2] : 0;
        std::vector<normalisation> norms = options_.normalise;
        if (norms.empty()) norms.emplace_back();
        DDP_EXPECTS(norms.size() == 1 || norms.size() == channels_,
                    detail::concat({"prefetch_loader: there are ", norms.size(), " normalisations for ", channels_,
                                    " channels; give one, or one a channel"}));
        for (normalisation const& norm : norms) {
            DDP_EXPECTS(detail::is_finite(norm.mean) && detail::is_finite(norm.deviation) && norm.deviation > 0,
                        "prefetch_loader: mean must be finite, and deviation finite and above 0; {0, 1} keeps [0, 1]");
            std::array<E, 256>& number = numbers_.emplace_back();
            for (std::size_t b = 0; b < number.size(); ++b)
                number[b] = static_cast<E>((static_cast<double>(b) / 255.0 - norm.mean) / norm.deviation);
        }
        digest all;
        all.add("prefetch_loader").add(std::uint64_t{norms.size()});
        for (normalisation const& norm : norms)
            all.add(std::bit_cast<std::uint64_t>(norm.mean)).add(std::bit_cast<std::uint64_t>(norm.deviation));
        all.add(std::uint64_t{options_.augment.crop_padding}).add(std::uint64_t{options_.augment.flip});
        all.add(changes ? options_.augment.seed : 0);
        place_.set_digest_of_preparation(all.value() | 1);
        slots_.resize(options_.depth + 1);
        for (slot& each : slots_) {
            each.inputs.reserve(batches_.largest_share() * data.features);
            each.labels.reserve(batches_.largest_share());
            each.samples.reserve(batches_.largest_share());
        }
        start();
    }
    prefetch_loader(classification_data const&&, sampler, prefetch_options = {}) = delete;  // would dangle
    prefetch_loader(prefetch_loader const&) = delete;
    prefetch_loader& operator=(prefetch_loader const&) = delete;
    ~prefetch_loader() { stop(); }

    /// This rank's next batch, which may have no rows; nullopt at the end of the epoch, after which the next epoch
    /// begins. The views are valid until the next call. Waits for the thread if no batch is ready.
    [[nodiscard]] std::optional<classification_batch<E>> next() {
        std::unique_lock lock(mutex_);
        if (std::exchange(held_, false)) {
            ++taken_;
            freed_.notify_one();
        }
        filled_.wait(lock, [&] { return made_ != taken_; });
        slot const& made = slots_[taken_ % slots_.size()];
        if (made.failure) std::rethrow_exception(made.failure);  // it stays there
        held_ = true;
        place_.seek(made.epoch, made.position);
        if (made.ends_epoch) return std::nullopt;
        return classification_batch<E>{made.inputs, made.labels, made.labels.size(), data_->features, made.samples};
    }

    /// A sampler at the position after the last batch that was handed out, for checkpoints::save and, as a copy, for
    /// checkpoints::resume, which then rejects a loader whose options differ from the checkpoint's.
    [[nodiscard]] sampler const& place() const noexcept { return place_; }
    /// Continues from the epoch and position that place() returned, here or in another process: the batches that follow
    /// are the same. Discards batches that are prepared already.
    void seek(std::uint64_t epoch, std::size_t position) {
        place_.seek(epoch, position);  // throws before anything ends
        stop();
        batches_.seek(epoch, position);
        made_ = taken_ = 0;
        held_ = false;
        start();
    }

private:
    struct slot {
        std::vector<E> inputs;               // (rows, features), row-major
        std::vector<std::uint32_t> labels;   // (rows)
        std::vector<std::uint32_t> samples;  // (rows)
        std::uint64_t epoch = 0;             // where the sampler stands behind this
        std::size_t position = 0;
        bool ends_epoch = false;
        std::exception_ptr failure;
    };

    void start() {
        stopped_ = false;
        try {
            thread_ = detail::start_thread("the thread of prefetch_loader", [this] { work(); });
        } catch (...) {
            slots_.front().failure = std::current_exception();  // for next(), which would not be woken otherwise
            made_ = 1;
            throw;
        }
    }
    void stop() noexcept {
        {
            std::lock_guard const lock(mutex_);
            stopped_ = true;
        }
        freed_.notify_one();
        if (thread_.joinable()) thread_.join();
    }

    void work() noexcept {
        for (bool failed = false; !failed;) {
            slot* next = nullptr;
            {
                std::unique_lock lock(mutex_);
                freed_.wait(lock, [&] { return stopped_ || made_ - taken_ < slots_.size(); });
                if (stopped_) return;
                next = &slots_[made_ % slots_.size()];
            }
            next->failure = nullptr;
            try {
                fill(*next);
            } catch (...) {
                next->failure = std::current_exception();
                failed = true;
            }
            {
                std::lock_guard const lock(mutex_);
                ++made_;
            }
            filled_.notify_one();
        }
    }

    void fill(slot& to) {
        std::uint64_t const epoch = batches_.epoch();
        auto const share = batches_.next();
        to.ends_epoch = !share;
        to.epoch = batches_.epoch();
        to.position = batches_.position();
        if (!share) return;
        std::size_t const features = data_->features;
        to.samples.assign(share->begin(), share->end());
        to.labels.resize(share->size());
        to.inputs.resize(share->size() * features);
        for (std::size_t row = 0; row < share->size() && !stopped_; ++row) {
            std::uint32_t const sample = (*share)[row];
            DDP_EXPECTS(sample < data_->size(),
                        detail::concat({"prefetch_loader: there is no sample ", sample, "; the data set holds ",
                                        data_->size(), ", give the sampler that number"}));
            to.labels[row] = data_->labels[sample];
            convert(to.inputs.data() + row * features, data_->inputs.data() + std::size_t{sample} * features, epoch,
                    sample);
        }
    }

    void convert(E* to, std::uint8_t const* from, std::uint64_t epoch, std::uint32_t sample) const {
        std::size_t const plane = data_->features / channels_;
        augmentation_draw const cut =
            width_ == 0 ? augmentation_draw{} : draw_augmentation(options_.augment, epoch, sample);
        for (std::size_t c = 0; c < channels_; ++c, to += plane, from += plane) {
            std::array<E, 256> const& number = numbers_[numbers_.size() == 1 ? 0 : c];
            if (width_ == 0) {
                for (std::size_t f = 0; f < plane; ++f) to[f] = number[from[f]];
                continue;
            }
            std::size_t const pad = options_.augment.crop_padding;
            for (std::size_t y = 0; y < height_; ++y) {
                std::size_t const row = y + cut.down;  // in the padded picture
                bool const inside = row >= pad && row < pad + height_;
                for (std::size_t x = 0; x < width_; ++x) {
                    std::size_t const column = (cut.flip ? width_ - 1 - x : x) + cut.right;
                    bool const there = inside && column >= pad && column < pad + width_;
                    to[y * width_ + x] = number[there ? from[(row - pad) * width_ + (column - pad)] : 0];
                }
            }
        }
    }

    classification_data const* data_;
    prefetch_options options_;
    sampler batches_;                                    // the thread's, while it runs
    sampler place_;                                      // of what was handed out
    std::size_t channels_ = 1, height_ = 0, width_ = 0;  // width 0: nothing is augmented
    std::vector<std::array<E, 256>> numbers_;            // of each byte: one, or one a channel
    std::vector<slot> slots_;                            // a ring: [taken_, made_) are filled

    std::mutex mutex_;
    std::condition_variable filled_, freed_;
    std::size_t made_ = 0, taken_ = 0;
    bool held_ = false;  // the caller looks at slot taken_
    std::atomic<bool> stopped_{false};
    std::thread thread_;
};

}  // namespace ddp
