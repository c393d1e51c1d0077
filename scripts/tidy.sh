#!/usr/bin/env bash
# clang-tidy, and Clang's own warnings, over every public header (as one source file that includes them all), the examples and the tools, which leave
# out the definitions that the first has seen.
set -euo pipefail
cd "$(dirname "$0")/.."

mkdir -p build/tidy
all=build/tidy/every_header.cpp
(cd include && find ddp -name '*.hpp' | LC_ALL=C sort | sed 's/.*/#include <&>/') > "$all"
flags=(-std=c++20 -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Iinclude -march=x86-64-v3 -DOMPI_SKIP_MPICXX -DEXAMPLE_WITH_MPI -DPERF_WITH_MPI)
for directory in $(mpicxx --showme:incdirs) /usr/include/eigen3; do
    flags+=(-isystem "$directory")
done
mapfile -t sources < <(printf '%s\n' "$all" && find examples tools -name '*.cpp')
run_one() {
    local seen=(-DDDP_SEPARATE_COMPILATION)
    [[ $1 == "$all" ]] && seen=()
    clang-tidy-19 --quiet "$1" -- "${@:2}" "${seen[@]}" 2> /dev/null
}
export all
export -f run_one
printf '%s\0' "${sources[@]}" |
    xargs -0 -I '{}' -P "${DDP_JOBS:-$(nproc)}" bash -c 'run_one "$@"' run_one '{}' "${flags[@]}"
printf '%d sources, %d headers: clean\n' "${#sources[@]}" "$(wc -l < "$all")"
