/// \file
/// What rendezvous/environment.hpp declares.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include <ddp/core/error.hpp>
#include <ddp/core/text.hpp>
#include <ddp/rendezvous/environment.hpp>
#include <ddp/rendezvous/environment_view.hpp>
#include <ddp/rendezvous/job_claim.hpp>

namespace ddp {

namespace detail {

struct job_source {
    char const* name;
    std::optional<job_claim> (*ask)(environment_view const&);
};
inline constexpr std::array<job_source, 6> job_sources = {{{"DDP_RANK", ddp_claim},
                                                           {"RANK", torchrun_claim},
                                                           {"Slurm", slurm_claim},
                                                           {"Open MPI", open_mpi_claim},
                                                           {"PMIx", pmix_claim},
                                                           {"PMI", pmi_claim}}};
inline constexpr std::size_t torchrun_source = 1, slurm_source = 2;

/// A port on which ranks of one job agree without communication, below those that kernels assign. Neighbouring jobs and steps
/// get different ones.
[[gnu::cold]] DDP_DECL std::uint16_t port_of_job(std::string_view id) {
    std::uint64_t mixed = 0, number = 0;
    for (char const c : id) {
        if (c >= '0' && c <= '9') {
            number = number * 10 + static_cast<std::uint64_t>(c - '0');
        } else {
            mixed = (mixed + number) * 31 + (c == '.' ? 0 : static_cast<unsigned char>(c));
            number = 0;
        }
    }
    return static_cast<std::uint16_t>(15000 + (mixed + number) % 16000);
}

[[gnu::cold]] DDP_DECL bool is_loopback(std::string_view address) {
    return address == "localhost" || address == "::1" || address.starts_with("127.");
}

/// Sets where the ranks of `j` meet; `claim` comes from source number `source`. Returns the variables that determine
/// it.
[[gnu::cold]] DDP_DECL std::string find_meeting(environment_view const& env, job& j, job_claim const& claim,
                                                std::size_t source) {
    std::string_view const addr_name = env.first_of({"DDP_MASTER_ADDR", "MASTER_ADDR"});
    std::string_view const port_name = env.first_of({"DDP_MASTER_PORT", "MASTER_PORT"});
    std::string said = env.list({addr_name, port_name});
    if (!addr_name.empty()) j.master_addr = env.known(addr_name);
    if (j.master_addr.empty())
        throw environment_error(concat({addr_name, " is empty; expected the address of rank 0's host"}));
    if (!port_name.empty())
        j.master_port =
            static_cast<std::uint16_t>(env.known_number(port_name, 1, 65535, "a TCP port on rank 0's host"));
    bool const whole = !addr_name.empty() && !port_name.empty();

    int hosts = claim.hosts;
    if (!whole && j.size > 1) {  // a job of one rank needs no meeting place
        std::optional<job_claim> slurm;
        if (source == slurm_source) slurm = claim;
        if (source < slurm_source) {
            slurm = slurm_claim(env);
            if (slurm && (slurm->rank != j.rank || slurm->size != j.size)) slurm.reset();
        }
        bool const one_host = slurm ? slurm->hosts == 1 : source > slurm_source && claim.local_size == claim.size;
        if (slurm && slurm->hosts == 0 && addr_name.empty())
            throw environment_error(
                concat({"Slurm says that this is task ", j.rank, " of ", j.size,
                        ", but not on which nodes: SLURM_STEP_NODELIST is not set. Set MASTER_ADDR ",
                        "and MASTER_PORT for all tasks: an address of task 0's node, and a free ", "port there"}));
        if (!slurm && source <= torchrun_source) throw half_of_a_job(env, source == torchrun_source ? "" : "DDP_");
        if (!slurm && !one_host)
            throw environment_error(
                concat({claim.said, " say that this is rank ", j.rank, " of ", j.size,
                        ", but no variable says where rank 0 is: ranks on several hosts need MASTER_ADDR, an address ",
                        "of rank 0's host, and MASTER_PORT (mpirun -x MASTER_ADDR -x MASTER_PORT), or a program built ",
                        "with MPI (<ddp/rendezvous/run_mpi.hpp>, target ddp::mpi)"}));
        std::string const& id = slurm ? slurm->id : claim.id;
        if (addr_name.empty()) {
            j.master_addr = one_host ? "127.0.0.1" : slurm->first_host;
            said += concat({said.empty() ? "" : ", ", one_host ? "one host" : "the first host of ",
                            one_host ? "" : env.list({"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"})});
            if (!one_host)
                j.advice = concat({"Slurm's node list says that rank 0 is on ", slurm->first_host,
                                   ". If that name is not its address on the network of the job, set MASTER_ADDR and ",
                                   "MASTER_PORT"});
        }
        if (port_name.empty() && !id.empty()) {
            j.master_port = port_of_job(id);
            said += concat({", port made of job ", id});
        }
        if (slurm) hosts = slurm->hosts;
    }
    j.several_hosts = hosts > 1 || (claim.local_size && *claim.local_size < claim.size);
    if (j.several_hosts && is_loopback(j.master_addr))
        j.advice = concat({"MASTER_ADDR is ", j.master_addr,
                           ", which every host resolves to itself, but there seem to be several hosts (", claim.said,
                           "): set it to an address of rank 0's host that the others reach"});
    return said.empty() ? "not needed: a job of one rank" : said;
}

/// The job as source number `source` describes it. `meeting`, if not null, becomes what find_meeting returns.
[[gnu::cold]] DDP_DECL job job_of_claim(environment_view const& env, job_claim const& claim, std::size_t source,
                                        std::string* meeting = nullptr) {
    job j;
    j.rank = claim.rank;
    j.size = claim.size;
    j.local_rank = claim.local_rank.value_or(0);
    j.local_size = claim.local_size.value_or(j.local_rank + 1);
    j.id = claim.id;
    j.source = concat({job_sources[source].name, " (", claim.said, ")"});
    std::string const said = find_meeting(env, j, claim, source);
    if (source == torchrun_source && env.has("TORCHELASTIC_RUN_ID")) {
        j.port_is_launchers = env.text("TORCHELASTIC_USE_AGENT_STORE") == "True";
        if (j.local_size == j.size) j.master_addr = "127.0.0.1";
    }
    if (auto const id = env.text("DDP_JOB_ID"); id && !id->empty()) j.id = *id;
    if (meeting != nullptr) *meeting = said;
    return j;
}

/// No source says which rank this is: it is alone. Throws if that looks like a mistake.
[[gnu::cold]] DDP_DECL void expect_no_job(environment_view const& env) {
    if (env.has("MASTER_ADDR") || env.has("MASTER_PORT") || env.has("DDP_MASTER_ADDR") || env.has("DDP_MASTER_PORT"))
        throw half_of_a_job(env, "");
    std::string const nodes = env.text("PET_NNODES").value_or("1");
    if (pet_ranks_a_host(env) > 1 || (nodes != "1" && nodes != "1:1"))
        throw environment_error(
            concat({env.list({"PET_NNODES", "PET_NPROC_PER_NODE"}),
                    " describe a job that torchrun or ddprun has yet to start: put ddprun in front ",
                    "of the program, which reads them"}));
}

[[gnu::cold]] DDP_DECL bool job_is_named(environment_reader get) {
    environment_view const env(get);
    for (char const* const name : {"DDP_RANK", "DDP_WORLD_SIZE", "RANK"})
        if (env.has(name)) return true;
    if (env.has("PMIX_RANK") || env.has("OMPI_COMM_WORLD_SIZE") || env.has("PMI_SIZE") || slurm_step(env)) return false;
    return env.has("WORLD_SIZE") || env.has("MASTER_ADDR") || env.has("MASTER_PORT");
}

[[gnu::cold]] DDP_DECL std::string explain_job(environment_reader get) {
    environment_view const env(get);
    std::string table, conflicts;
    std::optional<job_claim> first;
    std::size_t source = 0;
    for (std::size_t i = 0; i < job_sources.size(); ++i) {
        std::string line = concat({"  ", job_sources[i].name, ": "});
        line.resize(12, ' ');
        try {
            auto const claim = job_sources[i].ask(env);
            if (!claim) {
                bool const daemons = i == slurm_source && env.has("SLURM_PROCID") && started_by_mpirun(env);
                table += concat(
                    {line,
                     daemons ? "ignored: mpirun has started this process, and these are the ranks of mpirun's daemons"
                             : "-",
                     "\n"});
                continue;
            }
            table += concat({line, "rank ", claim->rank, " of ", claim->size});
            if (claim->local_rank) table += concat({", local rank ", *claim->local_rank});
            if (claim->local_size) table += concat({" of ", *claim->local_size, " here"});
            table += concat({" (", claim->said, ")", first ? "" : "  <- used", "\n"});
            if (first && (first->rank != claim->rank || first->size != claim->size))
                conflicts += concat({"conflict: ", job_sources[source].name, " says rank ", first->rank, " of ",
                                     first->size, ", ", job_sources[i].name, " rank ", claim->rank, " of ", claim->size,
                                     "; the first is used\n"});
            else if (first && first->local_rank && claim->local_rank && first->local_rank != claim->local_rank)
                conflicts += concat({"conflict: ", job_sources[source].name, " says local rank ", *first->local_rank,
                                     ", ", job_sources[i].name, " ", *claim->local_rank, "; the first is used\n"});
            if (!first) {
                first = claim;
                source = i;
            }
        } catch (environment_error const& e) {
            table += concat({line, e.what(), first ? "" : "  <- used", "\n"});
            if (first) continue;
            return concat({"Sources of this process's rank, in order:\n", table});
        }
    }
    std::string text = concat({"Sources of this process's rank, in order:\n", table});
    try {
        if (!first) {
            expect_no_job(env);
            return text + "None: the program runs alone.\n";
        }
        std::string meeting;
        job const j = job_of_claim(env, *first, source, &meeting);
        text += concat({"rank ", j.rank, " of ", j.size, "; local rank ", j.local_rank, " of ", j.local_size, "\n"});
        text += concat({"meeting at ", printable(j.master_addr), ":", j.master_port, " (", meeting, ")\n"});
        if (j.port_is_launchers) text += "that port is torchrun's own: rank 0 takes one of the next\n";
        if (!j.id.empty()) text += concat({"job ", printable(j.id), "\n"});
        if (env.has("SLURM_NTASKS_PER_NODE") && env.has("SLURM_STEP_TASKS_PER_NODE") && source == slurm_source &&
            first->local_size != env.number("SLURM_NTASKS_PER_NODE", 1, most_ranks, "the tasks of each node"))
            conflicts += concat({"conflict: ", env.list({"SLURM_NTASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"}),
                                 "; what the step says counts\n"});
        for (auto const& [ours, usual] :
             {std::pair{"DDP_MASTER_ADDR", "MASTER_ADDR"}, {"DDP_MASTER_PORT", "MASTER_PORT"}})
            if (env.has(ours) && env.has(usual) && env.text(ours) != env.text(usual))
                conflicts += concat({"conflict: ", env.list({ours, usual}), "; the first is used\n"});
        text += conflicts;
        if (!j.advice.empty()) text += concat({"note: ", j.advice, "\n"});
    } catch (environment_error const& e) {
        text += concat({conflicts, e.what(), "\n"});
    }
    return text;
}

}  // namespace detail

[[gnu::cold]] DDP_DECL std::optional<job> job_from_environment(
    function_ref<std::optional<std::string>(std::string const&)> get) {
    detail::environment_view const env(get);
    for (std::size_t i = 0; i < detail::job_sources.size(); ++i)
        if (auto const claim = detail::job_sources[i].ask(env)) return detail::job_of_claim(env, *claim, i);
    detail::expect_no_job(env);
    return std::nullopt;
}

[[gnu::cold]] DDP_DECL std::optional<job> job_from_environment() {
    return job_from_environment([](std::string const& name) { return detail::environment_variable(name); });
}

}  // namespace ddp
