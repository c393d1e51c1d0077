/// \file
/// What every transport has to carry, over communicators whose ranks are processes or threads: all collectives, the
/// overlap of a step, and trainings whose bits are those of inproc.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "support/collective_checks.hpp"
#include "support/ranks.hpp"
#include "support/training_checks.hpp"

namespace ddp::test {

/// Every collective against its oracle, in float and double.
template <class Comm>
failures check_all_collectives(Comm& comm) {
    failures all;
    auto const take = [&](failures some) { all.insert(all.end(), some.begin(), some.end()); };
    take(check_all_sums<float>(comm));
    take(check_all_sums<double>(comm));
    take(check_all_halves<float>(comm));
    take(check_all_operations(comm));
    take(check_all_moves(comm));
    return all;
}

/// A few steps by every canonical recipe; the digest of everything, and what is wrong.
template <class Comm>
std::pair<std::uint64_t, std::string> train_every_way(Comm& comm) {
    return check_same_bits<float>(comm, 2, adamw{.lr = 0.01});
}
/// The same on threads of this process, once a rank count.
inline std::uint64_t inproc_bits(int ranks) {
    static std::map<int, std::uint64_t> known;
    auto const [at, fresh] = known.try_emplace(ranks, 0);
    if (fresh) at->second = run_ranks(ranks, [](auto& comm) { return train_every_way(comm); }).front().first;
    return at->second;
}

/// Whether buckets are reduced during backward, for the algorithms that differ in how they begin.
template <class Comm>
failures check_overlap(Comm& comm) {
    failures all;
    for (char const* const name : {"auto", "direct", "ring"})
        for (bool const sharded : {false, true}) {
            recipe const by{.name = std::string(name) + (sharded ? ", sharded" : ""),
                            .algorithm = any_allreduce::parse(name),
                            .options = options_of(sharded, false)};
            note(all, "overlap", overlap_check::run(comm, by));
        }
    return all;
}

}  // namespace ddp::test
