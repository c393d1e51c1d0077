"""Weights files against the reference implementation of the format: PyPI's safetensors reads what we write, we read what it
writes, both write the same bytes, and we accept no file that it refuses.

WEIGHTS_PROGRAM (or DDP_PROGRAMS, its directory) names our side. Where safetensors is neither installed nor to be had, the
test says SKIPPED and exits with 77.
"""

import importlib
import importlib.util
import json
import os
import random
import struct
import subprocess
import sys
import tempfile
import unittest

from jobs import environment, program

PROGRAM = program("WEIGHTS_PROGRAM", "DDP_PROGRAMS", "weights_program")
DEADLINE = 120.0


def provide(directory, *packages):
    """Imports the packages, installed below `directory` if they are not there."""
    missing = [p for p in packages if importlib.util.find_spec(p) is None]
    if missing:
        try:
            done = subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
                                   "--no-deps", "--only-binary", ":all:", "--retries", "1", "--timeout", "10",
                                   "--target", directory, *missing],
                                  stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DEADLINE, check=False)
            problem = "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        except subprocess.TimeoutExpired:
            problem = "no answer"
        if problem:
            print(f"SKIPPED: no {' and '.join(missing)} here, and pip cannot get it: {problem}")
            sys.exit(77)
        sys.path.insert(0, directory)
        importlib.invalidate_caches()
    return [importlib.import_module(p) for p in packages]


def ours(*words):
    done = subprocess.run([PROGRAM, *words], env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          timeout=DEADLINE, check=False)
    return done.returncode, done.stdout, done.stderr


class Safetensors(unittest.TestCase):
    def setUp(self):
        self.directory = tempfile.TemporaryDirectory()
        self.addCleanup(self.directory.cleanup)

    def path(self, name):
        return os.path.join(self.directory.name, name)

    def expected(self, dtype):
        """What the small model of our program holds."""
        values = (numpy.ones(8, dtype) / numpy.arange(1, 9).astype(dtype) - dtype(0.5)).astype(dtype)
        return {"0.weight": values[:6].reshape(2, 3), "0.bias": values[6:7], "scale ä": values[7:8].reshape(()),
                "none": numpy.zeros((0, 4), dtype), "batches": numpy.array(-7, numpy.int64),
                "mask": numpy.array([1, 0, 255], numpy.uint8)}

    def test_what_we_write_is_read_by_the_reference(self):
        for name, dtype in (("float", numpy.float32), ("double", numpy.float64)):
            path = self.path(name)
            self.assertEqual(ours("write", path, name), (0, "", ""))
            got = safetensors_numpy.load_file(path)
            wanted = self.expected(dtype)
            self.assertEqual(set(got), set(wanted))
            for key, value in wanted.items():
                self.assertEqual((got[key].dtype, got[key].shape), (value.dtype, value.shape), key)
                self.assertEqual(got[key].tobytes(), value.tobytes(), key)
            with safetensors.safe_open(path, "numpy") as file:
                metadata = file.metadata()
            self.assertEqual(list(metadata), ["ddp.version"])

            # Not only does it understand: of the same tensors it makes the same file.
            again = self.path(name + "-again")
            safetensors_numpy.save_file(got, again, metadata)
            with open(path, "rb") as a, open(again, "rb") as b:
                self.assertEqual(a.read(), b.read())

    def test_what_the_reference_writes_goes_into_our_model(self):
        for name, dtype in (("float", numpy.float32), ("double", numpy.float64)):
            path = self.path(name)
            wanted = self.expected(dtype)
            wanted["0.weight"] = numpy.arange(6).astype(dtype).reshape(2, 3) + dtype(0.25)
            safetensors_numpy.save_file(wanted, path, {"by": "Python"})
            code, out, err = ours("load", path, name)
            self.assertEqual((code, err), (0, ""))
            got = dict(line.rsplit(" ", 1) for line in out.splitlines())
            self.assertEqual(got, {key: value.tobytes().hex() for key, value in wanted.items()})
            other = "double" if name == "float" else "float"
            code, out, err = ours("load", path, other)
            self.assertEqual((code, out), (1, ""))
            kinds = ("F32", "F64") if name == "float" else ("F64", "F32")
            self.assertIn(f"'0.weight': {kinds[0]} [2 x 3] in the file, {kinds[1]} [2 x 3] in the model", err)

    def test_every_type_that_numpy_has(self):
        kinds = {"BOOL": "?", "U8": "u1", "I8": "i1", "I16": "<i2", "U16": "<u2", "F16": "<f2", "I32": "<i4", "U32": "<u4",
                 "F32": "<f4", "F64": "<f8", "I64": "<i8", "U64": "<u8"}
        arrays = {"t " + kind: numpy.arange(6).astype(code).reshape(1, 3, 2) for kind, code in kinds.items()}
        path = self.path("all")
        safetensors_numpy.save_file(arrays, path, {"who": "\"Zoë\"\t\\", "": "empty"})
        code, out, err = ours("show", path)
        self.assertEqual((code, err), (0, ""))
        lines = out.splitlines()
        wanted = {f"t {kind} {kind} [1, 3, 2] {arrays['t ' + kind].tobytes().hex()}" for kind in kinds}
        self.assertEqual(set(lines[:-2]), wanted)
        self.assertEqual(lines[-2:], [" = empty", "who = \"Zoë\"\t\\"])

    def test_we_accept_no_file_that_the_reference_refuses(self):
        header = json.dumps({"__metadata__": {"a": "ä"}, "w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
                             "n": {"dtype": "I64", "shape": [], "data_offsets": [24, 32]}}, ensure_ascii=False)
        whole = header.encode() + bytes(range(32))
        pieces = [b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"\\u00e4", b"0", b"9", b"-", b".5", b"e1", b" ", b"\n",
                  b"null", b"18446744073709551616", b"\xc3", b'"w":', b'"shape":[]', b'"data_offsets":[0,24]']
        draws = random.Random(5)
        paths = []
        for number in range(1500):
            content = bytearray(whole)
            length = len(header.encode())
            for _ in range(draws.randint(1, 3)):
                at = draws.randrange(length)
                kind = draws.randrange(4)
                if kind == 0:
                    content[at] = draws.randrange(256)
                elif kind == 1:
                    del content[at]
                    length -= 1
                elif kind == 2:
                    piece = draws.choice(pieces)
                    content[at:at] = piece
                    length += len(piece)
                elif content[at:at + 1].isdigit():
                    content[at:at + 1] = draws.choice(b"0123456789").to_bytes(1, "little")
            if draws.randrange(20) == 0:
                content = content[:draws.randrange(len(content))]
            if draws.randrange(20) == 0:
                length += draws.choice([-1, 1, 1 << 40])
            paths.append(self.path(str(number)))
            with open(paths[-1], "wb") as file:
                file.write(struct.pack("<Q", length) + content)
        code, out, err = ours("check", *paths)
        self.assertEqual((code, err), (0, ""))
        lines = out.splitlines()
        self.assertEqual(len(lines), len(paths))
        accepted = 0
        for path, line in zip(paths, lines):
            if line != "ok":
                self.assertRegex(line, "^DDP-E302 format: ")
                continue
            accepted += 1
            with safetensors.safe_open(path, "numpy") as file:  # throws if it refuses
                self.assertLessEqual(len(list(file.keys())), 3)
        self.assertGreater(accepted, 20)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as installed:
        numpy, safetensors = provide(installed, "numpy", "safetensors")
        safetensors_numpy = importlib.import_module("safetensors.numpy")
        unittest.main()
