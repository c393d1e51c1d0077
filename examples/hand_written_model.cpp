// A model written by hand, without ddp::nn: a network of two layers learns to tell two interleaved half moons apart.
//
// Alone:              ./hand_written_model
// Three processes:    ddprun -n 3 ./hand_written_model
// Prints on rank 0:   accuracy 0.9785 on 2000 samples (ranks: 3)
#include <cmath>
#include <cstdio>
#include <ddp/ddp.hpp>
#include <ddp/rendezvous/run_tcp.hpp>

using batch = std::span<std::uint32_t const>;  // numbers of samples; anything with size() is a batch

struct point {
    double x, y, lower;  // lower: 1 on the lower moon, 0 on the upper one
};
point sample(std::uint32_t i) {  // the data set is a function, the same on every rank
    ddp::random_stream const angle{1, ddp::random_use::user, 0}, noise{1, ddp::random_use::user, 1};
    double const a = 3.14159 * angle.at(i).uniform<double>(), r = 1 + 0.2 * noise.at(i).normal<double>();
    if (i % 2 == 0) return {r * std::cos(a), r * std::sin(a), 0};
    return {1 - r * std::cos(a), 0.5 - r * std::sin(a), 1};
}

struct score {
    double right = 0, all = 0;
    void operator+=(score const& other) { right += other.right, all += other.all; }
};

struct moon_model {
    using element = double;
    static constexpr std::size_t hidden = 16;
    std::vector<double> own = std::vector<double>(8 * hidden + 2);  // values and gradients, until bind
    std::span<double> w, v, dw, dv;  // (hidden, 3) and (hidden + 1): weights, then bias; and their gradients
    std::shared_ptr<void> owner;
    batch samples;
    double h[hidden] = {};

    moon_model() {
        std::span<double> const all(own);
        w = all.subspan(0, 3 * hidden), dw = all.subspan(3 * hidden, 3 * hidden);
        v = all.subspan(6 * hidden, hidden + 1), dv = all.subspan(7 * hidden + 1);
        ddp::random_stream const start{7, ddp::random_use::initial_values};
        for (std::size_t k = 0; k < 3 * hidden; ++k) w[k] = start.at(k).symmetric<double>();
    }
    std::vector<ddp::parameter<double>> parameters() {
        return {{"hidden", {hidden, 3}, w, dw}, {"output", {hidden + 1}, v, dv}};
    }
    void bind(ddp::storage<double> memory) {  // optional: work in the library's memory from now on, without copies
        w = memory.values[0], v = memory.values[1], dw = memory.gradients[0], dv = memory.gradients[1];
        owner = memory.owner;
    }

    double output(point const& p) {  // > 0: on the lower moon
        double z = v[hidden];
        for (std::size_t j = 0; j < hidden; ++j)
            z += v[j] * (h[j] = std::tanh(w[3 * j] * p.x + w[3 * j + 1] * p.y + w[3 * j + 2]));
        return z;
    }
    double forward(batch const& which) {  // -> mean loss; remembers what backward needs
        samples = which;
        double loss = 0;
        for (auto const i : samples) loss += std::log1p(std::exp((1 - 2 * sample(i).lower) * output(sample(i))));
        return loss / static_cast<double>(samples.size());
    }
    template <class Ready>
    void backward(ddp::pass<double> how, Ready const& ready) {  // gradient of how.scale times the mean loss
        if (!how.accumulate)
            for (auto const g : {dw, dv}) std::fill(g.begin(), g.end(), 0.0);
        for (auto const i : samples) {
            point const p = sample(i);
            double const guess = 1 / (1 + std::exp(-output(p)));
            double const dz = how.scale / static_cast<double>(samples.size()) * (guess - p.lower);
            for (std::size_t j = 0; j < hidden; ++j) {
                double const dh = dz * v[j] * (1 - h[j] * h[j]);
                dv[j] += dz * h[j];
                dw[3 * j] += dh * p.x, dw[3 * j + 1] += dh * p.y, dw[3 * j + 2] += dh;
            }
            dv[hidden] += dz;
        }
        for (std::size_t i = 2; i-- > 0;) ready(i);  // final: the reduction of gradient i may start
    }
    score evaluate(batch const& which) {
        score counts{.right = 0, .all = static_cast<double>(which.size())};
        for (auto const i : which) counts.right += (output(sample(i)) > 0) == (sample(i).lower > 0) ? 1 : 0;
        return counts;
    }
};

int main() {
    return ddp::run_main<ddp::threads, ddp::tcp>([](auto& comm) {
        moon_model model;
        ddp::data_parallel trainer{model, ddp::adam{.lr = 0.02}, comm};
        ddp::sampler batches{{.samples = 2000, .global_batch = 100}, comm};
        for (int epoch = 0; epoch < 20; ++epoch)
            while (auto const mine = batches.next()) trainer.step(*mine);
        score const all = ddp::evaluate(comm, model, [&] { return batches.next(); }, [](batch b) { return b; });
        if (comm.rank() == 0)
            std::printf("accuracy %.4f on %.0f samples (ranks: %d)\n", all.right / all.all, all.all, comm.size());
    });
}
