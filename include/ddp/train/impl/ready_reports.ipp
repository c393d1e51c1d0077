/// \file
/// What train/ready_reports.hpp declares.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include <ddp/core/text.hpp>
#include <ddp/train/ready_reports.hpp>

namespace ddp::detail {

[[gnu::cold]] DDP_DECL std::string ready_reports::complaint(function_ref<std::string_view(std::size_t)> name_of) const {
    if (stray_)
        return concat({"backward reported parameter #", *stray_, ", but the model has ", times_.size(),
                       ": ready(i) takes the index in parameters()"});
    for (std::size_t i = 0; i < times_.size(); ++i) {
        if (times_[i] > 1)
            return concat({"backward reported parameter #", i, " '", name_of(i),
                           "' twice: call ready(i) once, when gradient i is final"});
        if (times_[i] == 0)
            return concat({"backward never reported parameter #", i, " '", name_of(i),
                           "': call ready(i) for every parameter, or set training_options.unused = "
                           "ddp::unused::allowed if it takes no part in this loss"});
    }
    return {};
}

}  // namespace ddp::detail
