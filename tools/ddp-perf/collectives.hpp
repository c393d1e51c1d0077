/// \file
/// The collectives that ddp-perf measures: what an operation is, what comes out of it, and how much a link carries.
///
/// Each is a type:
///
///  name            on the command line
///  rooted          the ranks take turns as its root
///  sliced          the data is one slice for each rank: its length is a multiple of the number of ranks
///  operations      how many operations one run is
///  bus_factor(n)   what nccl-tests multiplies size / time by
///  chosen()        the algorithm that the library uses at this size
///  fill()          writes values that can be verified
///  clear()         writes zeros
///  prepare()       writes values of no meaning, as fast as memory takes them
///  run(k)          runs it, from root k mod n where it is rooted
///  wrong(k)        how many elements are wrong on this rank after fill() and run(k)
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#if defined(PERF_WITH_MPI)
#include <ddp/collective/algorithms/native_allreduce.hpp>
#endif
#include <ddp/collective/shared_array.hpp>
#include <ddp/ddp.hpp>

namespace ddp_perf {

/// Memory for what is sent and received: the one place where ddp-perf takes it. Zeroed; ranks of one host share it.
using buffer = ddp::shared_array<float>;

/// Element i of what rank r brings is (i mod period + 1) (r + 1): it and all sums of it are exact in float.
struct pattern {
    std::size_t factors, period;  // the sum of the ranks' factors r + 1

    explicit pattern(int ranks)
        : factors(static_cast<std::size_t>(ranks) * (static_cast<std::size_t>(ranks) + 1) / 2),
          period(std::clamp((std::size_t{1} << 24) / factors, std::size_t{1}, std::size_t{1021})) {}

    [[nodiscard]] float of(std::size_t rank, std::size_t i) const {
        return static_cast<float>((i % period + 1) * (rank + 1));
    }
    [[nodiscard]] float sum(std::size_t i) const { return static_cast<float>((i % period + 1) * factors); }
};

/// What all have in common: an array that each operation reads and most write.
class collective {
public:
    static constexpr bool rooted = false, sliced = false;
    static constexpr int operations = 1;
    [[nodiscard]] static double bus_factor(double) { return 1; }
    [[nodiscard]] static std::string chosen() { return "-"; }

    collective(ddp::communicator<> const& over, ddp::any_allreduce const& algorithm, std::size_t count)
        : comm(over), how(algorithm), values(over.size()), memory(over, count), data(memory.span()) {}

    void prepare() const { rewrite(data, 1); }
    void clear() const { rewrite(data, 0); }

protected:
    /// Out of line, so that the compiler sees no two calls as one.
    [[gnu::noinline]] static void rewrite(std::span<float> what, float by) { std::fill(what.begin(), what.end(), by); }
    void fill_mine() const {
        for (std::size_t i = 0; i < data.size(); ++i) data[i] = values.of(me(), i);
    }
    /// How many of elements [begin, end) are not expected(i).
    template <class Expected>
    static std::size_t count_wrong(std::span<float const> what, std::size_t begin, std::size_t end,
                                   Expected const& expected) {
        std::size_t wrong = 0;
        for (std::size_t i = begin; i < end; ++i) wrong += what[i] == expected(i) ? 0u : 1u;
        return wrong;
    }
    [[nodiscard]] std::size_t me() const { return static_cast<std::size_t>(comm.rank()); }
    [[nodiscard]] std::size_t ranks() const { return static_cast<std::size_t>(comm.size()); }
    [[nodiscard]] std::size_t root(std::size_t k) const { return k % ranks(); }
    [[nodiscard]] std::size_t slice() const { return data.size() / ranks(); }
    /// What the library takes at this size, of an allreduce algorithm.
    [[nodiscard]] std::string chosen_allreduce(bool for_slices = false) const {
        if (how.name != std::string_view(ddp::automatic_allreduce::name)) return how.name;
        auto const fitted = ddp::automatic_allreduce{}.fitted_to(comm);
        return for_slices ? fitted.choice_for_slices(data.size_bytes(), comm.size())
                          : fitted.choice(data.size_bytes(), comm.size());
    }

    ddp::communicator<> const& comm;
    ddp::any_allreduce const& how;
    pattern values;
    buffer memory;
    std::span<float> data;
};

/// What has a second array besides, for what arrives.
class collective_of_two : public collective {
public:
    collective_of_two(ddp::communicator<> const& over, ddp::any_allreduce const& algorithm, std::size_t count)
        : collective(over, algorithm, count), second(over, count), in(second.span()) {}
    void fill() const {
        fill_mine();
        std::fill(in.begin(), in.end(), -1.0f);
    }

protected:
    buffer second;
    std::span<float> in;
};

struct allreduce : collective {
    using collective::collective;
    static constexpr char const* name = "allreduce";
    [[nodiscard]] static double bus_factor(double n) { return 2 * (n - 1) / n; }
    [[nodiscard]] std::string chosen() const {
        bool const automatic = how.name == std::string_view(ddp::automatic_allreduce::name);
        return automatic && ddp::in_memory(comm, memory) ? "memory" : chosen_allreduce();
    }
    void fill() const { fill_mine(); }
    void run(std::size_t) const {
        if (how.name == std::string_view(ddp::automatic_allreduce::name))
            ddp::allreduce(comm, memory);
        else
            ddp::allreduce(comm, data, how);
    }
    [[nodiscard]] std::size_t wrong(std::size_t) const {
        return count_wrong(data, 0, data.size(), [&](std::size_t i) { return values.sum(i); });
    }
};

#if defined(PERF_WITH_MPI)
/// The MPI library's own, on memory of this rank's own: what an MPI program has without ddp. Costs 0.1 us more than the bare
/// call.
struct mpi_allreduce : collective {
    mpi_allreduce(ddp::communicator<> const& over, ddp::any_allreduce const& algorithm, std::size_t count)
        : collective(over, algorithm, count), own(ddp::make_arena<float>(count)) {
        data = {own.get(), count};
    }
    static constexpr char const* name = "mpi_allreduce";
    [[nodiscard]] static double bus_factor(double n) { return 2 * (n - 1) / n; }
    [[nodiscard]] static std::string chosen() { return "MPI's"; }
    void fill() const { fill_mine(); }
    void run(std::size_t) const { ddp::allreduce(comm, data, ddp::native_allreduce{}); }
    [[nodiscard]] std::size_t wrong(std::size_t) const {
        return count_wrong(data, 0, data.size(), [&](std::size_t i) { return values.sum(i); });
    }

private:
    std::shared_ptr<float[]> own;
};
#endif

struct reduce_scatter : collective {
    using collective::collective;
    static constexpr char const* name = "reduce_scatter";
    static constexpr bool sliced = true;
    [[nodiscard]] static double bus_factor(double n) { return (n - 1) / n; }
    [[nodiscard]] std::string chosen() const { return chosen_allreduce(true); }
    void fill() const { fill_mine(); }
    void run(std::size_t) const { ddp::reduce_scatter(comm, data, how); }
    [[nodiscard]] std::size_t wrong(std::size_t) const {
        return count_wrong(data, me() * slice(), (me() + 1) * slice(), [&](std::size_t i) { return values.sum(i); });
    }
};

struct all_gather : collective {
    using collective::collective;
    static constexpr char const* name = "all_gather";
    static constexpr bool sliced = true;
    [[nodiscard]] static double bus_factor(double n) { return (n - 1) / n; }
    [[nodiscard]] std::string chosen() const {
        return data.size_bytes() <= ddp::automatic_all_gather{}.bruck_bytes ? "bruck" : "direct";
    }
    void fill() const {
        std::fill(data.begin(), data.end(), -1.0f);
        for (std::size_t i = me() * slice(); i < (me() + 1) * slice(); ++i) data[i] = values.of(me(), i);
    }
    void run(std::size_t) const {
        ddp::all_gather(comm, std::span<float const>(data.subspan(me() * slice(), slice())), data);
    }
    [[nodiscard]] std::size_t wrong(std::size_t) const {
        return count_wrong(data, 0, data.size(), [&](std::size_t i) { return values.of(i / slice(), i); });
    }
};

struct broadcast : collective {
    using collective::collective;
    static constexpr char const* name = "broadcast";
    static constexpr bool rooted = true;
    [[nodiscard]] std::string chosen() const {
        return ddp::automatic_broadcast{}.chains(data.size_bytes(), comm.size()) ? "chain" : "tree";
    }
    void fill() const { fill_mine(); }
    void run(std::size_t k) const { ddp::broadcast(comm, data, static_cast<int>(root(k))); }
    [[nodiscard]] std::size_t wrong(std::size_t k) const {
        return count_wrong(data, 0, data.size(), [&](std::size_t i) { return values.of(root(k), i); });
    }
};

struct reduce : collective {
    using collective::collective;
    static constexpr char const* name = "reduce";
    static constexpr bool rooted = true;
    [[nodiscard]] std::string chosen() const {
        return ddp::automatic_reduce{}.tree(data.size_bytes(), comm.size()) ? "tree" : "direct";
    }
    void fill() const { fill_mine(); }
    void run(std::size_t k) const { ddp::reduce(comm, data, static_cast<int>(root(k))); }
    [[nodiscard]] std::size_t wrong(std::size_t k) const {  // elsewhere than on the root the data stays as it is
        return count_wrong(data, 0, data.size(),
                           [&](std::size_t i) { return root(k) == me() ? values.sum(i) : values.of(me(), i); });
    }
};

struct all_to_all : collective_of_two {
    using collective_of_two::collective_of_two;
    static constexpr char const* name = "all_to_all";
    static constexpr bool sliced = true;
    [[nodiscard]] static double bus_factor(double n) { return (n - 1) / n; }
    [[nodiscard]] static std::string chosen() { return "direct"; }
    void run(std::size_t) const { ddp::all_to_all(comm, std::span<float const>(data), in); }
    [[nodiscard]] std::size_t wrong(std::size_t) const {
        return count_wrong(in, 0, in.size(),
                           [&](std::size_t i) { return values.of(i / slice(), me() * slice() + i % slice()); });
    }
};

/// Every rank's slice goes to the root, which keeps all of them in an array of its own.
struct gather : collective_of_two {
    using collective_of_two::collective_of_two;
    static constexpr char const* name = "gather";
    static constexpr bool rooted = true, sliced = true;
    [[nodiscard]] static double bus_factor(double n) { return (n - 1) / n; }
    [[nodiscard]] static std::string chosen() { return "direct"; }
    void run(std::size_t k) const {
        ddp::gather(comm, std::span<float const>(data.subspan(me() * slice(), slice())),
                    me() == root(k) ? in : std::span<float>(), static_cast<int>(root(k)));
    }
    [[nodiscard]] std::size_t wrong(std::size_t k) const {
        return count_wrong(in, 0, in.size(),
                           [&](std::size_t i) { return root(k) == me() ? values.of(i / slice(), i) : -1.0f; });
    }
};

/// The root's array is dealt out: a slice to each rank, which keeps it at the beginning of an array of its own.
struct scatter : collective_of_two {
    using collective_of_two::collective_of_two;
    static constexpr char const* name = "scatter";
    static constexpr bool rooted = true, sliced = true;
    [[nodiscard]] static double bus_factor(double n) { return (n - 1) / n; }
    [[nodiscard]] static std::string chosen() { return "direct"; }
    void run(std::size_t k) const {
        ddp::scatter(comm, me() == root(k) ? std::span<float const>(data) : std::span<float const>(), in.first(slice()),
                     static_cast<int>(root(k)));
    }
    [[nodiscard]] std::size_t wrong(std::size_t k) const {
        return count_wrong(in, 0, slice(), [&](std::size_t i) { return values.of(root(k), me() * slice() + i); });
    }
};

struct barrier : collective {
    using collective::collective;
    static constexpr char const* name = "barrier";
    static void fill() {}
    void run(std::size_t) const { ddp::barrier(comm); }
    [[nodiscard]] static std::size_t wrong(std::size_t) { return 0; }
};

/// A message from rank 0 to rank 1, and one back. Other ranks do nothing.
struct pingpong : collective_of_two {
    using collective_of_two::collective_of_two;
    static constexpr char const* name = "pingpong";
    static constexpr int operations = 2;
    void run(std::size_t) const {
        if (comm.rank() == 0) {
            ddp::send(comm, std::span<float const>(data), 1);
            ddp::receive(comm, in, 1);
        } else if (comm.rank() == 1) {
            ddp::receive(comm, in, 0);
            ddp::send(comm, std::span<float const>(data), 0);
        }
    }
    [[nodiscard]] std::size_t wrong(std::size_t) const {
        if (comm.rank() > 1) return 0;
        return count_wrong(in, 0, in.size(), [&](std::size_t i) { return values.of(1 - me(), i); });
    }
};

using all_collectives =
    std::tuple<allreduce, reduce_scatter, all_gather, broadcast, reduce, gather, scatter, all_to_all, barrier, pingpong
#if defined(PERF_WITH_MPI)
               ,
               mpi_allreduce
#endif
               >;

/// Calls f with a null pointer to each type.
template <class F>
void for_each_collective(F const& f) {
    [&]<class... C>(std::tuple<C...> const*) {
        (f(static_cast<C const*>(nullptr)), ...);
    }(static_cast<all_collectives const*>(nullptr));
}
[[nodiscard]] inline std::vector<std::string> collective_names() {
    std::vector<std::string> names;
    for_each_collective([&]<class C>(C const*) { names.emplace_back(C::name); });
    return names;
}

}  // namespace ddp_perf
