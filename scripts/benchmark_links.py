#!/usr/bin/env python3
"""Training steps over slow links, ours beside PyTorch's DDP with its own hooks, or allreduces; prints a table in Markdown.

usage: scripts/benchmark_links.py [--rates 1gbit,100mbit] [--ranks 2,4] [--rounds 3] [--model wide] [--ours "slices late"] [--json FILE]
                                  [--program FILE] [--seconds S]
       scripts/benchmark_links.py --allreduce BEGIN END [--rates …] [--ranks …] [--rounds …] [--seconds S] [--perf FILE] [--json FILE]

Each rank is in a network namespace of its own (root is needed) behind a link that tbf limits in both directions, cubic on both
sides; the two programs take turns, a round each. A figure is the median over the rounds of a round's median step. Of PyTorch's
two bucket sizes (25 MiB and one bucket) the better one counts, and of ours four buckets in flight (the default) and one; where
one is better, the default's figure follows in brackets. Exchanges: none, bfloat16, PowerSGD of rank 4 (PyTorch's in one
bucket: over Gloo it fails in several).
The last column, of exchange none, is the step divided by what neither program can be faster than: the longer of its own computing
(nosync: forward, backward, optimizer, nothing exchanged) and of the wire's time for 2(P-1)/P of the gradient at the rate that is left
for payload (1448 of 1538 bytes a packet). 1 would be perfect overlap; PyTorch's by its own nosync.
With --ours PyTorch is left out, and the table has our replicated step and the kinds that are named (WITH of benchmark_train_step).
With --allreduce 1M 256M an allreduce is timed instead, of sizes from 1 MiB to 256 MiB in steps of 4, by build/benchmark/tools/ddp-perf
or another (--perf): for S (0.25) seconds a size and round, at least 4 times, its sums checked. "of the rate" is what share of the time
the wire alone would take at the whole rate for 2(P-1)/P of the size; "of payload", at what is left for payload of packets as tbf counts
them, 1448 of 1514 bytes. 1 is a wire that never waits. "Only exchanged": of two ranks, the same share of benchmark_bounds (--bounds), which sends
as many bytes to the other process as it reads, at once, over one connection, without a library.
Needs build/benchmark/benchmarks/benchmark_train_step (scripts/benchmark.sh --quick makes it) or another build of it (--program),
and PyTorch in build/torch (scripts/setup.sh torch). Each kind is timed for at least S (1.5) seconds a round. DDP_INSECURE=1: neither side protects its connections. Leave the machine alone meanwhile.
"""
import argparse
import collections
import json
import os
import pathlib
import random
import re
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
KINDS = {"none": (("replicated", "one"), ("ddp", "ddp1")), "bfloat16": (("bf16", "bf16_one"), ("bf16", "bf16_1")),
         "PowerSGD, rank 4": (("powersgd",), ("powersgd_1",))}


def ip(*words, check=True):
    subprocess.run(["ip", *words], check=check, stderr=None if check else subprocess.DEVNULL)


def bytes_of(rate):
    """What a link of this rate carries in a second."""
    number, unit = re.fullmatch(r"([\d.]+)([mg])bit", rate).groups()
    return float(number) * {"m": 1e6, "g": 1e9}[unit] / 8


class Links:
    """Namespaces ddpl0, ddpl1, … on one bridge, each behind a link of that rate."""

    def __init__(self, ranks, rate):
        self.names = [f"ddpl{r}" for r in range(ranks)]
        self.rate = rate

    def __enter__(self):
        self.__exit__()
        listed = pathlib.Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")  # a namespace may only pick among these
        allowed = listed.read_text().split()
        if "cubic" not in allowed:
            listed.write_text(" ".join([*allowed, "cubic"]))
        # What may leave at once is 0.4 ms of the rate, and 4 ms wait (at least 128 KiB and 1 MiB): a link must not idle while its
        # host's core does other work.
        bytes_a_ms = bytes_of(self.rate) / 1e3
        shaped = ["tbf", "rate", self.rate, "burst", str(max(131072, int(0.4 * bytes_a_ms))),
                  "limit", str(max(1048576, int(4 * bytes_a_ms)))]
        ip("netns", "add", "ddplhub")
        ip("-n", "ddplhub", "link", "add", "name", "hub", "type", "bridge")
        ip("-n", "ddplhub", "link", "set", "hub", "up")
        for r, name in enumerate(self.names):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", "ddplhub", "link", "add", "name", f"p{r}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("-n", name, "addr", "add", f"10.88.0.{r + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", "ddplhub", "link", "set", f"p{r}", "master", "hub", "up")
            ip("netns", "exec", name, "sysctl", "-qw", "net.ipv4.tcp_congestion_control=cubic")
            ip("netns", "exec", name, "tc", "qdisc", "add", "dev", "eth0", "root", *shaped)
            ip("netns", "exec", "ddplhub", "tc", "qdisc", "add", "dev", f"p{r}", "root", *shaped)
        return self

    def __exit__(self, *_):
        for name in [*self.names, "ddplhub"]:
            ip("netns", "del", name, check=False)

    def start(self, command, settings):
        """What rank 0 has printed."""
        port = str(random.randint(20000, 30000))
        processes = []
        for r, name in enumerate(self.names):
            own = {"RANK": str(r), "WORLD_SIZE": str(len(self.names)), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                   "MASTER_ADDR": "10.88.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "eth0", "DDP_INTERFACE": "eth0",
                   "DDP_INSECURE": "1", "OMP_NUM_THREADS": "1", **settings}
            processes.append(subprocess.Popen(["ip", "netns", "exec", name, *command], env={**os.environ, **own}, text=True,
                                              stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        answers = [p.communicate(timeout=1800) for p in processes]
        if any(p.returncode for p in processes):
            sys.exit(f"{command}: exit codes {[p.returncode for p in processes]}\n{answers[0][1]}")
        return answers[0][0]

    def run(self, command, settings):
        rows = [json.loads(line) for line in self.start(command, settings).splitlines() if line.startswith("{")]
        wrong = [row["kind"] for row in rows if not row["ok"]]
        if wrong:
            sys.exit(f"{command}: {wrong}: replicas differ, or the loss has not fallen")
        return {row["kind"]: row for row in rows}


def wire_ms(rate, ranks, gradient_bytes, payload=1448 / 1538):
    """How long a link of this rate is busy with what a rank sends in an allreduce."""
    return 2 * (ranks - 1) / ranks * gradient_bytes / (bytes_of(rate) * payload) * 1e3


def allreduces(with_):
    begin, end = with_.allreduce
    figures = []
    compilers = set()
    print("| rate | ranks | size | algorithm | path | ms | of the rate | of payload | only exchanged, of the rate |\n"
          "|---|---:|---:|---|---|---:|---:|---:|---:|", flush=True)
    for rate in with_.rates.split(","):
        for ranks in (int(n) for n in with_.ranks.split(",")):
            seen, exchanged = collections.defaultdict(list), collections.defaultdict(list)
            with Links(ranks, rate) as links, tempfile.NamedTemporaryFile(suffix=".json") as results:
                for _ in range(with_.rounds):
                    links.start([str(with_.perf), "allreduce", "-b", begin, "-e", end, "-f", "4", "--check", "--budget",
                                 str(with_.seconds or 0.25), "--json", results.name], {})
                    result = json.loads(pathlib.Path(results.name).read_text())
                    compilers.add(result["compiler"])
                    path = "TCP" if result["messages"] == "sockets" else result["messages"]
                    for row in result["rows"]:
                        seen[row["bytes"], row["algorithm"], path].append(row["med_us"] / 1e3)
                    if ranks != 2:
                        continue
                    sizes = {"SIZES": " ".join(str(row["bytes"]) for row in result["rows"])}
                    for line in links.start([str(with_.bounds), "exchange"], sizes).splitlines():
                        row = json.loads(line)
                        exchanged[row["bytes"]].append(row["med_us"] / 1e3)
            for (size, algorithm, path), times in seen.items():
                ms = statistics.median(times)
                shares = {"rate": wire_ms(rate, ranks, size, 1) / ms, "payload": wire_ms(rate, ranks, size, 1448 / 1514) / ms}
                only = wire_ms(rate, ranks, size, 1) / statistics.median(exchanged[size]) if exchanged[size] else None
                figures.append({"rate": rate, "ranks": ranks, "bytes": size, "algorithm": algorithm, "path": path, "ms": ms,
                                "of_rate": shares["rate"], "of_payload": shares["payload"], "exchanged_of_rate": only, "all": times})
                print(f"| {rate} | {ranks} | {size / (1 << 20):g} MiB | {algorithm} | {path} | {ms:,.3f} | "
                      f"{shares['rate']:.3f} | {shares['payload']:.3f} | {f'{only:.3f}' if only else ''} |", flush=True)
    print(f"\nTCP with cubic through tbf, no secret; compiled by {', '.join(sorted(compilers))}; rounds: {with_.rounds}.")
    if with_.json:
        pathlib.Path(with_.json).write_text(json.dumps(figures, indent=1))


def ours_alone(with_, command, settings):
    print("| rate | ranks | kind | step, ms | step : max(compute, wire) |\n|---|---:|---|---:|---:|", flush=True)
    figures = []
    for rate in with_.rates.split(","):
        for ranks in (int(n) for n in with_.ranks.split(",")):
            seen = collections.defaultdict(list)
            with Links(ranks, rate) as links:
                for _ in range(with_.rounds):
                    for kind, row in links.run(command, {**settings, "WITH": with_.ours, "SKIP": "default sharded"}).items():
                        seen[kind].append(row["step_ms"])
                        gradient = row["grad_bytes"]
            steps = {kind: statistics.median(all_of) for kind, all_of in seen.items()}
            least = max(steps["nosync"], wire_ms(rate, ranks, gradient))
            for kind, step in steps.items():
                figures.append({"rate": rate, "ranks": ranks, "kind": kind, "step_ms": step, "least_ms": least, "all": seen[kind]})
                print(f"| {rate} | {ranks} | {kind} | {step:,.0f} | {step / least:.2f} |", flush=True)
    if with_.json:
        pathlib.Path(with_.json).write_text(json.dumps(figures, indent=1))


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rates", default="1gbit,100mbit")
    options.add_argument("--ranks", default="2,4")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--model", default="wide")
    options.add_argument("--ours", help="kinds of benchmark_train_step, without PyTorch")
    options.add_argument("--program", default=ROOT / "build/benchmark/benchmarks/benchmark_train_step")
    options.add_argument("--allreduce", nargs=2, metavar=("BEGIN", "END"), help="time allreduces instead, of these sizes")
    options.add_argument("--perf", default=ROOT / "build/benchmark/tools/ddp-perf")
    options.add_argument("--bounds", default=ROOT / "build/benchmark/benchmarks/benchmark_bounds")
    options.add_argument("--seconds", type=float)
    options.add_argument("--json")
    with_ = options.parse_args()
    if with_.allreduce:
        return allreduces(with_)
    ours = [str(with_.program), "--candidate", with_.model]
    theirs = [str(ROOT / "build/torch/bin/python"), str(ROOT / "benchmarks/train_torch.py"), with_.model]
    settings = {"ROUNDS": "1", "STEP_BUDGET": str(with_.seconds or 1.5), "STEPS": "3", "NET": "links"}
    figures = []
    if with_.ours is not None:
        return ours_alone(with_, ours, settings)
    print("| rate | ranks | exchange | ours, ms | PyTorch, ms | ratio | step : max(compute, wire), ours and PyTorch's |\n"
          "|---|---:|---|---:|---:|---:|---|", flush=True)
    for rate in with_.rates.split(","):
        for ranks in (int(n) for n in with_.ranks.split(",")):
            seen = collections.defaultdict(list)
            gradient = 0
            with Links(ranks, rate) as links:
                for _ in range(with_.rounds):
                    with_kinds = {"WITH": "one bf16 bf16_one powersgd", "SKIP": "default sharded"}
                    for kind, row in links.run(ours, {**settings, **with_kinds}).items():
                        seen["ours", kind].append(row["step_ms"])
                        gradient = row["grad_bytes"]
                    for kind, row in links.run(theirs, {**settings, "WITH": "bf16 bf16_1 powersgd_1"}).items():
                        seen["theirs", kind].append(row["step_ms"])
            wire = wire_ms(rate, ranks, gradient)
            for called, (own, others) in KINDS.items():
                ways = {kind: statistics.median(seen["ours", kind]) for kind in own}
                a = min(ways.values())
                usual = f" ({ways[own[0]]:,.0f})" if ways[own[0]] > a else ""
                b = min(statistics.median(seen["theirs", kind]) for kind in others)
                computes = {who: statistics.median(seen[who, "nosync"]) for who in ("ours", "theirs")}
                bounds = {who: max(compute, wire) for who, compute in computes.items()}
                figures.append({"rate": rate, "ranks": ranks, "exchange": called, "ours_ms": a, "torch_ms": b, "wire_ms": wire,
                                "compute_ms": computes["ours"], "torch_compute_ms": computes["theirs"],
                                "all": {" ".join(key): value for key, value in seen.items()}})
                beside = f"{a / bounds['ours']:.2f}, {b / bounds['theirs']:.2f}" if called == "none" else ""
                print(f"| {rate} | {ranks} | {called} | {a:,.0f}{usual} | {b:,.0f} | {b / a:.2f} | {beside} |", flush=True)
    if with_.json:
        pathlib.Path(with_.json).write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
