// What pages show and no example contains. Compiled and run over threads; with MPI, where there is one, under it too.
#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ddp/adapter/flat_model.hpp>
#include <ddp/checkpoint/checkpoints.hpp>
#include <ddp/collective/measure_network.hpp>
#include <ddp/comm/long_operation.hpp>
#include <ddp/data/prefetch_loader.hpp>
#include <ddp/ddp.hpp>
#include <ddp/nn/nn.hpp>
#include <ddp/rendezvous/run_tcp.hpp>
#include <ddp/strategy/local_parallel.hpp>
#include <ddp/testing/check_model.hpp>
#include <ddp/train/reduce_on_plateau.hpp>
#include <ddp/transport/framed/tcp.hpp>  // ddp::tcp_transport
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>
#ifdef SNIPPETS_WITH_MPI
#include <boost/mpi/communicator.hpp>
#include <boost/mpi/environment.hpp>
#include <ddp/collective/algorithms/native_allreduce.hpp>  // needs the target ddp::mpi
#include <ddp/rendezvous/run_mpi.hpp>
#endif

namespace {

struct my_metrics {
    ddp::mean_metric loss, length;
    std::uint64_t exact = 0;
    my_metrics& operator+=(my_metrics const& other) {
        loss += other.loss, length += other.length, exact += other.exact;
        return *this;
    }
};

struct gradient_noise {
    void on(ddp::mean_gradient<float> const& event) const {
        ddp::random_stream const draws{7, ddp::random_use::user, event.step};
        std::uint64_t const first = (std::uint64_t{event.parameter} << 32) + event.begin;
        for (std::size_t k = 0; k < event.gradient.size(); ++k)
            event.gradient[k] += draws.at(first + k).symmetric<float>() * 0x1p-10f;  // exact: nothing to contract
    }
};

/// The plain mean after every `period` steps: each rank counts alike, however many samples it has trained on.
struct plain_mean {
    static constexpr char const* name = "plain_mean";
    static constexpr bool agrees = true;  // meet() leaves the same bits on all ranks

    std::uint64_t period = 8;

    [[nodiscard]] std::uint64_t hash() const { return ddp::policy_hash(name, period); }
    void validate() const {
        if (period == 0) throw ddp::usage_error("plain_mean: period is 0");
    }
    [[nodiscard]] bool due(std::uint64_t step) const { return step % period == 0; }
    template <ddp::Element E>
    [[nodiscard]] ddp::no_strategy_state prepare(ddp::strategy_plan<E> const& /*plan*/) const {
        return {};
    }
    template <ddp::Transport T, ddp::Element E>
    void meet(ddp::no_strategy_state& /*state*/, ddp::meeting<T, E> const& with) const {
        ddp::allreduce(with.comm, with.values);
        for (E& value : with.values) value /= static_cast<E>(with.comm.size());
    }
};
static_assert(ddp::StrategyOver<plain_mean, ddp::any_transport, float>);

/// The plain mean of values as they were `period` steps ago: what a rank has learnt since is added to it. No rank waits for
/// what the others do in the same step.
struct late_mean {
    static constexpr char const* name = "late_mean";
    static constexpr bool agrees = false;

    std::uint64_t period = 8;

    template <ddp::Element E>
    struct state {
        std::vector<E> own = {};     // this rank's values when the exchange began
        std::span<E> sum = {};       // of all ranks; behind it, how many have no more data, and how many want to stop
        ddp::request exchange = {};  // the last member: it ends before the memory that it uses is destroyed
        bool open = false;
        void for_each_state(ddp::state_visitor /*visit*/) const {}  // shown only when no exchange is open
    };

    [[nodiscard]] std::uint64_t hash() const { return ddp::policy_hash(name, period); }
    void validate() const {
        if (period == 0) throw ddp::usage_error("late_mean: period is 0");
    }
    [[nodiscard]] bool due(std::uint64_t step) const { return step % period == 0; }
    template <ddp::Element E>
    [[nodiscard]] state<E> prepare(ddp::strategy_plan<E> const& plan) const {
        return {.own = std::vector<E>(plan.values.size()), .sum = plan.array(plan.values.size() + 2)};
    }
    template <ddp::Transport T, ddp::Element E>
    [[nodiscard]] ddp::passed pass(state<E>& kept, ddp::passing<T, E> const& with) const {
        ddp::passed const said = end(kept, with.comm.size(), with.values);
        if (said.done) return said;  // an exchange begun now would say it again
        std::ranges::copy(with.values, kept.own.begin());
        std::ranges::copy(with.values, kept.sum.begin());
        kept.sum[kept.own.size()] = with.done ? E(1) : E(0);
        kept.sum[kept.own.size() + 1] = with.stop ? E(1) : E(0);
        kept.exchange = ddp::start_allreduce(with.comm, kept.sum);
        kept.open = true;
        return said;
    }
    template <ddp::Transport T, ddp::Element E>
    void drain(state<E>& kept, ddp::meeting<T, E> const& last) const {
        (void)end(kept, last.comm.size(), last.values);
        ddp::allreduce(last.comm, last.values);
        for (E& value : last.values) value /= static_cast<E>(last.comm.size());
    }

private:
    template <ddp::Element E>
    static ddp::passed end(state<E>& kept, int ranks, std::span<E> values) {
        if (!std::exchange(kept.open, false)) return {};
        kept.exchange.wait();
        std::size_t const count = kept.own.size();
        for (std::size_t i = 0; i < count; ++i) values[i] += kept.sum[i] / static_cast<E>(ranks) - kept.own[i];
        return {.done = kept.sum[count] == static_cast<E>(ranks), .stop = kept.sum[count + 1] != 0, .met = true};
    }
};
static_assert(ddp::StrategyOver<late_mean, ddp::any_transport, float>);

/// Multiplies each column by a factor of its own, which is trained.
class column_scale {
public:
    using element = float;

    explicit column_scale(std::size_t columns) : factors_{ddp::nn::trainable<float>("factor", {columns})} {}

    std::span<ddp::nn::trainable<float>> parameters() { return factors_; }
    void initialize(std::uint64_t /*seed*/, std::uint64_t /*first*/) { std::ranges::fill(factors_[0].value(), 1.0f); }
    [[nodiscard]] std::size_t inputs() const { return factors_[0].size(); }
    [[nodiscard]] std::size_t outputs() const { return factors_[0].size(); }

    ddp::nn::matrix_view<float> forward(ddp::nn::const_matrix_view<float> x, ddp::nn::forward_mode /*mode*/) {
        x_ = x.data();  // stays valid until backward has returned
        ddp::nn::matrix_view<float> y = y_.take(ddp::nn::rows_of(x), outputs());
        y.array() = x.array().rowwise() * row(factors_[0].value()).array();
        return y;
    }
    ddp::nn::matrix_view<float> backward(ddp::nn::matrix_view<float> dy, ddp::nn::backward_mode mode) {
        ddp::nn::const_matrix_view<float> const x(x_, dy.rows(), dy.cols());
        row gradient(factors_[0].gradient());
        if (!mode.accumulate) gradient.setZero();
        gradient += dy.cwiseProduct(x).colwise().sum();
        if (!mode.input_gradient) return {nullptr, 0, 0};
        dy.array().rowwise() *= row(factors_[0].value()).array();  // dy may be overwritten
        return dy;
    }

private:
    struct row : Eigen::Map<Eigen::RowVectorXf> {
        explicit row(std::span<float> all) : Map(all.data(), static_cast<Eigen::Index>(all.size())) {}
    };

    std::array<ddp::nn::trainable<float>, 1> factors_;
    ddp::nn::buffer<float> y_;
    float const* x_ = nullptr;
};
static_assert(ddp::nn::LayerOf<column_scale, float>);

auto make_model() {
    return ddp::nn::sequential{ddp::nn::linear(1, 1), ddp::nn::mean_squared_error()};
}

std::vector<float> const x{0.0f, 1.0f}, y{1.0f, 3.0f};
std::vector<ddp::regression_batch<float>> const batches(50, {.inputs = x, .targets = y, .rows = 2, .features = 1});

void groups_of_several_algorithms(ddp::communicator<>& comm) {
    auto model = make_model();
    ddp::parameter_groups<ddp::any_optimizer> optimizer{ddp::adamw{}, {{"*.bias", ddp::sgd{.lr = 0.1}}}};
    ddp::training_options const guarded{.nonfinite = ddp::nonfinite::skip};
    ddp::data_parallel trainer{model, optimizer, comm, guarded};
    {
        auto const guard = trainer.no_sync();
        for (auto const& batch : batches) {
            trainer.forward(batch);
            trainer.backward();  // adds to the gradient; no communication
        }
    }
    trainer.forward(batches.front());
    trainer.backward();
    trainer.finish();

    ddp::reduce_on_plateau plateau{{.factor = 0.5, .patience = 2}};
    double const loss = trainer.step(batches.front()).loss;
    plateau.update(comm, loss);  // rank 0's metric decides
    trainer.set_rate_factor(plateau.factor());

    ddp::early_stopping stopping;
    stopping.update(comm, loss);
    if (char const* const path = std::getenv("KEPT")) {
        ddp::checkpoints kept(path);
        if (auto const from = kept.resume(trainer)) {
            plateau.restore(from->entries.at("plateau"));
            stopping.restore(from->entries.at("stopping"));
        }
        kept.save(trainer, {{"plateau", plateau.text()}, {"stopping", stopping.text()}});
    }

    if (char const* const path = std::getenv("WEIGHTS")) {
        ddp::load_report const report = ddp::load_weights_as(
            trainer, path, {.strict = false, .cast = true, .file_prefix = "module.", .model_prefix = "0."});
        for (std::string const& name : report.missing) std::printf("%s is left as it was\n", name.c_str());
    }
}

void frozen(ddp::communicator<>& comm) {
    auto model = make_model(), other = make_model();
    ddp::data_parallel noisy{model, ddp::sgd{.lr = 0.1}, comm, gradient_noise{}};
    noisy.step(batches.front());
    ddp::data_parallel tuned{other, ddp::adamw{}, comm, {.frozen = {"0.*"}}};
    tuned.step(batches.front());
    tuned.unfreeze("0.bias");
    tuned.freeze("*.weight");
    tuned.step(batches.front());
}

void gathered_late(ddp::communicator<>& comm) {
    auto model = make_model();
    ddp::data_parallel trainer{model, ddp::adamw{}, comm, {.overlap_gather = true}};
    for (auto const& batch : batches) trainer.step(batch);
    trainer.settle();  // model's own memory is current from here on
}

void prefetched(ddp::communicator<>& comm) {
    ddp::classification_data const data{.sample_shape = {2, 2},
                                        .features = 4,
                                        .classes = 2,
                                        .inputs = std::vector<std::uint8_t>(800),
                                        .labels = std::vector<std::uint32_t>(200)};
    ddp::nn::sequential model{ddp::nn::linear(4, 2), ddp::nn::softmax_cross_entropy()};
    ddp::data_parallel trainer{model, ddp::sgd{.lr = 0.1}, comm};
    ddp::prefetch_loader<float> load{data,
                                     ddp::sampler{{.samples = data.size(), .global_batch = 100}, comm},
                                     {.augment = {.crop_padding = 4, .flip = true, .seed = 7}}};
    while (auto const batch = load.next()) trainer.step(*batch);  // an epoch

    ddp::checkpoints kept("kept");
    ddp::sampler at = load.place();
    if (kept.resume(trainer, at)) load.seek(at.epoch(), at.position());
}

void fitted_to_the_network(ddp::communicator<>& comm) {
    std::vector<float> all(1000, 1.0f);
    ddp::automatic_allreduce const fitted{.cost = ddp::measure_network(comm)};
    if (comm.rank() == 0) std::printf("1 MiB goes by %s\n", fitted.choice(1 << 20, comm.size()));
    ddp::allreduce(comm, all, fitted);
}

bool sends_over_tcp(ddp::communicator<>& comm) {
    ddp::tcp_transport const* const over_tcp = comm.transport().target<ddp::tcp_transport>();
    return over_tcp != nullptr;
}

void between_hosts(ddp::communicator<>& comm) {
    std::vector<float> all(1000, 1.0f);
    ddp::hierarchical_allreduce const by_hosts(comm);  // collective: ranks exchange where they are
    ddp::allreduce(comm, all, by_hosts);
}

void evaluated_alone(ddp::communicator<>& comm) {
    auto model = make_model();
    if (comm.rank() == 0) {
        ddp::long_operation const scope(comm, "evaluation", std::chrono::minutes(20));
        for (auto const& batch : batches) model.forward(batch);
    }
    ddp::barrier(comm);
}

void own_strategy(ddp::communicator<>& comm) {
    auto model = make_model();
    ddp::local_parallel trainer{model, ddp::sgd{.lr = 0.1}, comm, plain_mean{.period = 4}};
    std::vector<float> const other{static_cast<float>(comm.rank()), 1.0f};  // ranks drift apart between meetings
    for (int step = 1; step <= 8; ++step) {
        auto const result =
            trainer.step(ddp::regression_batch<float>{.inputs = other, .targets = y, .rows = 2, .features = 1});
        if (result.met != (step % 4 == 0)) throw std::logic_error("plain_mean: a meeting at a wrong time");
        if (result.met && !trainer.replicas_identical()) throw std::logic_error("plain_mean: other values");
    }
}

void own_late_strategy(ddp::communicator<>& comm) {
    auto model = make_model();
    ddp::local_parallel trainer{model, ddp::sgd{.lr = 0.1}, comm, late_mean{.period = 2}};
    std::vector<float> const other{static_cast<float>(comm.rank()), 1.0f};
    for (int epoch = 1; epoch <= 2; ++epoch) {
        int meetings = 0;
        for (int step = 1; step <= 6 + comm.rank(); ++step)
            meetings +=
                trainer.step(ddp::regression_batch<float>{.inputs = other, .targets = y, .rows = 2, .features = 1}).met;
        if (meetings < 2) throw std::logic_error("late_mean: too few exchanges have ended");
        while (trainer.join()) {
        }
        trainer.synchronise();
        if (!trainer.replicas_identical()) throw std::logic_error("late_mean: other values");
    }
}

void own_layer() {
    ddp::nn::sequential model{column_scale(2), ddp::nn::linear(2, 3), ddp::nn::tanh(),
                              column_scale(3), ddp::nn::linear(3, 1), ddp::nn::mean_squared_error()};
    std::vector<float> const in{0.5f, -1.0f, 2.0f, 0.25f}, out{1.0f, -1.0f};
    ddp::regression_batch<float> const batch{.inputs = in, .targets = out, .rows = 2, .features = 2};
    auto const complaints = ddp::testing::check_model(model, batch);
    if (!complaints.empty()) throw std::logic_error(complaints.front());
}

double without_a_trainer() {
    auto model = make_model();
    ddp::replica net{model};
    net.attach(net.make_arena());
    ddp::stepper<float> local(ddp::sgd{.lr = 0.1}, net.where(), net.parameters());
    for (std::uint64_t update = 1; auto const& batch : batches) {
        net.forward(batch);
        net.backward({.weight = batch.size()});  // gradients are sums over this many samples
        local.step({.update = update++, .gradient_scale = 1.0 / static_cast<double>(batch.size())}, net.gradients(),
                   net.values());
        net.values_changed();
    }
    return net.forward(batches.front());
}

void body(ddp::communicator<>& comm) {
    groups_of_several_algorithms(comm);
    frozen(comm);
    gathered_late(comm);
    prefetched(comm);
    fitted_to_the_network(comm);
    between_hosts(comm);
    evaluated_alone(comm);
    own_strategy(comm);
    own_late_strategy(comm);
    if (comm.rank() == 0) own_layer();
    if (sends_over_tcp(comm)) throw std::logic_error("these ranks are threads");
    my_metrics mine;
    mine.loss.add(1.0 + comm.rank(), 1);
    mine.exact = 1;
    my_metrics const all = ddp::sum_over_ranks(comm, mine);
    if (comm.rank() == 0)
        std::printf("loss %.1f, exact %d of %d, without a trainer %.3f\n", all.loss.mean(), static_cast<int>(all.exact),
                    comm.size(), without_a_trainer());
}

#ifdef SNIPPETS_WITH_MPI
void vendors_sum(boost::mpi::communicator const& world, std::vector<float>& numbers) {
    auto model = make_model();
    auto comm = ddp::mpi_communicator(world);
    ddp::allreduce(comm, numbers, ddp::native_allreduce{});
    ddp::data_parallel trainer{model, ddp::adamw{}, comm, ddp::native_allreduce{}};
    trainer.step(batches.front());
}

/// A straight line through points: values are intercept and slope. What your program has.
struct line {
    struct point {
        double x, y;
    };
    std::vector<double> values = {0, 0}, gradient = {0, 0};
    double loss_and_gradient(std::vector<point> const& batch) {  // of the mean over the batch
        double loss = 0;
        gradient = {0, 0};
        for (point const& p : batch) {
            double const off = values[0] + values[1] * p.x - p.y, share = off / static_cast<double>(batch.size());
            loss += share * off / 2;
            gradient[0] += share, gradient[1] += share * p.x;
        }
        return loss;
    }
};

std::vector<double> by_hand(MPI_Comm comm, std::vector<line::point> const& batch) {
    line net;
    int ranks = 0;
    MPI_Comm_size(comm, &ranks);
    MPI_Bcast(net.values.data(), 2, MPI_DOUBLE, 0, comm);
    for (int step = 0; step < 100; ++step) {
        net.loss_and_gradient(batch);
        MPI_Allreduce(MPI_IN_PLACE, net.gradient.data(), 2, MPI_DOUBLE, MPI_SUM, comm);
        for (std::size_t i = 0; i < 2; ++i) net.values[i] -= 0.1 * net.gradient[i] / ranks;
    }
    return net.values;
}

std::vector<double> by_trainer(boost::mpi::communicator const& world, std::vector<line::point> const& batch) {
    line net;
    auto const passes = [&](std::vector<line::point> const& points) { return net.loss_and_gradient(points); };
    ddp::flat_model model{net.values, net.gradient, passes};
    auto comm = ddp::mpi_communicator(world);
    ddp::data_parallel trainer{model, ddp::sgd{.lr = 0.1}, comm};
    for (int step = 0; step < 100; ++step) trainer.step(batch);
    return net.values;
}

/// The largest difference of the two: shares are of one size.
double between_the_loops(boost::mpi::communicator const& world) {
    double const r = world.rank();
    std::vector<line::point> const batch{{r, 3 - r}, {r + 0.5, 1}, {-r, 2 * r}};
    std::vector<double> const ours = by_trainer(world, batch), theirs = by_hand(world, batch);
    return std::max(std::abs(ours[0] - theirs[0]), std::abs(ours[1] - theirs[1]));
}

int run_anywhere() {
    return ddp::run_main<ddp::threads, ddp::tcp, ddp::mpi>(body);
}
#endif

}  // namespace

int main(int argc, char** argv) {
#ifdef SNIPPETS_WITH_MPI
    if (argc > 1 && std::string_view(argv[1]) == "mpi") {
        boost::mpi::environment environment(argc, argv);
        std::vector<float> numbers{1, 2};
        vendors_sum({}, numbers);
        double const apart = between_the_loops({});
        std::printf("the vendor's sum is %.0f, the two loops %s\n", static_cast<double>(numbers[1]),
                    apart < 1e-12 ? "agree" : "differ");
        return 0;
    }
    if (argc < 0) return run_anywhere();
#endif
    int const threads = argc > 1 ? std::atoi(argv[1]) : 0;
    ddp::run_options how;                                              // as the launcher says
    if (threads > 0) how = {.transport = "inproc", .ranks = threads};  // that many threads
    return ddp::run_main<ddp::threads, ddp::tcp>(how, body);
}
