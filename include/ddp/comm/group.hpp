/// \file
/// group: some ranks of the job, numbered from 0, and what this rank has entered among them.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ddp/comm/transport.hpp>
#include <ddp/core/contract.hpp>
#include <ddp/core/separate.hpp>

namespace ddp {

/// What a rank has entered. It is turned into text only when something fails.
struct operation_info {
    char const* name = "";          ///< "allreduce", "step": a string literal
    std::uint64_t count = 0;        ///< elements or bytes
    char const* element = "";       ///< "float", "bytes"
    char const* detail = "";        ///< the algorithm, for example
    identity id = {};               ///< of its messages: group.id(), a channel, and group.next_call()
    std::uint64_t fingerprint = 0;  ///< digest of what all ranks must agree on
    int root = -1;                  ///< the rank that a broadcast or gather is about; -1: none

    [[nodiscard]] std::string text() const;
};

class scheduler_base;

/// Some ranks of the job, numbered from 0 to size() - 1: what a communicator refers to. All members enter the same
/// collectives and steps in the same order; the group counts them and keeps a fingerprint of them all.
///
/// Identity  the ranks that make the group agree on id(): the largest of the next free numbers of any of them. Two groups
///           that share a rank never have the same id; disjoint groups may.
///
/// Used only while its scheduler is driven or held; owned by the communicator or trainer that uses it.
class group {
public:
    /// `members` are ranks of the job, each once; this rank is members[rank].
    group(scheduler_base& on, std::uint32_t id, std::vector<int> members, int rank);
    group(group const&) = delete;
    group& operator=(group const&) = delete;
    ~group();

    /// This rank's number in the group.
    [[nodiscard]] int rank() const noexcept { return rank_; }
    /// The number of ranks in the group.
    [[nodiscard]] int size() const noexcept { return static_cast<int>(members_.size()); }
    /// The context of its messages: identity::group.
    [[nodiscard]] std::uint32_t id() const noexcept { return id_; }
    [[nodiscard]] scheduler_base& on() const noexcept { return *on_; }

    /// The rank of the job that is rank `r` here. Throws usage_error if there is none.
    [[nodiscard]] int world_rank(int r) const {
        DDP_EXPECTS(r >= 0 && r < size(), "a peer must be a rank of the group: between 0 and size() - 1");
        return members_[static_cast<std::size_t>(r)];
    }
    /// The job's ranks that are its members, by their rank in the group.
    [[nodiscard]] std::span<int const> members() const noexcept { return members_; }
    /// The lowest of its ranks of the job.
    [[nodiscard]] int leader() const noexcept { return leader_; }

    /// Records that this rank enters a collective or a step; returns how many it has entered in this group.
    std::uint64_t enter(operation_info const& what) noexcept;
    [[nodiscard]] std::uint64_t number() const noexcept { return number_; }
    /// A digest of everything entered so far. It is the fingerprint of operations that may end without a message from
    /// some peer (a broadcast's root only sends): a rank that differed once then differs in every later one.
    [[nodiscard]] std::uint64_t history() const noexcept { return history_; }
    [[nodiscard]] operation_info const& current() const noexcept { return recent(number_).what; }
    /// Number of the next collective that the user calls in this group; the same for all members.
    [[nodiscard]] std::uint64_t next_call() noexcept { return ++calls_; }

    /// " in group {0, 2, 4}"; nothing for the group of all ranks. Where several groups of this rank have the same
    /// members, with id(): " in group {0, 2, 4} #2".
    [[nodiscard]] std::string words() const;
    /// The number of the collective whose messages have this identity, if it was entered recently; otherwise that of
    /// what was entered last. Several may be under way.
    [[nodiscard]] std::uint64_t number_of(identity const& id) const noexcept;
    [[nodiscard]] bool remembers(std::uint64_t number) const noexcept {
        return number > 0 && number <= number_ && number_ - number < remembered;
    }
    /// A description of what was entered under this number, which must still be remembered.
    [[nodiscard]] std::string words_of(std::uint64_t number) const;
    /// Whether a peer of this group has entered, under one number, another operation than this rank did, perhaps some time
    /// ago.
    [[nodiscard]] bool contradicts(ddp::mark const& theirs) const noexcept {
        return remembers(theirs.number) && theirs.fingerprint != 0 &&
               recent(theirs.number).history != theirs.fingerprint;
    }
    /// For records of failures: with the words.
    [[nodiscard]] ddp::mark mark_of(std::uint64_t number) const noexcept;
    [[nodiscard]] ddp::mark mark() const noexcept { return mark_of(number_); }
    /// For heartbeats: with the operation's name only, so that entering one costs no more than its digest.
    [[nodiscard]] ddp::mark brief_mark() const noexcept {
        return {.group = id_,
                .leader = leader_,
                .number = number_,
                .fingerprint = history_,
                .name = std::string_view(current().name)};
    }

private:
    friend class scheduler_base;

    struct entry {
        operation_info what;
        std::uint64_t history = 0;  // this entry included
    };
    static constexpr std::uint64_t remembered = 16;
    [[nodiscard]] entry const& recent(std::uint64_t number) const noexcept { return recent_[number % remembered]; }

    scheduler_base* on_;
    std::uint32_t id_;
    int rank_;
    int leader_;
    std::vector<int> members_;
    std::uint64_t number_ = 0;
    std::uint64_t history_ = 0;
    std::uint64_t calls_ = 0;
    std::array<entry, remembered> recent_;  // what was entered as number n stands at n % remembered
    group* before_ = nullptr;               // among the scheduler's groups
    group* after_ = nullptr;
};

}  // namespace ddp

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/comm/impl/group.ipp>
#endif
