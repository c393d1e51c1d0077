/// \file
/// thrown_by: the text of what a call throws.
#pragma once

#include <exception>
#include <string>
#include <utility>

namespace ddp::test {

/// What it threw, in words; "" if it did not.
template <class F>
std::string thrown_by(F&& f) {
    try {
        std::forward<F>(f)();
        return {};
    } catch (std::exception const& e) {
        return e.what();
    }
}

}  // namespace ddp::test
