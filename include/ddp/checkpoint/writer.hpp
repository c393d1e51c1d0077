/// \file
/// checkpoint_writer: writes one rank's part of a checkpoint, at once or in a thread of its own.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <ddp/checkpoint/directory.hpp>
#include <ddp/checkpoint/manifest.hpp>
#include <ddp/core/separate.hpp>
#include <ddp/data/safetensors.hpp>
#include <ddp/data/string_map.hpp>

namespace ddp::detail {

/// What one rank writes of a checkpoint.
struct checkpoint_content {
    std::vector<tensor_view> tensors;
    string_map metadata;
    std::vector<std::vector<std::byte>> rearranged;  // values that do not lie row-major
};

/// Writes one file at a time, and on rank 0 makes a checkpoint of the files of all ranks, without communicating with
/// other ranks. One thread calls it.
class checkpoint_writer {
public:
    /// The directory outlives this.
    explicit checkpoint_writer(checkpoint_directory const& into) noexcept : into_(into) {}
    checkpoint_writer(checkpoint_writer const&) = delete;
    checkpoint_writer& operator=(checkpoint_writer const&) = delete;
    /// Waits for the thread.
    ~checkpoint_writer() { join(); }

    /// Returns when the file is written or has failed: see finish(). Without any tensor, no file is written.
    void write(std::uint64_t step, int rank, int ranks, checkpoint_content content) noexcept;
    /// Copies the contents of the tensors, and returns; a thread writes the copy. If there is no memory or no thread,
    /// writes the file at once; other ranks do not wait. Cost: one pass over the tensors; as much memory, which is kept
    /// for the next one.
    void start(std::uint64_t step, int rank, int ranks, checkpoint_content content);
    /// On rank 0, when all ranks have written, at once or in a thread: makes a checkpoint of the files (see
    /// checkpoint_directory::commit), and removes all but the `keep` newest that are not `broken`; a failure of that is
    /// reported on stderr. `manifest` and `broken` must not change until join().
    void commit(checkpoint_manifest const& manifest, std::size_t keep, std::set<std::string> const& broken) noexcept;
    void start_commit(checkpoint_manifest const& manifest, std::size_t keep,
                      std::set<std::string> const& broken) noexcept;
    /// Whether the last call has ended, successfully or not.
    [[nodiscard]] bool written() const noexcept { return written_.load(); }
    void join() noexcept {
        if (thread_.joinable()) thread_.join();
    }
    /// Waits for the last call. Returns the file (rank -1 if there is none), or throws the error of that call.
    [[nodiscard]] checkpoint_shard finish();

private:
    void begin(checkpoint_content content) noexcept;
    void write_content(std::uint64_t step, int rank, int ranks) noexcept;
    template <class F>
    void in_background(F const& work) noexcept;

    checkpoint_directory const& into_;
    checkpoint_content content_;
    checkpoint_shard shard_;
    std::exception_ptr error_;
    std::atomic<bool> written_{false};
    std::unique_ptr<std::byte[]> memory_;  // what the thread reads
    std::size_t bytes_ = 0;                // of it
    std::thread thread_;
};

}  // namespace ddp::detail

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/checkpoint/impl/writer.ipp>
#endif
