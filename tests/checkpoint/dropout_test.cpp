// A network that draws, and whose steps are made of parts, goes on as if it had not been interrupted.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ddp/checkpoint/checkpoints.hpp>
#include <ddp/data/batch.hpp>
#include <ddp/data/prefetch_loader.hpp>
#include <ddp/data/sampler.hpp>
#include <ddp/exchange/narrow.hpp>
#include <ddp/nn/nn.hpp>
#include <ddp/optim/adam.hpp>
#include <ddp/optim/any_optimizer.hpp>
#include <ddp/optim/lamb.hpp>
#include <ddp/optim/parameter_groups.hpp>
#include <ddp/optim/rmsprop.hpp>
#include <ddp/train/data_parallel.hpp>
#include <ddp/train/weights_file.hpp>

#include "checkpoint/training.hpp"
#include "data/files.hpp"
#include "support/catch.hpp"
#include "support/on_ranks.hpp"
#include "support/thrown_by.hpp"
#include "train/patience.hpp"
#include "train/tanh_mlp.hpp"

using namespace ddp;

namespace {

/// The digest at the end of steps [first, last); `kept`: resumed before, saved after.
template <class Comm>
std::uint64_t train(Comm& comm, std::size_t first, std::size_t last, buffers policy, checkpoints* kept,
                    training_options options = {}, any_optimizer const& by = adamw{.lr = 0.01}) {
    ddp::test::task_data<float> const data(7, 3, 64);
    nn::batch_norm whole(24, {.statistics = nn::batch_statistics::synchronised});
    nn::sequential model{nn::dropout(0.1), nn::linear(7, 24), std::move(whole),  nn::relu(),
                         nn::dropout(0.5), nn::linear(24, 3), nn::batch_norm(3), nn::mean_squared_error()};
    model.initialize(9);
    options.buffers = policy;
    data_parallel trainer{model, by, comm, options};
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
    struct recipe {
        training_options options;
        any_optimizer by;
    };
    clip_by_global_norm const clip{.max_norm = 0.5};
    std::vector<recipe> const recipes = {
        {{}, adamw{.lr = 0.01}},
        {{.update = update::sharded, .clip = clip, .share_memory = false}, lamb{.lr = 0.01, .weight_decay = 0.1}},
        {{.update = update::replicated, .share_memory = false}, rmsprop{.lr = 0.01, .momentum = 0.5}},
        {{.update = update::sharded, .clip = clip}, sgd{.lr = 0.05, .momentum = 0.9, .nesterov = true}}};
    std::size_t turn = 0;
    // Each rank's statistics are its own: those of rank 0, or of that rank alone.
    for (buffers const policy : {buffers::from_rank_0, buffers::left_alone, buffers::from_rank_0_at_evaluation}) {
        auto const& [options, by] = recipes[(turn++ + static_cast<std::size_t>(ranks)) % recipes.size()];
        CAPTURE(policy, by.name());
        auto const expected = ddp::test::run_ranks(
            ranks, [&](auto& comm) { return train(comm, 0, 9, policy, nullptr, options, by); }, ddp::test::patient());
        auto const got = ddp::test::ranks_over(
            tcp, ranks,
            [&](auto& comm) {
                checkpoints kept((scratch.path() / ("kept" + std::to_string(static_cast<int>(policy)))).string());
                (void)train(comm, 0, 4, policy, &kept, options, by);
                return train(comm, 4, 9, policy, &kept, options, by);
            },
            ddp::test::patient());
        REQUIRE(got == expected);
        if (ranks > 1 && policy == buffers::left_alone) REQUIRE(got[0] != got[1]);
    }
}

namespace {

/// Values and buffers after the steps of [first, last) with the same samples for any number of ranks, in two parts a step.
template <class Comm>
std::vector<double> train_shares(Comm& comm, std::size_t first, std::size_t last, checkpoints* kept) {
    ddp::test::task_data<double> const data(7, 3, 64);
    nn::batch_norm_options const all_ranks{.statistics = nn::batch_statistics::synchronised};
    nn::sequential model{nn::dropout<double>(0.1),
                         nn::linear<double>(7, 24),
                         nn::batch_norm<double>(24, all_ranks),
                         nn::relu<double>(),
                         nn::dropout<double>(0.5),
                         nn::linear<double>(24, 3),
                         nn::batch_norm<double>(3, all_ranks),
                         nn::mean_squared_error<double>()};
    model.initialize(9);
    data_parallel trainer{model, adamw{.lr = 0.01}, comm, {.clip = clip_by_global_norm{.max_norm = 0.5}}};
    std::vector<std::uint32_t> numbers(64);
    std::iota(numbers.begin(), numbers.end(), 0u);
    auto const ranks = static_cast<std::size_t>(comm.size()), rank = static_cast<std::size_t>(comm.rank());
    auto const forward = [&](std::size_t from) {  // this rank's share of six samples
        std::size_t const begin = from + 6 * rank / ranks, end = from + 6 * (rank + 1) / ranks;
        auto const part = data.batch(begin, end);
        trainer.forward(regression_batch<double>{.inputs = part.x,
                                                 .targets = part.y,
                                                 .rows = part.rows,
                                                 .features = 7,
                                                 .samples = std::span(numbers).subspan(begin, end - begin)});
    };
    if (first != 0 && (!kept->resume(trainer) || trainer.completed_steps() != first)) return {};
    for (std::size_t step = first; step < last; ++step) {
        forward(4 * step);
        trainer.accumulate();
        forward(4 * step + 6);
        trainer.backward();
        trainer.finish();
    }
    if (kept != nullptr) kept->save(trainer);
    std::vector<double> all;
    for (auto const& p : trainer.parameters()) all.insert(all.end(), p.value.begin(), p.value.end());
    for (model_buffer const& b : model.buffers())
        for (std::size_t i = 0; i < b.bytes.size(); i += sizeof(double)) {
            double& next = all.emplace_back();
            std::memcpy(&next, b.bytes.data() + i, sizeof next);
        }
    return all;
}

}  // namespace

TEST_CASE("with dropout, batch normalisation and accumulation, any number of ranks goes on where another stopped",
          "[checkpoint]") {
    auto const [ranks, tcp] = GENERATE(ddp::test::ways_to_run());
    if (ranks > 4) return;
    for (int const before : {1, 2, 3, 4}) {
        CAPTURE(before, ranks, tcp);
        ::test::scratch_directory const scratch;
        std::string const in = (scratch.path() / "kept").string();
        auto const expected = ddp::test::run_ranks(
            before, [](auto& comm) { return train_shares(comm, 0, 9, nullptr); }, ddp::test::patient());
        (void)ddp::test::run_ranks(
            before,
            [&](auto& comm) {
                checkpoints kept(in);
                return train_shares(comm, 0, 4, &kept);
            },
            ddp::test::patient());
        auto const got = ddp::test::ranks_over(
            tcp, ranks,
            [&](auto& comm) {
                checkpoints kept(in);
                return train_shares(comm, 4, 9, &kept);
            },
            ddp::test::patient());
        for (std::vector<double> const& each : got) {
            REQUIRE(each.size() == expected[0].size());
            for (std::size_t i = 0; i < each.size(); ++i) REQUIRE(std::abs(each[i] - expected[0][i]) < 1e-10);
        }
    }
}

namespace {

/// Which ranks keep and resume, and how they talk.
struct way {
    int ranks = 2;
    bool tcp = false;
};

/// One step on all ranks, kept in `path`, or refused from there: the error's text.
template <class Net, class Opt>
std::string keep_or_resume(way const& on, std::string const& path, std::uint64_t seed, Net const& make,
                           Opt const& optimizer, bool keep, std::vector<std::uint32_t> const& list = {}) {
    std::vector<std::string> const said = ddp::test::ranks_over(
        on.tcp, on.ranks,
        [&](auto& comm) -> std::string {
            ddp::test::task_data<float> const data(7, 3, 8);
            auto model = make();
            model.initialize(seed);
            data_parallel trainer{model, optimizer, comm};
            sampler_options const by{.samples = 4, .global_batch = 2};
            sampler batches = list.empty() ? sampler(by, comm) : sampler(by, list, comm);
            checkpoints kept(path);
            if (keep) {
                std::vector<std::uint32_t> const numbers{0, 1, 2, 3};
                auto const part = data.batch(0, 4);
                trainer.step(regression_batch<float>{
                    .inputs = part.x, .targets = part.y, .rows = part.rows, .features = 7, .samples = numbers});
                kept.save(trainer, batches);
                return {};
            }
            std::uint64_t const before = trainer.digest_of_values();
            std::string const text = ddp::test::thrown_by([&] { (void)kept.resume(trainer, batches); });
            if (!text.empty() && (trainer.digest_of_values() != before || trainer.completed_steps() != 0))
                return "changed: " + text;
            return text;
        },
        ddp::test::patient());
    for (std::string const& text : said) REQUIRE(text == said.front());
    return said.front();
}

}  // namespace

TEST_CASE("a checkpoint of a training that differs in what is in no tensor is refused, with what differs",
          "[checkpoint]") {
    auto const [ranks, tcp] = GENERATE(ddp::test::ways_to_run());
    CAPTURE(ranks, tcp);
    ::test::scratch_directory const scratch;
    way const on{ranks, tcp};
    std::string const in = (scratch.path() / "kept").string();
    auto const drops = [](double p) {
        return [p] {
            return nn::sequential{nn::dropout(p), nn::linear(7, 24), nn::gelu(), nn::linear(24, 3),
                                  nn::mean_squared_error()};
        };
    };
    auto const relu = [] {
        return nn::sequential{nn::dropout(0.5), nn::linear(7, 24), nn::relu(), nn::linear(24, 3),
                              nn::mean_squared_error()};
    };
    auto const normalised = [](double momentum) {
        return [momentum] {
            return nn::sequential{nn::linear(7, 3), nn::batch_norm(3, {.momentum = momentum}), nn::tanh(),
                                  nn::mean_squared_error()};
        };
    };
    using Catch::Contains;
    std::string const begin = "DDP-E302 format: " + in + "/step-000000000001: is a checkpoint of another training:\n  ";
    auto const other_model = [&](std::string const& text) {
        return text.starts_with(begin + "model's 'hash()': ") &&
               text.find(
                   "hash() of a model covers what is in no tensor, such as the seed of dropout and the settings of "
                   "layers: build and initialize the model as the checkpoint's was") != text.npos;
    };
    any_optimizer const by = adam{.lr = 0.1}, slower = adam{.lr = 0.01, .beta1 = 0.8};

    (void)keep_or_resume(on, in, 9, drops(0.5), by, true);
    CHECK(keep_or_resume(on, in, 9, drops(0.5), slower, false) == "");  // numbers may be others
    CHECK(keep_or_resume(on, in, 9, drops(0.5), adam{}, false) == "");
    CHECK(other_model(keep_or_resume(on, in, 8, drops(0.5), by, false)));
    CHECK(other_model(keep_or_resume(on, in, 9, drops(0.4), by, false)));
    CHECK(other_model(keep_or_resume(on, in, 9, relu, by, false)));
    CHECK(keep_or_resume(on, in, 9, drops(0.5), adamw{}, false) ==
          begin + "optimizer of '*': adam in the checkpoint, adamw in this one");
    CHECK(keep_or_resume(on, in, 9, drops(0.5), any_optimizer(lamb{}), false) ==
          begin + "optimizer of '*': adam in the checkpoint, lamb in this one");
    using groups = parameter_groups<any_optimizer>;
    groups const mixed{by, {{"3.*", adamw{}}}};
    CHECK(keep_or_resume(on, in, 9, drops(0.5), mixed, false) ==
          begin +
              "optimizer of '3.bias': adam in the checkpoint, adamw in this one\n  "
              "optimizer of '3.weight': adam in the checkpoint, adamw in this one");
    CHECK(keep_or_resume(on, in, 9, drops(0.5), groups{slower, {{"3.*", by}}}, false) == "");
    CHECK(keep_or_resume(on, in, 9, drops(0.5), by, false, {0, 1, 2, 3}) == "");  // what there is without a list
    CHECK_THAT(keep_or_resume(on, in, 9, drops(0.5), by, false, {0, 1, 2, 2}),
               Contains(begin + "sampler's 'list': none in the checkpoint, with digest "));
    // An earlier version did not say it.
    ddp::test::write_as_version(scratch.path() / "kept" / "step-000000000001" / "manifest.json", 2);
    CHECK(keep_or_resume(on, in, 8, relu, adamw{}, false, {0, 1, 2, 2}) == "");

    (void)keep_or_resume(on, in, 9, drops(0.5), mixed, true, {3, 1, 2, 2});
    CHECK(keep_or_resume(on, in, 9, drops(0.5), mixed, false, {3, 1, 2, 2}) == "");
    CHECK_THAT(keep_or_resume(on, in, 9, drops(0.5), mixed, false, {3, 2, 1, 2}),
               Contains(begin + "sampler's 'list': "));
    CHECK(keep_or_resume(on, in, 9, drops(0.5), adamw{}, false, {3, 1, 2, 2}) ==
          begin +
              "optimizer of '1.bias': adam in the checkpoint, adamw in this one\n  "
              "optimizer of '1.weight': adam in the checkpoint, adamw in this one");

    // Without a layer that draws, the seed of the first values does not matter.
    (void)keep_or_resume(on, in, 9, normalised(0.1), by, true);
    CHECK(keep_or_resume(on, in, 8, normalised(0.1), by, false) == "");
    CHECK(other_model(keep_or_resume(on, in, 9, normalised(0.2), by, false)));
    auto another = normalised(0.2)();  // a training that begins with these values
    CHECK(load_weights_as(another,
                          in + "/step-000000000001/shard-00000-of-0000" + std::to_string(ranks) + ".safetensors",
                          {.strict = false, .file_prefix = "model/"})
              .missing.empty());
}

namespace {

struct loaded_training {
    augmentation augment{.crop_padding = 1, .flip = true, .seed = 4};
    double lr = 0.05;
    schedule rate = schedule{};
};

/// Pictures of 5 x 4, shifted and mirrored: the digest after steps [first, last), or what resume said.
std::string train_on_pictures(communicator<>& comm, loaded_training const& with, std::uint64_t first,
                              std::uint64_t last, checkpoints* kept) {
    classification_data data;
    data.sample_shape = {5, 4};
    data.features = 20;
    data.classes = 3;
    for (std::size_t i = 0; i < 40 * data.features; ++i)
        data.inputs.push_back(static_cast<std::uint8_t>(1 + i * 37 % 255));
    for (std::size_t s = 0; s < 40; ++s) data.labels.push_back(static_cast<std::uint32_t>(s % 3));
    nn::sequential model{nn::linear(20, 8), nn::tanh(), nn::linear(8, 3), nn::softmax_cross_entropy()};
    model.initialize(9);
    data_parallel trainer{model, sgd{.lr = with.lr, .momentum = 0.9}, comm, {.schedule = with.rate}};
    sampler_options const samples{.samples = 40, .global_batch = 12, .seed = 5};
    prefetch_loader<float> load{
        data, sampler(samples, comm), {.normalise = {{.mean = 0.5, .deviation = 0.25}}, .augment = with.augment}};
    if (first != 0) {
        sampler at = load.place();
        if (std::string said = ddp::test::thrown_by([&] { (void)kept->resume(trainer, at); }); !said.empty()) {
            sampler plain(samples, comm);  // does not know what a loader does
            (void)kept->resume(trainer, plain);
            return said;
        }
        load.seek(at.epoch(), at.position());
    }
    while (trainer.completed_steps() < last)
        if (auto const batch = load.next()) trainer.step(*batch);
    if (kept != nullptr) kept->save(trainer, load.place());
    return std::to_string(trainer.digest_of_values());
}

}  // namespace

TEST_CASE("a training on pictures that are shifted and mirrored goes on in the middle of an epoch", "[checkpoint]") {
    auto const [ranks, tcp] = GENERATE(ddp::test::ways_to_run());
    ::test::scratch_directory const scratch;
    std::string const in = (scratch.path() / "kept").string();
    auto const run = [&, n = ranks, over = tcp](loaded_training const& with, std::uint64_t first, std::uint64_t last,
                                                bool keeps) {
        return ddp::test::ranks_over(
            over, n,
            [&](auto& comm) {
                checkpoints kept(in);
                return train_on_pictures(comm, with, first, last, keeps ? &kept : nullptr);
            },
            ddp::test::patient());
    };
    auto const whole = run({}, 0, 9, false);
    (void)run({}, 0, 5, true);  // four steps are an epoch
    ddp::test::captured_stderr quiet(scratch);
    auto const resumed = run({}, 5, 9, true);
    CHECK(quiet.text() == "");
    CHECK(resumed == whole);
    CHECK(run({.augment = {}}, 0, 9, false) != whole);

    // What nothing else tells: the loader draws others, or makes other numbers of the same ones.
    std::string const begin = "DDP-E302 format: " + in + "/step-000000000009: is a checkpoint of another training:\n";
    for (augmentation const& other : {augmentation{}, augmentation{.crop_padding = 1, .flip = true, .seed = 5},
                                      augmentation{.flip = true, .seed = 4}})
        for (std::string const& text : run({.augment = other}, 9, 10, true)) {
            CAPTURE(text);
            CHECK(text.starts_with(begin + "  sampler's 'preparation (normalisation, augmentation)': with digest "));
            CHECK(text.ends_with("give resume a sampler of your own instead of the loader's place()"));
        }

    // Other numbers may be what the user wants; rank 0 says so.
    ddp::test::captured_stderr heard(scratch);
    (void)run({.lr = 0.025, .rate = schedule{cosine_decay{.steps = 30}}}, 9, 9, true);
    CHECK(heard.text() == "ddp: " + in +
                              "/step-000000000009: the training continues with other settings:\n"
                              "  optimizer: sgd(lr 0.05, momentum 0.9, weight_decay 0, nesterov false) in the "
                              "checkpoint, sgd(lr 0.025, momentum 0.9, weight_decay 0, nesterov false) in this one\n"
                              "  schedule: constant_rate in the checkpoint, cosine_decay(steps 30, floor 0) in this "
                              "one\n");

    // An exchange that is given up, or taken up, has no state that would tell.
    auto const by = [&](auto const& exchange, bool keeps) {
        ddp::test::captured_stderr said(scratch);
        ddp::test::run_ranks(
            2,
            [&](auto& comm) {
                ddp::test::tanh_mlp<float> net(7, 24, 3, 5);
                data_parallel trainer{net, sgd{.lr = 0.1}, comm, exchange};
                checkpoints kept(in + "-exchange");
                keeps ? kept.save(trainer) : (void)kept.resume(trainer);
            },
            ddp::test::patient());
        std::string const text = said.text();
        return text.substr(std::min(text.size(), text.find("\n")));
    };
    (void)by(bfloat16_exchange{.feedback = false}, true);
    CHECK(by(automatic_allreduce{}, false) ==
          "\n  exchange: bfloat16(feedback false) in the checkpoint, none in this one\n");
    (void)by(automatic_allreduce{}, true);
    CHECK(by(bfloat16_exchange{.feedback = false}, false) ==
          "\n  exchange: none in the checkpoint, bfloat16(feedback false) in this one\n");
}
