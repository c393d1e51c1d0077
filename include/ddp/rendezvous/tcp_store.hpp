/// \file
/// tcp_store: a rank's side of the store through which a job comes together.
#pragma once

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <ddp/comm/timing.hpp>
#include <ddp/core/text.hpp>
#include <ddp/rendezvous/rendezvous_error.hpp>
#include <ddp/rendezvous/tcp_socket.hpp>
#include <ddp/rendezvous/tcp_store_protocol.hpp>

namespace ddp {

using store_entries = std::vector<std::pair<std::string, std::string>>;

/// A rank's connection to the store. Every call throws rendezvous_error with what the server decided, or why it cannot be
/// reached.
class tcp_store {
public:
    /// Tries the addresses in turn, with growing pauses, until `until`: rank 0 may start later than the others. `job`: the
    /// hash of its id. Where rank 0 is at one of several ports, whoever answers at another is passed over.
    [[gnu::cold]] tcp_store(std::vector<detail::tcp_endpoint> const& servers, int rank, int size, std::uint64_t job,
                            time_point until, bool several_ports = false)
        : socket_(tcp_context()), several_ports_(several_ports) {
        boost::system::error_code last;
        int attempts = 0;
        for (std::chrono::milliseconds pause{5};; pause = std::min(pause * 2, std::chrono::milliseconds{250})) {
            for (detail::tcp_endpoint const& at : servers) {
                ++attempts;
                at_ = at;
                last = detail::dial(socket_, at, until);
                if (last) continue;
                if (greet(rank, size, job, until)) return;
                last = boost::asio::error::connection_reset;  // a flood of strangers may have pushed us out: again
            }
            if (monotonic_clock::now() + pause >= until) break;
            std::this_thread::sleep_for(pause);
        }
        std::string tried;
        for (detail::tcp_endpoint const& at : servers)
            tried += detail::concat({tried.empty() ? "" : ", ", detail::text_of(at)});
        throw rendezvous_error(detail::concat(
            {"rank ", rank, " cannot reach rank 0 at ", tried, " (", attempts, " attempts, the last: ", last.message(),
             "). Check that rank 0 runs, that MASTER_ADDR and MASTER_PORT are right, and that no firewall drops "
             "connections between the hosts"}));
    }

    [[gnu::cold]] void put(std::string_view key, std::string_view value, time_point until) {
        request(detail::store_op::put, key, value, 0, until);
    }
    /// Waits until `count` keys begin with `prefix`, and returns them in order.
    [[nodiscard, gnu::cold]] store_entries all(std::string_view prefix, std::uint32_t count, time_point until) {
        std::string const text = request(detail::store_op::all, prefix, {}, count, until);
        store_entries entries;
        for (std::size_t at = 0; at + sizeof(detail::store_head) <= text.size();) {
            detail::store_head head;
            std::memcpy(&head, text.data() + at, sizeof head);
            at += sizeof head;
            if (head.key > text.size() - at || head.value > text.size() - at - head.key) break;
            entries.emplace_back(text.substr(at, head.key), text.substr(at + head.key, head.value));
            at += head.key + head.value;
        }
        return entries;
    }
    /// Tells every rank that the job cannot come together, and why.
    [[gnu::cold]] void fail(std::string_view why, time_point until) {
        request(detail::store_op::fail, {}, why.substr(0, detail::store_head::max_value), 0, until);
    }

    /// What rank 0 has drawn for this job: tells its connections from those of another.
    [[nodiscard]] std::uint64_t nonce() const noexcept { return nonce_; }
    /// The address of this host on the way to rank 0.
    [[nodiscard]] boost::asio::ip::address local_address() const { return socket_.local_endpoint().address(); }

private:
    static constexpr std::uint32_t max_answer = 64u << 20;

    /// False if the other side hung up before it said anything.
    [[gnu::cold]] bool greet(int rank, int size, std::uint64_t job, time_point until) {
        if (several_ports_) until = std::min(until, monotonic_clock::now() + timing{}.handshake);
        detail::store_hello hello;
        hello.rank = rank;
        hello.size = size;
        hello.job = job;
        hello.who = bounded_text<72>(detail::this_process());
        tune_connected(socket_.native_handle(), timing{});
        if (detail::write_all(socket_, bytes_of(hello), until) != detail::io_end::ok) return false;
        if (detail::poll_until(socket_.native_handle(), POLLIN, until)) {
            detail::store_head first;
            ssize_t const heard = ::recv(socket_.native_handle(), &first, sizeof first, MSG_PEEK);
            if (heard <= 0) return false;
            if (several_ports_ && (heard < static_cast<ssize_t>(sizeof first) || !ours(first))) return false;
        } else if (several_ports_) {
            return false;
        }
        std::string const nonce = answer(until);
        if (nonce.size() != sizeof nonce_) throw stranger();
        std::memcpy(&nonce_, nonce.data(), sizeof nonce_);
        return true;
    }
    [[gnu::cold]] std::string request(detail::store_op op, std::string_view key, std::string_view value,
                                      std::uint32_t count, time_point until) {
        detail::store_head const head{op, static_cast<std::uint32_t>(key.size()),
                                      static_cast<std::uint32_t>(value.size()), count};
        std::string text;
        detail::append(text, bytes_of(head));
        text.append(key).append(value);
        if (detail::write_all(socket_, as_const_bytes(std::span<char const>(text)), until) != detail::io_end::ok)
            throw lost();
        return answer(until);
    }
    [[gnu::cold]] std::string answer(time_point until) {
        detail::store_head head;
        detail::io_end const end = detail::read_all(socket_, bytes_of(head), until);
        if (end == detail::io_end::late) throw late();
        if (end == detail::io_end::closed) throw lost();
        if (!ours(head)) throw stranger();
        std::string text(head.value, '\0');
        if (detail::read_all(socket_, as_mutable_bytes(std::span<char>(text)), until) != detail::io_end::ok)
            throw lost();
        if (head.op == detail::store_op::refused) throw rendezvous_error(text);
        return text;
    }
    [[nodiscard]] static bool ours(detail::store_head const& head) noexcept {
        bool const answers = head.op == detail::store_op::ok || head.op == detail::store_op::refused;
        return answers && head.key == 0 && head.count == 0 && head.value <= max_answer;
    }
    [[nodiscard, gnu::cold]] rendezvous_error lost() const {
        return rendezvous_error(
            detail::concat({"the connection to rank 0 at ", detail::text_of(at_),
                            " broke while the job came together: rank 0 ended (its output says why), or another "
                            "program listens there (then choose another MASTER_PORT)"}));
    }
    [[nodiscard, gnu::cold]] rendezvous_error late() const {
        return rendezvous_error(
            detail::concat({"rank 0 at ", detail::text_of(at_),
                            " took the connection but did not answer in time: it is overloaded or stopped, or "
                            "another program listens there (then choose another MASTER_PORT)"}));
    }
    [[nodiscard, gnu::cold]] rendezvous_error stranger() const {
        return rendezvous_error(detail::concat(
            {"what answers at ", detail::text_of(at_), " is not rank 0 of a ddp job. Choose another MASTER_PORT"}));
    }

    detail::tcp_socket socket_;
    bool several_ports_;
    detail::tcp_endpoint at_;
    std::uint64_t nonce_ = 0;
};

}  // namespace ddp
