/// \file
/// tcp_memory_paths: moves the connections between ranks of one host to memory that both see.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <ddp/comm/blind_ranks.hpp>
#include <ddp/comm/shared_memory.hpp>
#include <ddp/comm/transport.hpp>
#include <ddp/core/bytes.hpp>
#include <ddp/core/text.hpp>
#include <ddp/rendezvous/ranks_apart.hpp>
#include <ddp/rendezvous/tcp_mesh.hpp>
#include <ddp/rendezvous/tcp_socket.hpp>
#include <ddp/rendezvous/tcp_store.hpp>
#include <ddp/transport/framed/memory_path.hpp>
#include <ddp/transport/shm/byte_ring.hpp>
#include <ddp/transport/shm/memfd.hpp>

namespace ddp::detail {

/// Ascending ranks as text, one bit each: the number of the first and a colon, then hexadecimal words of 64 bits with commas
/// between. It fits a value of the store: a thousand neighbours take about 280 bytes, and ranks among 13,000 consecutive ones
/// always fit.
[[nodiscard, gnu::cold]] inline std::string ranks_text(std::span<int const> ranks) {
    std::string text;
    if (ranks.empty()) return text;
    std::vector<std::uint64_t> words(static_cast<std::size_t>((ranks.back() - ranks.front()) / 64 + 1));
    for (int const rank : ranks) {
        int const at = rank - ranks.front();
        words[static_cast<std::size_t>(at / 64)] |= std::uint64_t{1} << (at % 64);
    }
    text = concat({ranks.front()});
    for (std::size_t i = 0; i < words.size(); ++i) {
        std::array<char, 24> word{};
        std::snprintf(word.data(), word.size(), "%c%llx", i == 0 ? ':' : ',',
                      static_cast<unsigned long long>(words[i]));
        text += word.data();
    }
    return text;
}
/// Reads what ranks_text wrote; of any other text, as much as can be read.
[[nodiscard, gnu::cold]] inline std::vector<int> ranks_in(std::string_view text) {
    std::vector<int> ranks;
    char const *const begin = text.data(), *const end = begin + text.size();
    int first = 0;
    auto [at, problem] = std::from_chars(begin, end, first);
    if (problem != std::errc{} || first < 0 || first > 65536) return ranks;
    for (int base = first; at != end && (*at == ':' || *at == ','); base += 64) {
        std::uint64_t word = 0;
        std::from_chars_result const read = std::from_chars(at + 1, end, word, 16);
        if (read.ec != std::errc{}) break;
        for (int bit = 0; bit < 64; ++bit)
            if ((word >> bit & 1) != 0) ranks.push_back(base + bit);
        at = read.ptr;
    }
    return ranks;
}

/// Every rank makes one piece of memory with a ring for each other rank of its host, into which it writes, and
/// publishes in the store where it is. Descriptors are sent as in memfd_sharing. A pair of ranks that see each other's
/// memory uses it; other pairs use TCP.
class memory_paths {
public:
    /// `machine`: this_machine(), or 0 if the host is one on purpose. `wanted`: whether this rank shares memory if it can. A
    /// rank's rings take 2 MiB in all, 16 to 256 KiB each.
    [[gnu::cold]] memory_paths(int rank, std::vector<tcp_mesh::connection>& all, std::uint64_t host,
                               std::uint64_t machine, bool wanted)
        : me_(rank), told_before_(blindness_said()), told_apart_before_(separation_said()) {
        for (int r = 0; r <= static_cast<int>(all.size()); ++r)
            for (tcp_mesh::connection& c : all)
                if (c.same_host && c.rank == r) peers_.push_back({r, &c.stream});
        if (!wanted) return;
        host_ = host;
        machine_ = machine;
        if (peers_.empty()) return;
        capacity_ = std::clamp(std::bit_floor((std::size_t{2} << 20) / peers_.size()), std::size_t{16} << 10,
                               std::size_t{256} << 10);
        expect_room(static_cast<int>(all.size()) + 1);
        try {
            mine_.bytes = peers_.size() * slot_bytes();
            memory_ = how_.make(mine_.bytes, mine_);
        } catch (std::exception const& e) {
            mine_.text = std::string_view(e.what());
        }
        if (memory_ != nullptr) mine_.host = host;
    }

    /// Call it before anything is sent over the connections. Ends at `until`, whether or not the other ranks have
    /// answered.
    [[gnu::cold]] void exchange(tcp_store& store, int size, time_point until) {
        const_bytes const offer = bytes_of(mine_);
        store.put(concat({"memory/", me_}), {reinterpret_cast<char const*>(offer.data()), offer.size()}, until);
        if (peers_.empty()) return;
        for (auto const& [key, value] : store.all("memory/", static_cast<std::uint32_t>(size), until))
            for (peer& p : peers_)
                if (key == concat({"memory/", p.rank}) && value.size() == sizeof p.offer)
                    std::memcpy(&p.offer, value.data(), sizeof p.offer);
        if (memory_ == nullptr) return;
        auto const shares = [&](peer const& p) { return p.offer.host == mine_.host && p.offer.bytes == mine_.bytes; };
        std::vector<memory_offer> offers;
        for (peer const& p : peers_)
            if (shares(p)) offers.push_back(p.offer);
        time_point const late = std::min(until, monotonic_clock::now() + std::chrono::seconds(1));
        for (bool complete = offers.empty(); !complete && monotonic_clock::now() < late;) {
            complete = true;
            how_.take(offers);
            for (peer& p : peers_) {
                if (!shares(p)) continue;
                if (!p.given) p.given = how_.give(p.offer);  // its queue may be full
                if (p.view == nullptr) p.view = how_.view(p.offer);
                complete = complete && p.given && p.view != nullptr;
            }
            if (!complete) std::this_thread::sleep_for(std::chrono::microseconds(200));
        }
    }
    /// What every rank has to hear of this one, with a semicolon between: its host and its machine in hexadecimal, 0 if it does
    /// not want to share; the ranks whose memory it sees, as ranks_text writes them; and why there are not more, if it
    /// knows.
    [[nodiscard, gnu::cold]] std::string news() const {
        std::vector<int> ranks;
        for (peer const& p : peers_)
            if (p.view != nullptr) ranks.push_back(p.rank);
        std::array<char, 48> host{};
        std::snprintf(host.data(), host.size(), "%llx;%llx", static_cast<unsigned long long>(host_),
                      static_cast<unsigned long long>(machine_));
        sharing_problem const problem = how_.problem();
        return concat(
            {host.data(), ";", ranks_text(ranks), ";", memory_ == nullptr ? mine_.text.view() : problem.text.view()});
    }
    /// Processes the news of rank `who`. If `who` and this rank see each other's memory, their connection goes through memory.
    [[gnu::cold]] void hear(int who, std::string_view news) {
        auto const next = [&] {
            std::string_view const part = news.substr(0, news.find(';'));
            news.remove_prefix(std::min(part.size() + 1, news.size()));
            return part;
        };
        sees_.resize(std::max(sees_.size(), static_cast<std::size_t>(who) + 1));
        std::vector<int>& sees = sees_[static_cast<std::size_t>(who)];
        auto const next_number = [&] {
            std::string_view const text = next();
            std::uint64_t number = 0;
            std::from_chars(text.data(), text.data() + text.size(), number, 16);
            return number;
        };
        std::uint64_t const host = next_number(), machine = next_number();
        if (std::vector<int>& there = hosts_[host]; host != 0)
            there.insert(std::upper_bound(there.begin(), there.end(), who), who);
        if (machine != 0) machines_[machine].insert(host);
        sees = ranks_in(next());
        if (!news.empty()) reasons_.emplace_back(who, printable(news, 96));
        bool const sees_me = std::binary_search(sees.begin(), sees.end(), me_);
        sees.insert(std::upper_bound(sees.begin(), sees.end(), who), who);
        auto const at = std::find_if(peers_.begin(), peers_.end(), [&](peer const& p) { return p.rank == who; });
        if (at == peers_.end() || at->view == nullptr || !sees_me) return;
        std::size_t const place = static_cast<std::size_t>(at - peers_.begin());  // of its ring in this rank's memory
        // The place of this rank's ring in its memory: how many ranks of the host come before this one, without it.
        std::size_t const below = static_cast<std::size_t>(
            std::count_if(peers_.begin(), peers_.end(), [&](peer const& p) { return p.rank < me_ && p.rank != who; }));
        auto path = std::make_unique<memory_path>();
        path->out = byte_ring(slot(memory_, place), capacity_);
        path->in = byte_ring(slot(at->view, below), capacity_);
        path->mine = memory_;
        path->theirs = at->view;
        at->stream->go_through(std::move(path));
    }
    /// For each rank, the lowest rank of its set, in which any two see each other's memory; the rank itself if it sees
    /// none. All ranks get the same result, from what all have published.
    [[nodiscard, gnu::cold]] std::vector<int> groups() const {
        std::vector<int> found(sees_.size());
        for (std::size_t r = 0; r < found.size(); ++r) found[r] = static_cast<int>(r);
        for (std::size_t r = 0; r < found.size(); ++r) {
            auto const same = [&](int m) {
                return static_cast<std::size_t>(m) < sees_.size() && sees_[static_cast<std::size_t>(m)] == sees_[r];
            };
            if (sees_[r].empty() || sees_[r].front() != static_cast<int>(r)) continue;
            if (std::all_of(sees_[r].begin(), sees_[r].end(), same))
                for (int const m : sees_[r]) found[static_cast<std::size_t>(m)] = static_cast<int>(r);
        }
        return found;
    }
    /// Once the news of all ranks have been heard. Rank 0 prints the complaints, if there are any, whichever ranks they are
    /// about; once per process.
    [[gnu::cold]] void tell() {
        how_.settle();
        tell(complaint(), told_before_, blindness_said());
        tell(apart(), told_apart_before_, separation_said());
    }
    /// Which ranks of one machine count as ranks of several hosts, because their network namespaces differ: the same text on all
    /// ranks. Empty if there are none, apart from those that do not want to share and those whose host has a name.
    [[nodiscard, gnu::cold]] std::string apart() const {
        std::vector<std::vector<std::vector<int>>> machines;
        for (auto const& [machine, hosts] : machines_) {
            std::vector<std::vector<int>> spaces;
            for (std::uint64_t const host : hosts) insert_in_order(spaces, hosts_.at(host));
            insert_in_order(machines, spaces);
        }
        std::string const text = ranks_apart(machines);
        return text.empty() ? text : text + what_to_do_if_apart;
    }
    /// Which ranks of a host exchange messages over TCP, and why: the same text on all ranks. Empty if there are none, apart
    /// from those that do not want to share.
    [[nodiscard, gnu::cold]] std::string complaint() const {
        blind_ranks blind;
        for (auto const& [host, ranks] : hosts_) {
            auto const sees = [&](int a) -> auto const& { return sees_[static_cast<std::size_t>(a)]; };
            if (std::all_of(ranks.begin(), ranks.end(), [&](int r) { return sees(r) == ranks; })) continue;
            auto const one_way = [&](int a, int b) { return std::binary_search(sees(a).begin(), sees(a).end(), b); };
            for (int const a : ranks)
                for (int const b : ranks)
                    if (a < b && !(one_way(a, b) && one_way(b, a))) blind.pairs.emplace_back(a, b);
        }
        if (blind.pairs.empty()) return {};
        for (auto const& reason : reasons_) insert_in_order(blind.reasons, reason);
        return concat({blind.text(), ": all that they exchange goes over TCP", what_to_do_if_blind});
    }

private:
    struct peer {
        int rank;
        tcp_stream* stream;
        memory_offer offer = {};
        std::shared_ptr<std::byte> view = nullptr;
        bool given = false;
    };

    /// Of few: compiles in less time than a sort.
    template <class V>
    [[gnu::cold]] static void insert_in_order(std::vector<V>& all, V const& one) {
        std::size_t at = 0;
        while (at < all.size() && all[at] < one) ++at;
        all.insert(all.begin() + static_cast<std::ptrdiff_t>(at), one);
    }
    [[gnu::cold]] void tell(std::string const& line, bool before, std::atomic<bool>& said) const {
        if (line.empty()) return;
        if (me_ == 0 && !before) std::fprintf(stderr, "ddp: %s\n", line.c_str());
        said = true;
    }
    /// Checks that there are enough descriptors: for its own memory and socket, and for the memory of each other rank of this
    /// host. If there are too few, a message that carries a descriptor arrives without it, and without an error.
    [[gnu::cold]] void expect_room(int size) const {
        std::vector<int> held(peers_.size() + 2, -1);
        int error = 0;
        for (int& one : held) {
            one = ::fcntl(peers_.front().stream->descriptor(), F_DUPFD_CLOEXEC, 0);
            if (one < 0) error = errno;
            if (error != 0) break;
        }
        for (int const one : held)
            if (one >= 0) ::close(one);
        if (out_of_descriptors(error))
            throw too_many_files(me_, size, "the memory that ranks of this host share (or set DDP_SHARE_MEMORY=0)",
                                 error);
    }
    [[nodiscard]] std::size_t slot_bytes() const noexcept { return byte_ring::header_bytes + capacity_; }
    [[nodiscard]] std::byte* slot(std::shared_ptr<std::byte> const& of, std::size_t place) const noexcept {
        return of.get() + memory_sharing::header_bytes + place * slot_bytes();
    }

    int me_;
    bool told_before_, told_apart_before_;  // before this job, in this process
    std::uint64_t host_ = 0;                // 0: it does not share
    std::uint64_t machine_ = 0;
    std::vector<peer> peers_;  // the other ranks of this host, in order
    std::size_t capacity_ = 0;
    memfd_sharing how_;
    memory_offer mine_;
    std::shared_ptr<std::byte> memory_;
    std::vector<std::vector<int>> sees_;                         // by rank: the ranks that it sees, itself included
    std::map<std::uint64_t, std::vector<int>> hosts_;            // the ranks of each host that want to share, ascending
    std::map<std::uint64_t, std::set<std::uint64_t>> machines_;  // the hosts of each machine
    std::vector<std::pair<int, std::string>> reasons_;
};

}  // namespace ddp::detail
