/// \file
/// Checks of the trainer over any communicator: they return digests or say what is wrong, so that the same training can
/// be compared between ranks, policies and transports. No test framework in here.
#pragma once

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ddp/collective/algorithms/any_allreduce.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/optim/any_optimizer.hpp>
#include <ddp/train/data_parallel.hpp>

#include "train/tanh_mlp.hpp"

namespace ddp::test {

/// A bucket policy chosen at run time: one trainer is compiled instead of one a policy.
struct any_buckets {
    std::function<bucket_plan(bucket_request const&)> how;

    template <BucketPolicy B>
    any_buckets(B policy) : how([policy](bucket_request const& request) { return policy.plan(request); }) {}
    [[nodiscard]] bucket_plan plan(bucket_request const& request) const { return how(request); }
};

/// What a user's own policy may do: parameters in another order, cut in the middle, launched in an order that is not the
/// one in which they fill.
struct scrambled_buckets {
    [[nodiscard]] bucket_plan plan(bucket_request const& request) const {
        bucket_plan result;
        std::size_t const n = request.counts.size();
        for (std::size_t i = 1; i < n; i += 2) result.order.push_back(i);
        for (std::size_t i = 0; i < n; i += 2) result.order.push_back(i);
        for (std::size_t position = 0; position < n; ++position) {
            if (position > 0) result.cuts.push_back({position, 0});
            if (request.counts[result.order[position]] > request.grain)
                result.cuts.push_back({position, request.grain});
        }
        std::size_t const buckets = result.cuts.size() + 1;
        for (std::size_t b = 0; b < buckets; b += 2) result.launch.push_back(b);
        for (std::size_t b = 1; b < buckets; b += 2) result.launch.push_back(b);
        return result;
    }
};

/// How to train, but for the model.
struct recipe {
    std::string name;
    any_optimizer optimizer = sgd{.lr = 0.1};
    any_allreduce algorithm = {};
    any_buckets buckets = size_capped_buckets{};
    training_options options = {};
};

/// Optimizers with settings that show.
inline std::vector<std::pair<std::string, any_optimizer>> optimizers() {
    return {{"sgd", sgd{.lr = 0.2}},
            {"momentum", sgd{.lr = 0.05, .momentum = 0.9}},
            {"nesterov", sgd{.lr = 0.05, .momentum = 0.9, .weight_decay = 1e-3, .nesterov = true}},
            {"decay", sgd{.lr = 0.2, .weight_decay = 1e-2}},
            {"adam", adam{.lr = 0.01, .weight_decay = 1e-3}},
            {"adamw", adamw{.lr = 0.01, .weight_decay = 1e-2}},
            {"rmsprop", rmsprop{.lr = 0.002, .weight_decay = 1e-3, .momentum = 0.5, .centered = true}},
            {"adagrad", adagrad{.lr = 0.02, .lr_decay = 1e-2, .weight_decay = 1e-3}},
            {"lion", lion{.lr = 1e-3, .weight_decay = 1e-2}}};
}
/// Bucket policies, with caps so small that a few hundred elements fill several.
inline std::vector<std::pair<std::string, any_buckets>> bucket_policies() {
    return {{"capped", size_capped_buckets{.cap_bytes = 1024, .first_bytes = 128}},
            {"per parameter", per_parameter_buckets{}},
            {"single", single_bucket{}},
            {"scrambled", scrambled_buckets{}}};
}
/// Canonical algorithms, with options that reach every path with little data.
inline std::vector<std::pair<std::string, any_allreduce>> canonical_algorithms() {
    return {{"auto", automatic_allreduce{}},
            {"direct", direct_allreduce{}},
            {"direct, tiny chunks", direct_allreduce{.chunk_bytes = 256, .window = 2}},
            {"recursive doubling", recursive_doubling_allreduce{}},
            {"halving and doubling", halving_doubling_allreduce{.chunk_bytes = 256, .window = 2}},
            {"naive", naive_allreduce{}}};
}
inline training_options options_of(bool sharded, bool clipped) {
    training_options options;
    options.update = sharded ? update::sharded : update::replicated;
    if (clipped) options.clip = clip_by_global_norm{.max_norm = 0.3};
    return options;
}

/// This rank's share of the rows [0, rows) of step `step`: contiguous, differing by at most one, and now and then
/// everything on one rank. Fewer rows than ranks leave some with none.
inline std::pair<std::size_t, std::size_t> share(std::size_t rows, std::size_t step, int rank, int ranks) {
    std::size_t const p = static_cast<std::size_t>(ranks), r = static_cast<std::size_t>(rank);
    if (step % 10 == 9) return r == step / 10 % p ? std::pair(std::size_t{0}, rows) : std::pair(rows, rows);
    return {rows * r / p, rows * (r + 1) / p};
}

/// What a training came to, on this rank.
template <Element E>
struct trained {
    std::vector<std::vector<E>> values;  // by parameter
    std::uint64_t digest = 0;            // of all values and clipping norms, after every step
    double loss = 0;                     // over the whole last batch's share
    std::string wrong;                   // "" or the first thing that was
};

/// Trains tanh_mlp on batches whose sizes most rank counts do not divide. Every rank starts with other values: rank 0's
/// must go everywhere. After every step all ranks have to hold the same bits.
template <Element E, memory Kind = memory::releasing, class Comm, class Recipe>
trained<E> train(Comm& comm, Recipe const& by, std::size_t steps, std::size_t in = 7, std::size_t hidden = 24,
                 std::size_t out = 3) {
    static constexpr std::size_t batches[] = {13, 16, 5, 3, 11};
    task_data<E> const data(in, out, 64);
    tanh_mlp<E, Kind> model(in, hidden, out, 5 + static_cast<std::uint64_t>(comm.rank()));
    data_parallel trainer{model, by.optimizer, comm, by.options, by.algorithm, by.buckets};
    trained<E> result;
    digest all;
    for (std::size_t step = 0; step < steps; ++step) {
        std::size_t const rows = batches[step % std::size(batches)], offset = step * 7 % (data.rows - rows + 1);
        auto const [begin, end] = share(rows, step, comm.rank(), comm.size());
        step_result const done = trainer.step(data.batch(offset + begin, offset + end));
        result.loss = done.loss;
        all.add(trainer.digest_of_values()).add(bytes_of(done.gradient_norm));
        std::string const where = by.name + ", step " + std::to_string(step);
        if (done.weight != rows) result.wrong = where + ": the weight is " + std::to_string(done.weight);
        if (by.options.norm_clip() && !(done.gradient_norm > 0)) result.wrong = where + ": there is no norm";
        if (!trainer.replicas_identical()) result.wrong = where + ": ranks hold different bits";
        if (!result.wrong.empty()) return result;
    }
    for (auto const& p : trainer.parameters()) result.values.emplace_back(p.value.begin(), p.value.end());
    result.digest = all.value();
    return result;
}

/// Trains with every canonical algorithm, bucket policy and update policy, clipped and not: the same bits, those of the
/// norm included. Parameters are large enough for several statistics blocks. Returns the digest of all, to be compared
/// between transports, and what is wrong.
template <Element E, class Comm>
std::pair<std::uint64_t, std::string> check_same_bits(Comm& comm, std::size_t steps, any_optimizer const& optimizer) {
    digest all;
    std::string wrong;
    for (bool const clipped : {false, true}) {
        std::optional<std::uint64_t> first;
        for (auto const& [algorithm_name, algorithm] : canonical_algorithms())
            for (auto const& [buckets_name, buckets] : bucket_policies())
                for (bool const sharded : {false, true}) {
                    recipe const by{.name = algorithm_name + ", " + buckets_name + (sharded ? ", sharded" : "") +
                                            (clipped ? ", clipped" : ""),
                                    .optimizer = optimizer,
                                    .algorithm = algorithm,
                                    .buckets = buckets,
                                    .options = options_of(sharded, clipped)};
                    auto const got = train<E>(comm, by, steps, 45, 200, 2);
                    if (!first) all.add(*(first = got.digest));
                    if (wrong.empty()) wrong = got.wrong;
                    if (wrong.empty() && got.digest != *first) wrong = by.name + ": other bits than the first recipe";
                }
    }
    return {all.value(), wrong};
}

/// Whether a rank that holds one other bit is seen by all.
template <class Comm>
std::string check_replica_differs(Comm& comm, int culprit) {
    task_data<float> const data(7, 3, 16);
    tanh_mlp<float> model(7, 24, 3, 1);
    data_parallel trainer{
        model, any_optimizer(sgd{}), comm, training_options{}, any_allreduce(), any_buckets(size_capped_buckets{})};
    trainer.step(data.batch(0, 4));
    if (!trainer.replicas_identical()) return "replicas differ after a step";
    if (comm.rank() == culprit) {
        float& one = model.value(tanh_mlp<float>::b2)[1];
        one = std::nextafter(one, 10.0f);
    }
    return trainer.replicas_identical() == (comm.size() == 1) ? "" : "a changed weight went unseen";
}

/// Whether buckets are reduced while backward runs: backward keeps its last gradient back until it has seen the event
/// that the first bucket is reduced, with two more buckets in flight. Where no thread of the library moves things on, the
/// wait calls the public progress().
class overlap_check {
public:
    struct observer {
        std::atomic<std::uint64_t>* reduced;  // a bit a bucket
        void on(bucket_reduced const& event) const { reduced->fetch_or(std::uint64_t{1} << event.bucket); }
    };
    struct one_sample {
        [[nodiscard]] std::size_t size() const noexcept { return 1; }
    };
    /// Four parameters, a bucket each, reported last first.
    struct model {
        using element = float;
        std::vector<float> memory = std::vector<float>(4 * 2 * 100);
        std::function<void()> before_last = {};

        [[nodiscard]] std::vector<parameter<float>> parameters() {
            std::vector<parameter<float>> all;
            for (std::size_t i = 0; i < 4; ++i)
                all.push_back({"p" + std::to_string(i), {100}, span(2 * i), span(2 * i + 1)});
            return all;
        }
        double forward(one_sample const&) { return 0; }
        template <class Ready>
        void backward(pass<float> how, Ready const& ready) {
            for (std::size_t i = 4; i-- > 0;) {
                if (i == 0) before_last();
                for (float& g : span(2 * i + 1)) g = how.scale * static_cast<float>(i + 1);
                ready(i);
            }
        }

    private:
        std::span<float> span(std::size_t k) { return std::span<float>(memory).subspan(k * 100, 100); }
    };

    /// "" or what is wrong.
    template <class Comm>
    static std::string run(Comm& comm, recipe const& by,
                           std::chrono::milliseconds patience = std::chrono::seconds(20)) {
        std::atomic<std::uint64_t> reduced = 0;
        model net;
        bool early = true;
        net.before_last = [&] {
            auto const until = monotonic_clock::now() + patience;
            while ((reduced.load() & 8) == 0 && monotonic_clock::now() < until) {
                comm.progress();  // moves things on where no thread does
                if (comm.has_thread()) std::this_thread::sleep_for(std::chrono::microseconds(50));
            }
            early = early && (reduced.load() & 8) != 0 && (reduced.load() & 1) == 0;
        };
        data_parallel trainer{
            net, by.optimizer, comm, by.options, by.algorithm, per_parameter_buckets{}, observer{&reduced}};
        for (int step = 0; step < 3; ++step) {
            reduced = 0;
            trainer.step(one_sample{});
            if (!early) return by.name + ": the first bucket was not reduced before the last gradient was reported";
            if (reduced != 15) return by.name + ": not every bucket was reduced by the end of the step";
        }
        return trainer.replicas_identical() ? "" : by.name + ": ranks hold different bits";
    }
};

}  // namespace ddp::test
