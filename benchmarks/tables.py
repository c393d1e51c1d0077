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


def lines_of(directory, pattern):
    for file in sorted(directory.glob(pattern)):
        for text in file.read_text().splitlines():
            if text.startswith("{"):
                yield json.loads(text)


def medians(pairs):
    """{key: median} of (key, value)."""
    found = collections.defaultdict(list)
    for key, value in pairs:
        found[key].append(value)
    return {key: statistics.median(values) for key, values in found.items()}


def table(title, head, rows):
    if rows:
        print(f"\n### {title}\n\n| " + " | ".join(head) + " |\n|---|" + "---:|" * (len(head) - 1))
        for row in rows:
            print("| " + " | ".join(map(str, row)) + " |")


def socket_tables(directory):
    pairs = []
    for file in directory.glob("*.sockets.*.json"):
        result = json.loads(file.read_text())
        pairs += [((result["ranks"], row["bytes"], file.name.split(".")[3]), row["med_us"]) for row in result["rows"]]
    for line in lines_of(directory, "*.sockets.*.lines"):
        assert line["ok"], line
        pairs.append(((line["n"], line["bytes"], line["impl"]), line["med_us"]))
    found = medians(pairs)
    titles = {"ddp": "ddp", "mpi": "MPI_Allreduce, its TCP"}
    for ranks in sorted({key[0] for key in found}):
        names = sorted({key[2] for key in found if key[0] == ranks}, key=lambda name: (name not in titles, name))
        rows = []
        for size in sorted({key[1] for key in found if key[0] == ranks}):
            times = {name: found.get((ranks, size, name)) for name in names}
            others = [time for name, time in times.items() if time is not None and name != "ddp"]
            rows.append([sizes_text(size), *("-" if times[name] is None else time_text(times[name]) for name in names),
                         f"{min(others) / times['ddp']:.2f}" if others and times.get("ddp") else "-"])
        table(f"Over sockets, TCP on loopback: allreduce, {ranks} processes",
              ["size", *(titles.get(name, name) for name in names), "best of the others : ddp"], rows)


def update_table(directory):
    lines = list(lines_of(directory, "*.update.lines"))
    assert all(line["ok"] for line in lines), lines
    time = medians(((line["n"], line["kind"]), line["update_ms"]) for line in lines)
    memory = medians(((line["n"], line["kind"]), line["memory"]) for line in lines)
    mib = {line["mib"] for line in lines}
    table(f"The update alone: reduce, mean, SGD with momentum; {'/'.join(map(str, sorted(mib)))} MiB of gradients a rank",
          ["kind", "ranks", "ms", "this : fused", "memory beyond values and momentum, in gradients"],
          [[kind, ranks, f"{ms:.2f}", f"{ms / time[ranks, 'fused']:.2f}", f"{memory[ranks, kind]:.2f}"]
           for (ranks, kind), ms in sorted(time.items())])


def startup_table(directory):
    found = medians(((line["n"], line["how"]), line["seconds"]) for line in lines_of(directory, "*.startup.*.lines"))
    table("Start: from the launch to the end of the first allreduce", ["ranks", "ddprun, ms", "mpirun, ms", "mpirun : ddprun"],
          [[ranks, f"{1000 * found[ranks, 'ddprun']:.0f}",
            *([f"{1000 * found[ranks, 'mpirun']:.0f}", f"{found[ranks, 'mpirun'] / found[ranks, 'ddprun']:.1f}"]
              if (ranks, "mpirun") in found else ["-", "-"])] for ranks in sorted({key[0] for key in found})])


def growth_tables(directory):
    rows = [row for file in directory.glob("*.growth.size.json") for row in json.loads(file.read_text())["rows"]]
    table("Growth with size: allreduce in shared memory, 2 processes", ["size", "ms", "ns a byte"],
          [[sizes_text(size), f"{us / 1000:.2f}", f"{1000 * us / size:.3f}"]
           for size, us in sorted(medians((row["bytes"], row["med_us"]) for row in rows).items())])
    table("Growth with ranks on few cores: 50 allreduces of 1 MiB over sockets",
          ["ranks", "processor seconds of all", "of each"],
          [[ranks, f"{cpu:.2f}", f"{cpu / ranks:.3f}"] for ranks, cpu in
           sorted(medians((line["n"], line["cpu_s"]) for line in lines_of(directory, "*.growth.crowd.lines")).items())])
    parts = medians(((line["kind"], line["parts"]), line["update_ms"]) for line in lines_of(directory, "*.growth.parts.lines"))
    table("Growth with parameters: the update of 1 MiB, 2 processes",
          ["kind", "1 parameter, ms", "1,000 parameters, ms", "us a parameter"],
          [[kind, f"{parts[kind, 1]:.3f}", f"{ms:.3f}", f"{ms - parts[kind, 1]:.3f}"]
           for (kind, count), ms in sorted(parts.items()) if count == 1000 and kind != "own_allreduce"])
    results = [json.loads(file.read_text()) for file in directory.glob("*.growth.threads.*.json")]
    times = medians(((r["ranks"], row["bytes"]), row["med_us"]) for r in results for row in r["rows"])
    sizes = sorted({size for _, size in times})
    table("Growth with ranks that are threads of one process: allreduce, us", ["ranks", *map(sizes_text, sizes)],
          [[ranks, *(f"{times[ranks, size]:.1f}" for size in sizes)] for ranks in sorted({r for r, _ in times})])


def main():
    directory = pathlib.Path(sys.argv[1])
    print((directory / "machine.txt").read_text().rstrip())
    allreduce_tables(directory)
    socket_tables(directory)
    step_tables(directory)
    update_table(directory)
    startup_table(directory)
    growth_tables(directory)


if __name__ == "__main__":
    main()
