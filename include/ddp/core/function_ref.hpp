/// \file
/// function_ref: a callable that is passed through a call without its type, and not kept.
#pragma once

#include <ddp/core/language.hpp>  // first

#include <concepts>
#include <memory>
#include <type_traits>
#include <utility>

namespace ddp {

/// Refers to a function object that outlives it, such as a lambda. (To pass a function, pass a lambda that calls it.) Two
/// pointers; a call costs one indirect call; never empty, allocates nothing.
template <class Signature>
class function_ref;

template <class R, class... Arguments>
class function_ref<R(Arguments...)> {
public:
    template <class F>
        requires(!std::same_as<std::remove_cvref_t<F>, function_ref> &&
                 !std::is_function_v<std::remove_reference_t<F>> && std::is_invocable_r_v<R, F&, Arguments...>)
    function_ref(F&& callable) noexcept
        : callable_(const_cast<void*>(static_cast<void const*>(std::addressof(callable)))),
          call_([](void* of, Arguments... arguments) -> R {
              return (*static_cast<std::remove_reference_t<F>*>(of))(std::forward<Arguments>(arguments)...);
          }) {}

    R operator()(Arguments... arguments) const { return call_(callable_, std::forward<Arguments>(arguments)...); }

private:
    void* callable_;
    R (*call_)(void*, Arguments...);
};

}  // namespace ddp
