/// \file
/// share_memory among the ranks of a communicator, for what works in memory that all of them see.
#pragma once

#include <cstddef>
#include <cstdio>
#include <memory>
#include <utility>

#include <ddp/collective/concepts.hpp>
#include <ddp/comm/blind_ranks.hpp>
#include <ddp/comm/communicator.hpp>
#include <ddp/comm/shared_memory.hpp>
#include <ddp/core/environment_flag.hpp>
#include <ddp/core/separate.hpp>
#include <ddp/transport/any.hpp>

namespace ddp::detail {

/// Memory of `bytes` on every rank of `comm` that all of them see, or all of its host. Null if they do not, or if a rank asks
/// for 0 bytes or has DDP_SHARE_MEMORY=0. If ranks do not see each other's, rank 0 of `comm` prints which and why, unless a
/// rank of `comm` knows that this has been said. Throws environment_error, the same on every rank, if one has no room; comm_error if
/// ranks disagree about `among`, with each one's `detail`: static text that says what decides it.
template <Transport T>
[[nodiscard]] std::shared_ptr<shared_memory> share_memory(communicator<T> const& comm, std::size_t bytes,
                                                          sharing_among among = sharing_among::one_host,
                                                          char const* detail = "") {
    sharing_result found;
    if constexpr (SharingTransport<T>) {
        if (comm.size() == 1) return nullptr;
        if (!detail::environment_flag("DDP_SHARE_MEMORY", true)) bytes = 0;
        operation_info what;
        what.name = "share_memory";
        what.detail = detail;
        what.fingerprint = agree(what.name, static_cast<std::size_t>(among), "", detail);
        offered_memory mine = offer_memory(comm.transport(), bytes);
        try {
            comm.run([&] { return ddp::share_memory(comm.enter(what), std::move(mine), among, &found); });
        } catch (comm_error const&) {  // a rank that has no room left first
            if (found.refused.empty()) throw;
        }
        if (!found.refused.empty())
            throw environment_error(found.refused +
                                    ". Give it more memory (ulimit -v, the limit of its container, fewer ranks on its "
                                    "host), or set DDP_SHARE_MEMORY=0: ranks then send each other messages, and each "
                                    "maps its own memory only.");
        if (found.blind.empty()) return found.memory;
        if (comm.rank() == 0 && !found.told)
            std::fprintf(stderr, "ddp: %s: %d ranks send messages instead of adding up in memory%s\n",
                         found.blind.c_str(), comm.size(), what_to_do_if_blind);
        blindness_said() = true;
    }
    return found.memory;
}

#if defined(DDP_SEPARATE_COMPILATION)
DDP_INSTANTIATE std::shared_ptr<shared_memory> share_memory(communicator<any_transport> const&, std::size_t,
                                                            sharing_among, char const*);
#endif

}  // namespace ddp::detail
