#!/usr/bin/env python3
"""The scripts that measure beside other programs and over slow links run once, briefly: they work, and their tables are complete.

Environment: DDP_BUILD (the directory of a build with examples and tools), ONCE (the path of the benchmarks built for
tests, up to the underscore before their names). Exit code 77: no network namespaces here.
"""
import json
import os
import pathlib
import random
import struct
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
BUILD = pathlib.Path(os.environ["DDP_BUILD"])
ONCE = os.environ["ONCE"]
# A peer of ours that speaks the protocol of candidates: ddp-perf itself, which takes the place of Gloo's program.
PEER = f"""#!/bin/sh
exec "{BUILD}/tools/ddp-perf" allreduce --transport tcp --candidate
"""
LAUNCH = """import os, socket, subprocess, sys
with socket.socket() as one:
    one.bind(("127.0.0.1", 0))
    port = one.getsockname()[1]
ranks = int(sys.argv[1])
running = [subprocess.Popen(sys.argv[3:], env={**os.environ, "RANK": str(r), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(r),
                                               "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}) for r in range(ranks)]
sys.exit(max(one.wait() for one in running))
"""


def run(*command, **variables):
    done = subprocess.run([str(word) for word in command], env={**os.environ, **variables}, cwd=ROOT, stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=100, check=False)
    return done.returncode, done.stdout, done.stderr


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


class Scripts(unittest.TestCase):
    def setUp(self):
        owner = tempfile.TemporaryDirectory(prefix="ddp-scripts-test-")
        self.addCleanup(owner.cleanup)
        self.at = pathlib.Path(owner.name)

    def ran(self, *command, **variables):
        code, out, err = run(*command, **variables)
        self.assertEqual(code, 0, out + err)
        return out, err

    def peers(self, program):
        (self.at / "peers" / "build").mkdir(parents=True)
        (self.at / "peers" / "launch.py").write_text(LAUNCH)
        gloo = self.at / "peers" / "build" / "allreduce_gloo"
        gloo.write_text(program)
        gloo.chmod(0o755)
        return ["scripts/benchmark.sh", "--smoke", "--programs", BUILD / "tools", ONCE, "--figures", self.at / "figures",
                "--peers", self.at / "peers", "--only", "sockets"]

    def test_peers_have_a_column(self):
        out, _ = self.ran(*self.peers(PEER))
        table = out[out.index("### Over sockets"):].splitlines()
        heads = next(line for line in table if line.startswith("|"))
        self.assertIn("gloo-ring", heads)
        row = next(cells(line) for line in table if line.startswith("| 64"))
        for head, cell in zip(cells(heads), row):
            self.assertRegex(cell, r"\d", f"{head}\n{out}")

    def test_a_peer_that_fails_is_named(self):
        out, err = self.ran(*self.peers("#!/bin/sh\nexit 3\n"))
        self.assertRegex(err, r"benchmark: this failed and is left out: python3 \S+launch.py 2 -- \S+allreduce_gloo")
        self.assertIn("### Over sockets", out)

    def test_allreduces_over_links(self):
        out, _ = self.ran("scripts/benchmark_links.py", "--allreduce", "256K", "1M", "--perf", BUILD / "tools" / "ddp-perf", "--rates",
                          "1gbit", "--ranks", "2", "--rounds", "1", "--seconds", "0.01", "--json", self.at / "links.json")
        rows = [cells(line) for line in out.splitlines() if line.startswith("| 1gbit")]
        self.assertEqual([(row[1], row[2], row[4]) for row in rows], [("2", "0.25 MiB", "TCP"), ("2", "1 MiB", "TCP")], out)
        self.assertRegex(out, r"compiled by (gcc|clang) \d")
        for figure in json.loads((self.at / "links.json").read_text()):
            self.assertAlmostEqual(figure["of_rate"] / figure["of_payload"], 1448 / 1514)
            self.assertAlmostEqual(figure["of_rate"], figure["bytes"] * 8 / 1e6 / figure["ms"])
        self.assertLess(figure["of_payload"], 1.3, "not over the link")  # a bucket of tbf lets 128 KiB through at once

    def test_training_steps_as_a_table_and_as_json(self):
        out, _ = self.ran(BUILD / "tools" / "ddprun", "-n", "2", "--prefix", "none", "--", f"{ONCE}_train_step", "--json",
                          self.at / "steps.json", "mlp", ROUNDS="1", STEPS="1", STEP_BUDGET="0.01")
        rows = {line.split()[0]: line.split() for line in out.splitlines()}
        kinds = {row["kind"]: row for row in json.loads((self.at / "steps.json").read_text())["rows"]}
        for kind in ("nosync", "default", "replicated", "sharded"):
            self.assertEqual(len(rows[kind]), 13, out)
            self.assertTrue(kinds[kind]["ok"])
            self.assertGreater(kinds[kind]["samples_per_s"], 0)
        self.assertGreaterEqual(kinds["replicated"]["sent_bytes"], kinds["replicated"]["grad_bytes"])

    def test_links(self):
        # A millisecond of wire for the gradient of this model: the step cannot be faster.
        out, _ = self.ran("scripts/benchmark_links.py", "--program", f"{ONCE}_train_step", "--model", "mlp", "--rates", "1gbit",
                          "--ranks", "2", "--rounds", "1", "--seconds", "0.01", "--ours", "bf16 powersgd",
                          "--json", self.at / "links.json")
        kinds = {cells(line)[2]: cells(line) for line in out.splitlines() if line.startswith("| 1gbit")}
        self.assertLessEqual({"nosync", "replicated", "bf16", "powersgd"}, set(kinds), out)
        for figure in json.loads((self.at / "links.json").read_text()):
            self.assertGreater(figure["step_ms"], 0)
            if figure["kind"] == "replicated":
                self.assertGreaterEqual(figure["step_ms"], figure["least_ms"] / 2, "not over the link")

    def test_less_communication(self):
        draws = random.Random(1)
        data = self.at / "data"
        data.mkdir()
        for name, count in (("train", 1280), ("t10k", 200)):
            (data / f"{name}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 0x803, count, 28, 28) +
                                                             draws.randbytes(count * 784))
            (data / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, count) +
                                                             bytes(draws.randrange(10) for _ in range(count)))
        what = ["every gradient", "bf16", "local SGD 8", "hierarchical 2, 8"]
        out, _ = self.ran("scripts/less_communication.py", "--build", BUILD, "--out", self.at / "out", "--data", data, "--models", "mlp",
                          "--ranks", "2", "--networks", "loopback", "1 Gbit/s", "--seeds", "7", "--epochs", "2", "--what", *what)
        rows = {cells(line)[0]: cells(line) for line in out.splitlines() if line.startswith("| ")}
        self.assertLessEqual(set(what), set(rows), out)
        for name in what:
            for cell in rows[name][1:]:
                self.assertRegex(cell, r"^[+−]?\d", out)
        results = {row["name"]: row for row in json.loads((self.at / "out" / "results.json").read_text())}
        whole, half = (results[name]["bytes"] for name in ("every gradient", "bf16"))  # on the cable, by messages
        self.assertAlmostEqual(whole / half, 2, places=3)
        self.assertTrue(list((self.at / "out").glob("mlp_2_*.svg")))


if __name__ == "__main__":
    namespace = f"ddp-scripts-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", namespace], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        print("skipped: no network namespaces here:", made.stderr)
        sys.exit(77)
    subprocess.run(["ip", "netns", "del", namespace], check=True)
    unittest.main()
