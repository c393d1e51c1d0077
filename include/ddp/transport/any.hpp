/// \file
/// any_transport: one of the transports, chosen at run time.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <utility>

#include <ddp/comm/communicator.hpp>
#include <ddp/comm/host.hpp>
#include <ddp/comm/shared_memory.hpp>
#include <ddp/comm/transport.hpp>
#include <ddp/core/interface.hpp>
#include <ddp/core/separate.hpp>

namespace ddp {

/// Owns a transport of any type and behaves as it does, refinements included. communicator<> uses it, so that code which
/// takes a communicator is compiled once.
///
/// Cost  one virtual call for each operation: a few nanoseconds per message.
class any_transport {
public:
    template <Transport T>
    explicit any_transport(std::unique_ptr<T> held)
        : rank_(held->rank()), size_(held->size()), held_(std::make_unique<model<T>>(std::move(held))) {}

    /// The transport that it holds, if that is a T; otherwise null.
    template <Transport T>
    [[nodiscard]] T* target() const noexcept {
        auto* const found = dynamic_cast<model<T>*>(held_.get());
        return found == nullptr ? nullptr : found->of.get();
    }
    /// "tcp", "mpi", "inproc", …; "transport" if it has no name.
    [[nodiscard]] std::string_view name() const noexcept { return held_->name(); }

    [[nodiscard]] int rank() const noexcept { return rank_; }
    [[nodiscard]] int size() const noexcept { return size_; }
    void post_send(int peer, tag what, const_bytes out, completion& done) { held_->post_send(peer, what, out, done); }
    void post_receive(int peer, tag what, mutable_bytes in, completion& done) {
        held_->post_receive(peer, what, in, done);
    }
    bool progress(time_point until) { return held_->progress(until); }
    void abort(failure const& record) { held_->abort(record); }
    [[nodiscard]] std::span<report const> reports() const { return held_->reports(); }
    void wake() { held_->wake(); }
    [[nodiscard]] time_point now() const { return held_->now(); }

    // Refinements. If the transport lacks one, these do nothing and return neutral values.
    [[nodiscard]] bool may_own_thread() const { return held_->may_own_thread(); }
    [[nodiscard]] bool shares_cores() const { return held_->shares_cores(); }
    [[nodiscard]] std::string_view process_of(int rank) const { return held_->process_of(rank); }
    void pace(nanoseconds least) { held_->pace(least); }
    [[nodiscard]] bool still_writes() const { return held_->still_writes(); }
    [[nodiscard]] std::uint64_t host() const { return held_->host(); }
    [[nodiscard]] std::unique_ptr<memory_sharing> share_memory() { return held_->share_memory(); }
    [[nodiscard]] std::optional<bool> through_memory(int a, int b) const { return held_->through_memory(a, b); }
    [[nodiscard]] time_point next_timer() const { return held_->next_timer(); }
    void entered(mark const& mine) { held_->entered(mine); }
    [[nodiscard]] mark mark_of(int peer) const { return held_->mark_of(peer); }
    [[nodiscard]] std::optional<int> overdue_peer() const { return held_->overdue_peer(); }
    [[nodiscard]] time_point last_heard(int peer) const { return held_->last_heard(peer); }

private:
    struct interface : detail::interface {
        virtual std::string_view name() const = 0;
        virtual void post_send(int, tag const&, const_bytes, completion&) = 0;
        virtual void post_receive(int, tag const&, mutable_bytes, completion&) = 0;
        virtual bool progress(time_point) = 0;
        virtual void abort(failure const&) = 0;
        virtual std::span<report const> reports() const = 0;
        virtual void wake() = 0;
        virtual time_point now() const = 0;
        virtual bool may_own_thread() const = 0;
        virtual bool shares_cores() const = 0;
        virtual std::string_view process_of(int) const = 0;
        virtual void pace(nanoseconds) = 0;
        virtual bool still_writes() const = 0;
        virtual std::uint64_t host() const = 0;
        virtual std::unique_ptr<memory_sharing> share_memory() = 0;
        virtual std::optional<bool> through_memory(int, int) const = 0;
        virtual time_point next_timer() const = 0;
        virtual void entered(mark const&) = 0;
        virtual mark mark_of(int) const = 0;
        virtual std::optional<int> overdue_peer() const = 0;
        virtual time_point last_heard(int) const = 0;
    };
    template <Transport T>
    struct model final : interface {
        explicit model(std::unique_ptr<T> held) : of(std::move(held)) {}
        std::string_view name() const override {
            if constexpr (requires { T::name; }) return T::name;
            return "transport";
        }
        void post_send(int peer, tag const& what, const_bytes out, completion& done) override {
            of->post_send(peer, what, out, done);
        }
        void post_receive(int peer, tag const& what, mutable_bytes in, completion& done) override {
            of->post_receive(peer, what, in, done);
        }
        bool progress(time_point until) override { return of->progress(until); }
        void abort(failure const& record) override { of->abort(record); }
        std::span<report const> reports() const override { return of->reports(); }
        void wake() override { of->wake(); }
        time_point now() const override { return of->now(); }
        bool may_own_thread() const override { return ddp::may_own_thread(*of); }
        bool shares_cores() const override { return ddp::shares_cores(*of); }
        std::string_view process_of(int rank) const override { return ddp::process_of(*of, rank); }
        void pace([[maybe_unused]] nanoseconds least) override {
            if constexpr (requires { of->pace(least); }) of->pace(least);
        }
        bool still_writes() const override {
            if constexpr (requires { of->still_writes(); }) return of->still_writes();
            return false;
        }
        std::uint64_t host() const override { return host_of(*of); }
        std::unique_ptr<memory_sharing> share_memory() override {
            if constexpr (SharingTransport<T>) return of->share_memory();
            return nullptr;
        }
        std::optional<bool> through_memory([[maybe_unused]] int a, [[maybe_unused]] int b) const override {
            if constexpr (PathTransport<T>) return of->through_memory(a, b);
            return std::nullopt;
        }
        time_point next_timer() const override {
            if constexpr (TimedTransport<T>) return of->next_timer();
            return never;
        }
        void entered(mark const& mine) override {
            if constexpr (WatchfulTransport<T>) of->entered(mine);
        }
        mark mark_of([[maybe_unused]] int peer) const override {
            if constexpr (WatchfulTransport<T>) return of->mark_of(peer);
            return {};
        }
        std::optional<int> overdue_peer() const override {
            if constexpr (WatchfulTransport<T>) return of->overdue_peer();
            return std::nullopt;
        }
        time_point last_heard([[maybe_unused]] int peer) const override {
            if constexpr (WatchfulTransport<T>) return of->last_heard(peer);
            return {};
        }
        std::unique_ptr<T> of;
    };

    int rank_, size_;
    std::unique_ptr<interface> held_;
};
static_assert(WatchfulTransport<any_transport> && TimedTransport<any_transport> && SharingTransport<any_transport> &&
              PathTransport<any_transport>);

/// A communicator<> over a transport of any type. Throws as the constructor of communicator.
template <Transport T>
[[nodiscard]] communicator<any_transport> any_communicator(
    std::unique_ptr<T> transport, timing const& times = {},
    communication_thread thread = communication_thread::automatic) {
    return communicator<any_transport>(std::make_unique<any_transport>(std::move(transport)), times, thread);
}

#if defined(DDP_SEPARATE_COMPILATION)
DDP_INSTANTIATE class scheduler<any_transport>;
DDP_INSTANTIATE class detail::background_thread<any_transport>;
DDP_INSTANTIATE class driver<any_transport>;
DDP_INSTANTIATE class communicator<any_transport>;
DDP_INSTANTIATE task<> detail::bruck_all_gather(lane<any_transport>, mutable_bytes, std::size_t);
DDP_INSTANTIATE task<> detail::split(lane<any_transport>, std::uint64_t, std::int64_t, std::unique_ptr<group>*);
#endif

}  // namespace ddp
