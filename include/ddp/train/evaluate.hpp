/// \file
/// evaluate: metrics of a model over data that is spread over the ranks, each sample once.
#pragma once

#include <concepts>
#include <cstddef>
#include <exception>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <ddp/collective/all_gather.hpp>
#include <ddp/collective/call.hpp>
#include <ddp/comm/communicator.hpp>

namespace ddp {

template <class M, class T>
class data_parallel;

/// Sums that may be added in any grouping: losses, correct answers, and the weights that they are divided by. The
/// struct is sent byte by byte, padding included.
template <class S>
concept Metrics = std::default_initializable<S> && std::is_trivially_copyable_v<S> &&
                  requires(S& sums, S const& others) { sums += others; };

/// A weighted mean as sums: a loss with the samples as weights, a rate of correct answers, or any other mean.
///
///     ddp::mean_metric loss;
///     while (auto const mine = batches.next())
///         loss.add(trainer.step(load(*mine)).loss, mine->size());  // this rank's share
///     double const everybody = ddp::sum_over_ranks(comm, loss).mean();
struct mean_metric {
    double sum = 0;     ///< of values times weights
    double weight = 0;  ///< of all values together

    mean_metric& operator+=(mean_metric const& other) noexcept {
        sum += other.sum;
        weight += other.weight;
        return *this;
    }
    /// `count` more samples whose mean is `value`. If `count` is 0, the value is ignored.
    template <class Count>
        requires std::is_arithmetic_v<Count>
    mean_metric& add(double value, Count count) noexcept {
        auto const w = static_cast<double>(count);
        if (w != 0) *this += {value * w, w};
        return *this;
    }
    /// 0 where nothing was added.
    [[nodiscard]] double mean() const noexcept { return weight == 0 ? 0 : sum / weight; }
};

/// The metrics of all ranks, added in the order of the ranks: the same bits everywhere.
/// Collective. Cost: ceil(log2 P) messages. Throws comm_error, the same on every rank.
template <Transport T, Metrics S>
[[nodiscard]] S sum_over_ranks(communicator<T> const& comm, S const& mine) {
    std::vector<S> all(static_cast<std::size_t>(comm.size()));
    all[static_cast<std::size_t>(comm.rank())] = mine;
    detail::call(comm, detail::about<S>("sum_over_ranks", 1),
                 [&](auto over) { return all_gather_small(over, std::span<S>(all)); });
    S sum{};
    for (S const& one : all) sum += one;
    return sum;
}

/// Calls model.evaluate on every batch that `next` returns until it returns none, then adds over the ranks. If the
/// model has `training(bool)`, it is in evaluation mode meanwhile. Afterwards it returns to its previous mode if it
/// also has `bool training() const`, otherwise to training mode. Ranks may have different numbers of batches, or
/// none.
///
///     ddp::sampler order{{.samples = test.size(), .global_batch = 1000, .shuffle = false}, comm};
///     auto const metrics = ddp::evaluate(comm, model, [&] { return order.next(); }, load);
///
/// `model` is anything with evaluate(batch): metrics of the user's own are a struct with +=, returned by the model's
/// evaluate or by that of a small type around the model.
///
/// `next()` returns a std::optional, or a pointer; `load(*next)` the batch. Collective. Returns the sums over all ranks, the
/// same on each.
///
/// Cost    the model's evaluate() per batch, without communication, then one exchange of ceil(log2 P) messages, in
///         which ranks wait for the slowest (timing.collective, 120 s by default, bounds that).
/// Sums    of a rank in the order of its batches, then over the ranks in their order: the same bits on every rank, but
///         not the same for another number of ranks if sums round.
/// Throws  comm_error, the same on every rank: errc::deadline, errc::mismatch, errc::peer_closed and so on.
///         What next, load or the model throws on one rank is rethrown there, and the others get
///         errc::remote_exception: the job has then failed, and the communicator can no longer be used.
template <Transport T, class M, class Next, class Load>
[[nodiscard]] auto evaluate(communicator<T> const& comm, M& model, Next&& next, Load&& load) {
    static_assert(requires { *next(); }, "evaluate: next() returns a std::optional, or a pointer");
    using metrics = std::remove_cvref_t<decltype(model.evaluate(load(*next())))>;
    static_assert(Metrics<metrics>, "evaluate(batch) returns sums that can be added: see ddp::Metrics");
    struct mode {
        M& of;
        bool before = true;
        explicit mode(M& m) : of(m) {
            if constexpr (requires {
                              { std::as_const(of).training() } -> std::convertible_to<bool>;
                          })
                before = std::as_const(of).training();
            if constexpr (requires { of.training(false); }) of.training(false);
        }
        ~mode() {
            if constexpr (requires { of.training(true); }) of.training(before);
        }
    };
    metrics mine{};
    {
        try {
            mode const evaluating(model);
            while (auto const item = next()) mine += model.evaluate(load(*item));
        } catch (...) {
            comm.fail(std::current_exception());
            throw;
        }
    }
    return sum_over_ranks(comm, mine);
}

/// The same for the model of a trainer, between its steps, on all ranks: where training_options::buffers says
/// from_rank_0_at_evaluation, every rank has rank 0's buffers before the first batch, and keeps them.
///
///     auto const metrics = ddp::evaluate(trainer, [&] { return order.next(); }, load);
///
/// Cost    as above; with that policy, also a broadcast of the buffers.
/// Throws  as above; usage_error, on the rank that is at fault, if a step is under way.
template <class M, class T, class Next, class Load>
[[nodiscard]] auto evaluate(data_parallel<M, T>& trainer, Next&& next, Load&& load) {
    trainer.prepare_evaluation();
    return evaluate(trainer.comm(), trainer.model(), std::forward<Next>(next), std::forward<Load>(load));
}

}  // namespace ddp
