/// \file
/// interface: what classes with virtual functions have in common.
#pragma once

#include <ddp/core/language.hpp>  // first

namespace ddp::detail {

/// Destroyed through a pointer to it, and never copied.
struct interface {
    interface() = default;
    interface(interface const&) = delete;
    interface& operator=(interface const&) = delete;
    virtual ~interface() = default;
};

}  // namespace ddp::detail
