/// \file
/// local_parallel: training in which each rank steps independently, and ranks meet at intervals.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ddp/collective/broadcast.hpp>
#include <ddp/collective/until_all_know.hpp>
#include <ddp/comm/communicator.hpp>
#include <ddp/comm/posted.hpp>
#include <ddp/core/contract.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/kernel/kernel.hpp>
#include <ddp/model/layout.hpp>
#include <ddp/model/model.hpp>
#include <ddp/optim/clip.hpp>
#include <ddp/optim/optimizer.hpp>
#include <ddp/optim/schedule.hpp>
#include <ddp/strategy/local_frozen.hpp>
#include <ddp/strategy/local_options.hpp>
#include <ddp/strategy/local_result.hpp>
#include <ddp/strategy/local_step.hpp>
#include <ddp/strategy/meetings.hpp>
#include <ddp/strategy/strategy.hpp>
#include <ddp/train/agreement.hpp>
#include <ddp/train/arena.hpp>
#include <ddp/train/buffers.hpp>
#include <ddp/train/events.hpp>
#include <ddp/train/options.hpp>
#include <ddp/train/replica.hpp>
#include <ddp/train/user_code.hpp>

namespace ddp {

/// A trainer whose ranks hold different values between their meetings: each rank steps its own replica on its own
/// batches, and a strategy (local_sgd, diloco, gossip, …) decides when ranks meet and with which values they continue.
/// The first line about each strategy says what holds right after a meeting.
///
///     ddp::local_parallel trainer{model, ddp::adamw{}, comm, ddp::local_sgd{.period = 16}};
///     while (auto const mine = batches.next()) trainer.step(load(*mine));
///     while (trainer.join()) {
///     }
///     trainer.synchronise();
///
/// The strategy and the local_options follow the communicator in either order. All ranks make the same number of steps
/// between two meetings, with batches of any size, which may be empty. A rank that has no more data calls join(), which
/// takes part in the meetings of the others. Schedules count local steps, the same on all ranks; bias corrections count
/// the steps in which the rank had samples.
///
/// Model, communicator and trainer may be destroyed in any order. Only one thread may call a trainer, which can neither be
/// copied nor moved; several trainers may share a communicator.
///
/// Cost    of the constructor: as for data_parallel. Of a step: the passes of the model and the pass of the optimizer
///         over all values, without communication (except for stale_synchronous). Of a meeting: an all-gather of 40 bytes
///         per rank (except for gossip), and the cost of the strategy. Where all ranks hold the same values afterwards, and in
///         synchronise(): an allreduce of the model's buffers as double (buffers::averaged), a broadcast of those that are
///         not float or double, or of all (buffers::from_rank_0).
/// Throws  as data_parallel: comm_error, the same on all ranks, if models or settings differ, or ranks fail; ddp::error
///         (errc::mismatch), the same on all ranks, if they meet or synchronise() after different numbers of steps (gossip,
///         stale_synchronous: the job has failed then). usage_error, likewise, for a model that adds over all ranks in its passes
///         (synchronised batch_norm). An exception of the user's model is rethrown there; the others fail in their next meeting.
template <class M, class T>
class local_parallel {
public:
    using element = element_of<M>;

    template <class Opt, class S>
        requires Model<M> && OptimizerFor<Opt, element_of<M>> && StrategyOver<S, T, element_of<M>>
    local_parallel(M& model, Opt const& optimizer, communicator<T> const& comm, S strategy,
                   local_options const& options = {});
    template <class Opt, class S>
        requires Model<M> && OptimizerFor<Opt, element_of<M>> && StrategyOver<S, T, element_of<M>>
    local_parallel(M& model, Opt const& optimizer, communicator<T> const& comm, local_options const& options,
                   S strategy)
        : local_parallel(model, optimizer, comm, std::move(strategy), options) {}
    local_parallel(local_parallel const&) = delete;
    local_parallel& operator=(local_parallel const&) = delete;

    /// One step on this rank's batch, followed by a meeting if the strategy calls for one.
    template <class Batch>
        requires ModelFor<M, Batch>
    local_result step(Batch const& batch) {
        auto const since = monotonic_clock::now();
        double const loss = forward(batch);
        backward();
        local_finish_result const ended = finish();
        ++times_.steps;
        times_.total += monotonic_clock::now() - since;
        return {loss, ended.weight, ended.met, ended.stop};
    }
    /// Continues to the next meeting without batches, for a rank that has no more data: `while (trainer.join()) {}`.
    /// Returns false once all ranks have called it: they have met then, and none of them has stepped since the previous
    /// one. With gossip and stale_synchronous, all ranks learn this in the same call, a few meetings or steps later.
    bool join() {
        expect_between("join()");
        comm_.check();
        meetings_.skip_steps();
        return !meet(true).everybody_done;
    }

    /// Returns the mean loss over the batch, and keeps the weight of the batch for the backward that follows.
    template <class Batch>
        requires ModelFor<M, Batch>
    double forward(Batch const& batch) {
        DDP_EXPECTS(!stepping_, "forward() begins a step, and the last one has not ended: finish() it first");
        comm_.check();
        replica_.expect_intact();
        if (accumulated_ == 0) replica_.copy_values_in();
        return tell_peers([&] {
            weight_ = weight_of(model(), batch);
            weighed_ = true;
            if (weight_ == 0) return 0.0;
            if (accumulated_ == 0) replica_.begin_step(completed_steps());
            return replica_.forward(batch);
        });
    }
    /// Backward that adds this batch to the step's gradient without ending the step.
    void accumulate() { go_back(false); }
    /// Backward for the last batch of the step.
    void backward() {
        go_back(true);
        stepping_ = true;
    }
    /// Ends the step: the optimizer's pass, and a meeting if it is due.
    local_finish_result finish() {
        DDP_EXPECTS(stepping_, "finish(): no step is under way; call forward() and backward() first");
        stepping_ = false;
        local_finish_result result{.weight = std::exchange(accumulated_, 0)};
        if (result.weight != 0) update(result.weight);
        if (meetings_.after_step(result.weight)) result.met = meet(false).all_ranks;
        result.stop = meetings_.stop();
        return result;
    }

    /// Gives all ranks the mean of their values, after any number of steps, the same on all of them. With a strategy whose
    /// ranks agree after meetings, they hold an additional meeting unless they have just met; with one whose exchanges end
    /// later, these are completed. Collective. For evaluation, for saving, and at the end of the training.
    void synchronise() {
        expect_between("synchronise()");
        replica_.copy_values_in();
        auto const result = meetings_.synchronise(trained_values(), rate());
        if (result.moved) tell_peers([&] { replica_.values_changed(); });
        share_buffers();
    }
    /// Whether all ranks hold the same values after each meeting of all ranks; otherwise only after synchronise().
    [[nodiscard]] bool agrees() const noexcept { return meetings_.strategy().agrees(); }

    /// The number of local steps, including those in join() and those with an empty batch: the same on all ranks that
    /// have met.
    [[nodiscard]] std::uint64_t completed_steps() const noexcept { return meetings_.steps(); }
    /// Continues as if `count` steps had been made and all ranks held the same values: schedules and meetings count from there.
    /// Does not change what for_each_state visits, including the optimizer's number of updates. Between steps.
    void set_completed_steps(std::uint64_t count) {
        expect_between("set_completed_steps()");
        meetings_.set_steps(count);
    }
    /// For code that has given all ranks the same values, as load_weights does: the strategy's state starts over. Collective;
    /// throws usage_error within a step, and ddp::error (errc::mismatch) on all ranks after different numbers of steps.
    void values_replaced() {
        expect_no_step("values_replaced()");
        replica_.copy_values_in();
        meetings_.values_replaced();
    }
    /// Throws usage_error within a step. `what` names the caller in the text.
    void expect_no_step(char const* what) const {
        DDP_EXPECTS(!stepping_, std::string(what) + " within a step: finish() it first");
    }
    /// Whether no step is under way, and ranks hold the same values: none has stepped since the last meeting of all
    /// ranks, if the strategy agrees, or since synchronise().
    [[nodiscard]] bool between_steps() const noexcept {
        return !stepping_ && accumulated_ == 0 && meetings_.together();
    }
    /// Throws usage_error, the same on all ranks, with advice, if between_steps() is false: for code that saves or
    /// replaces the values of all ranks (as checkpoints and save_weights do). `what` names the caller in the text.
    void expect_between_steps(char const* what) const {
        expect_between(what);
        meetings_.expect_together(what);
    }
    /// After a failure: whether it has changed some values but not all; they must not be used then.
    [[nodiscard]] bool torn() const noexcept { return meetings_.torn(); }

    /// Asks all ranks to stop training; they learn of it in the next meeting of all or synchronise(), or where
    /// local_result::stop says. From any thread, and from a signal handler.
    void request_stop() noexcept { meetings_.request_stop(); }
    /// The `stop` of the last step's result, for loops that end in join().
    [[nodiscard]] bool stop_agreed() const noexcept { return meetings_.stop(); }

    [[nodiscard]] M& model() noexcept { return replica_.model(); }
    [[nodiscard]] communicator<T> const& comm() const noexcept { return comm_; }
    [[nodiscard]] char const* strategy() const noexcept { return meetings_.strategy().name(); }
    [[nodiscard]] std::span<parameter<element> const> parameters() const noexcept { return replica_.parameters(); }

    /// Freezes every parameter whose name matches the pattern (see name_fits): its value, optimizer state and strategy
    /// state stay as they are, and its gradient counts as 0 in the norm. It is still sent in meetings; those of
    /// local_options::frozen are not.
    ///
    /// Collective; between_steps() must be true: all ranks hold the same values then, and keep them. Cost: an all-gather of 8
    /// bytes per rank; then, in each meeting, a copy of all that is frozen. Throws comm_error; usage_error on every rank if
    /// they hold different values or pass different patterns, or if no name matches.
    void freeze(std::string_view pattern) { mark_frozen("freeze", pattern, 1); }
    /// Undoes freeze() for every parameter whose name matches. Optimizer and strategy continue from where they were.
    /// Like freeze(); also throws usage_error for parameters of local_options::frozen, which have no state.
    void unfreeze(std::string_view pattern) { mark_frozen("unfreeze", pattern, 0); }
    /// By parameter: not 0 where it is frozen.
    [[nodiscard]] std::span<std::uint8_t const> frozen() const noexcept { return frozen_.now(); }
    /// By parameter: not 0 if local_options::frozen names it, which unfreeze() cannot change.
    [[nodiscard]] std::span<std::uint8_t const> frozen_from_the_start() const noexcept {
        return frozen_.from_the_start();
    }
    /// Freezes exactly the parameters whose mark is not 0, as frozen() returns them. Like freeze() and unfreeze().
    void set_frozen(std::span<std::uint8_t const> marks) {
        expect_between_steps("set_frozen");
        DDP_EXPECTS(meetings_.all_alike(detail::local_frozen<element>::hash_of(marks), "set_frozen"),
                    "set_frozen: ranks pass different marks; nothing was changed");
        set_marks("set_frozen", [&] { return marks; });
    }

    /// Each rank's own optimizer slots and number of updates; then all ranks' number of meetings and state of the strategy.
    void for_each_state(state_visitor visit) {
        expect_between("for_each_state()");
        local_.for_each_state(visit);
        meetings_.for_each_state(visit);
    }

    /// By parameter: the name of the algorithm that steps it (`name` of an optimizer); empty if it has none.
    [[nodiscard]] std::vector<std::string> optimizer_names() const { return local_.optimizer_names(); }
    /// As data_parallel::settings_in_words(), with "strategy" instead of "exchange".
    [[nodiscard]] string_map settings_in_words() const {
        string_map all = options_.as_training_options().settings_in_words();
        all.emplace("optimizer", local_.words());
        all.emplace("strategy", meetings_.strategy().hash_words());
        return all;
    }
    /// Whether ranks hold the same buffers after a meeting of all, or synchronise(): see local_options::buffers.
    [[nodiscard]] bool buffers_alike() const noexcept { return options_.buffers != buffers::left_alone; }

    /// Steps, the time in step(), and of that the time in meetings (waited) and in the optimizer (stepped).
    [[nodiscard]] step_times const& times() const noexcept { return times_; }
    void reset_times() noexcept { times_ = {}; }

    /// Digest of this rank's values, in the order of parameters().
    [[nodiscard]] std::uint64_t digest_of_values() const { return replica_.digest_of_values(); }
    /// Collective: whether all ranks hold the same bits, right after a meeting of all ranks or synchronise(). Throws
    /// usage_error at other times, and under strategies whose ranks never agree.
    [[nodiscard]] bool replicas_identical() {
        meetings_.expect_together("replicas_identical()");
        return meetings_.all_alike(digest_of_values());
    }

private:
    void expect_between(char const* what) const {
        DDP_EXPECTS(!stepping_ && accumulated_ == 0, std::string(what) + " within a step: finish() it first");
    }
    [[nodiscard]] double rate() const noexcept {
        return options_.schedule.factor(std::max<std::uint64_t>(completed_steps(), 1) - 1);
    }
    [[nodiscard]] std::span<element> trained_values() const noexcept {
        return replica_.values().first(local_.where().size());
    }
    void mark_frozen(char const* what, std::string_view pattern, std::uint8_t mark) {
        expect_between_steps(what);
        DDP_EXPECTS(meetings_.all_alike(digest{}.add(pattern).value(), what),
                    std::string(what) + ": ranks pass different patterns ('" + std::string(pattern) + "' on rank " +
                        std::to_string(comm_.members().world_rank(comm_.rank())) + "); nothing was changed");
        set_marks(what, [&] { return frozen_.marked(what, pattern, mark); });
    }
    /// All ranks have passed the same: what is wrong with it, all of them find.
    template <class F>
    void set_marks(char const* what, F const& next) {
        try {
            frozen_.set(what, next());
        } catch (usage_error const&) {
            detail::until_all_know(comm_, what);
            throw;
        }
        meetings_.freeze(frozen_.now());
    }

    void go_back(bool last) {
        DDP_EXPECTS(weighed_, "backward() and accumulate() need a trainer.forward(batch) before them");
        weighed_ = false;
        std::uint64_t const weight = std::exchange(weight_, 0);
        bool const adds = accumulated_ != 0;
        std::string complaint;
        if (weight != 0 || (last && adds))
            tell_peers([&] {
                try {
                    replica_.backward({.weight = weight,
                                       .accumulate = adds,
                                       .last = last,
                                       .unused = options_.unused,
                                       .frozen = frozen_.now(),
                                       .owner = "local_options"});
                } catch (gradient_error const& e) {
                    complaint = e.complaint();
                }
            });
        if (!complaint.empty()) detail::fail_gradient(comm_, complaint);
        accumulated_ += weight;
    }
    void update(std::uint64_t weight) {
        auto const since = monotonic_clock::now();
        local_.run(weight, options_.schedule.factor(completed_steps()), replica_.gradients(), replica_.values(),
                   frozen_.to_be_stepped(replica_, options_.unused));
        times_.stepped += monotonic_clock::now() - since;
        tell_peers([&] { replica_.values_changed(); });
    }
    auto meet(bool done) {
        auto const since = monotonic_clock::now();
        replica_.copy_values_in();
        auto const result = meetings_.meet(done, trained_values(), rate());
        if (result.moved) tell_peers([&] { replica_.values_changed(); });
        if (result.alike) share_buffers();
        times_.waited += monotonic_clock::now() - since;
        return result;
    }
    void share_buffers() {
        if (comm_.size() == 1 || options_.buffers == buffers::left_alone) return;
        std::vector<model_buffer> all;
        tell_peers([&] { all = replica_.buffers(); });
        if (all.empty()) return;
        if (options_.buffers == buffers::averaged)
            detail::average_buffers(comm_, std::span<model_buffer const>(all), {.count = comm_.size()});
        else
            detail::broadcast_buffers(comm_, std::span<model_buffer const>(all));
    }
    /// Runs the user's code; what it throws fails the job and is rethrown here.
    template <class F>
    decltype(auto) tell_peers(F&& f) {
        return detail::run_user_code(std::forward<F>(f), [this](std::exception_ptr thrown) { comm_.fail(thrown); });
    }

    communicator<T> comm_;
    local_options options_;
    replica<M> replica_;
    detail::local_frozen<element> frozen_;
    detail::local_step<element> local_;
    detail::posted<T, arena<element>> memory_;  // destroyed after the meetings, whose exchanges may be under way
    detail::meetings<T, element> meetings_;
    std::uint64_t weight_ = 0, accumulated_ = 0;  // of the last batch; of the step under way
    bool weighed_ = false, stepping_ = false;
    step_times times_;
};

template <class M, class T>
template <class Opt, class S>
    requires Model<M> && OptimizerFor<Opt, element_of<M>> && StrategyOver<S, T, element_of<M>>
local_parallel<M, T>::local_parallel(M& model, Opt const& optimizer, communicator<T> const& comm, S strategy,
                                     local_options const& options)
    : comm_(comm),
      options_(options),
      replica_(model),
      frozen_(parameters(), options.frozen),
      local_(optimizer, frozen_.trained(replica_.counts(), replica<M>::placed), parameters(), options.clip),
      memory_(comm_, replica_.make_arena(frozen_.order())),
      meetings_(comm, std::make_unique<detail::strategy_model_of<T, element, S>>(std::move(strategy))) {
    expect_uncontracted_kernels();
    meetings_.strategy().validate(comm_.size());
    DDP_EXPECTS(!replica_.would_need_all_ranks(),
                "local_parallel: passes of this model add over all ranks, which step on their own here; use "
                "nn::batch_statistics::local instead of synchronised, or a data_parallel");
    training_options const alike = options_.as_training_options();
    alike.template validate<element>();

    detail::agenda mine;
    mine.hashes = {version_number,
                   detail::hash_of(model),
                   static_cast<std::uint64_t>(replica<M>::placed),
                   digest{}.add(meetings_.strategy().name()).add(meetings_.strategy().hash()).value(),
                   local_.hash(),
                   0};
    std::ranges::copy(alike.hashes(), mine.hashes.begin() + detail::agenda::names.size());
    std::vector<model_buffer> const all = replica_.buffers();
    std::uint64_t const hash =
        detail::agree_on_start(comm_, parameters(), detail::describe(std::span(all)), mine,
                               detail::words_of(alike, detail::hash_words_of(model), {},
                                                meetings_.strategy().hash_words(), local_.words()),
                               {"local_parallel", "local_options"})
            .hash;
    meetings_.strategy().validate(comm_);
    if (comm_.size() > 1) broadcast(comm_, memory_->values(), 0);
    if (comm_.size() > 1) detail::broadcast_buffers(comm_, std::span(all));
    replica_.attach(*memory_);
    meetings_.start(hash | 1, {comm_.rank(), comm_.size(), &local_.where(), parameters(), trained_values()});
}
template <class M, class Opt, class T, class... More>
local_parallel(M&, Opt const&, communicator<T> const&, More...) -> local_parallel<M, T>;

}  // namespace ddp
