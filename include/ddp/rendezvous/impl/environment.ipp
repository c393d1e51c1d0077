/// \file
/// What rendezvous/environment.hpp declares.
#pragma once

#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>

#include <ddp/core/error.hpp>
#include <ddp/core/text.hpp>
#include <ddp/rendezvous/environment.hpp>
#include <ddp/rendezvous/slurm_node_list.hpp>

namespace ddp {

namespace detail {

inline constexpr int most_ranks = 65536;

[[gnu::cold]] DDP_DECL std::optional<std::string> environment_variable(std::string const& name) {
    char const* const value = std::getenv(name.c_str());
    if (value == nullptr) return std::nullopt;
    return std::string(value);
}

[[gnu::cold]] DDP_DECL int environment_number(std::string_view name, std::string_view text, int least, int most,
                                              std::string_view meaning) {
    int value = 0;
    auto const [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc{} || end != text.data() + text.size() || value < least || value > most)
        throw environment_error(concat({name, " is \"", text.substr(0, 80), "\"; expected ", meaning,
                                        ", a whole number from ", least, " to ", most}));
    return value;
}

/// The variables as one source reads them.
class environment_view {
public:
    explicit environment_view(environment_reader get) : get_(get) {}

    [[nodiscard]] std::optional<std::string> text(std::string_view name) const { return get_(std::string(name)); }
    [[nodiscard]] bool has(std::string_view name) const { return text(name).has_value(); }
    [[nodiscard]] std::optional<int> number(std::string_view name, int least, int most,
                                            std::string_view meaning) const {
        auto const value = text(name);
        if (!value) return std::nullopt;
        return environment_number(name, *value, least, most, meaning);
    }
    /// The same of one that is known to be set.
    [[nodiscard]] std::string known(std::string_view name) const { return text(name).value_or(""); }
    [[nodiscard]] int known_number(std::string_view name, int least, int most, std::string_view meaning) const {
        return environment_number(name, known(name), least, most, meaning);
    }
    /// The first of these that is set, "" if none is.
    [[nodiscard]] std::string_view first_of(std::initializer_list<std::string_view> names) const {
        for (std::string_view const name : names)
            if (has(name)) return name;
        return {};
    }
    /// "NAME=value" of those that are set.
    [[nodiscard]] std::string list(std::initializer_list<std::string_view> names) const {
        std::string all;
        for (std::string_view const name : names)
            if (auto const value = text(name))
                all += concat({all.empty() ? "" : " ", name, "=", std::string_view(*value).substr(0, 80)});
        return all;
    }

private:
    environment_reader get_;
};

/// What one source says.
struct job_claim {
    int rank = 0, size = 1;
    std::optional<int> local_rank = {}, local_size = {};
    std::string said = {};  ///< the variables
    std::string id = {};    ///< of the job, or empty
    int hosts = 0;          ///< how many there are, if the source knows; else 0
    std::string first_host = {};
};

/// RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT: those that are set, but not those that are not.
[[gnu::cold]] DDP_DECL environment_error half_of_a_job(environment_view const& env) {
    std::string present, absent;
    for (char const* const name : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
        std::string& list = env.has(name) || env.has(concat({"DDP_", name})) ? present : absent;
        if (!list.empty()) list += ", ";
        list += name;
    }
    return environment_error(
        concat({present, " set, but not ", absent,
                ". Start the program with ddprun or torchrun, set all four, or none to run alone"}));
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
    if (!rank_text && env.has("PMIX_RANK")) return std::nullopt;  // PMIx says the rank, and this the size
    if (!rank_text || !size_text) throw half_of_a_job(env);
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

/// How many ranks a host PET_NPROC_PER_NODE asks torchrun or ddprun for; 1 where it says nothing of the kind.
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

/// Whether mpirun has started this process: inside Slurm, Slurm's variables are then those of mpirun's daemons.
[[gnu::cold]] DDP_DECL bool started_by_mpirun(environment_view const& env) {
    return env.has("OMPI_COMM_WORLD_RANK") || env.has("MPI_LOCALNRANKS");
}

/// The step's number. None in a batch script and in salloc's shell, which Slurm counts as steps of special numbers.
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
        throw environment_error(concat({name, " is \"", std::string_view(text).substr(0, 80),
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
            throw environment_error(concat({"SLURM_STEP_TASKS_PER_NODE is \"", std::string_view(*counts).substr(0, 80),
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
    if (!env.has("PMIX_RANK") || env.has("PMI_SIZE")) return std::nullopt;
    std::string_view const size = env.first_of({"DDP_WORLD_SIZE", "WORLD_SIZE"});
    if (size.empty())
        throw environment_error(
            concat({"PMIX_RANK=", env.text("PMIX_RANK").value_or(""), " says which rank this is, but PMIx has no ",
                    "variable that says of how many. Set WORLD_SIZE, MASTER_ADDR and MASTER_PORT for all ranks, or ",
                    "build the program with MPI (<ddp/rendezvous/run_mpi.hpp>, target ddp::mpi)"}));
    return manager_claim(env, "PMIX_RANK", size, "LOCAL_RANK", "LOCAL_WORLD_SIZE");
}

[[gnu::cold]] DDP_DECL std::optional<job_claim> pmi_claim(environment_view const& env) {
    return manager_claim(env, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS");
}

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

/// A port that ranks of one job agree on without a word, below those that kernels hand out. Neighbouring jobs and their
/// steps have different ones.
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

/// Where the ranks of `j` meet, of which `claim` is source number `source`'s. Returns who says so.
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
    if (!whole && j.size > 1) {  // a job of one meets nobody
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
        if (!slurm && source <= torchrun_source) throw half_of_a_job(env);
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
                           ", which every host takes for itself, but there seem to be several hosts (", claim.said,
                           "): set it to an address of rank 0's host that the others reach"});
    return said.empty() ? "nobody: a job of one" : said;
}

/// The job as source number `source` claims it. `meeting`, if wanted, is who says where.
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

/// Nobody says which rank this is: it is alone, unless that is a mistake.
[[gnu::cold]] DDP_DECL void expect_no_job(environment_view const& env) {
    if (env.has("MASTER_ADDR") || env.has("MASTER_PORT") || env.has("DDP_MASTER_ADDR") || env.has("DDP_MASTER_PORT"))
        throw half_of_a_job(env);
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
                    {line, daemons ? "passed over: mpirun started this, and Slurm mpirun's daemons" : "-", "\n"});
                continue;
            }
            table += concat({line, "rank ", claim->rank, " of ", claim->size});
            if (claim->local_rank) table += concat({", local rank ", *claim->local_rank});
            if (claim->local_size) table += concat({" of ", *claim->local_size, " here"});
            table += concat({" (", claim->said, ")", first ? "" : "  <- counts", "\n"});
            if (first && (first->rank != claim->rank || first->size != claim->size))
                conflicts += concat({"conflict: ", job_sources[source].name, " says rank ", first->rank, " of ",
                                     first->size, ", ", job_sources[i].name, " rank ", claim->rank, " of ", claim->size,
                                     "; the first counts\n"});
            if (!first) {
                first = claim;
                source = i;
            }
        } catch (environment_error const& e) {
            table += concat({line, e.what(), first ? "" : "  <- counts", "\n"});
            if (first) continue;
            return concat({"Who says which rank this is, in order:\n", table});
        }
    }
    std::string text = concat({"Who says which rank this is, in order:\n", table});
    try {
        if (!first) {
            expect_no_job(env);
            return text + "Nobody: the program runs alone.\n";
        }
        std::string meeting;
        job const j = job_of_claim(env, *first, source, &meeting);
        text += concat({"rank ", j.rank, " of ", j.size, "; local rank ", j.local_rank, " of ", j.local_size, "\n"});
        text += concat({"meeting at ", j.master_addr, ":", j.master_port, " (", meeting, ")\n"});
        if (j.port_is_launchers) text += "that port is torchrun's own: rank 0 takes one of the next\n";
        if (!j.id.empty()) text += concat({"job ", j.id, "\n"});
        if (env.has("SLURM_NTASKS_PER_NODE") && env.has("SLURM_STEP_TASKS_PER_NODE") && source == slurm_source &&
            first->local_size != env.number("SLURM_NTASKS_PER_NODE", 1, most_ranks, "the tasks of each node"))
            conflicts += concat({"conflict: ", env.list({"SLURM_NTASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"}),
                                 "; the step's counts\n"});
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
