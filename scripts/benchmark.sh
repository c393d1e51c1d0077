#!/usr/bin/env bash
# Measures ddp on this machine beside the libraries that are installed, and writes tables to build/benchmark/tables.md:
# with the machine and, as the programs that measured say it, the compiler, versions and the path taken (shm, TCP, MPI).
#
#   scripts/benchmark.sh [--rounds N] [--ranks "2 4"] [--quick | --smoke] [--only "allreduce steps …"] [--peers DIR]
#
# Sections, in turn, N (3) times; a figure is the median of the rounds:
#   allreduce  every rank rewrites its data before each: ddp in shared memory and over sockets, and MPI_Allreduce of the MPI
#              library, in its own shared memory
#   sockets    over TCP on loopback: ddp, MPI_Allreduce through the MPI library's TCP, and what --peers has of Gloo and MPICH;
#              all with the system's congestion control, which the others use (sysctl net.ipv4.tcp_congestion_control)
#   steps      of three models: train_step, and PyTorch's DDP where scripts/setup.sh torch has put it into build/torch
#   update     the update of a step alone, and what memory it takes (benchmarks/update.cpp)
#   startup    from the launch to the end of the first allreduce: ddprun, mpirun
#   thread     steps by messages over TCP, with a communication thread that drives and with one that rests
#   alone      steps of one rank: data_parallel, and what --peers has in plain Eigen
#   bounds     what two processes need without any library to copy, to add in shared memory and to exchange over TCP
#   growth     with size, ranks on few cores, parameters, ranks in one process, and ranks on virtual time
# --peers DIR names a directory with programs that speak ddp-perf's candidate protocol (ddp-perf --help): build/allreduce_gloo
# and build/allreduce_mpich, and launch.py, which starts N copies with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. For alone:
# build/step_eigen-COMPILER, which takes a model, SECONDS_EACH and COMPILER, and prints a JSON line with impl, model, step_ms
# and ok.
#
# About three quarters of an hour for 2 and 4 ranks, with --quick three minutes. Leave the machine alone meanwhile.
# --smoke only runs everything once, in seconds; its figures mean nothing. Build and figures: build/benchmark, or with CXX=clang++-19
# build/benchmark-clang++-19; --programs TOOLS PREFIX takes programs that are built already (TOOLS/ddp-perf,
# PREFIX_train_step, …), --figures DIR another directory.
set -euo pipefail
cd "$(dirname "$0")/.."

rounds=3
ranks="2 4"
speed=
only="allreduce sockets steps update startup thread alone bounds growth"
peers=
build=build/benchmark${CXX:+-$(basename "$CXX")}
tools=
prefix=
figures=$build/figures
tables=$build/tables.md
while (($# > 0)); do
    case $1 in
        --rounds) rounds=${2:?--rounds takes a number} && shift 2 ;;
        --ranks) ranks=${2:?--ranks takes numbers of ranks} && shift 2 ;;
        --quick) speed=quick && shift ;;
        --smoke) speed=smoke && shift ;;
        --only) only=${2:?--only takes sections} && shift 2 ;;
        --peers) peers=$(cd "${2:?--peers takes a directory}" && pwd) && shift 2 ;;
        --programs) tools=${2:?--programs takes a directory and a prefix} && prefix=${3:?--programs takes a prefix too} && shift 3 ;;
        --figures) figures=${2:?--figures takes a directory} && tables=$2/tables.md && shift 2 ;;
        -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" && exit 0 ;;
        *) printf 'benchmark: what is %s? --help says what there is\n' "$1" >&2 && exit 2 ;;
    esac
done

if [[ -z $tools ]]; then
    cmake -S . -B "$build" -G Ninja --log-level=NOTICE -DCMAKE_BUILD_TYPE=Release -DDDP_ARCH=native \
        -DDDP_TOOLS_ARCH=native -DDDP_BUILD_BENCHMARKS=ON -DDDP_BUILD_TESTS=OFF -DDDP_BUILD_EXAMPLES=OFF > /dev/null
    cmake --build "$build" --target ddprun ddp-perf benchmark_{bounds,train_step,update,virtual_ranks} > /dev/null
    tools=$PWD/$build/tools
    prefix=$PWD/$build/benchmarks/benchmark
fi
perf=$tools/ddp-perf
run() { "$tools/ddprun" -n "$1" --prefix none -- "${@:2}"; }
mkdir -p "$figures"
rm -f "$figures"/*.json "$figures"/*.lines "$figures"/*.txt

export ROUNDS=1 STEP_BUDGET=1.5 MIB=140 STEPS=4
sizes=(-b 4 -e 64M -f 4)
large=(-b 16M -e 1G -f 4)
models=(mlp wide cnn)
bytes="1048576 4194304 16777216 67108864"
many="2 4 8 16 32 64"
virtual="2 4 8 16 32 64"
virtual_sizes="4096 4194304"
crowd="2 4 8 16"
budget=0.25
case $speed in
    quick)
        rounds=1 STEP_BUDGET=0.2 MIB=16 models=(mlp) many="2 16" virtual="2 16" crowd="2 8" budget=0.05
        sizes=(-b 64K -e 1M -f 16 --budget 0.02) large=(-b 1M -e 16M -f 16 --budget 0.1)
        ;;
    smoke)
        rounds=1 ranks=2 STEP_BUDGET=0.01 MIB=1 STEPS=1 models=(cnn) many="2 3" virtual="2 4" virtual_sizes=4096 crowd="3" budget=0 bytes=65536
        export SKIP=sharded
        sizes=(-b 64K -e 64K --iterations 2) large=(-b 256K -e 1M -f 4 --iterations 2)
        ;;
esac
# Open MPI as root, with more ranks than cores, and not bound to one.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
export OMPI_MCA_hwloc_base_binding_policy=none GLIBC_TUNABLES=glibc.malloc.hugetlb=1
torch=
[[ -x build/torch/bin/torchrun && $speed != smoke ]] && torch=$PWD/build/torch/bin/torchrun
mpi=
command -v mpirun > /dev/null && "$perf" --help | grep -q mpi_allreduce && mpi=yes

system_congestion=$(cat /proc/sys/net/ipv4/tcp_congestion_control)

{
    printf 'Measured on %s, %s cores, %s; %s' "$(date +%F)" "$(nproc)" \
        "$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)" "$(. /etc/os-release && printf %s "$PRETTY_NAME")"
    printf ', Linux %s; TCP on loopback with %s, beside other libraries with %s' "$(uname -r)" \
        "${DDP_TCP_CONGESTION:-cubic}" "$system_congestion"
    if ((rounds == 1)); then printf '. One round'; else printf '. Medians of %s rounds in turn' "$rounds"; fi
    printf '; commit %s.\n' "$(git rev-parse --short HEAD 2> /dev/null || printf unknown)"
} > "$figures/machine.txt"

# The package that a program's shared library LIB comes from, and its version.
package_of() {
    local file package
    file=$(ldd "$1" 2> /dev/null | sed -n "s/.*$2[^ ]* => \([^ ]*\) .*/\1/p" | head -n 1)
    package=$(dpkg-query -S "$(readlink -f "${file:-none}")" 2> /dev/null | head -n 1) && package=${package%%: *}
    [[ -z $package ]] || dpkg-query -W -f '${Package} ${Version}' "$package"
}
# Of what does not print its own version: NAME, tab, version.
{
    if [[ -n $peers && -x $peers/build/allreduce_gloo ]]; then
        version=$(package_of "$peers/build/allreduce_gloo" libgloo)
        printf 'gloo\tGloo (%s)\n' "${version:-of unknown version}"
    fi
    if [[ -n $peers && -x $peers/build/allreduce_mpich ]]; then
        version=$(mpiexec.mpich --version 2> /dev/null | sed -n 's/^ *Version: *//p' | head -n 1)
        printf 'mpich\tMPICH %s\n' "${version:-of unknown version}"
    fi
} > "$figures/versions.txt"

# What a peer does that has not been started as it should is no reason to lose the rest; it is said.
peer() {
    local to=$1
    shift
    "$@" > "$to" || { printf 'benchmark: this failed and is left out: %s\n' "$*" >&2 && rm -f "$to"; }
}

allreduce() {
    local n=$1 to=$figures/$2.$1.allreduce
    "$perf" allreduce --transport shm -n "$n" "${sizes[@]}" --dirty --check --json "$to.memory.json" > /dev/null
    "$perf" allreduce --transport tcp -n "$n" "${sizes[@]}" --dirty --check --json "$to.tcp.json" > /dev/null
    [[ -z $mpi ]] || mpirun -n "$n" "$perf" mpi_allreduce "${sizes[@]}" --dirty --check --json "$to.mpi.json" > /dev/null
}

sockets() {
    local n=$1 to=$figures/$2.$1.sockets algorithm
    DDP_TCP_CONGESTION=$system_congestion "$perf" allreduce --transport tcp -n "$n" "${sizes[@]}" --check --json "$to.ddp.json" \
        > /dev/null
    [[ -z $mpi ]] || OMPI_MCA_pml=ob1 OMPI_MCA_btl=tcp,self OMPI_MCA_btl_tcp_if_include=lo mpirun -n "$n" "$perf" mpi_allreduce \
        "${sizes[@]}" --check --json "$to.mpi.json" > /dev/null
    [[ -z $peers ]] && return
    local wanted
    wanted=$(python3 -c 'import json, sys; print(*(row["bytes"] for row in json.load(open(sys.argv[1]))["rows"]))' "$to.ddp.json")
    for algorithm in ring bcube ring_chunked halving_doubling; do
        [[ ! -x $peers/build/allreduce_gloo ]] || IFACE=lo NET="TCP on lo" SIZES=$wanted BUDGET=0.25 MINREPS=4 IMPL=gloo-$algorithm \
            ALGO=$algorithm peer "$to.gloo-$algorithm.lines" python3 "$peers/launch.py" "$n" -- "$peers/build/allreduce_gloo"
    done
    # MPICH waits in a loop without giving up its core: with more ranks than cores its figures are the scheduler's.
    [[ ! -x $peers/build/allreduce_mpich || $n -gt $(nproc) ]] || UCX_TLS=tcp UCX_NET_DEVICES=lo NET="TCP on lo" SIZES=$wanted BUDGET=0.25 \
        MINREPS=4 IMPL=mpich peer "$to.mpich.lines" mpiexec.mpich -n "$n" "$peers/build/allreduce_mpich"
}

steps() {
    local n=$1 model
    for model in "${models[@]}"; do
        [[ $model == cnn && $n -gt $(nproc) ]] && continue
        DDP_TCP_CONGESTION=$system_congestion \
            run "$n" "${prefix}_train_step" --candidate "$model" > "$figures/$2.$n.step.$model.ddp.lines"
        [[ -z $torch ]] || OMP_NUM_THREADS=1 "$torch" --standalone --nproc-per-node "$n" benchmarks/train_torch.py "$model" \
            > "$figures/$2.$n.step.$model.torch.lines"
    done
}

update() { run "$1" "${prefix}_update" > "$figures/$2.$1.update.lines"; }

# By messages over TCP, whatever the ranks could share: only the thread differs.
thread() {
    local n=$1 model how
    for model in "${models[@]}"; do
        [[ $model == cnn && $n -gt $(nproc) ]] && continue
        for how in drives rests; do
            DDP_SHARE_MEMORY=0 DDP_COMMUNICATION_THREAD=$how SKIP="default sharded" \
                run "$n" "${prefix}_train_step" --candidate "$model" > "$figures/$2.$n.thread.$model.$how.lines"
        done
    done
}

# Nothing of a rank's large temporary memory goes back to the system between steps, neither ours nor theirs.
alone() {
    local model program
    export MALLOC_MMAP_THRESHOLD_=8589934592 MALLOC_TRIM_THRESHOLD_=17179869184 OMP_NUM_THREADS=1
    for model in "${models[@]}"; do
        SKIP="nosync replicated sharded" "${prefix}_train_step" --candidate "$model" > "$figures/$2.alone.$model.ddp.lines"
        for program in ${peers:+"$peers"/build/step_eigen-*}; do
            [[ ! -x $program ]] || COMPILER=${program##*/step_eigen-} SECONDS_EACH=$STEP_BUDGET \
                peer "$figures/$2.alone.$model.${program##*/}.lines" "$program" "$model"
        done
    done
    unset MALLOC_MMAP_THRESHOLD_ MALLOC_TRIM_THRESHOLD_ OMP_NUM_THREADS
}

# Seconds from here to the end of the first allreduce.
startup() {
    local n=$1 to=$figures/$2.$1.startup how
    local -A ways=([ddprun]="$tools/ddprun -n $n --prefix none -- $perf allreduce --candidate")
    [[ -z $mpi ]] || ways[mpirun]="mpirun -n $n $perf allreduce --transport mpi --candidate"
    for how in "${!ways[@]}"; do
        # shellcheck disable=SC2086  # a command line without blanks in its words
        MODE=startup T0=$(date +%s.%N) ${ways[$how]} --json "$to.$how.json" > /dev/null
    done
}

bounds() { SIZES="$bytes" ROUNDS='' "${prefix}_bounds" > "$figures/$2.bounds.lines"; }

growth() {
    local to=$figures/$2.growth n parts spent way
    "$perf" allreduce --transport shm -n 2 "${large[@]}" --dirty --json "$to.size.json" > /dev/null
    for n in $crowd; do
        for way in shm tcp; do  # processor seconds of all ranks, the start and the end included
            TIMEFORMAT=%U,%S
            spent=$({ time "$perf" allreduce --transport "$way" -n "$n" -b 1M -e 1M --iterations 50 \
                --json "$to.crowd.$way.$n.json" > /dev/null; } 2>&1)
            printf '{"of":"%s","cpu_s":%s}\n' "$2.growth.crowd.$way.$n.json" "$(python3 -c "print(sum([$spent]))")" \
                >> "$to.crowd.lines"
        done
    done
    for parts in 1 1000; do
        MIB=1 PARTS=$parts run 2 "${prefix}_update" | sed "s/^{/{\"parts\":$parts,/" >> "$to.parts.lines"
    done
    for n in $many; do
        "$perf" allreduce --transport inproc -n "$n" -b 4 -e 4M -f 1024 --budget "$budget" --json "$to.threads.$n.json" > /dev/null
    done
    # Exact, so that no second round has anything to add.
    (($2 > 1)) || RANKS=$virtual SIZES=$virtual_sizes LATENCY_US=25 GBIT=10 OVERHEAD_US=2 "${prefix}_virtual_ranks" > "$to.virtual.lines"
}

for ((round = 1; round <= rounds; ++round)); do
    for section in $only; do
        if [[ $section =~ ^(growth|alone|bounds)$ ]]; then
            printf '== round %d of %d: %s\n' "$round" "$rounds" "$section" >&2
            "$section" - "$round"
            continue
        fi
        for n in $ranks; do
            printf '== round %d of %d: %s, %d ranks\n' "$round" "$rounds" "$section" "$n" >&2
            "$section" "$n" "$round"
        done
    done
done
python3 benchmarks/tables.py "$figures" | tee "$tables"
