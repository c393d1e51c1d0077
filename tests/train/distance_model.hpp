/// \file
/// distance: a model of several parameters whose gradient one line gives, and batches that lie unevenly on 1 to 4 ranks.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include <ddp/core/bytes.hpp>
#include <ddp/core/element_type.hpp>
#include <ddp/model/model.hpp>
#include <ddp/optim/parameter_groups.hpp>
#include <ddp/train/evaluate.hpp>

namespace ddp::test {

struct part {
    char const* name;
    std::size_t count;
};
inline constexpr std::array<part, 5> parts = {
    {{"first.weight", 9000}, {"first.bias", 7}, {"empty", 0}, {"second.weight", 13000}, {"second.bias", 3}}};

/// Numbers of samples.
using batch = std::vector<std::uint64_t>;

/// A number in [-1, 1) for each n: cheap, as sanitizers ask millions of them.
inline double scattered(std::uint64_t n) {
    n = (n + 1) * 0x9E3779B97F4A7C15u;
    n = (n ^ n >> 31) * 0xD6E8FEB86659FD93u;
    return static_cast<double>(n >> 11) * 0x1p-52 - 1;
}
/// What sample s wants element j of parameter i to be.
inline double target(std::uint64_t s, std::size_t i, std::size_t j) {
    return scattered((s * parts.size() + i) * 100'000 + j);
}
inline double start(std::size_t i, std::size_t j) {
    return scattered((1'000'000 + i) * 100'000 + j);
}

/// The gradient is that of half the squared distance from every sample's target; the loss looks at every hundredth element. Leaves out the gradients of the parameters named in `silent`.
template <bool Releases>
struct distance {
    using element = double;
    static constexpr bool ready_releases = Releases;
    std::vector<std::vector<double>> own;
    std::vector<std::span<double>> values, gradients;
    std::shared_ptr<void> owner;
    batch now;
    std::string silent;     // a pattern
    double seen = 0;        // a running mean of the samples' numbers
    std::size_t slice = 0;  // gradients are made and reported so many elements at a time, from the end; 0: each at once

    distance() {
        for (int k = 0; k < 2; ++k)
            for (part const& p : parts) own.emplace_back(p.count);
        for (std::size_t i = 0; i < parts.size(); ++i) {
            for (std::size_t j = 0; j < parts[i].count; ++j) own[i][j] = start(i, j);
            values.emplace_back(own[i]), gradients.emplace_back(own[parts.size() + i]);
        }
    }
    distance(distance const&) = delete;
    std::vector<parameter<double>> parameters() {
        std::vector<parameter<double>> all;
        for (std::size_t i = 0; i < parts.size(); ++i)
            all.push_back({parts[i].name, {parts[i].count}, values[i], gradients[i]});
        return all;
    }
    void bind(storage<double> memory) { values = memory.values, gradients = memory.gradients, owner = memory.owner; }
    double forward(batch const& samples) {
        now = samples;
        double sum = 0, ids = 0;
        for (std::uint64_t const s : now) {
            for (std::size_t i = 0; i < parts.size(); ++i)
                for (std::size_t j = 0; j < parts[i].count; j += 100) {
                    double const off = values[i][j] - target(s, i, j);
                    sum += off * off;
                }
            ids += static_cast<double>(s);
        }
        if (now.empty()) return 0;
        seen = 0.9 * seen + 0.1 * ids / static_cast<double>(now.size());
        return sum / static_cast<double>(now.size());
    }
    /// The mean distance of every hundredth element, times `seen`.
    mean_metric evaluate(batch const& samples) const {
        mean_metric result;
        for (std::uint64_t const s : samples)
            for (std::size_t i = 0; i < parts.size(); ++i)
                for (std::size_t j = 0; j < parts[i].count; j += 100)
                    result.add(seen * (values[i][j] - target(s, i, j)), 1);
        return result;
    }
    std::vector<model_buffer> buffers() {
        return {model_buffer{"seen", element_type::f64, {}, as_mutable_bytes(std::span(&seen, 1))}};
    }
    template <class Ready>
    void backward(pass<double> how, Ready const& ready) {
        for (std::size_t i = parts.size(); i-- > 0;) {
            if (!silent.empty() && name_fits(silent, parts[i].name)) continue;
            for (std::size_t end = parts[i].count; end > 0;) {
                std::size_t const first = slice == 0 || end < slice ? 0 : end - slice;
                for (std::size_t j = first; j < end; ++j) {
                    double sum = how.accumulate ? gradients[i][j] : 0;
                    for (std::uint64_t const s : now)
                        sum += (values[i][j] - target(s, i, j)) * how.scale / static_cast<double>(now.size());
                    gradients[i][j] = sum;
                }
                if (slice != 0) ready(i, first, end - first);
                end = first;
            }
            if (slice == 0 || parts[i].count == 0) ready(i);
        }
    }
};

/// Samples of step k, and rank r's of them: uneven, none on the last of four.
inline batch whole(std::uint64_t k) {
    batch all(7);
    std::iota(all.begin(), all.end(), 7 * k);
    return all;
}
inline batch share(std::uint64_t k, int rank, int ranks) {
    batch const all = whole(k);
    auto const cut = [&](int r) {
        return r >= 3 ? 7 : ranks == 1 ? 7 * r : ranks == 2 ? 3 * r : r == 2 && ranks == 3 ? 4 : r == 2 ? 7 : r;
    };
    int const from = cut(rank), to = rank + 1 == ranks ? 7 : cut(rank + 1);
    return {all.begin() + from, all.begin() + to};
}

}  // namespace ddp::test
