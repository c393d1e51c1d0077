/// \file
/// check_exchange: what an exchange promises, run against yours.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ddp/core/digest.hpp>
#include <ddp/core/random.hpp>
#include <ddp/exchange/exchange.hpp>
#include <ddp/model/model.hpp>
#include <ddp/optim/sgd.hpp>
#include <ddp/rendezvous/run.hpp>
#include <ddp/train/data_parallel.hpp>
#include <ddp/transport/any.hpp>

namespace ddp::testing {

namespace detail {

/// Gradients that are drawn, whatever the values are: each rank's own in each step.
template <Element E>
class drawn_gradients {
public:
    using element = E;
    struct batch {
        std::uint64_t step = 0, samples = 1;
        [[nodiscard]] std::size_t size() const noexcept { return static_cast<std::size_t>(samples); }
    };

    explicit drawn_gradients(int rank) : rank_(static_cast<std::uint64_t>(rank)) {
        for (std::vector<std::size_t> const& shape : shapes()) {
            std::size_t count = 1;
            for (std::size_t const extent : shape) count *= extent;
            memory_.emplace_back(2 * count);
        }
    }
    /// Matrices, a vector, a single number, nothing.
    static std::vector<std::vector<std::size_t>> shapes() { return {{40, 24}, {24}, {0}, {1}, {3, 8, 32}}; }

    [[nodiscard]] std::vector<parameter<E>> parameters() {
        std::vector<parameter<E>> all;
        for (std::size_t i = 0; i < memory_.size(); ++i) {
            std::span<E> const both(memory_[i]);
            all.push_back(
                {"p" + std::to_string(i), shapes()[i], both.first(both.size() / 2), both.last(both.size() / 2)});
        }
        return all;
    }
    double forward(batch const& of) {
        seen_ = of;
        return 0;
    }
    template <class Ready>
    void backward(pass<E> how, Ready const& ready) {
        for (std::size_t i = memory_.size(); i-- > 0;) {
            random_stream const draws{rank_ + 1, random_use::user, seen_.step * 64 + i};
            std::span<E> const gradient = std::span<E>(memory_[i]).last(memory_[i].size() / 2);
            for (std::size_t k = 0; k < gradient.size(); ++k)
                gradient[k] = how.scale * draws.at(k).template symmetric<E>();
            ready(i);
        }
    }

private:
    std::uint64_t rank_;
    std::vector<std::vector<E>> memory_;
    batch seen_;
};

/// What a training with drawn gradients came to on one rank.
struct exchanged {
    std::vector<std::uint64_t> values;                // digests after each step
    std::uint64_t state_before = 0, state_after = 0;  // around a step in which no rank has samples
    bool identical = true;
};

template <Element E, class X>
std::vector<exchanged> exchange_steps(X const& policy, int ranks, update how, bool some_empty) {
    std::vector<exchanged> all(static_cast<std::size_t>(ranks));
    timing times = timing::for_tests();
    times.collective = std::chrono::seconds(20);
    run<threads>(run_options{.ranks = ranks, .times = times}, [&](auto& comm) {
        using batch = typename drawn_gradients<E>::batch;
        exchanged& mine = all[static_cast<std::size_t>(comm.rank())];
        drawn_gradients<E> model(comm.rank());
        data_parallel trainer{
            model,  sgd{.lr = 0.5},
            comm,   training_options{.update = how},
            policy, size_capped_buckets{.cap_bytes = 2000 * sizeof(E), .first_bytes = 100 * sizeof(E)}};
        auto const state = [&] {
            digest seen;
            trainer.for_each_state([&](state_slice const& s) { seen.add(s.name).add(const_bytes(s.bytes)); });
            return seen.value();
        };
        for (std::uint64_t step = 0; step < 4; ++step) {
            bool const empty = some_empty && (step + static_cast<std::uint64_t>(comm.rank())) % 2 == 1;
            trainer.step(batch{.step = step, .samples = empty ? 0 : 1 + static_cast<std::uint64_t>(comm.rank())});
            mine.values.push_back(trainer.digest_of_values());
            mine.identical = trainer.replicas_identical() && mine.identical;
            if (step != 1) continue;
            mine.state_before = state();
            try {
                trainer.step(batch{.step = 99, .samples = 0});
            } catch (error const& e) {
                if (e.code() != errc::no_samples) throw;
            }
            mine.state_after = state();
            mine.values.push_back(trainer.digest_of_values());
        }
    });
    return all;
}

}  // namespace detail

/// What is wrong with this exchange; empty if nothing was found. Trains on drawn gradients with 1 to 5 ranks, which are threads,
/// and holds it to what it promises: every rank ends each step with the same bits; sharded and replicated updates give the same;
/// a second run repeats the first; a step without samples changes neither values nor state; every message finds its receiver.
/// How near the mean is to the true one is not looked at: only you know what is near.
template <class X>
    requires ExchangeOver<X, any_transport, float>
[[nodiscard]] std::vector<std::string> check_exchange(X const& policy) {
    std::vector<std::string> complaints;
    auto const note = [&](bool good, std::string what) {
        if (!good && (complaints.empty() || complaints.back() != what)) complaints.push_back(std::move(what));
    };
    for (int const ranks : {1, 2, 3, 5}) {
        std::string const with = "with " + std::to_string(ranks) + " ranks ";
        try {
            auto const first = detail::exchange_steps<float>(policy, ranks, update::replicated, ranks > 2);
            auto const again = detail::exchange_steps<float>(policy, ranks, update::replicated, ranks > 2);
            auto const sharded = detail::exchange_steps<float>(policy, ranks, update::sharded, ranks > 2);
            for (std::size_t r = 0; r < first.size(); ++r) {
                note(first[r].identical && sharded[r].identical && first[r].values == first[0].values,
                     with + "ranks end a step with different bits");
                note(first[r].values == again[r].values, with + "a second training gives other bits");
                note(first[r].values == sharded[r].values, with + "sharded and replicated updates give different bits");
                note(first[r].values[1] == first[r].values[2] && sharded[r].values[1] == sharded[r].values[2],
                     with + "a step in which no rank has samples changes values");
                note(first[r].state_before == first[r].state_after && sharded[r].state_before == sharded[r].state_after,
                     with + "a step in which no rank has samples changes the state");
            }
        } catch (std::exception const& e) {
            complaints.push_back(with + "not every rank comes to an end: " + e.what());
        }
    }
    return complaints;
}

}  // namespace ddp::testing
