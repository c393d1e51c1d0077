/// \file
/// check_buckets: tests whether the plans of a bucket policy are reproducible and valid, for models of many shapes.
#pragma once

#include <cstddef>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include <ddp/model/layout.hpp>
#include <ddp/train/bucket.hpp>

namespace ddp::testing {

/// Checks the plans of a bucket policy for models of many shapes, in float and in double, with the grains that a trainer
/// requests with and without clipping. Returns what is wrong; an empty list if nothing was found.
template <BucketPolicy B>
[[nodiscard]] std::vector<std::string> check_buckets(B const& policy) {
    std::vector<std::pair<char const*, std::vector<std::size_t>>> const models = {
        {"one element", {1}},
        {"nothing but an empty parameter", {0}},
        {"large, empty and small parameters", {300'000, 0, 17, 5, 0, 70'001, 1}},
        {"two hundred alike", std::vector<std::size_t>(200, 640)},
    };
    std::vector<std::string> complaints;
    for (auto const& [name, counts] : models)
        for (std::size_t const bytes : {sizeof(float), sizeof(double)})
            for (std::size_t const grain : {64 / bytes, statistics_block}) {
                bucket_request const request{.counts = counts, .element_bytes = bytes, .grain = grain};
                std::string const where = std::string(name) + ", " + std::to_string(bytes) +
                                          " bytes an element, a grain of " + std::to_string(grain) + ": ";
                try {
                    bucket_plan const plan = policy.plan(request), again = policy.plan(request);
                    ddp::detail::bucket_map const map(plan, layout(counts, plan.order, bytes), grain);
                    if (plan.order != again.order || plan.cuts != again.cuts || plan.launch != again.launch)
                        complaints.push_back(where + "the same request got another plan; plan() must be pure");
                } catch (std::exception const& e) {
                    complaints.push_back(where + e.what());
                }
            }
    return complaints;
}

}  // namespace ddp::testing
