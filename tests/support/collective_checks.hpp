/// \file
/// Checks of the collectives that run over any communicator: called on every rank with the same arguments, each returns
/// "" or what is wrong on this rank. No assertions in here: ranks may be threads or processes.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ddp/collective/algorithms/any_allreduce.hpp>
#include <ddp/collective/algorithms/hierarchical_allreduce.hpp>
#include <ddp/collective/all_gather.hpp>
#include <ddp/collective/all_to_all.hpp>
#include <ddp/collective/allreduce.hpp>
#include <ddp/collective/barrier.hpp>
#include <ddp/collective/broadcast.hpp>
#include <ddp/collective/gather.hpp>
#include <ddp/collective/point_to_point.hpp>
#include <ddp/collective/reduce.hpp>
#include <ddp/collective/reduce_scatter.hpp>
#include <ddp/collective/reference.hpp>
#include <ddp/collective/scatter.hpp>

#include "support/when_all.hpp"

namespace ddp::test {

using failures = std::vector<std::string>;

inline void note(failures& all, std::string const& where, std::string const& failure) {
    if (!failure.empty()) all.push_back(where + ": " + failure);
}

/// Networks on which automatic_allreduce takes one algorithm for every size.
inline constexpr network_cost costs_of_direct{.message = 1e-9, .post = 0, .byte = 1, .addition = 1};
inline constexpr network_cost costs_of_halving{.message = 0, .post = 1e9, .byte = 1, .addition = 0};

/// What a test adds up: small integers are exact in any order; numbers of mixed magnitude and sign in none. `special` are
/// mixed, and among them NaN, infinities and zeros of both signs. Mixed integers are any bits.
enum class values { small_integers, mixed, special };

/// Bits that differ between seeds, ranks and indices: what is drawn for tests costs a few instructions, unoptimised too.
/// Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
class test_bits {
public:
    test_bits(std::uint64_t seed, int rank) : state_(seed * 0xD1B54A32D192ED03u + static_cast<std::uint64_t>(rank)) {
        state_ = next();
    }
    std::uint64_t next() {
        std::uint64_t z = state_ += 0x9E3779B97F4A7C15u;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
        return z ^ (z >> 31);
    }

private:
    std::uint64_t state_;
};

template <Number E>
std::vector<E> addend(values kind, std::uint64_t seed, int rank, std::size_t count) {
    test_bits bits(seed, rank);
    std::vector<E> data(count);
    for (std::size_t i = 0; i < count; ++i) {
        std::uint64_t const drawn = bits.next(), chosen = bits.next();
        if (kind == values::small_integers)
            data[i] = static_cast<E>(static_cast<int>(drawn % 17) - 8);
        else if constexpr (std::integral<E>)
            data[i] = static_cast<E>(drawn);
        else if (kind == values::special && chosen % 3 == 0)
            data[i] = std::array<E, 7>{E(0),
                                       -E(0),
                                       std::numeric_limits<E>::infinity(),
                                       -std::numeric_limits<E>::infinity(),
                                       -std::numeric_limits<E>::quiet_NaN(),
                                       std::numeric_limits<E>::signaling_NaN(),
                                       std::numeric_limits<E>::denorm_min()}[drawn % 7];
        else
            data[i] = static_cast<E>(
                std::ldexp(static_cast<double>(drawn >> 11) * 0x1p-52 - 1.0, static_cast<int>(chosen % 24) - 12));
    }
    return data;
}

template <Number E>
std::vector<std::vector<E>> addends(values kind, std::uint64_t seed, int ranks, std::size_t count) {
    std::vector<std::vector<E>> all;
    for (int r = 0; r < ranks; ++r) all.push_back(addend<E>(kind, seed, r, count));
    return all;
}

/// "" or where the two differ in a bit.
template <class V>
std::string compare(std::span<V const> got, std::span<V const> expected) {
    if (got.size() != expected.size())
        return std::to_string(got.size()) + " values instead of " + std::to_string(expected.size());
    for (std::size_t i = 0; i < got.size(); ++i)
        if (std::memcmp(&got[i], &expected[i], sizeof(V)) != 0)
            return "value " + std::to_string(i) + " of " + std::to_string(got.size()) + " is wrong";
    return {};
}
template <class V>
std::string compare(std::vector<V> const& got, std::vector<V> const& expected) {
    return compare(std::span<V const>(got), std::span<V const>(expected));
}

/// "" or which rank holds other bits than rank 0.
template <class Comm, class V>
std::string same_everywhere(Comm const& comm, std::vector<V> const& data) {
    std::uint64_t const mine = digest().add(std::span<V const>(data)).value();
    std::vector<std::uint64_t> all(static_cast<std::size_t>(comm.size()));
    all_gather(comm, std::span<std::uint64_t const>(&mine, 1), std::span<std::uint64_t>(all));
    for (std::size_t r = 0; r < all.size(); ++r)
        if (all[r] != all[0]) return "rank " + std::to_string(r) + " holds other bits than rank 0";
    return {};
}

/// Within what adding P terms in any order may lose.
template <Element E>
std::string close_to(std::span<E const> got, std::span<E const> expected, std::vector<std::vector<E>> const& terms) {
    for (std::size_t i = 0; i < got.size(); ++i) {
        double size = 0;
        for (auto const& t : terms) size += std::abs(static_cast<double>(t[i]));
        if (!(std::abs(static_cast<double>(got[i]) - static_cast<double>(expected[i])) <=
              static_cast<double>(terms.size()) * static_cast<double>(std::numeric_limits<E>::epsilon()) * size))
            return "value " + std::to_string(i) + " is no sum of the addends";
    }
    return {};
}

/// allreduce against the oracle: its bits where the algorithm is canonical or the numbers are exact; otherwise equal bits
/// on all ranks, twice the same, and close.
template <Element E, class Comm>
std::string check_allreduce(Comm const& comm, any_allreduce const& algorithm, std::size_t count, values kind) {
    auto const terms = addends<E>(kind, count, comm.size(), count);
    auto const expected = reference_sum(terms);
    auto got = terms[static_cast<std::size_t>(comm.rank())];
    allreduce(comm, std::span<E>(got), algorithm);
    if (algorithm.canonical || kind == values::small_integers) return compare(got, expected);

    auto again = terms[static_cast<std::size_t>(comm.rank())];
    allreduce(comm, std::span<E>(again), algorithm);
    std::string wrong = same_everywhere(comm, got);  // on every rank, whatever else is wrong here
    if (wrong.empty()) wrong = compare(again, got);
    if (wrong.empty()) wrong = close_to<E>(got, expected, terms);
    return wrong;
}

/// allreduce by an operation against the oracle, whose bits every algorithm gives where the order of operands does not
/// matter.
template <class Op, Number E, class Comm, class A>
std::string check_combine(Comm& comm, A const& algorithm, std::size_t count, values kind) {
    auto const inputs = addends<E>(kind, count, comm.size(), count);
    auto got = inputs[static_cast<std::size_t>(comm.rank())];
    allreduce(comm, got, Op{}, algorithm);
    return compare(got, comm.size() == 1 ? inputs[0] : reference_reduce<Op>(inputs));
}

/// reduce to `root`; elsewhere nothing may have changed.
template <class Op, Number E, class Comm>
std::string check_reduce(Comm& comm, std::size_t count, int root, values kind, automatic_reduce const& how) {
    auto const inputs = addends<E>(kind, count, comm.size(), count);
    auto const& mine = inputs[static_cast<std::size_t>(comm.rank())];
    auto got = mine;
    reduce(comm, got, root, Op{}, how);
    return compare(got, comm.rank() != root || comm.size() == 1 ? mine : reference_reduce<Op>(inputs));
}

/// A lane for a test's own task: the next call's identity, and a fingerprint of the test's own.
template <class Comm>
auto lane_of(Comm const& comm, std::uint64_t fingerprint) {
    identity const id{.group = comm.members().id(), .index = comm.members().next_call()};
    return lane<typename Comm::transport_type>(comm.tasks(), comm.members(), id, fingerprint);
}

/// The halves of an allreduce over the given cuts, the addend written only after `reduce` has posted what it can.
template <Element E, class Comm>
std::string check_halves(Comm const& comm, any_allreduce const& algorithm, std::vector<std::size_t> const& cuts,
                         std::optional<E> factor, values kind) {
    using T = typename Comm::transport_type;
    std::size_t const count = cuts.back(), me = static_cast<std::size_t>(comm.rank());
    auto const terms = addends<E>(kind, count, comm.size(), count);
    auto expected = reference_sum(terms);
    if (factor)
        for (E& e : expected) e *= *factor;
    std::vector<E> data(count, E(-77));

    struct body {
        static task<> write(std::span<E> to, std::span<E const> from, event* done) {
            std::copy(from.begin(), from.end(), to.begin());
            done->set();
            co_return;
        }
        static task<> reduce(any_allreduce how, lane<T> over, reduction<E> what, std::span<E const> from) {
            event go(*over.on);
            what.go = &go;
            std::vector<task<>> both;
            both.push_back(any_allreduce::reduce(how, over, what));
            both.push_back(write(what.data, from, &go));
            co_await when_all(std::move(both), [=](std::exception_ptr const& e) { over.on->fail(e); });
        }
    };
    std::uint64_t const hash = detail::agree("halves", count, element_name<E>, algorithm.name);
    auto const over = lane_of(comm, hash);
    comm.run([&] {
        reduction<E> what{.data = data, .cuts = cuts};
        if (factor) what.factor = &*factor;
        return body::reduce(algorithm, over, what, terms[me]);
    });

    bool const everywhere = algorithm.everywhere(count * sizeof(E), comm.size());
    auto const exact = [&](std::size_t from, std::size_t to) {
        std::span<E const> const got(data.data() + from, to - from), right(expected.data() + from, to - from);
        return algorithm.canonical || kind == values::small_integers ? compare(got, right) : std::string();
    };
    std::string const first = everywhere ? exact(0, count) : exact(cuts[me], cuts[me + 1]);
    if (!everywhere) {
        for (std::size_t i = 0; i < count; ++i)  // what is not ours has to come from its owner
            if (i < cuts[me] || i >= cuts[me + 1]) data[i] = E(-99);
        comm.run([&] { return any_allreduce::all_gather(algorithm, over, std::span<E>(data), cuts); });
    }
    std::string const same = same_everywhere(comm, data), second = exact(0, count);
    if (!first.empty()) return "after reduce, " + first;
    if (!second.empty()) return "after all_gather, " + second;
    return same;
}

/// reduce_scatter by even cuts.
template <Number E, class Op = sum, class Comm>
std::string check_reduce_scatter(Comm& comm, any_allreduce const& algorithm, std::size_t count) {
    auto const terms =
        addends<E>(std::floating_point<E> && algorithm.canonical ? values::mixed : values::small_integers, count,
                   comm.size(), count);
    auto const expected = reference_reduce<Op>(terms);
    auto data = terms[static_cast<std::size_t>(comm.rank())];
    std::span<E const> const mine = reduce_scatter(comm, data, Op{}, algorithm);
    std::size_t const ranks = static_cast<std::size_t>(comm.size()), me = static_cast<std::size_t>(comm.rank());
    std::size_t const begin = count / ranks * me + std::min(me, count % ranks);
    std::size_t const length = count / ranks + (me < count % ranks ? 1 : 0);
    if (mine.data() != data.data() + begin) return "the slice is elsewhere";
    return compare(mine, std::span<E const>(expected).subspan(begin, length));
}

/// One of the things that collectives without arithmetic carry: neither a number nor a power of two long.
struct pixel {
    std::uint8_t red, green, blue;
};
template <class V>
std::vector<V> things(std::uint64_t seed, int rank, std::size_t count) {
    std::vector<V> all(count);
    test_bits bits(seed, rank);
    for (V& v : all) {
        std::array<std::uint64_t, 2> const drawn{bits.next(), bits.next()};
        static_assert(sizeof(V) <= sizeof drawn);
        std::memcpy(&v, drawn.data(), sizeof(V));
    }
    return all;
}

template <class V, class Comm>
std::string check_broadcast(Comm const& comm, std::size_t count, int root, automatic_broadcast how = {}) {
    auto data = things<V>(count, comm.rank(), count);
    broadcast(comm, std::span<V>(data), root, how);
    return compare(data, things<V>(count, root, count));
}

template <class V, class Comm>
std::string check_all_gather(Comm const& comm, std::size_t m, automatic_all_gather how, bool in_place) {
    std::size_t const me = static_cast<std::size_t>(comm.rank());
    auto const mine = things<V>(m, comm.rank(), m);
    std::vector<V> all(static_cast<std::size_t>(comm.size()) * m), expected;
    for (int r = 0; r < comm.size(); ++r)
        for (V const& v : things<V>(m, r, m)) expected.push_back(v);
    if (in_place) {
        std::copy(mine.begin(), mine.end(), all.begin() + static_cast<std::ptrdiff_t>(me * m));
        all_gather(comm, std::span<V const>(all).subspan(me * m, m), std::span<V>(all), how);
    } else {
        all_gather(comm, mine, std::span<V>(all), how);
    }
    return compare(all, expected);
}

template <class V, class Comm>
std::string check_all_gather_counts(Comm const& comm, std::vector<std::size_t> const& counts) {
    std::vector<V> expected;
    for (int r = 0; r < comm.size(); ++r)
        for (V const& v : things<V>(9, r, counts[static_cast<std::size_t>(r)])) expected.push_back(v);
    std::vector<V> all(expected.size());
    auto const mine = things<V>(9, comm.rank(), counts[static_cast<std::size_t>(comm.rank())]);
    all_gather(comm, mine, counts, std::span<V>(all));
    return compare(all, expected);
}

template <class V, class Comm>
std::string check_gather(Comm const& comm, std::size_t m, int root) {
    std::vector<V> expected, all(comm.rank() == root ? static_cast<std::size_t>(comm.size()) * m : 0);
    for (int r = 0; r < comm.size() && comm.rank() == root; ++r)
        for (V const& v : things<V>(m, r, m)) expected.push_back(v);
    gather(comm, things<V>(m, comm.rank(), m), std::span<V>(all), root);
    return compare(all, expected);
}

template <class V, class Comm>
std::string check_scatter(Comm& comm, std::size_t m, int root, bool in_place) {
    std::size_t const ranks = static_cast<std::size_t>(comm.size()), me = static_cast<std::size_t>(comm.rank());
    auto all = things<V>(m, root, comm.rank() == root ? ranks * m : 0);
    auto const parts = things<V>(m, root, ranks * m);
    std::vector<V> const expected(parts.begin() + static_cast<std::ptrdiff_t>(me * m),
                                  parts.begin() + static_cast<std::ptrdiff_t>((me + 1) * m));
    if (in_place && comm.rank() == root) {
        scatter(comm, all, std::span<V>(all).subspan(me * m, m), root);
        return compare(all, parts);
    }
    std::vector<V> mine(m);
    scatter(comm, all, mine, root);
    return compare(mine, expected);
}

/// How many values rank `from` has for rank `to`; none for some.
inline std::size_t count_between(int from, int to, std::size_t m) {
    return (from + 2 * to) % 3 == 0 ? 0 : m + static_cast<std::size_t>(from) * 2 + static_cast<std::size_t>(to);
}

/// Equal counts where `uneven` is not set.
template <class V, class Comm>
std::string check_all_to_all(Comm& comm, std::size_t m, bool uneven) {
    auto const count = [&](int from, int to) { return uneven ? count_between(from, to, m) : m; };
    auto const part = [&](int from, int to) {
        return things<V>(m + static_cast<std::size_t>(to), from, count(from, to));
    };
    std::vector<V> out, expected;
    std::vector<std::size_t> out_counts, in_counts;
    for (int r = 0; r < comm.size(); ++r) {
        for (V const& v : part(comm.rank(), r)) out.push_back(v);
        for (V const& v : part(r, comm.rank())) expected.push_back(v);
        out_counts.push_back(count(comm.rank(), r));
        in_counts.push_back(count(r, comm.rank()));
    }
    std::vector<V> in(expected.size());
    if (uneven) {
        all_to_all(comm, out, out_counts, in, in_counts);
    } else {
        all_to_all(comm, out, in);
        std::string const wrong = compare(all_to_all(comm, out), expected);
        if (!wrong.empty()) return "returned, " + wrong;
    }
    return compare(in, expected);
}

/// Round a ring at once; then from rank to rank, one after the other, several tags in an order other than they are sent in.
template <class V, class Comm>
std::string check_messages(Comm& comm, std::size_t count) {
    int const ranks = comm.size(), right = (comm.rank() + 1) % ranks, left = (comm.rank() + ranks - 1) % ranks;
    std::vector<V> in(count);
    send_receive(comm, things<V>(count, comm.rank(), count), right, in, left, 3);
    std::string wrong = compare(in, things<V>(count, left, count));
    if (ranks == 1) return wrong;

    V first{}, second{};
    if (comm.rank() == 0) {
        send(comm, things<V>(1, 0, 1)[0], right, 1);
        receive(comm, first, left, 1);
    } else {
        receive(comm, first, left, 1);
        send(comm, first, right, 1);
    }
    if (wrong.empty()) wrong = compare<V>(std::vector<V>{first}, things<V>(1, 0, 1));

    auto const a = things<V>(7, comm.rank(), 1), b = things<V>(8, comm.rank(), 1), c = things<V>(9, comm.rank(), count);
    std::vector<V> third(count);
    std::vector<request> all;  // messages of tag 1 in order, tag 0 whenever it is received
    all.push_back(start_receive(comm, third, left));
    all.push_back(start_receive(comm, first, left, 1));
    all.push_back(start_receive(comm, second, left, 1));
    all.push_back(start_send(comm, a, right, 1));
    all.push_back(start_send(comm, b, right, 1));
    all.push_back(start_send(comm, c, right));
    wait_all(all);
    if (wrong.empty()) wrong = compare<V>(std::vector<V>{first}, things<V>(7, left, 1));
    if (wrong.empty()) wrong = compare<V>(std::vector<V>{second}, things<V>(8, left, 1));
    if (wrong.empty()) wrong = compare(third, things<V>(9, left, count));
    return wrong;
}

/// One of everything under way at once, waited for from the last to the first.
template <class Comm>
std::string check_requests(Comm& comm, std::size_t count) {
    std::size_t const ranks = static_cast<std::size_t>(comm.size()), me = static_cast<std::size_t>(comm.rank());
    int const last = comm.size() - 1, right = (comm.rank() + 1) % comm.size(),
              left = (comm.rank() + last) % comm.size();
    auto const inputs = addends<double>(values::mixed, count, comm.size(), ranks * count);
    auto const& mine = inputs[me];
    auto summed = mine, least = mine, reduced = mine, scattered = mine, sent = mine;
    auto const part = [&](std::vector<double> const& of, std::size_t r) {
        return std::vector<double>(of.begin() + static_cast<std::ptrdiff_t>(r * count),
                                   of.begin() + static_cast<std::ptrdiff_t>((r + 1) * count));
    };
    auto const own = part(mine, me);
    std::vector<double> gathered(comm.rank() == last ? ranks * count : 0), everything(ranks * count), piece(count),
        exchanged(ranks * count), shifted(ranks * count), by_counts(ranks * count), by_both(ranks * count);
    std::vector<std::size_t> const counts(ranks, count);
    float single = static_cast<float>(comm.rank() + 1);

    std::vector<request> all;
    all.push_back(start_allreduce(comm, summed));
    all.push_back(start_allreduce(comm, least, minimum{}, direct_allreduce{.chunk_bytes = 64, .window = 1}));
    all.push_back(start_allreduce(comm, single));
    all.push_back(start_reduce(comm, reduced, last, sum{}, automatic_reduce{.tree_bytes = 100}));
    all.push_back(start_reduce_scatter(comm, scattered, maximum{}));
    all.push_back(start_broadcast(comm, sent, last));
    all.push_back(start_gather(comm, own, gathered, last));
    all.push_back(start_all_gather(comm, own, everything));
    all.push_back(start_all_gather(comm, own, counts, by_counts));
    all.push_back(start_scatter(comm, mine, piece, 0));
    all.push_back(start_all_to_all(comm, mine, exchanged));
    all.push_back(start_all_to_all(comm, mine, counts, by_both, counts));
    all.push_back(start_send_receive(comm, mine, right, shifted, left));
    all.push_back(start_barrier(comm));
    barrier(comm);  // a blocking call among them
    while (!all.empty()) {
        all.back().wait();
        all.pop_back();
    }

    std::vector<double> owns, columns;
    for (std::size_t r = 0; r < ranks; ++r)
        for (double const x : part(inputs[r], r)) owns.push_back(x);
    for (std::size_t r = 0; r < ranks; ++r)
        for (double const x : part(inputs[r], me)) columns.push_back(x);
    auto const total = reference_sum(inputs);
    failures wrong;
    note(wrong, "allreduce", compare(summed, total));
    note(wrong, "minimum", compare(least, reference_reduce<minimum>(inputs)));
    note(wrong, "single", single == static_cast<float>(ranks * (ranks + 1) / 2) ? "" : "is not the sum");
    note(wrong, "reduce", compare(reduced, comm.rank() == last ? total : mine));
    note(wrong, "reduce_scatter", compare(part(scattered, me), part(reference_reduce<maximum>(inputs), me)));
    note(wrong, "broadcast", compare(sent, inputs.back()));
    note(wrong, "gather", compare(gathered, comm.rank() == last ? owns : std::vector<double>()));
    note(wrong, "all_gather", compare(everything, owns));
    note(wrong, "all_gather of counts", compare(by_counts, owns));
    note(wrong, "scatter", compare(piece, part(inputs[0], me)));
    note(wrong, "all_to_all", compare(exchanged, columns));
    note(wrong, "all_to_all of counts", compare(by_both, columns));
    note(wrong, "send_receive", compare(shifted, inputs[static_cast<std::size_t>(left)]));
    return wrong.empty() ? std::string() : wrong.front();
}

/// The small all-gather that steps are made of: one struct a rank.
template <class Comm>
std::string check_small_table(Comm const& comm) {
    std::vector<std::uint64_t> table(static_cast<std::size_t>(comm.size())), expected;
    for (int r = 0; r < comm.size(); ++r) expected.push_back(things<std::uint64_t>(5, r, 1)[0]);
    table[static_cast<std::size_t>(comm.rank())] = expected[static_cast<std::size_t>(comm.rank())];
    auto const over = lane_of(comm, 1);
    comm.run([&] { return all_gather_small(over, std::span<std::uint64_t>(table)); });
    return compare(table, expected);
}

/// Several sums at once over lanes of their own, started on odd ranks in the opposite order.
template <Element E, class Comm>
std::string check_in_flight(Comm const& comm, std::vector<any_allreduce> const& algorithms) {
    using T = typename Comm::transport_type;
    std::uint64_t const index = comm.members().next_call();
    std::vector<std::vector<E>> data, expected;
    for (std::size_t b = 0; b < algorithms.size(); ++b) {
        auto const terms = addends<E>(values::small_integers, b, comm.size(), 100 * b + 7);
        expected.push_back(reference_sum(terms));
        data.push_back(terms[static_cast<std::size_t>(comm.rank())]);
    }
    comm.run([&] {
        std::vector<task<>> all;
        for (std::size_t i = 0; i < algorithms.size(); ++i) {
            std::size_t const b = comm.rank() % 2 == 0 ? i : algorithms.size() - 1 - i;
            identity const id{
                .group = comm.members().id(), .channel = 4 + 4 * static_cast<std::uint32_t>(b), .index = index};
            all.push_back(any_allreduce::sum(algorithms[b], lane<T>(comm.tasks(), comm.members(), id, b + 1),
                                             std::span<E>(data[b])));
        }
        return when_all(std::move(all), [&comm](std::exception_ptr const& e) { comm.tasks().fail(e); });
    });
    for (std::size_t b = 0; b < algorithms.size(); ++b)
        if (std::string const wrong = compare(data[b], expected[b]); !wrong.empty())
            return "collective " + std::to_string(b) + ": " + wrong;
    return {};
}

/// Every algorithm, those with options also with such as reach every path with little data.
inline std::vector<std::pair<std::string, any_allreduce>> algorithms() {
    std::vector<std::pair<std::string, any_allreduce>> all;
    for (char const* name : {"auto", "direct", "recursive_doubling", "halving_doubling", "ring", "naive"})
        all.emplace_back(name, any_allreduce::parse(name));
    all.emplace_back("direct, one tiny chunk under way", direct_allreduce{.chunk_bytes = 64, .window = 1});
    all.emplace_back("direct, tiny chunks", direct_allreduce{.chunk_bytes = 200, .window = 3});
    all.emplace_back("halving_doubling, one tiny chunk under way",
                     halving_doubling_allreduce{.chunk_bytes = 64, .window = 1});
    all.emplace_back("halving_doubling, tiny chunks", halving_doubling_allreduce{.chunk_bytes = 200, .window = 3});
    all.emplace_back("ring, one tiny segment under way", ring_allreduce{.segment_bytes = 64, .window = 1});
    all.emplace_back("ring, tiny segments", ring_allreduce{.segment_bytes = 200, .window = 3});
    all.emplace_back("auto, always direct", automatic_allreduce{.cost = costs_of_direct});
    all.emplace_back("auto, always halving", automatic_allreduce{.cost = costs_of_halving});
    return all;
}

/// Sizes where collectives break, for this many ranks.
inline std::vector<std::size_t> sizes(int ranks) {
    std::size_t const p = static_cast<std::size_t>(ranks);
    return {0, 1, p - 1, p, 1000, 1000 * p + 1, 3333};
}

/// Cuts of `count` elements into slices of very different lengths, the first and every third one empty.
inline std::vector<std::size_t> uneven_cuts(std::size_t count, int ranks) {
    std::vector<std::size_t> cuts(static_cast<std::size_t>(ranks) + 1);
    std::size_t at = 0;
    for (std::size_t r = 0; r + 1 < cuts.size(); ++r) {
        cuts[r] = at;
        if (r % 3 != 0) at += (count - at) / 3 + (count > at ? 1 : 0);
    }
    cuts.back() = count;
    return cuts;
}

/// All sums: every algorithm, size and kind of number.
template <Element E, class Comm>
failures check_all_sums(Comm const& comm) {
    failures all;
    for (auto const& [name, algorithm] : algorithms())
        for (std::size_t const count : sizes(comm.size()))
            for (values const kind : {values::small_integers, values::mixed})
                note(all, "allreduce of " + std::to_string(count) + " " + element_name<E> + ", " + name,
                     check_allreduce<E>(comm, algorithm, count, kind));
    std::vector<any_allreduce> many;
    for (auto const& [name, algorithm] : algorithms()) many.push_back(algorithm);
    note(all, "many in flight", check_in_flight<E>(comm, many));
    return all;
}

/// One operation on one type: every algorithm given, and reduce, on sizes that break things.
template <class Op, Number E, class A, class Comm>
failures check_operation(Comm& comm, std::vector<A> const& algorithms) {
    failures all;
    constexpr bool compares = std::same_as<Op, minimum> || std::same_as<Op, maximum>;
    values const kind = compares ? values::special : values::mixed;
    std::string const of = std::string(Op::name) + " of ";
    for (std::size_t const count : sizes(comm.size())) {
        std::string const what = of + std::to_string(count) + " " + detail::value_name<E>();
        for (A const& algorithm : algorithms)
            note(all, what + ", " + algorithm.name, check_combine<Op, E>(comm, algorithm, count, kind));
        for (int root = 0; root < comm.size(); ++root) {
            note(all, "reduce, " + what, check_reduce<Op, E>(comm, count, root, kind, {}));
            note(all, "reduce in slices, " + what,
                 check_reduce<Op, E>(comm, count, root, kind,
                                     {.tree_bytes = 0, .direct = {.chunk_bytes = 200, .window = 2}}));
        }
    }
    return all;
}

/// Operations other than sums of floats, on some types, by every algorithm whose bits they leave alone.
template <class Comm>
failures check_all_operations(Comm& comm) {
    failures all;
    auto const take = [&](failures some) { all.insert(all.end(), some.begin(), some.end()); };
    std::vector<any_allreduce> every;
    for (auto const& [name, algorithm] : algorithms()) every.push_back(algorithm);
    take(check_operation<minimum, float>(comm, every));
    take(check_operation<sum, std::int64_t>(comm, every));
    take(check_operation<sum, double>(comm, std::vector<automatic_allreduce>(1)));
    return all;
}

/// All halves: every algorithm over several kinds of cuts, with a factor and without; and the public reduce_scatter.
template <Element E, class Comm>
failures check_all_halves(Comm const& comm) {
    failures all;
    for (auto const& [name, algorithm] : algorithms())
        for (std::size_t const count : {std::size_t{0}, std::size_t{1}, std::size_t{50}, std::size_t{1003}}) {
            std::string const what = std::to_string(count) + " " + element_name<E> + ", " + name;
            std::vector<std::size_t> even(static_cast<std::size_t>(comm.size()) + 1);
            detail::even_cuts(count, 16, even);
            for (auto const& cuts : {even, uneven_cuts(count, comm.size())}) {
                note(all, "reduce of " + what, check_halves<E>(comm, algorithm, cuts, {}, values::mixed));
                note(all, "reduce with a factor of " + what,
                     check_halves<E>(comm, algorithm, cuts, E(1) / E(3), values::mixed));
                note(all, "reduce of integers, " + what,
                     check_halves<E>(comm, algorithm, cuts, E(0.5), values::small_integers));
            }
            note(all, "reduce_scatter of " + what, check_reduce_scatter<E>(comm, algorithm, count));
        }
    return all;
}

/// Everything that moves values without adding them.
template <class Comm>
failures check_all_moves(Comm const& comm) {
    failures all;
    for (std::size_t const m : {0u, 1u, 7u, 1000u}) {
        std::string const what = " of " + std::to_string(m);
        for (int root = 0; root < comm.size(); ++root) {
            note(all, "broadcast" + what, check_broadcast<pixel>(comm, m, root));
            note(all, "broadcast in a chain" + what,
                 check_broadcast<pixel>(comm, m, root, {.chain_bytes_per_rank = 1, .chunk_bytes = 100}));
            note(all, "gather" + what, check_gather<pixel>(comm, m, root));
            note(all, "scatter" + what, check_scatter<pixel>(comm, m, root, false));
            note(all, "scatter in place" + what, check_scatter<pixel>(comm, m, root, true));
        }
        for (bool const in_place : {false, true}) {
            note(all, "all_gather" + what, check_all_gather<pixel>(comm, m, {.bruck_bytes = 100'000}, in_place));
            note(all, "direct all_gather" + what, check_all_gather<double>(comm, m, {.bruck_bytes = 0}, in_place));
        }
        std::vector<std::size_t> counts(static_cast<std::size_t>(comm.size()));
        for (std::size_t r = 0; r < counts.size(); ++r) counts[r] = r % 3 == 1 ? 0 : m * (r + 1);
        note(all, "all_gather of differing counts" + what, check_all_gather_counts<pixel>(comm, counts));
        note(all, "all_to_all" + what, check_all_to_all<pixel>(comm, m, false));
        note(all, "all_to_all of differing counts" + what, check_all_to_all<pixel>(comm, m, true));
        note(all, "messages" + what, check_messages<pixel>(comm, m));
        note(all, "requests" + what, check_requests(comm, m));
    }
    note(all, "broadcast of much", check_broadcast<double>(comm, 100'000, comm.size() - 1));
    note(all, "small table", check_small_table(comm));
    barrier(comm);
    return all;
}

/// One allreduce by every algorithm and one of everything else, with little data: for groups, of which there are many.
template <class Comm>
failures check_every_collective(Comm const& comm) {
    failures all;
    for (auto const& [name, algorithm] : algorithms()) {
        note(all, "allreduce, " + name, check_allreduce<float>(comm, algorithm, 1003, values::mixed));
        note(all, "reduce_scatter, " + name, check_reduce_scatter<float>(comm, algorithm, 101));
    }
    hierarchical_allreduce const by_hosts(comm);
    note(all, "allreduce, by hosts", check_allreduce<float>(comm, by_hosts, 1003, values::mixed));
    note(all, "reduce_scatter, by hosts", check_reduce_scatter<float>(comm, by_hosts, 101));
    for (int root = 0; root < comm.size(); ++root) {
        note(all, "broadcast", check_broadcast<pixel>(comm, 700, root));
        note(all, "broadcast in a chain",
             check_broadcast<pixel>(comm, 700, root, {.chain_bytes_per_rank = 1, .chunk_bytes = 100}));
        note(all, "gather", check_gather<pixel>(comm, 7, root));
        note(all, "scatter", check_scatter<pixel>(comm, 7, root, false));
        note(all, "reduce", check_reduce<sum, double>(comm, 101, root, values::mixed, {}));
        note(all, "reduce in slices",
             check_reduce<minimum, float>(comm, 1003, root, values::special, {.tree_bytes = 0}));
    }
    note(all, "minimum", check_combine<minimum, float>(comm, any_allreduce(), 1003, values::special));
    note(all, "all_to_all", check_all_to_all<pixel>(comm, 7, false));
    note(all, "all_to_all of differing counts", check_all_to_all<pixel>(comm, 7, true));
    note(all, "messages", check_messages<pixel>(comm, 70));
    note(all, "requests", check_requests(comm, 30));
    note(all, "all_gather", check_all_gather<pixel>(comm, 7, {}, false));
    note(all, "direct all_gather", check_all_gather<double>(comm, 100, {.bruck_bytes = 0}, true));
    note(all, "small table", check_small_table(comm));
    std::vector<std::size_t> counts(static_cast<std::size_t>(comm.size()));
    for (std::size_t r = 0; r < counts.size(); ++r) counts[r] = r % 3 == 1 ? 0 : 7 * (r + 1);
    note(all, "all_gather of differing counts", check_all_gather_counts<pixel>(comm, counts));
    barrier(comm);
    return all;
}

}  // namespace ddp::test
