// Throws arbitrary bytes at what reads a checkpoint: its manifest, and the headers of its shards. They are refused with a
// data_error, or what is made of them is sound: a manifest is written again as it was read, and state is read from within
// its files only. Anything else, and whatever a sanitizer sees, ends the program.
//
// The first byte says what the rest is: a manifest as it stands; one whose digest is made right (a fuzzer would never find
// it); or the headers of one or more shards, a NUL byte between them, in a checkpoint whose digests are right and whose data
// are as long as the headers ask for.
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ddp/checkpoint/directory.hpp>
#include <ddp/checkpoint/manifest.hpp>
#include <ddp/checkpoint/reader.hpp>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "input.hpp"

namespace {

using namespace ddp;
using namespace ddp::detail;
using fuzz::expect;

void try_manifest(std::string const& text) {
    try {
        checkpoint_manifest const all = parse_manifest(text, "manifest.json");
        expect(all.ranks > 0 && !all.shards.empty() && all.shards.front().rank == 0, "rank 0 has a shard");
        for (std::size_t i = 0; i < all.shards.size(); ++i)
            expect(all.shards[i].rank < all.ranks && (i == 0 || all.shards[i - 1].rank < all.shards[i].rank),
                   "shards are in order");
        std::string const again = manifest_text(all);
        expect(manifest_text(parse_manifest(again, "again")) == again, "what is written is read back");
    } catch (data_error const&) {
    }
}

std::string signed_text(std::string_view body) {
    std::string const text(body);
    return text + "\"digest\": \"" + hexadecimal(digest().add(body).value()) + "\"\n}\n";
}

struct scratch {
    scratch() {
        std::string name =
            std::filesystem::is_directory("/dev/shm") ? "/dev/shm/ddp-fuzz-XXXXXX" : "/tmp/ddp-fuzz-XXXXXX";
        expect(::mkdtemp(name.data()) != nullptr, "there is room for a directory");
        path = name;
        std::filesystem::create_directory(path + "/" + step_name(1));
    }
    ~scratch() { std::filesystem::remove_all(path); }
    std::string path;
};

void write(std::string const& path, std::string_view text) {
    std::FILE* const file = std::fopen(path.c_str(), "w");
    expect(file != nullptr && std::fwrite(text.data(), 1, text.size(), file) == text.size(), "files can be written");
    std::fclose(file);
}

void try_shards(std::string_view headers) {
    static scratch const here;
    std::string const in = here.path + "/" + step_name(1) + "/";
    checkpoint_manifest manifest;
    manifest.step = 1;
    for (bool more = true; more && manifest.shards.size() < 3;) {
        std::size_t const end = std::min(headers.find('\0'), headers.size());
        std::string const text(headers.substr(0, end));
        more = end != headers.size();
        headers.remove_prefix(more ? end + 1 : end);
        std::uint64_t data = 0;
        try {
            safetensors_limits const limits{};
            std::string const name = "header";
            for (tensor_info const& t : header_parser(text, name, limits).parse().tensors) data = std::max(data, t.end);
        } catch (data_error const&) {
        }
        if (data > 4096) return;
        std::string file(8, '\0');
        for (std::size_t i = 0; i < 8; ++i) file[i] = static_cast<char>(text.size() >> 8 * i);
        file += text;
        file.append(static_cast<std::size_t>(data), 'x');
        manifest.shards.push_back({manifest.ranks, file.size(), digest().add(file).value()});
        write(in + shard_name(manifest.ranks++, 9), file);
    }
    int const shards = manifest.ranks;
    manifest.ranks = 9;
    write(in + "manifest.json", manifest_text(manifest));
    try {
        checkpoint_directory const directory(here.path);
        checkpoint_reader reader(directory, step_name(1), 0, 1);
        (void)reader.has_rank_state();
        std::vector<std::size_t> const four{2, 2}, two{2};
        std::vector<float> of_w(4), of_r(2), value(2);
        auto const part = [](std::vector<float>& all, std::size_t begin, std::size_t end) {
            return mutable_bytes(std::as_writable_bytes(std::span(all).subspan(begin, end - begin)));
        };
        std::vector<state_slice> slices;
        for (auto const& [begin, end] : {std::pair(0, 4), std::pair(1, 3), std::pair(3, 4)})
            slices.push_back({.of = "w",
                              .name = "m",
                              .shape = four,
                              .type = element_type::f32,
                              .begin = static_cast<std::size_t>(begin),
                              .bytes = part(of_w, static_cast<std::size_t>(begin), static_cast<std::size_t>(end))});
        slices.push_back({.of = "w",
                          .name = "r",
                          .shape = two,
                          .type = element_type::f32,
                          .begin = 0,
                          .bytes = part(of_r, 0, 2),
                          .per_rank = true});
        std::vector<std::string> lines;
        for (state_slice const& s : slices) lines.push_back(state_line(s));
        std::sort(lines.begin(), lines.end());
        lines.erase(std::unique(lines.begin(), lines.end()), lines.end());
        kept_tensor one;
        one.name = "v";
        one.type = element_type::f32;
        one.shape = two;
        one.bytes = part(value, 0, 2);
        std::vector<kept_tensor> const model{one};
        reader.expect_like(model, lines, nullptr, {});
        (void)reader.read_model(model);
        for (int rank = 0; rank <= shards; ++rank)
            for (state_slice const& s : slices) {
                bool covered = true;
                try {
                    reader.expect_covered(s, rank);
                } catch (data_error const&) {
                    covered = false;
                }
                if (!covered) continue;
                std::fill(s.bytes.begin(), s.bytes.end(), std::byte{0});
                reader.read_state(s, rank);
                for (std::byte const b : s.bytes) expect(b == std::byte{'x'}, "all that is covered is read");
            }
    } catch (data_error const& e) {
        expect(e.code() == errc::format, "the files are there and stay as they are");
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(std::uint8_t const* data, std::size_t size) {
    if (size == 0) return 0;
    std::string const text(reinterpret_cast<char const*>(data) + 1, size - 1);
    switch (data[0]) {
        case 'm': try_manifest(text); break;
        case 's': try_manifest(signed_text(text)); break;
        case 'h': try_shards(text); break;
        default: break;
    }
    return 0;
}
