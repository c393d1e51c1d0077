// A small transformer learns to write licences, data-parallel, character by character, from those that Debian keeps in
// /usr/share/common-licenses (or from --text FILE); then it writes some.
//
// Two threads:      ./text_model --ranks 2          (a minute on two cores)
// Two processes:    ddprun -n 2 --prefix none ./text_model
// Under MPI:        mpirun -n 2 ./text_model
// Prints how the loss of the last tenth of the text falls, which it is not trained on; then, with the same bits by
// every transport, "result: validation_loss=1.5… bits_per_character=2.1… … parameters=<digest>", and what it writes.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ddp/ddp.hpp>
#include <ddp/nn/nn.hpp>
#include <ddp/rendezvous/run_tcp.hpp>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "options.hpp"
#include "progress_bar.hpp"
#include "text/corpus.hpp"
#include "text/transformer.hpp"
#ifdef EXAMPLE_WITH_MPI
#include <ddp/rendezvous/run_mpi.hpp>
#endif

namespace {

struct settings {
    ddp::run_options run;
    std::string text = "/usr/share/common-licenses";
    transformer_shape shape;
    std::size_t steps = 2000, batch = 16, sample = 300;
    std::uint64_t seed = 7;
    double lr = 3e-3, temperature = 0.7;
};

std::string text(char const* format, auto... values) {
    char line[320];
    std::snprintf(line, sizeof line, format, values...);
    return line;
}

// How the model continues after the first window of what it has not seen: each character is drawn by its probability to
// the power of 1 / temperature; at 0 the likeliest.
std::string write(transformer<float>& model, corpus const& all, settings const& with) {
    std::string written;
    auto const begin = all.unseen().first(with.shape.time);
    std::vector<float> past(begin.begin(), begin.end());
    std::vector<double> odds(all.kinds.size());
    ddp::random_stream const draws{with.seed, ddp::random_use::user};
    for (std::size_t i = 0; i < with.sample; ++i) {
        auto const z = model.logits(past).bottomRows(1);
        double const largest = z.maxCoeff();
        double total = 0;
        for (std::size_t c = 0; c < odds.size(); ++c)
            total += odds[c] =
                std::exp((z(0, static_cast<Eigen::Index>(c)) - largest) / std::max(with.temperature, 1e-6));
        double left = draws.at(i).uniform<double>() * total;
        std::size_t next = 0;
        while (next + 1 < odds.size() && (left -= odds[next]) >= 0) ++next;
        written += all.kinds[next];
        past.erase(past.begin());
        past.push_back(static_cast<float>(next));
    }
    return written;
}

bool train(settings const& with, std::string_view transport, ddp::communicator<>& comm) {
    corpus const all = read_corpus(with.text, with.shape.time);
    transformer_shape shape = with.shape;
    shape.vocabulary = all.kinds.size();
    transformer<float> model(shape);
    model.initialize(with.seed);
    std::size_t const warmup = with.steps / 20;
    ddp::training_options const options{.clip = ddp::clip_by_global_norm{.max_norm = 1},
                                        .schedule = {ddp::linear_warmup{.steps = warmup},
                                                     ddp::cosine_decay{.steps = with.steps - warmup, .floor = 0.05}}};
    ddp::data_parallel trainer{model, ddp::adamw{.lr = with.lr, .weight_decay = 0.1}, comm, options};

    // Windows begin anywhere in the text that is trained on; those of the rest lie side by side.
    windows load(all.training(), shape.time, 1), load_unseen(all.unseen(), shape.time, shape.time);
    ddp::sampler batches({.samples = load.size(), .global_batch = with.batch, .seed = with.seed}, comm);
    ddp::sampler order({.samples = load_unseen.size(), .global_batch = with.batch, .shuffle = false}, comm);
    auto const unseen_loss = [&] {
        return ddp::evaluate(comm, model, [&] { return order.next(); }, load_unseen).loss();
    };

    std::size_t parameters = 0;
    for (auto const& p : trainer.parameters()) parameters += p.value.size();
    progress_bar bar(comm.rank() == 0, with.steps);
    bar.line(
        text("%zu characters of %zu kinds, the last %zu held out; %zu parameters; by frequency alone a loss of %.3f",
             all.ids.size(), all.kinds.size(), all.held_out, parameters, all.unigram_loss()));
    double validation = unseen_loss();
    bar.line(text("step 0/%zu  validation loss %.3f", with.steps, validation));

    auto const began = std::chrono::steady_clock::now();
    double spent = 0;  // seconds in steps
    std::size_t seen = 0;
    ddp::mean_metric loss;
    for (std::size_t step = 1; step <= with.steps; ++step) {
        auto next = batches.next();
        if (!next) next = batches.next();  // the next epoch
        auto const mine = next.value_or(std::span<std::uint32_t const>());
        auto const result = trainer.step(load(mine));
        loss.add(result.loss, mine.size());
        seen += result.weight;
        spent = std::chrono::duration<double>(trainer.times().total).count();
        bar.show(step, static_cast<double>(seen) / spent, text("step %zu  loss %.3f", step, result.loss));
        if (step * 8 / with.steps == (step - 1) * 8 / with.steps) continue;
        validation = unseen_loss();
        double const training = ddp::sum_over_ranks(comm, loss).mean();
        double const seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
        bar.line(text("step %zu/%zu  training loss %.3f  validation loss %.3f  %.1f s", step, with.steps, training,
                      validation, seconds));
        loss = {};
    }

    bool const identical = trainer.replicas_identical();
    bar.line(
        text("result: validation_loss=%.4f bits_per_character=%.4f ranks=%d transport=%s steps=%zu "
             "characters_per_second=%.0f communication_wait=%.1f%% replicas=%s parameters=%016llx",
             validation, validation / std::log(2.0), comm.size(), std::string(transport).c_str(), with.steps,
             static_cast<double>(seen) / spent,
             100.0 * static_cast<double>(trainer.times().waited.count()) /
                 static_cast<double>(trainer.times().total.count()),
             identical ? "identical" : "different", static_cast<unsigned long long>(trainer.digest_of_values())));
    if (comm.rank() == 0 && with.sample > 0) std::printf("\n%s\n", write(model, all, with).c_str());
    return identical;
}

}  // namespace

int main(int argc, char** argv) {
    settings with;
    options("Trains a small transformer on a text, character by character, with data-parallel ranks; then it writes.")
        .add("ranks", with.run.ranks, "how many; with --transport inproc they are threads of this process", 0)
        .add("transport", with.run.transport, "inproc, tcp or mpi; left out: what the launcher says")
        .add("text", with.text, "a file, or a directory of files")
        .add("steps", with.steps, "of training", 1)
        .add("batch", with.batch, "windows a step, over all ranks", 1)
        .add("time", with.shape.time, "characters of a window: as far back as the model sees", 1)
        .add("width", with.shape.width, "numbers a character is made of", 1)
        .add("heads", with.shape.heads, "of attention", 1)
        .add("blocks", with.shape.blocks, "of attention and a small network each", 0, 1000)
        .add("lr", with.lr, "learning rate of AdamW, decayed along a cosine", 0)
        .add("seed", with.seed, "of initial values, windows and what is written")
        .add("sample", with.sample, "characters to write at the end")
        .add("temperature", with.temperature, "0: always the likeliest character; 1: as likely as the model says", 0)
        .parse(argc, argv);
    std::atomic<bool> good{true};
    auto const body = [&](ddp::communicator<>& comm) {
        if (!train(with, comm.transport().name(), comm)) good = false;
    };
    if (with.run.ranks > 0 && with.run.transport.empty() && !ddp::tcp::detected()) with.run.transport = "inproc";
#ifdef EXAMPLE_WITH_MPI
    int const code = ddp::run_main<ddp::threads, ddp::tcp, ddp::mpi>(with.run, body);
#else
    int const code = ddp::run_main<ddp::threads, ddp::tcp>(with.run, body);
#endif
    return code != EXIT_SUCCESS ? code : good ? EXIT_SUCCESS : EXIT_FAILURE;
}
