// The stream by itself, and what connect() says where ranks do not find each other. Prints nothing but complaints.
#include <array>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "processes.hpp"
#include "uds_transport.hpp"

namespace {

bool expect(bool good, char const* complaint) {
    if (!good) std::fprintf(stderr, "%s\n", complaint);
    return good;
}

/// A Stream's promises. framed tolerates some mistakes: without shutdown_send() it still shuts down cleanly, only later.
bool stream_keeps_its_promises() {
    using ddp::stream_status;
    int ends[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) return expect(false, "no sockets");
    uds::stream ours(ends[0]), theirs(ends[1]);
    std::array<std::byte, 64> written, memory{};
    for (std::size_t i = 0; i < written.size(); ++i) written[i] = static_cast<std::byte>(i + 1);
    std::array<ddp::const_bytes, 2> const out{std::span(written).first(3), std::span(written).subspan(3, 4)};
    std::array<ddp::mutable_bytes, 2> const in{std::span(memory).first(1), std::span(memory).subspan(1)};

    bool good = expect(theirs.read_some(in).status == stream_status::would_block, "an empty stream blocks or ends");
    good &= expect(ours.write_some(out).bytes == 7, "seven bytes in two buffers do not fit");
    ours.shutdown_send();
    ddp::stream_result const got = theirs.read_some(in);
    good &=
        expect(got.status == stream_status::ok && got.bytes == 7 && memory[6] == written[6] && memory[7] == std::byte{},
               "what was written before shutdown_send() did not arrive");
    good &=
        expect(theirs.read_some(in).status == stream_status::end, "after shutdown_send() the other side reads no end");
    ddp::stream_result sent;
    for (int k = 0; k < 1'000'000 && sent.status == stream_status::ok; ++k) sent = theirs.write_some(out);
    good &= expect(sent.status == stream_status::would_block, "a full stream does not say would_block");
    {
        uds::stream const closed = std::move(ours);
    }
    good &= expect(theirs.write_some(out).status == stream_status::error, "a write to a closed stream is no error");
    return good;
}

/// Whether rank 0 of 3 in this directory ends with an error that says these words.
bool refuses(std::string const& directory, std::string const& words) {
    try {
        uds::connect(directory, 0, 3, {.join = std::chrono::milliseconds(100)});
    } catch (ddp::error const& e) {
        if (e.code() == ddp::errc::rendezvous && std::string(e.what()).find(words) != std::string::npos) return true;
        std::fprintf(stderr, "%s\n", e.what());
    }
    return expect(false, ("expected an error that says: " + words).c_str());
}

}  // namespace

int main() {
    uds::job_directory const where;
    bool good = stream_keeps_its_promises();
    good &= refuses(where.path(), "heard of 0 of 2 other ranks: Connection timed out");
    good &= refuses(where.path(), "every job needs a new directory of its own: Address already in use");
    good &= refuses(where.path() + std::string(100, 'x'), "is too long for a socket; use a shorter directory");
    good &= refuses(where.path() + "/nowhere", "No such file or directory");
    return good ? EXIT_SUCCESS : EXIT_FAILURE;
}
