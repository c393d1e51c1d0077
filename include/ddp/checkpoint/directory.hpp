/// \file
/// checkpoint_directory: checkpoints as directories of files, each of which exists in full or not at all.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ddp/checkpoint/manifest.hpp>
#include <ddp/core/separate.hpp>
#include <ddp/data/safetensors.hpp>

namespace ddp::detail {

inline void say_of_checkpoint(std::string_view text) noexcept {
    std::fprintf(stderr, "ddp: %.*s\n", static_cast<int>(text.size()), text.data());
}

/// "step-000000000100".
[[nodiscard]] std::string step_name(std::uint64_t step);

/// Throws data_error if there is no such file: on rank 0 errc::format, since a part of the checkpoint is missing; on another rank,
/// which then sees less than rank 0, errc::file.
void expect_there(std::string const& path, int rank);

/// The digest of the file's bytes. Throws data_error (errc::file) if it cannot be read. Cost: one pass.
[[nodiscard]] std::uint64_t digest_of_file(std::string const& path);

/// The layout of a directory of checkpoints, and the order in which it changes. Only rank 0 calls anything but
/// write_shard.
///
///     step-000000000100/            a checkpoint: manifest.json, shard-….safetensors
///     step-000000000200.tmp/        one that is being written, or was when its job was killed
///     step-000000000100.old.tmp/    one that is being replaced, where names cannot be exchanged
///     latest                        the name of the newest
///
/// From an object's first begin() on, its process holds a lock on the directory (flock), so that no other process saves into
/// it too. Without effect on file systems that lock no directories, such as NFS.
///
/// Throws  data_error (errc::file) with the system's reason.
/// Source  the order of fsync and rename: Pillai et al., "All file systems are not created equal", OSDI 2014.
class checkpoint_directory {
public:
    explicit checkpoint_directory(std::string path) : path_(std::move(path)) {}
    checkpoint_directory(checkpoint_directory const&) = delete;
    checkpoint_directory& operator=(checkpoint_directory const&) = delete;
    ~checkpoint_directory() { release(); }

    [[nodiscard]] std::string const& path() const noexcept { return path_; }
    [[nodiscard]] std::string of(std::string const& name) const { return path_ + "/" + name; }

    /// Makes the directory, if there is none, and in it an empty one for the checkpoint of this step; removes what
    /// killed jobs have left behind. Throws also if another process saves into this directory.
    void begin(std::uint64_t step);
    /// Another rank is rank 0 now: gives up this object's part in the lock.
    void release() noexcept;
    /// Writes a rank's file there. Returns when it is on the disk.
    [[nodiscard]] checkpoint_shard write_shard(std::uint64_t step, int rank, int ranks,
                                               std::vector<tensor_view> const& tensors,
                                               string_map const& metadata) const;
    /// Call it when all ranks have written: makes the files a checkpoint. Returns when it, and `latest`, are on the
    /// disk. Replaces a checkpoint of the same step.
    void commit(checkpoint_manifest const& manifest) const;
    /// Discards the unfinished checkpoint of this step.
    void abandon(std::uint64_t step) const noexcept;
    /// Keeps the `keep` newest checkpoints up to and including `step`, and all newer ones, and removes the others. Those whose
    /// names are in `broken` do not count. Returns what went wrong, "" if nothing did; the remaining checkpoints are not
    /// affected.
    [[nodiscard]] std::string remove_older(std::uint64_t step, std::size_t keep,
                                           std::set<std::string> const& broken = {}) const noexcept;

    /// Names of checkpoints in the order in which they are to be tried: the latest, older ones from the newest on, then
    /// those that are newer than the latest. None if there is no directory. Sets `complaint` to what is wrong with
    /// `latest`.
    [[nodiscard]] std::vector<std::string> candidates(std::string& complaint) const;
    /// The manifest of a checkpoint. Throws data_error also if it is damaged (errc::format), or of another step than
    /// its name says. Sets `text_digest` to the digest of the file's bytes.
    [[nodiscard]] checkpoint_manifest manifest_of(std::string const& name, std::uint64_t& text_digest,
                                                  int rank = 0) const;

private:
    void lock();
    [[nodiscard]] std::vector<std::uint64_t> steps() const;
    [[nodiscard]] std::string temporary(std::uint64_t step) const { return of(step_name(step) + ".tmp"); }

    std::string path_;
    std::optional<std::pair<dev_t, ino_t>> locked_;  // the directory that begin() has found under this name
};

}  // namespace ddp::detail

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/checkpoint/impl/directory.ipp>
#endif
