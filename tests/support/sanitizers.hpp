/// \file
/// What tests leave out under sanitizers, and say so.
#pragma once

#include <string>

#include "support/catch.hpp"
#include "train/patience.hpp"

namespace ddp::test {

/// Whether this is a build with sanitizers, which leave `what` out; scripts/skipped_tests.sh lists it. At most 50 characters:
/// Catch2 breaks lines.
[[nodiscard]] inline bool sanitizers_leave_out(std::string const& what) {
    if (fewer == 1) return false;
    WARN("not tried: " << what << " under a sanitizer");
    return true;
}
[[nodiscard]] inline bool sanitizers_leave_out(std::string const& what, int ranks) {
    return sanitizers_leave_out(what + ", P = " + std::to_string(ranks));
}

}  // namespace ddp::test
