// Weights that are kept in a file and brought back: the same bits, on all ranks or on none.
#include <ddp/train/weights.hpp>

#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ddp/optim/sgd.hpp>
#include <ddp/train/data_parallel.hpp>

#include "data/files.hpp"
#include "support/catch.hpp"
#include "support/on_ranks.hpp"
#include "support/ranks.hpp"
#include "support/sanitizers.hpp"
#include "train/patience.hpp"
#include "train/scripted_model.hpp"
#include "train/tanh_mlp.hpp"

using namespace ddp;
using namespace ddp::test;
using ::test::catch_error;
using ::test::scratch_directory;

namespace {

std::string in(scratch_directory const& scratch, char const* name = "kept.safetensors") {
    return (scratch.path() / name).string();
}
std::vector<char> content_of(std::string const& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}
bool contains(std::string const& text, std::string const& part) {
    return text.find(part) != std::string::npos;
}
/// What all of them are, if they are one.
std::string only(std::vector<std::string> const& texts) {
    for (std::string const& one : texts) REQUIRE(one == texts.front());
    return texts.front();
}

using model = scripted_model<>;
std::vector<model::part> const parts = {{"a", {2, 3}}, {"b", {4}}, {"none", {0}}};

/// A model with a counter and running statistics, and what it was told.
struct with_buffers : model {
    using model::model;
    std::int64_t batches = 0;
    std::vector<float> mean = std::vector<float>(3);
    std::string throws;

    std::vector<model_buffer> buffers() {
        if (!throws.empty()) throw std::runtime_error(throws);
        return {{"batches", element_type::i64, {}, bytes_of(batches)},
                {"mean", element_type::f32, {3}, as_mutable_bytes(std::span(mean))}};
    }
};

/// Trains, keeps the weights, goes on; brings them back, and goes the same way again.
template <Element E, memory Kind>
void require_same_way_again(int ranks, bool tcp) {
    scratch_directory const scratch;
    auto const got = ranks_over(
        tcp, ranks,
        [&](auto& comm) {
            task_data<E> const data(7, 3, 64);
            tanh_mlp<E, Kind> net(7, 24, 3, 5);
            data_parallel trainer{net, sgd{.lr = 0.1}, comm};
            auto const train = [&] {
                for (std::size_t step = 0; step < 3; ++step) {
                    std::size_t const from = 4 * step + static_cast<std::size_t>(comm.rank());
                    trainer.step(data.batch(from, from + 3));
                }
                return trainer.digest_of_values();
            };
            std::uint64_t const kept = train();
            save_weights(trainer, in(scratch), {{"task", "seven to three"}});
            std::uint64_t const beyond = train();
            string_map const said = load_weights(trainer, in(scratch));
            bool const back = trainer.digest_of_values() == kept && trainer.replicas_identical();
            return back && beyond != kept && train() == beyond && said.at("task") == "seven to three" &&
                   said.at("ddp.steps") == "3" && !said.at("ddp.version").empty();
        },
        patient());
    for (bool const good : got) REQUIRE(good);
    REQUIRE(std::distance(std::filesystem::directory_iterator(scratch.path()), {}) == 1);
}

}  // namespace

TEST_CASE("kept weights come back to the last bit, and training goes the same way again", "[train]") {
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    CAPTURE(ranks, tcp);
    require_same_way_again<float, memory::releasing>(ranks, tcp);
    if (ranks != 3 && sanitizers_leave_out("kept weights in other memory", ranks)) return;
    require_same_way_again<double, memory::bound>(ranks, tcp);
    require_same_way_again<float, memory::copied>(ranks, tcp);
}

TEST_CASE("buffers are kept with the parameters, and rank 0's go everywhere", "[train]") {
    scratch_directory const scratch;
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    CAPTURE(ranks, tcp);
    auto const got = ranks_over(
        tcp, ranks,
        [&](auto& comm) {
            with_buffers net(parts, comm.rank() + 1.0);
            net.batches = 10 + comm.rank();
            net.mean = {0.5f, 1.5f, static_cast<float>(comm.rank())};
            save_weights(comm, net, in(scratch));
            net.batches = 0;
            net.mean.assign(3, 0);
            for (double& v : net.value(1)) v = -1;
            (void)load_weights(comm, net, in(scratch));
            bool const right = net.batches == 10 && net.mean == std::vector<float>{0.5f, 1.5f, 0} &&
                               net.value(0)[5] == 1 && net.value(1)[3] == 1 &&
                               net.steps_seen == std::vector<int>{1, 1, 1};

            // In training, where each rank may have its own.
            training_options const own{.buffers = buffers::left_alone};
            auto trainer = make_trainer(net, comm, own);
            trainer.step(numbers{{1}});
            double const value = net.value(0)[5];
            net.batches = 20 + comm.rank(), net.mean[2] = static_cast<float>(comm.rank() + 7);
            save_weights(trainer, in(scratch, "trained"));
            trainer.step(numbers{{1}});
            net.batches = -comm.rank(), net.mean.assign(3, static_cast<float>(comm.rank()));
            (void)load_weights(trainer, in(scratch, "trained"));
            return right && net.batches == 20 && net.mean == std::vector<float>{0.5f, 1.5f, 7} &&
                   net.value(0)[5] == value && trainer.replicas_identical();
        },
        patient());
    for (bool const good : got) REQUIRE(good);

    with_buffers alone(parts);
    REQUIRE_FALSE(load_weights(alone, in(scratch)).contains("ddp.steps"));
    REQUIRE(alone.batches == 10);
    safetensors_file const file(in(scratch));
    REQUIRE(file.tensors().size() == 5);
    REQUIRE(file.tensors()[0].name == "batches");
    REQUIRE(file.tensors()[0].type == element_type::i64);
}

TEST_CASE("memory that is not row-major is kept as what it means", "[train]") {
    scratch_directory const scratch;
    model columns({{"a", {2, 3}, {1, 2}}});  // column by column
    for (std::size_t i = 0; i < 6; ++i) columns.value(0)[i] = static_cast<double>(i);
    save_weights(columns, in(scratch));
    model rows({{"a", {2, 3}}});
    (void)load_weights(rows, in(scratch));
    REQUIRE(std::vector(rows.value(0).begin(), rows.value(0).end()) == std::vector<double>{0, 2, 4, 1, 3, 5});
    model other({{"a", {2, 3}, {1, 2}}});
    (void)load_weights(other, in(scratch));
    REQUIRE(std::vector(other.value(0).begin(), other.value(0).end()) == std::vector<double>{0, 1, 2, 3, 4, 5});
    model astray({{"a", {2, 3}, {3, 2}}});
    REQUIRE(catch_error([&] { save_weights(astray, in(scratch)); }).says("strides of 'a' point outside its memory"));
    struct short_model : model {
        using model::model;
        std::vector<parameter<double>> parameters() {
            auto all = model::parameters();
            all[0].value = all[0].value.first(5);
            return all;
        }
    } short_of_one({{"a", {2, 3}}});
    REQUIRE(catch_error([&] {
                save_weights(short_of_one, in(scratch));
            }).says("the model lists 'a' as F64 [2 x 3], but with 40 bytes of memory"));
    model crossed({{"a", {2, 3}, {1, 1}}});
    REQUIRE(catch_error([&] {
                save_weights(crossed, in(scratch));
            }).says("the strides of 'a' visit an element twice: its memory must be dense"));
}

TEST_CASE("large tensors come back whole, straight or rearranged", "[train]") {
    scratch_directory const scratch;
    model large({{"a", {300'001}}, {"b", {500, 600}, {1, 500}}, {"c", {1}}});
    for (std::size_t i = 0; i < 2; ++i)
        for (std::size_t k = 0; k < large.value(i).size(); ++k) large.value(i)[k] = static_cast<double>(k + i);
    save_weights(large, in(scratch));
    model again({{"a", {300'001}}, {"b", {500, 600}, {1, 500}}, {"c", {1}}}, 5);
    (void)load_weights(again, in(scratch));
    for (std::size_t i = 0; i < 3; ++i)
        REQUIRE(std::equal(large.value(i).begin(), large.value(i).end(), again.value(i).begin()));
    REQUIRE(again.steps_seen == std::vector<int>{1, 1, 1});
}

TEST_CASE("a file that is overwritten between the two passes is noticed", "[train]") {
    scratch_directory const scratch;
    model one(parts, 1), two(parts, 2);
    save_weights(one, in(scratch));
    save_weights(two, in(scratch, "two"));
    model net(parts);
    ddp::detail::weights_file const file(net, in(scratch), {});
    std::uint64_t const before = file.read(false);
    std::vector<char> const other = content_of(in(scratch, "two"));
    std::ofstream(in(scratch), std::ios::binary).write(other.data(), static_cast<long>(other.size()));
    auto got = catch_error([&] { (void)ddp::detail::put_in_place(net, file, before); });
    REQUIRE(got.code == errc::file);
    REQUIRE(got.says("was overwritten while it was read; what the model holds now is a mixture"));
    std::filesystem::resize_file(in(scratch), 10);
    got = catch_error([&] { (void)ddp::detail::put_in_place(net, file, before); });
    REQUIRE(got.says("became shorter while it was read; what the model holds now is a mixture"));
}

TEST_CASE("a file of another model: all differences in one error, the same on every rank, and nothing has changed",
          "[train]") {
    scratch_directory const scratch;
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    CAPTURE(ranks, tcp);
    model other({{"a", {3, 2}}, {"c", {5}}, {"none", {0}}}, 7);
    save_weights(other, in(scratch));
    auto const errors = ranks_over(
        tcp, ranks,
        [&](auto& comm) {
            model net(parts, 2);
            std::string text = thrown_by([&] { (void)load_weights(comm, net, in(scratch)); });
            barrier(comm);  // it lives
            for (std::size_t i : {0u, 1u})
                for (double const v : net.value(i))
                    if (v != 2) text += " changed";
            return text;
        },
        patient());
    REQUIRE(only(errors) == "DDP-E302 format: " + in(scratch) +
                                ": holds the weights of another model:\n"
                                "  tensor 'a': F64 [3 x 2] in the file, F64 [2 x 3] in the model\n"
                                "  tensor 'c': F64 [5] in the file, not in the model\n"
                                "  tensor 'b': not in the file, F64 [4] in the model");
}

TEST_CASE("a file of other element types, or of very many other tensors, is refused with what differs", "[train]") {
    scratch_directory const scratch;
    tanh_mlp<float> floats(2, 2, 2, 1);
    tanh_mlp<double> doubles(2, 2, 2, 1);
    save_weights(floats, in(scratch));
    REQUIRE(
        catch_error([&] { (void)load_weights(doubles, in(scratch)); }).says("'b1': F32 [2] in the file, F64 [2] in"));

    std::vector<model::part> many;
    for (int i = 0; i < 1005; ++i) many.push_back({"p" + std::to_string(i), {1}});
    model large(many);
    auto const got =
        catch_error([&] { (void)load_weights(large, in(scratch)); });  // 5 in the file only, 1,005 in the model only
    REQUIRE(got.says("\n  and 10 more"));
    REQUIRE(std::count(got.text.begin(), got.text.end(), '\n') == 1001);
}

TEST_CASE("a file of other names, types or parts is loaded as far as the options say, and what differs is listed",
          "[train]") {
    scratch_directory const scratch;
    using names = std::vector<std::string>;
    auto const all_of = [](auto& net, std::size_t i) {
        return std::vector<double>(net.value(i).begin(), net.value(i).end());
    };
    model source({{"module.a", {2, 3}}, {"module.b", {4}}, {"module.head", {2}}, {"other", {1}}});
    for (std::size_t i = 0; i < 4; ++i)
        for (std::size_t k = 0; k < source.value(i).size(); ++k)
            source.value(i)[k] = static_cast<double>(10 * i + k) + 0.1;
    save_weights(source, in(scratch), {{"of", "module"}});
    tanh_mlp<float> floats(3, 5, 2, 1);
    save_weights(floats, in(scratch, "floats"));

    // All ranks load the part that fits, into memory that is not row-major; the rest stays.
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    CAPTURE(ranks, tcp);
    auto const reports = ranks_over(
        tcp, ranks,
        [&](auto& comm) {
            model net({{"net.a", {2, 3}, {1, 2}}, {"net.b", {4}}, {"net.c", {1}}, {"head", {2}}}, 7);
            load_report const got = load_weights_as(
                comm, net, in(scratch), {.strict = false, .file_prefix = "module.", .model_prefix = "net."});
            bool const right = got.missing == names{"head", "net.c"} &&
                               got.unexpected == names{"module.head", "other"} && got.converted.empty() &&
                               got.metadata.at("of") == "module" &&
                               all_of(net, 0) == std::vector{0.1, 3.1, 1.1, 4.1, 2.1, 5.1} &&
                               all_of(net, 1) == std::vector{10.1, 11.1, 12.1, 13.1} &&
                               all_of(net, 2) == std::vector{7.0} && all_of(net, 3) == std::vector{7.0, 7.0};
            std::string const strict = thrown_by([&] {
                (void)load_weights_as(comm, net, in(scratch), {.file_prefix = "module.", .model_prefix = "net."});
            });
            std::string const apart = thrown_by([&] {
                (void)load_weights_as(comm, net, in(scratch),
                                      {.strict = false,
                                       .file_prefix = comm.rank() == 1 ? "module.h" : "module.",
                                       .model_prefix = comm.rank() == 1 ? "h" : "net."});
            });
            // float into double, on every rank to the bit
            tanh_mlp<double> doubles(3, 5, 2, 3 + static_cast<std::uint64_t>(comm.rank()));
            load_report const cast = load_weights_as(comm, doubles, in(scratch, "floats"), {.cast = true});
            bool same = cast.converted == names{"b1", "b2", "none", "w1", "w2"};
            for (std::size_t i = 0; i < 5; ++i)
                same = same && std::ranges::equal(doubles.value(i), floats.value(i),
                                                  [](double a, float b) { return a == static_cast<double>(b); });
            return std::pair(right && same, strict + "\n" + apart);
        },
        patient());
    for (auto const& [right, text] : reports) {
        CHECK(right);
        CHECK(text == reports.front().second);
        CHECK(contains(text, "tensor 'other': F64 [1] in the file, not in the model\n"));
        CHECK(contains(text, "tensor 'net.c': not in the file, F64 [1] in the model\n"));
        CHECK(contains(text, "rank 1: " + in(scratch) +
                                 ": its values or metadata differ from those in the file that rank 0 read") ==
              (ranks > 1));
    }
}

TEST_CASE("what fits no tensor of the model, or no element, is refused before anything changes", "[train]") {
    scratch_directory const scratch;
    using names = std::vector<std::string>;
    model source({{"module.a", {2, 3}}, {"module.b", {4}}, {"module.head", {2}}, {"other", {1}}});
    save_weights(source, in(scratch));
    model wrong({{"a", {3, 2}}, {"b", {4}}}, 2);
    load_options const partly{.strict = false, .file_prefix = "module."};
    auto got = catch_error([&] { (void)load_weights_as(wrong, in(scratch), partly); });
    CHECK(got.says("tensor 'module.a': F64 [2 x 3] in the file, F64 [3 x 2] in the model"));
    CHECK(!got.says("'b'"));
    CHECK(std::vector(wrong.value(1).begin(), wrong.value(1).end()) == std::vector{2.0, 2.0, 2.0, 2.0});
    got = catch_error([&] { (void)load_weights_as(wrong, in(scratch), {.strict = false, .file_prefix = "modul."}); });
    CHECK(got.says("holds no tensor of the model. It has 'module."));
    CHECK(got.says("the model 'a'; look at file_prefix and model_prefix"));

    // float into double and back: every float comes back to the bit; what no float holds is refused before anything changes
    tanh_mlp<float> floats(3, 5, 2, 1), again(3, 5, 2, 2);
    tanh_mlp<double> doubles(3, 5, 2, 3);
    save_weights(floats, in(scratch));
    CHECK(load_weights_as(doubles, in(scratch), {.cast = true}).converted == names{"b1", "b2", "none", "w1", "w2"});
    for (std::size_t i = 0; i < 5; ++i)
        for (std::size_t k = 0; k < doubles.parameters()[i].value.size(); ++k)
            CHECK(doubles.parameters()[i].value[k] == static_cast<double>(floats.parameters()[i].value[k]));
    doubles.parameters()[0].value[0] = 0.1;
    save_weights(doubles, in(scratch));
    (void)load_weights_as(again, in(scratch), {.cast = true});
    CHECK(again.parameters()[0].value[0] == 0.1f);
    CHECK(again.parameters()[3].value[4] == floats.parameters()[3].value[4]);
    CHECK(catch_error([&] {
              (void)load_weights_as(again, in(scratch), {});
          }).says("F64 [5 x 3] in the file, F32 [5 x 3]"));
    doubles.parameters()[3].value[4] = -1e300;
    doubles.parameters()[0].value[0] = 0.5;
    save_weights(doubles, in(scratch));
    got = catch_error([&] { (void)load_weights_as(again, in(scratch), {.cast = true}); });
    CHECK(got.code == errc::format);
    CHECK(got.says("tensor 'w2': element 4 of its 10 is too large for a float"));
    CHECK(again.parameters()[0].value[0] == 0.1f);
}

TEST_CASE("a rank without the file, or with another, is named on every rank, and nobody's model has changed",
          "[train]") {
    scratch_directory const scratch;
    model good(parts, 1), another(parts, 3);
    save_weights(good, in(scratch, "good"));
    save_weights(good, in(scratch, "remark"), {{"colour", "red"}});
    save_weights(another, in(scratch, "another"));
    std::vector<char> const whole = content_of(in(scratch, "good"));
    std::ofstream(in(scratch, "short"), std::ios::binary).write(whole.data(), static_cast<long>(whole.size()) - 1);

    auto const [ranks, tcp] = GENERATE(ways_to_run());
    CAPTURE(ranks, tcp);
    // One error of all ranks, of which one or two try another file than the others' "good".
    auto const error_with = [&, of = ranks, over = tcp](std::vector<std::pair<int, std::string>> const& others) {
        return only(ranks_over(
            over, of,
            [&](auto& comm) {
                model net(parts, 2);
                std::string name = "good";
                for (auto const& [rank, other] : others)
                    if (rank == comm.rank()) name = other;
                std::string text = thrown_by([&] { (void)load_weights(comm, net, in(scratch, name.c_str())); });
                if (!text.empty() && (net.value(0)[0] != 2 || !net.steps_seen.empty())) text += " changed";
                std::string const then = thrown_by([&] { (void)load_weights(comm, net, in(scratch, "good")); });
                return text + then + (net.value(0)[0] == 1 ? "" : " not loaded");
            },
            patient()));
    };
    std::vector<std::pair<int, std::string>> nobody_has_it;
    for (int rank = 0; rank < ranks; ++rank) nobody_has_it.emplace_back(rank, "no");
    std::string const no = in(scratch, "no") + ": cannot be opened: No such file or directory";
    REQUIRE(error_with({}) == "");
    REQUIRE(error_with(nobody_has_it) == "DDP-E301 file: " + no);
    if (ranks == 1) {
        REQUIRE(contains(error_with({{0, "short"}}), "DDP-E302 format: " + in(scratch, "short") + ": is truncated"));
        return;
    }
    int const last = ranks - 1;
    REQUIRE(error_with({{last, "no"}}) == "DDP-E301 file: rank " + std::to_string(last) + ": " + no);
    REQUIRE(error_with({{0, "no"}}) == "DDP-E301 file: rank 0: " + no);
    std::string const two = error_with({{last - 1, "short"}, {last, "no"}});
    CAPTURE(two);
    REQUIRE(contains(
        two, "DDP-E302 format: rank " + std::to_string(last - 1) + ": " + in(scratch, "short") + ": is truncated"));
    REQUIRE(contains(two, "(something went wrong on other ranks as well: " + std::to_string(last) + ")"));
    REQUIRE(error_with({{last, "another"}}) ==
            "DDP-E302 format: rank " + std::to_string(last) + ": " + in(scratch, "another") +
                ": its values or metadata differ from those in the file that rank 0 read");
    REQUIRE(contains(error_with({{1, "remark"}}), "rank 1: " + in(scratch, "remark")));
    REQUIRE(contains(error_with({{0, "another"}}), "rank 1: " + in(scratch, "good")));
}

TEST_CASE("what cannot be saved is the same error on every rank, the old file stands, and training goes on",
          "[train]") {
    scratch_directory const scratch;
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    CAPTURE(ranks, tcp);
    std::ofstream(in(scratch)) << "old";
    struct rlimit before{};
    REQUIRE(::getrlimit(RLIMIT_FSIZE, &before) == 0);
    struct rlimit const small{100, before.rlim_max};
    REQUIRE(::setrlimit(RLIMIT_FSIZE, &small) == 0);
    auto const texts = ranks_over(
        tcp, ranks,
        [&](auto& comm) {
            model net(parts, 2);
            auto trainer = make_trainer(net, comm);
            std::string const text = thrown_by([&] { save_weights(trainer, in(scratch)); }) + "\n" +
                                     thrown_by([&] { save_weights(trainer, in(scratch, "nowhere/kept")); });
            trainer.step(numbers{{1}});
            return text + (trainer.replicas_identical() && trainer.completed_steps() == 1 ? "" : " and then");
        },
        patient());
    ::setrlimit(RLIMIT_FSIZE, &before);
    std::string const begin = std::string("DDP-E301 file: ") + (ranks == 1 ? "" : "rank 0: ");
    REQUIRE(only(texts) == begin + in(scratch) + ": cannot be written: File too large\n" + begin +
                               in(scratch, "nowhere/kept") + ": cannot be created: No such file or directory");
    REQUIRE(content_of(in(scratch)) == std::vector<char>{'o', 'l', 'd'});
    REQUIRE(std::distance(std::filesystem::directory_iterator(scratch.path()), {}) == 1);
}

TEST_CASE("a model whose names are not unique is refused on every rank", "[train]") {
    scratch_directory const scratch;
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    CAPTURE(ranks, tcp);
    auto const texts = ranks_over(
        tcp, ranks,
        [&](auto& comm) {
            model net({{"a", {1}}, {"a", {2}}});
            return thrown_by([&] { save_weights(comm, net, in(scratch)); });
        },
        patient());
    REQUIRE(contains(only(texts),
                     "DDP-E100 usage: " + std::string(ranks == 1 ? "" : "rank 0: ") + "the model lists 'a' twice"));
    REQUIRE(std::filesystem::is_empty(scratch.path()));
}

TEST_CASE("within a step nothing is saved or loaded", "[train]") {
    scratch_directory const scratch;
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    CAPTURE(ranks, tcp);
    auto const texts = ranks_over(
        tcp, ranks,
        [&](auto& comm) {
            model net(parts, 2);
            auto trainer = make_trainer(net, comm);
            (void)trainer.forward(numbers{{1}});
            trainer.backward();
            std::string const text = thrown_by([&] { save_weights(trainer, in(scratch)); });
            std::string const other = thrown_by([&] { (void)load_weights(trainer, in(scratch)); });
            trainer.finish();
            save_weights(trainer, in(scratch));
            return text == other ? text : text + other;
        },
        patient());
    REQUIRE(contains(only(texts), "DDP-E100 usage: a step is under way: weights are saved and loaded between steps"));
    REQUIRE(std::filesystem::exists(in(scratch)));
}

TEST_CASE("an error that every rank throws is every rank's, though none of them catches it before its trainer ends",
          "[train]") {
    scratch_directory const scratch;
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    bool const shared = GENERATE(true, false);
    CAPTURE(ranks, tcp, shared);
    using training = data_parallel<model, any_transport>;
    std::string const missing = in(scratch) + "/missing";
    std::vector<std::pair<std::string, std::function<void(training&, communicator<>&)>>> const calls = {
        {"E301", [&](auto& trainer, auto&) { (void)load_weights(trainer, missing); }},
        {"E301", [&](auto& trainer, auto&) { save_weights(trainer, missing + "/there"); }},
        {"E100", [](auto& trainer, auto& comm) { trainer.set_rate_factor(1.0 + comm.rank()); }},
        {"E100", [](auto& trainer, auto& comm) { trainer.freeze(comm.rank() == 0 ? "a" : "b"); }},
        {"E100 usage: freeze: no parameter's name matches", [](auto& trainer, auto&) { trainer.freeze("nothing*"); }},
        {"E100 usage: set_frozen: 0 marks", [](auto& trainer, auto&) { trainer.set_frozen({}); }},
        {"E104", [](auto& trainer, auto&) { trainer.step(numbers{}); }},
        {"E105", [](auto& trainer, auto&) { trainer.step(numbers{{std::numeric_limits<double>::infinity()}}); }}};
    for (auto const& [code, call] : calls) {
        if (ranks == 1 && code == "E100") continue;
        for (int round = 0; round < 5; ++round)
            for (std::string const& text : errors_over(
                     tcp, ranks,
                     [&](communicator<>& comm) {
                         model net(parts);
                         training trainer =
                             make_trainer(net, comm, {.nonfinite = nonfinite::stop, .share_memory = shared});
                         trainer.step(numbers{{1}});
                         call(trainer, comm);
                     },
                     patient())) {
                CAPTURE(text);
                CHECK(text.find("DDP-" + code) == 0);
            }
    }
}

TEST_CASE("what the model throws while it is saved or loaded comes back as itself, and the others are told",
          "[train]") {
    scratch_directory const scratch;
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    for (bool const saves : {true, false}) {
        CAPTURE(ranks, tcp, saves);
        with_buffers sound(parts);
        save_weights(sound, in(scratch));
        auto const texts = errors_over(
            tcp, ranks,
            [&](auto& comm) {
                with_buffers net(parts);
                if (comm.rank() == 0) net.throws = "no statistics today";
                if (saves)
                    save_weights(comm, net, in(scratch));
                else
                    (void)load_weights(comm, net, in(scratch));
            },
            patient());
        REQUIRE(texts[0] == "no statistics today");
        for (std::string const& text : std::span(texts).subspan(1)) {
            CAPTURE(text);
            REQUIRE(text.starts_with("DDP-E206"));
            REQUIRE(contains(text, "rank 0"));
            REQUIRE(contains(text, "no statistics today"));
        }
    }
}

namespace {
struct sees_last_bucket {
    std::atomic<int>* reduced;
    void on(bucket_reduced const& event) const {
        if (event.bucket == 1) ++*reduced;
    }
};
}  // namespace

TEST_CASE("torn values are never saved", "[train]") {
    scratch_directory const scratch;
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    CAPTURE(ranks, tcp);
    std::atomic<int> reduced = 0;  // of all ranks, in both steps
    auto const texts = errors_over(
        tcp, ranks,
        [&, of = ranks](auto& comm) {
            scripted_model<true, true> net({{"a", {30}}, {"b", {20}}});
            data_parallel trainer{
                net, sgd{}, comm, {}, automatic_allreduce{}, per_parameter_buckets{}, sees_last_bucket{&reduced}};
            trainer.step(numbers{{1}});
            net.leaves_out = [&](std::size_t i) -> bool {
                if (i != 0) return false;
                for (auto const until = monotonic_clock::now() + std::chrono::seconds(20);
                     of > 1 && reduced < 2 * of && monotonic_clock::now() < until;)
                    std::this_thread::sleep_for(std::chrono::microseconds(50));
                throw std::runtime_error("half-way");
            };
            (void)thrown_by([&] { trainer.step(numbers{{1}}); });
            std::string const torn = trainer.torn() ? "torn: " : "whole: ";
            throw std::runtime_error(torn + thrown_by([&] { save_weights(trainer, in(scratch)); }));
        },
        patient());
    REQUIRE(contains(only(texts), "torn: DDP-E206"));
    REQUIRE(std::filesystem::is_empty(scratch.path()));
}
