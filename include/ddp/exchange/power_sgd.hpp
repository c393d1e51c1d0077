/// \file
/// power_sgd_exchange: gradients of matrices are sent as products of two thin matrices.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ddp/collective/algorithms/direct_allreduce.hpp>
#include <ddp/comm/lane.hpp>
#include <ddp/core/contract.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/core/error.hpp>
#include <ddp/core/random.hpp>
#include <ddp/core/task.hpp>
#include <ddp/core/text.hpp>
#include <ddp/exchange/compression.hpp>
#include <ddp/exchange/exchange.hpp>
#include <ddp/exchange/thin_matrices.hpp>
#include <ddp/kernel/finite.hpp>

namespace ddp {

/// The gradient M of a matrix of m rows and n columns is sent as two thin matrices, P (m x rank) and Q (n x rank). P is
/// M Q, with the Q of the step before; P is summed over the ranks and made orthonormal; then Q = M^T P is summed; the
/// mean is P Q^T. The part of a rank's contribution that this leaves out is added to its next one.
///
/// A parameter of two dimensions or more is a matrix: its first dimension by all others. If it lies in several buckets, its
/// whole rows in each bucket are a matrix. A matrix is compressed if (m + n) rank min_compression_rate < m n. All others,
/// vectors, and rows that a bucket cuts are sent as they are, in one message with P.
///
/// Cost    for each bucket two sums by direct_allreduce, one after the other: of rank m elements for each of its matrices and
///         all elements sent as they are, then of rank n elements for each matrix; without a matrix, or before start_step, one
///         sum of all elements. Each sum is cut into slices of whole lines of 64 bytes: a rank of R sends those of all other
///         ranks once and its own R-1 times, 2 (R-1)/R of its bytes where they are equal. 4 steps of latency. P, Q and the
///         product take m n rank multiplications each; the transport is driven between matrices, not within one. Scratch: three
///         times the bucket's elements, or twice and Q if that is larger; and P. With update::sharded the same, and new values
///         are sent as well.
/// Error   with feedback, what is left out is sent later.
/// Sums    P and Q in the canonical tree over ranks; P is made orthonormal in double, by the same code on all ranks. Both
///         updates give the same bits; other bucket plans give other bits if they cut matrices elsewhere. After a resume
///         with such a plan, the Q of matrices that the checkpoint does not have is drawn again.
/// NaN     a sum P or Q that is not finite makes the whole matrix NaN; what was left out before is kept, and Q is drawn again.
/// Throws  usage_error when a trainer is made: rank 0, min_compression_rate below 1, no parameter that it can compress, or
///         buckets that cut all of them into parts that are too small.
/// Source  Vogels, Karimireddy and Jaggi, "PowerSGD", NeurIPS 2019, algorithms 1 and 2; the rule for what is compressed is
///         PyTorch's (powerSGD_hook, whose default start_step is 1000).
struct power_sgd_exchange {
    static constexpr char const* name = "power_sgd";

    std::size_t rank = 4;             ///< columns of P and Q
    bool feedback = true;             ///< keeps what is left out: memory for all elements on every rank
    bool warm_start = true;           ///< uses the Q of the step before; otherwise Q is drawn again in each step
    double min_compression_rate = 2;  ///< only matrices that become smaller by more than this factor are compressed
    std::uint64_t start_step = 0;     ///< number of steps that change values before compression begins
    std::uint64_t seed = 0;           ///< of the first Q (of each Q without warm_start); the same on all ranks

    [[nodiscard]] std::uint64_t hash() const {
        return policy_hash(name, rank, feedback, warm_start, min_compression_rate, start_step, seed);
    }
    [[nodiscard]] std::string hash_words() const {
        return policy_words(name, {{"rank", rank},
                                   {"feedback", feedback},
                                   {"warm_start", warm_start},
                                   {"min_compression_rate", min_compression_rate},
                                   {"start_step", start_step},
                                   {"seed", seed}});
    }

    /// Whole rows of a parameter in a bucket, and their Q (rank x columns).
    template <Element E>
    struct matrix {
        std::size_t parameter = 0, row = 0;  ///< which, and its first row
        std::size_t begin = 0;               ///< where that lies in the bucket
        std::size_t rows = 0, columns = 0;
        std::size_t in_p = 0, in_q = 0;  ///< where its P and Q begin among those of the bucket
        std::vector<E> q = {};
        std::string called = {};  ///< the name of q in the state

        [[nodiscard]] std::size_t size() const noexcept { return rows * columns; }
    };
    struct stretch {
        std::size_t begin = 0, count = 0;
    };
    template <Element E>
    struct bucket_state {
        std::vector<matrix<E>> matrices = {};
        std::vector<stretch> plain = {};  ///< the elements between them, which are not compressed
        std::size_t plain_count = 0, p_count = 0, q_count = 0;
        bool compressing = false;  ///< in this step
    };
    template <Element E>
    struct state {
        detail::compression<E> own;
        std::vector<bucket_state<E>> buckets = {};
        bool warm = true;  // otherwise Q is drawn again in each step, and none is kept
        std::string refused = {};

        [[nodiscard]] std::string refusal() const { return refused; }
        void for_each_state(state_visitor visit) {
            own.for_each_state(visit);
            if (!warm) return;
            for (bucket_state<E>& one : buckets)
                for (matrix<E>& m : one.matrices) {
                    std::size_t const shape[] = {m.q.size() / m.columns, m.columns};
                    visit({.of = own.plan().parameters[m.parameter].name,
                           .name = m.called,
                           .shape = shape,
                           .type = element_type_of<E>(),
                           .begin = 0,
                           .bytes = as_mutable_bytes(std::span(m.q)),
                           .optional = true});
                }
        }
        void for_each_shared(shared_state_visitor visit) const {
            if (!warm) return;
            for (bucket_state<E> const& one : buckets)
                for (matrix<E> const& m : one.matrices) visit(as_const_bytes(std::span<E const>(m.q)));
        }
        [[nodiscard]] exchange_statistics statistics() const noexcept { return own.statistics(); }
    };

    void validate(std::span<exchange_parameter const> parameters) const {
        DDP_EXPECTS(rank >= 1, "power_sgd: rank is 0; P and Q need at least one column");
        DDP_EXPECTS(min_compression_rate >= 1,
                    "power_sgd: min_compression_rate is " + detail::decimal(min_compression_rate) +
                        "; it must be at least 1, where every matrix that becomes smaller is compressed");
        for (exchange_parameter const& p : parameters)
            if (std::size_t const columns = columns_of(p.shape); columns != 0 && worthwhile(p.shape[0], columns))
                return;
        throw usage_error(
            "power_sgd: with rank " + std::to_string(rank) + " and min_compression_rate " +
            detail::decimal(min_compression_rate) +
            " no parameter of this model becomes smaller. Only matrices are compressed, where (rows + columns) * "
            "rank * min_compression_rate < rows * columns; choose a smaller rank or another exchange");
    }
    template <Element E>
    [[nodiscard]] state<E> prepare(exchange_plan<E> const& plan) const;
    template <Element E>
    [[nodiscard]] bool everywhere(exchange_plan<E> const& /*plan*/, std::size_t /*bucket*/) const noexcept {
        return true;
    }

    template <Transport T, Element E>
    static task<> exchange(power_sgd_exchange self, lane<T> over, state<E>& kept, bucket_exchange<E> what) {
        bucket_state<E>& of = kept.buckets[what.bucket];
        scratch space(2 * what.data.size() * sizeof(E)),
            thin((of.p_count + std::max(what.data.size(), of.q_count)) * sizeof(E));
        std::span<E> const wanted = space.as<E>().first(what.data.size());
        co_await *what.go;
        bool const used = *what.factor != 0;
        // Steps that change nothing send the same messages as others.
        of.compressing = what.updates >= self.start_step && !of.matrices.empty();
        std::span<E> const first = thin.as<E>().first(of.compressing ? of.p_count + of.plain_count : what.data.size());
        std::size_t const matrices = used && of.compressing ? of.matrices.size() : 0;
        std::size_t worked = 0;
        auto const its_turn = [&](matrix<E> const& m) {  // after this one the transport is driven
            worked += m.size() * self.rank;
            return worked >= work_in_a_turn && std::exchange(worked, 0) != 0;
        };
        if (used)
            take(kept, what, wanted, first);
        else
            std::ranges::fill(first, E(0));  // not what the memory held before
        for (std::size_t i = 0; i < matrices; ++i) {
            project(self, kept, what, wanted, of.matrices[i], first);
            if (its_turn(of.matrices[i])) co_await over.on->yield();
        }
        co_await direct_allreduce::sum({}, over, first);
        if (of.compressing) {
            std::span<E> const p = first.first(of.p_count), second = thin.as<E>().subspan(of.p_count, of.q_count);
            if (used)
                take_plain(kept, what, first.subspan(of.p_count));
            else
                std::ranges::fill(second, E(0));
            for (std::size_t i = 0; i < matrices; ++i) {
                project_back(self, kept, wanted, of.matrices[i], p, second);
                if (its_turn(of.matrices[i])) co_await over.on->yield();
            }
            co_await direct_allreduce::sum({}, over, second);
            for (std::size_t i = 0; i < matrices; ++i) {
                restore(self, kept, what, wanted, of.matrices[i], p, second, space.as<E>().subspan(what.data.size()));
                if (its_turn(of.matrices[i])) co_await over.on->yield();
            }
            if (used && kept.own.asks(what.bucket))
                for (stretch const& s : of.plain)
                    kept.own.sent(what.bucket, s.begin, wanted.subspan(s.begin, s.count),
                                  wanted.subspan(s.begin, s.count));
        } else if (used) {
            std::copy(first.begin(), first.end(), what.data.begin());
            if (kept.own.asks(what.bucket)) kept.own.sent(what.bucket, 0, wanted, wanted);
        }
    }
    template <Transport T, Element E>
    static task<> gather(power_sgd_exchange /*self*/, lane<T> /*over*/, state<E>& /*kept*/,
                         bucket_exchange<E> /*what*/) {
        co_return;  // every rank has the mean already
    }

private:
    static constexpr std::size_t work_in_a_turn = std::size_t{1} << 22;  // multiplications: about a millisecond

    /// The number of columns of a parameter as a matrix; 0 if it is not one.
    [[nodiscard]] static std::size_t columns_of(std::vector<std::size_t> const& shape) noexcept {
        std::size_t columns = shape.size() < 2 ? 0 : 1;
        for (std::size_t d = 1; d < shape.size(); ++d) columns *= shape[d];
        return columns;
    }
    [[nodiscard]] bool worthwhile(std::size_t rows, std::size_t columns) const noexcept {
        return static_cast<double>(rows + columns) * static_cast<double>(rank) * min_compression_rate <
               static_cast<double>(rows) * static_cast<double>(columns);
    }
    template <Element E>
    void draw(std::uint64_t step, matrix<E>& m, std::size_t k) const {
        random_stream const draws{seed, random_use::compression, m.parameter};
        for (std::size_t j = 0; j < m.columns; ++j)
            m.q[k * m.columns + j] =
                draws.at((step << 40) + (m.row * rank + k) * m.columns + j).template symmetric<E>();
    }

    /// What this rank wants to add to the mean, and of that what is sent as it is.
    template <Element E>
    static void take(state<E>& kept, bucket_exchange<E> const& what, std::span<E> wanted, std::span<E> first) {
        typename detail::compression<E>::stopwatch const time(kept.own);
        bucket_state<E> const& of = kept.buckets[what.bucket];
        int const me = kept.own.plan().rank, ranks = kept.own.plan().ranks;
        kept.own.begin(what.bucket, detail::direct_bytes<E>(first.size(), me, ranks) +
                                        (of.compressing ? detail::direct_bytes<E>(of.q_count, me, ranks) : 0));
        kept.own.contribution(what.bucket, what.data.data(), *what.factor, 0, wanted);
        if (!of.compressing) {
            std::copy(wanted.begin(), wanted.end(), first.begin());
            return;
        }
        E* p = first.data() + of.p_count;
        for (stretch const& s : of.plain) p = std::copy_n(wanted.data() + s.begin, s.count, p);
    }
    template <Element E>
    static void project(power_sgd_exchange const& self, state<E>& kept, bucket_exchange<E> const& what,
                        std::span<std::type_identity_t<E> const> wanted, matrix<E>& m, std::span<E> p) {
        typename detail::compression<E>::stopwatch const time(kept.own);
        for (std::size_t k = 0; k < self.rank; ++k) {
            auto const column = std::span<E const>(m.q).subspan(k * m.columns, m.columns);
            bool const usable =
                std::ranges::any_of(column, [](E x) { return x != 0; }) && first_nonfinite(column) == column.size();
            if (!usable || !self.warm_start) self.draw(what.updates, m, k);
        }
        detail::kernels::times_thin(wanted.data() + m.begin, m.q.data(), p.data() + m.in_p, m.rows, m.columns,
                                    self.rank);
    }
    template <Element E>
    static void take_plain(state<E>& kept, bucket_exchange<E> const& what,
                           std::span<std::type_identity_t<E> const> sums) {
        E const* from = sums.data();
        for (stretch const& s : kept.buckets[what.bucket].plain) {
            std::copy_n(from, s.count, what.data.data() + s.begin);
            from += s.count;
        }
    }
    template <Element E>
    static void project_back(power_sgd_exchange const& self, state<E>& kept,
                             std::span<std::type_identity_t<E> const> wanted, matrix<E> const& m, std::span<E> p,
                             std::span<E> second) {
        typename detail::compression<E>::stopwatch const time(kept.own);
        // NaN or an infinity in P leaves NaN there, which restore() finds.
        detail::kernels::orthonormalise(p.data() + m.in_p, m.rows, self.rank);
        detail::kernels::transposed_times(wanted.data() + m.begin, p.data() + m.in_p, second.data() + m.in_q, m.rows,
                                          m.columns, self.rank);
    }
    template <Element E>
    static void restore(power_sgd_exchange const& self, state<E>& kept, bucket_exchange<E> const& what,
                        std::span<std::type_identity_t<E> const> wanted, matrix<E>& m,
                        std::span<std::type_identity_t<E> const> p, std::span<std::type_identity_t<E> const> second,
                        std::span<E> sent) {
        typename detail::compression<E>::stopwatch const time(kept.own);
        E const share = E(1) / static_cast<E>(kept.own.plan().ranks);
        std::span<E> const mean = what.data.subspan(m.begin, m.size());
        std::span<E const> const left = p.subspan(m.in_p, m.rows * self.rank),
                                 right = second.subspan(m.in_q, m.columns * self.rank);
        bool const finite = first_nonfinite(left) == left.size() && first_nonfinite(right) == right.size();
        if (finite) {
            detail::kernels::product_of_thin(left.data(), right.data(), mean.data(), m.rows, m.columns, self.rank);
        } else {
            std::fill(mean.begin(), mean.end(), std::numeric_limits<E>::quiet_NaN());
            kept.own.spoil(what.bucket);
        }
        if (finite && kept.own.asks(what.bucket)) {  // each rank has sent an equal part of the product
            std::span<E> const part = sent.subspan(m.begin, m.size());
            detail::kernels::contribution(mean.data(), share, part.data(), part.size());
            kept.own.sent(what.bucket, m.begin, wanted.subspan(m.begin, m.size()), part);
        }
        std::ranges::copy(right, m.q.begin());
    }
};

template <Element E>
power_sgd_exchange::state<E> power_sgd_exchange::prepare(exchange_plan<E> const& plan) const {
    state<E> all{.own = detail::compression<E>(plan, feedback), .warm = warm_start};
    bool compresses = plan.buckets.empty();
    for (exchange_bucket const& bucket : plan.buckets) {
        bucket_state<E>& one = all.buckets.emplace_back();
        std::size_t at = 0;
        for (exchange_piece const& piece : bucket.pieces) {
            std::vector<std::size_t> const& shape = plan.parameters[piece.parameter].shape;
            std::size_t const columns = columns_of(shape);
            if (columns == 0) continue;
            std::size_t const row = (piece.offset + columns - 1) / columns,
                              end = (piece.offset + piece.count) / columns;
            if (row >= end || !worthwhile(end - row, columns)) continue;
            matrix<E> m{.parameter = piece.parameter,
                        .row = row,
                        .begin = piece.begin + (row * columns - piece.offset),
                        .rows = end - row,
                        .columns = columns};
            m.q.resize(rank * columns);
            m.called = "power_sgd_q" + (row == 0 ? "" : "_from_row_" + std::to_string(row));
            compresses = true;
            if (m.begin > at) one.plain.push_back({at, m.begin - at});
            at = m.begin + m.size();
            m.in_p = std::exchange(one.p_count, one.p_count + m.rows * rank);
            m.in_q = std::exchange(one.q_count, one.q_count + columns * rank);
            one.matrices.push_back(std::move(m));
        }
        if (at < bucket.count) one.plain.push_back({at, bucket.count - at});
        for (stretch const& s : one.plain) one.plain_count += s.count;
    }
    if (!compresses)
        all.refused = "power_sgd: with rank " + std::to_string(rank) + " and min_compression_rate " +
                      detail::decimal(min_compression_rate) +
                      " no matrix becomes smaller: what counts are its whole rows in each bucket. Choose larger "
                      "buckets, a smaller rank or another exchange";
    return all;
}

}  // namespace ddp
