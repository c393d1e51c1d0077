/// \file
/// posted: what the library itself posts in a call, in memory that no caller knows.
#pragma once

#include <memory>
#include <utility>

#include <ddp/comm/communicator.hpp>
#include <ddp/comm/transport.hpp>

namespace ddp::detail {

/// A thing whose memory messages are sent from or received into. It goes with this object; after a failure of the job not
/// before the transport, which may write there until then (communicator::keep). What it holds must hold no communicator.
template <Transport T, class Memory>
class posted {
public:
    posted(communicator<T> const& comm, Memory memory)
        : comm_(comm), memory_(std::make_shared<Memory>(std::move(memory))) {}
    posted(posted const&) = delete;
    posted& operator=(posted const&) = delete;
    ~posted() { comm_.keep_if_failed(std::move(memory_)); }

    [[nodiscard]] Memory& operator*() const noexcept { return *memory_; }
    [[nodiscard]] Memory* operator->() const noexcept { return memory_.get(); }

private:
    communicator<T> const& comm_;
    std::shared_ptr<Memory> memory_;
};

}  // namespace ddp::detail
