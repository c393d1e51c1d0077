// A small trainer whose ranks misbehave on request, for faults_test.py and chaos.py.
//
//   fault_program steps=6 tensors=8 elements=20000 fault=1:kill:backward:3 [fault=…] [name=value …]
//
// fault=RANK:KIND:PHASE:STEP[:MILLISECONDS]. Phases: construct, bind, forward, backward (between two reports), slice
// (with slices=N, gradients are reported N elements at a time: between two ranges of one gradient), first_reduced and
// reduced (an observer's event, of the first and of the last bucket), stepping (when the optimizer is about to step
// its second range: in memory that ranks share, values of the first stand in the other ranks' replicas already),
// waiting (inside the step, while the next rank is late), between (two steps), barrier, allreduce, broadcast, array
// (inside, while the next rank is late; array: the allreduce of a shared_array of 100,000 floats, which a job has with
// that phase or with array=N only), end (after the last step). With strategy=averaging (local_sgd), diloco,
// slow_momentum and elastic, whose ranks meet after every second step: meeting (inside, while the next rank is late),
// meet (just before its sum); likewise strategy=hierarchical, whose ranks meet in pairs after every second step, and all
// after every fourth. Also strategy=gossip, gossip_ring and stale, whose ranks meet in each step. With checkpoint=: saving
// (inside, while the next rank is late). Kinds: see misbehave().
// fault=RANK:KIND:PHASE:STEP:WHERE. nan, infinity and -infinity (in backward) take the place of an element of the
// gradient: WHERE counts those of all parameters. flip_value and flip_state (between, just before step STEP) and
// flip_gradient (reduced: of the mean gradient that this rank steps with) flip a bit: WHERE = 32 * element + bit.
// momentum=0.9: the optimizer has a state. nonfinite=stop or skip, agreement=N: of training_options; with goes_on=1 a
// rank that gets E105 goes on with the next step.
// fault=RANK:occupied:between:STEP:MILLISECONDS: asleep in a long_operation of limit=MILLISECONDS.
// checkpoint=DIRECTORY: steps alone, resumed from the newest checkpoint there. every=N saves; with stops=1, SIGTERM, SIGINT and
// SIGUSR1 to any rank make all save, and end with 75.
// apart=N: after training, all ranks but rank 0 share N doubles each, in a group of their own.
//
// Prints, with times of the monotonic clock that all processes share, in nanoseconds:
//   fault rank=1 at=…                   just before it happens
//   error rank=0 at=… since=… text=…    what a rank's call threw; since: when it last came from its own code
//   values rank=0 steps=… torn=… digest=…   what the rank holds after an error in its loop
//   array rank=0 memory=…               whether all ranks see the shared_array
//   done rank=0 digest=… steps=… processor=…   milliseconds of processor time that the process has used
//   skipped rank=0 number=…  caught rank=0 number=… text=…   a step that was not made
//   ready rank=0 resumed=…  stopped rank=0 number=… digest=…   with checkpoint=
// and with digests=1, after each step, made or not:
//   step rank=0 number=… took=… digest=…   took: in nanoseconds
//
// CHAOS_PROXY=PORT lets the rank reach the others' own ports by way of a proxy at that port of 127.0.0.1
// (chaos_proxy.py); its connection to the rendezvous stays direct. It stands in for a system call, so it works
// whatever ranks say to each other.
//
// claim=RANK:SIZE prints `claim=` and, in hexadecimal, what a rank of this job would send to the store first, once without a
// secret and once with another than the job's, and ends. protect=0: connections prove nothing, as with plain ddp::tcp.
//
// BLIND_TO=1,2 keeps from this rank the descriptors of memory that ranks 1 and 2 send it, as a sandbox may; with
// BLIND_BYTES=N only those of more bytes of memory. BLIND_SEND=1 lets it send none.
// With a secret (DDP_SECRET_FILE) `start` says how many connections of the rank prove or encrypt. prove=1: all of them
// prove it, as between hosts, not only those to rank 0's store.
//
// DDP_TEST_TIME_SCALE multiplies all times, for programs that a sanitizer slows down.
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <chrono>
#include <concepts>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ddp/checkpoint/checkpoints.hpp>
#include <ddp/checkpoint/stop_signals.hpp>
#include <ddp/collective/shared_array.hpp>
#include <ddp/comm/long_operation.hpp>
#include <ddp/ddp.hpp>
#include <ddp/exchange/narrow.hpp>
#include <ddp/exchange/power_sgd.hpp>
#include <ddp/exchange/sparse.hpp>
#include <ddp/rendezvous/environment.hpp>
#include <ddp/rendezvous/tcp_store_protocol.hpp>
#include <ddp/strategy/averaging.hpp>
#include <ddp/strategy/local_parallel.hpp>
#include <ddp/strategy/loose.hpp>
#include <ddp/strategy/outer_step.hpp>
#include <ddp/strategy/stale_synchronous.hpp>
#if defined(FAULT_PROGRAM_MPI)
#include <ddp/rendezvous/run_mpi.hpp>

#include <mpi.h>
#include <boost/mpi/environment.hpp>
#else
#include <ddp/rendezvous/run_secure.hpp>
#include <ddp/rendezvous/secure_channel.hpp>
#endif
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

extern char** environ;

// The system's connect, under a name of our own: the program's definition comes before the C library's.
extern "C" int chaos_connect(int fd, ::sockaddr const* to, ::socklen_t size) __asm__("connect");

int chaos_connect(int fd, ::sockaddr const* to, ::socklen_t size) {
    char const* const proxy = std::getenv("CHAOS_PROXY");
    char const* const rendezvous = std::getenv("MASTER_PORT");
    auto const direct = [&](void const* there) { return static_cast<int>(::syscall(SYS_connect, fd, there, size)); };
    if (proxy == nullptr || rendezvous == nullptr || to->sa_family != AF_INET) return direct(to);
    ::sockaddr_in at;
    std::memcpy(&at, to, sizeof at);
    std::uint32_t const port = ntohs(at.sin_port);
    if (port == static_cast<std::uint32_t>(std::atoi(rendezvous))) return direct(to);
    at.sin_port = htons(static_cast<std::uint16_t>(std::atoi(proxy)));
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int const flags = ::fcntl(fd, F_GETFL);
    ::fcntl(fd, F_SETFL, flags & ~O_NONBLOCK);
    // Who calls, and whom: then it is as if the proxy were not there.
    char const* const rank = std::getenv("RANK");
    std::uint32_t const words[4] = {0x6f616863, 0x00000073, static_cast<std::uint32_t>(std::atoi(rank)), port};
    int result = direct(&at);
    if (result == 0 && ::send(fd, words, sizeof words, MSG_NOSIGNAL) != sizeof words) result = -1;
    ::fcntl(fd, F_SETFL, flags);
    return result;
}

// Memory is named after the rank that makes it, and a descriptor that comes from a rank of BLIND_TO is lost on the way.
extern "C" int blind_memfd(char const* name, unsigned int flags) __asm__("memfd_create");
extern "C" ::ssize_t blind_sendmsg(int fd, ::msghdr const* message, int flags) __asm__("sendmsg");
extern "C" ::ssize_t blind_recvmsg(int fd, ::msghdr* message, int flags) __asm__("recvmsg");

namespace {

std::string variable(char const* name) {
    char const* const value = std::getenv(name);
    return value == nullptr ? "" : value;
}

std::string rank_of_process() {
    for (char const* const name : {"RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"})
        if (std::string const rank = variable(name); !rank.empty()) return rank;
    return "";
}

}  // namespace

int blind_memfd(char const* name, unsigned int flags) {
    std::string const longer = std::string(name) + "-rank-" + rank_of_process() + "-";
    return static_cast<int>(::syscall(SYS_memfd_create, longer.c_str(), flags));
}

::ssize_t blind_sendmsg(int fd, ::msghdr const* message, int flags) {
    if (message->msg_controllen != 0 && !variable("BLIND_SEND").empty()) {
        errno = EPERM;
        return -1;
    }
    return ::syscall(SYS_sendmsg, fd, message, flags);
}

::ssize_t blind_recvmsg(int fd, ::msghdr* message, int flags) {
    ::ssize_t const got = ::syscall(SYS_recvmsg, fd, message, flags);
    ::cmsghdr const* const header = got < 0 ? nullptr : CMSG_FIRSTHDR(message);
    std::string const from =
        header == nullptr || header->cmsg_type != SCM_RIGHTS ? "" : "," + variable("BLIND_TO") + ",";
    if (from.size() < 3) return got;
    int descriptor = -1;
    std::memcpy(&descriptor, CMSG_DATA(header), sizeof descriptor);
    char link[64] = {};
    struct ::stat status{};
    if (::readlink(("/proc/self/fd/" + std::to_string(descriptor)).c_str(), link, sizeof link - 1) < 0 ||
        ::fstat(descriptor, &status) != 0)
        std::_Exit(72);
    std::string const name = link, before = "/memfd:ddp-rank-";  // … and "1- (deleted)"
    std::string const least = variable("BLIND_BYTES");
    if (name.substr(0, before.size()) != before || (!least.empty() && status.st_size < std::stoll(least))) return got;
    std::string const rank = name.substr(before.size(), name.rfind('-') - before.size());
    if (from.find("," + rank + ",") == std::string::npos) return got;
    ::close(descriptor);
    message->msg_controllen = 0;
    message->msg_flags |= MSG_CTRUNC;
    return got;
}

namespace {

std::int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

// One write a line: nothing is lost when the next thing that happens is SIGKILL.
void say(std::string line) {
    line += '\n';
    if (::write(STDOUT_FILENO, line.data(), line.size()) < 0) std::_Exit(70);
}

struct fault {
    int rank = -1;
    std::string kind, phase;
    std::uint64_t step = 0;
    int milliseconds = 0;
    std::size_t where = 0;
};

struct settings {
    ddp::run_options run;
    std::uint64_t steps = 6;
    std::size_t tensors = 8, elements = 20000, bucket = 64 << 10;
    std::size_t apart = 0;
    int pause = 0;           // milliseconds in every forward
    int limit = 60'000;      // milliseconds, of a long_operation
    int linger = 0;          // milliseconds before the process ends, where it ends with an error
    std::size_t slices = 0;  // elements of a gradient that are reported at once; 0: all
    bool digests = false;
    std::string algorithm = "auto", exchange = "none", update = "automatic", strategy;
    bool share = true;
    bool releases = false;  // the model does not read a value again once its gradient is reported
    bool clip = false;
    bool multiple = false;  // over MPI: at MPI_THREAD_MULTIPLE, where a thread of the library's calls MPI
    std::size_t array = 0;  // elements of a shared_array; 0: none
    double momentum = 0;
    ddp::nonfinite nonfinite = ddp::nonfinite::unchecked;
    bool goes_on = false;  // after a step whose gradient was not finite
    std::size_t agreement = ddp::training_options{}.agreement_steps;
    std::string checkpoint;   // a directory; empty: none
    std::uint64_t every = 0;  // steps between two checkpoints; 0: none but the one at a signal
    bool stops = false;       // on a signal
    std::vector<fault> faults;
};

// secure_tcp, with a count of the connections that have a channel, and proofs between all ranks if that is asked for.
struct checked_channels {
    static inline bool proves = false, plain = false;
    static inline std::atomic<int> made{0};
#if defined(FAULT_PROGRAM_MPI)
    using launch = ddp::mpi;
#else
    struct counted final : ddp::tcp_security {
        explicit counted(std::unique_ptr<ddp::tcp_security> of) : inner(std::move(of)) {}
        [[nodiscard]] std::unique_ptr<ddp::tcp_channel> channel(bool dials) const override {
            ++made;
            return inner->channel(dials);
        }
        std::unique_ptr<ddp::tcp_security> inner;
    };
    struct launch : ddp::secure_tcp {
        static void start(ddp::run_options const& options, ddp::function_ref<void(ddp::communicator<>&)> body) {
            if (plain) return ddp::tcp::start(options, body);
            ddp::run_options with = options;
            with.encrypt = with.encrypt || proves;  // asks for a channel between all ranks: which, is said here
            ddp::detail::start_tcp(
                with,
                [](ddp::job_secret const& secret, bool encrypts) -> std::unique_ptr<ddp::tcp_security> {
                    return std::make_unique<counted>(ddp::make_tcp_security(secret, encrypts && !proves));
                },
                body);
        }
    };
#endif
};

// What every time is multiplied by.
int time_scale() {
    static int const scale = [] {
        char const* const text = std::getenv("DDP_TEST_TIME_SCALE");
        return text == nullptr ? 1 : std::stoi(text);
    }();
    return scale;
}

// The first bytes of a rank of this job, and of this version, that does not know the secret.
std::string claim_of(int rank, int size, bool guesses) {
    ddp::detail::store_hello hello;
    hello.rank = rank;
    hello.size = size;
    auto const job = ddp::job_from_environment();
    if (job && !job->id.empty()) hello.job = ddp::digest{}.add(std::string_view(job->id)).value();
    hello.who = ddp::bounded_text<72>("pid 1 on elsewhere");
    if (guesses) hello.secret.bytes.fill(std::byte{'0'});
    std::string all;
    for (std::byte const b : ddp::bytes_of(hello)) {
        char two[3];
        std::snprintf(two, sizeof two, "%02x", static_cast<unsigned>(b));
        all += two;
    }
    return all;
}

settings parse(int argc, char** argv) {
    settings with;
    with.run.times = ddp::timing::for_tests();
    for (int i = 1; i < argc; ++i) {
        std::string const word = argv[i];
        auto const equals = word.find('=');
        std::string const name = word.substr(0, equals), value = word.substr(equals + 1);
        auto const milliseconds = [&] { return std::chrono::milliseconds(std::stoi(value)); };
        if (name == "steps")
            with.steps = std::stoull(value);
        else if (name == "tensors")
            with.tensors = std::stoull(value);
        else if (name == "elements")
            with.elements = std::stoull(value);
        else if (name == "bucket")
            with.bucket = std::stoull(value);
        else if (name == "apart")
            with.apart = std::stoull(value);
        else if (name == "pause")
            with.pause = std::stoi(value);
        else if (name == "linger")
            with.linger = std::stoi(value);
        else if (name == "limit")
            with.limit = std::stoi(value);
        else if (name == "slices")
            with.slices = std::stoull(value);
        else if (name == "digests")
            with.digests = value == "1";
        else if (name == "algorithm")
            with.algorithm = value;
        else if (name == "exchange")
            with.exchange = value;
        else if (name == "update")
            with.update = value;
        else if (name == "strategy")
            with.strategy = value;
        else if (name == "share")
            with.share = value == "1";
        else if (name == "releases")
            with.releases = value == "1";
        else if (name == "clip")
            with.clip = value == "1";
        else if (name == "mpi" && value == "multiple")
            with.multiple = true;
        else if (name == "array")
            with.array = std::stoull(value);
        else if (name == "momentum")
            with.momentum = std::stod(value);
        else if (name == "nonfinite")
            with.nonfinite = value == "skip" ? ddp::nonfinite::skip : ddp::nonfinite::stop;
        else if (name == "goes_on")
            with.goes_on = value == "1";
        else if (name == "agreement")
            with.agreement = std::stoull(value);
        else if (name == "checkpoint")
            with.checkpoint = value;
        else if (name == "every")
            with.every = std::stoull(value);
        else if (name == "stops")
            with.stops = value == "1";
        else if (name == "protect")
            checked_channels::plain = value == "0";
        else if (name == "claim") {
            int const rank = std::stoi(value), size = std::stoi(value.substr(value.find(':') + 1));
            for (bool const guesses : {false, true}) std::puts(("claim=" + claim_of(rank, size, guesses)).c_str());
            std::exit(0);
        } else if (name == "prove")
            checked_channels::proves = value == "1";
        else if (name == "thread" && value == "rests")
            with.run.thread = ddp::communication_thread::rests;
        else if (name == "transport")
            with.run.transport = value;
        else if (name == "ranks")
            with.run.ranks = std::stoi(value);
        else if (name == "times" && value == "default")
            with.run.times = {};
        else if (name == "suspect")
            with.run.times.suspect = milliseconds();
        else if (name == "dead")
            with.run.times.dead = milliseconds();
        else if (name == "collective")
            with.run.times.collective = milliseconds();
        else if (name == "straggler")
            with.run.times.straggler = milliseconds();
        else if (name == "handshake")
            with.run.times.handshake = milliseconds();
        else if (name == "join")
            with.run.times.join = milliseconds();
        else if (name == "fault") {
            std::vector<std::string> parts(1);
            for (char const c : value)
                if (c == ':')
                    parts.emplace_back();
                else
                    parts.back() += c;
            parts.resize(5, "0");
            with.faults.push_back({std::stoi(parts[0]), parts[1], parts[2], std::stoull(parts[3]), std::stoi(parts[4]),
                                   std::stoull(parts[4])});
            if (parts[2] == "array" && with.array == 0) with.array = 100'000;
        } else {
            throw std::invalid_argument("fault_program: there is no option " + word);
        }
    }
    ddp::timing& times = with.run.times;
    for (auto* const time : {&times.heartbeat, &times.suspect, &times.dead, &times.collective, &times.straggler,
                             &times.end_of_file, &times.verdict, &times.handshake, &times.join, &times.shutdown})
        *time *= time_scale();
    for (fault& f : with.faults) f.milliseconds *= time_scale();
    with.pause *= time_scale();
    with.limit *= time_scale();
    with.linger *= time_scale();
    return with;
}

// What a rank does wrong, and when it was last in its own code.
class trouble {
public:
    trouble(settings const& with, int rank, int size) : with_(with), rank_(rank), size_(size) {}

    // Returns the fault of this kind that is due here, or none. For what a rank does instead of the right thing.
    [[nodiscard]] fault const* due(std::string const& kind, std::string const& phase, std::uint64_t step) const {
        for (fault const& f : with_.faults)
            if (f.rank == rank_ && f.kind == kind && f.phase == phase && f.step == step) return &f;
        return nullptr;
    }
    void announce() const { say("fault rank=" + std::to_string(rank_) + " at=" + std::to_string(now_ns())); }

    void at(std::string const& phase, std::uint64_t step) {
        if (phase == "forward") {
            ranges_ = 0;
            step_ = step;
        }
        for (fault const& f : with_.faults)
            if (f.phase == phase && f.step == step && f.rank == rank_) misbehave(f);
        since_ = now_ns();
    }
    // Of every range that the optimizer steps.
    void stepping() {
        if (++ranges_ == 2) at("stepping", step_);
    }
    // Inside a blocking call: the rank enters it and is struck there, for the next rank comes 200 ms late.
    void within(std::string const& phase, std::uint64_t step) {
        for (fault const& f : with_.faults) {
            if (f.phase != phase || f.step != step) continue;
            if (f.rank == rank_)
                std::thread([this, f] {
                    std::this_thread::sleep_for(std::chrono::milliseconds(80 * time_scale()));
                    misbehave(f);
                }).detach();
            else if ((f.rank + 1) % size_ == rank_)
                std::this_thread::sleep_for(std::chrono::milliseconds(200 * time_scale()));
        }
        since_ = now_ns();
    }
    [[nodiscard]] std::int64_t since() const { return since_; }

private:
    void misbehave(fault const& f) const {
        for (char const* const done_elsewhere : {"occupied", "other", "count", "root", "return", "skip", "nan",
                                                 "infinity", "-infinity", "flip_value", "flip_state", "flip_gradient"})
            if (f.kind == done_elsewhere) return;
        auto const until = std::chrono::steady_clock::now() + std::chrono::milliseconds(f.milliseconds);
        if (f.kind == "stop" && f.milliseconds > 0) {  // somebody has to wake us
            std::string command = "sleep " + std::to_string(f.milliseconds / 1000) + "." +
                                  std::to_string(1000 + f.milliseconds % 1000).substr(1) + "; kill -CONT " +
                                  std::to_string(::getpid());
            std::string shell = "sh", option = "-c";
            char* const words[] = {shell.data(), option.data(), command.data(), nullptr};
            pid_t child = 0;
            if (::posix_spawn(&child, "/bin/sh", nullptr, nullptr, words, environ) != 0) std::_Exit(71);
        }
        announce();
        if (f.kind == "kill")
            ::raise(SIGKILL);
        else if (f.kind == "segv")
            ::raise(SIGSEGV);
        else if (f.kind == "abort")
            std::abort();
        else if (f.kind == "memory")
            exhaust_memory();
        else if (f.kind == "files")
            allow_no_more_files();
        else if (f.kind == "stop")
            ::kill(::getpid(), SIGSTOP);
        else if (f.kind == "exit")
            std::exit(0);
        else if (f.kind == "throw")
            throw std::runtime_error("the lamp fell over");
        else if (f.kind == "sleep")
            std::this_thread::sleep_until(until);
        else if (f.kind == "spin")
            while (std::chrono::steady_clock::now() < until) {
            }
    }

    static void allow_no_more_files() {
        ::rlimit limit{3, 3};
        ::setrlimit(RLIMIT_NOFILE, &limit);
    }

    static void exhaust_memory() {
        ::rlimit limit{1 << 20, RLIM_INFINITY};
        ::setrlimit(RLIMIT_AS, &limit);
        std::vector<std::vector<char>> all;
        for (;;) all.emplace_back(std::size_t{1} << 24);
    }

    settings const& with_;
    int rank_, size_;
    std::int64_t since_ = now_ns();
    std::uint64_t step_ = 0;
    std::atomic<int> ranges_{0};
};

struct samples {
    std::uint64_t first = 0, count = 0;
    [[nodiscard]] std::uint64_t size() const { return count; }
};

void flip(float& number, std::size_t bit) {
    number = std::bit_cast<float>(std::bit_cast<std::uint32_t>(number) ^ std::uint32_t{1} << bit);
}

// Every value is drawn towards a number that depends on parameter, position and sample: loss (v - t)^2 / 2.
class pulled_values {
public:
    using element = float;

    pulled_values(settings const& with, trouble& ill) : with_(with), ill_(ill) {
        for (std::size_t i = 0; i < with.tensors; ++i) {
            bool const another = i + 1 == with.tensors && ill_.due("model", "construct", 0) != nullptr;
            shapes_.push_back({4, with.elements / 4 + another});
            own_.emplace_back(2 * count(i), 0.0f);
            values_.push_back(std::span(own_.back()).first(count(i)));
            gradients_.push_back(std::span(own_.back()).last(count(i)));
        }
    }

    std::vector<ddp::parameter<float>> parameters() {
        if (!listed_) ill_.at("construct", 0);
        listed_ = true;
        std::vector<ddp::parameter<float>> all;
        for (std::size_t i = 0; i < values_.size(); ++i)
            all.push_back({"w" + std::to_string(i), shapes_[i], values_[i], gradients_[i]});
        if (ill_.due("order", "construct", 0) != nullptr) std::ranges::reverse(all);
        return all;
    }
    void bind(ddp::storage<float> memory) {
        owner_ = std::move(memory.owner);
        values_ = std::move(memory.values);
        gradients_ = std::move(memory.gradients);
        ill_.at("bind", 0);
    }
    double forward(samples const& batch) {
        ++step_;
        ill_.at("forward", step_);
        if (with_.pause != 0) std::this_thread::sleep_for(std::chrono::milliseconds(with_.pause));
        batch_ = batch;
        double loss = 0;
        for (std::size_t i = 0; i < values_.size(); ++i) {
            float const away = values_[i].front() - target(i, 0, batch.first);
            loss += 0.5 * static_cast<double>(away) * static_cast<double>(away);
        }
        ill_.within("waiting", step_);
        return loss;
    }
    void backward(ddp::pass<float> how, auto const& ready) {
        std::size_t const first_bad = ill_.due("twice", "backward", step_) != nullptr ? 1 : 0;
        bool const silent = ill_.due("never", "backward", step_) != nullptr;
        bool const stray = ill_.due("stray", "backward", step_) != nullptr;
        float const share = how.scale / static_cast<float>(batch_.count);
        for (std::size_t i = values_.size(); i-- > 0;) {
            std::size_t const most = with_.slices == 0 ? values_[i].size() : with_.slices;
            for (std::size_t end = values_[i].size(); end > 0;) {  // ranges come from the end backwards
                std::size_t const first = end - std::min(end, most);
                for (std::size_t k = first; k < end; ++k) {
                    float sum = how.accumulate ? gradients_[i][k] : 0.0f;
                    for (std::uint64_t s = 0; s < batch_.count; ++s)
                        sum += share * (values_[i][k] - target(i, k, batch_.first + s));
                    gradients_[i][k] = sum;
                }
                spoil(i, first, end);
                if (with_.slices != 0) ready(i, first, end - first);
                if (first > 0 && i == values_.size() / 2 && end == values_[i].size()) ill_.at("slice", step_);
                end = first;
            }
            if (with_.slices == 0 && !(silent && i == 0)) ready(i);
            if (i == values_.size() / 2) ill_.at("backward", step_);
        }
        if (first_bad != 0) ready(std::size_t{1});
        if (stray) ready(values_.size() + 7);
    }
    // Element `where` of all parameters: which parameter, and which of its elements.
    [[nodiscard]] std::pair<std::size_t, std::size_t> place(std::size_t where) const {
        return {where / count(0), where % count(0)};
    }
    void flip_value(std::size_t where) {
        auto const [i, k] = place(where / 32);
        flip(values_[i][k], where % 32);
    }

private:
    // What is not a number takes the place of an element.
    void spoil(std::size_t parameter, std::size_t first, std::size_t end) {
        float const infinity = std::numeric_limits<float>::infinity();
        for (auto const& [kind, number] : {std::pair("nan", std::numeric_limits<float>::quiet_NaN()),
                                           std::pair("infinity", infinity), std::pair("-infinity", -infinity)})
            if (fault const* const f = ill_.due(kind, "backward", step_); f != nullptr) {
                auto const [i, k] = place(f->where);
                if (i != parameter || k < first || k >= end) continue;
                gradients_[i][k] = number;
                ill_.announce();
            }
    }
    [[nodiscard]] std::size_t count(std::size_t i) const { return shapes_[i][0] * shapes_[i][1]; }
    static float target(std::size_t i, std::size_t k, std::uint64_t sample) {
        std::uint64_t x = (sample + 1) * 0x9E3779B97F4A7C15u ^ (i << 40) ^ k;
        x = (x ^ x >> 29) * 0xBF58476D1CE4E5B9u;
        return static_cast<float>(x >> 40) * 0x1p-24f;
    }

    settings const& with_;
    trouble& ill_;
    std::vector<std::vector<std::size_t>> shapes_;
    std::vector<std::vector<float>> own_;
    std::shared_ptr<void> owner_;
    std::vector<std::span<float>> values_, gradients_;
    samples batch_;
    std::uint64_t step_ = 0;
    bool listed_ = false;
};

struct struck_sgd : ddp::sgd {
    trouble* ill = nullptr;
    template <std::floating_point E>
    void step(ddp::step_info const& at, std::span<E const> gradient, std::span<E> value,
              ddp::slot_spans<E> slots) const {
        ill->stepping();
        ddp::sgd::step(at, gradient, value, slots);
    }
};

struct watcher {
    trouble* ill;
    std::uint64_t begun = 0;
    void on(ddp::bucket_reduced const& event) {
        if (std::exchange(begun, event.step) != event.step) ill->at("first_reduced", event.step);
        if (event.bucket == 0) ill->at("reduced", event.step);
    }
};

// Flips a bit of the mean gradient that this rank is about to step with.
struct flips_gradients : watcher {
    pulled_values const* model;
    using watcher::on;
    void on(ddp::mean_gradient<float> const& event) {
        fault const* const f = ill->due("flip_gradient", "reduced", event.step);
        if (f == nullptr) return;
        auto const [i, k] = model->place(f->where / 32);
        if (event.parameter != i || k < event.begin || k >= event.begin + event.gradient.size()) return;
        flip(event.gradient[k - event.begin], f->where % 32);
        ill->announce();
    }
};

// A strategy that is struck in a meeting, of a group or of all.
template <class S>
struct struck : S {
    trouble* ill = nullptr;

    template <class State, class T, class E>
    void meet(State& kept, ddp::meeting<T, E> const& with) const {
        ill->at("meet", with.step);
        ill->within("meeting", with.step);
        S::meet(kept, with);
    }
};

template <class Comm>
void add_up(Comm& comm, ddp::shared_array<float> const& array, trouble& ill, std::uint64_t step) {
    std::fill(array.span().begin(), array.span().end(), static_cast<float>(comm.rank() + 1));
    ill.within("array", step);
    ddp::allreduce(comm, array);
    float const sum = static_cast<float>(comm.size() * (comm.size() + 1) / 2);
    if (std::count(array.span().begin(), array.span().end(), sum) != std::ssize(array.span()))
        throw std::logic_error("fault_program: the array holds another sum");
}

template <class Comm>
void collectives(Comm& comm, trouble& ill, std::uint64_t step) {
    std::vector<double> data(ill.due("count", "allreduce", step) != nullptr ? 9 : 10, 1.0);
    ill.within("barrier", step);
    if (ill.due("other", "barrier", step) != nullptr) {
        ill.announce();
        ddp::allreduce(comm, std::span<double>(data));
    }
    ddp::barrier(comm);
    ill.within("allreduce", step);
    if (ill.due("count", "allreduce", step) != nullptr) ill.announce();
    ddp::allreduce(comm, std::span<double>(data));
    ill.within("broadcast", step);
    int const root = ill.due("root", "broadcast", step) != nullptr ? 1 : 0;
    if (root != 0) ill.announce();
    ddp::broadcast(comm, std::span<double>(data), root);
}

// Of the optimizer's momentum.
template <class Trainer>
void flip_state(Trainer& trainer, std::size_t where, trouble const& ill) {
    auto const at = trainer.model().place(where / 32);
    std::string const name = "w" + std::to_string(at.first);
    trainer.for_each_state([&](ddp::state_slice const& s) {
        if (s.name != "momentum" || s.of != name || at.second < s.begin || at.second >= s.begin + s.count()) return;
        flip(s.as<float>()[at.second - s.begin], where % 32);
        ill.announce();
    });
}

// The samples of this rank in a step.
template <class Comm>
samples batch_of(Comm const& comm, std::uint64_t step) {
    auto const rank = static_cast<std::uint64_t>(comm.rank());
    return {(step * static_cast<std::uint64_t>(comm.size()) + rank) * 4, 2 + rank % 2};
}

template <class Comm, class Trainer>
bool loop(settings const& with, Comm& comm, trouble& ill, Trainer& trainer, auto const& digest) {
    std::string const me = " rank=" + std::to_string(comm.rank());
    auto const make = [&](std::uint64_t step, samples const& batch) {
        try {
            auto const result = trainer.step(batch);
            if constexpr (requires { result.skipped; })
                if (result.skipped) say("skipped" + me + " number=" + std::to_string(step));
        } catch (ddp::error const& e) {
            if (!with.goes_on || e.code() != ddp::errc::nonfinite) throw;
            say("caught" + me + " number=" + std::to_string(step) + " text=" + e.what());
        }
    };
    std::unique_ptr<ddp::shared_array<float>> array;
    if (with.array > 0) {
        array = std::make_unique<ddp::shared_array<float>>(comm, with.array);
        say("array rank=" + std::to_string(comm.rank()) +
            " memory=" + (ddp::in_memory(comm, *array) ? "shared" : "own"));
    }
    for (std::uint64_t step = 1; step <= with.steps; ++step) {
        if (ill.due("return", "between", step) != nullptr) {
            ill.announce();
            return false;
        }
        ill.at("between", step);
        if (fault const* const f = ill.due("occupied", "between", step); f != nullptr) {
            ddp::long_operation const scope(comm, "evaluation", std::chrono::milliseconds(with.limit));
            ill.announce();
            std::this_thread::sleep_for(std::chrono::milliseconds(f->milliseconds));
        }
        if (fault const* const f = ill.due("flip_value", "between", step); f != nullptr) {
            trainer.model().flip_value(f->where);
            ill.announce();
        }
        if constexpr (requires { trainer.for_each_state([](ddp::state_slice const&) {}); })
            if (fault const* const f = ill.due("flip_state", "between", step); f != nullptr)
                flip_state(trainer, f->where, ill);
        std::int64_t const began = now_ns();
        if (ill.due("skip", "between", step) == nullptr) {
            samples batch = batch_of(comm, step);
            if (ill.due("empty", "between", step) != nullptr) batch.count = 0;
            make(step, batch);
        } else {
            ill.announce();
        }
        if (with.digests)
            say("step" + me + " number=" + std::to_string(step) + " took=" + std::to_string(now_ns() - began) +
                " digest=" + digest());
        if (with.strategy.empty()) collectives(comm, ill, step);
        if (array) add_up(comm, *array, ill, step);
    }
    return true;
}

template <class Trainer>
std::string digest_of(Trainer& trainer) {
    char digest[40];
    std::snprintf(digest, sizeof digest, "%016llx", static_cast<unsigned long long>(trainer.digest_of_values()));
    return digest;
}

// Of this process.
long processor_milliseconds() {
    ::rusage used{};
    ::getrusage(RUSAGE_SELF, &used);
    return (used.ru_utime.tv_sec + used.ru_stime.tv_sec) * 1000 +
           (used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1000;
}

// Does it, and after an error says what the trainer holds.
template <class Comm, class Trainer>
auto telling_values(Comm const& comm, Trainer& trainer, auto const& body) {
    try {
        return body();
    } catch (ddp::error const& e) {
        if (e.code() == ddp::errc::nonfinite || dynamic_cast<ddp::comm_error const*>(&e) != nullptr)
            say("values rank=" + std::to_string(comm.rank()) + " steps=" + std::to_string(trainer.completed_steps()) +
                " torn=" + std::to_string(trainer.torn()) + " digest=" + digest_of(trainer));
        throw;
    }
}

template <class Comm, class Trainer>
void train_by(settings const& with, Comm& comm, trouble& ill, Trainer& trainer) {
    auto const hex = [&] { return digest_of(trainer); };
    bool const whole = telling_values(comm, trainer, [&] {
        if (!loop(with, comm, ill, trainer, hex)) return false;
        if constexpr (requires { trainer.synchronise(); }) trainer.synchronise();
        return true;
    });
    if (!whole) return;
    ill.at("end", 0);
    bool const same = trainer.replicas_identical();
    bool shared = false;
    if constexpr (requires { trainer.shares_memory(); }) shared = trainer.shares_memory();
    say("done rank=" + std::to_string(comm.rank()) + " digest=" + hex() +
        " steps=" + std::to_string(trainer.completed_steps()) + " replicas=" + (same ? "identical" : "different") +
        " memory=" + (shared ? "shared" : "own") + " messages=" + ddp::name_of(comm.messages()) +
        " here=" + std::to_string(comm.host().size()) + " host_messages=" + ddp::name_of(comm.host().messages()) +
        " processor=" + std::to_string(processor_milliseconds()));
}

// Returns the exit code.
template <class Comm, class Trainer>
int train_with_checkpoints(settings const& with, Comm& comm, trouble& ill, Trainer& trainer) {
    std::optional<ddp::stop_signals> signals;
    if (with.stops) signals.emplace();
    ddp::checkpoints kept(with.checkpoint);
    auto const from = kept.resume(trainer);
    std::string const me = " rank=" + std::to_string(comm.rank());
    auto const digest = [&] { return " digest=" + digest_of(trainer); };
    say("ready" + me + " resumed=" + std::to_string(from ? from->step : 0));
    for (std::uint64_t step = (from ? from->step : 0) + 1; step <= with.steps; ++step) {
        if (signals && signals->received()) trainer.request_stop();
        bool const stop = telling_values(comm, trainer, [&] {
            bool const asked = trainer.step(batch_of(comm, step)).stop;
            if (asked || (with.every != 0 && step % with.every == 0)) {
                ill.within("saving", step);
                kept.save(trainer);
            }
            return asked;
        });
        if (!stop) continue;
        say("stopped" + me + " number=" + std::to_string(step) + digest());
        return ddp::exit_to_be_resumed;
    }
    say("done" + me + digest() + " steps=" + std::to_string(trainer.completed_steps()) +
        " replicas=" + (trainer.replicas_identical() ? "identical" : "different"));
    return EXIT_SUCCESS;
}

struct releasing_values : pulled_values {
    using pulled_values::pulled_values;
    static constexpr bool ready_releases = true;
};

// Returns the exit code.
template <class Comm>
int train(settings const& with, Comm& comm, trouble& ill) {
    pulled_values model(with, ill);
    ddp::training_options options;
    if (with.update == "sharded") options.update = ddp::update::sharded;
    if (with.update == "replicated") options.update = ddp::update::replicated;
    options.share_memory = with.share;
    options.nonfinite = with.nonfinite;
    options.agreement_steps = with.agreement;
    if (with.clip) options.clip = ddp::clip_by_global_norm{.max_norm = 1.0};
    float const rate = ill.due("rate", "construct", 0) != nullptr ? 0.2f : 0.1f;
    if (rate != 0.1f || ill.due("model", "construct", 0) != nullptr) ill.announce();
    if (!with.strategy.empty()) {
        ddp::local_parallel trainer = [&] {
            auto const by = [&](auto strategy) {
                return ddp::local_parallel{model, ddp::sgd{.lr = rate}, comm, std::move(strategy)};
            };
            using groups = ddp::hierarchical_averaging<typename Comm::transport_type>;
            if (with.strategy == "averaging") return by(struck<ddp::local_sgd>{{.period = 2}, &ill});
            if (with.strategy == "hierarchical")
                return by(struck<groups>{{.inner = comm.split(comm.rank() / 2), .inner_period = 2, .period = 4}, &ill});
            if (with.strategy == "diloco") return by(struck<ddp::diloco>{{.period = 2}, &ill});
            if (with.strategy == "slow_momentum") return by(struck<ddp::slow_momentum>{{.period = 2}, &ill});
            if (with.strategy == "elastic") return by(struck<ddp::elastic_averaging>{{.period = 2}, &ill});
            if (with.strategy == "gossip") return by(ddp::gossip{});
            if (with.strategy == "gossip_ring") return by(ddp::gossip{.graph = ddp::gossip_graph::ring});
            if (with.strategy == "stale") return by(ddp::stale_synchronous{.staleness = 3});
            throw std::invalid_argument("fault_program: there is no strategy " + with.strategy);
        }();
        train_by(with, comm, ill, trainer);
        return EXIT_SUCCESS;
    }
    ddp::size_capped_buckets const buckets{.cap_bytes = with.bucket, .first_bytes = with.bucket / 4};
    auto const trainer_of = [&](auto& trained, auto const& exchange) {
        struck_sgd const optimizer{{.lr = rate, .momentum = with.momentum}, &ill};
        if (std::ranges::any_of(with.faults, [](fault const& f) { return f.kind == "flip_gradient"; }))
            return ddp::data_parallel{
                trained, optimizer, comm, options, exchange, buckets, flips_gradients{{.ill = &ill}, &trained}};
        return ddp::data_parallel{trained, optimizer, comm, options, exchange, buckets, watcher{&ill}};
    };
    if (with.releases) {
        releasing_values own(with, ill);
        auto trainer = trainer_of(own, ddp::any_allreduce::parse(with.algorithm));
        train_by(with, comm, ill, trainer);
        return EXIT_SUCCESS;
    }
    auto const trainer_with = [&](auto const& exchange) { return trainer_of(model, exchange); };
    auto trainer = with.exchange == "bfloat16"    ? trainer_with(ddp::bfloat16_exchange{})
                   : with.exchange == "half"      ? trainer_with(ddp::half_exchange{})
                   : with.exchange == "int8"      ? trainer_with(ddp::int8_exchange{})
                   : with.exchange == "top_k"     ? trainer_with(ddp::top_k_exchange{})
                   : with.exchange == "random_k"  ? trainer_with(ddp::random_k_exchange{})
                   : with.exchange == "power_sgd" ? trainer_with(ddp::power_sgd_exchange{.rank = 1})
                                                  : trainer_with(ddp::any_allreduce::parse(with.algorithm));
    if (!with.checkpoint.empty()) return train_with_checkpoints(with, comm, ill, trainer);
    train_by(with, comm, ill, trainer);
    return EXIT_SUCCESS;
}

}  // namespace

int main(int argc, char** argv) try {
    settings const with = parse(argc, argv);
#if defined(FAULT_PROGRAM_MPI)
    std::optional<boost::mpi::environment> own;
    if (with.multiple) own.emplace(boost::mpi::threading::multiple, false);
#endif
    int const code = ddp::run_main<ddp::threads, checked_channels::launch>(with.run, [&](auto& comm) -> int {
        trouble ill(with, comm.rank(), comm.size());
        say("start rank=" + std::to_string(comm.rank()) + " at=" + std::to_string(now_ns()) +
            " channels=" + std::to_string(checked_channels::made));
        try {
            int const result = train(with, comm, ill);
            if (with.apart != 0) {
                auto const group = comm.split(comm.rank() == 0 ? 0 : 1);
                ddp::shared_array<double> const numbers(group, with.apart);
                ddp::allreduce(group, numbers);
            }
            return result;
        } catch (std::exception const& e) {
            say("error rank=" + std::to_string(comm.rank()) + " at=" + std::to_string(now_ns()) +
                " since=" + std::to_string(ill.since()) + " text=" + e.what());
            throw;
        }
    });
    if (code != 0) std::this_thread::sleep_for(std::chrono::milliseconds(with.linger));
#if defined(FAULT_PROGRAM_MPI)
    // run() ends the job if it has initialised MPI itself. All have said why they fail, but for a frozen rank.
    if (code != 0 && own) {
        MPI_Request everybody = MPI_REQUEST_NULL;
        MPI_Ibarrier(MPI_COMM_WORLD, &everybody);
        for (int done = 0, waits = 0; done == 0 && waits < 500; ++waits) {
            MPI_Test(&everybody, &done, MPI_STATUS_IGNORE);
            std::this_thread::sleep_for(std::chrono::milliseconds(10));
        }
        MPI_Abort(MPI_COMM_WORLD, code);
    }
#endif
    return code;
} catch (std::exception const& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 2;
}
