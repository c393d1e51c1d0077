/// \file
/// What train/ready_reports.hpp declares.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include <ddp/comm/transport.hpp>
#include <ddp/core/text.hpp>
#include <ddp/train/ready_reports.hpp>

namespace ddp::detail {

[[gnu::cold]] DDP_DECL std::string ready_reports::complaint(function_ref<std::string_view(std::size_t)> name_of,
                                                            std::string_view owner) const {
    if (stray_)
        return concat({"backward reported parameter #", *stray_, ", but the model has ", states_.size(),
                       ": ready(i) takes the index in parameters()"});
    if (misplaced_)
        return concat({"backward reported elements [", misplaced_->first, ", ", misplaced_->first + misplaced_->count,
                       ") of parameter #", misplaced_->parameter, " '", name_of(misplaced_->parameter),
                       "', whose elements [0, ", misplaced_->left,
                       ") were left: ready(i, first, count) takes ranges from the end backwards, without gaps"});
    std::size_t missing = 0;
    for (std::size_t i = 0; i < states_.size(); ++i) {
        if (states_[i] == state::twice)
            return concat({"backward reported parameter #", i, " '", name_of(i),
                           "' twice: call ready(i) once, when gradient i is final"});
        if (states_[i] == state::partly)
            return concat({"backward never reported the first ", left_[i], " elements of parameter #", i, " '",
                           name_of(i), "': ready(i) reports all that ranges have left"});
        missing += states_[i] == state::none ? 1 : 0;
    }
    if (missing == 0) return {};
    // The text of a rank's record is limited, and the advice must fit too.
    constexpr std::size_t most_names = 10, room = sizeof(failure::text) / 2;
    std::string names;
    std::size_t named = 0;
    for (std::size_t i = 0; i < states_.size() && named < most_names; ++i) {
        if (states_[i] != state::none) continue;
        std::string const one = concat({named == 0 ? "#" : ", #", i, " '", name_of(i), "'"});
        if (named != 0 && names.size() + one.size() > room) break;
        names += one;
        ++named;
    }
    std::string const more = named == missing ? std::string() : concat({" and ", missing - named, " more"});
    return concat({"backward never reported ", missing == 1 ? "parameter " : concat({missing, " parameters: "}), names,
                   more, ": call ready(i) for each, or set ", owner, ".unused = ddp::unused::allowed"});
}

}  // namespace ddp::detail
