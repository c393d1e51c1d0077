/// \file
/// A duplicate of the user's MPI communicator, and all memory that MPI may access for it.
#pragma once

#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <ddp/comm/cores.hpp>
#include <ddp/comm/transport.hpp>
#include <ddp/core/contract.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/core/error.hpp>
#include <ddp/core/text.hpp>
#include <ddp/transport/mpi/mpi_envelope.hpp>
#include <ddp/transport/mpi/mpi_requests.hpp>

namespace ddp::detail::mpi {

[[nodiscard]] inline bounded_text<MPI_MAX_ERROR_STRING + 1> words_of(int code) noexcept {
    bounded_text<MPI_MAX_ERROR_STRING + 1> text;
    int length = 0;
    MPI_Error_string(code, text.chars.data(), &length);
    return text;
}

/// This process among those of the communicator, and what its MPI can do.
struct place {
    int rank = 0;
    int size = 1;
    int level = MPI_THREAD_SINGLE;
    int largest_tag = 32767;

    /// The tag for MPI_Comm_create_group on the transport's communicator, which no message of the transport has.
    [[nodiscard]] int group_tag() const noexcept { return largest_tag - 1; }

    [[nodiscard]] std::string name() const { return "rank " + std::to_string(rank) + " of " + std::to_string(size); }
    void check(int code, char const* call) const {
        if (code == MPI_SUCCESS) return;
        throw error(errc::peer_closed, name() + ": " + call + " failed: " + std::string(words_of(code).view()) +
                                           ". MPI cannot be relied on after this: end the job and start it again.");
    }
};

[[nodiscard]] inline place place_in(MPI_Comm comm) {
    int initialised = 0;
    int finalised = 0;
    int main_thread = 0;
    int between = 0;
    place self;
    MPI_Initialized(&initialised);
    MPI_Finalized(&finalised);
    DDP_EXPECTS(initialised != 0 && finalised == 0,
                "mpi_transport needs MPI: make a boost::mpi::environment in main() that outlives it");
    self.check(MPI_Query_thread(&self.level), "MPI_Query_thread");
    self.check(MPI_Is_thread_main(&main_thread), "MPI_Is_thread_main");
    DDP_EXPECTS(self.level >= MPI_THREAD_SERIALIZED || main_thread != 0,
                "below MPI_THREAD_SERIALIZED only the thread that initialised MPI may make an mpi_transport");
    DDP_EXPECTS(comm != MPI_COMM_NULL, "mpi_transport needs a communicator that this process belongs to");
    self.check(MPI_Comm_test_inter(comm, &between), "MPI_Comm_test_inter");
    DDP_EXPECTS(between == 0, "mpi_transport needs an intracommunicator; merge the two groups first");
    self.check(MPI_Comm_rank(comm, &self.rank), "MPI_Comm_rank");
    self.check(MPI_Comm_size(comm, &self.size), "MPI_Comm_size");
    int* tags = nullptr;
    int known = 0;
    self.check(MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, static_cast<void*>(&tags), &known), "MPI_Comm_get_attr");
    if (known != 0) self.largest_tag = *tags;
    return self;
}

/// Outlives the transport if MPI does not release it in time.
struct session {
    /// What ranks exchange first.
    struct hello {
        std::uint64_t piece_bytes = 0, layout = 0, host = 0;
        core_set cores = {};                // that the rank may run on
        std::array<char, 72> process = {};  // "pid 4711 on node3", ended by 0
    };
    static_assert(std::has_unique_object_representations_v<hello>);

    MPI_Comm comm = MPI_COMM_NULL;
    std::vector<std::pair<std::uint32_t, MPI_Comm>> seconds;  // by group id
    std::vector<hello> hellos;
    std::array<envelope, 16> ring;  // envelopes come in here, in order
    std::array<MPI_Request, 16> ring_requests;
    slot_pool slots;
    request_set requests;
    session* next_kept = nullptr;

    session() { ring_requests.fill(MPI_REQUEST_NULL); }

    /// Of a rank: "pid 4711 on node3".
    [[nodiscard]] std::string_view process_of(int rank) const noexcept {
        return hellos[static_cast<std::size_t>(rank)].process.data();
    }

    /// The ranks of this host, and the cores that they may run on together.
    struct neighbourhood {
        int ranks = 0;
        core_set cores = {};
    };

    /// Collective. Duplicates `users`, rejects differences that would corrupt memory later, and starts the ring's
    /// receives. Returns the ranks and cores of this host. Each of its two collective calls is limited by `join`.
    neighbourhood open(MPI_Comm users, place const& self, std::size_t piece_bytes, nanoseconds join) {
        MPI_Request request = MPI_REQUEST_NULL;
        self.check(MPI_Comm_idup(users, &comm, &request), "MPI_Comm_idup");
        await(request, "MPI_Comm_idup", self, monotonic_clock::now() + join);
        self.check(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
        neighbourhood const neighbours = agree(self, piece_bytes, join);
        for (std::size_t i = 0; i < ring.size(); ++i)
            self.check(MPI_Recv_init(&ring[i], sizeof(envelope), MPI_BYTE, MPI_ANY_SOURCE, 0, comm, &ring_requests[i]),
                       "MPI_Recv_init");
        for (MPI_Request& each : ring_requests) self.check(MPI_Start(&each), "MPI_Start");
        return neighbours;
    }

    /// A communicator for MPI calls of the group `id` of these ranks, made at the first call: collective over them.
    [[nodiscard]] MPI_Comm second_duplicate(place const& self, std::uint32_t id, std::span<int const> members) {
        for (auto const& [known, of] : seconds)
            if (known == id) return of;
        MPI_Group all = MPI_GROUP_NULL, some = MPI_GROUP_NULL;
        MPI_Comm made = MPI_COMM_NULL;
        self.check(MPI_Comm_group(comm, &all), "MPI_Comm_group");
        self.check(MPI_Group_incl(all, static_cast<int>(members.size()), members.data(), &some), "MPI_Group_incl");
        // Open MPI sends under this tag on this communicator: one that no message of the transport has.
        int const problem = MPI_Comm_create_group(comm, some, self.group_tag(), &made);
        MPI_Group_free(&some);
        MPI_Group_free(&all);
        self.check(problem, "MPI_Comm_create_group");
        self.check(MPI_Comm_set_errhandler(made, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
        seconds.emplace_back(id, made);
        return made;
    }

    /// Takes the receives back from MPI and frees the communicator if nothing is left on it, which needs `all_left`.
    [[nodiscard]] bool close(bool all_left) noexcept {
        bool clean = requests.empty();
        for (MPI_Request& request : ring_requests) {
            if (request == MPI_REQUEST_NULL) continue;
            MPI_Cancel(&request);
            int done = 0;
            for (int tries = 0; done == 0 && tries < 1000; ++tries)
                if (MPI_Test(&request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS) break;
            if (done != 0)
                MPI_Request_free(&request);
            else
                clean = false;
        }
        clean = clean && all_left;
        for (auto& [id, of] : seconds)
            if (clean) MPI_Comm_free(&of);
        if (clean) MPI_Comm_free(&comm);
        return clean;
    }

private:
    /// MPI has no deadlines of its own.
    static void await(MPI_Request& request, char const* call, place const& self, time_point until) {
        for (int done = 0; done == 0;) {
            self.check(MPI_Test(&request, &done, MPI_STATUS_IGNORE), call);
            if (done != 0) return;
            if (monotonic_clock::now() >= until)
                throw error(
                    errc::rendezvous,
                    self.name() + " waited in " + call +
                        " for the other ranks of its communicator: every one of them must call ddp::run, or make an "
                        "mpi_transport, in the same order, within timing::join");
            std::this_thread::sleep_for(std::chrono::microseconds(20));
        }
    }

    [[nodiscard]] static std::string name_of_host(place const& self) {
        std::array<char, MPI_MAX_PROCESSOR_NAME + 1> host{};
        int length = 0;
        self.check(MPI_Get_processor_name(host.data(), &length), "MPI_Get_processor_name");
        return {host.data(), static_cast<std::size_t>(length)};
    }

    neighbourhood agree(place const& self, std::size_t piece_bytes, nanoseconds join) {
        auto const ranks = static_cast<std::size_t>(self.size);
        hellos.resize(ranks + 1);  // the last is this rank's: MPI forbids sending from where it receives
        std::string const host = name_of_host(self), process = concat({"pid ", ::getpid(), " on ", printable(host)});
        hello& own = hellos.back() = {.piece_bytes = piece_bytes,
                                      .layout = sizeof(envelope) << 16 | sizeof(failure),
                                      .host = digest{}.add(std::string_view(host)).value(),
                                      .cores = cores_of_process()};
        std::copy_n(process.begin(), std::min(process.size(), own.process.size() - 1), own.process.begin());
        MPI_Request request = MPI_REQUEST_NULL;
        self.check(
            MPI_Iallgather(&own, sizeof(hello), MPI_BYTE, hellos.data(), sizeof(hello), MPI_BYTE, comm, &request),
            "MPI_Iallgather");
        await(request, "MPI_Iallgather", self, monotonic_clock::now() + join);
        neighbourhood neighbours;
        for (std::size_t peer = 0; peer < ranks; ++peer) {
            hello const& first = hellos[0];
            hello const& its = hellos[peer];
            if (its.piece_bytes != first.piece_bytes || its.layout != first.layout)
                throw error(errc::mismatch, "rank " + std::to_string(peer) +
                                                " and rank 0 made mpi_transports that differ: " + "piece_bytes " +
                                                std::to_string(its.piece_bytes) + " and " +
                                                std::to_string(first.piece_bytes) + ", record layout " +
                                                std::to_string(its.layout) + " and " + std::to_string(first.layout) +
                                                ". Use one build and the same mpi_options on every rank.");
            if (its.host != own.host) continue;
            ++neighbours.ranks;
            neighbours.cores.add(its.cores);
        }
        return neighbours;
    }
};

/// Keeps memory that MPI may still touch reachable until the process ends.
inline std::atomic<session*> kept_sessions{nullptr};
inline void keep_for_good(std::unique_ptr<session> dead) noexcept {
    if (dead == nullptr) return;
    session* const kept = dead.release();
    kept->next_kept = kept_sessions.load();
    while (!kept_sessions.compare_exchange_weak(kept->next_kept, kept)) {
    }
}

}  // namespace ddp::detail::mpi
