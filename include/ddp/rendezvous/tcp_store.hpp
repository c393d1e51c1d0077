/// \file
/// tcp_store: a rank's side of the store through which a job comes together.
#pragma once

#include <poll.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <ddp/comm/timing.hpp>
#include <ddp/core/error.hpp>
#include <ddp/core/text.hpp>
#include <ddp/core/thread.hpp>
#include <ddp/rendezvous/job_secret.hpp>
#include <ddp/rendezvous/rendezvous_error.hpp>
#include <ddp/rendezvous/tcp_socket.hpp>
#include <ddp/rendezvous/tcp_store_protocol.hpp>
#include <ddp/transport/framed/frame_stream.hpp>
#include <ddp/transport/framed/tcp.hpp>
#include <ddp/transport/framed/tcp_channel.hpp>

namespace ddp {

using store_entries = std::vector<std::pair<std::string, std::string>>;

/// A rank's connection to the store. Every call throws rendezvous_error with what the server decided, or why it cannot be
/// reached.
class tcp_store {
public:
    /// Tries the addresses in turn, with growing pauses, until `until`: rank 0 may start later than the others. `job`: the
    /// hash of its id. Where rank 0 is at one of several ports, what answers at another is ignored. From then on a
    /// thread tells the server every times.heartbeat that this process runs.
    [[gnu::cold]] tcp_store(std::vector<detail::tcp_endpoint> const& servers, int rank, int size, std::uint64_t job,
                            time_point until, bool several_ports = false, job_secret const& secret = {},
                            timing const& times = {}, tcp_security const* security = nullptr)
        : stream_(detail::tcp_socket(tcp_context())), several_ports_(several_ports), secret_{secret}, times_(times) {
        boost::system::error_code last;
        int attempts = 0;
        for (std::chrono::milliseconds pause{5};; pause = std::min(pause * 2, std::chrono::milliseconds{250})) {
            for (detail::tcp_endpoint const& at : servers) {
                ++attempts;
                at_ = at;
                detail::tcp_socket socket(tcp_context());
                // One address that drops packets must not take the time of the others.
                time_point const patience = monotonic_clock::now() + times_.handshake;
                last = detail::dial(socket, at, servers.size() > 1 ? std::min(until, patience) : until);
                if (detail::out_of_descriptors(last))
                    throw detail::too_many_files(
                        rank, size, detail::concat({"a socket to rank 0 at ", detail::text_of(at)}), last.value());
                if (last) continue;
                tune_connected(socket.native_handle(), times_);
                local_ = socket.local_endpoint().address();
                stream_ = tcp_stream(std::move(socket), detail::channel_of(security, true));
                if (greet(rank, size, job, until)) {
                    start_beating();
                    return;
                }
                last =
                    boost::asio::error::connection_reset;  // a flood of strangers may have displaced this rank: again
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
             "connections between the hosts. Rank 0 closes the connections of ranks whose secret (DDP_SECRET_FILE, or "
             "DDP_SECRET_FD from ddprun), DDP_TLS, DDP_JOB_ID or ddprun --max-restarts is not its own. Once all ranks "
             "have met, it no longer listens: was this rank started twice, or with a larger WORLD_SIZE (",
             size, ") than rank 0?"}));
    }
    tcp_store(tcp_store const&) = delete;
    tcp_store& operator=(tcp_store const&) = delete;
    [[gnu::cold]] ~tcp_store() { stop_beating(); }

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
    /// Tells every rank that the job cannot come together, and why. Returns what all ranks are told: the server may know of
    /// a cause behind this one; empty if it cannot be asked.
    [[nodiscard, gnu::cold]] std::string fail(std::string_view why, time_point until) noexcept try {
        request(detail::store_op::fail, {}, why.substr(0, detail::store_head::max_value), 0, until);
        return {};
    } catch (refusal const& told) {
        std::string const text = told.what();
        return text.substr(text.find(": ") + 2);
    } catch (std::exception const&) {
        return {};
    }

    /// Nothing more is sent unasked: the server may close the connection once it has answered.
    [[gnu::cold]] void stop_beating() {
        {
            std::scoped_lock lock(beating_);
            stop_ = true;
        }
        stopped_.notify_all();
        if (beats_.joinable()) beats_.join();
    }
    /// Throws a failure that the server has reported, or that rank 0 has become silent. Never waits.
    [[gnu::cold]] void check() {
        while (heard_head()) static_cast<void>(take_head());
        expect_life();
    }

    /// The random number that rank 0 has drawn for this job, which tells its connections from those of another.
    [[nodiscard]] std::uint64_t nonce() const noexcept { return nonce_; }
    /// The address of this host on the way to rank 0.
    [[nodiscard]] boost::asio::ip::address const& local_address() const noexcept { return local_; }

private:
    static constexpr std::uint32_t max_answer = 64u << 20;
    struct refusal : rendezvous_error {
        using rendezvous_error::rendezvous_error;
    };

    /// False if the other side closed the connection before it sent anything.
    [[gnu::cold]] bool greet(int rank, int size, std::uint64_t job, time_point until) {
        if (several_ports_) until = std::min(until, monotonic_clock::now() + times_.handshake);
        detail::store_hello hello;
        hello.rank = rank;
        hello.size = size;
        hello.job = job;
        hello.who = bounded_text<72>(detail::this_process());
        hello.secret = secret_;
        in_.clear();
        detail::io_end const said = detail::write_all(stream_, bytes_of(hello), until);
        hello.secret.wipe();
        if (!several_ports_ && stream_.flush().why == make_error_code(channel_error::unproven))
            throw rendezvous_error(detail::concat(
                {"rank ", rank, " has reached ", detail::text_of(at_),
                 ", but what answers there does not know this job's secret. Give all ranks the same (DDP_SECRET_FILE), "
                 "and DDP_TLS on all or none, or choose another MASTER_PORT if another program listens there"}));
        if (said == detail::io_end::late && !several_ports_) throw late();
        if (said != detail::io_end::ok) return false;
        while (in_.size() < sizeof(detail::store_head)) {
            if (!wait_for_more(until)) break;
            if (!fill() && in_.size() < sizeof(detail::store_head)) return false;
        }
        if (several_ports_ && (in_.size() < sizeof(detail::store_head) || !ours(head()))) return false;
        heard_ = never - std::chrono::hours(1);  // rank 0 may have been started long after its socket was
        std::string const nonce = answer(until);
        heard_ = monotonic_clock::now();
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
        {
            std::scoped_lock lock(beating_);
            if (detail::write_all(stream_, as_const_bytes(std::span<char const>(text)), until) != detail::io_end::ok)
                throw lost();
        }
        return answer(until);
    }
    [[gnu::cold]] void start_beating() {
        beats_ = detail::start_thread("the thread that sends this rank's heartbeats to rank 0", [this] {
            std::unique_lock lock(beating_);
            while (!stopped_.wait_for(lock, times_.heartbeat, [this] { return stop_; })) {
                detail::store_head const alive{detail::store_op::alive, 0, 0, 0};
                static_cast<void>(
                    detail::write_all(stream_, bytes_of(alive), monotonic_clock::now() + times_.heartbeat));
            }
        });
    }
    /// Reads what has arrived; any byte shows that the server is alive. False: the connection has ended.
    [[nodiscard, gnu::cold]] bool fill() {
        std::array<std::byte, 8192> buffer;
        mutable_bytes const all = buffer;
        while (in_.size() <= max_answer) {
            std::scoped_lock const lock(beating_);  // a channel is not for two threads
            stream_result const r = stream_.read_some({&all, 1});
            if (r.status == stream_status::would_block) return true;
            if (r.status != stream_status::ok) return false;
            detail::append(in_, all.first(r.bytes));
            heard_ = monotonic_clock::now();
        }
        return true;
    }
    /// Until fill() is worth another try; false when `until` has come.
    [[nodiscard, gnu::cold]] bool wait_for_more(time_point until) {
        {
            std::scoped_lock const lock(beating_);
            if (stream_.buffered()) return true;
        }
        return detail::poll_until(stream_.descriptor(), POLLIN, until);
    }
    [[nodiscard]] detail::store_head head() const noexcept {
        detail::store_head head;
        std::memcpy(&head, in_.data(), sizeof head);
        return head;
    }
    /// Whether the head of an answer is here.
    [[nodiscard, gnu::cold]] bool heard_head() {
        bool const open = fill();
        if (!open && in_.size() < sizeof(detail::store_head)) throw lost();
        return in_.size() >= sizeof(detail::store_head);
    }
    /// Of what heard_head() has seen. Throws what the server refuses.
    [[nodiscard, gnu::cold]] detail::store_head take_head() {
        detail::store_head const taken = head();
        in_.erase(0, sizeof taken);
        if (!ours(taken)) throw stranger();
        if (taken.op == detail::store_op::refused) throw refusal(detail::printable(text_of(taken)));
        return taken;
    }
    [[nodiscard, gnu::cold]] std::string text_of(detail::store_head const& head) {
        time_point const until = monotonic_clock::now() + times_.dead + times_.handshake;
        while (in_.size() < head.value) {
            bool const open = fill();
            if (in_.size() >= head.value) break;
            if (!open || !wait_for_more(until)) throw lost();
        }
        std::string text = in_.substr(0, head.value);
        in_.erase(0, head.value);
        return text;
    }
    [[gnu::cold]] void expect_life() {
        time_point const at = monotonic_clock::now();
        if (at - looked_ > times_.dead / 2 && heard_ < at) heard_ = at;  // this process did not run
        looked_ = at;
        if (at - heard_ < times_.dead) return;
        throw rendezvous_error(
            detail::concat({"rank 0 at ", detail::text_of(at_), " has sent nothing for ", times_.dead.count(),
                            " ms during start-up. Its process is stopped or swapped out, or its host is unreachable",
                            at_.address().is_loopback() ? "" : ", or large packets are lost on the way (MTU)"}));
    }
    [[gnu::cold]] std::string answer(time_point until) {
        looked_ = monotonic_clock::now();
        for (;;) {
            while (heard_head()) {
                detail::store_head const head = take_head();
                if (head.op == detail::store_op::ok) return text_of(head);
            }
            expect_life();
            if (monotonic_clock::now() >= until) throw late();
            detail::poll_until(stream_.descriptor(), POLLIN,
                               std::min(until, monotonic_clock::now() + times_.heartbeat));
        }
    }
    [[nodiscard]] static bool ours(detail::store_head const& head) noexcept {
        bool const answers = head.op == detail::store_op::ok || head.op == detail::store_op::refused ||
                             (head.op == detail::store_op::alive && head.value == 0);
        return answers && head.key == 0 && head.count == 0 && head.value <= max_answer;
    }
    [[nodiscard, gnu::cold]] rendezvous_error lost() const {
        return rendezvous_error(
            detail::concat({"the connection to rank 0 at ", detail::text_of(at_),
                            " broke during start-up: rank 0 ended (its output says why), or another "
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

    tcp_stream stream_;
    boost::asio::ip::address local_;
    bool several_ports_;
    detail::tcp_endpoint at_;
    std::uint64_t nonce_ = 0;
    detail::kept_secret secret_;
    timing times_;
    time_point heard_ = {};   // when the server was heard last
    time_point looked_ = {};  // when that was last asked
    std::string in_;          // has come, and was not looked at
    std::mutex beating_;      // held by the thread that writes or reads
    std::condition_variable stopped_;
    bool stop_ = false;
    std::thread beats_;
};

}  // namespace ddp
