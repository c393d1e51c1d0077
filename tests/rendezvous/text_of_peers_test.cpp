// What other ranks say reaches messages with its control characters escaped, whichever way it comes.
#include <ddp/collective/share_memory.hpp>
#include <ddp/comm/shared_memory.hpp>
#include <ddp/comm/verdict.hpp>
#include <ddp/rendezvous/tcp_memory_paths.hpp>
#include <ddp/rendezvous/tcp_mesh.hpp>
#include <ddp/rendezvous/tcp_store.hpp>
#include <ddp/rendezvous/tcp_store_server.hpp>
#include <ddp/train/weights.hpp>
#include <ddp/transport/inproc.hpp>

#include <cstddef>
#include <cstdint>
#include <future>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "support/catch.hpp"
#include "support/printed_by.hpp"
#include "support/thrown_by.hpp"

namespace {

using namespace std::chrono_literals;
using ddp::test::printed_by;

constexpr char const* raw = "\x1b[31mred";
constexpr char const* escaped = "\\x1b[31mred";

bool has(std::string const& text, std::string const& part) {
    return text.find(part) != std::string::npos;
}

/// What rank 0 of two throws; both run `f`.
template <class Transport, class F>
std::string thrown_on_rank_0(F const& f) {
    auto world = ddp::inproc_world::create(2);
    std::vector<std::future<std::string>> running;
    for (int r = 0; r < 2; ++r)
        running.push_back(std::async(std::launch::async, [&world, &f, r] {
            ddp::communicator<> const comm = ddp::any_communicator(std::make_unique<Transport>(world, r));
            return ddp::test::thrown_by([&] { f(comm); });
        }));
    std::string const said = running[0].get();
    running[1].get();
    return said;
}

/// Has no room on rank 1, and says why.
struct cramped : ddp::inproc_transport {
    using inproc_transport::inproc_transport;
    struct full final : ddp::memory_sharing {
        std::shared_ptr<std::byte> make(std::size_t, ddp::memory_offer&) override { throw std::runtime_error(raw); }
        bool give(ddp::memory_offer const&) noexcept override { return false; }
        void take(std::span<ddp::memory_offer const>) noexcept override {}
        std::shared_ptr<std::byte> view(ddp::memory_offer const&) noexcept override { return nullptr; }
    };
    std::unique_ptr<ddp::memory_sharing> share_memory() {
        return rank() == 1 ? std::make_unique<full>() : inproc_transport::share_memory();
    }
};

/// Does not share on rank 1, and says why.
struct unwilling : cramped {
    using cramped::cramped;
    struct none final : ddp::memory_sharing {
        std::shared_ptr<std::byte> make(std::size_t, ddp::memory_offer& mine) override {
            mine.text = std::string_view(raw);
            return nullptr;
        }
        bool give(ddp::memory_offer const&) noexcept override { return false; }
        void take(std::span<ddp::memory_offer const>) noexcept override {}
        std::shared_ptr<std::byte> view(ddp::memory_offer const&) noexcept override { return nullptr; }
    };
    std::unique_ptr<ddp::memory_sharing> share_memory() {
        return rank() == 1 ? std::make_unique<none>() : inproc_transport::share_memory();
    }
};

}  // namespace

TEST_CASE("what a late rank has entered is said without its control characters", "[rendezvous][verdict]") {
    ddp::failure mine;
    mine.entered = {.number = 2, .name = std::string_view("allreduce")};
    ddp::mark const last{.number = 1, .name = std::string_view(raw)};
    std::vector<int> const absent{1};
    std::string const text = ddp::detail::straggler_text(0, mine, absent, 1, last, 120s, true, false);
    CAPTURE(text);
    CHECK(has(text, escaped));
    CHECK(!has(text, raw));
}

TEST_CASE("why a rank shares no memory is said without its control characters", "[rendezvous][tcp]") {
    auto const share = [](ddp::communicator<> const& comm) { (void)ddp::detail::share_memory(comm, 4096); };
    std::string const thrown = thrown_on_rank_0<cramped>(share);
    CAPTURE(thrown);
    CHECK(has(
        thrown,
        std::string("rank 1 has no room for the memory that the ranks of its host share (ranks 0 and 1): ") + escaped));
    CHECK(!has(thrown, raw));

    ddp::detail::blindness_said() = false;
    std::string const printed = printed_by([&] { CHECK(thrown_on_rank_0<unwilling>(share) == ""); });
    CAPTURE(printed);
    CHECK(has(printed, escaped));
    CHECK(!has(printed, raw));

    ddp::timing const times = ddp::timing::for_tests();
    ddp::time_point const until = ddp::monotonic_clock::now() + 5s;
    ddp::detail::tcp_acceptor door(ddp::tcp_context());
    REQUIRE(!ddp::detail::listen_at(door, {boost::asio::ip::make_address("127.0.0.1"), 0}));
    ddp::detail::tcp_endpoint const at = door.local_endpoint();
    ddp::tcp_store_server server(std::move(door), 2, 0, 7, times);
    ddp::tcp_store zero({at}, 0, 2, 0, until, false, {}, times), one({at}, 1, 2, 0, until, false, {}, times);
    ddp::detail::tcp_socket socket(ddp::tcp_context());
    REQUIRE(!ddp::detail::dial(socket, at, until));
    std::vector<ddp::detail::tcp_mesh::connection> all;
    all.push_back({1, ddp::tcp_stream(std::move(socket)), true});
    ddp::detail::memory_paths paths(0, all, 5, 9, true);
    ddp::memory_offer offer;
    offer.text = std::string_view(raw);
    ddp::const_bytes const bytes = bytes_of(offer);
    one.put("memory/1", {reinterpret_cast<char const*>(bytes.data()), bytes.size()}, until);
    paths.exchange(zero, 2, until);
    paths.hear(0, paths.news());
    paths.hear(1, std::string("5;9;;") + raw);
    std::string const complaint = paths.complaint();
    CAPTURE(complaint);
    CHECK(has(complaint, escaped));
    CHECK(!has(complaint, raw));
    CHECK(paths.apart() == "");
    paths.hear(2, "7;0;");    // a host with a name
    paths.hear(3, ";;zz;;");  // nonsense
    CHECK(paths.apart() == "");
    paths.hear(4, "6;9;");
    CHECK(has(paths.apart(),
              "ranks 0, 1 and 4 are on one machine in 2 network namespaces (ranks 0 and 1; rank 4), which"));
}

TEST_CASE("what went wrong with another rank's file is said without its control characters", "[rendezvous][weights]") {
    std::string const said = thrown_on_rank_0<ddp::inproc_transport>([](ddp::communicator<> const& comm) {
        ddp::detail::file_outcome mine;
        std::string text = "a file";
        ddp::detail::attempt(comm, mine, text, [&]() -> std::uint64_t {
            if (comm.rank() == 1) throw ddp::data_error(ddp::errc::file, raw);
            return 0;
        });
        ddp::detail::agree_on_outcome(comm, mine, text, "load_weights");
    });
    CAPTURE(said);
    CHECK(has(said, std::string("rank 1: ") + escaped));
    CHECK(!has(said, raw));
}

TEST_CASE("ranks of one machine in several network namespaces are named by namespace", "[rendezvous]") {
    using machine = std::vector<std::vector<int>>;
    auto const text = [](std::vector<machine> machines) { return ddp::detail::ranks_apart(machines); };
    CHECK(text({}) == "");
    CHECK(text({{{0, 1, 2}}, {{3, 4}}}) == "");
    CHECK(text({{{0, 1}, {2, 3}}}) ==
          "ranks 0 to 3 are on one machine in 2 network namespaces (ranks 0 and 1; ranks 2 and 3)");
    CHECK(text({{{0}}, {{1}, {4}}, {{2, 3}}, {{5}, {6}, {7}, {8}, {9, 10}, {11}}}) ==
          "ranks 1 and 4 are on one machine in 2 network namespaces (rank 1; rank 4), ranks 5 to 11 are on one machine "
          "in 6 network namespaces (rank 5; rank 6; rank 7; rank 8; 2 more)");
    std::vector<machine> many;
    for (int m = 0; m < 4; ++m) many.push_back({{2 * m}, {2 * m + 1}});
    std::string const four = text(many);
    CHECK(four.find("ranks 4 and 5 are on one machine") != std::string::npos);
    CHECK(four.find("ranks 6 and 7") == std::string::npos);
    CHECK(four.ends_with(", and so are ranks of 1 more machine"));
    many.push_back({{8}, {9}});
    CHECK(text(many).find(", and so are ranks of 2 more machines") != std::string::npos);
}
