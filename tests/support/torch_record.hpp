/// \file
/// What tests/oracle/networks.py has written down of PyTorch, and the numbers that script draws.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <map>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <ddp/data/batch.hpp>

namespace ddp::test {

constexpr std::uint64_t torch_steps = 100;

using record = std::map<std::string, std::vector<double>>;  // what a case left, by name

/// By case; the path is from tests/CMakeLists.txt.
inline std::map<std::string, record> read_record(char const* path) {
    std::ifstream file(path);
    std::string line;
    std::getline(file, line);
    if (line != "case,what,numbers") throw std::runtime_error(std::string(path) + " is no record of networks.py");
    std::map<std::string, record> all;
    while (std::getline(file, line)) {
        std::istringstream fields(line);
        std::string name, what, number;
        std::getline(fields, name, ',');
        std::getline(fields, what, ',');
        std::vector<double>& numbers = all[name][what];
        while (std::getline(fields, number, ',')) numbers.push_back(std::stod(number));
    }
    return all;
}

/// Doubles in [-1, 1) from SplitMix64.
inline std::vector<double> numbers_of(std::uint64_t seed, std::size_t count) {
    std::vector<double> all(count);
    for (double& one : all) {
        std::uint64_t z = seed += 0x9E3779B97F4A7C15u;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
        z ^= z >> 31;
        one = static_cast<double>(z >> 11) * 0x1p-52 - 1;
    }
    return all;
}

void set_initial_values(auto& net) {
    auto const parameters = net.parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
        auto const drawn = numbers_of(100 + i, parameters[i].value.size());
        bool const ones = parameters[i].value[0] == 1 && parameters[i].shape.size() == 1;  // a batch_norm's weight
        for (std::size_t k = 0; k < drawn.size(); ++k)
            parameters[i].value[k] = parameters[i].shape.size() > 1 ? 0.5 * drawn[k]
                                     : ones                         ? 1 + 0.25 * drawn[k]
                                                                    : 0.25 * drawn[k];
    }
}

/// The samples of all ranks in a step, from 1.
struct torch_batch {
    static constexpr std::size_t rows = 12;
    std::size_t features;
    std::vector<double> inputs;
    std::vector<std::uint32_t> labels;

    torch_batch(std::uint64_t step, std::size_t width)
        : features(width), inputs(numbers_of(1000 + step, rows * width)) {
        for (double const one : numbers_of(5000 + step, rows))
            labels.push_back(static_cast<std::uint32_t>((one + 1) * 2));
    }
    [[nodiscard]] classification_batch<double> rows_of(std::size_t begin, std::size_t end) const {
        return {.inputs = std::span(inputs).subspan(begin * features, (end - begin) * features),
                .labels = std::span<std::uint32_t const>(labels).subspan(begin, end - begin),
                .rows = end - begin,
                .features = features};
    }
};

/// |a - b| / (1 + |b|), both as vectors.
inline double distance(std::vector<double> const& a, std::vector<double> const& b) {
    if (a.size() != b.size()) return HUGE_VAL;
    double difference = 0, size = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
        difference += (a[i] - b[i]) * (a[i] - b[i]);
        size += b[i] * b[i];
    }
    return std::sqrt(difference) / (1 + std::sqrt(size));
}

}  // namespace ddp::test
