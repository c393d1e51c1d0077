/// \file
/// DDP_DECL: whether what an .ipp file defines is compiled wherever its header is included, or in one source file.
#pragma once

#include <ddp/core/language.hpp>  // first

/// Before every definition in an .ipp file (MODULE/impl/HEADER.ipp, included at the end of its header). Header-only it is
/// `inline`. With DDP_SEPARATE_COMPILATION headers only declare, and src/ddp.cpp, compiled once into the program, defines;
/// the CMake target ddp::compiled adds that file (docs/compiling.md).
#if defined(DDP_SEPARATE_COMPILATION)
#define DDP_DECL
#else
#define DDP_DECL inline
#endif

/// With DDP_SEPARATE_COMPILATION, before each instantiation with types of the library's own that src/ddp.cpp compiles: a
/// declaration everywhere else.
#if defined(DDP_SEPARATE_COMPILATION) && defined(DDP_SOURCE_FILE)
#define DDP_INSTANTIATE template
#elif defined(DDP_SEPARATE_COMPILATION)
#define DDP_INSTANTIATE extern template
#endif
