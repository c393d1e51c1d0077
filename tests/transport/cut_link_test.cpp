// A connection between two of several ranks fails, and all ranks are alive: one verdict, which names the connection.
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <future>
#include <memory>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include <ddp/collective/allreduce.hpp>
#include <ddp/comm/communicator.hpp>
#include <ddp/transport/any.hpp>
#include <ddp/transport/framed/frame_descriptor.hpp>
#include <ddp/transport/framed/framed.hpp>

#include "support/catch.hpp"
#include "train/patience.hpp"

namespace {

using namespace std::chrono_literals;

enum class fault { cut, half_closed, silent, silent_forth, silent_back };

/// What happens to the connection of two ranks.
struct cable {
    int ends[2] = {-1, -1};
    std::atomic<bool> swallows[2] = {false, false};  // what end 0, end 1 writes

    void break_by(fault how) {
        swallows[0] = how == fault::silent || how == fault::silent_forth;
        swallows[1] = how == fault::silent || how == fault::silent_back;
        if (how == fault::cut) ::shutdown(ends[0], SHUT_RDWR);
        if (how == fault::half_closed) ::shutdown(ends[1], SHUT_RD), ::shutdown(ends[0], SHUT_WR);
    }
};

/// One end of a cable.
class cable_stream {
public:
    cable_stream(std::shared_ptr<cable> of, int end) : inner_(of->ends[end]), cable_(std::move(of)), end_(end) {}

    ddp::stream_result read_some(std::span<ddp::mutable_bytes const> buffers) noexcept {
        return inner_.read_some(buffers);
    }
    ddp::stream_result write_some(std::span<ddp::const_bytes const> buffers) noexcept {
        if (!cable_->swallows[end_]) return inner_.write_some(buffers);
        std::size_t bytes = 0;
        for (ddp::const_bytes const b : buffers) bytes += b.size();
        return {bytes, ddp::stream_status::ok, {}};
    }
    [[nodiscard]] int descriptor() const noexcept { return inner_.descriptor(); }
    void shutdown_send() noexcept { inner_.shutdown_send(); }

private:
    ddp::descriptor_stream inner_;
    std::shared_ptr<cable> cable_;
    int end_;
};

using transport = ddp::framed<cable_stream>;

ddp::timing quick() {
    ddp::timing times = ddp::timing::for_tests();
#if defined(DDP_TEST_SANITIZED)
    times.dead = 4000ms;  // some twenty threads that never rest share two slow cores with other tests
#else
    times.dead = 1000ms;
#endif
    times.collective = 20s;
    times.verdict = 3000ms;  // so that a busy machine changes nothing: nobody decides by this
    return times;
}

/// What every rank throws where the connection of `a` and `b` (-1: and everybody) fails in the middle of allreduces, and
/// how long after that. `apart`: between the failures of two connections.
std::vector<std::string> verdicts(int ranks, int a, int b, fault how, std::chrono::milliseconds& after,
                                  std::chrono::milliseconds apart = 30ms) {
    std::vector<std::vector<ddp::framed_peer<cable_stream>>> peers(static_cast<std::size_t>(ranks));
    std::vector<std::shared_ptr<cable>> failing;
    for (int high = 0; high < ranks; ++high)
        for (int low = 0; low < high; ++low) {
            auto const link = std::make_shared<cable>();
            if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, link->ends) != 0)
                throw std::runtime_error("socketpair");
            if ((low == a && high == b) || (b < 0 && (low == a || high == a))) failing.push_back(link);
            peers[static_cast<std::size_t>(low)].push_back({high, cable_stream(link, 0)});
            peers[static_cast<std::size_t>(high)].push_back({low, cable_stream(link, 1)});
        }
    std::atomic<int> rounds{0}, ended{0};
    std::vector<std::future<std::string>> running;
    for (int rank = 0; rank < ranks; ++rank)
        running.push_back(std::async(std::launch::async, [&, rank]() -> std::string {
            ddp::framed_options options;
            options.times = quick();
            auto comm = ddp::any_communicator(
                std::make_unique<transport>(rank, ranks, std::move(peers[static_cast<std::size_t>(rank)]), options),
                quick());
            try {
                for (;;) {
                    static_cast<void>(ddp::allreduce(comm, 1.0));
                    if (rank == 0) ++rounds;
                }
            } catch (ddp::comm_error const& e) {
                ++ended;
                return e.what();
            }
        }));
    while (rounds < 3 && ended == 0) std::this_thread::sleep_for(1ms);
    auto const start = std::chrono::steady_clock::now();
    for (auto const& link : failing) {  // one after the other: who hears of a loss has not noticed its own yet
        link->break_by(how);
        if (apart > 0ms) std::this_thread::sleep_for(apart);
    }
    std::vector<std::string> all;
    for (auto& r : running) all.push_back(r.get());
    after = std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - start);
    return all;
}

bool names_the_connection(std::string const& text, int a, int b) {
    auto const between = [&](int x, int y) {
        return text.find("the connection between rank " + std::to_string(x) + " and rank " + std::to_string(y)) !=
               std::string::npos;
    };
    return between(a, b) || between(b, a);
}

}  // namespace

TEST_CASE("a connection that fails between two of several ranks is named by all of them alike",
          "[comm][framed][fault]") {
    struct broken {
        int ranks, a, b;
        fault how;
        std::vector<std::string> said = {};
        std::chrono::milliseconds after{0};
    };
    std::vector<broken> all;
    for (fault const how : {fault::cut, fault::half_closed, fault::silent, fault::silent_forth, fault::silent_back})
        for (auto const& [ranks, a, b] : {std::tuple(3, 0, 1), {3, 0, 2}, {3, 1, 2}, {4, 0, 3}, {4, 2, 3}})
            all.push_back({ranks, a, b, how});
    for (int again = 0; again < 12; ++again)  // who hears of it first is chance: a hasty rank is seen in one of three
        all.push_back({3, 0, 1, again % 2 == 0 ? fault::cut : fault::half_closed});
    std::atomic<std::size_t> next{0};
    std::vector<std::future<void>> lanes;  // most of their time they wait
    for (int lane = 0; lane < 5; ++lane)
        lanes.push_back(std::async(std::launch::async, [&] {
            for (std::size_t i; (i = next++) < all.size();)
                all[i].said = verdicts(all[i].ranks, all[i].a, all[i].b, all[i].how, all[i].after);
        }));
    for (auto& lane : lanes) lane.get();
    for (broken const& each : all) {
        CAPTURE(each.ranks, each.a, each.b, static_cast<int>(each.how), each.said);
        std::vector<std::string> const& said = each.said;
        CHECK(std::set<std::string>(said.begin(), said.end()).size() == 1);
        CHECK(names_the_connection(said.front(), each.a, each.b));
        bool const closes = each.how == fault::cut || each.how == fault::half_closed;
        CHECK(each.after < (closes ? 0ms : quick().dead) + quick().verdict);  // nobody had to wait for that
    }
}

TEST_CASE("a rank that all others have lost is gone as soon as they have told each other", "[comm][framed][fault]") {
    std::chrono::milliseconds after{0};
    std::vector<std::string> const said = verdicts(4, 2, -1, fault::cut, after);
    CAPTURE(said);
    for (std::size_t const rank : {0u, 1u, 3u}) {
        CHECK(said[rank] == said[0]);
        CHECK(said[rank].find("rank 2 is gone") != std::string::npos);
    }
    CHECK(after < quick().verdict);
}

TEST_CASE("a rank that all others lose at the same moment is gone at once", "[comm][framed][fault]") {
    for (int attempt = 0; attempt < 12; ++attempt) {
        std::chrono::milliseconds after{0};
        std::vector<std::string> const said = verdicts(3, 0, -1, fault::cut, after, 0ms);
        CAPTURE(attempt, said);
        CHECK(said[1] == said[2]);
        CHECK(said[1].find("rank 0 is gone") != std::string::npos);
        CHECK(after < quick().verdict);  // they have told each other, and wait for nobody
    }
}
