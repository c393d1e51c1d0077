/// \file
/// What rendezvous/job_claim.hpp declares.
#pragma once

#include <charconv>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>

#include <ddp/core/error.hpp>
#include <ddp/core/text.hpp>
#include <ddp/rendezvous/environment_view.hpp>
#include <ddp/rendezvous/job_claim.hpp>
#include <ddp/rendezvous/slurm_node_list.hpp>

namespace ddp::detail {

[[gnu::cold]] DDP_DECL environment_error half_of_a_job(environment_view const& env, std::string_view prefix) {
    std::string present, absent, named;
    auto const add = [](std::string& list, std::string_view name) { list += concat({list.empty() ? "" : ", ", name}); };
    for (char const* const plain : {"RANK", "WORLD_SIZE"}) {
        std::string const name = concat({prefix, plain});
        add(env.has(name) ? present : absent, name);
    }
    named = present;
    for (char const* const plain : {"MASTER_ADDR", "MASTER_PORT"}) {
        std::string const ours = concat({"DDP_", plain});
        bool const has_ours = env.has(ours);
        add(has_ours || env.has(plain) ? present : absent, has_ours ? std::string_view(ours) : plain);
    }
    std::string const half = concat({present, " set, but not ", absent});
    struct launcher {
        char const* name;
        std::optional<job_claim> (*ask)(environment_view const&);
    };
    for (launcher const& one :
         {launcher{"Slurm", slurm_claim}, launcher{"Open MPI", open_mpi_claim}, launcher{"PMI", pmi_claim}}) {
        try {
            if (auto const claim = named.empty() ? std::nullopt : one.ask(env))
                return environment_error(
                    concat({half, ". ", one.name, " says that this is rank ", claim->rank, " of ", claim->size,
                            ": unset ", named, " for that to take effect, or set all four"}));
        } catch (environment_error const&) {  // the error below comes first
        }
    }
    return environment_error(
        concat({half, ". Start the program with ddprun or torchrun, set all four, or none to run alone"}));
}

[[gnu::cold]] DDP_DECL std::optional<int> local_rank_of(environment_view const& env, std::string_view name,
                                                        job_claim const& claim) {
    return env.number(name, 0, claim.local_size.value_or(claim.size) - 1, "this rank's place on its host");
}

/// RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE behind `prefix`.
[[gnu::cold]] DDP_DECL std::optional<job_claim> named_claim(environment_view const& env, std::string_view prefix) {
    std::string const rank = concat({prefix, "RANK"}), size = concat({prefix, "WORLD_SIZE"});
    std::string const local_rank = concat({prefix, "LOCAL_RANK"}), local_size = concat({prefix, "LOCAL_WORLD_SIZE"});
    auto const rank_text = env.text(rank), size_text = env.text(size);
    if (!rank_text && !size_text) return std::nullopt;
    if (!rank_text && env.has("PMIX_RANK")) return std::nullopt;  // the rank comes from PMIx, and the size from here
    if (!rank_text || !size_text) throw half_of_a_job(env, prefix);
    job_claim claim;
    claim.size = environment_number(size, *size_text, 1, most_ranks, "the number of ranks");
    claim.rank =
        environment_number(rank, *rank_text, 0, claim.size - 1, concat({"a rank below ", size, " (", *size_text, ")"}));
    claim.local_size = env.number(local_size, 1, most_ranks, "the number of ranks on this host");
    if (claim.local_size && *claim.local_size > claim.size)
        throw environment_error(
            concat({local_size, " is \"", *claim.local_size, "\", but ", size, " is ", claim.size, "; expected ", size,
                    " to count the ranks of all hosts. If it counts hosts here, as in some Kubernetes jobs, start the ",
                    "program with ddprun on each host: it sets them for each rank"}));
    claim.local_rank = local_rank_of(env, local_rank, claim);
    claim.said = env.list({rank, size, local_rank, local_size});
    return claim;
}

[[gnu::cold]] DDP_DECL std::optional<job_claim> ddp_claim(environment_view const& env) {
    return named_claim(env, "DDP_");
}

[[gnu::cold]] DDP_DECL int pet_ranks_a_host(environment_view const& env) {
    std::string const text = env.text("PET_NPROC_PER_NODE").value_or("1");
    int value = 1;
    auto const [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    return error == std::errc{} && end == text.data() + text.size() ? value : 1;
}

[[gnu::cold]] DDP_DECL std::optional<job_claim> torchrun_claim(environment_view const& env) {
    auto claim = named_claim(env, "");
    if (claim && !claim->local_rank && pet_ranks_a_host(env) > 1)
        throw environment_error(
            concat({"PET_NPROC_PER_NODE=", pet_ranks_a_host(env),
                    " asks for that many ranks on each host, and RANK=", claim->rank, " and WORLD_SIZE=", claim->size,
                    " without LOCAL_RANK count hosts. Put ddprun in front of the program: it reads the PET_ variables ",
                    "and starts the ranks"}));
    if (!claim) return claim;
    if (auto const run = env.text("TORCHELASTIC_RUN_ID"))
        claim->id = concat({*run, "/", env.text("TORCHELASTIC_RESTART_COUNT").value_or("0")});
    return claim;
}

[[gnu::cold]] DDP_DECL bool started_by_mpirun(environment_view const& env) {
    return env.has("OMPI_COMM_WORLD_RANK") || env.has("MPI_LOCALNRANKS");
}

[[gnu::cold]] DDP_DECL std::optional<std::uint32_t> slurm_step(environment_view const& env) {
    std::string const text = env.text("SLURM_STEP_ID").value_or("");
    std::uint32_t step = 0;
    auto const [end, error] = std::from_chars(text.data(), text.data() + text.size(), step);
    if (error != std::errc{} || end != text.data() + text.size() || step >= 0xfffffffaU) return std::nullopt;
    return step;
}

[[gnu::cold]] DDP_DECL std::optional<slurm_node_list> slurm_nodes(environment_view const& env) {
    std::string_view const name = env.first_of({"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"});
    if (name.empty()) return std::nullopt;
    std::string const text = env.text(name).value_or("");
    auto const nodes = slurm_node_list::parse(text);
    if (!nodes)
        throw environment_error(concat({name, " is \"", printable(text.substr(0, 80)),
                                        "\"; expected a list of hosts such as node[01-03,07],gpu1"}));
    return nodes;
}

[[gnu::cold]] DDP_DECL std::optional<job_claim> slurm_claim(environment_view const& env) {
    if ((!env.has("SLURM_JOB_ID") && !env.has("SLURM_PROCID")) || started_by_mpirun(env)) return std::nullopt;
    std::string_view const size_name = env.first_of({"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"});
    auto const size = env.number(size_name, 1, most_ranks, "the number of tasks");
    auto const step = slurm_step(env);
    if (!step) {
        int const tasks = size.value_or(1);
        if (env.has("PMIX_RANK") || env.has("PMI_RANK") || tasks == 1) return std::nullopt;
        throw environment_error(concat(
            {size_name, "=", tasks, " says that this Slurm job has ", tasks,
             " tasks, but this process is none of them: the script or shell itself runs once. Put srun in front ",
             "of the program (or ddprun -n ", tasks, ", on one host); RANK=0 WORLD_SIZE=1 to run alone"}));
    }
    if (!size || !env.has("SLURM_PROCID"))
        throw environment_error(concat({"SLURM_STEP_ID set, but not ", size ? "SLURM_PROCID" : "SLURM_STEP_NUM_TASKS",
                                        ": srun sets both for the program it starts"}));
    job_claim claim;
    claim.size = *size;
    claim.rank = env.known_number("SLURM_PROCID", 0, claim.size - 1, concat({"a task below ", size_name}));
    auto const nodes = slurm_nodes(env);
    if (nodes) {
        claim.hosts = static_cast<int>(nodes->count);
        claim.first_host = nodes->first;
    } else {
        claim.hosts = env.number("SLURM_STEP_NUM_NODES", 1, most_ranks, "the number of nodes of this step").value_or(0);
    }
    if (claim.hosts == 1) claim.local_size = claim.size;
    if (auto const counts = env.text("SLURM_STEP_TASKS_PER_NODE")) {
        int const node = env.number("SLURM_NODEID", 0, most_ranks, "this node's place in the step").value_or(0);
        auto const tasks = slurm_task_counts::parse(*counts, static_cast<std::uint32_t>(node));
        if (!tasks || tasks->tasks != static_cast<std::uint32_t>(claim.size))
            throw environment_error(concat({"SLURM_STEP_TASKS_PER_NODE is \"", printable(counts->substr(0, 80)),
                                            "\"; expected the tasks of each node, ", claim.size, " in all (", size_name,
                                            "), with one for SLURM_NODEID=", node}));
        claim.local_size = static_cast<int>(tasks->here);
    } else if (auto const each = env.number("SLURM_NTASKS_PER_NODE", 1, most_ranks, "the tasks of each node");
               each && claim.hosts != 0) {
        if (static_cast<long long>(*each) * claim.hosts != claim.size)
            throw environment_error(
                concat({"SLURM_NTASKS_PER_NODE=", *each, " on ", claim.hosts, " nodes makes ",
                        static_cast<long long>(*each) * claim.hosts, " tasks, but ", size_name, " is ", claim.size,
                        ". Give srun or sbatch --ntasks-per-node and --nodes, or --ntasks alone"}));
        claim.local_size = each;
    }
    claim.local_rank = local_rank_of(env, "SLURM_LOCALID", claim);
    if (auto const job = env.text("SLURM_JOB_ID")) claim.id = concat({*job, ".", *step});
    claim.said = env.list({"SLURM_PROCID", size_name, "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_STEP_ID",
                           "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST"});
    return claim;
}

/// A process manager's variables, named so.
[[gnu::cold]] DDP_DECL std::optional<job_claim> manager_claim(environment_view const& env, std::string_view rank,
                                                              std::string_view size, std::string_view local_rank,
                                                              std::string_view local_size) {
    if (!env.has(rank) || !env.has(size)) return std::nullopt;
    job_claim claim;
    claim.size = env.known_number(size, 1, most_ranks, "the number of ranks");
    claim.rank = env.known_number(rank, 0, claim.size - 1, concat({"a rank below ", size}));
    claim.local_size = env.number(local_size, 1, claim.size, "the number of ranks on this host");
    claim.local_rank = local_rank_of(env, local_rank, claim);
    if (auto const space = env.first_of({"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID"}); !space.empty())
        claim.id = env.known(space);
    claim.said = env.list({rank, size, local_rank, local_size});
    return claim;
}

[[gnu::cold]] DDP_DECL std::optional<job_claim> open_mpi_claim(environment_view const& env) {
    return manager_claim(env, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                         "OMPI_COMM_WORLD_LOCAL_SIZE");
}

[[gnu::cold]] DDP_DECL std::optional<job_claim> pmix_claim(environment_view const& env) {
    std::string_view const size = env.first_of({"DDP_WORLD_SIZE", "WORLD_SIZE"});
    if (!env.has("PMIX_RANK") || (size.empty() && env.has("PMI_SIZE"))) return std::nullopt;  // PMI says both
    if (size.empty())
        throw environment_error(
            concat({"PMIX_RANK=", printable(env.known("PMIX_RANK")), " says which rank this is, but PMIx has no ",
                    "variable for the number of ranks. Set WORLD_SIZE, MASTER_ADDR and MASTER_PORT for all ranks, or ",
                    "build the program with MPI (<ddp/rendezvous/run_mpi.hpp>, target ddp::mpi)"}));
    return manager_claim(env, "PMIX_RANK", size, "LOCAL_RANK", "LOCAL_WORLD_SIZE");
}

[[gnu::cold]] DDP_DECL std::optional<job_claim> pmi_claim(environment_view const& env) {
    return manager_claim(env, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS");
}

}  // namespace ddp::detail
