// An exchange of one's own (rounded_exchange.hpp): gradients travel as bfloat16, with and without error feedback.
//
// Three processes:    ddprun -n 3 ./own_exchange
// Prints on rank 0:   bfloat16 on the wire: off by 0.00000 with feedback, by 0.00133 without (ranks: 3)
#include <cmath>
#include <cstdio>
#include <ddp/ddp.hpp>
#include <ddp/rendezvous/run_tcp.hpp>
#include <vector>

#include "rounded_exchange.hpp"
#include "toy_model.hpp"

/// Where training ends, on samples whose gradients never vanish on a single rank.
template <class Comm, class Exchange>
double end_of_training(Comm& comm, Exchange const& exchange) {
    toy_model model({1000, 300});
    ddp::data_parallel trainer{model, ddp::sgd{.lr = 0.05}, comm, exchange};
    toy_batch const batch{static_cast<float>(comm.rank() * comm.rank()) * 1.1f};
    double sum = 0;
    for (int step = 0; step < 600; ++step) {
        trainer.step(batch);
        if (step >= 400) sum += static_cast<double>(trainer.parameters()[0].value[0]);
    }
    return trainer.replicas_identical() ? sum / 200 : std::nan("");
}

template <class Comm>
void show(Comm& comm) {
    double const exact = end_of_training(comm, ddp::automatic_allreduce{});
    double const with = end_of_training(comm, rounded_exchange{});
    double const without = end_of_training(comm, rounded_exchange{.feedback = false});
    if (comm.rank() == 0)
        std::printf("bfloat16 on the wire: off by %.5f with feedback, by %.5f without (ranks: %d)\n",
                    std::abs(with - exact), std::abs(without - exact), comm.size());
}

int main() {
    return ddp::run_main<ddp::threads, ddp::tcp>([](auto& comm) { show(comm); });
}
