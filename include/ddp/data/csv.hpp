/// \file
/// CSV: a table of numbers as text, one row a line.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <ddp/core/bytes.hpp>
#include <ddp/core/function_ref.hpp>
#include <ddp/core/separate.hpp>
#include <ddp/data/source.hpp>

namespace ddp {

/// How a CSV file is read.
struct csv_options {
    bool header = false;                           ///< the first line names the columns
    char separator = ',';                          ///< between fields; no quote, line end, blank or part of a number
    std::size_t max_bytes = std::size_t{1} << 30;  ///< the most text to accept
};

/// What a CSV file holds.
struct csv_table {
    std::vector<std::string> names;  ///< of the columns; none without a header
    std::size_t rows = 0;            ///< lines, but for the header
    std::size_t columns = 0;         ///< fields of every line
    std::vector<double> values;      ///< (rows, columns), row-major
};

namespace detail {
[[nodiscard]] csv_table read_csv(function_ref<std::size_t(mutable_bytes)> read, std::string const& name,
                                 csv_options const& options);
}  // namespace detail

/// Reads a table of numbers, written as C++ writes them (12, -0.5, 1e-3, nan, inf), whatever the locale. Lines end in a line
/// feed, perhaps after a carriage return; the last one may go without. Blanks around a field mean nothing, nor does a byte
/// order mark. A field of the header may be in double quotes, with two of them for one.
///
/// Memory  the values, one piece of 64 KiB, and the longest line.
/// Throws  data_error (errc::format), with line and column, both from 1: no number, one that is out of a double's range, another
///         number of fields than in the first line, an empty line, no rows, more than max_bytes; and whatever the source throws.
///         usage_error for a separator that could be part of a field.
template <ByteSource S>
[[nodiscard]] csv_table read_csv(S& source, csv_options const& options = {}) {
    return detail::read_csv([&](mutable_bytes out) { return source.read(out); }, source.name(), options);
}

}  // namespace ddp

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/data/impl/csv.ipp>
#endif
