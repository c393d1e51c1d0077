#!/usr/bin/env bash
# Measures ddp on this machine beside the libraries that are installed, and writes tables to build/benchmark/tables.md.
#
#   scripts/benchmark.sh [--rounds N] [--ranks "2 4"] [--quick]
#
# Allreduce between processes: ddp in shared memory and over TCP, and MPI_Allreduce of the MPI library (ddp-perf --dirty).
# Steps of three models: train_step, and PyTorch's DDP where scripts/setup.sh torch has put it into build/torch.
# Everything in turn, N (3) times; a figure is the median of the rounds. About a quarter of an hour for 2 and 4 ranks, with
# --quick a minute. Leave the machine alone meanwhile. Build and figures: build/benchmark.
set -euo pipefail
cd "$(dirname "$0")/.."

rounds=3
ranks="2 4"
quick=
while (($# > 0)); do
    case $1 in
        --rounds) rounds=${2:?--rounds takes a number} && shift 2 ;;
        --ranks) ranks=${2:?--ranks takes numbers of ranks} && shift 2 ;;
        --quick) quick=yes && shift ;;
        -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" && exit 0 ;;
        *) printf 'benchmark: what is %s? --help says what there is\n' "$1" >&2 && exit 2 ;;
    esac
done

build=build/benchmark
cmake -S . -B $build -G Ninja --log-level=NOTICE -DCMAKE_BUILD_TYPE=Release -DDDP_ARCH=native -DDDP_BUILD_BENCHMARKS=ON \
    -DDDP_BUILD_TESTS=OFF -DDDP_BUILD_EXAMPLES=OFF > /dev/null
cmake --build $build --target ddprun ddp-perf benchmark_train_step > /dev/null
perf=$PWD/$build/tools/ddp-perf
step=$PWD/$build/benchmarks/benchmark_train_step
launch=$PWD/$build/tools/ddprun
figures=$build/figures
rm -rf $figures && mkdir -p $figures

export ROUNDS=1 STEP_BUDGET=1.5
sizes=(-b 4 -e 64M -f 16 --dirty --check)
models=(mlp wide cnn)
if [[ -n $quick ]]; then
    rounds=1 STEP_BUDGET=0.2 models=(mlp)
    sizes=(-b 64K -e 1M -f 16 --dirty --check --budget 0.02)
fi
# Open MPI as root, with more ranks than cores, and not bound to one.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
export OMPI_MCA_hwloc_base_binding_policy=none GLIBC_TUNABLES=glibc.malloc.hugetlb=1
torch=
[[ -x build/torch/bin/torchrun ]] && torch=$PWD/build/torch/bin/torchrun
mpi=
command -v mpirun > /dev/null && "$perf" --help | grep -q mpi_allreduce && mpi=yes

{
    printf 'Measured on %s, %s cores, %s; %s' "$(date +%F)" "$(nproc)" \
        "$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)" "$(. /etc/os-release && printf %s "$PRETTY_NAME")"
    printf ', Linux %s, %s; TCP on loopback with %s' "$(uname -r)" "$(c++ --version | head -n 1)" \
        "${DDP_TCP_CONGESTION:-cubic}"
    [[ -z $mpi ]] || printf '; %s' "$(mpirun --version | head -n 1)"
    [[ -z $torch ]] || printf '; PyTorch %s' "$(build/torch/bin/python -c 'import torch; print(torch.__version__)')"
    printf '. Medians of %s rounds in turn; commit %s.\n' "$rounds" "$(git rev-parse --short HEAD)"
} > $figures/machine.txt

for ((round = 1; round <= rounds; ++round)); do
    for n in $ranks; do
        printf '== round %d of %d, %d ranks\n' "$round" "$rounds" "$n"
        "$launch" -n "$n" --prefix none -- "$perf" allreduce "${sizes[@]}" --json "$figures/$round.$n.allreduce.memory.json" > /dev/null
        DDP_SHARE_MEMORY=0 "$launch" -n "$n" --prefix none -- "$perf" allreduce "${sizes[@]}" \
            --json "$figures/$round.$n.allreduce.tcp.json" > /dev/null
        [[ -z $mpi ]] || mpirun -n "$n" "$perf" mpi_allreduce "${sizes[@]}" --json "$figures/$round.$n.allreduce.mpi.json" > /dev/null
        for model in "${models[@]}"; do
            [[ $model == cnn && $n -gt $(nproc) ]] && continue
            "$launch" -n "$n" --prefix none -- "$step" --candidate "$model" > "$figures/$round.$n.step.$model.ddp.lines"
            [[ -z $torch ]] || OMP_NUM_THREADS=1 "$torch" --standalone --nproc-per-node "$n" benchmarks/train_torch.py "$model" \
                > "$figures/$round.$n.step.$model.torch.lines"
        done
    done
done
python3 benchmarks/tables.py $figures | tee $build/tables.md
