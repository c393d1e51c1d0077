/// \file
/// checkpoints: the complete state of a training, saved to disk so that a job can be continued after it has ended.
#pragma once

#include <ddp/core/language.hpp>  // first

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <ddp/checkpoint/directory.hpp>
#include <ddp/checkpoint/kept_training.hpp>
#include <ddp/checkpoint/lines_of_ranks.hpp>
#include <ddp/checkpoint/manifest.hpp>
#include <ddp/checkpoint/reader.hpp>
#include <ddp/checkpoint/writer.hpp>
#include <ddp/collective/all_gather.hpp>
#include <ddp/comm/communicator.hpp>
#include <ddp/core/contract.hpp>
#include <ddp/core/error.hpp>
#include <ddp/core/version.hpp>
#include <ddp/data/safetensors.hpp>
#include <ddp/data/sampler.hpp>
#include <ddp/data/string_map.hpp>
#include <ddp/train/weights_file.hpp>

namespace ddp {

/// Options of checkpoints.
struct checkpoint_options {
    std::size_t keep = 3;  ///< number of checkpoints to keep, the newest ones; at least 1
    /// If true, save() copies everything to memory and returns, and a thread writes it. The files become a checkpoint
    /// in later calls of poll, or in the next call of save or wait.
    bool background = false;
};

/// The checkpoint from which a training continues.
struct resumed_checkpoint {
    std::uint64_t step = 0;  ///< the completed_steps() of the trainer
    string_map entries;      ///< the entries that were passed to save()
    std::string path;        ///< directory of the checkpoint
};

/// A directory of checkpoints. A training that is killed and resumed reaches the same bits as one that was not
/// interrupted.
///
///     ddp::checkpoints kept("checkpoints");
///     auto const from = kept.resume(trainer, batches);  // nullopt if there is no checkpoint yet
///     while (auto const batch = batches.next()) {
///         trainer.step(load(*batch));
///         if (trainer.completed_steps() % 100 == 0) kept.save(trainer, batches, {{"note", "so far so good"}});
///     }
///
///  Contents   parameters and buffers (those of rank 0, and of each rank where they differ), the state of the optimizer and
///             of the exchange, the trainer's progress() (numbers of steps, on which schedules, bias corrections and
///             observers depend, and the losses of the last step), rate_factor(), which parameters are frozen, the position
///             of the sampler, and the caller's entries. Compared only: the model's hash(), names of optimizers, the
///             sampler's options and list, how its loader prepares samples. Not saved: accumulated gradients, random number
///             generators of the caller's own, metrics.
///  Atomicity  A checkpoint exists in full or not at all: ranks write into a temporary directory, flush and agree, and
///             then rank 0 renames it. If a process is killed, at whatever moment, all earlier checkpoints remain as they
///             were.
///  Ranks      A checkpoint can be resumed by any number of ranks, with any update policy, bucket plan and transport;
///             with the same number of ranks, the bits that follow are the same. If the number of ranks has changed,
///             state that differs between ranks (residuals of an exchange) starts at zero, and buffers that differ
///             start as rank 0's.
///  Location   All ranks must see the same directory. Each trainer needs its own: a save removes what is older, whoever
///             wrote it, and throws if rank 0 of another job saves there (not over NFS).
///
/// All calls are collective, between steps, on the thread that calls the trainer; each rank has its own object, which can
/// neither be copied nor moved. From a save in the background until poll() has returned true or wait() has returned, the
/// object holds a communicator, which keeps the rank in the job, as any copy does. See docs/checkpoints.md.
class checkpoints {
public:
    /// Does not access the disk: the first save creates the directory, whose parent must exist. Throws usage_error if the
    /// directory has no name or options.keep is 0.
    explicit checkpoints(std::string directory, checkpoint_options options = {})
        : directory_(std::move(directory)), options_(options) {
        DDP_EXPECTS(!directory_.path().empty(), "checkpoints: give the directory a name");
        DDP_EXPECTS(options_.keep > 0, "checkpoints: keep is zero; the newest checkpoint has to stay");
    }
    checkpoints(checkpoints const&) = delete;
    checkpoints& operator=(checkpoints const&) = delete;
    /// Waits for the thread of a save in the background. The last save has certainly become a checkpoint only if wait()
    /// has returned, or poll() has returned true.
    ~checkpoints() = default;

    /// Saves a checkpoint of the trainer, and removes the oldest ones if there are more than options.keep. Only the
    /// `entries` of rank 0 are saved.
    ///
    /// Cost    rank 0 writes values and buffers; each rank writes the state that it holds, a part of it with
    ///         update::sharded. One more pass over the files for their digests; flushes; seven small exchanges. All ranks
    ///         wait for the slowest one's disk, for at most timing.collective.
    /// Throws  data_error (errc::file), the same on every rank, if a rank cannot write, if another job saves into the same
    ///         directory, or if a previous save in the background has failed; earlier checkpoints then remain, and training
    ///         can continue. The new one then does not exist, unless the failure came after its renaming: in flushing
    ///         the directory, or in writing `latest`. usage_error unless trainer.between_steps(), or for texts that are not
    ///         UTF-8. comm_error.
    template <detail::KeptTrainer C>
    void save(C& trainer, string_map const& entries = {}) {
        save_with(trainer, nullptr, entries);
    }
    /// The same, with the position of the sampler.
    template <detail::KeptTrainer C>
    void save(C& trainer, sampler const& batches, string_map const& entries = {}) {
        save_with(trainer, &batches, entries);
    }

    /// Restores the trainer from the newest intact checkpoint; returns nothing if there is no checkpoint yet. Rank 0
    /// reports a damaged one (a wrong digest, a missing file) on stderr, and the one before it is used. A file that exists
    /// but cannot be read now is an error instead, because an older checkpoint would lose what has been saved since.
    ///
    /// Cost    each rank reads all values and its part of the state; the digest of every file is verified by one rank.
    ///         Every rank opens every file and parses its header: on a shared file system, P ranks that resume a
    ///         checkpoint of P ranks open P^2 files.
    /// Throws  data_error, the same on every rank: errc::format for a checkpoint of another model, optimizer or sampler,
    ///         with all differences (up to 1,000), or if there are checkpoints but none is intact; errc::file
    ///         if the directory or a file cannot be read, or a previous save in the background has failed. The trainer is then
    ///         unchanged. usage_error unless trainer.between_steps(). comm_error. If reading a file fails after the model
    ///         has begun to change, the communicator can no longer be used.
    template <detail::KeptTrainer C>
    std::optional<resumed_checkpoint> resume(C& trainer) {
        return resume_with(trainer, nullptr);
    }
    /// The same, and sets the sampler to the saved position. Its options must be those with which it was saved.
    template <detail::KeptTrainer C>
    std::optional<resumed_checkpoint> resume(C& trainer, sampler& batches) {
        return resume_with(trainer, &batches);
    }

    /// With options.background: returns true if nothing is being written, because the last save has become a checkpoint, has
    /// failed and a call has thrown its error, or there was none. If all ranks have written, rank 0's thread begins to make
    /// a checkpoint of it, and a later call returns true. Collective. Waits for a disk only if it throws, or if no thread can
    /// be started. Cost: a small exchange; four more in the call that finds everything written. Throws like save.
    bool poll() { return pending_ == nullptr || finish(false); }
    /// Waits until the last save has become a checkpoint. Collective. Throws like save. Call it at the end of training.
    void wait() {
        if (pending_ != nullptr) (void)finish(true);
    }

    /// The directory that was passed to the constructor.
    [[nodiscard]] std::string const& directory() const noexcept { return directory_.path(); }

private:
    /// A checkpoint that is being written.
    struct writing {
        detail::checkpoint_manifest manifest;
        std::function<bool(bool)> finish;  // over the trainer's communicator
        group const* ranks = nullptr;      // its
        bool committing = false;           // all ranks have written their files
    };

    bool finish(bool block) {
        writing& one = *pending_;
        try {
            if (!one.finish(block)) return false;
        } catch (...) {
            writer_.join();
            pending_.reset();
            throw;
        }
        pending_.reset();
        return true;
    }

    /// The last save may belong to another job, which has failed since: that is no failure of this job.
    template <Transport T>
    void wait_before(communicator<T> const& comm) {
        bool const of_others = pending_ != nullptr && pending_->ranks != &comm.members();
        try {
            wait();
        } catch (comm_error const&) {
            if (!of_others) throw;
        }
    }

    template <class C>
    void save_with(C& trainer, sampler const* batches, string_map const& entries) {
        auto const& comm = trainer.comm();
        detail::expect_kept_between_steps(trainer);
        wait_before(comm);
        auto one = std::make_unique<writing>();
        one->manifest.library = detail::concat({version_major, ".", version_minor, ".", version_patch});
        one->manifest.step = trainer.completed_steps();
        one->manifest.ranks = comm.size();
        one->manifest.entries = entries;
        one->manifest.settings = detail::settings_of(trainer);
        if constexpr (requires { trainer.progress(); }) one->manifest.progress = trainer.progress();
        if (batches != nullptr) one->manifest.sampler = detail::place_of(*batches);
        if constexpr (requires { trainer.settings_in_words(); })
            for (auto const& [name, words] :
                 detail::run_code_of_user(trainer, [&] { return trainer.settings_in_words(); }))
                if (detail::is_utf8(words)) one->manifest.words.emplace(name, words);  // a user's may be anything

        detail::checkpoint_content content;
        detail::list_state(trainer, content);
        detail::file_outcome mine;
        std::string text = directory_.path();
        detail::attempt(comm, mine, text, [&] {
            if (comm.rank() == 0) {
                for (auto const& [key, value] : entries)
                    DDP_EXPECTS(detail::is_utf8(key) && detail::is_utf8(value),
                                "checkpoints: the entries must be UTF-8: " + detail::in_quotes(key) + " is not");
                auto const kept = detail::kept_tensors(trainer.model());
                for (tensor_view& v : detail::views_of(kept, content.rearranged)) {
                    v.name.insert(0, detail::model_prefix);
                    content.tensors.push_back(std::move(v));
                }
                one->manifest.identity = detail::identity_of(trainer);
                directory_.begin(one->manifest.step);
            } else {
                directory_.release();  // held if this rank was rank 0 before
                detail::list_buffers(trainer, content);
            }
            return std::uint64_t{0};
        });
        detail::agree_on_outcome(comm, mine, text, "checkpoint");

        one->finish = [this, comm](bool block) { return commit(comm, block); };
        one->ranks = &comm.members();
        pending_ = std::move(one);
        detail::checkpoint_manifest const& as = pending_->manifest;
        if (options_.background) {
            writer_.start(as.step, comm.rank(), as.ranks, std::move(content));
        } else {
            writer_.write(as.step, comm.rank(), as.ranks, std::move(content));
            wait();
        }
    }

    /// Waits until all ranks have written their files, then until rank 0 has made a checkpoint of them; or all ranks
    /// throw the error. Without `block`, returns false instead of waiting.
    template <Transport T>
    bool commit(communicator<T> const& comm, bool block) {
        writing& one = *pending_;
        if (!block && !all_written(comm)) return false;
        detail::file_outcome mine;
        std::string text = directory_.path();
        detail::checkpoint_shard shard;
        auto const agree = [&] {
            detail::attempt(comm, mine, text, [&] {
                shard = writer_.finish();
                return std::uint64_t{0};
            });
            detail::agree_on_outcome(comm, mine, text, "checkpoint");
        };
        try {
            if (!one.committing) {
                agree();
                // Not the struct itself, which has padding. No file has 0 bytes.
                std::vector<std::uint64_t> const all = all_gather(comm, std::array{shard.bytes, shard.digest});
                for (std::size_t r = 0; 2 * r < all.size(); ++r)
                    if (all[2 * r] > 0)
                        one.manifest.shards.push_back({static_cast<int>(r), all[2 * r], all[2 * r + 1]});
                one.committing = true;
                bool const behind = options_.background && !block;
                if (comm.rank() == 0 && behind) writer_.start_commit(one.manifest, options_.keep, broken_);
                if (comm.rank() == 0 && !behind) writer_.commit(one.manifest, options_.keep, broken_);
                if (!block && !all_written(comm)) return false;
                text = directory_.path();
            }
            agree();
        } catch (data_error const&) {
            if (comm.rank() == 0) directory_.abandon(one.manifest.step);
            throw;
        }
        broken_.erase(detail::step_name(one.manifest.step));
        return true;
    }
    /// Whether all ranks have finished what they are writing now.
    template <Transport T>
    bool all_written(communicator<T> const& comm) {
        std::vector<std::uint8_t> const written = all_gather(comm, static_cast<std::uint8_t>(writer_.written()));
        return std::count(written.begin(), written.end(), 0) == 0;
    }

    /// Collective: the checkpoints to try, in this order.
    template <Transport T>
    std::vector<std::string> candidates(communicator<T> const& comm) {
        std::vector<std::string> names;
        detail::file_outcome mine;
        std::string text = directory_.path(), complaint;
        detail::attempt(comm, mine, text, [&] {
            if (comm.rank() == 0) names = directory_.candidates(complaint);
            return std::uint64_t{0};
        });
        detail::agree_on_outcome(comm, mine, text, "resume");
        if (!complaint.empty()) detail::say_of_checkpoint(complaint);
        return detail::lines_of(detail::text_of_rank_0(comm, detail::joined_lines(names)));
    }

    template <class C>
    std::optional<resumed_checkpoint> resume_with(C& trainer, sampler* batches) {
        auto const& comm = trainer.comm();
        detail::expect_kept_between_steps(trainer);
        wait_before(comm);
        std::vector<std::string> const names = candidates(comm);
        std::string damage;
        for (std::string const& name : names) {
            detail::file_outcome mine;
            std::string text = directory_.of(name);
            std::optional<detail::checkpoint_reader> reader;
            detail::attempt(comm, mine, text, [&] {
                return reader.emplace(directory_, name, comm.rank(), comm.size()).digest_of_manifest();
            });
            try {
                detail::agree_on_outcome(comm, mine, text, "resume");
            } catch (data_error const& e) {
                if (e.code() != errc::format)  // it may be whole, but cannot be read now
                    throw data_error(e.code(),
                                     detail::text_of(e) +
                                         "; if that lasts, move this checkpoint away to continue from the one "
                                         "before it");
                damage = detail::text_of(e);
                broken_.insert(name);
                if (comm.rank() == 0) detail::say_of_checkpoint("a checkpoint is not used: " + damage);
                continue;
            }
            detail::continue_from(trainer, batches, *reader);
            return resumed_checkpoint{reader->manifest().step, reader->manifest().entries, reader->path()};
        }
        if (!names.empty())
            throw data_error(errc::format,
                             directory_.path() + ": none of its checkpoints is whole; of the oldest: " + damage);
        return std::nullopt;
    }

    detail::checkpoint_directory directory_;
    checkpoint_options options_;
    std::set<std::string> broken_;  // names of checkpoints that resume() has found damaged; they do not count for keep
    std::unique_ptr<writing> pending_;
    detail::checkpoint_writer writer_{directory_};
};

}  // namespace ddp
