/// \file
/// compression: the common state of exchanges that send less: the residuals, and statistics.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include <ddp/comm/transport.hpp>
#include <ddp/core/bytes.hpp>
#include <ddp/core/element_type.hpp>
#include <ddp/exchange/exchange.hpp>
#include <ddp/kernel/kernel.hpp>
#include <ddp/model/state_slice.hpp>

#if defined(__clang__)
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wpass-failed"  // sanitizers prevent vectorisation, which is harmless
#endif

namespace ddp::detail {

namespace kernels {

/// out = data * factor, rounded; the second form adds `left`.
template <Element E>
DDP_KERNEL void contribution(E const* data, E factor, E* out, std::size_t count) {
    DDP_NO_CONTRACTION
    DDP_INDEPENDENT
    for (std::size_t i = 0; i < count; ++i) out[i] = data[i] * factor;
}
template <Element E>
DDP_KERNEL void contribution(E const* data, E factor, E const* left, E* out, std::size_t count) {
    DDP_NO_CONTRACTION
    DDP_INDEPENDENT
    for (std::size_t i = 0; i < count; ++i) out[i] = data[i] * factor + left[i];
}
/// left = wanted - sent; 0 if that is not finite, so that a NaN does not reach later steps.
template <Element E>
DDP_KERNEL void leave_out(E const* wanted, E const* sent, E* left, std::size_t count) {
    DDP_NO_CONTRACTION
    constexpr E most = std::numeric_limits<E>::max();
    DDP_INDEPENDENT
    for (std::size_t i = 0; i < count; ++i) {
        E const rest = wanted[i] - sent[i];
        left[i] = rest >= -most && rest <= most ? rest : E(0);
    }
}
/// Adds the squares of wanted - sent to squares[0], those of wanted to squares[1].
template <Element E>
DDP_KERNEL void add_squares(E const* wanted, E const* sent, std::size_t count, double* squares) {
    DDP_NO_CONTRACTION
    double missed = 0, all = 0;
    for (std::size_t i = 0; i < count; ++i) {
        double const w = static_cast<double>(wanted[i]), d = w - static_cast<double>(sent[i]);
        missed += d * d;
        all += w * w;
    }
    squares[0] += missed;
    squares[1] += all;
}

}  // namespace kernels

/// Bytes that direct_allreduce::sum of `count` elements sends on a rank.
template <Element E>
[[nodiscard]] std::size_t direct_bytes(std::size_t count, int rank, int ranks) {
    slice_cuts<E> const cuts(count, ranks);
    std::size_t const me = static_cast<std::size_t>(rank), own = cuts.get()[me + 1] - cuts.get()[me];
    return (count - own + static_cast<std::size_t>(ranks - 1) * own) * sizeof(E);
}

/// State of an exchange that sends less: for each bucket what this rank has left out, in units of the mean gradient.
template <Element E>
class compression {
public:
    compression(exchange_plan<E> const& plan, bool feedback) : plan_(plan), figures_(plan.buckets.size()) {
        if (!feedback) return;
        for (exchange_bucket const& bucket : plan.buckets) left_.emplace_back(bucket.count);
    }

    [[nodiscard]] exchange_plan<E> const& plan() const noexcept { return plan_; }
    [[nodiscard]] exchange_bucket const& bucket(std::size_t b) const noexcept { return plan_.buckets[b]; }
    [[nodiscard]] bool feedback() const noexcept { return !left_.empty(); }
    /// What was left out of bucket b; empty without feedback.
    [[nodiscard]] std::span<E> left(std::size_t b) noexcept {
        return left_.empty() ? std::span<E>() : std::span<E>(left_[b]);
    }

    /// out = what this rank wants to add to the mean: elements [at, at + out.size()) of the bucket's data times factor, plus
    /// what was left out of them before.
    void contribution(std::size_t b, E const* data, E factor, std::size_t at, std::span<E> out) noexcept {
        if (feedback())
            kernels::contribution(data + at, factor, left_[b].data() + at, out.data(), out.size());
        else
            kernels::contribution(data + at, factor, out.data(), out.size());
    }
    /// Whether sent() has to be called in this step.
    [[nodiscard]] bool asks(std::size_t b) const noexcept { return feedback() || figures_[b].looks(); }
    /// Records that peers receive `sent` instead of `wanted`, from element `at` of the bucket on.
    void sent(std::size_t b, std::size_t at, std::span<E const> wanted, std::span<E const> sent) noexcept {
        if (feedback()) kernels::leave_out(wanted.data(), sent.data(), left_[b].data() + at, wanted.size());
        if (figures_[b].looks()) kernels::add_squares(wanted.data(), sent.data(), wanted.size(), figures_[b].now.of);
    }

    /// Part of bucket b is not finite, and so is the error of this step.
    void spoil(std::size_t b) noexcept {
        if (figures_[b].looks()) figures_[b].now.of[0] = std::numeric_limits<double>::quiet_NaN();
    }

    /// Begins a step of bucket b that changes values; it sends `bytes` bytes instead of the bucket.
    void begin(std::size_t b, std::size_t bytes) noexcept {
        std::uint64_t const ranks = static_cast<std::uint64_t>(plan_.ranks);
        dense_ += (plan_.sharded ? 1 : 2) * bucket(b).count * sizeof(E) * (ranks - 1) / ranks;
        sent_ += bytes;
        if (figures_[b].steps++ % figure::every == 0) {
            figures_[b].before = figures_[b].shown();
            figures_[b].now = {};
        }
    }
    /// Sets the gaps between the parameters of a bucket to zero again.
    void clear_gaps(std::size_t b, std::span<E> data) const noexcept {
        std::size_t at = 0;
        for (exchange_piece const& piece : bucket(b).pieces) {
            std::fill(data.begin() + static_cast<std::ptrdiff_t>(at),
                      data.begin() + static_cast<std::ptrdiff_t>(piece.begin), E(0));
            at = piece.begin + piece.count;
        }
        std::fill(data.begin() + static_cast<std::ptrdiff_t>(at), data.end(), E(0));
    }
    /// Adds its own lifetime to statistics().time.
    class stopwatch {
    public:
        explicit stopwatch(compression& of) noexcept : of_(of), since_(monotonic_clock::now()) {}
        stopwatch(stopwatch const&) = delete;
        stopwatch& operator=(stopwatch const&) = delete;
        ~stopwatch() { of_.time_ += monotonic_clock::now() - since_; }

    private:
        compression& of_;
        time_point since_;
    };

    [[nodiscard]] exchange_statistics statistics() const noexcept {
        double missed = 0, all = 0;
        for (figure const& one : figures_) {
            missed += one.shown().of[0];
            all += one.shown().of[1];
        }
        return {
            .dense_bytes = dense_, .sent_bytes = sent_, .error = all > 0 ? std::sqrt(missed / all) : 0, .time = time_};
    }

    /// Shows elements [begin, end) of bucket b, which `all` holds, parameter by parameter, without the gaps.
    static void show(exchange_plan<E> const& plan, std::size_t b, std::string_view name, std::span<E> all,
                     std::size_t begin, std::size_t end, bool per_rank, state_visitor visit) {
        for (exchange_piece const& piece : plan.buckets[b].pieces) {
            std::size_t const from = std::max(piece.begin, begin), to = std::min(piece.begin + piece.count, end);
            if (from >= to) continue;
            visit({.of = plan.parameters[piece.parameter].name,
                   .name = name,
                   .shape = plan.parameters[piece.parameter].shape,
                   .type = element_type_of<E>(),
                   .begin = piece.offset + (from - piece.begin),
                   .bytes = as_mutable_bytes(all.subspan(from - begin, to - from)),
                   .per_rank = per_rank});
        }
    }
    void for_each_state(state_visitor visit) {
        for (std::size_t b = 0; b < left_.size(); ++b)
            show(plan_, b, "residual", left_[b], 0, left_[b].size(), true, visit);
    }

private:
    struct squares {
        double of[2] = {};  // what was left out, what was wanted
        [[nodiscard]] bool finite() const noexcept { return std::isfinite(of[0]) && std::isfinite(of[1]); }
    };
    struct figure {
        static constexpr std::uint64_t every = 16;
        std::uint64_t steps = 0;
        squares now = {}, before = {};  // of the last step that was looked at, and of the last finite one before it
        [[nodiscard]] bool looks() const noexcept { return steps % every == 1; }
        [[nodiscard]] squares const& shown() const noexcept { return now.finite() ? now : before; }
    };

    exchange_plan<E> plan_;
    std::vector<std::vector<E>> left_;
    std::vector<figure> figures_;
    std::uint64_t dense_ = 0, sent_ = 0;
    nanoseconds time_{};
};

}  // namespace ddp::detail

#if defined(__clang__)
#pragma clang diagnostic pop
#endif
