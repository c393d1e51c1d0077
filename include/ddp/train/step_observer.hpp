/// \file
/// step_observer: an observer behind one virtual call per event, so that the step is compiled once for all observers.
#pragma once

#include <memory>
#include <type_traits>
#include <utility>

#include <ddp/core/interface.hpp>
#include <ddp/core/observe.hpp>
#include <ddp/train/events.hpp>

namespace ddp::detail {

class step_observer : public detail::interface {
public:
    virtual void on(bucket_reduced const& event) = 0;
    virtual void on(step_finished const& event) = 0;
    virtual void on(mean_gradient<float> const& event) = 0;
    virtual void on(mean_gradient<double> const& event) = 0;
    /// Whether the observer has the hook for the mean gradient.
    [[nodiscard]] virtual bool changes_gradients() const noexcept = 0;
};

template <class Obs>
    requires TrainingObserver<std::unwrap_reference_t<Obs>>
class step_observer_of final : public step_observer {
public:
    explicit step_observer_of(Obs held) : held_(std::move(held)) {}
    void on(bucket_reduced const& event) override { notify(observer(), event); }
    void on(step_finished const& event) override { notify(observer(), event); }
    void on(mean_gradient<float> const& event) override { notify(observer(), event); }
    void on(mean_gradient<double> const& event) override { notify(observer(), event); }
    bool changes_gradients() const noexcept override { return changes<float> || changes<double>; }

private:
    template <class E>
    static constexpr bool changes = ChangesGradients<std::unwrap_reference_t<Obs>, E>;

    [[nodiscard]] std::unwrap_reference_t<Obs>& observer() noexcept { return held_; }

    Obs held_;  // the observer, or a std::reference_wrapper of it
};

/// Null if there is no observer.
template <class Obs>
    requires TrainingObserver<std::unwrap_reference_t<Obs>>
[[nodiscard]] std::unique_ptr<step_observer> make_step_observer(Obs observer) {
    if constexpr (std::is_same_v<Obs, null_observer>)
        return nullptr;
    else
        return std::make_unique<step_observer_of<Obs>>(std::move(observer));
}

}  // namespace ddp::detail
