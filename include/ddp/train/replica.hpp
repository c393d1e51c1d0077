/// \file
/// replica: one copy of a model and the memory that it is trained in. Depends on no communicator and no number of
/// ranks.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ddp/core/contract.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/model/layout.hpp>
#include <ddp/model/model.hpp>
#include <ddp/model/parameter_list.hpp>
#include <ddp/model/rank_sums.hpp>
#include <ddp/train/arena.hpp>
#include <ddp/train/model_claim.hpp>
#include <ddp/train/ready_reports.hpp>

namespace ddp {

/// How a replica runs backward for a batch.
struct backward_pass {
    std::uint64_t weight = 1;  ///< samples that the gradients are summed over; 0: there was no batch
    bool empty = false;        ///< the model runs backward for a batch of weight 0 as well
    bool accumulate = false;   ///< add to the gradients instead of assigning them
    bool last = true;          ///< the last pass of this step: gradients are reported, and are then in the arena
    ddp::unused unused = ddp::unused::error;    ///< a parameter that backward leaves out
    std::span<std::uint8_t const> frozen = {};  ///< by parameter, not 0: may be left out; empty: none
    char const* owner = "backward_pass";        ///< the type whose `unused` an error says to set
};

/// A model, its parameters in an arena, and passes over it. It does everything that needs no peer; its user
/// (data_parallel, or a loop of your own) decides what is done with gradients and values.
///
///     ddp::replica net{model};
///     net.attach(net.make_arena());
///     ddp::stepper<float> local(ddp::sgd{.lr = 0.1}, net.where(), net.parameters());
///     for (std::uint64_t update = 1; auto const& batch : batches) {
///         net.forward(batch);
///         net.backward({.weight = batch.size()});
///         local.step({.update = update++, .gradient_scale = 1.0 / double(batch.size())}, net.gradients(), net.values());
///         net.values_changed();
///     }
///
/// The caller passes everything that a pass needs. From forward to backward, only the model itself keeps anything, so a
/// model that can hold several batches in between may do so.
///
/// A model that can be bound works in the arena. For one that cannot, gradients are copied out of it in the last pass, and
/// values by copy_values_in and values_changed. Model and replica may be destroyed in any order; one thread at a time.
template <class M>
class replica {
public:
    using element = element_of<M>;
    static constexpr bool bound = BindableModel<M>;
    static constexpr parameter_placement placed =
        contiguous<M> ? parameter_placement::contiguous : parameter_placement::aligned;

    /// Lists the parameters. The model works in its own memory until attach().
    explicit replica(M& model)
        : model_(&model), parameters_(detail::list_parameters(model)), reports_(counts()), used_(parameters_.size()) {}

    [[nodiscard]] M& model() const noexcept { return *model_; }
    /// The parameters as the model declares them, their values in memory that is current between steps.
    [[nodiscard]] std::span<parameter<element> const> parameters() const noexcept { return parameters_; }
    [[nodiscard]] std::vector<std::size_t> counts() const {
        std::vector<std::size_t> all;
        for (parameter<element> const& p : parameters_) all.push_back(p.value.size());
        return all;
    }

    /// An arena with the model's values; parameters lie in it by `order` (empty: as declared), without gaps where the model
    /// is `contiguous`. Allocates.
    [[nodiscard]] arena<element> make_arena(std::vector<std::size_t> order = {}) const {
        arena<element> memory(layout(counts(), std::move(order), sizeof(element), placed));
        fill(memory);
        return memory;
    }
    /// Copies the model's values into an arena that was made for it or for another replica of it.
    void fill(arena<element> const& memory) const {
        for (std::size_t i = 0; i < parameters_.size(); ++i)
            std::copy(parameters_[i].value.begin(), parameters_[i].value.end(), memory.value(i).begin());
    }
    /// From now on the model has the values of this arena, which was made for it or another replica of it, and is trained
    /// there. May be repeated with another arena.
    void attach(arena<element> memory) {
        memory_ = std::move(memory);
        claim_ = detail::model_claim(model_);
        if constexpr (bound) memory_.bind(*model_, std::span(parameters_));
        values_changed();
    }

    // The arena: where everything lies, and all of it.
    [[nodiscard]] arena<element> const& memory() const noexcept { return memory_; }
    [[nodiscard]] layout const& where() const noexcept { return memory_.where(); }
    [[nodiscard]] std::span<element> values() const noexcept { return memory_.values(); }
    [[nodiscard]] std::span<element> gradients() const noexcept { return memory_.gradients(); }

    /// Throws usage_error if the model has been attached to another replica's memory since, or says that it has lost the
    /// memory it was bound to.
    void expect_intact() const {
        DDP_EXPECTS(
            !claim_.superseded(),
            "another trainer was made for this model, and the model works in that trainer's memory. A model has one "
            "trainer at a time: use the one made last, or give each trainer a model of its own.");
        if constexpr (requires { model_->intact(); })
            DDP_EXPECTS(model_->intact(),
                        "the model's memory is no longer the library's: something re-seated its "
                        "tensors. Make a new trainer after loading or converting a model.");
    }
    /// Tells the model, if it has a member for this, that step number n comes next: before the step's first forward.
    void begin_step([[maybe_unused]] std::uint64_t n) {
        if constexpr (requires { model_->begin_step(n); }) model_->begin_step(n);
    }
    /// Whether passes are also run without samples, because other ranks have some.
    [[nodiscard]] bool needs_all_ranks() const {
        if constexpr (requires { model_->needs_all_ranks(); }) return model_->needs_all_ranks();
        return false;
    }
    /// Whether they would be if the trainer gave the model a rank_sums, which this one does not.
    [[nodiscard]] bool would_need_all_ranks() const {
        struct own_sums final : rank_sums {
            void add(std::span<double> /*mine*/) override {}
        };
        if (needs_all_ranks()) return true;
        if constexpr (requires { model_->joins_ranks(); }) return model_->joins_ranks();  // in whatever mode it is now
        if constexpr (requires { model_->join_ranks(std::shared_ptr<rank_sums>()); }) {
            model_->join_ranks(std::make_shared<own_sums>());
            bool const needs = needs_all_ranks();
            model_->join_ranks(std::shared_ptr<rank_sums>());
            return needs;
        } else {
            return false;
        }
    }
    /// A pass without a batch. Does nothing unless the model asks for it.
    void forward_absent() {
        if constexpr (requires { model_->forward_absent(); }) model_->forward_absent();
    }
    /// State that is not trained, as the model lists it now.
    [[nodiscard]] std::vector<model_buffer> buffers() const {
        if constexpr (requires { model_->buffers(); }) return model_->buffers();
        return {};
    }
    /// Mean loss over the batch.
    template <class Batch>
        requires ModelFor<M, Batch>
    double forward(Batch const& batch) {
        return static_cast<double>(model_->forward(batch));
    }
    /// The same, if value i may be read only after needed(i) has returned. A NeedingModel calls needed(i) itself; for
    /// others it is called here for all values.
    template <class Batch, class Needed>
        requires ModelFor<M, Batch>
    double forward(Batch const& batch, Needed const& needed) {
        if constexpr (NeedingModel<M, Batch>) {
            return static_cast<double>(model_->forward(batch, needed));
        } else {
            for (std::size_t i = 0; i < parameters_.size(); ++i) needed(i);
            return forward(batch);
        }
    }

    /// Goes back through the batch that the model saw in forward. Calls on_ready(i), which never throws, once for each
    /// parameter in the last pass: gradient i is final, and in the arena. Calls come from the model's own threads, one
    /// at a time. If on_ready accepts that, on_ready(i, first, count) is called instead, for each range that the model
    /// reports: elements [first, first + count) of gradient i are final, and all after them already were.
    ///
    /// Throws  gradient_error once the model's backward has returned; what the model throws.
    template <class Ready>
    void backward(backward_pass const& how, Ready const& on_ready) {
        bool const assigns = !how.accumulate;
        auto const clear = [&](std::size_t i) {
            if (assigns) std::fill(parameters_[i].gradient.begin(), parameters_[i].gradient.end(), element(0));
        };
        auto const report = [&](std::size_t i, std::size_t first, std::size_t count) noexcept {
            if (!how.last) return;
            copy_gradient(i, first, count);
            if constexpr (std::invocable<Ready const&, std::size_t, std::size_t, std::size_t>)
                on_ready(i, first, count);
            else if (first == 0)
                on_ready(i);
        };
        if (assigns) std::fill(used_.begin(), used_.end(), std::uint8_t{0});
        if (how.weight == 0 && !how.empty) {  // accumulated gradients stay; otherwise they are +0
            for (std::size_t i = 0; i < parameters_.size(); ++i) {
                clear(i);
                report(i, 0, parameters_[i].gradient.size());
            }
            return;
        }
        reports_.start_pass();
        detail::ready_calls const ready{[&](std::size_t i) noexcept {
                                            std::size_t const left = reports_.left(i);
                                            if (reports_.add(i)) report(i, 0, left);
                                        },
                                        [&](std::size_t i, std::size_t first, std::size_t count) noexcept {
                                            if (reports_.add(i, first, count)) report(i, first, count);
                                        }};
        model_->backward(pass<element>{.scale = static_cast<element>(how.weight), .accumulate = how.accumulate}, ready);
        for (std::size_t i = 0; i < parameters_.size(); ++i) {
            if (!reports_.missing(i)) {
                if (how.weight != 0) used_[i] = 1;  // without samples it reports nothing of its own
            } else if (how.unused == unused::allowed || (!how.frozen.empty() && how.frozen[i] != 0)) {
                clear(i);
                ready(i);
            }
        }
        if (!reports_.each_once())  // before any word is allocated
            throw gradient_error(
                reports_.complaint([&](std::size_t i) { return std::string_view(parameters_[i].name); }, how.owner));
    }
    void backward(backward_pass const& how) {
        backward(how, [](std::size_t) {});
    }

    /// By parameter: whether the model has reported it for samples since the last assigning backward.
    [[nodiscard]] std::span<std::uint8_t const> used() const noexcept { return used_; }

    /// Copies the values of a model that cannot be bound into the arena, if the program has changed them. Does nothing
    /// for a model that is bound.
    void copy_values_in() {
        if constexpr (!bound)
            for (std::size_t i = 0; i < parameters_.size(); ++i)
                std::copy(parameters_[i].value.begin(), parameters_[i].value.end(), memory_.value(i).begin());
    }
    /// Must be called after all values in the arena have changed: copies them into a model that is not bound, and calls
    /// its stepped(i) if it has one.
    void values_changed() {
        for (std::size_t i = 0; i < parameters_.size(); ++i) pass_on(i);
    }
    /// Says that all values in the arena are about to change, one after the other, each before the model reads it next.
    /// Then call value_changed(i) for each instead of values_changed().
    void values_change() { changing_.assign(parameters_.size(), std::uint8_t{1}); }
    /// Says that value i has changed, after values_change(). Further calls for the same value do nothing.
    void value_changed(std::size_t i) {
        if (std::exchange(changing_[i], std::uint8_t{0}) != 0) pass_on(i);
    }

    /// Digest of all values, in the order of parameters(). Cost: one pass over the values.
    [[nodiscard]] std::uint64_t digest_of_values() const {
        digest all;
        for (parameter<element> const& p : parameters_) all.add(p.name).add(std::span<element const>(p.value));
        return all.value();
    }

private:
    void pass_on(std::size_t i) {
        if constexpr (!bound) std::ranges::copy(memory_.value(i), parameters_[i].value.begin());
        if constexpr (requires { model_->stepped(i); }) model_->stepped(i);
    }
    void copy_gradient(std::size_t i, std::size_t first, std::size_t count) noexcept {
        if constexpr (!bound)
            std::ranges::copy(parameters_[i].gradient.subspan(first, count),
                              memory_.gradient(i).subspan(first).begin());
    }

    M* model_;
    std::vector<parameter<element>> parameters_;
    arena<element> memory_;
    detail::ready_reports reports_;
    std::vector<std::uint8_t> used_;
    detail::model_claim claim_;
    std::vector<std::uint8_t> changing_;  // by parameter: the model does not know yet that its value has changed
};

}  // namespace ddp
