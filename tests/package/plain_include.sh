#!/usr/bin/env bash
# plain_include.sh COMPILER DIRECTORY EIGEN [PREFIX]: programs compiled by hand, with -I; with PREFIX, by pkg-config from there.
set -euo pipefail
compiler=$1 directory=$2 eigen=$3 prefix=${4:-}
source_dir=$(cd "$(dirname "$0")/../.." && pwd)
if [[ -n $prefix ]]; then
    command -v pkg-config > /dev/null || { echo "skipped: pkg-config is not installed"; exit 77; }
    export PKG_CONFIG_PATH=$prefix/share/pkgconfig
    pkg-config --validate ddp
    eval "flags=($(pkg-config --cflags --libs ddp))" # pkg-config quotes what the shell would split
else
    flags=(-I "$source_dir/include" -pthread)
fi
mkdir -p "$directory"
cd "$directory"
set -x
"$compiler" -std=c++20 "$source_dir/tests/package/consumer.cpp" "${flags[@]}" -o consumer
./consumer
"$compiler" -std=c++20 "$source_dir/examples/quick_start.cpp" "${flags[@]}" -I "$eigen" -o quick_start
[[ $(./quick_start) == "y = 2.00 x + 1.00 (ranks: 1)" ]]
