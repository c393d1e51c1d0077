"""Ranks of one host that cannot have the memory which they would share, because of a container's limit, their address space
or the size of their files: an error on every rank, before the kernel kills one, or messages instead and one line that says so.

And ranks of several hosts, which one machine plays, over MPI.

FAULT_PROGRAM and FAULT_PROGRAM_MPI (or DDP_PROGRAMS, their directory) name the binaries, MPIEXEC the starter of the second. What
needs a memory cgroup, or MPI, is skipped, with the reason, where there is none.
"""

import concurrent.futures
import os
import pathlib
import re
import shutil
import signal
import subprocess
import time
import unittest

from jobs import SCALE, Job, environment, program

FAULT_PROGRAM = program("FAULT_PROGRAM", "DDP_PROGRAMS", "fault_program")
FAULT_PROGRAM_MPI = program("FAULT_PROGRAM_MPI", "DDP_PROGRAMS", "fault_program_mpi")
MPIEXEC = os.environ.get("MPIEXEC") or shutil.which("mpiexec") or ""
MIB = 1 << 20


class Container:
    """A memory cgroup with a limit, for as long as the block lasts. SkipTest where none can be made."""

    def __init__(self, limit):
        try:
            lines = pathlib.Path("/proc/self/mountinfo").read_text().splitlines()
        except OSError as problem:
            raise unittest.SkipTest(f"no cgroups: {problem}") from None
        reasons = []
        for line in lines:
            words, _, kind = line.partition(" - ")
            point, (system, _, options) = words.split()[4], kind.split()
            if system != "cgroup2" and (system != "cgroup" or "memory" not in options.split(",")):
                continue
            self.path = pathlib.Path(point, f"ddp-test-{os.getpid()}-{limit}")
            file = self.path / ("memory.max" if system == "cgroup2" else "memory.limit_in_bytes")
            try:
                self.path.mkdir()
            except OSError as problem:
                reasons.append(str(problem))
                continue
            try:
                if not file.exists():
                    raise OSError(f"{file} is not there: this hierarchy does not limit memory")
                file.write_text(str(limit))
                self.name = file.name
                swap = self.path / "memory.swap.max"
                if swap.exists():
                    swap.write_text("0")
                return
            except OSError as problem:
                reasons.append(str(problem))
                self.path.rmdir()
        raise unittest.SkipTest("no memory cgroup can be made here: " + ("; ".join(reasons) or "none is mounted"))

    def __enter__(self):
        return self

    def __exit__(self, *what):
        end = time.monotonic() + 5
        while True:
            try:
                return self.path.rmdir()
            except OSError:  # it is not empty until the last process has been waited for
                if time.monotonic() > end:
                    raise
                time.sleep(0.02)

    def command(self, *words):
        return ["sh", "-c", f'echo $$ > {self.path}/cgroup.procs && exec "$@"', "sh", *words]


def elements(mib):
    """Arguments for a model whose values and gradients are that large together. The program holds as much beside them."""
    return [FAULT_PROGRAM, "steps=2", "tensors=4", f"elements={mib * MIB // 8 // 4}", "bucket=4000000"]


def limited(words, limit):
    return ["sh", "-c", f'[ "$RANK" = 1 ] && {limit}; exec "$@"', "sh", *words]


class NoRoom(unittest.TestCase):
    def refused(self, job, culprit, *patterns):
        job.wait()
        self.assertEqual([r.code for r in job.ranks.values()], [1] * job.size, "an error, no signal\n" + job.story())
        texts = {r.error() for r in job.ranks.values()}
        self.assertEqual(len(texts), 1, job.story())
        text = texts.pop()
        self.assertRegex(text, rf"^DDP-E101 environment: rank {culprit} has no room for the memory that the ranks of its "
                         r"host share: \d+ MiB", job.story())
        for pattern in patterns:
            self.assertRegex(text, pattern)
        self.assertEqual(job.left_behind(), [])

    def test_a_container_with_too_little_for_all(self):
        with Container(160 * MIB) as box, Job(2, box.command(*elements(60))) as job:
            # Two models of 60 MiB fit, and nearly half of one arena.
            self.refused(job, "[01]", r"MiB: \d+ are missing and \d+ left", rf"\({box.name} is 160 MiB\)",
                         "Give it more memory")

    def test_a_container_of_one_rank(self):
        with Container(64 * MIB) as box:
            limit = f"echo $$ > {box.path}/cgroup.procs"
            for _ in range(4):  # the rank that leaves first must not hide the reason from the others
                with Job(3, limited(elements(40), limit)) as job:
                    self.refused(job, 1, rf"\({box.name} is 64 MiB\)")

    def test_a_container_that_is_large_enough(self):
        with Container(400 * MIB) as box, Job(2, box.command(*elements(60))) as job:
            job.wait()
            self.assertEqual([r.code for r in job.ranks.values()], [0, 0], job.story())
            self.assertEqual([r.err for r in job.ranks.values()], ["", ""])

    def test_no_room_for_a_copy_after_a_failure(self):
        # Values that others may still write are copied then, where there is room: 20 MiB on each of these ranks.
        with Container(200 * MIB) as box, Job(2, box.command(*elements(40), "fault=1:throw:reduced:2")) as job:
            job.wait()
            self.assertEqual([r.code for r in job.ranks.values()], [1, 1], job.story())
            self.assertIn("the lamp fell over", job.ranks[0].error())

    def test_too_little_address_space(self):
        with Job(3, limited(elements(60), "ulimit -v 160000")) as job:
            self.refused(job, 1, "MiB of address space: Cannot allocate memory", "ulimit -v")


class Struck(unittest.TestCase):
    """A rank is killed or stopped wherever memory of its host is in use: nothing is left of that, not even by the rank."""

    phases = ("construct:0", "bind:0", "forward:2", "backward:2", "reduced:2", "stepping:2", "waiting:2", "between:2", "barrier:2",
              "allreduce:2", "broadcast:2", "end:0")
    words = [FAULT_PROGRAM, "steps=3", "tensors=3"]

    # In the passes over the gradients: as they are reported, behind the gate of clipping, and with the optimizer on each rank.
    variants = ("releases=1", "clip=1", "update=replicated")
    passes = ("backward:2", "reduced:2", "stepping:2", "waiting:2")

    def strike(self, kind, phase, *words, struck=1, hosts="aaa"):
        how = {"kill": r"^DDP-E202 .*: rank %d is gone", "stop": r"^DDP-E203 .*: rank %d has sent nothing"}[kind] % struck
        others = [rank for rank in range(len(hosts)) if rank != struck]
        with Job(len(hosts), ["sh", "-c", Hosts.place, "sh", *self.words, *words, f"fault={struck}:{kind}:{phase}"],
                 {"HOSTS": ",".join(hosts)}) as job:
            job.wait(which=others if kind == "stop" else range(len(hosts)))
            for rank in others:
                self.assertEqual(job.ranks[rank].code, 1, job.story())
                self.assertRegex(job.ranks[rank].error(), how, job.story())
            if kind == "stop":  # it still holds all that it had; afterwards it finds that the others are gone
                self.assertIsNone(job.ranks[struck].poll(), job.story())
                with open(f"/proc/{job.ranks[struck].pid}/maps") as maps:
                    self.assertIn("/memfd:", maps.read())
                os.kill(job.ranks[struck].pid, signal.SIGCONT)
                job.wait()
                self.assertEqual(job.ranks[struck].code, 1, job.story())
            else:
                self.assertEqual(job.ranks[struck].code, -signal.SIGKILL, job.story())
            self.assertEqual(job.left_behind(), [], job.story())

    def test_killed_or_stopped_in_every_phase(self):
        with Job(3, self.words) as job:
            job.wait()
            self.assertEqual({r.said("done")[0]["memory"] for r in job.ranks.values()}, {"shared"}, job.story())
            self.assertEqual({r.said("done")[0]["messages"] for r in job.ranks.values()}, {"memory"}, job.story())
            self.assertEqual(job.left_behind(), [])
        self.strike_all([((phase,), {}) for phase in self.phases] +
                        [((phase, words), {}) for phase in self.passes for words in self.variants])

    def test_killed_or_stopped_on_one_of_two_hosts(self):
        self.strike_all([((phase,), {"struck": struck, "hosts": "aabb"}) for phase in self.passes for struck in (1, 2)])

    def strike_all(self, cases):
        # Ranks mostly wait: for each other's heartbeats, and for those of a rank that is stopped.
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            struck = [(kind, words, how, pool.submit(self.strike, kind, *words, **how))
                      for words, how in cases for kind in ("stop", "kill")]
            for kind, words, how, result in struck:
                with self.subTest(kind=kind, words=words, **how):
                    result.result()


class Messages(unittest.TestCase):
    def once(self, size, limit, words, pattern):
        with Job(size, ["sh", "-c", limit + '; exec "$@"', "sh", *words]) as job:
            job.wait()
            self.assertEqual([r.code for r in job.ranks.values()], [0] * size, job.story())
            said = [line for r in job.ranks.values() for line in r.err.splitlines()]
            self.assertEqual(len(said), 1, job.story())
            self.assertRegex(said[0], pattern)
            return {r.said("done")[0]["digest"] for r in job.ranks.values()}

    def test_said_once(self):
        words = [FAULT_PROGRAM, "steps=2"]
        with Job(3, words) as job:
            job.wait()
            self.assertEqual([r.err for r in job.ranks.values()], [""] * 3)
            shared = {r.said("done")[0]["digest"] for r in job.ranks.values()}
        self.assertEqual(len(shared), 1)
        # Not even the rings fit; rings fit and the arenas do not. The limits are counted in 512 bytes.
        rings = self.once(3, "ulimit -f 100", words, r"^ddp: ranks 0 and 1 are on one host and do not see each other's memory "
                          r"\(ulimit -f: File too large\): all that they exchange goes over TCP$")
        arenas = self.once(3, "ulimit -f 8192", [*words, "elements=400000"],
                           r"^ddp: the ranks of this host cannot see each other's memory \(ulimit -f: File too large\) and "
                           r"send messages instead$")
        self.assertEqual(rings, shared)
        self.assertEqual(len(arenas), 1)


class Hosts(unittest.TestCase):
    """DDP_HOST, over MPI and TCP: the bits are those of one host and of messages, wherever the ranks are."""

    words = ["steps=3", "tensors=3", "elements=30000"]
    place = 'export DDP_HOST=$(echo $HOSTS | cut -d, -f$((${RANK:-${OMPI_COMM_WORLD_RANK:-$PMI_RANK}} + 1))); exec "$@"'

    def result(self, out, size, hosts, memory, messages, inside):
        done = dict(re.findall(r"^done rank=(\d+) (.*)$", out, re.M))
        self.assertEqual(len(done), size, out)
        for rank, text in done.items():
            here = hosts.count(hosts[int(rank)])
            alone = "memory" if here == 1 and inside == "sockets" else inside  # nothing to send
            self.assertRegex(text, rf"memory={memory} messages={messages} here={here} host_messages={alone}$")
        digests = set(re.findall(r"digest=(\w+)", out))
        self.assertEqual(len(digests), 1, out)
        return digests.pop()

    def expect_warning(self, hosts, memory, said):
        """Once, where no two ranks of a host follow each other."""
        nothing_saved = memory == "shared" and len(set(hosts)) > 1 and all(a != b for a, b in zip(hosts, hosts[1:]))
        self.assertEqual(len(re.findall(r"^ddp: warning: ranks that follow each other are on different hosts", said, re.M)),
                         int(nothing_saved), said)

    def over_mpi(self, hosts, memory="shared", **variables):
        size = len(hosts)
        around = {**environment(HOSTS=",".join(hosts), **variables), "OMPI_ALLOW_RUN_AS_ROOT": "1",
                  "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        command = [MPIEXEC, "--oversubscribe", "-n", str(size), "sh", "-c", self.place, "sh", FAULT_PROGRAM_MPI, "times=default"]
        ended = subprocess.run([*command, *self.words], env=around, text=True, stdin=subprocess.DEVNULL, capture_output=True,
                               timeout=120 * SCALE, check=False)
        self.assertEqual(ended.returncode, 0, ended.stdout + ended.stderr)
        self.expect_warning(hosts, memory, ended.stderr)
        return self.result(ended.stdout, size, hosts, memory, "unknown", "unknown")

    def over_tcp(self, hosts, memory="shared", **variables):
        with Job(len(hosts), ["sh", "-c", self.place, "sh", FAULT_PROGRAM, *self.words],
                 {"HOSTS": ",".join(hosts), **variables}) as job:
            job.wait()
            self.assertEqual({r.code for r in job.ranks.values()}, {0}, job.story())
            shared = memory == "shared"
            self.expect_warning(hosts, memory, "".join(r.err for r in job.ranks.values()))
            messages = "sockets" if not shared else "memory" if len(set(hosts)) == 1 else "mixed"
            return self.result("".join(r.out for r in job.ranks.values()), job.size, hosts, memory, messages,
                               "memory" if shared else "sockets")

    def test_the_bits_do_not_depend_on_hosts(self):
        mpi = os.path.exists(FAULT_PROGRAM_MPI) and MPIEXEC
        for size, placements in ((3, ("abb", "aba")), (4, ("aabb", "abab", "aaab")), (5, ("aabbb", "abaab"))):
            by_messages = self.over_tcp("a" * size, "own", DDP_SHARE_MEMORY="0")
            self.assertEqual(self.over_tcp("a" * size), by_messages)
            for hosts in placements:
                with self.subTest(hosts=hosts):
                    self.assertEqual(self.over_tcp(hosts), by_messages)
                    if mpi:
                        self.assertEqual(self.over_mpi(hosts), by_messages)
        if not mpi:
            self.skipTest("no MPI here: over TCP only")


if __name__ == "__main__":
    unittest.main()
