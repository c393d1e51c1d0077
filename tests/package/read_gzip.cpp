// Uses the component gzip: prints a compressed file.
#include <array>
#include <cstdio>
#include <ddp/data/gzip.hpp>

int main(int, char** argv) {
    ddp::gzip_source file(argv[1]);
    std::array<std::byte, 4096> piece;
    for (std::size_t n; (n = file.read(piece)) != 0;) std::fwrite(piece.data(), 1, n, stdout);
}
