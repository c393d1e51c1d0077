/// \file
/// request: a collective or a message that has been started and is waited for later.
#pragma once

#include <ddp/core/language.hpp>  // first

#include <chrono>
#include <exception>
#include <memory>
#include <thread>
#include <utility>

namespace ddp {

namespace detail {

/// What a request holds, for any transport.
class in_flight {
public:
    virtual ~in_flight() = default;
    virtual bool done() = 0;
    virtual void wait() = 0;  // the second time does nothing
    /// Waits for its end; while an exception unwinds, for timing.shutdown at most, then it fails the job.
    virtual void drop(bool unwinding) noexcept = 0;
};

}  // namespace detail

/// What every start_* call returns. Any number may be under way; all ranks start collectives in the same order. They
/// make progress in blocking calls, in wait() and test(), and in between on the communicator's thread, where the
/// transport allows one.
///
/// Data    what was passed must stay alive and unchanged until wait() has returned or test() has returned true. Memory that is
///         only sent may be read meanwhile.
/// Deadline  of a wait for a peer: timing.collective from when it begins, which may be before wait() is called.
/// Destruction  of a request that was not waited for waits until it has ended, for as long as its deadlines allow, and
///         drops any error: the next call on the communicator throws it. During stack unwinding it waits for at most
///         timing.shutdown and then fails the job. It never throws, and may come after that of its communicator.
/// Throws  a start_* call throws usage_error as the blocking form does, and comm_error if the job has failed already; what
///         goes wrong later is thrown by wait().
/// Thread safety  as for the communicator's collectives: one thread at a time.
class [[nodiscard]] request {
public:
    request() = default;
    explicit request(std::unique_ptr<detail::in_flight> of) noexcept
        : of_(std::move(of)), unwinding_(std::uncaught_exceptions()) {}
    request(request&& other) noexcept = default;
    request& operator=(request&& other) noexcept {
        request const before(std::move(*this));  // waited for
        of_ = std::move(other.of_);
        unwinding_ = other.unwinding_;
        return *this;
    }
    ~request() {
        if (of_) of_->drop(std::uncaught_exceptions() > unwinding_);
    }

    /// Returns when it has ended: what was to be received has arrived, and what was to be sent may be changed. Returns
    /// at once the second time, or if the request holds nothing. Throws comm_error (the same verdict on every rank) if
    /// the job has failed before that; data is then unspecified. Throws usage_error in an observer or optimizer.
    void wait() {
        if (of_) of_->wait();
        of_.reset();  // not before: a hook, which may not wait, keeps what it holds
    }
    /// Whether it has ended, successfully or not; wait() then returns or throws at once. Does not wait for messages. Throws
    /// usage_error in an observer or optimizer.
    [[nodiscard]] bool test() { return !of_ || of_->done(); }

private:
    std::unique_ptr<detail::in_flight> of_;
    int unwinding_ = 0;
};

/// Waits for all of them, in order. Throws the first error; the destructors of the others wait for those.
template <class Requests>
void wait_all(Requests& requests) {
    for (request& r : requests) r.wait();
}

}  // namespace ddp
