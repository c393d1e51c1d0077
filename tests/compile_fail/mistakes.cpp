// What a compiler says about each mistake that a newcomer's own policy may have. Compiled, not run: check.py expects an
// error in the statement below every comment `expect:`, with these words among its first lines, and no error anywhere
// else. With CORRECTED every mistake is put right, and nothing may be said.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include <ddp/ddp.hpp>  // first, as in users' programs: the compiler says through which headers another one came
#include <ddp/exchange/narrow.hpp>
#include <ddp/strategy/averaging.hpp>
#include <ddp/strategy/local_parallel.hpp>

using job = ddp::communicator<ddp::inproc_transport>;
using numbers = std::vector<float>;

struct good_model {
    using element = float;
    std::vector<ddp::parameter<float>> parameters() { return {}; }
    double forward(numbers const&) { return 0; }
    void backward(ddp::pass<float>, auto const& ready) { ready(0); }
};

// A model

struct silent_model {
    using element = float;
#ifdef CORRECTED
    std::vector<ddp::parameter<float>> parameters() { return {}; }
#endif
    double forward(numbers const&) { return 0; }
    void backward(ddp::pass<float>, auto const& ready) { ready(0); }
};
void lists_nothing(silent_model& model, job& comm) {
    // expect: Model model.parameters()
    ddp::data_parallel trainer{model, ddp::sgd{}, comm};
}

struct one_way_model {
    using element = float;
    std::vector<ddp::parameter<float>> parameters() { return {}; }
    double forward(numbers const&) { return 0; }
#ifdef CORRECTED
    void backward(ddp::pass<float>, auto const& ready) { ready(0); }
#endif
};
void learns_nothing(one_way_model& model, job& comm) {
    // expect: Model model.backward(how, ready)
    ddp::data_parallel trainer{model, ddp::sgd{}, comm};
}

struct untyped_model {
#ifdef CORRECTED
    using element = float;
#endif
    std::vector<ddp::parameter<float>> parameters() { return {}; }
    double forward(numbers const&) { return 0; }
    void backward(ddp::pass<float>, auto const& ready) { ready(0); }
};
void names_no_element(untyped_model& model, job& comm) {
    // expect within 17: Model M::element
    ddp::data_parallel trainer{model, ddp::sgd{}, comm};
}

struct double_model {
    using element = double;
    std::vector<ddp::parameter<double>> parameters() { return {}; }
    double forward(std::span<double const>) { return 0; }
    void backward(ddp::pass<double>, auto const& ready) { ready(0); }
};
void mixes_precisions(double_model& model, job& comm) {
    ddp::data_parallel trainer{model, ddp::sgd{}, comm};
#ifdef CORRECTED
    std::vector<double> const batch(3);
#else
    std::vector<float> const batch(3);
#endif
    // expect: ModelFor model.forward(batch)
    trainer.step(batch);
}

// An optimizer

struct hashless {
    std::size_t slot_count() const { return 0; }
    double learning_rate() const { return 0.1; }
#ifdef CORRECTED
    std::uint64_t hash() const { return 1; }
#endif
    void step(ddp::step_info const&, std::span<float const>, std::span<float>, ddp::slot_spans<float>) const {}
};
void forgets_the_hash(good_model& model, job& comm) {
    // expect: OptimizerFor optimizer.hash()
    ddp::data_parallel trainer{model, hashless{}, comm};
}

struct two_stepper {
    std::size_t slot_count() const { return 0; }
    double learning_rate() const { return 0.1; }
    std::uint64_t hash() const { return 1; }
#ifdef CORRECTED
    void step(ddp::step_info const&, std::span<float const>, std::span<float>, ddp::slot_spans<float>) const {}
#else
    void step(std::span<float const>, std::span<float>) const {}
#endif
};
void steps_with_too_little(good_model& model, job& comm) {
    // expect: OptimizerFor optimizer.step(at, gradient, value, state)
    ddp::data_parallel trainer{model, two_stepper{}, comm};
}

// The order of the arguments

void swaps_arguments(good_model& model, job& comm) {
#ifdef CORRECTED
    ddp::data_parallel trainer{model, ddp::sgd{}, comm};
#else
    // expect: communicator<T> sgd
    ddp::data_parallel trainer{model, comm, ddp::sgd{}};
#endif
}

// An allreduce

struct sumless {
    static constexpr char const* name = "sumless";
    static constexpr bool canonical = false;
#ifdef CORRECTED
    template <ddp::Transport T, ddp::Element E>
    static ddp::task<> sum(sumless, ddp::lane<T>, std::span<E>) {
        return {};
    }
#endif
};
void adds_nothing(good_model& model, job& comm) {
    // expect: AllreduceOver A::sum(self, over, data)
    ddp::data_parallel trainer{model, ddp::sgd{}, comm, {}, sumless{}};
}

struct nameless {
#ifdef CORRECTED
    static constexpr char const* name = "nameless";
#endif
    static constexpr bool canonical = false;
    template <ddp::Transport T, ddp::Element E>
    static ddp::task<> sum(nameless, ddp::lane<T>, std::span<E>) {
        return {};
    }
};
void has_no_name(good_model& model, job& comm) {
    // expect: AllreduceOver self.name
    ddp::data_parallel trainer{model, ddp::sgd{}, comm, {}, nameless{}};
}

// An exchange

struct gatherless {
    static constexpr char const* name = "gatherless";
    std::uint64_t hash() const { return 0; }
    ddp::no_exchange_state prepare(ddp::exchange_plan<float> const&) const { return {}; }
    bool everywhere(ddp::exchange_plan<float> const&, std::size_t) const { return true; }
    template <ddp::Transport T>
    static ddp::task<> exchange(gatherless, ddp::lane<T>, ddp::no_exchange_state&, ddp::bucket_exchange<float>) {
        return {};
    }
#ifdef CORRECTED
    template <ddp::Transport T>
    static ddp::task<> gather(gatherless, ddp::lane<T>, ddp::no_exchange_state&, ddp::bucket_exchange<float>) {
        return {};
    }
#endif
};
void brings_nothing_back(good_model& model, job& comm) {
    // expect: ExchangeOver X::gather(self, over, state, what)
    ddp::data_parallel trainer{model, ddp::sgd{}, comm, {}, gatherless{}};
}

struct secretive {
    struct kept {
#ifdef CORRECTED
        void for_each_state(ddp::state_visitor) {}
#endif
    };
    static constexpr char const* name = "secretive";
    std::uint64_t hash() const { return 0; }
    kept prepare(ddp::exchange_plan<float> const&) const { return {}; }
    bool everywhere(ddp::exchange_plan<float> const&, std::size_t) const { return true; }
    template <ddp::Transport T>
    static ddp::task<> exchange(secretive, ddp::lane<T>, kept&, ddp::bucket_exchange<float>) {
        return {};
    }
    template <ddp::Transport T>
    static ddp::task<> gather(secretive, ddp::lane<T>, kept&, ddp::bucket_exchange<float>) {
        return {};
    }
};
void hides_its_state(good_model& model, job& comm) {
    // expect: ExchangeOver state.for_each_state(visit)
    ddp::data_parallel trainer{model, ddp::sgd{}, comm, {}, secretive{}};
}

// An exchange where ranks meet now and then, and a strategy where they exchange gradients

void exchanges_nothing(good_model& model, ddp::communicator<>& comm) {
#ifdef CORRECTED
    ddp::local_parallel trainer{model, ddp::sgd{}, comm, ddp::local_sgd{}};
#else
    // expect: StrategyOver policy.validate()
    ddp::local_parallel trainer{model, ddp::sgd{}, comm, ddp::bfloat16_exchange{}};
#endif
}
void never_meets(good_model& model, job& comm) {
#ifdef CORRECTED
    ddp::data_parallel trainer{model, ddp::sgd{}, comm, ddp::bfloat16_exchange{}};
#else
    // expect: one of the arguments is none of these or an exchange
    ddp::data_parallel trainer{model, ddp::sgd{}, comm, ddp::local_sgd{}};
#endif
}

// A bucket policy

struct planless {
#ifdef CORRECTED
    ddp::bucket_plan plan(ddp::bucket_request const&) const { return {}; }
#endif
};
void plans_nothing(good_model& model, job& comm) {
    // expect: one of the arguments is none of these bucket policy (with plan(bucket_request))
    ddp::data_parallel trainer{model, ddp::sgd{}, comm, planless{}};
}

// An observer

struct misspelt {
#ifdef CORRECTED
    void on(ddp::step_finished const&) {}
#else
    void on_step(ddp::step_finished const&) {}
#endif
};
void hears_nothing(good_model& model, job& comm) {
    // expect: one of the arguments is none of these observer (with on(step_finished)
    ddp::data_parallel trainer{model, ddp::sgd{}, comm, ddp::single_bucket{}, misspelt{}};
}
void gives_two_of_a_kind(good_model& model, job& comm) {
#ifdef CORRECTED
    ddp::data_parallel trainer{model, ddp::sgd{}, comm, ddp::single_bucket{}, ddp::training_options{}};
#else
    // expect: two of the arguments are of one kind
    ddp::data_parallel trainer{model, ddp::sgd{}, comm, ddp::single_bucket{}, ddp::per_parameter_buckets{}};
#endif
}

struct forgetful_planner {
#ifdef CORRECTED
    ddp::bucket_plan plan(ddp::bucket_request const&) const { return {}; }
#else
    void plan(ddp::bucket_request const&) const {}
#endif
};
void plans_and_says_nothing(good_model& model, job& comm) {
    // expect: BucketPolicy policy.plan(request)
    ddp::data_parallel trainer{model, ddp::sgd{}, comm, forgetful_planner{}};
}

struct mutable_stepper {
    std::size_t slot_count() const { return 0; }
    double learning_rate() const { return 0.1; }
    std::uint64_t hash() const { return 1; }
#ifdef CORRECTED
    void step(ddp::step_info const&, std::span<float const>, std::span<float>, ddp::slot_spans<float>) const {}
#else
    void step(ddp::step_info const&, std::span<float const>, std::span<float>, ddp::slot_spans<float>) {}
#endif
};
void steps_by_changing(good_model& model, job& comm) {
    // expect within 17: OptimizerFor StepIsConst
    ddp::data_parallel trainer{model, mutable_stepper{}, comm};
}

struct unweighed {
#ifdef CORRECTED
    std::size_t size() const { return 1; }
#endif
};
struct model_of_the_unweighed : good_model {
    double forward(unweighed const&) { return 0; }
};
void weighs_nothing(model_of_the_unweighed& model, job& comm) {
    ddp::data_parallel trainer{model, ddp::sgd{}, comm};
    // expect within 13: ModelFor HasWeight
    trainer.step(unweighed{});
}

// A transport

struct stuck_transport {
    int rank() const;
    int size() const;
    void post_send(int, ddp::tag, ddp::const_bytes, ddp::completion&);
    void post_receive(int, ddp::tag, ddp::mutable_bytes, ddp::completion&);
#ifdef CORRECTED
    bool progress(ddp::time_point);
#endif
    void abort(ddp::failure const&);
    std::span<ddp::report const> reports();
    void wake();
    ddp::time_point now() const;
};
// expect: Transport t.progress(until)
void never_moves(ddp::communicator<stuck_transport>&) {}
