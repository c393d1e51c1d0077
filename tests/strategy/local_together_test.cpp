// What the ranks of a local_parallel do together besides meetings: they continue from values that were replaced, and throw one error.
#include <ddp/strategy/averaging.hpp>
#include <ddp/strategy/local_parallel.hpp>
#include <ddp/strategy/loose.hpp>
#include <ddp/strategy/outer_step.hpp>
#include <ddp/strategy/stale_synchronous.hpp>

#include <unistd.h>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <set>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ddp/nn/activation.hpp>
#include <ddp/nn/batch_norm.hpp>
#include <ddp/nn/linear.hpp>
#include <ddp/nn/loss.hpp>
#include <ddp/nn/sequential.hpp>
#include <ddp/optim/any_optimizer.hpp>
#include <ddp/train/state_digest.hpp>
#include <ddp/train/weights.hpp>

#include "support/catch.hpp"
#include "support/on_ranks.hpp"
#include "support/ranks.hpp"
#include "train/patience.hpp"
#include "train/scripted_model.hpp"
#include "train/tanh_mlp.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

constexpr std::size_t in = 7, hidden = 11, out = 3;

std::string weights_path() {
    return (std::filesystem::temp_directory_path() / ("ddp-together-test-" + std::to_string(::getpid()))).string();
}

struct continuation {
    std::vector<std::uint64_t> digests;  // after each step, and after synchronise()
    std::string refused;
    bool operator==(continuation const&) const = default;
};

/// Values of 77 in a trainer: loaded after `before` steps from others, or there from the start.
template <memory Kind, class Make>
continuation continue_from_77(communicator<>& comm, Make const& make, std::uint64_t before, bool loads,
                              bool synchronises) {
    task_data<double> const data(in, out, 64);
    std::size_t const rank = static_cast<std::size_t>(comm.rank());
    tanh_mlp<double, Kind> model(in, hidden, out, loads ? 1 : 77);
    local_parallel trainer{model, any_optimizer(sgd{.lr = 0.05}), comm, make(comm)};
    auto const step = [&](std::size_t number) {
        std::size_t const at = (rank * 13 + number * 5) % 50;
        trainer.step(data.batch(at, at + 1 + (rank + number) % 3));
    };
    continuation all;
    if (loads) {
        for (std::uint64_t s = 0; s < before; ++s) step(static_cast<std::size_t>(s) + 7);
        if (!trainer.between_steps())
            all.refused = thrown_by([&] { load_weights_as(trainer, weights_path(), {.strict = false}); });
        load_weights(trainer, weights_path());
    } else {
        trainer.set_completed_steps(before);
    }
    if (!trainer.between_steps()) all.refused += " and apart";
    if (synchronises) trainer.synchronise();
    for (std::size_t s = 0; s < 10; ++s) {
        step(s);
        all.digests.push_back(trainer.digest_of_values());
    }
    trainer.synchronise();
    all.digests.push_back(trainer.digest_of_values());
    return all;
}

}  // namespace

TEST_CASE("a local_parallel continues from loaded weights as a trainer that was made from them", "[strategy]") {
    run_ranks(1, [](auto& comm) {
        tanh_mlp<double> model(in, hidden, out, 77);
        save_weights(comm, model, weights_path());
    });
    auto const same = [&]<memory Kind = memory::bound, class Make>(char const* name, Make const& make) {
        for (std::uint64_t const before : {14u, 16u})  // between two meetings, and right after one
            for (bool const synchronises : {false, true}) {
                CAPTURE(name, before, synchronises);
                auto const run = [&](bool loads) {
                    return run_ranks(
                        4, [&](auto& comm) { return continue_from_77<Kind>(comm, make, before, loads, synchronises); },
                        patient());
                };
                auto const loaded = run(true), made = run(false);
                for (std::size_t r = 0; r < loaded.size(); ++r) {
                    CHECK(loaded[r].digests == made[r].digests);
                    CHECK(loaded[r].digests.back() == loaded[0].digests.back());
                    CHECK(made[r].refused == "");
                    std::string const apart = std::string("load_weights_as: under ") + name + " ranks";
                    bool const together = before == 16 && std::invoke_result_t<Make const&, communicator<>&>::agrees;
                    CHECK((loaded[r].refused.find(apart) != std::string::npos) == !together);
                    CHECK(loaded[r].refused.find("and apart") == std::string::npos);
                }
            }
    };
    same("local_sgd", [](auto&) { return local_sgd{.period = 4}; });
    same("hierarchical_averaging", [](auto& comm) {
        return hierarchical_averaging<>{.inner = comm.split(comm.rank() / 2), .inner_period = 2, .period = 8};
    });
    same("diloco", [](auto&) { return diloco{.period = 4}; });
    same.operator()<memory::copied>("diloco", [](auto&) { return diloco{.period = 4}; });
    same("slow_momentum", [](auto&) { return slow_momentum{.period = 4}; });
    same("elastic_averaging", [](auto&) { return elastic_averaging{.period = 4}; });
    same("gossip", [](auto&) { return gossip{}; });
    same("gossip", [](auto&) { return gossip{.graph = gossip_graph::ring}; });
    same("stale_synchronous", [](auto&) { return stale_synchronous{.staleness = 2}; });
    std::filesystem::remove(weights_path());
}

TEST_CASE("an error that all ranks find is every rank's, though none of them catches it before its trainer ends",
          "[strategy]") {
    int const ranks = GENERATE(3, 4);
    bool const tcp = GENERATE(false, true);
    CAPTURE(ranks, tcp);
    using training = local_parallel<scripted_model<>, any_transport>;
    local_options const first_frozen{.frozen = {"a"}};
    std::vector<std::pair<std::string, std::function<void(communicator<>&, scripted_model<>&)>>> const calls = {
        {"DDP-E205 mismatch: ranks meet after different numbers of local steps: 1 in synchronise() on rank 0, 2 on "
         "rank 1, ",
         [](auto& comm, auto& net) {
             training trainer{net, any_optimizer(sgd{}), comm, local_sgd{.period = 2}};
             trainer.step(numbers{{1}});
             if (comm.rank() == 0)
                 trainer.synchronise();
             else
                 trainer.step(numbers{{1}});
         }},
        {"DDP-E100 usage: hierarchical_averaging: inner of rank 0 is a group of 2, and ",
         [](auto& comm, auto& net) {
             communicator<> const pair = comm.split(comm.rank() / 2), alone = comm.split(comm.rank());
             training trainer{net, any_optimizer(sgd{}), comm,
                              hierarchical_averaging<>{.inner = comm.rank() == 1 ? alone : pair}};
         }},
        {"DDP-E100 usage: freeze: no parameter's name matches 'nothing'",
         [](auto& comm, auto& net) {
             training trainer{net, any_optimizer(sgd{}), comm, local_sgd{}};
             trainer.freeze("nothing");
         }},
        {"DDP-E100 usage: unfreeze: 'a' is one of local_options::frozen",
         [&](auto& comm, auto& net) {
             training trainer{net, any_optimizer(sgd{}), comm, local_sgd{}, first_frozen};
             trainer.unfreeze("*");
         }},
        {"DDP-E100 usage: set_frozen: 1 marks for 2 parameters", [](auto& comm, auto& net) {
             training trainer{net, any_optimizer(sgd{}), comm, local_sgd{}};
             trainer.set_frozen(std::vector<std::uint8_t>{1});
         }}};
    for (auto const& [begin, call] : calls)
        for (int round = 0; round < 5; ++round)
            for (std::string const& text : errors_over(
                     tcp, ranks,
                     [&](communicator<>& comm) {
                         scripted_model<> net({{"a", {2}}, {"b", {2}}});
                         call(comm, net);
                     },
                     patient())) {
                CAPTURE(begin);
                CHECK(text.substr(0, begin.size()) == begin);
            }
}

TEST_CASE("ranks that synchronise after different numbers of steps are told to join, and can", "[strategy]") {
    bool const tcp = GENERATE(false, true);
    auto const said = [&](auto const& strategy) {
        return ranks_over(
            tcp, 3,
            [&](auto& comm) {
                scripted_model<> net({{"a", {2}}});
                local_parallel trainer{net, any_optimizer(sgd{}), comm, strategy};
                for (int step = 0; step < 4 + comm.rank(); ++step) trainer.step(numbers{{1}});
                std::string text = thrown_by([&] { trainer.synchronise(); });
                while (trainer.join()) {
                }
                trainer.synchronise();
                return trainer.replicas_identical() ? text : text + " and differ";
            },
            patient());
    };
    for (auto const& texts : {said(local_sgd{.period = 4}), said(elastic_averaging{.period = 4})})
        for (std::string const& text : texts)
            CHECK(text ==
                  "DDP-E205 mismatch: ranks meet after different numbers of local steps: 4 in synchronise() on rank 0, "
                  "5 in synchronise() on rank 1, 6 in synchronise() on rank 2. A rank that has fewer batches calls "
                  "join() until it returns false, and then all call synchronise() together");
    // Loading weights makes no peace between such ranks.
    run_ranks(1, [](auto& comm) {
        scripted_model<> net({{"a", {2}}});
        save_weights(comm, net, weights_path());
    });
    for (std::string const& text : ranks_over(
             tcp, 3,
             [](auto& comm) {
                 scripted_model<> net({{"a", {2}}});
                 local_parallel trainer{net, any_optimizer(sgd{}), comm, local_sgd{.period = 4}};
                 for (int step = 0; step < 4 + comm.rank(); ++step) trainer.step(numbers{{1}});
                 std::string refused = thrown_by([&] { (void)load_weights(trainer, weights_path()); });
                 bool const stepped = comm.rank() != 0;  // since they met
                 return trainer.between_steps() == stepped ? refused + " and together" : refused;
             },
             patient()))
        CHECK(text ==
              "DDP-E205 mismatch: ranks meet after different numbers of local steps: 4 in load_weights() on rank 0, "
              "5 in load_weights() on rank 1, 6 in load_weights() on rank 2. A rank that has fewer batches calls "
              "join() until it returns false, and then all call synchronise() together");
    // Where exchanges are under way all the time, they differ before.
    auto const passing = errors_over(
        tcp, 3,
        [](auto& comm) {
            scripted_model<> net({{"a", {2}}});
            local_parallel trainer{net, any_optimizer(sgd{}), comm, stale_synchronous{}};
            for (int step = 0; step < 4 + (comm.rank() == 1 ? 1 : 0); ++step) trainer.step(numbers{{1}});
            trainer.synchronise();
        },
        patient());
    for (std::string const& text : passing) CHECK(text.find("DDP-E205 mismatch: ") == 0);
}

TEST_CASE("a digest of the state covers what each strategy keeps, and the same program twice has the same",
          "[strategy]") {
    using names = std::set<std::string>;
    auto const covered = [](names const& kept, auto const& make) {
        auto const train = [&](auto& comm) {
            task_data<double> const data(in, out, 64);
            tanh_mlp<double> model(in, hidden, out, 1);
            local_parallel trainer{model, any_optimizer(adamw{.lr = 0.01}), comm, make(comm)};
            for (std::size_t step = 0; step < 6; ++step)
                trainer.step(data.batch(step * 7 + static_cast<std::size_t>(comm.rank()) * 3, step * 7 + 10));
            std::uint64_t const whole = digest_of_state(trainer);
            names shown;
            std::string not_seen;
            auto const changed = [&](std::byte& one, std::string const& what) {
                one ^= std::byte{1};
                if (digest_of_state(trainer) == whole) not_seen += what + " ";
                one ^= std::byte{1};
            };
            trainer.for_each_state([&](state_slice const& s) {
                if (s.bytes.empty()) return;
                if (!s.per_rank) shown.insert(std::string(s.name));
                changed(s.bytes.front(), std::string(s.of) + "/" + std::string(s.name));
                changed(s.bytes.back(), std::string(s.of) + "/" + std::string(s.name));
            });
            for (auto const& p : trainer.parameters())
                if (!p.value.empty()) changed(as_mutable_bytes(p.value).back(), "values");
            if (digest_of_state(trainer) != whole) not_seen += "(not restored) ";
            trainer.synchronise();
            std::uint64_t const before = digest_of_state(trainer);
            trainer.set_completed_steps(77);
            if (digest_of_state(trainer) == before) not_seen += "steps ";
            trainer.forward(data.batch(0, 2));
            trainer.backward();
            if (thrown_by([&] { (void)digest_of_state(trainer); }).find("finish() it first") == std::string::npos)
                not_seen += "(within a step) ";
            trainer.finish();
            return std::tuple(not_seen, shown, whole);
        };
        auto const first = run_ranks(3, train, patient()), again = run_ranks(3, train, patient());
        for (std::size_t r = 0; r < first.size(); ++r) {
            CAPTURE(r);
            CHECK(std::get<0>(first[r]) == "");
            CHECK(std::get<1>(first[r]) == kept);
            CHECK(std::get<2>(first[r]) == std::get<2>(again[r]));
        }
        CHECK(std::get<2>(first[0]) != std::get<2>(first[1]));  // each rank's own state of the optimizer
    };
    covered({"meetings"}, [](auto&) { return local_sgd{.period = 4}; });
    covered({"meetings", "outer_anchor", "outer_momentum"}, [](auto&) { return diloco{.period = 2}; });
    covered({"meetings", "slow_anchor", "slow_momentum"}, [](auto&) { return slow_momentum{.period = 2}; });
    covered({"meetings", "elastic_centre"}, [](auto&) { return elastic_averaging{.period = 2}; });
    covered({"meetings"}, [](auto&) { return gossip{}; });
    covered({"meetings", "stale_base"}, [](auto&) { return stale_synchronous{.staleness = 2}; });
}

TEST_CASE("a model whose passes add over all ranks is refused", "[strategy]") {
    auto const made = [](nn::batch_statistics over) {
        return errors_of_ranks(
            2,
            [&](auto& comm) {
                nn::sequential net{nn::linear(4, 3), nn::batch_norm(3, {.statistics = over}), nn::relu(),
                                   nn::mean_squared_error()};
                net.training(false);  // as it is now does not matter
                local_parallel trainer{net, any_optimizer(sgd{}), comm, local_sgd{}};
            },
            patient());
    };
    for (std::string const& text : made(nn::batch_statistics::local)) CHECK(text == "");
    for (std::string const& text : made(nn::batch_statistics::synchronised))
        CHECK(text ==
              "DDP-E100 usage: local_parallel: passes of this model add over all ranks, which step on their own here; "
              "use nn::batch_statistics::local instead of synchronised, or a data_parallel");
}
