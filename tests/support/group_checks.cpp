#include "support/group_checks.hpp"

#include <algorithm>
#include <cstddef>
#include <exception>
#include <optional>
#include <span>
#include <thread>

#include <ddp/collective/barrier.hpp>

namespace ddp::test {

namespace {

using Comm = communicator<>;

/// What a group of these ranks of the job has to look like.
std::string check_membership(Comm const& got, int own_rank_in_job, std::vector<int> const& expected) {
    std::span<int const> const members = got.members().members();
    if (!std::equal(members.begin(), members.end(), expected.begin(), expected.end())) return "other members";
    auto const at = std::find(expected.begin(), expected.end(), own_rank_in_job) - expected.begin();
    if (got.rank() != static_cast<int>(at)) return "rank " + std::to_string(got.rank());
    if (got.size() != static_cast<int>(expected.size())) return "size " + std::to_string(got.size());
    return {};
}

/// What `call` throws, or nothing.
template <class F>
std::string error_of(F const& call) {
    try {
        call();
    } catch (std::exception const& e) {
        return e.what();
    }
    return {};
}

}  // namespace

failures check_groups(Comm const& comm) {
    failures all;
    int const me = comm.rank(), ranks = comm.size();
    auto const members_if = [&](auto const& in, bool reversed = false) {
        std::vector<int> list;
        for (int r = 0; r < ranks; ++r)
            if (in(r)) list.push_back(r);
        if (reversed) std::reverse(list.begin(), list.end());
        return list;
    };
    auto const try_group = [&](std::string const& name, Comm const& group, std::vector<int> const& expected) {
        note(all, name, check_membership(group, me, expected));
        for (std::string const& wrong : check_every_collective(group)) all.push_back(name + ": " + wrong);
    };

    int const half = ranks / 2;
    Comm const contiguous = comm.split(me < half ? 0 : 1);
    try_group("contiguous", contiguous, members_if([&](int r) { return (r < half) == (me < half); }));
    Comm const strided = comm.split(me % 2, -me);
    std::vector<int> const parity = members_if([&](int r) { return r % 2 == me % 2; }, true);
    try_group("strided, from the last", strided, parity);
    try_group("single", comm.split(me), {me});
    try_group("all", comm.split(7), members_if([](int) { return true; }));
    try_group("host", comm.host(), members_if([](int) { return true; }));

    std::vector<int> some = members_if([](int r) { return r % 3 != 1; }, true);
    std::optional<Comm> const listed = comm.subgroup(some);
    bool const inside = std::find(some.begin(), some.end(), me) != some.end();
    if (listed.has_value() != inside) all.push_back("subgroup: a rank that is listed has it, others have nothing");
    if (listed) try_group("listed", *listed, some);

    Comm const within = strided.split(strided.rank() < 1 ? 0 : 1);
    std::vector<int> expected = parity;
    if (strided.rank() < 1)
        expected.resize(1);
    else
        expected.erase(expected.begin());
    try_group("group of a group", within, expected);
    if (strided.size() > 1)
        if (std::optional<Comm> const picked = strided.subgroup({1, 0}))
            try_group("ranks of a group", *picked, {parity[1], parity[0]});
    note(all, "host of a group", check_membership(strided.host(), me, parity));
    note(all, "the whole afterwards", check_allreduce<float>(comm, any_allreduce(), 100, values::mixed));
    return all;
}

failures check_grid(Comm const& comm, int columns) {
    failures all;
    int const row = comm.rank() / columns, column = comm.rank() % columns, rows = comm.size() / columns;
    if (row >= rows) {  // ranks that the grid leaves over take part in the splits only
        static_cast<void>(comm.split(rows));
        static_cast<void>(comm.split(columns));
        return all;
    }
    Comm const along_row = comm.split(row), along_column = comm.split(column);
    for (int round = 0; round < 20; ++round) {
        auto const value = [&](int r, int c) { return addend<float>(values::mixed, 5, 100 * round + 10 * r + c, 300); };
        std::vector<float> by_row = value(row, column), by_column = by_row;
        std::vector<std::vector<float>> row_terms, column_terms;
        for (int c = 0; c < columns; ++c) row_terms.push_back(value(row, c));
        for (int r = 0; r < rows; ++r) column_terms.push_back(value(r, column));
        allreduce(along_row, std::span<float>(by_row));
        allreduce(along_column, std::span<float>(by_column));
        note(all, "row", compare(by_row, reference_sum(row_terms)));
        note(all, "column", compare(by_column, reference_sum(column_terms)));
    }
    return all;
}

failures check_hosts(Comm const& comm, std::vector<std::uint64_t> const& places) {
    failures all;
    auto const place = [&](int r) { return places[static_cast<std::size_t>(r)]; };
    auto const on_host = [&](int r) {  // its place among the ranks of its host
        int before = 0;
        for (int other = 0; other < r; ++other) before += place(other) == place(r) ? 1 : 0;
        return before;
    };
    int const me = comm.rank();
    std::vector<int> mates, peers;
    for (int r = 0; r < comm.size(); ++r) {
        if (place(r) == place(me)) mates.push_back(r);
        if (on_host(r) == on_host(me)) peers.push_back(r);
    }
    Comm const host = comm.host(), across = comm.across_hosts();
    note(all, "host", check_membership(host, me, mates));
    note(all, "across hosts", check_membership(across, me, peers));
    Comm const backwards = comm.split(0, -me);
    std::vector<int> peers_backwards;
    for (int r = comm.size(); r-- > 0;) {
        auto const after = [&](int rank) {  // its place among the ranks of its host, from the last
            int count = 0;
            for (int other = rank + 1; other < comm.size(); ++other) count += place(other) == place(rank) ? 1 : 0;
            return count;
        };
        if (after(r) == after(me)) peers_backwards.push_back(r);
    }
    std::reverse(mates.begin(), mates.end());
    note(all, "host of a group", check_membership(backwards.host(), me, mates));
    note(all, "across the hosts of a group", check_membership(backwards.across_hosts(), me, peers_backwards));
    Comm const mixed = comm.split(me % 3 == 0 ? 1 : 0, -me);
    for (std::string const& wrong : check_every_collective(mixed)) all.push_back("of several hosts: " + wrong);
    for (std::string const& wrong : check_every_collective(host)) all.push_back("host: " + wrong);
    for (std::string const& wrong : check_every_collective(across)) all.push_back("across hosts: " + wrong);
    return all;
}

failures check_any_order(Comm const& comm) {
    std::optional<Comm> whole(comm), half(comm.split(comm.rank() / 2)), copy(half);
    std::optional<Comm> pair(half->split(0));
    float const ranks = static_cast<float>(pair->size());
    half.reset();
    float one = 1;
    allreduce(*pair, std::span<float>(&one, 1));
    whole.reset();
    allreduce(*copy, std::span<float>(&one, 1));
    copy.reset();
    allreduce(*pair, std::span<float>(&one, 1));
    if (one != ranks * ranks * ranks) return {"the sum of ones is " + std::to_string(one)};
    return {};
}

failures check_opposite_order(Comm const& comm, std::string& text) {
    text = error_of([&] {
        Comm const one = comm.split(0), two = comm.split(0);
        bool const last = comm.rank() == comm.size() - 1;
        barrier(last ? two : one);
        barrier(last ? one : two);
    });
    failures all;
    for (char const* const words : {"DDP-E205", "wait for each other", "in the same order", "group {0, 1"})
        if (text.find(words) == std::string::npos) all.push_back(std::string(words) + " is not in: " + text);
    return all;
}

failures check_chain_across_groups(Comm const& comm, std::chrono::milliseconds late, std::string& text) {
    text = error_of([&] {
        std::optional<Comm> const low = comm.subgroup({0, 1}), high = comm.subgroup({1, 2});
        if (comm.rank() == 2) std::this_thread::sleep_for(late);
        if (high) barrier(*high);
        if (low) barrier(*low);
        barrier(comm);
    });
    std::string const words = "rank 2 did not take part in barrier #1 in group {1, 2}";
    if (text.find(words) == std::string::npos) return {words + " is not in: " + text};
    return {};
}

failures check_mismatch_in_group(Comm const& comm, std::string& text) {
    int const last = comm.size() - 1;
    text = error_of([&] {
        Comm const mine = comm.split(comm.rank() == 0 ? 0 : 1);
        std::vector<float> data(comm.rank() == last ? 7 : 8);
        allreduce(mine, std::span<float>(data));
        barrier(comm);
    });
    failures all;
    for (std::string const& words :
         {std::string("DDP-E205"), "rank " + std::to_string(last), std::string(" in group {1, ")})
        if (text.find(words) == std::string::npos) all.push_back(words + " is not in: " + text);
    return all;
}

}  // namespace ddp::test
