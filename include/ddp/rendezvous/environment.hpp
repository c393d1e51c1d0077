/// \file
/// job: which rank of how many this process is, as torchrun, ddprun and Kubernetes say it in the environment.
#pragma once

#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>

#include <ddp/core/error.hpp>

namespace ddp {

struct job {
    int rank = 0;
    int size = 1;
    int local_rank = 0;  ///< among the ranks of this host
    int local_size = 1;
    std::string master_addr = "127.0.0.1";  ///< where rank 0 listens while the job comes together
    std::uint16_t master_port = 29500;
};

namespace detail {

/// A whole decimal number in [least, most], or an error that names the variable, its value and what it should be.
inline int environment_number(std::string_view name, std::string_view text, int least, int most,
                              std::string_view meaning) {
    int value = 0;
    auto const [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc{} || end != text.data() + text.size() || value < least || value > most)
        throw environment_error(std::string(name) + " is \"" + std::string(text.substr(0, 80)) + "\"; expected " +
                                std::string(meaning) + ", a whole number from " + std::to_string(least) + " to " +
                                std::to_string(most));
    return value;
}

}  // namespace detail

/// Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and, if they are there, LOCAL_RANK and LOCAL_WORLD_SIZE. None of
/// the four: no job. Throws environment_error if only some are there, or one makes no sense.
///
/// get(name) returns a std::optional<std::string>: another environment, for tests and launchers.
template <class Get>
[[nodiscard]] std::optional<job> job_from_environment(Get get) {
    constexpr int most_ranks = 65536;
    std::string_view const names[] = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"};
    std::optional<std::string> values[4];
    std::string present, absent;
    for (int i = 0; i < 4; ++i) {
        values[i] = get(std::string(names[i]));
        std::string& list = values[i] ? present : absent;
        list += (list.empty() ? "" : ", ") + std::string(names[i]);
    }
    if (present.empty()) return std::nullopt;
    // A job of one meets nobody, so it may leave out where.
    bool const alone = values[0] && values[1] && *values[1] == "1";
    if (!absent.empty() && !alone)
        throw environment_error(present + " set, but not " + absent +
                                ". Start the program with ddprun or torchrun, set all four, or none to run alone");
    job j;
    j.size = detail::environment_number("WORLD_SIZE", *values[1], 1, most_ranks, "the number of ranks");
    j.rank =
        detail::environment_number("RANK", *values[0], 0, j.size - 1, "a rank below WORLD_SIZE (" + *values[1] + ")");
    if (values[2]) j.master_addr = *values[2];
    if (j.master_addr.empty()) throw environment_error("MASTER_ADDR is empty; expected the address of rank 0's host");
    if (values[3])
        j.master_port = static_cast<std::uint16_t>(
            detail::environment_number("MASTER_PORT", *values[3], 1, 65535, "a TCP port on rank 0's host"));
    std::optional<std::string> const local_size = get("LOCAL_WORLD_SIZE"), local_rank = get("LOCAL_RANK");
    if (local_size)
        j.local_size = detail::environment_number("LOCAL_WORLD_SIZE", *local_size, 1, j.size,
                                                  "the number of ranks on this host, at most WORLD_SIZE");
    if (local_rank)
        j.local_rank = detail::environment_number(
            "LOCAL_RANK", *local_rank, 0, local_size ? j.local_size - 1 : j.size - 1, "this rank's place on its host");
    if (!local_size) j.local_size = j.local_rank + 1;
    return j;
}

/// From this process's environment.
[[nodiscard]] inline std::optional<job> job_from_environment() {
    return job_from_environment([](std::string const& name) -> std::optional<std::string> {
        char const* const value = std::getenv(name.c_str());
        if (value == nullptr) return std::nullopt;
        return std::string(value);
    });
}

}  // namespace ddp
