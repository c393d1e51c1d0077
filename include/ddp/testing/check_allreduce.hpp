/// \file
/// check_allreduce, is_canonical: test what an allreduce algorithm must do beyond what its types show.
#pragma once

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
template <class A, Element E>
std::vector<std::vector<E>> summed(A const& algorithm, std::vector<std::vector<E>> addends) {
    timing times = timing::for_tests();
    times.collective = std::chrono::seconds(20);
    try {
        run<threads>(run_options{.ranks = static_cast<int>(addends.size()), .times = times}, [&](auto& comm) {
            allreduce(comm, std::span<E>(addends[static_cast<std::size_t>(comm.rank())]), algorithm);
        });
    } catch (comm_error const& e) {
        throw check_failed(
            "with " + std::to_string(addends.size()) + " ranks and " + std::to_string(addends.front().size()) +
            " elements not every rank comes to an end: one sends or receives what its peer does not, or a "
            "rank is left out. " +
            e.what());
    }
    return addends;
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
/// to 9 ranks, which are threads, and with sizes at which collectives often fail.
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
                auto const terms = detail::addends<float>(ranks, count, false);
                auto const first = detail::summed(algorithm, terms);
                note("not the bits of rank 0:", detail::difference(first, first.front()));
                note("not twice the same:", detail::difference(detail::summed(algorithm, terms), first.front()));
            }
        if (algorithm.canonical) note("it says that it is canonical, but is not:", canonical_difference(algorithm));
    } catch (std::exception const& e) {
        complaints.push_back(e.what());
    }
    return complaints;
}

}  // namespace ddp::testing
