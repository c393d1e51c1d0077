/// \file
/// Catch2 2.13 and 3 through one header. Use only what both have.
#pragma once

// An assertion without a try block of its own: what throws inside one ends its test case.
#define CATCH_CONFIG_FAST_COMPILE

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
using Catch::Approx;
#else
#include <catch2/catch.hpp>
#endif
