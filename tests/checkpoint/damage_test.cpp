// Disks that fail and files that are damaged: one error on all ranks, or the checkpoint before.
#include <ddp/checkpoint/checkpoints.hpp>

#include <fcntl.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ddp/collective/barrier.hpp>

#define DISK_CALLS_ARE_STRONG
#include "checkpoint/disk_calls.hpp"
#include "checkpoint/training.hpp"
#include "support/catch.hpp"
#include "support/on_ranks.hpp"
#include "train/scripted_model.hpp"

// As write() and mkdir() in disk_calls.hpp.
extern "C" int open(char const* path, int flags, ...) {
    unsigned mode = 0;
    if ((flags & O_CREAT) != 0) {
        if (ddp::test::refuses("create", path)) return -1;
        std::va_list more;
        va_start(more, flags);
        mode = va_arg(more, unsigned);
        va_end(more);
    }
    return static_cast<int>(::syscall(SYS_openat, AT_FDCWD, path, flags, mode));
}

extern "C" ssize_t pread(int descriptor, void* bytes, std::size_t count, off_t at) {
    if (ddp::test::refusing.load() != nullptr && ddp::test::refuses("read", ddp::test::path_of(descriptor))) return -1;
    return ::syscall(SYS_pread64, descriptor, bytes, count, at);
}

using namespace ddp;
using namespace ddp::test;
using ::test::scratch_directory;

namespace {

std::string in(scratch_directory const& scratch) {
    return (scratch.path() / "kept").string();
}
bool has(std::string const& text, std::string const& part) {
    return text.find(part) != std::string::npos;
}
/// What all of them are, if they are one.
template <class T>
T only(std::vector<T> const& all) {
    for (T const& one : all) REQUIRE(one == all.front());
    return all.front();
}

kept_recipe const by{.optimizer = adam{.lr = 0.01}, .options = options_of(true, false)};
constexpr char const* second = "step-000000000004";

/// Checkpoints of steps 2 and 4 in a directory.
void keep_two(scratch_directory const& scratch) {
    run_ranks(
        3,
        [&](auto& comm) {
            kept_training one(comm, by);
            checkpoints kept(in(scratch));
            for (std::uint64_t const step : {2u, 4u}) kept.save(one.go_to(step).trainer, one.batches);
            return 0;
        },
        patient());
}
/// The step that is resumed, or the error; and whether training goes on from there to the right bits.
std::string resume_and_finish(scratch_directory const& scratch, int ranks = 3, bool tcp = false) {
    return only(ranks_over(
        tcp, ranks,
        [&](auto& comm) -> std::string {
            kept_training one(comm, by);
            std::uint64_t const before = one.digest();
            std::optional<resumed_checkpoint> from;
            std::string const error =
                thrown_by([&] { from = checkpoints(in(scratch)).resume(one.trainer, one.batches); });
            if (!from) {
                if (one.digest() != before || one.trainer.completed_steps() != 0 || one.batches.position() != 0)
                    return "changed";
                return error + (one.go_to(1).digest() != 0 ? " and trained on" : "");
            }
            one.go_to(6);
            return std::to_string(from->step) + " " + std::to_string(one.digest());
        },
        patient()));
}

}  // namespace

TEST_CASE("a damaged checkpoint is named, and the one before it is taken, on all ranks alike", "[checkpoint]") {
    std::string const right = " " + std::to_string(undisturbed(3, by, 6));
    using std::filesystem::path;
    struct fault {
        std::string name;
        std::function<void(path const&)> damage;  // of the newest
        std::string words;
    };
    std::string const shard_0 = "shard-00000-of-00003.safetensors", shard_2 = "shard-00002-of-00003.safetensors";
    std::vector<fault> const faults = {
        {"half a manifest", [](path const& p) { std::filesystem::resize_file(p / "manifest.json", 200); },
         "manifest.json: byte "},
        {"no manifest", [](path const& p) { std::filesystem::remove(p / "manifest.json"); },
         "manifest.json: is missing, or not a file"},
        {"a manifest that is too large",
         [](path const& p) { std::filesystem::resize_file(p / "manifest.json", 100'000'001); },
         "manifest.json: is larger than 100000000 bytes"},
        {"an empty manifest", [](path const& p) { put_content(p / "manifest.json", ""); }, "ends too early"},
        {"a flipped bit in the manifest",
         [](path const& p) {
             flip_bit(p / "manifest.json", content_of(p / "manifest.json").find("\"epoch\": ") + 9, 0);
         },
         "its digest does not match its contents: it is damaged"},
        {"a missing shard", [&](path const& p) { std::filesystem::remove(p / shard_2); },
         shard_2 + ": is missing, or not a file"},
        {"a short shard", [&](path const& p) { std::filesystem::resize_file(p / shard_2, 300); },
         "has 300 bytes, the manifest says "},
        {"a flipped bit in the last byte of a shard",
         [&](path const& p) { flip_bit(p / shard_2, std::filesystem::file_size(p / shard_2) - 1); },
         "is damaged: its digest is not that of the manifest"},
        {"a flipped bit in the values",
         [&](path const& p) { flip_bit(p / shard_0, std::filesystem::file_size(p / shard_0) - 9); },
         "is damaged: its digest is not that of the manifest"},
        {"a flipped bit in a header", [&](path const& p) { flip_bit(p / shard_2, 30); }, shard_2},
        {"a directory in place of a shard",
         [&](path const& p) {
             std::filesystem::remove(p / shard_2);
             std::filesystem::create_directory(p / shard_2);
         },
         shard_2},
        {"the manifest of another step",
         [](path const& p) {
             std::filesystem::copy_file(p.parent_path() / "step-000000000002" / "manifest.json", p / "manifest.json",
                                        std::filesystem::copy_options::overwrite_existing);
         },
         "is that of step 2"},
        {"no directory", [](path const& p) { std::filesystem::remove_all(p); }, second},
    };
    for (fault const& f : faults)
        for (auto const& [ranks, tcp] :
             {std::pair(3, false), std::pair(2, false), std::pair(3, true), std::pair(4, true)}) {
            CAPTURE(f.name, ranks, tcp);
            scratch_directory const scratch;
            keep_two(scratch);
            f.damage(std::filesystem::path(in(scratch)) / second);
            captured_stderr said(scratch);
            std::string const got = resume_and_finish(scratch, ranks, tcp);
            std::string const text = said.text();
            CAPTURE(text);
            REQUIRE(got.substr(0, 1) == "2");
            if (ranks == 3) REQUIRE(got == "2" + right);
            REQUIRE(has(text, "ddp: a checkpoint is not used: "));
            REQUIRE(has(text, f.words));
            REQUIRE(std::count(text.begin(), text.end(), '\n') == 1);
        }
}

TEST_CASE("what only rank 0 sees is no damage", "[checkpoint]") {
    scratch_directory const scratch;
    ddp::detail::checkpoint_directory directory(in(scratch));
    std::uint64_t digest = 0;
    std::string const manifest = in(scratch) + "/" + second + "/manifest.json";
    REQUIRE(thrown_by([&] { (void)directory.manifest_of(second, digest); }) ==
            "DDP-E302 format: " + manifest + ": is missing, or not a file");
    REQUIRE(thrown_by([&] { (void)directory.manifest_of(second, digest, 1); }) ==
            "DDP-E301 file: " + manifest + ": is missing, or not a file; do all ranks see the same directory?");
}

TEST_CASE("a damaged checkpoint does not count among those that are kept", "[checkpoint]") {
    scratch_directory const scratch;
    keep_two(scratch);
    std::string const name = in(scratch) + "/" + second;
    flip_bit(name + "/shard-00002-of-00003.safetensors", 20);
    captured_stderr said(scratch);
    using all = std::vector<std::string>;
    auto const go_on = [&](std::uint64_t from, std::uint64_t first, std::uint64_t last) {
        run_ranks(
            3,
            [&](auto& comm) {
                kept_training one(comm, by);
                checkpoints kept(in(scratch), {.keep = 2});
                auto const resumed = kept.resume(one.trainer, one.batches);
                if (!resumed || resumed->step != from) throw std::runtime_error("another step");
                for (std::uint64_t step = first; step <= last; ++step) kept.save(one.go_to(step).trainer, one.batches);
                return 0;
            },
            patient());
        return names_in(in(scratch));
    };
    REQUIRE(go_on(2, 5, 5) == all{"latest", "step-000000000002", second, "step-000000000005"});
    std::filesystem::remove_all(in(scratch) + "/step-000000000005");
    put_content(in(scratch) + "/latest", std::string(second) + "\n");
    REQUIRE(go_on(2, 4, 5) == all{"latest", second, "step-000000000005"});  // replaced, and whole again
}

TEST_CASE("a checkpoint that cannot be read just now is an error on all ranks, and not a reason to go back",
          "[checkpoint]") {
    scratch_directory const scratch;
    keep_two(scratch);
    std::string const right = " " + std::to_string(undisturbed(3, by, 6)),
                      shard = in(scratch) + "/" + second + "/shard-00002-of-00003.safetensors";
    for (bool const tcp : {false, true}) {
        CAPTURE(tcp);
        captured_stderr said(scratch);
        disk_fault const fault{"read", shard, EIO};
        refusing = &fault;
        std::string const got = resume_and_finish(scratch, 3, tcp);
        refusing = nullptr;
        REQUIRE(got == "DDP-E301 file: " + shard +
                           ": cannot be read: Input/output error; if that lasts, move this checkpoint away to continue "
                           "from the one before it and trained on");
        REQUIRE(said.text() == "");
        REQUIRE(resume_and_finish(scratch, 3, tcp) == "4" + right);
    }
}

TEST_CASE("every flipped bit of a shard is found", "[checkpoint]") {
    scratch_directory const scratch;
    keep_two(scratch);
    std::filesystem::path const shard =
        std::filesystem::path(in(scratch)) / second / "shard-00001-of-00003.safetensors";
    std::string const whole = content_of(shard);
    ddp::detail::checkpoint_directory directory(in(scratch));
    for (std::size_t byte = 0; byte < whole.size(); byte += 13) {
        flip_bit(shard, byte, static_cast<int>(byte % 8));
        CAPTURE(byte);
        REQUIRE_THROWS_WITH(ddp::detail::checkpoint_reader(directory, second, 0, 1),
                            Catch::Contains("shard-00001-of-00003.safetensors"));
        put_content(shard, whole);
    }
    REQUIRE_NOTHROW(ddp::detail::checkpoint_reader(directory, second, 0, 1));
}

TEST_CASE("a word of the latest that is lost or damaged loses no checkpoint", "[checkpoint]") {
    std::string const right = " " + std::to_string(undisturbed(3, by, 6));
    for (char const* const content : {"", "step-000000000004", "step-4\n", "../kept\n", "no"}) {
        scratch_directory const scratch;
        keep_two(scratch);
        auto const latest = std::filesystem::path(in(scratch)) / "latest";
        if (std::string_view(content) == "no")
            std::filesystem::remove(latest);
        else
            put_content(latest, content);
        captured_stderr said(scratch);
        REQUIRE(resume_and_finish(scratch) == "4" + right);
        REQUIRE(has(said.text(), std::string_view(content) == "no" ? "latest: cannot be opened"
                                                                   : "latest: does not name a checkpoint"));
    }
    scratch_directory const scratch;  // killed between the two renames: the older one counts, the newer is whole
    keep_two(scratch);
    put_content(std::filesystem::path(in(scratch)) / "latest", "step-000000000002\n");
    REQUIRE(resume_and_finish(scratch) == "2" + right);
    std::filesystem::remove(std::filesystem::path(in(scratch)) / "step-000000000002" / "manifest.json");
    captured_stderr said(scratch);
    REQUIRE(resume_and_finish(scratch) == "4" + right);
}

TEST_CASE("a latest that names nothing, with nothing beside it, is an error", "[checkpoint]") {
    scratch_directory const scratch;
    std::filesystem::create_directories(in(scratch));
    put_content(std::filesystem::path(in(scratch)) / "latest", "step\n");
    REQUIRE(has(resume_and_finish(scratch), "latest: does not name a checkpoint, and there is none beside it"));
}

TEST_CASE("a manifest whose digest is right, but not what it says, is refused alike on all ranks", "[checkpoint]") {
    auto const [ranks, tcp] = GENERATE(table<int, bool>({{3, false}, {3, true}, {4, true}}));
    CAPTURE(ranks, tcp);
    auto const refusal = [of = ranks,
                          over = tcp](std::function<void(ddp::detail::checkpoint_manifest&)> const& change) {
        scratch_directory const scratch;
        keep_two(scratch);
        ddp::detail::checkpoint_directory directory(in(scratch));
        std::uint64_t digest = 0;
        auto manifest = directory.manifest_of(second, digest);
        change(manifest);
        put_content(std::filesystem::path(in(scratch)) / second / "manifest.json",
                    ddp::detail::manifest_text(manifest));
        return resume_and_finish(scratch, of, over);
    };
    for (std::string const& text : {refusal([](auto& m) { m.sampler->position = 99; }),
                                    refusal([](auto& m) { m.sampler->epoch = std::uint64_t{1} << 48; })}) {
        CAPTURE(text);
        REQUIRE(has(text, std::string("kept/") + second + ": the sampler's position is past the end of an epoch"));
        REQUIRE(has(text, " and trained on"));
    }
    std::string const text = refusal([](auto& m) { m.shards.erase(m.shards.begin() + 1); });
    CAPTURE(text);
    REQUIRE(has(text, " is in none of its files"));
    REQUIRE(has(text, " and trained on"));

    scratch_directory const scratch;
    keep_two(scratch);
    ddp::detail::checkpoint_reader reader(ddp::detail::checkpoint_directory(in(scratch)), second, 0, 1);
    scripted_model<> net({{"another", {1}}});
    REQUIRE_THROWS_WITH(reader.read_model(ddp::detail::kept_tensors(net)),
                        Catch::Contains("checkpoint_reader::read_model comes after expect_like"));
}

TEST_CASE("a shard that is whole, but not what was looked for, is refused", "[checkpoint]") {
    scratch_directory const scratch;
    keep_two(scratch);
    ddp::detail::checkpoint_directory directory(in(scratch));
    std::string const step = in(scratch) + "/" + second, shard = step + "/shard-00002-of-00003.safetensors";
    std::vector<float> const three(3);
    auto const bytes = as_const_bytes(std::span(three));
    std::uint64_t digest = 0;
    auto manifest = directory.manifest_of(second, digest);
    for (char const* const name : {"a", "state/a/b", "state/a/b[0:2]", "state/a/b[0:3", "other/a/b[0:3]"}) {
        write_safetensors(shard, {{name, element_type::f32, {3}, bytes}}, {{"state/a/b", "3"}, {"other/a/b", "3"}});
        manifest.shards[2] = {2, std::filesystem::file_size(shard), ddp::detail::digest_of_file(shard)};
        put_content(step + "/manifest.json", ddp::detail::manifest_text(manifest));
        REQUIRE_THROWS_WITH(ddp::detail::checkpoint_reader(directory, second, 0, 1),
                            "DDP-E302 format: " + shard + ": tensor '" + name + "' does not belong in a checkpoint");
    }
    ddp::detail::checkpoint_reader reader(directory, "step-000000000002", 0, 3);
    std::string const first = in(scratch) + "/step-000000000002/shard-00000-of-00003.safetensors";
    write_safetensors(first, {{"a", element_type::f32, {3}, bytes}}, {});
    tanh_mlp<float> net(7, 24, 3, 5);
    REQUIRE_THROWS_WITH(reader.read_model(ddp::detail::kept_tensors(net)),
                        "DDP-E301 file: " + first + ": was overwritten while it was read");
}

TEST_CASE("where no checkpoint is whole, training does not begin anew by itself", "[checkpoint]") {
    bool const tcp = GENERATE(false, true);
    scratch_directory const scratch;
    keep_two(scratch);
    for (char const* const step : {"step-000000000002", second})
        std::filesystem::remove(std::filesystem::path(in(scratch)) / step / "manifest.json");
    captured_stderr said(scratch);
    std::string const got = resume_and_finish(scratch, 3, tcp);
    REQUIRE(has(got, "DDP-E302 format: " + in(scratch) + ": none of its checkpoints is whole"));
    REQUIRE(has(got, " and trained on"));  // training can go on all the same
}

namespace {

/// What save throws on every rank; afterwards a step is made, and the older checkpoint is there.
std::string failing_save(scratch_directory const& scratch, std::function<void()> const& before_save,
                         std::function<void()> const& after_save, bool background = false, int ranks = 3,
                         bool tcp = false) {
    std::atomic<int> arrived = 0, left = 0;
    std::string const text = only(ranks_over(
        tcp, ranks,
        [&, last = ranks - 1](auto& comm) {
            kept_training one(comm, by);
            checkpoints kept(in(scratch), {.background = background});
            kept.save(one.go_to(2).trainer, one.batches);
            kept.wait();
            one.go_to(3);
            comm.check();
            if (arrived.fetch_add(1) == last) before_save();
            ddp::barrier(comm);
            std::string const said = thrown_by([&] {
                kept.save(one.trainer, one.batches);
                kept.wait();
            });
            if (left.fetch_add(1) == last) after_save();
            ddp::barrier(comm);
            one.go_to(4);
            kept.save(one.trainer, one.batches);
            kept.wait();
            return said + (one.digest() != 0 ? "" : " ranks differ");
        },
        patient()));
    REQUIRE(names_in(in(scratch)) == std::vector<std::string>{"latest", "step-000000000002", second});
    REQUIRE(resume_and_finish(scratch, ranks, tcp) == "4 " + std::to_string(undisturbed(ranks, by, 6)));
    return text;
}

}  // namespace

TEST_CASE("a full disk is one error on all ranks, and nothing older is lost", "[checkpoint]") {
    auto const [ranks, tcp] = GENERATE(table<int, bool>({{1, false}, {2, true}, {3, false}, {4, true}}));
    for (bool const background : {false, true})
        for (rlim_t const limit : {100u, 1500u}) {
            CAPTURE(ranks, tcp, background, limit);
            scratch_directory const scratch;
            struct rlimit before{};
            REQUIRE(::getrlimit(RLIMIT_FSIZE, &before) == 0);
            std::vector<std::string> left_behind;
            std::string const said = failing_save(
                scratch,
                [&] {
                    struct rlimit const small{limit, before.rlim_max};
                    ::setrlimit(RLIMIT_FSIZE, &small);
                },
                [&] {
                    ::setrlimit(RLIMIT_FSIZE, &before);
                    left_behind = names_in(in(scratch));
                },
                background, ranks, tcp);
            ::setrlimit(RLIMIT_FSIZE, &before);
            CAPTURE(said);
            REQUIRE(has(said, "DDP-E301 file: " + std::string(ranks == 1 ? "" : "rank 0: ") + in(scratch) +
                                  "/step-000000000003.tmp/shard-00000-of-0000" + std::to_string(ranks)));
            REQUIRE(has(said, "File too large"));
            REQUIRE(left_behind == std::vector<std::string>{"latest", "step-000000000002"});
        }
}

namespace {

/// A file system of `pages` pages in a directory, as long as it lives. Not mounted where that is not permitted.
class small_disk {
public:
    small_disk(std::filesystem::path at, std::size_t pages) : at_(std::move(at)) {
        std::string const size = "size=" + std::to_string(pages * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)));
        mounted_ = ::mount("none", at_.c_str(), "tmpfs", 0, size.c_str()) == 0;
        if (!mounted_) WARN("not tried: full and read-only disks: no right to mount a small file system");
    }
    small_disk(small_disk const&) = delete;
    ~small_disk() {
        if (mounted_) ::umount2(at_.c_str(), MNT_DETACH);
    }
    [[nodiscard]] bool mounted() const noexcept { return mounted_; }
    void read_only(bool so) const {
        if (::mount("none", at_.c_str(), nullptr, MS_REMOUNT | (so ? MS_RDONLY : 0), nullptr) != 0)
            throw std::logic_error("cannot be mounted anew");
    }
    /// Leaves room for so many pages.
    void fill_up_to(std::size_t left) const {
        struct statvfs now{};
        ::statvfs(at_.c_str(), &now);
        put_content(at_ / "ballast", std::string((now.f_bavail - left) * now.f_bsize, 'x'));
        ::statvfs(at_.c_str(), &now);
        if (now.f_bavail != left) throw std::logic_error("the file system is not filled");
    }

private:
    std::filesystem::path at_;
    bool mounted_ = false;
};

}  // namespace

TEST_CASE("a file system that is full, at whichever file, or read-only, is one error on all ranks", "[checkpoint]") {
    std::size_t refused = 0;
    for (std::size_t left = 0; left < 5; ++left)  // three shards, a manifest and the name of the latest: a page each
        for (bool const background : {false, true}) {
            if (background && left % 2 != 0) continue;
            CAPTURE(left, background);
            scratch_directory const scratch;
            small_disk const disk(scratch.path(), 64);
            if (!disk.mounted()) return;
            std::vector<std::string> left_behind;
            std::string const said = failing_save(
                scratch, [&] { disk.fill_up_to(left); },
                [&] {
                    left_behind = names_in(in(scratch));
                    std::filesystem::remove(scratch.path() / "ballast");
                },
                background, 3, left == 1 || left == 4);
            CAPTURE(said);
            REQUIRE(has(said, "DDP-E301 file: rank "));
            REQUIRE(has(said, in(scratch) + "/"));
            REQUIRE(has(said, "No space left on device"));
            REQUIRE(left_behind == std::vector<std::string>{"latest", "step-000000000002"});
            ++refused;
        }
    REQUIRE(refused == 8);
    scratch_directory const scratch;
    small_disk const disk(scratch.path(), 64);
    std::string const said = failing_save(scratch, [&] { disk.read_only(true); }, [&] { disk.read_only(false); });
    REQUIRE(said == "DDP-E301 file: rank 0: " + in(scratch) +
                        "/step-000000000003.tmp: cannot be created: Read-only file system");
}

TEST_CASE("what a disk refuses to write, or to create, at whichever file, is one error on all ranks", "[checkpoint]") {
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    if (ranks > 4) return;
    std::string const first = ranks == 1 ? "" : "rank 0: ", last_rank = std::to_string(ranks - 1),
                      last = ranks == 1 ? "" : "rank " + last_rank + ": ",
                      shard = "shard-0000" + last_rank + "-of-0000" + std::to_string(ranks) + ".safetensors",
                      step = "/step-000000000003.tmp";
    struct example {
        disk_fault fault;
        std::string whose, said;
    };
    std::vector<example> const examples = {
        {{"mkdir", step, EROFS}, first, step + ": cannot be created: Read-only file system"},
        {{"create", step + "/" + shard, EROFS},
         last,
         step + "/" + shard + ": cannot be created: Read-only file system"},
        {{"write", step + "/" + shard, ENOSPC},
         last,
         step + "/" + shard + ": cannot be written: No space left on device"},
        {{"create", step + "/manifest.json", ENOSPC},
         first,
         step + "/manifest.json: cannot be created: No space left on device"},
        {{"write", step + "/manifest.json", ENOSPC},
         first,
         step + "/manifest.json: cannot be written: No space left on device"},
        {{"create", "/kept/latest", EROFS}, first, "/latest: cannot be created: Read-only file system"},
        {{"write", "/kept/latest", ENOSPC}, first, "/latest: cannot be written: No space left on device"},
    };
    bool background = tcp;
    for (auto const& [fault, whose, said] : examples) {
        background = !background;
        CAPTURE(ranks, tcp, background, fault.call, fault.path);
        scratch_directory const scratch;
        std::vector<std::string> left_behind;
        std::string latest;
        std::string const got = failing_save(
            scratch, [&, at = &fault] { refusing = at; },
            [&] {
                refusing = nullptr;
                left_behind = names_in(in(scratch));
                latest = content_of(in(scratch) + "/latest");
            },
            background, ranks, tcp);
        CHECK(got == "DDP-E301 file: " + whose + in(scratch) + said);
        CHECK(left_behind == std::vector<std::string>{"latest", "step-000000000002"});
        CHECK(latest == "step-000000000002\n");
    }
}

TEST_CASE("a directory that cannot be written to is one error on all ranks", "[checkpoint]") {
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    scratch_directory const scratch;
    std::filesystem::path const kept = in(scratch), away = scratch.path() / "away";
    std::string const said = failing_save(
        scratch,
        [&] {  // whoever runs the tests may be allowed everything: a file in its place is no directory for anybody
            std::filesystem::rename(kept, away);
            put_content(kept, "a file");
        },
        [&] {
            std::filesystem::remove(kept);
            std::filesystem::rename(away, kept);
        },
        false, ranks, tcp);
    REQUIRE(has(said, "DDP-E301 file: " + std::string(ranks == 1 ? "" : "rank 0: ") + in(scratch) +
                          ": cannot be listed: Not a directory"));
    bool const root = ::geteuid() == 0;  // who may write everywhere: it saves as somebody else
    if (root && (::seteuid(65534) != 0 || ::seteuid(0) != 0)) {
        WARN("not tried: a directory that may not be written to, because root cannot become somebody else here");
    } else {
        scratch_directory const locked;
        auto const become = [&](::uid_t who) {
            if (root && ::seteuid(who) != 0) std::abort();
        };
        auto const refused = [&] {
            ::chmod(in(locked).c_str(), 0555);
            become(65534);
        };
        auto const allowed = [&] {
            become(0);
            ::chmod(in(locked).c_str(), 0755);
        };
        REQUIRE(has(failing_save(locked, refused, allowed, false, ranks, tcp),
                    "step-000000000003.tmp: cannot be created: Permission denied"));
        become(0);
    }
    scratch_directory const none;
    auto const errors = run_ranks(
        2,
        [&](auto& comm) {
            kept_training one(comm, {});
            return thrown_by([&] { checkpoints(in(none) + "/deeper").save(one.trainer); });
        },
        patient());
    REQUIRE(only(errors) ==
            "DDP-E301 file: rank 0: " + in(none) + "/deeper: cannot be created: No such file or directory");
}

TEST_CASE("shapes that differ in a late extent are other shapes", "[checkpoint]") {
    scratch_directory const scratch;
    using part = scripted_model<>::part;
    part const wide{"a", {1, 1, 1, 1, 1, 1, 1, 1, 2, 3}}, high{"a", {1, 1, 1, 1, 1, 1, 1, 1, 3, 2}};
    std::string const says_wide = "F64 [1 x 1 x 1 x 1 x 1 x 1 x 1 x 1 x 2 x 3]",
                      says_high = "F64 [1 x 1 x 1 x 1 x 1 x 1 x 1 x 1 x 3 x 2]";
    auto const texts = run_ranks(
        2,
        [&](auto& comm) {
            scripted_model<> net({wide}), other({high});
            data_parallel keeping{net, sgd{.lr = 0.1, .momentum = 0.9}, comm},
                resuming{other, sgd{.lr = 0.1, .momentum = 0.9}, comm};
            checkpoints kept(in(scratch));
            kept.save(keeping);
            return thrown_by([&] { kept.resume(resuming); });
        },
        patient());
    for (std::string const& text : texts) {
        CAPTURE(text);
        REQUIRE(text.find("tensor 'a': " + says_wide + " in the checkpoint, " + says_high + " in this one") !=
                text.npos);
        REQUIRE(text.find("state 'state/a/momentum': " + says_wide + " in the checkpoint, " + says_high) != text.npos);
    }
}

TEST_CASE("a checkpoint of another training is refused with all differences, alike on all ranks", "[checkpoint]") {
    auto const [ranks, tcp] = GENERATE(ways_to_run());
    CAPTURE(ranks, tcp);
    scratch_directory const scratch;
    run_ranks(
        2,
        [&](auto& comm) {
            scripted_model<> net({{"a", {2, 3}}, {"b", {4}}, {"c", {1}}});
            data_parallel trainer{net, sgd{.lr = 0.1, .momentum = 0.9}, comm, {.update = update::sharded}};
            trainer.step(numbers{{1.0}});
            checkpoints(in(scratch)).save(trainer, sampler({.samples = 10, .global_batch = 2, .seed = 1}, comm));
            return 0;
        },
        patient());
    auto const errors = ranks_over(
        tcp, ranks,
        [&](auto& comm) {
            scripted_model<> net({{"a", {3, 2}}, {"b", {4}}, {"d", {1}}}, 5.0);
            data_parallel trainer{net, adam{.lr = 0.1}, comm, {.update = update::sharded}};
            trainer.step(numbers{{1.0}});
            std::uint64_t const before = trainer.digest_of_values();
            sampler batches({.samples = 10, .global_batch = 5, .seed = 1}, comm);
            std::string const text = thrown_by([&] { checkpoints(in(scratch)).resume(trainer, batches); });
            if (trainer.digest_of_values() != before || trainer.completed_steps() != 1) return "changed: " + text;
            trainer.step(numbers{{1.0}});
            return text;
        },
        patient());
    std::string expected =
        "DDP-E302 format: " + in(scratch) + "/step-000000000001: is a checkpoint of another training:";
    for (char const* const line : {"tensor 'a': F64 [2 x 3] in the checkpoint, F64 [3 x 2] in this one",
                                   "tensor 'c': F64 [1] in the checkpoint, not in this one",
                                   "tensor 'd': not in the checkpoint, F64 [1] in this one",
                                   "state 'state/a/exp_avg': not in the checkpoint, F64 [3 x 2] in this one",
                                   "state 'state/a/exp_avg_sq': not in the checkpoint, F64 [3 x 2] in this one",
                                   "state 'state/a/momentum': F64 [2 x 3] in the checkpoint, not in this one",
                                   "state 'state/b/exp_avg': not in the checkpoint, F64 [4] in this one",
                                   "state 'state/b/exp_avg_sq': not in the checkpoint, F64 [4] in this one",
                                   "state 'state/b/momentum': F64 [4] in the checkpoint, not in this one",
                                   "state 'state/c/momentum': F64 [1] in the checkpoint, not in this one",
                                   "state 'state/d/exp_avg': not in the checkpoint, F64 [1] in this one",
                                   "state 'state/d/exp_avg_sq': not in the checkpoint, F64 [1] in this one",
                                   "optimizer of '*': sgd in the checkpoint, adam in this one",
                                   "sampler's 'global_batch': 2 in the checkpoint, 5 in this one"})
        expected += std::string("\n  ") + line;
    REQUIRE(only(errors) == expected);
    REQUIRE(names_in(in(scratch)) == std::vector<std::string>{"latest", "step-000000000001"});

    // Of many differences 1,000 are shown, and the others counted: 2 x 3 of the checkpoint, 2 x 600 of the model.
    auto const many = ranks_over(
        tcp, ranks,
        [&](auto& comm) {
            std::vector<scripted_model<>::part> parts;
            for (int i = 0; i < 600; ++i) parts.push_back({"p" + std::to_string(i), {1}});
            scripted_model<> net(parts);
            data_parallel trainer{net, sgd{.lr = 0.1, .momentum = 0.9}, comm};
            return thrown_by([&] { checkpoints(in(scratch)).resume(trainer); });
        },
        patient());
    std::string const text = only(many);
    CAPTURE(text);
    REQUIRE(std::count(text.begin(), text.end(), '\n') == 1001);
    REQUIRE(text.ends_with("\n  and " + std::to_string(2 * 3 + 2 * 600 - 1000) + " more"));
}
