/// \file
/// lingering_transport: inproc, but like MPI it may write into memory of receives that were aborted until it is destroyed,
/// and when that happens it does. AddressSanitizer finds memory that is gone by then.
#pragma once

#include <chrono>
#include <cstring>
#include <list>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <ddp/transport/inproc.hpp>

namespace ddp::test {

class lingering_transport {
public:
    explicit lingering_transport(std::unique_ptr<inproc_transport> inner) : inner_(std::move(inner)) {}
    lingering_transport(lingering_transport const&) = delete;
    lingering_transport& operator=(lingering_transport const&) = delete;
    ~lingering_transport() {
        inner_.reset();
        for (receive const& r : receives_)
            if (!r.arrived && !r.in.empty()) std::memset(r.in.data(), 0xee, r.in.size());
    }
    [[nodiscard]] int rank() const noexcept { return inner_->rank(); }
    [[nodiscard]] int size() const noexcept { return inner_->size(); }
    void post_send(int peer, tag what, const_bytes out, completion& done) { inner_->post_send(peer, what, out, done); }
    void post_receive(int peer, tag what, mutable_bytes in, completion& done) {
        std::erase_if(receives_, [](receive const& r) { return r.arrived; });
        receive& mine = receives_.emplace_back();
        mine.in = in;
        mine.users = &done;
        mine.reader = done.reader;
        mine.run = [](completion& node) noexcept {
            completion& users = *static_cast<receive&>(node).users;
            static_cast<receive&>(node).arrived = node.status == op_status::ok;
            users.status = node.status;
            users.fingerprint = node.fingerprint;
            users.length = node.length;
            users.run(users);
        };
        inner_->post_receive(peer, what, in, mine);
    }
    bool progress(time_point until) { return inner_->progress(until); }
    void abort(failure const& record) {
        if (lets_go_ == never) lets_go_ = now() + std::chrono::milliseconds(100);
        inner_->abort(record);
    }
    /// For a while after the failure, as MPI until the messages that it has matched have ended.
    [[nodiscard]] bool still_writes() const { return lets_go_ != never && now() < lets_go_; }
    [[nodiscard]] std::span<report const> reports() const { return inner_->reports(); }
    void wake() { inner_->wake(); }
    [[nodiscard]] time_point now() const { return inner_->now(); }

private:
    struct receive : completion {
        mutable_bytes in;
        completion* users = nullptr;
        bool arrived = false;
    };
    std::unique_ptr<inproc_transport> inner_;
    time_point lets_go_ = never;
    std::list<receive> receives_;
};
static_assert(Transport<lingering_transport>);

}  // namespace ddp::test
