#!/usr/bin/env python3
"""Training steps of PyTorch's DistributedDataParallel over Gloo, beside which train_step stands: the same models, batches
and optimizer, one thread a rank. Prints train_step's lines (--candidate).

usage: torchrun --standalone --nproc-per-node 2 train_torch.py mlp|wide|cnn

Kinds of step, in turn: nosync (no communication), ddp (buckets of 25 MiB that are views of the gradients, its defaults but
for that), ddp1 (one bucket). Environment: ROUNDS (3), STEP_BUDGET (1.5 seconds a round), SKIP (kinds left out), STEPS (4, the
least number of steps in a round), WITH="bf16 bf16_1 powersgd_1": kinds with DDP's own hooks, those with _1 in one bucket. PowerSGD has rank 4 and begins with
the third step; in several buckets its hook fails over Gloo, which adds what belongs to different ones.
"""
import contextlib
import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel


def dense(*widths):
    layers = []
    for i in range(len(widths) - 1):
        layers += [nn.Linear(widths[i], widths[i + 1]), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def convolutions():
    return nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1),
                         nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(3136, 128), nn.ReLU(), nn.Linear(128, 10))


MODELS = {"mlp": lambda: dense(784, 1024, 1024, 10), "wide": lambda: dense(784, 4096, 4096, 4096, 10), "cnn": convolutions}


def in_two_bytes(group, bucket):
    """DDP takes its own hook by this name for NCCL only; Gloo can add bfloat16 too."""
    return default_hooks.bf16_compress_hook(group, bucket)


class Kind:
    def __init__(self, name, bucket_mib):
        torch.manual_seed(1)
        self.name = name
        self.model = DistributedDataParallel(MODELS[sys.argv[1]](), bucket_cap_mb=bucket_mib, gradient_as_bucket_view=True)
        if name.startswith("bf16"):
            self.model.register_comm_hook(None, in_two_bytes)
        if name.startswith("powersgd"):
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
            self.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.rounds = []

    def step(self, inputs, labels):
        began = time.perf_counter()
        with self.model.no_sync() if self.name == "nosync" else contextlib.nullcontext():
            loss = nn.functional.cross_entropy(self.model(inputs), labels)
            forward = time.perf_counter()
            loss.backward()
        backward = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        end = time.perf_counter()
        return forward - began, backward - forward, end - backward, end - began


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(100 + rank)
    batch = 128 if sys.argv[1] == "mlp" else 64
    inputs = torch.randn(batch, 1, 28, 28) if sys.argv[1] == "cnn" else torch.randn(batch, 784)
    labels = torch.randint(0, 10, (batch,))
    wanted = ["nosync", "ddp", "ddp1", *os.environ.get("WITH", "").split()]
    skipped = os.environ.get("SKIP", "").split()
    kinds = [Kind(name, 1 << 20 if name.endswith("1") else 25) for name in wanted if name not in skipped]
    budget = float(os.environ.get("STEP_BUDGET", "1.5"))
    for turn in range(int(os.environ.get("ROUNDS", "3"))):
        for kind in kinds:
            for _ in range(4 if turn == 0 else 1):  # DDP rearranges its buckets after the first step
                last = kind.step(inputs, labels)
            dist.barrier()
            steps = torch.tensor([min(200, max(int(os.environ.get("STEPS", "4")), budget / max(1e-4, last[3])))])
            dist.broadcast(steps, 0)
            times = [kind.step(inputs, labels) for _ in range(int(steps.item()))]
            kind.rounds.append([statistics.median(part) for part in zip(*times)])
    if rank == 0:
        alone = statistics.median(r[3] for r in kinds[0].rounds) if kinds[0].name == "nosync" else None
        for kind in kinds:
            forward, backward, optimizer, step = (1e3 * statistics.median(part) for part in zip(*kind.rounds))
            print(json.dumps({"bench": "ddp", "impl": "torch-ddp", "model": sys.argv[1], "kind": kind.name, "n": ranks,
                              "batch": batch, "fwd_ms": forward, "bwd_ms": backward, "opt_ms": optimizer, "step_ms": step,
                              "exposed_ms": None if alone is None else step - 1e3 * alone, "version": torch.__version__,
                              "transport": dist.get_backend(), "ok": True}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
