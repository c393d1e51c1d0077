// Weights files from outside: writes what another implementation reads, and shows what it has written.
//
//   weights_program write FILE float|double   a small model's parameters and buffers, values by formula
//   weights_program load FILE float|double    into such a model, then a line a tensor: name and bytes
//   weights_program show FILE                 a line a tensor: name, type, shape and bytes; then the metadata
//   weights_program check FILE…               a line a file: "ok" or what is wrong
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ddp/ddp.hpp>
#include <ddp/train/weights_file.hpp>
#include <exception>
#include <string>
#include <vector>

namespace {

void print_hex(ddp::const_bytes bytes) {
    for (std::byte const b : bytes) std::printf("%02x", static_cast<unsigned>(b));
    std::printf("\n");
}

template <class E>
struct small_model {
    using element = E;
    std::vector<E> memory = std::vector<E>(2 * 8);
    std::int64_t batches = 0;
    std::vector<std::uint8_t> mask = std::vector<std::uint8_t>(3);

    std::vector<ddp::parameter<E>> parameters() {
        std::span<E> const all(memory);
        return {{"0.weight", {2, 3}, all.subspan(0, 6), all.subspan(8, 6)},
                {"0.bias", {1}, all.subspan(6, 1), all.subspan(14, 1)},
                {"scale ä", {}, all.subspan(7, 1), all.subspan(15, 1)},
                {"none", {0, 4}, {}, {}}};
    }
    std::vector<ddp::model_buffer> buffers() {
        return {{"batches", ddp::element_type::i64, {}, ddp::bytes_of(batches)},
                {"mask", ddp::element_type::u8, {3}, ddp::as_mutable_bytes(std::span(mask))}};
    }
    template <class Ready>
    void backward(ddp::pass<E>, Ready const&) {}
};

template <class E>
void use(std::string const& what, std::string const& path) {
    small_model<E> model;
    if (what == "write") {
        for (std::size_t i = 0; i < 8; ++i) model.memory[i] = E(1) / static_cast<E>(i + 1) - E(0.5);
        model.batches = -7;
        model.mask = {1, 0, 255};
        ddp::save_weights(model, path);
        return;
    }
    ddp::load_weights(model, path);
    for (auto const& p : model.parameters()) {
        std::printf("%s ", p.name.c_str());
        print_hex(ddp::as_const_bytes(p.value));
    }
    for (auto const& b : model.buffers()) {
        std::printf("%s ", b.name.c_str());
        print_hex(b.bytes);
    }
}

void show(std::string const& path) {
    ddp::safetensors_file const file(path);
    for (auto const& t : file.tensors()) {
        std::printf("%s %s [", t.name.c_str(), std::string(name_of(t.type)).c_str());
        for (std::size_t d = 0; d < t.shape.size(); ++d) std::printf("%s%zu", d == 0 ? "" : ", ", t.shape[d]);
        std::vector<std::byte> bytes(t.end - t.begin);
        file.read(t, 0, bytes);
        std::printf("] ");
        print_hex(bytes);
    }
    for (auto const& [key, value] : file.metadata()) std::printf("%s = %s\n", key.c_str(), value.c_str());
}

}  // namespace

int main(int argc, char** argv) {
    std::vector<std::string> const words(argv + 1, argv + argc);
    try {
        if (words.size() == 3 && words[2] == "float") return use<float>(words[0], words[1]), EXIT_SUCCESS;
        if (words.size() == 3 && words[2] == "double") return use<double>(words[0], words[1]), EXIT_SUCCESS;
        if (words.size() == 2 && words[0] == "show") return show(words[1]), EXIT_SUCCESS;
        if (words.empty() || words[0] != "check") return 2;
        for (std::size_t i = 1; i < words.size(); ++i) {
            try {
                ddp::safetensors_file const file(words[i]);
                std::printf("ok\n");
            } catch (ddp::data_error const& e) {
                std::printf("%s\n", e.what());
            }
        }
        return EXIT_SUCCESS;
    } catch (std::exception const& e) {
        std::fprintf(stderr, "%s\n", e.what());
        return EXIT_FAILURE;
    }
}
