// Throws arbitrary bytes at the reader of safetensors headers: it refuses them with a data_error, or what it makes of
// them is sound. Anything else, and whatever a sanitizer sees, ends the program.
//
// The input is taken twice: as a whole file, and as the JSON of a header whose data are as long as it asks for (a
// fuzzer would spend its time on lengths otherwise).
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ddp/data/safetensors_parser.hpp>
#include <set>
#include <string>
#include <string_view>

namespace {

void expect(bool condition, char const* what) {
    if (condition) return;
    std::fprintf(stderr, "not so: %s\n", what);
    std::abort();
}

void expect_sound(ddp::safetensors_header const& header, std::uint64_t data_bytes) {
    std::uint64_t at = 0;
    std::set<std::string_view> names;
    for (ddp::tensor_info const& t : header.tensors) {
        expect(t.begin == at && t.end >= t.begin, "tensors lie one after the other");
        expect(ddp::detail::bytes_of_tensor(t.type, t.shape) == t.end - t.begin, "a tensor is as large as its shape");
        expect(names.insert(t.name).second, "names are unique");
        at = t.end;
    }
    expect(at == data_bytes, "tensors cover the data");
    std::string const text = ddp::safetensors_header_text(header);
    expect(text.size() % 8 == 0, "a header keeps data aligned");
    auto const again = ddp::parse_safetensors_header(text, data_bytes, "again");
    expect(again.metadata == header.metadata && ddp::safetensors_header_text(again) == text,
           "what is written is read back");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(std::uint8_t const* data, std::size_t size) {
    try {
        auto const header = ddp::read_safetensors_header(
            size,
            [&](std::uint64_t offset, ddp::mutable_bytes out) {
                expect(offset <= size && out.size() <= size - offset, "nothing is read beyond the end");
                std::memcpy(out.data(), data + offset, out.size());
            },
            "file");
        expect_sound(header, size - header.data_offset);
    } catch (ddp::data_error const&) {
    }
    try {
        std::string const name = "header";
        std::string_view const text(reinterpret_cast<char const*>(data), size);
        ddp::safetensors_limits const limits{};
        std::uint64_t end = 0;
        for (auto const& t : ddp::detail::header_parser(text, name, limits).parse().tensors) end = std::max(end, t.end);
        expect_sound(ddp::parse_safetensors_header(text, end, name, limits), end);
    } catch (ddp::data_error const&) {
    }
    return 0;
}
