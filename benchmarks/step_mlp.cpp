// Forward + backward of the MLP 784-1024-1024-10 (ReLU, softmax cross-entropy), batch 128, float, one thread.
//
// Run:    step_mlp [seconds, default 3]
// Prints: one JSON line: the median milliseconds of forward + backward, and of the whole step with SGD with momentum,
//         which is there so that every pass finds the caches as a training run leaves them.
// Compile with -O3 -march=native -DNDEBUG; pin it to a core (taskset -c 0) to compare.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <vector>

#include <ddp/core/random.hpp>
#include <ddp/nn/activation.hpp>
#include <ddp/nn/linear.hpp>
#include <ddp/nn/loss.hpp>
#include <ddp/nn/sequential.hpp>

namespace {

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double median_ms(std::vector<double> seconds) {
    auto const middle = seconds.begin() + static_cast<std::ptrdiff_t>(seconds.size() / 2);
    std::nth_element(seconds.begin(), middle, seconds.end());
    return *middle * 1e3;
}

}  // namespace

int main(int argc, char** argv) {
    constexpr std::size_t rows = 128, features = 784, classes = 10, warm_up = 3;
    double const seconds = argc > 1 ? std::atof(argv[1]) : 3.0;

    ddp::nn::sequential net{ddp::nn::linear(features, 1024), ddp::nn::relu(),
                            ddp::nn::linear(1024, 1024),     ddp::nn::relu(),
                            ddp::nn::linear(1024, classes),  ddp::nn::softmax_cross_entropy()};
    std::vector<float> inputs(rows * features);
    std::vector<std::uint32_t> labels(rows);
    ddp::random_stream const draws{1, ddp::random_use::user};
    for (std::size_t i = 0; i < inputs.size(); ++i) inputs[i] = draws.at(i).symmetric<float>();
    for (std::size_t i = 0; i < rows; ++i) labels[i] = static_cast<std::uint32_t>(i * 7 % classes);
    ddp::classification_batch<float> const batch{inputs, labels, rows, features};

    auto const parameters = net.parameters();
    std::vector<std::vector<float>> velocity;
    std::size_t count = 0;
    for (auto const& p : parameters) {
        velocity.emplace_back(p.value.size(), 0.0f);
        count += p.value.size();
    }

    std::vector<double> forward_backward, step;
    double first_loss = 0, loss = 0;
    double const until = now() + seconds;
    for (std::size_t s = 0; s < warm_up + 5 || now() < until; ++s) {
        double const start = now();
        loss = net.forward(batch);
        net.backward({}, [](std::size_t) {});
        double const computed = now();
        for (std::size_t i = 0; i < parameters.size(); ++i)
            for (std::size_t e = 0; e < velocity[i].size(); ++e) {
                velocity[i][e] = 0.9f * velocity[i][e] + parameters[i].gradient[e];
                parameters[i].value[e] -= 0.01f * velocity[i][e];
            }
        double const done = now();
        if (s == 0) first_loss = loss;
        if (s < warm_up) continue;
        forward_backward.push_back(computed - start);
        step.push_back(done - start);
    }
#if defined(__clang__)
    constexpr char const* compiler = "clang " __clang_version__;
#else
    constexpr char const* compiler = "gcc " __VERSION__;
#endif
    std::printf(
        "{\"bench\":\"step1\",\"impl\":\"ddp, %s\",\"model\":\"mlp\",\"params\":%zu,\"batch\":%zu,\"fb_ms\":%.3f,"
        "\"step_ms\":%.3f,\"ok\":%s}\n",
        compiler, count, rows, median_ms(forward_backward), median_ms(step), loss < first_loss ? "true" : "false");
}
