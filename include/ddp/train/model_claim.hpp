/// \file
/// model_claim: which trainer a model belongs to, so that a trainer notices when another one was made for its model.
#pragma once

#include <atomic>
#include <memory>

#include <ddp/core/separate.hpp>

namespace ddp::detail {

/// The latest claim on a model is valid; earlier ones are superseded. Models are distinguished by address, within the
/// process. Threads may make claims at the same time; a claim is one thread's.
class model_claim {
public:
    /// On no model.
    model_claim() noexcept = default;
    /// Cost: a lock, and a look at every claim that is alive. Allocates.
    explicit model_claim(void const* model);

    [[nodiscard]] bool superseded() const noexcept {
        return state_ && state_->superseded.load(std::memory_order_relaxed);
    }

private:
    struct state {
        explicit state(void const* of) noexcept : model(of) {}
        void const* model;
        std::atomic<bool> superseded{false};
    };
    struct registry;

    std::shared_ptr<state> state_;
};

}  // namespace ddp::detail

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/train/impl/model_claim.ipp>
#endif
