// In which order a checkpoint comes to be on the disk: nothing has a name before what it names is there.
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <map>
#include <mutex>
#include <regex>
#include <string>
#include <vector>

#include "checkpoint/training.hpp"
#include "support/catch.hpp"

namespace {

std::mutex lock;
std::string watched;                         // a directory; empty: nothing is noted
std::vector<std::string> calls;              // there, in order
std::map<std::string, std::size_t> flushed;  // bytes of files when they were flushed

/// Beneath the directory, with the names that files have for a while as NAME~.
std::string shortened(std::string const& path) {
    static std::regex const temporary("\\.[0-9]+\\.[0-9]+\\.tmp$"), zeros("step-0+");
    if (path == watched || path == watched + "/") return ".";
    std::string const rest = path.substr(watched.size() + 1);
    return std::regex_replace(
        std::regex_replace(rest.ends_with('/') ? rest.substr(0, rest.size() - 1) : rest, temporary, "~"), zeros,
        "step-");
}
bool is_watched(std::string const& path) {
    return !watched.empty() && path.starts_with(watched);
}

}  // namespace

// The program's own come before the C library's.
extern "C" int fsync(int descriptor) {
    {
        std::lock_guard const guard(lock);
        char path[4096];
        ssize_t const size = ::readlink(("/proc/self/fd/" + std::to_string(descriptor)).c_str(), path, sizeof path);
        std::string const name(path, size > 0 ? static_cast<std::size_t>(size) : 0);
        struct stat about{};
        if (is_watched(name) && ::fstat(descriptor, &about) == 0) {
            calls.push_back("fsync " + shortened(name));
            if (S_ISREG(about.st_mode)) flushed[shortened(name)] = static_cast<std::size_t>(about.st_size);
        }
    }
    return static_cast<int>(::syscall(SYS_fsync, descriptor));
}
extern "C" int rename(char const* from, char const* to) noexcept {
    {
        std::lock_guard const guard(lock);
        if (is_watched(from)) calls.push_back("rename " + shortened(from) + " " + shortened(to));
    }
    return static_cast<int>(::syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0));
}
extern "C" int unlink(char const* path) noexcept {
    {
        std::lock_guard const guard(lock);
        if (is_watched(path)) calls.push_back("unlink " + shortened(path));
    }
    return static_cast<int>(::syscall(SYS_unlinkat, AT_FDCWD, path, 0));
}

using namespace ddp;
using namespace ddp::test;

TEST_CASE(
    "files are flushed before their names, the directory before its name, the latest comes last, then old ones go",
    "[checkpoint]") {
    int const ranks = GENERATE(1, 3);
    ::test::scratch_directory const scratch;
    std::string const kept_in = (std::filesystem::canonical(scratch.path()) / "kept").string();
    run_ranks(
        ranks,
        [&](auto& comm) {
            kept_training one(comm, {.options = options_of(true, false)});
            checkpoints kept(kept_in, {.keep = 1});
            kept.save(one.go_to(2).trainer);
            one.go_to(4);
            if (comm.rank() == 0) {
                std::lock_guard const guard(lock);
                calls.clear(), flushed.clear();
                watched = kept_in;
            }
            kept.save(one.trainer);
            return 0;
        },
        patient());
    watched.clear();

    std::string const dir = "step-4.tmp";
    std::vector<std::string> const end = {"fsync " + dir + "/manifest.json~",
                                          "rename " + dir + "/manifest.json~ " + dir + "/manifest.json",
                                          "fsync " + dir,
                                          "fsync " + dir,
                                          "rename " + dir + " step-4",
                                          "fsync .",
                                          "fsync latest~",
                                          "rename latest~ latest",
                                          "fsync .",
                                          "rename step-2 step-2.tmp"};
    auto const last = std::find(calls.begin(), calls.end(), end.front());
    CAPTURE(calls);
    std::size_t shards = 0;
    for (auto call = calls.begin(); call != last; ++call)
        if (call->starts_with("rename ")) {
            std::string const shard = call->substr(7, call->find('~') - 7);
            REQUIRE(*call == "rename " + shard + "~ " + shard);
            REQUIRE(std::find(calls.begin(), call, "fsync " + shard + "~") != call);
            REQUIRE(std::find(call, last, "fsync " + dir) != last);
            REQUIRE(flushed.at(shard + "~") ==
                    std::filesystem::file_size(kept_in + "/step-000000000004" + shard.substr(dir.size())));
            ++shards;
        } else {
            REQUIRE(call->starts_with("fsync " + dir));
        }
    REQUIRE(shards == static_cast<std::size_t>(ranks));
    REQUIRE(static_cast<std::size_t>(calls.end() - last) == end.size() + static_cast<std::size_t>(ranks) + 1);
    REQUIRE(std::equal(end.begin(), end.end(), last));
    REQUIRE(flushed.at(dir + "/manifest.json~") ==
            std::filesystem::file_size(kept_in + "/step-000000000004/manifest.json"));
    REQUIRE(flushed.at("latest~") == std::filesystem::file_size(kept_in + "/latest"));
    for (auto call = last + static_cast<std::ptrdiff_t>(end.size()); call != calls.end(); ++call)
        REQUIRE(call->starts_with("unlink step-2.tmp/"));
}
