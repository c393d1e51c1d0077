// The examples in the headers' comments, which docs/reference/*.md show: nothing runs them, but they compile. Each stands between
// `// example: NAME`, with the heading under which the reference shows it, and `// end`; tests/docs/pages.py compares them. What an
// example takes for granted are a function's parameters. The functions are inline, so templates are instantiated and checked, and no
// code is generated.
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <ddp/adapter/accumulating.hpp>
#include <ddp/adapter/flat_model.hpp>
#include <ddp/checkpoint/checkpoints.hpp>
#include <ddp/checkpoint/stop_signals.hpp>
#include <ddp/collective/measure_network.hpp>
#include <ddp/collective/shared_array.hpp>
#include <ddp/comm/long_operation.hpp>
#include <ddp/data/gzip.hpp>
#include <ddp/data/prefetch_loader.hpp>
#include <ddp/ddp.hpp>
#include <ddp/nn/nn.hpp>
#include <ddp/rendezvous/run_secure.hpp>
#include <ddp/rendezvous/run_tcp.hpp>
#include <ddp/sim/cluster.hpp>
#include <ddp/strategy/averaging.hpp>
#include <ddp/strategy/local_parallel.hpp>
#include <ddp/train/reduce_on_plateau.hpp>
#include <ddp/transport/framed/frame_descriptor.hpp>
#include <ddp/transport/framed/framed.hpp>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>
#ifdef SNIPPETS_WITH_MPI
#include <boost/mpi/communicator.hpp>
#include <ddp/rendezvous/run_mpi.hpp>
#endif

// An example ends where its reader goes on.
#pragma GCC diagnostic ignored "-Wunused-variable"
#pragma GCC diagnostic ignored "-Wunused-but-set-variable"

namespace docstring_examples {

using network = ddp::nn::sequential<float>;
using any_trainer = ddp::data_parallel<network, ddp::any_transport>;
using batch_type = ddp::classification_batch<float>;
using loader = ddp::batch_loader<float>;

// core, kernel

struct lion_like {
    double lr, beta1, beta2, weight_decay;
    // example: policy_hash
    std::uint64_t hash() const { return ddp::policy_hash("lion", lr, beta1, beta2, weight_decay); }
    // end
    // example: policy_words
    std::string hash_words() const { return ddp::policy_words("lion", {{"lr", lr}, {"beta1", beta1}}); }
    // end
};

// example: DDP_KERNEL
template <std::floating_point E>
DDP_KERNEL void axpy(E* out, E const* in, std::size_t count, E factor) {
    DDP_NO_CONTRACTION
    DDP_INDEPENDENT
    for (std::size_t i = 0; i < count; ++i) out[i] += factor * in[i];
}
// end

// comm

inline void of_long_operation(ddp::communicator<>& comm, network& model, batch_type const& batch) {
    auto const evaluate = [&](network& of) { of.forward(batch); };
    // example: long_operation
    if (comm.rank() == 0) {
        ddp::long_operation const scope(comm, "evaluation", std::chrono::minutes(20));
        evaluate(model);
    }
    ddp::barrier(comm);
    // end
}

// nn

inline void of_sequential() {
    // example: sequential
    ddp::nn::sequential net{ddp::nn::linear(784, 128), ddp::nn::relu(), ddp::nn::linear(128, 10),
                            ddp::nn::softmax_cross_entropy()};
    // end
}

inline void of_batch_norm() {
    // example: batch_norm
    ddp::nn::batch_norm(128);  // for rows of 128 features
    ddp::nn::batch_norm({.channels = 16, .height = 14, .width = 14},
                        {.statistics = ddp::nn::batch_statistics::synchronised});
    // end
}

inline void of_conv2d() {
    // example: conv2d
    ddp::nn::conv2d first({.channels = 1, .height = 28, .width = 28}, {.filters = 16, .kernel = 3, .padding = 1});
    ddp::nn::max_pool2d half(first.output_shape());  // before first is moved from
    ddp::nn::sequential net{std::move(first), ddp::nn::relu(), std::move(half), ddp::nn::linear(16 * 14 * 14, 10),
                            ddp::nn::softmax_cross_entropy()};
    // end
}

// optim

inline void of_parameter_groups() {
    // example: parameter_groups
    ddp::parameter_groups const optimizer{
        ddp::adamw{.lr = 1e-3},                                  // all others
        {{"*.bias", ddp::adamw{.lr = 1e-3, .weight_decay = 0}},  // the first that matches
         {"head.*", ddp::adamw{.lr = 1e-2}}}};
    // end
}

inline void of_parameter_groups_of_several_algorithms() {
    // example: parameter_groups
    ddp::parameter_groups<ddp::any_optimizer> const optimizer{ddp::adamw{}, {{"embedding.*", ddp::sgd{.lr = 0.1}}}};
    // end
}

inline void of_schedule() {
    // example: schedule
    ddp::schedule const rate{ddp::linear_warmup{.steps = 100, .from = 0.25}, ddp::cosine_decay{.steps = 900}};
    // end
}

// data

inline void of_sampler(ddp::communicator<>& comm, ddp::classification_data const& data,
                       void (&train)(std::span<std::uint32_t const>)) {
    // example: sampler
    ddp::sampler batches{{.samples = data.size(), .global_batch = 128, .seed = 7}, comm};
    for (int epoch = 0; epoch < 5; ++epoch)
        while (auto const batch = batches.next()) train(*batch);  // indices of samples
    // end
}

inline void of_share_of(ddp::communicator<>& comm, std::span<std::uint32_t const> my_order, std::size_t step,
                        loader& load, any_trainer& trainer) {
    // example: share_of
    std::span<std::uint32_t const> const batch = my_order.subspan(step * 128, 128);  // the same on every rank
    auto const [begin, end] = ddp::share_of(batch.size(), comm.rank(), comm.size());
    trainer.step(load(batch.subspan(begin, end - begin)));  // load: for example a batch_loader
    // end
}

inline void of_load_idx_classification(std::string const& directory) {
    // example: load_idx_classification
    auto const data = ddp::load_idx_classification<ddp::gzip_source>(directory, ddp::data_split::train);
    // end
}

inline void of_batch_loader(ddp::classification_data const& data, ddp::sampler& batches, any_trainer& trainer) {
    // example: batch_loader
    ddp::batch_loader<float> load{data, batches.largest_share()};
    while (auto const indices = batches.next()) trainer.step(load(*indices));
    // end
}

inline void of_prefetch_loader(ddp::communicator<>& comm, ddp::classification_data const& data, any_trainer& trainer) {
    // example: prefetch_loader
    ddp::prefetch_loader<float> load{data,
                                     ddp::sampler{{.samples = data.size(), .global_batch = 128}, comm},
                                     {.augment = {.crop_padding = 4, .flip = true}}};
    for (int epoch = 0; epoch < 5; ++epoch)
        while (auto const batch = load.next()) trainer.step(*batch);
    // end
}

// collective

inline void of_shared_array(ddp::communicator<>& comm, std::size_t n, void (&compute)(std::span<float>)) {
    // example: shared_array
    ddp::shared_array<float> gradient(comm, n);
    compute(gradient.span());
    ddp::allreduce(comm, gradient);
    // end
}

inline void of_automatic_allreduce(ddp::communicator<>& comm) {
    // example: automatic_allreduce
    ddp::automatic_allreduce fitted{.cost = ddp::measure_network(comm)};
    std::puts(fitted.choice(1 << 20, comm.size()));  // such as "direct"
    // end
}

inline void of_measure_network(ddp::communicator<>& comm) {
    // example: measure_network
    ddp::automatic_allreduce const fitted{.cost = ddp::measure_network(comm)};
    // end
}

inline void of_hierarchical_allreduce(ddp::communicator<>& comm, std::vector<float>& data) {
    // example: hierarchical_allreduce
    ddp::hierarchical_allreduce const by_hosts(comm);  // collective
    ddp::allreduce(comm, data, by_hosts);
    // end
}

// train

inline void of_data_parallel(ddp::communicator<>& comm, network& model, std::vector<batch_type> const& batches) {
    // example: data_parallel
    ddp::data_parallel trainer{model, ddp::sgd{.lr = 0.1}, comm};
    for (auto const& batch : batches) trainer.step(batch);
    // end
}

inline void of_no_sync(any_trainer& trainer, std::vector<batch_type> const& micro_batches, batch_type const& last) {
    // example: data_parallel
    {
        auto const guard = trainer.no_sync();
        for (auto const& batch : micro_batches) trainer.forward(batch), trainer.backward();
    }
    trainer.forward(last), trainer.backward(), trainer.finish();
    // end
}

inline void of_training_options(ddp::communicator<>& comm, network& model) {
    // example: training_options
    ddp::data_parallel trainer{
        model, ddp::adamw{}, comm, {.update = ddp::update::sharded, .clip = ddp::clip_by_global_norm{1.0}}};
    // end
}

inline void of_evaluate(ddp::communicator<>& comm, network& model, ddp::classification_data const& test, loader& load) {
    // example: evaluate
    ddp::sampler order{{.samples = test.size(), .global_batch = 1000, .shuffle = false}, comm};
    auto const metrics = ddp::evaluate(comm, model, [&] { return order.next(); }, load);
    // end
}

inline void of_evaluate_of_a_trainer(any_trainer& trainer, ddp::sampler& order, loader& load) {
    // example: evaluate
    auto const metrics = ddp::evaluate(trainer, [&] { return order.next(); }, load);
    // end
}

inline void of_mean_metric(ddp::communicator<>& comm, any_trainer& trainer, ddp::sampler& batches, loader& load) {
    // example: mean_metric
    ddp::mean_metric loss;
    while (auto const mine = batches.next())
        loss.add(trainer.step(load(*mine)).loss, mine->size());  // this rank's share
    double const everybody = ddp::sum_over_ranks(comm, loss).mean();
    // end
}

inline void of_early_stopping(ddp::communicator<>& comm, any_trainer& trainer, void (&train_an_epoch)(any_trainer&),
                              ddp::sampler& order, loader& load, void (&keep_values)(any_trainer&)) {
    // example: early_stopping
    ddp::early_stopping stopping{{.patience = 5, .min_delta = 1e-3}};
    while (!stopping.stopped()) {
        train_an_epoch(trainer);
        auto const metrics = ddp::evaluate(trainer, [&] { return order.next(); }, load);
        stopping.update(comm, metrics.loss());  // collective
        if (stopping.improved()) keep_values(trainer);
    }
    // end
}

inline void of_reduce_on_plateau(ddp::communicator<>& comm, any_trainer& trainer, void (&train_an_epoch)(any_trainer&),
                                 ddp::sampler& order, loader& load) {
    // example: reduce_on_plateau
    ddp::reduce_on_plateau plateau{{.patience = 2}};
    for (int epoch = 0; epoch < 50; ++epoch) {
        train_an_epoch(trainer);
        auto const metrics = ddp::evaluate(trainer, [&] { return order.next(); }, load);
        plateau.update(comm, metrics.loss());       // collective
        trainer.set_rate_factor(plateau.factor());  // collective
    }
    // end
}

inline void of_reduce_on_plateau_in_a_checkpoint(ddp::checkpoints& kept, any_trainer& trainer, ddp::sampler& batches,
                                                 ddp::reduce_on_plateau& plateau) {
    // example: reduce_on_plateau
    kept.save(trainer, batches, {{"plateau", plateau.text()}});
    if (auto const from = kept.resume(trainer, batches)) plateau.restore(from->entries.at("plateau"));
    // end
}

inline void of_local_parallel(ddp::communicator<>& comm, network& model, ddp::sampler& batches, loader& load) {
    // example: local_parallel
    ddp::local_parallel trainer{model, ddp::adamw{}, comm, ddp::local_sgd{.period = 16}};
    while (auto const mine = batches.next()) trainer.step(load(*mine));
    while (trainer.join()) {
    }
    trainer.synchronise();
    // end
}

inline void of_hierarchical_averaging(ddp::communicator<>& comm) {
    // example: hierarchical_averaging
    ddp::hierarchical_averaging const strategy{.inner = comm.host(), .inner_period = 4, .period = 32};
    // end
}

inline void of_replica(network& model, std::vector<batch_type> const& batches) {
    // example: replica
    ddp::replica net{model};
    net.attach(net.make_arena());
    ddp::stepper<float> local(ddp::sgd{.lr = 0.1}, net.where(), net.parameters());
    for (std::uint64_t update = 1; auto const& batch : batches) {
        net.forward(batch);
        net.backward({.weight = batch.size()});
        local.step({.update = update++, .gradient_scale = 1.0 / double(batch.size())}, net.gradients(), net.values());
        net.values_changed();
    }
    // end
}

inline void of_stepper(ddp::replica<network>& net, std::uint64_t n, double samples) {
    // example: stepper
    ddp::stepper<float> local(ddp::sgd{.lr = 0.1}, net.where(), net.parameters());
    local.step({.update = ++n, .gradient_scale = 1.0 / samples}, net.gradients(), net.values());
    // end
}

// rendezvous, transport, sim

void train(ddp::communicator<>& comm);

inline void of_run() {
    // example: run
    ddp::run<ddp::threads, ddp::tcp>([](auto& comm) { train(comm); });
    // end
}

inline void of_secure_tcp() {
    // example: secure_tcp
    ddp::run<ddp::threads, ddp::secure_tcp>([](auto& comm) { train(comm); });
    // end
}

#ifdef SNIPPETS_WITH_MPI
inline void of_mpi_communicator() {
    // example: mpi_communicator
    boost::mpi::communicator world;
    auto comm = ddp::mpi_communicator(world);
    // end
}
#endif

inline void of_descriptor_stream(int const (&two)[2]) {
    // example: descriptor_stream
    std::vector<ddp::framed_peer<ddp::descriptor_stream>> peers;
    peers.push_back({.rank = 1, .stream = ddp::descriptor_stream(two[0])});
    auto transport = std::make_unique<ddp::framed<ddp::descriptor_stream>>(0, 2, std::move(peers));
    auto comm = ddp::any_communicator(std::move(transport));
    // end
}

inline void of_virtual_cluster(ddp::task<> (&my_program)(int, ddp::virtual_cluster::scheduler_type*,
                                                         ddp::virtual_cluster*)) {
    using namespace std::chrono_literals;
    // example: virtual_cluster
    ddp::virtual_cluster cluster(256, {.latency = 10us});
    auto const outcome = cluster.run([&](int rank, auto& on) { return my_program(rank, &on, &cluster); });
    // end
}

// weights, checkpoints

inline void of_load_weights_as(network& model) {
    // example: load_weights_as
    auto const report =
        ddp::load_weights_as(model, "of_pytorch.safetensors", {.strict = false, .file_prefix = "module."});
    for (std::string const& name : report.missing) std::puts(name.c_str());  // unchanged
    // end
}

inline void of_checkpoints(any_trainer& trainer, ddp::sampler& batches, loader& load) {
    // example: checkpoints
    ddp::checkpoints kept("checkpoints");
    auto const from = kept.resume(trainer, batches);  // nullopt if there is no checkpoint yet
    while (auto const batch = batches.next()) {
        trainer.step(load(*batch));
        if (trainer.completed_steps() % 100 == 0) kept.save(trainer, batches, {{"note", "so far so good"}});
    }
    // end
}

inline int of_stop_signals(any_trainer& trainer, ddp::checkpoints& kept, ddp::sampler& batches, loader& load) {
    // example: stop_signals
    ddp::stop_signals const signals;
    while (auto const batch = batches.next()) {
        if (signals.received()) trainer.request_stop();
        if (trainer.step(load(*batch)).stop) {
            kept.save(trainer, batches);
            return ddp::exit_to_be_resumed;
        }
    }
    // end
    return 0;
}

// adapter

inline void of_flat_model(ddp::communicator<>& comm, std::size_t n) {
    struct batch {
        [[nodiscard]] std::size_t size() const { return 1; }
    };
    auto const loss_and_gradient = [](std::span<double const>, batch const&, std::span<double>) { return 0.0; };
    // example: flat_model
    std::vector<double> values(n), gradient(n);
    ddp::flat_model model{values, gradient, [&](batch const& b) { return loss_and_gradient(values, b, gradient); }};
    ddp::data_parallel trainer{model, ddp::sgd{.lr = 0.1}, comm};
    // end
}

inline void of_accumulating(std::size_t arguments) {
    struct my_model : network {
        explicit my_model(std::size_t inputs)
            : network(ddp::nn::linear(inputs, 10), ddp::nn::softmax_cross_entropy()) {}
    };
    // example: accumulating
    ddp::accumulating<my_model> model(arguments);
    // end
}

}  // namespace docstring_examples
