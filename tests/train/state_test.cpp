// What a trainer keeps besides values: listed by parameter, slot and range, to be read and written.
#include <array>
#include <cstddef>
#include <map>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <ddp/optim/parameter_groups.hpp>

#include "support/catch.hpp"
#include "support/ranks.hpp"
#include "support/training_checks.hpp"
#include "train/patience.hpp"
#include "train/scripted_model.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

template <class E>
struct slice {
    std::string of, name;
    std::vector<std::size_t> shape;
    std::size_t begin;
    std::vector<E> values;
    bool per_rank;
};

template <class Trainer>
auto slices_of(Trainer& trainer) {
    using E = typename Trainer::element;
    std::vector<slice<E>> all;
    trainer.for_each_state([&](state_slice const& s) {
        std::span<E> const values = s.as<E>();
        all.push_back({std::string(s.of),
                       std::string(s.name),
                       {s.shape.begin(), s.shape.end()},
                       s.begin,
                       {values.begin(), values.end()},
                       s.per_rank});
    });
    return all;
}

/// Elements by (parameter, slot), and how often each was shown.
template <class E>
struct whole {
    std::vector<E> values;
    std::vector<int> shown;
};
template <class E>
std::map<std::pair<std::string, std::string>, whole<E>> put_together(std::vector<std::vector<slice<E>>> const& ranks) {
    std::map<std::pair<std::string, std::string>, whole<E>> all;
    for (auto const& rank : ranks)
        for (slice<E> const& s : rank) {
            whole<E>& into = all[{s.of, s.name}];
            std::size_t count = 1;
            for (std::size_t const extent : s.shape) count *= extent;
            into.values.resize(count);
            into.shown.resize(count);
            for (std::size_t k = 0; k < s.values.size(); ++k) {
                into.values.at(s.begin + k) = s.values[k];
                ++into.shown.at(s.begin + k);
            }
        }
    return all;
}

/// The state after some steps, by rank.
template <Element E, class Opt>
std::vector<std::vector<slice<E>>> state_after_training(int ranks, Opt const& optimizer, update how,
                                                        any_buckets const& buckets, bool clipped = false) {
    return run_ranks(
        ranks,
        [&](auto& comm) {
            task_data<E> const data(45, 2, 64);
            tanh_mlp<E> model(45, 200, 2, 1);
            data_parallel trainer{
                model, optimizer, comm, options_of(how == update::sharded, clipped), automatic_allreduce{}, buckets};
            for (std::size_t step = 0; step < 3; ++step) {
                auto const [begin, end] = share(13, step, comm.rank(), comm.size());
                trainer.step(data.batch(begin, end));
            }
            return slices_of(trainer);
        },
        patient());
}

}  // namespace

TEMPLATE_TEST_CASE("with a sharded update ranks hold each element of the state once, the bits of the replicated one",
                   "[train]", float, double) {
    int const ranks = GENERATE(1, 3);
    bool const clipped = GENERATE(false, true);
    for (auto const& [name, buckets] : bucket_policies()) {
        CAPTURE(ranks, clipped, name);
        auto const sharded = state_after_training<TestType>(ranks, adam{.lr = 0.01}, update::sharded, buckets, clipped);
        auto const replicated =
            state_after_training<TestType>(ranks, adam{.lr = 0.01}, update::replicated, buckets, clipped);
        auto const together = put_together(sharded);
        REQUIRE(together.size() == 8);  // of w1, b1, w2 and b2; one parameter is empty
        bool some_are_not_zero = false;
        for (auto const& [key, one] : together) {
            CAPTURE(key.first, key.second);
            REQUIRE((key.second == "exp_avg" || key.second == "exp_avg_sq"));
            REQUIRE(one.shown == std::vector<int>(one.shown.size(), 1));
            for (TestType const x : one.values) some_are_not_zero = some_are_not_zero || x != 0;
        }
        REQUIRE(some_are_not_zero);
        for (auto const& rank : replicated) {
            auto const here = put_together<TestType>({rank});
            REQUIRE(here.size() == together.size());
            for (auto const& [key, one] : here) {
                REQUIRE(one.shown == std::vector<int>(one.shown.size(), 1));
                REQUIRE(one.values == together.at(key).values);
            }
        }
    }
}

TEST_CASE("by itself an update is sharded where ranks share memory, and replicated where they do not", "[train]") {
    for (bool const shares : {true, false}) {
        auto const all = put_together(run_ranks(
            3,
            [&](auto& comm) {
                scripted_model<> net({{"a", {300}}});
                data_parallel trainer{net, sgd{.lr = 1, .momentum = 0.5}, comm,
                                      training_options{.share_memory = shares}};
                trainer.step(numbers{{1}});
                return slices_of(trainer);
            },
            patient()));
        CAPTURE(shares);
        REQUIRE(all.at({"a", "momentum"}).shown == std::vector<int>(300, shares ? 1 : 3));
        REQUIRE(all.at({"a", "momentum"}).values == std::vector<double>(300, 1.0));
    }
}

TEST_CASE("slots are shown by the names that the optimizer of the parameter's group gives them", "[train]") {
    parameter_groups<any_optimizer> const groups{adam{}, {{"b?", sgd{.momentum = 0.9}}, {"w2", sgd{.lr = 0.1}}}};
    auto const all = put_together(state_after_training<float>(2, groups, update::sharded, single_bucket{}));
    std::vector<std::pair<std::string, std::string>> names;
    for (auto const& [key, one] : all) {
        names.push_back(key);
        REQUIRE(one.shown == std::vector<int>(one.shown.size(), 1));
    }
    REQUIRE(names == std::vector<std::pair<std::string, std::string>>{
                         {"b1", "momentum"}, {"b2", "momentum"}, {"w1", "exp_avg"}, {"w1", "exp_avg_sq"}});
}

namespace {
/// Two slots, and no word about them; or too many.
template <bool Names>
struct two_slots {
    [[nodiscard]] std::size_t slot_count() const { return 2; }
    [[nodiscard]] double learning_rate() const { return 0.1; }
    [[nodiscard]] std::uint64_t hash() const { return 1; }
    [[nodiscard]] std::array<char const*, 3> slot_names() const
        requires Names
    {
        return {"a", "b", "c"};
    }
    template <class E>
    void step(step_info const&, std::span<E const> gradient, std::span<E>, slot_spans<E> slots) const {
        for (std::size_t i = 0; i < gradient.size(); ++i) slots[1][i] = gradient[i];
    }
};
}  // namespace

TEST_CASE("slots without names are numbered, and a wrong number of names is refused", "[train]") {
    auto const all = run_ranks(1, [](auto& comm) {
        scripted_model<> net({{"a", {3}}, {"none", {0}}, {"m", {2, 2}}});
        data_parallel trainer{net, two_slots<false>{}, comm};
        trainer.step(numbers{{2}});
        return slices_of(trainer);
    })[0];
    REQUIRE(all.size() == 4);
    std::vector<std::tuple<std::string, std::string, std::vector<std::size_t>, std::size_t, std::vector<double>, bool>>
        shown;
    for (auto const& s : all) shown.emplace_back(s.of, s.name, s.shape, s.begin, s.values, s.per_rank);
    using list = std::vector<std::size_t>;
    REQUIRE(shown[0] == std::tuple("a", "slot 0", list{3}, 0, std::vector<double>(3), false));
    REQUIRE(shown[1] == std::tuple("a", "slot 1", list{3}, 0, std::vector<double>(3, 2.0), false));
    REQUIRE(shown[2] == std::tuple("m", "slot 0", list{2, 2}, 0, std::vector<double>(4), false));
    REQUIRE(shown[3] == std::tuple("m", "slot 1", list{2, 2}, 0, std::vector<double>(4, 6.0), false));
    auto const errors = errors_of_ranks(1, [](auto& comm) {
        scripted_model<> net({{"a", {3}}});
        data_parallel trainer{net, two_slots<true>{}, comm};
    });
    REQUIRE(errors[0].find("slot_names() must return one name per slot") != std::string::npos);
    struct by_group : two_slots<false> {  // of one group's slots no more than there are
        [[nodiscard]] std::vector<std::string> slot_names(std::size_t) const { return {"a", "b", "c"}; }
    };
    auto const of_a_group = errors_of_ranks(1, [](auto& comm) {
        scripted_model<> net({{"a", {3}}});
        data_parallel trainer{net, by_group{}, comm};
    });
    REQUIRE(of_a_group[0].find("slot_names(group) must return no more names than slot_count()") != std::string::npos);
}

TEST_CASE("a trainer that is given another's values and state goes on as the other does", "[train]") {
    bool const sharded = GENERATE(false, true);
    for (bool const right : run_ranks(
             3,
             [&](auto& comm) {
                 task_data<float> const data(7, 3, 64);
                 tanh_mlp<float> one(7, 24, 3, 1), two(7, 24, 3, 2);
                 any_optimizer const optimizer = sgd{.lr = 0.1, .momentum = 0.9};
                 any_buckets const small = size_capped_buckets{.cap_bytes = 256, .first_bytes = 64};
                 data_parallel first{one, optimizer, comm, options_of(sharded, false), any_allreduce{}, small};
                 data_parallel second{two, optimizer, comm, options_of(sharded, false), any_allreduce{}, small};
                 auto const r = static_cast<std::size_t>(comm.rank());
                 auto const step = [&](auto& trainer) { trainer.step(data.batch(5 * r, 5 * r + 4)); };
                 for (int i = 0; i < 3; ++i) step(first);
                 for (std::size_t i = 0; i < 5; ++i)
                     std::copy_n(one.value(i).begin(), one.value(i).size(), two.value(i).begin());
                 auto const kept = slices_of(first);
                 std::size_t next = 0;
                 second.for_each_state([&](state_slice const& s) {
                     auto const& from = kept.at(next++);
                     if (from.of != s.of || from.name != s.name || from.begin != s.begin)
                         throw std::logic_error("order");
                     std::copy(from.values.begin(), from.values.end(), s.as<float>().begin());
                 });
                 for (int i = 0; i < 3; ++i) {
                     step(first);
                     step(second);
                 }
                 return first.digest_of_values() == second.digest_of_values();
             },
             patient()))
        REQUIRE(right);
}

TEST_CASE("state is not shown within a step, nor as elements of another type", "[train]") {
    auto const said = run_ranks(1, [](auto& comm) {
        scripted_model<> net({{"a", {3}}});
        data_parallel trainer{net, sgd{.momentum = 0.5}, comm};
        std::string const type =
            thrown_by([&] { trainer.for_each_state([](state_slice const& s) { (void)s.as<float>(); }); });
        trainer.forward(numbers{{1}});
        trainer.backward();
        std::string const within = thrown_by([&] { trainer.for_each_state([](state_slice const&) {}); });
        trainer.finish();
        return type + within;
    })[0];
    REQUIRE(said.find("state_slice::as<E>: the elements are of another type") != std::string::npos);
    REQUIRE(said.find("a step is under way: finish() it before its state is looked at") != std::string::npos);
}
