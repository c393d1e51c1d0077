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

# GCC collects its garbage when its heap has grown by a third. Where each job has memory enough, it never does: a tenth of its time.
cmake_host_system_information(RESULT memory QUERY TOTAL_PHYSICAL_MEMORY)  # MiB
cmake_host_system_information(RESULT cores QUERY NUMBER_OF_LOGICAL_CORES)
math(EXPR memory_of_a_job "${memory} / ${cores}")
set(uncollected "")
if(memory_of_a_job GREATER_EQUAL 6000)
  set(uncollected $<$<CXX_COMPILER_ID:GNU>:--param=ggc-min-heapsize=4000000>)  # KiB
endif()

# ddp_add_flags(<target> <arch>): the flags of our own programs, for one -march.
function(ddp_add_flags name arch)
  add_library(${name} INTERFACE)
  target_link_libraries(${name} INTERFACE ddp::ddp)
  target_compile_options(${name} INTERFACE -Wall -Wextra -Wpedantic -Wconversion -Wshadow
    $<$<CXX_COMPILER_ID:GNU>:-fconcepts-diagnostics-depth=2> ${uncollected}
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

# Where programs are built again after every small change (tests/planted), src/ddp.cpp is compiled as a source for each module and
# component, so that a change compiles what depends on it. Weak definitions of a header that several include are one at link time.
option(DDP_TEST_PROGRAM_A_FILE "A program for each test file instead of a few fat ones" OFF)
mark_as_advanced(DDP_TEST_PROGRAM_A_FILE)
set(DDP_STANDARD_HEADERS <algorithm> <array> <atomic> <charconv> <chrono> <condition_variable> <coroutine> <cstdint> <functional> <list>
  <map> <memory> <mutex> <numeric> <optional> <random> <span> <sstream> <string> <thread> <unordered_map> <variant> <vector>)
function(ddp_once_in_parts result)
  file(STRINGS "${PROJECT_SOURCE_DIR}/src/ddp.cpp" lines REGEX "^#(include <ddp/[a-z]+/|if defined\\(DDP_WITH_|endif)")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/src/ddp.cpp")
  set(component "")
  set(parts "")
  foreach(line IN LISTS lines)
    if(line MATCHES "^#if defined\\((.*)\\)")
      set(component "${CMAKE_MATCH_1}")
    elseif(line STREQUAL "#endif")
      set(component "")
    elseif(line MATCHES "<ddp/([a-z]+)/")
      set(part "${CMAKE_MATCH_1}${component}")
      list(APPEND parts "${part}")
      set(component_${part} "${component}")
      string(APPEND text_${part} "${line}\n")
    endif()
  endforeach()
  file(GLOB headers CONFIGURE_DEPENDS RELATIVE "${PROJECT_SOURCE_DIR}/include" "${PROJECT_SOURCE_DIR}/include/ddp/*/*.hpp")
  foreach(header IN LISTS headers)
    file(STRINGS "${PROJECT_SOURCE_DIR}/include/${header}" instantiates REGEX "^DDP_INSTANTIATE " LIMIT_COUNT 1)
    if(instantiates AND header MATCHES "^ddp/([a-z]+)/" AND NOT CMAKE_MATCH_1 STREQUAL "nn")  # nn.hpp is in src/ddp.cpp
      list(APPEND parts "${CMAKE_MATCH_1}")
      string(APPEND text_${CMAKE_MATCH_1} "#include <${header}>\n")
    endif()
  endforeach()
  list(REMOVE_DUPLICATES parts)
  set(sources "")
  foreach(part IN LISTS parts)
    set(text "#define DDP_SOURCE_FILE\n${text_${part}}")
    if(component_${part})
      set(text "#if defined(${component_${part}})\n${text}#endif\n")
    endif()
    file(CONFIGURE OUTPUT "${PROJECT_BINARY_DIR}/once/${part}.cpp" CONTENT "${text}" @ONLY)
    list(APPEND sources "${PROJECT_BINARY_DIR}/once/${part}.cpp")
  endforeach()
  set(${result} ${sources} PARENT_SCOPE)
endfunction()

# What depends on no program's own types, compiled once for all of ours, as ddp::compiled does it for one target. A program links
# ddp_once, or ddp_once_mpi if it uses that component; the tools, ddp_tool_once. Header-only use is tested by the packages, the quick start and the demo.
function(ddp_add_once name flags)
  set(sources "${PROJECT_SOURCE_DIR}/src/ddp.cpp")
  if(DDP_TEST_PROGRAM_A_FILE)
    ddp_once_in_parts(sources)
  endif()
  add_library(${name} STATIC EXCLUDE_FROM_ALL ${sources})
  target_link_libraries(${name} PUBLIC ${flags})
  target_compile_definitions(${name} PUBLIC DDP_SEPARATE_COMPILATION)
  foreach(component IN LISTS ARGN)
    if(TARGET ddp::${component})
      target_link_libraries(${name} PRIVATE ddp::${component})
    endif()
  endforeach()
  if(DDP_TEST_PROGRAM_A_FILE)
    target_precompile_headers(${name} PRIVATE ${DDP_STANDARD_HEADERS})
  endif()
endfunction()
function(ddp_add_once_mpi name once)  # the same, and what that component adds
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
