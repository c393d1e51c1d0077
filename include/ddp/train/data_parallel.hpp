/// \file
/// data_parallel: trains one model on all ranks of a communicator as if they were one process.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <ddp/collective/algorithms/automatic_allreduce.hpp>
#include <ddp/collective/broadcast.hpp>
#include <ddp/comm/communicator.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/kernel/kernel.hpp>
#include <ddp/model/layout.hpp>
#include <ddp/model/model.hpp>
#include <ddp/model/parameter_list.hpp>
#include <ddp/optim/optimizer.hpp>
#include <ddp/train/agreement.hpp>
#include <ddp/train/arena.hpp>
#include <ddp/train/bucket.hpp>
#include <ddp/train/events.hpp>
#include <ddp/train/options.hpp>
#include <ddp/train/ready_reports.hpp>
#include <ddp/train/reducer.hpp>
#include <ddp/train/stepper.hpp>

namespace ddp {

/// What step returns.
struct step_result {
    double loss = 0;           ///< mean over this rank's samples; 0 where it had none
    std::uint64_t weight = 0;  ///< samples of all ranks; 0: nobody had any, and nothing changed
    double gradient_norm = 0;  ///< of the mean gradient before clipping, where clipping asks for it
};

/// Where the time of the steps went, on the thread that calls them.
struct step_times {
    std::uint64_t steps = 0;
    std::chrono::nanoseconds total{};    ///< in step(); loops of one's own are not counted
    std::chrono::nanoseconds waited{};   ///< in step() or finish(): waiting for communication after backward had ended
    std::chrono::nanoseconds stepped{};  ///< likewise, in the optimizer; no part of waited
};

/// Data-parallel training: the gradient of every step is the mean over the samples of all ranks, and after every step all
/// ranks hold the same bits.
///
///     ddp::data_parallel trainer{model, ddp::sgd{.lr = 0.1}, comm};
///     for (auto const& batch : batches) trainer.step(batch);
///
/// The constructor compares models and settings of all ranks, gives the model library memory to work in where it can be
/// bound (otherwise gradients are copied out and values back in: two extra passes over each a step), and broadcasts rank
/// 0's values. Gradients are reduced bucket by bucket while backward still runs.
///
/// Model, communicator and trainer are destroyed in any order: a trainer holds the communicator. One thread calls it.
/// Throws comm_error, the same on every rank; what the user's own model throws comes back as itself on that rank.
/// After a comm_error the communicator has failed for good; completed_steps() and torn() say what the values are worth
/// (ask between steps). Any number of trainers may share a communicator, also within their steps.
///
/// What each argument must be is said at the constructor, not here: Clang names the operation that is missing only there.
template <class M, class Opt, class T, class A = automatic_allreduce, class Obs = null_observer>
class data_parallel {
public:
    using element = element_of<M>;

    template <class Buckets = size_capped_buckets>
        requires Model<M> && Transport<T> && OptimizerFor<Opt, element_of<M>> && AllreduceOver<A, T, element_of<M>> &&
                     BucketPolicy<Buckets> && TrainingObserver<Obs>
    data_parallel(M& model, Opt optimizer, communicator<T> const& comm, training_options const& options = {},
                  A algorithm = {}, Buckets const& buckets = {}, Obs observer = {})
        : model_(model),
          comm_(comm),
          options_(options),
          parameters_(detail::list_parameters(model)),
          observer_(observer),
          home_(std::this_thread::get_id()),
          reports_(parameters_.size()) {
        expect_uncontracted_kernels();
        if constexpr (requires { optimizer.validate(); }) optimizer.validate();
        options_.validate<element>();
        std::vector<std::size_t> const groups =
            detail::groups_of(optimizer, std::span<parameter<element> const>(parameters_));
        std::vector<std::size_t> counts;
        for (parameter<element> const& p : parameters_) counts.push_back(p.value.size());
        std::size_t const grain = reducer_type::slice_grain(options_.norm_clip() != nullptr);
        bucket_plan const plan = buckets.plan({counts, sizeof(element), grain});
        memory_ = detail::arena<element>(layout(counts, plan.order, sizeof(element)));
        detail::bucket_map map(plan, memory_.where(), grain);

        detail::agenda mine;
        mine.hashes = {version_number,
                       detail::hash_of(model),
                       map.hash(memory_.where()),
                       digest{}.add(algorithm.name).add(detail::hash_of(algorithm)).value(),
                       digest{}.add(optimizer.hash()).add(std::span<std::size_t const>(groups)).value(),
                       options_.hash()};
        comm_.exclusively([&] {  // it joins the scheduler, which the communication thread may be driving
            reducer_ = std::make_unique<reducer_type>(
                comm_.tasks(), comm_.members(), algorithm, optimizer, memory_.where(), std::move(map), options_,
                ready_releases<M> && bound, memory_.gradients(), memory_.values(), observer_, groups);
        });
        try {
            start(mine);
        } catch (...) {
            detach();
            throw;
        }
    }
    data_parallel(data_parallel const&) = delete;
    data_parallel& operator=(data_parallel const&) = delete;
    ~data_parallel() {
        if (begun_) comm_.fail("its program left a training step before the step had ended, perhaps by an exception");
        end_step();
        detach();
    }

    /// One step on this rank's batch: forward, backward, mean over all ranks' samples, update. Batches may differ in size
    /// between ranks and be empty on some.
    template <class Batch>
        requires ModelFor<M, Batch>
    step_result step(Batch const& batch) {
        auto const since = clock::now();
        weigh(batch);
        begin(0);
        double const loss = forward_quietly(batch, weight_);
        backward_quietly();
        step_result const result = finish(loss);
        account(since);
        return result;
    }

    /// Takes part without a batch, for a rank that is out of data. Returns false once every rank says so; nothing has
    /// changed then, and every rank stops. What was accumulated is no end yet: it goes into this step.
    bool step() {
        auto const since = clock::now();
        weight_ = 0;
        begin(accumulated_ == 0 ? 1 : 0);
        backward_quietly();
        finish(0, true);
        account(since);
        return !reducer_->everybody_done();
    }

    // The calls behind step, for gradient accumulation and for loops of one's own:
    // forward, accumulate (any number of times), then forward, backward, finish.

    /// Mean loss over the batch; remembers the batch's weight for the backward that follows.
    template <class Batch>
        requires ModelFor<M, Batch>
    double forward(Batch const& batch) {
        expect_intact();
        weigh(batch);
        return forward_quietly(batch, weight_);
    }
    /// Backward without communication: adds this batch to the next step's gradient.
    void accumulate() {
        DDP_EXPECTS(!begun_, "accumulate() comes before the synchronising backward(); finish() the step first");
        DDP_EXPECTS(weighed_,
                    "accumulate() goes back through trainer.forward(batch): call that first, not the model's");
        run_backward(false);
    }
    /// Backward that starts the reductions. Nothing may touch the model's values until finish().
    void backward() {
        DDP_EXPECTS(!begun_, "a step is under way: finish() it before the next one begins");
        DDP_EXPECTS(weighed_ || accumulated_ != 0,
                    "backward() goes back through trainer.forward(batch): call that first, not the model's");
        begin(0);
        backward_quietly();
    }
    /// Returns when all values are new. `loss` of the result is 0: forward returned it.
    step_result finish() { return finish(0); }

    /// Steps that changed the values. After a failure ranks may differ by one: those who had every gradient of a rank that
    /// then failed have completed the step. Equal numbers are equal bits.
    [[nodiscard]] std::uint64_t completed_steps() const noexcept { return reducer_->updates(); }
    /// After a failure: whether only some values took part in the step that failed. Such state must not be kept.
    [[nodiscard]] bool torn() const noexcept { return reducer_->torn(); }
    [[nodiscard]] M& model() noexcept { return model_; }
    [[nodiscard]] communicator<T> const& comm() const noexcept { return comm_; }
    [[nodiscard]] step_times const& times() const noexcept { return times_; }
    void reset_times() noexcept { times_ = {}; }

    /// The parameters, their values in memory that is current between steps.
    [[nodiscard]] std::span<parameter<element> const> parameters() const noexcept { return parameters_; }

    /// Digest of all values, in the order of parameters(). Local; cost: one pass over the values.
    [[nodiscard]] std::uint64_t digest_of_values() const {
        digest all;
        for (parameter<element> const& p : parameters_) all.add(p.name).add(std::span<element const>(p.value));
        return all.value();
    }
    /// Collective: whether all ranks hold the same bits.
    [[nodiscard]] bool replicas_identical() {
        std::vector<std::uint64_t> all(static_cast<std::size_t>(comm_.size()));
        all[static_cast<std::size_t>(comm_.rank())] = digest_of_values();
        operation_info what;
        what.name = "replicas_identical";
        what.fingerprint = reducer_->hash();
        comm_.run([&] { return all_gather_small(comm_.enter(what), std::span<std::uint64_t>(all)); });
        return std::all_of(all.begin(), all.end(), [&](std::uint64_t d) { return d == all.front(); });
    }

private:
    using reducer_type = reducer<T, element, Opt, A, Obs>;
    static constexpr bool bound = BindableModel<M>;

    /// Ranks agree, rank 0's values go everywhere, the model moves into our memory.
    void start(detail::agenda mine) {
        copy_values_in();
        std::string const description = detail::describe(std::span<parameter<element> const>(parameters_));
        mine.parameters = digest().add(description).value();
        mine.description = description.size();
        operation_info what;
        what.name = "data_parallel";
        what.fingerprint = detail::agree("data_parallel", 0, "", "");
        std::uint32_t context = 0;
        comm_.run([&] { return detail::expect_agreement(comm_.enter(what), description, mine, &context); });
        if (comm_.size() > 1) broadcast(comm_, memory_.values(), 0);
        digest all;
        for (std::uint64_t const hash : mine.hashes) all.add(hash);
        reducer_->agree_on(all.add(mine.parameters).value(), context);
        if constexpr (bound) memory_.bind(model_, std::span(parameters_));
        values_changed();
    }
    void copy_values_in() {
        for (std::size_t i = 0; i < parameters_.size(); ++i)
            std::copy(parameters_[i].value.begin(), parameters_[i].value.end(), memory_.value(i).begin());
    }
    void values_changed() {
        for (std::size_t i = 0; i < parameters_.size(); ++i) {
            if constexpr (!bound)
                std::copy(memory_.value(i).begin(), memory_.value(i).end(), parameters_[i].value.begin());
            if constexpr (requires { model_.stepped(i); }) model_.stepped(i);
        }
    }
    void detach() noexcept {
        comm_.exclusively([&] {
            // The transport of a failed communicator may not have let go of what was posted.
            if (comm_.tasks().failed()) comm_.keep(memory_.owner());
            if (!reducer_->idle()) {  // its coroutines end before it does
                comm_.tasks().fail(failure_kind::threw, errc::remote_exception, -1, "a trainer ended within a step");
                comm_.tasks().pump();
            }
            reducer_.reset();
        });
    }

    void begin(std::uint64_t done) {
        DDP_EXPECTS(!begun_, "a step is under way: finish() it before the next one begins");
        comm_.check();
        expect_intact();
        if constexpr (!bound) copy_values_in();  // the user may have changed them
        begun_ = true;
        reducer_->begin({.weight = accumulated_ + weight_, .done = done});
        move_on();
    }
    void end_step() noexcept { begun_ = false; }
    void expect_intact() {
        if constexpr (requires { model_.intact(); })
            DDP_EXPECTS(model_.intact(),
                        "the model's memory is no longer the library's: something re-seated its "
                        "tensors. Make a new trainer after loading or converting a model.");
    }
    template <class Batch>
    void weigh(Batch const& batch) {
        tell_peers([&] { weight_ = weight_of(model_, batch); });
        weighed_ = true;
    }
    /// There is mail: somebody has to fetch it.
    void move_on() noexcept {
        if (comm_.has_thread())
            comm_.poke();
        else if (comm_.size() > 1 && std::this_thread::get_id() == home_)
            comm_.progress();
    }

    template <class Batch>
    double forward_quietly(Batch const& batch, std::uint64_t weight) {
        if (weight == 0) return 0;  // skipped; backward will be as well
        return tell_peers([&] {
            if constexpr (requires { model_.begin_step(std::uint64_t{}); })
                if (accumulated_ == 0) model_.begin_step(reducer_->updates());
            return static_cast<double>(model_.forward(batch));
        });
    }

    void backward_quietly() {
        run_backward(true);
        reducer_->backward_done();
        move_on();
    }
    void run_backward(bool synchronise) {
        weighed_ = false;
        bool const assigns = accumulated_ == 0;
        if (weight_ != 0) {
            reports_.start_pass();
            pass<element> const how{.scale = static_cast<element>(weight_), .accumulate = !assigns};
            tell_peers(
                [&] { model_.backward(how, [this, synchronise](std::size_t i) { this->ready(i, synchronise); }); });
            for (std::size_t i = 0; i < parameters_.size(); ++i)
                if (reports_.missing(i) && options_.unused == unused::allowed) {
                    if (assigns) std::fill(parameters_[i].gradient.begin(), parameters_[i].gradient.end(), element(0));
                    ready(i, synchronise);
                }
            expect_all_reported();
            accumulated_ += std::exchange(weight_, 0);
        } else if (synchronise) {
            // No samples in this batch: what was accumulated stands; nothing at all is +0.
            for (std::size_t i = 0; i < parameters_.size(); ++i) {
                if (assigns) std::fill(parameters_[i].gradient.begin(), parameters_[i].gradient.end(), element(0));
                hand_over(i);
            }
        }
    }

    /// Called by the model. Never throws.
    void ready(std::size_t i, bool synchronise) noexcept {
        if (reports_.add(i) && synchronise) hand_over(i);
    }
    void hand_over(std::size_t i) noexcept {
        if constexpr (!bound)
            std::copy(parameters_[i].gradient.begin(), parameters_[i].gradient.end(), memory_.gradient(i).begin());
        if (reducer_->ready(i)) move_on();
    }
    void expect_all_reported() {
        if (reports_.each_once()) return;  // before any word is allocated
        std::string const complaint =
            reports_.complaint(comm_.rank(), std::span<parameter<element> const>(parameters_));
        end_step();
        comm_.exclusively([&] { comm_.tasks().fail(failure_kind::mismatch, errc::gradient, comm_.rank(), complaint); });
        comm_.check();
    }

    step_result finish(double loss, bool may_be_empty = false) {
        DDP_EXPECTS(begun_, "finish() ends a step that backward() has begun");
        auto const since = clock::now();
        end_step();
        reducer_->await_from(since);
        comm_.run([&] {
            reducer_->collect();
            return reducer_->finished();
        });
        times_.stepped += reducer_->stepped_late();
        times_.waited += clock::now() - since - reducer_->stepped_late();
        accumulated_ = 0;
        step_result const result{loss, reducer_->weight(), reducer_->gradient_norm()};
        if (result.weight != 0)
            values_changed();
        else if (!may_be_empty || !reducer_->everybody_done())
            throw error(errc::no_samples,
                        "the batch is empty on every rank: there is no mean over no samples. Nothing was changed; a "
                        "rank that is out of data calls step() without a batch.");
        return result;
    }
    void account(time_point since) noexcept {
        ++times_.steps;
        times_.total += clock::now() - since;
    }

    /// Runs the user's code; what it throws fails the step on every rank and comes back as itself here.
    template <class F>
    decltype(auto) tell_peers(F&& f) {
        std::exception_ptr thrown;
        try {
            return std::forward<F>(f)();
        } catch (...) {
            thrown = std::current_exception();
        }
        end_step();
        comm_.fail(thrown);
        std::rethrow_exception(thrown);
    }

    M& model_;
    communicator<T> comm_;
    training_options options_;
    std::vector<parameter<element>> parameters_;
    Obs observer_;
    std::thread::id home_;
    detail::arena<element> memory_;
    std::unique_ptr<reducer_type> reducer_;

    std::uint64_t weight_ = 0;       // of the batch that forward saw last
    std::uint64_t accumulated_ = 0;  // of the passes since the last step
    bool weighed_ = false;           // there was a forward that no backward has gone through yet
    bool begun_ = false;
    detail::ready_reports reports_;
    step_times times_;
};

}  // namespace ddp
