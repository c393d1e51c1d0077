#!/usr/bin/env bash
# clang-tidy, and Clang's own warnings, over every public header (as one source file that includes them all), the examples and the tools, which leave
# out the definitions that the first has seen. Those without macros of their own are one source, too: most of the time is that of the headers.
set -euo pipefail
cd "$(dirname "$0")/.."

mkdir -p build/tidy
all=build/tidy/every_header.cpp together=build/tidy/together.cpp
(cd include && find ddp -name '*.hpp' | LC_ALL=C sort | sed 's/.*/#include <&>/') > "$all"
flags=(-std=c++20 -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Iinclude -march=x86-64-v3 -DOMPI_SKIP_MPICXX -DEXAMPLE_WITH_MPI -DPERF_WITH_MPI)
for directory in $(mpicxx --showme:incdirs) /usr/include/eigen3; do
    flags+=(-isystem "$directory")
done
macros='^#(define|undef|if)|^extern "C"|^namespace ddp'
mapfile -t alone < <(find examples tools -name '*.cpp' -exec grep -lE "$macros" {} +)
mapfile -t merged < <(find examples tools -name '*.cpp' -exec grep -LE "$macros" {} + | LC_ALL=C sort)
python3 scripts/compile_together.py "$together" "${merged[@]}"
run_one() {
    local seen=(-DDDP_SEPARATE_COMPILATION)
    [[ $1 != "$all" ]] || seen=()
    [[ $1 != "$together" ]] || seen+=(-Wno-return-type) # main in a namespace; GCC's warning finds the others
    clang-tidy-19 --quiet "$1" -- "${@:2}" "${seen[@]}" 2> /dev/null
}
export all together
export -f run_one
printf '%s\0' "$together" "$all" "${alone[@]}" |
    xargs -0 -I '{}' -P "${DDP_JOBS:-$(nproc)}" bash -c 'run_one "$@"' run_one '{}' "${flags[@]}"
printf '%d sources, %d headers: clean\n' $((${#alone[@]} + ${#merged[@]})) "$(wc -l < "$all")"
