/// \file
/// checkpoints: all that a training is made of, kept on disk now and then, so that a job that ends can be continued.
#pragma once

#include <ddp/core/language.hpp>  // first

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
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

/// How a directory of checkpoints is kept.
struct checkpoint_options {
    std::size_t keep = 3;  ///< so many of the newest stay; at least 1
    /// save() copies everything to memory and returns; a thread of its own writes it. It becomes a checkpoint in the next
    /// call of save, poll or wait.
    bool background = false;
};

/// Where a training goes on.
struct resumed_checkpoint {
    std::uint64_t step = 0;  ///< completed steps: the trainer's completed_steps()
    string_map entries;      ///< what save was given
    std::string path;        ///< of the checkpoint's directory
};

/// A directory of checkpoints. A training that is killed and resumed goes on to the same bits as one that was not.
///
///     ddp::checkpoints kept("checkpoints");
///     auto const from = kept.resume(trainer, batches);   // nothing there: training begins
///     while (auto const batch = batches.next()) {
///         trainer.step(load(*batch));
///         if (trainer.completed_steps() % 100 == 0) kept.save(trainer, batches, {{"note", "so far so good"}});
///     }
///
///  Kept     parameters and buffers (rank 0's), the optimizer's state and the exchange's, the number of completed steps
///           (on which schedules and corrections of bias depend), the trainer's rate_factor() and which parameters are
///           frozen, the sampler's place, the caller's entries. Not kept: gradients that were accumulated, what is random in
///           the caller's own code, metrics.
///  Whole    A checkpoint is there as a whole or not at all: ranks write into a temporary directory, flush, agree, and rank 0
///           renames it. A process that is killed at any moment leaves all earlier checkpoints as they were.
///  Ranks    A checkpoint is continued by any number of ranks, with any update policy, bucket plan and transport. With the
///           same number of ranks, to the same bits. State that differs by rank (an exchange's residuals) begins at zero
///           where the number of ranks is another.
///  Where    All ranks see the same directory.
///
/// All calls are collective, between steps, by the same thread as the trainer's; each rank has an object of its own. See
/// docs/checkpoints.md.
class checkpoints {
public:
    /// Touches no file: the first save makes the directory, whose parent must exist. Throws usage_error if the directory has
    /// no name or options.keep is 0.
    explicit checkpoints(std::string directory, checkpoint_options options = {})
        : directory_(std::move(directory)), options_(options) {
        DDP_EXPECTS(!directory_.path().empty(), "checkpoints: give the directory a name");
        DDP_EXPECTS(options_.keep > 0, "checkpoints: keep is zero; the newest checkpoint has to stay");
    }
    checkpoints(checkpoints const&) = delete;
    checkpoints& operator=(checkpoints const&) = delete;
    /// Waits for a writer in the background. What it has written does not become a checkpoint: call wait() first.
    ~checkpoints() = default;

    /// Writes a checkpoint of the trainer, and removes those that are too old. `entries`: those of rank 0 are kept.
    ///
    /// Cost    values and buffers are written by rank 0; state by who holds it: with update::sharded every rank its part.
    ///         One pass more over the files, for their digests; flushes; four small exchanges. All wait for the slowest
    ///         rank's disk, timing.collective at most.
    /// Throws  data_error (errc::file), the same on every rank, if a rank cannot write: nothing has happened then, earlier
    ///         checkpoints are there, and training may go on. With options.background also if writing the previous one has
    ///         failed; this one is then not begun. usage_error within a step, or for texts that are no UTF-8. comm_error.
    template <detail::KeptTrainer C>
    void save(C& trainer, string_map const& entries = {}) {
        save_with(trainer, nullptr, entries);
    }
    /// The sampler's place is kept with it.
    template <detail::KeptTrainer C>
    void save(C& trainer, sampler const& batches, string_map const& entries = {}) {
        save_with(trainer, &batches, entries);
    }

    /// Restores the trainer from the newest intact checkpoint; returns nothing if there is no checkpoint yet. One that is
    /// damaged (a wrong digest, a missing file) is named on stderr by rank 0, and the one before it is taken.
    ///
    /// Cost    each rank reads all values, and of the state what it holds; every file's digest is checked by one rank.
    /// Throws  data_error, the same on every rank: errc::format for a checkpoint of another model, optimizer or sampler, with
    ///         all differences (20 are shown), or if none of those that are there is whole: nothing has changed then.
    ///         errc::file if the directory cannot be read. usage_error within a step. comm_error. Where a file fails while
    ///         it is put in place, the communicator has failed with it.
    template <detail::KeptTrainer C>
    std::optional<resumed_checkpoint> resume(C& trainer) {
        return resume_with(trainer, nullptr);
    }
    /// The sampler goes to its place; its options must be what they were.
    template <detail::KeptTrainer C>
    std::optional<resumed_checkpoint> resume(C& trainer, sampler& batches) {
        return resume_with(trainer, &batches);
    }

    /// With options.background: whether nothing is being written. Collective; a small exchange, which makes a checkpoint of
    /// what all ranks have written. Throws as save.
    bool poll() { return pending_ == nullptr || finish(false); }
    /// Waits until what was saved is a checkpoint. Collective. Throws as save. Call it at the end.
    void wait() {
        if (pending_ != nullptr) (void)finish(true);
    }

    [[nodiscard]] std::string const& directory() const noexcept { return directory_.path(); }

private:
    /// A checkpoint that is being written.
    struct writing {
        detail::checkpoint_manifest manifest;
        std::function<bool(bool)> finish;  // over the trainer's communicator
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

    template <class C>
    void save_with(C& trainer, sampler const* batches, string_map const& entries) {
        auto const& comm = trainer.comm();
        detail::expect_kept_between_steps(trainer);
        wait();
        auto one = std::make_unique<writing>();
        one->manifest.library = detail::concat({version_major, ".", version_minor, ".", version_patch});
        one->manifest.step = trainer.completed_steps();
        one->manifest.ranks = comm.size();
        one->manifest.entries = entries;
        one->manifest.settings = detail::settings_of(trainer);
        if (batches != nullptr) one->manifest.sampler = {batches->options(), batches->epoch(), batches->position()};

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
                directory_.begin(one->manifest.step);
            }
            return std::uint64_t{0};
        });
        detail::agree_on_outcome(comm, mine, text, "checkpoint");

        one->finish = [this, comm](bool block) { return commit(comm, block); };
        pending_ = std::move(one);
        detail::checkpoint_manifest const& as = pending_->manifest;
        if (options_.background) {
            writer_.start(as.step, comm.rank(), as.ranks, std::move(content));
        } else {
            writer_.write(as.step, comm.rank(), as.ranks, std::move(content));
            wait();
        }
    }

    /// All ranks have written: it becomes a checkpoint, or all throw what went wrong. Not `block`: false if some rank still
    /// writes.
    template <Transport T>
    bool commit(communicator<T> const& comm, bool block) {
        writing& one = *pending_;
        if (!block) {
            std::vector<std::uint8_t> const written = all_gather(comm, static_cast<std::uint8_t>(writer_.written()));
            if (std::count(written.begin(), written.end(), 0) != 0) return false;
        }
        writer_.join();
        try {
            detail::file_outcome mine;
            std::string text = directory_.path();
            detail::checkpoint_shard shard;
            detail::attempt(comm, mine, text, [&] {
                shard = writer_.finish();
                return std::uint64_t{0};
            });
            detail::agree_on_outcome(comm, mine, text, "checkpoint");
            for (detail::checkpoint_shard const& s : all_gather(comm, shard))
                if (s.rank >= 0) one.manifest.shards.push_back(s);
            text = directory_.path();
            detail::attempt(comm, mine, text, [&] {
                if (comm.rank() == 0) directory_.commit(one.manifest);
                return std::uint64_t{0};
            });
            detail::agree_on_outcome(comm, mine, text, "checkpoint");
        } catch (data_error const&) {
            if (comm.rank() == 0) directory_.abandon(one.manifest.step);
            throw;
        }
        if (comm.rank() == 0)
            if (std::string const wrong = directory_.remove_older(one.manifest.step, options_.keep); !wrong.empty())
                detail::say_of_checkpoint("an older checkpoint cannot be removed: " + wrong);
        return true;
    }

    /// Collective: what to try, and in which order.
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
        wait();
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
                damage = detail::text_of(e);
                if (comm.rank() == 0) detail::say_of_checkpoint("a checkpoint is not used: " + damage);
                continue;
            }
            detail::continue_from(trainer, batches, *reader);
            return resumed_checkpoint{reader->manifest().step, reader->manifest().entries, reader->path()};
        }
        if (!names.empty())
            throw data_error(errc::format,
                             directory_.path() + ": none of its checkpoints is whole; of the last one: " + damage);
        return std::nullopt;
    }

    detail::checkpoint_directory directory_;
    checkpoint_options options_;
    std::unique_ptr<writing> pending_;
    detail::checkpoint_writer writer_{directory_};
};

}  // namespace ddp
