/// \file
/// What train/bucket.hpp declares.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include <ddp/core/text.hpp>
#include <ddp/train/bucket.hpp>

namespace ddp {

DDP_DECL bucket_plan size_capped_buckets::plan(bucket_request const& request) const {
    DDP_EXPECTS(cap_bytes > 0 && first_bytes > 0, "size_capped_buckets: caps are positive numbers of bytes");
    bucket_plan result;
    std::size_t room = limit(std::min(first_bytes, cap_bytes), request), filled = 0;
    auto const close = [&](bucket_cut at) {
        result.cuts.push_back(at);
        room = limit(cap_bytes, request);
        filled = 0;
    };
    for (std::size_t position = request.counts.size(); position-- > 0;) {
        std::size_t left = padded(request.counts[position], request);
        if (filled > 0 && left > room - filled) close({position + 1, 0});
        while (left > room - filled) {  // larger than a whole bucket: cut from its end
            std::size_t const at = (left - (room - filled) + request.grain - 1) / request.grain * request.grain;
            if (at >= left) break;
            close({position, at});
            left = at;
        }
        filled += left;
    }
    std::reverse(result.cuts.begin(), result.cuts.end());
    return result;
}

namespace detail {

[[gnu::cold]] DDP_DECL bucket_map::bucket_map(bucket_plan const& plan, layout const& where, std::size_t grain)
    : bounds_{0} {
    for (bucket_cut const& cut : plan.cuts) {
        DDP_EXPECTS(cut.position < where.parameters(), "a bucket plan cuts after the last parameter");
        std::size_t const i = where.order()[cut.position];
        DDP_EXPECTS(cut.offset <= where.count(i) && cut.offset % grain == 0,
                    "a bucket plan cuts inside a parameter only at multiples of the requested grain");
        bounds_.push_back(where.begin(i) + cut.offset);
        DDP_EXPECTS(bounds_.back() >= bounds_[bounds_.size() - 2], "a bucket plan's cuts must ascend");
    }
    bounds_.push_back(where.size());
    launch_ = plan.launch;
    if (launch_.empty())
        for (std::size_t b = count(); b-- > 0;) launch_.push_back(b);
    DDP_EXPECTS(names_each_once(launch_, count()), "a bucket plan launches every bucket exactly once");
    touches_.resize(where.parameters());
    members_.resize(count());
    for (std::size_t b = 0; b < count(); ++b)
        where.for_each_in(begin(b), end(b), [&](std::size_t i, std::size_t, std::size_t) {
            touches_[i].push_back(b);
            ++members_[b];
        });
}

DDP_DECL std::string bucket_map::words(layout const& where) const {
    std::string text = count() == 1 ? "1 bucket" : concat({count(), " buckets"});
    for (std::size_t b = 0; b < count(); ++b) text += concat({"; bucket #", b, " of ", end(b) - begin(b), " elements"});
    for (std::size_t k = 0; k < where.order().size(); ++k)
        text += concat({"; parameter #", where.order()[k], " in place ", k});
    for (std::size_t k = 0; k < launch_.size(); ++k) text += concat({"; bucket #", launch_[k], " sent as number ", k});
    return text;
}

}  // namespace detail

}  // namespace ddp
