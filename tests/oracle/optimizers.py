#!/usr/bin/env python3
"""What torch.optim makes of a small problem, as a record for tests/optim/torch_oracle_test.cpp.

    build/torch/bin/python tests/oracle/optimizers.py           writes tests/oracle/optimizers.csv anew
    build/torch/bin/python tests/oracle/optimizers.py --check   compares the record with this torch, to 1e-12

scripts/setup.sh torch installs PyTorch and timm. No test runs this: the record is kept, so that the tests need no PyTorch.
Lion, LAMB and LARS, which PyTorch does not have, are those of timm 1.0.31, of which only these files are imported.

The problem: values w that start at 0 and gradients g = A (w - c), with the small whole numbers below, in double and one
operation after the other. The test has the same numbers, and the same settings by the names of the cases. Lines of the
record, behind a line of column names:

    optimizer's case,update,"value" or torch's name for a piece of state,one number for each element
    schedule's case,update from 0,"factor",the learning rate of that update (the optimizer's own is 1)
    ReduceLROnPlateau's case,update from 1,"plateau",the metric,the learning rate after it (the optimizer's own is 1)
"""

import importlib
import importlib.util
import math
import pathlib
import sys
import types

import torch

RECORD = pathlib.Path(__file__).with_name("optimizers.csv")
A = [[4, 1, 0, -1], [1, 3, 1, 0], [0, 1, 2, 1], [-1, 0, 1, 5]]
C = [1, -2, 3, -1]
SHOWN = (1, 2, 3, 10, 30, 100)


def of_timm(name, kind):
    """A class of timm.optim, without what the whole package imports."""
    for package in ("timm", "timm.optim"):
        if package not in sys.modules:
            where = importlib.util.find_spec("timm").submodule_search_locations if package == "timm" else [
                f"{path}/optim" for path in sys.modules["timm"].__path__]
            sys.modules[package] = types.ModuleType(package)
            sys.modules[package].__spec__ = importlib.util.spec_from_loader(package, None, is_package=True)
            sys.modules[package].__path__ = where
    return getattr(importlib.import_module(f"timm.optim.{name}"), kind)


Lion, Lamb, Lars = of_timm("lion", "Lion"), of_timm("lamb", "Lamb"), of_timm("lars", "Lars")

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, dict(lr=0.05)),
    "sgd_momentum": (torch.optim.SGD, dict(lr=0.02, momentum=0.9, weight_decay=0.01)),
    "sgd_nesterov": (torch.optim.SGD, dict(lr=0.02, momentum=0.8, weight_decay=0.02, nesterov=True)),
    "adam": (torch.optim.Adam, dict(lr=0.05)),
    "adam_decay": (torch.optim.Adam, dict(lr=0.03, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)),
    "adamw": (torch.optim.AdamW, dict(lr=0.05, weight_decay=0.2)),
    "rmsprop": (torch.optim.RMSprop, dict(lr=0.02)),
    "rmsprop_decay": (torch.optim.RMSprop, dict(lr=0.02, alpha=0.9, eps=1e-4, weight_decay=0.1)),
    "rmsprop_momentum": (torch.optim.RMSprop, dict(lr=0.01, alpha=0.95, momentum=0.7)),
    "rmsprop_centered": (torch.optim.RMSprop, dict(lr=0.01, alpha=0.95, centered=True)),
    "rmsprop_all": (torch.optim.RMSprop,
                    dict(lr=0.005, alpha=0.9, eps=1e-3, weight_decay=0.05, momentum=0.6, centered=True)),
    "adagrad": (torch.optim.Adagrad, dict(lr=0.5)),
    "adagrad_decay": (torch.optim.Adagrad, dict(lr=0.5, lr_decay=0.05, eps=1e-6, weight_decay=0.1)),
    "lion": (Lion, dict(lr=0.013, betas=(0.9, 0.99))),
    "lion_decay": (Lion, dict(lr=0.021, betas=(0.8, 0.95), weight_decay=0.3)),
    "lamb": (Lamb, dict(lr=0.03, weight_decay=0, always_adapt=True, max_grad_norm=None)),
    "lamb_decay": (Lamb, dict(lr=0.02, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1, max_grad_norm=None)),
    "lars": (Lars, dict(lr=0.3, momentum=0.9, trust_coeff=0.01, eps=1e-8, always_adapt=True)),
    "lars_decay": (Lars, dict(lr=0.5, momentum=0.6, trust_coeff=0.05, eps=0.1, weight_decay=0.2)),
}

SCHEDULERS = {
    "linear": (torch.optim.lr_scheduler.LinearLR, dict(start_factor=0.25, total_iters=20)),
    "step": (torch.optim.lr_scheduler.StepLR, dict(step_size=15, gamma=0.6)),
    "cosine": (torch.optim.lr_scheduler.CosineAnnealingLR, dict(T_max=59, eta_min=0.1)),
    "polynomial": (torch.optim.lr_scheduler.PolynomialLR, dict(total_iters=40, power=1)),
    "polynomial_cubic": (torch.optim.lr_scheduler.PolynomialLR, dict(total_iters=50, power=3)),
    "exponential": (torch.optim.lr_scheduler.ExponentialLR, dict(gamma=0.95)),
    "one_cycle": (torch.optim.lr_scheduler.OneCycleLR, dict(max_lr=1, total_steps=60, cycle_momentum=False)),
    "one_cycle_late": (torch.optim.lr_scheduler.OneCycleLR,
                       dict(max_lr=1, total_steps=60, pct_start=0.71, div_factor=4, final_div_factor=50,
                            cycle_momentum=False)),
}
UPDATES = 60  # of each schedule

NAN, INFINITY = float("nan"), float("inf")
NOISY = [3 / (1 + k) + 0.25 * (7 * k % 5) for k in range(60)]
PLATEAUS = {  # settings, without eps, which the library does not have; metrics
    "plateau_patience": (dict(patience=1), [5, 5, 5, 5, 5, 4, 4, 4, 4]),
    "plateau_nan": (dict(patience=0), [5, 4, 4, 3, NAN, INFINITY]),
    "plateau_cooldown": (dict(patience=0, cooldown=2), [5] * 8),
    "plateau_relative": (dict(patience=0, threshold=0.1), [10, 9.5, 9.0, 8.9]),
    "plateau_absolute": (dict(patience=0, threshold=0.5, threshold_mode="abs"), [10, 9.6, 9.4, 9]),
    "plateau_higher": (dict(patience=0, threshold=0.1, mode="max"), [1, 1.05, 1.2]),
    "plateau_floor": (dict(factor=0.5, patience=0, min_lr=0.2), [1] * 5),
    "plateau_usual": ({}, [1] * 40),
    "plateau_noisy": (dict(factor=0.7, patience=2, cooldown=3, threshold=0.02, min_lr=0.1), NOISY),
    "plateau_noisy_higher": (dict(factor=0.5, patience=3, threshold=0.1, threshold_mode="abs", mode="max"),
                             [-metric for metric in NOISY]),
}


def gradient(w):
    """A (w - c) in doubles, added from left to right."""
    off = [x - c for x, c in zip(w, C)]
    result = []
    for row in A:
        total = 0.0
        for a, x in zip(row, off):
            total += a * x
        result.append(total)
    return result


def optimizer_rows():
    for case, (kind, settings) in OPTIMIZERS.items():
        w = torch.zeros(len(C), dtype=torch.float64, requires_grad=True)
        optimizer = kind([w], foreach=False, **settings)
        factor = settings["lr"] if kind is Lars else 1  # its momentum is without the rate
        for update in range(1, max(SHOWN) + 1):
            w.grad = torch.tensor(gradient(w.tolist()), dtype=torch.float64)
            optimizer.step()
            if update not in SHOWN:
                continue
            yield case, update, "value", w.tolist()
            for name, state in optimizer.state[w].items():
                if torch.is_tensor(state) and state.shape == w.shape:
                    yield case, update, name, (factor * state).tolist()


def schedule_rows():
    for case, (kind, settings) in SCHEDULERS.items():
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1)
        scheduler = kind(optimizer, **settings)
        for update in range(UPDATES):
            yield case, update, "factor", [optimizer.param_groups[0]["lr"]]
            optimizer.step()
            if update + 1 < UPDATES:
                scheduler.step()


def plateau_rows():
    for case, (settings, metrics) in PLATEAUS.items():
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, eps=0, **settings)
        for update, metric in enumerate(metrics, 1):
            plateau.step(metric)
            yield case, update, "plateau", [float(metric), float(optimizer.param_groups[0]["lr"])]


def main():
    rows = [*optimizer_rows(), *schedule_rows(), *plateau_rows()]
    if sys.argv[1:] == ["--check"]:
        kept = [line.split(",") for line in RECORD.read_text().splitlines()[1:]]
        good = len(kept) == len(rows)
        for (case, update, name, numbers), line in zip(rows, kept):
            same = line[:3] == [case, str(update), name] and len(line) == 3 + len(numbers) and all(
                repr(a) == b or math.isclose(a, float(b), rel_tol=1e-12, abs_tol=1e-12)
                for a, b in zip(numbers, line[3:]))
            if not same:
                print(f"{RECORD.name}: {','.join(line)}\nthis torch: {case},{update},{name},{numbers}")
            good = good and same
        print(f"{len(rows)} lines, torch {torch.__version__}: {'the same' if good else 'NOT the same'}")
        return 0 if good else 1
    with RECORD.open("w") as out:
        out.write("case,update,what,numbers\n")
        for case, update, name, numbers in rows:
            out.write(",".join([case, str(update), name, *map(repr, numbers)]) + "\n")
    print(f"{RECORD}: {len(rows)} lines, torch {torch.__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
