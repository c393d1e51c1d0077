/// \file
/// local_parallel: training in which each rank steps by itself, and ranks meet now and then.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ddp/collective/broadcast.hpp>
#include <ddp/comm/communicator.hpp>
#include <ddp/comm/small_gather.hpp>
#include <ddp/core/contract.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/core/error.hpp>
#include <ddp/kernel/combine.hpp>
#include <ddp/kernel/finite.hpp>
#include <ddp/model/model.hpp>
#include <ddp/optim/clip.hpp>
#include <ddp/optim/optimizer.hpp>
#include <ddp/optim/schedule.hpp>
#include <ddp/strategy/strategy.hpp>
#include <ddp/train/agreement.hpp>
#include <ddp/train/arena.hpp>
#include <ddp/train/buffers.hpp>
#include <ddp/train/events.hpp>
#include <ddp/train/gradient_norm.hpp>
#include <ddp/train/options.hpp>
#include <ddp/train/replica.hpp>
#include <ddp/train/stepper.hpp>

namespace ddp {

/// How a local_parallel trains. Ranks must have them alike, as training_options.
struct local_options {
    std::optional<clipping> clip = {};        ///< of each rank's own mean gradient
    ddp::schedule schedule = {};              ///< factor of the optimizer's learning rate, by local step
    ddp::unused unused = ddp::unused::error;  ///< a parameter that backward leaves out
    /// Of a model that has some, after each meeting of all ranks whose values agree: from rank 0, averaged, or left alone.
    ddp::buffers buffers = ddp::buffers::averaged;
};

/// What a local step returns.
struct local_result {
    double loss = 0;           ///< mean over this rank's samples; 0 where it had none
    std::uint64_t weight = 0;  ///< this rank's samples
    bool met = false;          ///< all ranks have met after this step
    bool stop = false;  ///< some rank had called request_stop() before the last meeting of all ranks; the same on all
};

/// Training in which ranks hold different values between their meetings: each steps its own replica on its own batches, and a strategy
/// (local_sgd, diloco, gossip, …) says when they meet and what becomes of their values. What holds right after a meeting is said in the
/// first line of each strategy.
///
///     ddp::local_parallel trainer{model, ddp::adamw{}, comm, ddp::local_sgd{.period = 16}};
///     while (auto const mine = batches.next()) trainer.step(load(*mine));
///     while (trainer.join()) {}
///     trainer.synchronise();
///
/// All ranks make the same number of steps from one meeting to the next, with batches of any size, none included; a rank that has no more
/// calls join(), which takes part in the meetings of the others. Schedules count local steps, the same on all ranks; corrections
/// of bias count those in which the rank had samples.
///
/// Model, communicator and trainer may be destroyed in any order. One thread calls it; any number of them may share a communicator.
///
/// Cost    of the constructor: as data_parallel's. Of a step: the model's passes and the optimizer's pass over all values, no
///         communication (but that of stale_synchronous). Of a meeting: an all-gather of 40 bytes a rank, and the
///         strategy's.
/// Throws  as data_parallel: comm_error, the same on all ranks, where models or settings differ, or ranks fail; error
///         (errc::mismatch), the same on all ranks, where they meet after different numbers of steps; what the user's model throws comes back as itself on that rank, and fails the others at the next meeting.
template <class M, class T>
class local_parallel {
public:
    using element = element_of<M>;

    template <class Opt, class S>
        requires Model<M> && OptimizerFor<Opt, element_of<M>> && StrategyOver<S, T, element_of<M>>
    local_parallel(M& model, Opt const& optimizer, communicator<T> const& comm, S strategy,
                   local_options const& options = {});
    local_parallel(local_parallel const&) = delete;
    local_parallel& operator=(local_parallel const&) = delete;

    /// One step on this rank's batch; then, where the strategy says so, a meeting.
    template <class Batch>
        requires ModelFor<M, Batch>
    local_result step(Batch const& batch) {
        auto const since = monotonic_clock::now();
        double const loss = forward(batch);
        backward();
        local_result result = finish();
        result.loss = loss;
        ++times_.steps;
        times_.total += monotonic_clock::now() - since;
        return result;
    }
    /// Goes on to the next meeting without batches, for a rank that is out of data: while (trainer.join()) {}. Returns
    /// false once all ranks have called it: they have met, and none of them has stepped since the meeting before.
    bool join() {
        expect_between("join()");
        comm_.check();
        do {
            ++steps_;
        } while (!strategy_->due(steps_));
        return !meet(true).everybody_done;
    }

    /// Mean loss over the batch; remembers its weight for the backward that follows.
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
            if (accumulated_ == 0) replica_.begin_step(updates_);
            return replica_.forward(batch);
        });
    }
    /// Backward that adds this batch to the step's gradient, and ends no step.
    void accumulate() { go_back(false); }
    /// Backward of the step's last batch.
    void backward() {
        go_back(true);
        stepping_ = true;
    }
    /// Ends the step: the optimizer's pass, and a meeting if it is due.
    local_result finish() {
        DDP_EXPECTS(stepping_, "finish() ends a step that backward() has begun");
        stepping_ = false;
        local_result result{.weight = std::exchange(accumulated_, 0)};
        if (result.weight != 0) update(result.weight);
        ++steps_;
        if (strategy_->due(steps_)) result.met = meet(false).all_ranks;
        result.stop = stop_;
        return result;
    }

    /// Gives all ranks the mean of their values, after any number of steps; of a strategy whose ranks agree when they meet,
    /// by a meeting outside the period, unless they have just met; of one whose exchanges end later, by their end.
    /// Collective. For evaluation, saving, and the end of the training.
    void synchronise() {
        expect_between("synchronise()");
        comm_.check();
        ticket const all = exchange_tickets(comm_, {.weight = since_all_, .step = 0, .done = 0});
        if (strategy_->passes()) {
            replica_.copy_values_in();
            tell_peers([&] {
                strategy_->drain(replica_.values());
                replica_.values_changed();
            });
        } else if (strategy_->agrees()) {
            if (all.weight != 0) meet_by(comm_, all, since_all_);
        } else {
            replica_.copy_values_in();
            detail::average(meeting<T, element>{comm_, replica_.values(), meetings_ + 1, steps_,
                                                1.0 / static_cast<double>(comm_.size()), rate()},
                            replica_.values());
            tell_peers([&] { replica_.values_changed(); });
        }
        since_all_ = since_group_ = 0;
        share_buffers();
    }

    /// Local steps of this rank, those in join() included; not those of a rank that had an empty batch.
    [[nodiscard]] std::uint64_t completed_steps() const noexcept { return steps_; }
    /// Goes on as if so many steps had been made, all of them with samples, and the last had ended with a meeting. Between steps.
    void set_completed_steps(std::uint64_t count) {
        expect_between("set_completed_steps()");
        steps_ = updates_ = count;
        since_all_ = since_group_ = 0;
        meetings_ = 0;
        for (std::uint64_t step = 1; step <= count; ++step)
            if (strategy_->due(step) && strategy_->group(step) == nullptr) ++meetings_;
    }
    /// Neither is a step under way nor are values of ranks apart: the last step ended with a meeting of all ranks.
    [[nodiscard]] bool between_steps() const noexcept { return !stepping_ && accumulated_ == 0 && since_all_ == 0; }
    [[nodiscard]] bool torn() const noexcept { return torn_; }

    /// This rank wants training to stop: all ranks learn it at the next meeting of all. From any thread, and from a signal handler.
    void request_stop() noexcept { stop_requested_.store(true); }
    [[nodiscard]] bool stop_agreed() const noexcept { return stop_; }

    [[nodiscard]] M& model() noexcept { return replica_.model(); }
    [[nodiscard]] communicator<T> const& comm() const noexcept { return comm_; }
    [[nodiscard]] char const* strategy() const noexcept { return strategy_->name(); }
    [[nodiscard]] std::span<parameter<element> const> parameters() const noexcept { return replica_.parameters(); }

    /// The optimizer's slots, which are each rank's own; then what the strategy keeps, the same on all ranks.
    void for_each_state(state_visitor visit) {
        expect_between("for_each_state()");
        stepper_.for_each_state(replica_.where(), parameters(), [&](state_slice slice) {
            slice.per_rank = true;
            visit(slice);
        });
        strategy_->for_each_state(visit);
    }

    /// Steps, the time in step(), and of that the time in meetings (waited) and in the optimizer (stepped).
    [[nodiscard]] step_times const& times() const noexcept { return times_; }
    void reset_times() noexcept { times_ = {}; }

    /// Digest of this rank's values, in the order of parameters().
    [[nodiscard]] std::uint64_t digest_of_values() const { return replica_.digest_of_values(); }
    /// Collective: whether all ranks hold the same bits, right after a meeting of all ranks or synchronise(). Throws usage_error at other
    /// times, and under strategies whose ranks never agree.
    [[nodiscard]] bool replicas_identical() {
        DDP_EXPECTS(since_all_ == 0 && (strategy_->agrees() || synchronised_),
                    std::string("replicas_identical(): under ") + strategy_->name() +
                        (strategy_->agrees() ? " ranks hold the same values right after a meeting only"
                                             : " ranks hold different values for good") +
                        "; call synchronise() on all ranks first");
        return detail::all_alike(comm_, "replicas_identical", hash_, digest_of_values());
    }

private:
    struct ticket {
        std::uint64_t weight = 0, step = 0, done = 0, stop = 0, odd = 0;
    };
    struct met {
        bool all_ranks = false, everybody_done = false;
    };

    void expect_between(char const* what) const {
        DDP_EXPECTS(!stepping_ && accumulated_ == 0, std::string(what) + " within a step: finish() it first");
    }
    [[nodiscard]] double rate() const noexcept { return options_.schedule.factor(steps_ == 0 ? 0 : steps_ - 1); }

    void go_back(bool last) {
        DDP_EXPECTS(weighed_, "backward() and accumulate() go back through trainer.forward(batch): call that first");
        weighed_ = false;
        std::uint64_t const weight = std::exchange(weight_, 0);
        bool const adds = accumulated_ != 0;
        std::string complaint;
        if (weight != 0 || (last && adds))
            tell_peers([&] {
                try {
                    replica_.backward({.weight = weight, .accumulate = adds, .last = last, .unused = options_.unused});
                } catch (gradient_error const& e) {
                    complaint = e.complaint();
                }
            });
        if (!complaint.empty()) detail::fail_gradient(comm_, complaint);
        accumulated_ += weight;
    }
    void update(std::uint64_t weight) {
        std::span<element> const gradients = replica_.gradients();
        scale(gradients, static_cast<element>(1.0 / static_cast<double>(weight)));
        double clip = 1;
        if (options_.clip) {
            if (auto const* const by_norm = std::get_if<clip_by_global_norm>(&*options_.clip)) {
                norm_.add(std::span<element const>(gradients), 0, gradients.size());
                clip = by_norm->factor(norm_.value());
            } else if (auto const* const by_value = std::get_if<clip_by_value>(&*options_.clip)) {
                by_value->apply(gradients);
            }
        }
        auto const since = monotonic_clock::now();
        update_info how{
            .update = updates_ + 1, .rate_factor = options_.schedule.factor(steps_), .gradient_scale = clip};
        auto const for_each_used = [&](auto const& f) {  // what this rank has not used stays as it is
            if (options_.unused == unused::error) return f(std::size_t{0}, gradients.size());
            for (std::size_t i = 0; i < parameters().size(); ++i)
                if (replica_.used()[i] != 0) f(replica_.where().begin(i), replica_.where().end(i));
        };
        if (stepper_.needs_norms()) {
            for_each_used([&](std::size_t from, std::size_t to) {
                stepper_.prepare(how, gradients, replica_.values(), from, to);
            });
            value_norms_.add(std::span<element const>(replica_.values()), 0, gradients.size());
            norm_.add(std::span<element const>(gradients), 0, gradients.size());
            how.value_norms = value_norms_.of_parameters();
            how.gradient_norms = norm_.of_parameters();
        }
        for_each_used(
            [&](std::size_t from, std::size_t to) { stepper_.step(how, gradients, replica_.values(), from, to); });
        times_.stepped += monotonic_clock::now() - since;
        ++updates_;
        since_all_ += weight;
        since_group_ += weight;
        since_pass_ += weight;
        synchronised_ = false;
        tell_peers([&] { replica_.values_changed(); });
    }

    /// The sum over the ranks of `over`, where they meet after the same step.
    ticket exchange_tickets(communicator<T> const& over, ticket mine) {
        mine.stop = stop_requested_.load() ? 1 : 0;
        std::vector<ticket> all(static_cast<std::size_t>(over.size()));
        all[static_cast<std::size_t>(over.rank())] = mine;
        operation_info what;
        what.name = "meeting";
        what.fingerprint = hash_;
        if (over.size() > 1) over.run([&] { return all_gather_small(over.enter(what), std::span<ticket>(all)); });
        ticket sum{.weight = 0, .step = mine.step, .done = 1};
        for (ticket const& one : all) {
            sum.weight += one.weight;
            sum.done = sum.done != 0 && one.done != 0 ? 1 : 0;
            sum.stop += one.stop;
            sum.odd += one.step != mine.step ? 1 : 0;
        }
        if (sum.odd != 0) {
            std::string text = "ranks meet after different numbers of local steps:";
            for (std::size_t r = 0; r < all.size(); ++r)
                text += (r == 0 ? " " : ", ") + std::to_string(all[r].step) + " on rank " +
                        std::to_string(over.members().members()[r]);
            throw error(errc::mismatch, text +
                                            " of this meeting (0: synchronise()). A rank that has fewer batches calls "
                                            "join(), and all call synchronise() together");
        }
        return sum;
    }
    met meet(bool done) {
        auto const since = monotonic_clock::now();
        met const result = meet_now(done);
        times_.waited += monotonic_clock::now() - since;
        return result;
    }
    /// After a step under a strategy whose exchanges end later: nobody waits for what others do in this step.
    met pass(bool done) {
        std::uint64_t const mine = std::exchange(since_pass_, 0);
        replica_.copy_values_in();
        torn_ = true;
        passed const late = tell_peers([&] {
            return strategy_->pass({comm_, replica_.values(), mine, done && mine == 0, stop_requested_.load()});
        });
        torn_ = false;
        tell_peers([&] { replica_.values_changed(); });
        stop_ = stop_ || late.stop;
        return {false, late.done};
    }
    met meet_now(bool done) {
        if (strategy_->passes()) return pass(done);
        communicator<T> const* const group = strategy_->group(steps_);
        communicator<T> const& over = group == nullptr ? comm_ : *group;
        std::uint64_t const mine = group == nullptr ? since_all_ : since_group_;
        ticket const all =
            exchange_tickets(over, {.weight = mine, .step = steps_, .done = done && mine == 0 ? 1u : 0u});
        if (all.weight != 0) meet_by(over, all, mine);
        since_group_ = 0;
        if (group != nullptr) return {};
        since_all_ = 0;
        stop_ = all.stop != 0;
        if (all.weight != 0 && strategy_->agrees()) share_buffers();
        return {true, all.done != 0};
    }
    void meet_by(communicator<T> const& over, ticket const& all, std::uint64_t mine) {
        if (&over == &comm_) ++meetings_;
        replica_.copy_values_in();
        torn_ = true;     // should it fail, values are somewhere between
        tell_peers([&] {  // the strategy may be the user's
            strategy_->meet({over, replica_.values(), meetings_, steps_,
                             static_cast<double>(mine) / static_cast<double>(all.weight), rate()});
        });
        torn_ = false;
        synchronised_ = strategy_->agrees() && &over == &comm_;
        tell_peers([&] { replica_.values_changed(); });
    }
    void share_buffers() {
        synchronised_ = true;
        if (comm_.size() == 1 || options_.buffers == buffers::left_alone) return;
        std::vector<model_buffer> all;
        tell_peers([&] { all = replica_.buffers(); });
        if (all.empty()) return;
        if (options_.buffers == buffers::averaged)
            detail::average_buffers(comm_, std::span<model_buffer const>(all));
        else
            detail::broadcast_buffers(comm_, std::span<model_buffer const>(all));
    }
    /// Runs the user's code; what it throws fails the job and comes back as itself here.
    template <class F>
    decltype(auto) tell_peers(F&& f) {
        std::exception_ptr thrown;
        try {
            return std::forward<F>(f)();
        } catch (...) {
            thrown = std::current_exception();
        }
        comm_.fail(thrown);
        std::rethrow_exception(thrown);
    }

    communicator<T> comm_;
    local_options options_;
    replica<M> replica_;
    std::unique_ptr<detail::strategy_model<T, element>> strategy_;
    stepper<element> stepper_;
    detail::gradient_norm norm_, value_norms_;
    std::uint64_t hash_ = 1;

    std::uint64_t weight_ = 0, accumulated_ = 0;            // of the last batch; of the step under way
    std::uint64_t since_all_ = 0, since_group_ = 0;         // samples since the last meeting of all; of the group
    std::uint64_t since_pass_ = 0;                          // samples of the last step
    std::uint64_t steps_ = 0, updates_ = 0, meetings_ = 0;  // updates: steps with samples
    bool weighed_ = false, stepping_ = false, stop_ = false, torn_ = false, synchronised_ = true;
    step_times times_;
    std::atomic<bool> stop_requested_{false};
};

template <class M, class T>
template <class Opt, class S>
    requires Model<M> && OptimizerFor<Opt, element_of<M>> && StrategyOver<S, T, element_of<M>>
local_parallel<M, T>::local_parallel(M& model, Opt const& optimizer, communicator<T> const& comm, S strategy,
                                     local_options const& options)
    : comm_(comm),
      options_(options),
      replica_(model),
      strategy_(std::make_unique<detail::strategy_model_of<T, element, S>>(std::move(strategy))),
      stepper_(optimizer, layout(replica_.counts(), {}, sizeof(element)), replica_.parameters()),
      norm_(layout(replica_.counts(), {}, sizeof(element))),
      value_norms_(layout(replica_.counts(), {}, sizeof(element))) {
    expect_uncontracted_kernels();
    strategy_->validate();
    training_options alike;
    alike.clip = options_.clip;
    alike.schedule = options_.schedule;
    alike.unused = options_.unused;
    alike.buffers = options_.buffers;
    alike.template validate<element>();

    arena<element> const memory = replica_.make_arena();
    detail::agenda mine;
    mine.hashes = {version_number, detail::hash_of(model), 0,
                   digest{}.add(strategy_->name()).add(strategy_->hash()).value(), stepper_.hash()};
    std::ranges::copy(alike.hashes(), mine.hashes.begin() + detail::agenda::names.size());
    std::vector<model_buffer> const all = replica_.buffers();
    hash_ = detail::agree_on_start(comm_, parameters(), detail::describe(std::span(all)), mine).hash | 1;
    if (comm_.size() > 1) broadcast(comm_, memory.values(), 0);
    if (comm_.size() > 1) detail::broadcast_buffers(comm_, std::span(all));
    replica_.attach(memory);
    strategy_->prepare({comm_.rank(), comm_.size(), &replica_.where(), parameters(), replica_.values()});
}
template <class M, class Opt, class T, class... More>
local_parallel(M&, Opt const&, communicator<T> const&, More...) -> local_parallel<M, T>;

}  // namespace ddp
