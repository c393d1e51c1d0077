// CIFAR-10, CSV and NPY: what they hold, and what is refused in files from strangers.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <ddp/data/cifar.hpp>
#include <ddp/data/csv.hpp>
#include <ddp/data/npy.hpp>
#include <fstream>
#include <limits>
#include <map>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "data/files.hpp"
#include "support/catch.hpp"

using test::bytes;
using test::memory_source;

namespace {

bytes as_bytes(std::string_view text) {
    return {text.begin(), text.end()};
}
template <class Read>
void check_refused(bytes const& content, std::string_view words, Read read) {
    memory_source source{content, "some/file"};
    test::caught const e = test::catch_error([&] { (void)read(source); });
    CAPTURE(e.text, words);
    CHECK(e.code == ddp::errc::format);
    CHECK(e.says("some/file: "));
    CHECK(e.says(words));
}

/// `count` records with labels 0, 1, … 9, 0, …; byte k of record r's image is 7 r + k.
bytes cifar_records(std::size_t count, std::size_t first = 0) {
    bytes all;
    for (std::size_t r = first; r < first + count; ++r) {
        all.push_back(static_cast<std::uint8_t>(r % 10));
        for (std::size_t k = 0; k < 3072; ++k) all.push_back(static_cast<std::uint8_t>(7 * r + k));
    }
    return all;
}

/// An NPY file as numpy.save writes it.
bytes npy(std::string dictionary, bytes const& data, unsigned version = 1) {
    std::size_t const fixed = version == 1 ? 10 : 12;
    while ((fixed + dictionary.size() + 1) % 64 != 0) dictionary += ' ';
    dictionary += '\n';
    bytes file = as_bytes("\x93NUMPY");
    file.push_back(static_cast<std::uint8_t>(version));
    file.push_back(0);
    for (std::size_t k = 0; k < fixed - 8; ++k) file.push_back(static_cast<std::uint8_t>(dictionary.size() >> (8 * k)));
    return test::joined(test::joined(file, as_bytes(dictionary)), data);
}
template <class E>
bytes bytes_of_all(std::vector<E> const& values) {
    bytes all(values.size() * sizeof(E));
    if (!all.empty()) std::memcpy(all.data(), values.data(), all.size());
    return all;
}
bytes from_hex(std::string const& text) {
    bytes all;
    for (std::size_t k = 0; k < text.size(); k += 2)
        all.push_back(static_cast<std::uint8_t>(std::stoi(text.substr(k, 2), nullptr, 16)));
    return all;
}
/// What NumPy has written, by case, as tests/oracle/npy.py has recorded it; the path is from tests/CMakeLists.txt.
std::map<std::string, bytes> files_of_numpy() {
    std::ifstream file(DDP_TEST_NPY);
    std::string line;
    std::getline(file, line);
    REQUIRE(line == "case,header,blanks and line feed,data");
    std::map<std::string, bytes> all;
    while (std::getline(file, line)) {
        std::istringstream fields(line);
        std::string name, header, blanks, data;
        std::getline(fields, name, ',');
        std::getline(fields, header, ',');
        std::getline(fields, blanks, ',');
        std::getline(fields, data, ',');
        all[name] = test::joined(
            test::joined(from_hex(header), as_bytes(std::string(std::stoul(blanks) - 1, ' ') + "\n")), from_hex(data));
    }
    return all;
}
constexpr std::size_t limit = std::size_t{1} << 20;
auto const read_npy = [](memory_source& source) { return ddp::read_npy(source, limit); };
auto const read_csv = [](memory_source& source) { return ddp::read_csv(source); };
auto const read_named = [](memory_source& source) { return ddp::read_csv(source, {.header = true}); };

}  // namespace

TEST_CASE("CIFAR-10's binary files are read record by record", "[data][cifar]") {
    test::scratch_directory const dir;
    std::size_t first = 0;
    for (int part = 1; part <= 5; ++part) {
        std::size_t const count = part == 2 ? 256 : 3;  // a whole piece, and parts of one
        dir.write("data_batch_" + std::to_string(part) + ".bin", cifar_records(count, first));
        first += count;
    }
    dir.write("test_batch.bin", cifar_records(2, 90));
    auto const train = ddp::load_cifar10(dir.path().string(), ddp::data_split::train);
    auto const test = ddp::load_cifar10(dir.path().string(), ddp::data_split::test);
    CHECK((train.size() == 268 && train.classes == 10 && train.features == 3072));
    CHECK(train.sample_shape == std::vector<std::size_t>{3, 32, 32});
    bytes inputs;
    for (std::size_t r = 0; r < 268; ++r)
        for (std::size_t k = 0; k < 3072; ++k) inputs.push_back(static_cast<std::uint8_t>(7 * r + k));
    CHECK(train.inputs == inputs);
    CHECK((train.labels[0] == 0 && train.labels[259] == 9 && train.labels[267] == 7));
    CHECK(test.labels == std::vector<std::uint32_t>{0, 1});

    ddp::classification_data to = test;
    auto const append = [&](memory_source& source) { ddp::append_cifar10(to, source, 10 * limit); };
    bytes file = cifar_records(300);
    for (std::size_t const cut : {1u, 3072u, 3073u * 299u + 5u})
        check_refused(bytes(file.begin(), file.begin() + static_cast<long>(cut)), "is truncated, or no CIFAR-10 file",
                      append);
    check_refused(bytes(file.begin(), file.end() - 1), "record 299 has 3072 bytes, expected 3073", append);
    check_refused({}, "is empty, expected records of 3073 bytes", append);
    file[3073 * 280] = 10;
    check_refused(file, "the label of record 280 is 10, expected 0 to 9", append);
    check_refused(cifar_records(3), "is longer than the limit of 9218 bytes; raise the limit if that is what it holds",
                  [&](memory_source& source) { ddp::append_cifar10(to, source, 9218); });
    CHECK((to.size() == 2 && to.inputs == test.inputs));  // what was refused has left nothing
    CHECK(test::catch_error([&] {
              (void)ddp::load_cifar10(dir.path().string() + "/none", ddp::data_split::test);
          }).says("is not a directory. Give the one that holds test_batch.bin"));
    to.sample_shape = {28, 28};
    memory_source other{cifar_records(1)};
    CHECK(test::catch_error([&] { append(other); }).says("samples of another shape than 3 x 32 x 32"));
}

TEST_CASE("a CSV file is a table of numbers, with or without names", "[data][csv]") {
    memory_source source{as_bytes("1, -2.5,3e2\r\n 4,5,\t.5\n")};
    ddp::csv_table table = ddp::read_csv(source);
    CHECK((table.rows == 2 && table.columns == 3 && table.names.empty()));
    CHECK(table.values == std::vector<double>{1, -2.5, 300, 4, 5, 0.5});

    memory_source named{as_bytes("\xef\xbb\xbf\"a;\"\"b\"\"\" ; c ;\n0.1;nan;-inf")};
    table = ddp::read_csv(named, {.header = true, .separator = ';'});
    CHECK(table.names == std::vector<std::string>{"a;\"b\"", "c", ""});
    CHECK((table.rows == 1 && table.values[0] == 0.1 && std::isnan(table.values[1]) &&
           table.values[2] == -std::numeric_limits<double>::infinity()));

    memory_source tabs{as_bytes("\t\"x\"\ty\n1\t2\t3\n")};  // the first name is empty
    table = ddp::read_csv(tabs, {.header = true, .separator = '\t'});
    CHECK(table.names == std::vector<std::string>{"", "x", "y"});
    CHECK(table.values == std::vector<double>{1, 2, 3});

    std::string text;  // lines over the seams of the pieces that it is read in
    std::vector<double> values;
    for (int i = 0; i < 30'000; ++i) {
        values.push_back(i * 0.125);
        values.push_back(-i);
        text += std::to_string(i * 0.125) + "," + std::to_string(-i) + "\n";
    }
    memory_source large{as_bytes(text)};
    table = ddp::read_csv(large);
    CHECK((table.rows == 30'000 && table.values == values));
    CHECK(large.largest_request <= 65536);
}

TEST_CASE("what is no table of numbers is refused by line and column", "[data][csv]") {
    check_refused(as_bytes("1,2\n3,x4\n"), "line 2, column 2: 'x4' is not a number", read_csv);
    check_refused(as_bytes("a,b\n3,4\n"), "line 1, column 1: 'a' is not a number; set csv_options::header", read_csv);
    check_refused(as_bytes("1,2\n3,\n"), "line 2, column 2: is empty, expected a number", read_csv);
    check_refused(as_bytes("1,2\n3\n"), "line 2: has 1 fields, the first line has 2", read_csv);
    check_refused(as_bytes("a,b\n1,2,3\n"), "line 2: has 3 fields, the first line has 2", read_named);
    check_refused(as_bytes("1\n\n2\n"), "line 2: is empty; remove it", read_csv);
    check_refused(as_bytes("1\n1e999\n"), "line 2, column 1: '1e999' is out of a double's range", read_csv);
    check_refused(as_bytes("+2\n"), "'+2' is not a number; leave out the plus", read_csv);
    check_refused(as_bytes("1 2\n"), "'1 2' is not a number", read_csv);
    check_refused(as_bytes(std::string_view("1\0,2\n", 5)), "line 1, column 1: ", read_csv);
    check_refused(as_bytes("0x10\n"), "'0x10' is not a number", read_csv);
    check_refused({}, "holds no rows of numbers", read_csv);
    check_refused(as_bytes("a,b\n"), "holds no rows of numbers, only a line that names the columns", read_named);
    check_refused(as_bytes("\"a,b\n1,2\n"), "line 1, column 1: the quote is not closed on this line", read_named);
    check_refused(as_bytes("a,\"b\"c\n1,2\n"), "line 1, column 2: 'c' follows the closing quote", read_named);
    check_refused(as_bytes("1\n2\n"), "is longer than the limit of 3 bytes; raise csv_options::max_bytes if that is",
                  [](memory_source& source) { return ddp::read_csv(source, {.max_bytes = 3}); });
    memory_source source{as_bytes("1")};
    for (char const separator : {'.', '1', 'e', '"', '\n', '-', '\0'})
        CHECK_THROWS_WITH(
            ddp::read_csv(source, {.separator = separator}),
            Catch::Contains("read_csv: the separator may not be part of a field; ',' ';' and tabs are usual"));
}

TEST_CASE("an NPY array is read as numpy.save wrote it", "[data][npy]") {
    std::vector<float> const floats{1.5f, -2, 3, 4, 5, 6};
    for (unsigned const version : {1u, 2u, 3u}) {
        memory_source source{
            npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }", bytes_of_all(floats), version)};
        ddp::npy_array const array = ddp::read_npy(source, limit);
        CHECK((array.type == ddp::element_type::f32 && array.shape == std::vector<std::size_t>{2, 3}));
        CHECK(array.values<float>() == floats);
        CHECK(test::catch_error([&] {
                  (void)array.values<double>();
              }).says("the array holds F32, not F64; ask for its own type and convert"));
    }
    auto const one = [](char const* code, auto const& values) {
        memory_source source{npy(std::string("{'shape': (3,), \"descr\": '") + code + "', 'fortran_order': True}",
                                 bytes_of_all(values))};  // of one dimension both orders are the same
        return ddp::read_npy(source, limit).values<std::decay_t<decltype(values[0])>>() == values;
    };
    CHECK(one("<f8", std::vector<double>{1e300, -0.1, 0}));
    CHECK(one("|u1", std::vector<std::uint8_t>{0, 128, 255}));
    CHECK(one("<i4", std::vector<std::int32_t>{-1, 1 << 30, 0}));
    CHECK(one("<i8", std::vector<std::int64_t>{-1, std::int64_t{1} << 60, 0}));
    memory_source scalar{npy("{'descr': '|u1', 'fortran_order': False, 'shape': (), }", {42})};
    ddp::npy_array const number = ddp::read_npy(scalar, limit);
    CHECK((number.shape.empty() && number.data == bytes{42}));
    memory_source none{npy("{'descr': '<f8', 'fortran_order': False, 'shape': (0, 18446744073709551615), }", {})};
    CHECK(ddp::read_npy(none, limit).data.empty());
}

TEST_CASE("what NumPy itself has written is read, or refused with what to do", "[data][npy][oracle]") {
    auto const files = files_of_numpy();
    std::size_t seen = 0;
    auto const holds = [&](std::string const& name, std::vector<std::size_t> const& shape, auto const& values) {
        CAPTURE(name);
        REQUIRE(files.count(name) == 1);
        memory_source source{files.at(name)};
        auto const array = ddp::read_npy(source, limit);
        CHECK(array.shape == shape);
        CHECK(array.data == bytes_of_all(values));  // -0 is another number than 0
        CHECK(array.values<std::decay_t<decltype(values[0])>>() == values);
        ++seen;
    };
    constexpr float infinite = std::numeric_limits<float>::infinity();
    std::vector<float> const floats{1.5f, -2, 0.1f, -0.0f, infinite, 0x1p-149f};
    for (char const* const name : {"f4", "version 2", "version 3"}) holds(name, {2, 3}, floats);
    holds("f8", {3}, std::vector<double>{1e300, -0.1, 0x1p-1074});
    holds("u1", {2, 2, 2}, std::vector<std::uint8_t>{250, 251, 252, 253, 254, 255, 0, 1});
    using of_32 = std::numeric_limits<std::int32_t>;
    using of_64 = std::numeric_limits<std::int64_t>;
    holds("i4", {3}, std::vector<std::int32_t>{-1, of_32::max(), of_32::min()});
    holds("i8", {3, 1}, std::vector<std::int64_t>{-1, of_64::max(), of_64::min()});
    holds("scalar", {}, std::vector<double>{0.1});
    holds("empty", {0, 3}, std::vector<float>{});
    holds("column of Fortran", {2, 1}, std::vector<std::int32_t>{1, 2});
    holds("slice", {3, 2}, std::vector<std::int32_t>{0, 2, 4, 6, 8, 10});
    auto const refused = [&](std::string const& name, std::string_view words) {
        CAPTURE(name);
        REQUIRE(files.count(name) == 1);
        check_refused(files.at(name), words, read_npy);
        ++seen;
    };
    refused("Fortran", "is in Fortran order; save numpy.ascontiguousarray(array)");
    refused("big endian",
            "'>f8', expected '<f4', '<f8', '|u1', '<i4' or '<i8'; save array.astype('<f8'), little endian, say");
    refused("half", "elements of type '<f2', expected '<f4'");
    refused("bool", "elements of type '|b1', expected '<f4'");
    refused("text", "elements of type '<U2', expected '<f4'");
    refused("records", "arrays of records are not read");
    CHECK(seen == files.size());
}

TEST_CASE("what is not an NPY file, or promises too much, is refused", "[data][npy]") {
    std::string const good = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }";
    bytes const whole = npy(good, test::ramp(24));
    for (std::size_t length = 0; length < whole.size(); ++length) {
        CAPTURE(length);
        bytes const part(whole.begin(), whole.begin() + static_cast<long>(length));
        check_refused(part,
                      length < 8    ? "is not an NPY file: it does not begin with"
                      : length < 10 ? "is truncated: it ends within the length of its header"
                      : length < 128
                          ? "is truncated: it ends after " + std::to_string(length) + " bytes, its header takes 128"
                          : "is truncated: it holds " + std::to_string(length - 128) + " bytes of data",
                      read_npy);
    }
    check_refused(npy(good, test::ramp(25)), "continues after the 24 bytes of data that its header promises", read_npy);
    bytes other = whole;
    other[1] = 'n';
    check_refused(other, "is not an NPY file", read_npy);
    other = whole;
    other[6] = 4;
    check_refused(other, "byte 6: has format 4.0, expected 1.0, 2.0 or 3.0", read_npy);
    other = npy(good, test::ramp(24), 2);
    other[11] = 0x7f;
    check_refused(other, "byte 8: promises a header of", read_npy);

    auto const header = [](std::string const& text, std::string_view words) {
        check_refused(npy(text, test::ramp(24)), words, read_npy);
    };
    auto const shaped = [&](std::string const& shape) {
        return "{'descr': '<f4', 'fortran_order': False, 'shape': " + shape + "}";
    };
    header(shaped("(1048576, 1048576)"),
           "promises 1048576 x 1048576 elements of F32, more than the limit of 1048576 bytes");
    // Products of 2^64 and more: they must not wrap round to something small.
    header(shaped("(4611686018427387904, 3)"), "more than the limit");
    header(shaped("(4294967296, 4294967296, 2)"), "more than the limit");
    header(shaped("(18446744073709551616, 1)"), "the number is too large");
    header(shaped("(6)"), "a tuple of one size is written (3,)");
    header(shaped("(-6,)"), "byte 61 of its header: expected a size or ')'");
    header(shaped("(2, 3"), "expected )");
    header(shaped("6"), "expected (");
    std::string many = "(";
    for (int i = 0; i < 65; ++i) many += "1,";
    header(shaped(many + ")"), "more than 64 dimensions");
    header("{'descr': '>f4', 'fortran_order': False, 'shape': (6,)}", "save array.astype('<f4'), little endian, say");
    header("{'descr': '<f2', 'fortran_order': False, 'shape': (6,)}", "elements of type '<f2', expected '<f4'");
    header("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (6,)}",
           "byte 20 of its header: expected a text in "
           "quotes; arrays of records are not read");
    header("{'descr': '<f4', 'fortran_order': True, 'shape': (2, 3)}",
           "is in Fortran order; save numpy.ascontiguousarray(array)");
    header("{'descr': '<f4', 'fortran_order': 0, 'shape': (2, 3)}", "expected True or False");
    header("{'descr': '<f4', 'fortran_order': False}", "the header has no 'shape'");
    header("{'descr': '<f4', 'descr': '<f4', 'shape': (6,)}", "byte 27 of its header: 'descr' occurs twice");
    header("{'descr': '<f4', 'other': False, 'shape': (6,)}", "unknown key 'other'");
    header("{'descr': '<f4, 'fortran_order': False, 'shape': (6,)}", "expected");
    header("import os", "byte 10 of its header: expected {");
    header(good + " 1", "expected blanks and one line feed to end the header");
    header("", "expected {");
    header("{'descr", "byte 11 of its header: the quote is not closed");
    bytes open = as_bytes(std::string_view("\x93NUMPY\x01\0\x08\0{'descr'", 18));
    check_refused(open, "byte 18 of its header: expected :, but it ends", read_npy);

    test::scratch_directory const dir;  // a file that cannot hold so much costs no memory
    std::string const path = dir.write("short.npy", npy(shaped("(1000000000,)"), test::ramp(24)));
    test::watched_source<ddp::file_source> source{ddp::file_source(path)};
    auto const e = test::catch_error([&] { (void)ddp::read_npy(source, std::size_t{1} << 40); });
    CHECK(e.says(path + ": is truncated: its header promises 4000000000 bytes, but only 24 follow"));
    CHECK(source.asked_for < 200);
}
