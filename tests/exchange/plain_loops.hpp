/// \file
/// Trainings with exchanges that send less, and the same algorithms in plain loops, one rank after the other.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <ddp/collective/reference.hpp>
#include <ddp/exchange/narrow.hpp>
#include <ddp/exchange/power_sgd.hpp>
#include <ddp/exchange/sparse.hpp>
#include <ddp/kernel/kernel.hpp>
#include <ddp/model/layout.hpp>
#include <ddp/optim/parameter_groups.hpp>
#include <ddp/train/data_parallel.hpp>
#include <ddp/train/state_digest.hpp>
#include <ddp/train/stepper.hpp>

#include "support/on_ranks.hpp"
#include "support/ranks.hpp"
#include "support/training_checks.hpp"
#include "train/patience.hpp"

namespace ddp::test {

using numbers_of = std::vector<double>;

/// Any exchange behind one type, so that one trainer is compiled; what it is told is seen.
template <Element E>
struct any_exchange_of {
    std::function<std::unique_ptr<ddp::detail::exchange_model<any_transport, E>>()> make;
    std::string called;
    std::uint64_t settings;
    exchange_plan<E>* told = nullptr;

    template <class X>
    any_exchange_of(X policy)
        : make([policy] { return std::make_unique<ddp::detail::exchange_model_of<any_transport, E, X>>(policy); }),
          called(X::name),
          settings(policy.hash()),
          name(X::name) {}
    char const* name;

    struct state {
        std::unique_ptr<ddp::detail::exchange_model<any_transport, E>> inner;
        void for_each_state(state_visitor visit) { inner->for_each_state(visit); }
        void for_each_shared(shared_state_visitor visit) const { inner->for_each_shared(visit); }
        [[nodiscard]] std::string refusal() const { return inner->refusal(); }
        [[nodiscard]] exchange_statistics statistics() const { return inner->statistics(); }
    };
    [[nodiscard]] std::uint64_t hash() const { return settings; }
    void validate(std::span<exchange_parameter const> parameters) const { make()->validate(parameters); }
    [[nodiscard]] state prepare(exchange_plan<E> const& plan) const {
        if (told != nullptr) *told = plan;
        state all{make()};
        all.inner->prepare(plan);
        return all;
    }
    [[nodiscard]] bool everywhere(exchange_plan<E> const& plan, std::size_t bucket) const {
        return make()->everywhere(plan, bucket);
    }
    static task<> exchange(any_exchange_of const& /*self*/, lane<any_transport> over, state& kept,
                           bucket_exchange<E> what) {
        return kept.inner->exchange(over, what);
    }
    static task<> gather(any_exchange_of const& /*self*/, lane<any_transport> over, state& kept,
                         bucket_exchange<E> what) {
        return kept.inner->gather(over, what);
    }
};
using any_exchange = any_exchange_of<double>;

constexpr std::size_t steps = 11, rows = 13, inputs = 9, hidden = 31, outputs = 5;
constexpr double lr = 0.1, momentum = 0.9;

/// tanh_mlp, some of whose gradients are not reported in some steps, whose first weights may be of four dimensions, and whose
/// backward may be interrupted.
class told_mlp : public tanh_mlp<double> {
public:
    explicit told_mlp(std::uint64_t seed = 1) : tanh_mlp<double>(inputs, hidden, outputs, seed) {}
    bool four_dimensions = false;
    bool leaves_out = false;                              // b2 is not reported
    std::function<void(std::size_t)> reported = nullptr;  // before parameter i is

    [[nodiscard]] std::vector<parameter<double>> parameters() {
        auto all = tanh_mlp<double>::parameters();
        if (four_dimensions) all[w1].shape = {hidden, 3, inputs / 3, 1};
        return all;
    }
    template <class Ready>
    void backward(pass<double> how, Ready const& ready) {
        tanh_mlp<double>::backward(how, [&](std::size_t i) {
            if (reported) reported(i);
            if (i != b2 || !leaves_out) ready(i);
        });
    }
};
/// Whether b2 is left out, with unused::allowed: by a rank now and then, and by all of them.
inline bool leaves_b2_out(std::size_t step, int rank) {
    return (step + static_cast<std::size_t>(rank)) % 3 == 0 || step % 5 == 4;
}
/// Changes means, the same on every rank.
struct doubling {
    void on(mean_gradient<double> const& seen) const {
        for (std::size_t k = 0; k < seen.gradient.size(); ++k)
            if ((seen.begin + k) % 3 == 0) seen.gradient[k] *= 2;
    }
};
using grouped = parameter_groups<any_optimizer>;

/// How a test trains.
struct training {
    any_exchange exchange;
    any_buckets buckets = single_bucket{};
    bool sharded = false, clipped = false;
    grouped optimizer = {sgd{.lr = lr, .momentum = momentum}, {}};
    bool by_library = false;  // the simulation steps by it too, not by hand
    bool four_dimensions = false, leaves_out = false, watched = false;
    std::vector<std::string> frozen = {};
    std::optional<clipping> clip = {};  // another one
    ddp::nonfinite nonfinite = ddp::nonfinite::unchecked;

    [[nodiscard]] training_options options() const {
        training_options all = options_of(sharded, clipped);
        if (clip) all.clip = clip;
        all.frozen = frozen;
        all.nonfinite = nonfinite;
        if (leaves_out) all.unused = unused::allowed;
        return all;
    }
};
struct ending {
    std::vector<numbers_of> values;
    std::vector<std::uint64_t> digests;
    std::map<std::string, std::vector<std::byte>> state;  // by parameter and name, where it begins
    std::uint64_t state_digest = 0;
    std::uint64_t updates = 0;
    exchange_statistics statistics;
    std::size_t bytes = 0;  // as the communicator counts them, in the last step
    exchange_plan<double> plan;
    std::string wrong;
};

inline std::string key_of(state_slice const& s) {
    return std::string(s.of) + "/" + std::string(s.name) + "/" + std::to_string(s.begin);
}
using trainer_type = data_parallel<told_mlp, any_transport>;
inline trainer_type trainer_of(told_mlp& model, communicator<>& comm, training const& with,
                               exchange_plan<double>* told = nullptr) {
    model.four_dimensions = with.four_dimensions;
    any_exchange exchange = with.exchange;
    exchange.told = told;
    if (with.watched)
        return trainer_type(model, with.optimizer, comm, with.options(), exchange, with.buckets, doubling{});
    return trainer_type(model, with.optimizer, comm, with.options(), exchange, with.buckets);
}
inline task_data<double> const& all_data() {
    static task_data<double> const data(inputs, outputs, 64);
    return data;
}
/// Steps [from, to) of a trainer, each on this rank's share.
inline void go(trainer_type& trainer, told_mlp& model, training const& with, std::size_t from, std::size_t to,
               ending& end) {
    auto const& comm = trainer.comm();
    for (std::size_t step = from; step < to; ++step) {
        auto const [first, last] = share(rows, step, comm.rank(), comm.size());
        std::uint64_t const sent = comm.bytes_sent();
        model.leaves_out = with.leaves_out && leaves_b2_out(step, comm.rank());
        trainer.step(all_data().batch(step + first, step + last));
        end.bytes = static_cast<std::size_t>(comm.bytes_sent() - sent);
        end.digests.push_back(trainer.digest_of_values());
        if (!trainer.replicas_identical()) end.wrong = "ranks hold different bits";
    }
    for (auto const& p : trainer.parameters()) end.values.emplace_back(p.value.begin(), p.value.end());
    trainer.for_each_state([&](state_slice const& s) { end.state[key_of(s)] = {s.bytes.begin(), s.bytes.end()}; });
    end.state_digest = digest_of_state(trainer);
    end.statistics = trainer.statistics();
}
/// Trains from step `from` to step `to`, having been given values and state.
inline ending train_part(communicator<>& comm, training const& with, std::size_t from, std::size_t to,
                         ending const* before) {
    told_mlp model;
    ending end;
    auto trainer = trainer_of(model, comm, with, &end.plan);
    if (before != nullptr) {
        for (std::size_t i = 0; i < before->values.size(); ++i)
            std::ranges::copy(before->values[i], trainer.parameters()[i].value.begin());
        trainer.for_each_state([&](state_slice const& s) {
            if (!before->state.contains(key_of(s)) || before->state.at(key_of(s)).size() != s.bytes.size())
                end.wrong = "no state for " + key_of(s);
            else
                std::ranges::copy(before->state.at(key_of(s)), s.bytes.begin());
        });
        trainer.set_completed_steps(before->updates);
    }
    go(trainer, model, with, from, to, end);
    end.updates = trainer.completed_steps();
    return end;
}
inline std::vector<ending> train_on(int ranks, training const& with, bool tcp = false) {
    return ranks_over(tcp, ranks, [&](auto& comm) { return train_part(comm, with, 0, steps, nullptr); }, patient());
}

/// One bucket's exchange by hand: contributions of all ranks become the mean; what each rank's peers received stands in `received`.
template <Element E>
struct by_hand_of {
    using elements = std::vector<E>;
    std::function<elements(std::size_t bucket, std::vector<elements> const& wanted, std::vector<elements>& received)>
        mean;
    bool feedback = true;
};
using by_hand = by_hand_of<double>;

/// A product that is rounded before it is added to anything, whatever the compiler's flags.
template <Element E>
DDP_KERNEL E times(E a, E b) {
    return a * b;
}

/// What the same training in one program gives: values, and each rank's residuals by bucket and relative error of what it sent
/// in the last step that the library looks at.
struct simulated {
    std::vector<numbers_of> values;
    std::vector<std::vector<numbers_of>> left;
    numbers_of error;
};
inline simulated simulate(exchange_plan<double> const& plan, by_hand const& algorithm, training const& with,
                          std::size_t last_step = steps) {
    std::size_t const ranks = static_cast<std::size_t>(plan.ranks);
    told_mlp model;
    auto const parameters = model.parameters();
    std::vector<numbers_of> velocity, mean_of;
    std::vector<std::size_t> counts;
    for (auto const& p : parameters) {
        velocity.emplace_back(p.value.size());
        mean_of.emplace_back(p.value.size());
        counts.push_back(p.value.size());
    }
    layout const where(counts, {}, sizeof(double));
    stepper<double> library(with.optimizer, where, parameters);
    auto const frozen = [&](std::size_t i) {
        return std::ranges::any_of(with.frozen,
                                   [&](auto const& names) { return name_fits(names, parameters[i].name); });
    };
    simulated all{{}, std::vector<std::vector<numbers_of>>(ranks), numbers_of(ranks)};
    for (auto& one : all.left)
        for (auto const& bucket : plan.buckets) one.emplace_back(bucket.count);
    for (std::size_t step = 0; step < last_step; ++step) {
        std::vector<std::vector<numbers_of>> wanted(plan.buckets.size());
        bool b2_used = !with.leaves_out;
        for (std::size_t r = 0; r < ranks; ++r) {
            auto const [first, last] = share(rows, step, static_cast<int>(r), plan.ranks);
            for (auto const& p : parameters) std::fill(p.gradient.begin(), p.gradient.end(), 0.0);
            if (first != last) {
                (void)model.forward(all_data().batch(step + first, step + last));
                model.backward({.scale = static_cast<double>(last - first)}, [](std::size_t) {});
                if (with.leaves_out && leaves_b2_out(step, static_cast<int>(r)))
                    std::ranges::fill(parameters[told_mlp::b2].gradient, 0.0);
                else
                    b2_used = true;
            }
            for (std::size_t i = 0; i < parameters.size(); ++i)
                if (frozen(i)) std::ranges::fill(parameters[i].gradient, 0.0);
            for (std::size_t b = 0; b < plan.buckets.size(); ++b) {
                numbers_of& mine = wanted[b].emplace_back(plan.buckets[b].count);
                for (exchange_piece const& piece : plan.buckets[b].pieces)
                    for (std::size_t k = 0; k < piece.count; ++k)
                        mine[piece.begin + k] =
                            times(parameters[piece.parameter].gradient[piece.offset + k], 1.0 / rows) +
                            all.left[r][b][piece.begin + k];
            }
        }
        std::vector<std::array<double, 2>> squares(ranks);
        for (std::size_t b = 0; b < plan.buckets.size(); ++b) {
            if (std::ranges::all_of(plan.buckets[b].pieces, [&](auto const& piece) { return frozen(piece.parameter); }))
                continue;
            std::vector<numbers_of> received(ranks, numbers_of(plan.buckets[b].count));
            numbers_of const mean = algorithm.mean(b, wanted[b], received);
            for (std::size_t r = 0; r < ranks; ++r)
                for (std::size_t k = 0; k < mean.size(); ++k) {
                    double const rest = wanted[b][r][k] - received[r][k];
                    if (algorithm.feedback) all.left[r][b][k] = rest;
                    squares[r][0] += rest * rest;
                    squares[r][1] += wanted[b][r][k] * wanted[b][r][k];
                }
            for (exchange_piece const& piece : plan.buckets[b].pieces)
                std::copy_n(mean.begin() + static_cast<std::ptrdiff_t>(piece.begin), piece.count,
                            mean_of[piece.parameter].begin() + static_cast<std::ptrdiff_t>(piece.offset));
        }
        for (std::size_t r = 0; r < ranks && step % 16 == 0; ++r)
            all.error[r] = std::sqrt(squares[r][0] / squares[r][1]);
        auto const stepped = [&](std::size_t i) { return !frozen(i) && (i != told_mlp::b2 || b2_used); };
        double norm = 0;
        for (std::size_t i = 0; i < parameters.size(); ++i)
            for (std::size_t k = 0; k < mean_of[i].size(); ++k) {
                double& g = mean_of[i][k];
                if (with.watched && k % 3 == 0 && !frozen(i)) g *= 2;
                norm += stepped(i) ? g * g : 0;
            }
        auto const clip = with.options().clip;
        double factor = 1;
        if (auto const* const bound = clip ? std::get_if<clip_by_global_norm>(&*clip) : nullptr)
            factor = std::min(1.0, bound->max_norm / (std::sqrt(norm) + 1e-6));
        if (auto const* const bound = clip ? std::get_if<clip_by_value>(&*clip) : nullptr)
            for (numbers_of& one : mean_of)
                for (double& g : one) g = std::clamp(g, -bound->limit, bound->limit);
        if (!with.by_library) {
            for (std::size_t i = 0; i < parameters.size(); ++i)
                for (std::size_t k = 0; stepped(i) && k < mean_of[i].size(); ++k) {
                    double const g = factor == 1 ? mean_of[i][k] : times(factor, mean_of[i][k]);
                    double& v = velocity[i][k];
                    v = step == 0 ? g : times(momentum, v) + g;
                    parameters[i].value[k] -= times(lr, v);
                }
            continue;
        }
        numbers_of gradients(where.size()), values(where.size()), value_norms, gradient_norms;
        for (std::size_t i = 0; i < parameters.size(); ++i) {
            std::ranges::copy(mean_of[i], gradients.begin() + static_cast<std::ptrdiff_t>(where.begin(i)));
            std::ranges::copy(parameters[i].value, values.begin() + static_cast<std::ptrdiff_t>(where.begin(i)));
        }
        update_info how{.update = step + 1, .gradient_scale = factor};
        if (library.needs_norms()) {
            for (std::size_t i = 0; i < parameters.size(); ++i) {
                if (stepped(i) && where.count(i) != 0)
                    library.prepare(how, gradients, values, where.begin(i), where.end(i));
                double of_value = 0, of_gradient = 0;
                for (std::size_t k = where.begin(i); k < where.end(i); ++k) {
                    of_value += values[k] * values[k];
                    of_gradient += gradients[k] * gradients[k];
                }
                value_norms.push_back(std::sqrt(of_value));
                gradient_norms.push_back(std::sqrt(of_gradient));
            }
            how.value_norms = value_norms;
            how.gradient_norms = gradient_norms;
        }
        for (std::size_t i = 0; i < parameters.size(); ++i) {
            if (!stepped(i) || where.count(i) == 0) continue;
            library.step(how, gradients, values, where.begin(i), where.end(i));
            std::copy_n(values.begin() + static_cast<std::ptrdiff_t>(where.begin(i)), where.count(i),
                        parameters[i].value.begin());
        }
    }
    for (auto const& p : parameters) all.values.emplace_back(p.value.begin(), p.value.end());
    return all;
}

/// Slice by slice to its owner and back, through a rounding of the whole slice.
template <Element E>
by_hand_of<E> narrow_by_hand(exchange_plan<E> const& plan, std::vector<E> (*rounded)(std::vector<E> const&),
                             bool feedback) {
    auto left = std::make_shared<std::vector<std::vector<E>>>();
    for (auto const& bucket : plan.buckets) left->emplace_back(bucket.count);
    return {[&plan, rounded, left, feedback](std::size_t b, auto const& wanted, auto& received) {
                std::vector<E> mean(plan.buckets[b].count);
                auto const& cuts = plan.buckets[b].cuts;
                for (std::size_t owner = 0; owner + 1 < cuts.size(); ++owner) {
                    std::vector<std::vector<E>> parts;
                    for (std::size_t r = 0; r < wanted.size(); ++r) {
                        auto const begin = wanted[r].begin();
                        parts.push_back(rounded({begin + static_cast<std::ptrdiff_t>(cuts[owner]),
                                                 begin + static_cast<std::ptrdiff_t>(cuts[owner + 1])}));
                        std::ranges::copy(parts[r], received[r].begin() + static_cast<std::ptrdiff_t>(cuts[owner]));
                    }
                    std::vector<E> sum = reference_sum(parts);
                    for (std::size_t k = 0; feedback && k < sum.size(); ++k) sum[k] += (*left)[b][cuts[owner] + k];
                    std::vector<E> const result = rounded(sum);
                    for (std::size_t k = 0; feedback && k < sum.size(); ++k)
                        (*left)[b][cuts[owner] + k] = sum[k] - result[k];
                    std::ranges::copy(result, mean.begin() + static_cast<std::ptrdiff_t>(cuts[owner]));
                }
                return mean;
            },
            feedback};
}
template <Element E>
std::vector<E> to_bfloat16(std::vector<E> const& values) {
    std::vector<E> all;
    for (E const x : values) {  // 8 bits of precision: the nearest multiple of 2^(e - 7)
        int exponent = 0;
        std::frexp(static_cast<float>(x), &exponent);
        double const unit = std::ldexp(1.0, std::max(exponent - 8, -133));
        all.push_back(static_cast<E>(std::nearbyint(static_cast<double>(static_cast<float>(x)) / unit) * unit));
    }
    return all;
}
template <Element E>
std::vector<E> to_half(std::vector<E> const& values) {
    std::vector<E> all;
    for (E const x : values) {
        int exponent = 0;
        std::frexp(static_cast<float>(x), &exponent);
        double const unit = std::ldexp(1.0, std::max(exponent - 11, -24));
        all.push_back(static_cast<E>(std::nearbyint(static_cast<double>(static_cast<float>(x)) / unit) * unit));
    }
    return all;
}
template <Element E>
std::vector<E> to_eight_bits(std::vector<E> const& values) {
    std::vector<E> all;
    for (std::size_t begin = 0; begin < values.size(); begin += 256) {
        std::size_t const end = std::min(values.size(), begin + 256);
        E most = 0;
        for (std::size_t i = begin; i < end; ++i) most = std::max(most, std::abs(values[i]));
        float const scale = static_cast<float>(most) / 127.0f, inverse = scale > 0 ? 1 / scale : 0;
        for (std::size_t i = begin; i < end; ++i)
            all.push_back(static_cast<E>(std::nearbyint(static_cast<float>(values[i]) * inverse) * scale));
    }
    return all;
}
inline std::size_t elements(exchange_bucket const& bucket) {
    std::size_t all = 0;
    for (auto const& piece : bucket.pieces) all += piece.count;
    return all;
}
inline std::size_t k_of(exchange_bucket const& bucket, double ratio) {
    return std::max<std::size_t>(1,
                                 static_cast<std::size_t>(std::llround(ratio * static_cast<double>(elements(bucket)))));
}
template <Element E>
by_hand_of<E> top_k_by_hand(exchange_plan<E> const& plan, double ratio, bool feedback) {
    return {[&plan, ratio](std::size_t b, auto const& wanted, auto& received) {
                std::vector<E> mean(plan.buckets[b].count);
                for (std::size_t r = 0; r < wanted.size(); ++r) {
                    std::vector<std::size_t> order(mean.size());
                    std::iota(order.begin(), order.end(), std::size_t{0});
                    std::sort(order.begin(), order.end(), [&](std::size_t x, std::size_t y) {
                        E const a = std::abs(wanted[r][x]), c = std::abs(wanted[r][y]);
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
template <Element E>
by_hand_of<E> random_k_by_hand(exchange_plan<E> const& plan, double ratio, std::uint64_t seed, bool feedback) {
    auto step = std::make_shared<std::vector<std::uint64_t>>(plan.buckets.size());
    return {
        [&plan, ratio, seed, step](std::size_t b, auto const& wanted, auto& received) {
            std::vector<std::size_t> places;  // of elements: without gaps
            for (exchange_piece const& piece : plan.buckets[b].pieces)
                for (std::size_t i = 0; i < piece.count; ++i) places.push_back(piece.begin + i);
            std::size_t const n = places.size(), k = k_of(plan.buckets[b], ratio);
            std::uint64_t const now = (*step)[b]++;
            for (std::size_t j = 0; j < k; ++j) {
                std::size_t const begin = n * j / k, end = n * (j + 1) / k;
                std::size_t const at =
                    places[begin +
                           static_cast<std::size_t>(
                               random_stream(seed, random_use::compression, b).at((now << 32) + j).below(end - begin))];
                for (std::size_t r = 0; r < wanted.size(); ++r) received[r][at] = wanted[r][at];
            }
            return reference_sum(received);
        },
        feedback};
}

/// Vogels et al., algorithm 1, for whole rows of each parameter: dense matrices, one number after the other.
inline by_hand power_sgd_by_hand(exchange_plan<double> const& plan, power_sgd_exchange const& with) {
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
                                right[j * rank + k] = random_stream(with.seed, random_use::compression, piece.parameter)
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
inline std::vector<named> all_exchanges() {
    auto const narrow = [](auto rounded, bool feedback) {
        return [rounded, feedback](auto const& plan) { return narrow_by_hand(plan, rounded, feedback); };
    };
    power_sgd_exchange const warm{.rank = 2, .min_compression_rate = 1.1, .seed = 5},
        cold{.rank = 1, .feedback = false, .warm_start = false, .start_step = 3};
    return {{"bfloat16", bfloat16_exchange{}, narrow(to_bfloat16<double>, false)},
            {"bfloat16 with feedback", bfloat16_exchange{.feedback = true}, narrow(to_bfloat16<double>, true)},
            {"half", half_exchange{}, narrow(to_half<double>, false)},
            {"half with feedback", half_exchange{.feedback = true}, narrow(to_half<double>, true)},
            {"int8", int8_exchange{}, narrow(to_eight_bits<double>, true)},
            {"int8 without feedback", int8_exchange{.feedback = false}, narrow(to_eight_bits<double>, false)},
            {"top_k", top_k_exchange{.ratio = 0.07}, [](auto const& p) { return top_k_by_hand(p, 0.07, true); }},
            {"top_k without feedback", top_k_exchange{.ratio = 0.3, .feedback = false},
             [](auto const& p) { return top_k_by_hand(p, 0.3, false); }},
            {"random_k", random_k_exchange{.ratio = 0.21, .seed = 9},
             [](auto const& p) { return random_k_by_hand(p, 0.21, 9, true); }},
            {"random_k without feedback", random_k_exchange{.ratio = 0.4, .feedback = false},
             [](auto const& p) { return random_k_by_hand(p, 0.4, 0, false); }},
            {"power_sgd", warm, [warm](auto const& p) { return power_sgd_by_hand(p, warm); }, 1e-10},
            {"power_sgd, started late, drawn anew", cold, [cold](auto const& p) { return power_sgd_by_hand(p, cold); },
             1e-10}};
}
inline any_buckets const two_buckets = size_capped_buckets{.cap_bytes = 3000, .first_bytes = 700};

}  // namespace ddp::test
