/// \file
/// What train/model_claim.hpp declares.
#pragma once

#include <atomic>
#include <condition_variable>  // and std::mutex, which its interface needs: <mutex> is 400 lines more
#include <memory>
#include <vector>

#include <ddp/train/model_claim.hpp>

namespace ddp::detail {

struct model_claim::registry {
    std::mutex mutex;
    std::vector<std::weak_ptr<state>> claims;
};

DDP_DECL model_claim::model_claim(void const* model) : state_(std::make_shared<state>(model)) {
    static registry all;
    std::unique_lock const lock(all.mutex);
    std::erase_if(all.claims, [](std::weak_ptr<state> const& one) { return one.expired(); });
    for (std::weak_ptr<state> const& one : all.claims)
        if (auto const other = one.lock(); other && other->model == model)
            other->superseded.store(true, std::memory_order_relaxed);
    all.claims.push_back(state_);
}

}  // namespace ddp::detail
