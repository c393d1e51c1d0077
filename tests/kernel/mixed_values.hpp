/// \file
/// Random numbers of mixed magnitude and sign, whose sums round differently in every order.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace test {

/// The same sequence for the same seed everywhere (SplitMix64).
class mixed_values {
public:
    explicit mixed_values(std::uint64_t seed) : state_(seed) {}

    std::uint64_t bits() {
        std::uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        return z ^ (z >> 31);
    }
    std::size_t below(std::size_t bound) { return static_cast<std::size_t>(bits() % bound); }

    /// Sign and 53 random bits, times 2^-12 … 2^11.
    double next() {
        double const unit = static_cast<double>(bits() >> 11) * 0x1p-53;
        int const exponent = static_cast<int>(bits() % 24) - 12;
        return std::ldexp((bits() & 1) != 0 ? unit : -unit, exponent);
    }
    template <class E>
    std::vector<E> vector(std::size_t count) {
        std::vector<E> values(count);
        for (E& value : values) value = static_cast<E>(next());
        return values;
    }

private:
    std::uint64_t state_;
};

template <class E>
bool same_bits(std::vector<E> const& left, std::vector<E> const& right) {
    return left.size() == right.size() &&
           (left.empty() || std::memcmp(left.data(), right.data(), left.size() * sizeof(E)) == 0);
}

}  // namespace test
