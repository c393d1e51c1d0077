/// \file
/// control_groups: which control groups limit this process, and where their files are.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include <ddp/core/separate.hpp>

namespace ddp::detail {

struct control_group {
    std::string directory;  ///< with a slash at its end
    bool unified;           ///< version 2
};

/// The control groups around this process that have `controller` ("cpu", "memory"): its own first, then up to the topmost
/// that it can see. `root` is put before /proc and before the places where groups are mounted.
[[nodiscard]] std::vector<control_group> control_groups(std::string_view controller, std::string_view root = {});

/// A file of /proc or of a control group; "" if there is none.
[[nodiscard]] std::string system_file(std::string const& path);

}  // namespace ddp::detail

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/comm/impl/control_groups.ipp>
#endif
