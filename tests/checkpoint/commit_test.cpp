// In which order a checkpoint comes to be on the disk: nothing has a name before what it names is there. And what a process
// leaves that is killed at any of these calls.
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <map>
#include <mutex>
#include <optional>
#include <regex>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "checkpoint/disk_calls.hpp"
#include "checkpoint/training.hpp"
#include "support/catch.hpp"
#include "support/on_ranks.hpp"
#include "support/thrown_by.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

std::mutex lock;
std::vector<std::string> calls;              // there, in order
std::set<std::thread::id> callers;           // of them
std::map<std::string, std::size_t> flushed;  // bytes of files when they were flushed
std::string failing;                         // the call that fails
std::atomic<bool> flushes = true;            // a kill takes nothing from what the system has not yet written
std::atomic<bool> exchanges = true;          // whether the file system can exchange two names

/// Beneath the directory, with the names that files have for a while as NAME~.
std::string shortened(std::string const& path) {
    static std::regex const temporary("\\.[0-9]+\\.[0-9]+\\.tmp$"), zeros("step-0+");
    if (path == watched || path == watched + "/") return ".";
    std::string const rest = path.substr(watched.size() + 1);
    return std::regex_replace(
        std::regex_replace(rest.ends_with('/') ? rest.substr(0, rest.size() - 1) : rest, temporary, "~"), zeros,
        "step-");
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
extern "C" long syscall(long number, ...) noexcept {
    va_list all;
    va_start(all, number);
    long with[6];
    for (long& one : with) one = va_arg(all, long);
    va_end(all);
    if (number == SYS_renameat2 && with[4] != 0 && !exchanges) {
        errno = EINVAL;
        return -1;
    }
    // No guard of a static: who waits for one calls this function.
    static std::atomic<long (*)(long, ...)> known = nullptr;
    auto own = known.load();
    if (own == nullptr) known = own = reinterpret_cast<long (*)(long, ...)>(::dlsym(RTLD_NEXT, "syscall"));
    return own(number, with[0], with[1], with[2], with[3], with[4], with[5]);
}
extern "C" int fsync(int descriptor) {
    if (mortal && is_last(path_of(descriptor))) die();
    if (!flushes) return 0;
    {
        std::lock_guard const guard(lock);
        std::string const name = path_of(descriptor);
        struct stat about{};
        if (is_watched(name) && ::fstat(descriptor, &about) == 0) {
            if (fails("fsync " + shortened(name))) return -1;
            if (S_ISREG(about.st_mode)) flushed[shortened(name)] = static_cast<std::size_t>(about.st_size);
        }
    }
    return static_cast<int>(::syscall(SYS_fsync, descriptor));
}
extern "C" int rename(char const* from, char const* to) noexcept {
    if (mortal && is_last(from)) die();
    {
        std::lock_guard const guard(lock);
        if (!mortal && is_watched(from) && fails("rename " + shortened(from) + " " + shortened(to))) return -1;
    }
    return static_cast<int>(::syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0));
}
extern "C" int unlink(char const* path) noexcept {
    if (mortal && is_last(path)) die();
    {
        std::lock_guard const guard(lock);
        if (!mortal && is_watched(path) && fails("unlink " + shortened(path))) return -1;
    }
    return static_cast<int>(::syscall(SYS_unlinkat, AT_FDCWD, path, 0));
}
extern "C" int rmdir(char const* path) noexcept {
    if (mortal && is_last(path)) die();
    return static_cast<int>(::syscall(SYS_unlinkat, AT_FDCWD, path, AT_REMOVEDIR));
}

TEST_CASE(
    "files are flushed before their names, the directory before its name, the latest comes last, then old ones go",
    "[checkpoint]") {
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    bool const background = GENERATE(false, true);
    CAPTURE(ranks, tcp, background);
    ::test::scratch_directory const scratch;
    std::string const kept_in = (std::filesystem::canonical(scratch.path()) / "kept").string();
    std::set<std::thread::id> trainers;
    auto const latest = ranks_over(
        tcp, ranks,
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
    ddp::detail::checkpoint_directory directory(kept_in);
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

TEST_CASE("a directory in which another process saves is refused, with that process", "[checkpoint]") {
    ::test::scratch_directory const scratch;
    std::string const kept_in = (std::filesystem::canonical(scratch.path()) / "kept").string();
    using ddp::detail::checkpoint_directory;
    REQUIRE(std::filesystem::create_directory(kept_in));
    int ready[2];
    REQUIRE(::pipe(ready) == 0);
    pid_t const child = ::fork();
    if (child == 0) {
        int const directory = ::open(kept_in.c_str(), O_RDONLY | O_DIRECTORY);
        (void)!::write(ready[1], ::flock(directory, LOCK_EX) == 0 ? "y" : "n", 1);
        for (;;) ::pause();
    }
    char locked = 0;
    REQUIRE(::read(ready[0], &locked, 1) == 1);
    auto const saving = [&](auto& comm) {
        kept_training one(comm, {});
        checkpoints kept(kept_in);
        one.go_to(1);
        return thrown_by([&] { kept.save(one.trainer); });
    };
    auto const refused = run_ranks(2, saving, patient());
    std::string const pid = std::to_string(child);
    bool const told = content_of("/proc/locks").find(" " + pid + " ") != std::string::npos;  // not in every sandbox
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    for (int const end : ready) ::close(end);
    REQUIRE(locked == 'y');
    for (std::string const& text : refused)
        CHECK(text == "DDP-E301 file: rank 0: " + kept_in + ": " +
                          (told ? "process " + pid + ", on the same host," : std::string("another job")) +
                          " saves checkpoints here, and each would remove the other's; give each "
                          "trainer a directory of its own, or end the other job");
    CHECK(names_in(kept_in).empty());
    CHECK(run_ranks(2, saving, patient()) == std::vector<std::string>(2));

    auto const is_free = [&] {
        int const mine = ::open(kept_in.c_str(), O_RDONLY | O_DIRECTORY);
        bool const got = ::flock(mine, LOCK_EX | LOCK_NB) == 0;
        ::close(mine);
        return got;
    };
    CHECK(is_free());
    std::optional<checkpoint_directory> first(kept_in);
    checkpoint_directory second(kept_in);
    first->begin(2);
    second.begin(3);  // objects of one process share the lock
    first.reset();
    CHECK_FALSE(is_free());
    std::filesystem::remove_all(kept_in);
    second.begin(4);  // in the directory that has the name now
    CHECK_FALSE(is_free());
    second.release();
    CHECK(is_free());
}

TEST_CASE("what resume would refuse does not become a checkpoint", "[checkpoint]") {
    ::test::scratch_directory const scratch;
    std::string const kept_in = (std::filesystem::canonical(scratch.path()) / "kept").string();
    ddp::detail::checkpoint_directory directory(kept_in);
    std::uint8_t const byte = 1;
    auto const committing = [&](std::uint64_t step, auto const& change) {
        directory.begin(step);
        ddp::detail::checkpoint_manifest about;
        about.step = step, about.ranks = 1;
        about.shards = {directory.write_shard(step, 0, 1, {{"model/a", element_type::u8, {1}, bytes_of(byte)}}, {})};
        change(about);
        std::string const said = thrown_by([&] { directory.commit(about); });
        directory.abandon(step);
        return said;
    };
    REQUIRE(committing(1, [](auto&) {}) == "");
    std::string const manifest = kept_in + "/step-000000000002.tmp/manifest.json: ";
    std::string const large =
        committing(2, [](auto& about) { about.entries.emplace("rng", std::string(100'000'000, 'x')); });
    REQUIRE(large.find("DDP-E301 file: " + manifest + "would have 100000") == 0);
    REQUIRE(large.ends_with(" bytes, of at most 100000000; save less in the entries"));
    REQUIRE(committing(2, [](auto& about) {
                about.identity.emplace().optimizers.emplace("*", "\xff");
            }).find("DDP-E301 file: " + manifest + "could not be read again: DDP-E302 format: " + manifest) == 0);
    REQUIRE(names_in(kept_in) == std::vector<std::string>{"latest", "step-000000000001"});
}

TEST_CASE("where a file system cannot exchange names, a checkpoint that is replaced is not lost either",
          "[checkpoint]") {
    ::test::scratch_directory const scratch;
    std::string const kept_in = (std::filesystem::canonical(scratch.path()) / "kept").string();
    ddp::detail::checkpoint_directory directory(kept_in);
    auto const committing = [&](std::uint64_t step, std::uint8_t byte, std::string const& call) {
        directory.begin(step);
        ddp::detail::checkpoint_manifest about;
        about.step = step, about.ranks = 1;
        about.shards = {directory.write_shard(step, 0, 1, {{"model/a", element_type::u8, {1}, bytes_of(byte)}}, {})};
        watched = kept_in, failing = call;
        std::string const said = thrown_by([&] { directory.commit(about); });
        watched.clear(), failing.clear();
        directory.abandon(step);
        return said;
    };
    auto const byte_of = [&](std::uint64_t step) {
        return content_of(kept_in + "/" + ddp::detail::step_name(step) + "/shard-00000-of-00001.safetensors").back();
    };
    exchanges = false;
    REQUIRE(committing(1, 'a', "") == "");
    REQUIRE(committing(2, 'b', "") == "");
    REQUIRE(committing(2, 'c', "rename step-2.tmp step-2").ends_with(": cannot be put in place: Input/output error"));
    REQUIRE(byte_of(2) == 'b');
    REQUIRE(committing(2, 'c', "rename step-2 step-2.old.tmp").ends_with(": cannot be replaced: Input/output error"));
    REQUIRE(byte_of(2) == 'b');
    REQUIRE(committing(2, 'd', "") == "");
    REQUIRE(byte_of(2) == 'd');
    REQUIRE(directory.remove_older(2, 2) == "");
    REQUIRE(names_in(kept_in) == std::vector<std::string>{"latest", "step-000000000001", "step-000000000002"});
    // Killed between the two names: what was to be replaced has its name again, for whoever comes next.
    for (bool const resumes : {true, false}) {
        std::filesystem::rename(kept_in + "/step-000000000002", kept_in + "/step-000000000002.old.tmp");
        std::filesystem::create_directory(kept_in + "/step-000000000002.tmp");
        std::string complaint;
        if (resumes)
            REQUIRE(directory.candidates(complaint)[0] == "step-000000000002");
        else
            directory.begin(3);
        REQUIRE(byte_of(2) == 'd');
    }
    directory.abandon(3);
    exchanges = true;
    REQUIRE(committing(3, 'e', "") == "");
    REQUIRE(names_in(kept_in) ==
            std::vector<std::string>{"latest", "step-000000000001", "step-000000000002", "step-000000000003"});
    // A damaged one does not count among those that are kept.
    REQUIRE(directory.remove_older(3, 2, {"step-000000000002"}) == "");
    REQUIRE(names_in(kept_in).size() == 4);
    REQUIRE(directory.remove_older(3, 2) == "");
    REQUIRE(names_in(kept_in) == std::vector<std::string>{"latest", "step-000000000002", "step-000000000003"});
}

namespace {

/// A save into a directory in which there may be others.
struct saving {
    char const* name;
    std::vector<std::uint64_t> there;  // steps
    std::uint64_t latest;              // the one from which the training goes on, for a step
    std::size_t keep;
    bool exchanges = true;
};

kept_recipe const sharded{.options = options_of(true, false)};

/// What stands in whole checkpoints, by file.
std::map<std::string, std::string> files_in(std::string const& directory) {
    std::map<std::string, std::string> all;
    if (!std::filesystem::exists(directory)) return all;
    for (std::string const& name : names_in(directory))
        if (name.starts_with("step-") && !name.ends_with(".tmp"))
            for (std::string const& file : names_in(directory + "/" + name))
                all[name + "/" + file] = content_of(directory + "/" + name + "/" + file);
    return all;
}

/// A process resumes, takes a step and saves, but is killed at its n-th call in the directory; half of a write is made then.
/// Whether it was: it may have had fewer.
bool killed(int n, int ranks, bool background, std::string const& directory, saving const& how) {
    watched = directory;
    std::fflush(nullptr);  // or the child prints it again, under a sanitizer
    pid_t const child = ::fork();
    if (child == 0) {
        ::alarm(100);
        calls_left = n, mortal = true;
        try {
            run_ranks(
                ranks,
                [&](auto& comm) {
                    kept_training one(comm, sharded);
                    checkpoints kept(directory, {.keep = how.keep, .background = background});
                    static_cast<void>(kept.resume(one.trainer, one.batches));
                    kept.save(one.go_to(how.latest + 1).trainer, one.batches);
                    while (!kept.poll()) std::this_thread::yield();
                    return 0;
                },
                patient());
            ::_exit(0);
        } catch (...) {
            ::_exit(1);
        }
    }
    watched.clear();
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    bool const by_us = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
    REQUIRE((by_us || (WIFEXITED(status) && WEXITSTATUS(status) == 0)));
    return by_us;
}

}  // namespace

TEST_CASE("a process that is killed at any call of a save leaves every checkpoint whole, and the training goes on",
          "[checkpoint]") {
    struct no_flushes {
        no_flushes() { flushes = false; }
        ~no_flushes() { flushes = true; }
    } const quick;
    ::test::scratch_directory const scratch;
    std::string const parent = std::filesystem::canonical(scratch.path()).string(), base = parent + "/base",
                      kept_in = parent + "/kept";
    int kills = 0, within = 0;  // within: after which something unfinished was left
    for (auto const& [ranks, background] : {std::pair(1, false), std::pair(3, true)}) {
        auto const digests = run_ranks(
                                 ranks,
                                 [](auto& comm) {
                                     kept_training one(comm, sharded);
                                     std::vector<std::uint64_t> all;
                                     for (std::uint64_t step = 0; step < 6; ++step)
                                         all.push_back(one.go_to(step).digest());
                                     return all;
                                 },
                                 patient())
                                 .front();
        for (saving const& how : {saving{"the first", {}, 0, 3}, saving{"one more", {1, 2, 3}, 3, 4},
                                  saving{"instead of all", {1, 2, 3}, 3, 1}, saving{"again", {1, 2, 3}, 2, 4},
                                  saving{"again, by two names", {1, 2, 3}, 2, 4, false}}) {
            exchanges = how.exchanges;
            std::uint64_t const to = how.latest + 1, end = to + 1;
            std::string const old_name = ddp::detail::step_name(how.latest) + "\n",
                              new_name = ddp::detail::step_name(to) + "\n";
            std::filesystem::remove_all(base);
            run_ranks(
                ranks,
                [&](auto& comm) {
                    kept_training one(comm, sharded);
                    checkpoints kept(base, {.keep = 9});
                    for (std::uint64_t const step : how.there) kept.save(one.go_to(step).trainer, one.batches);
                    return 0;
                },
                patient());
            if (how.latest < how.there.size()) {  // as others left it who were killed
                put_content(base + "/latest", old_name);
                put_content(base + "/latest.7.0.tmp", new_name);
                std::filesystem::create_directory(base + "/step-000000000009.tmp");
                put_content(base + "/step-000000000009.tmp/manifest.json.7.1.tmp", "{");
            }
            auto const before = files_in(base);
            std::uint64_t step = 0, last = 0;
            bool again = true;
            // What several ranks have done by then differs anyway.
            for (int n = 1; again; n += static_cast<int>(fewer) * (ranks == 1 ? 1 : 2)) {
                CAPTURE(ranks, how.name, n);
                std::filesystem::remove_all(kept_in);
                if (!how.there.empty()) std::filesystem::copy(base, kept_in, std::filesystem::copy_options::recursive);
                again = killed(n, ranks, background, kept_in, how);
                kills += again ? 1 : 0;

                if (!exchanges && again) {
                    std::string complaint;
                    (void)ddp::detail::checkpoint_directory(kept_in).candidates(complaint);
                }
                // Whatever was there is, to the bit; or, once the new one is the latest, is gone as a whole.
                auto const now = files_in(kept_in);
                bool const named = std::filesystem::exists(kept_in + "/latest");
                std::string const latest = content_of(kept_in + "/latest");
                REQUIRE((latest == new_name || (how.there.empty() ? !named : latest == old_name)));
                for (auto const& [path, content] : before) {
                    auto const found = now.find(path);
                    std::string const of = path.substr(0, path.find('/') + 1);
                    auto const beside = now.lower_bound(of);
                    bool const removed =
                        how.keep == 1 && latest == new_name && (beside == now.end() || !beside->first.starts_with(of));
                    CAPTURE(path);
                    REQUIRE((removed || (found != now.end() && found->second == content)));
                }
                std::vector<std::string> names;
                if (std::filesystem::exists(kept_in)) names = names_in(kept_in);
                within += std::any_of(names.begin(), names.end(), [](auto const& s) { return s.ends_with(".tmp"); });

                step = latest == new_name || (!named && !now.empty()) ? to : how.latest;
                captured_stderr printed(scratch);
                auto const resumed = run_ranks(
                    ranks,
                    [&](auto& comm) {
                        kept_recipe other = sharded;
                        other.seed = step == 0 ? other.seed : 99;  // the checkpoint's values are not its own
                        kept_training one(comm, other);
                        checkpoints kept(kept_in, {.keep = 9});
                        auto const from = kept.resume(one.trainer, one.batches);
                        std::uint64_t const digest = one.digest();
                        kept.save(one.go_to(end).trainer, one.batches);
                        return std::tuple(from ? from->step : 0, digest, one.digest());
                    },
                    patient());
                std::string const said = printed.text();
                REQUIRE(resumed.front() == std::tuple(step, digests.at(step), digests.at(end)));
                if (!named && step == to)
                    REQUIRE_THAT(said,
                                 Catch::StartsWith("ddp: DDP-E301 file: " + kept_in + "/latest: cannot be opened"));
                else
                    REQUIRE(said == "");  // no checkpoint is damaged
                for (std::string const& name : names_in(kept_in)) REQUIRE(!name.ends_with(".tmp"));
                REQUIRE(content_of(kept_in + "/latest") == ddp::detail::step_name(end) + "\n");
                REQUIRE((step >= last || ranks > 1));
                last = step;
            }
            REQUIRE(step == to);
        }
    }
    CAPTURE(kills, within);
    REQUIRE(within > 0);
    if (fewer == 1) REQUIRE(kills >= 200);
}
