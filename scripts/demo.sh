#!/usr/bin/env bash
# Trains on Fashion-MNIST with several processes on this machine; on a bare Debian 12 it installs what that needs first.
#
#   scripts/demo.sh [--ranks N] [--transport tcp|inproc|mpi] [options of the program, such as --epochs 2 --seed 7]
#
# Default: one process per core, at least two, over TCP, started by ddprun. With inproc the ranks are threads of one process;
# with mpi they run under mpirun. The program is examples/fashion_mnist.cpp: its --help shows the other options.
# The last line is the result, the exit code the program's. DDP_SETUP=skip: no package is looked for.
set -euo pipefail
here=$PWD
cd "$(dirname "$0")/.."

# shellcheck source=scripts/progress.sh
source scripts/progress.sh

usage_error() {
    printf 'demo: %s\n' "$1" >&2
    exit 2
}

# One per core that we may use (a container's quota counts), at least two.
default_ranks() {
    local cores quota=max period=1
    cores=$(nproc)
    [[ -r /sys/fs/cgroup/cpu.max ]] && read -r quota period < /sys/fs/cgroup/cpu.max
    if [[ $quota != max ]] && (((quota + period / 2) / period < cores)); then
        cores=$(((quota + period / 2) / period))
    fi
    echo $((cores < 2 ? 2 : cores))
}

ranks=$(default_ranks)
transport=tcp
arguments=()
while (($# > 0)); do
    case $1 in
        --ranks | --transport)
            (($# > 1)) || usage_error "$1 needs a value"
            if [[ $1 == --ranks ]]; then ranks=$2; else transport=$2; fi
            shift 2
            ;;
        --data | --load | --save) # where the caller stands, not where we go
            (($# > 1)) || usage_error "$1 needs a value"
            arguments+=("$1" "$(cd "$here" && realpath -m -- "$2")")
            shift 2
            ;;
        --ranks=*) ranks=${1#*=} && shift ;;
        --transport=*) transport=${1#*=} && shift ;;
        -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" && exit 0 ;;
        *) arguments+=("$1") && shift ;;
    esac
done
[[ $ranks =~ ^[1-9][0-9]{0,3}$ ]] || usage_error "--ranks takes a positive number, not '$ranks'"
[[ $transport =~ ^(tcp|inproc|mpi)$ ]] || usage_error "--transport takes tcp, inproc or mpi, not '$transport'"

groups=(demo)
[[ $transport == mpi ]] && groups+=(mpi)
scripts/setup.sh "${groups[@]}"

build=build/demo
targets=(fashion_mnist)
[[ " ${arguments[*]} " == *" --save "* ]] && targets+=(predict)
[[ $transport == tcp ]] && targets+=(ddprun)
with_progress "demo: configuring" cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DDDP_ARCH=native \
    -DDDP_BUILD_TESTS=OFF -DDDP_INSTALL=OFF
with_progress "demo: compiling for this machine (a minute or two the first time)" \
    cmake --build "$build" --target "${targets[@]}"

program=$build/examples/fashion_mnist
printf 'demo: training with %s ranks, %s\n' "$ranks" "$transport"
case $transport in
    tcp)
        exec "$build/tools/ddprun" -n "$ranks" --prefix others -- "$program" "${arguments[@]}"
        ;;
    inproc)
        exec "$program" --ranks "$ranks" "${arguments[@]}"
        ;;
    mpi)
        options=(-n "$ranks" --oversubscribe --bind-to none) # cores that are threads of one core count as one slot
        if [[ -t 1 ]]; then # mpirun gives every rank a pseudo-terminal, whatever it has itself
            options+=(-x DDP_TTY=1)
        else
            options+=(-x DDP_TTY=0)
        fi
        # Containers forbid the copying between processes that Open MPI prefers, and run as root.
        export OMPI_MCA_btl_vader_single_copy_mechanism=${OMPI_MCA_btl_vader_single_copy_mechanism-none}
        if ((EUID == 0)); then
            export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
        fi
        launcher=mpirun
        command -v mpirun.openmpi > /dev/null && launcher=mpirun.openmpi
        exec "$launcher" "${options[@]}" "$program" "${arguments[@]}"
        ;;
esac
