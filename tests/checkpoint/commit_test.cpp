// In which order a checkpoint comes to be on the disk: nothing has a name before what it names is there.
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <map>
#include <mutex>
#include <regex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "checkpoint/training.hpp"
#include "support/catch.hpp"
#include "support/thrown_by.hpp"

namespace {

std::mutex lock;
std::string watched;                         // a directory; empty: nothing is noted
std::vector<std::string> calls;              // there, in order
std::set<std::thread::id> callers;           // of them
std::map<std::string, std::size_t> flushed;  // bytes of files when they were flushed
std::string failing;                         // the call that fails

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
/// Notes it. Whether it is to fail.
bool fails(std::string call) {
    if (call == failing) errno = EIO;
    calls.push_back(std::move(call));
    callers.insert(std::this_thread::get_id());
    return calls.back() == failing;
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
            if (fails("fsync " + shortened(name))) return -1;
            if (S_ISREG(about.st_mode)) flushed[shortened(name)] = static_cast<std::size_t>(about.st_size);
        }
    }
    return static_cast<int>(::syscall(SYS_fsync, descriptor));
}
extern "C" int rename(char const* from, char const* to) noexcept {
    {
        std::lock_guard const guard(lock);
        if (is_watched(from) && fails("rename " + shortened(from) + " " + shortened(to))) return -1;
    }
    return static_cast<int>(::syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0));
}
extern "C" int unlink(char const* path) noexcept {
    {
        std::lock_guard const guard(lock);
        if (is_watched(path) && fails("unlink " + shortened(path))) return -1;
    }
    return static_cast<int>(::syscall(SYS_unlinkat, AT_FDCWD, path, 0));
}

using namespace ddp;
using namespace ddp::test;

TEST_CASE(
    "files are flushed before their names, the directory before its name, the latest comes last, then old ones go",
    "[checkpoint]") {
    int const ranks = GENERATE(1, 3);
    bool const background = GENERATE(false, true);
    CAPTURE(ranks, background);
    ::test::scratch_directory const scratch;
    std::string const kept_in = (std::filesystem::canonical(scratch.path()) / "kept").string();
    std::set<std::thread::id> trainers;
    auto const latest = run_ranks(
        ranks,
        [&](auto& comm) {
            kept_training one(comm, {.options = options_of(true, false)});
            checkpoints kept(kept_in, {.keep = 1, .background = background});
            kept.save(one.go_to(2).trainer);
            kept.wait();
            one.go_to(4);
            if (comm.rank() == 0) {
                std::lock_guard const guard(lock);
                calls.clear(), flushed.clear(), callers.clear();
                watched = kept_in;
            }
            barrier(comm);
            {
                std::lock_guard const guard(lock);
                trainers.insert(std::this_thread::get_id());
            }
            kept.save(one.trainer);
            std::string const named = content_of(kept_in + "/latest");
            while (background && !kept.poll()) std::this_thread::yield();
            kept.wait();
            return named;
        },
        patient());
    watched.clear();
    REQUIRE(latest[0] == (background ? "step-000000000002\n" : "step-000000000004\n"));
    for (std::thread::id const one : callers) REQUIRE(trainers.contains(one) != background);  // training does not wait

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

TEST_CASE("the directory's own name is on the disk before anything in it", "[checkpoint]") {
    ::test::scratch_directory const scratch;
    watched = std::filesystem::canonical(scratch.path()).string();
    calls.clear(), flushed.clear();
    run_ranks(
        1,
        [&](auto& comm) {
            kept_training one(comm, {.options = options_of(true, false)});
            checkpoints kept(watched + "/kept");
            kept.save(one.go_to(2).trainer);
            kept.save(one.go_to(3).trainer);
            return 0;
        },
        patient());
    std::string const parent = std::exchange(watched, std::string());
    CAPTURE(calls);
    REQUIRE(calls.front() == "fsync .");  // of the parent
    REQUIRE(std::count(calls.begin(), calls.end(), "fsync .") == 1);
}

TEST_CASE("what fails while a checkpoint becomes one is named, with the system's reason", "[checkpoint]") {
    ::test::scratch_directory const scratch;
    std::string const kept_in = (std::filesystem::canonical(scratch.path()) / "kept").string();
    ddp::detail::checkpoint_directory const directory(kept_in);
    auto const watching = [&](std::string const& call, auto const& f) {
        watched = kept_in, failing = call;
        std::string const said = thrown_by(f);
        watched.clear(), failing.clear();
        return said;
    };
    auto const committing = [&](std::uint64_t step, std::string const& call, std::uint64_t more_bytes = 0) {
        std::uint8_t const byte = 1;
        directory.begin(step);
        ddp::detail::checkpoint_manifest about;
        about.step = step, about.ranks = 1;
        about.shards = {directory.write_shard(step, 0, 1, {{"model/a", element_type::u8, {1}, bytes_of(byte)}}, {})};
        about.shards[0].bytes += more_bytes;
        std::string const said = watching(call, [&] { directory.commit(about); });
        directory.abandon(step);
        return said;
    };
    std::string const file = "DDP-E301 file: " + kept_in, failed = ": Input/output error";
    REQUIRE(committing(1, "") == "");
    REQUIRE(committing(2, "", 1) ==
            file +
                "/step-000000000002.tmp/shard-00000-of-00001.safetensors: is not what that rank wrote; do all ranks "
                "see the same directory?");
    REQUIRE(committing(2, "fsync step-2.tmp") ==
            file + "/step-000000000002.tmp/manifest.json: is in place, but its directory cannot be flushed" + failed);
    REQUIRE(committing(2, "rename step-2.tmp step-2") ==
            file + "/step-000000000002.tmp: cannot be put in place" + failed);
    REQUIRE(names_in(kept_in) == std::vector<std::string>{"latest", "step-000000000001"});
    REQUIRE(committing(2, "fsync .") == file + ": cannot be flushed" + failed);
    REQUIRE(content_of(kept_in + "/latest") == "step-000000000001\n");
    REQUIRE(committing(2, "") == "");
    std::string said;
    (void)watching("rename step-1 step-1.tmp", [&] { said = directory.remove_older(2, 1); });
    REQUIRE(said == file + "/step-000000000001: cannot be removed" + failed);
    (void)watching("unlink step-1.tmp/manifest.json", [&] { said = directory.remove_older(2, 1); });
    REQUIRE(said == file + "/step-000000000001.tmp/manifest.json: cannot be removed" + failed);
}
