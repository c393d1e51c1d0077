/// \file
/// What can go wrong, each with a code that stands in the exception, the message and docs/errors.md.
#pragma once

#include <ddp/core/language.hpp>  // first

#include <cstdint>
#include <stdexcept>
#include <string_view>

#include <ddp/core/separate.hpp>

namespace ddp {

/// The codes are stable: scripts may branch on them, and the manual lists the cause and remedy of each.
enum class errc : std::uint16_t {
    usage = 100,             ///< the caller broke a precondition; the text says what to do instead
    environment = 101,       ///< RANK, WORLD_SIZE, … are missing, malformed or contradict each other
    model_differs = 102,     ///< ranks built different models, plans or optimizers
    gradient = 103,          ///< backward reported a parameter twice, never, or out of range
    no_samples = 104,        ///< the batch has weight zero on every rank
    nonfinite = 105,         ///< the mean gradient has a NaN or an infinity, and training_options says stop
    replicas_differ = 106,   ///< ranks hold different values, or different optimizer state
    rendezvous = 201,        ///< ranks could not find each other
    peer_closed = 202,       ///< a rank died or its connection broke
    peer_silent = 203,       ///< a rank is frozen or unreachable: no heartbeats
    deadline = 204,          ///< a rank is alive but did not take part in time
    mismatch = 205,          ///< ranks called different operations, or the same one with different sizes
    remote_exception = 206,  ///< user code on another rank threw
    frame = 207,             ///< bytes on a connection are not what this library writes
    transport = 208,         ///< a rank's transport reported an error of its own: MPI, or one of yours
    file = 301,              ///< a file is missing or cannot be read
    format = 302,            ///< a file's content is not valid for its kind
};

/// The name of a code in words, as in error messages: "peer closed".
[[nodiscard]] constexpr std::string_view name_of(errc code) noexcept {
    switch (code) {
        case errc::usage: return "usage";
        case errc::environment: return "environment";
        case errc::model_differs: return "model differs";
        case errc::gradient: return "gradient";
        case errc::no_samples: return "no samples";
        case errc::nonfinite: return "not finite";
        case errc::replicas_differ: return "replicas differ";
        case errc::rendezvous: return "rendezvous";
        case errc::peer_closed: return "peer closed";
        case errc::peer_silent: return "peer silent";
        case errc::deadline: return "deadline";
        case errc::mismatch: return "mismatch";
        case errc::remote_exception: return "remote exception";
        case errc::frame: return "frame";
        case errc::transport: return "transport";
        case errc::file: return "file";
        case errc::format: return "format";
    }
    return "unknown";
}

namespace detail {

/// Whether every rank detects such an error by itself: one that left first says the same.
[[nodiscard]] constexpr bool all_detect(errc code) noexcept {
    return code == errc::no_samples || code == errc::nonfinite;
}

}  // namespace detail

/// Base of everything the library throws on purpose. what() reads "DDP-E202 peer closed: <text>".
class error : public std::runtime_error {
public:
    error(errc code, std::string_view text);

    [[nodiscard]] errc code() const noexcept { return code_; }
    /// What run_main returns after it: the number of its code, 202 for DDP-E202, but 1 where that is above 255.
    [[nodiscard]] int exit_code() const noexcept { return code_ < errc::file ? static_cast<int>(code_) : 1; }

private:
    errc code_;
};

/// The caller's mistake, found at run time. The text says what to do instead.
class usage_error : public error {
public:
    explicit usage_error(std::string_view text) : error(errc::usage, text) {}
};

/// The environment or a command line does not describe a job.
class environment_error : public error {
public:
    explicit environment_error(std::string_view text) : error(errc::environment, text) {}
};

/// A file is missing, truncated, mislabelled or too large. The text names the file and what was expected.
class data_error : public error {
public:
    explicit data_error(errc code, std::string_view text) : error(code, text) {}
};

namespace detail {
/// Called by a DDP_EXPECTS that fails: a function, so that each check costs one call.
[[noreturn]] void throw_usage(std::string_view advice);
}  // namespace detail

}  // namespace ddp

#if !defined(DDP_SEPARATE_COMPILATION)
#include <ddp/core/impl/error.ipp>
#endif
