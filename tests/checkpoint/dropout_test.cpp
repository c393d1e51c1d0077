// A network that draws, and whose steps are made of parts, goes on as if it had not been interrupted.
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include <ddp/checkpoint/checkpoints.hpp>
#include <ddp/data/batch.hpp>
#include <ddp/nn/nn.hpp>
#include <ddp/optim/adam.hpp>
#include <ddp/train/data_parallel.hpp>

#include "data/files.hpp"
#include "support/catch.hpp"
#include "support/on_ranks.hpp"
#include "train/patience.hpp"
#include "train/tanh_mlp.hpp"

using namespace ddp;

namespace {

/// The digest at the end of steps [first, last); `kept`: resumed before, saved after.
template <class Comm>
std::uint64_t train(Comm& comm, std::size_t first, std::size_t last, checkpoints* kept) {
    ddp::test::task_data<float> const data(7, 3, 64);
    nn::batch_norm whole(24, {.statistics = nn::batch_statistics::synchronised});
    nn::sequential model{nn::dropout(0.1), nn::linear(7, 24), std::move(whole),  nn::relu(),
                         nn::dropout(0.5), nn::linear(24, 3), nn::batch_norm(3), nn::mean_squared_error()};
    model.initialize(9);
    data_parallel trainer{model, adamw{.lr = 0.01}, comm};
    std::vector<std::uint32_t> numbers(64);
    std::iota(numbers.begin(), numbers.end(), 0u);
    auto const rows = [&](std::size_t begin, std::size_t end) {
        auto const part = data.batch(begin, end);
        return regression_batch<float>{.inputs = part.x,
                                       .targets = part.y,
                                       .rows = part.rows,
                                       .features = 7,
                                       .samples = std::span(numbers).subspan(begin, end - begin)};
    };
    if (kept != nullptr && first != 0 && (!kept->resume(trainer) || trainer.completed_steps() != first)) return 1;
    for (std::size_t step = first; step < last; ++step) {
        std::size_t const at = 4 * (static_cast<std::size_t>(comm.rank()) + step);
        trainer.forward(rows(at, at + 2));
        trainer.accumulate();
        trainer.forward(rows(at + 2, at + 4));
        trainer.backward();
        trainer.finish();
    }
    if (kept != nullptr) kept->save(trainer);
    digest all;
    for (model_buffer const& b : model.buffers()) all.add(const_bytes(b.bytes));
    return all.add(trainer.digest_of_values()).value();
}

}  // namespace

TEST_CASE("with dropout, batch normalisation and accumulation, a resumed training leaves out the same units",
          "[checkpoint]") {
    auto const [ranks, tcp] = GENERATE(ddp::test::ways_to_run());
    if (ranks > 4) return;
    CAPTURE(ranks, tcp);
    ::test::scratch_directory const scratch;
    auto const expected =
        ddp::test::run_ranks(ranks, [](auto& comm) { return train(comm, 0, 9, nullptr); }, ddp::test::patient());
    auto const got = ddp::test::ranks_over(
        tcp, ranks,
        [&](auto& comm) {
            checkpoints kept((scratch.path() / "kept").string());
            (void)train(comm, 0, 4, &kept);
            return train(comm, 4, 9, &kept);
        },
        ddp::test::patient());
    REQUIRE(got == expected);
}
