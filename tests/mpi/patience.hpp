/// \file
/// patient_times: short deadlines, except for silence and for the ranks' meeting: where many ranks share two cores under a
/// sanitizer, one may not get to run for a while, and what each works out by itself takes some longer than others.
#pragma once

#include <chrono>

#include <ddp/comm/timing.hpp>

namespace ddp::test {

inline timing patient_times() {
    timing times = timing::for_tests();
    times.dead = std::chrono::seconds(20);
    times.join = std::chrono::minutes(2);
    return times;
}

}  // namespace ddp::test
