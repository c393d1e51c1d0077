// A model of another library: Armadillo's matrices look into one vector, and one function computes loss and gradient.
// armadillo_model, or ddprun -n 3 armadillo_model
#include <armadillo>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <span>

#include <ddp/adapter/flat_model.hpp>
#include <ddp/ddp.hpp>
#include <ddp/rendezvous/run_tcp.hpp>

/// Sixteen tanh and a logistic: is a point inside the circle? Columns are samples, as Armadillo has them.
struct network {
    static constexpr arma::uword hidden = 16;
    arma::vec values = arma::zeros(4 * hidden + 1), gradient = arma::zeros(4 * hidden + 1);
    // of the vectors' memory, without copies
    arma::mat w{values.memptr(), hidden, 3, false, true}, dw{gradient.memptr(), hidden, 3, false, true};
    arma::vec v{values.memptr() + 3 * hidden, hidden + 1, false, true};
    arma::vec dv{gradient.memptr() + 3 * hidden, hidden + 1, false, true};

    network() {
        ddp::random_stream const start{7, ddp::random_use::initial_values};
        for (arma::uword k = 0; k < 4 * hidden; ++k) values[k] = start.at(k).symmetric<double>();
    }
    network(network const&) = delete;

    static arma::mat points(std::span<std::uint32_t const> which) {  // (3, samples): x, y, 1
        ddp::random_stream const drawn{11, ddp::random_use::user};
        arma::mat x(3, which.size());
        for (std::size_t i = 0; i < which.size(); ++i)
            x.col(i) = arma::vec{2 * drawn.at(2 * std::uint64_t{which[i]}).symmetric<double>(),
                                 2 * drawn.at(2 * std::uint64_t{which[i]} + 1).symmetric<double>(), 1};
        return x;
    }
    static arma::rowvec inside(arma::mat const& x) {
        return arma::conv_to<arma::rowvec>::from(arma::square(x.row(0)) + arma::square(x.row(1)) < 2);
    }
    arma::rowvec guess(arma::mat const& x) const {
        return 1 / (1 + arma::exp(-(v.head(hidden).t() * arma::tanh(w * x) + v[hidden])));
    }
    double loss_and_gradient(std::span<std::uint32_t const> which) {  // mean loss; the gradient is assigned
        arma::mat const x = points(which), h = arma::tanh(w * x);
        arma::rowvec const target = inside(x), p = guess(x);
        arma::rowvec const dz = (p - target) / static_cast<double>(which.size());
        dv.head(hidden) = h * dz.t();
        dv[hidden] = arma::accu(dz);
        dw = ((v.head(hidden) * dz) % (1 - arma::square(h))) * x.t();
        return -arma::mean(target % arma::log(p) + (1 - target) % arma::log(1 - p));
    }
};

int main() {
    return ddp::run_main<ddp::threads, ddp::tcp>([](auto& comm) {
        network net;
        auto const passes = [&](std::span<std::uint32_t const> batch) { return net.loss_and_gradient(batch); };
        ddp::flat_model model{net.values, net.gradient, passes};

        ddp::data_parallel trainer{model, ddp::adam{.lr = 0.02}, comm};
        ddp::sampler batches{{.samples = 2000, .global_batch = 100}, comm};
        for (int epoch = 0; epoch < 20; ++epoch)
            while (auto const mine = batches.next()) trainer.step(*mine);

        ddp::mean_metric right;  // every rank looks at its share
        while (auto const mine = batches.next()) {
            arma::mat const x = network::points(*mine);
            arma::uvec const hits = arma::find((net.guess(x) > 0.5) == (network::inside(x) > 0.5));
            right.add(static_cast<double>(hits.n_elem) / static_cast<double>(mine->size()), mine->size());
        }
        double const accuracy = ddp::sum_over_ranks(comm, right).mean();
        if (comm.rank() == 0) std::printf("accuracy %.3f (ranks: %d)\n", accuracy, comm.size());
    });
}
