#!/usr/bin/env python3
"""Tables in Markdown of what scripts/benchmark.sh has measured: medians over the rounds, and ratios.

usage: tables.py DIRECTORY     of JSON files: ROUND.what.json by ddp-perf --json, ROUND.what.lines by --candidate
"""
import collections
import json
import pathlib
import statistics
import sys


def sizes_text(size):
    for unit, shift in (("MiB", 20), ("KiB", 10)):
        if size >= 1 << shift:
            return f"{size >> shift} {unit}"
    return f"{size} B"


def time_text(microseconds):
    return f"{microseconds / 1000:.2f} ms" if microseconds >= 1000 else f"{microseconds:.1f} us"


def allreduce_tables(directory):
    # [ranks][bytes][what] -> medians of the rounds
    found = collections.defaultdict(lambda: collections.defaultdict(lambda: collections.defaultdict(list)))
    names = []
    for file in sorted(directory.glob("*.allreduce.*.json")):
        what = file.name.split(".allreduce.")[1].removesuffix(".json")
        result = json.loads(file.read_text())
        if what not in names:
            names.append(what)
        for row in result["rows"]:
            found[result["ranks"]][row["bytes"]][what].append(row["med_us"])
    for ranks, by_size in sorted(found.items()):
        columns = [n for n in ("memory", "tcp", "mpi") if any(n in row for row in by_size.values())]
        titles = {"memory": "shared_array", "tcp": "ddp, TCP", "mpi": "MPI_Allreduce"}
        print(f"\n### Allreduce, {ranks} processes of this machine, every rank rewrites its data before each\n")
        print("| size | " + " | ".join(titles[c] for c in columns) + " | MPI_Allreduce : shared_array |")
        print("|---|" + "---:|" * (len(columns) + 1))
        for size, row in sorted(by_size.items()):
            median = {c: statistics.median(row[c]) for c in columns if row[c]}
            ratio = f"{median['mpi'] / median['memory']:.2f}" if "mpi" in median and "memory" in median else "-"
            print(f"| {sizes_text(size)} | " + " | ".join(time_text(median[c]) if c in median else "-" for c in columns)
                  + f" | {ratio} |")


def step_tables(directory):
    found = collections.defaultdict(lambda: collections.defaultdict(list))  # [(n, model)][impl kind] -> lines
    for file in sorted(directory.glob("*.step.*.lines")):
        for text in file.read_text().splitlines():
            if text.startswith("{"):
                line = json.loads(text)
                assert line["ok"], text
                found[line["n"], line["model"]][line["impl"], line["kind"]].append(line)
    if not found:
        return
    print("\n### Training steps, ms: the whole step (and what of it is not hidden behind its own computation)\n")
    print("| model | ranks | ddp | ddp by messages | PyTorch DDP, its best | PyTorch : ddp | "
          "exposed communication and optimizer, PyTorch : ddp |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for (ranks, model), kinds in sorted(found.items()):
        def of(impl, kind, key):
            values = [line[key] for line in kinds.get((impl, kind), [])]
            return statistics.median(values) if values else None

        def cell(impl, kind):
            step = of(impl, kind, "step_ms")
            return "-" if step is None else f"{step:.2f} ({of(impl, kind, 'exposed_ms'):.2f})"

        def after(impl, kind):  # all but computation: communication and optimizer
            compute = of(impl, "nosync", "step_ms") - of(impl, "nosync", "opt_ms")
            return of(impl, kind, "step_ms") - compute

        own, messages = ("ddp", "default"), ("ddp", "replicated")
        best = min((k for k in kinds if k[0] == "torch-ddp" and k[1] != "nosync"),
                   key=lambda k: of(*k, "step_ms"), default=None)
        ratios = "- | -"
        if best is not None and of(*own, "step_ms") is not None:
            hidden = after(*own) < 0.02 * of(*own, "step_ms")  # too little to divide by
            ratios = (f"{of(*best, 'step_ms') / of(*own, 'step_ms'):.2f} | "
                      + ("-" if hidden else f"{after(*best) / after(*own):.1f}"))
        print(f"| {model} | {ranks} | {cell(*own)} | {cell(*messages)} | {cell(*best) if best else '-'} | {ratios} |")


def main():
    directory = pathlib.Path(sys.argv[1])
    print((directory / "machine.txt").read_text().rstrip())
    allreduce_tables(directory)
    step_tables(directory)


if __name__ == "__main__":
    main()
