/// \file
/// What checkpoint/writer.hpp declares.
#pragma once

#include <sys/resource.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <new>
#include <set>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include <ddp/checkpoint/directory.hpp>
#include <ddp/checkpoint/manifest.hpp>
#include <ddp/checkpoint/writer.hpp>
#include <ddp/kernel/store.hpp>

namespace ddp::detail {

[[gnu::cold]] DDP_DECL void checkpoint_writer::begin(checkpoint_content content) noexcept {
    join();
    content_ = std::move(content);
    shard_ = {.rank = -1};
    error_ = nullptr;
    written_.store(false);
}

[[gnu::cold]] DDP_DECL void checkpoint_writer::write_content(std::uint64_t step, int rank, int ranks) noexcept {
    try {
        if (!content_.tensors.empty())
            shard_ = into_.write_shard(step, rank, ranks, content_.tensors, content_.metadata);
    } catch (...) {
        error_ = std::current_exception();
    }
    content_ = {};
    written_.store(true);
}

[[gnu::cold]] DDP_DECL void checkpoint_writer::write(std::uint64_t step, int rank, int ranks,
                                                     checkpoint_content content) noexcept {
    begin(std::move(content));
    write_content(step, rank, ranks);
}

[[gnu::cold]] DDP_DECL void checkpoint_writer::start(std::uint64_t step, int rank, int ranks,
                                                     checkpoint_content content) {
    begin(std::move(content));
    std::size_t total = 0;
    for (tensor_view const& t : content_.tensors) total += t.bytes.size();
    if (bytes_ < total) {
        memory_.reset();
        bytes_ = 0;
        memory_.reset(new (std::nothrow) std::byte[total]);  // not initialised, which would take another pass
        if (memory_ == nullptr) return write_content(step, rank, ranks);
        bytes_ = total;
    }
    std::byte* to = memory_.get();
    for (tensor_view& t : content_.tensors) {
        stream_bytes({to, t.bytes.size()}, t.bytes);  // so that the caches stay as they are for the next step
        t.bytes = {to, t.bytes.size()};
        to += t.bytes.size();
    }
    finish_streams();
    content_.rearranged.clear();
    in_background([this, step, rank, ranks](bool by_thread) {
        if (by_thread)  // Linux: of this thread alone, which training does not wait for
            ::setpriority(PRIO_PROCESS, 0, 19);
        write_content(step, rank, ranks);
    });
}

[[gnu::cold]] DDP_DECL void checkpoint_writer::commit(checkpoint_manifest const& manifest, std::size_t keep,
                                                      std::set<std::string> const& broken) noexcept {
    try {
        into_.commit(manifest);
        if (std::string const wrong = into_.remove_older(manifest.step, keep, broken); !wrong.empty())
            say_of_checkpoint("an older checkpoint cannot be removed: " + wrong);
    } catch (...) {
        error_ = std::current_exception();
    }
    written_.store(true);
}

[[gnu::cold]] DDP_DECL void checkpoint_writer::start_commit(checkpoint_manifest const& manifest, std::size_t keep,
                                                            std::set<std::string> const& broken) noexcept {
    join();
    written_.store(false);
    // At the priority of training: it takes hardly any processor time, and a wait() may come meanwhile.
    in_background([this, &manifest, keep, &broken](bool) { commit(manifest, keep, broken); });
}

template <class F>
void checkpoint_writer::in_background(F const& work) noexcept {
    try {
        thread_ = std::thread([work] { work(true); });
    } catch (...) {  // no thread, or no memory for one
        work(false);
    }
}

[[gnu::cold]] DDP_DECL checkpoint_shard checkpoint_writer::finish() {
    join();
    if (error_) std::rethrow_exception(error_);
    return shard_;
}

}  // namespace ddp::detail
