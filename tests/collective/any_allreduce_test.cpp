/// \file
/// The algorithm chosen at run time, and what an algorithm has to offer.
#include <ddp/collective/algorithms/any_allreduce.hpp>

#include <ddp/transport/inproc.hpp>

#include "support/catch.hpp"

namespace {

using ddp::any_allreduce;
using ddp::inproc_transport;

enum class without { nothing, sum, name, canonical, reduce, all_gather, everywhere };

struct named {
    static constexpr char const* name = "archetype";
};
struct ordered {
    static constexpr bool canonical = true;
};
template <int>
struct absent {};

/// The least an algorithm can be, less one operation.
template <without Missing = without::nothing>
struct archetype : std::conditional_t<Missing == without::name, absent<0>, named>,
                   std::conditional_t<Missing == without::canonical, absent<1>, ordered> {
    template <class T, class E>
        requires(Missing != without::sum)
    static ddp::task<> sum(archetype, ddp::lane<T>, std::span<E>);
    template <class T, class E>
        requires(Missing != without::reduce)
    static ddp::task<> reduce(archetype, ddp::lane<T>, ddp::reduction<E>);
    template <class T, class E>
        requires(Missing != without::all_gather)
    static ddp::task<> all_gather(archetype, ddp::lane<T>, std::span<E>, std::span<std::size_t const>);
    bool everywhere(std::size_t, int) const
        requires(Missing != without::everywhere);
};

template <class A>
constexpr bool whole = ddp::AllreduceOver<A, inproc_transport, float>;
template <class A>
constexpr bool sliced = ddp::SlicedAllreduceOver<A, inproc_transport, double>;

static_assert(whole<archetype<>> && sliced<archetype<>>);
static_assert(!whole<archetype<without::sum>> && !whole<archetype<without::name>>);
static_assert(!whole<archetype<without::canonical>>);
static_assert(whole<archetype<without::reduce>> && !sliced<archetype<without::reduce>>);
static_assert(whole<archetype<without::all_gather>> && !sliced<archetype<without::all_gather>>);
static_assert(whole<archetype<without::everywhere>> && !sliced<archetype<without::everywhere>>);

static_assert(sliced<ddp::automatic_allreduce> && sliced<ddp::direct_allreduce> && sliced<ddp::ring_allreduce>);
static_assert(sliced<ddp::halving_doubling_allreduce> && sliced<ddp::hierarchical_allreduce>);
static_assert(sliced<ddp::recursive_doubling_allreduce> && sliced<ddp::naive_allreduce> && sliced<any_allreduce>);

}  // namespace

TEST_CASE("any_allreduce is what its name says", "[collective][allreduce]") {
    for (char const* name : {"auto", "direct", "recursive_doubling", "halving_doubling", "ring", "naive"}) {
        any_allreduce const parsed = any_allreduce::parse(name);
        CHECK(parsed.name == std::string(name));
        CHECK(parsed.canonical == (std::string(name) != "ring"));
        CHECK(std::string(any_allreduce::choices).find(name) != std::string::npos);
    }
    CHECK(any_allreduce().name == std::string("auto"));

    any_allreduce held = ddp::ring_allreduce{};
    CHECK_FALSE(held.everywhere(1000, 3));
    held = ddp::naive_allreduce{};
    CHECK(held.name == std::string("naive"));
    CHECK(held.everywhere(1000, 3));
}

TEST_CASE("an algorithm that does not exist is refused with the list of those that do", "[collective][allreduce]") {
    for (std::string const name : {"", "Ring", "ring ", "tree"}) {
        CAPTURE(name);
        std::string text;
        try {
            (void)any_allreduce::parse(name);
        } catch (ddp::usage_error const& e) {
            text = e.what();
        }
        CHECK(text.find("there is no allreduce algorithm '" + name + "'; choose one of ") != std::string::npos);
        CHECK(text.find("auto|direct|recursive_doubling|halving_doubling|ring|naive|hierarchical") !=
              std::string::npos);
    }
    try {
        (void)any_allreduce::parse("hierarchical");
        FAIL("made without a communicator");
    } catch (ddp::usage_error const& e) {
        CHECK(std::string(e.what()).find("'hierarchical' is made for a communicator") != std::string::npos);
    }
}
