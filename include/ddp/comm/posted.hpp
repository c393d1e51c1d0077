/// \file
/// posted: memory that the library itself sends from or receives into during a call.
#pragma once

#include <memory>
#include <utility>

#include <ddp/comm/communicator.hpp>
#include <ddp/comm/transport.hpp>

namespace ddp::detail {

/// Owns memory that messages are sent from or received into, and frees it when it is destroyed. After a failure of the
/// job the memory lives as long as the transport, which may write to it until then (communicator::keep). `Memory` must
/// not contain a communicator.
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
