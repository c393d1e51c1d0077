"""The Fashion-MNIST example as people run it: what it prints, and that its bits do not depend on how the ranks are started,
how they talk and how the gradients are cut.

FASHION_MNIST (or DDP_EXAMPLES, its directory) and DDPRUN name the binaries; MPIEXEC the launcher of MPI. FASHION_DATA names
the data set's directory, if not where Debian puts it; without one the test is skipped.
"""

import gzip
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import unittest

from jobs import environment, program

FASHION_MNIST = program("FASHION_MNIST", "DDP_EXAMPLES", "fashion_mnist")
DDPRUN = os.environ.get("DDPRUN", "")
MPIEXEC = os.environ.get("MPIEXEC") or shutil.which("mpirun") or ""
FASHION_DATA = os.environ.get("FASHION_DATA", "/usr/share/datasets/fashion-mnist")
DEADLINE = 300.0

FILES = {"train-images-idx3-ubyte": 2000, "train-labels-idx1-ubyte": 2000,
         "t10k-images-idx3-ubyte": 500, "t10k-labels-idx1-ubyte": 500}

RESULT = re.compile(
    r"^result: test_accuracy=(?P<accuracy>[01]\.\d{4}) ranks=(?P<ranks>\d+) transport=(?P<transport>inproc|tcp|mpi)"
    r" memory=(?P<memory>shared|own) messages=(?P<messages>memory|sockets|mixed|unknown) algorithm=(?P<algorithm>\w+) exchange=(?P<exchange>\w+)"
    r"(?: ratio=(?P<ratio>[0-9.e-]+))?(?: rank=(?P<rank>\d+))? strategy=(?P<strategy>\w+)(?: period=(?P<period>\d+))?"
    r" bytes_per_step=(?P<bytes>\d+) epochs=(?P<epochs>\d+) seconds=\d+\.\d samples_per_second=\d+"
    r" communication_wait=\d+\.\d% replicas=(?P<replicas>identical|different) parameters=(?P<parameters>[0-9a-f]{16})$")


def run(*command, env=None):
    done = subprocess.run(command, env=environment(**(env or {})), stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          timeout=DEADLINE, check=False)
    return done.returncode, done.stdout, done.stderr


def tcp(ranks, *words):
    return [DDPRUN, "-n", str(ranks), "--prefix", "none", "--", FASHION_MNIST, *words]


def inproc(ranks, *words):
    return [FASHION_MNIST, "--ranks", str(ranks), "--transport", "inproc", *words]


def mpi(ranks, *words):
    return [MPIEXEC, "-n", str(ranks), "--oversubscribe", FASHION_MNIST, "--transport", "mpi", *words]


MPI_ENVIRONMENT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                   "OMPI_MCA_btl_vader_single_copy_mechanism": "none", "OMPI_MCA_hwloc_base_binding_policy": "none"}


def cut(name, count):
    """The first `count` entries of one of the data set's files, as a plain IDX file's bytes."""
    with gzip.open(os.path.join(FASHION_DATA, name + ".gz")) as file:
        magic = file.read(4)
        dims = struct.unpack(f">{magic[3]}I", file.read(4 * magic[3]))
        one = 1
        for d in dims[1:]:
            one *= d
        return magic + struct.pack(f">{magic[3]}I", count, *dims[1:]) + file.read(count * one)


@unittest.skipUnless(os.path.isfile(os.path.join(FASHION_DATA, "train-images-idx3-ubyte.gz")),
                     f"no Fashion-MNIST in {FASHION_DATA} (Debian: apt install dataset-fashion-mnist)")
class Demo(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.owner = tempfile.TemporaryDirectory(prefix="ddp-demo-test-")
        cls.few = cls.owner.name  # a data set small enough for a matrix
        for name, count in FILES.items():
            with open(os.path.join(cls.few, name), "wb") as file:
                file.write(cut(name, count))

    @classmethod
    def tearDownClass(cls):
        cls.owner.cleanup()

    def small(self, *words):
        return ("--data", self.few, "--hidden", "48", "--epochs", "1", "--batch", "100", *words)

    def result(self, command, env=None, code=0):
        """The last line's fields."""
        got, out, err = run(*command, env=env)
        self.assertEqual(got, code, f"{command}\n{out}{err}")
        match = RESULT.match(out.splitlines()[-1] if out else "")
        self.assertTrue(match, f"the last line is no result line:\n{out}{err}")
        return match.groupdict()


class ResultLine(Demo):
    def test_says_what_was_run(self):
        got = self.result(tcp(2, *self.small("--algorithm", "direct", "--epochs", "2")))
        self.assertEqual({k: got[k] for k in ("ranks", "transport", "algorithm", "epochs", "replicas")},
                         {"ranks": "2", "transport": "tcp", "algorithm": "direct", "epochs": "2", "replicas": "identical"})

    def test_twice_the_same(self):
        for command in (tcp(3, *self.small()), inproc(2, *self.small()), tcp(3, *self.small("--algorithm", "ring")),
                        [FASHION_MNIST, *self.small()]):
            self.assertEqual(self.result(command)["parameters"], self.result(command)["parameters"], command)

    def test_less_on_the_wire(self):
        plain = self.result(tcp(2, *self.small()), env={"DDP_SHARE_MEMORY": "0"})
        shared = self.result(tcp(2, *self.small()))
        paths = ("transport", "memory", "messages", "parameters")
        self.assertEqual([plain[key] for key in paths], ["tcp", "own", "sockets", shared["parameters"]])
        self.assertEqual([shared[key] for key in paths[:3]], ["tcp", "shared", "memory"])
        for exchange, most in (("bf16", 0.51), ("fp16", 0.51), ("int8", 0.26), ("topk", 0.03), ("randomk", 0.02),
                               ("powersgd", 0.12)):
            command = tcp(2, *self.small("--exchange", exchange))
            got = self.result(command)
            self.assertEqual((got["exchange"], got["replicas"], got["memory"]), (exchange, "identical", "own"))
            self.assertEqual(got["ratio"], "0.01" if exchange in ("topk", "randomk") else None)
            self.assertEqual(got["rank"], "4" if exchange == "powersgd" else None)
            self.assertLess(int(got["bytes"]), most * int(plain["bytes"]), exchange)
            self.assertGreater(int(got["bytes"]), 1000, exchange)
            self.assertEqual(self.result(inproc(2, *self.small("--exchange", exchange)))["parameters"], got["parameters"])

    def test_fewer_meetings(self):
        plain = int(self.result(tcp(3, *self.small()), env={"DDP_SHARE_MEMORY": "0"})["bytes"])
        digests = set()
        usual = {"gossip": "1", "hierarchical": "8"}
        # Bytes of rank 0 against those of plain training: values have the size of gradients; a meeting's tickets come on top.
        for strategy, period, least, most in (("local_sgd", "4", 0.24, 0.26), ("post_local", "4", 0.4, 0.46),
                                              ("hierarchical", "0", 0.49, 0.51), ("diloco", "5", 0.19, 0.21),
                                              ("slow_momentum", "5", 0.19, 0.21), ("elastic", "5", 0.19, 0.21),
                                              ("gossip", "0", 0.74, 0.76), ("gossip_ring", "2", 0.74, 0.76),
                                              ("stale", "2", 0.99, 1.01)):
            words = self.small("--strategy", strategy, "--period", period)
            got = self.result(tcp(3, *words))
            self.assertEqual((got["strategy"], got["period"], got["replicas"]),
                             (strategy, period if period != "0" else usual[strategy], "identical"))
            self.assertTrue(least * plain <= int(got["bytes"]) <= most * plain, f"{strategy}: {got['bytes']} of {plain}")
            self.assertEqual(self.result(inproc(3, *words))["parameters"], got["parameters"])
            digests.add(got["parameters"])
        self.assertEqual(len(digests), 9)

    def test_groups_of_ranks_are_those_of_a_host(self):
        words = self.small("--strategy", "hierarchical", "--period", "8")
        on_hosts = [DDPRUN, "-n", "4", "--prefix", "none", "--", "sh", "-c", 'DDP_HOST="host$((RANK / 2))" exec "$@"', "sh",
                    FASHION_MNIST, *words]
        got = self.result(on_hosts)
        self.assertEqual(got["replicas"], "identical")
        self.assertNotEqual(got["parameters"], self.result(inproc(4, *words))["parameters"])  # one host: all ranks meet often

    def test_the_seed_counts(self):
        digests = {self.result(inproc(2, *self.small("--seed", seed)))["parameters"] for seed in ("7", "8")}
        self.assertEqual(len(digests), 2)

    def test_one_process_alone_needs_no_launcher(self):
        got = self.result([FASHION_MNIST, *self.small()])
        self.assertEqual(got["ranks"], "1")

    def test_output_that_cannot_be_written_is_no_success(self):
        with open("/dev/full", "w") as full:
            done = subprocess.run([FASHION_MNIST, *self.small()], stdout=full, stderr=subprocess.PIPE, text=True, timeout=DEADLINE,
                                  check=False, env=environment())
        self.assertEqual((done.returncode, done.stderr),
                         (1, "ddp: not all of the program's standard output could be written\n"))

    def test_a_damaged_replica_shows(self):
        for rank in (0, 1, 2):
            self.assertEqual(self.result(inproc(3, *self.small("--flip", str(rank))), code=1)["replicas"], "different")
        code, out, err = run(*tcp(3, *self.small("--flip", "1")))
        self.assertNotEqual(code, 0)
        self.assertRegex(out + err, r"(?m)^result: .* replicas=different ")


class SameBits(Demo):
    def test_on_every_transport(self):
        for ranks in (2, 3, 4):
            expected = self.result(inproc(ranks, *self.small()))["parameters"]
            self.assertEqual(self.result(tcp(ranks, *self.small()))["parameters"], expected, ranks)

    def test_of_either_loader(self):
        for launch in (inproc, tcp):
            digests = {self.result(launch(3, *self.small("--epochs", "2", "--loader", loader)))["parameters"]
                       for loader in ("direct", "background")}
            self.assertEqual(len(digests), 1)

    def test_of_the_cnn(self):  # whose dropout draws by sample, not by rank
        expected = self.result(inproc(3, *self.small("--model", "cnn")))
        self.assertEqual(self.result(tcp(3, *self.small("--model", "cnn")))["parameters"], expected["parameters"])
        for less in (("--exchange", "powersgd"), ("--strategy", "diloco", "--period", "5")):
            words = self.small("--model", "cnn", *less)
            self.assertEqual(self.result(tcp(3, *words))["parameters"], self.result(inproc(3, *words))["parameters"], less)
        self.assertGreater(float(expected["accuracy"]), 0.3)

    def test_under_mpi(self):
        if not MPIEXEC:
            self.skipTest("no mpirun here")
        code, out, err = run(*mpi(1, *self.small()), env=MPI_ENVIRONMENT)
        if code != 0 and "not one this program was built with" in out + err:
            self.skipTest("the example was built without MPI")
        for ranks in (2, 3):
            expected = self.result(inproc(ranks, *self.small()))["parameters"]
            got = self.result(mpi(ranks, *self.small()), env=MPI_ENVIRONMENT)
            self.assertEqual((got["parameters"], got["transport"]), (expected, "mpi"), ranks)
        for strategy in ("hierarchical", "diloco", "gossip"):  # mpi/job_test.cpp has others
            words = self.small("--strategy", strategy, "--period", "2")
            self.assertEqual(self.result(mpi(3, *words), env=MPI_ENVIRONMENT)["parameters"],
                             self.result(inproc(3, *words))["parameters"], strategy)
        for exchange in ("bf16", "powersgd"):
            words = self.small("--exchange", exchange)
            self.assertEqual(self.result(mpi(2, *words), env=MPI_ENVIRONMENT)["parameters"],
                             self.result(inproc(2, *words))["parameters"], exchange)

    def test_with_every_canonical_algorithm_bucket_size_and_update(self):
        """The options reach what train/same_bits_test.cpp tries in every combination."""
        plans = (("2KiB", "replicated"), ("40000", "sharded"), ("64MiB", "replicated"))
        for place, clip in enumerate(((), ("--clip", "0.5"))):
            expected = self.result(inproc(3, *self.small(*clip)))["parameters"]
            for turn, algorithm in enumerate(("auto", "direct", "recursive_doubling", "halving_doubling", "naive")):
                buckets, update = plans[(turn + place) % 3]
                words = self.small("--algorithm", algorithm, "--buckets", buckets, "--update", update, *clip)
                with self.subTest(words=words[8:]):
                    self.assertEqual(self.result(inproc(3, *words))["parameters"], expected)
            words = self.small("--buckets", "2KiB", "--update", "sharded", *clip)
            with self.subTest(words=words[8:], transport="tcp"):
                self.assertEqual(self.result(tcp(3, *words))["parameters"], expected)


class Learns(Demo):
    def compare(self, seed):
        """The worst relative difference of a loss, and of an accuracy, from those of one rank."""
        losses, accuracy = {}, {}
        for ranks in (1, 2, 4):
            words = ("--epochs", "1", "--hidden", "128", "--lr", "5e-4", "--seed", seed, "--losses", "100", "--data",
                     FASHION_DATA)
            code, out, err = run(*tcp(ranks, *words))
            self.assertEqual(code, 0, out + err)
            losses[ranks] = [float(x) for x in re.findall(r"(?m)^loss \d+ (\S+)$", out)]
            self.assertEqual(len(losses[ranks]), 100, out)
            accuracy[ranks] = float(RESULT.match(out.splitlines()[-1])["accuracy"])
        self.assertGreater(accuracy[1], 0.8)
        return (max(abs(a - b) / abs(b) for ranks in (2, 4) for a, b in zip(losses[ranks], losses[1])),
                max(abs(accuracy[ranks] - accuracy[1]) for ranks in (2, 4)))

    def test_as_one_rank_does(self):
        # Usually the losses agree to 1e-6. But in float a ReLU whose input is zero to rounding may open on one count of
        # ranks and not on another: about one run in twenty then drifts apart. So: two seeds of three.
        agree = [self.compare(seed) for seed in ("1", "2")]
        if sum(loss <= 1e-3 and accuracy <= 0.003 + 1e-9 for loss, accuracy in agree) < 2:
            agree.append(self.compare("3"))
        self.assertGreaterEqual(sum(loss <= 1e-3 and accuracy <= 0.003 + 1e-9 for loss, accuracy in agree), 2, agree)


class BadData(Demo):
    """Every rank says what is wrong with which file, and what was expected."""

    def broken(self, damage, pattern):
        with tempfile.TemporaryDirectory(prefix="ddp-demo-test-") as directory:
            for name in FILES:
                shutil.copy(os.path.join(self.few, name), directory)
            damage(directory)
            command = [DDPRUN, "-n", "2", "--", FASHION_MNIST, "--data", directory, "--hidden", "16", "--epochs", "1"]
            code, out, err = run(*command)
            self.assertNotEqual(code, 0, out)
            for rank in (0, 1):
                self.assertRegex(err, rf"(?m)^\[{rank}\] DDP-E30[12] [a-z]+: .*{pattern}", out + err)

    def change(self, name, edit):
        def damage(directory):
            path = os.path.join(directory, name)
            with open(path, "rb") as file:
                content = bytearray(file.read())
            with open(path, "wb") as file:
                file.write(edit(content))
        return damage

    def test_no_directory(self):
        self.broken(shutil.rmtree, "ddp-demo-test-.*is not a directory")

    def test_no_file(self):
        self.broken(lambda d: os.remove(os.path.join(d, "t10k-labels-idx1-ubyte")), "t10k-labels-idx1-ubyte")

    def test_truncated(self):
        for name in FILES:
            with self.subTest(name=name):
                self.broken(self.change(name, lambda c: c[:-1]), name + ".*(expected|header)")
        self.broken(self.change("train-images-idx3-ubyte", lambda c: c[:5]), "train-images-idx3-ubyte")
        self.broken(self.change("train-labels-idx1-ubyte", lambda c: b""), "train-labels-idx1-ubyte")

    def test_too_long(self):
        self.broken(self.change("train-images-idx3-ubyte", lambda c: c + b"x"), "train-images-idx3-ubyte.*")

    def test_sizes_that_no_file_has(self):
        def huge(content):
            content[4:16] = b"\xff" * 12
            return content
        self.broken(self.change("train-images-idx3-ubyte", huge), "train-images-idx3-ubyte.*")

    def test_mislabelled(self):
        self.broken(self.change("train-images-idx3-ubyte", lambda c: b"\x89PNG" + c[4:]), "train-images-idx3-ubyte")
        self.broken(self.change("train-labels-idx1-ubyte", lambda c: c[:2] + b"\x0d" + c[3:]), "train-labels-idx1-ubyte")

        def exchange(directory):
            images, labels = (os.path.join(directory, f"train-{kind}-ubyte") for kind in ("images-idx3", "labels-idx1"))
            os.rename(images, images + ".tmp")
            os.rename(labels, images)
            os.rename(images + ".tmp", labels)
        self.broken(exchange, "train-(images|labels)-idx")

    def test_counts_that_differ(self):
        def fewer(content):
            content[4:8] = struct.pack(">I", 1999)
            return content[:-1]
        self.broken(self.change("train-labels-idx1-ubyte", fewer), "train-.*1999")

    def test_a_label_out_of_range(self):
        def ten(content):
            content[8 + 17] = 10
            return content
        self.broken(self.change("train-labels-idx1-ubyte", ten), "train-labels-idx1-ubyte.*10")

    def test_damaged_gzip(self):
        def damage(directory):
            path = os.path.join(directory, "train-images-idx3-ubyte")
            with open(path, "rb") as file:
                packed = bytearray(gzip.compress(file.read()))
            os.remove(path)
            packed[len(packed) // 2] ^= 0x55
            with open(path + ".gz", "wb") as file:
                file.write(packed)
        self.broken(damage, "train-images-idx3-ubyte.gz.*")


class CommandLine(Demo):
    def test_mistakes_are_named(self):
        for words, pattern in ((("--epoch", "2"), "--epoch\\b"), (("--epochs", "two"), "--epochs .*two"),
                               (("--epochs",), "--epochs needs a value"), (("--buckets", "1MB"), "--buckets .*1MB"),
                               (("--buckets", "0"), "--buckets"), (("5",), "'5'"),
                               (("--algorithm", "tree"), "tree"), (("--update", "shared"), "shared"),
                               (("--transport", "udp"), "udp"), (("--exchange", "zip"), "--exchange .*zip"),
                               (("--strategy", "lazy"), "--strategy .*lazy"),
                               (("--strategy", "diloco", "--exchange", "bf16"), "goes with neither --exchange nor --update"),
                               (("--strategy", "gossip", "--update", "sharded"), "goes with neither --exchange nor --update"),
                               (("--strategy", "stale", "--algorithm", "ring"), "--strategy stale .*--algorithm and --buckets are for"),
                               (("--strategy", "local_sgd", "--buckets", "2MiB"), "--strategy local_sgd .*--algorithm and --buckets"),
                               (("--exchange", "bf16", "--algorithm", "ring"), "--exchange bf16 .*does not go with --algorithm"),
                               (("--period", "4"), "--period is for a --strategy other than every_step"),
                               (("--exchange", "int8", "--ratio", "0.1"), "--ratio is for --exchange topk and randomk, not int8"),
                               (("--ratio", "0.1"), "--ratio is for --exchange topk and randomk, not none"),
                               (("--exchange", "topk", "--rank", "2"), "--rank is for --exchange powersgd, not topk"),
                               (("--strategy", "hierarchical", "--period", "6"), "--period that four divides, not 6"),
                               (("--loader", "lazy"), "--loader .*lazy"),
                               (("--exchange", "topk", "--ratio", "0"), "top_k: ratio"),
                               (("--exchange", "randomk", "--ratio", "1.5"), "random_k: ratio"), (("--epochs", "-1"), "--epochs .* not '-1'"),
                               (("--batch", "0"), "batch"), (("--hidden", "0"), "--hidden takes .* from 1 on, not '0'"), (("--ranks", "-1"), "ranks")):
            with self.subTest(words=words):
                code, out, err = run(FASHION_MNIST, *self.small(*words))
                self.assertNotIn(code, (0, -6, -11), out + err)
                self.assertRegex(err, pattern)
                self.assertNotRegex(out, "result:")

    def test_ranks_that_contradict_the_launcher(self):
        code, out, err = run(*tcp(2, *self.small("--ranks", "3")))
        self.assertNotEqual(code, 0, out)
        self.assertRegex(err, "DDP-E101 .*2.*3")

    def test_help(self):
        code, out, _ = run(FASHION_MNIST, "--help")
        self.assertEqual(code, 0)
        for option in ("ranks", "transport", "algorithm", "buckets", "epochs", "seed", "data"):
            self.assertIn(f"--{option}", out)


class Terminal(Demo):
    def on_terminal(self, command):
        """What a terminal is shown, and the exit code."""
        pid, terminal = pty.fork()
        if pid == 0:
            os.execve(command[0], command, environment(TERM="xterm"))
        seen, end = b"", time.monotonic() + DEADLINE
        while time.monotonic() < end:
            if select.select([terminal], [], [], 0.2)[0]:
                try:
                    chunk = os.read(terminal, 65536)
                except OSError:
                    break  # the other side is closed
                if not chunk:
                    break
                seen += chunk
        os.close(terminal)
        return seen.decode(errors="replace"), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def test_a_bar_on_a_terminal(self):
        for command in (inproc(2, *self.small("--epochs", "3")), tcp(2, *self.small("--epochs", "3"))):
            with self.subTest(command=command[0]):
                seen, code = self.on_terminal(command)
                self.assertEqual(code, 0, seen)
                self.assertRegex(seen, r"\r\[#*\.*\] +\d+% .*loss \d.*samples/s .*s left")
                self.assertRegex(seen, r"\[#{30}\] 100%")
                last = seen.replace("\r\n", "\n").rstrip("\n").splitlines()[-1]
                self.assertTrue(RESULT.match(re.sub(r"\x1b\[K|\r", "", last)), repr(last))

    def test_plain_lines_elsewhere(self):
        for command in (inproc(2, *self.small()), tcp(2, *self.small())):
            _, out, err = run(*command)
            self.assertNotRegex(out + err, "[\r\x1b]")
            self.assertRegex(out, r"(?m)^epoch 1/1 .*loss \d.*test accuracy 0\.\d{4}")


if __name__ == "__main__":
    if not DDPRUN:
        sys.exit("DDPRUN names no launcher")
    unittest.main()
