#include <ddp/comm/cores.hpp>

#include <sched.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "support/catch.hpp"

namespace {

namespace fs = std::filesystem;
using namespace ddp::detail;

/// A directory that stands for the root of a file system, with the files of control groups in it.
class fake_root {
public:
    explicit fake_root(std::string const& groups)
        : at_(fs::temp_directory_path() / ("ddp-cores-" + std::to_string(::getpid()))) {
        write("proc/self/cgroup", groups);
        write("proc/self/mountinfo",
              "30 1 0:1 / /sys/fs/cgroup rw - cgroup2 cgroup rw\n31 1 0:2 / /sys/fs/cgroup/cpu rw - cgroup cgroup "
              "rw,cpu,cpuacct");
    }
    fake_root(fake_root const&) = delete;
    fake_root& operator=(fake_root const&) = delete;
    ~fake_root() { fs::remove_all(at_); }
    fake_root& write(std::string const& path, std::string const& text) {
        fs::create_directories((at_ / path).parent_path());
        std::ofstream(at_ / path) << text << '\n';
        return *this;
    }
    [[nodiscard]] double quota() const { return core_quota(at_.string()); }

private:
    fs::path at_;
};

}  // namespace

TEST_CASE("cores are those of the affinity mask, and travel as text", "[comm]") {
    ::cpu_set_t before, one;
    REQUIRE(::sched_getaffinity(0, sizeof before, &before) == 0);
    core_set const all = cores_of_process();
    CHECK(all.count() == CPU_COUNT(&before));
    int last = CPU_SETSIZE - 1;
    while (!CPU_ISSET(last, &before)) --last;
    CPU_ZERO(&one);
    CPU_SET(last, &one);
    REQUIRE(::sched_setaffinity(0, sizeof one, &one) == 0);
    core_set const bound = cores_of_process();
    REQUIRE(::sched_setaffinity(0, sizeof before, &before) == 0);
    CHECK(bound.count() == 1);
    CHECK(bound.has(last));

    core_set wide;
    for (int const core : {0, 63, 64, 1023}) wide.add(core);
    core_set const back = core_set::parse(wide.text());
    CHECK(back.words == wide.words);
    CHECK(core_set::parse(core_set{}.text()).count() == 0);
    CHECK(core_set::parse("3;rubbish").count() == 2);
    CHECK(core_set::parse("rubbish").count() == 0);

    // Ranks that are bound to one core each have as many together as there are ranks.
    core_set together, second;
    together.add(2), second.add(5);
    together.add(second);
    CHECK(usable_cores(together, 0) == 2);
    CHECK(usable_cores(together, 1.4) == 1);
    CHECK(usable_cores(together, 1.5) == 2);
    CHECK(usable_cores(together, 16) == 2);
    CHECK(usable_cores(together, 0.1) == 1);
}

TEST_CASE("the least quota of a process's control groups counts, of both versions", "[comm]") {
    std::string const unified = "sys/fs/cgroup", old = "sys/fs/cgroup/cpu";
    CHECK(fake_root("0::/a/b").quota() == 0);
    CHECK(fake_root("0::/a/b").write(unified + "/a/b/cpu.max", "max 100000").quota() == 0);
    CHECK(fake_root("0::/a/b").write(unified + "/a/b/cpu.max", "150000 100000").quota() == 1.5);
    CHECK(fake_root("0::/a/b")
              .write(unified + "/a/b/cpu.max", "400000 100000")
              .write(unified + "/a/cpu.max", "200000 100000")
              .quota() == 2);
    // In a container the path is the host's, and the group's files are at the top.
    CHECK(fake_root("0::/docker/0123").write(unified + "/cpu.max", "300000 100000").quota() == 3);
    CHECK(fake_root("4:memory:/a\n2:cpu,cpuacct:/a\n1:name=systemd:/b\n0::/")
              .write(old + "/a/cpu.cfs_quota_us", "50000")
              .write(old + "/a/cpu.cfs_period_us", "100000")
              .quota() == 0.5);
    CHECK(fake_root("2:cpuset:/a\n0::/").write(old + "/a/cpu.cfs_quota_us", "50000").quota() == 0);
    CHECK(fake_root("2:cpu:/a")
              .write(old + "/a/cpu.cfs_quota_us", "-1")
              .write(old + "/a/cpu.cfs_period_us", "100000")
              .quota() == 0);
}
