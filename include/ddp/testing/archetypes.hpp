/// \file
/// Archetypes: for every concept the minimal type that models it, to test that generic code requires nothing else.
///
/// They run: a trainer made of archetypes alone trains. With an argument of `without` one operation is missing.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ddp/collective/concepts.hpp>
#include <ddp/comm/transport.hpp>
#include <ddp/exchange/exchange.hpp>
#include <ddp/kernel/sum.hpp>
#include <ddp/model/model.hpp>
#include <ddp/optim/optimizer.hpp>
#include <ddp/train/bucket.hpp>
#include <ddp/train/events.hpp>
#include <ddp/transport/inproc.hpp>

namespace ddp::testing {

/// The operation that an archetype lacks, for example `model_archetype<float, without::backward>`, which no longer models the concept.
enum class without : std::uint8_t {
    nothing,         ///< the archetype models its concept
    rank,            ///< of a transport
    size,            ///< of a transport
    post_send,       ///< of a transport
    post_receive,    ///< of a transport
    progress,        ///< of a transport
    abort,           ///< of a transport
    reports,         ///< of a transport
    wake,            ///< of a transport
    now,             ///< of a transport
    parameters,      ///< of a model
    forward,         ///< of a model
    backward,        ///< of a model
    slot_count,      ///< of an optimizer
    learning_rate,   ///< of an optimizer
    hash,            ///< of an optimizer or an exchange
    step,            ///< of an optimizer
    plan,            ///< of a bucket policy
    sum,             ///< of an allreduce
    on,              ///< of an observer
    prepare,         ///< of an exchange
    everywhere,      ///< of an exchange
    exchange,        ///< of an exchange
    gather,          ///< of an exchange
    for_each_state,  ///< of the state of an exchange
};

/// Forwards to another transport, but has no optional members: no timers, nothing about threads.
template <class Inner, without Missing = without::nothing>
class transport_archetype {
public:
    explicit transport_archetype(std::unique_ptr<Inner> inner) : inner_(std::move(inner)) {}

    int rank() const
        requires(Missing != without::rank)
    {
        return inner_->rank();
    }
    int size() const
        requires(Missing != without::size)
    {
        return inner_->size();
    }
    void post_send(int peer, tag what, const_bytes out, completion& done)
        requires(Missing != without::post_send)
    {
        inner_->post_send(peer, what, out, done);
    }
    void post_receive(int peer, tag what, mutable_bytes in, completion& done)
        requires(Missing != without::post_receive)
    {
        inner_->post_receive(peer, what, in, done);
    }
    bool progress(time_point until)
        requires(Missing != without::progress)
    {
        return inner_->progress(until);
    }
    void abort(failure const& record)
        requires(Missing != without::abort)
    {
        inner_->abort(record);
    }
    std::span<report const> reports()
        requires(Missing != without::reports)
    {
        return inner_->reports();
    }
    void wake()
        requires(Missing != without::wake)
    {
        inner_->wake();
    }
    time_point now()
        requires(Missing != without::now)
    {
        return inner_->now();
    }

private:
    std::unique_ptr<Inner> inner_;
};

/// The minimal batch: it has a size.
struct batch_archetype {
    std::vector<double> numbers;  ///< one for each sample
    [[nodiscard]] std::size_t size() const { return numbers.size(); }
};

/// One parameter w that is fitted to the samples: the loss is the mean of (w[i] - x)^2 / 2, summed over i. Cannot be
/// bound, copied or made without its size.
template <Element E, without Missing = without::nothing>
class model_archetype {
public:
    using element = E;

    explicit model_archetype(std::size_t count) : value_(count), gradient_(count) {}
    model_archetype(model_archetype const&) = delete;
    model_archetype& operator=(model_archetype const&) = delete;

    std::vector<parameter<E>> parameters()
        requires(Missing != without::parameters)
    {
        return {{"w", {value_.size()}, value_, gradient_}};
    }
    double forward(batch_archetype const& batch)
        requires(Missing != without::forward)
    {
        batch_ = &batch;
        double sum = 0;
        for (double const x : batch.numbers)
            for (E const w : value_) sum += (static_cast<double>(w) - x) * (static_cast<double>(w) - x) / 2;
        return sum / static_cast<double>(batch.size());
    }
    template <class Ready>
    void backward(pass<E> how, Ready const& ready)
        requires(Missing != without::backward)
    {
        for (std::size_t i = 0; i < value_.size(); ++i) {
            double sum = 0;
            for (double const x : batch_->numbers) sum += static_cast<double>(value_[i]) - x;
            E const slope = how.scale * static_cast<E>(sum / static_cast<double>(batch_->size()));
            gradient_[i] = how.accumulate ? gradient_[i] + slope : slope;
        }
        ready(0);
    }

private:
    std::vector<E> value_, gradient_;
    batch_archetype const* batch_ = nullptr;
};

/// Plain gradient descent.
template <without Missing = without::nothing>
class optimizer_archetype {
public:
    explicit optimizer_archetype(double rate) : rate_(rate) {}

    std::size_t slot_count() const
        requires(Missing != without::slot_count)
    {
        return 0;
    }
    double learning_rate() const
        requires(Missing != without::learning_rate)
    {
        return rate_;
    }
    std::uint64_t hash() const
        requires(Missing != without::hash)
    {
        return static_cast<std::uint64_t>(rate_ * 1e9);
    }
    template <class E>
    void step(step_info const& at, std::span<E const> gradient, std::span<E> value, slot_spans<E> /*slots*/) const
        requires(Missing != without::step)
    {
        for (std::size_t i = 0; i < value.size(); ++i)
            value[i] -= static_cast<E>(at.learning_rate * at.gradient_scale) * gradient[i];
    }

private:
    double rate_;
};

/// Returns an empty plan, which means one bucket.
template <without Missing = without::nothing>
class bucket_policy_archetype {
public:
    explicit bucket_policy_archetype(int /*nothing is made by default*/) {}
    bucket_plan plan(bucket_request const& /*request*/) const
        requires(Missing != without::plan)
    {
        return {};
    }
};

/// Every rank sends all its data to every other rank and adds in the order of the ranks, not in the canonical order.
template <without Missing = without::nothing>
class allreduce_archetype {
public:
    char const* name;
    bool canonical = false;

    explicit allreduce_archetype(char const* called) : name(called) {}

    template <Transport T, Element E>
    static task<> sum(allreduce_archetype /*self*/, lane<T> over, std::span<E> data)
        requires(Missing != without::sum)
    {
        std::size_t const ranks = static_cast<std::size_t>(over.size()), me = static_cast<std::size_t>(over.rank());
        scratch memory(ranks * data.size_bytes());
        operations in(ranks), out(ranks);
        std::span<E> const all = memory.template as<E>();
        std::copy(data.begin(), data.end(), all.subspan(me * data.size()).begin());
        for (std::size_t r = 0; r < ranks; ++r) {
            if (r == me) continue;
            over.receive(in[r], static_cast<int>(r), as_mutable_bytes(all.subspan(r * data.size(), data.size())));
            over.send(out[r], static_cast<int>(r), as_const_bytes(data));
        }
        for (std::size_t r = 0; r < ranks; ++r) {
            if (r == me) continue;
            co_await in[r];
            co_await out[r];
        }
        std::copy_n(all.begin(), data.size(), data.begin());
        for (std::size_t r = 1; r < ranks; ++r)
            add(data, std::span<E const>(data), std::span<E const>(all.subspan(r * data.size(), data.size())));
    }
};

/// Sums by an allreduce, everywhere, and counts its sums in a state of its own.
template <without Missing = without::nothing>
class exchange_archetype {
public:
    explicit exchange_archetype(int /*nothing is made by default*/) {}

    /// Cannot be copied or made without its count.
    class state {
    public:
        explicit state(std::uint64_t sums) : sums_(sums) {}
        state(state const&) = delete;
        state& operator=(state const&) = delete;
        state(state&&) = default;
        state& operator=(state&&) = delete;

        void for_each_state(state_visitor visit)
            requires(Missing != without::for_each_state)
        {
            visit({.of = "exchange", .name = "sums", .type = element_type::u64, .bytes = bytes_of(sums_)});
        }

    private:
        friend exchange_archetype;
        std::uint64_t sums_;
    };
    static constexpr char const* name = "archetype";

    std::uint64_t hash() const
        requires(Missing != without::hash)
    {
        return 0;
    }
    template <Element E>
    state prepare(exchange_plan<E> const& /*plan*/) const
        requires(Missing != without::prepare)
    {
        return state(0);
    }
    template <Element E>
    bool everywhere(exchange_plan<E> const& /*plan*/, std::size_t /*bucket*/) const
        requires(Missing != without::everywhere)
    {
        return true;
    }
    template <Transport T, Element E>
    static task<> exchange(exchange_archetype /*self*/, lane<T> over, state& kept, bucket_exchange<E> what)
        requires(Missing != without::exchange)
    {
        co_await *what.go;
        co_await allreduce_archetype<>::sum(allreduce_archetype<>("of an exchange"), over, what.data);
        scale(what.data, *what.factor);
        if (*what.factor != 0) ++kept.sums_;
    }
    template <Transport T, Element E>
    static task<> gather(exchange_archetype /*self*/, lane<T> /*over*/, state& /*kept*/, bucket_exchange<E> /*what*/)
        requires(Missing != without::gather)
    {
        co_return;
    }
};

/// Receives only one of the many events.
template <without Missing = without::nothing>
class observer_archetype {
public:
    explicit observer_archetype(std::uint64_t& steps) : steps_(&steps) {}
    void on(step_finished const& event)
        requires(Missing != without::on)
    {
        *steps_ = event.step;
    }

private:
    std::uint64_t* steps_;
};

/// A transport_archetype over threads of this process.
template <without Missing = without::nothing>
using inproc_archetype = transport_archetype<inproc_transport, Missing>;

static_assert(Transport<inproc_archetype<>> && !TimedTransport<inproc_archetype<>>);
static_assert(!Transport<inproc_archetype<without::rank>> && !Transport<inproc_archetype<without::size>>);
static_assert(!Transport<inproc_archetype<without::post_send>> && !Transport<inproc_archetype<without::post_receive>>);
static_assert(!Transport<inproc_archetype<without::progress>> && !Transport<inproc_archetype<without::abort>>);
static_assert(!Transport<inproc_archetype<without::reports>> && !Transport<inproc_archetype<without::wake>>);
static_assert(!Transport<inproc_archetype<without::now>>);

static_assert(ModelFor<model_archetype<float>, batch_archetype> && !BindableModel<model_archetype<float>>);
static_assert(!Model<model_archetype<float, without::parameters>> && !Model<model_archetype<float, without::backward>>);
static_assert(!ModelFor<model_archetype<float, without::forward>, batch_archetype>);

static_assert(OptimizerFor<optimizer_archetype<>, float> && OptimizerFor<optimizer_archetype<>, double>);
static_assert(!OptimizerFor<optimizer_archetype<without::slot_count>, float>);
static_assert(!OptimizerFor<optimizer_archetype<without::learning_rate>, float>);
static_assert(!OptimizerFor<optimizer_archetype<without::hash>, float>);
static_assert(!OptimizerFor<optimizer_archetype<without::step>, float>);

static_assert(BucketPolicy<bucket_policy_archetype<>> && !BucketPolicy<bucket_policy_archetype<without::plan>>);

static_assert(AllreduceOver<allreduce_archetype<>, inproc_archetype<>, float>);
static_assert(!SlicedAllreduceOver<allreduce_archetype<>, inproc_archetype<>, float>);
static_assert(!AllreduceOver<allreduce_archetype<without::sum>, inproc_archetype<>, float>);

static_assert(ExchangeOver<exchange_archetype<>, inproc_archetype<>, float>);
static_assert(!ExchangeOver<exchange_archetype<without::hash>, inproc_archetype<>, float>);
static_assert(!ExchangeOver<exchange_archetype<without::prepare>, inproc_archetype<>, float>);
static_assert(!ExchangeOver<exchange_archetype<without::everywhere>, inproc_archetype<>, float>);
static_assert(!ExchangeOver<exchange_archetype<without::exchange>, inproc_archetype<>, float>);
static_assert(!ExchangeOver<exchange_archetype<without::gather>, inproc_archetype<>, float>);
static_assert(!ExchangeOver<exchange_archetype<without::for_each_state>, inproc_archetype<>, float>);

static_assert(TrainingObserver<observer_archetype<>> && !TrainingObserver<observer_archetype<without::on>>);

}  // namespace ddp::testing
