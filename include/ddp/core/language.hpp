/// \file
/// Checks for C++20 before anything else can fail to compile.
#pragma once

#if __cplusplus < 202002L
#error "ddp needs C++20. Compile this file with -std=c++20, or link the target ddp::ddp, which asks for it."
#include <ddp_needs_std_cxx20>  // there is no such file: the compiler stops here
#endif
