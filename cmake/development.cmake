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
set(DDP_ARCH "${default_arch}" CACHE STRING "The -march of tests, examples and benchmarks; empty for the compiler's default")
set(DDP_TOOLS_ARCH "" CACHE STRING "The -march of ddprun and ddp-perf; empty for the compiler's default, as for tools that are installed elsewhere; \"tests\" for DDP_ARCH")
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

# ddp_add_flags(<target> <arch>): the flags of our own programs, for one -march.
function(ddp_add_flags name arch)
  add_library(${name} INTERFACE)
  target_link_libraries(${name} INTERFACE ddp::ddp)
  target_compile_options(${name} INTERFACE -Wall -Wextra -Wpedantic -Wconversion -Wshadow
    $<$<CXX_COMPILER_ID:GNU>:-fconcepts-diagnostics-depth=2>
    $<$<BOOL:${DDP_WERROR}>:-Werror>)
  if(arch)
    target_compile_options(${name} INTERFACE -march=${arch})
  endif()
  if(arch STREQUAL "native")  # on machines with AVX-512 both speak about headers of the compiler, not ours
    target_compile_options(${name} INTERFACE
      $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>
      $<$<CXX_COMPILER_ID:Clang>:-Wno-invalid-feature-combination>)
  endif()
endfunction()
ddp_add_flags(ddp_dev "${DDP_ARCH}")

# What depends on no program's own types, compiled once for all of ours, as ddp::compiled does it for one target. A program links
# ddp_once, or ddp_once_mpi if it opens that door; the tools, ddp_tool_once. Header-only use is tested by the packages, the quick start and the demo.
function(ddp_add_once name flags)
  add_library(${name} STATIC EXCLUDE_FROM_ALL "${PROJECT_SOURCE_DIR}/src/ddp.cpp")
  target_link_libraries(${name} PUBLIC ${flags})
  target_compile_definitions(${name} PUBLIC DDP_SEPARATE_COMPILATION)
  foreach(door IN LISTS ARGN)
    if(TARGET ddp::${door})
      target_link_libraries(${name} PRIVATE ddp::${door})
    endif()
  endforeach()
endfunction()
function(ddp_add_once_mpi name once)  # the same, and what that door adds
  add_library(${name} STATIC EXCLUDE_FROM_ALL "${PROJECT_BINARY_DIR}/once_mpi.cpp")
  target_link_libraries(${name} PUBLIC ${once} PRIVATE ddp::mpi)
endfunction()
ddp_add_once(ddp_once ddp_dev tcp secure nn gzip)
if(TARGET ddp::mpi)
  file(CONFIGURE OUTPUT "${PROJECT_BINARY_DIR}/once_mpi.cpp"
    CONTENT "#include <ddp/rendezvous/impl/run_mpi.ipp>\n#include <ddp/transport/mpi/impl/mpi.ipp>\n")
  ddp_add_once_mpi(ddp_once_mpi ddp_once)
endif()
# The tools' own, or the same.
if(NOT DDP_TOOLS_ARCH STREQUAL "tests")
  ddp_add_flags(ddp_tool_dev "${DDP_TOOLS_ARCH}")
  ddp_add_once(ddp_tool_once ddp_tool_dev tcp secure)
  if(TARGET ddp::mpi)
    ddp_add_once_mpi(ddp_tool_once_mpi ddp_tool_once)
  endif()
else()
  foreach(part IN ITEMS dev once once_mpi)
    if(TARGET ddp_${part})
      add_library(ddp_tool_${part} ALIAS ddp_${part})
    endif()
  endforeach()
endif()
