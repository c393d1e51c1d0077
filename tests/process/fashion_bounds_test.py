"""Files and options that ask for too much: the programs refuse them in words, at once, and without the memory asked for.

Programs: DDP_EXAMPLES, the directory of fashion_mnist, predict and text_model.
"""

import gzip
import json
import os
import struct
import subprocess
import tempfile
import threading
import unittest

from jobs import DEADLINE, environment, program


def idx(kind, shape, data):
    return struct.pack(f">HBB{len(shape)}I", 0, kind, len(shape), *shape) + data


class Bounds(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.directory = scratch.name
        for half in ("train", "t10k"):
            self.write(f"{half}-images-idx3-ubyte", idx(8, (20, 28, 28), bytes(range(196)) * 80))
            self.write(f"{half}-labels-idx1-ubyte", idx(8, (20,), bytes(i % 10 for i in range(20))))

    def path(self, name):
        return os.path.join(self.directory, name)

    def write(self, name, content):
        with open(self.path(name), "wb") as file:
            file.write(content)

    def refused(self, code, most_mb, *words, name="fashion_mnist"):
        """Runs an example, which must exit with `code` and stay below `most_mb`; what it said."""
        with tempfile.TemporaryFile("w+") as err:
            process = subprocess.Popen([program("", "DDP_EXAMPLES", name), *words], env=environment(),
                                       stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=err)
            hangs = threading.Timer(DEADLINE, process.kill)
            hangs.start()
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            hangs.cancel()
            err.seek(0)
            said = err.read()
        self.assertEqual(process.returncode, code, said)
        self.assertLess(used.ru_maxrss / 1024, most_mb, said)
        return said

    def train(self, code, most_mb, *words):
        return self.refused(code, most_mb, "--data", self.directory, "--epochs", "1", *words)

    def test_a_small_gzip_file_does_not_unpack_to_a_gigabyte(self):
        zeros = gzip.compress(bytes(1 << 24))
        count = (1 << 30) // 784
        head = idx(8, (count, 28, 28), b"")
        rest = count * 784 - 63 * (1 << 24)
        os.remove(self.path("train-images-idx3-ubyte"))
        self.write("train-images-idx3-ubyte.gz", gzip.compress(head) + zeros * 63 + gzip.compress(bytes(rest)))
        said = self.train(1, 200)
        self.assertIn("DDP-E302", said)
        self.assertIn("more than 100 times", said)

    def test_a_short_weights_file_does_not_make_a_large_model(self):
        header = {"__metadata__": {"model": "mlp", "hidden": "100000"},
                  "0.weight": {"dtype": "F32", "shape": [6, 784], "data_offsets": [0, 18816]}}
        text = json.dumps(header).encode()
        self.write("claims.safetensors", struct.pack("<Q", len(text)) + text + bytes(18816))
        said = self.refused(1, 100, "--data", self.directory, "--load", self.path("claims.safetensors"), name="predict")
        self.assertIn("100000 hidden units", said)
        self.assertIn("0.weight", said)

    def test_more_threads_than_a_process_can_be_ranks(self):
        said = self.train(101, 100, "--ranks", "65537")
        self.assertIn("run_options.ranks is 65537", said)
        self.assertIn("at most 1024", said)

    def test_clipping_by_a_number_that_is_none(self):
        for value in ("nan", "-1", "inf", "-0.5"):
            said = self.train(2, 100, "--clip", value)
            self.assertIn("--clip takes a ", said)
            self.assertIn(f"not '{value}'", said)

    def test_layers_for_which_there_is_no_memory(self):
        for hidden, size in (("1000000000", "3.14e+03 GB"), (str(1 << 62), "GB")):
            said = self.train(100, 100, "--hidden", hidden)
            self.assertIn(f"a layer's 'weight' of {hidden} x 784 elements takes ", said)
            self.assertIn(size, said)

    def test_a_pipe_is_no_data_file(self):
        os.remove(self.path("train-labels-idx1-ubyte"))
        os.mkfifo(self.path("train-labels-idx1-ubyte"))
        self.assertIn("train-labels-idx1-ubyte: is not a regular file but a pipe", self.train(1, 100))
        said = self.refused(1, 100, "--text", self.path("train-labels-idx1-ubyte"), name="text_model")
        self.assertIn("is not a regular file", said)


if __name__ == "__main__":
    unittest.main()
