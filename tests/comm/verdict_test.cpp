// decide(): from what the ranks have said to the rank at fault.
#include <ddp/comm/verdict.hpp>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include <ddp/core/random.hpp>

#include "support/catch.hpp"

using namespace ddp;
using namespace std::chrono_literals;

namespace {

constexpr nanoseconds limit = 10s;

report silent() {
    return {};
}
report left() {
    return {.is = report::state::left};
}
report closed() {
    return {.is = report::state::closed};
}
report said(failure_kind kind, int rank, int peer, nanoseconds waited = 0s, std::uint64_t step = 1,
            std::uint32_t channel = 0) {
    report r{.is = report::state::spoke};
    r.record.kind = kind;
    r.record.rank = rank;
    r.record.peer = peer;
    r.record.operation = {.channel = channel, .index = step};
    r.record.waited_ns = static_cast<std::uint64_t>(waited.count());
    r.record.expired = kind == failure_kind::waiting && waited >= limit;
    r.record.entered = {.number = step, .fingerprint = 99, .name = std::string_view("allreduce")};
    if (kind == failure_kind::threw) r.record.text = std::string_view("own words");
    return r;
}
report waits(int rank, int peer, nanoseconds waited = limit, std::uint64_t step = 1) {
    return said(failure_kind::waiting, rank, peer, waited, step);
}
report idle(int rank) {
    return said(failure_kind::idle, rank, -1);
}

failure verdict_of(std::vector<report> const& reports) {
    return decide(reports, limit);
}
std::string text_of(failure const& f) {
    return std::string(f.text.view());
}

struct story {
    char const* name;
    std::vector<report> reports;
    int culprit;
    errc code;
    char const* words;
};

}  // namespace

TEST_CASE("each story has one culprit", "[comm][verdict]") {
    report unheard = said(failure_kind::silent, 0, 1, 5s);
    unheard.record.code = errc::peer_silent;
    report other_operation = waits(1, 0, 2s);
    other_operation.record.entered.fingerprint = 55;
    other_operation.record.entered.name = std::string_view("broadcast");
    report published = said(failure_kind::closed, 1, 3);
    published.record.is_verdict = true;
    published.record.code = errc::peer_closed;
    published.record.text = std::string_view("as published");
    report const stopped = said(failure_kind::silent, 1, 1, 3s);
    report frame = closed();
    frame.record.code = errc::frame;
    frame.record.text = std::string_view("bytes that are no frame");
    report mismatch = said(failure_kind::mismatch, 1, 2);
    mismatch.record.code = errc::mismatch;
    mismatch.record.text = std::string_view("8 bytes, not 16");

    std::vector<story> const stories = {
        {"own fault beats closed and waiting",
         {waits(0, 1), said(failure_kind::threw, 1, -1), said(failure_kind::closed, 2, 1)},
         1,
         errc::remote_exception,
         "own words"},
        {"two own faults: the lower step decides",
         {said(failure_kind::threw, 0, -1, 0s, 5), said(failure_kind::threw, 1, -1, 0s, 4)},
         1,
         errc::remote_exception,
         "rank 1"},
        {"two own faults in one step: the lower rank",
         {said(failure_kind::threw, 0, -1), said(failure_kind::threw, 1, -1)},
         0,
         errc::remote_exception,
         "rank 0"},
        {"a mismatch beats closed",
         {said(failure_kind::closed, 0, 3), mismatch, idle(2), closed()},
         2,
         errc::mismatch,
         "8 bytes"},
        {"equal operations with other fingerprints",
         {waits(0, 1), other_operation, waits(2, 0)},
         1,
         errc::mismatch,
         "disagree"},
        {"other operations with other fingerprints are a legal lead",
         {waits(0, 1, limit, 2), waits(1, 2, limit, 1), silent()},
         2,
         errc::deadline,
         "rank 2 did not take part"},
        {"a dead rank, seen by one",
         {said(failure_kind::closed, 0, 2), waits(1, 0), closed()},
         2,
         errc::peer_closed,
         "rank 2 is gone"},
        {"a dead rank that nobody waits for", {idle(0), idle(1), closed()}, 2, errc::peer_closed, "rank 2 is gone"},
        {"who has spoken is alive: the thawed rank's own closed record does not count",
         {said(failure_kind::closed, 0, 1), said(failure_kind::closed, 1, 2), closed()},
         2,
         errc::peer_closed,
         "rank 2"},
        {"a rank that exited cleanly",
         {said(failure_kind::closed, 0, 1), left()},
         1,
         errc::peer_closed,
         "fewer collectives"},
        {"bytes that are no frame", {said(failure_kind::closed, 0, 1), frame}, 1, errc::peer_closed, "rank 1 is gone"},
        {"a silent rank",
         {said(failure_kind::silent, 0, 2, 3s), waits(1, 0, 2s), silent()},
         2,
         errc::peer_silent,
         "heartbeat"},
        {"a rank that was stopped finds its connections closed",
         {closed(), stopped},
         1,
         errc::peer_silent,
         "rank 1 was stopped for 3.0 s in allreduce"},
        {"a rank that was stopped, while another died",
         {said(failure_kind::closed, 0, 2), stopped, closed()},
         2,
         errc::peer_closed,
         "rank 2 is gone"},
        {"a rank called silent that has spoken since",
         {said(failure_kind::silent, 0, 1, 3s), waits(1, 2), silent()},
         2,
         errc::deadline,
         "rank 2"},
        {"a silent connection: the waits for it are old, but none has reached the deadline",
         {unheard, waits(1, 0, 5s), waits(2, 1, 5s)},
         1,
         errc::peer_silent,
         "the connection between rank 0 and rank 1"},
        {"closed beats silent",
         {said(failure_kind::silent, 0, 1, 3s), silent(), said(failure_kind::closed, 2, 3), closed()},
         3,
         errc::peer_closed,
         "rank 3"},
        {"a chain of waits leads to who waits for nobody",
         {waits(0, 1), waits(1, 2), waits(2, 3), idle(3)},
         3,
         errc::deadline,
         "through rank 1"},
        {"a chain of waits leads to who says nothing",
         {waits(0, 1), waits(1, 2), silent()},
         2,
         errc::deadline,
         "Nothing has been heard"},
        {"who has just begun to wait is late itself",
         {waits(0, 1), waits(1, 2, 1s), waits(2, 0)},
         1,
         errc::deadline,
         "rank 1 did not take part"},
        {"young waits accuse nobody, wherever they stand",
         {waits(0, 3, 1s), waits(1, 2), waits(2, 0), waits(3, 0)},
         0,
         errc::deadline,
         "rank 0 did not"},
        {"in a circle nobody can say whose message was lost",
         {waits(0, 1, 9s), waits(1, 2, 9500ms), waits(2, 0, 9s)},
         -1,
         errc::deadline,
         "A message between two of them was lost"},
        {"a circle that the chain enters from outside",
         {waits(0, 1, 9s), waits(1, 2, 9s), waits(2, 3, 8s), waits(3, 1, 9500ms)},
         -1,
         errc::deadline,
         "rank 1 for rank 2 in"},
        {"the least operation's wait is followed first",
         {waits(0, 1, limit, 7), waits(1, 0, limit, 7), waits(2, 3, limit, 6), idle(3)},
         3,
         errc::deadline,
         "rank 3"},
        {"a published verdict is adopted",
         {waits(0, 1), published, said(failure_kind::threw, 2, -1), closed()},
         3,
         errc::peer_closed,
         "as published"},
        {"nobody knows anything", {idle(0), idle(1)}, -1, errc::deadline, "gave up"},
        {"nobody says anything", {silent(), silent()}, -1, errc::peer_closed, "without a reason"},
    };
    for (story const& s : stories) {
        CAPTURE(s.name);
        failure const v = verdict_of(s.reports);
        CHECK(v.peer == s.culprit);
        CHECK(v.code == s.code);
        CHECK(v.is_verdict);
        CAPTURE(text_of(v));
        CHECK(text_of(v).find(s.words) != std::string::npos);
    }
}

TEST_CASE("a partition of a large job is told whole, and only longer words are cut, visibly", "[comm][verdict]") {
    std::vector<report> reports(4096);
    reports[4000] = said(failure_kind::silent, 4000, 3000, 3600s);
    reports[4000].record.entered.name = std::string_view(std::string(200, 'n'));
    reports[4000].record.text = std::string_view(
        "At most 1279 bytes at once have come from rank 3000: large packets may be lost on the way (MTU).");
    std::string const told = text_of(verdict_of(reports));
    CAPTURE(told);
    CHECK(told.find("nn...)") != std::string::npos);
    CHECK(told.find("(MTU). Nothing came from ranks 0, 1, 2, 3, 4, 5, 6, 7 and others either.") != std::string::npos);
    CHECK(told.ends_with("the network is partitioned, and they report the same about the ranks on this side."));

    for (std::size_t const length : {std::size_t{639}, std::size_t{640}, std::size_t{641}, std::size_t{5000}}) {
        std::string const words(length, 'w');
        std::string const kept = std::string(bounded_text<640>(words).view());
        CHECK(kept == (length <= 640 ? words : std::string(637, 'w') + "..."));
    }
    for (std::string_view const letter : {"ö", "漢", "🛰"})  // of 2, 3 and 4 bytes, cut at each of them
        for (std::size_t before = 0; before < 4; ++before) {
            std::string words(before, 'w');
            while (words.size() < 80) words += letter;
            std::size_t const whole = before + (61 - before) / letter.size() * letter.size();
            CHECK(bounded_text<64>(words).view() == words.substr(0, whole) + "...");
            CHECK(ddp::detail::printable(words, 61) == words.substr(0, whole) + " (cut)");
        }
    CHECK(bounded_text<64>(std::string(80, '\x80')).view() == std::string(61, '\x80') + "...");
}

TEST_CASE("a rank that has entered nothing is not said to be in an operation", "[comm][verdict]") {
    report before_any = idle(1);
    before_any.record.entered = {};
    std::string const told = text_of(verdict_of({waits(0, 1), before_any}));
    CAPTURE(told);
    CHECK(told.find("It is alive, and has not entered any operation yet. Look at") != std::string::npos);
    CHECK(text_of(verdict_of({waits(0, 1), idle(1)})).find("the last operation it entered is allreduce. Look") !=
          std::string::npos);
    report busy = idle(1);
    busy.record.entered.phase = std::string_view("forward of step 57");
    CHECK(text_of(verdict_of({waits(0, 1), busy}))
              .find("the last operation it entered is allreduce; it is in forward of step 57. Look") !=
          std::string::npos);
}

TEST_CASE("a rank that gave up for a reason that nobody has kept says where to look", "[comm][verdict]") {
    report gave_up = idle(0);
    CHECK(text_of(verdict_of({gave_up, idle(1)})) ==
          "rank 0 gave up in allreduce, but the record that says why was lost. Look for the first "
          "error in the output of the other ranks.");
    gave_up.record.text = std::string_view("own words");
    CHECK(text_of(verdict_of({gave_up, idle(1)})) == "rank 0 gave up in allreduce: own words");
}

TEST_CASE("peers out of range in a record do no harm", "[comm][verdict]") {
    for (int const peer : {-1, 2, 1000}) {
        CHECK_NOTHROW(verdict_of({waits(0, peer), idle(1)}));
        CHECK_NOTHROW(verdict_of({said(failure_kind::closed, 0, peer), idle(1)}));
        CHECK_NOTHROW(verdict_of({said(failure_kind::silent, 0, peer, 3s), idle(1)}));
    }
}

TEST_CASE("a verdict throws as what it says", "[comm][verdict]") {
    failure const v = verdict_of({waits(0, 1), silent()});
    comm_error const e(v);
    CHECK(e.culprit() == 1);
    CHECK(e.code() == errc::deadline);
    CHECK(std::string(e.what()).find("DDP-E204") == 0);
    CHECK(e.verdict().rank == 0);
}

TEST_CASE("a verdict says which process is at fault, once, and where there is room", "[comm][verdict]") {
    failure verdict;
    verdict.peer = 2;
    verdict.text = std::string_view("rank 2 failed in its own code: bad data");
    failure unknown = verdict, nobody = verdict, full = verdict;
    for (errc const code : {errc::mismatch, errc::model_differs, errc::gradient, errc::replicas_differ}) {
        failure disagree = verdict;
        disagree.code = code;
        ddp::detail::name_process(disagree, "pid 4711 on node3");
        CHECK(disagree.text.view() == verdict.text.view());
    }
    failure cut = verdict;  // both ends are alive
    cut.text = std::string_view("the connection between rank 1 and rank 2 broke in step #3");
    ddp::detail::name_process(cut, "pid 4711 on node3");
    CHECK(cut.text.view() == "the connection between rank 1 and rank 2 broke in step #3");
    ddp::detail::name_process(verdict, "pid 4711 on node3");
    CHECK(verdict.text.view() == "rank 2 failed in its own code: bad data (rank 2: pid 4711 on node3)");
    ddp::detail::name_process(verdict, "pid 4711 on node3");
    CHECK(verdict.text.view() == "rank 2 failed in its own code: bad data (rank 2: pid 4711 on node3)");

    ddp::detail::name_process(unknown, "");
    CHECK(unknown.text.view() == "rank 2 failed in its own code: bad data");
    nobody.peer = -1;
    ddp::detail::name_process(nobody, "pid 4711 on node3");
    CHECK(nobody.text.view() == "rank 2 failed in its own code: bad data");

    std::string const long_words = "rank 2" + std::string(full.text.chars.size() - 34, 'x');  // 28 characters are added
    full.text = std::string_view(long_words);
    failure fuller = full;
    ddp::detail::name_process(full, "pid 4711 on node3");
    CHECK(full.text.view() == long_words + " (rank 2: pid 4711 on node3)");
    fuller.text = std::string_view(long_words + "x");
    ddp::detail::name_process(fuller, "pid 4711 on node3");
    CHECK(fuller.text.view() == long_words + "x");
}

TEST_CASE("who is late is said in words", "[comm][verdict]") {
    failure const mine = waits(0, 3, 5s, 12).record;
    failure message = mine;
    message.entered = {.name = std::string_view("receive of 8 bytes from rank 3 with tag 7")};
    auto const text = [](failure const& of, std::vector<int> const& absent, int named, mark const& last) {
        return detail::straggler_text(0, of, absent, named, last, 120s, true, last.occupied != 0);
    };
    mark const step{.number = 11, .name = std::string_view("step")}, none;
    std::string const wait = "rank 0 has waited 5.0 s in ",
                      end =
                          "; send it SIGUSR2 to see what it is doing. If nothing changes, the job fails after 120.0 s "
                          "(timing.collective)";
    CHECK(text(mine, {2}, 2, step) == wait +
                                          "allreduce for rank 2, which has not entered it. Rank 2 is alive and last "
                                          "entered step (1 operation earlier)" +
                                          end);
    CHECK(text(mine, {2, 4, 5}, 2, none) ==
          wait + "allreduce for ranks 2, 4, 5, which have not entered it. Rank 2 is alive and has entered nothing yet" +
              end);
    CHECK(text(mine, {1, 2, 3, 4, 5, 6, 7, 8, 9}, 1, none).find("ranks 1, 2, 3, 4, 5, 6, 7, 8 and others, which") !=
          std::string::npos);
    CHECK(text(mine, {}, 3, step) ==
          wait + "allreduce for rank 3, which has entered it, too, and may wait for another. Rank 3 is alive" + end);
    CHECK(text(mine, {}, 3, none) == wait + "allreduce for rank 3" + end);
    CHECK(text(message, {}, 3, step) == wait +
                                            "receive of 8 bytes from rank 3 with tag 7 for rank 3. Rank 3 is alive and "
                                            "last entered step" +
                                            end);
    mark busy = step;  // where its program is, as far as that is known
    busy.phase = std::string_view("backward of step 57");
    CHECK(text(mine, {2}, 2, busy) == wait +
                                          "allreduce for rank 2, which has not entered it. Rank 2 is alive and last "
                                          "entered step (1 operation earlier); it is in backward of step 57" +
                                          end);
    CHECK(text(mine, {}, 3, busy) == wait +
                                         "allreduce for rank 3, which has entered it, too, and may wait for another. "
                                         "Rank 3 is alive; it is in backward of step 57" +
                                         end);
    busy.phase = std::string_view("back\x1bward");
    CHECK(text(mine, {2}, 2, busy).find("; it is in back\\x1bward; send it") != std::string::npos);
    mark const occupied{.number = 11,
                        .occupied = 1,
                        .name = std::string_view("evaluation"),
                        .phase = std::string_view("forward of step 58")};
    CHECK(text(mine, {2}, 2, occupied) == wait +
                                              "allreduce for rank 2, which has not entered it. Rank 2 is alive and is "
                                              "in a long operation, evaluation; send "
                                              "it SIGUSR2 to see what it is doing. Deadlines are extended until no "
                                              "rank is in a long operation; after that the job "
                                              "fails within 120.0 s (timing.collective)");
    std::string const process = detail::straggler_text(0, mine, {}, 3, none, 120s, true, false, "pid 4711 on node3");
    CHECK(process.find("; send it (pid 4711 on node3) SIGUSR2 to see") != std::string::npos);
    // Where ranks are threads, for example, the signal would end the process.
    CHECK(detail::straggler_text(0, mine, {}, 3, none, 120s, false, false) ==
          wait + "allreduce for rank 3. If nothing changes, the job fails after 120.0 s (timing.collective)");
}

TEST_CASE("whoever of a random job is killed, frozen or late is named, whatever the others were doing",
          "[comm][verdict]") {
    for (std::uint64_t seed = 0; seed < 20000; ++seed) {
        random_stream const random(seed, random_use::user);
        std::uint64_t draws = 0;
        auto const draw = [&](std::uint64_t bound) { return random.at(draws++).below(bound); };
        int const ranks = 2 + static_cast<int>(draw(8)),
                  culprit = static_cast<int>(draw(static_cast<std::uint64_t>(ranks)));
        int const fault = static_cast<int>(draw(4));  // killed, frozen with heartbeats, late, threw
        // Everybody waits, directly or through others, for the culprit: edges lead to ranks that are nearer to it.
        std::vector<int> by_distance;
        for (int r = 0; r < ranks; ++r)
            if (r != culprit) by_distance.push_back(r);
        for (std::size_t i = by_distance.size(); i > 1; --i) std::swap(by_distance[i - 1], by_distance[draw(i)]);
        std::vector<report> reports(static_cast<std::size_t>(ranks));
        bool accused = false;
        for (std::size_t i = 0; i < by_distance.size(); ++i) {
            int const r = by_distance[i];
            std::size_t const nearer = draw(i + 1);
            int const peer = nearer == 0 ? culprit : by_distance[nearer - 1];
            report mine =
                waits(r, peer, limit - nanoseconds(static_cast<std::int64_t>(draw(4'000'000'000))), 1 + draw(1));
            if (fault == 0 && draw(2) == 0) mine = said(failure_kind::closed, r, culprit, 1s);
            if (fault == 1 && (draw(2) == 0 || (!accused && i + 1 == by_distance.size()))) {
                mine = said(failure_kind::silent, r, culprit, 3s);
                accused = true;
            }
            reports[static_cast<std::size_t>(r)] = mine;
        }
        auto& own = reports[static_cast<std::size_t>(culprit)];
        if (fault == 0) own = closed();
        if (fault == 2)
            own = draw(2) == 0
                      ? idle(culprit)
                      : waits(culprit, by_distance[0], nanoseconds(static_cast<std::int64_t>(draw(4'900'000'000))));
        if (fault == 3) own = said(failure_kind::threw, culprit, -1);
        failure const v = decide(reports, limit);
        CAPTURE(seed, ranks, culprit, fault, text_of(v));
        REQUIRE(v.peer == culprit);
        REQUIRE(v.is_verdict);
    }
}
