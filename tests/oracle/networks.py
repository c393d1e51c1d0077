#!/usr/bin/env python3
"""What torch's DistributedDataParallel makes of small networks, as a record for tests/nn/torch_networks_test.cpp, and for
tests/exchange/torch_less_test.cpp what becomes of them with PowerSGD, with post-local SGD and with DiLoCo.

    build/torch/bin/python tests/oracle/networks.py           writes tests/oracle/networks.csv anew
    build/torch/bin/python tests/oracle/networks.py --check   compares the record with this torch, to 1e-11

scripts/setup.sh torch installs PyTorch and timm, whose LAMB, LARS and Lion these are. No test runs this: the record is kept,
so that the tests need no PyTorch. A bias before a normalisation has a gradient that is nothing but rounding. Lion steps by its
sign, and LARS by another rate where it is zero: for these two that bias is frozen.

Every case is 100 steps in double on 2 or 3 processes over Gloo, 12 samples a step in equal shares, local statistics of batch
normalisation, buffers broadcast from rank 0. Initial values, inputs and labels come from SplitMix64, so that the test has
them to the last bit. Lines of the record, behind a line of column names:

    case,"loss",the mean loss over all ranks at every step
    case,name of a parameter, or of a buffer of rank 0,its elements after the last step

PowerSGD is torch's hook; the first Q comes from SplitMix64 too. Its cases end after 50 steps: what each step leaves out
comes back in the next, and differences of rounding grow tenfold every ten steps. Post-local SGD is torch's optimizer,
averager and hook. DiLoCo is the paper's algorithm 1 with torch's AdamW and torch's SGD with nesterov=True.
"""

import itertools
import json
import os
import pathlib
import socket
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook as post_local
import torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook as power_sgd
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

from optimizers import Lamb, Lars, Lion

RECORD = pathlib.Path(__file__).with_name("networks.csv")
STEPS, BATCH = 100, 12

# A bias before a normalisation has a gradient of zero, but for rounding: eps keeps optimizers from dividing that by itself.
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, dict(lr=0.05)),
    "momentum": (torch.optim.SGD, dict(lr=0.02, momentum=0.9, weight_decay=0.01)),
    "nesterov": (torch.optim.SGD, dict(lr=0.02, momentum=0.8, nesterov=True)),
    "adam": (torch.optim.Adam, dict(lr=0.01, eps=1e-4)),
    "adamw": (torch.optim.AdamW, dict(lr=0.01, eps=1e-4, weight_decay=0.1)),
    "rmsprop": (torch.optim.RMSprop, dict(lr=0.002, eps=1e-4)),
    "adagrad": (torch.optim.Adagrad, dict(lr=0.05, eps=1e-4)),
    "lamb": (Lamb, dict(lr=0.01, eps=1e-4, weight_decay=0.1, max_grad_norm=None)),
    "lars": (Lars, dict(lr=0.3, momentum=0.9, trust_coeff=0.05, eps=1e-4, weight_decay=0.1)),
    "lion": (Lion, dict(lr=0.002, betas=(0.9, 0.99), weight_decay=0.1)),
}
DISCONTINUOUS = ("lars", "lion")
CLIPPINGS = {
    "": lambda parameters: None,
    " clipped": lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 0.5),
    " clipped by value": lambda parameters: torch.nn.utils.clip_grad_value_(parameters, 0.05),
}
WARM_UP, PERIOD = 12, 4  # of post-local SGD
OUTER_PERIOD, OUTER = 10, dict(lr=0.7, momentum=0.9, nesterov=True)  # of DiLoCo


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
    elif kind == "wide":
        net = nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 10), nn.ReLU(), nn.Linear(10, 4))
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
    features = {"mlp": 6, "wide": 24, "cnn": 2 * 4 * 4}[kind]
    x = numbers(1000 + step, BATCH * features).reshape(BATCH, features)
    labels = ((numbers(5000 + step, BATCH) + 1) * 2).floor().long()
    share = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
    x = x[share].reshape(-1, 2, 4, 4) if kind == "cnn" else x[share]
    return x, labels[share]


def run(kind, rank, ranks, model, step, steps=STEPS):
    """`steps` steps of a network, on this rank's shares; step(k) follows backward. The mean loss over all ranks at each."""
    losses = []
    for k in range(1, steps + 1):
        x, labels = batch(kind, k, rank, ranks)
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(x), labels)
        loss.backward()
        step(k)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / ranks)
    return losses


def every_gradient(rank, ranks):
    for kind, (name, (make, settings)), (how, clip) in itertools.product(("mlp", "cnn"), OPTIMIZERS.items(), CLIPPINGS.items()):
        net = make_net(kind)
        net[0].bias.requires_grad_(name not in DISCONTINUOUS)
        model = nn.parallel.DistributedDataParallel(net)
        optimizer = make(net.parameters(), **settings)

        def step(_, net=net, optimizer=optimizer, clip=clip):
            clip(net.parameters())
            optimizer.step()

        losses = run(kind, rank, ranks, model, step)
        yield f"{kind} {name}{how} {ranks}", losses, net


def less_communication(rank, ranks):
    for name in ("momentum", "adamw"):
        net = make_net("wide")
        model = nn.parallel.DistributedDataParallel(net)
        hook = power_sgd.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=2)
        model.register_comm_hook(hook, power_sgd.powerSGD_hook)
        make, settings = OPTIMIZERS[name]
        optimizer = make(net.parameters(), **settings)
        drawn, torch.randn = torch.randn, lambda *shape, **_: numbers(7000 + shape[-2], shape[-2] * shape[-1]).reshape(shape)
        losses = run("wide", rank, ranks, model, lambda _, optimizer=optimizer: optimizer.step(), 50)
        torch.randn = drawn
        yield f"power_sgd {name} {ranks}", losses, net

    net = make_net("wide")
    model = nn.parallel.DistributedDataParallel(net)
    alone = [dist.new_group([r]) for r in range(ranks)][rank]
    model.register_comm_hook(
        post_local.PostLocalSGDState(None, alone, start_localSGD_iter=WARM_UP, post_local_gradient_allreduce=False),
        post_local.post_localSGD_hook)
    # The averager counts from 0 and averages at once when its warm-up ends: the first time after PERIOD local steps.
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(net.parameters(), lr=0.05),
                                      PeriodicModelAverager(period=PERIOD, warmup_steps=WARM_UP + PERIOD - 1))
    yield f"post_local {ranks}", run("wide", rank, ranks, model, lambda _: optimizer.step()), net

    net = make_net("wide")
    make, settings = OPTIMIZERS["adamw"]
    inner = make(net.parameters(), **settings)
    anchor = [nn.Parameter(p.detach().clone()) for p in net.parameters()]
    outer = torch.optim.SGD(anchor, **OUTER)

    def step(k):
        inner.step()
        if k % OUTER_PERIOD != 0:
            return
        for old, new in zip(anchor, net.parameters()):
            mean = new.detach().clone()
            dist.all_reduce(mean)
            old.grad = old.detach() - mean / ranks
        outer.step()
        with torch.no_grad():
            for old, new in zip(anchor, net.parameters()):
                new.copy_(old)

    yield f"diloco {ranks}", run("wide", rank, ranks, net, step), net


def train(rank, ranks, port, path):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    lines = []
    for case, losses, net in itertools.chain(every_gradient(rank, ranks), less_communication(rank, ranks)):
        lines.append((case, "loss", losses))
        for what, tensor in itertools.chain(net.named_parameters(), net.named_buffers()):
            lines.append((case, what, tensor.detach().reshape(-1).tolist()))
    if rank == 0:
        path.write_text(json.dumps(lines))
    dist.barrier()
    dist.destroy_process_group()


def measure():
    lines = []
    for ranks in (2, 3):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        with tempfile.TemporaryDirectory() as directory:
            path = pathlib.Path(directory, "lines.json")
            mp.start_processes(train, (ranks, port, path), nprocs=ranks, start_method="spawn")
            lines += [tuple(line) for line in json.loads(path.read_text())]
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
