// Throws arbitrary bytes at a rank that asks rank 0 for the job's addresses: another program may listen at MASTER_PORT. The
// rank takes an answer, or says in words for a terminal why not; it keeps no more than was sent. Anything else, and whatever
// a sanitizer sees, ends the program.
//
// Over a real connection: rank 0 is a thread that sends the whole input, and then nothing more.
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <ddp/rendezvous/rendezvous_error.hpp>
#include <ddp/rendezvous/tcp_mesh.hpp>
#include <ddp/rendezvous/tcp_store.hpp>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <thread>

#include "input.hpp"

namespace {

using fuzz::expect;

// Whoever connects is sent what `words` hold.
class impostor {
public:
    impostor() : acceptor_(ddp::tcp_context(), {boost::asio::ip::address_v4::loopback(), 0}) {
        std::thread([this] {
            for (;;) {
                ddp::detail::tcp_socket one(ddp::tcp_context());
                boost::system::error_code ignored;
                acceptor_.accept(one, ignored);
                if (ignored) {
                    std::this_thread::sleep_for(std::chrono::milliseconds(1));
                    continue;
                }
                {
                    std::scoped_lock const lock(mutex_);
                    ::send(one.native_handle(), words_.data(), words_.size(), MSG_NOSIGNAL);
                }
                one.shutdown(boost::asio::socket_base::shutdown_send, ignored);
                char sink[512];
                while (::recv(one.native_handle(), sink, sizeof sink, 0) > 0) {
                }  // until the rank closes
            }
        }).detach();
    }
    void say(std::string_view words) {
        std::scoped_lock const lock(mutex_);
        words_ = words;
    }
    ddp::detail::tcp_endpoint at() const { return acceptor_.local_endpoint(); }

private:
    ddp::detail::tcp_acceptor acceptor_;
    std::mutex mutex_;
    std::string words_;
};

template <class Call>
void answered(Call const& call) {
    try {
        call();
    } catch (ddp::rendezvous_error const& e) {
        std::string_view const said = e.what();
        expect(said.size() < 4 * 4096 + 1024, "what is said has bounds");
        expect(ddp::detail::printable(said, said.size()) == said, "what is said is for a terminal");
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(std::uint8_t const* data, std::size_t size) {
    using namespace std::chrono_literals;
    static impostor& rank0 = *new impostor;
    if (size == 0) return 0;
    bool const several = (data[0] & 1) != 0;
    std::string_view const words(reinterpret_cast<char const*>(data) + 1, size - 1);
    rank0.say(words);
    ddp::timing times;
    times.handshake = times.dead = times.join = 1s;  // nothing waits: the connection ends behind the words
    ddp::time_point const until =
        ddp::monotonic_clock::now() + 5ms;  // no second attempt: the pause before it is as long
    answered([&] {
        ddp::tcp_store store({rank0.at()}, 1, 2, 77, until, several, {}, times);
        ddp::time_point const late = ddp::monotonic_clock::now() + 1s;
        for (int turn = 0; turn < 2; ++turn) {
            std::size_t bytes = 0;
            for (auto const& [key, value] : store.all("address/", 2, late)) {
                bytes += key.size() + value.size();
                try {
                    static_cast<void>(ddp::detail::peer_address::parse(value));
                } catch (ddp::rendezvous_error const&) {
                }
            }
            expect(bytes <= words.size(), "no more is returned than was sent");
            answered([&] { store.check(); });
        }
        std::string const told = store.fail("a reason", late);
        expect(told.size() <= words.size() * 4 + 1024, "what all are told has bounds");
    });
    return 0;
}
