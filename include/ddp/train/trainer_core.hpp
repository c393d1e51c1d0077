/// \file
/// trainer_core: the part of data_parallel that does not depend on the model's type, so that it is compiled once for
/// all of them.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <ddp/collective/broadcast.hpp>
#include <ddp/comm/communicator.hpp>
#include <ddp/core/separate.hpp>
#include <ddp/kernel/kernel.hpp>
#include <ddp/model/model.hpp>
#include <ddp/train/agreement.hpp>
#include <ddp/train/arena.hpp>
#include <ddp/train/buffers.hpp>
#include <ddp/train/events.hpp>
#include <ddp/train/frozen.hpp>
#include <ddp/train/make_engine.hpp>
#include <ddp/train/options.hpp>
#include <ddp/train/policies.hpp>
#include <ddp/train/step_engine.hpp>
#include <ddp/train/training_progress.hpp>
#include <ddp/transport/any.hpp>

namespace ddp {

/// The result of data_parallel::finish.
struct finish_result {
    std::uint64_t weight = 0;  ///< samples of all ranks, of every batch that went into the step; never 0
    /// Of the mean gradient before clipping, if clipping by norm or training_options::nonfinite needs it.
    double gradient_norm = 0;
    bool skipped = false;  ///< the mean gradient was not finite: nothing was changed (nonfinite::skip)
    bool stop = false;     ///< some rank had called request_stop() before it began this step; the same on all ranks
    /// Mean loss over the samples of all ranks in the step before this one, the same bits on all ranks: it is sent with
    /// this step's weights, so it costs no message. NaN in the first step, and after one without samples. Losses are
    /// summed in the order of ranks, each times its samples. After join(): trainer.previous_loss().
    double previous_loss = 0;
};

namespace detail {

/// The engine, the arena that it works in, and all that ranks do with them, from the comparison of models to the end of
/// a step.
template <Transport T, Element E>
class trainer_core {
public:
    /// Collective. The arena has rank 0's values then. `parameters` outlive this.
    [[gnu::cold]] trainer_core(communicator<T> const& comm, trainer_setup<T, E>&& with,
                               std::span<parameter<E> const> parameters, model_facts const& model);
    ~trainer_core() { detach(); }
    trainer_core(trainer_core const&) = delete;
    trainer_core& operator=(trainer_core const&) = delete;

    [[nodiscard]] communicator<T> const& comm() const noexcept { return comm_; }
    [[nodiscard]] training_options const& options() const noexcept { return options_; }
    [[nodiscard]] step_engine<T, E>& engine() const noexcept { return *engine_; }
    [[nodiscard]] optimizer_model<E>& optimizer() const noexcept { return *optimizer_; }
    [[nodiscard]] arena<E> const& memory() const noexcept { return memory_; }
    [[nodiscard]] bool shares_memory() const noexcept { return shared_; }
    [[nodiscard]] bool begun() const noexcept { return begun_; }
    /// Steps of the training.
    [[nodiscard]] std::uint64_t begun_steps() const noexcept { return begun_steps_; }
    [[nodiscard]] std::span<std::uint8_t const> frozen() const noexcept { return frozen_; }
    [[nodiscard]] step_times& times() noexcept { return times_; }
    [[nodiscard]] step_times const& times() const noexcept { return times_; }

    // Between steps. Values are current once settle() has returned.

    /// Whether some values of the last step may still be on their way.
    [[nodiscard]] bool late() const noexcept { return late_; }
    /// Waits until all values have arrived. Throws the error of all ranks.
    void settle() {
        if (!late_) return;
        wait_for_values([&] { return engine_->settled(); });
        late_ = false;
    }
    /// The same if the job may have failed: engine().torn() says whether values are torn.
    void settle_quietly() noexcept {
        comm_.driver()->quietly([&] { settle(); });
    }
    /// Waits until the values of parameter i have arrived.
    void need(std::size_t i) {
        if (!late_) return;
        if (!engine_->late()->current(i)) return wait_for_values([&] { return engine_->late()->made_current(i); });
        if (!comm_.has_thread()) comm_.progress();
    }
    void set_progress(training_progress const& at) {
        begun_steps_ = at.begun_steps;
        comm_.exclusively([&] { engine_->set_progress(at); });
    }
    void set_rate_factor(double factor) {
        DDP_EXPECTS(!begun_, "set_rate_factor: a step is under way; finish() it first");
        agree_on_factor(comm_, "set_rate_factor", digest{}.add("set_rate_factor").add(engine_->hash()).value(), factor);
        comm_.exclusively([&] { optimizer_->set_rate_factor(factor + 0.0); });  // -0 is 0 on every rank
    }
    void set_frozen(char const* what, std::string_view pattern, std::uint8_t frozen);
    void set_frozen(std::span<std::uint8_t const> marks);
    void synchronise_buffers(std::span<model_buffer const> all, buffer_ranks const& of) {
        if (all.empty()) return;
        if (options_.buffers == buffers::averaged)
            average_buffers(comm_, all, of);
        else
            broadcast_buffers(comm_, all, of.first);
    }
    [[nodiscard]] bool all_alike(std::uint64_t digest) {
        return detail::all_alike(comm_, "replicas_identical", engine_->hash(), digest);
    }

    // A step.
    /// From then on the engine waits for gradients. The values are current.
    void begin(step_ticket const& mine) {
        // Another trainer's step may have begun and not been entered yet: all ranks enter them in the order of the calls.
        if (comm_.tasks().has_mail()) comm_.exclusively([&] { comm_.tasks().pump(); });
        begun_ = true;
        ++begun_steps_;
        engine_->begin(mine);
        move_on();
    }
    /// Reports elements [first, first + count) of gradient i.
    void report(std::size_t i, std::size_t first, std::size_t count) noexcept {
        if (engine_->ready(i, first, count)) move_on();
    }
    void backward_done(std::span<std::uint8_t const> used) {
        engine_->use(used);
        engine_->backward_done();
        note(flight::mark, "reported");
        move_on();
    }
    /// This rank's backward has reported wrongly: throws the error of all ranks.
    void fail_gradient(std::string const& complaint) {
        leave_step();
        try {
            detail::fail_gradient(comm_, complaint);
        } catch (...) {
            keep_values();
            throw;
        }
    }
    /// Waits for the end of the step, since `since`. Throws the error of all ranks.
    finish_result wait(time_point since);
    /// The same on every rank, except that rank 0 prints it.
    void report_nonfinite();
    /// Called when this rank's own code has thrown: fails the step, or the operation between steps, on every rank.
    void fail(std::exception_ptr thrown) {
        leave_step();
        comm_.fail(thrown);
        wait_for_verdict();
    }
    /// Called when the trainer is left within a step.
    void abandon_step() {
        comm_.fail("its program left a training step before the step had ended, perhaps by an exception");
        wait_for_verdict();  // the model may outlive this
    }
    /// After a failure: from now on no other rank changes this rank's values.
    void keep_values() const noexcept {
        if (shared_ && comm_.tasks().failed()) engine_->keep_values();
    }
    /// For the flight recorder: the program begins this part of the step that is under way, or comes next.
    void note(flight what, char const* name) const noexcept {
        comm_.tasks().note(what, begun_steps_ + (begun_ ? 0 : 1), 0, 0, name);
    }

    /// Destroys the engine; its memory stays as long as the transport may write there.
    void detach() noexcept;

private:
    [[gnu::cold]] void start_engine(trainer_setup<T, E>& with, model_facts const& model);
    void leave_step() noexcept {
        begun_ = false;
        engine_->end();
    }
    void wait_for_verdict() const noexcept;
    template <class Make>
    void wait_for_values(Make&& make);
    /// There is mail: makes the thread that drives collect it.
    void move_on() noexcept {
        if (comm_.has_thread())
            comm_.poke();
        else if (comm_.size() > 1 && std::this_thread::get_id() == home_)
            comm_.progress();
    }

    communicator<T> comm_;
    training_options options_;
    std::span<parameter<E> const> parameters_;
    std::thread::id home_;
    std::vector<std::uint8_t> frozen_;  // by parameter
    arena<E> memory_;
    bool shared_ = false;                      // the other ranks see it
    optimizer_model<E>* optimizer_ = nullptr;  // the engine's
    std::unique_ptr<step_engine<T, E>> engine_;
    bool begun_ = false, late_ = false;
    int unwinding_ = std::uncaught_exceptions();
    std::uint64_t begun_steps_ = 0, nonfinite_steps_ = 0;
    step_times times_;
};

template <Transport T, Element E>
trainer_core<T, E>::trainer_core(communicator<T> const& comm, trainer_setup<T, E>&& with,
                                 std::span<parameter<E> const> parameters, model_facts const& model)
    : comm_(comm),
      options_(std::move(with.options)),
      parameters_(parameters),
      home_(std::this_thread::get_id()),
      frozen_(parameters.size()) {
    expect_uncontracted_kernels();
    optimizer_ = with.parts.optimizer.get();
    optimizer_->validate();
    std::vector<exchange_parameter> shapes;
    for (parameter<E> const& p : parameters) shapes.push_back({p.name, p.shape});
    with.parts.exchange->check_group(comm_.members());
    with.parts.exchange->validate(shapes);
    static_cast<void>(optimizer_->groups_of(parameters));  // throws, if it does, before any peer waits
    options_.template validate<E>();
    frozen_ = marks_of(parameters, options_.frozen, "training_options.frozen");
    try {
        start_engine(with, model);
    } catch (...) {
        detach();
        throw;
    }
}

template <Transport T, Element E>
void trainer_core<T, E>::start_engine(trainer_setup<T, E>& with, model_facts const& model) {
    engine_made<T, E> made = make_engine(comm_, with, options_, parameters_, model, frozen_);
    options_.update = made.update;
    memory_ = std::move(made.memory);
    shared_ = made.shared;
    engine_ = std::move(made.engine);
    made.mine.hashes[agenda::optimizer] = engine_->optimizer_hash();
    start_agreement const agreed =
        agree_on_start(comm_, parameters_, describe(std::span(model.buffers)), made.mine,
                       words_of(options_, model.hash_words, made.buckets, made.exchange, engine_->optimizer_words()),
                       {"data_parallel", "training_options"});
    engine_->agree_on(agreed.hash, agreed.context);
    expect_no_refusal(comm_, *engine_);
    if (comm_.size() > 1) broadcast(comm_, memory_.values(), 0);
    if (comm_.size() > 1) broadcast_buffers(comm_, std::span(model.buffers));
}

template <Transport T, Element E>
void trainer_core<T, E>::detach() noexcept {
    if (engine_ == nullptr) return;
    if (std::uncaught_exceptions() <= unwinding_) settle_quietly();
    comm_.exclusively([&] {
        // The transport of a failed communicator may still use posted memory.
        if (comm_.tasks().failed()) {
            comm_.keep(memory_.owner());
            comm_.keep(engine_->posted_memory());
        }
        if (!engine_->idle()) {  // its coroutines end before it does
            comm_.tasks().fail(failure_kind::threw, errc::remote_exception, -1, "a trainer ended within a step");
            comm_.tasks().pump();
        }
        engine_.reset();
    });
}

// Between steps

template <Transport T, Element E>
template <class Make>
void trainer_core<T, E>::wait_for_values(Make&& make) {
    time_point const since = monotonic_clock::now();
    try {
        comm_.driver()->run(make, "step", begun_steps_);
    } catch (...) {
        late_ = false;  // they will not arrive
        throw;
    }
    times_.waited += monotonic_clock::now() - since;
}
template <Transport T, Element E>
void trainer_core<T, E>::set_frozen(char const* what, std::string_view pattern, std::uint8_t frozen) {
    bool const alike =
        comm_.size() == 1 ||
        detail::all_alike(comm_, what, digest{}.add(what).add(engine_->hash()).value(), digest{}.add(pattern).value());
    DDP_EXPECTS(alike, std::string(what) + ": ranks pass different patterns ('" + std::string(pattern) + "' on rank " +
                           std::to_string(comm_.members().world_rank(comm_.rank())) + "); nothing was changed");
    bool const fits = mark_fitting(parameters_, pattern, frozen, frozen_);
    if (!fits) until_all_know(comm_, what);
    DDP_EXPECTS(fits, std::string(what) + ": no parameter's name matches '" + std::string(pattern) +
                          "'; '*' stands for any characters, '?' for one");
    comm_.exclusively([&] { engine_->freeze(frozen_); });
}
template <Transport T, Element E>
void trainer_core<T, E>::set_frozen(std::span<std::uint8_t const> marks) {
    digest all;
    for (std::uint8_t const mark : marks) all.add(mark != 0 ? "1" : "0");
    DDP_EXPECTS(
        comm_.size() == 1 || detail::all_alike(comm_, "set_frozen",
                                               digest{}.add("set_frozen").add(engine_->hash()).value(), all.value()),
        "set_frozen: ranks pass different marks; nothing was changed");
    if (marks.size() != frozen_.size()) until_all_know(comm_, "set_frozen");
    DDP_EXPECTS(marks.size() == frozen_.size(), "set_frozen: " + std::to_string(marks.size()) + " marks for " +
                                                    std::to_string(frozen_.size()) + " parameters");
    std::ranges::transform(marks, frozen_.begin(), [](std::uint8_t mark) { return std::uint8_t{mark != 0}; });
    comm_.exclusively([&] { engine_->freeze(frozen_); });
}

template <Transport T, Element E>
finish_result trainer_core<T, E>::wait(time_point since) {
    begun_ = false;
    engine_->await_from(since);
    try {
        comm_.driver()->run(
            [&] {
                engine_->collect();
                engine_->end();  // from here on the call says that the step is under way: its observer may still throw
                return engine_->finished();
            },
            "step", begun_steps_);
    } catch (...) {
        engine_->end();
        keep_values();
        throw;
    }
    times_.stepped += engine_->stepped_late();
    times_.waited += monotonic_clock::now() - since - engine_->stepped_late();
    late_ = engine_->late() != nullptr;
    if (engine_->weight() == 0 || engine_->skipped()) settle();
    return {engine_->weight(), engine_->gradient_norm(), engine_->skipped(), engine_->stop(), engine_->previous_loss()};
}
template <Transport T, Element E>
void trainer_core<T, E>::report_nonfinite() {
    std::string const what =
        detail::describe(engine_->places(), comm_.members().members(),
                         [this](std::size_t i) -> std::string_view { return parameters_[i].name; });
    if (options_.nonfinite == nonfinite::stop) {
        until_all_know(comm_, "error_of_all");
        throw error(errc::nonfinite,
                    concat({"step ", begun_steps_, ": the mean gradient is not finite: ", what,
                            ". Nothing was changed. Look at the batch of each rank named, and at the learning rate; "
                            "nonfinite::skip skips such steps"}));
    }
    // Reported at the first, second, fourth, … such step, so that the log stays short.
    if (std::has_single_bit(++nonfinite_steps_) && comm_.rank() == 0)
        say_nonfinite(begun_steps_, engine_->skipped(), nonfinite_steps_, what);
}
/// Until the other ranks know of this failure, they may still write into this rank's values.
template <Transport T, Element E>
void trainer_core<T, E>::wait_for_verdict() const noexcept {
    if (!shared_) return;
    comm_.driver()->quietly([&] { comm_.check(); });  // also in a hook, where nothing can be waited for
    keep_values();
}

#if defined(DDP_SEPARATE_COMPILATION)
DDP_INSTANTIATE class trainer_core<any_transport, float>;
DDP_INSTANTIATE class trainer_core<any_transport, double>;
#endif

}  // namespace detail
}  // namespace ddp
