/// \file
/// Which processes have failed, where MPI can say so: ULFM (user-level failure mitigation), which Open MPI 5 has.
#pragma once

#include <ddp/core/language.hpp>  // first

#include <dlfcn.h>
#include <mpi.h>

#include <cstddef>
#include <numeric>
#include <type_traits>
#include <vector>

namespace ddp::detail::mpi {

/// ULFM's functions of the MPI library that this process has loaded; null where it has none. Looked up by name: a program
/// that was compiled for Open MPI 4 may run with Open MPI 5. Only those of Open MPI: MPICH's do not work with all of its
/// devices.
struct ulfm {
    int (*acknowledge)(MPI_Comm) = nullptr;
    int (*acknowledged)(MPI_Comm, MPI_Group*) = nullptr;
    int (*agree)(MPI_Comm, int*, MPI_Request*) = nullptr;

    [[nodiscard]] static ulfm const& of_this_process() {
        static ulfm const found = [] {
            ulfm all;
#if defined(OPEN_MPI)
            auto const look_up = [](auto& function, char const* name) {
                function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(RTLD_DEFAULT, name));
            };
            look_up(all.acknowledge, "MPIX_Comm_failure_ack");
            look_up(all.acknowledged, "MPIX_Comm_failure_get_acked");
            look_up(all.agree, "MPIX_Comm_iagree");
#endif
            return all;
        }();
        return found;
    }
};

/// ULFM's error classes in Open MPI: the process has failed; a receive from any source waits until a failure is acknowledged.
inline constexpr int process_failed = 75, process_failed_pending = 76;
[[nodiscard]] inline bool tells_of_failure(int code) {
    return ulfm::of_this_process().acknowledge != nullptr && (code == process_failed || code == process_failed_pending);
}

/// The ranks of `comm` whose processes have failed so far. Acknowledges them: receives from any source go on without them.
[[nodiscard]] inline std::vector<int> failed_ranks(MPI_Comm comm) {
    ulfm const& with = ulfm::of_this_process();
    MPI_Group failed = MPI_GROUP_NULL, all = MPI_GROUP_NULL;
    if (with.acknowledge == nullptr || with.acknowledged == nullptr || with.acknowledge(comm) != MPI_SUCCESS ||
        with.acknowledged(comm, &failed) != MPI_SUCCESS)
        return {};
    int count = 0;
    std::vector<int> places, ranks;
    if (MPI_Group_size(failed, &count) == MPI_SUCCESS && MPI_Comm_group(comm, &all) == MPI_SUCCESS) {
        places.resize(static_cast<std::size_t>(count));
        ranks.resize(places.size());
        std::iota(places.begin(), places.end(), 0);
        if (MPI_Group_translate_ranks(failed, count, places.data(), all, ranks.data()) != MPI_SUCCESS) ranks.clear();
        MPI_Group_free(&all);
    }
    if (failed != MPI_GROUP_EMPTY) MPI_Group_free(&failed);
    return ranks;
}

/// MPI_Ibarrier, of those ranks that have not failed where MPI can say so. For once in a process, at its end.
[[nodiscard]] inline int barrier_of_the_living(MPI_Comm comm, MPI_Request* request) {
    static int all = 1;  // MPI may write to it until the request has ended
    ulfm const& with = ulfm::of_this_process();
    if (with.agree != nullptr && with.agree(comm, &all, request) == MPI_SUCCESS) return MPI_SUCCESS;
    return MPI_Ibarrier(comm, request);
}

}  // namespace ddp::detail::mpi
