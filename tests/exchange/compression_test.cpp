// Exchanges that send less, against simulations of the same algorithms in plain loops, one rank after the other.
#include <ddp/exchange/narrow.hpp>
#include <ddp/exchange/power_sgd.hpp>
#include <ddp/exchange/sparse.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ddp/collective/reference.hpp>
#include <ddp/kernel/kernel.hpp>
#include <ddp/testing/check_exchange.hpp>

#include "support/catch.hpp"
#include "support/counting_transport.hpp"
#include "support/on_ranks.hpp"
#include "support/ranks.hpp"
#include "support/training_checks.hpp"
#include "train/patience.hpp"
#include "train/scripted_model.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

using numbers_of = std::vector<double>;

/// Any exchange of double behind one type, so that one trainer is compiled; what it is told is seen.
struct any_exchange {
    std::function<std::unique_ptr<ddp::detail::exchange_model<any_transport, double>>()> make;
    std::string called;
    std::uint64_t settings;
    exchange_plan<double>* told = nullptr;

    template <class X>
    any_exchange(X policy)
        : make([policy] { return std::make_unique<ddp::detail::exchange_model_of<any_transport, double, X>>(policy); }),
          called(X::name),
          settings(policy.hash()),
          name(X::name) {}
    char const* name;

    struct state {
        std::unique_ptr<ddp::detail::exchange_model<any_transport, double>> inner;
        void for_each_state(state_visitor visit) { inner->for_each_state(visit); }
        [[nodiscard]] exchange_statistics statistics() const { return inner->statistics(); }
    };
    [[nodiscard]] std::uint64_t hash() const { return settings; }
    void validate(std::span<exchange_parameter const> parameters) const { make()->validate(parameters); }
    [[nodiscard]] state prepare(exchange_plan<double> const& plan) const {
        if (told != nullptr) *told = plan;
        state all{make()};
        all.inner->prepare(plan);
        return all;
    }
    [[nodiscard]] bool everywhere(exchange_plan<double> const& plan, std::size_t bucket) const {
        return make()->everywhere(plan, bucket);
    }
    static task<> exchange(any_exchange const& /*self*/, lane<any_transport> over, state& kept,
                           bucket_exchange<double> what) {
        return kept.inner->exchange(over, what);
    }
    static task<> gather(any_exchange const& /*self*/, lane<any_transport> over, state& kept,
                         bucket_exchange<double> what) {
        return kept.inner->gather(over, what);
    }
};

constexpr std::size_t steps = 11, rows = 13, in = 9, hidden = 31, out = 5;
constexpr double lr = 0.1, momentum = 0.9;

/// How a test trains.
struct training {
    any_exchange exchange;
    any_buckets buckets = single_bucket{};
    bool sharded = false, clipped = false;
};
struct ending {
    std::vector<numbers_of> values;
    std::vector<std::uint64_t> digests;
    std::map<std::string, std::vector<std::byte>> state;  // by parameter and name, where it begins
    exchange_statistics statistics;
    std::size_t bytes = 0;  // as the communicator counts them, in the last step
    exchange_plan<double> plan;
    std::string wrong;
};

/// Trains from step `from` to step `to`, having been given values and state.
ending train_part(communicator<>& comm, training const& with, std::size_t from, std::size_t to, ending const* before) {
    task_data<double> const data(in, out, 64);
    tanh_mlp<double> model(in, hidden, out, 1);
    ending end;
    any_exchange exchange = with.exchange;
    exchange.told = &end.plan;
    data_parallel trainer{model,    any_optimizer(sgd{.lr = lr, .momentum = momentum}),
                          comm,     options_of(with.sharded, with.clipped),
                          exchange, with.buckets};
    auto const key = [](state_slice const& s) {
        return std::string(s.of) + "/" + std::string(s.name) + "/" + std::to_string(s.begin);
    };
    if (before != nullptr) {
        for (std::size_t i = 0; i < before->values.size(); ++i)
            std::ranges::copy(before->values[i], trainer.parameters()[i].value.begin());
        trainer.for_each_state([&](state_slice const& s) {
            if (!before->state.contains(key(s)) || before->state.at(key(s)).size() != s.bytes.size())
                end.wrong = "no state for " + key(s);
            else
                std::ranges::copy(before->state.at(key(s)), s.bytes.begin());
        });
    }
    for (std::size_t step = from; step < to; ++step) {
        auto const [first, last] = share(rows, step, comm.rank(), comm.size());
        std::uint64_t const sent = comm.bytes_sent();
        trainer.step(data.batch(step + first, step + last));
        end.bytes = static_cast<std::size_t>(comm.bytes_sent() - sent);
        end.digests.push_back(trainer.digest_of_values());
        if (!trainer.replicas_identical()) end.wrong = "ranks hold different bits";
    }
    for (auto const& p : trainer.parameters()) end.values.emplace_back(p.value.begin(), p.value.end());
    trainer.for_each_state([&](state_slice const& s) { end.state[key(s)] = {s.bytes.begin(), s.bytes.end()}; });
    end.statistics = trainer.statistics();
    return end;
}
std::vector<ending> train_on(int ranks, training const& with, bool tcp = false) {
    return ranks_over(tcp, ranks, [&](auto& comm) { return train_part(comm, with, 0, steps, nullptr); }, patient());
}

/// One bucket's exchange by hand: contributions of all ranks become the mean; what each rank's peers received stands in `received`.
struct by_hand {
    std::function<numbers_of(std::size_t bucket, std::vector<numbers_of> const& wanted,
                             std::vector<numbers_of>& received)>
        mean;
    bool feedback = true;
};

/// A product that is rounded before it is added to anything, whatever the compiler's flags.
DDP_KERNEL double times(double a, double b) {
    return a * b;
}

/// The same training in one program. Returns the values, and each rank's residuals by bucket.
std::pair<std::vector<numbers_of>, std::vector<std::vector<numbers_of>>> simulate(exchange_plan<double> const& plan,
                                                                                  by_hand const& algorithm) {
    std::size_t const ranks = static_cast<std::size_t>(plan.ranks);
    task_data<double> const data(in, out, 64);
    tanh_mlp<double> model(in, hidden, out, 1);
    auto const parameters = model.parameters();
    std::vector<numbers_of> velocity;
    for (auto const& p : parameters) velocity.emplace_back(p.value.size());
    std::vector<std::vector<numbers_of>> left(ranks);
    for (auto& one : left)
        for (auto const& bucket : plan.buckets) one.emplace_back(bucket.count);
    for (std::size_t step = 0; step < steps; ++step) {
        std::vector<std::vector<numbers_of>> wanted(plan.buckets.size());
        for (std::size_t r = 0; r < ranks; ++r) {
            auto const [first, last] = share(rows, step, static_cast<int>(r), plan.ranks);
            for (auto const& p : parameters) std::fill(p.gradient.begin(), p.gradient.end(), 0.0);
            if (first != last) {
                (void)model.forward(data.batch(step + first, step + last));
                model.backward({.scale = static_cast<double>(last - first)}, [](std::size_t) {});
            }
            for (std::size_t b = 0; b < plan.buckets.size(); ++b) {
                numbers_of& mine = wanted[b].emplace_back(plan.buckets[b].count);
                for (exchange_piece const& piece : plan.buckets[b].pieces)
                    for (std::size_t k = 0; k < piece.count; ++k)
                        mine[piece.begin + k] =
                            times(parameters[piece.parameter].gradient[piece.offset + k], 1.0 / rows) +
                            left[r][b][piece.begin + k];
            }
        }
        for (std::size_t b = 0; b < plan.buckets.size(); ++b) {
            std::vector<numbers_of> received(ranks, numbers_of(plan.buckets[b].count));
            numbers_of const mean = algorithm.mean(b, wanted[b], received);
            for (std::size_t r = 0; algorithm.feedback && r < ranks; ++r)
                for (std::size_t k = 0; k < mean.size(); ++k) left[r][b][k] = wanted[b][r][k] - received[r][k];
            for (exchange_piece const& piece : plan.buckets[b].pieces)
                for (std::size_t k = 0; k < piece.count; ++k) {
                    double& v = velocity[piece.parameter][piece.offset + k];
                    v = step == 0 ? mean[piece.begin + k] : times(momentum, v) + mean[piece.begin + k];
                    parameters[piece.parameter].value[piece.offset + k] -= times(lr, v);
                }
        }
    }
    std::vector<numbers_of> values;
    for (auto const& p : parameters) values.emplace_back(p.value.begin(), p.value.end());
    return {values, left};
}

/// Slice by slice to its owner and back, through a rounding of the whole slice.
by_hand narrow_by_hand(exchange_plan<double> const& plan, std::function<numbers_of(numbers_of const&)> const& rounded,
                       bool feedback) {
    auto left = std::make_shared<std::vector<numbers_of>>();
    for (auto const& bucket : plan.buckets) left->emplace_back(bucket.count);
    return {[&plan, rounded, left, feedback](std::size_t b, auto const& wanted, auto& received) {
                numbers_of mean(plan.buckets[b].count);
                auto const& cuts = plan.buckets[b].cuts;
                for (std::size_t owner = 0; owner + 1 < cuts.size(); ++owner) {
                    std::vector<numbers_of> parts;
                    for (std::size_t r = 0; r < wanted.size(); ++r) {
                        auto const begin = wanted[r].begin();
                        parts.push_back(rounded({begin + static_cast<std::ptrdiff_t>(cuts[owner]),
                                                 begin + static_cast<std::ptrdiff_t>(cuts[owner + 1])}));
                        std::ranges::copy(parts[r], received[r].begin() + static_cast<std::ptrdiff_t>(cuts[owner]));
                    }
                    numbers_of sum = reference_sum(parts);
                    for (std::size_t k = 0; feedback && k < sum.size(); ++k) sum[k] += (*left)[b][cuts[owner] + k];
                    numbers_of const result = rounded(sum);
                    for (std::size_t k = 0; feedback && k < sum.size(); ++k)
                        (*left)[b][cuts[owner] + k] = sum[k] - result[k];
                    std::ranges::copy(result, mean.begin() + static_cast<std::ptrdiff_t>(cuts[owner]));
                }
                return mean;
            },
            feedback};
}
numbers_of to_bfloat16(numbers_of const& values) {
    numbers_of all;
    for (double const x : values) {  // 8 bits of precision: the nearest multiple of 2^(e - 7)
        int exponent = 0;
        std::frexp(static_cast<float>(x), &exponent);
        double const unit = std::ldexp(1.0, std::max(exponent - 8, -133));
        all.push_back(std::nearbyint(static_cast<double>(static_cast<float>(x)) / unit) * unit);
    }
    return all;
}
numbers_of to_half(numbers_of const& values) {
    numbers_of all;
    for (double const x : values) {
        int exponent = 0;
        std::frexp(static_cast<float>(x), &exponent);
        double const unit = std::ldexp(1.0, std::max(exponent - 11, -24));
        all.push_back(std::nearbyint(static_cast<double>(static_cast<float>(x)) / unit) * unit);
    }
    return all;
}
numbers_of to_eight_bits(numbers_of const& values) {
    numbers_of all;
    for (std::size_t begin = 0; begin < values.size(); begin += 256) {
        std::size_t const end = std::min(values.size(), begin + 256);
        double most = 0;
        for (std::size_t i = begin; i < end; ++i) most = std::max(most, std::abs(values[i]));
        float const scale = static_cast<float>(most) / 127.0f, inverse = scale > 0 ? 1 / scale : 0;
        for (std::size_t i = begin; i < end; ++i)
            all.push_back(static_cast<double>(std::nearbyint(static_cast<float>(values[i]) * inverse) * scale));
    }
    return all;
}
std::size_t elements(exchange_bucket const& bucket) {
    std::size_t all = 0;
    for (auto const& piece : bucket.pieces) all += piece.count;
    return all;
}
std::size_t k_of(exchange_bucket const& bucket, double ratio) {
    return std::max<std::size_t>(1,
                                 static_cast<std::size_t>(std::llround(ratio * static_cast<double>(elements(bucket)))));
}
by_hand top_k_by_hand(exchange_plan<double> const& plan, double ratio, bool feedback) {
    return {[&plan, ratio](std::size_t b, auto const& wanted, auto& received) {
                numbers_of mean(plan.buckets[b].count);
                for (std::size_t r = 0; r < wanted.size(); ++r) {
                    std::vector<std::size_t> order(mean.size());
                    std::iota(order.begin(), order.end(), std::size_t{0});
                    std::sort(order.begin(), order.end(), [&](std::size_t x, std::size_t y) {
                        double const a = std::abs(wanted[r][x]), c = std::abs(wanted[r][y]);
                        return a != c ? a > c : x < y;
                    });
                    for (std::size_t i = 0; i < k_of(plan.buckets[b], ratio); ++i) {
                        received[r][order[i]] = wanted[r][order[i]];
                        mean[order[i]] += wanted[r][order[i]];
                    }
                }
                return mean;
            },
            feedback};
}
by_hand random_k_by_hand(exchange_plan<double> const& plan, double ratio, std::uint64_t seed) {
    auto step = std::make_shared<std::vector<std::uint64_t>>(plan.buckets.size());
    return {[&plan, ratio, seed, step](std::size_t b, auto const& wanted, auto& received) {
                std::size_t const n = plan.buckets[b].count, k = k_of(plan.buckets[b], ratio);
                std::uint64_t const now = (*step)[b]++;
                for (std::size_t j = 0; j < k; ++j) {
                    std::size_t const begin = n * j / k, end = n * (j + 1) / k;
                    std::size_t const at =
                        begin + static_cast<std::size_t>(
                                    random_stream(seed, random_use::user, b).at((now << 32) + j).below(end - begin));
                    for (std::size_t r = 0; r < wanted.size(); ++r) received[r][at] = wanted[r][at];
                }
                return reference_sum(received);
            },
            true};
}

/// Vogels et al., algorithm 1, for whole rows of each parameter: dense matrices, one number after the other.
by_hand power_sgd_by_hand(exchange_plan<double> const& plan, power_sgd_exchange const& with) {
    auto q = std::make_shared<std::map<std::size_t, numbers_of>>();  // by place in the arena; columns x rank
    auto step = std::make_shared<std::vector<std::uint64_t>>(plan.buckets.size());
    return {[=, &plan](std::size_t b, std::vector<numbers_of> const& wanted, std::vector<numbers_of>& received) {
                numbers_of mean = reference_sum(wanted);
                received = wanted;
                std::size_t const rank = with.rank, ranks = wanted.size();
                std::uint64_t const now = (*step)[b]++;
                if (now < with.start_step) return mean;
                for (exchange_piece const& piece : plan.buckets[b].pieces) {
                    auto const& shape = plan.parameters[piece.parameter].shape;
                    if (shape.size() < 2) continue;
                    std::size_t const n =
                        std::accumulate(shape.begin() + 1, shape.end(), std::size_t{1}, std::multiplies<>());
                    if (n == 0) continue;
                    std::size_t const first = (piece.offset + n - 1) / n, last = (piece.offset + piece.count) / n;
                    if (first >= last) continue;
                    std::size_t const m = last - first, begin = piece.begin + first * n - piece.offset;
                    if (static_cast<double>((m + n) * rank) * with.min_compression_rate >= static_cast<double>(m * n))
                        continue;
                    numbers_of& right = (*q)[plan.buckets[b].begin + begin];
                    if (right.empty() || !with.warm_start) {
                        right.assign(n * rank, 0);
                        for (std::size_t k = 0; k < rank; ++k)
                            for (std::size_t j = 0; j < n; ++j)
                                right[j * rank + k] =
                                    random_stream(with.seed, random_use::initial_values, piece.parameter)
                                        .at((now << 40) + (first * rank + k) * n + j)
                                        .symmetric<double>();
                    }
                    numbers_of all(m * n), p(m * rank);
                    for (std::size_t i = 0; i < m * n; ++i)
                        for (std::size_t r = 0; r < ranks; ++r) all[i] += wanted[r][begin + i];
                    for (std::size_t i = 0; i < m; ++i)
                        for (std::size_t j = 0; j < n; ++j)
                            for (std::size_t k = 0; k < rank; ++k)
                                p[i * rank + k] += all[i * n + j] * right[j * rank + k];
                    for (std::size_t k = 0; k < rank; ++k) {  // modified Gram-Schmidt
                        for (std::size_t o = 0; o < k; ++o) {
                            double dot = 0;
                            for (std::size_t i = 0; i < m; ++i) dot += p[i * rank + k] * p[i * rank + o];
                            for (std::size_t i = 0; i < m; ++i) p[i * rank + k] -= dot * p[i * rank + o];
                        }
                        double norm = 0;
                        for (std::size_t i = 0; i < m; ++i) norm += p[i * rank + k] * p[i * rank + k];
                        for (std::size_t i = 0; i < m; ++i) p[i * rank + k] /= std::sqrt(norm);
                    }
                    std::fill(right.begin(), right.end(), 0.0);
                    for (std::size_t i = 0; i < m; ++i)
                        for (std::size_t j = 0; j < n; ++j)
                            for (std::size_t k = 0; k < rank; ++k)
                                right[j * rank + k] += all[i * n + j] * p[i * rank + k];
                    for (std::size_t i = 0; i < m; ++i)
                        for (std::size_t j = 0; j < n; ++j) {
                            double x = 0;
                            for (std::size_t k = 0; k < rank; ++k) x += p[i * rank + k] * right[j * rank + k];
                            mean[begin + i * n + j] = x;
                            for (std::size_t r = 0; r < ranks; ++r)
                                received[r][begin + i * n + j] = x / static_cast<double>(ranks);
                        }
                }
                return mean;
            },
            with.feedback};
}

struct named {
    std::string name;
    any_exchange exchange;
    std::function<by_hand(exchange_plan<double> const&)> simulation;
    double tolerance = 0;  // 0: the same bits
};
std::vector<named> all_exchanges() {
    auto const narrow = [](auto rounded, bool feedback) {
        return [rounded, feedback](auto const& plan) { return narrow_by_hand(plan, rounded, feedback); };
    };
    power_sgd_exchange const warm{.rank = 2, .min_compression_rate = 1.1, .seed = 5},
        cold{.rank = 1, .feedback = false, .warm_start = false, .start_step = 3};
    return {{"bfloat16", bfloat16_exchange{}, narrow(to_bfloat16, false)},
            {"bfloat16 with feedback", bfloat16_exchange{.feedback = true}, narrow(to_bfloat16, true)},
            {"half", half_exchange{}, narrow(to_half, false)},
            {"int8", int8_exchange{}, narrow(to_eight_bits, true)},
            {"int8 without feedback", int8_exchange{.feedback = false}, narrow(to_eight_bits, false)},
            {"top_k", top_k_exchange{.ratio = 0.07}, [](auto const& p) { return top_k_by_hand(p, 0.07, true); }},
            {"top_k without feedback", top_k_exchange{.ratio = 0.3, .feedback = false},
             [](auto const& p) { return top_k_by_hand(p, 0.3, false); }},
            {"random_k", random_k_exchange{.ratio = 0.21, .seed = 9},
             [](auto const& p) { return random_k_by_hand(p, 0.21, 9); }},
            {"power_sgd", warm, [warm](auto const& p) { return power_sgd_by_hand(p, warm); }, 1e-10},
            {"power_sgd, started late, drawn anew", cold, [cold](auto const& p) { return power_sgd_by_hand(p, cold); },
             1e-10}};
}
any_buckets const two_buckets = size_capped_buckets{.cap_bytes = 3000, .first_bytes = 700};

}  // namespace

TEST_CASE("what is sent less trains to what plain loops give, on any ranks, sharded and not", "[exchange]") {
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    for (named const& one : all_exchanges())
        for (bool const cut : {false, true}) {
            CAPTURE(one.name, ranks, cut, tcp);
            std::vector<ending> last;
            for (bool const sharded : {false, true}) {
                auto const got =
                    train_on(ranks, {one.exchange, cut ? two_buckets : any_buckets(single_bucket{}), sharded}, tcp);
                REQUIRE((got[0].plan.buckets.size() > 1) == cut);
                auto const [values, left] = simulate(got[0].plan, one.simulation(got[0].plan));
                for (std::size_t r = 0; r < got.size(); ++r) {
                    CAPTURE(sharded, r);
                    REQUIRE(got[r].wrong == "");
                    REQUIRE(got[r].digests == got[0].digests);
                    if (!last.empty()) REQUIRE(got[r].digests == last[r].digests);
                    for (std::size_t i = 0; i < values.size(); ++i)
                        for (std::size_t k = 0; k < values[i].size(); ++k) {
                            if (one.tolerance == 0)
                                REQUIRE(got[r].values[i][k] == values[i][k]);
                            else
                                REQUIRE(std::abs(got[r].values[i][k] - values[i][k]) <= one.tolerance);
                        }
                    // Residuals, where there are some.
                    for (std::size_t b = 0; b < left[r].size(); ++b)
                        for (exchange_piece const& piece : got[r].plan.buckets[b].pieces) {
                            auto const at = got[r].state.find(got[r].plan.parameters[piece.parameter].name +
                                                              "/residual/" + std::to_string(piece.offset));
                            if (at == got[r].state.end() || piece.count == 0) continue;
                            std::span<double const> const kept(reinterpret_cast<double const*>(at->second.data()),
                                                               piece.count);
                            for (std::size_t k = 0; k < piece.count; ++k)
                                REQUIRE(std::abs(kept[k] - left[r][b][piece.begin + k]) <= one.tolerance);
                        }
                }
                last = got;
            }
        }
}

TEST_CASE("bytes sent are those of the formulas, error and time are accounted for", "[exchange]") {
    std::size_t const ranks = static_cast<std::size_t>(GENERATE(2, 3, 4));
    for (named const& one : all_exchanges())
        for (bool const sharded : {false, true}) {
            auto const got = train_on(static_cast<int>(ranks), {one.exchange, single_bucket{}, sharded});
            exchange_bucket const& bucket = got[0].plan.buckets[0];
            std::size_t const n = bucket.count;
            for (std::size_t r = 0; r < ranks; ++r) {
                auto const slice = [&](std::size_t of) { return bucket.cuts[of + 1] - bucket.cuts[of]; };
                auto const both_ways = [&](auto bytes) {  // to each owner its slice, and ours to all
                    std::size_t sum = sharded ? 0 : (ranks - 1) * bytes(slice(r));
                    for (std::size_t other = 0; other < ranks; ++other) sum += other == r ? 0 : bytes(slice(other));
                    return sum;
                };
                auto const direct = [&](std::size_t count) {  // slices of whole lines of 8
                    std::size_t const lines = (count + 7) / 8, mine = lines / ranks + (r < lines % ranks ? 1 : 0);
                    std::size_t const end = (lines / ranks * r + std::min(r, lines % ranks) + mine) * 8;
                    std::size_t const own = std::min(end, count) - std::min(end - mine * 8, count);
                    return 8 * (count - own + (ranks - 1) * own);
                };
                std::size_t expected = 0;
                if (one.name.starts_with("bfloat16") || one.name == "half")
                    expected = both_ways([](std::size_t count) { return 2 * count; });
                else if (one.name.starts_with("int8"))
                    expected = both_ways([](std::size_t count) { return count + 4 * ((count + 255) / 256); });
                else if (one.name == "random_k")
                    expected = direct(k_of(bucket, 0.21));
                else {  // w1 is 31 x 9, w2 5 x 31
                    bool const warm = one.name == "power_sgd";
                    std::size_t const rank = warm ? 2 : 1;
                    bool const second = warm ? (5 + 31) * 2 * 1.1 < 5 * 31 : (5 + 31) * 2 < 5 * 31;
                    std::size_t const matrices = 31 * 9 + (second ? 5 * 31 : 0);
                    expected =
                        direct((31 + (second ? 5 : 0)) * rank + n - matrices) + direct((9 + (second ? 31 : 0)) * rank);
                }
                if (one.name.starts_with("top_k"))  // values and indices, to a multiple of 8
                    expected = (ranks - 1) * ((12 * k_of(bucket, one.name == "top_k" ? 0.07 : 0.3) + 7) / 8 * 8);
                CAPTURE(one.name, ranks, r, sharded);
                std::size_t const weights = (ranks - 1) * sizeof(step_ticket),
                                  values = sharded ? (ranks - 1) * slice(r) * sizeof(double) : 0;
                REQUIRE(got[r].bytes == expected + weights + values);
                exchange_statistics const& all = got[r].statistics;
                if (one.name.find("late") == std::string::npos) REQUIRE(all.sent_bytes == steps * expected);
                REQUIRE(all.dense_bytes == steps * (sharded ? 1 : 2) * n * sizeof(double) * (ranks - 1) / ranks);
                REQUIRE(all.ratio() == static_cast<double>(all.dense_bytes) / static_cast<double>(all.sent_bytes));
                REQUIRE((all.error >= 0 && all.error < 1 && all.time.count() > 0));
                bool const rounds =
                    one.name.find("late") == std::string::npos;  // that one has sent all in the first step
                REQUIRE((all.error > 0) == rounds);
                if (one.name.starts_with("bfloat16")) REQUIRE(all.error < 0x1p-8);
                if (one.name == "half") REQUIRE(all.error < 0x1p-11);
                if (one.name.starts_with("int8")) REQUIRE(all.error < 0.05);
            }
        }
}

TEST_CASE("clipping sees the mean as it was sent, with the same bits for both updates", "[exchange]") {
    for (named const& one : all_exchanges()) {
        CAPTURE(one.name);
        auto const plain = train_on(3, {one.exchange, two_buckets}),
                   first = train_on(3, {one.exchange, two_buckets, false, true}),
                   second = train_on(3, {one.exchange, two_buckets, true, true});
        REQUIRE((first[0].wrong == "" && second[0].wrong == ""));
        REQUIRE(first[0].digests == second[2].digests);
        REQUIRE(first[0].digests != plain[0].digests);
    }
}

TEST_CASE("a training that is continued with values and state has the bits of one that was not interrupted",
          "[exchange]") {
    for (named const& one : all_exchanges())
        for (bool const sharded : {false, true}) {
            CAPTURE(one.name, sharded);
            training const with{one.exchange, two_buckets, sharded};
            auto const whole = train_on(3, with);
            auto const first =
                run_ranks(3, [&](auto& comm) { return train_part(comm, with, 0, 5, nullptr); }, patient());
            auto const rest = run_ranks(
                3,
                [&](auto& comm) {
                    return train_part(comm, with, 5, steps, &first[static_cast<std::size_t>(comm.rank())]);
                },
                patient());
            for (std::size_t r = 0; r < 3; ++r) {
                REQUIRE(rest[r].wrong == "");
                REQUIRE(rest[r].digests.back() == whole[r].digests.back());
            }
            // Without what the exchange keeps it goes another way, where it keeps something.
            auto forgotten = first;
            bool keeps = false;
            for (ending& end : forgotten)
                for (auto& [key, bytes] : end.state)
                    if (key.find("momentum") == key.npos) {
                        keeps = true;
                        std::ranges::fill(bytes, std::byte{0});
                    }
            auto const without = run_ranks(
                3,
                [&](auto& comm) {
                    return train_part(comm, with, 5, steps, &forgotten[static_cast<std::size_t>(comm.rank())]);
                },
                patient());
            REQUIRE((without[0].digests.back() != whole[0].digests.back()) == keeps);
        }
}

TEST_CASE("a gradient that is not finite stays visible in its step, and does not outlive it", "[exchange]") {
    for (named const& one : all_exchanges())
        for (double const odd : {std::nan(""), static_cast<double>(INFINITY)}) {
            CAPTURE(one.name, odd);
            struct result {
                std::vector<bool> skipped;
                bool finite;
            };
            auto const got = run_ranks(
                2,
                [&](auto& comm) {
                    task_data<double> data(in, out, 64), other(in, out, 64);
                    tanh_mlp<double> model(in, hidden, out, 1);
                    data_parallel trainer{
                        model,        any_optimizer(sgd{.lr = lr}),
                        comm,         training_options{.update = update::replicated, .nonfinite = nonfinite::skip},
                        one.exchange, any_buckets(single_bucket{})};
                    result mine{{}, true};
                    for (std::size_t step = 0; step < 8; ++step) {
                        (void)model.forward(data.batch(step, step + 4));
                        double& input = const_cast<double&>(data.batch(step, step + 4).y[0]);
                        double const before = input;
                        if (step == 4 && comm.rank() == 1) input = odd;
                        mine.skipped.push_back(trainer.step(data.batch(step, step + 4)).skipped);
                        input = before;
                    }
                    for (auto const& p : trainer.parameters())
                        for (double const x : p.value) mine.finite = mine.finite && std::isfinite(x);
                    trainer.for_each_state([&](state_slice const& s) {
                        if (s.name != "residual") return;
                        for (double const x : s.as<double>()) mine.finite = mine.finite && std::isfinite(x);
                    });
                    return mine;
                },
                patient());
            for (result const& r : got) {
                REQUIRE(r.skipped == std::vector<bool>{false, false, false, false, true, false, false, false});
                REQUIRE(r.finite);
            }
        }
}

TEST_CASE("settings that mean nothing are refused in words, on every rank, before anything is sent", "[exchange]") {
    auto const refused = [](any_exchange const& exchange) {
        auto const errors = errors_of_ranks(2, [&](auto& comm) {
            scripted_model<> net({{"matrix", {8, 8}}, {"vector", {5}}});
            data_parallel trainer{net,      any_optimizer(sgd{}),        comm, training_options{},
                                  exchange, any_buckets(single_bucket{})};
        });
        REQUIRE(errors[0] == errors[1]);
        return errors[0];
    };
    using Catch::Matchers::Contains;
    REQUIRE_THAT(refused(top_k_exchange{.ratio = 0}),
                 Contains("top_k: ratio is 0.0") && Contains("above 0 and at most 1"));
    REQUIRE_THAT(refused(top_k_exchange{.ratio = 1.5}), Contains("top_k: ratio is 1.5"));
    REQUIRE_THAT(refused(random_k_exchange{.ratio = std::nan("")}), Contains("random_k: ratio is nan"));
    REQUIRE_THAT(refused(power_sgd_exchange{.rank = 0}), Contains("power_sgd: rank is 0"));
    REQUIRE_THAT(refused(power_sgd_exchange{.rank = 9}),
                 Contains("with rank 9") && Contains("no parameter of this model"));
    REQUIRE_THAT(refused(power_sgd_exchange{.min_compression_rate = 0.5}), Contains("min_compression_rate is 0.5"));
    // Another setting on one rank.
    auto const errors = errors_of_ranks(2, [&](auto& comm) {
        scripted_model<> net({{"matrix", {8, 8}}, {"vector", {5}}});
        data_parallel trainer{net,
                              any_optimizer(sgd{}),
                              comm,
                              training_options{},
                              any_exchange(top_k_exchange{.ratio = comm.rank() == 0 ? 0.5 : 0.25}),
                              any_buckets(single_bucket{})};
    });
    for (std::string const& text : errors) REQUIRE_THAT(text, Contains("E102"));
}

TEST_CASE("only vectors, nothing, and zeros: power_sgd leaves as it is what it cannot compress", "[exchange]") {
    auto const values = run_ranks(
        2,
        [](auto& comm) {
            scripted_model<> net(
                {{"matrix", {40, 30}}, {"none", {0}}, {"vector", {5}}, {"empty rows", {0, 7}}, {"one", {}}});
            data_parallel trainer{net,
                                  any_optimizer(sgd{.lr = 1}),
                                  comm,
                                  training_options{.update = update::replicated},
                                  any_exchange(power_sgd_exchange{.rank = 3}),
                                  any_buckets(per_parameter_buckets{})};
            trainer.step(numbers{{0}});  // a gradient of zeros: nothing to make orthonormal
            trainer.step(numbers{{1, 3}});
            trainer.step(numbers{{1}});
            return std::vector<double>{net.value(0)[77], net.value(2)[4], net.value(4)[0]};
        },
        patient());
    REQUIRE(values[0] == values[1]);
    REQUIRE(std::abs(values[0][0] + (2 + 1) * 1) < 1e-12);  // every row is the same: of rank one
    REQUIRE((values[0][1] == -(2 + 1) * 3 && values[0][2] == -(2 + 1) * 5));
}

TEST_CASE("check_exchange finds nothing in the library's own", "[exchange]") {
    REQUIRE(testing::check_exchange(int8_exchange{}).empty());
    REQUIRE(testing::check_exchange(top_k_exchange{.ratio = 0.1}).empty());
    REQUIRE(testing::check_exchange(random_k_exchange{.ratio = 0.1}).empty());
    REQUIRE(testing::check_exchange(power_sgd_exchange{.rank = 1}).empty());
}

namespace {
/// What goes wrong with an exchange.
enum class flaw : std::uint8_t { own_bits, forgets_sharding, counts_nothing };
struct flawed {
    static constexpr char const* name = "flawed";
    flaw kind;

    struct state {
        std::uint64_t steps = 0;
        bool sharded = false;
        void for_each_state(state_visitor visit) {
            visit({.of = "exchange", .name = "steps", .type = element_type::u64, .bytes = bytes_of(steps)});
        }
    };
    [[nodiscard]] std::uint64_t hash() const { return 1; }
    [[nodiscard]] state prepare(exchange_plan<float> const& plan) const { return {0, plan.sharded}; }
    [[nodiscard]] bool everywhere(exchange_plan<float> const&, std::size_t) const { return true; }
    template <Transport T>
    static task<> exchange(flawed self, lane<T> over, state& kept, bucket_exchange<float> what) {
        co_await *what.go;
        co_await naive_allreduce::sum({}, over, what.data);
        if (self.kind == flaw::counts_nothing || *what.factor != 0) ++kept.steps;
        if (*what.factor == 0) co_return;
        for (float& x : what.data) x *= *what.factor;
        if (self.kind == flaw::own_bits && over.rank() == 1 && !what.data.empty()) what.data[0] += 1;
        if (self.kind == flaw::forgets_sharding && kept.sharded && !what.data.empty()) what.data[0] += 1;
    }
    template <Transport T>
    static task<> gather(flawed, lane<T>, state&, bucket_exchange<float>) {
        co_return;
    }
};
}  // namespace

TEST_CASE("check_exchange says what is wrong", "[exchange]") {
    auto const complaint = [](flaw kind) {
        auto const all = testing::check_exchange(flawed{kind});
        std::string text;
        for (std::string const& one : all) text += one + "; ";
        return text;
    };
    using Catch::Matchers::Contains;
    REQUIRE_THAT(complaint(flaw::own_bits), Contains("with 2 ranks"));
    REQUIRE_THAT(complaint(flaw::forgets_sharding), Contains("sharded and replicated updates give different bits"));
    REQUIRE_THAT(complaint(flaw::counts_nothing), Contains("in which no rank has samples changes the state"));
}
