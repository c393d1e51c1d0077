// Linear regression over a transport of one's own: processes that talk through Unix-domain sockets.
//
// Four processes:              ./train unix 4
// Four threads, same bits:     ./train inproc 4
// Prints:                      y = 2.00 x + 1.00 (ranks: 4, parameters …)
#include <cstdio>
#include <cstdlib>
#include <ddp/ddp.hpp>

#include "processes.hpp"

struct point {
    double x, y;
};

/// y = a x + b, squared error.
struct line {
    using element = double;
    std::vector<double> own = std::vector<double>(4);  // a, b, and their gradients
    std::span<point const> samples;

    std::vector<ddp::parameter<double>> parameters() {
        std::span<double> const all(own);
        return {{"slope", {1}, all.subspan(0, 1), all.subspan(2, 1)},
                {"offset", {1}, all.subspan(1, 1), all.subspan(3, 1)}};
    }
    [[nodiscard]] double error(point p) const { return own[0] * p.x + own[1] - p.y; }
    double forward(std::span<point const> batch) {
        samples = batch;
        double loss = 0;
        for (point const p : samples) loss += error(p) * error(p);
        return loss / static_cast<double>(samples.size());
    }
    template <class Ready>
    void backward(ddp::pass<double> how, Ready const& ready) {
        if (!how.accumulate) own[2] = own[3] = 0;
        double const scale = 2 * how.scale / static_cast<double>(samples.size());
        for (point const p : samples) own[2] += scale * error(p) * p.x, own[3] += scale * error(p);
        ready(1);
        ready(0);
    }
};

int main(int argc, char** argv) {
    if (argc != 3) {
        std::fprintf(stderr, "usage: train unix|inproc RANKS\n");
        return 2;
    }
    ddp::run_options const how{.transport = argv[1], .ranks = std::atoi(argv[2])};
    return ddp::run_main<ddp::threads, uds::processes>(how, [](auto& comm) {
        line model;
        ddp::data_parallel trainer{model, ddp::sgd{.lr = 0.1}, comm};
        for (int step = 0; step < 200; ++step) {
            point const mine[2] = {{0.1 * comm.rank(), 0.2 * comm.rank() + 1},
                                   {1, 3}};  // every rank brings its own samples
            trainer.step(std::span<point const>(mine));
        }
        auto const digest = static_cast<unsigned long long>(trainer.digest_of_values());
        auto const p = trainer.parameters();
        if (comm.rank() == 0)
            std::printf("y = %.2f x + %.2f (ranks: %d, parameters %016llx)\n", p[0].value[0], p[1].value[0],
                        comm.size(), digest);
    });
}
