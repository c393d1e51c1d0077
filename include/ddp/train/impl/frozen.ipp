/// \file
/// What train/frozen.hpp declares.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <ddp/train/frozen.hpp>

namespace ddp::detail {

[[gnu::cold]] DDP_DECL bucket_plan plan_apart(planner const& buckets, bucket_request const& request,
                                              std::span<std::uint8_t const> marks) {
    std::vector<std::size_t> parts[2], counts[2];  // not marked, marked
    for (std::size_t i = 0; i < request.counts.size(); ++i) {
        std::size_t const part = marks[i] != 0 ? 1 : 0;
        parts[part].push_back(i);
        counts[part].push_back(request.counts[i]);
    }
    if (parts[0].empty() || parts[1].empty()) return buckets.plan(request);
    bucket_plan all;
    std::vector<std::size_t> launches[2];
    for (std::size_t const part : {std::size_t{1}, std::size_t{0}}) {
        bucket_request one = request;
        one.counts = counts[part];
        bucket_plan plan = buckets.plan(one);
        // Throws unless the order names each once.
        layout const valid(counts[part], plan.order, one.element_bytes, parameter_placement::aligned);
        std::size_t const first_position = all.order.size(), first_bucket = part == 1 ? 0 : all.cuts.size() + 1;
        if (part == 0) all.cuts.push_back({first_position, 0});
        for (std::size_t k = 0; k < parts[part].size(); ++k)
            all.order.push_back(parts[part][plan.order.empty() ? k : plan.order.at(k)]);
        for (bucket_cut const& cut : plan.cuts) all.cuts.push_back({first_position + cut.position, cut.offset});
        if (plan.launch.empty())
            for (std::size_t b = plan.cuts.size() + 1; b-- > 0;) plan.launch.push_back(b);
        for (std::size_t const b : plan.launch) launches[part].push_back(first_bucket + b);
    }
    all.launch = std::move(launches[0]);
    all.launch.insert(all.launch.end(), launches[1].begin(), launches[1].end());
    return all;
}

}  // namespace ddp::detail
