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

from jobs import SCALE, Job, environment, exit_code_of, program

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


def limited(words, limit, rank=1):
    # With one arena for all threads the C library's reserves, 64 MiB of address space for each thread, do not count.
    return ["sh", "-c", f'export MALLOC_ARENA_MAX=1; [ "$RANK" = {rank} ] && {limit}; exec "$@"', "sh", *words]


class NoRoom(unittest.TestCase):
    def refused(self, job, culprit, *patterns, sharing=r"[\d to,and]+"):
        job.wait()
        self.assertEqual([r.code for r in job.ranks.values()], [exit_code_of(r.error()) for r in job.ranks.values()], "an error, no signal\n" + job.story())
        texts = {r.error() for r in job.ranks.values()}
        self.assertEqual(len(texts), 1, job.story())
        text = texts.pop()
        self.assertRegex(text, rf"^DDP-E101 environment: rank {culprit} has no room for the memory that the ranks of its "
                         rf"host share \(ranks {sharing}\): \d+ MiB", job.story())
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
            self.assertEqual([r.code for r in job.ranks.values()], [206, 1], job.story())
            self.assertIn("the lamp fell over", job.ranks[0].error())

    def test_too_little_address_space(self):
        with Job(3, limited(elements(60), "ulimit -v 143360")) as job:
            self.refused(job, 1, "MiB of address space: Cannot allocate memory", "ulimit -v", sharing="0 to 2")

    def test_address_space_for_its_own_memory_but_not_for_that_of_all_others(self):
        with Job(3, limited(elements(60), "ulimit -v 225280")) as job:
            self.refused(job, 1, r": 6\d MiB of address space for another rank's: Cannot allocate memory\. Give it more memory "
                         r"\(ulimit -v", sharing="0 to 2")

    def on_one_of_two_hosts(self, mib, limit, *patterns):
        place = ["sh", "-c", Hosts.place, "sh"]
        for _ in range(4):  # here, too, whichever rank leaves first
            with Job(4, place + limited(elements(mib), limit, 3), {"HOSTS": "a,a,b,b"}) as job:
                self.refused(job, 3, *patterns, sharing="2 and 3")

    def test_a_container_of_one_rank_on_one_of_two_hosts(self):
        with Container(64 * MIB) as box:
            self.on_one_of_two_hosts(40, f"echo $$ > {box.path}/cgroup.procs", rf"\({box.name} is 64 MiB\)")

    def test_too_little_address_space_on_one_of_two_hosts(self):
        self.on_one_of_two_hosts(60, "ulimit -v 143360", "MiB of address space: Cannot allocate memory", "ulimit -v")
        self.on_one_of_two_hosts(60, "ulimit -v 194560", "MiB of address space for another rank's: Cannot allocate memory")


@unittest.skipIf(shutil.which("strace") is None, "no strace (scripts/setup.sh tests)")
class Interrupted(unittest.TestCase):
    """Before Linux 6.10 a signal, such as a profiler's, undoes an allocation in a file of memory."""

    def ends(self, when):
        tracer = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", "trace=fallocate", "-e", f"inject=fallocate:error=EINTR{when}"]
        command = [FAULT_PROGRAM, "tensors=8", "elements=20000", "handshake=5000"]
        with Job(2, command, {"ASAN_OPTIONS": os.environ.get("ASAN_OPTIONS", "") + ":detect_leaks=0"}, without=[1]) as job:
            job.command = tracer + command
            job.start(1)
            job.wait(30 * SCALE)
            return job.story(), [r.code for r in job.ranks.values()], [line["memory"] for r in job.ranks.values() for line in r.said("done")]

    def test_now_and_then(self):
        story, codes, memory = self.ends(":when=1+3")
        self.assertEqual((codes, memory), ([0, 0], ["shared", "shared"]), story)

    def test_always(self):
        story, codes, _ = self.ends("")
        self.assertIn("Interrupted system call", story)
        self.assertEqual(len(set(codes)), 1, story)


class Struck(unittest.TestCase):
    """A rank is killed or stopped wherever memory of its host is in use: nothing is left of that, not even by the rank."""

    phases = ("construct:0", "bind:0", "forward:2", "backward:2", "reduced:2", "stepping:2", "waiting:2", "between:2", "barrier:2",
              "allreduce:2", "broadcast:2", "array:2", "end:0")
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
            if phase.startswith("array") and len(set(hosts)) == 1:
                self.assertEqual({r.said("array")[0]["memory"] for r in job.ranks.values()}, {"shared"}, job.story())
            for rank in others:
                self.assertEqual(job.ranks[rank].code, exit_code_of(job.ranks[rank].error()), job.story())
                self.assertRegex(job.ranks[rank].error(), how, job.story())
            if kind == "stop":  # it still holds all that it had; afterwards it finds that the others are gone
                self.assertIsNone(job.ranks[struck].poll(), job.story())
                with open(f"/proc/{job.ranks[struck].pid}/maps") as maps:
                    self.assertIn("/memfd:", maps.read())
                os.kill(job.ranks[struck].pid, signal.SIGCONT)
                job.wait()
                self.assertEqual(job.ranks[struck].code, exit_code_of(job.ranks[struck].error()), job.story())
            else:
                self.assertEqual(job.ranks[struck].code, -signal.SIGKILL, job.story())
            self.assertEqual(job.left_behind(), [], job.story())

    def test_killed_or_stopped_in_every_phase(self):
        with Job(3, self.words) as job:
            job.wait()
            self.assertEqual({r.said("done")[0]["memory"] for r in job.ranks.values()}, {"shared"}, job.story())
            self.assertEqual({r.said("done")[0]["messages"] for r in job.ranks.values()}, {"memory"}, job.story())
            self.assertEqual(job.left_behind(), [])
        self.strike_all([((phase,), {}) for phase in self.phases] + [(("array:2", "array=100"), {})] +
                        [((phase, words), {}) for phase in self.passes for words in self.variants])

    def test_killed_or_stopped_on_one_of_two_hosts(self):
        self.strike_all([((phase,), {"struck": struck, "hosts": "aabb"}) for phase in (*self.passes, "array:2") for struck in (1, 2)] +
                        [((phase, words), {"struck": 1 + turn % 2, "hosts": "aabb"})
                         for words in self.variants for turn, phase in enumerate(self.passes)])

    def strike_all(self, cases):
        # Ranks mostly wait: for each other's heartbeats, and for those of a rank that is stopped.
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            struck = [(kind, words, how, pool.submit(self.strike, kind, *words, **how))
                      for words, how in cases for kind in ("stop", "kill")]
            for kind, words, how, result in struck:
                with self.subTest(kind=kind, words=words, **how):
                    result.result()


class Messages(unittest.TestCase):
    what_to_do = "Remove the cause, or set DDP_SHARE_MEMORY=0: then no ranks share memory, and this warning is not printed$"

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
        all_three = r"^ddp: ranks 0 to 2 are on one host and do not see each other's memory \(rank 0: ulimit -f: File too large\): "
        rings = self.once(3, "ulimit -f 100", words, all_three + r"all that they exchange goes over TCP\. " + self.what_to_do)
        arenas = self.once(3, "ulimit -f 8192", [*words, "elements=400000"],
                           all_three + r"3 ranks send messages instead of adding up in memory\. " + self.what_to_do)
        self.assertEqual(rings, shared)
        self.assertEqual(len(arenas), 1)


class Blind(unittest.TestCase):
    """Some ranks of a host do not see each other's memory: one line in the whole job, of rank 0, which names them."""

    lost = r"a descriptor was not let through: ulimit -n, or a sandbox"
    rings, arenas = "all that they exchange goes over TCP", r"\d ranks send messages instead of adding up in memory"

    def job(self, hosts, variables, *words):
        """What is printed on stderr, by rank, and what all say when they are done."""
        of_rank = lambda rank: {"DDP_HOST": hosts[rank], **variables.get(rank, {})}
        with Job(len(hosts), [FAULT_PROGRAM, "times=default", "steps=2", *words], of_rank) as job:  # nobody is late on purpose
            job.wait()
            self.assertEqual([r.code for r in job.ranks.values()], [0] * job.size, job.story())
            self.assertEqual(job.left_behind(), [], job.story())
            done = [r.said("done")[0] for r in job.ranks.values()]
            self.assertEqual(len({d["digest"] for d in done}), 1, job.story())
            return {rank: r.err.splitlines() for rank, r in job.ranks.items() if r.err}, done

    def expect_one_line(self, hosts, variables, who, ends, *words):
        nothing, shared = self.job(hosts, {}, *words)
        self.assertEqual(nothing, {})
        self.assertEqual({d["memory"] for d in shared}, {"shared"})
        said, done = self.job(hosts, variables, *words)
        self.assertEqual({rank: len(lines) for rank, lines in said.items()}, {0: 1}, said)
        self.assertRegex(said[0][0], f"^ddp: {who}: {ends}\\. {Messages.what_to_do}")
        self.assertEqual({d["memory"] for d in done}, {"own"})
        self.assertEqual(done[0]["digest"], shared[0]["digest"])

    def pair(self, a, b):
        return rf"ranks {a} and {b} are on one host and do not see each other's memory \(rank {b}: {self.lost}\)"

    def test_one_pair(self):
        self.expect_one_line("aaa", {1: {"BLIND_TO": "0"}}, self.pair(0, 1), self.rings)
        self.expect_one_line("aaa", {2: {"BLIND_TO": "1"}}, self.pair(1, 2), self.rings)

    def test_two_pairs(self):
        self.expect_one_line("aaaaa", {2: {"BLIND_TO": "1"}, 4: {"BLIND_TO": "3"}}, f"{self.pair(1, 2)}; {self.pair(3, 4)}",
                             self.rings)

    def test_on_a_host_without_rank_0(self):
        self.expect_one_line("abb", {2: {"BLIND_TO": "1"}}, self.pair(1, 2), self.rings)
        self.expect_one_line("aabb", {3: {"BLIND_TO": "2"}}, self.pair(2, 3), self.rings)

    def test_on_two_hosts(self):
        self.expect_one_line("aabb", {1: {"BLIND_TO": "0"}, 3: {"BLIND_TO": "2"}}, f"{self.pair(0, 1)}; {self.pair(2, 3)}",
                             self.rings)

    def test_one_rank_that_sends_none(self):
        self.expect_one_line("aaaa", {1: {"BLIND_SEND": "1"}}, "rank 1, on one host with ranks 0, 2 and 3, shares no memory with them "
                             r"\(rank 1: sendmsg: Operation not permitted\)", self.rings)

    def test_trainers_only(self):
        # Their memory is larger than the rings for messages, which all ranks see.
        lost = {2: {"BLIND_TO": "1", "BLIND_BYTES": str(4 * MIB)}}
        self.expect_one_line("aaa", lost, self.pair(1, 2), self.arenas, "elements=400000")
        self.expect_one_line("abb", lost, self.pair(1, 2), self.arenas, "elements=400000")
        nobody = {rank: {"BLIND_TO": "0,1,2", "BLIND_BYTES": str(4 * MIB)} for rank in range(3)}
        self.expect_one_line("aaa", nobody, rf"ranks 0 to 2 are on one host and do not see each other's memory \(rank 0: {self.lost}\)",
                             self.arenas, "elements=400000")

    def test_over_mpi(self):
        if not os.path.exists(FAULT_PROGRAM_MPI) or not MPIEXEC:
            self.skipTest("no MPI here")
        blind = '[ "${OMPI_COMM_WORLD_RANK:-$PMI_RANK}" = 2 ] && export BLIND_TO=1; exec "$@"'
        around = {**environment(), "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        ended = subprocess.run([MPIEXEC, "--oversubscribe", "-n", "3", "sh", "-c", blind, "sh", FAULT_PROGRAM_MPI, "times=default",
                                "steps=2", "apart=5000"], env=around, text=True, stdin=subprocess.DEVNULL, capture_output=True,
                               timeout=120 * SCALE, check=False)
        self.assertEqual(ended.returncode, 0, ended.stdout + ended.stderr)
        said = [line for line in ended.stderr.splitlines() if line.startswith("ddp:")]
        self.assertEqual(len(said), 1, ended.stderr)
        self.assertRegex(said[0], f"^ddp: {self.pair(1, 2)}: {self.arenas}\\. {Messages.what_to_do}")
        self.assertEqual(re.findall(r"^done rank=\d .* memory=(\w+)", ended.stdout, re.M), ["own"] * 3, ended.stdout)

    def test_containers_in_one_network_namespace(self):
        box = ["unshare", *([] if os.geteuid() == 0 else ["--map-root-user"]), "--mount", "--pid", "--ipc", "--uts", "--fork",
               "--mount-proc", "--kill-child"]
        if subprocess.run([*box, "true"], capture_output=True, check=False).returncode != 0:
            self.skipTest("no namespaces can be made here")
        with Job(3, [*box, FAULT_PROGRAM, "times=default", "steps=2"]) as job:
            job.wait()
            self.assertEqual([(r.code, r.err) for r in job.ranks.values()], [(0, "")] * 3, job.story())
            self.assertEqual({r.said("done")[0]["memory"] for r in job.ranks.values()}, {"shared"}, job.story())
            self.assertEqual({r.said("done")[0]["messages"] for r in job.ranks.values()}, {"memory"}, job.story())

    def test_a_group_without_the_rank_that_has_said_it(self):
        words = ["apart=1000000", "elements=400000"]
        self.expect_one_line("aaa", {2: {"BLIND_TO": "1"}}, self.pair(1, 2), self.rings, *words)
        self.expect_one_line("aaa", {2: {"BLIND_TO": "1", "BLIND_BYTES": str(4 * MIB)}}, self.pair(1, 2), self.arenas, *words)


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
            self.assertRegex(text, rf"memory={memory} messages={messages} here={here} host_messages={alone} processor=\d+$")
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
