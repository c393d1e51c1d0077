/// \file
/// What rendezvous/environment.hpp declares.
#pragma once

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>

#include <ddp/core/error.hpp>
#include <ddp/core/text.hpp>
#include <ddp/rendezvous/environment.hpp>

namespace ddp {

[[gnu::cold]] DDP_DECL int detail::environment_number(std::string_view name, std::string_view text, int least, int most,
                                                      std::string_view meaning) {
    int value = 0;
    auto const [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc{} || end != text.data() + text.size() || value < least || value > most)
        throw environment_error(concat({name, " is \"", text.substr(0, 80), "\"; expected ", meaning,
                                        ", a whole number from ", least, " to ", most}));
    return value;
}

[[gnu::cold]] DDP_DECL std::optional<job> detail::job_from(job_values const& values) {
    constexpr int most_ranks = 65536;
    auto const& [rank, size, address, port, local_rank, local_size, run_id, restart, agent_store] = values;
    std::string present, absent;
    for (std::size_t i = 0; i < 4; ++i) {
        std::string& list = values[i] ? present : absent;
        if (!list.empty()) list += ", ";
        list += job_variables[i];
    }
    if (present.empty()) return std::nullopt;
    // A job of one meets nobody, so it may leave out where.
    bool const alone = rank && size && *size == "1";
    if (!absent.empty() && !alone)
        throw environment_error(
            concat({present, " set, but not ", absent,
                    ". Start the program with ddprun or torchrun, set all four, or none to run alone"}));
    job j;
    j.size = environment_number("WORLD_SIZE", *size, 1, most_ranks, "the number of ranks");
    j.rank = environment_number("RANK", *rank, 0, j.size - 1, concat({"a rank below WORLD_SIZE (", *size, ")"}));
    if (address) j.master_addr = *address;
    if (j.master_addr.empty()) throw environment_error("MASTER_ADDR is empty; expected the address of rank 0's host");
    if (port)
        j.master_port = static_cast<std::uint16_t>(
            environment_number("MASTER_PORT", *port, 1, 65535, "a TCP port on rank 0's host"));
    if (local_size)
        j.local_size = environment_number("LOCAL_WORLD_SIZE", *local_size, 1, j.size,
                                          "the number of ranks on this host, at most WORLD_SIZE");
    if (local_rank)
        j.local_rank = environment_number("LOCAL_RANK", *local_rank, 0, local_size ? j.local_size - 1 : j.size - 1,
                                          "this rank's place on its host");
    if (!local_size) j.local_size = j.local_rank + 1;
    if (run_id) {
        j.id = concat({*run_id, "/", restart ? *restart : "0"});
        j.port_is_launchers = agent_store && *agent_store == "True";
        if (j.local_size == j.size) j.master_addr = "127.0.0.1";
    }
    return j;
}

[[gnu::cold]] DDP_DECL std::optional<job> job_from_environment() {
    return job_from_environment([](std::string const& name) -> std::optional<std::string> {
        char const* const value = std::getenv(name.c_str());
        if (value == nullptr) return std::nullopt;
        return std::string(value);
    });
}

}  // namespace ddp
