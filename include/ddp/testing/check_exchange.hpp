/// \file
/// check_exchange: tests what an exchange must do beyond what its types show.
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
#include <string_view>
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

/// An exchange, and whether it leaves zeros between the parameters of a bucket.
template <class X>
struct watched_exchange {
    X inner;
    bool* dirty;
    char const* name = inner.name;

    template <Element E>
    struct state {
        exchange_plan<E> plan;
        exchange_state<X, E> kept;

        [[nodiscard]] std::string refusal() const {
            if constexpr (requires { kept.refusal(); }) return kept.refusal();
            return {};
        }
        void for_each_state(state_visitor visit) { kept.for_each_state(visit); }
        void for_each_shared(shared_state_visitor visit) const {
            if constexpr (requires { kept.for_each_shared(visit); }) kept.for_each_shared(visit);
        }
    };

    [[nodiscard]] std::uint64_t hash() const { return static_cast<std::uint64_t>(inner.hash()); }
    void validate([[maybe_unused]] std::span<exchange_parameter const> parameters) const {
        if constexpr (requires { inner.validate(parameters); }) inner.validate(parameters);
    }
    template <Element E>
    [[nodiscard]] state<E> prepare(exchange_plan<E> const& plan) const {
        return {plan, inner.prepare(plan)};
    }
    template <Element E>
    [[nodiscard]] bool everywhere(exchange_plan<E> const& plan, std::size_t bucket) const {
        return inner.everywhere(plan, bucket);
    }
    template <Transport T, Element E>
    static task<> exchange(watched_exchange const& self, lane<T> over, state<E>& kept, bucket_exchange<E> what) {
        co_await X::exchange(self.inner, over, kept.kept, what);
        self.look(kept.plan.buckets[what.bucket], what);
    }
    template <Transport T, Element E>
    static task<> gather(watched_exchange const& self, lane<T> over, state<E>& kept, bucket_exchange<E> what) {
        co_await X::gather(self.inner, over, kept.kept, what);
        self.look(kept.plan.buckets[what.bucket], what);
    }
    template <Transport T, Element E>
        requires BlockingExchangeOver<X, T, E>
    static void exchange_blocking(watched_exchange const& self, lane<T> over, state<E>& kept, bucket_exchange<E> what) {
        X::exchange_blocking(self.inner, over, kept.kept, what);
        self.look(kept.plan.buckets[what.bucket], what);
    }

private:
    template <Element E>
    void look(exchange_bucket const& bucket, bucket_exchange<E> const& what) const {
        if (*what.factor == 0) return;
        std::size_t at = 0;
        for (std::size_t i = 0; i <= bucket.pieces.size(); ++i) {
            std::size_t const end = i < bucket.pieces.size() ? bucket.pieces[i].begin : bucket.count;
            for (; at < end; ++at) *dirty = *dirty || what.data[at] != 0;
            if (i < bucket.pieces.size()) at = end + bucket.pieces[i].count;
        }
    }
};

/// What a training with drawn gradients came to on one rank.
struct exchanged {
    std::vector<std::uint64_t> values;                // digests after each step
    std::uint64_t state_before = 0, state_after = 0;  // around a step in which no rank has samples
    bool identical = true, dirty = false;
    bool shown_alike = true;  // where it was cut: both trainers have shown the same state
};
/// How it trains.
struct exchange_run {
    int ranks;
    ddp::update update;
    bool some_empty;
    std::size_t agreement_steps = 256;
    bool cut = false;  // goes on after two steps with another trainer, which is given values and state
};

template <Element E, class X>
std::vector<exchanged> exchange_steps(X const& policy, exchange_run const& how) {
    std::vector<exchanged> all(static_cast<std::size_t>(how.ranks));
    timing times = timing::for_tests();
    times.collective = std::chrono::seconds(20);
    run<threads>(run_options{.ranks = how.ranks, .times = times}, [&](auto& comm) {
        using batch = typename drawn_gradients<E>::batch;
        exchanged& mine = all[static_cast<std::size_t>(comm.rank())];
        drawn_gradients<E> model(comm.rank()), other(comm.rank());
        auto const trainer_of = [&](drawn_gradients<E>& of) {
            return data_parallel{of,
                                 sgd{.lr = 0.5},
                                 comm,
                                 training_options{.update = how.update, .agreement_steps = how.agreement_steps},
                                 watched_exchange<X>{policy, &mine.dirty},
                                 size_capped_buckets{.cap_bytes = 2000 * sizeof(E), .first_bytes = 100 * sizeof(E)}};
        };
        auto const steps = [&](auto& trainer, std::uint64_t from, std::uint64_t to) {
            for (std::uint64_t step = from; step < to; ++step) {
                bool const empty = how.some_empty && (step + static_cast<std::uint64_t>(comm.rank())) % 2 == 1;
                trainer.step(batch{.step = step, .samples = empty ? 0 : 1 + static_cast<std::uint64_t>(comm.rank())});
                mine.values.push_back(trainer.digest_of_values());
                mine.identical = trainer.replicas_identical() && mine.identical;
            }
        };
        auto trainer = trainer_of(model);
        auto const state = [&] {
            digest seen;
            trainer.for_each_state([&](state_slice const& s) { seen.add(s.name).add(const_bytes(s.bytes)); });
            return seen.value();
        };
        steps(trainer, 0, 2);
        mine.state_before = state();
        try {
            trainer.step(batch{.step = 99, .samples = 0});
        } catch (error const& e) {
            if (e.code() != errc::no_samples) throw;
        }
        mine.state_after = state();
        mine.values.push_back(trainer.digest_of_values());
        if (!how.cut) return steps(trainer, 2, 4);
        auto next = trainer_of(other);
        for (std::size_t i = 0; i < next.parameters().size(); ++i)
            std::ranges::copy(trainer.parameters()[i].value, next.parameters()[i].value.begin());
        std::vector<std::vector<std::byte>> kept;
        trainer.for_each_state([&](state_slice const& s) { kept.emplace_back(s.bytes.begin(), s.bytes.end()); });
        std::size_t shown = 0;
        next.for_each_state([&](state_slice const& s) {
            if (shown < kept.size() && kept[shown].size() == s.bytes.size())
                std::ranges::copy(kept[shown], s.bytes.begin());
            else
                mine.shown_alike = false;
            ++shown;
        });
        mine.shown_alike = mine.shown_alike && shown == kept.size();
        next.set_completed_steps(trainer.completed_steps());
        steps(next, 2, 4);
    });
    return all;
}

}  // namespace detail

/// Checks an exchange by training on random gradients with 1 to 5 ranks, which are threads. Returns what is wrong; an
/// empty list if nothing was found. It checks that
///
///  - every rank has the same bits after each step, and sharded and replicated updates give the same
///  - a second run repeats the first, and so does one in which, after two steps, another trainer continues with the
///    values, the state and the number of steps
///  - a step without samples changes neither values nor state
///  - the gaps between the parameters of a bucket remain zero
///  - what the state declares to be the same on all ranks is the same
///  - every message is received
///
/// It does not check how close the result is to the true mean, because only the author of an exchange knows what is close
/// enough.
template <class X>
    requires ExchangeOver<X, any_transport, float>
[[nodiscard]] std::vector<std::string> check_exchange(X const& policy) {
    std::vector<std::string> complaints;
    auto const note = [&](bool good, std::string what) {
        if (!good && std::ranges::find(complaints, what) == complaints.end()) complaints.push_back(std::move(what));
    };
    for (int const ranks : {1, 2, 3, 4, 5}) {
        std::string const with = "with " + std::to_string(ranks) + " ranks ";
        bool const some_empty = ranks > 2;
        auto const train = [&](update how, std::size_t agreement_steps = 256, bool cut = false) {
            auto const all = detail::exchange_steps<float>(policy, {ranks, how, some_empty, agreement_steps, cut});
            for (detail::exchanged const& one : all) {
                note(one.identical && one.values == all[0].values, with + "ranks end a step with different bits");
                note(one.values[1] == one.values[2], with + "a step in which no rank has samples changes values");
                note(one.state_before == one.state_after,
                     with + "a step in which no rank has samples changes the state");
                note(!one.dirty, with + "something is left between the parameters of a bucket");
                note(one.shown_alike, with + "two trainers of the same model show different state");
            }
            return all.front().values;
        };
        try {
            auto const first = train(update::replicated);
            note(first == train(update::sharded), with + "sharded and replicated updates give different bits");
            for (update const how : {update::replicated, update::sharded})
                note(first == train(how, 256, true),
                     with + "a training that goes on with values and state from for_each_state gives other bits");
            note(first == train(update::replicated, 1), with + "a second training gives other bits");
        } catch (usage_error const& e) {
            complaints.push_back(with + "are refused: " + e.what());
        } catch (std::exception const& e) {
            bool const bits = std::string_view(e.what()).starts_with("DDP-E106");
            complaints.push_back(with + (bits ? "the ranks do not hold the same bits: " : "some ranks never finish: ") +
                                 e.what());
        }
    }
    return complaints;
}

}  // namespace ddp::testing
