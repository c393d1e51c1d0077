#!/usr/bin/env bash
# The tests on Debian 13 (GCC 14, Boost 1.83, Catch2 3), in a chroot made for them and removed afterwards. Needs root, debootstrap
# (Debian: apt install debootstrap), 4 GB of disk, and a network: what this machine's own apt uses as its archive.
#
#   scripts/debian13.sh [arguments of scripts/test.sh, such as --preset debug -LE fashion]
#
# Environment: DDP_CHROOT=DIR makes the chroot there, or takes the one that is there, and keeps it; DDP_JOBS (default: the cores).
set -euo pipefail
cd "$(dirname "$0")/.."

suite=trixie

cannot() { printf 'debian13: %s\n' "$1" >&2 && exit 1; }
((EUID == 0)) || cannot "making a chroot needs root: sudo scripts/debian13.sh"
command -v debootstrap > /dev/null || cannot "there is no debootstrap here (Debian: apt install debootstrap)."

# In a mount namespace of its own, so that no mount outlives this script or is reached by removing the chroot.
if [[ ${DDP_DEBIAN13_INSIDE:-} != yes ]]; then
    exec env DDP_DEBIAN13_INSIDE=yes unshare --mount --propagation private "$PWD/scripts/debian13.sh" "$@"
fi

if [[ -n ${DDP_CHROOT:-} ]]; then
    mkdir -p "$DDP_CHROOT"
    root=$(cd "$DDP_CHROOT" && pwd)
else
    root=$(mktemp -d --tmpdir ddp-debian13.XXXXXX)
    trap 'umount --recursive "$root/proc" "$root/dev" 2> /dev/null; rm -rf --one-file-system "$root"' EXIT
fi
chmod 755 "$root"

if [[ ! -e $root/made ]]; then
    # shellcheck disable=SC2016  # the field name is apt's, not the shell's
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Label: Debian' | sort -u | head -n 1)
    [[ -n $mirror ]] || cannot "this machine's apt knows no Debian archive; is it Debian, and has apt-get update been run?"
    debootstrap --variant=minbase "$suite" "$root" "$mirror" > "$root.log" 2>&1 ||
        { tail -n 20 "$root.log" >&2 && cannot "debootstrap failed; all it said is in $root.log"; }
    rm -f "$root.log"
    touch "$root/made"
fi

mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
cp /etc/resolv.conf "$root/etc/resolv.conf"
mkdir -p "$root/ddp"
find "$root/ddp" -mindepth 1 -maxdepth 1 ! -name build -exec rm -rf {} + # what is gone here must not stay there
git ls-files -z --cached --others --exclude-standard | tar --null --files-from=- --ignore-failed-read -c | tar -x -C "$root/ddp"

inside() {
    chroot "$root" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 DDP_JOBS="${DDP_JOBS:-$(nproc)}" "$@"
}
inside /ddp/scripts/setup.sh tests
# shellcheck disable=SC2016  # the field names are dpkg's
inside dpkg-query --show --showformat='${Package} ${Version}\n' \
    g++ cmake libboost-dev libeigen3-dev libopenmpi-dev catch2 zlib1g-dev libxxhash-dev
inside /ddp/scripts/test.sh "$@"
