/// \file
/// measure: how long one operation takes, of many back to back.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <ddp/collective/barrier.hpp>
#include <ddp/collective/broadcast.hpp>
#include <ddp/comm/communicator.hpp>

namespace ddp_perf {

inline double seconds_now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Seconds for one operation.
struct statistics {
    double median = 0, p10 = 0, p90 = 0, mean = 0, least = 0;
    std::size_t samples = 0;

    void divide_by(double operations) {
        for (double* const time : {&median, &p10, &p90, &mean, &least}) *time /= operations;
    }
};

[[nodiscard]] inline statistics summarize(std::vector<double> times) {
    std::sort(times.begin(), times.end());
    auto const at = [&](double q) {
        return times[static_cast<std::size_t>(std::lround(q * static_cast<double>(times.size() - 1)))];
    };
    double sum = 0;
    for (double const t : times) sum += t;
    return {at(0.5), at(0.1), at(0.9), sum / static_cast<double>(times.size()), times.front(), times.size()};
}

struct measuring {
    std::size_t bytes = 0;       ///< decides how much is warmed up
    std::size_t turns = 1;       ///< operations in one sample, which is their mean
    std::size_t iterations = 0;  ///< samples; 0: what fits into `budget` seconds, from `least` to `most`
    double budget = 0.25;
    std::size_t least = 4, most = 4000;
    bool prepares = false;  ///< call prepare before each operation, and subtract its time
};

/// Every rank calls it. operation(k) is the k-th operation; prepare() writes what this rank brings to it.
///
/// A sample is the time on rank 0 from the end of one operation to the end of the next; there is no barrier between
/// them. Where no rank can end an operation before all have begun it, none can be ahead by more than one. In the
/// other collectives the root moves on with every operation, and one sample is the mean over `turns` of them.
///
/// Warm-up, number of samples and percentiles are those of the programs that other libraries are measured with
/// (options.hpp, --candidate), so that the figures compare.
/// With `prepares`, the median of prepare() alone, which all ranks call at once as they do in the loop, is subtracted.
template <class Prepare, class Operation>
[[nodiscard]] statistics measure(ddp::communicator<> const& comm, measuring const& how, Prepare const& prepare,
                                 Operation const& operation) {
    auto const repeat = [&](std::size_t samples, auto const& body) {
        std::vector<double> times(samples);
        std::size_t k = 0;
        double last = seconds_now();
        for (double& time : times) {
            for (std::size_t turn = 0; turn < how.turns; ++turn) body(k++);
            double const now = seconds_now();
            time = (now - last) / static_cast<double>(how.turns);
            last = now;
        }
        return times;
    };
    auto const once = [&](std::size_t k) {
        if (how.prepares) prepare();
        operation(k);
    };
    bool const large = how.bytes >= std::size_t{16} << 20;
    repeat(large ? 1 : how.bytes >= std::size_t{256} << 10 ? 4 : 20, once);
    double const each = summarize(repeat(large ? 1 : 8, once)).mean * static_cast<double>(how.turns);
    std::uint64_t samples =
        how.iterations != 0
            ? how.iterations
            : static_cast<std::uint64_t>(std::clamp(how.budget / std::max(each, 1e-9), static_cast<double>(how.least),
                                                    static_cast<double>(how.most)));
    ddp::broadcast(comm, samples);

    double rewrite = 0;
    if (how.prepares) {
        rewrite = summarize(repeat(samples, [&](std::size_t) { prepare(); })).median;
        ddp::barrier(comm);
    }
    std::vector<double> times = repeat(samples, once);
    for (double& time : times) time = std::max(0.0, time - rewrite);
    return summarize(times);
}

}  // namespace ddp_perf
