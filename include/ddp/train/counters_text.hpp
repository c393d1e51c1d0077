/// \file
/// counters_text: a few numbers as one line of text that gives them back bit by bit, for a checkpoint's entries.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include <ddp/core/separate.hpp>

namespace ddp::detail {

/// A member by its name. One of the two pointers is null.
struct named_number {
    std::string_view name;
    double* real = nullptr;
    std::uint64_t* whole = nullptr;
};

/// "OF NAME=NUMBER NAME=NUMBER …". Real numbers are hexadecimal, which is exact.
[[nodiscard]] std::string counters_text(std::string_view of, std::span<named_number const> numbers);
/// Sets the numbers to those that counters_text has written. Throws data_error (errc::format) for any other text; some
/// numbers may then have changed.
void counters_from(std::string_view of, std::string_view text, std::span<named_number const> numbers);

}  // namespace ddp::detail

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/train/impl/counters_text.ipp>
#endif
