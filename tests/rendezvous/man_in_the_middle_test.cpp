// Somebody between two ends who can change, cut, exchange and repeat what they say, but does not know the secret. First two
// streams with channels, at every bit and every length of both handshakes; then whole jobs.
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <future>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <ddp/core/text.hpp>
#include <ddp/rendezvous/bootstrap.hpp>
#include <ddp/rendezvous/secure_channel.hpp>
#include <ddp/rendezvous/tcp_mesh.hpp>
#include <ddp/rendezvous/tcp_socket.hpp>
#include <ddp/rendezvous/tcp_store.hpp>
#include <ddp/rendezvous/tcp_store_protocol.hpp>
#include <ddp/rendezvous/tcp_store_server.hpp>
#include <ddp/transport/framed/tcp.hpp>

#include "support/catch.hpp"
#include "support/listener.hpp"
#include "support/secret.hpp"
#include "train/patience.hpp"

using namespace std::chrono_literals;
using ddp::channel_error;
using ddp::stream_status;
using ddp::test::listener;
using ddp::test::secret_in_a_file;

namespace {

constexpr char const* the_secret = "0123456789abcdef0123456789abcdef";

bool has(std::string_view text, std::string_view part) {
    return text.find(part) != std::string_view::npos;
}

ddp::const_bytes bytes_of_text(std::string_view text) {
    return std::as_bytes(std::span(text));
}

void append(std::string& to, ddp::const_bytes what) {
    to.append(reinterpret_cast<char const*>(what.data()), what.size());
}

std::unique_ptr<ddp::tcp_security> security_of(bool encrypts, std::string_view text = the_secret) {
    ddp::job_secret secret;
    std::memcpy(secret.bytes.data(), text.data(), text.size());
    return ddp::make_tcp_security(secret, encrypts);
}

std::string taken(int fd) {
    std::array<char, 16384> some;
    ssize_t const n = ::recv(fd, some.data(), some.size(), MSG_DONTWAIT);
    return n > 0 ? std::string(some.data(), static_cast<std::size_t>(n)) : std::string();
}

/// One end, as the store and the mesh use it: once its channel lets it, it says something, and it reads until it is told that
/// the connection is over. The other end of its socket is in the middle.
class end {
public:
    end(ddp::tcp_security const& security, bool dials) {
        int both[2];
        REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, both) == 0);
        middle_ = both[1];
        ddp::tcp_stream::socket socket(ddp::tcp_context());
        socket.assign(boost::asio::ip::tcp::v4(), both[0]);
        auto channel = security.channel(dials);
        channel_ = channel.get();
        stream_ = std::make_unique<ddp::tcp_stream>(std::move(socket), std::move(channel));
        words_ = dials ? "what the one that dials says" : "what the one that listens says";
    }
    end(end const&) = delete;
    end& operator=(end const&) = delete;
    ~end() { leave(); }

    /// What its user would do now. Returns whether anything has happened.
    bool act() {
        if (over()) return false;
        ddp::stream_result r = stream_->flush();
        if (r.status == stream_status::ok && !spoken_) {
            ddp::const_bytes const all = bytes_of_text(words_);
            r = stream_->write_some({&all, 1});
            spoken_ = r.status == stream_status::ok;
        }
        std::array<std::byte, 1000> buffer;
        ddp::mutable_bytes const to = buffer;
        if (r.status == stream_status::ok || r.status == stream_status::would_block) r = stream_->read_some({&to, 1});
        append(heard_, std::span<std::byte const>(buffer).first(r.bytes));
        if (r.status == stream_status::end || r.status == stream_status::error) {
            ended_ = r.status;
            boost::system::error_code ignored;
            stream_->base().close(ignored);  // as the library does with a connection that is over
        }
        return over() || r.bytes != 0;
    }
    /// What it has sent since the last call.
    std::string said() {
        std::string const now = middle_ < 0 ? std::string() : taken(middle_);
        wire_ += now;
        return now;
    }
    void hear(std::string_view what) const {
        if (middle_ >= 0 && !what.empty()) static_cast<void>(::send(middle_, what.data(), what.size(), MSG_NOSIGNAL));
    }
    /// The middle closes its connection to it.
    void leave() {
        if (middle_ >= 0) ::close(std::exchange(middle_, -1));
    }

    [[nodiscard]] bool over() const { return ended_ != stream_status::ok; }
    [[nodiscard]] bool established() const { return channel_->established(); }
    [[nodiscard]] channel_error error() const { return channel_->error(); }
    [[nodiscard]] std::string const& heard() const { return heard_; }
    [[nodiscard]] std::string const& words() const { return words_; }
    [[nodiscard]] std::string const& wire() const { return wire_; }

private:
    int middle_ = -1;
    std::unique_ptr<ddp::tcp_stream> stream_;
    ddp::tcp_channel const* channel_ = nullptr;
    std::string words_, heard_, wire_;
    bool spoken_ = false;
    stream_status ended_ = stream_status::ok;
};

/// Changes what one end has just said, of which `at` bytes have passed before. Returns false to end both connections after it.
using mischief = std::function<bool(bool from_the_dialler, std::size_t at, std::string& said)>;

bool none(bool, std::size_t, std::string&) {
    return true;
}

/// Two ends, and what is between them. When nothing moves any more, the connections end, as at a deadline.
struct encounter {
    end dials, listens;
    bool waited = false;  // it came to that

    explicit encounter(ddp::tcp_security const& security, mischief const& what = none)
        : encounter(security, security, what) {}
    encounter(ddp::tcp_security const& one, ddp::tcp_security const& other, mischief const& what)
        : dials(one, true), listens(other, false) {
        std::size_t up = 0, down = 0;
        bool open = true;
        for (bool moved = true; moved && open;) {
            moved = dials.act();
            moved = listens.act() || moved;
            open = carry(dials, listens, up, true, what, moved) && carry(listens, dials, down, false, what, moved);
            if (dials.over()) listens.leave();
            if (listens.over()) dials.leave();
        }
        waited = open && !dials.over() && !listens.over();
        if (both_believe()) return;
        dials.leave();
        listens.leave();
        for (int turn = 0; turn < 3; ++turn) {
            dials.act();
            listens.act();
        }
    }
    [[nodiscard]] bool both_believe() const {
        return dials.established() && listens.established() && dials.error() == channel_error::none &&
               listens.error() == channel_error::none && !dials.over() && !listens.over();
    }
    /// Whether each has what the other said, and nothing else.
    [[nodiscard]] bool met() const {
        return both_believe() && dials.heard() == listens.words() && listens.heard() == dials.words();
    }
    /// Whether neither has taken a byte of anybody, and both know that the connection is over.
    [[nodiscard]] bool refused() const {
        return !listens.established() && dials.heard().empty() && listens.heard().empty() && dials.over() &&
               listens.over();
    }

private:
    static bool carry(end& from, end& to, std::size_t& at, bool dialler, mischief const& what, bool& moved) {
        std::string said = from.said();
        if (said.empty()) return true;
        moved = true;
        std::size_t const before = std::exchange(at, at + said.size());
        bool const goes_on = what(dialler, before, said);
        to.hear(said);
        return goes_on;
    }
};

/// How many bytes each end says until both believe: what a middle can change of the handshake.
std::pair<std::size_t, std::size_t> lengths_of_handshake(ddp::tcp_security const& security) {
    auto const one = security.channel(true), other = security.channel(false);
    std::size_t up = 0, down = 0;
    auto const carry = [](ddp::tcp_channel& from, ddp::tcp_channel& to, std::size_t& count) {
        for (ddp::const_bytes out; !(out = from.pending()).empty();) {
            ddp::mutable_bytes const space = to.space();
            std::size_t const n = std::min(out.size(), space.size());
            std::memcpy(space.data(), out.data(), n);
            to.arrived(n);
            from.sent(n);
            count += n;
        }
    };
    while (!one->established() || !other->established()) {
        std::size_t const before = up + down;
        carry(*one, *other, up);
        carry(*other, *one, down);
        if (before == up + down) throw std::logic_error("they do not meet");
    }
    return {up, down};
}

}  // namespace

TEST_CASE("no bit of a handshake can be changed on the way", "[rendezvous][secure]") {
    bool const encrypts = GENERATE(false, true);
    auto const security = security_of(encrypts);
    REQUIRE(encounter(*security).met());
    auto const [up, down] = lengths_of_handshake(*security);
    CAPTURE(encrypts, up, down);
    REQUIRE((encrypts ? up > 200 && down > 150 : up == 72 && down == 64));
    std::size_t ignored = 0;
    auto const change = [&](bool from_the_dialler, std::size_t at, std::byte bits) {
        bool changed = false;
        encounter const both(*security, [&](bool dialler, std::size_t passed, std::string& said) {
            if (dialler == from_the_dialler && at >= passed && at < passed + said.size()) {
                changed = true;
                said[at - passed] = static_cast<char>(std::byte(said[at - passed]) ^ bits);
            }
            return true;
        });
        // RFC 8446, 5.1: the version of a record that is not encrypted "MUST be ignored for all purposes". What arrives is whole.
        bool const unread = encrypts && at == 2;
        ignored += unread && both.met();
        if (unread && both.met()) return;
        // Who listens proves itself over the number of who dials, who then finds that it was another.
        end const& notices = from_the_dialler && (encrypts || at < 8 || at >= 40) ? both.listens : both.dials;
        // A length of TLS that has grown: the rest would have to come.
        bool const told = notices.error() == channel_error::unproven || (encrypts && both.waited);
        bool const shown = encrypts && has(both.dials.wire() + both.listens.wire(), "what the one that");
        if (!changed || !both.refused() || notices.established() || !told || shown)
            FAIL_CHECK("byte " << at << (from_the_dialler ? " of who dials" : " of who listens") << ", bits "
                               << static_cast<int>(bits) << ": changed " << changed << ", refused " << both.refused()
                               << ", told " << told << ", shown " << shown);
    };
    for (bool const from_the_dialler : {true, false})
        for (std::size_t at = 0; at < (from_the_dialler ? up : down); at += ddp::test::fewer) {
            for (int bit = 0; bit < 8; ++bit) change(from_the_dialler, at, std::byte{1} << bit);
            change(from_the_dialler, at, std::byte{0xff});
            change(from_the_dialler, at, std::byte{0x21});
        }
    CHECK(ignored <= 20);
}

TEST_CASE("a handshake that is cut short anywhere ends both sides", "[rendezvous][secure]") {
    bool const encrypts = GENERATE(false, true);
    bool const silent = GENERATE(false, true);  // the rest never comes, or the connections end there
    auto const security = security_of(encrypts);
    auto const [up, down] = lengths_of_handshake(*security);
    for (bool const from_the_dialler : {true, false})
        for (std::size_t kept = 0; kept < (from_the_dialler ? up : down); kept += ddp::test::fewer) {
            bool cut = false;
            encounter const both(*security, [&](bool dialler, std::size_t passed, std::string& said) {
                if (dialler != from_the_dialler || passed + said.size() <= kept) return true;
                said.resize(kept > passed ? kept - passed : 0);
                cut = true;
                return silent;
            });
            end const& short_of = from_the_dialler ? both.listens : both.dials;
            if (!cut || !both.refused() || short_of.established() || (silent && !both.waited))
                FAIL_CHECK((encrypts ? "TLS: " : "proof: ")
                           << kept << " bytes of " << (from_the_dialler ? "who dials" : "who listens") << ", silent "
                           << silent << ": cut " << cut << ", refused " << both.refused());
        }
    SUCCEED();
}

TEST_CASE("a middle that knows other secrets, other handshakes or only these two ends convinces neither",
          "[rendezvous][secure]") {
    bool const encrypts = GENERATE(false, true);
    CAPTURE(encrypts);
    auto const security = security_of(encrypts);
    std::size_t first = 0;  // bytes of the first message of who dials
    encounter const recorded(*security, [&](bool dialler, std::size_t passed, std::string const& said) {
        if (dialler && passed == 0) first = said.size();
        return true;
    });
    REQUIRE(recorded.met());
    auto const [up, down] = lengths_of_handshake(*security);
    // With each of them it speaks by a secret of its own, or in the other way.
    for (auto const& other : {security_of(encrypts, "fedcba9876543210fedcba9876543210"), security_of(!encrypts)}) {
        CHECK(encounter(*security, *other, none).refused());
        CHECK(encounter(*other, *security, none).refused());
    }
    // Part of a handshake is one of before. (All that an end then says is another's, too: nobody is there to answer.)
    using range = std::pair<std::size_t, std::size_t>;
    for (bool const from_the_dialler : {true, false})
        for (auto const& [begin, past] : from_the_dialler ? std::vector<range>{{0, first}, {first, up}, {0, up}}
                                         : encrypts       ? std::vector<range>{{0, down}}
                                                          : std::vector<range>{{0, 32}, {32, 64}, {0, 64}}) {
            CAPTURE(from_the_dialler, begin, past);
            std::string const& before = (from_the_dialler ? recorded.dials : recorded.listens).wire();
            encounter const both(*security, [&](bool dialler, std::size_t passed, std::string& said) {
                for (std::size_t i = 0; dialler == from_the_dialler && i < said.size(); ++i)
                    if (passed + i >= begin && passed + i < past) said[i] = before[passed + i];
                return true;
            });
            CHECK(both.refused());
        }
    // Each hears what it has said itself.
    std::string own_of[2];
    encounter const mirror(*security, [&](bool dialler, std::size_t, std::string& said) {
        own_of[dialler] += said;
        said = std::exchange(own_of[!dialler], {});
        return true;
    });
    CHECK(mirror.refused());
    if (encrypts) return;
    // Number for number and proof for proof, so that all lengths are right.
    std::string number, proof;
    encounter const same_number(*security, [&](bool dialler, std::size_t passed, std::string& said) {
        if (dialler && passed == 0) number = said.substr(8, 32);
        if (!dialler && passed == 0) said.replace(0, 32, number);
        return true;
    });
    CHECK(same_number.refused());
    encounter const own_proof(*security, [&](bool dialler, std::size_t passed, std::string& said) {
        if (!dialler && passed == 0) proof = said.substr(32, 32);
        if (dialler && passed == 40) said.replace(0, 32, proof);
        return true;
    });
    CHECK(own_proof.refused());
    CHECK(own_proof.listens.error() == channel_error::unproven);
}

namespace {

/// What stands between rank 1 and rank 0, at a port of its own, on each connection that rank 1 makes.
class middle {
public:
    /// One connection of rank 1 and one to rank 0. `up`: said by rank 1, `down`: by rank 0; what is left in them is passed on.
    struct link {
        int one, zero;
        std::string up = {}, down = {};
        std::size_t passed_up = 0, passed_down = 0;  // before these
        bool over = false;
    };
    using act = std::function<void(link&)>;

    middle(std::uint16_t port_of_0, act does) : does_(std::move(does)), zero_(port_of_0) {
        thread_ = std::thread([this] { run(); });
    }
    middle(middle const&) = delete;
    middle& operator=(middle const&) = delete;
    ~middle() {
        stop_ = true;
        thread_.join();
    }
    [[nodiscard]] std::uint16_t port() const { return at_.port; }
    /// The first bytes that rank 1 has said on each connection.
    [[nodiscard]] std::vector<std::string> openings() const {
        std::scoped_lock const lock(lock_);
        return openings_;
    }
    [[nodiscard]] std::string said_by_0() const {
        std::scoped_lock const lock(lock_);
        return said_by_0_;
    }

private:
    static int dial(std::uint16_t port) {
        int const fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        ::sockaddr_in to{};
        to.sin_family = AF_INET;
        to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        to.sin_port = htons(port);
        static_cast<void>(::connect(fd, reinterpret_cast<::sockaddr*>(&to), sizeof to));
        return fd;
    }
    /// False once that side has closed.
    static bool take(int fd, std::string& to) {
        char probe = 0;
        if (::recv(fd, &probe, 1, MSG_PEEK | MSG_DONTWAIT) == 0) return false;
        to = taken(fd);
        return true;
    }
    static void give(int fd, std::string& what) {
        if (!what.empty()) static_cast<void>(::send(fd, what.data(), what.size(), MSG_NOSIGNAL));
        what.clear();
    }
    void run() {
        struct open_link : link {
            std::size_t number;
        };
        std::list<open_link> links;
        while (!stop_) {
            std::vector<::pollfd> polls{{at_.fd, POLLIN, 0}};
            for (link const& l : links) {
                polls.push_back({l.one, POLLIN, 0});
                polls.push_back({l.zero, POLLIN, 0});
            }
            ::poll(polls.data(), polls.size(), 5);
            for (open_link& l : links) {
                bool const stay = take(l.one, l.up), stays = take(l.zero, l.down);
                std::size_t const up = l.up.size(), down = l.down.size();
                {
                    std::scoped_lock const lock(lock_);
                    if (openings_[l.number].size() < 16) openings_[l.number] += l.up.substr(0, 16);
                    said_by_0_ += l.down;
                }
                if (up + down != 0) does_(l);
                l.passed_up += up;
                l.passed_down += down;
                give(l.zero, l.up);
                give(l.one, l.down);
                l.over = l.over || (!stay && up == 0) || (!stays && down == 0);
            }
            links.remove_if([](link const& l) {
                if (!l.over) return false;
                ::close(l.one);
                ::close(l.zero);
                return true;
            });
            if ((polls[0].revents & POLLIN) == 0) continue;
            int const one = ::accept4(at_.fd, nullptr, nullptr, SOCK_CLOEXEC);
            if (one < 0) continue;
            std::scoped_lock const lock(lock_);
            links.push_back({{one, dial(zero_)}, openings_.size()});
            openings_.emplace_back();
        }
        for (link const& l : links) {
            ::close(l.one);
            ::close(l.zero);
        }
    }

    act does_;
    std::uint16_t zero_;
    listener at_;
    std::thread thread_;
    std::atomic<bool> stop_{false};
    mutable std::mutex lock_;
    std::vector<std::string> openings_;
    std::string said_by_0_;
};

std::string outcome(int rank, std::uint16_t port, ddp::tcp_options const& options) {
    ddp::job j;
    j.rank = j.local_rank = rank;
    j.size = j.local_size = 2;
    j.master_port = port;
    try {
        static_cast<void>(ddp::connect_tcp(j, options));
        return "it came together";
    } catch (std::exception const& e) {
        return e.what();
    }
}

struct story {
    std::string zero, one;  // what became of the ranks
    std::vector<std::string> openings;
    std::string said_by_0;
};

/// A job of two ranks, where that stands between rank 1 and rank 0's store.
story of_a_job(bool encrypts, std::chrono::milliseconds join, middle::act const& does, bool insecure = false) {
    ddp::tcp_options options;
    options.prove = !insecure;
    options.encrypt = encrypts;
    options.insecure = insecure;
    options.security = &ddp::make_tcp_security;
    options.share_memory = false;
    options.times = ddp::timing::for_tests();
    options.times.join = join;
    listener const at;
    middle const between(at.port, does);
    ddp::tcp_options of_0 = options;
    of_0.listen_descriptor = at.inherit();
    auto zero = std::async(std::launch::async, outcome, 0, at.port, of_0);
    std::string const one = outcome(1, between.port(), options);
    return {zero.get(), one, between.openings(), between.said_by_0()};
}

/// The same where it stands between the ranks themselves, who meet by a store that nobody disturbs.
story of_a_mesh(bool encrypts, std::chrono::milliseconds join, middle::act const& does) {
    using boost::asio::ip::address_v4;
    ddp::timing times = ddp::timing::for_tests();
    times.join = join;
    listener const at;
    ddp::detail::tcp_acceptor store_at(ddp::tcp_context());
    store_at.assign(boost::asio::ip::tcp::v4(), at.inherit());
    ddp::tcp_store_server server(std::move(store_at), 2, 0, 7, times);
    std::list<ddp::detail::tcp_acceptor> acceptors;
    for (int rank = 0; rank < 2; ++rank) {
        acceptors.emplace_back(ddp::tcp_context());
        if (ddp::detail::listen_at(acceptors.back(), {address_v4::loopback(), 0})) throw std::runtime_error("no port");
    }
    middle const between(acceptors.front().local_endpoint().port(), does);
    auto const security = security_of(encrypts);
    auto const one = [&](int rank, ddp::detail::tcp_acceptor& acceptor) -> std::string {
        try {
            ddp::time_point const until = ddp::monotonic_clock::now() + 20s;
            ddp::tcp_store store({{address_v4::loopback(), at.port}}, rank, 2, 0, until, false, {}, times);
            ddp::detail::peer_hello mine;
            mine.from = rank;
            mine.size = 2;
            mine.nonce = store.nonce();
            std::vector<ddp::detail::peer_address> const addresses(
                2, {{address_v4::loopback(), between.port()}, "a process"});
            std::vector<ddp::detail::tcp_mesh::connection> met;
            ddp::detail::tcp_mesh mesh(mine, addresses, acceptor, store, times, security.get());
            mesh.connect(met);
            store.put(ddp::detail::concat({"done/", rank}), {}, until);
            static_cast<void>(store.all("done/", 2, until));  // the server waits for that of both
            return "it came together";
        } catch (std::exception const& e) {
            return e.what();
        }
    };
    auto zero = std::async(std::launch::async, one, 0, std::ref(acceptors.front()));
    std::string const said = one(1, acceptors.back());
    return {zero.get(), said, between.openings(), between.said_by_0()};
}

/// What a rank without any secret would say, and what it would be told.
std::string plain_hello() {
    ddp::detail::store_hello hello;
    hello.rank = 1;
    hello.size = 2;
    std::string text;
    append(text, ddp::bytes_of(hello));
    return text;
}
std::string plain_welcome() {
    std::string text;
    append(text, ddp::bytes_of(ddp::detail::store_head{ddp::detail::store_op::ok, 0, 8, 0}));
    return text + "a nonce.";
}
std::string plain_peer(int from) {
    ddp::detail::peer_hello hello;
    hello.from = from;
    hello.to = 1 - from;
    hello.size = 2;
    hello.nonce = 7;
    std::string text;
    append(text, ddp::bytes_of(hello));
    return text;
}

}  // namespace

TEST_CASE("whatever stands between two ranks, they do not meet, nor ever try a weaker way", "[rendezvous][secure]") {
    bool const encrypts = GENERATE(false, true);
    CAPTURE(encrypts);
    secret_in_a_file const secret(the_secret);
    auto const security = security_of(encrypts), weaker = security_of(!encrypts);
    auto const [up, down] = lengths_of_handshake(*security);
    encounter const recorded(*security), other_way(*weaker);
    REQUIRE(recorded.met());
    using link = middle::link;

    for (story const& honest : {of_a_job(encrypts, 20s, [](link&) {}), of_a_mesh(encrypts, 20s, [](link&) {})}) {
        CHECK(honest.zero == "it came together");
        CHECK(honest.one == "it came together");
        CHECK_FALSE(honest.openings.empty());
    }

    std::string const replayed_up = recorded.dials.wire(), replayed_down = recorded.listens.wire();
    std::string const other_up = other_way.dials.wire().substr(0, 40), other_down = other_way.listens.wire();
    auto const says_down = [](std::string const& what) {  // to rank 1, in place of rank 0, which hears nothing
        return [what](link& l) {
            l.up.clear();
            l.down = l.passed_up == 0 ? what : "";
        };
    };
    auto const says_up = [](std::string const& what) {  // to rank 0, in place of rank 1, whose answers come from rank 0
        return [what](link& l) {
            if (!l.up.empty()) l.up = l.passed_up == 0 ? what : "";
        };
    };
    std::vector<std::pair<std::string, middle::act>> cases = {
        {"rank 1 is answered without a proof", says_down(plain_welcome())},
        {"rank 0 is greeted without a proof", says_up(plain_hello())},
        {"rank 1 is answered by a peer without a proof", says_down(plain_peer(0))},
        {"rank 0 is greeted by a peer without a proof", says_up(plain_peer(1))},
        {"rank 1 is answered in the other way", says_down(other_down)},
        {"rank 0 is greeted in the other way", says_up(other_up)},
        {"rank 1 is told that TLS cannot be", says_down(std::string("\x15\x03\x03\x00\x02\x02\x46", 7))},
        {"rank 1 is told that there is no TLS", says_down("HTTP/1.1 400 Bad Request\r\n\r\n")},
        {"rank 1 hears a handshake of before", says_down(replayed_down)},
        {"rank 0 hears a session of before", says_up(replayed_up)},
        {"rank 1 hears itself", [](link& l) { l.down = std::exchange(l.up, {}); }},
        {"rank 0 hears itself",
         [&, encrypts](link& l) {
             if (encrypts ? l.passed_up != 0 : l.passed_up == 40) l.up = recorded.listens.wire().substr(0, l.up.size());
         }},
        {"connections are closed at once", [](link& l) { l.over = true; }},
    };
    // A bit changed, and all that follows held back: of each connection, at the ends of messages and among them.
    for (bool const from_1 : {true, false})
        for (std::size_t const at : {std::size_t{0}, std::size_t{1}, std::size_t{3}, std::size_t{8}, std::size_t{39},
                                     std::size_t{40}, (from_1 ? up : down) - 33, (from_1 ? up : down) - 1}) {
            std::string const where = std::to_string(at) + (from_1 ? " of rank 1" : " of rank 0");
            cases.emplace_back("a bit is changed at " + where, [=](link& l) {
                std::size_t const passed = from_1 ? l.passed_up : l.passed_down;
                std::string& said = from_1 ? l.up : l.down;
                if (at >= passed && at < passed + said.size()) said[at - passed] ^= 4;
            });
            cases.emplace_back("nothing comes after " + where, [=](link& l) {
                std::size_t const passed = from_1 ? l.passed_up : l.passed_down;
                std::string& said = from_1 ? l.up : l.down;
                said.resize(std::min(said.size(), at > passed ? at - passed : 0));
            });
        }
    std::chrono::milliseconds const patience = ddp::test::fewer == 1 ? 900ms : 3000ms;
    using begin = std::function<story(middle::act const&)>;
    std::vector<std::pair<std::string, begin>> const places = {
        {"the store", [=](middle::act const& does) { return of_a_job(encrypts, patience, does, false); }},
        {"the store of a job that may be insecure",  // which is for ranks that have no secret
         [=](middle::act const& does) { return of_a_job(encrypts, patience, does, true); }},
        {"a rank", [=](middle::act const& does) { return of_a_mesh(encrypts, patience, does); }}};
    std::string const opening = encrypts ? "\x16\x03" : "ddpprov\x01";
    for (auto const& [place, start] : places) {
        std::vector<std::future<story>> running;
        for (auto const& [name, does] : cases) running.push_back(std::async(std::launch::async, start, does));
        for (std::size_t i = 0; i < cases.size(); ++i) {
            story const told = running[i].get();
            std::string const& name = cases[i].first;
            CAPTURE(place, name, told.zero, told.one);
            CHECK(has(told.zero, "DDP-E201"));
            CHECK(has(told.one, "DDP-E201"));
            if (place != "a rank") CHECK(has(told.zero, "ranks {1} never joined"));
            CHECK_FALSE(told.openings.empty());
            for (std::string const& one : told.openings)
                if (!one.empty() && one.substr(0, opening.size()) != opening)
                    FAIL_CHECK("a connection began otherwise");
            // Who does not begin as the job's ranks do is told nothing, but for TLS's own word for that, 7 bytes.
            if (name.starts_with("rank 0 is greeted"))
                CHECK(told.said_by_0.size() <= (encrypts ? 7 * told.openings.size() : 0));
            CHECK_FALSE(has(told.said_by_0, the_secret));
        }
    }
}
