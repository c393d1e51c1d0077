/// \file
/// tcp_mesh: every rank connects to every other, and both check each other's identity.
#pragma once

#include <poll.h>

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <list>
#include <string>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <utility>
#include <vector>

#include <ddp/comm/timing.hpp>
#include <ddp/comm/transport.hpp>
#include <ddp/core/bytes.hpp>
#include <ddp/core/text.hpp>
#include <ddp/core/version.hpp>
#include <ddp/rendezvous/rendezvous_error.hpp>
#include <ddp/rendezvous/tcp_socket.hpp>
#include <ddp/rendezvous/tcp_store.hpp>
#include <ddp/rendezvous/tcp_visitors.hpp>
#include <ddp/transport/framed/frame_header.hpp>
#include <ddp/transport/framed/tcp.hpp>

namespace ddp::detail {

/// What both sides of a connection send before any frame.
struct peer_hello {
    static constexpr std::uint64_t expected_magic = 0x32657267'70646421u;
    std::uint64_t magic = expected_magic;
    std::uint32_t version = version_number;
    std::uint32_t record_bytes = sizeof(failure);
    std::int32_t from = 0;
    std::int32_t to = 0;
    std::int32_t size = 0;
    std::uint32_t frame_format = frame_header::magic_and_version;
    std::uint64_t nonce = 0;
    std::uint64_t host = 0;
    std::uint64_t early_bytes = 0;
};
static_assert(std::has_unique_object_representations_v<peer_hello>);

/// What a rank publishes: its address and its process.
struct peer_address {
    tcp_endpoint at;
    std::string who;

    [[nodiscard, gnu::cold]] std::string text() const {
        return concat({at.port(), " ", at.address().to_string(), " ", who});
    }
    [[nodiscard, gnu::cold]] static peer_address parse(std::string_view const all) {
        std::string_view text = all;
        std::uint16_t port = 0;
        auto const [end, error] = std::from_chars(text.data(), text.data() + text.size(), port);
        text.remove_prefix(static_cast<std::size_t>(end - text.data()));
        if (error != std::errc{} || !text.starts_with(' ')) throw no_address(all);
        text.remove_prefix(1);
        std::string_view const host = text.substr(0, text.find(' '));
        boost::system::error_code bad;
        auto const address = boost::asio::ip::make_address(std::string(host), bad);
        if (bad) throw no_address(all);
        text.remove_prefix(std::min(text.size(), host.size() + 1));
        return {{address, port}, printable(text, 200)};
    }

private:
    [[nodiscard, gnu::cold]] static rendezvous_error no_address(std::string_view text) {
        return rendezvous_error(concat({"a rank published ", in_quotes(text),
                                        " where its address was expected. All ranks must run the same program"}));
    }
};

/// Connects all ranks to all: each dials the ranks below it, and waits for those above.
class tcp_mesh {
public:
    struct connection {
        int rank;
        tcp_stream stream;
        bool same_host;
        bool greeted = true;   // the peer has this rank's hello
        bool answered = true;  // and this rank has the peer's
        peer_hello answer = {};
        std::size_t have = 0;  // bytes of it
        bool ready = true;     // worth a try
    };

    /// `store` reports ranks that end or become silent meanwhile. Connecting ends at `until`, or after times.join.
    [[gnu::cold]] tcp_mesh(peer_hello mine, std::vector<peer_address> const& addresses, tcp_acceptor& acceptor,
                           tcp_store& store, timing const& times, tcp_security const* security = nullptr,
                           time_point until = never)
        : mine_(mine),
          addresses_(addresses),
          acceptor_(acceptor),
          store_(store),
          times_(times),
          security_(security),
          redials_(static_cast<std::size_t>(mine.size)),
          until_(std::min(until, monotonic_clock::now() + times.join)),
          dial_until_(until_ - (until_ - monotonic_clock::now()) / 2) {}

    /// Adds the connections to `all`. Throws rendezvous_error, which names the rank that could not be reached.
    /// Connections stay open as long as this object and `all`, so that no rank sees a connection close before all ranks
    /// know why.
    [[gnu::cold]] void connect(std::vector<connection>& all) {
        store_.check();
        for (int peer = 0; peer < mine_.from; ++peer) dial_to(peer);
        meet(all);
    }

private:
    struct visitor {
        tcp_stream stream;
        time_point until;
        bool silent = true;  // until bytes have come
        peer_hello hello = {};
        std::size_t have = 0;
        bool left = false;  // closed, or accepted
    };
    struct attempt {
        int rank;
        tcp_socket socket;
        time_point until;
    };

    [[nodiscard, gnu::cold]] std::string name(int peer) const {
        peer_address const& a = addresses_[static_cast<std::size_t>(peer)];
        return concat({"rank ", peer, " (", a.who, ") at ", text_of(a.at)});
    }
    [[nodiscard]] std::string me() const { return concat({"rank ", mine_.from}); }
    [[nodiscard, gnu::cold]] rendezvous_error unreachable(int peer, boost::system::error_code error) const {
        if (out_of_descriptors(error))
            return too_many_files(mine_.from, mine_.size, concat({"a socket to ", name(peer)}), error.value());
        return rendezvous_error(concat({me(), " reaches rank 0, but not ", name(peer), ": ", error.message(),
                                        ". Check firewalls, and that all hosts use the same network"}));
    }
    [[gnu::cold]] void dial_to(int peer) {
        tcp_socket socket(tcp_context());
        if (auto const error = begin_dial(socket, addresses_[static_cast<std::size_t>(peer)].at))
            throw unreachable(peer, error);
        dialling_.push_back({peer, std::move(socket), monotonic_clock::now() + times_.handshake});
    }
    /// Takes the connections that have been made so far. If packets are lost, TCP retries after 1, 3 and 7 s: several
    /// attempts at once succeed sooner.
    [[gnu::cold]] void dialled(std::vector<connection>& all) {
        std::vector<attempt> attempts = std::exchange(dialling_, {});
        for (attempt& a : attempts) {
            auto const error = end_dial(a.socket, time_point{});
            time_point const now = monotonic_clock::now();
            if (!error) {
                tune_connected(a.socket.native_handle(), times_);
                all.push_back(
                    {a.rank, tcp_stream(std::move(a.socket), channel_of(security_, true)), false, false, false});
            } else if (error == boost::asio::error::timed_out && now < a.until) {
                dialling_.push_back(std::move(a));
            } else if (error != boost::asio::error::timed_out || now >= dial_until_) {
                throw unreachable(a.rank, error);
            } else {
                dial_to(a.rank);
            }
        }
    }
    /// Sends this rank's hello, after the proofs if there are any. Returns false if the connection was lost.
    [[nodiscard, gnu::cold]] bool greet(connection& c) {
        stream_result const r = c.stream.flush();
        if (r.status == stream_status::would_block) return true;
        if (r.why == make_error_code(channel_error::unproven))
            throw rendezvous_error(concat({"what answers for ", name(c.rank), " does not know this job's secret"}));
        if (r.status != stream_status::ok) return false;
        peer_hello hello = mine_;
        hello.to = c.rank;
        c.greeted = write_all(c.stream, bytes_of(hello), monotonic_clock::now() + times_.handshake) == io_end::ok;
        return c.greeted;
    }
    /// Reads the bytes of the peer's hello that have arrived. Returns false if the connection was lost.
    [[nodiscard, gnu::cold]] bool hear_answer(connection& c) {
        mutable_bytes const rest = bytes_of(c.answer).subspan(c.have);
        stream_result const r = c.stream.read_some({&rest, 1});
        c.have += r.bytes;
        if (c.have < sizeof c.answer) return r.status == stream_status::ok || r.status == stream_status::would_block;
        if (c.answer.magic != mine_.magic || c.answer.nonce != mine_.nonce || c.answer.from != c.rank)
            throw rendezvous_error(concat({"what answers ", me(), " at the address of ", name(c.rank),
                                           " is another program. Start the job again"}));
        check(c.answer, c.rank);
        c.same_host = c.answer.host == mine_.host;
        return c.answered = true;
    }
    /// A connection that is lost before the answer has arrived is made again: a flood of strangers may have displaced
    /// this rank, or lost packets may have delayed its hello.
    [[gnu::cold]] void greet_all(std::vector<connection>& all) {
        std::erase_if(all, [&](connection& c) {
            if (c.answered || !(c.ready || c.stream.buffered())) return false;
            if ((c.greeted || greet(c)) && (!c.greeted || hear_answer(c))) return false;
            if (++redials_[static_cast<std::size_t>(c.rank)] > most_redials) throw closed(c.rank);
            boost::system::error_code ignored;
            c.stream.base().close(ignored);  // before the next one needs a descriptor
            dial_to(c.rank);
            return true;
        });
    }
    [[nodiscard, gnu::cold]] rendezvous_error closed(int peer) const {
        return rendezvous_error(concat({name(peer), " closed ", most_redials + 1, " connections of ", me(),
                                        " one after the other; its own output may say why"}));
    }
    [[gnu::cold]] void check(peer_hello const& theirs, int peer) const {
        auto const differs = [&](char const* what, std::uint64_t here, std::uint64_t there) {
            if (here != there)
                throw rendezvous_error(
                    concat({what, " differs: ", here, " on ", me(), ", ", there, " on ", name(peer)}));
        };
        differs("the frame format", mine_.frame_format, theirs.frame_format);
        differs("tcp_options.early_bytes", mine_.early_bytes, theirs.early_bytes);
    }
    /// Whether the first bytes are those of a rank of this job; other connections are closed without an answer.
    [[nodiscard, gnu::cold]] bool of_this_job(peer_hello const& h) const {
        return h.magic == mine_.magic && h.nonce == mine_.nonce && h.version == mine_.version &&
               h.record_bytes == mine_.record_bytes && h.to == mine_.from && h.size == mine_.size &&
               h.from > mine_.from && h.from < mine_.size;
    }
    /// Each rank sends its hello on the connections that it has made, while it reads from those that others have made.
    [[gnu::cold]] void meet(std::vector<connection>& all) {
        std::size_t const wanted = static_cast<std::size_t>(mine_.size) - 1;
        auto const answered = [](connection const& c) { return c.answered; };
        while (all.size() < wanted || !std::all_of(all.begin(), all.end(), answered)) {
            if (monotonic_clock::now() >= until_) {
                if (!dialling_.empty()) throw unreachable(dialling_.front().rank, boost::asio::error::timed_out);
                auto const mute = std::find_if_not(all.begin(), all.end(), answered);
                throw rendezvous_error(mute == all.end() ? concat({me(), " was not reached by ", missing(all),
                                                                   ", though all reach rank 0. Check firewalls between "
                                                                   "the hosts"})
                                                         : concat({name(mute->rank), " did not answer ", me()}));
            }
            store_.check();
            std::vector<::pollfd> polls{{acceptor_.native_handle(), POLLIN, 0}};
            for (visitor& v : visitors_) polls.push_back({v.stream.descriptor(), POLLIN, 0});
            for (connection const& c : all)
                if (!c.answered)
                    polls.push_back({c.stream.descriptor(), c.greeted ? short{POLLIN} : c.stream.write_event(), 0});
            for (attempt& a : dialling_) polls.push_back({a.socket.native_handle(), POLLOUT, 0});
            ::poll(polls.data(), polls.size(), 50);
            std::size_t next = 1;
            for (visitor& v : visitors_) v.silent = polls[next++].revents == 0 && v.silent;
            for (connection& c : all)
                if (!c.answered) c.ready = polls[next++].revents != 0;
            dialled(all);
            greet_all(all);
            for (visitor& v : visitors_) hear(v, all);
            auto const over = [](visitor const& v) { return v.left || monotonic_clock::now() >= v.until; };
            visitors_.remove_if(over);  // others may need their descriptors
            int full = 0;
            if (polls[0].revents != 0)
                full = welcome(
                    acceptor_, security_, visitors_, times_, [](visitor const& v) { return !v.left; },
                    [&](visitor& v) { hear(v, all); });
            visitors_.remove_if(over);
            if (full != 0)
                throw too_many_files(mine_.from, mine_.size, concat({"the sockets of ", missing(all)}), full);
        }
    }
    [[gnu::cold]] void hear(visitor& v, std::vector<connection>& all) {
        if (v.left) return;
        mutable_bytes const rest = bytes_of(v.hello).subspan(v.have);
        stream_result const r = v.stream.read_some({&rest, 1});
        v.have += r.bytes;
        v.left = r.status != stream_status::ok && r.status != stream_status::would_block;
        if (v.left || v.have < sizeof v.hello) return;
        v.left = true;
        auto const known = [&](connection const& c) { return c.rank == v.hello.from; };
        if (!of_this_job(v.hello) || std::any_of(all.begin(), all.end(), known)) return;
        peer_hello hello = mine_;
        hello.to = v.hello.from;
        if (write_all(v.stream, bytes_of(hello), monotonic_clock::now() + times_.handshake) != io_end::ok) return;
        check(v.hello, v.hello.from);
        all.push_back({v.hello.from, std::move(v.stream), v.hello.host == mine_.host});
    }
    [[nodiscard, gnu::cold]] std::string missing(std::vector<connection> const& all) const {
        std::string names;
        for (int peer = mine_.from + 1; peer < mine_.size; ++peer)
            if (std::none_of(all.begin(), all.end(), [&](connection const& c) { return c.rank == peer; }))
                names += concat({names.empty() ? "" : ", ", name(peer)});
        return names;
    }

    peer_hello mine_;
    std::vector<peer_address> const& addresses_;
    tcp_acceptor& acceptor_;
    tcp_store& store_;
    timing times_;
    tcp_security const* security_;
    std::vector<int> redials_;  // by rank
    time_point until_, dial_until_;
    std::vector<attempt> dialling_;
    std::list<visitor> visitors_;
    static constexpr int most_redials = 100;
};

}  // namespace ddp::detail
