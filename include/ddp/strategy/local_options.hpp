/// \file
/// local_options: how a local_parallel trains.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <ddp/optim/clip.hpp>
#include <ddp/optim/schedule.hpp>
#include <ddp/train/options.hpp>
#include <ddp/train/ready_reports.hpp>

namespace ddp {

/// How a local_parallel trains. The same on all ranks, like training_options.
struct local_options {
    std::optional<clipping> clip = {};        ///< of each rank's own mean gradient
    ddp::schedule schedule = {};              ///< factor of the optimizer's learning rate, by local step
    ddp::unused unused = ddp::unused::error;  ///< a parameter that backward leaves out
    /// Parameters whose names match one of these patterns (see name_fits) stay frozen: they are neither stepped nor
    /// sent in meetings, and do not count in the norm; all ranks keep rank 0's values of them. They have no state. To
    /// freeze others: local_parallel::freeze().
    std::vector<std::string> frozen = {};
    /// A model's buffers after each meeting of all ranks that leaves them with the same values: those of rank 0,
    /// averaged, or left alone.
    ddp::buffers buffers = ddp::buffers::averaged;

    /// The same as options of a data_parallel, which are checked and compared in the same way.
    [[nodiscard]] training_options as_training_options() const {
        training_options all;
        all.clip = clip;
        all.schedule = schedule;
        all.unused = unused;
        all.frozen = frozen;
        all.buffers = buffers;
        return all;
    }
};

}  // namespace ddp
