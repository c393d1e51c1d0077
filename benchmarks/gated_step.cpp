// A step whose buckets all wait at one gate (clipping by norm, sharded update, AdamW), stepped in one uninterrupted turn and
// in pieces between which the network is looked after. One JSON line each on rank 0.
//
//   DDP_SHARE_MEMORY=0 ddprun -n 2 --prefix none -- ./gated_step     (through sockets: memory has no rate)
//
// BUCKETS (16) of BUCKET_MIB (4), STEPS (15) a mode, by turns. On loopback the processors copy what a network card would
// carry; for a network with a rate of its own, in a namespace:
//   unshare -n sh -c 'ip link set lo up; tc qdisc add dev lo root tbf rate 8gbit burst 1m latency 50ms
//                    DDP_SHARE_MEMORY=0 ddprun …'
//
// step_ms       the whole step, median
// after_ms      of that, after backward had ended: what exchange, norm, update and gather of values leave to wait for
// turn_ms       the longest time in the optimizer without a look at the network: heartbeats and messages wait as long
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include <ddp/ddp.hpp>
#include <ddp/rendezvous/run_tcp.hpp>

namespace {

using ms = std::chrono::duration<double, std::milli>;

std::size_t setting(char const* name, std::size_t otherwise) {
    char const* const value = std::getenv(name);
    return value != nullptr && *value != '\0' ? std::stoul(value) : otherwise;
}

struct nothing {
    [[nodiscard]] std::size_t size() const { return 1; }
};

/// Parameters of one size, a bucket each, whose gradients are final at once.
struct large_model {
    using element = float;
    std::vector<std::vector<float>> value, gradient;

    large_model(std::size_t buckets, std::size_t elements)
        : value(buckets, std::vector<float>(elements, 1.0f)), gradient(buckets, std::vector<float>(elements, 0.25f)) {}
    std::vector<ddp::parameter<float>> parameters() {
        std::vector<ddp::parameter<float>> all;
        for (std::size_t i = 0; i < value.size(); ++i)
            all.push_back({"p" + std::to_string(i), {value[i].size()}, value[i], gradient[i]});
        return all;
    }
    void bind(ddp::storage<float> memory) {
        memory_ = std::move(memory);
        for (std::span<float> const g : memory_.gradients) std::fill(g.begin(), g.end(), 0.25f);
        value.clear();
        gradient.clear();
    }
    double forward(nothing const&) { return 0; }
    void backward(ddp::pass<float>, auto const& ready) {
        for (std::size_t i = memory_.gradients.size(); i-- > 0;) ready(i);
    }

private:
    ddp::storage<float> memory_;
};

/// Hears of every turn of whoever drives, and how long the optimizer took within it.
struct watch final : ddp::mailbox_client {
    ddp::nanoseconds in_turn{0}, longest{0};
    void collect() override { in_turn = {}; }
    void stepped(ddp::nanoseconds length) {
        in_turn += length;
        longest = std::max(longest, in_turn);
    }
};
struct watched_adamw : ddp::adamw {
    watch* turns;
    template <class E>
    void step(ddp::step_info const& at, std::span<E const> gradient, std::span<E> value,
              ddp::slot_spans<E> slots) const {
        ddp::time_point const since = ddp::monotonic_clock::now();
        ddp::adamw::step(at, gradient, value, slots);
        turns->stepped(ddp::monotonic_clock::now() - since);
    }
};

struct mode {
    char const* name;
    std::size_t piece_bytes;
    std::vector<double> step = {}, after = {}, turn = {};
};

double median(std::vector<double> v) {
    auto const middle = v.begin() + static_cast<std::ptrdiff_t>(v.size() / 2);
    std::nth_element(v.begin(), middle, v.end());
    return *middle;
}

}  // namespace

int main() {
    return ddp::run_main<ddp::threads, ddp::tcp>([](auto& comm) {
        std::size_t const buckets = setting("BUCKETS", 16), mib = setting("BUCKET_MIB", 4);
        watch turns;
        comm.exclusively([&] { comm.tasks().add(turns); });
        mode modes[] = {{"one turn", std::numeric_limits<std::size_t>::max()},
                        {"in pieces", ddp::training_options{}.step_piece_bytes}};
        auto const run = [&](mode& m, std::size_t steps) {
            large_model model(buckets, (mib << 20) / sizeof(float));
            ddp::data_parallel trainer{model,
                                       watched_adamw{{}, &turns},
                                       comm,
                                       {.update = ddp::update::sharded,
                                        .clip = ddp::clip_by_global_norm{.max_norm = 1},
                                        .step_piece_bytes = m.piece_bytes},
                                       ddp::automatic_allreduce{},
                                       ddp::per_parameter_buckets{}};
            for (std::size_t s = 0; s < steps + 1; ++s) {
                ddp::barrier(comm);
                comm.exclusively([&] { turns.longest = {}; });
                trainer.reset_times();
                trainer.step(nothing{});
                if (s == 0) continue;  // memory is touched for the first time
                m.step.push_back(ms(trainer.times().total).count());
                m.after.push_back(ms(trainer.times().waited + trainer.times().stepped).count());
                m.turn.push_back(ms(turns.longest).count());
            }
        };
        std::size_t const rounds = 3;
        for (std::size_t round = 0; round < rounds; ++round)
            for (mode& m : modes) run(m, std::max<std::size_t>(setting("STEPS", 15) / rounds, 1));
        comm.exclusively([&] { comm.tasks().remove(turns); });
        if (comm.rank() != 0) return;
        for (mode const& m : modes)
            std::printf(
                "{\"bench\":\"gated_step\",\"mode\":\"%s\",\"n\":%d,\"mib\":%zu,\"step_ms\":%.1f,\"after_ms\":%.1f,"
                "\"turn_ms\":%.2f}\n",
                m.name, comm.size(), buckets * mib, median(m.step), median(m.after), median(m.turn));
    });
}
