// What bounds an allreduce of two processes: what they need without any library to copy, to add and to exchange as many bytes.
// One JSON line for each kind and size.
//
//   ./benchmark_bounds [copy] [add] [exchange]      (all three)
//
// copy      each process copies an array of its own
// add       two arrays lie in memory that both see: each process adds half of them, and stores the sum into both
// exchange  each sends an array to the other and reads as much, at the same time, over one TCP connection: on loopback, or with
//           RANK, WORLD_SIZE=2, MASTER_ADDR and MASTER_PORT to the other process that was started with these
//
// SIZES ("1048576 4194304 16777216 67108864": bytes of an array), ROUNDS (20, at most 100).
//
// med_us    from the moment when both are ready until both are done (exchange: until this one is), the median
// ok        what was copied, added or read is right
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <arpa/inet.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "../tools/ddp-perf/compiler.hpp"

namespace {

std::string setting(char const* name, char const* otherwise) {
    char const* const value = std::getenv(name);
    return value != nullptr && *value != '\0' ? value : otherwise;
}

void check(bool done, char const* what) {
    if (!done) throw std::runtime_error(std::string("bounds: ") + what + " failed");
}

/// Memory that this process and its child see.
std::byte* shared_bytes(std::size_t bytes) {
    void* const at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    check(at != MAP_FAILED, "mmap");
    return static_cast<std::byte*>(at);
}

/// Two processes wait for each other, on a core each.
struct meeting {
    std::atomic<std::uint32_t> come{0};
    void operator()() noexcept {
        std::uint32_t const round = come.fetch_add(1) / 2;
        for (int looks = 0; come.load() < 2 * (round + 1); ++looks)
            if (looks > 10'000) ::sched_yield();  // there is one core
    }
};

/// The median of ROUNDS times, after one that does not count. Both processes repeat equally often.
template <class Once>
double median_us(int rounds, Once const& once) {
    std::vector<double> times;
    for (int i = 0; i <= rounds; ++i) times.push_back(once());
    times.erase(times.begin());
    std::nth_element(times.begin(), times.begin() + rounds / 2, times.end());
    return times[static_cast<std::size_t>(rounds / 2)];
}

double since_us(std::chrono::steady_clock::time_point begin) {
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count();
}

void print(std::string_view kind, std::size_t bytes, double us, bool ok) {
    std::printf(R"({"bench":"bounds","kind":"%.*s","n":2,"bytes":%zu,"med_us":%.2f,"compiler":"%s","ok":%s})"
                "\n",
                static_cast<int>(kind.size()), kind.data(), bytes, us, ddp_perf::compiler, ok ? "true" : "false");
    std::fflush(stdout);
}

/// Runs `body(leads)` in this process and in a child. Returns whether both say that all was right.
template <class Body>
bool in_two(Body const& body) {
    ::pid_t const child = ::fork();
    check(child >= 0, "fork");
    if (child == 0) {
        bool fine = false;
        try {
            fine = body(false);
        } catch (std::exception const& e) {
            std::fprintf(stderr, "%s\n", e.what());
        }
        ::_exit(fine ? 0 : 1);
    }
    bool const mine = body(true);
    int status = 0;
    ::waitpid(child, &status, 0);
    return mine && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

void in_memory(std::string_view kind, std::size_t bytes, int rounds) {
    std::size_t const count = bytes / sizeof(float);
    auto* const meet = new (shared_bytes(sizeof(meeting))) meeting;
    float* const first = reinterpret_cast<float*>(shared_bytes(bytes));
    float* const second = reinterpret_cast<float*>(shared_bytes(bytes));
    std::fill_n(first, count, 1.0f);
    std::fill_n(second, count, 0.0f);
    double us = 0;
    bool const ok = in_two([&](bool leads) {
        std::vector<float> from(kind == "copy" ? count : 0, 3.0f), to(from.size());
        std::size_t const half = count / 2, begin = leads ? 0 : half, end = leads ? half : count;
        float* __restrict const a = first, * __restrict const b = second;
        double const median = median_us(rounds, [&] {
            (*meet)();
            auto const since = std::chrono::steady_clock::now();
            if (kind == "copy")
                std::memcpy(to.data(), from.data(), bytes);
            else
                for (std::size_t i = begin; i < end; ++i) a[i] = b[i] = a[i] + b[i];
            (*meet)();
            return since_us(since);
        });
        if (leads) us = median;
        if (kind == "copy") return to == from;
        float sum = 1;  // 1 + 0, then 1 + 1, 2 + 2, …
        for (int i = 0; i < rounds; ++i) sum += sum;
        return std::all_of(a + begin, a + end, [&](float x) { return x == sum; });
    });
    print(kind, bytes, us, ok);
    ::munmap(meet, sizeof(meeting));
    ::munmap(first, bytes);
    ::munmap(second, bytes);
}

/// A connection to the other process: the one that leads listens.
class line {
public:
    line(bool leads, int listening, ::sockaddr_in const& at) {
        for (int tries = 0; leads ? tries == 0 : tries < 500 && fd_ < 0; ++tries) {
            fd_ = leads ? ::accept(listening, nullptr, nullptr) : ::socket(AF_INET, SOCK_STREAM, 0);
            if (leads || ::connect(fd_, reinterpret_cast<::sockaddr const*>(&at), sizeof at) == 0) break;
            ::close(fd_);
            fd_ = -1;
            ::usleep(20'000);  // the other is not there yet
        }
        check(fd_ >= 0, leads ? "accept" : "connect");
        int const yes = 1;
        ::setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    }
    line(line const&) = delete;
    line& operator=(line const&) = delete;
    ~line() { ::close(fd_); }

    void exchange(std::vector<char> const& out, std::vector<char>& in) const {
        constexpr std::size_t most = std::size_t{256} << 10;
        for (std::size_t sent = 0, read = 0; sent < out.size() || read < in.size();) {
            ::ssize_t const s = sent == out.size() ? 0
                                                   : ::send(fd_, out.data() + sent, std::min(most, out.size() - sent),
                                                            MSG_DONTWAIT | MSG_NOSIGNAL);
            ::ssize_t const r =
                read == in.size() ? 0 : ::recv(fd_, in.data() + read, std::min(most, in.size() - read), MSG_DONTWAIT);
            check(read == in.size() || r != 0, "reading: the other process has ended, so it");
            sent += static_cast<std::size_t>(std::max<::ssize_t>(s, 0));
            read += static_cast<std::size_t>(std::max<::ssize_t>(r, 0));
            if (s > 0 || r > 0) continue;
            short const full = sent == out.size() ? 0 : POLLOUT;
            ::pollfd one{fd_, static_cast<short>(POLLIN | full), 0};
            check(::poll(&one, 1, 30'000) > 0, "waiting for 30 s");
        }
    }

private:
    int fd_ = -1;
};

::sockaddr_in address(std::string const& host, int port) {
    ::sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_port = htons(static_cast<std::uint16_t>(port));
    check(::inet_pton(AF_INET, host.c_str(), &at.sin_addr) == 1, "reading MASTER_ADDR, a number such as 10.0.0.1,");
    return at;
}

int listen_at(::sockaddr_in& at) {
    int const fd = ::socket(AF_INET, SOCK_STREAM, 0), yes = 1;
    ::socklen_t size = sizeof at;
    ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    check(::bind(fd, reinterpret_cast<::sockaddr const*>(&at), sizeof at) == 0 && ::listen(fd, 1) == 0, "listening");
    check(::getsockname(fd, reinterpret_cast<::sockaddr*>(&at), &size) == 0, "getsockname");
    return fd;
}

bool exchanges(line const& over, std::vector<std::size_t> const& sizes, int rounds, bool leads) {
    bool all = true;
    for (std::size_t const bytes : sizes) {
        std::vector<char> const out(bytes, leads ? 'l' : 'f');
        std::vector<char> in(bytes), right(bytes, leads ? 'f' : 'l');
        double const us = median_us(rounds, [&] {
            auto const since = std::chrono::steady_clock::now();
            over.exchange(out, in);
            return since_us(since);
        });
        all = all && in == right;
        if (leads) print("exchange", bytes, us, in == right);
    }
    return all;
}

void exchange(std::vector<std::size_t> const& sizes, int rounds) {
    if (std::string const rank = setting("RANK", ""); !rank.empty() && setting("WORLD_SIZE", "2") == "2") {
        bool const leads = rank == "0";
        ::sockaddr_in at = address(setting("MASTER_ADDR", "127.0.0.1"), std::stoi(setting("MASTER_PORT", "29500")));
        int const listening = leads ? listen_at(at) : -1;
        check(exchanges(line(leads, listening, at), sizes, rounds, leads), "the comparison of what was read");
        if (leads) ::close(listening);
        return;
    }
    ::sockaddr_in at = address("127.0.0.1", 0);
    int const listening = listen_at(at);
    check(in_two([&](bool leads) { return exchanges(line(leads, listening, at), sizes, rounds, leads); }), "a process");
    ::close(listening);
}

}  // namespace

int main(int argc, char** argv) try {
    std::vector<std::string_view> kinds(argv + 1, argv + argc);
    if (kinds.empty()) kinds = {"copy", "add", "exchange"};
    std::istringstream words(setting("SIZES", "1048576 4194304 16777216 67108864"));
    std::vector<std::size_t> sizes;
    for (std::size_t one = 0; words >> one;) sizes.push_back(one);
    int const rounds = std::stoi(setting("ROUNDS", "20"));
    check(rounds >= 1 && rounds <= 100, "reading ROUNDS, from 1 to 100,");
    for (std::string_view const kind : kinds) {
        check(kind == "copy" || kind == "add" || kind == "exchange",
              "finding a kind other than copy, add and exchange");
        if (kind == "exchange")
            exchange(sizes, rounds);
        else
            for (std::size_t const bytes : sizes) in_memory(kind, bytes, rounds);
    }
    return EXIT_SUCCESS;
} catch (std::exception const& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return EXIT_FAILURE;
}
