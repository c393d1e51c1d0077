// An observer of one's own: where the time of the reductions goes, bucket by bucket, as a table at the end. Two ranks, as
// threads.
//
// Run:       ./own_observer
// Prints:    a line a bucket, such as "bucket 1:  100 reductions of    8 KiB, mean    41 us, worst   250 us", and the
//            steps and samples that there were
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ddp/ddp.hpp>
#include <vector>

#include "toy_model.hpp"

struct reduction_table {
    struct line {
        std::size_t bytes = 0, count = 0;
        std::chrono::nanoseconds sum{}, worst{};
    };
    std::vector<line> buckets = std::vector<line>(64);  // enough for most: then no hook allocates
    std::uint64_t steps = 0, samples = 0;

    void print() const {
        auto const us = [](std::chrono::nanoseconds t) { return std::chrono::duration<double, std::micro>(t).count(); };
        for (std::size_t b = 0; b < buckets.size(); ++b)
            if (line const& l = buckets[b]; l.count != 0)
                std::printf("bucket %zu: %4zu reductions of %4zu KiB, mean %5.0f us, worst %5.0f us\n", b, l.count,
                            l.bytes / 1024, us(l.sum) / static_cast<double>(l.count), us(l.worst));
        std::printf("%llu steps, %llu samples\n", static_cast<unsigned long long>(steps),
                    static_cast<unsigned long long>(samples));
    }
};

struct reduction_timer {  // the trainer keeps a copy: it points to the table
    reduction_table* table;

    void on(ddp::bucket_reduced const& event) const {
        if (event.bucket >= table->buckets.size()) table->buckets.resize(event.bucket + 1);
        auto& line = table->buckets[event.bucket];
        line.bytes = event.bytes;
        ++line.count;
        line.sum += event.elapsed;
        line.worst = std::max(line.worst, event.elapsed);
    }
    void on(ddp::step_finished const& event) const {
        table->steps = event.step;
        table->samples += event.weight;
    }
};
static_assert(ddp::TrainingObserver<reduction_timer>);

int main() {
    return ddp::run_main<ddp::threads>({.ranks = 2}, [](auto& comm) {
        toy_model model({256, 16384, 256, 1});
        reduction_table table;
        ddp::data_parallel trainer{model, ddp::sgd{.lr = 0.1}, comm,
                                   ddp::size_capped_buckets{.cap_bytes = 32 << 10, .first_bytes = 8 << 10},
                                   reduction_timer{&table}};
        for (int step = 0; step < 100; ++step) trainer.step(toy_batch(4, 1.0f));
        if (comm.rank() == 0) table.print();  // between steps no hook runs
    });
}
