// A grid of ranks: trainers along the columns, collectives along the rows while the trainers are within their steps.
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ddp/collective/allreduce.hpp>
#include <ddp/optim/adam.hpp>
#include <ddp/optim/sgd.hpp>
#include <ddp/train/data_parallel.hpp>

#include "support/catch.hpp"
#include "support/collective_checks.hpp"
#include "support/on_ranks.hpp"
#include "support/ranks.hpp"
#include "train/patience.hpp"
#include "train/tanh_mlp.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

constexpr int columns = 3, rows = 2;
constexpr std::size_t batch_rows = 4;

/// What the rank in `row` trains on in one step, in the column's own task.
struct samples {
    std::vector<float> x, y;
    samples(int column, int row, int step)
        : x(addend<float>(values::small_integers, static_cast<std::uint64_t>(100 + column), 10 * step + row,
                          3 * batch_rows)),
          y(addend<float>(values::small_integers, static_cast<std::uint64_t>(200 + column), 10 * step + row,
                          2 * batch_rows)) {
        for (float& v : x) v /= 8;
        for (float& v : y) v /= 8;
    }
    [[nodiscard]] regression<float> batch() const { return {x, y, batch_rows}; }
};

training_options options_for(bool sharded, bool in_memory = true) {
    training_options options;
    options.update = sharded ? update::sharded : update::replicated;
    options.share_memory = in_memory;
    return options;
}
/// A column's training on ranks of its own: what the grid's column has to equal, bit by bit.
template <class Comm>
std::uint64_t train_column(Comm& comm, int column, int steps, bool sharded) {
    tanh_mlp<float> model(3, 5, 2, static_cast<std::uint64_t>(column));
    data_parallel trainer{model, adam{.lr = 0.01}, comm, options_for(sharded)};
    for (int s = 0; s < steps; ++s) trainer.step(samples(column, comm.rank(), s).batch());
    return trainer.digest_of_values();
}

}  // namespace

TEST_CASE("a grid trains along its columns while it sums along its rows", "[train][group]") {
    bool const sharded = GENERATE(false, true), tcp = GENERATE(false, true);  // over TCP by messages
    CAPTURE(sharded, tcp);
    constexpr int steps = 6;
    auto const got = ranks_over(
        tcp, rows * columns,
        [&](auto& comm) {
            int const row = comm.rank() / columns, column = comm.rank() % columns;
            auto const along_row = comm.split(row), along_column = comm.split(column);
            tanh_mlp<float> model(3, 5, 2, static_cast<std::uint64_t>(column));
            data_parallel trainer{model, adam{.lr = 0.01}, along_column, options_for(sharded, !tcp)};
            failures wrong;
            for (int s = 0; s < steps; ++s) {
                samples const mine(column, row, s);
                trainer.forward(mine.batch());
                trainer.backward();  // from here on the column's gradients are on their way
                std::vector<std::vector<float>> terms;
                for (int c = 0; c < columns; ++c)
                    terms.push_back(addend<float>(values::mixed, 9, 100 * s + 10 * row + c, 500));
                std::vector<float> sum = terms[static_cast<std::size_t>(column)];
                allreduce(along_row, std::span<float>(sum));
                note(wrong, "row", compare(sum, reference_sum(terms)));
                trainer.finish();
            }
            if (!trainer.replicas_identical()) wrong.push_back("replicas of a column differ");
            return std::pair(trainer.digest_of_values(), wrong);
        },
        patient());
    for (int column = 0; column < columns; ++column) {
        auto const alone =
            run_ranks(rows, [&](auto& comm) { return train_column(comm, column, steps, sharded); }, patient());
        for (int row = 0; row < rows; ++row) {
            auto const& [digest, wrong] = got[static_cast<std::size_t>(row * columns + column)];
            CHECK(wrong == failures{});
            CHECK(digest == alone.front());
        }
    }
}

TEST_CASE("trainers along the rows and the columns of a grid are inside a step at the same time", "[train][group]") {
    bool const sharded = GENERATE(false, true), tcp = GENERATE(false, true);  // over TCP by messages
    CAPTURE(sharded, tcp);
    constexpr int steps = 6;
    auto const got = ranks_over(
        tcp, rows * columns,
        [&](auto& comm) {
            int const row = comm.rank() / columns, column = comm.rank() % columns;
            auto const along_row = comm.split(row), along_column = comm.split(column);
            tanh_mlp<float> by_row(3, 5, 2, static_cast<std::uint64_t>(columns + row)),
                by_column(3, 5, 2, static_cast<std::uint64_t>(column));
            data_parallel across{by_row, adam{.lr = 0.01}, along_row, options_for(sharded, !tcp)};
            data_parallel down{by_column, adam{.lr = 0.01}, along_column, options_for(!sharded, !tcp)};
            for (int s = 0; s < steps; ++s) {
                samples const of_row(columns + row, column, s), of_column(column, row, s);
                across.forward(of_row.batch());
                down.forward(of_column.batch());
                if ((row + column + s) % 2 == 0) {  // neighbours in other orders: both have begun everywhere
                    across.backward();
                    down.backward();
                } else {
                    down.backward();
                    across.backward();
                }
                down.finish();
                across.finish();
            }
            return std::pair(across.digest_of_values(), down.digest_of_values());
        },
        patient());
    auto const alone = [&](int ranks, int task, bool as_sharded) {
        return run_ranks(
                   ranks, [&](auto& comm) { return train_column(comm, task, steps, as_sharded); }, patient())
            .front();
    };
    std::vector<std::uint64_t> by_row, by_column;
    for (int row = 0; row < rows; ++row) by_row.push_back(alone(columns, columns + row, sharded));
    for (int column = 0; column < columns; ++column) by_column.push_back(alone(rows, column, !sharded));
    for (std::size_t r = 0; r < got.size(); ++r) {
        CHECK(got[r].first == by_row[r / columns]);
        CHECK(got[r].second == by_column[r % columns]);
    }
}

TEST_CASE("one model trained on the whole and on groups by turns", "[train][group]") {
    // Two trainers share a model's replica on each rank: steps on a group change it, a broadcast makes it equal again.
    auto const equal = run_ranks(
        4,
        [](auto& comm) {
            auto const half = comm.split(comm.rank() / 2);
            tanh_mlp<float> mine(3, 5, 2, 1), ours(3, 5, 2, 1);
            data_parallel local{mine, sgd{.lr = 0.1}, half};
            data_parallel global{ours, sgd{.lr = 0.1}, comm};
            for (int s = 0; s < 3; ++s) {
                samples const batch(0, comm.rank(), s);
                local.forward(batch.batch());
                global.forward(batch.batch());
                local.backward();
                global.backward();
                if (s % 2 == 0) local.finish();
                global.finish();
                if (s % 2 != 0) local.finish();
            }
            return local.replicas_identical() && global.replicas_identical() &&
                   local.digest_of_values() != global.digest_of_values();
        },
        patient());
    for (bool const each : equal) CHECK(each);
}
