/// \file
/// local_result: what a rank learns when a step of a local_parallel ends.
#pragma once

#include <ddp/core/language.hpp>  // first

#include <cstdint>

namespace ddp {

/// The result of local_parallel::finish.
struct local_finish_result {
    std::uint64_t weight = 0;  ///< this rank's samples
    /// A meeting in which every rank took part ended this step. With gossip each rank took part with its neighbours only. Ranks
    /// hold the same values then only if local_parallel::agrees(). Never true with stale_synchronous, which has no meetings.
    bool met = false;
    /// Some rank had called request_stop() before the last meeting of all ranks; the same on all. With gossip and
    /// stale_synchronous before a meeting or step some time ago.
    bool stop = false;
};

/// The result of local_parallel::step.
struct local_result {
    double loss = 0;           ///< mean over this rank's samples; 0 if it had none
    std::uint64_t weight = 0;  ///< as in local_finish_result
    bool met = false;          ///< as in local_finish_result
    bool stop = false;         ///< as in local_finish_result
};

}  // namespace ddp
