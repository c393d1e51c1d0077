/// \file
/// naive_allreduce: all ranks send to rank 0, which adds and sends the sum to all.
#pragma once

#include <cstddef>
#include <span>

#include <ddp/collective/concepts.hpp>
#include <ddp/kernel/combine.hpp>

namespace ddp {

/// Gather to rank 0, sum, broadcast: the simplest algorithm, with which the others are compared.
///
/// data    n elements (S bytes), the same n on every rank; on return every rank holds the same bits.
/// Cost    rank 0 sends P-1 messages, (P-1)S bytes, and keeps (P-1)S bytes of scratch; every other rank sends 1 message,
///         S bytes, and needs no scratch.
/// Sums    the canonical tree over ranks, all sources in one pass; the factor in the same pass; other operations likewise.
/// Throws  collective_aborted inside the scheduler, comm_error to the caller; data is then unspecified.
struct naive_allreduce {
    static constexpr char const* name = "naive";
    static constexpr bool canonical = true;

    [[nodiscard]] static bool everywhere(std::size_t /*bytes*/, int /*ranks*/) noexcept { return true; }

    template <Transport T, Number E>
    static task<> sum(naive_allreduce self, lane<T> over, std::span<E> data) {
        return combine(self, over, data, ddp::sum{});
    }
    template <Transport T, Number E, OperationOn<E> Op>
    static task<> combine(naive_allreduce self, lane<T> over, std::span<E> data, Op /*op*/) {
        return reduce(self, over, reduction<E, Op>{.data = data, .cuts = {}});
    }

    template <Transport T, Number E, OperationOn<E> Op>
    static task<> reduce(naive_allreduce /*self*/, lane<T> over, reduction<E, Op> what) {
        lane<T> const result = over.phase(1);
        std::span<E> const data = what.data;
        if (over.rank() != 0) {
            operation out, in;
            if (what.go != nullptr) co_await *what.go;
            result.receive(in, 0, as_mutable_bytes(data), &out);  // comes only after rank 0 has the addend
            over.send(out, 0, as_const_bytes(data));
            co_await in;
            co_await out;
            co_return;
        }

        std::size_t const others = static_cast<std::size_t>(over.size()) - 1;
        scratch memory(others * data.size_bytes()), table((others + 1) * sizeof(E const*));
        operations in(others), out(others);
        std::span<E const*> const sources = table.template as<E const*>();
        sources[0] = data.data();
        for (std::size_t p = 0; p < others; ++p) {
            std::span<E> const theirs = memory.template as<E>().subspan(p * data.size(), data.size());
            sources[p + 1] = theirs.data();
            over.receive(in[p], static_cast<int>(p + 1), as_mutable_bytes(theirs));
        }
        if (what.go != nullptr) co_await *what.go;
        for (std::size_t p = 0; p < others; ++p) co_await in[p];
        if (what.factor != nullptr)
            combine_tree_scaled<Op>(data, std::span<E const* const>(sources), *what.factor);
        else
            combine_tree<Op>(data, std::span<E const* const>(sources));
        for (std::size_t p = 0; p < others; ++p) result.send(out[p], static_cast<int>(p + 1), as_const_bytes(data));
        for (std::size_t p = 0; p < others; ++p) co_await out[p];
    }

    template <Transport T, Number E>
    static task<> all_gather(naive_allreduce /*self*/, lane<T> /*over*/, std::span<E> /*data*/,
                             std::span<std::size_t const> /*cuts*/) {
        co_return;  // reduce left everything everywhere
    }
};

}  // namespace ddp
