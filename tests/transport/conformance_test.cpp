// Every transport that can live in one process, against the conformance suite; and the suite against broken ones.
#include <ddp/testing/conformance.hpp>

#include <chrono>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ddp/transport/inproc.hpp>

#include "support/catch.hpp"
#include "support/sanitizers.hpp"

using namespace std::chrono_literals;
using ddp::testing::conformance_options;

TEST_CASE("inproc keeps every promise of a transport", "[comm][conformance]") {
    int const ranks = GENERATE(1, 2, 3, 5);
    CAPTURE(ranks);
    if (ranks != 3 && ddp::test::sanitizers_leave_out("inproc", ranks)) return;
    bool const full = ranks == 2;
    conformance_options const small{.large_bytes = 1'000'003, .many = 600, .early_bytes = 4'000'000};
    auto const complaints = ddp::testing::check_transport(
        ranks, [](int n) { return ddp::inproc_world::create(n); }, full ? conformance_options{} : small);
    CHECK(complaints == std::vector<std::string>{});
}

TEST_CASE("virtual time keeps every promise of a transport", "[comm][conformance][same_threads]") {
    int const ranks = GENERATE(1, 2, 3, 5);
    std::size_t const early_bytes = GENERATE(std::size_t{0}, std::size_t{65536}, std::size_t{1} << 40);
    ddp::nanoseconds const extra = GENERATE(ddp::nanoseconds{0}, ddp::nanoseconds{500'000});
    CAPTURE(ranks, early_bytes, extra.count());
    if (ranks != 3 && ddp::test::sanitizers_leave_out("virtual time", ranks)) return;
    ddp::network_model const network{.extra_delay = extra, .early_bytes = early_bytes, .seed = 17};
    conformance_options const small{.large_bytes = 300'003, .many = 300, .early_bytes = 1'000'000};
    CHECK(ddp::testing::check_virtual_transport(ranks, network, small) == std::vector<std::string>{});
}

namespace {

enum class flaw {
    none,
    swaps_neighbours,  // of one identity
    merges_identities,
    drops_fingerprint,
    completes_in_post,
    forgets_wake,
    oversleeps,
    ignores_length,
    cuts_records,
    publishes_once,
    abort_leaves_operations,
    leaves_without_a_word,
    loses_empty_messages,
    changes_a_byte,
    completes_twice,
    tells_no_news,
    takes_in_everything,
    forgets_who_left,
};

/// inproc with one fault.
class flawed_transport {
public:
    flawed_transport(std::unique_ptr<ddp::inproc_transport> inner, flaw with) : inner_(std::move(inner)), with_(with) {}
    ~flawed_transport() {
        if (with_ == flaw::leaves_without_a_word) inner_->abort({});
    }
    [[nodiscard]] int rank() const noexcept { return inner_->rank(); }
    [[nodiscard]] int size() const noexcept { return inner_->size(); }
    void post_send(int peer, ddp::tag what, ddp::const_bytes out, ddp::completion& done) {
        if ((with_ == flaw::takes_in_everything || with_ == flaw::forgets_who_left) && what.id.channel < 1000)
            return send_a_copy(peer, what, out, done);
        if (with_ == flaw::merges_identities && what.id.channel < 1000) what.id = {.group = what.id.group};
        if (with_ == flaw::drops_fingerprint) what.fingerprint = 0;
        if (with_ == flaw::ignores_length && out.size() == 8) out = out.first(4);
        if (with_ == flaw::changes_a_byte && out.size() > 100'000)
            const_cast<std::byte*>(out.data())[77'777] ^= std::byte{1};
        if ((with_ == flaw::completes_in_post || with_ == flaw::loses_empty_messages) && out.empty() &&
            what.id.channel < 1000) {
            done.status = ddp::op_status::ok;
            if (with_ == flaw::completes_in_post) done.run(done);
            return;
        }
        if (with_ == flaw::swaps_neighbours && what.id.index == 1 && what.id.channel == 0) {
            if (!held_) {
                held_ = held{peer, what, out, &done};
                return;
            }
            inner_->post_send(peer, what, out, done);
            inner_->post_send(held_->peer, held_->what, held_->out, *held_->done);
            held_.reset();
            return;
        }
        inner_->post_send(peer, what, out, done);
    }
    void post_receive(int peer, ddp::tag what, ddp::mutable_bytes in, ddp::completion& done) {
        if (with_ == flaw::merges_identities && what.id.channel < 1000) what.id = {.group = what.id.group};
        if (with_ == flaw::ignores_length && in.size() == 4) in = in.first(0);
        if (with_ == flaw::abort_leaves_operations && in.size() == 64) return;
        if (with_ == flaw::forgets_who_left &&
            inner_->reports()[static_cast<std::size_t>(peer)].is == ddp::report::state::left)
            return end_later(done, ddp::op_status::closed);
        if (with_ == flaw::completes_twice) return receive_and_run_twice(peer, what, in, done);
        inner_->post_receive(peer, what, in, done);
    }
    bool progress(ddp::time_point until) {
        if (with_ == flaw::oversleeps) until = std::max(until, now()) + 400ms;
        bool const news = inner_->progress(until);
        for (auto const& [node, how] : std::exchange(ended_, {})) {
            node->status = how;
            node->run(*node);
        }
        return news && with_ != flaw::tells_no_news;
    }
    void abort(ddp::failure const& record) {
        ddp::failure cut = record;
        if (with_ == flaw::cuts_records) cut.text = record.text.view().substr(0, 5);
        if (with_ == flaw::publishes_once && record.is_verdict) return;
        inner_->abort(cut);
    }
    [[nodiscard]] std::span<ddp::report const> reports() const { return inner_->reports(); }
    void wake() {
        if (with_ != flaw::forgets_wake) inner_->wake();
    }
    [[nodiscard]] ddp::time_point now() const { return inner_->now(); }

private:
    void receive_and_run_twice(int peer, ddp::tag const& what, ddp::mutable_bytes in, ddp::completion& done) {
        doubled& mine = doubled_.emplace_back();
        mine.users = &done;
        mine.run = [](ddp::completion& node) noexcept {
            ddp::completion& users = *static_cast<doubled&>(node).users;
            users.status = node.status;
            users.fingerprint = node.fingerprint;
            users.length = node.length;
            users.run(users);
            if (users.status == ddp::op_status::ok) users.run(users);
        };
        inner_->post_receive(peer, what, in, mine);
    }
    void end_later(ddp::completion& done, ddp::op_status how) {
        ended_.emplace_back(&done, how);
        inner_->wake();
    }
    /// Completes at once, whatever has been taken in already. The copies stay until the end of the program: inproc lets its
    /// peers read from the sender's memory.
    void send_a_copy(int peer, ddp::tag const& what, ddp::const_bytes out, ddp::completion& done) {
        static std::mutex one_at_a_time;
        static auto& copies = *new std::deque<std::pair<std::vector<std::byte>, ddp::completion>>;
        ddp::completion* node = nullptr;
        {
            std::scoped_lock lock(one_at_a_time);
            auto& [copy, unseen] = copies.emplace_back();
            copy.assign(out.begin(), out.end());
            unseen.run = [](ddp::completion&) noexcept {};
            node = &unseen;
            out = copy;
        }
        inner_->post_send(peer, what, out, *node);
        end_later(done, ddp::op_status::ok);
    }

    struct held {
        int peer;
        ddp::tag what;
        ddp::const_bytes out;
        ddp::completion* done;
    };
    struct doubled : ddp::completion {
        ddp::completion* users = nullptr;
    };
    std::deque<doubled> doubled_;  // outlives the transport
    std::unique_ptr<ddp::inproc_transport> inner_;
    flaw with_;
    std::optional<held> held_;
    std::vector<std::pair<ddp::completion*, ddp::op_status>> ended_;
};

struct flawed_world {
    std::shared_ptr<ddp::inproc_world> inner;
    flaw with;
    [[nodiscard]] auto connect(int rank) const {
        return std::make_unique<flawed_transport>(inner->connect(rank), with);
    }
};

std::vector<std::string> check(flaw with, char const* only) {
    conformance_options const options{.patience = with == flaw::none ? 10s : 250ms,
                                      .large_bytes = 300'000,
                                      .many = 50,
                                      .early_bytes = 200'000,
                                      .only = only};
    return ddp::testing::check_transport(
        2,
        [&](int ranks) { return std::make_shared<flawed_world>(flawed_world{ddp::inproc_world::create(ranks), with}); },
        options);
}

}  // namespace

TEST_CASE("a scenario that does not exist is not passed", "[comm][conformance]") {
    CHECK_THROWS_WITH(
        check(flaw::none, "deth"),
        Catch::Contains("conformance_options::only: there is no scenario 'deth'; scenarios() lists them"));
}

TEST_CASE("the suite complains of every flaw it was made for", "[comm][conformance]") {
    struct row {
        flaw with;
        char const* scenario;
    };
    std::vector<row> const rows = {
        {flaw::swaps_neighbours, "order"},
        {flaw::merges_identities, "independence"},
        {flaw::drops_fingerprint, "fingerprint"},
        {flaw::completes_in_post, "empty"},
        {flaw::forgets_wake, "wake"},
        {flaw::oversleeps, "progress_deadline"},
        {flaw::ignores_length, "length_mismatch"},
        {flaw::cuts_records, "abort"},
        {flaw::publishes_once, "abort"},
        {flaw::abort_leaves_operations, "abort"},
        {flaw::leaves_without_a_word, "leave"},
        {flaw::leaves_without_a_word, "destruction_by_one"},
        {flaw::loses_empty_messages, "empty"},
        {flaw::changes_a_byte, "sizes"},
        {flaw::changes_a_byte, "large"},
        {flaw::completes_twice, "all_to_all"},
        {flaw::merges_identities, "early"},
        {flaw::tells_no_news, "abort"},
        {flaw::takes_in_everything, "early"},
        {flaw::forgets_who_left, "leave"},
    };
    for (row const& r : rows) {
        CAPTURE(static_cast<int>(r.with), r.scenario);
        auto const complaints = check(r.with, r.scenario);
        CHECK_FALSE(complaints.empty());
        for (std::string const& c : complaints) CHECK(c.find(r.scenario) == 0);
        CHECK(check(flaw::none, r.scenario) == std::vector<std::string>{});
    }
}

TEST_CASE("a death is tried with the caller's own way to kill, in its turn", "[comm][conformance]") {
    int killed = 0;
    auto world = [&](int n) { return ddp::inproc_world::create(n); };
    std::shared_ptr<ddp::inproc_world> current;
    conformance_options options{.large_bytes = 1000, .many = 10, .early_bytes = 4'000'000};
    options.kill = [&](int rank) {
        ++killed;
        current->kill(rank);
    };
    auto const remembered = [&](int n) { return current = world(n); };
    CHECK(ddp::testing::check_transport(2, remembered, options) == std::vector<std::string>{});
    CHECK(killed == 1);
}
