/// \file
/// state_slice: a piece of what training keeps from step to step besides values, under a name that outlives the run.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

#include <ddp/core/bytes.hpp>
#include <ddp/core/contract.hpp>
#include <ddp/core/element_type.hpp>
#include <ddp/core/function_ref.hpp>

namespace ddp {

/// Elements [begin, begin + count()) of the state `name` of `of`. Names are valid during the visit, `bytes` until the next
/// step; the bytes may be written.
struct state_slice {
    std::string_view of;                      ///< the name of a parameter, or of whatever else the state belongs to
    std::string_view name;                    ///< "momentum", "exp_avg", "residual"
    std::span<std::size_t const> shape = {};  ///< of the whole: the parameter's shape; row-major unless it has strides
    element_type type = element_type::u8;     ///< of each element
    std::size_t begin = 0;                    ///< the first element held here, counted in the whole
    mutable_bytes bytes = {};                 ///< the elements held here, in the library's memory
    /// Whether each rank has its own state of this name. Otherwise ranks hold parts of one state, and any that hold
    /// the same element hold the same bits.
    bool per_rank = false;
    /// Whether a training can continue without it: if a checkpoint has none of this name, it starts as zeros. Not for
    /// state that is per rank.
    bool optional = false;

    [[nodiscard]] std::size_t count() const noexcept { return bytes.size() * 8 / bits_of(type); }
    /// The elements, which are of type E. Throws usage_error if they are not.
    template <class E>
    [[nodiscard]] std::span<E> as() const {
        DDP_EXPECTS(type == element_type_of<E>(), "state_slice::as<E>: the elements are of another type");
        return {reinterpret_cast<E*>(bytes.data()), bytes.size() / sizeof(E)};
    }
};

/// A function that is called with each slice of a state.
using state_visitor = function_ref<void(state_slice const&)>;

}  // namespace ddp
