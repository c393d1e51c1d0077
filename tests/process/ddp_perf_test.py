"""ddp-perf: each collective over threads and over processes, its files, its errors, and --candidate.

DDP_PERF names it (else: beside DDPRUN). Nothing is timed; that the numbers are numbers is all that is asked of them.
"""

import json
import math
import os
import pathlib
import shutil
import subprocess
import tempfile
import time
import unittest
import xml.etree.ElementTree

from jobs import SCALE, environment

DDPRUN = os.environ.get("DDPRUN", "")
DDP_PERF = os.environ.get("DDP_PERF") or os.path.join(os.path.dirname(DDPRUN), "ddp-perf")
MPIEXEC = os.environ.get("MPIEXEC", "")
COLLECTIVES = ("allreduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "gather", "scatter", "all_to_all",
               "barrier", "pingpong")


def perf(*options, launcher=(), **variables):
    return subprocess.run([*launcher, DDP_PERF, *map(str, options)], env=environment(**variables),
                          stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60 * SCALE, check=False)


class DdpPerf(unittest.TestCase):
    def setUp(self):
        place = tempfile.TemporaryDirectory()
        self.addCleanup(place.cleanup)
        self.place = pathlib.Path(place.name)

    def measured(self, *options, **more):
        done = perf(*options, **more)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual(done.stderr, "")
        return done.stdout

    @staticmethod
    def sizes(collective):
        """Of -b 4 -e 64K -f 128, between two ranks."""
        sliced = collective in ("reduce_scatter", "all_gather", "gather", "scatter", "all_to_all")
        return [0] if collective == "barrier" else [8 if sliced else 4, 512, 65536]

    def test_every_collective(self):
        path = self.place / "results.json"
        for collective in COLLECTIVES:
            for transport, messages in (("inproc", "memory"), ("shm", "memory"), ("tcp", "sockets")):
                with self.subTest(collective=collective, transport=transport):
                    out = self.measured(collective, "--transport", transport, "-n", 2, "-b", 4, "-e", "64K", "-f", 128,
                                        "--iterations", 3, "--check", "--dirty", "--json", path)
                    found = json.loads(path.read_text())
                    rows = found["rows"]
                    self.assertEqual([found[key] for key in ("collective", "transport", "messages", "ranks", "dirty")],
                                     [collective, transport, messages, 2, True])
                    self.assertIn(f"2 ranks over {transport}, messages through {messages};", out)
                    if collective == "allreduce":
                        self.assertEqual("memory" in [row["algorithm"] for row in rows], transport != "tcp")
                    self.assertEqual([row["bytes"] for row in rows], self.sizes(collective))
                    for row in rows:
                        self.assertEqual((row["wrong"], row["reps"], row["count"]), (0, 3, row["bytes"] // 4))
                        self.assertLessEqual(row["min_us"], row["p10_us"])
                        self.assertLessEqual(row["p10_us"], row["med_us"])
                        self.assertLessEqual(row["med_us"], row["p90_us"])
                    lines = out.splitlines()
                    self.assertEqual([line.split()[:3] for line in lines[2:]],
                                     [[str(row["bytes"]), str(row["count"]), row["algorithm"]] for row in rows])

    def test_three_ranks_take_turns_as_root(self):
        for collective in ("broadcast", "reduce", "gather", "scatter", "all_gather", "pingpong"):
            self.measured(collective, "--transport", "inproc", "-n", 3, "-b", 4, "-e", "1M", "-f", 512,
                          "--iterations", 2, "--check")

    def test_bandwidths(self):
        path = self.place / "results.json"
        for collective, factor in (("allreduce", 1.5), ("all_gather", 0.75), ("broadcast", 1)):
            self.measured(collective, "--transport", "inproc", "-n", 4, "-b", "64K", "-e", "64K", "--iterations", 5,
                          "--json", path)
            row = json.loads(path.read_text())["rows"][0]
            self.assertIsNone(row["wrong"])
            self.assertTrue(math.isclose(row["alg_GBps"], 65536 / row["med_us"] / 1e3, rel_tol=1e-2), row)
            self.assertTrue(math.isclose(row["bus_GBps"], factor * row["alg_GBps"], rel_tol=1e-4), row)

    def test_algorithms(self):
        for given, printed in (("ring", "ring"), ("auto", "memory"), ("naive", "naive"), ("direct", "direct"),
                               ("halving_doubling", "halving_doubling"), ("hierarchical", "hierarchical")):
            out = self.measured("allreduce", "--transport", "inproc", "--algorithm", given, "-b", 4, "-e", 4,
                                "--iterations", 1)
            self.assertEqual(out.splitlines()[2].split()[2], printed)

    def test_a_plot_beside_others(self):
        other, plot = self.place / "other.json", self.place / "plot.svg"
        sizes = ("-b", 4, "-e", "4K", "-f", 32, "--iterations", 2, "--transport", "inproc")
        self.measured("allreduce", "--algorithm", "direct", "--json", other, *sizes)
        lines = [dict(bench="allreduce", net="lo", impl="<theirs> & others", n=2, bytes=size, med_us=size / 4)
                 for size in (4, 4096)]
        lines += [dict(line, n=4, impl="of more ranks") for line in lines]
        lines += [dict(lines[0], bench="broadcast", impl="of another collective")]
        with other.open("a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))
        self.measured("allreduce", "--plot", plot, "--beside", other, *sizes)
        root = xml.etree.ElementTree.parse(plot).getroot()
        name = "{http://www.w3.org/2000/svg}"
        texts = [node.text for node in root.iter(name + "text")]
        for label in ("ddp, inproc", "ddp, inproc, direct", "<theirs> & others, lo", "4 B", "4 KiB",
                      "bus bandwidth, GB/s"):
            self.assertIn(label, texts)
        self.assertNotIn("of more ranks", " ".join(texts))
        self.assertNotIn("of another collective", " ".join(texts))
        curves = [node.get("points").split() for node in root.iter(name + "polyline")]
        self.assertEqual([len(points) for points in curves], [3, 2, 3])
        for x, y in (point.split(",") for points in curves for point in points):
            self.assertTrue(70 <= float(x) <= 700 and 50 <= float(y) <= 430, (x, y))

    def test_candidate(self):
        variables = dict(SIZES="4 1000 65536", BUDGET="0.01", MINREPS="5", IMPL="ours", NET="lo")
        out = self.measured("allreduce", "--candidate", **variables)
        rows = [json.loads(line) for line in out.splitlines()]
        self.assertEqual([(row["bench"], row["net"], row["impl"], row["n"], row["bytes"], row["ok"]) for row in rows],
                         [("allreduce", "lo", "ours", 2, size, True) for size in (4, 1000, 65536)])
        for row in rows:
            self.assertGreaterEqual(row["reps"], 5)
            self.assertTrue(all(row[key] > 0 for key in ("med_us", "p10_us", "p90_us", "mean_us", "min_us")), row)
        seconds = float(self.measured("allreduce", "--candidate", MODE="startup", T0=str(time.time())))
        self.assertTrue(0 < seconds < 60 * SCALE, seconds)
        path = self.place / "startup.json"
        out = self.measured("allreduce", "--candidate", "--json", path, MODE="startup", T0=str(time.time()))
        found = json.loads(path.read_text())
        self.assertEqual((found["startup_s"], found["messages"], found["rows"]), (float(out), "memory", []))

    def test_under_launchers(self):
        options = ("allreduce", "-b", 4, "-e", "64K", "-f", 128, "--iterations", 2, "--check")
        out = self.measured(*options, launcher=(DDPRUN, "-n", "3", "--prefix", "none", "--"))
        self.assertIn("3 ranks over tcp, messages through memory;", out)
        if MPIEXEC and shutil.which(MPIEXEC) and SCALE == 1:  # sanitizers: what Open MPI leaks
            path = self.place / "mpi.json"
            done = perf(*options, "--json", path, launcher=(MPIEXEC, "-n", "2", "--oversubscribe"), OMPI_ALLOW_RUN_AS_ROOT="1",
                        OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", OMPI_MCA_pml="ob1")
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            self.assertIn("2 ranks over mpi", done.stdout)
            found = json.loads(path.read_text())
            self.assertRegex(found["mpi"], r"MPI.* v?\d")
            self.assertIn("OMPI_MCA_pml=ob1", found["mpi_settings"])
        else:
            print("\nnot tried: ddp-perf under mpirun, which is not here, or with a sanitizer", flush=True)

    @unittest.skipUnless(MPIEXEC and shutil.which(MPIEXEC) and SCALE == 1, "no MPI here, or a sanitizer: what Open MPI leaks")
    def test_every_collective_over_mpi(self):
        path = self.place / "results.json"
        for collective in (*COLLECTIVES, "mpi_allreduce"):  # the last is the MPI library's own
            with self.subTest(collective=collective):
                path.unlink(missing_ok=True)
                done = perf(collective, "-b", 4, "-e", "64K", "-f", 128, "--iterations", 3, "--check", "--dirty", "--json", path,
                            launcher=(MPIEXEC, "-n", "2", "--oversubscribe"), OMPI_ALLOW_RUN_AS_ROOT="1",
                            OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                found = json.loads(path.read_text())
                self.assertEqual([found[key] for key in ("collective", "transport", "ranks", "dirty")], [collective, "mpi", 2, True])
                self.assertEqual([row["bytes"] for row in found["rows"]], self.sizes(collective))
                self.assertEqual([(row["wrong"], row["reps"]) for row in found["rows"]], [(0, 3)] * len(found["rows"]))

    def test_what_is_refused(self):
        refused = (
            ((), "say which collective to measure: allreduce, reduce_scatter, "),
            (("gather_all",), "there is no collective 'gather_all'; choose one of allreduce"),
            (("allreduce", "--transport", "udp"), "there is no transport 'udp'; choose one of inproc, shm, tcp"),
            (("allreduce", "--algorithm", "rings"), "there is no algorithm 'rings'; choose one of auto|"),
            (("broadcast", "--algorithm", "ring"), "--algorithm is for allreduce and reduce_scatter"),
            (("allreduce", "-n", "0"), "-n takes an integer from 1 to 4096, not '0'"),
            (("allreduce", "-b", "6"), "-b takes a size such as 4, 64K, 16M or 1G"),
            (("allreduce", "-e", "1X"), "not '1X'"),
            (("allreduce", "-b", "1M", "-e", "4"), "-e 4 is below -b 1M"),
            (("allreduce", "-f", "1"), "-f takes an integer from 2 to 1024, not '1'"),
            (("allreduce", "--budget", "-1"), "--budget takes seconds from 0 to 3600"),
            (("allreduce", "--frob"), "--frob"),
            (("allreduce", "--json", "/nowhere/a.json"), "/nowhere/a.json cannot be written"),
            (("allreduce", "--plot", "a.png"), "name it FILE.svg"),
            (("barrier", "--plot", "a.svg"), "a barrier has none"),
            (("allreduce", "--beside", "a.json"), "say --plot"),
            (("pingpong", "-n", "1"), "pingpong needs two ranks"),
            (("reduce", "--candidate"), "--candidate is for allreduce, not reduce"),
            (("allreduce", "--candidate", "--json", "a.json"), "--candidate prints its results: no --json (but with MODE=startup)"),
            (("allreduce", "--transport", "mpi"), "MPI"),
        )
        for options, words in refused:
            with self.subTest(options=options):
                done = perf(*options)
                self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
                self.assertTrue(done.stderr.startswith("ddp-perf: "), done.stderr)
                self.assertIn(words, done.stderr)
                self.assertIn("ddp-perf --help", done.stderr)

    def test_what_a_launcher_contradicts(self):
        launcher = (DDPRUN, "-n", "2", "--prefix", "none", "--")
        done = perf("allreduce", "--transport", "inproc", launcher=launcher)
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn("leave out one of the two", done.stderr)
        done = perf("allreduce", "-n", 3, launcher=launcher)
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn("WORLD_SIZE is 2", done.stderr)

    def test_shm_is_memory_or_an_error(self):
        for variables, said in ((dict(DDP_SHARE_MEMORY="0"), "messages go through sockets"),
                                (dict(HOSTS="ab"), "messages go through sockets"), (dict(HOSTS="aab"), "messages go through mixed")):
            ranks = len(variables.get("HOSTS", "aa"))
            place = 'test -z "$HOSTS" || export DDP_HOST=$(echo $HOSTS | cut -c$((RANK + 1))); exec "$@"'
            done = perf("allreduce", "--transport", "shm", "-e", 4,
                        launcher=(DDPRUN, "-n", str(ranks), "--prefix", "none", "--", "sh", "-c", place, "sh"), **variables)
            self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
            self.assertIn("--transport shm is for ranks that share memory, and between these " + said, done.stderr)

    def test_results_of_other_sizes_of_job(self):
        other = self.place / "other.json"
        other.write_text('{"bench":"allreduce","n":4,"bytes":4,"med_us":1}\n')
        done = perf("allreduce", "--plot", self.place / "a.svg", "--beside", other)
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn("has no results of allreduce between 2 ranks", done.stderr)


if __name__ == "__main__":
    unittest.main()
