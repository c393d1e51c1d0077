// Throws arbitrary bytes at the readers of NPY and CSV files: they refuse them with a data_error, or what they make of them is
// sound, and reads the same again once it is written anew. Anything else, and whatever a sanitizer
// sees, ends the program.
//
// The first byte chooses: a whole NPY file, the header and the data of one that begins well, or a CSV file. The second says of
// which format, or what stands between fields.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ddp/core/text.hpp>
#include <ddp/data/csv.hpp>
#include <ddp/data/npy.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "input.hpp"

namespace {

using fuzz::expect;

constexpr std::size_t limit = std::size_t{1} << 16;

// Bytes in memory, and whether it can tell how many follow.
struct memory_source {
    std::string_view content;
    std::string called = "memory";
    std::size_t read(ddp::mutable_bytes out) {
        std::size_t const count = std::min(out.size(), content.size());
        if (count != 0) std::memcpy(out.data(), content.data(), count);
        content.remove_prefix(count);
        return count;
    }
    std::string const& name() const { return called; }
};
struct telling_source : memory_source {
    void expect_more(std::uint64_t count) const {
        if (count > content.size()) throw ddp::data_error(ddp::errc::format, "memory: is truncated");
    }
};

void said(ddp::data_error const& e) {
    std::string_view const text = e.what();
    expect(text.size() < 2000, "what is said has bounds");
    expect(ddp::detail::is_utf8(text), "what is said is a text");
    for (char const c : text) expect(static_cast<unsigned char>(c) >= ' ' && c != 127, "and for a terminal");
}

template <class Source>
std::optional<ddp::npy_array> npy(std::string_view content) {
    try {
        Source source{};
        source.content = content;
        ddp::npy_array array = ddp::read_npy(source, limit);
        std::size_t count = ddp::bits_of(array.type) / 8;
        bool empty = false;
        for (std::size_t const extent : array.shape) empty = empty || extent == 0;
        for (std::size_t const extent : array.shape)
            count *= empty ? 0 : extent;  // cannot overflow: the limit was kept
        if (empty) count = 0;
        expect(array.data.size() == count && count <= limit, "data are as large as the shape says, within the limit");
        expect(array.shape.size() <= 64, "there are no more dimensions than NumPy has");
        expect(source.content.empty(), "nothing is left");
        return array;
    } catch (ddp::data_error const& e) {
        said(e);
        return std::nullopt;
    }
}

// As numpy.save writes it.
std::string written(ddp::npy_array const& array) {
    std::string shape;
    for (std::size_t const extent : array.shape) shape += std::to_string(extent) + ", ";
    char const* const code = array.type == ddp::element_type::f32   ? "<f4"
                             : array.type == ddp::element_type::f64 ? "<f8"
                             : array.type == ddp::element_type::u8  ? "|u1"
                             : array.type == ddp::element_type::i32 ? "<i4"
                                                                    : "<i8";
    std::string header = std::string("{'descr': '") + code + "', 'fortran_order': False, 'shape': (" + shape + "), }";
    header.resize((header.size() + 10) / 64 * 64 + 64 - 10 - 1, ' ');
    header += '\n';
    std::string text = std::string("\x93NUMPY\x01", 7) + '\0';
    text += static_cast<char>(header.size() % 256);
    text += static_cast<char>(header.size() / 256);
    return (text + header).append(array.data.begin(), array.data.end());
}

void npy_file(std::string_view content) {
    auto const array = npy<memory_source>(content);
    auto const told = npy<telling_source>(content);
    expect(array.has_value() == told.has_value(), "a source that can tell its length reads the same");
    if (!array) return;
    expect(array->data == told->data && array->shape == told->shape && array->type == told->type, "it reads the same");
    auto const again = npy<memory_source>(written(*array));
    expect(again && again->data == array->data && again->shape == array->shape && again->type == array->type,
           "what was read is read again from what numpy.save writes of it");
}

std::optional<ddp::csv_table> csv(std::string_view content, ddp::csv_options const& options) {
    try {
        memory_source source{content};
        ddp::csv_table table = ddp::read_csv(source, options);
        expect(table.rows >= 1 && table.columns >= 1 && table.values.size() == table.rows * table.columns,
               "every row has a number for every column");
        expect(options.header ? table.names.size() == table.columns : table.names.empty(), "every column has its name");
        return table;
    } catch (ddp::data_error const& e) {
        said(e);
        return std::nullopt;
    }
}
bool same(double a, double b) {
    return std::memcmp(&a, &b, sizeof a) == 0 || (std::isnan(a) && std::isnan(b));
}

void csv_file(std::string_view content, ddp::csv_options const& options) {
    auto const table = csv(content, options);
    if (!table) return;
    std::string text;
    for (std::size_t i = 0; i < table->names.size(); ++i) {
        std::string name;
        for (char const c : table->names[i]) name += c == '"' ? std::string("\"\"") : std::string(1, c);
        text += (i == 0 ? "\"" : options.separator + std::string("\"")) + name + '"';
    }
    if (options.header) text += "\r\n";
    for (std::size_t i = 0; i < table->values.size(); ++i) {
        std::array<char, 64> number{};
        std::snprintf(number.data(), number.size(), "%.17g", table->values[i]);
        std::string_view digits = number.data();
        if (digits == "-nan") digits = "nan";
        text += digits;
        text += (i + 1) % table->columns == 0 ? std::string("\n") : std::string(1, options.separator);
    }
    auto const again = csv(text, options);
    expect(again && again->rows == table->rows && again->columns == table->columns && again->names == table->names,
           "a table that is written anew reads the same");
    expect(std::equal(table->values.begin(), table->values.end(), again->values.begin(), same), "so do its numbers");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(std::uint8_t const* data, std::size_t size) {
    fuzz::reader in({data, size});
    std::uint8_t const which = in.byte(), how = in.byte();
    std::string const rest = in.text(size);
    switch (which % 4) {
        case 0: npy_file(rest); break;
        case 1: {  // a good beginning, and a header as long as the input is, up to a line feed; data behind it
            std::size_t const end = std::min(rest.find('\n') + 1, rest.size());
            std::size_t const length = rest.find('\n') == rest.npos ? rest.size() : end;
            std::string text = std::string("\x93NUMPY", 6) + static_cast<char>(1 + how % 3) + '\0';
            for (int i = 0; i < (how % 3 == 0 ? 2 : 4); ++i) text += static_cast<char>(length >> 8 * i & 255);
            npy_file(text + rest);
            break;
        }
        default: {
            constexpr std::string_view separators = ",;\t|";
            csv_file(rest, {.header = which % 4 == 3, .separator = separators[how % 4]});
        }
    }
    return 0;
}
