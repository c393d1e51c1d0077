// Exchanges that send less, against simulations of the same algorithms in plain loops, one rank after the other.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "exchange/plain_loops.hpp"
#include "support/catch.hpp"
#include "support/counting_transport.hpp"
#include "support/sanitizers.hpp"
#include "train/scripted_model.hpp"

using namespace ddp;
using namespace ddp::test;

TEST_CASE("what is sent less trains to what plain loops give, on any ranks, sharded and not", "[exchange]") {
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    if (ranks != 3 && sanitizers_leave_out("plain loops", ranks)) return;
    for (named const& one : all_exchanges())
        for (bool const cut : {false, true}) {
            CAPTURE(one.name, ranks, cut, tcp);
            std::vector<ending> last;
            for (bool const sharded : {false, true}) {
                auto const got =
                    train_on(ranks, {one.exchange, cut ? two_buckets : any_buckets(single_bucket{}), sharded}, tcp);
                REQUIRE((got[0].plan.buckets.size() > 1) == cut);
                std::vector<ending> again;  // a second run, to the bits of what is kept too
                if (cut && (ranks == 2 || ranks == 3 || (ranks == 4 && !tcp)))
                    again = train_on(ranks, {one.exchange, two_buckets, sharded}, tcp);
                training const with{one.exchange};
                auto const [values, left, error] = simulate(got[0].plan, one.simulation(got[0].plan), with);
                for (std::size_t r = 0; r < got.size(); ++r) {
                    CAPTURE(sharded, r);
                    REQUIRE(got[r].wrong == "");
                    REQUIRE(got[r].digests == got[0].digests);
                    if (!last.empty()) REQUIRE(got[r].digests == last[r].digests);
                    if (!again.empty()) REQUIRE((again[r].digests == got[r].digests && again[r].state == got[r].state));
                    // Eleven steps: the first was looked at.
                    REQUIRE(std::abs(got[r].statistics.error - error[r]) <= 1e-10);
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

namespace {

using numbers_in_float = std::vector<float>;
struct kind {
    std::string name;
    any_exchange_of<float> exchange;
    std::function<by_hand_of<float>(exchange_plan<float> const&)> simulation = nullptr;
};
/// Those of all_exchanges() whose sums have no choice of rounding, with its names and settings.
std::vector<kind> float_exchanges() {
    return {
        {"bfloat16", bfloat16_exchange{}, [](auto const& p) { return narrow_by_hand(p, to_bfloat16<float>, false); }},
        {"bfloat16 with feedback", bfloat16_exchange{.feedback = true},
         [](auto const& p) { return narrow_by_hand(p, to_bfloat16<float>, true); }},
        {"half with feedback", half_exchange{.feedback = true},
         [](auto const& p) { return narrow_by_hand(p, to_half<float>, true); }},
        {"int8", int8_exchange{}, [](auto const& p) { return narrow_by_hand(p, to_eight_bits<float>, true); }},
        {"top_k", top_k_exchange{.ratio = 0.07}, [](auto const& p) { return top_k_by_hand(p, 0.07, true); }},
        {"random_k", random_k_exchange{.ratio = 0.21, .seed = 9},
         [](auto const& p) { return random_k_by_hand(p, 0.21, 9, true); }}};
}

}  // namespace

TEST_CASE("what is sent less in float has the bits of plain loops", "[exchange]") {
    struct result {
        std::vector<numbers_in_float> values;
        std::map<std::string, numbers_in_float> residuals;
        exchange_plan<float> plan;
    };
    constexpr std::size_t ranks = 3;
    sgd const optimizer{.lr = lr, .momentum = momentum};
    task_data<float> const data(inputs, outputs, 64);
    for (kind const& one : float_exchanges())
        for (bool const sharded : {false, true}) {
            CAPTURE(one.name, sharded);
            auto const got = run_ranks(
                ranks,
                [&](auto& comm) {
                    tanh_mlp<float> model(inputs, hidden, outputs, 1);
                    result mine;
                    auto exchange = one.exchange;
                    exchange.told = &mine.plan;
                    data_parallel trainer{
                        model, any_optimizer(optimizer), comm, options_of(sharded, false), exchange, two_buckets};
                    for (std::size_t step = 0; step < steps; ++step) {
                        auto const [first, last] = share(rows, step, comm.rank(), comm.size());
                        trainer.step(data.batch(step + first, step + last));
                    }
                    for (auto const& p : trainer.parameters()) mine.values.emplace_back(p.value.begin(), p.value.end());
                    trainer.for_each_state([&](state_slice const& s) {
                        if (s.name == "residual")
                            mine.residuals[key_of(s)] = {s.template as<float>().begin(), s.template as<float>().end()};
                    });
                    return mine;
                },
                patient());
            exchange_plan<float> const& plan = got[0].plan;
            REQUIRE(plan.buckets.size() > 1);
            by_hand_of<float> const algorithm = one.simulation(plan);
            tanh_mlp<float> model(inputs, hidden, outputs, 1);
            auto const parameters = model.parameters();
            std::vector<numbers_in_float> velocity, mean_of;
            for (auto const& p : parameters)
                velocity.emplace_back(p.value.size()), mean_of.emplace_back(p.value.size());
            std::vector<std::vector<numbers_in_float>> left(plan.buckets.size());  // by bucket, then rank
            for (std::size_t b = 0; b < left.size(); ++b)
                left[b].assign(ranks, numbers_in_float(plan.buckets[b].count));
            for (std::size_t step = 0; step < steps; ++step) {
                auto wanted = left;
                for (std::size_t r = 0; r < ranks; ++r) {
                    auto const [first, last] = share(rows, step, static_cast<int>(r), ranks);
                    for (auto const& p : parameters) std::ranges::fill(p.gradient, 0.0f);
                    if (first != last) {
                        (void)model.forward(data.batch(step + first, step + last));
                        model.backward({.scale = static_cast<float>(last - first)}, [](std::size_t) {});
                    }
                    for (std::size_t b = 0; b < left.size(); ++b)
                        for (exchange_piece const& piece : plan.buckets[b].pieces)
                            for (std::size_t k = 0; k < piece.count; ++k)
                                wanted[b][r][piece.begin + k] +=
                                    times(parameters[piece.parameter].gradient[piece.offset + k],
                                          static_cast<float>(1.0 / static_cast<double>(rows)));
                }
                for (std::size_t b = 0; b < left.size(); ++b) {
                    std::vector<numbers_in_float> received(ranks, numbers_in_float(plan.buckets[b].count));
                    numbers_in_float const mean = algorithm.mean(b, wanted[b], received);
                    for (std::size_t r = 0; algorithm.feedback && r < ranks; ++r)
                        for (std::size_t k = 0; k < mean.size(); ++k) left[b][r][k] = wanted[b][r][k] - received[r][k];
                    for (exchange_piece const& piece : plan.buckets[b].pieces)
                        std::copy_n(mean.begin() + static_cast<std::ptrdiff_t>(piece.begin), piece.count,
                                    mean_of[piece.parameter].begin() + static_cast<std::ptrdiff_t>(piece.offset));
                }
                for (std::size_t i = 0; i < parameters.size(); ++i) {
                    std::span<float> slots[] = {velocity[i]};
                    optimizer.step({.step = step + 1, .learning_rate = lr}, std::span<float const>(mean_of[i]),
                                   parameters[i].value, slot_spans<float>(slots));
                }
            }
            for (std::size_t r = 0; r < ranks; ++r) {
                CAPTURE(r);
                for (std::size_t i = 0; i < parameters.size(); ++i)
                    REQUIRE(std::ranges::equal(got[r].values[i], parameters[i].value));
                REQUIRE(got[r].residuals.empty() != algorithm.feedback);
                for (std::size_t b = 0; algorithm.feedback && b < left.size(); ++b)
                    for (exchange_piece const& piece : plan.buckets[b].pieces)
                        if (piece.count != 0)
                            REQUIRE(std::ranges::equal(got[r].residuals.at(plan.parameters[piece.parameter].name +
                                                                           "/residual/" + std::to_string(piece.offset)),
                                                       std::span(left[b][r]).subspan(piece.begin, piece.count)));
            }
        }
}

namespace {

/// What direct_allreduce of n elements sends on rank r. Slices are whole lines of 64 bytes; of empty ones nothing is sent.
template <Element E>
traffic direct_sum_of(std::size_t n, std::size_t r, std::size_t ranks) {
    constexpr std::size_t line = 64 / sizeof(E);
    auto const begin = [&](std::size_t of) {
        std::size_t const lines = (n + line - 1) / line;
        return std::min(n, line * (lines / ranks * of + std::min(of, lines % ranks)));
    };
    traffic all;
    for (std::size_t other = 0; other < ranks; ++other) {
        if (other == r) continue;
        for (std::size_t const count : {begin(other + 1) - begin(other), begin(r + 1) - begin(r)}) {
            all.messages += count == 0 ? 0 : 1;
            all.bytes += count * sizeof(E);
        }
    }
    return all;
}
/// What the docstrings say that rank r sends for a bucket, in bytes and messages.
template <Element E>
traffic formula(std::string const& name, exchange_plan<E> const& plan, std::size_t b, std::size_t r) {
    exchange_bucket const& bucket = plan.buckets[b];
    std::size_t const ranks = static_cast<std::size_t>(plan.ranks), others = ranks - 1;
    auto const slice = [&](std::size_t of) { return bucket.cuts[of + 1] - bucket.cuts[of]; };
    auto const both_ways = [&](auto bytes) {  // to each owner its slice, and ours to all
        std::size_t sum = plan.sharded ? 0 : others * bytes(slice(r));
        for (std::size_t other = 0; other < ranks; ++other) sum += other == r ? 0 : bytes(slice(other));
        return traffic{(plan.sharded ? 1 : 2) * others, sum};
    };
    if (name.starts_with("bfloat16") || name.starts_with("half"))
        return both_ways([](std::size_t count) { return 2 * count; });
    if (name.starts_with("int8")) return both_ways([](std::size_t count) { return count + 4 * ((count + 255) / 256); });
    if (name.starts_with("top_k"))  // values and indices, to a multiple of 8
        return {others, others * (((4 + sizeof(E)) * k_of(bucket, name == "top_k" ? 0.07 : 0.3) + 7) / 8 * 8)};
    if (name.starts_with("random_k")) return direct_sum_of<E>(k_of(bucket, name == "random_k" ? 0.21 : 0.4), r, ranks);
    bool const warm = name == "power_sgd";
    std::size_t const rank = warm ? 2 : 1;
    std::size_t left = bucket.count, p = 0, q = 0;
    for (exchange_piece const& piece : bucket.pieces) {
        auto const& shape = plan.parameters[piece.parameter].shape;
        if (shape.size() < 2 || shape[1] == 0) continue;
        std::size_t const columns = shape[1], first = (piece.offset + columns - 1) / columns,
                          last = (piece.offset + piece.count) / columns, m = last > first ? last - first : 0;
        if (static_cast<double>((m + columns) * rank) * (warm ? 1.1 : 2.0) >= static_cast<double>(m * columns))
            continue;
        left -= m * columns;
        p += m * rank;
        q += columns * rank;
    }
    // All vectors, and what else is not compressed, in one message with P. No matrix: one sum of everything.
    traffic const first = direct_sum_of<E>(left + p, r, ranks), second = direct_sum_of<E>(q, r, ranks);
    return {first.messages + second.messages, first.bytes + second.bytes};
}
/// With a sharded update: each rank's new values, and squares of its blocks of 4,096 where the gradient is clipped by its norm.
template <Element E>
traffic after_the_mean(exchange_plan<E> const& plan, std::size_t b, std::size_t r, bool clipped) {
    exchange_bucket const& bucket = plan.buckets[b];
    std::size_t const others = static_cast<std::size_t>(plan.ranks) - 1, begin = bucket.cuts[r],
                      end = bucket.cuts[r + 1];
    if (!plan.sharded || begin == end) return {};
    std::size_t blocks = 0;
    for (exchange_piece const& piece : bucket.pieces) {
        std::size_t const from = std::max(begin, piece.begin), to = std::min(end, piece.begin + piece.count);
        if (clipped && from < to) blocks += (to - from + 4095) / 4096;
    }
    return {(blocks == 0 ? 1 : 2) * others, others * ((end - begin) * sizeof(E) + blocks * sizeof(double))};
}

/// Trains a model that make() makes, on batch(step, rank), and compares what the last steps gave to the transport.
template <Element E>
exchange_plan<E> compare_traffic(std::string const& name, any_exchange_of<E> exchange, std::size_t ranks,
                                 any_buckets const& buckets, training_options const& options, std::size_t rounds,
                                 auto const& make, auto const& batch) {
    struct counted {
        exchange_plan<E> plan;
        exchange_statistics statistics;
        std::size_t all = 0;  // bytes, after the trainer was made
        traffic last;         // in the last step
        std::chrono::nanoseconds in_first_step{}, elapsed{};
    };
    auto const world = inproc_world::create(static_cast<int>(ranks));
    auto const got = on_threads(static_cast<int>(ranks), [&](int rank) {
        auto counting = std::make_unique<counting_transport<inproc_transport>>(world->connect(rank));
        auto& count = *counting;
        communicator<> comm = any_communicator(std::move(counting), patient());
        auto const model = make();
        counted mine;
        any_exchange_of<E> told = exchange;
        told.told = &mine.plan;
        grouped const optimizer{sgd{.lr = lr, .momentum = momentum}, {}};
        data_parallel trainer{*model, optimizer, comm, options, told, buckets};
        barrier(comm);
        count.take_sent();
        auto const since = std::chrono::steady_clock::now();
        for (std::size_t step = 0; step < rounds; ++step) {
            trainer.step(batch(step, rank));
            mine.last = count.take_sent();
            mine.all += mine.last.bytes;
            if (step == 0) mine.in_first_step = trainer.statistics().time;
        }
        mine.elapsed = std::chrono::steady_clock::now() - since;
        mine.statistics = trainer.statistics();
        return mine;
    });
    exchange_plan<E> const& plan = got[0].plan;
    for (std::size_t r = 0; r < ranks; ++r) {
        CAPTURE(name, ranks, r, plan.sharded, plan.buckets.size());
        traffic expected, after;
        std::size_t dense = 0;
        for (std::size_t b = 0; b < plan.buckets.size(); ++b) {
            for (auto const& [sum, of] : {std::pair(&expected, formula(name, plan, b, r)),
                                          std::pair(&after, after_the_mean(plan, b, r, options.clip.has_value()))}) {
                sum->messages += of.messages;
                sum->bytes += of.bytes;
            }
            dense += (plan.sharded ? 1 : 2) * plan.buckets[b].count * sizeof(E) * (ranks - 1) / ranks;
        }
        std::size_t const tickets = (ranks - 1) * sizeof(step_ticket);
        REQUIRE(got[r].last.bytes == expected.bytes + tickets + after.bytes);
        // Tickets are gathered in as many rounds as P has bits.
        REQUIRE(got[r].last.messages ==
                expected.messages + after.messages + static_cast<std::size_t>(std::bit_width(ranks - 1)));
        exchange_statistics const& all = got[r].statistics;
        if (name.find("late") == std::string::npos) {
            REQUIRE(all.sent_bytes == rounds * expected.bytes);
            REQUIRE(got[r].all == rounds * (expected.bytes + tickets + after.bytes));
        }
        REQUIRE(all.dense_bytes == rounds * dense);
        REQUIRE(
            all.ratio() ==
            (all.sent_bytes == 0 ? 1.0 : static_cast<double>(all.dense_bytes) / static_cast<double>(all.sent_bytes)));
        REQUIRE((got[r].in_first_step.count() > 0 && got[r].in_first_step < all.time && all.time < got[r].elapsed));
    }
    return plan;
}

}  // namespace

namespace ddp::test {
/// Looks at the last four bytes of each message of five values, five indices, and four bytes.
struct watching_transport : counting_transport<inproc_transport> {
    using counting_transport::counting_transport;
    static constexpr std::size_t length = 5 * (sizeof(double) + sizeof(std::uint32_t)) + 4;
    std::size_t seen = 0, not_zero = 0;
    void post_send(int peer, tag what, const_bytes out, completion& done) {
        if (out.size() == length) {
            ++seen;
            for (std::byte const b : out.last(4)) not_zero += b != std::byte{0};
        }
        counting_transport::post_send(peer, what, out, done);
    }
};
}  // namespace ddp::test

TEST_CASE("top_k rounds its messages up by zeros, whatever its memory held before", "[exchange]") {
    auto const world = inproc_world::create(2);
    auto const got = on_threads(2, [&](int rank) {
        auto own = std::make_unique<watching_transport>(world->connect(rank));
        watching_transport const& watched = *own;
        communicator<watching_transport> comm(std::move(own), patient());
        scripted_model<> model({{"w", {50}}}, 1.0);
        data_parallel trainer{model, sgd{.lr = 0.1}, comm, top_k_exchange{.ratio = 0.1}};
        for (int step = 0; step < 3; ++step) {
            comm.run([]() -> task<> {
                scratch used(2 * watching_transport::length);
                std::ranges::fill(used.bytes(), std::byte{0xff});
                co_return;
            });
            trainer.step(numbers{{1.0 + rank}});
        }
        return std::pair(watched.seen, watched.not_zero);
    });
    for (auto const& [seen, not_zero] : got) {
        CHECK(seen == 3);
        CHECK(not_zero == 0);
    }
}

TEST_CASE("messages and bytes that the transport is given are those of the formulas", "[exchange]") {
    std::size_t const ranks = static_cast<std::size_t>(GENERATE(1, 2, 3, 4, 7));
    auto const part = [&](std::size_t step, int rank, auto const& data) {
        auto const [first, last] = share(rows, step, rank, static_cast<int>(ranks));
        return data.batch(step + first, step + last);
    };
    any_buckets const whole = single_bucket{};
    for (named const& one : all_exchanges())
        for (bool const sharded : {false, true}) {
            for (bool const cut : {false, true})
                compare_traffic(
                    one.name, one.exchange, ranks, cut ? two_buckets : whole, options_of(sharded, false), steps,
                    [] { return std::make_unique<told_mlp>(); },
                    [&](std::size_t step, int rank) { return part(step, rank, all_data()); });
            if (ranks != 4) continue;
            auto const plan = compare_traffic(
                one.name, one.exchange, ranks, whole, options_of(sharded, true), 4,
                [] {
                    using parts = std::vector<scripted_model<>::part>;
                    return std::make_unique<scripted_model<>>(parts{{"matrix", {100, 120}}, {"vector", {5001}}});
                },
                [](std::size_t step, int rank) { return numbers{{1.0 + static_cast<double>(step) - 2 * rank}}; });
            REQUIRE(plan.buckets[0].cuts == std::vector<std::size_t>{0, 4096, 8192, 12000, 17008});
        }
    if (ranks != 3) return;
    auto kinds = float_exchanges();
    kinds.push_back({"power_sgd", power_sgd_exchange{.rank = 2, .min_compression_rate = 1.1, .seed = 5}});
    task_data<float> const data(inputs, outputs, 64);
    for (kind const& one : kinds)
        for (bool const sharded : {false, true})
            compare_traffic(
                one.name, one.exchange, ranks, two_buckets, options_of(sharded, false), 4,
                [] { return std::make_unique<tanh_mlp<float>>(inputs, hidden, outputs, 1); },
                [&](std::size_t step, int rank) { return part(step, rank, data); });
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
    struct result {
        std::vector<bool> skipped;
        bool finite = true, residuals_finite = true;
        std::string text;
    };
    int const ranks = GENERATE(1, 2, 3, 7);
    int const culprit = ranks - 1;
    for (named const& one : all_exchanges())
        for (bool const sharded : {false, true})
            for (nonfinite const how : {nonfinite::skip, nonfinite::stop, nonfinite::warn})
                for (double const odd : {std::nan(""), static_cast<double>(INFINITY)}) {
                    if (how != nonfinite::skip && std::isinf(odd)) continue;
                    if (how == nonfinite::warn && ranks != 3) continue;
                    CAPTURE(one.name, ranks, sharded, static_cast<int>(how), odd);
                    auto const got = run_ranks(
                        ranks,
                        [&](auto& comm) {
                            task_data<double> data(inputs, outputs, 64);
                            told_mlp model;
                            training_options options = options_of(sharded, false);
                            options.nonfinite = how;
                            trainer_type trainer(model, grouped{sgd{.lr = lr}, {}}, comm, options, one.exchange,
                                                 sharded ? two_buckets : any_buckets(single_bucket{}));
                            result mine;
                            mine.text = thrown_by([&] {
                                for (std::size_t step = 0; step < 8; ++step) {
                                    double& answer = const_cast<double&>(data.batch(step, step + 4).y[0]);
                                    double const before = answer;
                                    if (step == 4 && comm.rank() == culprit) answer = odd;
                                    mine.skipped.push_back(trainer.step(data.batch(step, step + 4)).skipped);
                                    answer = before;
                                }
                            });
                            for (auto const& p : trainer.parameters())
                                for (double const x : p.value) mine.finite = mine.finite && std::isfinite(x);
                            trainer.for_each_state([&](state_slice const& s) {
                                if (!s.name.starts_with("residual")) return;
                                for (double const x : s.as<double>())
                                    mine.residuals_finite = mine.residuals_finite && std::isfinite(x);
                            });
                            return mine;
                        },
                        patient());
                    for (result const& r : got) {
                        if (how == nonfinite::stop) {
                            REQUIRE(r.text == got[0].text);
                            REQUIRE_THAT(r.text, Catch::Contains("DDP-E105") &&
                                                     Catch::Contains("rank " + std::to_string(culprit)));
                            REQUIRE(r.skipped.size() == 4);
                            REQUIRE((r.finite && r.residuals_finite));
                        } else {
                            REQUIRE(r.text == "");
                            bool const skips = how == nonfinite::skip;
                            REQUIRE(r.skipped ==
                                    std::vector<bool>{false, false, false, false, skips, false, false, false});
                            REQUIRE(r.finite == skips);  // warned of, and stepped all the same: it shows in the values
                            REQUIRE(r.residuals_finite);
                        }
                    }
                }
}

TEST_CASE("one NaN, unchecked, is in its step's mean, and neither in the next one nor in what is kept", "[exchange]") {
    constexpr std::size_t odd_step = 4, last = 7;
    struct result {
        std::vector<bool> finite = std::vector<bool>(last, true);  // what this rank sees of each step's mean
        std::string odd;                                           // what is kept and not finite
    };
    struct watching {
        result* all;
        void on(mean_gradient<double> const& mean) const {
            for (double const x : mean.gradient)
                if (!std::isfinite(x)) all->finite[mean.step - 1] = false;
        }
    };
    int const ranks = GENERATE(1, 2, 3);
    for (named const& one : all_exchanges())
        for (bool const sharded : {false, true}) {
            CAPTURE(one.name, ranks, sharded);
            auto const got = run_ranks(
                ranks,
                [&](auto& comm) {
                    scripted_model<> net({{"matrix", {40, 30}}, {"vector", {300}}});  // gradients without values
                    result mine;
                    data_parallel trainer{
                        net,          any_optimizer(sgd{.lr = 1}),  comm,           options_of(sharded, false),
                        one.exchange, any_buckets(single_bucket{}), watching{&mine}};
                    std::size_t step = 0;
                    auto const strikes = [&] { return step == odd_step && comm.rank() == comm.size() - 1; };
                    net.leaves_out = [&](std::size_t i) { return strikes() && i == 0; };
                    net.at_end = [&](auto const& ready) {
                        if (!strikes()) return;
                        net.parameters()[0].gradient[77] = std::nan("");
                        ready(0);
                    };
                    for (; step < last; ++step) {
                        trainer.step(numbers{{1.0 + 0.25 * comm.rank()}});
                        trainer.for_each_state([&](state_slice const& s) {
                            // A Q is drawn anew in the next step.
                            if (s.type != element_type_of<double>() ||
                                (step == odd_step && s.name.starts_with("power")))
                                return;
                            for (double const x : s.template as<double>())
                                if (!std::isfinite(x)) mine.odd = key_of(s) + " after step " + std::to_string(step);
                        });
                    }
                    return mine;
                },
                patient());
            std::vector<bool> finite(last, true), expected(last, true);
            expected[odd_step] = false;
            for (result const& r : got) {
                REQUIRE(r.odd == "");
                for (std::size_t step = 0; step < last; ++step) finite[step] = finite[step] && r.finite[step];
            }
            REQUIRE(finite == expected);
        }
}

TEST_CASE("what half cannot hold makes the mean infinite, and the error says where that may come from", "[exchange]") {
    auto const texts = run_ranks(
        3,
        [](auto& comm) {
            scripted_model<> net({{"weights", {40}}, {"more", {5}}});
            data_parallel trainer{net,
                                  any_optimizer(sgd{.lr = 1e-9}),
                                  comm,
                                  training_options{.nonfinite = nonfinite::stop},
                                  any_exchange(half_exchange{}),
                                  any_buckets(single_bucket{})};
            trainer.step(numbers{{30000}});  // a mean of 60000 at most
            return thrown_by([&] { trainer.step(numbers{{comm.rank() == 1 ? 3e5 : 1}}); });
        },
        patient());
    for (std::string const& text : texts)
        REQUIRE_THAT(text, Catch::Contains("DDP-E105") && Catch::Contains("each rank's own gradient is finite") &&
                               Catch::Contains("half_exchange: numbers from 65520 on become infinite"));
}

namespace {
/// One bucket in bfloat16, with steps so small that values stay as they are.
auto rounding(scripted_model<>& net, auto& comm) {
    return data_parallel{net,
                         any_optimizer(sgd{.lr = 1e-9}),
                         comm,
                         training_options{},
                         any_exchange(bfloat16_exchange{}),
                         any_buckets(single_bucket{})};
}
}  // namespace

TEST_CASE("the error is that of one step in sixteen", "[exchange]") {
    auto const seen = run_ranks(
        2,
        [](auto& comm) {
            scripted_model<> net({{"weights", {40}}});
            auto trainer = rounding(net, comm);
            std::vector<double> errors;
            for (int step = 1; step <= 34; ++step) {  // bfloat16 holds 1, but not 1 + 2^-9
                trainer.step(numbers{{step % 16 == 1 && step != 17 ? 1.0 : 1 + 1.0 / 512}});
                errors.push_back(trainer.statistics().error);
            }
            return errors;
        },
        patient());
    double const missed = (1.0 / 512) / (1 + 1.0 / 512);
    for (std::vector<double> const& errors : seen)
        for (std::size_t step = 1; step <= errors.size(); ++step) {
            CAPTURE(step);
            REQUIRE(std::abs(errors[step - 1] - (step < 17 || step > 32 ? 0 : missed)) < 1e-12);
        }
}

TEST_CASE("the error is relative to the gradient with what was kept", "[exchange]") {
    constexpr std::size_t looked_at = 17;  // the second time
    for (named const& one : all_exchanges()) {
        training const with{one.exchange, two_buckets};
        auto const got =
            run_ranks(3, [&](auto& comm) { return train_part(comm, with, 0, looked_at, nullptr); }, patient());
        auto const expected = simulate(got[0].plan, one.simulation(got[0].plan), with, looked_at).error;
        for (std::size_t r = 0; r < got.size(); ++r) {
            CAPTURE(one.name, r);
            REQUIRE(expected[r] > 1e-5);
            REQUIRE(std::abs(got[r].statistics.error - expected[r]) <= 1e-10);
        }
    }
}

TEST_CASE("the error of a step that is not finite is that of the one before", "[exchange]") {
    run_ranks(1, [](auto& comm) {
        scripted_model<> net({{"weights", {40}}});
        auto trainer = rounding(net, comm);
        for (int step = 1; step <= 16; ++step) trainer.step(numbers{{1 + 1.0 / 512}});
        double const before = trainer.statistics().error;
        REQUIRE(before > 0);
        for (double const odd : {std::nan(""), std::numeric_limits<double>::infinity()}) {
            trainer.step(numbers{{odd}});
            for (int step = 2; step <= 16; ++step) trainer.step(numbers{{1}});
            REQUIRE(trainer.statistics().error == before);
        }
        trainer.step(numbers{{1}});
        REQUIRE(trainer.statistics().error == 0);
    });
    run_ranks(1, [](auto& comm) {
        told_mlp model;
        auto trainer = trainer_of(
            model, comm,
            training{.exchange = power_sgd_exchange{.rank = 1, .feedback = false, .min_compression_rate = 1.1},
                     .buckets = single_bucket{}});
        for (std::size_t step = 0; step < 16; ++step) trainer.step(all_data().batch(step, step + 2));
        double const before = trainer.statistics().error;
        REQUIRE(before > 0);
        model.reported = [&](std::size_t i) {
            if (i == told_mlp::w1) model.gradient(i)[0] = std::nan("");
        };
        trainer.step(all_data().batch(16, 18));
        REQUIRE(trainer.statistics().error == before);
    });
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
                 Contains("top_k: ratio is 0;") && Contains("above 0 and at most 1"));
    REQUIRE_THAT(refused(top_k_exchange{.ratio = 1.5}), Contains("top_k: ratio is 1.5"));
    REQUIRE_THAT(refused(random_k_exchange{.ratio = 0}),
                 Contains("random_k: ratio is 0;") && Contains("above 0 and at most 1"));
    REQUIRE_THAT(refused(random_k_exchange{.ratio = std::nan("")}), Contains("random_k: ratio is nan"));
    exchange_plan<double> large;  // whose memory no test has
    large.buckets.emplace_back().count = std::size_t{1} << 32;
    REQUIRE(top_k_exchange{.feedback = false}.prepare(large).refusal() ==
            "top_k: a bucket of 2^32 elements or more; choose smaller buckets");
    REQUIRE(random_k_exchange{.feedback = false}.prepare(large).refusal() ==
            "random_k: a bucket of 2^32 elements or more; choose smaller buckets");
    large.buckets[0].count -= 1;
    REQUIRE(top_k_exchange{.feedback = false}.prepare(large).refusal() == "");
    REQUIRE_THAT(refused(top_k_exchange{.ratio = -0.5}), Contains("top_k: ratio is -0.5"));
    REQUIRE_THAT(refused(power_sgd_exchange{.rank = 0}),
                 Contains("power_sgd: rank is 0; P and Q need at least one column"));
    REQUIRE_THAT(refused(power_sgd_exchange{.rank = 9}),
                 Contains("with rank 9") && Contains("no parameter of this model"));
    REQUIRE_THAT(refused(power_sgd_exchange{.min_compression_rate = 0.5}), Contains("min_compression_rate is 0.5"));
    // A matrix that is worth it, of which each bucket holds two rows only.
    auto const of_matrix = [](any_buckets const& buckets, training_options const& options, bool later) {
        return errors_of_ranks(2, [&](auto& comm) {
            scripted_model<> net({{"matrix", {32, 32}}, {"vector", {5}}});
            data_parallel trainer{net,    any_optimizer(sgd{}), comm, options, any_exchange(power_sgd_exchange{}),
                                  buckets};
            if (later) trainer.freeze("matrix");
            trainer.step(numbers{{1}});
        });
    };
    any_buckets const small = size_capped_buckets{.cap_bytes = 512, .first_bytes = 512}, whole = single_bucket{};
    for (std::string const& text : of_matrix(small, {}, false))
        REQUIRE(text ==
                "DDP-E100 usage: power_sgd: with rank 4 and min_compression_rate 2 no matrix becomes smaller: "
                "what counts are its whole rows in each bucket. Choose larger buckets, a smaller rank or another "
                "exchange");
    for (std::string const& text : of_matrix(whole, {}, true)) REQUIRE(text == "");
    for (std::string const& text : of_matrix(whole, {.frozen = {"matrix"}}, false)) REQUIRE(text == "");  // it may thaw
    // Such buckets on one rank only: what differs is named on both.
    for (std::string const& text : errors_of_ranks(2, [&](auto& comm) {
             scripted_model<> net({{"matrix", {32, 32}}, {"vector", {5}}});
             any_buckets const& mine = comm.rank() == 0 ? whole : small;
             data_parallel trainer{net, any_optimizer(sgd{}), comm, any_exchange(power_sgd_exchange{}), mine};
         }))
        REQUIRE_THAT(text, Contains("DDP-E102") && Contains("bucket policy"));
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
