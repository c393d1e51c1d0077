// Fashion-MNIST, data-parallel: real images, every policy chosen on the command line.
//
// Two threads:      ./fashion_mnist --ranks 2
// Two processes:    ddprun -n 2 --prefix none ./fashion_mnist
// Under MPI:        mpirun -n 2 ./fashion_mnist
// Prints a line an epoch and, last, "result: test_accuracy=0.88… ranks=2 transport=tcp memory=shared messages=memory … parameters=<digest>".
#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ddp/checkpoint/checkpoints.hpp>
#include <ddp/checkpoint/stop_signals.hpp>
#include <ddp/data/gzip.hpp>
#include <ddp/data/prefetch_loader.hpp>
#include <ddp/ddp.hpp>
#include <ddp/exchange/narrow.hpp>
#include <ddp/exchange/power_sgd.hpp>
#include <ddp/exchange/sparse.hpp>
#include <ddp/nn/nn.hpp>
#include <ddp/rendezvous/run_secure.hpp>
#include <ddp/strategy/averaging.hpp>
#include <ddp/strategy/local_parallel.hpp>
#include <ddp/strategy/loose.hpp>
#include <ddp/strategy/outer_step.hpp>
#include <ddp/strategy/stale_synchronous.hpp>
#include <ddp/train/weights.hpp>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fashion_models.hpp"
#include "options.hpp"
#include "progress_bar.hpp"
#ifdef EXAMPLE_WITH_MPI
#include <ddp/rendezvous/run_mpi.hpp>
#endif

namespace {

struct settings {
    ddp::run_options run;
    std::string model = "mlp", algorithm = "auto", update = "replicated", loader = "direct",
                data = "/usr/share/datasets/fashion-mnist", buckets = "1MiB", exchange = "none",
                strategy = "every_step", save, load, checkpoint;
    int epochs = 0;
    std::uint64_t seed = 7;
    std::size_t batch = 128, hidden = 512, losses = 0, every = 0, keep = 3, rank = 4, period = 0;
    double lr = 2e-3, clip = 0, ratio = 0.01;
    int flip = -1;
    bool resume = false, background = false;
};

enum class outcome : std::uint8_t { good, replicas_differ, interrupted };

std::string text(char const* format, auto... values) {
    char line[512];
    std::snprintf(line, sizeof line, format, values...);
    return line;
}

/// What a choice would leave without effect, in words; empty if nothing.
std::string ignored(settings const& with) {
    settings const usual;
    bool const other_algorithm = with.algorithm != usual.algorithm;
    if (with.strategy != usual.strategy && (other_algorithm || with.buckets != usual.buckets))
        return "--strategy " + with.strategy +
               " sends values, all at once: --algorithm and --buckets are for gradients, which only every_step sends";
    if (with.exchange != "none" && other_algorithm)
        return "--exchange " + with.exchange + " replaces the algorithm: it does not go with --algorithm";
    if (with.strategy == usual.strategy && with.period != usual.period)
        return "--period is for a --strategy other than every_step";
    if (with.ratio != usual.ratio && with.exchange != "topk" && with.exchange != "randomk")
        return "--ratio is for --exchange topk and randomk, not " + with.exchange;
    if (with.rank != usual.rank && with.exchange != "powersgd")
        return "--rank is for --exchange powersgd, not " + with.exchange;
    return "";
}

/// Whether values lie in memory that ranks share. A trainer whose ranks step by themselves shares none.
template <class Trainer>
bool shares_memory(Trainer const& trainer) {
    if constexpr (requires { trainer.shares_memory(); })
        return trainer.shares_memory();
    else
        return false;
}

/// Exchange and strategy, with their settings, as the result line has them.
std::string how_it_communicates(settings const& with) {
    std::string words = "exchange=" + with.exchange;
    if (with.exchange == "topk" || with.exchange == "randomk") words += text(" ratio=%g", with.ratio);
    if (with.exchange == "powersgd") words += text(" rank=%zu", with.rank);
    words += " strategy=" + with.strategy;
    if (with.strategy != "every_step") words += text(" period=%zu", with.period);
    return words;
}

/// Whether all ranks hold the same values, so that rank 0's can be kept. Ranks that step by themselves do when they have met; under some
/// strategies they never do, and are given the mean now.
template <class Trainer>
bool ready_to_save(Trainer& trainer) {
    if constexpr (requires { trainer.synchronise(); })
        if (!trainer.agrees()) trainer.synchronise();
    return trainer.between_steps();
}

/// Trains as the trainer does it. Steps of all ranks see with.batch samples together.
template <class Trainer>
outcome train_by(Trainer& trainer, settings const& with, std::string_view transport, ddp::sampler& batches,
                 ddp::classification_data const& images, ddp::classification_data const& unseen) {
    ddp::communicator<> const& comm = trainer.comm();
    std::size_t const steps = batches.steps_per_epoch() * static_cast<std::size_t>(with.epochs);
    if (!with.load.empty()) ddp::load_weights(trainer, with.load);

    std::optional<ddp::checkpoints> kept;
    std::optional<ddp::stop_signals> signals;
    if (!with.checkpoint.empty()) {
        kept.emplace(with.checkpoint, ddp::checkpoint_options{.keep = with.keep, .background = with.background});
        signals.emplace();
    }
    std::optional<ddp::resumed_checkpoint> from;
    if (kept && with.resume) from = kept->resume(trainer, batches);

    std::optional<ddp::prefetch_loader<float>> ahead;  // a thread of its own prepares the next batches
    if (with.loader == "background") ahead.emplace(images, batches);
    ddp::batch_loader<float> load(images, batches.largest_share());
    auto const next = [&]() -> std::optional<ddp::classification_batch<float>> {
        if (ahead) return ahead->next();
        if (auto const indices = batches.next()) return load(*indices);
        return std::nullopt;
    };
    ddp::sampler const& place = ahead ? ahead->place() : batches;  // behind the last batch that was handed out
    progress_bar bar(comm.rank() == 0, steps);
    auto const began = std::chrono::steady_clock::now();
    auto const seconds = [&] {
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
    };
    std::size_t step = trainer.completed_steps(), samples = 0, sent = 0, taken = 0;
    bool save_is_due = false;
    if (from) bar.line(text("resumed after step %zu", step));
    for (int epoch = 1 + static_cast<int>(batches.epoch()); epoch <= with.epochs; ++epoch) {
        ddp::mean_metric loss;
        std::uint64_t const sent_before = comm.bytes_sent();
        std::uint64_t apart = 0;  // bytes for something else than training
        while (auto const batch = next()) {
            if (signals && signals->received()) trainer.request_stop();
            auto const result = trainer.step(*batch);
            ++taken;
            loss.add(result.loss, batch->size());
            samples += std::min(with.batch, images.size());
            if (++step <= with.losses) {
                std::uint64_t const sent_by_now = comm.bytes_sent();
                auto const all = ddp::sum_over_ranks(comm, ddp::mean_metric{}.add(result.loss, batch->size()));
                bar.line(text("loss %zu %.9g", step, all.mean()));
                apart += comm.bytes_sent() - sent_by_now;
            }
            bar.show(step, static_cast<double>(samples) / seconds(), text("epoch %d  loss %.3f", epoch, result.loss));
            save_is_due = save_is_due || result.stop || (with.every != 0 && step % with.every == 0);
            if (kept && save_is_due && ready_to_save(trainer)) {
                std::uint64_t const sent_by_now = comm.bytes_sent();
                kept->save(trainer, place);
                apart += comm.bytes_sent() - sent_by_now;
                save_is_due = false;
            } else if (kept && with.background && step % 8 == 0) {
                std::uint64_t const sent_by_now = comm.bytes_sent();
                (void)kept->poll();  // what has been written becomes a checkpoint
                apart += comm.bytes_sent() - sent_by_now;
            }
            if (!result.stop) continue;
            if (kept) kept->wait();
            bar.line(text("stopped after step %zu", step));
            return outcome::interrupted;
        }
        std::uint64_t const sent_in_steps = comm.bytes_sent();
        if constexpr (requires { trainer.synchronise(); }) trainer.synchronise();
        // Sums that the last steps have started are theirs; other strategies meet here for the evaluation.
        sent += (with.strategy == "stale" ? comm.bytes_sent() : sent_in_steps) - sent_before - apart;
        double const training_loss = ddp::sum_over_ranks(comm, loss).mean();
        ddp::sampler order({.samples = unseen.size(), .global_batch = 1000, .shuffle = false}, comm);
        ddp::batch_loader<float> load_unseen(unseen);
        auto const test = ddp::evaluate(comm, trainer.model(), [&] { return order.next(); }, load_unseen);
        bar.line(text("epoch %d/%d  loss %.4f  test accuracy %.4f  %.1f s", epoch, with.epochs, training_loss,
                      test.accuracy(), seconds()));
        if (epoch != with.epochs) continue;

        double const took = seconds();
        if (with.flip == comm.rank()) {  // to see what a damaged replica looks like
            float& weight = trainer.parameters()[0].value[0];
            weight = std::bit_cast<float>(std::bit_cast<std::uint32_t>(weight) ^ 1u);
        }
        if (kept) kept->wait();
        bool const identical = trainer.replicas_identical();
        auto const& times = trainer.times();
        bar.line(text(
            "result: test_accuracy=%.4f ranks=%d transport=%s memory=%s messages=%s algorithm=%s %s "
            "bytes_per_step=%zu epochs=%d seconds=%.1f samples_per_second=%.0f communication_wait=%.1f%% replicas=%s "
            "parameters=%016llx",
            test.accuracy(), comm.size(), std::string(transport).c_str(), shares_memory(trainer) ? "shared" : "own",
            ddp::name_of(comm.messages()), with.algorithm.c_str(), how_it_communicates(with).c_str(),
            sent / std::max<std::size_t>(1, taken), with.epochs, took, static_cast<double>(samples) / took,
            100.0 * static_cast<double>(times.waited.count()) /
                static_cast<double>(std::max<std::int64_t>(1, times.total.count())),
            identical ? "identical" : "different", static_cast<unsigned long long>(trainer.digest_of_values())));
        if (identical && !with.save.empty())
            ddp::save_weights(trainer, with.save, {{"model", with.model}, {"hidden", std::to_string(with.hidden)}});
        return identical ? outcome::good : outcome::replicas_differ;
    }
    bar.line("nothing was left to do");
    return outcome::good;
}

outcome train(settings const& with, std::string_view transport, ddp::communicator<>& comm) {
    auto const directory = std::filesystem::path(with.save).parent_path();  // rank 0 writes there after the training
    if (comm.rank() == 0 && !directory.empty() && !std::filesystem::is_directory(directory))
        throw std::invalid_argument("--save " + with.save + ": there is no directory " + directory.string());
    auto const limits = ddp::idx_limits{};
    auto const images = ddp::load_idx_classification<ddp::gzip_source>(with.data, ddp::data_split::train, limits);
    auto const unseen = ddp::load_idx_classification<ddp::gzip_source>(with.data, ddp::data_split::test, limits);

    ddp::sampler batches({.samples = images.size(), .global_batch = with.batch, .seed = with.seed}, comm);
    std::size_t const steps = batches.steps_per_epoch() * static_cast<std::size_t>(with.epochs);
    fashion_model model = make_model(with.model, images.sample_shape, with.hidden);
    model.initialize(with.seed);
    ddp::adamw const optimizer{.lr = with.lr};
    ddp::training_options options{.schedule = ddp::schedule{ddp::cosine_decay{.steps = steps, .floor = 0.05}}};
    options.update = with.update == "sharded" ? ddp::update::sharded : ddp::update::replicated;
    if (with.clip > 0) options.clip = ddp::clip_by_global_norm{.max_norm = with.clip};
    if (with.strategy != "every_step") {
        auto const locally = [&](auto strategy) {
            return ddp::local_parallel{
                model, optimizer, comm, std::move(strategy), {.clip = options.clip, .schedule = options.schedule}};
        };
        std::uint64_t const period = with.period;
        ddp::local_parallel trainer = [&] {
            if (with.strategy == "local_sgd") return locally(ddp::local_sgd{.period = period});
            if (with.strategy == "post_local")
                return locally(ddp::local_sgd{.period = period, .warm_up_steps = steps / 4});
            if (with.strategy == "hierarchical")
                return locally(ddp::hierarchical_averaging<>{
                    .inner = comm.host(), .inner_period = std::max<std::uint64_t>(1, period / 4), .period = period});
            if (with.strategy == "diloco") return locally(ddp::diloco{.period = period});
            if (with.strategy == "slow_momentum") return locally(ddp::slow_momentum{.period = period});
            if (with.strategy == "elastic") return locally(ddp::elastic_averaging{.period = period});
            if (with.strategy == "stale") return locally(ddp::stale_synchronous{.staleness = period});
            if (with.strategy == "gossip_ring")
                return locally(ddp::gossip{.graph = ddp::gossip_graph::ring, .period = period});
            return locally(ddp::gossip{.period = period});
        }();
        return train_by(trainer, with, transport, batches, images, unseen);
    }

    std::size_t const cap = options::bytes(with.buckets, "buckets");
    auto const exchanging = [&](auto exchange) {
        return ddp::data_parallel{
            model,   optimizer,           comm,
            options, std::move(exchange), ddp::size_capped_buckets{.cap_bytes = cap, .first_bytes = cap / 4 + 1}};
    };
    ddp::data_parallel trainer = [&] {
        if (with.exchange == "bf16") return exchanging(ddp::bfloat16_exchange{});
        if (with.exchange == "fp16") return exchanging(ddp::half_exchange{});
        if (with.exchange == "int8") return exchanging(ddp::int8_exchange{});
        if (with.exchange == "topk") return exchanging(ddp::top_k_exchange{.ratio = with.ratio});
        if (with.exchange == "randomk") return exchanging(ddp::random_k_exchange{.ratio = with.ratio});
        if (with.exchange == "powersgd") return exchanging(ddp::power_sgd_exchange{.rank = with.rank});
        return exchanging(ddp::any_allreduce::parse(with.algorithm));
    }();
    return train_by(trainer, with, transport, batches, images, unseen);
}

}  // namespace

int main(int argc, char** argv) {
    settings with;
    options("Trains a network on Fashion-MNIST (or any data in IDX files) with data-parallel ranks.")
        .add("ranks", with.run.ranks, "how many; with --transport inproc they are threads of this process", 0)
        .add("transport", with.run.transport, "inproc, tcp or mpi; left out: what the launcher says")
        .add("model", with.model, "mlp or cnn; the latter wants images of 28 x 28 pixels")
        .add("algorithm", with.algorithm, "auto, direct, recursive_doubling, halving_doubling, ring or naive")
        .add("exchange", with.exchange,
             "what travels instead of gradients: none, bf16, fp16, int8, topk or randomk (see --ratio), or powersgd "
             "(see "
             "--rank)")
        .add("strategy", with.strategy,
             "when ranks talk: every_step (gradients), or (values) local_sgd, post_local, hierarchical (within a host "
             "four "
             "times as often), diloco, slow_momentum, elastic, gossip, gossip_ring or stale")
        .add("period", with.period,
             "steps from one meeting to the next, or, with stale, to what others did; 0: 8, or 1 with gossip and stale")
        .add("ratio", with.ratio, "part of the gradient that topk or randomk sends")
        .add("rank", with.rank, "columns of powersgd's matrices")
        .add("buckets", with.buckets, "size of a gradient bucket, such as 1MiB")
        .add("update", with.update, "replicated or sharded")
        .add("epochs", with.epochs, "passes over the data; 0: 8, or 6 of the cnn", 0)
        .add("batch", with.batch, "samples a step, over all ranks", 1)
        .add("save", with.save, "after training, write the weights to this .safetensors file")
        .add("load", with.load, "begin with the weights in this file")
        .add("checkpoint", with.checkpoint, "keep checkpoints in this directory")
        .add("every", with.every,
             "steps from one checkpoint to the next; 0: only when a signal stops training. With --strategy: "
             "at the next meeting")
        .add("keep", with.keep, "keep this many of the newest checkpoints", 1)
        .add("resume", with.resume, "go on from the newest checkpoint, if there is one")
        .add("background", with.background, "write checkpoints while training goes on")
        .add("loader", with.loader, "which thread prepares batches: direct, the one that trains; background, another")
        .add("hidden", with.hidden, "units of the mlp's first hidden layer", 1)
        .add("lr", with.lr, "learning rate of AdamW, decayed along a cosine", 0)
        .add("clip", with.clip, "global norm to which gradients are clipped; 0: not at all", 0)
        .add("seed", with.seed, "of initial values and shuffling")
        .add("data", with.data, "directory with IDX files, plain or gzipped")
        .add("losses", with.losses, "print the loss of the first N steps")
        .add("flip", with.flip, "after training, flip a bit of one weight on this rank")
        .parse(argc, argv);
    if (with.update != "replicated" && with.update != "sharded") {
        std::fprintf(stderr, "--update is replicated or sharded, not '%s'\n", with.update.c_str());
        return 2;
    }
    if (std::string const known[] = {"none", "bf16", "fp16", "int8", "topk", "randomk", "powersgd"};
        std::find(std::begin(known), std::end(known), with.exchange) == std::end(known)) {
        std::fprintf(stderr, "--exchange is none, bf16, fp16, int8, topk, randomk or powersgd, not '%s'\n",
                     with.exchange.c_str());
        return 2;
    }
    if (std::string const known[] = {"every_step", "local_sgd", "post_local", "hierarchical", "diloco", "slow_momentum",
                                     "elastic", "gossip", "gossip_ring", "stale"};
        std::find(std::begin(known), std::end(known), with.strategy) == std::end(known)) {
        std::fprintf(stderr,
                     "--strategy is every_step, local_sgd, post_local, hierarchical, diloco, slow_momentum, elastic, "
                     "gossip, gossip_ring or stale, not '%s'\n",
                     with.strategy.c_str());
        return 2;
    }
    if (with.strategy == "hierarchical" && with.period > 4 && with.period % 4 != 0) {
        std::fprintf(stderr, "--strategy hierarchical wants a --period that four divides, not %zu\n", with.period);
        return 2;
    }
    if (with.strategy != "every_step" && (with.exchange != "none" || with.update == "sharded")) {
        std::fprintf(stderr,
                     "--strategy %s sends values, by steps of its own: it goes with neither --exchange nor --update\n",
                     with.strategy.c_str());
        return 2;
    }
    if (std::string const words = ignored(with); !words.empty()) {
        std::fprintf(stderr, "%s\n", words.c_str());
        return 2;
    }
    if (with.loader != "direct" && with.loader != "background") {
        std::fprintf(stderr, "--loader is direct or background, not '%s'\n", with.loader.c_str());
        return 2;
    }
    if (with.model != "mlp" && with.model != "cnn") {
        std::fprintf(stderr, "--model is mlp or cnn, not '%s'\n", with.model.c_str());
        return 2;
    }
    if (with.strategy != "every_step" && with.period == 0)
        with.period = with.strategy.starts_with("gossip") || with.strategy == "stale" ? 1 : 8;
    if (with.epochs == 0) with.epochs = with.model == "cnn" ? 6 : 8;
    std::atomic<outcome> worst{outcome::good};
    auto const body = [&](ddp::communicator<>& comm) {
        outcome const mine = train(with, comm.transport().name(), comm);
        if (mine != outcome::good) worst = mine;
    };
    if (with.run.ranks > 0 && with.run.transport.empty() && !ddp::secure_tcp::detected()) with.run.transport = "inproc";
#ifdef EXAMPLE_WITH_MPI
    int const code = ddp::run_main<ddp::threads, ddp::secure_tcp, ddp::mpi>(with.run, body);
#else
    int const code = ddp::run_main<ddp::threads, ddp::secure_tcp>(with.run, body);
#endif
    if (code != EXIT_SUCCESS) return code;
    if (worst == outcome::interrupted) return ddp::exit_to_be_resumed;
    return worst == outcome::good ? EXIT_SUCCESS : EXIT_FAILURE;
}
