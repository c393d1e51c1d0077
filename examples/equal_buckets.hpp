// A bucket policy that the library does not have: so many buckets, whatever the model.
#pragma once

#include <cstddef>
#include <ddp/ddp.hpp>

/// `count` buckets of as nearly the same size as the grain allows; fewer where there are fewer grains.
struct equal_buckets {
    std::size_t count = 4;

    ddp::bucket_plan plan(ddp::bucket_request const& request) const {
        std::size_t total = 0;
        for (std::size_t const elements : request.counts) total += elements;
        ddp::bucket_plan result;
        ddp::bucket_cut last;                // no cut at the very front, and none twice
        std::size_t before = 0, bucket = 1;  // elements in front of parameter p; the bucket that begins next
        for (std::size_t p = 0; p < request.counts.size(); before += request.counts[p++])
            for (; bucket < count && total * bucket / count < before + request.counts[p]; ++bucket) {
                std::size_t const inside = total * bucket / count - before;
                ddp::bucket_cut const cut{.position = p, .offset = inside / request.grain * request.grain};
                if (cut > last) result.cuts.push_back(last = cut);
            }
        return result;
    }
};
static_assert(ddp::BucketPolicy<equal_buckets>);
