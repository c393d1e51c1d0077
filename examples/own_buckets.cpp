// A bucket policy of one's own (equal_buckets.hpp): its plan, and that it changes no bit. Two ranks, as threads.
//
// Run:       ./own_buckets
// Prints:    the buckets that it plans, then "4 buckets: the bits of any other plan"
#include <cstdio>
#include <ddp/ddp.hpp>
#include <vector>

#include "equal_buckets.hpp"
#include "toy_model.hpp"

void print(ddp::bucket_plan const& plan, std::vector<ddp::parameter<float>> const& parameters) {
    std::printf("bucket 0 begins with %s[0]\n", parameters[0].name.c_str());
    for (std::size_t b = 0; b < plan.cuts.size(); ++b)
        std::printf("bucket %zu begins with %s[%zu]\n", b + 1, parameters[plan.cuts[b].position].name.c_str(),
                    plan.cuts[b].offset);
}

template <class Buckets>
std::uint64_t train(ddp::communicator<>& comm, Buckets const& buckets, bool show) {
    toy_model model({100, 2000, 100, 50});
    if (show) {
        auto const parameters = model.parameters();
        std::vector<std::size_t> counts;
        counts.reserve(parameters.size());
        for (auto const& p : parameters) counts.push_back(p.value.size());
        print(buckets.plan({.counts = counts}), parameters);
    }
    ddp::data_parallel trainer{model, ddp::sgd{.lr = 0.1}, comm, buckets};
    for (int step = 0; step < 50; ++step) trainer.step(toy_batch{0.1f * static_cast<float>(comm.rank() + step)});
    return trainer.digest_of_values();
}

int main() {
    return ddp::run_main<ddp::threads>({.ranks = 2}, [](auto& comm) {
        bool const first = comm.rank() == 0;
        std::uint64_t const bits = train(comm, equal_buckets{.count = 4}, first);
        bool const same = bits == train(comm, ddp::per_parameter_buckets{}, false);
        if (first) std::printf("4 buckets: %s any other plan\n", same ? "the bits of" : "not the bits of");
    });
}
