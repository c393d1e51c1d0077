/// \file
/// shared_memory: memory of every rank of a host, which all of them can read and write.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <ddp/comm/blind_ranks.hpp>
#include <ddp/comm/group.hpp>
#include <ddp/comm/host.hpp>
#include <ddp/comm/small_gather.hpp>
#include <ddp/comm/transport.hpp>
#include <ddp/core/interface.hpp>
#include <ddp/core/task.hpp>
#include <ddp/core/text.hpp>

namespace ddp {

/// Describes the memory that one rank offers; sent as its bytes.
struct memory_offer {
    std::uint64_t host = 0;                ///< see host_of; 0: this rank shares no memory
    std::uint64_t bytes = 0;               ///< size of its memory, without the header; the caller of make() sets it
    std::uint64_t refused = 0;             ///< 1: it has no room; 2: it cannot share; `text` says why
    std::uint64_t told = 0;                ///< 1: it knows that ranks of this job do not see each other's memory
    std::array<std::uint64_t, 4> where{};  ///< how the others find it, in the transport's own form
    bounded_text<96> text = {};            ///< the reason, in words

    /// The text for messages: that of another rank may hold anything.
    [[nodiscard]] std::string reason() const { return detail::printable(text.view()); }
};
static_assert(std::has_unique_object_representations_v<memory_offer>);

/// Why a rank does not see the memory of another.
struct sharing_problem {
    std::uint64_t refused = 0;   ///< 1: no room for it; 2: the system does not permit it; 0: the reason is not known
    bounded_text<96> text = {};  ///< the reason, in words
    std::uint64_t unseen = 0;  ///< set by whoever sends it: 1 + the lowest rank concerned; 0: this rank sees all memory
    std::uint64_t sees_none = 0;  ///< 1: nor does it see that of any other rank of its host

    /// The text for messages: that of another rank may hold anything.
    [[nodiscard]] std::string reason() const { return detail::printable(text.view()); }
};
static_assert(std::has_unique_object_representations_v<sharing_problem>);

/// Makes memory of this rank visible to others: one object for each piece of memory, made by the transport.
///
/// Models: memfd_sharing, and one of inproc_transport.
class memory_sharing : public detail::interface {
public:
    static constexpr std::size_t header_bytes = 4096;  ///< of a header before the memory; zero at first

    /// Allocates header and memory, zeroed, and writes into `mine` how to find them. Throws std::exception if there is
    /// no room. Returns null if the system does not let this rank share; `mine.text` then says why.
    virtual std::shared_ptr<std::byte> make(std::size_t bytes, memory_offer& mine) = 0;
    /// Lets the rank with that offer see this rank's memory. Never waits. Returns whether that worked.
    virtual bool give(memory_offer const& peer) noexcept = 0;
    /// Receives what other ranks have given so far.
    virtual void take(std::span<memory_offer const> all) noexcept = 0;
    /// The header and memory of the rank with that offer; null if this rank cannot see them.
    virtual std::shared_ptr<std::byte> view(memory_offer const& peer) noexcept = 0;
    /// Why give(), take() or view() has failed, if this is known. The text says nothing of which rank it is.
    [[nodiscard]] virtual sharing_problem problem() const noexcept { return {}; }
    /// Replaces the first `bytes` of this rank's own header and memory by a private copy at the same address, the
    /// header last. Returns false if they stay shared. Does nothing where ranks are threads.
    virtual bool keep(std::size_t /*bytes*/) noexcept { return true; }
    /// Called once all views have been taken: releases what was needed only to take them.
    virtual void settle() noexcept {}
};

/// Refinement: a transport whose ranks may see each other's memory where they share a host. share_memory() returns null
/// where they cannot.
template <class T>
concept SharingTransport = Transport<T> && requires(T& t) {
    { t.share_memory() } -> std::same_as<std::unique_ptr<memory_sharing>>;
};

/// Memory of equal size on every rank of a group. This rank sees that of the ranks of its own host.
class shared_memory {
public:
    /// `views`: one per rank, null for those of other hosts. `hosts`: where each rank is.
    shared_memory(std::unique_ptr<memory_sharing> how, std::vector<std::shared_ptr<std::byte>> views,
                  std::vector<std::size_t> hosts, group const& of, std::uint64_t number)
        : how_(std::move(how)),
          views_(std::move(views)),
          hosts_(std::move(hosts)),
          rank_(static_cast<std::size_t>(of.rank())),
          group_(of.id()),
          number_(number) {
        for (std::size_t r = 0; r < views_.size(); ++r)
            if (views_[r] != nullptr) here_.push_back(r);
    }

    /// Identifies this memory: the same on all ranks, and different for other memory.
    [[nodiscard]] std::uint64_t number() const noexcept { return number_; }
    /// Whether these are the ranks that share it, in the same order. (No rank is in two groups with the same id.)
    [[nodiscard]] bool belongs_to(group const& ranks) const noexcept {
        return ranks.id() == group_ && static_cast<std::size_t>(ranks.size()) == views_.size();
    }
    /// The ranks of this host, ascending.
    [[nodiscard]] std::span<std::size_t const> here() const noexcept { return here_; }
    /// The number of the host of each rank: 0 for that of rank 0, the others in the order of their lowest ranks.
    [[nodiscard]] std::span<std::size_t const> hosts() const noexcept { return hosts_; }
    /// The memory of a rank of this host, on a page boundary.
    [[nodiscard]] std::byte* of(std::size_t rank) const noexcept {
        return views_[rank].get() + memory_sharing::header_bytes;
    }
    /// This rank's memory, which stays valid for as long as the result exists.
    [[nodiscard]] std::shared_ptr<std::byte> mine() const noexcept {
        return {views_[rank_], views_[rank_].get() + memory_sharing::header_bytes};
    }
    /// A number next to the memory of that rank, which other ranks may write, such as the last round that wrote its memory.
    [[nodiscard]] std::atomic_ref<std::uint64_t> word(std::size_t rank) const noexcept {
        return std::atomic_ref<std::uint64_t>(*reinterpret_cast<std::uint64_t*>(views_[rank].get() + 64));
    }
    /// From now on the first `bytes` of this rank's memory are private; they keep their values. Used after a failure,
    /// because a rank that was stopped may still write. It does not help where ranks are threads and one stays in its
    /// optimizer for longer than timing.verdict. Returns false if there was no room for a copy.
    bool keep(std::size_t bytes) noexcept {
        if (!kept_) kept_ = how_->keep(memory_sharing::header_bytes + bytes);
        return kept_;
    }

private:
    std::unique_ptr<memory_sharing> how_;
    std::vector<std::shared_ptr<std::byte>> views_;  // a rank of the group each
    std::vector<std::size_t> hosts_;
    std::vector<std::size_t> here_;
    std::size_t rank_;
    std::uint32_t group_;
    std::uint64_t number_;
    bool kept_ = false;
};

/// The result of an attempt to share memory.
struct sharing_result {
    std::shared_ptr<shared_memory> memory = nullptr;  ///< null: these ranks do not see each other's memory
    std::string refused =
        {};  ///< some rank has no room, and why: the same text on every rank, also if the call then throws
    std::string blind = {};  ///< which ranks of one host do not see each other's memory, and why, as far as known
    bool told = false;       ///< a rank has known before that some do not
};

/// This rank's memory, before others see it.
struct offered_memory {
    std::unique_ptr<memory_sharing> how = nullptr;
    std::shared_ptr<std::byte> memory = nullptr;  ///< with its header
    memory_offer offer = {};
};

/// Allocates `bytes` of memory, if the transport can share any; 0 if this rank does not want to share. Takes as long as
/// the system needs to clear it, so it is not called while driving; another thread may drive the transport meanwhile.
template <Transport T>
[[nodiscard]] offered_memory offer_memory([[maybe_unused]] T& transport, std::size_t bytes) {
    offered_memory mine;
    mine.offer.bytes = bytes;
    mine.offer.told = detail::blindness_said() ? 1 : 0;
    if constexpr (SharingTransport<T>) {
        if (bytes != 0) mine.how = transport.share_memory();
        if (mine.how == nullptr) return mine;
        mine.offer.host = host_of(transport);
        try {
            mine.memory = mine.how->make(bytes, mine.offer);
            if (mine.memory == nullptr) mine.offer.refused = 2;
        } catch (std::exception const& e) {
            mine.offer.refused = 1;
            mine.offer.text = std::string_view(e.what());
        }
    }
    return mine;
}

/// Which ranks may share memory.
enum class sharing_among : std::uint8_t {
    one_host,  ///< all ranks if they are on one host, otherwise none
    hosts,     ///< those of each host, if there are several on one of them
};

/// Ranks of one host share the memory that each of them offers, if all ranks of the lane offer the same size. The
/// result is the same on all ranks.
///
/// Cost  an all-gather of the offers, one of a byte a rank for every 4 ranks of a host, and one of what each sees (120 bytes);
///       meanwhile a descriptor for every pair of ranks of a host.
template <Transport T>
task<> share_memory(lane<T> over, offered_memory mine, sharing_among among, sharing_result* result) {
    std::unique_ptr<memory_sharing> how = std::move(mine.how);
    std::size_t const ranks = static_cast<std::size_t>(over.size()), me = static_cast<std::size_t>(over.rank());
    std::vector<memory_offer> offers(ranks);
    std::vector<std::shared_ptr<std::byte>> views(ranks);
    offers[me] = mine.offer;
    views[me] = std::move(mine.memory);
    co_await all_gather_small(over, std::span<memory_offer>(offers));
    for (memory_offer const& one : offers)
        if (one.host == 0 || one.bytes != offers[0].bytes) co_return;
    std::vector<std::uint64_t> names;
    for (memory_offer const& one : offers) names.push_back(one.host);
    std::vector<std::size_t> hosts = host_numbers(names), here;
    std::size_t most = 0, place = 0;
    for (std::size_t r = 0; r < ranks; ++r) {
        if (r == me) place = here.size();
        if (hosts[r] == hosts[me]) here.push_back(r);
        most = std::max(most, static_cast<std::size_t>(std::count(hosts.begin(), hosts.end(), hosts[r])));
    }
    if (most == 1 || (most != ranks && among == sharing_among::one_host)) co_return;
    auto const rank_of_job = [&](std::size_t r) { return over.of->world_rank(static_cast<int>(r)); };
    auto const no_room = [&](std::size_t r, std::string const& why) {
        if (!result->refused.empty()) return;
        std::vector<int> there;
        for (std::size_t other = 0; other < ranks; ++other)
            if (hosts[other] == hosts[r]) there.push_back(rank_of_job(other));
        result->refused =
            detail::concat({"rank ", rank_of_job(r), " has no room for the memory that the ranks of its host share (",
                            detail::named_ranks(there), "): ", why});
    };
    detail::blind_ranks blind;
    auto const do_not_see = [&](std::size_t a, std::size_t b) {
        blind.pairs.push_back(std::minmax({rank_of_job(a), rank_of_job(b)}));
    };
    for (std::size_t r = 0; r < ranks; ++r) {
        result->told = result->told || offers[r].told != 0;
        if (offers[r].refused == 1) no_room(r, offers[r].reason());
        if (offers[r].refused != 2) continue;
        blind.reasons.emplace_back(rank_of_job(r), offers[r].reason());
        for (std::size_t other = 0; other < ranks; ++other)  // each pair once
            if (hosts[other] == hosts[r] && (other < r || offers[other].refused != 2)) do_not_see(other, r);
    }
    result->blind = blind.text();
    if (!result->blind.empty() && result->refused.empty()) co_return;

    std::vector<std::uint8_t> said(ranks);
    if (!result->refused.empty()) {  // no rank may throw, which ends the job, before all know
        co_await all_gather_small(over.phase(1), std::span<std::uint8_t>(said));
        co_return;
    }
    std::vector<sharing_problem> seen(ranks);
    std::size_t unseen = ranks, others_seen = 0;
    constexpr std::size_t at_once = 4;  // a socket's queue holds 10 by default, and some ranks are one round ahead
    for (std::size_t first = 1; first < most; first += at_once) {
        for (std::size_t d = first; d < std::min(here.size(), first + at_once); ++d)
            if (std::size_t const r = here[(place + d) % here.size()]; !how->give(offers[r]))
                unseen = std::min(unseen, r);
        co_await all_gather_small(over.phase(1), std::span<std::uint8_t>(said));  // now all have given
        how->take(offers);
    }
    for (std::size_t const r : here) {
        if (r != me) views[r] = how->view(offers[r]);
        if (views[r] == nullptr) unseen = std::min(unseen, r);
        if (r != me && views[r] != nullptr) ++others_seen;
    }
    if (unseen != ranks) {
        seen[me] = how->problem();
        seen[me].unseen = unseen + 1;
        seen[me].sees_none = others_seen == 0 ? 1 : 0;
    }
    co_await all_gather_small(over.phase(2), std::span<sharing_problem>(seen));
    how->settle();
    for (std::size_t r = 0; r < ranks; ++r) {
        if (seen[r].unseen == 0) continue;
        if (seen[r].refused == 1) no_room(r, seen[r].reason());
        blind.reasons.emplace_back(rank_of_job(r), seen[r].reason());
        for (std::size_t other = 0; other < ranks; ++other)
            if (other != r && hosts[other] == hosts[r] && (seen[r].sees_none != 0 || other + 1 == seen[r].unseen))
                do_not_see(other, r);
    }
    std::sort(blind.pairs.begin(), blind.pairs.end());
    blind.pairs.erase(std::unique(blind.pairs.begin(), blind.pairs.end()), blind.pairs.end());
    result->blind = blind.text();
    if (!result->refused.empty())
        co_await all_gather_small(over.phase(3), std::span<std::uint8_t>(said));  // as above
    else if (result->blind.empty())
        result->memory = std::make_shared<shared_memory>(std::move(how), std::move(views), std::move(hosts), *over.of,
                                                         hash_of(0, over.id));
}

}  // namespace ddp
