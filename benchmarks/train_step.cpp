// Times training steps of three models: what the step takes, what of it is computing, and what communication adds.
//
//   ddprun -n 2 --prefix none -- ./benchmark_train_step [--json FILE] MODEL
//   ./benchmark_train_step --threads 2 MODEL
// Any other launcher will do, mpirun too; without one it is a single rank.
//
// MODEL    mlp   784-1024-1024-10, 128 samples a rank
//          wide  784-4096-4096-4096-10, 64 samples a rank
//          cnn   28 x 28 pixels, two 3 x 3 convolutions (32, 64 filters), each with ReLU and then halved by
//                max-pooling, then 3136-128-10; 64 samples a rank
// All with ReLU between layers, softmax cross-entropy, float, SGD with rate 0.01 and momentum 0.9, and one batch again
// and again.
//
// Kinds of step, in turn for ROUNDS (3) rounds of about STEP_BUDGET (1.5) seconds; SKIP="sharded" leaves kinds out:
//   nosync      forward, backward, optimizer in a replica of this rank's own, on all ranks at the same time; nothing
//               is exchanged
//   default     data_parallel with its default options: in memory that the ranks share, if they are on one host
//   replicated  by messages; every rank keeps all of the optimizer's state
//   sharded     by messages; each rank steps its slice and sends the new values
// WITH="bf16 int8 powersgd topk" adds kinds whose exchange sends less, by messages: bfloat16_exchange, int8_exchange,
// power_sgd_exchange of rank 4, top_k_exchange of 1 %. WITH="unchecked replicated_unchecked sharded_unchecked" adds the default,
// replicated and sharded without agreement_steps,
// WITH="nonfinite unused" the default that looks for NaN (nonfinite::stop), and that allows unused parameters (unused::allowed),
// WITH="slices" replicated where large gradients are computed and reported in slices of 4 MiB, WITH="late" that and sharded,
// with values that are gathered while the next batch goes forward (overlap_gather), WITH="one bf16_one" replicated and bf16
// with training_options::buckets_in_flight = 1.
// STEPS is the least number of steps in a round (4). OPTIMIZER=adam replaces SGD with momentum.
//
// Prints, in milliseconds on rank 0 (medians of a round's steps, then of the rounds):
//   step        the whole step
//   forward, backward   within the model
//   optimizer   after backward; trainers step early buckets while backward still runs
//   waiting     the trainer waits for communication after backward
//   exposed     step - step of nosync, and its share of the step: what communication costs, hidden parts not counted
//   cpu         processor time of a rank a step, all its threads: the mean of the ranks
//   comm cpu    cpu - cpu of nosync: what communication costs the processor, hidden or not
//   thread      what of it was the communication thread's; what a rank spends while it waits is its caller's
//   a 64 MiB    comm cpu for 64 MiB that a rank has sent in messages; 0 in memory, where it sends next to nothing
//
// --candidate prints a JSON line for each kind instead, as the program does that measures PyTorch's
// DistributedDataParallel with the same models: there bwd_ms is all of the step but forward and optimizer. NET and TUNE
// are names in the output. in_memory: gradients are added and values stored in memory that the ranks share; otherwise
// "messages" says how the kind's messages travel.
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iostream>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ddp/ddp.hpp>
#include <ddp/exchange/narrow.hpp>
#include <ddp/exchange/power_sgd.hpp>
#include <ddp/exchange/sparse.hpp>
#include <ddp/nn/nn.hpp>
#include <ddp/rendezvous/run_secure.hpp>
#if defined(DDP_WITH_MPI)
#include <ddp/rendezvous/run_mpi.hpp>
#endif

#include "../tools/ddp-perf/compiler.hpp"

namespace {

std::string setting(char const* name, char const* otherwise) {
    char const* const value = std::getenv(name);
    return value != nullptr && *value != '\0' ? value : otherwise;
}
double seconds_now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
double median(std::vector<double> v) {
    auto const middle = v.begin() + static_cast<std::ptrdiff_t>(v.size() / 2);
    std::nth_element(v.begin(), middle, v.end());
    return *middle;
}
template <class... V>
std::string text(char const* format, V... values) {
    char line[512];
    std::snprintf(line, sizeof line, format, values...);
    return line;
}

/// A network that notes how long its passes take.
class timed_network : public ddp::nn::sequential<> {
public:
    explicit timed_network(ddp::nn::sequential<> net) : sequential(std::move(net)) {}

    template <class... Needed>
    double forward(ddp::classification_batch<float> const& batch, Needed const&... needed) {
        double const since = seconds_now();
        double const loss = sequential::forward(batch, needed...);
        forward_seconds = seconds_now() - since;
        return loss;
    }
    template <class Ready>
    void backward(ddp::pass<float> how, Ready const& ready) {
        double const since = seconds_now();
        sequential::backward(how, ready);
        backward_seconds = seconds_now() - since;
    }

    double forward_seconds = 0, backward_seconds = 0;
};

constexpr std::array<std::string_view, 3> models{"mlp", "wide", "cnn"};

timed_network make_model(std::string_view name) {
    using namespace ddp::nn;
    auto const build = [&]() -> sequential<> {
        if (name == "mlp")
            return sequential{linear(784, 1024),      relu(), linear(1024, 1024), relu(), linear(1024, 10),
                              softmax_cross_entropy()};
        if (name == "wide")
            return sequential{linear(784, 4096),  relu(), linear(4096, 4096), relu(),
                              linear(4096, 4096), relu(), linear(4096, 10),   softmax_cross_entropy()};
        conv2d first({.channels = 1, .height = 28, .width = 28}, {.filters = 32, .kernel = 3, .padding = 1});
        max_pool2d half(first.output_shape());
        conv2d second(half.output_shape(), {.filters = 64, .kernel = 3, .padding = 1});
        max_pool2d quarter(second.output_shape());
        std::size_t const features = quarter.outputs();
        return sequential{std::move(first),
                          relu(),
                          std::move(half),
                          std::move(second),
                          relu(),
                          std::move(quarter),
                          flatten(),
                          linear(features, 128),
                          relu(),
                          linear(128, 10),
                          softmax_cross_entropy()};
    };
    timed_network net(build());
    net.initialize(1);
    return net;
}

/// The same batch for every step; another on each rank.
struct data {
    std::size_t rows, features = 784;
    std::vector<float> inputs;
    std::vector<std::uint32_t> labels;

    data(std::size_t samples, int rank) : rows(samples), inputs(rows * features), labels(rows) {
        ddp::random_stream const draws{100 + static_cast<std::uint64_t>(rank), ddp::random_use::user};
        for (std::size_t i = 0; i < inputs.size(); ++i) inputs[i] = 1.7320508f * draws.at(i).symmetric<float>();
        for (std::size_t i = 0; i < rows; ++i) labels[i] = static_cast<std::uint32_t>(draws.at(i).below(10));
    }
    [[nodiscard]] ddp::classification_batch<float> batch() const { return {inputs, labels, rows, features}; }
};

/// Seconds of one step, or medians of many. What a process has used is known of a whole round: `cpu`, `thread` and `sent`
/// are a round's, divided by its steps, and means of all ranks.
struct sample {
    double forward = 0, backward = 0, optimizer = 0, waiting = 0, step = 0;
    double cpu = 0, thread = 0;  ///< processor time of a rank, and of its communication thread
    double sent = 0;             ///< bytes in messages
};
sample median_of(std::vector<sample> const& all) {
    auto const of = [&](double sample::* part) {
        std::vector<double> values;
        values.reserve(all.size());
        for (sample const& one : all) values.push_back(one.*part);
        return median(values);
    };
    return {of(&sample::forward), of(&sample::backward), of(&sample::optimizer), of(&sample::waiting),
            of(&sample::step),    of(&sample::cpu),      of(&sample::thread),    of(&sample::sent)};
}

/// A way to train the model.
class kind {
public:
    explicit kind(std::string called) : name(std::move(called)) {}
    kind(kind const&) = delete;
    kind& operator=(kind const&) = delete;
    virtual ~kind() = default;
    virtual double step(sample& times) = 0;  ///< its loss; everything but times.step
    virtual bool good() = 0;                 ///< collective
    [[nodiscard]] virtual bool in_memory() const { return false; }

    std::string name;
    std::vector<sample> rounds = {};
    double first_loss = 0, last_loss = 0;
};

ddp::any_optimizer optimizer() {
    if (setting("OPTIMIZER", "sgd") == "adam") return ddp::adam{.lr = 0.0001};
    return ddp::sgd{.lr = 0.01, .momentum = 0.9};
}

class without_exchange final : public kind {
public:
    without_exchange(std::string_view model, data const& with)
        : kind("nosync"), net_(make_model(model)), batch_(with.batch()), replica_(net_) {
        replica_.attach(replica_.make_arena());
        stepper_ = std::make_unique<ddp::stepper<float>>(optimizer(), replica_.where(), replica_.parameters());
    }
    double step(sample& times) override {
        double const loss = replica_.forward(batch_);
        replica_.backward({.weight = batch_.size()});
        double const since = seconds_now();
        stepper_->step({.update = ++updates_, .gradient_scale = 1.0 / static_cast<double>(batch_.size())},
                       replica_.gradients(), replica_.values());
        replica_.values_changed();
        times.optimizer = seconds_now() - since;
        times.forward = net_.forward_seconds;
        times.backward = net_.backward_seconds;
        return loss;
    }
    bool good() override { return last_loss < first_loss; }

private:
    timed_network net_;
    ddp::classification_batch<float> batch_;
    ddp::replica<timed_network> replica_;
    std::unique_ptr<ddp::stepper<float>> stepper_;
    std::uint64_t updates_ = 0;
};

class with_exchange final : public kind {
public:
    template <class... Policies>
    with_exchange(std::string called, std::string_view model, data const& with, ddp::communicator<> const& comm,
                  Policies const&... policies)
        : kind(std::move(called)),
          net_(make_model(model)),
          batch_(with.batch()),
          trainer_(net_, optimizer(), comm, policies...) {}
    double step(sample& times) override {
        trainer_.reset_times();
        double const loss = trainer_.step(batch_).loss;
        times.forward = net_.forward_seconds;
        times.backward = net_.backward_seconds;
        times.optimizer = std::chrono::duration<double>(trainer_.times().stepped).count();
        times.waiting = std::chrono::duration<double>(trainer_.times().waited).count();
        return loss;
    }
    bool good() override { return trainer_.replicas_identical() && last_loss < first_loss; }
    [[nodiscard]] bool in_memory() const override { return trainer_.shares_memory(); }
    void report_slices(std::size_t bytes) { net_.report_slices(bytes); }

private:
    timed_network net_;
    ddp::classification_batch<float> batch_;
    ddp::data_parallel<timed_network, ddp::any_transport> trainer_;
};

/// What this rank's process has used so far.
struct usage {
    double cpu = 0, thread = 0, sent = 0;
};
usage usage_of(ddp::communicator<> const& comm) {
    ::rusage self{};
    ::getrusage(RUSAGE_SELF, &self);
    auto const seconds = [](::timeval const& t) {
        return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
    };
    return {seconds(self.ru_utime) + seconds(self.ru_stime), std::chrono::duration<double>(comm.thread_time()).count(),
            static_cast<double>(comm.bytes_sent())};
}

void run_round(ddp::communicator<> const& comm, kind& how, double budget, bool first) {
    auto const once = [&] {
        sample times;
        double const since = seconds_now();
        how.last_loss = how.step(times);
        times.step = seconds_now() - since;
        return times;
    };
    sample last = once();
    if (first) how.first_loss = how.last_loss;
    for (int i = 0; i < (first ? 2 : 0); ++i) last = once();
    ddp::barrier(comm);
    double const least = std::stod(setting("STEPS", "4"));
    auto steps = static_cast<std::uint64_t>(std::clamp(budget / std::max(last.step, 1e-4), least, 200.0));
    ddp::broadcast(comm, steps);
    std::vector<sample> all;
    all.reserve(steps);
    ddp::barrier(comm);
    usage const before = usage_of(comm);
    for (std::uint64_t i = 0; i < steps; ++i) all.push_back(once());
    usage const after = usage_of(comm);
    // Ranks that are threads share one process, whose time each of them reads.
    double const sharing = comm.transport().name() == "inproc" ? comm.size() : 1;
    std::array<double, 3> used{(after.cpu - before.cpu) / sharing, after.thread - before.thread,
                               after.sent - before.sent};
    ddp::allreduce(comm, std::span<double>(used));
    sample result = median_of(all);
    double const divisor = static_cast<double>(steps) * comm.size();
    result.cpu = used[0] / divisor;
    result.thread = used[1] / divisor;
    result.sent = used[2] / divisor;
    how.rounds.push_back(result);
}

struct options {
    std::string model, json;
    int threads = 0;  // 0: not --threads
    bool candidate = false;
};

struct row {
    std::string kind;
    sample times;
    double least = 0, most = 0;  // of the rounds' steps
    double exposed = 0;          // of the step; 0 where nosync was left out
    double comm_cpu = 0;         // likewise of the processor time
    [[nodiscard]] double cpu_a_64_mib() const { return times.sent > 4096 ? comm_cpu * 67108864 / times.sent : 0; }
    bool good = true, in_memory = false;
};

/// The communicator, as the output names it.
struct path {
    std::string transport, messages, thread;
};

/// The line of --candidate, with what only this program knows at the end.
std::string to_json(options const& with, row const& r, int ranks, std::size_t batch, std::size_t parameters,
                    path const& by) {
    sample const& t = r.times;
    std::string const words = "{\"bench\":\"ddp\",\"impl\":\"ddp\",\"net\":\"" + setting("NET", "loopback") +
                              "\",\"model\":\"" + with.model + "\",\"kind\":\"" + r.kind + "\",\"tune\":\"" +
                              setting("TUNE", "") + "\",\"transport\":\"" + by.transport + "\",\"messages\":\"" +
                              by.messages + "\",\"in_memory\":" + (r.in_memory ? "true" : "false") + ",\"thread\":\"" +
                              by.thread + "\",\"compiler\":\"" + ddp_perf::compiler + "\"";
    return words + text(",\"eigen\":\"%d.%d.%d\"", EIGEN_WORLD_VERSION, EIGEN_MAJOR_VERSION, EIGEN_MINOR_VERSION) +
           text(
               ",\"n\":%d,\"batch\":%zu,\"params\":%zu,\"grad_bytes\":%zu,\"fwd_ms\":%.3f,\"bwd_ms\":%.3f,"
               "\"opt_ms\":%.3f,\"step_ms\":%.3f,\"fb_ms\":%.3f,\"step_min_ms\":%.3f,\"step_max_ms\":%.3f,\"ok\":%s",
               ranks, batch, parameters, 4 * parameters, 1e3 * t.forward, 1e3 * (t.step - t.forward - t.optimizer),
               1e3 * t.optimizer, 1e3 * t.step, 1e3 * (t.step - t.optimizer), 1e3 * r.least, 1e3 * r.most,
               r.good ? "true" : "false") +
           text(
               ",\"compute_ms\":%.3f,\"wait_ms\":%.3f,\"exposed_ms\":%.3f,\"exposed_share\":%.4f,\"samples_per_s\":%."
               "1f",
               1e3 * (t.forward + t.backward), 1e3 * t.waiting, 1e3 * r.exposed, r.exposed / t.step,
               static_cast<double>(ranks) * static_cast<double>(batch) / t.step) +
           text(
               ",\"cpu_ms\":%.3f,\"comm_cpu_ms\":%.3f,\"thread_ms\":%.3f,\"sent_bytes\":%.0f,\"cpu_ms_a_64_mib\":%.3f}",
               1e3 * t.cpu, 1e3 * r.comm_cpu, 1e3 * t.thread, t.sent, 1e3 * r.cpu_a_64_mib());
}

/// Whether every kind was good.
bool measure(options const& with, ddp::communicator<> const& comm) {
    data const mine(with.model == "mlp" ? 128 : 64, comm.rank());
    std::string const skip = " " + setting("SKIP", "") + " ";
    auto const wanted = [&](char const* name) { return skip.find(" " + std::string(name) + " ") == std::string::npos; };
    std::vector<std::unique_ptr<kind>> kinds;
    if (wanted("nosync")) kinds.push_back(std::make_unique<without_exchange>(with.model, mine));
    std::vector<std::pair<char const*, ddp::training_options>> const ways{
        {"default", {}},  // in memory that the ranks share, if they are on one host
        {"replicated", {.update = ddp::update::replicated, .share_memory = false}},
        {"sharded", {.update = ddp::update::sharded, .share_memory = false}}};
    for (auto const& [name, how] : ways)
        if (wanted(name)) kinds.push_back(std::make_unique<with_exchange>(name, with.model, mine, comm, how));
    std::string const extra = " " + setting("WITH", "") + " ";
    auto const add = [&](char const* name, auto const& exchange,
                         std::size_t in_flight = ddp::training_options{}.buckets_in_flight) {
        if (extra.find(" " + std::string(name) + " ") == std::string::npos) return;
        ddp::training_options how{.share_memory = false, .buckets_in_flight = in_flight};
        if (std::string_view(name) == "one") how.update = ddp::update::replicated;
        kinds.push_back(std::make_unique<with_exchange>(name, with.model, mine, comm, how, exchange));
    };
    add("one", ddp::automatic_allreduce{}, 1);
    add("bf16_one", ddp::bfloat16_exchange{}, 1);
    add("bf16", ddp::bfloat16_exchange{});
    add("int8", ddp::int8_exchange{});
    add("powersgd", ddp::power_sgd_exchange{.rank = 4});
    add("topk", ddp::top_k_exchange{.ratio = 0.01});
    std::pair<char const*, ddp::training_options> const others[] = {
        {"unchecked", {.agreement_steps = 0}},
        {"replicated_unchecked", {.update = ddp::update::replicated, .share_memory = false, .agreement_steps = 0}},
        {"sharded_unchecked", {.update = ddp::update::sharded, .share_memory = false, .agreement_steps = 0}},
        {"nonfinite", {.nonfinite = ddp::nonfinite::stop}},
        {"unused", {.unused = ddp::unused::allowed}}};
    for (auto const& [name, how] : others)
        if (extra.find(" " + std::string(name) + " ") != std::string::npos)
            kinds.push_back(std::make_unique<with_exchange>(name, with.model, mine, comm, how));
    if (extra.find(" slices ") != std::string::npos) {
        auto sliced = std::make_unique<with_exchange>(
            "slices", with.model, mine, comm,
            ddp::training_options{.update = ddp::update::replicated, .share_memory = false});
        sliced->report_slices(std::size_t{4} << 20);
        kinds.push_back(std::move(sliced));
    }
    if (extra.find(" late ") != std::string::npos) {
        auto late = std::make_unique<with_exchange>(
            "late", with.model, mine, comm, ddp::training_options{.share_memory = false, .overlap_gather = true});
        late->report_slices(std::size_t{4} << 20);
        kinds.push_back(std::move(late));
    }
    if (kinds.empty()) throw std::runtime_error("SKIP leaves no kind of step");
    double const budget = std::stod(setting("STEP_BUDGET", "1.5"));
    int const rounds = std::max(1, std::stoi(setting("ROUNDS", "3")));
    for (int round = 0; round < rounds; ++round)
        for (auto const& one : kinds) run_round(comm, *one, budget, round == 0);

    std::size_t parameters = 0;
    timed_network net = make_model(with.model);
    for (auto const& p : net.parameters()) parameters += p.value.size();
    std::vector<row> rows;
    bool all_good = true;
    for (auto const& one : kinds) {
        row r{one->name, median_of(one->rounds)};
        auto const [least, most] = std::minmax_element(one->rounds.begin(), one->rounds.end(),
                                                       [](auto const& a, auto const& b) { return a.step < b.step; });
        r.least = least->step;
        r.most = most->step;
        if (kinds.front()->name == "nosync") {
            sample const alone = median_of(kinds.front()->rounds);
            r.exposed = r.times.step - alone.step;
            r.comm_cpu = r.times.cpu - alone.cpu;
        }
        r.good = one->good();
        r.in_memory = one->in_memory();
        all_good = all_good && r.good;
        rows.push_back(r);
    }
    if (comm.rank() != 0) return all_good;

    path const by{std::string(comm.transport().name()), name_of(comm.messages()), name_of(comm.thread())};
    std::string lines;
    if (!with.candidate)
        std::cout << text("# %s, %d rank%s over %s, %zu samples a rank, %zu parameters; communication thread: %s\n",
                          with.model.c_str(), comm.size(), comm.size() == 1 ? "" : "s", by.transport.c_str(), mine.rows,
                          parameters, by.thread.c_str())
                  << text("%-11s %9s %9s %9s %9s %9s %9s %7s %11s %9s %9s %9s %9s\n", "ms", "step", "forward",
                          "backward", "optimizer", "waiting", "exposed", "share", "samples/s", "cpu", "comm cpu",
                          "thread", "a 64 MiB");
    for (row const& r : rows) {
        std::string const line = to_json(with, r, comm.size(), mine.rows, parameters, by);
        lines += (lines.empty() ? "  " : ",\n  ") + line;
        sample const& t = r.times;
        if (with.candidate)
            std::cout << line << '\n';
        else
            std::cout << text("%-11s %9.2f %9.2f %9.2f %9.2f %9.2f %9.2f %6.1f%% %11.0f %9.2f %9.2f %9.2f %9.2f%s\n",
                              r.kind.c_str(), 1e3 * t.step, 1e3 * t.forward, 1e3 * t.backward, 1e3 * t.optimizer,
                              1e3 * t.waiting, 1e3 * r.exposed, 100 * r.exposed / t.step,
                              static_cast<double>(comm.size()) * static_cast<double>(mine.rows) / t.step, 1e3 * t.cpu,
                              1e3 * r.comm_cpu, 1e3 * t.thread, 1e3 * r.cpu_a_64_mib(),
                              r.good ? "" : "  WRONG: replicas differ, or the loss has not fallen");
    }
    std::cout << std::flush;
    if (!with.json.empty()) {
        std::ofstream file(with.json);
        file << "{\"tool\":\"train_step\",\"rows\":[\n" << lines << "\n]}\n";
        if (!file.flush()) throw std::runtime_error(with.json + " cannot be written");
    }
    return all_good;
}

[[noreturn]] void refuse(std::string const& problem) {
    std::cerr << "train_step: " << problem
              << "\nusage: train_step [--threads N] [--json FILE] [--candidate] mlp|wide|cnn\n";
    std::exit(2);
}

options parse(std::vector<std::string> const& words) {
    options result;
    for (std::size_t i = 0; i < words.size(); ++i) {
        std::string const& word = words[i];
        auto const value = [&] { return i + 1 < words.size() ? words[++i] : (refuse(word + " needs a value"), ""); };
        if (word == "--candidate")
            result.candidate = true;
        else if (word == "--json")
            result.json = value();
        else if (word == "--threads") {
            result.threads = std::atoi(value().c_str());
            if (result.threads < 1) refuse("--threads takes a positive number");
        } else if (result.model.empty() && std::find(models.begin(), models.end(), word) != models.end())
            result.model = word;
        else
            refuse("'" + word + "' is not understood");
    }
    if (result.model.empty()) refuse("which model?");
    return result;
}

}  // namespace

int main(int argc, char** argv) {
    options const with = parse({argv + 1, argv + argc});
    ddp::run_options how{.ranks = with.threads};
    if (with.threads > 0) how.transport = "inproc";
    std::atomic<bool> good{true};
    auto const body = [&](ddp::communicator<>& comm) {
        if (!measure(with, comm)) good = false;
    };
#if defined(DDP_WITH_MPI)
    int const code = ddp::run_main<ddp::threads, ddp::secure_tcp, ddp::mpi>(how, body);
#else
    int const code = ddp::run_main<ddp::threads, ddp::secure_tcp>(how, body);
#endif
    return code != EXIT_SUCCESS ? code : good ? EXIT_SUCCESS : EXIT_FAILURE;
}
