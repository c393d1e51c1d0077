// An exchange of one's own: gradients travel as bfloat16, and what rounding leaves out goes into the next
// step's. docs/own_exchange.md explains it.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <ddp/exchange/exchange.hpp>
#include <ddp/kernel/kernel.hpp>
#include <ddp/transport/inproc.hpp>
#include <span>
#include <vector>

/// To the nearest bfloat16, ties to even; `left` takes what that leaves out. A NaN stays one.
DDP_KERNEL inline void round_values(float const* data, float* left, std::uint16_t* out, std::size_t count) {
    DDP_NO_CONTRACTION
    for (std::size_t i = 0; i < count; ++i) {
        float const wanted = data[i] + left[i];
        auto const bits = std::bit_cast<std::uint32_t>(wanted);
        std::uint32_t const rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        out[i] = static_cast<std::uint16_t>(wanted == wanted ? rounded : bits >> 16 | 0x40);
        left[i] = wanted - std::bit_cast<float>(std::uint32_t{out[i]} << 16);
    }
}
/// sum + addend, or the addend alone; then times factor.
DDP_KERNEL inline void add_rounded(float* sum, std::uint16_t const* addend, std::size_t count, bool first,
                                   float factor) {
    DDP_NO_CONTRACTION
    for (std::size_t i = 0; i < count; ++i) {
        float const x = std::bit_cast<float>(std::uint32_t{addend[i]} << 16);
        sum[i] = (first ? x : sum[i] + x) * factor;
    }
}

struct rounded_exchange {
    static constexpr char const* name = "rounded";
    bool feedback = true;

    /// What rounding has left out, by bucket: this rank's own.
    struct residuals {
        ddp::exchange_plan<float> plan;
        std::vector<std::vector<float>> left;

        void for_each_state(ddp::state_visitor visit) {
            for (std::size_t b = 0; b < left.size(); ++b)
                for (ddp::exchange_piece const& piece : plan.buckets[b].pieces)
                    visit({.of = plan.parameters[piece.parameter].name,
                           .name = "residual",
                           .shape = plan.parameters[piece.parameter].shape,
                           .type = ddp::element_type::f32,
                           .begin = piece.offset,
                           .bytes = ddp::as_mutable_bytes(std::span(left[b]).subspan(piece.begin, piece.count)),
                           .per_rank = true});
        }
    };

    std::uint64_t hash() const { return ddp::policy_hash(name, feedback); }
    residuals prepare(ddp::exchange_plan<float> const& plan) const {
        residuals all{plan, {}};
        for (ddp::exchange_bucket const& bucket : plan.buckets) all.left.emplace_back(bucket.count);
        return all;
    }
    bool everywhere(ddp::exchange_plan<float> const& /*plan*/, std::size_t /*bucket*/) const { return true; }

    template <ddp::Transport T>
    static ddp::task<> exchange(rounded_exchange self, ddp::lane<T> over, residuals& kept,
                                ddp::bucket_exchange<float> what) {
        int const ranks = over.size(), me = over.rank();
        std::size_t const count = what.data.size();
        std::vector<float>& left = kept.left[what.bucket];
        ddp::scratch memory(static_cast<std::size_t>(ranks) * count * sizeof(std::uint16_t));
        auto const addend = [=, all = memory.as<std::uint16_t>()](int r) {
            return all.subspan(static_cast<std::size_t>(r) * count, count);
        };
        ddp::operations in(static_cast<std::size_t>(ranks)), out(static_cast<std::size_t>(ranks));
        for (int r = 0; r < ranks; ++r)  // before our own gradient is there
            if (r != me) over.receive(in[static_cast<std::size_t>(r)], r, ddp::as_mutable_bytes(addend(r)));
        co_await *what.go;

        bool const used = *what.factor != 0;  // 0: no rank has samples, and nothing may change
        if (used && !self.feedback) left.assign(count, 0.0f);
        if (used) round_values(what.data.data(), left.data(), addend(me).data(), count);
        for (int r = 0; r < ranks; ++r)
            if (r != me) over.send(out[static_cast<std::size_t>(r)], r, ddp::as_const_bytes(addend(me)));
        for (int r = 0; r < ranks; ++r) {  // in the order of the ranks: the same bits everywhere
            if (r != me) co_await in[static_cast<std::size_t>(r)];
            float const factor = r + 1 == ranks ? *what.factor : 1.0f;
            if (used) add_rounded(what.data.data(), addend(r).data(), count, r == 0, factor);
        }
        for (int r = 0; r < ranks; ++r)
            if (r != me) co_await out[static_cast<std::size_t>(r)];
    }
    template <ddp::Transport T>
    static ddp::task<> gather(rounded_exchange /*self*/, ddp::lane<T> /*over*/, residuals& /*kept*/,
                              ddp::bucket_exchange<float> /*what*/) {
        co_return;  // exchange leaves the mean everywhere
    }
};
static_assert(ddp::ExchangeOver<rounded_exchange, ddp::inproc_transport, float>);
