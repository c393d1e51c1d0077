// The words for ranks of one host that do not see each other's memory.
#include <ddp/comm/blind_ranks.hpp>

#include <string>
#include <utility>
#include <vector>

#include "support/catch.hpp"

using ddp::detail::blind_ranks;
using ddp::detail::named_ranks;

TEST_CASE("ranks are named one by one, from three on in a row as a range, and not more than fit a line", "[comm]") {
    CHECK(named_ranks(std::vector<int>{3}) == "rank 3");
    CHECK(named_ranks(std::vector<int>{0, 2}) == "ranks 0 and 2");
    CHECK(named_ranks(std::vector<int>{5, 6}) == "ranks 5 and 6");
    CHECK(named_ranks(std::vector<int>{0, 1, 2, 3, 6, 9}) == "ranks 0 to 3, 6 and 9");
    std::vector<int> every_second;
    for (int i = 0; i < 40; i += 2) every_second.push_back(i);
    CHECK(named_ranks(every_second) == "ranks 0, 2, 4, 6, 8, 10, 12 and 13 more");
    CHECK(named_ranks(std::vector<int>{0, 2, 4, 6, 8, 10, 12, 14}) == "ranks 0, 2, 4, 6, 8, 10, 12 and 14");
}

TEST_CASE("pairs of ranks that do not see each other's memory are put together, with a reason that one of them knows",
          "[comm]") {
    std::string const guess = " (none came: does a sandbox, such as seccomp or AppArmor, forbid it?)";
    std::string const on_one_host = " are on one host and do not see each other's memory";
    auto const text = [](std::vector<std::pair<int, int>> pairs,
                         std::vector<std::pair<int, std::string>> reasons = {}) {
        return blind_ranks{std::move(pairs), std::move(reasons)}.text();
    };
    CHECK(text({}) == "");
    CHECK(text({}, {{1, "a reason of nothing"}}) == "");
    CHECK(text({{1, 2}}) == "ranks 1 and 2" + on_one_host + guess);
    CHECK(text({{1, 2}}, {{0, "another's"}, {1, ""}, {2, "why"}}) == "ranks 1 and 2" + on_one_host + " (rank 2: why)");
    CHECK(text({{1, 2}, {3, 4}}, {{3, "why"}}) ==
          "ranks 1 and 2" + on_one_host + guess + "; ranks 3 and 4" + on_one_host + " (rank 3: why)");
    CHECK(text({{0, 1}, {0, 2}, {0, 3}, {1, 2}, {1, 3}, {2, 3}}) == "ranks 0 to 3" + on_one_host + guess);
    CHECK(text({{0, 2}, {1, 2}, {2, 3}}, {{2, "why"}}) ==
          "rank 2, on one host with ranks 0, 1 and 3, shares no memory with them (rank 2: why)");
    CHECK(text({{0, 1}, {2, 3}, {4, 5}, {6, 7}}).find("; and so 1 pair more") != std::string::npos);
    CHECK(text({{0, 1}, {2, 3}, {4, 5}, {6, 7}, {8, 9}}).find("; and so 2 pairs more") != std::string::npos);
}
