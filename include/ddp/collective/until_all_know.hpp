/// \file
/// until_all_know: for errors that every rank throws.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <ddp/collective/call.hpp>
#include <ddp/comm/communicator.hpp>
#include <ddp/comm/small_gather.hpp>
#include <ddp/core/error.hpp>

namespace ddp::detail {

/// Collective; called by every rank that is about to throw the same error, and returns once all of them know of it. If one threw
/// before, the job would fail as that rank unwinds, and the others would throw that instead. Throws no comm_error: a rank that
/// has already left knew. Cost: a small all-gather.
template <Transport T>
void until_all_know(communicator<T> const& comm, char const* operation) {
    std::vector<std::uint8_t> all(static_cast<std::size_t>(comm.size()));
    try {
        call(comm, about<std::uint8_t>(operation, 1, "an error of all ranks"),
             [&](auto over) { return all_gather_small(over, std::span(all)); });
    } catch (comm_error const&) {  // the job has failed meanwhile
    }
}

}  // namespace ddp::detail
