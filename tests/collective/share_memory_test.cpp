// A rank that has no room for memory that ranks share: every rank says the same, whichever learns of it first.
#include <ddp/collective/share_memory.hpp>
#include <ddp/comm/shared_memory.hpp>
#include <ddp/transport/inproc.hpp>

#include <chrono>
#include <cstddef>
#include <future>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "support/catch.hpp"
#include "support/thrown_by.hpp"
#include "train/patience.hpp"

namespace {

enum class missing { own, others };

/// Rank 2 has no room for its own memory, or for that of others, and its messages to rank 0 are late: rank 1 knows first.
struct late_transport : ddp::inproc_transport {
    using inproc_transport::inproc_transport;
    struct narrow final : ddp::memory_sharing {
        explicit narrow(missing of) : missing_(of) {}
        std::shared_ptr<std::byte> make(std::size_t bytes, ddp::memory_offer&) override {
            if (missing_ == missing::own) throw std::runtime_error("8 MiB: no more");
            return std::shared_ptr<std::byte>(new std::byte[bytes + header_bytes](),
                                              std::default_delete<std::byte[]>());
        }
        bool give(ddp::memory_offer const&) noexcept override { return true; }
        void take(std::span<ddp::memory_offer const>) noexcept override {}
        std::shared_ptr<std::byte> view(ddp::memory_offer const&) noexcept override { return nullptr; }
        [[nodiscard]] ddp::sharing_problem problem() const noexcept override {
            return {.refused = 1, .text = std::string_view("8 MiB: no more")};
        }

    private:
        missing missing_;
    };
    std::unique_ptr<ddp::memory_sharing> share_memory() {
        return rank() == 2 ? std::make_unique<narrow>(what) : inproc_transport::share_memory();
    }
    void post_send(int peer, ddp::tag tag, ddp::const_bytes out, ddp::completion& done) {
        if (rank() == 2 && peer == 0) std::this_thread::sleep_for(std::chrono::milliseconds(50));
        inproc_transport::post_send(peer, tag, out, done);
    }
    missing what = missing::own;
};

}  // namespace

TEST_CASE("a rank that learns first that another has no room leaves when all know", "[collective]") {
    missing const what = GENERATE(missing::own, missing::others);
    auto world = ddp::inproc_world::create(3);
    std::vector<std::future<std::string>> running;
    for (int r = 0; r < 3; ++r)
        running.push_back(std::async(std::launch::async, [&world, r, what] {
            auto end = std::make_unique<late_transport>(world, r);
            end->what = what;
            return ddp::test::thrown_by([&] {
                ddp::communicator<> const comm = ddp::any_communicator(std::move(end), ddp::test::patient());
                (void)ddp::detail::share_memory(comm, 4096);
            });
        }));
    for (auto& one : running)
        CHECK(one.get().find("DDP-E101 environment: rank 2 has no room for the memory that the ranks of its host share "
                             "(ranks 0 to 2): 8 MiB: no more. Give it more memory (ulimit -v") == 0);
}
