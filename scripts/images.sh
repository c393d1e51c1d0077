#!/usr/bin/env bash
# Builds the images of packaging/kubernetes on this machine, without any registry of images, and runs the demo in each.
#
#   scripts/images.sh [DIRECTORY]    where images and what they are made of go (default: a temporary directory, removed at the end)
#
# Needs root, and Debian's buildah and debootstrap. Debian's packages are fetched from where this machine fetches its own.
set -euo pipefail
cd "$(dirname "$0")/.."

for tool in buildah debootstrap; do
    if ! command -v "$tool" > /dev/null; then
        echo "images: there is no $tool: apt-get install --no-install-recommends buildah debootstrap" >&2
        exit 2
    fi
done
if [[ ${1:-} ]]; then
    mkdir -p "$1"
    at=$(realpath "$1")
else
    at=$(mktemp -d)
    trap 'rm -rf "$at"' EXIT
fi
export STORAGE_DRIVER=vfs BUILDAH_ISOLATION=chroot
storage() { buildah --root "$at/storage" --runroot "$at/run" "$@"; }

lists=$(cat /etc/apt/sources.list /etc/apt/sources.list.d/* 2> /dev/null || true)
source=$(grep -E '^(URIs:|deb )' <<< "$lists" | grep -oE -m 1 'https?://[^ ]+')
if [[ ! -e $at/base.done ]]; then
    rm -rf "$at/base"
    debootstrap --variant=minbase bookworm "$at/base" "$source" > "$at/debootstrap.log"
    touch "$at/base.done"
fi
made=$(storage from scratch)
storage add -q "$made" "$at/base" / > /dev/null
storage config --cmd /bin/bash "$made"
storage commit -q "$made" docker.io/library/debian:12 > /dev/null
storage rm "$made" > /dev/null

git clone -q . "$at/source"  # what is committed, and nothing that was built
for image in fashion_mnist fashion_mnist_mpi; do
    file=packaging/kubernetes/Containerfile
    start=(ddprun -n 2)
    if [[ $image == *_mpi ]]; then
        file+=.mpi
        start=(mpirun -n 2 --oversubscribe)
    fi
    storage bud --pull-never -q -f "$file" -t "$image" "$at/source"
    container=$(storage from --pull-never "localhost/$image")
    storage run "$container" -- "${start[@]}" fashion_mnist --epochs 1 --batch 64 | tee "$at/$image.out"
    storage rm "$container" > /dev/null
    grep -q 'replicas=identical' "$at/$image.out" || { echo "images: $image does not train" >&2; exit 1; }
done
rm -rf "$at/source"
echo "images: both train"
