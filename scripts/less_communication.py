#!/usr/bin/env python3
"""Accuracy, bytes and time of exchanges and strategies on Fashion-MNIST, as docs/less_communication.md shows them.

usage: scripts/less_communication.py [--out DIRECTORY] [--ranks N…] [--networks [NAME…]] [--models mlp cnn] [--seeds [S…]]
                                     [--epochs E] [--what NAME…] [--data DIRECTORY] [--build DIRECTORY]

Builds the example in build/less_communication, with all of the processor's instructions, or takes it from another build. Accuracy by epoch is of processes on
loopback, for every seed, and so are the bytes of strategies. Time and the other bytes are of an epoch of a fifth of the samples on
each network: loopback, or two network namespaces (which needs root) with half of the ranks in each, joined by a cable of 1 Gbit/s, or
by one of 100 Mbit/s with a round trip of 20 ms (scripts/relayed_cable.py). Writes results.json, table.md, and for each model and
number of ranks accuracy over bytes and over seconds as SVG. What is there already in results.json is not measured again: accuracy,
which does not depend on what else the machine does, can be measured first (`--networks` without names), and times later, or the other
way round (`--seeds` without numbers). Leave the machine alone while times are measured, which takes half an hour; accuracy takes hours,
most of them for the CNN.
"""
import argparse
import contextlib
import gzip
import json
import math
import os
import pathlib
import re
import statistics
import struct
import subprocess
import sys

from relayed_cable import RelayedCable, ip

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "less_communication"
DATA = {"mlp": 469, "cnn": 469}  # steps an epoch with 128 samples each
EXCHANGES = {"every gradient": [], "bf16": ["--exchange", "bf16"], "fp16": ["--exchange", "fp16"],
             "int8": ["--exchange", "int8"], "top-k 1 %": ["--exchange", "topk", "--ratio", "0.01"],
             "random-k 5 %": ["--exchange", "randomk", "--ratio", "0.05"],
             "PowerSGD 4": ["--exchange", "powersgd", "--rank", "4"]}
STRATEGIES = {"local SGD 8": ["--strategy", "local_sgd", "--period", "8"],
              "stale by 2": ["--strategy", "stale", "--period", "2"],
              "post-local SGD 8": ["--strategy", "post_local", "--period", "8"],
              "hierarchical 2, 8": ["--strategy", "hierarchical", "--period", "8"],
              "DiLoCo 16": ["--strategy", "diloco", "--period", "16"],
              "slow momentum 8": ["--strategy", "slow_momentum", "--period", "8"],
              "elastic 8": ["--strategy", "elastic", "--period", "8"],
              "gossip": ["--strategy", "gossip"],
              "gossip in a ring": ["--strategy", "gossip_ring"]}
# Which ranks meet often depends on who shares a host: on loopback, two hosts with half of the ranks each, as on a cable.
OF_HOSTS = ("hierarchical 2, 8",)
TWO_HOSTS = ["sh", "-c", 'DDP_HOST=host$((RANK * 2 / WORLD_SIZE)) exec "$@"', "sh"]
EPOCH = re.compile(r"^epoch (\d+)/\d+  loss (\S+)  test accuracy (\S+)  (\S+) s", re.MULTILINE)
RESULT = re.compile(r"^result: (.*)$", re.MULTILINE)


def build():
    """Into BUILD."""
    subprocess.run(["cmake", "-S", ROOT, "-B", BUILD, "-G", "Ninja", "--log-level=NOTICE", "-DCMAKE_BUILD_TYPE=Release",
                    "-DDDP_ARCH=native", "-DDDP_BUILD_TESTS=OFF", "-DDDP_BUILD_EXAMPLES=ON"], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", BUILD, "--target", "fashion_mnist", "ddprun"], check=True, stdout=subprocess.DEVNULL)


class Cable:
    """Two hosts, which are network namespaces, joined at a rate both ways."""

    addresses = ("10.77.0.1", "10.77.0.2")

    def __init__(self, rate):
        self.names = [f"ddp-less-{os.getpid()}-{side}" for side in "ab"]
        self.rate = rate

    def __enter__(self):
        plugs = [f"less{os.getpid()}{side}" for side in "ab"]
        for name in self.names:
            ip("netns", "add", name)
        ip("link", "add", plugs[0], "netns", self.names[0], "type", "veth", "peer", "name", plugs[1], "netns", self.names[1])
        for name, plug, address in zip(self.names, plugs, self.addresses):
            ip("-n", name, "addr", "add", address + "/24", "dev", plug)
            for device in ("lo", plug):
                ip("-n", name, "link", "set", device, "up")
            subprocess.run(["ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", plug, "root", "tbf", "rate", self.rate,
                            "burst", "256k", "latency", "20ms"], check=True)
        return self

    def __exit__(self, *_):
        for name in self.names:
            ip("netns", "del", name, check=False)


NETWORKS = {"loopback": contextlib.nullcontext, "1 Gbit/s": lambda: Cable("1gbit"),
            "100 Mbit/s, 20 ms": lambda: RelayedCable(rate=100e6, delay=0.010)}


def shortened(data, out):
    """A directory with the first fifth of the images and labels."""
    out.mkdir(parents=True, exist_ok=True)
    for file in pathlib.Path(data).glob("*-ubyte*"):
        raw = gzip.open(file, "rb").read() if file.suffix == ".gz" else file.read_bytes()
        kind, count = struct.unpack(">II", raw[:8])
        header = 4 + 4 * (kind & 0xFF)
        kept = count // 5
        (out / file.name.removesuffix(".gz")).write_bytes(
            struct.pack(">II", kind, kept) + raw[8:header] + raw[header:header + kept * ((len(raw) - header) // count)])
    return out


def train(programs, ranks, words, cable=None, two_hosts=False):
    """What rank 0 prints. Ranks are processes, on loopback (of one host or of two) or at both ends of the cable."""
    program = [*(TWO_HOSTS if two_hosts and cable is None else []), str(programs / "examples" / "fashion_mnist"), *words]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("DDP_", "OMPI_", "PMI"))}
    environment["OMP_NUM_THREADS"] = "1"
    if cable is None:
        done = subprocess.run([programs / "tools" / "ddprun", "-n", str(ranks), "--prefix", "none", "--", *program],
                              env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"{' '.join(program)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout
    running = []
    for rank in range(ranks):
        mine = environment | {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank % (ranks // 2)),
                              "LOCAL_WORLD_SIZE": str(ranks // 2), "MASTER_ADDR": cable.addresses[0], "MASTER_PORT": "29511",
                              "DDP_INSECURE": "1"}
        running.append(subprocess.Popen(["ip", "netns", "exec", cable.names[rank * 2 // ranks], *program], env=mine,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    outputs = [process.communicate() for process in running]
    if any(process.returncode != 0 for process in running):
        sys.exit(f"{' '.join(program)}:\n" + "\n".join(out + err for out, err in outputs))
    return outputs[0][0]


def fields(output):
    return dict(word.split("=", 1) for word in RESULT.search(output).group(1).split())


def measure(options):
    """Fills what options.out has not got yet, and writes it down after every run."""
    file = options.out / "results.json"
    results = json.loads(file.read_text()) if file.exists() else []
    data = ["--data", str(options.data)]
    fifth = ["--data", str(shortened(options.data, options.out / "fifth"))]
    kinds = {name: words for name, words in (EXCHANGES | STRATEGIES).items() if not options.what or name in options.what}

    def entry(model, ranks, name):
        for one in results:
            if (one["model"], one["ranks"], one["name"]) == (model, ranks, name):
                return one
        results.append({"model": model, "ranks": ranks, "name": name, "bytes": 0, "accuracy": {}, "rate": {}})
        return results[-1]

    def done(one, *words):
        file.write_text(json.dumps(results, indent=1) + "\n")
        print(one["model"], one["ranks"], one["name"], *words, flush=True)

    for model in options.models:
        for ranks in options.ranks:
            for name, words in kinds.items():
                one = entry(model, ranks, name)
                for seed in (str(s) for s in options.seeds if str(s) not in one["accuracy"]):
                    output = train(options.build, ranks, ["--model", model, "--epochs", str(options.epochs), "--seed", seed, *data, *words],
                                   two_hosts=name in OF_HOSTS)
                    one["accuracy"][seed] = [float(line[2]) for line in EPOCH.findall(output)]
                    one["bytes"] = max(one["bytes"], int(fields(output)["bytes_per_step"]))
                    done(one, "seed", seed, one["accuracy"][seed][-1])
            for network in options.networks:
                for name, words in kinds.items():
                    one = entry(model, ranks, name)
                    if network in one["rate"]:
                        continue
                    with NETWORKS[network]() as cable:
                        found = fields(train(options.build, ranks, ["--model", model, "--epochs", "1", *fifth, *words], cable, name in OF_HOSTS))
                    one["rate"][network] = float(found["samples_per_second"])
                    # On loopback ranks share memory under plain training, and little is sent. A strategy shares none: its bytes
                    # are those of the whole training, because a fifth of an epoch is no multiple of a period.
                    if network != "loopback" and name not in STRATEGIES:
                        one["bytes"] = int(found["bytes_per_step"])
                    done(one, network, one["rate"][network], "samples/s")
    return results


def table(results, out):
    """A table a model; in a cell, for each number of ranks: accuracy of the first row, of others in points against it."""
    networks = [n for n in NETWORKS if any(n in r["rate"] for r in results)]
    lines = []

    def accuracy(r):
        return 100 * statistics.mean(run[-1] for run in r["accuracy"].values())

    def cell(rows, text):
        return " / ".join(text(r) for r in rows)

    for model in dict.fromkeys(r["model"] for r in results):
        of_model = [r for r in results if r["model"] == model]
        names = list(dict.fromkeys(r["name"] for r in of_model))
        base = {r["ranks"]: accuracy(r) for r in of_model if r["name"] == names[0]}
        lines += [f"\n{model}, {' / '.join(map(str, base))} ranks\n", "| | points | KB a step | s an epoch, " + " | ".join(networks) + " |",
                  "|---|---:|---:|" + "---:|" * len(networks)]
        for name in names:
            rows = [r for r in of_model if r["name"] == name]
            points = cell(rows, lambda r: f"{accuracy(r):.2f} %" if r["name"] == names[0]
                          else f"{accuracy(r) - base[r['ranks']]:+.2f}".replace("-", "−"))
            times = [cell(rows, lambda r, n=n: f"{60000 / r['rate'][n]:.1f}" if n in r["rate"] else "-") for n in networks]
            lines.append(f"| {name} | {points} | {cell(rows, lambda r: format(r['bytes'] / 1000, '.0f'))} | " + " | ".join(times) + " |")
    (out / "table.md").write_text("\n".join(lines) + "\n")


def plot(rows, out, name, title, unit, where):
    """Accuracy over what `where` gives for a row and an epoch, in `unit`, logarithmic, as SVG."""
    lines = []
    for r in rows:
        runs = list(r["accuracy"].values())
        lines.append((r["name"], [(where(r, e + 1), statistics.mean(run[e] for run in runs)) for e in range(len(runs[0]))]))
    points = [p for _, line in lines for p in line if p[0] > 0]
    if not points:
        return
    left, right = (math.log10(f(p[0] for p in points)) for f in (min, max))
    low, high = math.floor(100 * min(p[1] for p in points)), math.ceil(100 * max(p[1] for p in points))
    width, height, edge = 640, 400, 60
    x = lambda v: edge + (math.log10(v) - left) / max(right - left, 1e-9) * (width - edge - 170)
    y = lambda v: height - edge - (100 * v - low) / max(high - low, 1) * (height - 2 * edge)
    colours = ["#000", "#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#17becf", "#bcbd22", "#7f7f7f",
               "#0b0", "#a60", "#06c", "#c06", "#088"]
    svg = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
           f'<rect width="{width}" height="{height}" fill="white"/><text x="{edge}" y="24" font-size="14">{title}</text>',
           f'<path d="M{edge} {edge}V{height - edge}H{width - 170}" fill="none" stroke="#888"/>']
    for power in range(math.ceil(left), math.floor(right) + 1):
        svg.append(f'<text x="{x(10.0 ** power):.1f}" y="{height - edge + 18}" text-anchor="middle">{10.0 ** power:g}</text>')
    svg.append(f'<text x="{(width - 170 + edge) / 2:.0f}" y="{height - edge + 38}" text-anchor="middle">{unit}</text>')
    for value in range(low, high + 1, max(1, (high - low) // 6)):
        svg.append(f'<text x="{edge - 6}" y="{y(value / 100) + 4:.1f}" text-anchor="end">{value} %</text>')
    for number, (label, line) in enumerate(lines):
        colour = colours[number % len(colours)]
        path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in line if a > 0)
        svg.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        svg.append(f'<text x="{width - 160}" y="{edge + 18 * number}" fill="{colour}">{label}</text>')
    (out / name).write_text("\n".join(svg) + "\n</svg>\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=BUILD / "results")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--networks", nargs="*", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--models", nargs="+", choices=DATA, default=list(DATA))
    parser.add_argument("--seeds", type=int, nargs="*", default=[7, 8, 9])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--data", type=pathlib.Path, default="/usr/share/datasets/fashion-mnist")
    parser.add_argument("--what", nargs="+", choices=EXCHANGES | STRATEGIES)
    parser.add_argument("--build", type=pathlib.Path)
    options = parser.parse_args()
    if options.build is None:
        build()
        options.build = BUILD
    options.out.mkdir(parents=True, exist_ok=True)
    results = [r for r in measure(options) if r["accuracy"]]
    table(results, options.out)
    for model in options.models:
        for ranks in options.ranks:
            rows = [r for r in results if r["model"] == model and r["ranks"] == ranks]
            plot(rows, options.out, f"{model}_{ranks}_bytes.svg", f"{model}, {ranks} ranks: test accuracy after each epoch",
                 "MB sent by a rank", lambda r, e: r["bytes"] * DATA[r["model"]] * e / 1e6)
            for network in options.networks:
                plot([r for r in rows if network in r["rate"]], options.out,
                     f"{model}_{ranks}_{re.sub('[^0-9A-Za-z]+', '_', network)}.svg",
                     f"{model}, {ranks} ranks, {network}: test accuracy after each epoch", "seconds",
                     lambda r, e, n=network: 60000 * e / r["rate"][n])
    print((options.out / "table.md").read_text())


if __name__ == "__main__":
    main()
