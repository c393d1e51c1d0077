// An exchange of one's own: a narrower wire with error feedback, which the library does not know, against plain loops.
#include <ddp/exchange/exchange.hpp>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include <ddp/exchange/allreduce_exchange.hpp>
#include <ddp/kernel/kernel.hpp>

#include "support/catch.hpp"
#include "support/ranks.hpp"
#include "support/training_checks.hpp"
#include "train/patience.hpp"
#include "train/scripted_model.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

// The wire: bfloat16 for float, float for double.

std::uint16_t narrow(float x) {  // to nearest, ties to even; finite numbers only
    auto const bits = std::bit_cast<std::uint32_t>(x);
    return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
float widen(std::uint16_t x) {
    return std::bit_cast<float>(std::uint32_t{x} << 16);
}
float narrow(double x) {
    return static_cast<float>(x);
}
double widen(float x) {
    return x;
}
template <class E>
using wire = decltype(narrow(E()));

/// wire = narrow(data + residual); the rest is the new residual.
template <class E>
DDP_KERNEL void compress(E const* data, E* residual, wire<E>* out, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
        E const wanted = data[i] + residual[i];
        out[i] = narrow(wanted);
        residual[i] = wanted - widen(out[i]);
    }
}
template <class E>
DDP_KERNEL void add_wide(E* sum, wire<E> const* one, std::size_t count, bool first) {
    for (std::size_t i = 0; i < count; ++i) sum[i] = first ? widen(one[i]) : sum[i] + widen(one[i]);
}
template <class E>
DDP_KERNEL void round_mean(E* sum, std::size_t count, E factor) {
    for (std::size_t i = 0; i < count; ++i) sum[i] = widen(narrow(sum[i] * factor));
}
template <class E>
DDP_KERNEL void to_wire(E const* data, wire<E>* out, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) out[i] = narrow(data[i]);
}
template <class E>
DDP_KERNEL void from_wire(wire<E> const* in, E* data, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) data[i] = widen(in[i]);
}

/// Every rank sends what it has, compressed, slice by slice to the slice's owner, which adds in the order of the ranks and
/// rounds the mean for the way back. What compression leaves out is added to the next step's gradient.
struct compressed_exchange {
    static constexpr char const* name = "compressed";
    bool feedback = true;

    template <Element E>
    struct kept {
        exchange_plan<E> plan;
        std::vector<std::vector<E>> residual;  // by bucket

        void for_each_state(state_visitor visit) {
            for (std::size_t b = 0; b < residual.size(); ++b)
                for (exchange_piece const& piece : plan.buckets[b].pieces) {
                    exchange_parameter const& p = plan.parameters[piece.parameter];
                    visit({.of = p.name,
                           .name = "residual",
                           .shape = p.shape,
                           .type = element_type_of<E>(),
                           .begin = piece.offset,
                           .bytes = as_mutable_bytes(std::span<E>(residual[b]).subspan(piece.begin, piece.count)),
                           .per_rank = true});
                }
        }
    };

    [[nodiscard]] std::uint64_t hash() const { return feedback ? 1 : 2; }
    template <Element E>
    [[nodiscard]] kept<E> prepare(exchange_plan<E> const& plan) const {
        kept<E> all{plan, {}};
        for (exchange_bucket const& bucket : plan.buckets) all.residual.emplace_back(bucket.count);
        return all;
    }
    template <Element E>
    [[nodiscard]] bool everywhere(exchange_plan<E> const& plan, std::size_t /*bucket*/) const {
        return plan.ranks == 1;
    }

    template <Transport T, Element E>
    static task<> exchange(compressed_exchange self, lane<T> over, kept<E>& state, bucket_exchange<E> what) {
        std::size_t const ranks = static_cast<std::size_t>(over.size()), me = static_cast<std::size_t>(over.rank());
        std::size_t const begin = what.cuts[me], mine = what.cuts[me + 1] - begin;
        scratch outgoing(what.data.size() * sizeof(wire<E>)), incoming(ranks * mine * sizeof(wire<E>));
        std::span<wire<E>> const out = outgoing.template as<wire<E>>(), in = incoming.template as<wire<E>>();
        operations receives(ranks), sends(ranks);
        for (std::size_t r = 0; r < ranks; ++r)
            if (r != me) over.receive(receives[r], static_cast<int>(r), as_mutable_bytes(in.subspan(r * mine, mine)));
        co_await *what.go;

        std::vector<E>& residual = state.residual[what.bucket];
        if (*what.factor == 0) {  // nobody has samples: messages all the same, and nothing else
            std::fill(out.begin(), out.end(), wire<E>{});
        } else {
            if (!self.feedback) std::fill(residual.begin(), residual.end(), E(0));
            compress(what.data.data(), residual.data(), out.data(), out.size());
        }
        for (std::size_t r = 0; r < ranks; ++r)
            if (r != me)
                over.send(sends[r], static_cast<int>(r),
                          as_const_bytes(out.subspan(what.cuts[r], what.cuts[r + 1] - what.cuts[r])));
        E* const sum = what.data.data() + begin;
        for (std::size_t r = 0; r < ranks; ++r) {
            if (r != me) co_await receives[r];
            add_wide(sum, r == me ? out.data() + begin : in.data() + r * mine, mine, r == 0);
        }
        round_mean(sum, mine, *what.factor);
        for (std::size_t r = 0; r < ranks; ++r)
            if (r != me) co_await sends[r];
    }

    template <Transport T, Element E>
    static task<> gather(compressed_exchange /*self*/, lane<T> over, kept<E>& /*state*/, bucket_exchange<E> what) {
        std::size_t const ranks = static_cast<std::size_t>(over.size()), me = static_cast<std::size_t>(over.rank());
        lane<T> const back = over.phase(1);
        scratch memory(what.data.size() * sizeof(wire<E>));
        std::span<wire<E>> const all = memory.template as<wire<E>>();
        operations receives(ranks), sends(ranks);
        auto const part = [&](std::size_t r) { return all.subspan(what.cuts[r], what.cuts[r + 1] - what.cuts[r]); };
        to_wire(what.data.data() + what.cuts[me], part(me).data(), part(me).size());  // exact: it is rounded already
        for (std::size_t r = 0; r < ranks; ++r) {
            if (r == me) continue;
            back.receive(receives[r], static_cast<int>(r), as_mutable_bytes(part(r)));
            back.send(sends[r], static_cast<int>(r), as_const_bytes(part(me)));
        }
        for (std::size_t r = 0; r < ranks; ++r) {
            if (r == me) continue;
            co_await receives[r];
            from_wire(part(r).data(), what.data.data() + what.cuts[r], part(r).size());
        }
        for (std::size_t r = 0; r < ranks; ++r)
            if (r != me) co_await sends[r];
    }
};
static_assert(ExchangeOver<compressed_exchange, inproc_transport, float>);
static_assert(ExchangeOver<compressed_exchange, inproc_transport, double>);
static_assert(ExchangeOver<allreduce_exchange<any_allreduce>, inproc_transport, float>);
static_assert(!ExchangeOver<any_allreduce, inproc_transport, float>);

constexpr std::size_t steps = 12, rows = 13;

/// What a rank ends with: values by parameter, residuals by parameter.
template <class E>
struct ending {
    std::vector<std::vector<E>> values, residuals;
    std::vector<std::uint64_t> digests;  // after each step
    std::string wrong;
};

template <Element E>
std::vector<ending<E>> train_on(int ranks, update how, any_buckets const& buckets, bool clipped, bool feedback = true) {
    return run_ranks(
        ranks,
        [&](auto& comm) {
            task_data<E> const data(7, 3, 64);
            tanh_mlp<E> model(7, 24, 3, 1);
            data_parallel trainer{model,
                                  any_optimizer(sgd{.lr = 0.1, .momentum = 0.9}),
                                  comm,
                                  options_of(how == update::sharded, clipped),
                                  compressed_exchange{.feedback = feedback},
                                  buckets};
            ending<E> end;
            for (std::size_t step = 0; step < steps; ++step) {
                auto const [first, last] = share(rows, step, comm.rank(), comm.size());
                trainer.step(data.batch(step + first, step + last));
                if (step == 5) (void)thrown_by([&] { trainer.step(data.batch(0, 0)); });  // nobody has samples
                end.digests.push_back(trainer.digest_of_values());
                if (!trainer.replicas_identical()) end.wrong = "ranks hold different bits";
            }
            for (auto const& p : trainer.parameters()) {
                end.values.emplace_back(p.value.begin(), p.value.end());
                end.residuals.emplace_back(p.value.size(), E(-1));
            }
            trainer.for_each_state([&](state_slice const& s) {
                if (s.name != "residual") return;
                if (!s.per_rank) end.wrong = "a residual that is not the rank's own";
                for (std::size_t i = 0; i < trainer.parameters().size(); ++i)
                    if (trainer.parameters()[i].name == s.of)
                        std::copy(s.as<E>().begin(), s.as<E>().end(),
                                  end.residuals[i].begin() + static_cast<std::ptrdiff_t>(s.begin));
            });
            return end;
        },
        patient());
}

/// The same algorithm for `ranks` ranks, one after the other, one parameter after the other. Returns each rank's ending.
template <Element E>
std::vector<ending<E>> by_hand(int ranks) {
    task_data<E> const data(7, 3, 64);
    tanh_mlp<E> model(7, 24, 3, 1);
    auto const parameters = model.parameters();
    std::vector<ending<E>> ends(static_cast<std::size_t>(ranks));
    std::vector<std::vector<E>> momentum;
    for (auto const& p : parameters) {
        momentum.emplace_back(p.value.size());
        for (ending<E>& end : ends) end.residuals.emplace_back(p.value.size());
    }
    sgd const optimizer{.lr = 0.1, .momentum = 0.9};
    for (std::size_t step = 0; step < steps; ++step) {
        std::vector<std::vector<E>> sum;
        for (auto const& p : parameters) sum.emplace_back(p.value.size());
        for (int r = 0; r < ranks; ++r) {
            auto const [first, last] = share(rows, step, r, ranks);
            for (auto const& p : parameters) std::fill(p.gradient.begin(), p.gradient.end(), E(0));
            if (first != last) {
                (void)model.forward(data.batch(step + first, step + last));
                model.backward({.scale = static_cast<E>(last - first)}, [](std::size_t) {});
            }
            auto& residuals = ends[static_cast<std::size_t>(r)].residuals;
            for (std::size_t i = 0; i < parameters.size(); ++i)
                for (std::size_t k = 0; k < sum[i].size(); ++k) {
                    E const wanted = parameters[i].gradient[k] + residuals[i][k];
                    E const sent = widen(narrow(wanted));
                    residuals[i][k] = wanted - sent;
                    sum[i][k] = r == 0 ? sent : sum[i][k] + sent;
                }
        }
        for (std::size_t i = 0; i < parameters.size(); ++i) {
            for (E& x : sum[i]) x = widen(narrow(x * static_cast<E>(1.0 / static_cast<double>(rows))));
            std::span<E> slots[] = {momentum[i]};
            optimizer.step({.step = step + 1, .learning_rate = 0.1}, std::span<E const>(sum[i]), parameters[i].value,
                           slot_spans<E>(slots));
        }
    }
    for (ending<E>& end : ends)
        for (auto const& p : parameters) end.values.emplace_back(p.value.begin(), p.value.end());
    return ends;
}

}  // namespace

TEMPLATE_TEST_CASE("a compressed exchange with error feedback trains to the bits of plain loops, on any ranks",
                   "[train]", float, double) {
    int const ranks = GENERATE(1, 2, 3, 4);
    auto const expected = by_hand<TestType>(ranks);
    for (auto const& [name, buckets] : bucket_policies())
        for (update const how : {update::replicated, update::sharded}) {
            CAPTURE(ranks, name, how == update::sharded);
            auto const got = train_on<TestType>(ranks, how, buckets, false);
            for (std::size_t r = 0; r < got.size(); ++r) {
                REQUIRE(got[r].wrong == "");
                REQUIRE(got[r].values == expected[r].values);
                REQUIRE(got[r].residuals == expected[r].residuals);
                REQUIRE(got[r].digests == got[0].digests);
            }
        }
    TestType largest = 0;
    for (auto const& one : expected[0].residuals)
        for (TestType const x : one) largest = std::max(largest, std::abs(x));
    REQUIRE(largest > 0);
}

TEST_CASE("clipping sees the compressed mean, with the same bits for both updates", "[train]") {
    int const ranks = GENERATE(1, 3);
    auto const first = train_on<float>(ranks, update::replicated, single_bucket{}, true);
    for (auto const& [name, buckets] : bucket_policies())
        for (update const how : {update::replicated, update::sharded}) {
            CAPTURE(ranks, name, how == update::sharded);
            for (auto const& one : train_on<float>(ranks, how, buckets, true)) {
                REQUIRE(one.wrong == "");
                REQUIRE(one.digests == first[0].digests);
            }
        }
    REQUIRE(first[0].digests != train_on<float>(ranks, update::replicated, single_bucket{}, false)[0].digests);
}

TEST_CASE("what compression leaves out makes a difference later", "[train]") {
    auto const with = train_on<float>(2, update::replicated, single_bucket{}, false);
    auto const without = train_on<float>(2, update::replicated, single_bucket{}, false, false);
    REQUIRE(with[0].digests[0] == without[0].digests[0]);
    REQUIRE(with[0].digests[1] != without[0].digests[1]);
}

TEST_CASE("an exchange with other settings is refused when the trainers are made", "[train]") {
    auto const errors = errors_of_ranks(2, [](auto& comm) {
        scripted_model<> net({{"a", {2}}});
        data_parallel trainer{net, sgd{}, comm, {}, compressed_exchange{.feedback = comm.rank() == 0}};
    });
    for (std::string const& text : errors)
        REQUIRE((text.find("E102") != text.npos && text.find("allreduce algorithm") != text.npos));
}

namespace {
/// Writes down what it is told, and does nothing on one rank.
struct told {
    exchange_plan<double>* into;
    static constexpr char const* name = "told";
    [[nodiscard]] std::uint64_t hash() const { return 0; }
    [[nodiscard]] no_exchange_state prepare(exchange_plan<double> const& plan) const {
        *into = plan;
        return {};
    }
    [[nodiscard]] bool everywhere(exchange_plan<double> const&, std::size_t) const { return true; }
    template <Transport T>
    static task<> exchange(told, lane<T>, no_exchange_state&, bucket_exchange<double> what) {
        co_await *what.go;
    }
    template <Transport T>
    static task<> gather(told, lane<T>, no_exchange_state&, bucket_exchange<double>) {
        co_return;
    }
};
}  // namespace

TEST_CASE("an exchange is told where each parameter lies in each bucket", "[train]") {
    auto const plan = run_ranks(1, [](auto& comm) {
        exchange_plan<double> seen;
        scripted_model<> net({{"a", {3, 4}}, {"none", {0}}, {"b", {5}}, {"c", {40}}});
        data_parallel trainer{net,         sgd{},
                              comm,        {.update = update::sharded},
                              told{&seen}, size_capped_buckets{.cap_bytes = 256, .first_bytes = 128}};
        trainer.step(numbers{{1}});
        return seen;
    })[0];
    REQUIRE((plan.rank == 0 && plan.ranks == 1 && plan.sharded));
    REQUIRE(plan.parameters.size() == 4);
    REQUIRE(plan.parameters[0].name == "a");
    REQUIRE(plan.parameters[0].shape == std::vector<std::size_t>{3, 4});
    std::vector<std::size_t> seen(4);
    std::size_t end = 0;
    REQUIRE(plan.buckets.size() >= 3);
    for (exchange_bucket const& bucket : plan.buckets) {
        REQUIRE(bucket.begin == end);
        end += bucket.count;
        REQUIRE(bucket.cuts == std::vector<std::size_t>{0, bucket.count});
        std::size_t at = 0;
        for (exchange_piece const& piece : bucket.pieces) {
            REQUIRE(piece.begin >= at);
            at = piece.begin + piece.count;
            REQUIRE(piece.offset == seen[piece.parameter]);
            seen[piece.parameter] += piece.count;
        }
        REQUIRE(at <= bucket.count);
    }
    REQUIRE(seen == std::vector<std::size_t>{12, 0, 5, 40});
    REQUIRE(end == 16 + 8 + 40);
}
