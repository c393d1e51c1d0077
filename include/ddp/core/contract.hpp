/// \file
/// DDP_EXPECTS: a caller's mistake that the types cannot show, checked in every build.
#pragma once

#include <ddp/core/language.hpp>  // first

#include <ddp/core/error.hpp>

/// Throws ddp::usage_error with `advice` (what to do instead) unless `condition` holds.
#define DDP_EXPECTS(condition, advice)                        \
    do {                                                      \
        if (!(condition)) ::ddp::detail::throw_usage(advice); \
    } while (false)
