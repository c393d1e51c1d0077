// The safetensors format: what is written, what is refused, and what is left behind when writing fails.
#include <ddp/data/safetensors.hpp>
#include <ddp/data/whole_file.hpp>

#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include <ddp/core/random.hpp>

#include "data/files.hpp"
#include "support/catch.hpp"

using namespace ddp;

namespace {
std::string replaced;  // the path of a file that a test has replaced
std::vector<std::string>
    flushed;  // what was flushed to the disk, in order, and whether the new file stood there already
bool files_fail = false, directories_fail = false;  // to be flushed
}  // namespace

/// The program's own comes before the C library's.
extern "C" int fsync(int descriptor) {
    struct stat about{}, there{};
    bool const known = ::fstat(descriptor, &about) == 0;
    bool const in_place = !replaced.empty() && ::stat(replaced.c_str(), &there) == 0 && there.st_size != 3;
    if (known)
        flushed.emplace_back(std::string(S_ISDIR(about.st_mode) ? "directory" : "file") +
                             (in_place ? " after" : " before"));
    if (known && (S_ISDIR(about.st_mode) ? directories_fail : files_fail)) {
        errno = EIO;
        return -1;
    }
    return static_cast<int>(::syscall(SYS_fsync, descriptor));
}

namespace {

/// A file with `json` as its header and so many bytes of data.
test::bytes file_with(std::string_view json, std::size_t data_bytes) {
    test::bytes file;
    for (std::size_t i = 0; i < 8; ++i) file.push_back(static_cast<std::uint8_t>(json.size() >> 8 * i));
    file.insert(file.end(), json.begin(), json.end());
    return test::joined(file, test::ramp(data_bytes));
}

safetensors_header read(test::bytes const& file, safetensors_limits const& limits = {}) {
    return read_safetensors_header(
        file.size(),
        [&](std::uint64_t offset, mutable_bytes out) {
            REQUIRE(offset + out.size() <= file.size());
            std::memcpy(out.data(), file.data() + offset, out.size());
        },
        "weights.safetensors", limits);
}

test::bytes content_of(std::string const& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
}

std::set<std::string> names_in(std::filesystem::path const& directory) {
    std::set<std::string> names;
    for (auto const& entry : std::filesystem::directory_iterator(directory)) names.insert(entry.path().filename());
    return names;
}

/// Two tensors and what is said about them: 24 + 4 bytes of data.
constexpr std::string_view two =
    R"({"__metadata__":{"made by":"hand"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
    R"("b":{"dtype":"I32","shape":[],"data_offsets":[24,28]}}  )";

/// What holds for every header that was accepted.
void require_sound(safetensors_header const& header, std::size_t file_bytes) {
    std::uint64_t at = 0;
    std::set<std::string> names;
    for (tensor_info const& t : header.tensors) {
        REQUIRE(t.begin == at);
        REQUIRE(ddp::detail::bytes_of_tensor(t.type, t.shape) == t.end - t.begin);
        REQUIRE(names.insert(t.name).second);
        at = t.end;
    }
    REQUIRE(header.data_offset + at == file_bytes);
    std::string const text = safetensors_header_text(header);
    REQUIRE(text.size() % 8 == 0);
    REQUIRE(safetensors_header_text(parse_safetensors_header(text, at, "again")) == text);
}

}  // namespace

TEST_CASE("a header says names, types, shapes, places and metadata", "[data]") {
    auto const header = read(file_with(two, 28));
    REQUIRE(header.metadata == string_map{{"made by", "hand"}});
    REQUIRE(header.tensors.size() == 2);
    REQUIRE(header.tensors[0].name == "a");
    REQUIRE(header.tensors[0].type == element_type::f32);
    REQUIRE(header.tensors[0].shape == std::vector<std::size_t>{2, 3});
    REQUIRE(header.tensors[1].type == element_type::i32);
    REQUIRE(header.tensors[1].shape.empty());
    REQUIRE(header.tensors[1].begin == 24);
    REQUIRE(header.data_offset == 8 + two.size());
    require_sound(header, 8 + two.size() + 28);
}

TEST_CASE("headers may be empty, spread over lines, in any order, and full of escapes", "[data]") {
    REQUIRE(read(file_with("{}", 0)).tensors.empty());
    auto const spread =
        read(file_with("{\n \"b\" : {\"shape\":[ 2 ,1],\t\"data_offsets\":[4,8],\"dtype\":\"F16\"} ,\r\n"
                       "\"a\":{\"data_offsets\":[0,4],\"dtype\":\"F4\",\"shape\":[8]},"
                       "\"none\":{\"dtype\":\"F64\",\"shape\":[0,7],\"data_offsets\":[4,4]}}",
                       8));
    REQUIRE(spread.tensors.size() == 3);
    REQUIRE(spread.tensors[0].name == "a");
    REQUIRE(spread.tensors[1].name == "none");
    REQUIRE(spread.tensors[2].name == "b");
    auto const escaped =
        read(file_with(R"({"__metadata__":{"\u00e4\u20AC\ud83d\ude00":"\"\\\/\b\f\n\r\t\u0001ä€😀"}})", 0));
    REQUIRE(escaped.metadata == string_map{{"ä€😀", "\"\\/\b\f\n\r\t\x01ä€😀"}});
    require_sound(escaped, static_cast<std::size_t>(escaped.data_offset));
}

TEST_CASE("every type of the format has the size that the format gives it", "[data]") {
    for (auto const& [name, bits] : ddp::detail::element_types) {
        CAPTURE(name);
        std::string const entry = R"({"x":{"dtype":")" + std::string(name) + R"(","shape":[8],"data_offsets":[0,)";
        REQUIRE(read(file_with(entry + std::to_string(bits) + "]}}", bits)).tensors[0].type ==
                element_type_named(name));
        REQUIRE(test::catch_error([&, size = bits] {
                    read(file_with(entry + std::to_string(size + 1) + "]}}", size + 1));
                }).says("takes " + std::to_string(bits) + " bytes"));
    }
}

TEST_CASE("a file cut off at any byte, or one byte too long, is refused", "[data]") {
    test::bytes const whole = file_with(two, 28);
    for (std::size_t length = 0; length < whole.size(); ++length) {
        CAPTURE(length);
        auto const got =
            test::catch_error([&] { read(test::bytes(whole.begin(), whole.begin() + static_cast<long>(length))); });
        REQUIRE(got.code == errc::format);
        REQUIRE(got.says(length < 8
                             ? "is not a safetensors file: it has " + std::to_string(length) + " bytes, a header takes"
                             : "is truncated"));
        REQUIRE(got.says("weights.safetensors"));
    }
    test::bytes longer = whole;
    longer.push_back(0);
    REQUIRE(test::catch_error([&] { read(longer); }).says("promises 28 bytes of data, there are 29"));
}

TEST_CASE("bad headers are refused, with the place and what was expected", "[data]") {
    struct bad {
        std::string_view json, says;
        std::size_t data = 4;
    };
    // In most of them X stands for a tensor that would be right on its own.
    bad const table[] = {
        {R"()", "a header begins with '{'"},
        {R"( {})", "begins with '{'"},
        {R"([])", "begins with '{'"},
        {"\xEF\xBB\xBF{}", "begins with '{'"},
        {R"({)", "ends too early"},
        {R"({"a")", "ends too early"},
        {R"({"a)", "the header ends within a string"},
        {R"({"a\)", "the header ends within a string"},
        {R"({X)", "ends too early"},
        {R"({X}x)", "after the header's last '}'"},
        {"{X}\n", "after the header's last '}'"},
        {R"({X}{})", "after the header's last '}'"},
        {R"({X,})", "expected '\"'"},
        {R"({,X})", "expected '\"'"},
        {R"({X X})", "expected ',' or '}'"},
        {R"({X,X})", "tensor 'x' occurs twice"},
        {R"({X,"\u0078":{"dtype":"U8","shape":[0],"data_offsets":[4,4]}})", "tensor 'x' occurs twice"},
        {R"({"x":1})", "tensor 'x': expected '{'"},
        {R"({"x":null})", "tensor 'x': expected '{'"},
        {R"({"x":[[[[[[[[[[]]]]]]]]]]})", "tensor 'x': expected '{'"},
        {R"({"x":{"dtype":{"dtype":{}}}})", "tensor 'x': expected '\"'"},
        {R"({"x":{"shape":[[1]]}})", "tensor 'x': expected a whole number"},
        {R"({"x":{}})", "tensor 'x': dtype, shape or data_offsets is missing"},
        {R"({"x":{"dtype":"F32","shape":[1]}})", "is missing"},
        {R"({"x":{"dtype":"F32","data_offsets":[0,4]}})", "is missing"},
        {R"({"x":{"shape":[1],"data_offsets":[0,4]}})", "is missing"},
        {R"({"x":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}})", "'dtype' occurs twice"},
        {R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"colour":"red"}})",
         "expected dtype, shape and data_offsets, found 'colour'"},
        {R"({"x":{"dtype":"f32","shape":[1],"data_offsets":[0,4]}})",
         "dtype 'f32' is not a type that the format defines"},
        {R"({"x":{"dtype":"","shape":[1],"data_offsets":[0,4]}})", "dtype ''"},
        {R"({"x":{"dtype":"F64","shape":[1],"data_offsets":[0,4]}})", "F64 [1] takes 8 bytes"},
        {R"({"x":{"dtype":"F4","shape":[7],"data_offsets":[0,4]}})", "takes no possible number of bytes"},
        {R"({"x":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]}})", "no possible number"},
        {R"({"x":{"dtype":"F32","shape":[4611686018427387905],"data_offsets":[0,4]}})", "no possible number"},
        {R"({"x":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})", "not negative"},
        {R"({"x":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}})", "expected a whole number"},
        {R"({"x":{"dtype":"F32","shape":[1e0],"data_offsets":[0,4]}})", "expected a whole number"},
        {R"({"x":{"dtype":"F32","shape":[01],"data_offsets":[0,4]}})", "a number begins with 0"},
        {R"({"x":{"dtype":"F32","shape":["1"],"data_offsets":[0,4]}})", "expected a whole number"},
        {R"({"x":{"dtype":"F32","shape":[18446744073709551616],"data_offsets":[0,4]}})",
         "a number is larger than 2^64 - 1"},
        {R"({"x":{"dtype":"F32","shape":[1,],"data_offsets":[0,4]}})", "expected a whole number"},
        {R"({"x":{"dtype":"F32","shape":[1 1],"data_offsets":[0,4]}})", "expected ',' or ']'"},
        {R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[0]}})", "data_offsets takes two numbers"},
        {R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4,8]}})", "more than 2 numbers"},
        {R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}})", "data_offsets are 4 and 0"},
        {R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[18446744073709551612,0]}})", "data_offsets are 18446"},
        {R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[1,5]}})",
         "tensor 'x' begins at byte 1 of the data; no tensor has the bytes from 0 on", 5},
        {R"({X,"y":{"dtype":"F32","shape":[1],"data_offsets":[8,12]}})", "no tensor has the bytes from 4 on", 12},
        {R"({X,"y":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}})",
         "tensor 'y' begins at byte 2 of the data and overlaps the one before it, which ends at 4", 6},
        {R"({X,"y":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", "overlaps"},
        {R"({X,"y":{"dtype":"F32","shape":[0],"data_offsets":[2,2]}})", "overlaps"},
        {R"({X,"y":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})", "is truncated"},
        {R"({})", "continues after its last tensor"},
        {R"({"__metadata__":null,X})", "expected '{'"},
        {R"({"__metadata__":{"a":1},X})", "expected '\"'"},
        {R"({"__metadata__":{"a":{}},X})", "expected '\"'"},
        {R"({"__metadata__":{"a":"1","a":"2"},X})", "'a' twice"},
        {R"({"__metadata__":{},"__metadata__":{},X})", "__metadata__ occurs twice"},
        {"{\"\x80\":1}", "a string that is not UTF-8"},
        {"{\"\xC0\xAF\":1}", "not UTF-8"},
        {"{\"\xE0\x9F\xBF\":1}", "not UTF-8"},
        {"{\"\xED\xA0\x80\":1}", "not UTF-8"},
        {"{\"\xF4\x90\x80\x80\":1}", "not UTF-8"},
        {"{\"\xF0\x9F\x98\":1}", "not UTF-8"},
        {"{\"\xE2\x82", "not UTF-8"},
        {"{\"\n\":1}", "a control character within a string"},
        {R"({"\x41":1})", "escape that JSON does not define"},
        {R"({"\u12":1})", "four hexadecimal digits"},
        {R"({"\u12g4":1})", "four hexadecimal digits"},
        {R"({"\ud800":1})", "half a surrogate pair"},
        {R"({"\ude00":1})", "half a surrogate pair"},
        {R"({"\ud83d\ud83d":1})", "half a surrogate pair"},
        {R"({"\ud83dx":1})", "half a surrogate pair"},
    };
    for (bad const& one : table) {
        std::string json(one.json);
        for (std::size_t at = 0; (at = json.find('X')) != json.npos;)
            json.replace(at, 1, R"("x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]})");
        CAPTURE(json);
        auto const got = test::catch_error([&] { read(file_with(json, one.data)); });
        CAPTURE(got.text);
        REQUIRE(got.code == errc::format);
        REQUIRE(got.says(one.says));
        REQUIRE(got.text.find('\n') == std::string::npos);
    }
}

TEST_CASE("what a file asks of memory is bounded before it is taken", "[data]") {
    test::bytes huge(8, 0xFF);
    REQUIRE(test::catch_error([&] {
                read(huge);
            }).says("18446744073709551615 bytes long, and safetensors_limits::header_bytes accepts at most 100000000"));
    test::bytes lying = {0, 225, 245, 5, 0, 0, 0, 0, '{', '}'};  // a hundred million bytes
    REQUIRE(test::catch_error([&] { read(lying); }).says("100000000 bytes long, but only 2 follow"));
    REQUIRE(test::catch_error([&] {
                read(file_with(two, 28), {.header_bytes = 16});
            }).says("safetensors_limits::header_bytes accepts at most 16"));
    std::string shape = "1";
    for (int d = 1; d < 65; ++d) shape += ",1";
    auto const entry = R"({"x":{"dtype":"U8","shape":[)" + shape + R"(],"data_offsets":[0,1]}})";
    REQUIRE(test::catch_error([&] {
                read(file_with(entry, 1));
            }).says("more than 64 numbers, which safetensors_limits::dimensions accepts at most"));
    REQUIRE(read(file_with(entry, 1), {.dimensions = 65}).tensors[0].shape.size() == 65);

    std::string const deep = R"({"x":)" + std::string(1'000'000, '[');
    REQUIRE(test::catch_error([&] { read(file_with(deep, 0)); }).says("expected '{'"));
    std::string const name(1'000'000, 'n');
    auto const got = test::catch_error([&] { read(file_with("{\"" + name + "\":1}", 0)); });
    REQUIRE(got.says("nnn…'"));
    REQUIRE(got.text.size() < 300);
}

TEST_CASE("damaged headers are refused or mean something sound", "[data]") {
    constexpr std::string_view pieces[] = {"{",
                                           "}",
                                           "[",
                                           "]",
                                           ",",
                                           ":",
                                           "\"",
                                           "\\u",
                                           "\\",
                                           "0",
                                           "9",
                                           "-",
                                           "e",
                                           " ",
                                           "\"x\":",
                                           "\"dtype\":\"F32\"",
                                           "\"shape\":[]",
                                           "\"data_offsets\":[0,4]",
                                           "\"__metadata__\":{",
                                           "18446744073709551615",
                                           "\xC3",
                                           "\xF0\x9F",
                                           "\n"};
    std::size_t accepted = 0, refused = 0;
    for (std::uint64_t round = 0; round < 20'000; ++round) {
        random_stream const draws(11, random_use::user, round);
        std::string json(two);
        std::uint64_t n = 0;
        auto const below = [&](std::size_t limit) {
            return static_cast<std::size_t>(draws.at(n++).uniform<double>() * static_cast<double>(limit));
        };
        for (std::size_t edits = 1 + below(4); edits > 0; --edits) {
            std::size_t const at = below(json.size()), kind = below(5);
            if (kind == 0) json[at] = static_cast<char>(below(256));
            if (kind == 1) json.erase(at, 1 + below(6));
            if (kind == 2) json.insert(at, pieces[below(std::size(pieces))]);
            if (kind == 3) json.insert(below(json.size()), json.substr(at, below(30)));
            if (kind == 4) json[at] = static_cast<char>(json[at] ^ (1 << below(8)));
            if (json.empty()) json = "{";
        }
        std::size_t const data = below(8) == 0 ? below(64) : 28;
        test::bytes const file = file_with(json, data);
        CAPTURE(round, json);
        try {
            require_sound(read(file), file.size());
            ++accepted;
        } catch (data_error const& e) {
            REQUIRE(e.code() == errc::format);
            ++refused;
        }
    }
    REQUIRE(accepted > 100);
    REQUIRE(refused > 10'000);
}

TEST_CASE("what is written is laid out as the reference implementation does, and read back", "[data]") {
    test::scratch_directory const scratch;
    std::string const path = (scratch.path() / "kept.safetensors").string();
    std::vector<float> const weight{1, 2, 3, 4, 5, 6};
    std::vector<double> const wide{-0.0, 1e300};
    std::vector<std::uint8_t> const small{7, 8, 9};
    auto const save = [&] {
        write_safetensors(path,
                          {{"b.weight", element_type::f32, {2, 3}, as_const_bytes(std::span(weight))},
                           {"small", element_type::u8, {3}, as_const_bytes(std::span(small))},
                           {"wide", element_type::f64, {2}, as_const_bytes(std::span(wide))},
                           {"none", element_type::i64, {0, 4}, {}},
                           {"a \"quoted\"\nname ä", element_type::f32, {}, as_const_bytes(std::span(weight).first(1))}},
                          {{"steps", "12"}, {"by", "us"}});
    };
    save();
    safetensors_file const file(path);
    REQUIRE(file.metadata() == string_map{{"by", "us"}, {"steps", "12"}});
    std::vector<std::string> order;
    for (tensor_info const& t : file.tensors()) order.push_back(t.name);
    REQUIRE(order == std::vector<std::string>{"none", "wide", "a \"quoted\"\nname ä", "b.weight", "small"});

    std::vector<float> got(6);
    file.read(file.tensors()[3], 0, as_mutable_bytes(std::span(got)));
    REQUIRE(got == weight);
    float third = 0;
    file.read(file.tensors()[3], 8, bytes_of(third));
    REQUIRE(third == 3);
    auto const beyond = test::catch_error([&] { file.read(file.tensors()[3], 24, bytes_of(third)); });
    REQUIRE((beyond.code == errc::usage && beyond.says("read: tensor 'b.weight' has only 24 bytes")));
    REQUIRE(test::catch_error([&] { (void)file.metadata().at("at"); }).says("there is no entry 'at'"));

    test::bytes const once = content_of(path);
    REQUIRE(once[8] == '{');
    REQUIRE(read(once).data_offset % 8 == 0);
    save();
    REQUIRE(content_of(path) == once);
    REQUIRE(names_in(scratch.path()) == std::set<std::string>{"kept.safetensors"});
}

TEST_CASE("nothing is written that could not be read again", "[data]") {
    test::scratch_directory const scratch;
    std::string const path = (scratch.path() / "kept.safetensors").string();
    std::uint8_t const byte = 1;
    auto const refused = [&](std::vector<tensor_view> const& tensors, string_map const& metadata, char const* says) {
        auto const got = test::catch_error([&] { write_safetensors(path, tensors, metadata); });
        CAPTURE(got.text);
        REQUIRE(got.code == errc::usage);
        REQUIRE(got.says(says));
    };
    tensor_view const good{"x", element_type::u8, {1}, bytes_of(byte)};
    refused({good, good}, {}, "tensor 'x' occurs twice");
    refused({good, good}, {}, "these tensors make no safetensors file that could be read again: ");
    refused({{"\xFF", element_type::u8, {1}, bytes_of(byte)}}, {}, "not UTF-8");
    refused({{"__metadata__", element_type::u8, {1}, bytes_of(byte)}}, {},
            "'__metadata__' cannot be a tensor's name: the format reserves it");
    refused({{"x", element_type::u8, {2}, bytes_of(byte)}}, {}, "U8 [2] takes 2 bytes");
    refused({{"x", element_type::u8, std::vector<std::size_t>(65, 1), bytes_of(byte)}}, {}, "more than 64 numbers");
    refused({good}, {{"key", "\xC3("}}, "the metadata 'key' is not text in UTF-8");
    REQUIRE(names_in(scratch.path()).empty());
}

TEST_CASE("files that cannot be opened are named, with the reason", "[data]") {
    test::scratch_directory const scratch;
    auto const missing = test::catch_error([&] { safetensors_file("/no/such/file"); });
    REQUIRE(missing.code == errc::file);
    REQUIRE(missing.says("/no/such/file: cannot be opened: No such file"));
    REQUIRE(test::catch_error([&] { safetensors_file(scratch.path().string()); }).says("is not a regular file"));
    std::string const pipe = (scratch.path() / "pipe").string();
    REQUIRE(::mkfifo(pipe.c_str(), 0600) == 0);
    REQUIRE(test::catch_error([&] { safetensors_file reads(pipe); }).says("is not a regular file"));
    std::string const empty = scratch.write("empty", {});
    REQUIRE(test::catch_error([&] { safetensors_file reads(empty); }).says("empty: is not a safetensors file"));
}

TEST_CASE("a file that shrinks while it is read is an error, and another of its name is another file", "[data]") {
    test::scratch_directory const scratch;
    std::string const path = scratch.write("kept", file_with(two, 28));
    safetensors_file const file(path);
    std::int32_t value = 0;
    std::filesystem::rename(scratch.write("other", file_with("{}", 0)), path);
    file.read(file.tensors()[1], 0, bytes_of(value));
    REQUIRE(std::memcmp(&value, test::ramp(28).data() + 24, 4) == 0);

    std::string const again = scratch.write("again", file_with(two, 28));
    safetensors_file const shrinks(again);
    std::filesystem::resize_file(again, 8 + two.size() + 26);
    REQUIRE(test::catch_error([&] { shrinks.read(shrinks.tensors()[1], 0, bytes_of(value)); }).says("became shorter"));
}

TEST_CASE("a file is replaced whole or not at all", "[data]") {
    test::scratch_directory const scratch;
    std::string const path = scratch.write("kept", {1, 2, 3});
    std::vector<std::uint8_t> const fresh(100'000, 9);
    auto const bytes = as_const_bytes(std::span(fresh));

    SECTION("given up before the end") {
        {
            whole_file file(path);
            file.write(bytes);
            REQUIRE(names_in(scratch.path()).size() == 2);
        }
        REQUIRE(content_of(path) == test::bytes{1, 2, 3});
    }
    SECTION("committed") {
        whole_file file(path);
        file.write(bytes.first(10));
        REQUIRE(content_of(path) == test::bytes{1, 2, 3});
        file.write(bytes.subspan(10));
        flushed.clear();
        replaced = path;
        file.commit();
        replaced.clear();
        REQUIRE(content_of(path) == fresh);
        REQUIRE(flushed == std::vector<std::string>{"file before", "directory after"});
    }
    SECTION("a disk that is full") {
        struct rlimit before{};
        REQUIRE(::getrlimit(RLIMIT_FSIZE, &before) == 0);
        struct rlimit const small{50'000, before.rlim_max};
        REQUIRE(::setrlimit(RLIMIT_FSIZE, &small) == 0);
        auto const got = test::catch_error([&] {
            whole_file file(path);
            file.write(bytes);
            file.commit();
        });
        ::setrlimit(RLIMIT_FSIZE, &before);
        REQUIRE(got.code == errc::file);
        REQUIRE(got.says("kept: cannot be written: File too large"));
        REQUIRE(content_of(path) == test::bytes{1, 2, 3});
    }
    SECTION("no such directory") {
        auto const got = test::catch_error([&] { whole_file((scratch.path() / "nowhere" / "kept").string()); });
        REQUIRE(got.code == errc::file);
        REQUIRE(got.says("cannot be created: No such file or directory"));
    }
    SECTION("a disk that fails while the file is flushed, or after it has its name") {
        auto const committing = [&](bool& fails) {
            whole_file file(path);
            file.write(bytes);
            fails = true;
            auto const got = test::catch_error([&] { file.commit(); });
            fails = false;
            REQUIRE(got.code == errc::file);
            return got.text;
        };
        REQUIRE(committing(files_fail) == "DDP-E301 file: " + path + ": cannot be flushed: Input/output error");
        REQUIRE(content_of(path) == test::bytes{1, 2, 3});
        REQUIRE(committing(directories_fail) ==
                "DDP-E301 file: " + path + ": is in place, but its directory cannot be flushed: Input/output error");
        REQUIRE(content_of(path) == fresh);
    }
    SECTION("a directory that comes to be where the file belongs") {
        whole_file file(path);
        std::filesystem::remove(path);
        std::filesystem::create_directory(path);
        auto const got = test::catch_error([&] { file.commit(); });
        REQUIRE(got.text == "DDP-E301 file: " + path + ": cannot be put in place: Is a directory");
    }
    SECTION("a device, which is not to be replaced") {
        REQUIRE(test::catch_error([&] { whole_file("/dev/full"); }).says("/dev/full: cannot be written"));
    }
    SECTION("a directory") {
        REQUIRE(test::catch_error([&] { whole_file(scratch.path().string()); }).says("not a regular file"));
    }
    REQUIRE(names_in(scratch.path()) == std::set<std::string>{"kept"});
}
