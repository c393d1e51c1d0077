#include "support/job_checks.hpp"

#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include <ddp/collective/allreduce.hpp>

#include "support/ranks.hpp"
#include "support/training_checks.hpp"

namespace ddp::test {

namespace {

template <Number E>
failures check_operations_on(communicator<>& comm) {
    failures all;
    auto const check = [&]<class Op>(Op op) {
        auto const terms = addends<E>(values::small_integers, 27, comm.size(), 101);
        std::vector<E> data = terms[static_cast<std::size_t>(comm.rank())];
        allreduce(comm, std::span<E>(data), op);
        note(all, std::string(Op::name) + " of " + detail::value_name<E>(),
             compare(std::span<E const>(data), std::span<E const>(reference_reduce<Op>(terms))));
    };
    check(sum{});
    check(product{});
    check(minimum{});
    check(maximum{});
    return all;
}

}  // namespace

failures check_all_collectives(communicator<>& comm) {
    failures all;
    auto const take = [&](failures some) { all.insert(all.end(), some.begin(), some.end()); };
    take(check_all_sums<float>(comm));
    take(check_all_sums<double>(comm));
    take(check_all_halves<float>(comm));
    take(check_all_operations(comm));
    take(check_operations_on<float>(comm));
    take(check_operations_on<double>(comm));
    take(check_operations_on<std::int32_t>(comm));
    take(check_operations_on<std::uint32_t>(comm));
    take(check_operations_on<std::int64_t>(comm));
    take(check_operations_on<std::uint64_t>(comm));
    take(check_all_moves(comm));
    return all;
}

std::pair<std::uint64_t, std::string> train_every_way(communicator<>& comm) {
    return check_same_bits<float>(comm, 2, adamw{.lr = 0.01});
}
std::uint64_t inproc_bits(int ranks) {
    static std::map<int, std::uint64_t> known;
    static std::mutex one_at_a_time;  // ranks of a test may be threads
    std::scoped_lock const lock(one_at_a_time);
    auto const [at, fresh] = known.try_emplace(ranks, 0);
    if (fresh) at->second = run_ranks(ranks, [](auto& comm) { return train_every_way(comm); }).front().first;
    return at->second;
}

failures train_in_groups(communicator<>& comm) {
    communicator<> part = comm.split(comm.rank() % 2, -comm.rank());
    auto const [bits, wrong] = train_every_way(part);
    failures all;
    note(all, "in a group of " + std::to_string(part.size()), wrong);
    if (bits != inproc_bits(part.size())) all.push_back("other bits than over inproc");
    return all;
}

failures check_overlap(communicator<>& comm) {
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
