// Catch2 2 itself, which brings no library, and the entry point of test programs that have none of their own.
#define CATCH_CONFIG_RUNNER
#include "catch.hpp"
#include "run_catch.hpp"

int ddp::test::run_catch(int argc, char** argv) {
    return Catch::Session().run(argc, argv);
}

[[gnu::weak]] int main(int argc, char** argv) {
    return ddp::test::run_catch(argc, argv);
}
