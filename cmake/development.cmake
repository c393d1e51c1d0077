# What our own programs are built with: tests, examples, tools, benchmarks. Nothing of it reaches a user of the library.

# Warnings count on one architecture, whatever the machine; -march=native is for the demo and for benchmarks.
set(default_arch "")
if(CMAKE_SYSTEM_PROCESSOR STREQUAL "x86_64")
  set(default_arch "x86-64")
  if(EXISTS /proc/cpuinfo)
    file(STRINGS /proc/cpuinfo flags REGEX "^flags.* avx2 " LIMIT_COUNT 1)
    if(flags)
      set(default_arch "x86-64-v3")
    endif()
  endif()
endif()
set(DDP_ARCH "${default_arch}" CACHE STRING "The -march of tests, examples, tools and benchmarks; empty for the compiler's default")
option(DDP_WERROR "Warnings are errors in tests, examples, tools and benchmarks" OFF)
set(DDP_TEST_TIMEOUT_SCALE 1 CACHE STRING "Multiplies the tests' time limits (sanitizers are slow)")
set(DDP_TEST_TIME_SCALE 1 CACHE STRING "Multiplies the times that tests of whole processes set and assert (sanitizers again)")

if(PROJECT_IS_TOP_LEVEL AND NOT DEFINED CMAKE_CXX_COMPILER_LAUNCHER)
  find_program(DDP_CCACHE ccache)
  mark_as_advanced(DDP_CCACHE)
  if(DDP_CCACHE)  # without this sloppiness, ccache does not cache what uses a precompiled header
    set(CMAKE_CXX_COMPILER_LAUNCHER
      "${CMAKE_COMMAND};-E;env;CCACHE_SLOPPINESS=pch_defines,time_macros;${DDP_CCACHE}"
      CACHE STRING "Found ccache" FORCE)
  endif()
endif()

add_library(ddp_dev INTERFACE)
target_link_libraries(ddp_dev INTERFACE ddp::ddp)
target_compile_options(ddp_dev INTERFACE -Wall -Wextra -Wpedantic -Wconversion -Wshadow
  $<$<CXX_COMPILER_ID:GNU>:-fconcepts-diagnostics-depth=2>
  $<$<BOOL:${DDP_WERROR}>:-Werror>)
if(DDP_ARCH)
  target_compile_options(ddp_dev INTERFACE -march=${DDP_ARCH})
endif()
if(DDP_ARCH STREQUAL "native")  # on machines with AVX-512 both speak about headers of the compiler, not ours
  target_compile_options(ddp_dev INTERFACE
    $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>
    $<$<CXX_COMPILER_ID:Clang>:-Wno-invalid-feature-combination>)
endif()

# What depends on no program's own types, compiled once for all of ours, as ddp::compiled does it for one target. A program links
# ddp_once, or ddp_once_mpi if it opens that door. Header-only use is tested by the packages, the quick start and the demo.
function(ddp_add_once name)
  add_library(${name} STATIC EXCLUDE_FROM_ALL "${PROJECT_SOURCE_DIR}/src/ddp.cpp")
  target_link_libraries(${name} PUBLIC ddp_dev)
  target_compile_definitions(${name} PUBLIC DDP_SEPARATE_COMPILATION)
  foreach(door IN LISTS ARGN)
    if(TARGET ddp::${door})
      target_link_libraries(${name} PRIVATE ddp::${door})
    endif()
  endforeach()
endfunction()
ddp_add_once(ddp_once tcp secure nn gzip)
if(TARGET ddp::mpi)  # the same, and what that door adds
  file(CONFIGURE OUTPUT once_mpi.cpp
    CONTENT "#include <ddp/rendezvous/impl/run_mpi.ipp>\n#include <ddp/transport/mpi/impl/mpi.ipp>\n")
  add_library(ddp_once_mpi STATIC EXCLUDE_FROM_ALL "${CMAKE_CURRENT_BINARY_DIR}/once_mpi.cpp")
  target_link_libraries(ddp_once_mpi PUBLIC ddp_once PRIVATE ddp::mpi)
endif()
