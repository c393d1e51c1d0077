/// \file
/// Which processes have failed, as an MPI library with ULFM knows (user-level failure mitigation: Open MPI 5, MPICH).
#pragma once

#include <ddp/core/language.hpp>  // first

#include <dlfcn.h>
#include <mpi.h>

#include <cstddef>
#include <numeric>
#include <vector>

namespace ddp::detail::mpi {

/// ULFM's functions of the MPI library that this process has loaded; null where it has none. Looked up by name: a program
/// that was compiled for Open MPI 4 may run with Open MPI 5.
struct ulfm {
    int (*acknowledge)(MPI_Comm) = nullptr;
    int (*acknowledged)(MPI_Comm, MPI_Group*) = nullptr;
    int (*agree)(MPI_Comm, int*, MPI_Request*) = nullptr;

    [[nodiscard]] static ulfm const& of_this_process() {
        static ulfm const found = [] {
            ulfm all;
            all.acknowledge = reinterpret_cast<int (*)(MPI_Comm)>(::dlsym(RTLD_DEFAULT, "MPIX_Comm_failure_ack"));
            all.acknowledged =
                reinterpret_cast<int (*)(MPI_Comm, MPI_Group*)>(::dlsym(RTLD_DEFAULT, "MPIX_Comm_failure_get_acked"));
            all.agree =
                reinterpret_cast<int (*)(MPI_Comm, int*, MPI_Request*)>(::dlsym(RTLD_DEFAULT, "MPIX_Comm_iagree"));
            return all;
        }();
        return found;
    }
};

/// The ranks of `comm` whose processes have failed. Acknowledges them, so that receives from any source go on without them.
[[nodiscard]] inline std::vector<int> failed_ranks(MPI_Comm comm) {
    ulfm const& with = ulfm::of_this_process();
    MPI_Group failed = MPI_GROUP_NULL, all = MPI_GROUP_NULL;
    if (with.acknowledge == nullptr || with.acknowledged == nullptr || with.acknowledge(comm) != MPI_SUCCESS ||
        with.acknowledged(comm, &failed) != MPI_SUCCESS)
        return {};
    int count = 0;
    MPI_Group_size(failed, &count);
    std::vector<int> places(static_cast<std::size_t>(count)), ranks(places.size());
    std::iota(places.begin(), places.end(), 0);
    MPI_Comm_group(comm, &all);
    MPI_Group_translate_ranks(failed, count, places.data(), all, ranks.data());
    MPI_Group_free(&all);
    if (failed != MPI_GROUP_EMPTY) MPI_Group_free(&failed);
    return ranks;
}

/// MPI_Ibarrier, of those ranks that have not failed where the library can tell.
[[nodiscard]] inline int barrier_of_the_living(MPI_Comm comm, MPI_Request* request) {
    static int all = 1;
    ulfm const& with = ulfm::of_this_process();
    return with.agree != nullptr ? with.agree(comm, &all, request) : MPI_Ibarrier(comm, request);
}

}  // namespace ddp::detail::mpi
