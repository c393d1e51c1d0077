// Connections that prove a secret, or encrypt with it: nothing but the bytes that were sent arrives, and only from who knows
// the secret. Channels back to back without sockets, where every byte can be changed; then whole jobs.
#include <openssl/bio.h>
#include <openssl/ec.h>
#include <openssl/evp.h>
#include <openssl/provider.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ddp/rendezvous/bootstrap.hpp>
#include <ddp/rendezvous/secure_channel.hpp>
#include <ddp/rendezvous/tcp_store_protocol.hpp>
#include <ddp/rendezvous/tls_channel.hpp>
#include <ddp/testing/conformance.hpp>

#include "support/catch.hpp"
#include "support/job_checks.hpp"
#include "support/listener.hpp"
#include "support/loopback.hpp"
#include "support/sanitizers.hpp"
#include "support/secret.hpp"
#include "support/thrown_by.hpp"
#include "train/patience.hpp"

using namespace std::chrono_literals;
using ddp::channel_error;
using ddp::test::listener;
using ddp::test::loopback_world;
using ddp::test::secret_in_a_file;

namespace {

using bytes = std::vector<std::byte>;

ddp::job_secret secret_of(std::string const& text) {
    ddp::job_secret secret;
    std::memcpy(secret.bytes.data(), text.data(), text.size());
    return secret;
}

bytes text_bytes(std::string const& text) {
    bytes all(text.size());
    std::memcpy(all.data(), text.data(), text.size());
    return all;
}

/// One end: a channel, what its user has received, and all that it has put on the wire.
struct end {
    std::unique_ptr<ddp::tcp_channel> channel;
    bytes received = {};
    bytes wire = {};

    /// Everything that it has to say now.
    bytes speak() {
        bytes said;
        while (true) {
            ddp::const_bytes const out = channel->pending();
            if (out.empty()) break;
            said.insert(said.end(), out.begin(), out.end());
            channel->sent(out.size());
        }
        wire.insert(wire.end(), said.begin(), said.end());
        return said;
    }
    /// Hears these, at most `step` at a time, and reads what has become of them.
    void hear(ddp::const_bytes what, std::size_t step = 1 << 20) {
        while (!what.empty() && channel->error() == channel_error::none) {
            ddp::mutable_bytes const to = channel->space();
            std::size_t const n = std::min({to.size(), what.size(), step});
            REQUIRE(n != 0);
            std::memcpy(to.data(), what.data(), n);
            channel->arrived(n);
            what = what.subspan(n);
            read();
        }
    }
    void read() {
        std::array<std::byte, 1000> buffer;
        for (std::size_t n = 0; (n = channel->read(buffer)) != 0;)
            received.insert(received.end(), buffer.begin(), buffer.begin() + static_cast<std::ptrdiff_t>(n));
        CHECK_FALSE(channel->readable());
    }
};

struct pair {
    end dials, listens;
    std::size_t step = 1 << 20;

    explicit pair(bool encrypts, std::string const& one = "0123456789abcdef",
                  std::string const& other = "0123456789abcdef", bool first = true, bool second = false)
        : dials{ddp::make_tcp_security(secret_of(one), encrypts)->channel(first)},
          listens{ddp::make_tcp_security(secret_of(other), encrypts)->channel(second)} {}

    /// Lets them talk until neither has anything to say; `on_the_way` may change what one says: (from the dialler?, bytes).
    void talk(std::function<void(bool, bytes&)> const& on_the_way = [](bool, bytes&) {}) {
        for (int turn = 0; turn < 20; ++turn) {
            bytes one = dials.speak(), other = listens.speak();
            if (one.empty() && other.empty()) return;
            if (!one.empty()) on_the_way(true, one);
            if (!other.empty()) on_the_way(false, other);
            listens.hear(one, step);
            dials.hear(other, step);
        }
        FAIL("they never stop talking");
    }
    [[nodiscard]] bool established() const { return dials.channel->established() && listens.channel->established(); }
};

/// Sends all of it in one direction, in pieces of that many bytes.
void send(pair& between, end& from, ddp::const_bytes all, std::size_t piece) {
    while (!all.empty()) {
        std::size_t const n = std::min(piece, all.size());
        std::array<ddp::const_bytes, 2> const list = {all.first(n / 2), all.subspan(n / 2, n - n / 2)};
        std::size_t const taken = from.channel->write(list);
        REQUIRE(taken != 0);
        all = all.subspan(taken);
        between.talk();
    }
}

bytes noise(std::size_t size, unsigned seed) {
    std::mt19937 random(seed);
    bytes all(size);
    for (std::byte& b : all) b = static_cast<std::byte>(random());
    return all;
}

ddp::tcp_options with_secret(bool encrypts) {
    ddp::tcp_options options;
    options.prove = true;
    options.encrypt = encrypts;
    options.security = &ddp::make_tcp_security;
    options.share_memory = false;
    return options;
}

std::string outcome(ddp::job const& j, ddp::tcp_options const& options) {
    try {
        auto const t = ddp::connect_tcp(j, options);
        return t->rank() == j.rank ? "" : "another rank";
    } catch (std::exception const& e) {
        return e.what();
    }
}

ddp::job job_of(int rank, int size, std::uint16_t port) {
    ddp::job j;
    j.rank = j.local_rank = rank;
    j.size = j.local_size = size;
    j.master_port = port;
    return j;
}

bool has(std::string const& text, std::string const& part) {
    return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("what one end writes the other reads, however the bytes are cut", "[rendezvous][secure]") {
    bool const encrypts = GENERATE(false, true);
    auto const [step, size] =
        GENERATE(table<std::size_t, std::size_t>({{1, 3000}, {7, 20000}, {4096, 900000}, {1 << 20, 3000000}}));
    CAPTURE(encrypts, step, size);
    pair both(encrypts);
    both.step = step;
    both.talk();
    REQUIRE(both.established());
    bytes const up = noise(size, 1), down = noise(size / 3, 2);
    for (std::size_t const piece : {std::size_t{1}, std::size_t{500}, std::size_t{200000}}) {
        both.dials.received.clear();
        both.listens.received.clear();
        std::size_t const part = piece == 1 ? std::min<std::size_t>(size, 300) : size;
        send(both, both.dials, std::span(up).first(part), piece);
        send(both, both.listens, std::span(down).first(part / 3), piece);
        CHECK(both.listens.received == bytes(up.begin(), up.begin() + static_cast<std::ptrdiff_t>(part)));
        CHECK(both.dials.received == bytes(down.begin(), down.begin() + static_cast<std::ptrdiff_t>(part / 3)));
    }
    CHECK(both.dials.channel->error() == channel_error::none);
    CHECK(both.listens.channel->error() == channel_error::none);
}

TEST_CASE("who does not know the secret is no peer, in either role, and neither is a mirror", "[rendezvous][secure]") {
    bool const encrypts = GENERATE(false, true);
    CAPTURE(encrypts);
    bytes const hello = text_bytes("a user's first bytes");
    auto const fails = [&](pair& both) {
        both.talk();
        CHECK_FALSE(both.listens.channel->established());
        std::array<ddp::const_bytes, 1> const list = {hello};
        static_cast<void>(both.dials.channel->write(list));  // who dials may believe in a proof that is not taken
        both.talk();
        CHECK(both.listens.received.empty());
        CHECK(both.dials.received.empty());
    };
    pair other(encrypts, "0123456789abcdef", "0123456789abcdeg");
    fails(other);
    CHECK(other.dials.channel->error() == channel_error::unproven);
    pair longer(encrypts, "0123456789abcdef", "0123456789abcdefg");
    fails(longer);
    // Both ends believe that they have dialled, or listened: what each says, the other could only throw back.
    pair mirror(encrypts, "0123456789abcdef", "0123456789abcdef", true, true);
    fails(mirror);
    pair silence(encrypts, "0123456789abcdef", "0123456789abcdef", false, false);
    fails(silence);
    // One that returns to a rank its own words.
    end alone{ddp::make_tcp_security(secret_of("0123456789abcdef"), encrypts)->channel(true)};
    for (int turn = 0; turn < 5; ++turn) alone.hear(alone.speak());
    CHECK_FALSE(alone.channel->established());
    // One that answers a rank with that rank's own proof.
    end asked{ddp::make_tcp_security(secret_of("0123456789abcdef"), encrypts)->channel(false)};
    end asks{ddp::make_tcp_security(secret_of("another secret....."), encrypts)->channel(true)};
    asked.hear(asks.speak());
    bytes const proof_of_asked = asked.speak();
    asked.hear(proof_of_asked.size() > 32 ? std::span(proof_of_asked).last(32) : std::span(proof_of_asked));
    CHECK_FALSE(asked.channel->established());
    // The other way to join.
    end proof{ddp::make_tcp_security(secret_of("0123456789abcdef"), encrypts)->channel(true)};
    end tls{ddp::make_tcp_security(secret_of("0123456789abcdef"), !encrypts)->channel(false)};
    tls.hear(proof.speak());
    CHECK(tls.channel->error() == channel_error::unproven);
}

TEST_CASE("who has a certificate and ignores the secret is no peer, as listener or as dialler",
          "[rendezvous][secure]") {
    ::EVP_PKEY* const key = ::EVP_EC_gen("P-256");
    ::X509* const certificate = ::X509_new();
    ::X509_set_version(certificate, 2);
    ::ASN1_INTEGER_set(::X509_get_serialNumber(certificate), 1);
    ::X509_gmtime_adj(::X509_getm_notBefore(certificate), 0);
    ::X509_gmtime_adj(::X509_getm_notAfter(certificate), 3600);
    ::X509_set_pubkey(certificate, key);
    REQUIRE(::X509_sign(certificate, key, ::EVP_sha256()) > 0);
    ::SSL_CTX* const context = ::SSL_CTX_new(::TLS_method());
    ::SSL_CTX_set_verify(context, SSL_VERIFY_NONE, nullptr);
    REQUIRE(::SSL_CTX_use_certificate(context, certificate) == 1);
    REQUIRE(::SSL_CTX_use_PrivateKey(context, key) == 1);
    for (bool const victim_dials : {true, false}) {
        end victim{ddp::make_tcp_security(secret_of("0123456789abcdef"), true)->channel(victim_dials)};
        ::SSL* const impostor = ::SSL_new(context);
        ::BIO *inside = nullptr, *outside = nullptr;
        REQUIRE(::BIO_new_bio_pair(&inside, 0, &outside, 0) == 1);
        ::SSL_set_bio(impostor, inside, inside);
        victim_dials ? ::SSL_set_accept_state(impostor) : ::SSL_set_connect_state(impostor);
        for (int turn = 0; turn < 10; ++turn) {
            static_cast<void>(::SSL_do_handshake(impostor));
            static_cast<void>(::SSL_write(impostor, "poison", 6));
            std::array<std::byte, 16384> wire;
            for (int n = 0; (n = ::BIO_read(outside, wire.data(), static_cast<int>(wire.size()))) > 0;)
                victim.hear(std::span(wire).first(static_cast<std::size_t>(n)));
            std::array<ddp::const_bytes, 1> const list = {std::span<std::byte const>(wire).first(10)};
            CHECK(victim.channel->write(list) == 0);
            bytes const said = victim.speak();
            if (!said.empty()) static_cast<void>(::BIO_write(outside, said.data(), static_cast<int>(said.size())));
        }
        CHECK_FALSE(victim.channel->established());
        CHECK(victim.received.empty());
        CHECK(victim.channel->error() == channel_error::unproven);
        ::SSL_free(impostor);
        ::BIO_free(outside);
    }
    ::SSL_CTX_free(context);
    ::X509_free(certificate);
    ::EVP_PKEY_free(key);
}

TEST_CASE("a handshake with any byte changed, dropped or added ends in nobody's trust", "[rendezvous][secure]") {
    bool const encrypts = GENERATE(false, true);
    pair honest(encrypts);
    honest.talk();
    REQUIRE(honest.established());
    for (bool const from_the_dialler : {true, false}) {
        std::size_t const whole = (from_the_dialler ? honest.dials : honest.listens).wire.size();
        CAPTURE(encrypts, from_the_dialler, whole);
        REQUIRE(whole > 60);
        for (std::size_t at = 0; at < whole; ++at)
            for (int const change : {0, 1, 2}) {                   // a bit flipped, the byte dropped, one more
                if (encrypts && change == 0 && at == 2) continue;  // a version of old, which TLS 1.3 says to ignore
                pair both(encrypts);
                std::size_t passed = 0;
                both.talk([&](bool dialler, bytes& said) {
                    if (dialler != from_the_dialler) return;
                    if (at >= passed && at < passed + said.size()) {
                        auto const where = said.begin() + static_cast<std::ptrdiff_t>(at - passed);
                        if (change == 0)
                            *where ^= std::byte{1} << (at % 8);
                        else if (change == 1)
                            said.erase(where);
                        else
                            said.insert(where, *where ^ std::byte{1});
                    }
                    passed += said.size();
                });
                std::array<ddp::const_bytes, 1> const list = {std::span<std::byte const>(honest.dials.wire).first(50)};
                if (both.dials.channel->established()) static_cast<void>(both.dials.channel->write(list));
                if (both.listens.channel->established()) static_cast<void>(both.listens.channel->write(list));
                both.talk();
                bool const reached = !both.dials.received.empty() || !both.listens.received.empty();
                if (reached || (both.established() && both.dials.channel->error() == channel_error::none &&
                                both.listens.channel->error() == channel_error::none))
                    FAIL_CHECK("byte " << at << ", change " << change);
            }
    }
    SUCCEED();
}

TEST_CASE("records that are changed, left out, repeated or from elsewhere are never handed out",
          "[rendezvous][secure]") {
    bool const encrypts = GENERATE(false, true);
    CAPTURE(encrypts);
    bytes const first = noise(40, 3), second = noise(60, 4);
    auto const after = [&](auto const& change) {  // what arrives of two records on whose way that happens
        pair both(encrypts);
        both.talk();
        std::vector<bytes> records;
        for (bytes const& plain : {first, second}) {
            std::array<ddp::const_bytes, 1> const list = {plain};
            REQUIRE(both.dials.channel->write(list) == plain.size());
            records.push_back(both.dials.speak());
        }
        change(records);
        for (bytes const& record : records) both.listens.hear(record);
        return std::pair(both.listens.received, both.listens.channel->error());
    };
    auto const [whole, fine] = after([](auto&) {});
    CHECK(whole.size() == 100);
    CHECK(fine == channel_error::none);
    std::size_t length = 0;
    static_cast<void>(after([&](auto& records) { length = records[0].size(); }));
    for (std::size_t bit = 0; bit < 8 * length; ++bit) {
        auto const [got, error] = after([&](auto& records) { records[0][bit / 8] ^= std::byte{1} << (bit % 8); });
        bool const waits = error == channel_error::none;  // a longer length: the rest would have to come
        if (!got.empty() || (waits && bit >= 8 * 5)) FAIL_CHECK("bit " << bit);
    }
    auto const swapped = after([](auto& records) { std::swap(records[0], records[1]); });
    CHECK(swapped == std::pair(bytes{}, channel_error::altered));
    auto const repeated = after([](auto& records) { records[1] = records[0]; });
    CHECK(repeated == std::pair(first, channel_error::altered));
    auto const left_out = after([](auto& records) { records.erase(records.begin()); });
    CHECK(left_out == std::pair(bytes{}, channel_error::altered));
    for (end pair::* const from : {&pair::dials, &pair::listens}) {  // of another connection, in either direction
        auto const elsewhere = after([&](auto& records) {
            pair other(encrypts);
            other.talk();
            std::array<ddp::const_bytes, 1> const list = {first};
            REQUIRE((other.*from).channel->write(list) == first.size());
            records[0] = (other.*from).speak();
        });
        CHECK(elsewhere == std::pair(bytes{}, channel_error::altered));
    }
    pair thrown_back(encrypts);
    thrown_back.talk();
    std::array<ddp::const_bytes, 1> const list = {first};
    REQUIRE(thrown_back.dials.channel->write(list) == first.size());
    thrown_back.dials.hear(thrown_back.dials.speak());
    CHECK(thrown_back.dials.received.empty());
    CHECK(thrown_back.dials.channel->error() == channel_error::altered);
}

TEST_CASE("who sent bytes that were changed on the way hears of it", "[rendezvous][secure]") {
    bool const encrypts = GENERATE(false, true);
    CAPTURE(encrypts);
    pair both(encrypts);
    both.talk();
    bytes const plain = noise(40, 5);
    std::array<ddp::const_bytes, 1> const list = {plain};
    REQUIRE(both.dials.channel->write(list) == plain.size());
    bytes record = both.dials.speak();
    record.back() ^= std::byte{1};
    both.listens.hear(record);
    REQUIRE(both.listens.channel->error() == channel_error::altered);
    CHECK(both.listens.received.empty());
    // By what the user of the other end then says; with TLS, which ends both directions, by its alert.
    CHECK(both.listens.channel->write(list) == (encrypts ? 0 : plain.size()));
    both.dials.hear(both.listens.speak());
    CHECK(both.dials.channel->error() == (encrypts ? channel_error::altered : channel_error::none));
    CHECK(both.dials.received == (encrypts ? bytes{} : plain));
}

TEST_CASE("a recorded session convinces nobody a second time", "[rendezvous][secure]") {
    bool const encrypts = GENERATE(false, true);
    pair both(encrypts);
    both.talk();
    bytes const said = text_bytes("weights, weights, weights");
    send(both, both.dials, said, 100);
    send(both, both.listens, said, 100);
    pair again(encrypts);
    again.listens.hear(both.dials.wire);
    CHECK(again.listens.received.empty());
    CHECK(again.listens.channel->error() != channel_error::none);
    static_cast<void>(again.dials.speak());
    again.dials.hear(both.listens.wire);
    CHECK(again.dials.received.empty());
    CHECK(again.dials.channel->error() != channel_error::none);
}

TEST_CASE("with TLS what is sent cannot be read on the way", "[rendezvous][secure]") {
    bool const encrypts = GENERATE(false, true);
    pair both(encrypts);
    both.talk();
    bytes const said = text_bytes("a pattern that would be found");
    send(both, both.dials, said, 100);
    auto const& wire = both.dials.wire;
    CHECK((std::search(wire.begin(), wire.end(), said.begin(), said.end()) == wire.end()) == encrypts);
}

TEST_CASE("garbage is refused at the first byte that is wrong, and costs no more than a buffer",
          "[rendezvous][secure]") {
    for (unsigned seed = 0; seed < 300; ++seed) {
        end stranger{ddp::make_tcp_security(secret_of("0123456789abcdef"), seed % 2 != 0)->channel(false)};
        bytes junk = noise(1 + seed * 7, seed);
        if (seed % 3 == 0) junk[0] = std::byte{22};  // TLS's own first byte
        stranger.hear(junk);
        CHECK_FALSE(stranger.channel->established());
        CHECK(stranger.received.empty());
    }
    end quick{ddp::make_tcp_security(secret_of("0123456789abcdef"), false)->channel(false)};
    quick.hear(text_bytes("G"));
    CHECK(quick.channel->error() == channel_error::unproven);
}

TEST_CASE("with a secret TCP keeps the promises of a transport, and trainings their bits", "[rendezvous][secure]") {
    secret_in_a_file const secret("0123456789abcdef0123456789abcdef");
    bool const encrypts = GENERATE(false, true);
    CAPTURE(encrypts);
    auto const world = [&](int n) { return std::make_unique<loopback_world>(n, with_secret(encrypts)); };
    if (encrypts || !ddp::test::sanitizers_leave_out("a proof over sockets"))
        CHECK(ddp::testing::check_transport(3, world) == std::vector<std::string>{});
    auto const through_memory = [&](int n) {
        ddp::tcp_options options = with_secret(encrypts);
        options.share_memory = true;
        return std::make_unique<loopback_world>(n, options);
    };
    if (ddp::test::fewer == 1 || !encrypts)
        CHECK(ddp::testing::check_transport(3, through_memory) == std::vector<std::string>{});

    auto const expected = ddp::test::inproc_bits(3);
    auto const at = world(3);
    std::vector<std::future<std::pair<std::uint64_t, std::string>>> running;
    for (int rank = 0; rank < 3; ++rank)
        running.push_back(std::async(std::launch::async, [&at, rank] {
            ddp::communicator<> comm = ddp::any_communicator(at->connect(rank), ddp::test::loopback_patience());
            auto const [bits, wrong] = ddp::test::train_every_way(comm);
            return std::pair(bits, wrong);
        }));
    for (auto& r : running) {
        auto const [bits, wrong] = r.get();
        CHECK(wrong == "");
        CHECK(bits == expected);
    }
}

TEST_CASE("a rank with another secret, or none, is told so; strangers change nothing", "[rendezvous][secure]") {
    bool const encrypts = GENERATE(false, true);
    CAPTURE(encrypts);
    listener const at;
    auto options = with_secret(encrypts);
    options.times = ddp::timing::for_tests();
    options.times.join = 4s;
    auto rank0 = options;
    rank0.listen_descriptor = at.inherit();
    std::future<std::string> zero;
    {
        secret_in_a_file const secret("0123456789abcdef");
        zero = std::async(std::launch::async, outcome, job_of(0, 2, at.port), rank0);
        std::this_thread::sleep_for(200ms);
    }
    CHECK(has(outcome(job_of(1, 2, at.port), options), "asks for what this rank cannot do: there is no secret"));
    {
        secret_in_a_file const secret("0123456789abcdeF");
        auto brief = options;
        brief.times.join = 800ms;
        // TLS answers strangers with nothing that they would understand.
        CHECK(has(outcome(job_of(1, 2, at.port), brief),
                  encrypts ? "closes the connections of ranks whose secret" : "does not know this job's secret"));
    }
    std::vector<int> strangers;
    for (int kind = 0; kind < 30; ++kind) {
        int const fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        ::sockaddr_in to{};
        to.sin_family = AF_INET;
        to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        to.sin_port = htons(at.port);
        REQUIRE(::connect(fd, reinterpret_cast<::sockaddr*>(&to), sizeof to) == 0);
        ddp::detail::store_hello hello;  // plain, as a rank without this would say it
        hello.rank = 1;
        hello.size = 2;
        bytes const junk = noise(200, static_cast<unsigned>(kind));
        ddp::const_bytes const say = kind % 3 == 0 ? ddp::bytes_of(hello) : ddp::const_bytes(junk);
        if (kind % 3 != 2) CHECK(::write(fd, say.data(), say.size()) == static_cast<ssize_t>(say.size()));
        strangers.push_back(fd);
    }
    {
        secret_in_a_file const secret("0123456789abcdef");
        CHECK(outcome(job_of(1, 2, at.port), options) == "");
    }
    CHECK(zero.get() == "");
    for (int const fd : strangers) ::close(fd);
}

TEST_CASE("a rank that could prove its secret does not show it, whoever listens at rank 0's port",
          "[rendezvous][secure]") {
    listener const at;
    secret_in_a_file const secret("0123456789abcdef");
    ddp::tcp_options options;
    options.security = &ddp::make_tcp_security;
    options.times = ddp::timing::for_tests();
    options.times.join = 600ms;
    auto one = std::async(std::launch::async, outcome, job_of(1, 2, at.port), options);
    int const fd = ::accept(at.fd, nullptr, nullptr);
    std::string heard(500, '\0');
    ::timeval const patience{0, 300000};
    ::setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    ssize_t const n = ::recv(fd, heard.data(), heard.size(), MSG_WAITALL);
    CHECK(n == 40);
    CHECK_FALSE(has(heard, "0123456789abcdef"));
    CHECK(has(one.get(), "took the connection but did not answer in time"));
    ::close(fd);

    // Between two ranks that can, the job is as ever, with channels to the store alone.
    auto rank0 = options;
    rank0.times.join = options.times.join = 5s;
    listener const other;
    rank0.listen_descriptor = other.inherit();
    auto zero = std::async(std::launch::async, outcome, job_of(0, 2, other.port), rank0);
    CHECK(outcome(job_of(1, 2, other.port), options) == "");
    CHECK(zero.get() == "");
}

TEST_CASE("an address that other hosts reach wants a secret and OpenSSL, or somebody who says insecure",
          "[rendezvous][secure]") {
    ddp::job j = job_of(1, 2, 9);
    j.master_addr = "192.0.2.1";
    ddp::tcp_options options;
    options.times = ddp::timing::for_tests();
    options.times.join = 300ms;
    CHECK(has(outcome(j, options), "built without OpenSSL"));
    options.security = &ddp::make_tcp_security;
    CHECK(has(outcome(j, options), "there is no secret: set DDP_SECRET_FILE"));
    secret_in_a_file const secret("0123456789abcdef");
    CHECK(has(outcome(j, options), "cannot reach rank 0"));
    options.security = nullptr;
    CHECK(has(outcome(j, options), "built without OpenSSL"));
    options.encrypt = true;
    CHECK(has(outcome(j, options),
              "DDP_TLS=1 (run_options.encrypt, tcp_options.encrypt) asks for what this rank cannot do"));
}

TEST_CASE("what a library below throws on rank 0 while it joins is told to the others", "[rendezvous][secure]") {
    struct broken final : ddp::tcp_security {
        std::unique_ptr<ddp::tcp_security> inner;
        [[nodiscard]] std::unique_ptr<ddp::tcp_channel> channel(bool dials) const override {
            if (dials) throw std::runtime_error("the lamp fell over");
            return inner->channel(dials);
        }
    };
    secret_in_a_file const secret("0123456789abcdef");
    listener const at;
    auto options = with_secret(false);
    options.times = ddp::timing::for_tests();
    options.times.join = 5s;
    auto rank0 = options;
    rank0.listen_descriptor = at.inherit();
    rank0.security = [](ddp::job_secret const& of, bool encrypts) -> std::unique_ptr<ddp::tcp_security> {
        auto one = std::make_unique<broken>();
        one->inner = ddp::make_tcp_security(of, encrypts);
        return one;
    };
    auto other = std::async(std::launch::async, outcome, job_of(1, 2, at.port), options);
    CHECK(outcome(job_of(0, 2, at.port), rank0) == "the lamp fell over");
    std::string const told = other.get();
    CAPTURE(told);
    CHECK(has(told, "rank 0 (pid "));
    CHECK(has(told, ") failed during start-up: the lamp fell over"));
}

TEST_CASE("an OpenSSL that lacks what a secret or TLS needs is named", "[rendezvous][secure]") {
    struct without_algorithms {  // for this thread
        OSSL_LIB_CTX* empty = OSSL_LIB_CTX_new();
        OSSL_PROVIDER* none = OSSL_PROVIDER_load(empty, "null");
        OSSL_LIB_CTX* before = OSSL_LIB_CTX_set0_default(empty);
        ~without_algorithms() {
            OSSL_LIB_CTX_set0_default(before);
            OSSL_PROVIDER_unload(none);
            OSSL_LIB_CTX_free(empty);
        }
    };
    ddp::job_secret const secret = secret_of("0123456789abcdef");
    {
        without_algorithms const lacking;
        for (bool const encrypts : {false, true})
            CHECK(ddp::test::thrown_by([&] { static_cast<void>(ddp::make_tcp_security(secret, encrypts)); }) ==
                  "DDP-E101 environment: this OpenSSL lacks HMAC-SHA-256, which a job's secret needs");
        CHECK(ddp::test::thrown_by([] { ddp::detail::tls_context{ddp::detail::secure_key{}}; }) ==
              "DDP-E101 environment: this OpenSSL lacks TLS 1.3 with TLS_AES_128_GCM_SHA256, which DDP_TLS=1 needs");
    }
    for (bool const encrypts : {false, true}) CHECK(ddp::make_tcp_security(secret, encrypts) != nullptr);
}
