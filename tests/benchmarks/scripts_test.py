#!/usr/bin/env python3
"""The scripts that measure beside other programs and over slow links run once, briefly: they work, and their tables are complete.

Environment: DDP_BUILD (the directory of a build with examples and tools), ONCE (the path of the benchmarks built for
tests, up to the underscore before their names). Exit code 77: no network namespaces here.
"""
import json
import os
import pathlib
import random
import re
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
# One that takes the place of the program in plain Eigen.
EIGEN = """#!/bin/sh
echo '{"bench":"step1","impl":"eigen '$COMPILER', gemm eigen","model":"'$1'","step_ms":1000000,"ok":true}'
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


def table_of(out, title):
    """The lines of the first table whose title begins so, and of the text below it."""
    return out[out.index("### " + title):].split("\n### ")[0].strip().splitlines()


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

    def script(self, only, *more):
        return ["scripts/benchmark.sh", "--smoke", "--programs", BUILD / "tools", ONCE, "--figures", self.at / "figures",
                "--only", only, *more]

    def peers(self, program, name="allreduce_gloo", only="sockets"):
        (self.at / "peers" / "build").mkdir(parents=True)
        (self.at / "peers" / "launch.py").write_text(LAUNCH)
        peer = self.at / "peers" / "build" / name
        peer.write_text(program)
        peer.chmod(0o755)
        return self.script(only, "--peers", self.at / "peers")

    def test_peers_have_a_column(self):
        out, _ = self.ran(*self.peers(PEER))
        table = table_of(out, "Over sockets")
        heads = next(line for line in table if line.startswith("|"))
        self.assertIn("gloo-ring", heads)
        row = next(cells(line) for line in table if line.startswith("| 64"))
        for head, cell in zip(cells(heads), row):
            self.assertRegex(cell, r"\d", f"{head}\n{out}")
        self.assertRegex(table[-1], r"^Paths: ddp: TCP\. .*gloo-ring: TCP on lo")
        self.assertRegex(out, r"(?m)^Compiled by (gcc|clang) \d.* Versions: .*Gloo \(of unknown version\)")

    def test_every_library_has_the_systems_congestion_control(self):
        programs, said = self.at / "programs", self.at / "said"
        programs.mkdir()
        for name in ("ddp-perf", "ddprun"):
            program = programs / name
            program.write_text(f"""#!/bin/sh
[ "$1" = --help ] || echo "{name} ${{DDP_TCP_CONGESTION-its own}}" >> "{said}"
exec "{BUILD}/tools/{name}" "$@"
""")
            program.chmod(0o755)
        command = self.script("sockets steps")
        command[command.index("--programs") + 1] = programs
        self.ran(*command)
        systems = pathlib.Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
        wanted = {f"ddp-perf {systems}", f"ddprun {systems}"}
        # The same program measures MPI over TCP, which takes the system's without being told.
        self.assertEqual(set(said.read_text().splitlines()) - {"ddp-perf its own"}, wanted)

    def test_one_rank_beside_plain_eigen(self):
        out, _ = self.ran(*self.peers(EIGEN, "step_eigen-theirs", "alone"))
        table = table_of(out, "One rank")
        self.assertEqual(cells(table[2]), ["model", "ddp", "eigen theirs, gemm eigen", "this : ddp"])
        model, own, theirs, ratio = cells(table[4])
        self.assertEqual((model, theirs), ("cnn", "1000000.000"), out)
        self.assertAlmostEqual(float(ratio), 1e6 / float(own), delta=1e-3 * float(ratio))
        self.assertRegex(table[-1], r"^Paths: ddp: one rank, compiled by (gcc|clang) \d")

    def test_a_communication_thread_of_each_kind(self):
        out, _ = self.ran(*self.script("thread"))
        rows = [cells(line) for line in table_of(out, "The communication thread") if line.startswith("| cnn")]
        self.assertEqual([row[:4] for row in rows], [["cnn", "2", "drives", "TCP"], ["cnn", "2", "rests", "TCP"]], out)
        for row in rows:
            self.assertGreater(float(row[4]), 0)

    def test_growth_on_virtual_time_and_with_ranks_on_few_cores(self):
        out, _ = self.ran(*self.script("growth"))
        virtual = table_of(out, "Growth with ranks on virtual time: allreduce of 4 KiB")
        self.assertEqual(cells(virtual[2]), ["ranks", "ring", "direct", "recursive_doubling", "halving_doubling", "automatic takes"])
        # Exact on every machine: a step takes 25 us, 2 us for its message, and 3.28 us of wire for 4 KiB. Four ranks take six steps
        # with a quarter of it in a ring, and two with all of it in a doubling.
        four = cells(virtual[5])
        self.assertEqual((four[1], four[3]), ("166.9 us (6; 6.0 KiB)", "60.6 us (2; 8.0 KiB)"), out)
        self.assertIn("25 us from card to card, 10 Gbit/s each way, 2 us a message", virtual[-1])
        crowd = [cells(line)[:2] for line in table_of(out, "Growth with ranks on few cores") if line.startswith("| 3")]
        self.assertEqual(crowd, [["3", "TCP"], ["3", "shm, in place"]], out)
        for title in ("Growth with size", "Growth with parameters"):
            table = table_of(out, title)
            at = cells(table[2]).index("path")
            for line in table[4:]:
                self.assertRegex(cells(line)[at], r"^shm, (in place|messages)$", out)
        self.assertRegex(table_of(out, "Growth with ranks that are threads")[-1], r"^Paths: 4 B: threads, (in place|messages)\.")

    def test_paths_and_compilers_are_those_of_the_results(self):
        self.ran(*self.script("allreduce update startup"))
        figures = self.at / "figures"
        for file in [*figures.glob("*.allreduce.tcp.json"), *figures.glob("*.startup.ddprun.json")]:
            file.write_text(re.sub(r'"compiler":"[^"]*"', '"compiler":"elsewhere 7"', file.read_text())
                            .replace('"messages":"sockets"', '"messages":"mixed"').replace('"messages":"memory"', '"messages":"sockets"'))
        out, _ = self.ran("benchmarks/tables.py", figures)
        self.assertRegex(out, r"(?m)^Compiled by elsewhere 7 \(ddp-perf\); (gcc|clang) \d.*\(ddp-perf, update\)\. Versions: .*ddp \d")
        row = cells(table_of(out, "Allreduce, 2 processes")[4])
        self.assertEqual((row[2], row[4]), ("shm, in place", "TCP and shm, messages"), out)
        self.assertRegex(table_of(out, "Start:")[-1], r"^Paths: ddprun: TCP")
        kinds = {cells(line)[0]: cells(line)[2] for line in table_of(out, "The update alone")[4:]}
        self.assertEqual(kinds, {"fused": "shm, in place", "own_allreduce": "shm, in place", "replicated": "shm, in place",
                                 "messages": "shm, messages"}, out)

    def test_allreduces_over_links(self):
        out, _ = self.ran("scripts/benchmark_links.py", "--allreduce", "256K", "1M", "--perf", BUILD / "tools" / "ddp-perf", "--rates",
                          "1gbit", "--ranks", "2", "--rounds", "1", "--seconds", "0.01", "--json", self.at / "links.json",
                          "--bounds", f"{ONCE}_bounds")
        rows = [cells(line) for line in out.splitlines() if line.startswith("| 1gbit")]
        self.assertEqual([(row[1], row[2], row[4]) for row in rows], [("2", "0.25 MiB", "TCP"), ("2", "1 MiB", "TCP")], out)
        self.assertRegex(out, r"compiled by (gcc|clang) \d")
        for figure in json.loads((self.at / "links.json").read_text()):
            self.assertAlmostEqual(figure["of_rate"] / figure["of_payload"], 1448 / 1514)
            self.assertAlmostEqual(figure["of_rate"], figure["bytes"] * 8 / 1e6 / figure["ms"])
        for share in ("of_payload", "exchanged_of_rate"):  # of 1 MiB: a bucket of tbf lets 128 KiB through at once
            self.assertTrue(0.2 < figure[share] < 1.3, f"not over the link: {figure}")

    def test_a_peer_that_fails_is_named(self):
        out, err = self.ran(*self.peers("#!/bin/sh\nexit 3\n"))
        self.assertRegex(err, r"benchmark: this failed and is left out: python3 \S+launch.py 2 -- \S+allreduce_gloo")
        self.assertIn("### Over sockets", out)

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
