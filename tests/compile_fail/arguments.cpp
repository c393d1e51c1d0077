// What a compiler says about arguments that no collective takes. See mistakes.cpp.
#include <ctime>
#include <string>
#include <vector>

#include <ddp/ddp.hpp>

// Names of the C library are no names of ours: this compiles, corrected or not.
namespace with_all_names {
using namespace ddp;
using namespace std;
inline clock_t processor_time() {
    return clock();
}
}  // namespace with_all_names

using job = ddp::communicator<ddp::inproc_transport>;
using numbers = std::vector<float>;

void sums_bools(job& comm) {
#ifdef CORRECTED
    std::vector<int> flags(3);
#else
    std::vector<bool> flags(3);
#endif
    // expect: NumbersTarget
    ddp::allreduce(comm, flags);
}

void sums_what_nobody_can_see(job& comm) {
#ifdef CORRECTED
    numbers data(3);
    ddp::allreduce(comm, data);
#else
    // expect: NumbersTarget
    ddp::allreduce(comm, numbers(3));
#endif
}

struct average {
    static constexpr char const* name = "average";
#ifdef CORRECTED
    static float combine(float left, float right) { return (left + right) / 2; }
#endif
};
void combines_by_nothing(job& comm) {
    numbers data(3);
    // expect: OperationOn Op::combine(left, right)
    ddp::reduce(comm, data, 0, average{});
}

void broadcasts_into_a_constant(job& comm) {
#ifdef CORRECTED
    numbers data(3);
#else
    numbers const data(3);
#endif
    // expect: Target
    ddp::broadcast(comm, data);
}

void sends_strings(job& comm) {
#ifdef CORRECTED
    std::string const names = "abc";
#else
    std::vector<std::string> const names(3);
#endif
    // expect: Source Movable
    ddp::send(comm, names, 1);
}

void sends_a_pointer(job& comm) {
    int const value = 3;
#ifdef CORRECTED
    ddp::send(comm, value, 1);
#else
    // expect: Source is_pointer
    ddp::send(comm, &value, 1);
#endif
}

void gathers_floats_as_doubles(job& comm) {
    numbers const mine(3);
#ifdef CORRECTED
    numbers all(9);
#else
    std::vector<double> all(9);
#endif
    // expect: SameValues
    ddp::gather(comm, mine, all);
}

void starts_with_a_temporary(job& comm) {
    numbers in(3);
#ifdef CORRECTED
    numbers const out(3);
    ddp::start_all_to_all(comm, out, in).wait();
#else
    // expect: LastingSource
    ddp::start_all_to_all(comm, numbers(3), in).wait();
#endif
}
