/// \file
/// data_parallel: trains one model on all ranks of a communicator as if they were one process.
#pragma once

#include <ddp/core/language.hpp>  // first

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include <ddp/comm/communicator.hpp>
#include <ddp/model/model.hpp>
#include <ddp/model/state_slice.hpp>
#include <ddp/train/buffers.hpp>
#include <ddp/train/events.hpp>
#include <ddp/train/model_step.hpp>
#include <ddp/train/no_sync.hpp>
#include <ddp/train/options.hpp>
#include <ddp/train/policies.hpp>
#include <ddp/train/replica.hpp>
#include <ddp/train/step_engine.hpp>
#include <ddp/train/trainer_core.hpp>
#include <ddp/train/training_progress.hpp>

namespace ddp {

/// The result of data_parallel::step.
struct step_result {
    double loss = 0;           ///< mean over this rank's samples; 0 if it had none
    std::uint64_t weight = 0;  ///< as in finish_result
    double gradient_norm = 0;  ///< as in finish_result
    bool skipped = false;      ///< as in finish_result
    bool stop = false;         ///< as in finish_result
    double previous_loss = 0;  ///< as in finish_result
};

/// A trainer for data-parallel training: the gradient of every step is the mean over the samples of all ranks, and after
/// every step all ranks hold the same bits.
///
///     ddp::data_parallel trainer{model, ddp::sgd{.lr = 0.1}, comm};
///     for (auto const& batch : batches) trainer.step(batch);
///
/// The constructor compares models and settings of all ranks; gives the model the library's memory to work in, if the
/// model can be bound (otherwise each step copies gradients out and values back, two extra passes over each); and
/// broadcasts the values of rank 0. Gradients are reduced bucket by bucket while backward is still running.
///
/// The type of a trainer depends only on model and transport: optimizer, exchange, bucket policy and observer are chosen
/// at run time. A trainer keeps its communicator alive, so model, communicator and trainer may be destroyed in any order.
/// Only one thread may call it; it can neither be copied nor moved. Several trainers may share a communicator, and their
/// steps may overlap; all ranks must call them in the same order. A model has one trainer at a time: once another has
/// been made for it, the first throws usage_error.
///
/// If all ranks of the communicator are on one host, values and gradients are in memory that they share, and only small
/// messages are sent, unless an allreduce algorithm or exchange was passed on some rank. The bits are the same.
///
/// Cost    of the constructor: all-gathers of less than 300 bytes per rank and a broadcast of all values; memory for values,
///         gradients and the optimizer's state (with update::sharded, 1/P of the state). Of a step: the passes of the
///         model, one small exchange of weights, one exchange for each bucket (with long buckets, in total 2 (P-1)/P
///         times the bytes of the gradient sent per rank, unless memory is shared), and the pass of the optimizer; with
///         clipping by the norm, a check for non-finite values, unused::allowed or buffers, one small exchange each.
///         Bytes sent per rank: weights 32 (P-1); with update::sharded, a norm 8 (P-1) for each block of 4,096 elements of
///         its slices, and after an exchange that is not an allreduce, new values, (P-1) sizeof(element) for each element.
/// Throws  comm_error, the same on every rank: errc::model_differs from the constructor if models, optimizers, bucket
///         policies or options differ; errc::gradient if backward leaves out a parameter or reports one twice;
///         errc::replicas_differ if ranks hold different values; errc::mismatch, errc::deadline, errc::peer_closed,
///         errc::peer_silent, errc::remote_exception, errc::transport or errc::frame if ranks or connections fail.
///         ddp::error on every rank: errc::no_samples if the batch is empty on all ranks; errc::nonfinite if
///         training_options::nonfinite asks for it. environment_error on every rank, from the constructor, if one
///         cannot allocate the memory to share. usage_error, on the rank that is at fault, for settings that make no
///         sense and for calls in an order other than described below; on every rank if the exchange refuses the
///         buckets. An exception of the user's model, optimizer, exchange or observer is rethrown on that rank.
///
/// After a comm_error the communicator can no longer be used; completed_steps() and torn() say whether the values can be
/// kept (call them between steps).
template <class M, class T>  // constrained at the constructor: only there does Clang name the operation that is missing
class data_parallel {
    // The order of the constructors is for error messages: GCC lists them from the last to the first.
    using setup = detail::trainer_setup<T, element_of<M>>;
    data_parallel(M& model, communicator<T> const& comm, setup with);

public:
    using element = element_of<M>;

    data_parallel(data_parallel const&) = delete;
    data_parallel& operator=(data_parallel const&) = delete;

    /// The same as the constructor below, for options that are only braces: `{.clip = …}`.
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
    ///  - an allreduce algorithm, or an exchange of your own (ExchangeOver)             (default: automatic_allreduce)
    ///  - a bucket policy (BucketPolicy)                                                 (default: size_capped_buckets)
    ///  - an observer (TrainingObserver), moved in, or held by reference if it is given as std::ref(observer), which
    ///    then outlives the trainer                                                      (default: none)
    template <class Opt, class... Policies>
        requires detail::TrainerArguments<M, T, Opt, Policies...>
    data_parallel(M& model, Opt optimizer, communicator<T> const& comm, Policies... policies)
        : data_parallel(model, comm, setup(std::move(optimizer), std::tuple<Policies...>(std::move(policies)...))) {}
    ~data_parallel() = default;

    /// One step on this rank's batch: forward, backward, mean over all ranks' samples, update. Batches may differ in size
    /// between ranks and be empty on some. Collective. Throws usage_error under a no_sync() guard; otherwise as the class says.
    template <class Batch>
        requires ModelFor<M, Batch>
    step_result step(Batch const& batch) {
        expect_synchronising("step()");
        auto const since = monotonic_clock::now();
        step_.weigh(batch);
        bool const early = !core().late();  // else forward goes first, while values of the last step come
        if (early) begin(0);
        double const loss = step_.forward(batch);
        if (!early) begin(0);
        step_.backward();
        finish_result const result = step_.finish(false);
        account(since);
        return {loss, result.weight, result.gradient_norm, result.skipped, result.stop, result.previous_loss};
    }

    /// Takes part in a step of the other ranks without a batch, for a rank that has no more data: `while (trainer.join())
    /// {}`. Returns false once every rank has called it: nothing has changed then, and every rank stops. If this rank has
    /// accumulated gradients, they go into this step, and the call does not count as the end of its data. Collective; costs what
    /// a step costs without passes. Throws usage_error under a no_sync() guard; otherwise as step().
    bool join() {
        expect_synchronising("join()");
        auto const since = monotonic_clock::now();
        step_.weigh_nothing();
        begin(step_.accumulated() ? 0 : 1);
        step_.forward_absent();
        step_.backward();
        step_.finish(true);
        account(since);
        return !engine().everybody_done();
    }

    // The calls behind step, for gradient accumulation and for loops of your own:
    // forward, accumulate (any number of times), then forward, backward, finish.

    /// Returns the mean loss over the batch, and keeps the weight of the batch for the backward that follows.
    /// Cost: the model's forward pass; without communication, unless layers synchronise statistics or values still arrive
    /// (training_options::overlap_gather). Throws usage_error between backward() and finish(); otherwise as the class says.
    template <class Batch>
        requires ModelFor<M, Batch>
    double forward(Batch const& batch) {
        DDP_EXPECTS(!core().begun(), "forward: a step is under way, which changes values; finish() it first");
        replica().expect_intact();
        step_.weigh(batch);
        return step_.forward(batch);
    }
    /// Backward without communication: adds this batch to the next step's gradient. Local. Cost: the model's backward
    /// pass. Throws usage_error without a forward(), or between backward() and finish().
    void accumulate() {
        DDP_EXPECTS(!core().begun(), "accumulate() comes before the synchronising backward(); finish() the step first");
        DDP_EXPECTS(step_.weighed(), "accumulate() needs a trainer.forward(batch) before it, not the model's own");
        step_.accumulate();
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
    /// Backward that starts the reductions. Nothing may touch the model's values until finish(). Collective; does not wait,
    /// except for the previous step with training_options::overlap_gather. After accumulate(), without a forward() since, it
    /// reduces what is accumulated. Throws usage_error without either, or while a step is under way; otherwise as step().
    void backward() {
        if (unsynchronised_ != 0 && !core().begun()) return accumulate();
        DDP_EXPECTS(!core().begun(), "a step is under way: finish() it before the next one begins");
        DDP_EXPECTS(step_.weighed() || step_.accumulated(),
                    "backward() needs a trainer.forward(batch) before it, not the model's own");
        begin(0);
        step_.backward();
    }
    /// Ends the step: waits for the reductions and the optimizer, and returns when all values are new (with
    /// training_options::overlap_gather, those that this rank steps). The result has
    /// the samples of all ranks (`weight`) and, where clipping by norm or training_options::nonfinite asks for it, the
    /// norm of the mean gradient. Collective. Throws usage_error without a backward(); otherwise as step().
    finish_result finish() {
        if (!core().begun()) expect_synchronising("finish()");
        return step_.finish(false);
    }

    /// Steps that changed the values. After a failure ranks may differ by one: those that had every gradient of a rank that
    /// then failed have completed the step. Ranks with equal numbers hold equal bits.
    [[nodiscard]] std::uint64_t completed_steps() const noexcept { return engine().updates(); }
    /// Continues as if `count` steps had been begun and completed: schedules, bias corrections and the step numbers of
    /// observers count from there, and the next step has no previous loss. Pass the same count on all ranks; for code
    /// that restores values and state. Local, constant time. Throws usage_error, on this rank, unless between_steps().
    void set_completed_steps(std::uint64_t count) {
        expect_between_steps("set_completed_steps");
        step_.set_progress({.completed_steps = count, .begun_steps = count});
    }
    /// The progress of the training, apart from values and state, the same on all ranks. Collective, between steps;
    /// cost: an all-gather of 8 bytes per rank. Throws comm_error; usage_error, on this rank, unless between_steps().
    [[nodiscard]] training_progress progress() {
        expect_between_steps("progress");
        return step_.progress();
    }
    /// Continues from there, like a trainer that has made these steps: for code that restores values and state, such as
    /// checkpoints. Pass the same on all ranks; the number of ranks may differ from that of the run that made the
    /// steps. Local, constant time. Throws usage_error, on this rank, unless between_steps().
    void set_progress(training_progress const& at) {
        expect_between_steps("set_progress");
        step_.set_progress(at);
    }
    /// From the next step on (which includes gradients accumulated already), multiplies each group's learning rate by
    /// `factor` in addition to the schedule's factor: for rates that the program decides on while it trains
    /// (reduce_on_plateau). Stays until the next call; checkpoints keep it.
    /// Collective: ranks compare what they pass before anything changes. Cost: an all-gather of 8 bytes per rank. Throws
    /// comm_error; usage_error, the same on every rank, where ranks pass different factors, or one that is negative or not
    /// finite: the factor then stays what it was; and usage_error on this rank while a step is under way.
    void set_rate_factor(double factor) {
        settle();
        core().set_rate_factor(factor);
    }
    /// The factor of the last set_rate_factor(); 1 before the first.
    [[nodiscard]] double rate_factor() const noexcept { return core().optimizer().rate_factor(); }
    /// Freezes every parameter whose name matches the pattern (see name_fits), from the next step on: neither its value
    /// nor its optimizer state changes, not even by weight decay, whatever backward reports, and its gradient counts as 0
    /// in the norm. Those of training_options::frozen have buckets of their own, unless the model is contiguous. A bucket
    /// without trained parameters is not exchanged; others from their first to their last one, with zeros for frozen ones
    /// between. An exchange that keeps a state sends whole buckets, and what it still holds of frozen parameters first.
    /// Checkpoints store which parameters are frozen. Collective: ranks compare their arguments before anything changes.
    /// Cost: an all-gather of 8 bytes per rank. Throws comm_error; usage_error on every rank if ranks pass different
    /// patterns, or no name matches, and on this rank unless between_steps().
    void freeze(std::string_view pattern) { mark_frozen("freeze", pattern, 1); }
    /// Undoes freeze() and training_options::frozen for every parameter whose name matches. Its optimizer state continues
    /// from where it was. Otherwise like freeze().
    void unfreeze(std::string_view pattern) { mark_frozen("unfreeze", pattern, 0); }
    /// By parameter: not 0 where it is frozen.
    [[nodiscard]] std::span<std::uint8_t const> frozen() const noexcept { return core().frozen(); }
    /// Freezes exactly those parameters whose mark is not 0, in the form that frozen() returns: for code that restores a
    /// training, such as checkpoints. Collective, like freeze(). Throws comm_error; usage_error on every rank if ranks pass
    /// different marks, or if there is not one for each parameter, and on this rank unless between_steps().
    void set_frozen(std::span<std::uint8_t const> marks) {
        expect_between_steps("set_frozen");
        core().set_frozen(marks);
    }
    /// With training_options::overlap_gather: waits until every value is that of the last step. Functions of the trainer
    /// that read values, including model(), do this themselves; call it before a program reads the memory of the model in
    /// another way. Not collective: each rank may call it or not. Does nothing without that option. Cost: the rest of the
    /// last step's gather, at most (P-1)/P of the values' bytes received. Throws comm_error if ranks or connections fail.
    void settle() { step_.settle(); }
    /// Whether no step is under way and no gradients are accumulated for the next one. A step is under way from its
    /// backward() until finish() returns; forward() alone begins none (docs/semantics.md).
    [[nodiscard]] bool between_steps() const noexcept { return !core().begun() && !step_.accumulated(); }

    /// Asks all ranks to stop training: they learn of it in the same step, the next one that this rank begins
    /// (`finish_result::stop`; after join(), stop_agreed()), and in every one after that. What they do then is up to the program.
    /// Costs no message. From any thread, and from a signal handler.
    void request_stop() noexcept { stop_requested_.store(true); }
    /// The `stop` of the last step's result, for loops that end in join().
    [[nodiscard]] bool stop_agreed() const noexcept { return engine().stop(); }
    /// The mean loss over the samples of all ranks in the step before the last one: the `previous_loss` of the last
    /// step's result.
    [[nodiscard]] double previous_loss() const noexcept { return engine().previous_loss(); }
    /// After a failure: whether the step that failed has changed some values but not all. They must not be used then.
    [[nodiscard]] bool torn() noexcept {
        step_.settle_quietly();
        core().keep_values();
        return engine().torn();
    }
    /// The model, with the values of the last step. Waits for them with training_options::overlap_gather. After a
    /// failure, see torn().
    [[nodiscard]] M& model() noexcept {
        step_.settle_quietly();
        return replica().model();
    }
    /// The communicator that the trainer was given.
    [[nodiscard]] communicator<T> const& comm() const noexcept { return core().comm(); }
    /// Whether gradients are added, and values stored, in memory that all ranks see; otherwise they are sent as messages.
    [[nodiscard]] bool shares_memory() const noexcept { return core().shares_memory(); }
    /// How long steps have taken on this rank since the trainer was made, or reset_times(), and how long they waited.
    [[nodiscard]] step_times const& times() const noexcept { return core().times(); }
    void reset_times() noexcept { core().times() = {}; }
    /// What an exchange with compression has done since the trainer was made: how much less it has sent, how
    /// accurately, and how long it took. All zero if it keeps no statistics, like a plain allreduce. Local. Throws
    /// usage_error while a step is under way.
    [[nodiscard]] exchange_statistics statistics() const {
        DDP_EXPECTS(!core().begun(), "a step is under way: finish() it before its exchange's figures are looked at");
        return engine().exchange_statistics();
    }

    /// The parameters; their values are up to date between steps.
    [[nodiscard]] std::span<parameter<element> const> parameters() noexcept {
        step_.settle_quietly();
        return replica().parameters();
    }

    /// Calls `visit` for each piece of state that is kept from step to step on this rank, besides values and the number
    /// of steps: first the slots of the optimizer, by parameter, then what the exchange keeps. With update::sharded,
    /// which ranks that share memory use by default, this rank has slices: each element is visited once across all
    /// ranks. With update::replicated every rank visits all of them, with the same bits. What is visited may be
    /// written. Local; allocates. Throws usage_error while a step is under way.
    void for_each_state(state_visitor visit) {
        DDP_EXPECTS(!core().begun(), "a step is under way: finish() it before its state is looked at");
        settle();
        engine().for_each_state(visit);
    }

    /// By parameter: the name of the algorithm that steps it (`name` of an optimizer); empty if it has none.
    [[nodiscard]] std::vector<std::string> optimizer_names() {
        return detail::names_by_parameter(core().optimizer(), parameters());
    }
    /// The settings that decide what is trained and that no tensor or hash() contains, in words by name: "optimizer",
    /// "schedule", "clip", "nonfinite", "buffers" and "exchange" ("none" for one that sends gradients as they are).
    /// Checkpoints keep them, and resume says what differs. Local; allocates.
    [[nodiscard]] string_map settings_in_words() const {
        string_map all = core().options().settings_in_words();
        all.emplace("optimizer", engine().optimizer_words());
        all.emplace("exchange", engine().exchange_words());
        return all;
    }
    /// Whether ranks hold the same buffers after each step, as training_options::buffers says.
    [[nodiscard]] bool buffers_alike() const noexcept { return core().options().buffers_alike(); }

    /// Makes the model's buffers the same on all ranks, as training_options::buffers says, otherwise those of rank 0.
    /// Collective, between steps; does nothing without buffers. Only needed with buffers::left_alone and
    /// buffers::from_rank_0_at_evaluation: with the other values, each step does it. Cost: an allreduce of averaged buffers
    /// in double, a broadcast of the others. Throws comm_error; usage_error, on this rank, if a step is under way.
    void synchronise_buffers() {
        DDP_EXPECTS(!core().begun(), "synchronise_buffers: a step is under way; finish() it first");
        step_.synchronise_buffers(false);
    }

    /// What evaluate(trainer, …) does first: if training_options::buffers is buffers::from_rank_0_at_evaluation, gives
    /// rank 0's buffers to every rank. Collective. Throws comm_error; usage_error, on this rank, if a step is under way.
    void prepare_evaluation() {
        DDP_EXPECTS(!core().begun(), "evaluate: a step is under way, and may change values; finish() it first");
        settle();
        if (core().options().buffers == buffers::from_rank_0_at_evaluation) synchronise_buffers();
    }

    /// Returns a digest of all values, in the order of parameters(). Local. Cost: one pass over the values.
    [[nodiscard]] std::uint64_t digest_of_values() {
        settle();
        return replica().digest_of_values();
    }
    /// Returns whether all ranks hold the same bits: in values, and in buffers if training_options::buffers makes them
    /// the same after each step (from a forward until finish() they differ). Collective. Cost: one pass over them, an
    /// all-gather of 8 bytes per rank. Throws comm_error.
    [[nodiscard]] bool replicas_identical() { return core().all_alike(step_.digest_of_replica()); }

private:
    void expect_between_steps(char const* what) {
        DDP_EXPECTS(!core().begun(), std::string(what) + ": a step is under way; finish() it first");
        DDP_EXPECTS(!step_.accumulated(),
                    std::string(what) +
                        ": gradients of accumulate() wait for their step; make it first, by backward() "
                        "and finish()");
        settle();
    }
    void expect_synchronising(char const* what) const {
        DDP_EXPECTS(unsynchronised_ == 0,
                    std::string(what) +
                        " under a no_sync() guard: backward() only adds up there, and no step ends. "
                        "Let the guard's scope end first");
    }
    [[nodiscard]] detail::trainer_core<T, element>& core() noexcept { return step_.core(); }
    [[nodiscard]] detail::trainer_core<T, element> const& core() const noexcept { return step_.core(); }
    [[nodiscard]] ddp::replica<M>& replica() noexcept { return step_.replica(); }
    [[nodiscard]] step_engine<T, element>& engine() const noexcept { return core().engine(); }
    void mark_frozen(char const* what, std::string_view pattern, std::uint8_t mark) {
        expect_between_steps(what);
        core().set_frozen(what, pattern, mark);
    }

    void begin(std::uint32_t done) { step_.begin(done, stop_requested_.load()); }
    void account(time_point since) noexcept {
        ++core().times().steps;
        core().times().total += monotonic_clock::now() - since;
    }

    detail::model_step<M, T> step_;
    int unsynchronised_ = 0;  // guards of no_sync()
    std::atomic<bool> stop_requested_{false};
};

template <class M, class T>
data_parallel<M, T>::data_parallel(M& model, communicator<T> const& comm, setup with)
    : step_(model, comm, std::move(with)) {}

}  // namespace ddp
