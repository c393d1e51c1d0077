/// \file
/// request: a collective or a message that was started, to be waited for later.
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
    virtual void wait() = 0;  // the second time, nothing
    /// Waits for its end; while an exception unwinds, for timing.shutdown at most, then it fails the job.
    virtual void drop(bool unwinding) noexcept = 0;
};

}  // namespace detail

/// What every start_* call returns. Any number may be under way; all ranks start collectives in the same order. They
/// make progress in blocking calls, in wait() and test(), and in between on the communicator's thread, where the
/// transport allows one.
///
/// Data    what was passed stays alive, and untouched, until wait() has returned or test() has said true: memory that is
///         only sent may be read meanwhile.
/// Deadline  of a wait for a peer: timing.collective from the start, not from wait().
/// Destruction  of one that was not waited for waits, for as long as its deadlines allow, and drops the error: the next
///         call on the communicator throws it. While an exception unwinds it waits for at most timing.shutdown, then fails
///         the job. It never throws, and may come after its communicator's.
///
/// Thread safety: as the communicator's collectives, one thread at a time.
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

    /// Returns when it has ended: what was to be received is there, what was to be sent may be changed. The second time, or
    /// of a request that holds nothing: returns at once.
    /// Throws comm_error (the same verdict on every rank) if the job failed before; data is then unspecified.
    void wait() {
        if (of_) of_->wait();
        of_.reset();  // not before: a hook, which may not wait, keeps what it holds
    }
    /// Whether it has ended, well or not; wait() then returns or throws at once. Does not block.
    [[nodiscard]] bool test() { return !of_ || of_->done(); }

private:
    std::unique_ptr<detail::in_flight> of_;
    int unwinding_ = 0;
};

/// Waits for all of them, in order. Throws the first error; the rest is waited for by their destructors.
template <class Requests>
void wait_all(Requests& requests) {
    for (request& r : requests) r.wait();
}

}  // namespace ddp
