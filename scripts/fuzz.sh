#!/usr/bin/env bash
# Every fuzzer, one after the other, for so many seconds each (600 by default).
#
#   scripts/fuzz.sh [seconds] [name …]     names: those of tests/fuzz/*_fuzzer.cpp
#
# Begins with what is in tests/fuzz/corpus and what earlier runs have found; at the end the inputs that reach new code are
# added to the corpus, for you to look at and commit. A crash leaves its input behind, and its path is printed.
set -euo pipefail
cd "$(dirname "$0")/.."
case ${1:-} in -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" && exit 0 ;; esac

seconds=${1:-600}
shift || true
names=("$@")
build=build/release/tests/fuzz
export ASAN_OPTIONS=detect_stack_use_after_return=0:quarantine_size_mb=16 # half the time otherwise
[[ -f build/release/build.ninja ]] || cmake --preset release --log-level=NOTICE > /dev/null
cmake --build --preset release --target ddp_fuzzers
if ((${#names[@]} == 0)); then
    for fuzzer in tests/fuzz/*_fuzzer.cpp; do names+=("$(basename "$fuzzer" _fuzzer.cpp)"); done
fi
for name in "${names[@]}"; do
    found=$build/found/$name corpus=tests/fuzz/corpus/$name dict=tests/fuzz/$name.dict
    mkdir -p "$found" "$corpus"
    options=(-timeout=10 -rss_limit_mb=1024 -malloc_limit_mb=64 -max_len=4096 "-artifact_prefix=$build/$name-")
    [[ -f $dict ]] && options+=("-dict=$dict")
    printf '== %s: %d s\n' "$name" "$seconds"
    "$build/${name}_fuzzer" "${options[@]}" "-max_total_time=$seconds" -verbosity=0 -print_funcs=0 -print_final_stats=1 "$found" "$corpus"
    "$build/${name}_fuzzer" "${options[@]}" -set_cover_merge=1 -use_counters=0 "$corpus" "$found" 2>&1 | tail -n 1
done
