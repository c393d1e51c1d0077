#!/usr/bin/env python3
"""Tables in Markdown of what scripts/benchmark.sh has measured: medians over the rounds, and ratios.

usage: tables.py DIRECTORY     of JSON files: ROUND.what.json by ddp-perf --json, ROUND.what.lines by --candidate

Compilers, versions and paths are those that the programs have written into their results.
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


def path_of(line):
    """How data travelled between the ranks: a line of results, or a row of ddp-perf together with the rest of its file."""
    if line["n"] == 1:
        return "one rank"
    if line.get("kind") == "nosync":
        return "nothing sent"
    if line["transport"] == "gloo":
        return "TCP, Gloo"
    if line["transport"] == "mpi":
        settings = line.get("mpi_settings")
        return "MPI" + (f" ({settings})" if settings else "")
    where = "threads" if line["transport"] == "inproc" else "shm"
    if line.get("in_memory") or line.get("algorithm") == "memory":
        return f"{where}, in place"
    return {"memory": f"{where}, messages", "sockets": "TCP", "mixed": f"TCP and {where}, messages"}[line["messages"]]


def rows_of(file):
    """Rows of a file of ddp-perf, each with what holds for all: one that has no rows, for a start alone, is one itself."""
    result = json.loads(file.read_text())
    rows = result.pop("rows")
    return [{**result, "n": result["ranks"], **row} for row in rows or [{}]]


def all_lines(directory):
    for file in sorted(directory.glob("*.json")):
        yield from rows_of(file)
    yield from lines_of(directory, "*.lines")


def versions(directory):
    """A sentence: compilers, libraries."""
    lines = list(all_lines(directory))
    compilers = collections.defaultdict(set)  # of our programs
    found = set()
    for line in lines:
        if "compiler" in line:
            compilers[line["compiler"]].add(line.get("tool") or {"ddp": "train_step"}.get(line["bench"], line["bench"]))
        if "version" in line:
            found.add(f"{'PyTorch' if line.get('impl') == 'torch-ddp' else 'ddp'} {line['version']}")
        if "mpi" in line:
            found.add(" ".join(line["mpi"].split()))
        if "eigen" in line:
            found.add(f"Eigen {line['eigen']}")
    for name, version in (text.split("\t") for text in (directory / "versions.txt").read_text().splitlines()):
        if any(line.get("impl", "").startswith(name) for line in lines):
            found.add(version)
    built = "; ".join(compiler + (f" ({', '.join(sorted(of))})" if len(compilers) > 1 else "")
                      for compiler, of in sorted(compilers.items()))
    return f"Compiled by {built}. Versions: {', '.join(sorted(found))}."


def by(paths):
    """The same for all, or each once."""
    return "; ".join(dict.fromkeys(paths)) or "-"


def print_paths(columns):
    """Of {title: paths}: a line below a table."""
    print("\nPaths: " + ". ".join(f"{title}: {by(paths)}" for title, paths in columns.items()) + ".")


def allreduce_tables(directory):
    # [ranks][bytes][what] -> medians of the rounds
    found = collections.defaultdict(lambda: collections.defaultdict(lambda: collections.defaultdict(list)))
    for file in sorted(directory.glob("*.allreduce.*.json")):
        what = file.name.split(".allreduce.")[1].removesuffix(".json")
        for row in rows_of(file):
            found[row["n"]][row["bytes"]][what].append(row)
    for ranks, by_size in sorted(found.items()):
        columns = [n for n in ("memory", "tcp", "mpi") if any(n in row for row in by_size.values())]
        titles = {"memory": "ddp", "tcp": "ddp, no memory shared", "mpi": "MPI_Allreduce"}
        print(f"\n### Allreduce, {ranks} processes of this machine, every rank rewrites its data before each\n")
        print("| size | " + " | ".join(f"{titles[c]} | path" for c in columns) + " | MPI_Allreduce : ddp |")
        print("|---|" + "---:|---|" * len(columns) + "---:|")
        for size, row in sorted(by_size.items()):
            median = {c: statistics.median(one["med_us"] for one in row[c]) for c in columns if row[c]}
            ratio = f"{median['mpi'] / median['memory']:.2f}" if "mpi" in median and "memory" in median else "-"
            cells = (f"{time_text(median[c]) if c in median else '-'} | {by(map(path_of, row[c]))}" for c in columns)
            print(f"| {sizes_text(size)} | " + " | ".join(cells) + f" | {ratio} |")


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
    print("| model | ranks | ddp | path | ddp by messages | path | PyTorch DDP, its best | path | PyTorch : ddp | "
          "exposed communication and optimizer, PyTorch : ddp |")
    print("|---|---:|---:|---|---:|---|---:|---|---:|---:|")
    for (ranks, model), kinds in sorted(found.items()):
        def of(impl, kind, key):
            values = [line[key] for line in kinds.get((impl, kind), [])]
            return statistics.median(values) if values else None

        def cell(impl, kind):
            step = of(impl, kind, "step_ms")
            paths = by(map(path_of, kinds.get((impl, kind), [])))
            return "- | -" if step is None else f"{step:.2f} ({of(impl, kind, 'exposed_ms'):.2f}) | {paths}"

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
        print(f"| {model} | {ranks} | {cell(*own)} | {cell(*messages)} | {cell(*best) if best else '- | -'} | {ratios} |")


def thread_table(directory):
    found = collections.defaultdict(list)
    for line in lines_of(directory, "*.thread.*.lines"):
        assert line["ok"], line
        if line["kind"] != "nosync":
            found[line["model"], line["n"], line["thread"]].append(line)
    keys = ("step_ms", "exposed_ms", "cpu_ms", "comm_cpu_ms", "thread_ms")
    table("The communication thread: steps by messages, replicated; ms",
          ["model", "ranks", "thread", "path", "step", "exposed", "processor time a rank", "of it communication's", "the thread's"],
          [[*key, by(map(path_of, lines)), *(f"{statistics.median(line[k] for line in lines):.2f}" for k in keys)]
           for key, lines in sorted(found.items())])


def alone_table(directory):
    lines = list(lines_of(directory, "*.alone.*.lines"))
    assert all(line["ok"] for line in lines), lines
    times = medians(((line["model"], line["impl"]), line["step_ms"]) for line in lines)
    others = sorted({impl for _, impl in times} - {"ddp"})
    rows = []
    for model in dict.fromkeys(model for model, _ in times):
        own = times[model, "ddp"]
        rows.append([model, f"{own:.3f}"])
        for impl in others:
            rows[-1] += [f"{times[model, impl]:.3f}", f"{times[model, impl] / own:.2f}"] if (model, impl) in times else ["-", "-"]
    table("One rank: a step of data_parallel, and the same model and optimizer in plain Eigen, ms",
          ["model", "ddp", *(title for impl in others for title in (impl, "this : ddp"))], rows)
    if rows:
        own = [line for line in lines if line["impl"] == "ddp"]
        print_paths({"ddp": [f"{path_of(line)}, compiled by {line['compiler']}" for line in own]})


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
    paths = collections.defaultdict(list)  # [ranks, what]
    for file in directory.glob("*.sockets.*.json"):
        for row in rows_of(file):
            key = (row["n"], row["bytes"], file.name.split(".")[3])
            pairs.append((key, row["med_us"]))
            paths[key[0], key[2]].append(path_of(row))
    for line in lines_of(directory, "*.sockets.*.lines"):
        assert line["ok"], line
        pairs.append(((line["n"], line["bytes"], line["impl"]), line["med_us"]))
        paths[line["n"], line["impl"]].append(line["net"])  # as the peer was told to take it
    found = medians(pairs)
    titles = {"ddp": "ddp", "mpi": "MPI_Allreduce"}
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
        print_paths({titles.get(name, name): paths[ranks, name] for name in names})


def update_table(directory):
    lines = list(lines_of(directory, "*.update.lines"))
    assert all(line["ok"] for line in lines), lines
    time = medians(((line["n"], line["kind"]), line["update_ms"]) for line in lines)
    memory = medians(((line["n"], line["kind"]), line["memory"]) for line in lines)
    mib = {line["mib"] for line in lines}
    paths = {(line["n"], line["kind"]): path_of(line) for line in lines}
    table(f"The update alone: reduce, mean, SGD with momentum; {'/'.join(map(str, sorted(mib)))} MiB of gradients a rank",
          ["kind", "ranks", "path", "ms", "this : fused", "memory beyond values and momentum, in gradients"],
          [[kind, ranks, paths[ranks, kind], f"{ms:.2f}", f"{ms / time[ranks, 'fused']:.2f}", f"{memory[ranks, kind]:.2f}"]
           for (ranks, kind), ms in sorted(time.items())])


def startup_table(directory):
    lines = [(file.name.split(".")[3], row) for file in directory.glob("*.startup.*.json") for row in rows_of(file)]
    found = medians(((line["n"], how), line["startup_s"]) for how, line in lines)
    table("Start: from the launch to the end of the first allreduce", ["ranks", "ddprun, ms", "mpirun, ms", "mpirun : ddprun"],
          [[ranks, f"{1000 * found[ranks, 'ddprun']:.0f}",
            *([f"{1000 * found[ranks, 'mpirun']:.0f}", f"{found[ranks, 'mpirun'] / found[ranks, 'ddprun']:.1f}"]
              if (ranks, "mpirun") in found else ["-", "-"])] for ranks in sorted({key[0] for key in found})])
    if found:
        print_paths({name: [path_of(line) for how, line in lines if how == name] for name in sorted({how for how, _ in lines})})


def bounds_table(directory):
    lines = list(lines_of(directory, "*.bounds.lines"))
    assert all(line["ok"] for line in lines), lines
    times = medians(((line["bytes"], line["kind"]), line["med_us"]) for line in lines)
    kinds = list(dict.fromkeys(line["kind"] for line in lines))
    table("Bounds: two processes without a library", ["size", *kinds],
          [[sizes_text(size), *(time_text(times[size, kind]) for kind in kinds)] for size in sorted({s for s, _ in times})])


def growth_tables(directory):
    rows = [row for file in directory.glob("*.growth.size.json") for row in rows_of(file)]
    paths = {row["bytes"]: path_of(row) for row in rows}
    table("Growth with size: allreduce of 2 processes", ["size", "path", "ms", "ns a byte"],
          [[sizes_text(size), paths[size], f"{us / 1000:.2f}", f"{1000 * us / size:.3f}"]
           for size, us in sorted(medians((row["bytes"], row["med_us"]) for row in rows).items())])
    crowds = [(rows_of(directory / line["of"])[0], line["cpu_s"]) for line in lines_of(directory, "*.growth.crowd.lines")]
    table("Growth with ranks on few cores: 50 allreduces of 1 MiB",
          ["ranks", "path", "processor seconds of all", "of each"],
          [[ranks, path, f"{cpu:.2f}", f"{cpu / ranks:.3f}"] for (ranks, path), cpu in
           sorted(medians(((of["n"], path_of(of)), cpu) for of, cpu in crowds).items())])
    lines = list(lines_of(directory, "*.growth.parts.lines"))
    parts = medians(((line["kind"], line["parts"]), line["update_ms"]) for line in lines)
    paths = {line["kind"]: path_of(line) for line in lines}
    table("Growth with parameters: the update of 1 MiB, 2 processes",
          ["kind", "path", "1 parameter, ms", "1,000 parameters, ms", "us a parameter"],
          [[kind, paths[kind], f"{parts[kind, 1]:.3f}", f"{ms:.3f}", f"{ms - parts[kind, 1]:.3f}"]
           for (kind, count), ms in sorted(parts.items()) if count == 1000 and kind != "own_allreduce"])
    rows = [row for file in directory.glob("*.growth.threads.*.json") for row in rows_of(file)]
    times = medians(((row["n"], row["bytes"]), row["med_us"]) for row in rows)
    sizes = sorted({size for _, size in times})
    table("Growth with ranks that are threads of one process: allreduce, us", ["ranks", *map(sizes_text, sizes)],
          [[ranks, *(f"{times[ranks, size]:.1f}" for size in sizes)] for ranks in sorted({r for r, _ in times})])
    if rows:
        print_paths({sizes_text(size): [path_of(row) for row in rows if row["bytes"] == size] for size in sizes})
    virtual_tables(list(lines_of(directory, "*.growth.virtual.lines")))


def virtual_tables(lines):
    assert all(line["ok"] for line in lines), lines
    algorithms = list(dict.fromkeys(line["algorithm"] for line in lines))
    for size in sorted({line["bytes"] for line in lines}):
        found = {(line["n"], line["algorithm"]): line for line in lines if line["bytes"] == size}
        chosen = {line["n"]: line["automatic"] for line in found.values()}

        def cell(line):
            sent = line["sent_bytes"]
            amount = f"{sent / (1 << 20):.2f} MiB" if sent >= 1 << 20 else f"{sent / 1024:.1f} KiB"
            return f"{time_text(line['time_us'])} ({line['messages']:g}; {amount})"

        table(f"Growth with ranks on virtual time: allreduce of {sizes_text(size)} (messages; bytes that a rank sends)",
              ["ranks", *algorithms, "automatic takes"],
              [[ranks, *(cell(found[ranks, name]) for name in algorithms), chosen[ranks]] for ranks in sorted(chosen)])
        networks = {f"{line['latency_us']:g} us from card to card, {line['gbit']:g} Gbit/s each way, "
                    f"{line['overhead_us']:g} us a message" for line in found.values()}
        print(f"\nPath: {by(line['transport'] for line in found.values())}; {by(sorted(networks))}; additions take no time.")


def main():
    directory = pathlib.Path(sys.argv[1])
    print((directory / "machine.txt").read_text().rstrip())
    print(versions(directory))
    allreduce_tables(directory)
    socket_tables(directory)
    step_tables(directory)
    update_table(directory)
    startup_table(directory)
    thread_table(directory)
    alone_table(directory)
    bounds_table(directory)
    growth_tables(directory)


if __name__ == "__main__":
    main()
