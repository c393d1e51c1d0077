#!/usr/bin/env python3
"""What torch's DistributedDataParallel makes of two small networks, as a record for tests/nn/torch_oracle_test.cpp.

    build/torch/bin/python tests/oracle/networks.py           writes tests/oracle/networks.csv anew
    build/torch/bin/python tests/oracle/networks.py --check   compares the record with this torch, to 1e-11

scripts/setup.sh torch installs PyTorch. No test runs this: the record is kept, so that the tests need no PyTorch.

Every case is 100 steps in double on 2 or 3 processes over Gloo, 12 samples a step in equal shares, local statistics of batch
normalisation, buffers broadcast from rank 0. Initial values, inputs and labels come from SplitMix64, so that the test has
them to the last bit. Lines of the record, behind a line of column names:

    case,"loss",the mean loss over all ranks at steps 1, 2, 10, 50, 100
    case,name of a parameter, or of a buffer of rank 0,its elements after the last step
"""

import itertools
import os
import pathlib
import socket
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

RECORD = pathlib.Path(__file__).with_name("networks.csv")
STEPS, BATCH, SHOWN = 100, 12, (1, 2, 10, 50, 100)

# A bias before a normalisation has a gradient of zero, but for rounding: eps keeps optimizers from dividing that by itself.
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, dict(lr=0.05)),
    "momentum": (torch.optim.SGD, dict(lr=0.02, momentum=0.9, weight_decay=0.01)),
    "nesterov": (torch.optim.SGD, dict(lr=0.02, momentum=0.8, nesterov=True)),
    "adam": (torch.optim.Adam, dict(lr=0.01, eps=1e-4)),
    "adamw": (torch.optim.AdamW, dict(lr=0.01, eps=1e-4, weight_decay=0.1)),
    "rmsprop": (torch.optim.RMSprop, dict(lr=0.002, eps=1e-4)),
    "adagrad": (torch.optim.Adagrad, dict(lr=0.05, eps=1e-4)),
}
CLIP = 0.5  # of the gradient's norm


def numbers(seed, count):
    """`count` doubles in [-1, 1) from SplitMix64."""
    mask, state, result = (1 << 64) - 1, seed, []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        z ^= z >> 31
        result.append((z >> 11) * 2.0**-52 - 1)
    return torch.tensor(result, dtype=torch.float64)


def make_net(kind):
    if kind == "mlp":
        net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    else:
        net = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
                            nn.Linear(12, 4))
    net.double()
    with torch.no_grad():
        for i, p in enumerate(net.parameters()):
            if p.dim() > 1:
                p.copy_(0.5 * numbers(100 + i, p.numel()).reshape(p.shape))
            elif p.data.eq(1).all():
                p.copy_(1 + 0.25 * numbers(100 + i, p.numel()))
            else:
                p.copy_(0.25 * numbers(100 + i, p.numel()))
    return net


def batch(kind, step, rank, ranks):
    features = 6 if kind == "mlp" else 2 * 4 * 4
    x = numbers(1000 + step, BATCH * features).reshape(BATCH, features)
    labels = ((numbers(5000 + step, BATCH) + 1) * 2).floor().long()
    share = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
    x = x[share] if kind == "mlp" else x[share].reshape(-1, 2, 4, 4)
    return x, labels[share]


def train(rank, ranks, port, results):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    lines = []
    for kind, (name, (make, settings)), clips in itertools.product(("mlp", "cnn"), OPTIMIZERS.items(), (False, True)):
        net = make_net(kind)
        model = nn.parallel.DistributedDataParallel(net)
        optimizer = make(net.parameters(), **settings)
        losses = []
        for step in range(1, STEPS + 1):
            x, labels = batch(kind, step, rank, ranks)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), labels)
            loss.backward()
            if clips:
                torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP)
            optimizer.step()
            if step in SHOWN:
                mean = loss.detach().clone()
                dist.all_reduce(mean)
                losses.append(mean.item() / ranks)
        case = f"{kind} {name}{' clipped' if clips else ''} {ranks}"
        lines.append((case, "loss", losses))
        for what, tensor in itertools.chain(net.named_parameters(), net.named_buffers()):
            lines.append((case, what, tensor.detach().reshape(-1).tolist()))
    if rank == 0:
        results.put(lines)
    dist.barrier()
    dist.destroy_process_group()


def measure():
    lines = []
    for ranks in (2, 3):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        results = mp.get_context("spawn").Queue()
        context = mp.start_processes(train, (ranks, port, results), nprocs=ranks, join=False, start_method="spawn")
        lines += results.get()
        context.join()
    return lines


def main():
    lines = measure()
    if sys.argv[1:] == ["--check"]:
        worst = 0.0
        kept = [line.split(",") for line in RECORD.read_text().splitlines()[1:]]
        if [(f[0], f[1]) for f in kept] != [(case, what) for case, what, _ in lines]:
            sys.exit("other cases than in the record")
        for fields, (_, _, now) in zip(kept, lines):
            worst = max([worst, *(abs(float(a) - b) / (1 + abs(b)) for a, b in zip(fields[2:], now))])
        print(f"worst difference {worst:.1e}")
        sys.exit(worst > 1e-11)
    with RECORD.open("w") as out:
        out.write("case,what,numbers\n")
        for case, what, values in lines:
            out.write(",".join([case, what, *(repr(float(v)) for v in values)]) + "\n")
    print(f"{len(lines)} lines of torch {torch.__version__}")


if __name__ == "__main__":
    main()
