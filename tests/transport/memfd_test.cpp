// Memory of a host, by a file without a name: what is said where the system has none.
#include <ddp/transport/shm/memfd.hpp>

#include <string>

#include "support/catch.hpp"
#include "support/descriptors_left.hpp"
#include "support/sanitizers.hpp"

TEST_CASE("whoever may open no more descriptors shares no memory, and says which one is missing", "[comm]") {
    if (ddp::test::sanitizers_leave_out("no descriptors")) return;  // they need some too
    auto const refused = [](int left) {
        ddp::test::descriptors_left const few(left);
        ddp::memfd_sharing one;
        ddp::memory_offer offer;
        bool const made = one.make(1000, offer) != nullptr;
        return made ? "made" : std::string(offer.text.view());
    };
    CHECK(refused(0) == "memfd_create: Too many open files");
    CHECK(refused(1) == "a Unix-domain socket: Too many open files");
    CHECK(refused(4) == "made");
}
