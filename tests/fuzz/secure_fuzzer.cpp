// Throws arbitrary bytes at connections that prove a secret or encrypt: as a stranger from the first byte on, and on the way
// of two ends that have proved themselves to each other. No byte is ever handed out that the other end did not write, there and
// in that order. Anything else, and whatever a sanitizer sees, ends the program.
//
// Each channel draws its random numbers, so an input does not end the same way twice, but what is expected always holds.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ddp/rendezvous/job_secret.hpp>
#include <ddp/rendezvous/secure_channel.hpp>
#include <ddp/transport/framed/tcp_channel.hpp>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "input.hpp"

namespace {

using ddp::channel_error;
using fuzz::expect;
using fuzz::reader;
using bytes = std::vector<std::byte>;

bytes spoken(ddp::tcp_channel& from) {
    bytes all;
    for (ddp::const_bytes out = from.pending(); !out.empty(); out = from.pending()) {
        all.insert(all.end(), out.begin(), out.end());
        from.sent(out.size());
    }
    return all;
}
void hear(ddp::tcp_channel& by, ddp::const_bytes what, std::size_t step, bytes& received) {
    while (!what.empty() && by.error() == channel_error::none) {
        ddp::mutable_bytes const to = by.space();
        std::size_t const n = std::min({to.size(), what.size(), step});
        expect(n != 0, "there is always space");
        std::memcpy(to.data(), what.data(), n);
        by.arrived(n);
        what = what.subspan(n);
        std::array<std::byte, 100> part;
        for (std::size_t got = 0; (got = by.read(part)) != 0;)
            received.insert(received.end(), part.begin(), part.begin() + static_cast<std::ptrdiff_t>(got));
    }
}
bool begins_with(bytes const& whole, bytes const& front) {
    return front.size() <= whole.size() && std::equal(front.begin(), front.end(), whole.begin());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(std::uint8_t const* data, std::size_t size) {
    reader in({data, size});
    static std::array<std::unique_ptr<ddp::tcp_security>, 2> const made = [] {
        ddp::job_secret secret;
        secret.bytes.fill(std::byte{7});
        return std::array{ddp::make_tcp_security(secret, false), ddp::make_tcp_security(secret, true)};
    }();
    std::uint8_t const kind = in.byte();
    auto const& security = *made[kind % 8 == 0];  // a key exchange takes most of a millisecond
    std::size_t const step = 1 + in.byte();
    auto const text = [&] {
        std::string const said = in.text(in.byte());
        bytes all;
        for (char const c : said) all.push_back(static_cast<std::byte>(c));
        return all;
    };
    if ((kind & 8) != 0) {
        auto const victim = security.channel((kind & 16) != 0);
        bytes received;
        while (!in.empty()) {
            hear(*victim, text(), step, received);
            static_cast<void>(spoken(*victim));
        }
        expect(received.empty() && !victim->established(), "no stranger is believed");
        return 0;
    }
    auto const one = security.channel(true), other = security.channel(false);
    bytes sent, received, nothing;
    for (int turn = 0; turn < 6; ++turn) {
        hear(*other, spoken(*one), step, received);
        hear(*one, spoken(*other), step, nothing);
    }
    expect(one->established() && other->established() && received.empty(), "two that know the secret meet");
    while (!in.empty()) {
        bytes const plain = text();
        if (plain.empty()) continue;
        std::array<ddp::const_bytes, 1> const list = {plain};
        expect(one->write(list) == plain.size(), "a record takes so much");
        sent.insert(sent.end(), plain.begin(), plain.end());
        bytes wire = spoken(*one);
        if (std::uint8_t const change = in.byte(); change < 128) {
            std::size_t const at = in.number<std::uint16_t>() % wire.size();
            auto const where = wire.begin() + static_cast<std::ptrdiff_t>(at);
            switch (change % 4) {
                case 0: *where ^= static_cast<std::byte>(1 + in.byte() % 255); break;
                case 1: wire.erase(where); break;
                case 2: wire.insert(where, static_cast<std::byte>(in.byte())); break;
                default: wire = text(); break;
            }
        }
        hear(*other, wire, step, received);
        expect(begins_with(sent, received), "what is read was written, in that order");
    }
    return 0;
}
