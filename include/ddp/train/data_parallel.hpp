/// \file
/// data_parallel: trains one model on all ranks of a communicator as if they were one process.
#pragma once

#include <ddp/core/language.hpp>  // first

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include <ddp/comm/communicator.hpp>
#include <ddp/model/model.hpp>
#include <ddp/model/state_slice.hpp>
#include <ddp/train/agreement.hpp>
#include <ddp/train/buffers.hpp>
#include <ddp/train/events.hpp>
#include <ddp/train/no_sync.hpp>
#include <ddp/train/options.hpp>
#include <ddp/train/policies.hpp>
#include <ddp/train/replica.hpp>
#include <ddp/train/step_engine.hpp>
#include <ddp/train/trainer_core.hpp>
#include <ddp/train/user_code.hpp>

namespace ddp {

/// What step returns.
struct step_result {
    double loss = 0;           ///< mean over this rank's samples; 0 where it had none
    std::uint64_t weight = 0;  ///< as finish_result's
    double gradient_norm = 0;  ///< as finish_result's
    bool skipped = false;      ///< as finish_result's
    bool stop = false;         ///< as finish_result's
    double previous_loss = 0;  ///< as finish_result's
};

/// Data-parallel training: the gradient of every step is the mean over the samples of all ranks, and after every step all
/// ranks hold the same bits.
///
///     ddp::data_parallel trainer{model, ddp::sgd{.lr = 0.1}, comm};
///     for (auto const& batch : batches) trainer.step(batch);
///
/// The constructor compares models and settings of all ranks, gives the model library memory to work in where it can be
/// bound (otherwise gradients are copied out and values back in: two extra passes over each a step), and broadcasts rank
/// 0's values. Gradients are exchanged bucket by bucket while backward still runs.
///
/// Composed of a replica (the model and its passes) and a step_engine (what happens to gradients and values) over a
/// communicator. Its type depends on model and transport only: what optimizes, exchanges and observes is chosen at run time.
///
/// Model, communicator and trainer are destroyed in any order: a trainer holds the communicator. One thread calls it. Any
/// number of trainers may share a communicator, also within their steps; all ranks call them in the same order.
///
/// Where all ranks of the communicator are on one host, the arenas are memory that they share, unless a rank has asked for
/// an algorithm or exchange of its own: nothing but small messages travels then (memory_engine). The same bits.
///
/// Cost    of the constructor: an all-gather of 128 bytes a rank and a broadcast of all values; memory for values,
///         gradients and the optimizer's state (with update::sharded 1/P of the state). Of a step: the model's passes,
///         one small exchange of weights, one of each bucket (in all 2 (P-1)/P times the gradient's bytes sent a rank,
///         where buckets are long and memory is not shared), and the optimizer's pass.
/// Throws  comm_error, the same on every rank: errc::model_differs from the constructor where models, optimizers,
///         bucket policies or options differ; errc::gradient where backward leaves a parameter out or reports it twice;
///         errc::mismatch, errc::deadline, errc::peer_closed, errc::peer_silent, errc::remote_exception,
///         errc::transport or errc::frame where ranks or connections fail. error (errc::no_samples) for a batch that is
///         empty on every rank; error (errc::nonfinite) where options say so; comm_error (errc::replicas_differ) where
///         ranks hold other values. usage_error, on the rank that is at fault, for settings that make no sense and for
///         calls in another order than below. What the user's own model throws comes back as itself on that rank.
///
/// After a comm_error the communicator cannot be used any more; completed_steps() and torn() tell whether the values can be
/// kept (call them between steps).
///
/// What each argument must be is said at the constructor, not here: Clang names the operation that is missing only there.
template <class M, class T>
class data_parallel {
    // Constructors stand in the order in which compilers are to speak of them: GCC begins with the last.
    using setup = detail::trainer_setup<T, element_of<M>>;
    data_parallel(M& model, communicator<T> const& comm, setup with);

public:
    using element = element_of<M>;

    data_parallel(data_parallel const&) = delete;
    data_parallel& operator=(data_parallel const&) = delete;

    /// As the constructor below, with the options' braces alone: {.clip = …}.
    template <class Opt, class... Policies>
        requires detail::TrainerArguments<M, T, Opt, Policies...>
    data_parallel(M& model, Opt optimizer, communicator<T> const& comm, training_options const& options,
                  Policies... policies)
        : data_parallel(
              model, comm,
              setup(std::move(optimizer), std::tuple<training_options, Policies...>(options, std::move(policies)...))) {
    }
    /// After the communicator come, in any order and each at most once:
    ///  - training_options                                                               (default: {})
    ///  - an allreduce algorithm, or an exchange of one's own (ExchangeOver)             (default: automatic_allreduce)
    ///  - a bucket policy (BucketPolicy)                                                 (default: size_capped_buckets)
    ///  - an observer (TrainingObserver), moved in, or held by reference if it is given as std::ref(observer), which
    ///    then outlives the trainer                                                      (default: none)
    template <class Opt, class... Policies>
        requires detail::TrainerArguments<M, T, Opt, Policies...>
    data_parallel(M& model, Opt optimizer, communicator<T> const& comm, Policies... policies)
        : data_parallel(model, comm, setup(std::move(optimizer), std::tuple<Policies...>(std::move(policies)...))) {}
    ~data_parallel() {
        if (core_.begun()) core_.abandon_step();
        if (sums_ != nullptr) sums_->leave();
    }

    /// One step on this rank's batch: forward, backward, mean over all ranks' samples, update. Batches may differ in size
    /// between ranks and be empty on some.
    template <class Batch>
        requires ModelFor<M, Batch>
    step_result step(Batch const& batch) {
        expect_synchronising("step()");
        auto const since = monotonic_clock::now();
        weigh(batch);
        begin(0);
        double const loss = forward_weighed(batch);
        backward_last();
        finish_result const result = finish(false);
        account(since);
        return {loss, result.weight, result.gradient_norm, result.skipped, result.stop, result.previous_loss};
    }

    /// Takes part in a step of the others without a batch, for a rank that is out of data: while (trainer.join()) {}.
    /// Returns false once every rank has called it: nothing has changed then, and every rank stops. If this rank has
    /// accumulated gradients, they go into this step, and the call does not count as the end of its data.
    bool join() {
        expect_synchronising("join()");
        auto const since = monotonic_clock::now();
        weight_ = 0;
        begin(accumulated_ == 0 ? 1 : 0);
        if (replica_.needs_all_ranks())
            tell_peers([&] {
                if (accumulated_ == 0) replica_.begin_step(engine().updates());
                replica_.forward_absent();
            });
        backward_last();
        finish(true);
        account(since);
        return !engine().everybody_done();
    }

    // The calls behind step, for gradient accumulation and for loops of one's own:
    // forward, accumulate (any number of times), then forward, backward, finish.

    /// Mean loss over the batch; remembers the batch's weight for the backward that follows.
    template <class Batch>
        requires ModelFor<M, Batch>
    double forward(Batch const& batch) {
        replica_.expect_intact();
        weigh(batch);
        return forward_weighed(batch);
    }
    /// Backward without communication: adds this batch to the next step's gradient.
    void accumulate() {
        DDP_EXPECTS(!core_.begun(), "accumulate() comes before the synchronising backward(); finish() the step first");
        DDP_EXPECTS(weighed_,
                    "accumulate() goes back through trainer.forward(batch): call that first, not the model's");
        weighed_ = false;
        if (weight_ != 0 || replica_.needs_all_ranks()) run_backward(false);
    }
    /// While the guard lives, backward() is accumulate(), for code that calls the same passes for every batch:
    ///
    ///     {
    ///         auto const guard = trainer.no_sync();
    ///         for (auto const& batch : micro_batches) trainer.forward(batch), trainer.backward();
    ///     }
    ///     trainer.forward(last), trainer.backward(), trainer.finish();
    ///
    /// The guard is checked when backward() begins; a step whose backward() was called outside may be finished inside. Throws
    /// usage_error if step(), join(), or finish() without such a step, is called under it.
    [[nodiscard]] no_sync_guard no_sync() noexcept { return no_sync_guard(unsynchronised_); }
    /// Backward that starts the reductions. Nothing may touch the model's values until finish().
    void backward() {
        if (unsynchronised_ != 0 && !core_.begun()) return accumulate();
        DDP_EXPECTS(!core_.begun(), "a step is under way: finish() it before the next one begins");
        DDP_EXPECTS(weighed_ || accumulated_ != 0,
                    "backward() goes back through trainer.forward(batch): call that first, not the model's");
        begin(0);
        backward_last();
    }
    /// Ends the step: waits for the reductions and the optimizer, and returns when all values are new. The result has
    /// the samples of all ranks (`weight`) and, where clipping by norm or training_options::nonfinite asks for it, the
    /// norm of the mean gradient.
    finish_result finish() {
        if (!core_.begun()) expect_synchronising("finish()");
        return finish(false);
    }

    /// Steps that changed the values. After a failure ranks may differ by one: those that had every gradient of a rank that
    /// then failed have completed the step. Ranks with equal numbers hold equal bits.
    [[nodiscard]] std::uint64_t completed_steps() const noexcept { return engine().updates(); }
    /// Goes on as if so many steps had been completed: schedules and corrections of bias count from there. Between steps,
    /// the same on all ranks; for code that restores values and state, as checkpoints does.
    void set_completed_steps(std::uint64_t count) {
        DDP_EXPECTS(between_steps(), "set_completed_steps: a step is under way; finish() it first");
        core_.set_updates(count);
    }
    /// From the next step on each group's learning rate is multiplied by `factor` as well as by the schedule's: for rates
    /// that the program decides on while it trains (reduce_on_plateau). Stays until the next call; checkpoints keep it.
    /// Collective, between steps: ranks compare what they pass before anything changes.
    /// Cost: an all-gather of 8 bytes a rank. Throws usage_error, the same on every rank, where ranks pass different factors, or
    /// one that is negative or not finite: the factor then stays what it was.
    void set_rate_factor(double factor) { core_.set_rate_factor(factor); }
    /// The factor of the last set_rate_factor(); 1 before the first.
    [[nodiscard]] double rate_factor() const noexcept { return core_.optimizer().rate_factor(); }
    /// Freezes every parameter whose name fits the pattern (see name_fits), from the next step on: neither value nor optimizer state
    /// changes, decay included, whatever backward reports; its gradient counts as 0 in the norm. A bucket of nothing but frozen
    /// parameters is not exchanged: those frozen by training_options::frozen have buckets of their own, unless the model is
    /// `contiguous`; others share theirs and travel as zeros. Checkpoints keep which parameters are frozen.
    /// Collective, between steps: ranks compare what they pass before anything changes. Cost: an all-gather of 8 bytes a rank.
    /// Throws usage_error on every rank where ranks pass different patterns, or no name fits.
    void freeze(std::string_view pattern) { mark_frozen("freeze", pattern, 1); }
    /// Undoes freeze(), also of training_options::frozen, for every parameter whose name fits. Optimizer state goes on from where it
    /// was. As freeze().
    void unfreeze(std::string_view pattern) { mark_frozen("unfreeze", pattern, 0); }
    /// By parameter: not 0 where it is frozen.
    [[nodiscard]] std::span<std::uint8_t const> frozen() const noexcept { return core_.frozen(); }
    /// Freezes exactly the parameters whose mark is not 0, as frozen() shows them: for code that restores a training, as checkpoints
    /// does. Collective, between steps, as freeze(). Throws usage_error on every rank where ranks pass different marks, or
    /// another number of them than there are parameters.
    void set_frozen(std::span<std::uint8_t const> marks) {
        DDP_EXPECTS(between_steps(), "set_frozen: a step is under way; finish() it first");
        core_.set_frozen(marks);
    }
    /// Neither is a step under way, nor has accumulate() left gradients for the next one.
    [[nodiscard]] bool between_steps() const noexcept { return !core_.begun() && accumulated_ == 0; }

    /// Asks all ranks to stop training: they learn of it in the same step, the next one that this rank begins
    /// (`finish_result::stop`; after join(), stop_agreed()), and in every one after that. What they do then is up to the program.
    /// Costs no message. From any thread, and from a signal handler.
    void request_stop() noexcept { stop_requested_.store(true); }
    /// What the last step's result said, for loops that end in join().
    [[nodiscard]] bool stop_agreed() const noexcept { return engine().stop(); }
    /// Mean loss over all ranks' samples of the step before the last one: what the last step's result said.
    [[nodiscard]] double previous_loss() const noexcept { return engine().previous_loss(); }
    /// After a failure: whether only some values took part in the step that failed. Such state must not be kept.
    [[nodiscard]] bool torn() const noexcept {
        core_.keep_values();
        return engine().torn();
    }
    [[nodiscard]] M& model() noexcept { return replica_.model(); }
    [[nodiscard]] communicator<T> const& comm() const noexcept { return core_.comm(); }
    /// Whether gradients are added, and values stored, in memory that all ranks see; else they travel as messages.
    [[nodiscard]] bool shares_memory() const noexcept { return core_.shares_memory(); }
    [[nodiscard]] step_times const& times() const noexcept { return core_.times(); }
    void reset_times() noexcept { core_.times() = {}; }
    /// What an exchange that sends less has done since the trainer was made: how much less, how exactly, in what time. All zero where
    /// it keeps no account (a plain allreduce). Local; between steps.
    [[nodiscard]] exchange_statistics statistics() const {
        DDP_EXPECTS(!core_.begun(), "a step is under way: finish() it before its exchange's figures are looked at");
        return engine().exchange_statistics();
    }

    /// The parameters, their values in memory that is current between steps.
    [[nodiscard]] std::span<parameter<element> const> parameters() const noexcept { return replica_.parameters(); }

    /// Shows each piece of state that is kept from step to step on this rank besides values and the number of steps: first the
    /// optimizer's slots, by parameter; then what the exchange keeps. With update::sharded, which ranks that share memory
    /// use unless told otherwise, this rank holds slices: of all ranks together every element is shown once; with
    /// update::replicated every rank shows all, and the same bits. What is shown may be written. Between steps; local; allocates.
    void for_each_state(state_visitor visit) {
        DDP_EXPECTS(!core_.begun(), "a step is under way: finish() it before its state is looked at");
        engine().for_each_state(visit);
    }

    /// Makes the model's buffers alike on all ranks, as training_options::buffers says, or else by rank 0's. Collective, between
    /// steps; without buffers nothing happens. After each step it is done already, unless they are left_alone or go to all
    /// from_rank_0_at_evaluation.
    void synchronise_buffers() {
        if (comm().size() == 1) return;
        std::vector<model_buffer> all;
        tell_peers([&] { all = replica_.buffers(); });
        core_.synchronise_buffers(all);
    }

    /// What evaluate(trainer, …) begins with: gives every rank rank 0's buffers where training_options::buffers asks for it at
    /// each evaluation. Collective. Throws usage_error, on this rank, if a step is under way.
    void prepare_evaluation() {
        DDP_EXPECTS(!core_.begun(), "evaluate: a step is under way, and may change values; finish() it first");
        if (core_.options().buffers == buffers::from_rank_0_at_evaluation) synchronise_buffers();
    }

    /// Digest of all values, in the order of parameters(). Local; cost: one pass over the values.
    [[nodiscard]] std::uint64_t digest_of_values() const { return replica_.digest_of_values(); }
    /// Collective: whether all ranks hold the same bits; in buffers too, where training_options::buffers makes them alike after
    /// each step.
    [[nodiscard]] bool replicas_identical() {
        std::uint64_t mine = digest_of_values();
        if (core_.options().buffers_alike()) mine ^= detail::digest_of(replica_.buffers());
        return core_.all_alike(mine);
    }

private:
    void expect_synchronising(char const* what) const {
        DDP_EXPECTS(unsynchronised_ == 0,
                    std::string(what) +
                        " under a no_sync() guard: backward() only adds up there, and no step ends. "
                        "Let the guard's scope end first");
    }
    [[nodiscard]] step_engine<T, element>& engine() const noexcept { return core_.engine(); }
    void mark_frozen(char const* what, std::string_view pattern, std::uint8_t mark) {
        DDP_EXPECTS(between_steps(), std::string(what) + ": a step is under way; finish() it first");
        core_.set_frozen(what, pattern, mark);
    }

    void begin(std::uint32_t done) {
        DDP_EXPECTS(!core_.begun(), "a step is under way: finish() it before the next one begins");
        comm().check();
        replica_.expect_intact();
        replica_.copy_values_in();  // the user may have changed them
        core_.begin({.weight = accumulated_ + weight_,
                     .done = done,
                     .stop = stop_requested_.load() ? 1u : 0u,
                     .loss = loss_before_});
    }
    template <class Batch>
    void weigh(Batch const& batch) {
        tell_peers([&] { weight_ = weight_of(model(), batch); });
        weighed_ = true;
    }

    template <class Batch>
    double forward_weighed(Batch const& batch) {
        if (weight_ == 0 && !replica_.needs_all_ranks()) return 0;  // skipped; backward will be as well
        return tell_peers([&] {
            if (accumulated_ == 0) replica_.begin_step(engine().updates());
            core_.note(flight::forward);
            double const loss = replica_.forward(batch);
            loss_ += loss * static_cast<double>(weight_);
            return loss;
        });
    }

    void backward_last() {
        run_backward(true);
        core_.backward_done(replica_.used());
    }
    void run_backward(bool last) {
        weighed_ = false;
        bool silent = true;
        core_.note(flight::backward);
        std::string complaint;
        tell_peers([&] {
            try {
                replica_.backward({.weight = weight_,
                                   .empty = replica_.needs_all_ranks(),
                                   .accumulate = accumulated_ != 0,
                                   .last = last,
                                   .unused = core_.options().unused,
                                   .frozen = core_.frozen()},
                                  [this, &silent](std::size_t i, std::size_t first, std::size_t count) noexcept {
                                      if (std::exchange(silent, false)) core_.note(flight::gradient);
                                      core_.report(i, first, count);
                                  });
            } catch (gradient_error const& e) {
                complaint = e.complaint();
            }
        });
        if (!complaint.empty()) core_.fail_gradient(complaint);
        accumulated_ += std::exchange(weight_, 0);
    }

    finish_result finish(bool may_be_empty) {
        DDP_EXPECTS(core_.begun(), "finish() ends a step that backward() has begun");
        finish_result const result = core_.wait(monotonic_clock::now());
        accumulated_ = 0;
        loss_before_ = std::exchange(loss_, 0.0);
        if (engine().found_nonfinite()) core_.report_nonfinite();
        if (result.weight != 0 && !result.skipped) tell_peers([&] { replica_.values_changed(); });
        if (result.weight != 0 && core_.options().buffers_alike()) synchronise_buffers();
        if (result.weight == 0 && (!may_be_empty || !engine().everybody_done()))
            throw error(errc::no_samples,
                        "the batch is empty on every rank: there is no mean over no samples. Nothing was changed; a "
                        "rank that is out of data calls trainer.join().");
        return result;
    }
    void account(time_point since) noexcept {
        ++core_.times().steps;
        core_.times().total += monotonic_clock::now() - since;
    }

    /// Runs the user's code; what it throws fails the step on every rank and comes back as itself here.
    template <class F>
    decltype(auto) tell_peers(F&& f) {
        return detail::run_user_code(std::forward<F>(f), [this](std::exception_ptr thrown) { core_.fail(thrown); });
    }

    replica<M> replica_;
    detail::trainer_core<T, element> core_;
    std::shared_ptr<detail::trainer_sums<T>> sums_;  // what the model adds by, where it does

    std::uint64_t weight_ = 0;       // of the batch that forward saw last
    std::uint64_t accumulated_ = 0;  // of the passes since the last step
    double loss_ = 0;                // of the forwards since the last step: mean times weight, added up
    double loss_before_ = 0;         // of the last step
    bool weighed_ = false;           // there was a forward that no backward has gone through yet
    int unsynchronised_ = 0;         // guards of no_sync()
    std::atomic<bool> stop_requested_{false};
};

template <class M, class T>
data_parallel<M, T>::data_parallel(M& model, communicator<T> const& comm, setup with)
    : replica_(model),
      core_(comm, std::move(with), replica_.parameters(),
            {detail::hash_of(model), ready_releases<M> && replica<M>::bound, replica<M>::placed, replica_.buffers()}) {
    if constexpr (requires { model.join_ranks(sums_); }) {
        sums_ = std::make_shared<detail::trainer_sums<T>>(comm);
        model.join_ranks(sums_);
    }
    replica_.attach(core_.memory());
}

}  // namespace ddp
