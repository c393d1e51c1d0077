/// \file
/// communicator: what users hold. A handle on a group of ranks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <ddp/comm/driver.hpp>
#include <ddp/comm/group.hpp>
#include <ddp/comm/host.hpp>
#include <ddp/comm/lane.hpp>
#include <ddp/comm/split.hpp>
#include <ddp/core/contract.hpp>
#include <ddp/core/digest.hpp>

namespace ddp {

/// One rank among the ranks of a group. The first communicator of a job is the group of all its ranks; split(),
/// subgroup(), host() and across_hosts() make groups of its ranks, and groups of groups.
///
/// communicator<> is over any_transport: to make or use one include transport/any.hpp, or ddp.hpp, which includes both.
///
/// A handle: copies refer to the same group, and all groups share one transport. They may be destroyed in any order; the
/// rank leaves the job with its last communicator or trainer: cleanly, or, during stack unwinding, by reporting a failure.
///
/// Order   all members of a group call its collectives in the same order. Ranks that are members of several groups also
///         agree on the order between these groups: if ranks of different groups wait for one another in a cycle, every
///         rank throws comm_error (DDP-E205). Steps of trainers on different groups may overlap in any way.
/// Thread safety  each rank may call collectives from one thread at a time.
/// Failure  of any rank or connection is a failure of the job: every rank throws the same verdict as comm_error, except
///         that a rank whose own code threw gets its own exception back; afterwards every call in every group throws
///         the verdict again.
template <Transport T = any_transport>
class communicator {
public:
    using transport_type = T;

    /// The group of all ranks. DDP_COMMUNICATION_THREAD overrides `thread`. Throws usage_error if `times` makes no sense or
    /// `thread` is none; environment_error if the variable has a value other than automatic, drives or rests, or if the
    /// system cannot start a thread.
    explicit communicator(std::unique_ptr<T> transport, timing const& times = {},
                          communication_thread thread = communication_thread::automatic);

    /// This rank's number in the group, between 0 and size() - 1.
    [[nodiscard]] int rank() const noexcept { return group_->rank(); }
    /// The number of ranks in the group.
    [[nodiscard]] int size() const noexcept { return group_->size(); }
    /// What moves the bytes, for all groups of the job.
    [[nodiscard]] T& transport() const noexcept { return driver_->transport(); }
    [[nodiscard]] scheduler<T>& tasks() const noexcept { return driver_->tasks(); }
    /// The time limits of the job.
    [[nodiscard]] timing const& times() const noexcept { return tasks().times(); }
    /// The ranks of the job that form this group, by their rank in it.
    [[nodiscard]] group& members() const noexcept { return *group_; }

    // Groups. All four are collective over this communicator: every rank of it calls them.

    /// Collective: ranks that pass the same color form a group, numbered by ascending key; ranks with equal keys keep their
    /// order.
    ///
    /// Cost    an all-gather of 24 bytes per rank. A group holds its list of ranks and no resource of the transport.
    /// Throws  comm_error (the same verdict on every rank).
    [[nodiscard]] communicator split(int color, int key = 0) const {
        return divide("split", static_cast<std::uint64_t>(static_cast<std::int64_t>(color) + (std::int64_t{1} << 31)),
                      key);
    }
    /// Collective: the listed ranks of this communicator, in that order. Every rank calls it with the same list; those that
    /// are not in it get std::nullopt. Cost: as split(). Throws comm_error (DDP-E205 if the lists differ); usage_error if
    /// the list is empty, names a rank twice or one that does not exist.
    [[nodiscard]] std::optional<communicator> subgroup(std::span<int const> ranks) const;
    [[nodiscard]] std::optional<communicator> subgroup(std::initializer_list<int> ranks) const {
        return subgroup(std::span<int const>(ranks.begin(), ranks.size()));
    }
    /// Collective: the ranks that run on this rank's host. Cost and errors: as split().
    [[nodiscard]] communicator host() const { return divide("host", host_of(transport()), 0); }
    /// Collective: the ranks that have the same number on their hosts as this rank has on its own (in host()). If all
    /// hosts have the same number of ranks, this is one rank of each host. Cost: two splits. Errors: as split().
    [[nodiscard]] communicator across_hosts() const { return split(host().rank()); }

    // What collectives and trainers are made of.

    /// Records that this rank enters `what`, the next collective of this group, and returns the lane that it
    /// communicates over. Call it inside run() or start().
    [[nodiscard]] lane<T> enter(operation_info what) const;
    /// Runs the task that `make` returns to its end, and everything else in flight beside it.
    /// Throws the verdict (comm_error) if the job failed, or what the task itself threw, after the peers were told.
    void run(function_ref<task<>()> make) const { driver_->run(make); }
    /// The driver of the job, for objects that outlive this handle.
    [[nodiscard]] std::shared_ptr<ddp::driver<T>> const& driver() const noexcept { return driver_; }

    /// Bytes that this rank has sent to other ranks of the job, in all groups, since it joined: payloads of the messages of
    /// trainers and collectives, without the transport's headers. What ranks read in each other's memory does not count.
    [[nodiscard]] std::uint64_t bytes_sent() const {
        return exclusively([this] { return tasks().bytes_sent(); });
    }

    /// How messages between these ranks travel; the same on every rank. Sends nothing. Cost: O(P), or O(P^2) if not all of
    /// them go through memory.
    [[nodiscard]] message_path messages() const {
        if constexpr (PathTransport<T>) {
            std::span<int const> const ranks = members().members();
            if (!transport().through_memory(ranks[0], ranks[0])) return message_path::unknown;
            if (through_memory()) return message_path::memory;
            for (std::size_t a = 0; a < ranks.size(); ++a)
                for (std::size_t b = 0; b < a; ++b)
                    if (*transport().through_memory(ranks[a], ranks[b])) return message_path::mixed;
            return message_path::sockets;
        } else {
            return message_path::unknown;
        }
    }
    /// Whether all messages between these ranks go through memory.
    [[nodiscard]] bool through_memory() const {
        if constexpr (PathTransport<T>) {
            std::span<int const> const ranks = members().members();
            return std::all_of(ranks.begin(), ranks.end(),
                               [&](int r) { return transport().through_memory(ranks[0], r).value_or(false); });
        } else {
            return false;
        }
    }

    /// What the communication thread does in this job: drives, rests or none.
    [[nodiscard]] communication_thread thread() const noexcept { return driver_->thread(); }
    /// Whether a thread of the library drives the communication between calls: thread() is communication_thread::drives.
    [[nodiscard]] bool has_thread() const noexcept { return driver_->has_thread(); }
    /// Processor time that the communication thread has taken so far, in all groups of the job; 0 without one. Blocking calls
    /// handle messages on the caller's thread, which is not included.
    [[nodiscard]] nanoseconds thread_time() const noexcept { return driver_->thread_time(); }
    /// Drives the communication without waiting. Needed only where no thread of the library does (see has_thread()); harmless
    /// elsewhere. Throws nothing: an error fails the job, and the next call throws it.
    void progress() const noexcept { driver_->progress(); }
    /// Tells the thread that drives that there is mail for it (see mailbox_client). From any thread; never blocks for
    /// long.
    void poke() const noexcept { driver_->poke(); }
    /// Calls `f` while no other thread drives: for code that uses the scheduler from outside. Throws usage_error in a hook.
    template <class F>
    decltype(auto) exclusively(F&& f) const {
        return driver_->exclusively(std::forward<F>(f));
    }

    /// Reports that this rank's own code failed: the job ends, and the other ranks throw comm_error (DDP-E206) with this
    /// text. Throws nothing. Waits while another thread is in a blocking call.
    void fail(std::string_view text) const noexcept {
        driver_->fail([&] { tasks().fail(failure_kind::threw, errc::remote_exception, -1, text); });
    }
    void fail(std::exception_ptr const& thrown) const noexcept {
        driver_->fail([&] { tasks().fail(thrown); });
    }
    /// Keeps memory until the transport is gone: MPI may touch what was posted even after a failure.
    void keep(std::shared_ptr<void> memory) const { driver_->keep(std::move(memory)); }
    /// The same if the job has failed; otherwise releases the memory. May be called from anywhere, hooks included.
    void keep_if_failed(std::shared_ptr<void> memory) const noexcept { driver_->keep_if_failed(std::move(memory)); }
    /// Throws the verdict (comm_error) if the job has failed. If this rank's own observer, optimizer or exchange was
    /// the reason, the first call throws its exception instead. Cheap; `step` and every collective do the same.
    void check() const { driver_->check(); }

private:
    communicator(std::shared_ptr<ddp::driver<T>> driver, std::unique_ptr<ddp::group> members);

    [[nodiscard]] communicator divide(char const* name, std::uint64_t color, std::int64_t key,
                                      std::uint64_t more = 0) const;

    std::shared_ptr<ddp::driver<T>> driver_;
    std::shared_ptr<ddp::group> group_;
};

// Defined out of the class, so that one source file can compile them for any_transport.

template <Transport T>
communicator<T>::communicator(std::unique_ptr<T> transport, timing const& times, communication_thread thread)
    : driver_(std::make_shared<ddp::driver<T>>(std::move(transport), times, thread)),
      group_(driver_, &driver_->tasks().world()) {}
template <Transport T>
std::optional<communicator<T>> communicator<T>::subgroup(std::span<int const> ranks) const {
    std::vector<int> sorted(ranks.begin(), ranks.end());
    std::sort(sorted.begin(), sorted.end());
    auto const twice = std::adjacent_find(sorted.begin(), sorted.end());
    DDP_EXPECTS(!sorted.empty(), "subgroup: list ranks of this communicator; the list is empty");
    DDP_EXPECTS(sorted.front() >= 0 && sorted.back() < size(),
                detail::concat({"subgroup: list ranks of this communicator; there is no rank ",
                                sorted.front() < 0 ? sorted.front() : sorted.back(), " among ", size()}));
    DDP_EXPECTS(twice == sorted.end(), detail::concat({"subgroup: list each rank once; ", *twice, " is there twice"}));
    auto const at = std::find(ranks.begin(), ranks.end(), rank());
    bool const inside = at != ranks.end();
    communicator all =
        divide("subgroup", inside ? 0 : 1, at - ranks.begin(), digest().add(std::span<int const>(ranks)).value());
    if (!inside) return std::nullopt;
    return all;
}
template <Transport T>
lane<T> communicator<T>::enter(operation_info what) const {
    what.id = {.group = group_->id(), .channel = channel::user, .index = group_->next_call()};
    group_->enter(what);
    return {tasks(), *group_, what.id, group_->history()};
}
template <Transport T>
communicator<T>::communicator(std::shared_ptr<ddp::driver<T>> driver, std::unique_ptr<ddp::group> members)
    : driver_(std::move(driver)), group_(members.release(), [on = driver_](ddp::group* of) {
          on->exclusively_from_anywhere([of] { delete of; });
      }) {}
template <Transport T>
communicator<T> communicator<T>::divide(char const* name, std::uint64_t color, std::int64_t key,
                                        std::uint64_t more) const {
    operation_info what;
    what.name = name;
    what.fingerprint = digest().add(std::string_view(name)).add(more).value();
    std::unique_ptr<ddp::group> mine;
    run([&] { return detail::split(enter(what), color, key, &mine); });
    return communicator(driver_, std::move(mine));
}

}  // namespace ddp
