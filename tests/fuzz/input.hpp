/// \file
/// What the fuzzers share: an input that is read piece by piece, and a check that ends the program.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <string>

namespace fuzz {

inline void expect(bool condition, char const* what) {
    if (condition) return;
    std::fprintf(stderr, "not so: %s\n", what);
    std::abort();
}

/// The input, from its front; zeros when it is at its end.
class reader {
public:
    explicit reader(std::span<std::uint8_t const> input) : input_(input) {}
    bool empty() const { return input_.empty(); }
    std::uint8_t byte() {
        if (input_.empty()) return 0;
        std::uint8_t const b = input_.front();
        input_ = input_.subspan(1);
        return b;
    }
    template <class T>
    T number() {
        T value{};
        for (std::size_t i = 0; i < sizeof(T); ++i) value = static_cast<T>(value << 8 | byte());
        return value;
    }
    std::span<std::uint8_t const> bytes(std::size_t count) {
        auto const taken = input_.first(std::min(count, input_.size()));
        input_ = input_.subspan(taken.size());
        return taken;
    }
    std::string text(std::size_t count) {
        auto const taken = bytes(count);
        return {taken.begin(), taken.end()};
    }

private:
    std::span<std::uint8_t const> input_;
};

}  // namespace fuzz
