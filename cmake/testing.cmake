# What every CTest entry of ours is given: a time limit, labels, the environment of MPI and of the sanitizers.
include_guard(GLOBAL)
if(POLICY CMP0174)  # an empty TIMEOUT is no TIMEOUT, and no reason for CMake 3.31 to warn
  cmake_policy(SET CMP0174 NEW)
endif()

set(DDP_TEST_ENVIRONMENT
  OMPI_ALLOW_RUN_AS_ROOT=1
  OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  OMPI_MCA_rmaps_base_oversubscribe=1
  OMPI_MCA_hwloc_base_binding_policy=none
  OMPI_MCA_btl_vader_single_copy_mechanism=none  # containers forbid it, and Open MPI then complains on every message
  UBSAN_OPTIONS=print_stacktrace=1
  CACHE INTERNAL "")

# ddp_test_properties(<test> [TIMEOUT seconds] [PROCESSORS n] [LABELS …] [ENVIRONMENT …])
function(ddp_test_properties test)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "TIMEOUT;PROCESSORS" "LABELS;ENVIRONMENT")
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 60)
  endif()
  if(NOT arg_PROCESSORS)
    set(arg_PROCESSORS 1)
  endif()
  math(EXPR timeout "${arg_TIMEOUT} * ${DDP_TEST_TIMEOUT_SCALE}")
  set_tests_properties(${test} PROPERTIES TIMEOUT ${timeout} PROCESSORS ${arg_PROCESSORS} SKIP_RETURN_CODE 77)
  set_property(TEST ${test} PROPERTY LABELS ${arg_LABELS})
  set_property(TEST ${test} PROPERTY ENVIRONMENT ${DDP_TEST_ENVIRONMENT} ${arg_ENVIRONMENT})
endfunction()

# ddp_absent_test(<entry> <what there was none of> <label>): skipped, so that the list of what was left out names it.
function(ddp_absent_test entry what label)
  add_test(NAME ${entry} COMMAND sh -c "echo 'there was no ${what} when this was configured'; exit 77")
  ddp_test_properties(${entry} LABELS ${label})
endfunction()
