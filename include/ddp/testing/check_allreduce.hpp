/// \file
/// check_allreduce, is_canonical: test what an allreduce algorithm must do beyond what its types show.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <ddp/collective/allreduce.hpp>
#include <ddp/collective/reference.hpp>
#include <ddp/core/function_ref.hpp>
#include <ddp/core/random.hpp>
#include <ddp/rendezvous/run.hpp>
#include <ddp/transport/any.hpp>

namespace ddp::testing {

namespace detail {

/// The addend of every rank: numbers of many magnitudes, whose sum shows the order; or small integers, exact in any.
template <Element E>
std::vector<std::vector<E>> addends(int ranks, std::size_t count, bool exact) {
    std::vector<std::vector<E>> all;
    for (int rank = 0; rank < ranks; ++rank) {
        random_stream const draws{11, random_use::user, static_cast<std::uint64_t>(rank)};
        std::vector<E>& mine = all.emplace_back(count);
        for (std::size_t i = 0; i < count; ++i) {
            auto const words = draws.at(i).words();
            if (exact)
                mine[i] = static_cast<E>(words[0] % 100) - E(50);
            else
                mine[i] = (static_cast<E>(words[0] % 2'000'001) - E(1'000'000)) / static_cast<E>(1 + words[1] % 5000);
        }
    }
    return all;
}

struct check_failed : std::runtime_error {
    using std::runtime_error::runtime_error;
};
/// What every rank holds afterwards. Ranks are threads. Throws check_failed where they do not all come to an end.
template <Element E>
std::vector<std::vector<E>> computed(std::vector<std::vector<E>> addends,
                                     function_ref<void(communicator<> const&, std::span<E>)> compute) {
    timing times = timing::for_tests();
    times.collective = std::chrono::seconds(20);
    try {
        run<threads>(run_options{.ranks = static_cast<int>(addends.size()), .times = times}, [&](communicator<>& comm) {
            compute(comm, std::span<E>(addends[static_cast<std::size_t>(comm.rank())]));
        });
    } catch (comm_error const& e) {
        throw check_failed("with " + std::to_string(addends.size()) + " ranks and " +
                           std::to_string(addends.front().size()) +
                           " elements some ranks never finish: one sends or receives what its peer does not, or a "
                           "rank is left out. " +
                           e.what());
    }
    return addends;
}

/// Leaves in `reduced` what reduce leaves in the data, and in `data` what all_gather makes of it.
template <class A, Transport T, Element E>
task<> in_halves(A algorithm, lane<T> over, std::span<E> data, std::vector<std::size_t> cuts, E factor,
                 std::span<E> reduced) {
    co_await A::reduce(algorithm, over, reduction<E>{.data = data, .cuts = cuts, .factor = &factor});
    std::ranges::copy(data, reduced.begin());
    if (!algorithm.everywhere(data.size_bytes(), over.size())) co_await A::all_gather(algorithm, over, data, cuts);
}

/// "" or where `got` first differs from `expected`.
template <Element E>
std::string difference(std::vector<std::vector<E>> const& got, std::vector<E> const& expected) {
    for (std::size_t rank = 0; rank < got.size(); ++rank)
        for (std::size_t i = 0; i < expected.size(); ++i)
            if (std::memcmp(&got[rank][i], &expected[i], sizeof(E)) != 0)
                return "with " + std::to_string(got.size()) + " ranks, element " + std::to_string(i) + " of " +
                       std::to_string(expected.size()) + " on rank " + std::to_string(rank);
    return {};
}

template <class A, Element E>
std::vector<std::vector<E>> summed(A const& algorithm, std::vector<std::vector<E>> addends) {
    return computed<E>(std::move(addends),
                       [&](communicator<> const& comm, std::span<E> mine) { allreduce(comm, mine, algorithm); });
}

template <class Op, class A, Element E>
std::string combined_wrongly(A const& algorithm, std::vector<std::vector<E>> const& terms) {
    auto const got = computed<E>(
        terms, [&](communicator<> const& comm, std::span<E> mine) { allreduce(comm, mine, Op{}, algorithm); });
    return difference(got, reference_reduce<Op>(terms));
}

/// What is wrong with reduce, and with all_gather. Half of an exact sum is exact.
template <class A, Element E>
std::array<std::string, 2> halves_wrong(A const& algorithm, std::vector<std::vector<E>> const& terms) {
    std::size_t const ranks = terms.size(), count = terms.front().size();
    std::vector<std::size_t> cuts(ranks + 1, count);  // the last rank has half of it, and some have nothing
    for (std::size_t r = 0; r < ranks; ++r) cuts[r] = r * (count / 2) / ranks;
    std::vector<std::vector<E>> reduced(ranks, std::vector<E>(count));
    auto const all = computed<E>(terms, [&](communicator<> const& comm, std::span<E> mine) {
        std::span<E> const mine_reduced = reduced[static_cast<std::size_t>(comm.rank())];
        ddp::detail::blocking::run(comm, ddp::detail::about<E>("check_allreduce", count), [&](auto over) {
            return in_halves(algorithm, over, mine, cuts, E(0.5), mine_reduced);
        });
    });
    std::vector<E> expected = reference_sum(terms);
    for (E& x : expected) x *= E(0.5);
    if (!algorithm.everywhere(count * sizeof(E), static_cast<int>(ranks)))
        for (std::size_t r = 0; r < ranks; ++r)  // of other slices nothing is promised
            for (std::size_t i = 0; i < count; ++i)
                if (i < cuts[r] || i >= cuts[r + 1]) reduced[r][i] = expected[i];
    return {difference(reduced, expected), difference(all, expected)};
}

}  // namespace detail

/// Says where the sums of an algorithm first differ from those of the canonical tree (docs/design.md, section 4); an
/// empty text if they never do. Compares sums of random numbers on 2 to 9 ranks, which are threads, with reference_sum,
/// which shares no code with any algorithm. Also says so if a rank does not finish.
template <class A>
    requires AllreduceOver<A, any_transport, float>
[[nodiscard]] std::string canonical_difference(A const& algorithm) {
    try {
        for (int const ranks : {2, 3, 4, 5, 6, 7, 8, 9}) {
            auto const terms = detail::addends<float>(ranks, 1003, false);
            std::string const where = detail::difference(detail::summed(algorithm, terms), reference_sum(terms));
            if (!where.empty()) return where;
        }
    } catch (detail::check_failed const& e) {
        return e.what();
    }
    return {};
}

/// Whether an algorithm adds in the canonical order. A training with it then gives the same bits as with any other
/// canonical algorithm. Cost: see canonical_difference.
template <class A>
[[nodiscard]] bool is_canonical(A const& algorithm) {
    return canonical_difference(algorithm).empty();
}

/// Checks an allreduce algorithm. Returns what is wrong; an empty list if nothing was found. It checks that sums are
/// exact where they can be, that all ranks and all repetitions have the same bits, and that `canonical` is right, with 2
/// to 9 ranks, which are threads, and with sizes at which collectives often fail; of a SlicedAllreduceOver also reduce, with
/// a null `go`, and all_gather, of a CombiningAllreduceOver also minimum, maximum and product.
template <class A>
    requires AllreduceOver<A, any_transport, float> && AllreduceOver<A, any_transport, double>
[[nodiscard]] std::vector<std::string> check_allreduce(A const& algorithm) {
    std::vector<std::string> complaints;
    auto const note = [&](char const* what, std::string const& where) {
        if (!where.empty()) complaints.push_back(std::string(what) + " " + where);
    };
    try {
        for (int const ranks : {2, 3, 5, 7, 8, 9})
            for (std::size_t const count : {std::size_t{1}, static_cast<std::size_t>(ranks - 1), std::size_t{1003}}) {
                auto const exact = detail::addends<double>(ranks, count, true);
                note("not the sum:", detail::difference(detail::summed(algorithm, exact), reference_sum(exact)));
                if constexpr (SlicedAllreduceOver<A, any_transport, double>) {
                    auto const [reduced, gathered] = detail::halves_wrong(algorithm, exact);
                    note("reduce: not this rank's slice of the sum, times the factor:", reduced);
                    note("all_gather: not the slices of all ranks:", gathered);
                }
                if constexpr (CombiningAllreduceOver<A, any_transport, double, minimum>)
                    note("combine: not the minimum:", detail::combined_wrongly<minimum>(algorithm, exact));
                if constexpr (CombiningAllreduceOver<A, any_transport, double, maximum>)
                    note("combine: not the maximum:", detail::combined_wrongly<maximum>(algorithm, exact));
                if constexpr (CombiningAllreduceOver<A, any_transport, double, product>)
                    note("combine: not the product:", detail::combined_wrongly<product>(algorithm, exact));
                auto const terms = detail::addends<float>(ranks, count, false);
                auto const first = detail::summed(algorithm, terms);
                note("not the bits of rank 0:", detail::difference(first, first.front()));
                note("not twice the same:", detail::difference(detail::summed(algorithm, terms), first.front()));
            }
        if (algorithm.canonical) note("it declares itself canonical, but is not:", canonical_difference(algorithm));
    } catch (std::exception const& e) {
        complaints.push_back(e.what());
    }
    return complaints;
}

}  // namespace ddp::testing
