#!/usr/bin/env bash
# debian.sh BUILD DIRECTORY COMPILER: the Debian packages that CPack makes of BUILD, checked by lintian where there is one,
# installed below DIRECTORY by dpkg, used from there, and removed without a trace.
set -euo pipefail
build=$1 directory=$2 compiler=$3
source_dir=$(cd "$(dirname "$0")/../.." && pwd)
skip() { echo "skipped: $1" && exit 77; }
command -v dpkg dpkg-deb dpkg-shlibdeps > /dev/null || skip "this is not a Debian system with dpkg-dev"
((EUID == 0)) || skip "dpkg installs as root only"

rm -rf "$directory"
mkdir -p "$directory"/{packages,tree}
cd "$directory"
root=$directory/tree
cpack --config "$build/CPackConfig.cmake" -G DEB -B packages
packages=(packages/*.deb)
ls "${packages[@]}"
if command -v lintian > /dev/null; then # who publishes them gives an address: cmake -DCPACK_PACKAGE_CONTACT=…
    lintian --fail-on error,warning --suppress-tags bogus-mail-host,bogus-mail-host-in-debian-changelog "${packages[@]}"
else
    echo "not tried: lintian, which is not installed (Debian: apt install lintian)"
fi

mkdir -p "$root"/var/lib/dpkg/{info,updates}
touch "$root"/var/lib/dpkg/status
contents() { (cd "$root" && find . -path ./var -prune -o -print | sort); }
contents > before
on_root() { # libc and its like are this machine's; the packages have no scripts that would want them
    dpkg --root="$root" --force-depends --force-script-chrootless "$@" 2>&1
}
on_root --install "${packages[@]}"
on_root --verify libddp-dev ddprun ddp-perf

export PKG_CONFIG_PATH=$root/usr/share/pkgconfig
flags=()
eval "flags=($(pkg-config --cflags --libs ddp-tcp ddp-nn))" # pkg-config quotes what the shell would split
"$compiler" -std=c++20 "$source_dir/tests/package/consumer.cpp" "${flags[@]}" -o by_hand
printed=$("$root/usr/bin/ddprun" -n 2 --prefix none -- ./by_hand)
[[ $printed == "ddp "*$'\n'"ddp "* ]]
"$root/usr/bin/ddp-perf" allreduce -n 2 -e 64 --iterations 2 --check
cmake -S "$source_dir/tests/package/find_package" -B consumer -DCMAKE_PREFIX_PATH="$root/usr" -DCMAKE_CXX_COMPILER="$compiler"
cmake --build consumer
consumer/consumer

on_root --purge libddp-dev ddprun ddp-perf
diff before <(contents)
echo "installed, used and removed"
