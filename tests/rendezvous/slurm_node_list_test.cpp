#include <ddp/rendezvous/slurm_node_list.hpp>

#include <string>

#include "support/catch.hpp"

using ddp::detail::slurm_node_list;
using ddp::detail::slurm_task_counts;

TEST_CASE("a node list's first host and number of hosts", "[rendezvous]") {
    struct sample {
        std::string text, first;
        unsigned count;
    };
    for (auto const& [text, first, count] :
         {sample{"localhost", "localhost", 1}, sample{"node[01-03,07],gpu-[1-2]x", "node01", 6},
          sample{"a,b,c.example.org", "a", 3}, sample{"n[7]", "n7", 1}, sample{"n[8-12]", "n8", 5},
          sample{"n[098-101]", "n098", 4}, sample{"r[1-2]n[01-16]", "r1n01", 32}, sample{"[1-3]", "1", 3},
          sample{"n[1-1000000]", "n1", 1'000'000}, sample{"n_1-a,n2", "n_1-a", 2}}) {
        CAPTURE(text);
        auto const list = slurm_node_list::parse(text);
        REQUIRE(list.has_value());
        CHECK(list->first == first);
        CHECK(list->count == count);
    }
}

TEST_CASE("what is no node list is refused, and so is one too large", "[rendezvous]") {
    for (std::string const text : {"",
                                   ",",
                                   "a,",
                                   ",a",
                                   "a,,b",
                                   "n[",
                                   "n[]",
                                   "n]",
                                   "n[1",
                                   "n[1-]",
                                   "n[-1]",
                                   "n[3-1]",
                                   "n[1,]",
                                   "n[,1]",
                                   "n[1-2-3]",
                                   "n[[1]]",
                                   "n[a-b]",
                                   "n[012-13]",
                                   "a b",
                                   "a;b",
                                   "-a",
                                   "n[1-1000001]",
                                   "n[1-1000]m[1-1001]",
                                   "n[1-999999],m[1-2]",
                                   "n[1-1000000000]",
                                   "n[00000000001]",
                                   "a/b",
                                   "a\n"}) {
        CAPTURE(text);
        CHECK_FALSE(slurm_node_list::parse(text).has_value());
    }
    CHECK_FALSE(slurm_node_list::parse(std::string(254, 'a')).has_value());
    std::string many = "a";
    while (many.size() <= 65536) many += ",a";
    CHECK_FALSE(slurm_node_list::parse(many).has_value());
}

TEST_CASE("tasks of each node", "[rendezvous]") {
    auto const counts = slurm_task_counts::parse("2(x3),1,4(x2)", 3);
    REQUIRE(counts.has_value());
    CHECK((counts->here == 1 && counts->tasks == 15 && counts->nodes == 6));
    CHECK(slurm_task_counts::parse("2(x3),1,4(x2)", 2)->here == 2);
    CHECK(slurm_task_counts::parse("2(x3),1,4(x2)", 5)->here == 4);
    for (std::string const text : {"", "2(x3", "2(x)", "(x2)", "2(3)", "2,", "0", "2(x0)", "2x3", "1000001",
                                   "1(x999999),2", "999999999(x999999999)", "a"}) {
        CAPTURE(text);
        CHECK_FALSE(slurm_task_counts::parse(text, 0).has_value());
    }
    CHECK_FALSE(slurm_task_counts::parse("2(x3)", 3).has_value());
}
