#!/usr/bin/env bash
# Every test: installs what is missing (scripts/setup.sh: Debian's packages; for release and debug also PyTorch and two MPI
# libraries from PyPI, 1.2 GB in build/), configures, builds and runs CTest. The last lines say what was skipped.
#
#   scripts/test.sh [--preset release|debug|clang|asan|asan_training|tsan] [--build] [arguments of ctest, such as -R collective]
#
# --build stops before the tests. Presets are CMakePresets.json's. release and debug run everything; release compiles the library, programs, and tests of arithmetic and
# layers with -O2, other tests with -O0. The others build and run what they can find and these
# cannot: asan what reads input and moves bytes, asan_training the rest but examples, pages, packages, messages, the fuzzers, Fashion-MNIST, the launchers and faults in processes,
# models of other libraries, counted allocations and train/same_bits, with the middle of the rank counts over MPI; tsan the test files whose threads differ
# (DDP_TEST_FILES), but for cases tagged same_threads (DDP_TEST_LEAVE_OUT), over MPI where ranks have some; clang what depends on an optimizer's choices (arithmetic), while both asan
# compile most other tests with Clang.
# Environment: DDP_JOBS (default: the cores), DDP_SETUP=skip, DDP_WERROR=ON, and DDP_SECOND_TRY=N: if at most N tests fail, and
# none by a crash, a timeout or the report of a sanitizer or fuzzer, they run once more, alone. What passes only then is named in
# build/PRESET/second_try.txt and in the last lines: such a test depends on the speed of the machine, or has found a rare
# error. Look at its output in build/PRESET/ctest.log.
set -euo pipefail
cd "$(dirname "$0")/.."

preset=release
only_build=
arguments=()
while (($# > 0)); do
    case $1 in
        --preset) preset=${2:?--preset needs a name} && shift 2 ;;
        --preset=*) preset=${1#*=} && shift ;;
        --build) only_build=yes && shift ;;
        -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" && exit 0 ;;
        *) arguments+=("$1") && shift ;;
    esac
done
jobs=${DDP_JOBS:-$(nproc)}

stage() { printf '== %s: %s (%d:%02d)\n' "$preset" "$1" $((SECONDS / 60)) $((SECONDS % 60)); }

scripts/setup.sh tests
case ${DDP_SETUP:-}$only_build$preset in
    release | debug)
        without() { printf '== %s: %s could not be installed: tests that need it are skipped\n' "$preset" "$1"; }
        scripts/setup.sh slurm ssh || without "Slurm or sshd"
        scripts/setup.sh torch || { without PyTorch && rm -rf build/torch; }
        scripts/setup.sh launchers || { without "another MPI" && rm -rf build/openmpi build/mpich; }
        scripts/setup.sh mlpack || { without mlpack && rm -rf build/mlpack; }
        scripts/setup.sh kubernetes || { without "Kubeflow's schemas" && rm -rf build/kubernetes; }
        ;;
esac

stage configure
cmake --preset "$preset" -DDDP_WERROR="${DDP_WERROR:-OFF}" --log-level=NOTICE > /dev/null
targets=()
case $preset in
    clang) targets=(--target ddp_base_tests ddp_kernels_object) ;;
    asan) targets=(--target ddp_base_tests ddp_comm_tests ddp_tcp_tests ddp_kernels_object) ;;
    asan_training) targets=(--target ddp_sim_tests ddp_train_tests ddp_checkpoint_tests ddp_nn_tests process_programs) ;;&
    tsan) targets=(--target ddp_base_tests ddp_comm_tests ddp_tcp_tests ddp_train_tests ddp_checkpoint_tests) ;;&
    asan_training | tsan) targets+=(ddp_mpi_tests ddp_mpi_leaving_program) ;;&
    tsan) targets+=(ddprun process_newcomer_program) ;;
esac
stage "build with $jobs jobs"
cmake --build --preset "$preset" --parallel "$jobs" "${targets[@]}"
[[ -z $only_build ]] || exit 0
stage test
again=build/$preset/ctest_again.log
rm -f "$again"
started=$(mktemp)
trap 'rm -f "$started"' EXIT
status=0
ctest --preset "$preset" --parallel "$jobs" --output-log "build/$preset/ctest.log" "${arguments[@]}" || status=$?
skipped=$(scripts/skipped_tests.sh "$preset" | tee "build/$preset/skipped.txt")
if [[ -z $skipped ]]; then
    printf '== %s: no test was skipped\n' "$preset"
else
    printf '== %s: these were skipped (why a whole test was, build/%s/ctest.log says):\n%s\n' "$preset" "$preset" "$skipped"
fi
awk -v preset="$preset" '/ Testing: fuzz\// { name = $3 }
    /^stat::number_of_executed_units/ { printf "== %s: %s tried %d inputs\n", preset, name, $2 }' \
    "build/$preset/Testing/Temporary/LastTest.log"
second=build/$preset/second_try.txt
failed=build/$preset/Testing/Temporary/LastTestsFailed.log
may_try_again() {
    local crash='\*\*\*(Timeout|Exception)|exited on signal|fatal error condition|Segmentation fault|terminate called'
    [[ -s $failed && $failed -nt $started ]] && (($(wc -l < "$failed") <= ${DDP_SECOND_TRY:-0})) &&
        ! grep -qE "$crash|exit code -[0-9]|TimeoutExpired" "build/$preset/ctest.log" &&
        ! grep -qE 'SUMMARY: |runtime error:' "build/$preset/Testing/Temporary/LastTest.log"
}
: > "$second"
if ((status != 0)) && may_try_again; then
    names=$(sed 's/^[0-9]*://' "$failed" | paste -sd ' ')
    stage "failed, and run once more: $names"
    status=0
    ctest --preset "$preset" --parallel 1 --rerun-failed --output-log "$again" || status=$?
    ! grep -qE '\*\*\*(Skipped|Not Run)' "$again" || status=1
    ((status != 0)) || printf 'passed only at the second try: %s\n' "$names" > "$second"
    sed "s/^/== $preset: /" "$second"
fi
stage "$( ((status == 0)) && echo "all passed" || echo "FAILED")"
exit "$status"
