/// \file
/// What core/error.hpp declares.
#pragma once

#include <ddp/core/error.hpp>
#include <ddp/core/text.hpp>

namespace ddp {

[[gnu::cold, gnu::noinline]] DDP_DECL error::error(errc code, std::string_view text)
    : std::runtime_error(detail::concat({"DDP-E", static_cast<int>(code), " ", name_of(code), ": ", text})),
      code_(code) {}

[[gnu::cold, gnu::noinline]] DDP_DECL void detail::throw_usage(std::string_view advice) {
    throw usage_error(advice);
}

}  // namespace ddp
