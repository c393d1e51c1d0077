// What checkpoints cost the steps of a training: saved at once, and in the background, beside a copy of what is saved.
//
//   ddprun -n 2 --prefix none -- ./benchmark_checkpoint DIRECTORY
//
// The model is train_step's wide (784-4096-4096-4096-10, float, 147 MB; 64 samples a rank), with SGD with momentum, or with
// OPTIMIZER=adam Adam; WIDTH replaces 4096, UPDATE=replicated the update. DIRECTORY gets the checkpoints, and keeps the last.
// ROUNDS (5) are counted after one that is not.
//
// Prints milliseconds on rank 0, medians of rounds, and whether the last checkpoint, resumed, has the values that were saved:
//   step               a step while nothing is written
//   copy               memcpy of values and state into memory that is there already
//   background save()  until training goes on
//   step meanwhile     a step while a thread writes; the writer takes processor time for digests
//   poll()             after each of these steps, until the checkpoint is whole; it waits for the other ranks to call it
//   save()             until the checkpoint is whole
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include <ddp/checkpoint/checkpoints.hpp>
#include <ddp/ddp.hpp>
#include <ddp/nn/nn.hpp>
#include <ddp/rendezvous/run_tcp.hpp>

namespace {

double milliseconds_since(std::chrono::steady_clock::time_point since) {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - since).count();
}

struct measured {
    char const* what;
    std::vector<double> all = {};
    template <class F>
    void add(F const& f) {
        auto const since = std::chrono::steady_clock::now();
        f();
        all.push_back(milliseconds_since(since));
    }
    void print() {
        if (all.size() > 1) all.erase(all.begin());
        std::ranges::sort(all);
        std::printf("%-18s %9.1f  (%.1f to %.1f)\n", what, all[all.size() / 2], all.front(), all.back());
    }
};

}  // namespace

int main(int argc, char** argv) {
    if (argc != 2) {
        std::fprintf(stderr, "usage: checkpoint DIRECTORY\n");
        return 2;
    }
    auto const number = [](char const* name, int otherwise) {
        char const* const text = std::getenv(name);
        return text == nullptr ? otherwise : std::max(1, std::atoi(text));
    };
    auto const asks = [](char const* name, std::string_view value) {
        char const* const text = std::getenv(name);
        return text != nullptr && text == value;
    };
    int const count = 1 + number("ROUNDS", 5);
    std::size_t const width = static_cast<std::size_t>(number("WIDTH", 4096));
    return ddp::run_main<ddp::threads, ddp::tcp>([&](ddp::communicator<>& comm) {
        using namespace ddp::nn;
        auto net = sequential{linear(784, width),   relu(), linear(width, width), relu(),
                              linear(width, width), relu(), linear(width, 10),    softmax_cross_entropy()};
        net.initialize(1);
        ddp::any_optimizer const optimizer = asks("OPTIMIZER", "adam")
                                                 ? ddp::any_optimizer(ddp::adam{.lr = 1e-4})
                                                 : ddp::any_optimizer(ddp::sgd{.lr = 0.01, .momentum = 0.9});
        ddp::training_options options;
        if (asks("UPDATE", "replicated")) options.update = ddp::update::replicated;
        ddp::data_parallel trainer{net, optimizer, comm, options};
        std::size_t const rows = 64, features = 784;
        std::vector<float> const inputs(rows * features, 0.5F);
        std::vector<std::uint32_t> const labels(rows, 3);
        auto const step = [&] { trainer.step(ddp::classification_batch<float>{inputs, labels, rows, features}); };
        std::vector<std::vector<std::byte>> copies;
        auto const copy = [&](bool make) {  // values on rank 0 only, as save() has it, and this rank's state
            std::size_t next = 0;
            auto const one = [&](void const* from, std::size_t bytes) {
                if (make) copies.emplace_back(bytes);
                std::memcpy(copies[next++].data(), from, bytes);
            };
            if (comm.rank() == 0)
                for (auto const& p : net.parameters()) one(p.value.data(), p.value.size_bytes());
            trainer.for_each_state([&](ddp::state_slice const& s) {
                auto const state = s.as<float>();
                one(state.data(), state.size_bytes());
            });
        };
        ddp::checkpoints behind(argv[1], {.keep = 1, .background = true}), at_once(argv[1], {.keep = 1});
        measured steps{"step"}, copying{"copy"}, saving{"background save()"}, meanwhile{"step meanwhile"},
            polling{"poll()"}, whole{"save()"};
        for (int k = 0; k < 3; ++k) step();
        copy(true);
        for (int round = 0; round < count; ++round) {
            for (int k = 0; k < 3; ++k) steps.add(step);
            copying.add([&] { copy(false); });
            ddp::barrier(comm);
            saving.add([&] { behind.save(trainer); });
            for (bool done = false; !done;) {
                meanwhile.add(step);
                polling.add([&] { done = behind.poll(); });
            }
            step();  // a checkpoint of its own
            whole.add([&] { at_once.save(trainer); });
        }
        std::uint64_t const saved = trainer.digest_of_values();
        step();
        bool const same =
            at_once.resume(trainer) && trainer.replicas_identical() && trainer.digest_of_values() == saved;
        if (comm.rank() != 0) return;
        std::size_t bytes = 0;
        for (auto const& one : copies) bytes += one.size();
        std::printf("# width %zu, %d ranks over %s, rank 0 saves %.0f MB\n", width, comm.size(),
                    std::string(comm.transport().name()).c_str(), static_cast<double>(bytes) / 1e6);
        for (measured* one : {&steps, &copying, &saving, &meanwhile, &polling, &whole}) one->print();
        std::printf("resumed            %s\n", same ? "ok" : "OTHER VALUES");
    });
}
