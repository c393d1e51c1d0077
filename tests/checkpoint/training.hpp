/// \file
/// A small training with everything that a checkpoint has to keep, for tests.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <ddp/checkpoint/checkpoints.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/core/random.hpp>
#include <ddp/data/sampler.hpp>
#include <ddp/exchange/power_sgd.hpp>
#include <ddp/exchange/sparse.hpp>
#include <ddp/optim/any_optimizer.hpp>
#include <ddp/train/data_parallel.hpp>

#include "../../examples/rounded_exchange.hpp"
#include "data/files.hpp"
#include "support/ranks.hpp"
#include "support/training_checks.hpp"
#include "train/patience.hpp"
#include "train/tanh_mlp.hpp"

namespace ddp::test {

/// Three and a bit batches an epoch; short ones leave ranks with fewer.
inline constexpr sampler_options kept_sampler{.samples = 40, .global_batch = 12, .seed = 5};

/// What differs between two trainings of the same thing.
struct kept_recipe {
    any_optimizer optimizer = sgd{.lr = 0.05, .momentum = 0.9};
    training_options options = {};
    any_buckets buckets = size_capped_buckets{.cap_bytes = 512, .first_bytes = 128};
    bool rounded = false;              // gradients travel rounded, each rank keeps what that leaves out
    std::string_view sends_less = {};  // "random_k", "power_sgd"
    std::size_t slice = 0;   // elements of a gradient that are reported at once, and one more on each rank; 0: all
    std::uint64_t seed = 5;  // of the initial values: a training that is resumed does not depend on it
    bool noise = false;      // an observer adds some to each mean gradient, drawn by the number of the step
    bool poison = false;     // one of the samples is no number
    bool late = false;       // new values of the last rank come late: an observer holds it up after each step
};

/// What docs/own_observer.md shows, with the numbers of the steps that it was told of.
struct step_noise {
    std::vector<std::uint64_t> steps;

    template <class E>
    void on(mean_gradient<E> const& event) const {
        random_stream const draws{7, random_use::user, event.step};
        std::uint64_t const first = (std::uint64_t{event.parameter} << 32) + event.begin;
        for (std::size_t k = 0; k < event.gradient.size(); ++k)
            event.gradient[k] += draws.at(first + k).template symmetric<E>() * E(0x1p-6);
    }
    void on(bucket_reduced const& event) {
        if (steps.empty() || steps.back() != event.step) steps.push_back(event.step);
    }
    void on(step_finished const& event) { steps.push_back(1000 + event.step); }
};

/// Holds up what comes after a rank's own step: the others get its slices so much later.
struct slow_to_send {
    bool slow = false;
    void on(step_finished const&) const {
        if (slow) std::this_thread::sleep_for(std::chrono::milliseconds(3));
    }
};

template <class Comm, Element E = float>
struct kept_training {
    kept_training(Comm& on, kept_recipe const& by)
        : comm(on),
          model(7, 24, 3, by.seed + static_cast<std::uint64_t>(on.rank())),
          trainer(make_trainer(by)),
          batches(kept_sampler, on) {
        if (by.poison) poisoned = 17;
        if (by.slice != 0) model.slice = by.slice + static_cast<std::size_t>(on.rank());
    }

    using trainer_type = data_parallel<tanh_mlp<E>, typename Comm::transport_type>;
    trainer_type make_trainer(kept_recipe const& by) {
        training_options const options = scheduled(by.options);
        if constexpr (std::same_as<E, float>)  // what the exchange of the examples is for
            if (by.rounded) return trainer_type(model, by.optimizer, comm, options, rounded_exchange{}, by.buckets);
        if (by.noise) return trainer_type(model, by.optimizer, comm, options, by.buckets, std::ref(noise));
        if (by.late)
            return trainer_type(model, by.optimizer, comm, options, by.buckets,
                                slow_to_send{comm.rank() + 1 == comm.size()});
        if (by.sends_less == "random_k")
            return trainer_type(model, by.optimizer, comm, options, random_k_exchange{.ratio = 0.25}, by.buckets);
        if (by.sends_less == "power_sgd")
            return trainer_type(model, by.optimizer, comm, options, power_sgd_exchange{.rank = 2, .start_step = 2},
                                by.buckets);
        return trainer_type(model, by.optimizer, comm, options, any_allreduce{}, by.buckets);
    }
    static training_options scheduled(training_options options) {
        options.schedule = schedule{cosine_decay{.steps = 30, .floor = 0.05}};
        return options;
    }
    /// Steps until so many are completed, through the ends of epochs.
    kept_training& go_to(std::uint64_t steps) {
        while (trainer.completed_steps() < steps) {
            auto const mine = batches.next();
            if (!mine) continue;
            x.clear(), y.clear();
            for (std::uint32_t const i : *mine) {
                auto const row = data.batch(i, i + 1);
                x.insert(x.end(), row.x.begin(), row.x.end());
                if (i == poisoned) x.back() = std::numeric_limits<E>::quiet_NaN();
                y.insert(y.end(), row.y.begin(), row.y.end());
            }
            last = trainer.step(regression<E>{x, y, mine->size()});
        }
        return *this;
    }
    /// Of the values, once all ranks are known to hold the same.
    [[nodiscard]] std::uint64_t digest() { return trainer.replicas_identical() ? trainer.digest_of_values() : 0; }

    Comm& comm;
    step_noise noise;
    std::uint32_t poisoned = std::numeric_limits<std::uint32_t>::max();  // this sample
    step_result last;
    tanh_mlp<E> model;
    trainer_type trainer;
    sampler batches;
    task_data<E> data{7, 3, kept_sampler.samples};
    std::vector<E> x, y;
};
template <class Comm>
kept_training(Comm&, kept_recipe const&) -> kept_training<Comm>;

/// The digest of a training that nothing has disturbed.
inline std::uint64_t undisturbed(int ranks, kept_recipe const& by, std::uint64_t steps) {
    return run_ranks(
               ranks, [&](auto& comm) { return kept_training(comm, by).go_to(steps).digest(); }, patient())
        .front();
}
/// Names in a directory, sorted.
inline std::vector<std::string> names_in(std::filesystem::path const& path) {
    std::vector<std::string> all;
    for (auto const& entry : std::filesystem::directory_iterator(path)) all.push_back(entry.path().filename().string());
    std::sort(all.begin(), all.end());
    return all;
}
inline std::string content_of(std::filesystem::path const& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}
inline void put_content(std::filesystem::path const& path, std::string const& content) {
    std::ofstream(path, std::ios::binary | std::ios::trunc) << content;
}
inline void flip_bit(std::filesystem::path const& path, std::size_t byte, int bit = 3) {
    std::string content = content_of(path);
    content.at(byte) = static_cast<char>(content[byte] ^ (1 << bit));
    put_content(path, content);
}

/// Rewrites a manifest as an earlier version of the library would have written it.
inline void write_as_version(std::filesystem::path const& manifest, int version) {
    std::string text = content_of(manifest);
    auto const cut = [&](std::string_view from, std::string_view to) {
        std::size_t const at = text.find(from), end = text.find(to, at);
        if (at < end && end != text.npos) text.erase(at, end - at);
    };
    bool const has_sampler = text.find("\n  \"sampler\"") != text.npos;
    cut("  \"model_hash\"", version >= 2 ? "  \"rate_factor\"" : has_sampler ? "  \"sampler\"" : "  \"entries\"");
    cut(", \"list\": ", "},\n  \"entries\"");
    cut("  \"settings\"", has_sampler ? "  \"sampler\"" : "  \"entries\"");
    text.replace(text.find("\"format_version\": 4"), 19, "\"format_version\": " + std::to_string(version));
    text.resize(text.find("\"digest\": ", text.find("\n  \"entries\"")));
    char sum[40];
    std::snprintf(sum, sizeof sum, "\"digest\": \"%016llx\"\n}\n",
                  static_cast<unsigned long long>(ddp::digest().add(text).value()));
    put_content(manifest, text + sum);
}

/// stderr in a file for as long as it lives.
class captured_stderr {
public:
    explicit captured_stderr(::test::scratch_directory const& scratch)
        : path_(scratch.path() / "stderr"), kept_(::dup(2)) {
        std::fflush(stderr);
        std::FILE* const file = std::fopen(path_.c_str(), "w");
        ::dup2(::fileno(file), 2);
        std::fclose(file);
    }
    ~captured_stderr() { (void)text(); }
    std::string text() {
        if (kept_ >= 0) {
            std::fflush(stderr);
            ::dup2(kept_, 2);
            ::close(std::exchange(kept_, -1));
        }
        return content_of(path_);
    }

private:
    std::filesystem::path path_;
    int kept_;
};

}  // namespace ddp::test
