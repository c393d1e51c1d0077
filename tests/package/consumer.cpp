// What a stranger's program does with the package: include, compute, print. Built four ways by the tests beside it.
#include <ddp/core/digest.hpp>
#include <ddp/core/version.hpp>

#include <cstddef>
#include <cstdio>
#include <span>

#if defined(CONSUMER_OPENS_EVERY_DOOR)
#include <xxhash.h>
#include <zlib.h>
#include <Eigen/Core>
#include <boost/mpi/environment.hpp>
#include <boost/version.hpp>
#endif

int main() {
    std::printf("ddp %d.%d.%d\n", ddp::version_major, ddp::version_minor, ddp::version_patch);
}
