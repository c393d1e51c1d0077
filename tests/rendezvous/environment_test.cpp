#include <ddp/core/error.hpp>
#include <ddp/rendezvous/environment.hpp>

#include <map>
#include <optional>
#include <string>
#include <utility>

#include "support/catch.hpp"

namespace {

using variables = std::map<std::string, std::string>;

auto getter(variables const& all) {
    return [&all](std::string const& name) -> std::optional<std::string> {
        auto const at = all.find(name);
        if (at == all.end()) return std::nullopt;
        return at->second;
    };
}

std::string complaint(variables const& all) {
    try {
        static_cast<void>(ddp::job_from_environment(getter(all)));
    } catch (ddp::environment_error const& e) {
        return e.what();
    }
    return "";
}

variables const whole{
    {"RANK", "2"},       {"WORLD_SIZE", "4"},      {"MASTER_ADDR", "10.0.0.1"}, {"MASTER_PORT", "29501"},
    {"LOCAL_RANK", "0"}, {"LOCAL_WORLD_SIZE", "2"}};

variables with(std::string const& name, std::string const& value) {
    variables all = whole;
    all[name] = value;
    return all;
}
variables less(variables all, std::string const& name) {
    all.erase(name);
    return all;
}
variables without(std::string const& name) {
    return less(whole, name);
}
variables plus(variables all, variables const& more) {
    for (auto const& [name, value] : more) all[name] = value;
    return all;
}

// What srun sets for task 2 of 5 on three nodes.
variables const slurm{{"SLURM_JOB_ID", "4711"},
                      {"SLURM_STEP_ID", "3"},
                      {"SLURM_PROCID", "2"},
                      {"SLURM_STEP_NUM_TASKS", "5"},
                      {"SLURM_NTASKS", "5"},
                      {"SLURM_LOCALID", "0"},
                      {"SLURM_NODEID", "1"},
                      {"SLURM_STEP_TASKS_PER_NODE", "2(x2),1"},
                      {"SLURM_STEP_NODELIST", "node[08-10]"}};

}  // namespace

TEST_CASE("a whole environment is a job, an empty one is none", "[rendezvous]") {
    CHECK_FALSE(ddp::job_from_environment(getter({})).has_value());
    CHECK_FALSE(ddp::job_from_environment(getter({{"PATH", "/bin"}})).has_value());
    auto const job = ddp::job_from_environment(getter(whole));
    REQUIRE(job.has_value());
    CHECK(job->rank == 2);
    CHECK(job->size == 4);
    CHECK(job->local_rank == 0);
    CHECK(job->local_size == 2);
    CHECK(job->master_addr == "10.0.0.1");
    CHECK(job->master_port == 29501);
    CHECK(ddp::job_from_environment(getter(without("LOCAL_RANK"))).has_value());
    CHECK(ddp::job_from_environment(getter({{"RANK", "0"}, {"WORLD_SIZE", "1"}}))->size == 1);
}

TEST_CASE("torchrun's variables say that its agent has the port, and where all ranks are", "[rendezvous]") {
    variables all = whole;
    all["TORCHELASTIC_RUN_ID"] = "a-b";
    all["TORCHELASTIC_RESTART_COUNT"] = "2";
    all["TORCHELASTIC_USE_AGENT_STORE"] = "True";
    auto job = ddp::job_from_environment(getter(all));
    CHECK(job->id == "a-b/2");
    CHECK(job->port_is_launchers);
    CHECK(job->master_addr == "10.0.0.1");  // two hosts
    CHECK(job->several_hosts);
    all["TORCHELASTIC_USE_AGENT_STORE"] = "False";
    all["LOCAL_WORLD_SIZE"] = "4";
    job = ddp::job_from_environment(getter(all));
    CHECK_FALSE(job->port_is_launchers);
    CHECK(job->master_addr == "127.0.0.1");
}

TEST_CASE("srun alone is enough: rank, size, place on the host, meeting point and name of the job", "[rendezvous]") {
    auto job = ddp::job_from_environment(getter(slurm));
    REQUIRE(job.has_value());
    CHECK((job->rank == 2 && job->size == 5));
    CHECK((job->local_rank == 0 && job->local_size == 2));
    CHECK(job->master_addr == "node08");
    CHECK(job->several_hosts);
    CHECK(job->id == "4711.3");
    CHECK(job->source.find("Slurm (SLURM_PROCID=2") == 0);
    CHECK(job->advice ==
          "Slurm's node list says that rank 0 is on node08. If that name is not its address on the network of the job, "
          "set MASTER_ADDR and MASTER_PORT");
    CHECK(ddp::detail::explain_job(getter(slurm))
              .find(" (the first host of SLURM_STEP_NODELIST=node[08-10], port made of "
                    "job 4711.3)\n") != std::string::npos);
    auto const port = job->master_port;
    CHECK((port >= 15000 && port < 31000));  // below what kernels hand out
    CHECK(ddp::job_from_environment(getter(plus(slurm, {{"SLURM_STEP_ID", "4"}})))->master_port != port);
    CHECK(ddp::job_from_environment(getter(plus(slurm, {{"SLURM_JOB_ID", "4712"}})))->master_port != port);

    // One node: loopback. Another step than the batch script's size; what the user says about the meeting point counts.
    variables one = plus(slurm, {{"SLURM_STEP_NODELIST", "node08"},
                                 {"SLURM_STEP_TASKS_PER_NODE", "5"},
                                 {"SLURM_NODEID", "0"},
                                 {"SLURM_LOCALID", "2"},
                                 {"SLURM_NTASKS", "40"}});
    job = ddp::job_from_environment(getter(one));
    CHECK((job->master_addr == "127.0.0.1" && job->local_size == 5 && job->local_rank == 2 && job->advice.empty()));
    CHECK_FALSE(job->several_hosts);
    job = ddp::job_from_environment(getter(plus(slurm, {{"MASTER_ADDR", "10.1.1.1"}})));
    CHECK((job->master_addr == "10.1.1.1" && job->master_port == port));
    job = ddp::job_from_environment(getter(plus(slurm, {{"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "4000"}})));
    CHECK((job->master_addr == "127.0.0.1" && job->master_port == 4000));
    CHECK(job->advice.find("every host resolves to itself") != std::string::npos);
    // Ranks handed on by hand, as batch scripts do, still meet where Slurm says.
    job = ddp::job_from_environment(getter(plus(slurm, {{"RANK", "2"}, {"WORLD_SIZE", "5"}})));
    CHECK((job->master_addr == "node08" && job->master_port == port));
}

TEST_CASE("one order of sources: DDP_, torchrun's, Slurm, Open MPI, PMIx, PMI", "[rendezvous]") {
    variables all = plus(slurm, {{"DDP_RANK", "1"},
                                 {"DDP_WORLD_SIZE", "9"},
                                 {"RANK", "2"},
                                 {"WORLD_SIZE", "8"},
                                 {"MASTER_ADDR", "127.0.0.1"},
                                 {"MASTER_PORT", "4000"},
                                 {"PMIX_RANK", "4"},
                                 {"PMI_RANK", "5"},
                                 {"PMI_SIZE", "6"},
                                 {"SLURM_PROCID", "3"}});
    auto const found = [&] {
        auto const job = ddp::job_from_environment(getter(all));
        REQUIRE(job.has_value());
        return std::pair(job->rank, job->size);
    };
    CHECK(found() == std::pair(1, 9));
    all.erase("DDP_RANK");
    CHECK(complaint(all).empty());  // PMIx may need a size; RANK has its own
    CHECK(found() == std::pair(2, 8));
    all.erase("DDP_WORLD_SIZE");
    std::string const explained = ddp::detail::explain_job(getter(all));
    CAPTURE(explained);
    CHECK(explained.find("Sources of this process's rank, in order:\n  DDP_RANK: ") == 0);
    CHECK(explained.find("conflict: RANK says rank 2 of 8, Slurm rank 3 of 5; the first is used") != std::string::npos);
    CHECK(explained.find("rank 2 of 8; local rank 0 of 1\nmeeting at 127.0.0.1:4000 (MASTER_ADDR=127.0.0.1 ") !=
          std::string::npos);
    auto differing = all;  // the same rank, but not all else
    for (auto const& [name, value] : {std::pair{"SLURM_PROCID", "2"},
                                      {"SLURM_NTASKS", "8"},
                                      {"SLURM_STEP_NUM_TASKS", "8"},
                                      {"SLURM_LOCALID", "1"},
                                      {"SLURM_STEP_TASKS_PER_NODE", "3,2,3"},
                                      {"LOCAL_RANK", "0"},
                                      {"DDP_MASTER_ADDR", "127.0.0.3"}})
        differing[name] = value;
    std::string const others = ddp::detail::explain_job(getter(differing));
    CAPTURE(others);
    CHECK(others.find("conflict: RANK says local rank 0, Slurm 1; the first is used\n") != std::string::npos);
    CHECK(others.find("conflict: DDP_MASTER_ADDR=127.0.0.3 MASTER_ADDR=127.0.0.1; the first is used\n") !=
          std::string::npos);
    all.erase("RANK");
    all.erase("WORLD_SIZE");
    CHECK(found() == std::pair(3, 5));
    all.insert({{"OMPI_COMM_WORLD_RANK", "6"}, {"OMPI_COMM_WORLD_SIZE", "7"}});
    CHECK(found() == std::pair(6, 7));  // Slurm's are those of mpirun's daemons
    CHECK(ddp::detail::explain_job(getter(all)).find("ignored: mpirun has started this process") != std::string::npos);
    for (std::string const name : {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "SLURM_PROCID", "SLURM_JOB_ID"})
        all.erase(name);
    CHECK(found() == std::pair(5, 6));  // PMI's, since PMIx has no size
    all["WORLD_SIZE"] = "11";
    CHECK(found() == std::pair(4, 11));
    all.erase("WORLD_SIZE");
    all.erase("PMI_SIZE");
    CHECK(complaint(all).find(
              "PMIX_RANK=4 says which rank this is, but PMIx has no variable for the number of ranks. Set "
              "WORLD_SIZE, MASTER_ADDR and MASTER_PORT for all ranks") != std::string::npos);
    all.insert({{"WORLD_SIZE", "12"}, {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "3"}});
    CHECK(found() == std::pair(4, 12));
    auto const job = ddp::job_from_environment(getter(all));
    CHECK(std::pair(job->local_rank, job->local_size) == std::pair(1, 3));
}

TEST_CASE("each variable of DDP_ comes before the usual one", "[rendezvous]") {
    auto const job = ddp::job_from_environment(getter(plus(whole, {{"DDP_RANK", "5"},
                                                                   {"DDP_WORLD_SIZE", "6"},
                                                                   {"DDP_LOCAL_RANK", "2"},
                                                                   {"DDP_LOCAL_WORLD_SIZE", "3"},
                                                                   {"DDP_MASTER_ADDR", "10.0.0.7"},
                                                                   {"DDP_MASTER_PORT", "4321"}})));
    REQUIRE(job.has_value());
    CHECK(std::pair(job->rank, job->size) == std::pair(5, 6));
    CHECK(std::pair(job->local_rank, job->local_size) == std::pair(2, 3));
    CHECK(job->master_addr == "10.0.0.7");
    CHECK(job->master_port == 4321);
}

TEST_CASE("what variables say is printed without control characters", "[rendezvous]") {
    std::string const harm = "\x1b]0;x\x07\r";
    for (auto const& [name, base] : {std::pair{"RANK", whole},
                                     {"MASTER_PORT", whole},
                                     {"LOCAL_WORLD_SIZE", whole},
                                     {"SLURM_PROCID", slurm},
                                     {"SLURM_STEP_NODELIST", slurm},
                                     {"SLURM_STEP_TASKS_PER_NODE", slurm}}) {
        CAPTURE(name);
        std::string const said = complaint(plus(base, {{name, harm}}));
        CHECK(said.find(name) != std::string::npos);
        CHECK(said.find_first_of("\x1b\x07\r") == std::string::npos);
    }
    CHECK(complaint({{"PMIX_RANK", harm}}).find_first_of("\x1b\x07\r") == std::string::npos);
    std::string const explained =
        ddp::detail::explain_job(getter(plus(whole, {{"MASTER_ADDR", harm}, {"DDP_JOB_ID", harm}})));
    CHECK(explained.find_first_of("\x1b\x07\r") == std::string::npos);
}

TEST_CASE("ranks of mpirun meet over loopback on one host, and need a meeting point on several", "[rendezvous]") {
    variables one{{"OMPI_COMM_WORLD_RANK", "1"},
                  {"OMPI_COMM_WORLD_SIZE", "2"},
                  {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                  {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                  {"PMIX_NAMESPACE", "job-17"}};
    auto const job = ddp::job_from_environment(getter(one));
    CHECK((job->rank == 1 && job->master_addr == "127.0.0.1" && job->id == "job-17" && job->master_port != 29500));
    one["OMPI_COMM_WORLD_SIZE"] = "4";
    CHECK(complaint(one).find("but no variable says where rank 0 is: ranks on several hosts need MASTER_ADDR") !=
          std::string::npos);
    one.insert({{"MASTER_ADDR", "10.0.0.1"}, {"MASTER_PORT", "4000"}});
    CHECK(ddp::job_from_environment(getter(one))->master_addr == "10.0.0.1");
    auto const mpich = ddp::job_from_environment(
        getter({{"PMI_RANK", "1"}, {"PMI_SIZE", "3"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "3"}}));
    CHECK((mpich->rank == 1 && mpich->local_size == 3 && mpich->master_addr == "127.0.0.1"));
}

TEST_CASE("what asks for tcp by name, and what a program with MPI leaves to MPI", "[rendezvous]") {
    CHECK(ddp::detail::job_is_named(getter(whole)));
    CHECK(ddp::detail::job_is_named(getter({{"DDP_RANK", "0"}})));
    CHECK(ddp::detail::job_is_named(getter({{"MASTER_ADDR", "a"}})));
    CHECK_FALSE(ddp::detail::job_is_named(getter({})));
    CHECK_FALSE(ddp::detail::job_is_named(getter(slurm)));
    CHECK_FALSE(ddp::detail::job_is_named(getter({{"OMPI_COMM_WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}})));
}

TEST_CASE("each known mistake of launching has a message of its own", "[rendezvous]") {
    struct mistake {
        variables all;
        std::string words;
    };
    variables const batch{{"SLURM_JOB_ID", "7"}, {"SLURM_NTASKS", "8"}, {"SLURM_PROCID", "0"}};
    variables const unsettled = less(slurm, "SLURM_STEP_TASKS_PER_NODE");
    for (auto const& [all, words] :
         {mistake{batch, "Put srun in front of the program"},
          mistake{plus(batch, {{"SLURM_STEP_ID", "4294967291"}}), "Put srun in front"},  // the batch script's own step
          mistake{plus(slurm, {{"SLURM_STEP_TASKS_PER_NODE", "2(x3)"}}), "SLURM_STEP_TASKS_PER_NODE is \"2(x3)\""},
          mistake{plus(unsettled, {{"SLURM_NTASKS_PER_NODE", "2"}}),
                  "SLURM_NTASKS_PER_NODE=2 on 3 nodes makes 6 tasks"},
          mistake{plus(slurm, {{"SLURM_STEP_NODELIST", "node[08-"}}), "SLURM_STEP_NODELIST is \"node[08-\""},
          mistake{plus(slurm, {{"SLURM_PROCID", "5"}}),
                  "SLURM_PROCID is \"5\"; expected a task below SLURM_STEP_NUM_TASKS"},
          mistake{less(slurm, "SLURM_PROCID"), "SLURM_STEP_ID set, but not SLURM_PROCID"},
          mistake{less(slurm, "SLURM_STEP_NODELIST"), "not on which nodes"},
          mistake{with("LOCAL_WORLD_SIZE", "8"), "count the ranks of all hosts"},
          mistake{plus(less(less(whole, "LOCAL_RANK"), "LOCAL_WORLD_SIZE"), {{"PET_NPROC_PER_NODE", "4"}}),
                  "count hosts. Put ddprun in front"},
          mistake{{{"PET_NNODES", "2"}, {"PET_NPROC_PER_NODE", "auto"}},
                  "describe a job that torchrun or ddprun has yet to start: put ddprun in front of the program"},
          mistake{{{"MASTER_PORT", "4000"}}, "MASTER_PORT set, but not RANK, WORLD_SIZE, MASTER_ADDR"}}) {
        std::string const text = complaint(all);
        CAPTURE(words, text);
        CHECK(text.find("DDP-E101") == 0);
        CHECK(text.find(words) != std::string::npos);
        CHECK(ddp::detail::explain_job(getter(all)).find(words) != std::string::npos);
    }
    CHECK_FALSE(ddp::job_from_environment(getter(plus(batch, {{"SLURM_NTASKS", "1"}}))).has_value());
    CHECK_FALSE(ddp::job_from_environment(getter({{"PET_NNODES", "1"}, {"PET_NPROC_PER_NODE", "auto"}})).has_value());
    CHECK(ddp::job_from_environment(getter(with("MASTER_ADDR", "localhost")))->advice.find("several hosts") !=
          std::string::npos);
    CHECK(complaint(with("PET_NPROC_PER_NODE", "2")).empty());  // torchrun leaves it there for its workers
}

TEST_CASE("half an environment is named as it was set, with the launcher that says more", "[rendezvous]") {
    variables const there{{"MASTER_ADDR", "10.0.0.1"}, {"MASTER_PORT", "4000"}};
    for (auto const& [all, words] :
         {std::pair(variables{{"DDP_RANK", "0"}}, "DDP_RANK set, but not DDP_WORLD_SIZE, MASTER_ADDR, MASTER_PORT. "),
          std::pair(plus(there, {{"DDP_RANK", "0"}, {"WORLD_SIZE", "2"}}),
                    "DDP_RANK, MASTER_ADDR, MASTER_PORT set, but not DDP_WORLD_SIZE. "),
          std::pair(variables{{"DDP_RANK", "0"}, {"DDP_WORLD_SIZE", "2"}, {"DDP_MASTER_PORT", "4000"}},
                    "DDP_RANK, DDP_WORLD_SIZE, DDP_MASTER_PORT set, but not MASTER_ADDR. "),
          std::pair(variables{{"DDP_MASTER_ADDR", "a"}},
                    "DDP_MASTER_ADDR set, but not RANK, WORLD_SIZE, MASTER_PORT. "),
          std::pair(plus(slurm, plus(there, {{"WORLD_SIZE", "5"}})),
                    "but not RANK. Slurm says that this is rank 2 of 5: unset WORLD_SIZE for that to take effect"),
          std::pair(plus(slurm, {{"RANK", "0"}, {"WORLD_SIZE", "5"}}),
                    "but not MASTER_ADDR, MASTER_PORT. Slurm says that this is rank 2 of 5: unset RANK, WORLD_SIZE "),
          std::pair(variables{{"RANK", "0"}, {"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "2"}},
                    "Open MPI says that this is rank 1 of 2: unset RANK for that to take effect")}) {
        std::string const text = complaint(all);
        CAPTURE(words, text);
        CHECK(text.find(words) != std::string::npos);
        CHECK(text.find(" set, but not ") == text.rfind(" set, but not "));
    }
}

TEST_CASE("half an environment is an error that names what is missing", "[rendezvous]") {
    for (std::string const name : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
        std::string const text = complaint(without(name));
        CAPTURE(name, text);
        CHECK(text.find("but not " + name) != std::string::npos);
    }
}

TEST_CASE("a variable that makes no sense is named with its value and what was expected", "[rendezvous]") {
    struct sample {
        std::string name, value;
    };
    for (auto const& [name, value] :
         {sample{"RANK", "4"}, sample{"RANK", "-1"}, sample{"RANK", "two"}, sample{"RANK", ""}, sample{"RANK", "1 "},
          sample{"RANK", "99999999999"}, sample{"WORLD_SIZE", "0"}, sample{"WORLD_SIZE", "4x"},
          sample{"WORLD_SIZE", "-4"}, sample{"MASTER_PORT", "0"}, sample{"MASTER_PORT", "65536"},
          sample{"MASTER_PORT", "http"}, sample{"LOCAL_RANK", "2"}, sample{"LOCAL_WORLD_SIZE", "5"}}) {
        std::string const text = complaint(with(name, value));
        CAPTURE(name, value, text);
        CHECK(text.find(name + " is \"" + value + "\"") != std::string::npos);
        CHECK(text.find("expected") != std::string::npos);
        CHECK(text.find("DDP-E101") == 0);
    }
    CHECK(complaint(with("MASTER_ADDR", "")).find("MASTER_ADDR is empty; expected the address of rank 0's host") !=
          std::string::npos);
    std::string const explained = ddp::detail::explain_job(getter(plus(slurm, {{"SLURM_NTASKS_PER_NODE", "3"}})));
    CAPTURE(explained);
    CHECK(explained.find("conflict: SLURM_NTASKS_PER_NODE=3 SLURM_STEP_TASKS_PER_NODE=2(x2),1; what the step says "
                         "counts\n") != std::string::npos);
}
