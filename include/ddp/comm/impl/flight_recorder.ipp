/// \file
/// What comm/flight_recorder.hpp declares.
#pragma once

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include <fcntl.h>
#include <unistd.h>

#include <ddp/comm/flight_recorder.hpp>

namespace ddp {
namespace detail {

inline constexpr std::array<std::string_view, 11> flight_names = {
    "phase", "waits", "finished", "entered", "mark", "left", "record", "closed", "silent", "failed", "verdict"};
/// Keeps what fits, with a zero at the end.
template <std::size_t N>
void keep(std::string_view text, std::array<char, N>& to) noexcept {
    std::copy_n(text.begin(), std::min(text.size(), N - 1), to.begin());
}
[[nodiscard]] inline std::int64_t flight_time(time_point at) noexcept {
    return std::chrono::duration_cast<nanoseconds>(at.time_since_epoch()).count();
}
[[nodiscard]] inline std::int64_t flight_clock() noexcept {
    return flight_time(monotonic_clock::now());
}

}  // namespace detail

[[gnu::cold]] DDP_DECL flight_recorder::flight_recorder(int rank, int size, std::string_view transport) noexcept
    : flight_recorder(rank, size, detail::lasting_ring.exchange(nullptr), std::getenv("DDP_FLIGHT_DIR")) {
    ring_->next = 0;  // whatever an earlier process has left there
    ring_->begun = detail::flight_clock();
    ring_->pid = ::getpid();
    detail::keep(transport, ring_->transport);
    if (char const* const job = std::getenv("DDP_JOB_ID")) detail::keep(job, job_);
}
[[gnu::cold]] DDP_DECL flight_recorder::flight_recorder(int rank, int size, detail::flight_ring* ring,
                                                        char const* path) noexcept
    : ring_(ring != nullptr ? ring : &own_), rank_(rank), size_(size) {
    ring_->transport.back() = '\0';  // whatever the process has written there
    if (::gethostname(host_.data(), host_.size() - 1) != 0) host_[0] = '\0';
    if (path != nullptr && *path != '\0') {
        bool const known = *path == '/' || ::getcwd(directory_.data(), directory_.size()) != nullptr;
        put_all(directory_.data(), *path == '/' ? "" : "/", path);
        directory_ = {};
        constexpr std::size_t rest = 40;  // "/rank-R.N.jsonl"
        errno = known ? ENAMETOOLONG : errno;
        if (known && filled_ + rest <= directory_.size())
            detail::keep(std::string_view(out_.data(), filled_), directory_);
        else
            complain(path);
        filled_ = 0;
    }
}
[[gnu::cold]] DDP_DECL flight_recorder::~flight_recorder() {
    if (ring_->pid == ::getpid()) {
        record(flight::left);
        if (file_ >= 0) dump("end");
    }
    if (file_ >= 0) ::close(file_);
}

DDP_DECL std::uint64_t flight_recorder::check_of(std::uint64_t ticket, words const& of) noexcept {
    std::uint64_t sum = (ticket + 1) * 0x9e3779b97f4a7c15u;
    for (std::size_t i = 0; i + 1 < of.size(); ++i)
        sum += std::rotl(of[i] * 0xbf58476d1ce4e5b9u, static_cast<int>(8 * i));
    return sum | 1;  // never what an empty place holds
}
DDP_DECL void flight_recorder::record_at(time_point at, flight what, std::uint64_t number, std::int64_t whose,
                                         std::uint64_t count, char const* name) noexcept {
    words all{std::uint64_t{static_cast<std::uint8_t>(what)} << 32 | static_cast<std::uint32_t>(whose),
              static_cast<std::uint64_t>(detail::flight_time(at)), number, count};
    std::array<char, 24> text{};
    for (std::size_t i = 0; i < text.size() && name[i] != '\0'; ++i) text[i] = name[i];
    std::memcpy(&all[4], text.data(), text.size());
    std::uint64_t const ticket = ring_->next.fetch_add(1, std::memory_order_relaxed);
    all.back() = check_of(ticket, all);
    auto& place = ring_->places[ticket % capacity];
    for (std::size_t i = 0; i < all.size(); ++i) place[i].store(all[i], std::memory_order_relaxed);
}
DDP_DECL bool flight_recorder::read(std::uint64_t ticket, words& to) const noexcept {
    for (std::size_t i = 0; i < to.size(); ++i)
        to[i] = ring_->places[ticket % capacity][i].load(std::memory_order_relaxed);
    return to.back() == check_of(ticket, to) && to[0] >> 32 < detail::flight_names.size();
}
[[gnu::cold]] DDP_DECL std::uint64_t flight_recorder::read_newest(words& to) const noexcept {
    std::uint64_t const end = ring_->next.load(), count = std::min<std::uint64_t>(end, capacity);
    for (std::uint64_t i = 1; i <= count; ++i)
        if (read(end - i, to) && to[0] >> 32 <= static_cast<std::uint64_t>(flight::finished)) return end - i + 1;
    return 0;
}
[[gnu::cold]] DDP_DECL bounded_text<32> flight_recorder::phase() const noexcept {
    words entry{};
    if (read_newest(entry) == 0 || entry[0] >> 32 == static_cast<std::uint64_t>(flight::waits)) return {};
    if (entry[0] >> 32 == static_cast<std::uint64_t>(flight::finished)) return std::string_view("its own code");
    char text[64]{};
    std::snprintf(text, sizeof text, entry[2] == 0 ? "%.24s" : "%.24s of step %llu",
                  reinterpret_cast<char const*>(&entry[4]), static_cast<unsigned long long>(entry[2]));
    return std::string_view(text);
}
[[gnu::cold]] DDP_DECL void flight_recorder::fail(failure const& own) noexcept {
    record(flight::failed, 0, own.peer, static_cast<std::uint64_t>(own.code), detail::kind_name(own.kind));
}
[[gnu::cold]] DDP_DECL void flight_recorder::adopt(failure const& verdict) noexcept {
    record(flight::verdict, 0, verdict.peer, static_cast<std::uint64_t>(verdict.code));
    if (!has_text_.load()) {
        detail::keep(verdict.text.view(), text_);
        has_text_.store(true);
    }
    dump("verdict");
}

// Files

[[gnu::cold]] DDP_DECL void flight_recorder::put(std::string_view text) noexcept {
    std::size_t const n = std::min(text.size(), out_.size() - filled_);
    std::memcpy(out_.data() + filled_, text.data(), n);
    filled_ += n;
}
[[gnu::cold]] DDP_DECL void flight_recorder::put(std::int64_t number) noexcept {
    char digits[20];
    std::size_t first = sizeof digits;
    std::uint64_t rest =
        number < 0 ? std::uint64_t{0} - static_cast<std::uint64_t>(number) : static_cast<std::uint64_t>(number);
    do digits[--first] = static_cast<char>('0' + rest % 10);
    while ((rest /= 10) != 0);
    if (number < 0) put("-");
    put(std::string_view(digits + first, sizeof digits - first));
}
/// As a JSON string of ASCII only: all other bytes, and characters with a meaning in JSON, become \u00NN.
[[gnu::cold]] DDP_DECL void flight_recorder::put(quoted string) noexcept {
    put("\"");
    for (char const c : string.text) {
        auto const code = static_cast<unsigned char>(c);
        bool const plain = code >= 0x20 && code < 0x7f && c != '"' && c != '\\';
        char const escaped[] = {'\\', 'u', '0', '0', "0123456789abcdef"[code / 16], "0123456789abcdef"[code % 16]};
        put(plain ? std::string_view(&c, 1) : std::string_view(escaped, sizeof escaped));
    }
    put("\"");
}
[[gnu::cold]] DDP_DECL void flight_recorder::put_entry(std::uint64_t ticket, words const& of) noexcept {
    auto const what = static_cast<flight>(of[0] >> 32);
    bool const of_peer = what >= flight::record, of_group = what >= flight::waits && what <= flight::entered;
    bool const named = what != flight::phase && what != flight::mark;
    std::array<char, 25> name{};
    std::memcpy(name.data(), &of[4], 24);
    auto const number = [](std::uint64_t n) { return static_cast<std::int64_t>(n); };
    put_all("{\"seq\":", number(ticket), ",\"t_ns\":", number(of[1]),
            ",\"event\":", quoted{named ? detail::flight_names[of[0] >> 32] : std::string_view(name.data())});
    if (named && name[0] != '\0') put_all(of_peer ? ",\"kind\":" : ",\"name\":", quoted{name.data()});
    if (of[2] != 0 && !of_peer) put_all(",\"number\":", number(of[2]));
    if (of_peer || of_group) put_all(of_peer ? ",\"peer\":" : ",\"group\":", static_cast<std::int32_t>(of[0]));
    if (of[3] != 0) put_all(of_peer ? ",\"code\":" : ",\"count\":", number(of[3]));
    put("}\n");
}
[[gnu::cold]] DDP_DECL void flight_recorder::say() noexcept {
    [[maybe_unused]] ssize_t const n = ::write(STDERR_FILENO, out_.data(), filled_);
    filled_ = 0;
}
[[gnu::cold]] DDP_DECL void flight_recorder::complain(char const* path) noexcept {
    filled_ = 0;
    put_all("ddp: rank ", rank_, ": the flight record cannot be written: ", path, " (errno ", errno, ")\n");
    say();
}
[[gnu::cold]] DDP_DECL void flight_recorder::flush() noexcept {
    for (std::size_t done = 0; file_ >= 0 && done < filled_;) {
        ssize_t const n = ::write(file_, out_.data() + done, filled_ - done);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) {  // a full disk: no torn line stays, and nothing follows
            int const problem = errno;
            while (done > 0 && out_[done - 1] != '\n') --done;
            [[maybe_unused]] int const cut = ::ftruncate(file_, written_ + static_cast<off_t>(done));
            ::close(std::exchange(file_, -1));
            errno = problem;
            return complain(directory_.data());
        }
        done += static_cast<std::size_t>(n);
    }
    written_ += static_cast<off_t>(filled_);
    filled_ = 0;
}
[[gnu::cold]] DDP_DECL bool flight_recorder::open() noexcept {
    if (file_ >= 0 || directory_[0] == '\0' || std::exchange(tried_, true)) return file_ >= 0;
    std::array<char, 512> path{};
    for (int again = 0; again < 10 && file_ < 0; ++again) {
        filled_ = 0;
        put_all(directory_.data(), "/rank-", rank_);
        if (again != 0) put_all(".", again);
        put(".jsonl");
        std::memcpy(path.data(), out_.data(), filled_);
        path[filled_] = '\0';
        file_ = ::open(path.data(), O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0600);
        if (file_ < 0 && errno != EEXIST) break;
    }
    filled_ = 0;
    if (file_ < 0) {
        complain(path.data());
        return false;
    }
    put_all("{\"event\":\"start\",\"version\":1,\"rank\":", rank_, ",\"size\":", size_, ",\"pid\":", ring_->pid,
            ",\"host\":", quoted{host_.data()}, ",\"transport\":", quoted{ring_->transport.data()},
            ",\"thread\":", quoted{thread_.load()}, ",\"job\":", quoted{job_.data()}, ",\"t_ns\":", ring_->begun,
            "}\n");
    return true;
}
[[gnu::cold]] DDP_DECL void flight_recorder::dump_once(char const* why) noexcept {
    if (!open()) return;
    constexpr std::size_t longest_line = 6 * sizeof(failure::text) + 480;  // the verdict's text, each byte escaped
    std::uint64_t const end = ring_->next.load();
    if (end > capacity) dumped_ = std::max(dumped_, end - capacity);
    words entry;
    auto const written = [&](std::uint64_t ticket) {
        if (!read(ticket, entry)) return false;
        if (out_.size() - filled_ < longest_line) flush();
        put_entry(ticket, entry);
        return true;
    };
    for (std::uint64_t& one : unfinished_)
        if (one != 0 && (one + capacity <= end || written(one - 1))) one = 0;
    for (; dumped_ < end; ++dumped_)
        if (!written(dumped_))
            if (auto const free = std::ranges::find(unfinished_, 0u); free != unfinished_.end()) *free = dumped_ + 1;
    flush();
    if (has_text_.load() && !std::exchange(wrote_text_, true))
        put_all("{\"event\":\"verdict_text\",\"text\":", quoted{text_.data()}, "}\n");
    put_all("{\"event\":\"dump\",\"why\":", quoted{why}, ",\"t_ns\":", detail::flight_clock(), "}\n");
    flush();
}
[[gnu::cold]] DDP_DECL void flight_recorder::dump(char const* why) noexcept {
    if (directory_[0] == '\0') return;
    int const kept = errno;
    again_.store(why);
    while (again_.load() != nullptr && !dumping_.exchange(true)) {
        if (char const* const reason = again_.exchange(nullptr)) dump_once(reason);
        dumping_.store(false);
    }
    errno = kept;
}
[[gnu::cold]] DDP_DECL void flight_recorder::dump_or_say(char const* why) noexcept {
    if (directory_[0] != '\0') return dump(why);
    if (dumping_.exchange(true)) return;
    words entry{};
    std::uint64_t const found = read_newest(entry);
    filled_ = 0;
    put_all("ddp: rank ", rank_, ": ");
    if (found != 0) {
        put_all((detail::flight_clock() - static_cast<std::int64_t>(entry[1])) / 1'000'000, " ms ago: ");
        put_entry(found - 1, entry);
        --filled_;  // the line feed
    }
    put_all(found != 0 ? "; " : "has done nothing yet; ",
            "DDP_FLIGHT_DIR=DIRECTORY makes it write its last events there\n");
    say();
    dumping_.store(false);
}

}  // namespace ddp
