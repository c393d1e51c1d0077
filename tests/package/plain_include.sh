#!/usr/bin/env bash
# plain_include.sh COMPILER DIRECTORY EIGEN [PREFIX]: programs compiled by hand, with -I; with PREFIX, by pkg-config from there.
# The quick start: with PREFIX from headers alone, otherwise with src/ddp.cpp, where no file of its own includes Asio.
set -euo pipefail
compiler=$1 directory=$2 eigen=$3 prefix=${4:-}
source_dir=$(cd "$(dirname "$0")/../.." && pwd)
if [[ -n $prefix ]]; then
    command -v pkg-config > /dev/null || { echo "skipped: pkg-config is not installed"; exit 77; }
    export PKG_CONFIG_PATH=$prefix/share/pkgconfig
    for module in "$PKG_CONFIG_PATH"/ddp*.pc; do pkg-config --validate "$(basename "$module" .pc)"; done
    eval "compiled_once=$(pkg-config --variable=source ddp)"
else
    compiled_once=$source_dir/src/ddp.cpp
fi
flags_of() { # flags_of MODULE…: sets `flags`
    if [[ -n $prefix ]]; then
        eval "flags=($(pkg-config --cflags --libs "$@"))" # pkg-config quotes what the shell would split
    else
        flags=(-I "$source_dir/include" -pthread -I "$eigen")
        [[ $* != *gzip* ]] || flags+=(-lz)
        [[ $* != *tcp* ]] || flags+=(-DDDP_WITH_TCP)
        [[ $* != *nn* ]] || flags+=(-DDDP_WITH_NN)
    fi
}
mkdir -p "$directory"
cd "$directory"
set -x
flags_of ddp
"$compiler" -std=c++20 "$source_dir/tests/package/consumer.cpp" "${flags[@]}" -o consumer
./consumer
flags_of ddp-tcp ddp-nn
if [[ -z $prefix ]]; then
    "$compiler" -std=c++20 -DDDP_SEPARATE_COMPILATION "$source_dir"/{examples/quick_start,tests/package/without_asio}.cpp \
        "$compiled_once" "${flags[@]}" -o quick_start
else
    [[ -f $compiled_once ]]
    "$compiler" -std=c++20 "$source_dir/examples/quick_start.cpp" "${flags[@]}" -o quick_start
fi
[[ $(./quick_start) == "y = 2.00 x + 1.00 (ranks: 1)" ]]
if [[ -n $prefix ]]; then # by hand -lssl -lcrypto; the rendezvous' tests use it
    flags_of ddp-secure
    "$compiler" -std=c++20 -fsyntax-only -x c++ "$source_dir/include/ddp/rendezvous/run_secure.hpp" "${flags[@]}"
fi
flags_of ddp-gzip
"$compiler" -std=c++20 "$source_dir/tests/package/read_gzip.cpp" "${flags[@]}" -o read_gzip
[[ $(echo "through zlib" | gzip -c > text.gz && ./read_gzip text.gz) == "through zlib" ]]
if [[ -n $prefix ]] && command -v mpicxx > /dev/null; then # by hand one would have to name MPI's own libraries too
    flags_of ddp-mpi
    OMPI_CXX=$compiler MPICH_CXX=$compiler mpicxx -std=c++20 "$source_dir/tests/package/under_mpi.cpp" "${flags[@]}" -o under_mpi
    [[ $(./under_mpi) == "ranks: 1, transport mpi" ]]
elif [[ -n $prefix ]]; then
    echo "not tried: the module ddp-mpi, because there is no mpicxx"
fi
