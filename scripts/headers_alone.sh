#!/usr/bin/env bash
# Every public header compiles alone, with what its component brings and nothing else: one that has an .ipp file with it, the others as
# separate compilation leaves them; all of them together in the latter way,
# and src/ddp.cpp, for AVX-512 too; and, with Clang, the benchmarks, and tests that no other stage compiles with it (most: .ci/run's asan;
# examples and tools: scripts/tidy.sh). Needs scripts/setup.sh ci.
set -euo pipefail
cd "$(dirname "$0")/.."
jobs=${DDP_JOBS:-$(nproc)}

mkdir -p build/headers
alone() { # alone HEADER: below include/
    local definitions flags=(-std=c++20 -fsyntax-only -Iinclude) component pattern directory
    definitions=include/$(dirname "$1")/impl/$(basename "$1" .hpp).ipp
    [[ -e $definitions ]] || flags+=(-DDDP_SEPARATE_COMPILATION)
    while read -r component pattern; do
        # shellcheck disable=SC2053 # a glob
        [[ $1 == $pattern ]] || continue
        case $component in
            nn) flags+=(-isystem /usr/include/eigen3) ;;
            mpi)
                flags+=(-DOMPI_SKIP_MPICXX)
                for directory in $(mpicxx --showme:incdirs); do flags+=(-isystem "$directory"); done
                ;;
        esac
    done < <(grep -v '^#' cmake/components.txt)
    printf '#include <%s>\n' "$1" | g++ "${flags[@]}" -x c++ - || { echo "$1 does not compile alone" && return 255; }
}
export -f alone
(cd include && find ddp -name '*.hpp') | xargs -P "$jobs" -I '{}' bash -c 'alone {}'
(cd include && find ddp -name '*.hpp' | LC_ALL=C sort | sed 's/.*/#include <&>/') > build/headers/every_header.cpp
warnings=(-Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror)
includes=()
for directory in $(mpicxx --showme:incdirs) /usr/include/eigen3; do includes+=(-isystem "$directory"); done
g++ -std=c++20 -fsyntax-only "${warnings[@]}" -Iinclude "${includes[@]}" -DDDP_SEPARATE_COMPILATION -DOMPI_SKIP_MPICXX \
    build/headers/every_header.cpp
# With -Og, GCC takes a function that has to be inlined and cannot be for an error.
g++ -std=c++20 -Og -c -Wall -Wextra -Werror -Iinclude "${includes[@]}" -o build/headers/quick_start.o examples/quick_start.cpp
# For AVX-512, GCC 12's own header warns of itself. Other people's headers do not warn through ours, not even Eigen's by plain -I.
arch=native
[[ $(uname -m) != x86_64 ]] || arch=x86-64-v4
g++ -std=c++20 -O2 -march=$arch -c -Wall -Wextra -Werror -Iinclude -I/usr/include/eigen3 -o build/headers/quick_start.o examples/quick_start.cpp
optimized=(g++ -std=c++20 -O2 -march="$arch" -c -Wall -Wextra -Werror -Iinclude "${includes[@]}" -DDDP_SEPARATE_COMPILATION -DOMPI_SKIP_MPICXX)
"${optimized[@]}" -o build/headers/every_header.o build/headers/every_header.cpp
"${optimized[@]}" -DDDP_WITH_{TCP,SECURE,NN,GZIP,MPI} -o build/headers/ddp.o src/ddp.cpp
{
    find benchmarks -name '*.cpp' -print0
    printf 'tests/%s.cpp\0' {nn,train}/allocation_test train/same_bits_test adapter/separable_function_test docs/{snippets,docstring_examples}
} | xargs -0 -n 4 -P "$jobs" clang++-19 -std=c++20 -fsyntax-only \
    "${warnings[@]}" -Iinclude -Itests -I. "${includes[@]}" -DDDP_SEPARATE_COMPILATION -DOMPI_SKIP_MPICXX
