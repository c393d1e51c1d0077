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
    char separator = ',';                          ///< between fields; not a quote, line end, blank or part of a number
    std::size_t max_bytes = std::size_t{1} << 30;  ///< largest size of the text to accept
};

/// The contents of a CSV file.
struct csv_table {
    std::vector<std::string> names;  ///< of the columns; empty without a header
    std::size_t rows = 0;            ///< lines, not counting the header
    std::size_t columns = 0;         ///< fields in every line
    std::vector<double> values;      ///< (rows, columns), row-major
};

namespace detail {
[[nodiscard]] csv_table read_csv(function_ref<std::size_t(mutable_bytes)> read, std::string const& name,
                                 csv_options const& options);
}  // namespace detail

/// Reads a table of numbers, written as std::from_chars takes them (12, -0.5, 1e-3, nan, inf; no leading plus) whatever
/// the locale. Lines end in a line feed, which may follow a carriage return; the last line may lack it. Blanks around a
/// field and a byte order mark are ignored. A field of the header may be in double quotes, in which two of them stand
/// for one.
///
/// Memory  the values, one block of 64 KiB, and the longest line.
/// Throws  data_error (errc::format), with the line and the number of the field in it, both from 1, for a field that is
///         not a number or is out of the range of double, a line with more or fewer fields than the first, an empty line,
///         no rows, or more than max_bytes; and what the source throws. usage_error for a separator that could be part of
///         a field.
template <ByteSource S>
[[nodiscard]] csv_table read_csv(S& source, csv_options const& options = {}) {
    return detail::read_csv([&](mutable_bytes out) { return source.read(out); }, source.name(), options);
}

}  // namespace ddp

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/data/impl/csv.ipp>
#endif
