#include <ddp/rendezvous/slurm_node_list.hpp>

#include <cstddef>
#include <random>
#include <string>
#include <vector>

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

namespace {

// A list as Slurm would write it, and the hosts that it names, one by one.
struct written_list {
    std::string text;
    std::vector<std::string> hosts;
};

written_list random_list(std::mt19937& random) {
    auto const upto = [&](unsigned n) { return static_cast<unsigned>(random() % n); };
    written_list list;
    for (unsigned items = 1 + upto(3); items > 0; --items) {
        std::vector<std::string> hosts{""};
        std::string text;
        for (unsigned parts = 1 + upto(3); parts > 0; --parts) {
            std::vector<std::string> ends;
            if (upto(2) == 0) {
                ends.emplace_back(1, "abz-_.9A"[text.empty() ? upto(3) : upto(8)]);
                text += ends.front();
            } else {
                text += '[';
                for (unsigned ranges = 1 + upto(3); ranges > 0; --ranges) {
                    unsigned const low = upto(12), high = low + upto(4);
                    auto const width = static_cast<std::size_t>(1 + upto(3));
                    auto const digits = [&](unsigned number) {
                        std::string const plain = std::to_string(number);
                        return std::string(width > plain.size() ? width - plain.size() : 0, '0') + plain;
                    };
                    for (unsigned number = low; number <= high; ++number) ends.push_back(digits(number));
                    text += digits(low) + (low == high && upto(2) == 0 ? "" : "-" + digits(high));
                    text += ranges > 1 ? ',' : ']';
                }
            }
            std::vector<std::string> longer;
            for (std::string const& host : hosts)
                for (std::string const& end : ends) longer.push_back(host + end);
            hosts = longer;
        }
        list.text += (list.text.empty() ? "" : ",") + text;
        list.hosts.insert(list.hosts.end(), hosts.begin(), hosts.end());
    }
    return list;
}

}  // namespace

TEST_CASE("random node lists name the hosts they were made of, and damaged ones are refused or sound", "[rendezvous]") {
    std::mt19937 random(7);
    std::size_t wrong = 0, refused = 0;
    std::string last;
    for (int i = 0; i < 3000; ++i) {
        written_list const list = random_list(random);
        auto const found = slurm_node_list::parse(list.text);
        if (!found || found->first != list.hosts.front() || found->count != list.hosts.size()) {
            ++wrong;
            last = list.text;
        }
        for (int damage = 0; damage < 10; ++damage) {
            std::string text = list.text;
            std::size_t const at = random() % text.size();
            if (damage % 2 == 0)
                text.erase(at, 1);
            else
                text[at] = "[],-0 x(\n"[random() % 9];
            auto const damaged = slurm_node_list::parse(text);
            refused += damaged ? 0 : 1;
            if (damaged && (damaged->count == 0 || damaged->first.empty() ||
                            damaged->first.find_first_of("[], (\n") != std::string::npos)) {
                ++wrong;
                last = text;
            }
            static_cast<void>(slurm_task_counts::parse(text, 1));
        }
    }
    CAPTURE(last);
    CHECK(wrong == 0);
    CHECK((refused > 5000 && refused < 25000));
}
