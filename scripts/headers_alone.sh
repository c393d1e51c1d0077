#!/usr/bin/env bash
# Every public header compiles alone, with what its target brings and nothing else; all of them as separate compilation leaves them,
# and src/ddp.cpp, for AVX-512 too; and, with Clang, the benchmarks (tests: .ci/run's asan; examples and tools: scripts/tidy.sh). Needs scripts/setup.sh ci.
set -euo pipefail
cd "$(dirname "$0")/.."
jobs=${DDP_JOBS:-$(nproc)}

cmake --preset release -B build/headers -DDDP_WERROR=ON --log-level=NOTICE > /dev/null
cmake --build build/headers --parallel "$jobs" --target all_verify_interface_header_sets
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
find benchmarks -name '*.cpp' -print0 | xargs -0 -n 4 -P "$jobs" clang++-19 -std=c++20 -fsyntax-only \
    "${warnings[@]}" -Iinclude "${includes[@]}" -DDDP_SEPARATE_COMPILATION -DOMPI_SKIP_MPICXX
