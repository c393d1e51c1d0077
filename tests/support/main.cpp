// The entry point of every Catch2 test program, where the library does not bring one (Catch2 2).
#define CATCH_CONFIG_MAIN
#include "catch.hpp"
