// any_transport behaves as what it holds, refinements included.
#include <ddp/transport/any.hpp>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ddp/testing/conformance.hpp>
#include <ddp/transport/inproc.hpp>

#include "support/catch.hpp"

using namespace ddp;

namespace {

struct any_world {
    std::shared_ptr<inproc_world> inner;
    [[nodiscard]] auto connect(int rank) const { return std::make_unique<any_transport>(inner->connect(rank)); }
};

/// inproc with every refinement, each with an answer of its own.
class refined {
public:
    static constexpr std::string_view name = "refined";
    explicit refined(std::unique_ptr<inproc_transport> inner) : inner_(std::move(inner)) {}
    [[nodiscard]] int rank() const { return inner_->rank(); }
    [[nodiscard]] int size() const { return inner_->size(); }
    void post_send(int peer, tag what, const_bytes out, completion& done) { inner_->post_send(peer, what, out, done); }
    void post_receive(int peer, tag what, mutable_bytes in, completion& done) {
        inner_->post_receive(peer, what, in, done);
    }
    bool progress(time_point until) { return inner_->progress(until); }
    void abort(failure const& record) { inner_->abort(record); }
    [[nodiscard]] std::span<report const> reports() const { return inner_->reports(); }
    void wake() { inner_->wake(); }
    [[nodiscard]] time_point now() const { return inner_->now(); }

    [[nodiscard]] bool may_own_thread() const { return false; }
    [[nodiscard]] bool shares_cores() const { return true; }
    void pace(nanoseconds least) { paced = least; }
    [[nodiscard]] std::uint64_t host() const { return 42; }
    [[nodiscard]] time_point next_timer() const { return time_point(nanoseconds(7)); }
    void entered(mark const& mine) { last = mine; }
    [[nodiscard]] mark mark_of(int peer) const { return {.number = static_cast<std::uint64_t>(peer) + 5}; }
    [[nodiscard]] std::optional<int> overdue_peer() const { return 3; }
    [[nodiscard]] time_point last_heard(int peer) const { return time_point(nanoseconds(peer)); }
    [[nodiscard]] bool still_writes() const { return true; }
    [[nodiscard]] std::string_view process_of(int rank) const { return rank == 0 ? "the first" : "another"; }
    [[nodiscard]] std::unique_ptr<memory_sharing> share_memory() { return inner_->share_memory(); }
    [[nodiscard]] std::optional<bool> through_memory(int a, int b) const { return a < b; }
    mark last;
    nanoseconds paced{0};

private:
    std::unique_ptr<inproc_transport> inner_;
};
static_assert(WatchfulTransport<refined> && TimedTransport<refined>);

}  // namespace

TEST_CASE("any_transport keeps the promises of a transport", "[transport][conformance]") {
    for (int const ranks : {2, 3})
        CHECK(testing::check_transport(ranks, [](int n) {
                  return std::make_shared<any_world>(any_world{inproc_world::create(n)});
              }) == std::vector<std::string>{});
}

TEST_CASE("any_transport passes every refinement on", "[transport]") {
    any_transport held(std::make_unique<refined>(inproc_world::create(1)->connect(0)));
    CHECK_FALSE(may_own_thread(held));
    CHECK(shares_cores(held));
    CHECK(host_of(held) == 42);
    CHECK(held.name() == "refined");
    CHECK(held.next_timer() == time_point(nanoseconds(7)));
    CHECK(held.mark_of(2).number == 7);
    CHECK(held.overdue_peer() == 3);
    CHECK(held.last_heard(9) == time_point(nanoseconds(9)));
    CHECK(held.still_writes());
    CHECK(process_of(held, 0) == "the first");
    CHECK(process_of(held, 1) == "another");
    CHECK(held.share_memory() != nullptr);
    CHECK(held.through_memory(0, 1) == true);
    CHECK(held.through_memory(1, 0) == false);
    held.entered({.number = 11});
    REQUIRE(held.target<refined>() != nullptr);
    CHECK(held.target<refined>()->last.number == 11);
    held.pace(nanoseconds(5));
    CHECK(held.target<refined>()->paced == nanoseconds(5));
    CHECK(held.target<inproc_transport>() == nullptr);
}

TEST_CASE("any_transport has answers where the transport has no refinement", "[transport]") {
    any_transport held(inproc_world::create(1, {8})->connect(0));
    CHECK(may_own_thread(held));
    CHECK_FALSE(shares_cores(held));
    held.pace(nanoseconds(5));
    CHECK(host_of(held) == 8);
    CHECK(process_of(held, 0).empty());
    CHECK(held.next_timer() == never);
    CHECK(held.mark_of(0).fingerprint == 0);
    CHECK_FALSE(held.overdue_peer().has_value());
    held.entered({.number = 11});
}
