/// \file
/// The MPI requests of a transport in flight, and what each of them is for.
#pragma once

#include <mpi.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include <ddp/comm/transport.hpp>
#include <ddp/transport/mpi/mpi_envelope.hpp>

namespace ddp::detail::mpi {

/// What an MPI request is for.
struct transfer {
    completion* node = nullptr;  // null: no operation waits for it (any more)
    slot* out = nullptr;         // given back when the request is done
    int peer = -1;
    bool receives = false;
    std::unique_ptr<std::byte[]> drain = nullptr;  // of a message of the wrong length
    std::size_t drain_left = 0;                    // bytes that are still to come
    int tag = 0;
};

/// A list of requests that MPI tests in one call. Never throws between two requests that make_room() has made room for.
class request_set {
public:
    [[nodiscard]] bool empty() const noexcept { return requests_.empty(); }
    [[nodiscard]] bool receives() const noexcept {
        return std::any_of(transfers_.begin(), transfers_.end(), [](transfer const& t) { return t.receives; });
    }

    void make_room(std::size_t more) {
        std::size_t const needed = requests_.size() + more;
        if (needed <= requests_.capacity() && needed <= transfers_.capacity()) return;
        std::size_t const grown = std::max(needed, 2 * requests_.capacity());
        requests_.reserve(grown);
        transfers_.reserve(grown);
        indices_.resize(requests_.capacity());
        statuses_.resize(requests_.capacity());
    }

    /// Adds the request that call(MPI_Request*) starts. Returns MPI's code; nothing is in flight unless it is
    /// MPI_SUCCESS.
    template <class Call>
    [[nodiscard]] int start(transfer what, Call const& call) {
        make_room(1);
        requests_.push_back(MPI_REQUEST_NULL);
        transfers_.push_back(std::move(what));
        int const code = call(&requests_.back());
        if (code != MPI_SUCCESS) {
            requests_.pop_back();
            transfers_.pop_back();
        }
        return code;
    }

    /// Receives `length` bytes that no receive can take, in pieces, and discards them.
    void start_drain(MPI_Comm comm, int peer, int tag, std::size_t length, std::size_t piece_bytes) {
        transfer waste{.peer = peer, .receives = true, .drain_left = length, .tag = tag};
        waste.drain = std::make_unique<std::byte[]>(std::min(length, piece_bytes));
        make_room(1);
        requests_.push_back(MPI_REQUEST_NULL);
        transfers_.push_back(std::move(waste));
        next_drain(comm, requests_.size() - 1, piece_bytes);
    }

    /// Calls ended(transfer&, code) for each request that is over, with MPI's code of it. Returns the code of the test
    /// as a whole; `moved` says whether any was over.
    template <class Ended>
    [[nodiscard]] int test(MPI_Comm comm, std::size_t piece_bytes, bool& moved, Ended const& ended) {
        moved = false;
        if (requests_.empty()) return MPI_SUCCESS;
        int count = 0;
        int const code = MPI_Testsome(static_cast<int>(requests_.size()), requests_.data(), &count, indices_.data(),
                                      statuses_.data());
        bool const one_failed = code == MPI_ERR_IN_STATUS;
        if (code != MPI_SUCCESS && !one_failed) return code;
        if (count == 0) return MPI_SUCCESS;
        moved = true;
        for (std::size_t k = 0; k < static_cast<std::size_t>(std::max(count, 0)); ++k) {  // MPI_UNDEFINED: all are null
            auto const at = static_cast<std::size_t>(indices_[k]);
            int const how = one_failed ? statuses_[k].MPI_ERROR : MPI_SUCCESS;
            if (how != MPI_SUCCESS) requests_[at] = MPI_REQUEST_NULL;
            if (how == MPI_SUCCESS && transfers_[at].drain_left > 0)
                next_drain(comm, at, piece_bytes);
            else
                ended(transfers_[at], how);
        }
        sweep();
        return MPI_SUCCESS;
    }

    /// Requests with `peer` continue, but no operation waits for them any more.
    void forget(int peer, bool receives_too) noexcept {
        for (transfer& each : transfers_)
            if (each.peer == peer && (receives_too || !each.receives)) each.node = nullptr;
    }
    /// Has no effect on receives whose bytes are already arriving.
    void cancel_receives() noexcept {
        for (std::size_t i = 0; i < requests_.size(); ++i)
            if (transfers_[i].receives && !transfers_[i].drain) MPI_Cancel(&requests_[i]);
    }

private:
    /// Requests the next piece. If MPI refuses, the request stays null and is removed.
    void next_drain(MPI_Comm comm, std::size_t at, std::size_t piece_bytes) noexcept {
        transfer& waste = transfers_[at];
        int const count = static_cast<int>(std::min(piece_bytes, waste.drain_left));
        waste.drain_left -= static_cast<std::size_t>(count);
        if (MPI_Irecv(waste.drain.get(), count, MPI_BYTE, waste.peer, waste.tag, comm, &requests_[at]) != MPI_SUCCESS)
            requests_[at] = MPI_REQUEST_NULL;
    }
    void sweep() noexcept {
        std::size_t kept = 0;
        for (std::size_t at = 0; at < requests_.size(); ++at) {
            if (requests_[at] == MPI_REQUEST_NULL) continue;
            if (kept != at) {
                requests_[kept] = requests_[at];
                transfers_[kept] = std::move(transfers_[at]);
            }
            ++kept;
        }
        requests_.resize(kept);
        transfers_.resize(kept);
    }

    std::vector<MPI_Request> requests_;
    std::vector<transfer> transfers_;  // one a request
    std::vector<int> indices_;
    std::vector<MPI_Status> statuses_;
};

}  // namespace ddp::detail::mpi
