/// \file
/// What checkpoint/directory.hpp declares.
#pragma once

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include <ddp/checkpoint/directory.hpp>
#include <ddp/checkpoint/manifest.hpp>
#include <ddp/core/bytes.hpp>
#include <ddp/core/digest.hpp>
#include <ddp/core/error.hpp>
#include <ddp/core/text.hpp>
#include <ddp/data/source.hpp>
#include <ddp/data/whole_file.hpp>

namespace ddp::detail {

[[noreturn, gnu::cold]] inline void file_failed(std::string const& path, std::string_view what, int reason) {
    throw data_error(errc::file, concat({path, ": ", what, ": ", std::generic_category().message(reason)}));
}

constexpr std::uint64_t manifest_bytes = 100'000'000;  // at most

[[gnu::cold]] DDP_DECL void expect_there(std::string const& path, int rank) {
    struct stat there{};
    if (::stat(path.c_str(), &there) == 0 ? S_ISREG(there.st_mode) : errno != ENOENT && errno != ENOTDIR) return;
    if (rank == 0) throw data_error(errc::format, path + ": is missing, or not a file");
    throw data_error(errc::file, path + ": is missing, or not a file; do all ranks see the same directory?");
}

/// Names in a directory, except . and .. ; none if it does not exist.
[[nodiscard, gnu::cold]] inline std::vector<std::string> names_in(std::string const& path) {
    std::vector<std::string> names;
    struct closer {
        void operator()(DIR* d) const noexcept { ::closedir(d); }
    };
    std::unique_ptr<DIR, closer> const all(::opendir(path.c_str()));
    if (all == nullptr && errno == ENOENT) return names;
    if (all == nullptr) file_failed(path, "cannot be listed", errno);
    for (;;) {
        errno = 0;
        dirent const* const one = ::readdir(all.get());
        if (one == nullptr && errno != 0) file_failed(path, "cannot be listed", errno);
        if (one == nullptr) return names;
        std::string_view const name = one->d_name;
        if (name != "." && name != "..") names.emplace_back(name);
    }
}

/// Removes a directory and all its files, the manifest first: what is left of a checkpoint must not look like one. It is not an
/// error if it does not exist.
[[gnu::cold]] inline void remove_directory(std::string const& path) {
    std::vector<std::string> names = names_in(path);
    std::partition(names.begin(), names.end(), [](std::string const& name) { return name == "manifest.json"; });
    for (std::string const& name : names) {
        std::string const file = concat({path, "/", name});
        if (::unlink(file.c_str()) != 0 && errno != ENOENT) file_failed(file, "cannot be removed", errno);
    }
    if (::rmdir(path.c_str()) != 0 && errno != ENOENT) file_failed(path, "cannot be removed", errno);
}

/// Flushes the names in a directory to the disk.
[[gnu::cold]] inline void flush_directory(std::string const& path) {
    int const directory = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int const flushed = directory < 0 ? -1 : ::fsync(directory), reason = errno;
    if (directory >= 0) ::close(directory);
    // Some file systems cannot flush a directory, and some directories may be written but not read.
    if (flushed != 0 && reason != EINVAL && reason != EACCES) file_failed(path, "cannot be flushed", reason);
}

constexpr std::string_view replaced_suffix = ".old.tmp";

/// Renames a directory. If another one has the new name, that one gets the old name, or NEW.old.tmp.
[[gnu::cold]] inline void put_in_place_of(std::string const& from, std::string const& to) {
    struct stat there{};
    if (::lstat(to.c_str(), &there) == 0) {
#if defined(SYS_renameat2)
        constexpr unsigned exchange = 2;  // RENAME_EXCHANGE
        if (::syscall(SYS_renameat2, AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), exchange) == 0) return;
#endif
        // A file system that cannot exchange names (NFS): for a moment there is neither; see put_back_replaced.
        std::string const aside = to + std::string(replaced_suffix);
        if (std::rename(to.c_str(), aside.c_str()) != 0) file_failed(to, "cannot be replaced", errno);
        if (std::rename(from.c_str(), to.c_str()) == 0) return;
        int const reason = errno;
        (void)std::rename(aside.c_str(), to.c_str());
        file_failed(from, "cannot be put in place", reason);
    }
    if (std::rename(from.c_str(), to.c_str()) != 0) file_failed(from, "cannot be put in place", errno);
}

[[gnu::cold]] DDP_DECL std::string step_name(std::uint64_t step) {
    char text[32];
    std::snprintf(text, sizeof text, "step-%012llu", static_cast<unsigned long long>(step));
    return text;
}

/// The step of a checkpoint's directory of that name.
[[nodiscard, gnu::cold]] inline std::optional<std::uint64_t> step_of(std::string_view name) {
    if (!name.starts_with("step-") || name.size() > 25) return std::nullopt;
    std::uint64_t step = 0;
    for (char const c : name.substr(5)) {
        if (c < '0' || c > '9') return std::nullopt;
        step = 10 * step + static_cast<std::uint64_t>(c - '0');
    }
    return step_name(step) == name ? std::optional(step) : std::nullopt;
}

/// A checkpoint that was to be replaced, by a process that was killed before the new one had its name.
[[gnu::cold]] inline void put_back_replaced(std::string const& path) {
    for (std::string const& name : names_in(path)) {
        if (!name.ends_with(replaced_suffix)) continue;
        std::string const aside = concat({path, "/", name}),
                          to = aside.substr(0, aside.size() - replaced_suffix.size());
        struct stat there{};
        if (step_of(std::string_view(name).substr(0, name.size() - replaced_suffix.size())) &&
            ::lstat(to.c_str(), &there) != 0 && ::lstat((aside + "/manifest.json").c_str(), &there) == 0)
            (void)std::rename(aside.c_str(), to.c_str());
    }
}

[[gnu::cold]] DDP_DECL std::uint64_t digest_of_file(std::string const& path) {
    file_source file(path);
    std::vector<std::byte> piece(std::size_t{1} << 20);
    digest all;
    while (std::size_t const count = file.read(piece)) all.add(const_bytes(piece).first(count));
    return all.value();
}

/// The process that has the lock of this file; 0 if the system does not say.
[[nodiscard, gnu::cold]] inline long holder_of_lock(int descriptor) noexcept {
    struct stat own{};
    std::unique_ptr<std::FILE, int (*)(std::FILE*)> const locks(std::fopen("/proc/locks", "re"), &std::fclose);
    if (locks == nullptr || ::fstat(descriptor, &own) != 0) return 0;
    char line[256];
    while (std::fgets(line, sizeof line, locks.get()) != nullptr) {
        long process = 0;
        unsigned long long inode = 0;
        if (std::sscanf(line, "%*d: FLOCK %*s %*s %ld %*x:%*x:%llu", &process, &inode) == 2 && inode == own.st_ino)
            return process;
    }
    return 0;
}

/// The directories on which this process holds locks: by device and inode, since all its objects share one lock.
struct locked_directories {
    struct one {
        open_file file;
        std::size_t users = 0;  ///< objects
    };
    std::mutex mutex;
    std::map<std::pair<dev_t, ino_t>, one> all;
};
[[nodiscard, gnu::cold]] inline locked_directories& directories_of_process() {
    static locked_directories& ours = *new locked_directories;  // outlives objects with static storage duration
    return ours;
}

[[gnu::cold]] DDP_DECL void checkpoint_directory::lock() {
    open_file directory;
    directory.number = ::open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    struct stat there{};
    if (directory.number < 0 || ::fstat(directory.number, &there) != 0) return;  // listing it says why
    std::pair const found(there.st_dev, there.st_ino);
    if (locked_ == found) return;
    release();  // of a directory that had this name
    locked_directories& ours = directories_of_process();
    std::lock_guard const guard(ours.mutex);
    auto at = ours.all.find(found);
    if (at == ours.all.end()) {
        if (::flock(directory.number, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
            long const process = holder_of_lock(directory.number);
            throw data_error(
                errc::file,
                concat({path_, ": ", process > 0 ? concat({"process ", process, ", on the same host,"}) : "another job",
                        " saves checkpoints here, and each would remove the other's; give each "
                        "trainer a directory of its own, or end the other job"}));
        }
        at = ours.all.emplace(found, locked_directories::one{std::move(directory)}).first;
    }
    ++at->second.users;
    locked_ = found;
}

[[gnu::cold]] DDP_DECL void checkpoint_directory::release() noexcept {
    if (!locked_) return;
    locked_directories& ours = directories_of_process();
    std::lock_guard const guard(ours.mutex);
    auto const at = ours.all.find(*locked_);
    if (at != ours.all.end() && --at->second.users == 0) ours.all.erase(at);
    locked_.reset();
}

[[gnu::cold]] DDP_DECL void checkpoint_directory::begin(std::uint64_t step) {
    if (::mkdir(path_.c_str(), 0777) == 0)
        flush_directory(path_ + "/..");  // its own name is on the disk before anything in it
    else if (errno != EEXIST)
        file_failed(path_, "cannot be created", errno);
    lock();
    put_back_replaced(path_);
    for (std::string const& name : names_in(path_))
        if (name.starts_with("step-") && name.ends_with(".tmp")) try {
                remove_directory(of(name));
            } catch (error const&) {  // the remains of another checkpoint do no harm
                if (of(name) == temporary(step)) throw;
            }
        else if (name.starts_with("latest.") && name.ends_with(".tmp"))
            ::unlink(of(name).c_str());
    if (::mkdir(temporary(step).c_str(), 0777) != 0) file_failed(temporary(step), "cannot be created", errno);
}

[[gnu::cold]] DDP_DECL checkpoint_shard checkpoint_directory::write_shard(std::uint64_t step, int rank, int ranks,
                                                                          std::vector<tensor_view> const& tensors,
                                                                          string_map const& metadata) const {
    std::string const path = temporary(step) + "/" + shard_name(rank, ranks);
    write_safetensors(path, tensors, metadata);
    return {rank, file_source(path).size(), digest_of_file(path)};
}

[[gnu::cold]] DDP_DECL void checkpoint_directory::commit(checkpoint_manifest const& manifest) const {
    std::string const name = step_name(manifest.step), from = temporary(manifest.step);
    std::string const text = manifest_text(manifest), path_of_text = from + "/manifest.json";
    if (text.size() > manifest_bytes)
        throw data_error(errc::file, concat({path_of_text, ": would have ", text.size(), " bytes, of at most ",
                                             manifest_bytes, "; save less in the entries"}));
    try {
        (void)parse_manifest(text, path_of_text);
    } catch (data_error const& e) {  // what resume() would refuse is no checkpoint, and earlier ones stay
        throw data_error(errc::file, concat({path_of_text, ": could not be read again: ", e.what()}));
    }
    for (checkpoint_shard const& s : manifest.shards) {
        std::string const path = from + "/" + shard_name(s.rank, manifest.ranks);
        if (file_source(path).size() != s.bytes)
            throw data_error(errc::file, path + ": is not what that rank wrote; do all ranks see the same directory?");
    }
    auto const write = [](whole_file& file, std::string_view what) {
        file.write(as_const_bytes(std::span<char const>(what)));
    };
    whole_file about(path_of_text), latest(of("latest"));
    write(about, text);
    write(latest, name + "\n");  // most file systems that are full say so now, before anything has changed
    about.commit();
    flush_directory(from);
    put_in_place_of(from, of(name));
    flush_directory(path_);
    latest.commit();
}

[[gnu::cold]] DDP_DECL void checkpoint_directory::abandon(std::uint64_t step) const noexcept {
    try {
        remove_directory(temporary(step));
    } catch (...) {  // the next begin() tries again
    }
}

[[gnu::cold]] DDP_DECL std::string checkpoint_directory::remove_older(
    std::uint64_t step, std::size_t keep, std::set<std::string> const& broken) const noexcept try {
    std::size_t whole = 0;
    for (std::uint64_t const one : steps()) {  // from the newest on
        if (one > step) continue;
        std::string const name = of(step_name(one));
        if (whole < keep) {
            whole += one != step && broken.contains(step_name(one)) ? 0 : 1;
            continue;
        }
        // Renames it first: a partly removed checkpoint must not look like one.
        if (std::rename(name.c_str(), (name + ".tmp").c_str()) != 0) file_failed(name, "cannot be removed", errno);
        remove_directory(name + ".tmp");
    }
    // One of the same step, which was replaced.
    remove_directory(temporary(step));
    remove_directory(concat({of(step_name(step)), replaced_suffix}));
    return {};
} catch (std::exception const& e) {
    try {
        return e.what();
    } catch (...) {
        return {};
    }
}

/// The newest comes first.
[[gnu::cold]] DDP_DECL std::vector<std::uint64_t> checkpoint_directory::steps() const {
    std::vector<std::uint64_t> all;
    for (std::string const& name : names_in(path_))
        if (auto const step = step_of(name)) all.push_back(*step);
    std::sort(all.rbegin(), all.rend());
    return all;
}

[[gnu::cold]] DDP_DECL std::vector<std::string> checkpoint_directory::candidates(std::string& complaint) const {
    put_back_replaced(path_);
    std::vector<std::uint64_t> const all = steps();
    std::vector<std::string> names;
    std::optional<std::uint64_t> latest;
    struct stat there{};
    bool const said = ::stat(of("latest").c_str(), &there) == 0;
    if (all.empty() && !said) return names;
    try {
        file_source file(of("latest"));
        std::string text(64, '\0');
        text.resize(file.read(as_mutable_bytes(std::span<char>(text))));
        if (text.ends_with('\n')) latest = step_of(std::string_view(text).substr(0, text.size() - 1));
        if (!latest) complaint = of("latest") + ": does not name a checkpoint";
    } catch (data_error const& e) {
        complaint = e.what();
    }
    if (!latest && all.empty()) throw data_error(errc::format, complaint + ", and there is none beside it");
    if (latest) names.push_back(step_name(*latest));
    for (std::uint64_t const step : all)
        if (!latest || step < *latest) names.push_back(step_name(step));
    for (std::uint64_t const step : all)
        if (latest && step > *latest) names.push_back(step_name(step));
    return names;
}

[[gnu::cold]] DDP_DECL checkpoint_manifest checkpoint_directory::manifest_of(std::string const& name,
                                                                             std::uint64_t& text_digest,
                                                                             int rank) const {
    std::string const path = of(name) + "/manifest.json";
    expect_there(path, rank);
    file_source file(path);
    if (file.size() > manifest_bytes)
        throw data_error(errc::format, concat({path, ": is larger than ", manifest_bytes, " bytes"}));
    std::string text(static_cast<std::size_t>(file.size()), '\0');
    text.resize(file.read(as_mutable_bytes(std::span<char>(text))));
    text_digest = digest().add(text).value();
    checkpoint_manifest manifest = parse_manifest(text, path);
    if (step_name(manifest.step) != name)
        throw data_error(errc::format, concat({path, ": is that of step ", manifest.step}));
    return manifest;
}

}  // namespace ddp::detail
