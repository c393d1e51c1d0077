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
DDP_PERF = os.environ.get("DDP_PERF") or os.path.join(os.path.dirname(os.environ.get("DDPRUN", "")), "ddp-perf")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Torchrun(unittest.TestCase):
    def run_under(self, options, *command, agents=((),), works=True, **more):
        """What each rank has said, by the name of its log. `agents`: each one's own options."""
        logs = tempfile.TemporaryDirectory()
        self.addCleanup(logs.cleanup)
        running = [subprocess.Popen([TORCHRUN, *options, *own, "--log-dir", f"{logs.name}/{k}", "--redirects", "3", "--no-python", *command],
                                    env=environment(**more), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
                   for k, own in enumerate(agents)]
        for agent in running:
            self.addCleanup(agent.wait)
            self.addCleanup(agent.kill)
        errors = [agent.communicate(timeout=120 * SCALE)[1] for agent in running]
        said = {str(file.relative_to(logs.name)): file.read_text()
                for file in sorted(pathlib.Path(logs.name).rglob("*.log"))}
        for agent, error in zip(running, errors):
            self.assertEqual(agent.returncode == 0, works, error[-3000:] + str(said))
        return said

    def start(self, *options, **more):
        said = self.run_under(options, FAULT_PROGRAM, "steps=4", "tensors=3", "elements=1000", **more)
        digests = re.findall(r"^done rank=(\d) digest=(\w+) steps=4", "\n".join(said.values()), re.M)
        return sorted(rank for rank, _ in digests), {digest for _, digest in digests}

    def test_standalone(self):
        ranks, digests = self.start("--standalone", "--nproc-per-node", "3")
        self.assertEqual(ranks, ["0", "1", "2"])
        self.assertEqual(len(digests), 1)

    def test_ddp_perf_is_one_of_the_ranks(self):
        said = "\n".join(self.run_under(["--standalone", "--nproc-per-node", "2"], DDP_PERF, "allreduce", "-e", "64K", "-f", "128",
                                        "--iterations", "2", "--check").values())
        self.assertEqual(said.count("# ddp-perf "), 1, "rank 0 prints\n" + said)
        self.assertIn("2 ranks over tcp, messages through memory;", said)
        self.assertEqual(re.findall(r"^ +(\d+) .* 0$", said, re.M), ["4", "512", "65536"], said)

    def test_c10d_rendezvous_of_two_agents(self):
        options = ["--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}",
                   "--rdzv-id", "two agents"]
        # Agents name the host of rank 0 as --local-addr says, or else by this machine's name, which others may not know.
        ranks, digests = self.start(*options, agents=[("--local-addr", "127.0.0.1")] * 2)
        self.assertEqual(ranks, ["0", "1", "2", "3"])
        self.assertEqual(len(digests), 1)

    def test_static_address(self):
        ranks, digests = self.start("--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port",
                                    str(free_port()))
        self.assertEqual(ranks, ["0", "1"])
        self.assertEqual(len(digests), 1)

    def agents_at(self, address):
        """Options of two agents that start two ranks each."""
        meeting = ["--nnodes", "2", "--nproc-per-node", "2", "--master-addr", address, "--master-port", str(free_port())]
        return meeting, [("--node-rank", "0"), ("--node-rank", "1")]

    def test_two_agents(self):
        with tempfile.NamedTemporaryFile() as secret:
            secret.write(os.urandom(32).hex().encode())
            secret.flush()
            for more in ({}, {"DDP_SECRET_FILE": secret.name, "DDP_TLS": "1"}):
                options, agents = self.agents_at("127.0.0.1")
                ranks, digests = self.start(*options, agents=agents, **more)
                self.assertEqual(ranks, ["0", "1", "2", "3"])
                self.assertEqual(len(digests), 1)

    def test_a_rank_that_fails_ends_the_job_with_its_words_on_all(self):
        options, agents = self.agents_at("127.0.0.1")
        said = self.run_under(options, FAULT_PROGRAM, "steps=4", "tensors=3", "elements=1000", "fault=1:throw:forward:3",
                              agents=agents, works=False)
        verdicts = [text for name, text in said.items() if name.endswith("stderr.log") and "DDP-E206" in text]
        self.assertEqual(len(verdicts), 3, said)
        for text in verdicts:
            self.assertIn("rank 1 failed in its own code", text)
            self.assertIn("the lamp fell over", text)


if __name__ == "__main__":
    if not TORCHRUN:
        print("torchrun: skipped, for there is none here (scripts/setup.sh torch)")
        sys.exit(77)
    unittest.main()
