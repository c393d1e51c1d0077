"""Jobs that PyTorch's torchrun starts, as they are: with --standalone, with its c10d rendezvous, and with a static address.

TORCHRUN names it (else: on PATH, or in build/torch, where scripts/setup.sh torch puts it). Without it: skipped.
"""

import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import unittest

from jobs import SCALE, environment, program

ROOT = pathlib.Path(__file__).resolve().parents[2]
TORCHRUN = (os.environ.get("TORCHRUN") or shutil.which("torchrun") or
            shutil.which(str(ROOT / "build" / "torch" / "bin" / "torchrun")) or "")
FAULT_PROGRAM = program("FAULT_PROGRAM", "DDP_PROGRAMS", "fault_program")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Torchrun(unittest.TestCase):
    def start(self, *options):
        logs = tempfile.TemporaryDirectory()
        self.addCleanup(logs.cleanup)
        done = subprocess.run([TORCHRUN, *options, "--log-dir", logs.name, "--redirects", "3", "--no-python", FAULT_PROGRAM,
                               "steps=4", "tensors=3", "elements=1000"],
                              env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              timeout=120 * SCALE, check=False)
        said = {str(file.relative_to(logs.name)): file.read_text()
                for file in sorted(pathlib.Path(logs.name).rglob("*.log"))}
        self.assertEqual(done.returncode, 0, done.stderr[-3000:] + str(said))
        digests = re.findall(r"^done rank=(\d) digest=(\w+) steps=4", "\n".join(said.values()), re.M)
        return sorted(rank for rank, _ in digests), {digest for _, digest in digests}

    def test_standalone(self):
        ranks, digests = self.start("--standalone", "--nproc-per-node", "3")
        self.assertEqual(ranks, ["0", "1", "2"])
        self.assertEqual(len(digests), 1)

    def test_c10d_rendezvous(self):
        ranks, digests = self.start("--nnodes", "1", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint",
                                    f"localhost:{free_port()}", "--rdzv-id", "some job")
        self.assertEqual(ranks, ["0", "1"])
        self.assertEqual(len(digests), 1)

    def test_static_address(self):
        ranks, digests = self.start("--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port",
                                    str(free_port()))
        self.assertEqual(ranks, ["0", "1"])
        self.assertEqual(len(digests), 1)


if __name__ == "__main__":
    if not TORCHRUN:
        print("torchrun: skipped, for there is none here (scripts/setup.sh torch)")
        sys.exit(77)
    unittest.main()
