// The flight recorder: a ring in fixed memory, written as JSON lines while threads record; Python's parser reads every line.
#include <sys/stat.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <ddp/collective/barrier.hpp>
#include <ddp/comm/flight_recorder.hpp>
#include <ddp/core/random.hpp>
#include <ddp/rendezvous/flight_signal.hpp>
#include <ddp/rendezvous/run.hpp>

#include "support/catch.hpp"

using namespace ddp;

namespace {

/// A directory that is DDP_FLIGHT_DIR as long as this lives.
class flight_files {
public:
    flight_files() {
        std::string name = std::filesystem::temp_directory_path().string() + "/flight-XXXXXX";
        path = ::mkdtemp(name.data());
        ::setenv("DDP_FLIGHT_DIR", path.c_str(), 1);
    }
    ~flight_files() {
        ::unsetenv("DDP_FLIGHT_DIR");
        std::filesystem::remove_all(path);
    }
    [[nodiscard]] std::vector<std::string> lines(std::string const& file = "rank-0.jsonl") const {
        std::ifstream in(path + "/" + file);
        std::vector<std::string> all;
        for (std::string line; std::getline(in, line);) all.push_back(line);
        return all;
    }
    /// What Python's json says about all files: "" if each line is an object. `more`: code about `lines`, of all files.
    [[nodiscard]] std::string python(std::string const& more = "") const {
        std::ofstream(path + "/check.py") << "import json, glob, sys\n"
                                             "lines = []\n"
                                             "for name in sorted(glob.glob(sys.argv[1] + '/*.jsonl')):\n"
                                             "    text = open(name, 'rb').read()\n"
                                             "    assert text.endswith(b'\\n')\n"
                                             "    lines += [json.loads(l) for l in text.decode('ascii').splitlines()]\n"
                                             "assert all(isinstance(l, dict) for l in lines)\n" +
                                                 more;
        std::string said;
        std::FILE* const pipe = ::popen(("python3 " + path + "/check.py " + path + " 2>&1").c_str(), "r");
        for (int c; (c = std::fgetc(pipe)) != EOF;) said += static_cast<char>(c);
        ::pclose(pipe);
        return said;
    }

    std::string path;
};

std::uint64_t number_in(std::string const& line, std::string const& key) {
    auto const at = line.find("\"" + key + "\":");
    return at == std::string::npos ? 0 : std::strtoull(line.c_str() + at + key.size() + 3, nullptr, 10);
}
std::string text_in(std::string const& line, std::string const& key) {
    auto const at = line.find("\"" + key + "\":\"");
    if (at == std::string::npos) return "";
    return line.substr(at + key.size() + 4, line.find('"', at + key.size() + 4) - at - key.size() - 4);
}
std::size_t count(std::vector<std::string> const& lines, std::string const& event) {
    return static_cast<std::size_t>(
        std::count_if(lines.begin(), lines.end(), [&](auto const& l) { return text_in(l, "event") == event; }));
}

static_assert(sizeof(flight_recorder) < 75776, "fixed memory: nothing else is ever taken");

}  // namespace

TEST_CASE("the flight recorder says which phase the program is in", "[comm][flight]") {
    flight_recorder ring(0, 1, "test");
    CHECK(ring.phase().view().empty());
    ring.record(flight::phase, 0, 0, 0, "joining");
    CHECK(ring.phase().view() == "joining");
    ring.record(flight::phase, 57, 0, 0, "forward");
    for (int i = 0; i < 1000; ++i) ring.record(flight::entered, 58, 0, 4, "allreduce");
    CHECK(ring.phase().view() == "forward of step 57");
    ring.record(flight::waits, 58, 0, 0, "allreduce");
    CHECK(ring.phase().view().empty());
    ring.record(flight::finished, 58, 0, 0, "allreduce");
    CHECK(ring.phase().view() == "its own code");
    ring.record(flight::phase, ~std::uint64_t{0}, 0, 0, "a phase of 24 characters or more");
    CHECK(ring.phase().view() == "a phase of 24 characters of s...");
    for (std::size_t i = 0; i < flight_recorder::capacity; ++i) ring.record(flight::entered, 59, 0, 4, "allreduce");
    CHECK(ring.phase().view().empty());  // overwritten
}

TEST_CASE("the flight recorder keeps the last entries, and each dump writes what is new", "[comm][flight]") {
    flight_files files;
    constexpr std::uint64_t size = flight_recorder::capacity, first = 2500;
    {
        flight_recorder ring(0, 1, "test");
        for (std::uint64_t i = 1; i <= first; ++i) ring.record(flight::entered, i, 3, 2 * i, "allreduce");
        ring.dump("one");
        std::vector<std::string> const all = files.lines();
        REQUIRE(all.size() == size + 2);  // the start, the entries, the end of the dump
        CHECK(all[0].find("\"rank\":0,\"size\":1,\"pid\":" + std::to_string(::getpid())) != std::string::npos);
        for (std::size_t i = 0; i < size; ++i) {
            std::string const& line = all[i + 1];
            REQUIRE(number_in(line, "seq") == first - size + i);
            REQUIRE(number_in(line, "number") == first - size + i + 1);
            REQUIRE(number_in(line, "count") == 2 * number_in(line, "number"));
            REQUIRE(number_in(line, "group") == 3);
            REQUIRE(number_in(line, "t_ns") >= (i == 0 ? 1 : number_in(all[i], "t_ns")));
        }
        CHECK(text_in(all.back(), "why") == "one");
        struct ::stat info{};
        REQUIRE(::stat((files.path + "/rank-0.jsonl").c_str(), &info) == 0);
        CHECK((info.st_mode & 0777) == 0600);

        ring.record(flight::phase, 7, 0, 0, "forward");
        ring.dump("two");
        CHECK(files.lines().size() == all.size() + 2);
        ring.dump("three");
        CHECK(files.lines().size() == all.size() + 3);
        for (std::uint64_t i = 0; i < size; ++i) ring.record(flight::mark, 8, 0, 0, "reduced");
        ring.dump("four");
        CHECK(files.lines().size() == all.size() + 3 + size + 1);

        flight_recorder second(0, 1, "test");  // the file is there: it takes another name, and touches nothing
        second.record(flight::phase, 1, 0, 0, "forward");
        second.dump("other");
        CHECK(files.lines("rank-0.1.jsonl").size() == 3);
        CHECK(files.lines().size() == all.size() + 3 + size + 1);
    }
    CHECK(text_in(files.lines().back(), "why") == "end");
    CHECK(count(files.lines(), "left") == 1);
    CHECK(files.python() == "");
}

TEST_CASE("names and texts from anywhere leave every line of a flight record valid JSON", "[comm][flight]") {
    ::setenv("DDP_JOB_ID", "job \"\\\n\x1b[31m\xff", 1);
    flight_files files;
    flight_recorder ring(5, 9, "a \"transport\"");
    ring.record(flight::entered, 1, 0, 0, "\"},{\"x\":\"");
    ring.record(flight::entered, 2, 0, 0, "\\\\\\\n\r\t\x01\x7f");
    ring.record(flight::entered, 3, 0, 0, "\xc3\xa9\xff\xfe\x80");
    ring.record(flight::entered, 4, 0, 0, "twenty-four characters, and a few more that are cut");
    ring.record(flight::verdict, ~std::uint64_t{0}, -1, ~std::uint64_t{0});
    failure verdict;
    verdict.kind = static_cast<failure_kind>(200);
    verdict.peer = -7;
    verdict.text = std::string_view("rank 3 said \"\\\", \x1b]0;title\x07 and \x80\x81\x82");
    ring.fail(verdict);
    for (char& c : verdict.text.chars)
        if (c == '\0') c = '"';  // the longest line: characters that each take six
    ring.adopt(verdict);
    ::unsetenv("DDP_JOB_ID");
    CHECK(files.python("name = {l.get('number'): l.get('name') for l in lines if l['event'] == 'entered'}\n"
                       "assert lines[0]['job'] == 'job \"\\\\\\n\\x1b[31m\\xff', lines[0]\n"
                       "assert lines[0]['transport'] == 'a \"transport\"'[:15], lines[0]\n"
                       "assert name[1] == '\"},{\"x\":\"' and name[2] == '\\\\\\\\\\\\\\n\\r\\t\\x01\\x7f', name\n"
                       "assert name[3] == '\\xc3\\xa9\\xff\\xfe\\x80', name\n"
                       "assert name[4] == 'twenty-four characters, ', name\n"
                       "failed = [l for l in lines if l['event'] == 'failed']\n"
                       "assert failed[0]['kind'] == 'unknown' and failed[0]['peer'] == -7, failed\n"
                       "text = [l['text'] for l in lines if l['event'] == 'verdict_text'][0]\n"
                       "assert len(text) == 640 and text.startswith('rank 3 said \"\\\\\", \\x1b]0;'), text\n") == "");
}

TEST_CASE("a flight record is written whole while threads record", "[comm][flight]") {
    flight_files files;
    constexpr int writers = 3;
    constexpr int dumps = 1000;
    {
        flight_recorder ring(0, 1, "test");
        std::atomic<int> dumped{0};
        {
            std::vector<std::jthread> threads;
            for (int w = 0; w < writers; ++w)
                threads.emplace_back([&ring, &dumped, w] {
                    char const name[] = {static_cast<char>('a' + w), '\0'};
                    for (std::uint64_t i = 1; dumped.load() < dumps || i <= flight_recorder::capacity; ++i)
                        ring.record(flight::entered, i, w, i * 3 + static_cast<std::uint64_t>(w), name);
                });
            for (int d = 0; d < 2; ++d)
                threads.emplace_back([&ring, &dumped] {
                    while (dumped.load() < dumps) {
                        ring.dump("now");
                        ++dumped;
                    }
                });
        }
        ring.dump("last");
    }
    std::vector<std::string> const all = files.lines();
    std::uint64_t next = 0, wrong = 0, late = 0, too_late = 0;
    std::set<std::uint64_t> seen;
    std::vector<std::uint64_t> last(writers);
    for (std::string const& line : all) {
        if (text_in(line, "event") == "dump") late = 0;
        if (text_in(line, "event") != "entered") continue;
        std::uint64_t const seq = number_in(line, "seq"), i = number_in(line, "number"), w = number_in(line, "group");
        wrong += !seen.insert(seq).second || w >= writers || number_in(line, "count") != i * 3 + w ||
                 text_in(line, "name") != std::string(1, static_cast<char>('a' + w)) || i <= last[w];
        if (w < writers) last[w] = i;
        if (seq >= next) {
            next = seq + 1;
            late = writers;  // no more of these in this dump
        } else if (++late > writers) {
            ++too_late;
        }
    }
    CHECK(too_late == 0);  // what a thread was still making at one dump stands first in the next
    CHECK(wrong == 0);
    CHECK(seen.size() >= flight_recorder::capacity - writers);
    CHECK(files.python() == "");
}

TEST_CASE("entries that are overwritten during a dump are left out of it", "[comm][flight]") {
    static flight_recorder* ring = nullptr;
    static std::uint64_t recorded = 0, interruptions = 0;
    recorded = interruptions = 0;
    flight_files files;
    auto const overwrite_all = [](int /*signo*/) {
        ++interruptions;
        for (std::size_t k = 0; k < flight_recorder::capacity; ++k) ring->record(flight::entered, ++recorded);
    };
    {
        flight_recorder one(0, 1, "test");
        ring = &one;
        overwrite_all(0);
        struct ::sigaction with{}, before{};
        with.sa_handler = overwrite_all;
        with.sa_flags = SA_RESTART;
        REQUIRE(::sigaction(SIGALRM, &with, &before) == 0);
        ::itimerval const often{{0, 1000}, {0, 1000}}, never_again{};
        REQUIRE(::setitimer(ITIMER_REAL, &often, nullptr) == 0);
        for (int dumps = 0; dumps < 100 || interruptions < 100; ++dumps) one.dump("now");
        REQUIRE(::setitimer(ITIMER_REAL, &never_again, nullptr) == 0);
        REQUIRE(::sigaction(SIGALRM, &before, nullptr) == 0);
    }
    std::uint64_t wrong = 0, entries = 0;
    for (std::string const& line : files.lines()) {
        if (text_in(line, "event") != "entered") continue;
        ++entries;
        wrong += number_in(line, "number") != number_in(line, "seq") + 1;
    }
    CHECK(entries >= flight_recorder::capacity);
    CHECK(wrong == 0);
}

TEST_CASE("ranks that fail write what they did, and the verdict's words", "[comm][flight]") {
    flight_files files;
    run_options const options{.ranks = 3, .times = timing::for_tests()};
    CHECK_THROWS_WITH(run<threads>(options,
                                   [](communicator<>& comm) {
                                       barrier(comm);
                                       if (comm.rank() == 1) throw std::runtime_error("the \"lamp\" fell over");
                                       barrier(comm);
                                   }),
                      "the \"lamp\" fell over");
    CHECK(files.python("assert len(glob.glob(sys.argv[1] + '/*.jsonl')) == 3\n"
                       "texts = {l['text'] for l in lines if l['event'] == 'verdict_text'}\n"
                       "assert len(texts) == 1 and 'the \"lamp\" fell over' in texts.pop(), lines\n") == "");
    for (int const rank : {0, 1, 2}) {
        std::vector<std::string> const all = files.lines("rank-" + std::to_string(rank) + ".jsonl");
        CAPTURE(rank, all);
        CHECK(count(all, "failed") == 1);
        CHECK(count(all, "verdict") == 1);
        CHECK(count(all, "waits") == count(all, "finished") + (rank == 1 ? 0 : 1));
        auto const failed =
            std::find_if(all.begin(), all.end(), [](auto const& l) { return text_in(l, "event") == "failed"; });
        REQUIRE(failed != all.end());
        CHECK((text_in(*failed, "kind") == "threw") == (rank == 1));
    }
}

TEST_CASE("SIGUSR2 writes a flight record, unless the program has a use for that signal", "[comm][flight]") {
    flight_files files;
    auto const handler = [] {
        struct ::sigaction now{};
        ::sigaction(SIGUSR2, nullptr, &now);
        return now.sa_handler;
    };
    REQUIRE(handler() == SIG_DFL);
    {
        detail::flight_signal const on_request;
        ::raise(SIGUSR2);  // the job has not come together: there is nothing to write
        {
            flight_recorder ring(0, 1, "test");
            CHECK_FALSE(ring.answers_signal.load());
            detail::flight_signal::target const whose(ring);
            CHECK(ring.answers_signal.load());
            ring.record(flight::phase, 1, 0, 0, "forward");
            errno = 77;
            ::raise(SIGUSR2);
            CHECK(errno == 77);
            CHECK(text_in(files.lines().back(), "why") == "SIGUSR2");
            for (std::uint64_t i = 2; i <= 500; ++i) {  // in the middle of whatever a thread does
                std::jthread other([] { ::raise(SIGUSR2); });
                ring.record(flight::phase, i, 0, 0, "forward");
                ::raise(SIGUSR2);
                ring.dump("now");
            }
        }
        ::raise(SIGUSR2);
    }
    CHECK(handler() == SIG_DFL);
    CHECK(count(files.lines(), "forward") == 500);
    CHECK(files.python() == "");

    static std::atomic<int> heard{0};
    ::signal(SIGUSR2, [](int) { ++heard; });
    auto const own = handler();
    {
        detail::flight_signal const on_request;
        CHECK(handler() == own);
        flight_recorder ring(0, 1, "test");
        detail::flight_signal::target const whose(ring);
        CHECK_FALSE(ring.answers_signal.load());
        ::raise(SIGUSR2);
    }
    CHECK(handler() == own);
    CHECK(heard == 1);
    ::signal(SIGUSR2, SIG_IGN);
    {
        detail::flight_signal const on_request;
        CHECK(handler() == SIG_IGN);
    }
    ::signal(SIGUSR2, SIG_DFL);
    {
        detail::flight_signal const on_request;
        ::signal(SIGUSR2, own);  // the program's, meanwhile
    }
    CHECK(handler() == own);
    ::signal(SIGUSR2, SIG_DFL);
}

TEST_CASE("what a process that is gone has left in lasting memory is dumped, whatever stands there", "[comm][flight]") {
    flight_files files;
    auto const ring = std::make_unique<detail::flight_ring>();
    detail::lasting_ring.store(ring.get());
    {
        flight_recorder recorder(3, 4, "test");
        flight_recorder const second(3, 4, "another");  // has memory of its own
        CHECK(detail::lasting_ring.load() == nullptr);
        for (std::uint64_t i = 0; i < 1500; ++i) recorder.record(flight::entered, i, 0, 0, "allreduce");
        CHECK(ring->pid == ::getpid());
        ring->pid = 4711;  // it is another process's
    }
    auto const dump = [&](int rank) {
        flight_recorder of_it(rank, 4, ring.get(), files.path.c_str());
        of_it.say_thread("unknown");
        of_it.dump("gone");
    };
    dump(3);
    std::vector<std::string> const all = files.lines("rank-3.jsonl");
    REQUIRE(all.size() == flight_recorder::capacity + 2);
    CHECK(all[0].find("\"rank\":3,\"size\":4,\"pid\":4711,") != std::string::npos);
    CHECK(text_in(all[0], "transport") == "test");
    CHECK(number_in(all[0], "t_ns") == static_cast<std::uint64_t>(ring->begun));
    CHECK(number_in(all[all.size() - 2], "seq") == 1499);
    CHECK(text_in(all.back(), "why") == "gone");
    CHECK(count(all, "left") == 0);

    random_stream const random(5, random_use::user);
    auto* const bytes = reinterpret_cast<unsigned char*>(ring.get());
    for (std::uint64_t seed = 0; seed < 100; ++seed) {
        for (std::uint64_t k = 0; k < (seed % 2 == 0 ? 300 : sizeof *ring); ++k) {
            std::uint64_t const at = seed % 2 == 0 ? random.at(seed << 32 | k).below(sizeof *ring) : k;
            bytes[at] = static_cast<unsigned char>(random.at(seed << 32 | k | 1u << 31).below(256));
        }
        dump(100 + static_cast<int>(seed));
    }
    CHECK(files.lines("rank-199.jsonl").size() >= 2);
    detail::lasting_ring.store(ring.get());
    {
        flight_recorder recorder(200, 201, "test");  // the next process, in memory that is used already
        recorder.record(flight::phase, 1, 0, 0, "forward");
        ring->pid = 4711;
    }
    dump(200);
    CHECK(files.lines("rank-200.jsonl").size() == 3);
    CHECK(files.python() == "");
}

TEST_CASE("what one entry of the flight recorder costs", "[.][flight][measure]") {
    flight_recorder ring(0, 1, "test");
    constexpr int times = 2'000'000;
    auto const since = std::chrono::steady_clock::now();
    for (int i = 0; i < times; ++i) ring.record(flight::entered, static_cast<std::uint64_t>(i), 0, 1000, "allreduce");
    std::chrono::duration<double, std::nano> const taken = std::chrono::steady_clock::now() - since;
    WARN(taken.count() / times << " ns an entry");
}
