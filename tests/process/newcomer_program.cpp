// A small training with one mistake in it, chosen on the command line, for newcomer_test.py:
//
//   newcomer_program none
//   newcomer_program ranks 4      asks for four ranks over TCP, however it was started
//   newcomer_program data DIR     loads IDX files from there
//   newcomer_program label 10     a sample of class 10, where the model tells 0 to 9 apart
//   newcomer_program features 3   batches of another width than the model's
//   newcomer_program rate -0.1    the learning rate, also nan
//   newcomer_program empty all    no samples on any rank
//   newcomer_program ends 1       a rank returns from its loop before the others
//   newcomer_program threads 200  that many ranks, which are threads
//   newcomer_program barrier 1    a rank calls a barrier where the others train
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ddp/ddp.hpp>
#include <ddp/nn/nn.hpp>
#include <ddp/rendezvous/run_secure.hpp>
#include <string>
#include <vector>

namespace {

template <class Comm>
void train(std::string const& mistake, std::string const& value, Comm& comm) {
    auto const number = [&](char const* name, std::uint32_t right) {
        return mistake == name ? static_cast<std::uint32_t>(std::stoul(value)) : right;
    };
    auto const mine = [&](char const* name) { return mistake == name && value == std::to_string(comm.rank()); };
    if (mistake == "data") {
        auto const images = ddp::load_idx_classification(value, ddp::data_split::train);
        std::printf("%zu images\n", images.size());
        return;
    }
    ddp::nn::sequential model{ddp::nn::linear(4, 10), ddp::nn::softmax_cross_entropy()};
    ddp::data_parallel trainer{model, ddp::sgd{.lr = mistake == "rate" ? std::stod(value) : 0.1}, comm};
    std::size_t const features = number("features", 4), rows = mistake == "empty" ? 0 : 2;
    std::vector<float> const inputs(rows * features, 1.0f);
    std::vector<std::uint32_t> labels(rows, 3);
    if (rows != 0) labels.back() = number("label", 3);
    for (int step = 1; step <= 4; ++step) {
        if (step == 3 && mine("ends")) return;
        if (step == 3 && mine("barrier")) ddp::barrier(comm);
        trainer.step(
            ddp::classification_batch<float>{.inputs = inputs, .labels = labels, .rows = rows, .features = features});
    }
    std::printf("trained\n");
}

}  // namespace

int main(int argc, char** argv) {
    std::string const mistake = argc > 1 ? argv[1] : "none", value = argc > 2 ? argv[2] : "";
    char const* const scale = std::getenv("DDP_TEST_TIME_SCALE");
    ddp::run_options options;
    options.times = ddp::timing::for_tests();
    options.times.join = std::chrono::milliseconds(1500);
    for (auto* const time : {&options.times.heartbeat, &options.times.dead, &options.times.collective,
                             &options.times.handshake, &options.times.join, &options.times.shutdown})
        *time *= scale == nullptr ? 1 : std::stoi(scale);
    if (mistake == "threads") {
        options.transport = "inproc";
        options.ranks = std::stoi(value);
    }
    if (mistake == "ranks") {
        options.transport = "tcp";
        options.ranks = std::stoi(value);
    }
    return ddp::run_main<ddp::threads, ddp::secure_tcp>(options, [&](auto& comm) { train(mistake, value, comm); });
}
