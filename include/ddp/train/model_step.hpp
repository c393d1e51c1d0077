/// \file
/// model_step: the passes of a step over the user's model, for data_parallel.
#pragma once

#include <ddp/core/language.hpp>  // first

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ddp/collective/all_gather.hpp>
#include <ddp/collective/until_all_know.hpp>
#include <ddp/comm/communicator.hpp>
#include <ddp/model/model.hpp>
#include <ddp/train/buffers.hpp>
#include <ddp/train/replica.hpp>
#include <ddp/train/step_engine.hpp>
#include <ddp/train/trainer_core.hpp>
#include <ddp/train/training_progress.hpp>
#include <ddp/train/user_code.hpp>

namespace ddp::detail {

/// Takes the user's model through a step: runs its passes, adds up weights and losses until the step begins, and fails the step
/// on every rank if the user's code throws. What does not depend on the model is trainer_core's; the order of calls that a user
/// has to keep is data_parallel's.
template <class M, class T>
class model_step {
public:
    using element = element_of<M>;

    [[gnu::cold]] model_step(M& model, communicator<T> const& comm, trainer_setup<T, element>&& with)
        : replica_(model),
          core_(comm, std::move(with), replica_.parameters(),
                {hash_of(model), hash_words_of(model), ready_releases<M> && ddp::replica<M>::bound,
                 ddp::replica<M>::placed, replica_.buffers()}) {
        if constexpr (requires { model.join_ranks(sums_); }) {
            sums_ = std::make_shared<trainer_sums<T>>(comm);
            model.join_ranks(sums_);
        }
        replica_.attach(core_.memory());
    }
    model_step(model_step const&) = delete;
    model_step& operator=(model_step const&) = delete;
    ~model_step() {
        if (core_.begun()) core_.abandon_step();
        if (sums_ != nullptr) sums_->leave();
    }

    [[nodiscard]] ddp::replica<M>& replica() noexcept { return replica_; }
    [[nodiscard]] trainer_core<T, element>& core() noexcept { return core_; }
    [[nodiscard]] trainer_core<T, element> const& core() const noexcept { return core_; }
    /// Whether gradients of earlier passes wait for the step.
    [[nodiscard]] bool accumulated() const noexcept { return accumulated_ != 0; }
    /// Whether there was a forward without its backward yet.
    [[nodiscard]] bool weighed() const noexcept { return weighed_; }

    template <class Batch>
    void weigh(Batch const& batch) {
        pass_loss_ = 0;
        tell_peers([&] { weight_ = weight_of(replica_.model(), batch); });
        weighed_ = true;
    }
    /// Forward over the batch that was weighed; without samples nothing, unless the model needs all ranks.
    template <class Batch>
    double forward(Batch const& batch) {
        if (weight_ == 0 && !replica_.needs_all_ranks()) return 0;  // skipped; backward will be as well
        return tell_peers([&] {
            before_forward();
            core_.note(flight::phase, "forward");
            double const loss =
                core_.late() ? replica_.forward(batch, [this](std::size_t i) { need(i); }) : replica_.forward(batch);
            core_.note(flight::finished, "forward");
            pass_loss_ = loss * static_cast<double>(weight_);
            return loss;
        });
    }
    /// Forward of a rank that has no batch, where the model needs all ranks.
    void forward_absent() {
        if (!replica_.needs_all_ranks()) return;
        tell_peers([&] {
            before_forward();
            replica_.forward_absent();
        });
    }
    /// A rank without a batch has no weight.
    void weigh_nothing() noexcept {
        weight_ = 0;
        pass_loss_ = 0;
    }

    /// Backward without communication.
    void accumulate() {
        settle();
        weighed_ = false;
        if (weight_ != 0 || replica_.needs_all_ranks()) run_backward(false);
    }
    void begin(std::uint32_t done, bool stop) {
        DDP_EXPECTS(!core_.begun(), "a step is under way: finish() it before the next one begins");
        settle();
        core_.comm().check();
        replica_.expect_intact();
        replica_.copy_values_in();  // the user may have changed them
        begun_weight_ = accumulated_ + weight_;
        core_.begin({.weight = begun_weight_, .done = done, .stop = stop ? 1u : 0u, .loss = loss_before_});
    }
    /// The step's last backward, whose gradients are exchanged as they are reported.
    void backward() {
        run_backward(true);
        core_.backward_done(replica_.used());
    }
    finish_result finish(bool may_be_empty) {
        DDP_EXPECTS(core_.begun(), "finish(): no step is under way; call forward() and backward() first");
        step_engine<T, element>& engine = core_.engine();
        finish_result const result = core_.wait(monotonic_clock::now());
        accumulated_ = 0;
        first_pass_ = true;
        loss_before_ = std::exchange(loss_, 0.0);
        if (engine.found_nonfinite()) {
            if (core_.options().may_skip()) tell_peers([&] { buffers_before_.put_back(replica_.buffers()); });
            buffers_before_.forget();
            core_.report_nonfinite();
        }
        buffers_before_.forget();
        if (core_.late())
            replica_.values_change();
        else if (result.weight != 0 && !result.skipped)
            tell_peers([&] { replica_.values_changed(); });
        if (result.weight != 0 && !result.skipped && core_.options().buffers_alike()) synchronise_buffers(true);
        if (result.weight == 0 && (!may_be_empty || !engine.everybody_done())) {
            until_all_know(core_.comm(), "error_of_all");
            throw error(errc::no_samples,
                        "the batch is empty on every rank, so there is no mean gradient. Nothing was changed; a "
                        "rank that is out of data calls trainer.join().");
        }
        return result;
    }

    /// Between steps. Collective: losses are added up in the order of ranks, as the next step would add them.
    [[nodiscard]] training_progress progress() const {
        step_engine<T, element> const& engine = core_.engine();
        training_progress at{.completed_steps = engine.updates(),
                             .begun_steps = core_.begun_steps(),
                             .last_weight = engine.weight(),
                             .previous_loss = engine.previous_loss()};
        for (double const one : all_gather(core_.comm(), loss_before_)) at.last_losses += one;
        return at;
    }
    /// Between steps, on all ranks alike.
    void set_progress(training_progress const& at) {
        loss_ = pass_loss_ = 0;
        loss_before_ = core_.comm().rank() == 0 ? at.last_losses : 0;  // the same sum: zeros add nothing to it
        core_.set_progress(at);
    }

    /// Waits for values that are still being gathered.
    void settle() {
        if (!core_.late()) return;
        core_.settle();
        tell_peers([&] {
            for (std::size_t i = 0; i < replica_.parameters().size(); ++i) replica_.value_changed(i);
        });
    }
    void settle_quietly() noexcept {
        core_.comm().driver()->quietly([&] { settle(); });
    }
    /// Of the bits that all ranks hold between steps.
    [[nodiscard]] std::uint64_t digest_of_replica() {
        settle();
        std::uint64_t all = replica_.digest_of_values();
        if (core_.options().buffers_alike()) tell_peers([&] { all ^= digest_of(replica_.buffers()); });
        return all;
    }
    void synchronise_buffers(bool after_step) {
        if (core_.comm().size() == 1) return;
        std::vector<model_buffer> all;
        tell_peers([&] { all = replica_.buffers(); });
        step_totals const& of = core_.engine().totals();
        core_.synchronise_buffers(all, after_step
                                           ? buffer_ranks{of.first_with_samples, of.with_samples, begun_weight_ != 0}
                                           : buffer_ranks{.count = core_.comm().size()});
    }

private:
    void before_forward() {
        if (accumulated_ == 0) replica_.begin_step(core_.engine().updates());
        if (first_pass_ && core_.options().may_skip()) buffers_before_.keep(replica_.buffers());
    }
    void need(std::size_t i) {
        if (i >= replica_.parameters().size()) return;
        core_.need(i);
        replica_.value_changed(i);
    }
    void run_backward(bool last) {
        weighed_ = first_pass_ = false;
        bool silent = true;
        core_.note(flight::phase, "backward");
        std::string complaint;
        tell_peers([&] {
            try {
                replica_.backward({.weight = weight_,
                                   .empty = replica_.needs_all_ranks(),
                                   .accumulate = accumulated_ != 0,
                                   .last = last,
                                   .unused = core_.options().unused,
                                   .frozen = core_.frozen(),
                                   .owner = "training_options"},
                                  [this, &silent](std::size_t i, std::size_t first, std::size_t count) noexcept {
                                      if (std::exchange(silent, false)) core_.note(flight::mark, "gradient");
                                      core_.report(i, first, count);
                                  });
            } catch (gradient_error const& e) {
                complaint = e.complaint();
            }
        });
        if (!complaint.empty()) core_.fail_gradient(complaint);
        core_.note(flight::finished, "backward");
        accumulated_ += std::exchange(weight_, 0);
        loss_ += std::exchange(pass_loss_, 0.0);
    }

    /// Runs the user's code. What it throws fails the step on every rank, and is rethrown here.
    template <class F>
    decltype(auto) tell_peers(F&& f) {
        return run_user_code(std::forward<F>(f), [this](std::exception_ptr thrown) { core_.fail(thrown); });
    }

    ddp::replica<M> replica_;
    trainer_core<T, element> core_;
    std::shared_ptr<trainer_sums<T>> sums_;  // what the model adds by, where it does

    std::uint64_t weight_ = 0;        // of the batch that forward saw last
    std::uint64_t accumulated_ = 0;   // of the passes since the last step
    std::uint64_t begun_weight_ = 0;  // of all passes of the step that began last
    double pass_loss_ = 0;            // of that batch: mean times weight; only a backward makes it count
    double loss_ = 0;                 // of the passes since the last step, added up
    double loss_before_ = 0;          // of the last step
    bool weighed_ = false;
    bool first_pass_ = true;  // no backward since the last step
    buffers_before buffers_before_;
};

}  // namespace ddp::detail
