/// \file
/// training_progress: where a training stands besides its values and its state.
#pragma once

#include <ddp/core/language.hpp>  // first

#include <cstdint>
#include <limits>

namespace ddp {

/// What a trainer counts, and what its next step reports about its last one: the same on all ranks. For code that restores a
/// training, such as checkpoints.
struct training_progress {
    std::uint64_t completed_steps = 0;  ///< that changed values: schedules and bias corrections count them
    std::uint64_t begun_steps =
        0;  ///< all, skipped ones and those without samples included: observers are told this number
    std::uint64_t last_weight = 0;  ///< samples of all ranks in the last step; 0: there was none
    double last_losses = 0;  ///< of the last step: the sum over ranks, in their order, of mean loss times samples
    /// Mean loss in the step before the last one; NaN if there was none.
    double previous_loss = std::numeric_limits<double>::quiet_NaN();
};

}  // namespace ddp
