/// \file
/// flight_recorder: what this rank did last, in fixed memory; written as JSON lines when something fails or a signal asks.
#pragma once

#include <ddp/core/language.hpp>  // first

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include <ddp/comm/transport.hpp>
#include <ddp/core/separate.hpp>

namespace ddp {

/// What an entry of the flight recorder says. The first three say what the program is doing; the newest of them counts.
enum class flight : std::uint8_t {
    phase,     ///< the program begins `name`, of what a user of the driver counts as `number`: "forward" of a step
    waits,     ///< a blocking call begins to wait; `name` and `number` of the collective, or "request"
    finished,  ///< it has returned, or the phase `name` has ended: the program is in its own code
    entered,   ///< a collective or step was entered: `name`, `number`, `group`, `count` of elements
    mark,      ///< `name` has happened in `number`, whatever phase the program is in: "reduced" in a step
    left,      ///< this rank leaves the job
    record,    ///< `peer` has published a record of a failure, of the kind `name`
    closed,    ///< the connection to `peer` is closed
    silent,    ///< nothing was heard of `peer` for timing.dead
    failed,   ///< this rank has published its own record, of the kind `name`, about `peer`; `count` is the error's code
    verdict,  ///< the verdict of all ranks: `peer` is the culprit (-1: none), `count` the error's code
};

namespace detail {
/// A record of another rank may hold any number here: it comes from the network.
[[nodiscard]] constexpr char const* kind_name(failure_kind kind) noexcept {
    constexpr std::array names{"threw", "broke", "mismatch", "closed", "silent", "waiting", "idle"};
    return static_cast<std::size_t>(kind) < names.size() ? names[static_cast<std::size_t>(kind)] : "unknown";
}

/// The memory of a recorder, in which another process can read it.
struct flight_ring {
    static constexpr std::size_t capacity = 1024;
    std::array<std::array<std::atomic<std::uint64_t>, 8>, capacity> places{};
    std::atomic<std::uint64_t> next{0};  // the ticket of the next entry: it stands at ticket % capacity
    std::int64_t begun = 0;              // when the rank could first record something
    std::int64_t pid = 0;
    std::array<char, 16> transport{};
};
/// For the next recorder of this process: memory that outlives the process. What stands there is forgotten.
inline std::atomic<flight_ring*> lasting_ring{nullptr};
}  // namespace detail

/// A ring of the last `capacity` entries of one rank, 64 bytes each. Part of a driver; users never see it.
///
/// Threads  any number may record and dump at once. Nothing is allocated or locked. A dump leaves out entries that are
///          half written or have been overwritten meanwhile: each entry carries a checksum.
/// Cost     record: one atomic addition, one reading of the monotonic clock, eight stores: 45 to 70 ns; record_at reads no
///          clock, and takes half of that. 72 KiB a rank.
/// Files    dump writes to DDP_FLIGHT_DIR/rank-R.jsonl, or rank-R.1.jsonl to rank-R.9.jsonl if that file exists already
///          (mode 0600, created by the first dump); without that variable nothing is written. Later dumps append what
///          is new. A write that fails is reported once on stderr, and does not fail the job.
class flight_recorder {
public:
    static constexpr std::size_t capacity = detail::flight_ring::capacity;

    /// Reads DDP_FLIGHT_DIR and DDP_JOB_ID. `transport` is a name, such as "tcp".
    flight_recorder(int rank, int size, std::string_view transport) noexcept;
    /// What a process that is gone has left in lasting_ring, to be dumped into this directory (null: nowhere).
    flight_recorder(int rank, int size, detail::flight_ring* ring, char const* directory) noexcept;
    flight_recorder(flight_recorder const&) = delete;
    flight_recorder& operator=(flight_recorder const&) = delete;
    ~flight_recorder();

    /// What the communication thread does, for the head of the file. `is` is a literal.
    void say_thread(char const* is) noexcept { thread_.store(is); }
    /// Whether SIGUSR2 makes this process dump this record; otherwise the signal may end it.
    std::atomic<bool> answers_signal{false};
    /// `whose`: the group, or the peer. Of `name` 24 bytes are kept. A phase or a mark is written as an event `name`.
    void record(flight what, std::uint64_t number = 0, std::int64_t whose = 0, std::uint64_t count = 0,
                char const* name = "") noexcept {
        record_at(monotonic_clock::now(), what, number, whose, count, name);
    }
    /// The same at a time on the transport's clock, which the caller has read.
    void record_at(time_point at, flight what, std::uint64_t number = 0, std::int64_t whose = 0,
                   std::uint64_t count = 0, char const* name = "") noexcept;
    /// What the program is in: "forward of step 57", or "its own code" after a call or pass that has returned. Empty if it
    /// waits, or has done nothing yet.
    [[nodiscard]] bounded_text<32> phase() const noexcept;
    void fail(failure const& own) noexcept;
    /// Records the verdict, keeps its text, and dumps.
    void adopt(failure const& verdict) noexcept;

    /// Writes what no earlier dump has written. `why` is a literal. Async-signal-safe.
    void dump(char const* why) noexcept;
    /// Dumps, or, if DDP_FLIGHT_DIR is not set, writes a line to stderr that says what the program is doing.
    /// Async-signal-safe.
    void dump_or_say(char const* why) noexcept;

private:
    using words = std::array<std::uint64_t, 8>;  // what and whose, time, number, count, three of name, check
    [[nodiscard]] static std::uint64_t check_of(std::uint64_t ticket, words const& of) noexcept;
    [[nodiscard]] bool read(std::uint64_t ticket, words& to) const noexcept;
    /// Reads the newest of the entries that say what the program is doing. Returns its ticket + 1, or 0: there is none.
    [[nodiscard]] std::uint64_t read_newest(words& to) const noexcept;
    [[nodiscard]] bool open() noexcept;
    void dump_once(char const* why) noexcept;
    void complain(char const* path) noexcept;

    struct quoted {
        std::string_view text;
    };
    // Into out_, which has room for a line more.
    void put(std::string_view text) noexcept;
    void put(std::int64_t number) noexcept;
    void put(quoted string) noexcept;
    template <class... Pieces>
    void put_all(Pieces... pieces) noexcept {
        (put(pieces), ...);
    }
    void put_entry(std::uint64_t ticket, words const& of) noexcept;
    void flush() noexcept;
    void say() noexcept;

    detail::flight_ring own_;
    detail::flight_ring* ring_;
    int rank_, size_;
    std::atomic<char const*> thread_{"none"};
    std::array<char, 64> host_{}, job_{};
    std::array<char, 512> directory_{};                   // absolute; empty: there is none
    std::array<char, sizeof(failure::text) + 1> text_{};  // the verdict's, once has_text_
    std::atomic<bool> has_text_{false};

    std::atomic<char const*> again_{nullptr};    // the reason of a dump that was asked for during another one
    std::atomic<bool> dumping_{false};           // the thread that has set it owns what follows
    std::uint64_t dumped_ = 0;                   // tickets below were written, except these:
    std::array<std::uint64_t, 4> unfinished_{};  // tickets + 1 of entries that a thread was still making; 0: none
    int file_ = -1;
    bool tried_ = false, wrote_text_ = false;
    std::int64_t written_ = 0;
    std::size_t filled_ = 0;
    std::array<char, 6144> out_{};
};

}  // namespace ddp

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/comm/impl/flight_recorder.ipp>
#endif
