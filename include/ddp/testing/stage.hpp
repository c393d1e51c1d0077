/// \file
/// stage: one rank's side of a conformance scenario: its transport, its memory, and the first thing that went wrong.
#pragma once

#include <ddp/core/language.hpp>  // first

#include <algorithm>
#include <chrono>
#include <coroutine>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ddp/comm/transport.hpp>
#include <ddp/core/task.hpp>

namespace ddp::testing {

/// Options of check_transport.
struct conformance_options {
    std::chrono::milliseconds patience{15000};             ///< longest wait for anything, on the transport's clock
    bool threads = true;                                   ///< whether wake() is also called from another thread
    std::size_t large_bytes = (std::size_t{4} << 20) + 3;  ///< size of the large message
    std::size_t many = 1500;                               ///< messages in flight to one peer
    /// Total size of messages that are sent before their receive is posted: more than the transport stores from one peer.
    std::size_t early_bytes = std::size_t{24} << 20;
    /// Whether a transport must not accept early_bytes before they are asked for. False if a library below it stores such
    /// messages without a limit that it controls.
    bool early_is_bounded = true;
    std::string only = {};  ///< name of the only scenario to run; empty: all. Another name is a usage_error
    /// Called on the rank that has to die, with its number; like a crash, it must not tell the peers anything. If it
    /// returns, the rank does nothing more. Empty: ranks of this transport cannot die separately, and the scenario is
    /// left out.
    std::function<void(int)> kill = {};
};

/// A posted operation that counts how often, and where, it was completed.
struct probe : completion {
    int runs = 0;
    bool inside_post = false;
    bool const* posting = nullptr;
    std::size_t* open = nullptr;

    probe() {
        completion::run = [](completion& node) noexcept {
            probe& self = static_cast<probe&>(node);
            self.inside_post = self.inside_post || *self.posting;
            if (++self.runs == 1) --*self.open;
        };
    }
};

/// A scenario is a coroutine over this. Where ranks are threads or processes, awaiting progress() blocks in the transport;
/// on virtual time it suspends, and whoever drives the clock resumes it. Buffers and probes are the stage's, because a
/// transport may hold on to them until it is gone: destroy the transport before the stage.
template <Transport T>
class stage {
public:
    stage(std::unique_ptr<T>& transport, conformance_options const& with, std::uint32_t group, bool blocking)
        : options(with),
          transport_(transport),
          rank_(transport->rank()),
          size_(transport->size()),
          group_(group),
          blocking_(blocking) {}
    stage(stage const&) = delete;
    stage& operator=(stage const&) = delete;

    conformance_options const options;

    [[nodiscard]] T& transport() noexcept { return *transport_; }
    void destroy_transport() { transport_.reset(); }
    [[nodiscard]] bool has_transport() const noexcept { return transport_ != nullptr; }
    [[nodiscard]] int rank() const noexcept { return rank_; }
    [[nodiscard]] int size() const noexcept { return size_; }
    [[nodiscard]] int after(int distance = 1) const noexcept { return (rank_ + distance) % size_; }
    [[nodiscard]] int before(int distance = 1) const noexcept { return (rank_ + size_ - distance % size_) % size_; }

    /// Remembers the first complaint. Returns `good`.
    bool expect(bool good, std::string_view complaint) {
        if (!good && complaint_.empty())
            complaint_ =
                "rank " + std::to_string(rank_) + " of " + std::to_string(size_) + ": " + std::string(complaint);
        return good;
    }
    [[nodiscard]] std::string const& complaint() const noexcept { return complaint_; }

    [[nodiscard]] mutable_bytes memory(std::size_t bytes, std::byte fill = std::byte{0xEE}) {
        return buffers_.emplace_back(bytes, fill);
    }
    /// Bytes that depend on (seed, place), so that a mix-up shows.
    [[nodiscard]] mutable_bytes pattern(std::size_t bytes, std::size_t seed) {
        mutable_bytes const out = memory(bytes);
        for (std::size_t i = 0; i < bytes; ++i) out[i] = byte_of(seed, i);
        return out;
    }
    [[nodiscard]] static bool has_pattern(const_bytes in, std::size_t seed) noexcept {
        for (std::size_t i = 0; i < in.size(); ++i)
            if (in[i] != byte_of(seed, i)) return false;
        return true;
    }

    /// Scenarios do not see each other's messages, even one after the other on one transport.
    [[nodiscard]] tag what(std::uint64_t index, std::uint32_t channel = 0,
                           std::uint64_t fingerprint = 7) const noexcept {
        return {.id = {.group = group_, .channel = channel, .index = index}, .fingerprint = fingerprint};
    }
    probe& send(int peer, tag const& with, const_bytes out) {
        probe& node = make_probe();
        posting_ = true;
        transport_->post_send(peer, with, out, node);
        posting_ = false;
        expect(node.runs == 0, "a send completed inside post_send");
        return node;
    }
    probe& receive(int peer, tag const& with, mutable_bytes in) {
        probe& node = make_probe();
        posting_ = true;
        transport_->post_receive(peer, with, in, node);
        posting_ = false;
        expect(node.runs == 0, "a receive completed inside post_receive");
        return node;
    }
    /// Operations posted that have not completed.
    [[nodiscard]] std::size_t open() const noexcept { return open_; }

    struct progress_awaiter {
        stage& of;
        time_point until;
        [[nodiscard]] bool await_ready() const {
            if (of.blocking_) of.drive(until);
            return of.blocking_;
        }
        void await_suspend(std::coroutine_handle<> self) const noexcept {
            of.sleeper_ = self;
            of.until_ = until;
        }
        void await_resume() const {
            if (!of.blocking_) of.drive(time_point{});
        }
    };
    [[nodiscard]] progress_awaiter progress(time_point until) noexcept { return {*this, until}; }

    /// Drives until `condition` holds, or patience ends and `complaint` is remembered.
    template <class Condition>
    static task<bool> until(stage* self, Condition condition, char const* complaint) {
        time_point const limit = self->transport_->now() + self->options.patience;
        while (!condition()) {
            if (self->transport_->now() >= limit) co_return self->expect(false, complaint);
            co_await self->progress(limit);
        }
        co_return true;
    }
    /// Drives until everything that was posted has completed.
    static task<bool> all(stage* self, char const* complaint = "operations did not complete in time") {
        bool const done = co_await until(self, [self] { return self->open_ == 0; }, complaint);
        co_return done;
    }
    /// Drives for a while: others may come first.
    static task<> pause(stage* self, std::chrono::milliseconds length) {
        time_point const limit = self->transport_->now() + length;
        while (self->transport_->now() < limit) co_await self->progress(limit);
    }
    /// A barrier among the first `ranks` ranks (0: all).
    static task<bool> together(stage* self, int ranks = 0) {
        tag const with = self->what(++self->meetings_, 1000);
        if (ranks == 0) ranks = self->size_;
        std::vector<probe*> nodes;
        for (int peer = 0; peer < ranks; ++peer) {
            if (peer == self->rank_) continue;
            nodes.push_back(&self->receive(peer, with, {}));
            nodes.push_back(&self->send(peer, with, {}));
        }
        auto const met = [&nodes] {
            return std::all_of(nodes.begin(), nodes.end(), [](probe* n) { return n->runs > 0; });
        };
        bool good = co_await until(self, met, "the ranks did not meet in time");
        for (probe const* const node : nodes)
            good = good && self->expect(node->status == op_status::ok, "an empty message of a meeting failed");
        co_return good;
    }

    /// What must hold of every probe whatever the scenario; call it at the end.
    void check_probes() {
        for (probe const& node : probes_) {
            expect(node.runs <= 1, "an operation was completed twice");
            expect(!node.inside_post, "an operation was completed inside a post");
            if (node.runs > 0) expect(node.status != op_status::pending, "a completed operation is still pending");
        }
    }

    // For whoever drives virtual time.
    [[nodiscard]] bool sleeps() const noexcept { return static_cast<bool>(sleeper_); }
    [[nodiscard]] time_point sleeps_until() const noexcept { return until_; }
    void resume() { std::exchange(sleeper_, nullptr).resume(); }

private:
    [[nodiscard]] static std::byte byte_of(std::size_t seed, std::size_t i) noexcept {
        return static_cast<std::byte>(i * 31 + i / 251 + seed * 97 + 1);
    }
    probe& make_probe() {
        probe& node = probes_.emplace_back();
        node.posting = &posting_;
        node.open = &open_;
        ++open_;
        return node;
    }

    /// What progress() returns must be what has become of reports(). After abort(), which may listen too, nobody needs it.
    void drive(time_point until) {
        bool const said = transport_->progress(until);
        std::span<report const> const now = transport_->reports();
        seen_.resize(now.size());
        for (std::size_t r = 0; r < now.size(); ++r) {
            std::pair const is(now[r].is, now[r].record.text);
            bool const changed = is.first != seen_[r].first || is.second.view() != seen_[r].second.view();
            seen_[r] = is;
            bool const aborted = now[static_cast<std::size_t>(rank_)].is == report::state::spoke;
            expect(said || !changed || aborted, "reports() has changed, and progress() returned false");
        }
    }

    std::unique_ptr<T>& transport_;
    std::vector<std::pair<report::state, decltype(failure::text)>> seen_;
    int rank_, size_;
    std::uint32_t group_;
    bool blocking_;
    bool posting_ = false;
    std::size_t open_ = 0;
    std::uint64_t meetings_ = 0;
    std::string complaint_;
    std::deque<std::vector<std::byte>> buffers_;
    std::deque<probe> probes_;
    std::coroutine_handle<> sleeper_;
    time_point until_ = {};
};

}  // namespace ddp::testing
