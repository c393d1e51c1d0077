/// \file
/// What a test program with an entry point of its own calls.
#pragma once

#include "catch.hpp"

namespace ddp::test {

#if CATCH_VERSION_MAJOR >= 3
inline int run_catch(int argc, char** argv) {
    return Catch::Session().run(argc, argv);
}
#else
int run_catch(int argc, char** argv);  // main.cpp, the only file that compiles Catch2
#endif

}  // namespace ddp::test
