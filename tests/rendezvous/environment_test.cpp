#include <ddp/core/error.hpp>
#include <ddp/rendezvous/environment.hpp>

#include <map>
#include <optional>
#include <string>

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
variables without(std::string const& name) {
    variables all = whole;
    all.erase(name);
    return all;
}

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
    all["TORCHELASTIC_USE_AGENT_STORE"] = "False";
    all["LOCAL_WORLD_SIZE"] = "4";
    job = ddp::job_from_environment(getter(all));
    CHECK_FALSE(job->port_is_launchers);
    CHECK(job->master_addr == "127.0.0.1");
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
    CHECK(complaint(with("MASTER_ADDR", "")).find("MASTER_ADDR") != std::string::npos);
}
