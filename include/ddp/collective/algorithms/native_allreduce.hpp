/// \file
/// native_allreduce: the MPI library's own MPI_Allreduce.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <type_traits>

#include <ddp/collective/concepts.hpp>
#include <ddp/comm/scheduler.hpp>
#include <ddp/core/contract.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/core/task.hpp>
#include <ddp/transport/any.hpp>
#include <ddp/transport/mpi/mpi.hpp>

#include <mpi.h>

namespace ddp {

/// What native_allreduce works over: MPI, or an any_transport that holds it.
template <class T>
concept MpiTransport = std::same_as<T, mpi_transport> || std::same_as<T, any_transport>;

/// Sums by MPI_Allreduce on a duplicate of the user's communicator: for interconnects that only the vendor's MPI uses well,
/// and for comparison. docs/native_allreduce.md says when.
///
/// data    n elements of float or double, the same n on every rank.
/// Cost    that of MPI_Allreduce, plus less than a microsecond. It blocks the calling thread and works in place, which Open MPI
///         does no slower than between two buffers. Nothing else of the library makes progress meanwhile, so a trainer
///         overlaps nothing: it sums in finish(), after the weights, bucket by bucket.
/// Sums    in an order that MPI chooses by size and number of ranks: bits differ from those of other algorithms.
/// Throws  ddp::error (DDP-E202) with MPI's message if MPI returns an error, and the other ranks DDP-E206, which quotes it.
///         usage_error if the communicator is not over MPI, or piece_bytes is too small; this is found within the call, and the
///         job has failed afterwards.
///         There is no deadline: a rank that never calls it, or calls it with another count, is waited for until something ends
///         the job.
struct native_allreduce {
    /// Longer arrays are summed in pieces of this size, the same on every rank: MPI allocates scratch memory as large as the
    /// array in each call (Open MPI 4.1, 16 MiB on two ranks: 13.8 ms in one call, 7.2 ms in pieces of 1 MiB).
    std::size_t piece_bytes = std::size_t{1} << 20;

    static constexpr char const* name = "native";
    static constexpr bool canonical = false;

    [[nodiscard]] std::uint64_t hash() const noexcept { return policy_hash(name, piece_bytes); }
    [[nodiscard]] std::string hash_words() const { return policy_words(name, {{"piece_bytes", piece_bytes}}); }

    template <MpiTransport T, Element E>
    static void sum_blocking(native_allreduce self, lane<T> over, std::span<E> data) {
        DDP_EXPECTS(self.piece_bytes >= sizeof(E), "native_allreduce::piece_bytes must be at least one element");
        if (over.size() == 1) return;
        mpi_transport& transport = mpi_of(over.on->transport());
        MPI_Datatype const type = std::is_same_v<E, float> ? MPI_FLOAT : MPI_DOUBLE;
        std::size_t const most = std::min<std::size_t>(self.piece_bytes / sizeof(E), std::numeric_limits<int>::max());
        MPI_Comm const comm = transport.second_duplicate(over.of->id(), over.of->members());
        for (; !data.empty(); data = data.subspan(std::min(most, data.size())))
            transport.check(MPI_Allreduce(MPI_IN_PLACE, data.data(), static_cast<int>(std::min(most, data.size())),
                                          type, MPI_SUM, comm),
                            "MPI_Allreduce");
    }

    template <MpiTransport T, Element E>
    static task<> sum(native_allreduce self, lane<T> over, std::span<E> data) {
        sum_blocking(self, over, data);
        co_return;
    }

private:
    static mpi_transport& mpi_of(mpi_transport& transport) noexcept { return transport; }
    static mpi_transport& mpi_of(any_transport& transport) {
        mpi_transport* const held = transport.target<mpi_transport>();
        DDP_EXPECTS(held != nullptr,
                    "native_allreduce sums by MPI: it needs a communicator over MPI, and this one is over " +
                        std::string(transport.name()));
        return *held;
    }
};
static_assert(BlockingAllreduceOver<native_allreduce, mpi_transport, float>);
static_assert(BlockingAllreduceOver<native_allreduce, mpi_transport, double>);
static_assert(BlockingAllreduceOver<native_allreduce, any_transport, float>);

}  // namespace ddp
