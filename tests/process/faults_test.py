"""Ranks that die, freeze, throw, come late or do something else, over TCP on loopback: every other rank says the same, names
the right one, in time, and nothing hangs or is left behind.

FAULT_PROGRAM (or DDP_PROGRAMS, its directory) and DDPRUN name the binaries.
"""

import concurrent.futures
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
import unittest

import jobs
from jobs import (DEADLINE, SCALE, Rank, check_flight_records, check_process_named, environment, exit_code_of, listening_ports,
                  program)

FAULT_PROGRAM = program("FAULT_PROGRAM", "DDP_PROGRAMS", "fault_program")
DDPRUN = os.environ.get("DDPRUN", "")

# What fault_program sets by default, in seconds (ddp::timing::for_tests).
DEAD, JOIN = 1.5 * SCALE, 5.0 * SCALE
SOON = 0.5 * SCALE  # a death, an exception or a mismatch is known everywhere after this
TRIES = 3  # a measured time may be the machine's fault; what was said may not
MOMENTS = 16  # of two kills each: where a message is just then is chance, and mostly inside


class Slow(Exception):
    """Everything was right, but late."""


class Job(jobs.Job):
    """One whose ranks write flight records."""

    def __init__(self, size, command, variables=None, **more):
        self.records = tempfile.TemporaryDirectory(prefix="faults-")
        super().__init__(size, command, lambda rank: {
            "DDP_FLIGHT_DIR": self.records.name, **(variables(rank) if callable(variables) else variables or {})}, **more)

    def __exit__(self, *what):
        super().__exit__(*what)
        self.records.cleanup()


def command(*words):
    return [FAULT_PROGRAM, *words]


def seconds_to_error(job, rank):
    """From the last fault, or from when the rank came back from its own code if that was later, to its error."""
    struck = max(int(line["at"]) for r in job.ranks.values() for line in r.said("fault"))
    error = job.ranks[rank].said("error")[-1]
    return (int(error["at"]) - max(struck, int(error["since"]))) * 1e-9


class FaultCase(unittest.TestCase):
    verdict = ""  # the last that ranks agreed on

    def in_time(self, attempt):
        """Runs attempt(), again if it was only slow."""
        for left in reversed(range(TRIES)):
            try:
                return attempt()
            except Slow as slow:
                if left == 0:
                    self.fail(str(slow))
                print(f"{self.id()}: too slow, tried again ({left} left): {str(slow).splitlines()[0]}", flush=True)

    def agree(self, job, pattern, ranks, bound):
        """All of `ranks` threw the same text, which matches, within `bound` seconds, and ended."""
        texts = {r: job.ranks[r].error() for r in ranks}
        self.assertEqual(len(set(texts.values())), 1, f"not one verdict: {texts}\n{job.story()}")
        self.verdict = next(iter(texts.values()))
        self.assertRegex(self.verdict, pattern, job.story())
        for r in ranks:
            self.assertEqual(job.ranks[r].code, exit_code_of(self.verdict), job.story())
            self.assertIn(texts[r], job.ranks[r].err, "run_main says it too")
        check_flight_records(job.records.name, texts)
        check_process_named(job, self.verdict)
        self.assertEqual(job.left_behind(), [], "processes are left")
        late = {r: seconds_to_error(job, r) for r in ranks}
        if max(late.values()) > bound:
            raise Slow(f"seconds until the error came: {late}, allowed {bound}\n{job.story()}")

    def strike(self, size, faults, pattern, who, *words, bound=SOON, survivors=None, code=None, variables=None):
        """A job of `size` ranks in which `who` misbehave; all others agree. Returns the culprits' exit codes."""
        def attempt():
            with Job(size, command(*(f"fault={f}" for f in faults), *words), variables) as job:
                job.wait()
                others = survivors if survivors is not None else [r for r in range(size) if r not in who]
                self.agree(job, pattern, others, bound)
                codes = [job.ranks[r].code for r in who]
                if code is not None:
                    self.assertEqual(codes, [code] * len(who), job.story())
                return [job.ranks[r].error() for r in who]
        return self.in_time(attempt)


def gone(rank):
    return rf"^DDP-E202 peer closed: rank {rank} is gone\b"


class Killed(FaultCase):
    """Every phase, ranks of jobs of 2, 3 and 4; algorithms and update policies take turns, each in some of the phases."""

    turns = [("algorithm=auto",), ("algorithm=ring",), ("update=sharded",), ("algorithm=recursive_doubling",),
             ("share=0",), ("algorithm=direct", "bucket=8192"), ("update=replicated",), ("algorithm=naive",),
             ("algorithm=halving_doubling",), ("thread=rests",), ("thread=rests", "share=0")]

    def phase(self, name, step=3):
        where = [(2, 0), (3, 1), (4, 2), (4, 0)]
        for turn, (size, rank) in enumerate(where):
            words = self.turns[(2 * turn + len(name)) % len(self.turns)]
            with self.subTest(size=size, rank=rank, words=words):
                self.strike(size, [f"{rank}:kill:{name}:{step}"], gone(rank), [rank], *words, code=-signal.SIGKILL)

    def test_before_the_models_are_compared(self):
        self.phase("construct", 0)

    def test_between_construction_and_the_first_step(self):
        self.phase("bind", 0)

    def test_in_forward(self):
        self.phase("forward")

    def test_in_backward_between_two_reports(self):
        self.phase("backward")

    def test_between_two_ranges_of_one_gradient(self):
        # Buckets of 2,048 elements, ranges of 3,000 of 20,000: some buckets of the gradient travel already, and none is all of it.
        for size, rank, *words in ((2, 0, "bucket=8192", "share=0"), (3, 1, "bucket=8192", "update=sharded"),
                                   (3, 2, "share=0"), (4, 0, "bucket=8192")):
            with self.subTest(size=size, rank=rank, words=words):
                self.strike(size, [f"{rank}:kill:slice:3"], gone(rank), [rank], "slices=3000", *words,
                            code=-signal.SIGKILL)
                self.strike(size, [f"{rank}:throw:slice:3"],
                            rf"^DDP-E206 remote exception: rank {rank} failed in its own code.*: the lamp fell over \(rank \d: .*\)$",
                            [rank], "slices=3000", *words, code=1)

    def test_when_a_bucket_has_just_been_reduced(self):
        self.phase("reduced")

    def test_while_it_waits_inside_a_step(self):
        self.phase("waiting")

    def test_between_steps(self):
        self.phase("between")

    def test_inside_a_barrier(self):
        self.phase("barrier")

    def test_inside_an_allreduce(self):
        self.phase("allreduce")

    def test_inside_a_broadcast(self):
        self.phase("broadcast")

    def test_after_the_last_step(self):
        self.phase("end", 0)

    # One gradient in buckets of 8 MB, all of which are ready at once: the others are under way, in messages of 1 MB, when the first
    # is reduced.
    large = ("share=0", "algorithm=ring", "tensors=1", "elements=6000000", "bucket=8000000", "steps=2")
    paths = {"rings": {}, "sockets": {"DDP_SHARE_MEMORY": "0"}}

    def test_in_the_middle_of_a_large_message(self):
        for path, variables in self.paths.items():
            inside = []
            for turn in range(MOMENTS):
                for size, rank in ((2, 1), (3, 0)):
                    with self.subTest(path=path, size=size, rank=rank, turn=turn):
                        self.strike(size, [f"{rank}:kill:first_reduced:1"], gone(rank), [rank], *self.large,
                                    code=-signal.SIGKILL, variables=variables)
                        inside.append(", inside a message" in self.verdict)
                if any(inside):
                    break
                print(f"no rank was killed in the middle of a message, turn {turn + 1} of {MOMENTS}", flush=True)
            self.assertTrue(any(inside), f"through {path} no rank was killed in the middle of a message: {self.verdict}")

    def test_stopped_in_the_middle_of_a_large_message(self):
        for path, size, rank in (("rings", 3, 1), ("sockets", 2, 0), ("sockets", 3, 1)):
            def attempt(path=path, size=size, rank=rank):
                others = [r for r in range(size) if r != rank]
                with Job(size, command(f"fault={rank}:stop:first_reduced:1", *self.large), self.paths[path]) as job:
                    job.wait(which=others)
                    os.kill(job.ranks[rank].pid, signal.SIGCONT)
                    job.wait()
                    self.agree(job, rf"^DDP-E203 peer silent: rank {rank} has sent nothing", others, DEAD + SOON)
                    text = job.ranks[rank].error()  # it can read the verdict of the others unless each has left within a message
                    self.assertRegex(text, rf"^DDP-E203 peer silent: rank {rank} (has sent nothing,|was stopped for [0-9.]+ s in) ", job.story())
                    self.assertEqual(job.ranks[rank].code, exit_code_of(text), job.story())
                    check_flight_records(job.records.name, {rank: text})
                    check_process_named(job, text)
            with self.subTest(path=path, size=size, rank=rank):
                self.in_time(attempt)

    def test_with_a_bucket_of_each_exchange_under_way(self):
        for exchange in ("bfloat16", "half", "int8", "top_k", "random_k", "power_sgd"):
            with self.subTest(exchange=exchange):
                self.strike(3, ["1:kill:backward:3"], gone(1), [1], f"exchange={exchange}", code=-signal.SIGKILL)

    def test_by_a_crash(self):
        self.strike(3, ["1:segv:backward:2"], gone(1), [1])

    def test_two_at_once(self):
        for phase in ("forward", "backward", "waiting", "barrier"):
            with self.subTest(phase=phase):
                self.strike(4, [f"1:kill:{phase}:3", f"2:kill:{phase}:3"], gone("[12]"), [1, 2])

    def test_a_second_one_while_the_news_of_the_first_spreads(self):
        for pause in (40, 110, 250):
            with self.subTest(pause=pause):
                self.strike(4, ["1:kill:forward:3", f"2:sleep:forward:3:{pause}", "2:kill:forward:3"], gone("[12]"),
                            [1, 2], bound=2 * SOON)

    def test_all_but_one(self):
        self.strike(4, [f"{r}:kill:backward:2" for r in (0, 1, 3)], gone("[013]"), [0, 1, 3])


class Throws(FaultCase):
    def test_in_its_own_code(self):
        text = r"^DDP-E206 remote exception: rank {} failed in its own code.*: the lamp fell over \(rank \d: .*\)$"
        for phase, step in (("construct", 0), ("bind", 0), ("forward", 3), ("backward", 3), ("between", 3), ("end", 0)):
            for size, rank in ((2, 0), (3, 1), (4, 3)):
                with self.subTest(phase=phase, size=size, rank=rank):
                    own = self.strike(size, [f"{rank}:throw:{phase}:{step}"], text.format(rank), [rank], code=1)
                    self.assertEqual(own, ["the lamp fell over"])

    def test_while_large_messages_arrive(self):
        # Rank 1 hands rank 2 the last of rank 0's values and throws. Rank 2 still reads when rank 0 tells it so.
        for attempt in range(4):
            with self.subTest(attempt=attempt):
                self.strike(3, ["1:throw:bind:0"], r"^DDP-E206 remote exception: rank 1 failed in its own code", [1],
                            "tensors=3", "elements=1000000")

    @unittest.skipUnless(SCALE == 1, "sanitizers need memory")
    def test_without_memory_while_large_messages_are_under_way(self):
        # Half of a frame is written: the rest of it, and the record, need memory that must be there already.
        words = ("tensors=3", "elements=300000", "bucket=1000000", "algorithm=naive")
        for size, words in ((2, (*words, "share=0")), (3, (*words, "share=0")), (2, words)):
            with self.subTest(size=size, words=words):
                self.strike(size, ["1:memory:backward:1"], r"^DDP-E206 remote exception: rank 1 .*bad_alloc", [1], *words)

    def test_in_its_observer(self):
        for size, rank in ((2, 1), (3, 0)):
            with self.subTest(size=size, rank=rank):
                self.strike(size, [f"{rank}:throw:reduced:3"], f"E206 .*rank {rank} .*the lamp fell over",
                            [rank], bound=SOON)

    def test_two_at_once(self):
        # Both are in their own code when the first of them throws; without the pause one might hear of the other before.
        own = self.strike(4, [f"{rank}:{what}" for rank in (1, 3) for what in ("sleep:backward:3:300", "throw:backward:3")],
                          r"E206 .*rank [13] failed in its own code.*the lamp fell over", [1, 3], code=1)
        self.assertIn("the lamp fell over", own)

    def test_as_threads_of_one_process(self):
        with Job(1, command("transport=inproc", "ranks=3", "fault=1:throw:backward:3"),
                 {"RANK": None, "WORLD_SIZE": None, "MASTER_ADDR": None, "MASTER_PORT": None}) as job:
            job.wait()
            errors = sorted(line["text"] for line in job.ranks[0].said("error"))
            self.assertEqual(len(errors), 3, job.story())
            self.assertEqual(errors[0], errors[1])
            self.assertRegex(errors[0], r"^DDP-E206 .*rank 1 failed in its own code.*: the lamp fell over$")
            self.assertEqual(job.ranks[0].err.strip(), "the lamp fell over", "what began it is what ends the program")


class BetweenMeetings(FaultCase):
    """Ranks that step by themselves: inside a meeting, between two, and while sums of earlier steps are under way."""

    def test_killed(self):
        for size, rank, strategy, phase, step in ((3, 1, "averaging", "meeting", 4), (2, 0, "averaging", "forward", 3),
                                                  (4, 2, "gossip", "waiting", 3), (3, 0, "stale", "between", 5),
                                                  (3, 2, "diloco", "meeting", 2), (4, 1, "elastic", "meeting", 4),
                                                  (3, 1, "slow_momentum", "meeting", 4),
                                                  (4, 3, "gossip_ring", "waiting", 3),
                                                  # of ranks 0 and 1, or 2 and 3; and of all
                                                  (4, 0, "hierarchical", "meeting", 2), (4, 2, "hierarchical", "meeting", 6),
                                                  (3, 1, "hierarchical", "meet", 2), (4, 2, "hierarchical", "meeting", 4)):
            with self.subTest(size=size, rank=rank, strategy=strategy, phase=phase, step=step):
                self.strike(size, [f"{rank}:kill:{phase}:{step}"], gone(rank), [rank], f"strategy={strategy}",
                            code=-signal.SIGKILL)

    def test_stopped_for_good(self):
        for size, rank, strategy, phase, step in ((3, 1, "diloco", "meeting", 4), (3, 2, "stale", "backward", 5),
                                                  (4, 2, "hierarchical", "meeting", 2)):
            with self.subTest(size=size, rank=rank, strategy=strategy, phase=phase):
                def attempt():
                    with Job(size, command(f"fault={rank}:stop:{phase}:{step}", f"strategy={strategy}")) as job:
                        others = [r for r in range(size) if r != rank]
                        job.wait(which=others)
                        os.kill(job.ranks[rank].pid, signal.SIGKILL)
                        job.wait()
                        self.agree(job, rf"^DDP-E203 peer silent: rank {rank} has sent nothing", others, DEAD + SOON)
                self.in_time(attempt)

    def test_thrown(self):
        text = r"^DDP-E206 remote exception: rank {} failed in its own code.*: the lamp fell over \(rank \d: .*\)$"
        for size, rank, strategy, phase, step in ((3, 1, "averaging", "meet", 4), (4, 3, "gossip", "backward", 3),
                                                  (3, 0, "stale", "forward", 5), (4, 1, "hierarchical", "meet", 2),
                                                  (3, 2, "elastic", "meet", 2), (4, 0, "gossip_ring", "forward", 3)):
            with self.subTest(size=size, rank=rank, strategy=strategy, phase=phase):
                own = self.strike(size, [f"{rank}:throw:{phase}:{step}"], text.format(rank), [rank],
                                  f"strategy={strategy}", code=1)
                self.assertEqual(own, ["the lamp fell over"])


class LeavesEarly(FaultCase):
    def test_returning_in_good_order(self):
        for size, rank in ((2, 0), (2, 1), (3, 1), (4, 0), (4, 3)):
            with self.subTest(size=size, rank=rank):
                self.strike(size, [f"{rank}:return:between:3"],
                            rf"^DDP-E202 peer closed: rank {rank} exited cleanly", [rank], code=0)

    def test_calling_exit_is_no_good_order(self):
        for phase, step in (("construct", 0), ("forward", 3), ("backward", 3), ("between", 3)):
            for size, rank in ((2, 0), (3, 2)):
                with self.subTest(phase=phase, size=size, rank=rank):
                    self.strike(size, [f"{rank}:exit:{phase}:{step}"], gone(rank), [rank], code=0)


class Late(FaultCase):
    def late(self, kind, where):
        for size, rank, phase in where:
            with self.subTest(size=size, rank=rank, phase=phase):
                # Counted from the fault; the others may have begun to wait a little later. The late rank itself says
                # the same when it comes back.
                self.strike(size, [f"{rank}:{kind}:{phase}:3:1500"],
                            rf"^DDP-E204 deadline: rank {rank} did not take part in .* in time: .*; it is in "
                            rf"{'its own code' if phase == 'between' else f'{phase} of step 3'}\. Look", [],
                            "collective=600", bound=0.6 * SCALE + SOON, survivors=range(size))

    def test_asleep(self):
        self.late("sleep", ((2, 0, "between"), (2, 1, "forward"), (3, 0, "backward"), (3, 2, "between"), (4, 1, "forward")))

    def test_busy(self):
        self.late("spin", ((2, 1, "backward"), (3, 0, "between"), (4, 2, "forward")))

    def test_who_is_late_is_said_before_it_fails_the_job(self):
        alive = r"; send it \(pid \d+ on \S+, 127.0.0.1:\d+\) SIGUSR2 to see what it is doing. If nothing changes, the job fails after \d+.0 s \(timing.collective\)$"
        for phase, expected in (
                ("between", r"^ddp: rank 0 has waited \d+.\d s in step #3 for rank 1, which has not entered it. Rank 1 is alive and last "
                            r"entered \w+ \(1 operation earlier\); it is in its own code" + alive),
                ("backward", r"^ddp: rank 0 has waited \d+.\d s in step #3 for rank \d, which has entered it, too, and may wait for "
                             r"another. Rank (?:1 is alive; it is in backward of step 3|[02] is alive)" + alive)):
            def attempt(phase=phase, expected=expected):
                with Job(3, command(f"fault=1:sleep:{phase}:3:2000", "collective=60000", "straggler=700")) as job:
                    job.wait()
                    self.assertEqual([r.code for r in job.ranks.values()], [0] * 3, job.story())
                    said = {r: [line for line in job.ranks[r].err.splitlines() if "has waited" in line] for r in range(3)}
                    # After 0.7 s and after 1.4 s, by rank 0 alone, unless something else was slow as well.
                    if not said[0] or len(said[0]) > 2 or said[1] or said[2] or not re.search(expected, said[0][0]):
                        raise Slow(f"who is late was not said as expected: {said}")
            with self.subTest(phase=phase):
                self.in_time(attempt)

    def test_one_wait_is_told_of_each_time_it_has_doubled(self):
        def attempt():  # after 0.5 s, 1 s and 2 s, although half of `collective` has passed
            with Job(2, command("fault=1:sleep:between:3:3000", "collective=4000", "straggler=500")) as job:
                job.wait()
                said = [line for line in job.ranks[0].err.splitlines() if "has waited" in line]
                if any(r.code for r in job.ranks.values()) or len(said) != 3:
                    raise Slow(f"expected three lines: {said}\n{job.story()}")
        self.in_time(attempt)

    def test_the_signal_is_not_advised_where_ranks_are_threads(self):
        with Job(1, command("transport=inproc", "ranks=3", "fault=1:sleep:between:3:2000", "collective=60000", "straggler=700"),
                 {"RANK": None, "WORLD_SIZE": None, "MASTER_ADDR": None, "MASTER_PORT": None}) as job:
            job.wait()
            self.assertEqual(job.ranks[0].code, 0, job.story())
            self.assertRegex(job.ranks[0].err, r"(?m)^ddp: rank \d has waited \d+.\d s in step #3 for rank 1.* If nothing changes, the job fails")
            self.assertNotIn("SIGUSR2", job.ranks[0].err, "the signal would end all of them")

    def test_a_long_operation_is_waited_for_as_long_as_it_says(self):
        for words in ((), ("share=0", "algorithm=ring"), ("thread=rests",)):
            with self.subTest(words=words):
                with Job(3, command("fault=1:occupied:between:3:2500", "collective=700", "straggler=300", *words)) as job:
                    job.wait()
                    self.assertEqual([r.code for r in job.ranks.values()], [0] * 3, job.story())
                    self.assertRegex(job.ranks[0].err, r"(?m)^ddp: rank 0 has waited \d+.\d s in step #3 for rank 1, .*is alive and is in a long "
                                     r"operation, evaluation; send it \(pid \d+ .*\) SIGUSR2 .*\. Deadlines are extended until no rank is in a long operation; after that the job fails within ")
                # 1.5 s are granted: a deadline that passes then is the last one, 0.7 s later at most.
                self.strike(3, ["1:occupied:between:3:4000"], r"^DDP-E204 deadline: rank 1 did not take part in .* in time", [1],
                            "collective=700", "limit=1500", *words, bound=2.2 * SCALE + SOON, code=204)

    def test_late_but_in_time(self):
        with Job(3, command("fault=1:sleep:forward:2:400", "fault=2:spin:backward:3:400", "fault=0:sleep:between:4:400",
                            "collective=2500")) as job:
            job.wait()
            self.assertEqual([r.code for r in job.ranks.values()], [0, 0, 0], job.story())


class Idle(FaultCase):
    """Ranks that wait for one that is long in its own code sleep, whether or not there is a core for each."""

    @staticmethod
    def processor_seconds(rank):
        with open(f"/proc/{rank.pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def test_waiting_ranks_leave_the_processor_alone(self):
        for size, words in ((2, ()), (8, ()), (3, ("share=0", "thread=rests"))):
            with self.subTest(size=size, words=words):
                with Job(size, command("fault=1:sleep:between:2:2000", *words)) as job:
                    job.wait_for("fault", 1)
                    time.sleep(0.3)  # who was about to wait does
                    waiting = [r for r in range(size) if r != 1]
                    before = {r: self.processor_seconds(job.ranks[r]) for r in waiting}
                    time.sleep(1.2)
                    used = {r: self.processor_seconds(job.ranks[r]) - before[r] for r in waiting}
                    self.assertLess(max(used.values()), 0.1, used)  # eight that spin on two cores would take 0.3 each
                    job.wait()
                    self.assertEqual([r.code for r in job.ranks.values()], [0] * size, job.story())


class Frozen(FaultCase):
    def undisturbed(self, size, *words):
        with Job(size, command(*words)) as job:
            job.wait()
            return self.digest_of(job)

    def digest_of(self, job):
        done = [line for r in job.ranks.values() for line in r.said("done")]
        self.assertEqual(len(done), job.size, job.story())
        self.assertEqual({line["replicas"] for line in done}, {"identical"})
        self.assertEqual(len({line["digest"] for line in done}), 1, job.story())
        self.assertEqual([r.code for r in job.ranks.values()], [0] * job.size, job.story())
        return done[0]["digest"]

    def test_for_good(self):
        for size, rank, phase, *words in ((2, 1, "forward"), (3, 0, "backward"), (4, 2, "reduced"), (3, 1, "barrier"),
                                          (3, 2, "backward", "thread=rests")):
            with self.subTest(size=size, rank=rank, phase=phase, words=words):
                def attempt():
                    with Job(size, command(f"fault={rank}:stop:{phase}:3", *words)) as job:
                        others = [r for r in range(size) if r != rank]
                        job.wait(which=others)
                        os.kill(job.ranks[rank].pid, signal.SIGKILL)
                        job.wait()
                        self.agree(job, rf"^DDP-E203 peer silent: rank {rank} has sent nothing", others, DEAD + SOON)
                self.in_time(attempt)

    def test_and_thawed_it_says_the_same(self):
        for size, rank, phase in ((2, 0, "forward"), (3, 2, "backward"), (4, 1, "between"), (3, 0, "allreduce")):
            with self.subTest(size=size, rank=rank, phase=phase):
                def attempt():
                    with Job(size, command(f"fault={rank}:stop:{phase}:3:3500")) as job:
                        others = [r for r in range(size) if r != rank]
                        job.wait()
                        self.assertEqual(job.ranks[rank].error(), job.ranks[others[0]].error(), job.story())
                        self.assertEqual(job.ranks[rank].code, 203)
                        self.agree(job, rf"^DDP-E203 peer silent: rank {rank} has sent nothing", others, DEAD + SOON)
                        # It goes on 3.5 s after it was stopped, and finds out that the others have gone on without it.
                        thawed = int(job.ranks[rank].said("fault")[0]["at"]) * 1e-9 + 3.5 * SCALE
                        fenced = int(job.ranks[rank].said("error")[-1]["at"]) * 1e-9 - thawed
                        if fenced > SOON:
                            raise Slow(f"{fenced:.3f} s until the rank that was stopped said so, allowed {SOON}\n{job.story()}")
                self.in_time(attempt)

    def test_shortly_and_often_is_no_fault(self):
        expected = self.undisturbed(3)
        faults = [f"fault={r}:stop:{phase}:{step}:{length}"
                  for step, r, phase, length in ((1, 0, "forward", 300), (2, 1, "backward", 200), (2, 2, "between", 350),
                                                 (3, 1, "reduced", 250), (4, 0, "backward", 350), (5, 2, "forward", 300),
                                                 (6, 1, "barrier", 200))]
        def attempt():
            with Job(3, command("slices=3000", "suspect=140", *faults)) as job:  # and how gradients are reported changes no bit
                job.wait()
                self.assertEqual(self.digest_of(job), expected)
                self.assertNotRegex(job.ranks[2].err, "has heard nothing", "only the lowest other rank says so")
                for teller, peer in ((0, 1), (0, 2), (1, 0)):  # what was silent for longer than `suspect` is named and counted
                    found = re.findall(rf"(?m)^ddp: rank {teller} has heard nothing from rank {peer} \(pid {job.ranks[peer].pid} on .*\) for "
                                       r"\d+\.\d s \(silence number (\d+) of at least \d+\.\d s\)\. After \d+\.\d s \(timing\.dead\) the job fails$",
                                       job.ranks[teller].err)
                    if found[:2] != ["1", "2"]:  # a teller that does not run meanwhile hears of no silence
                        raise Slow(f"rank {teller} has told of the silences {found} of rank {peer}\n{job.story()}")
        self.in_time(attempt)

    def test_the_whole_job_at_once_is_no_fault(self):
        words = ("pause=15", "steps=40")
        expected = self.undisturbed(3, *words)
        with Job(3, command(*words)) as job:
            for rank in range(3):
                job.wait_for("start", rank)
            time.sleep(0.1)
            for signo in (signal.SIGSTOP, signal.SIGCONT):
                for rank in job.ranks.values():
                    os.kill(rank.pid, signo)
                time.sleep(1.3 * DEAD)
            job.wait()
            self.assertEqual(self.digest_of(job), expected)


class WallClock(FaultCase):
    """The system's time of day jumps by an hour, forwards and back again, a hundred times a second on some of the ranks. All waits use
    the monotonic clock."""

    jumping = """
        #include <dlfcn.h>
        #include <sys/time.h>
        #include <time.h>
        typedef int (*reader)(clockid_t, struct timespec*);
        int clock_gettime(clockid_t which, struct timespec* now) {
            static reader next;
            if (!next) next = (reader)dlsym(RTLD_NEXT, "clock_gettime");
            int const failed = next(which, now);
            if (!failed && which == CLOCK_REALTIME && now->tv_nsec / 5000000 % 2) now->tv_sec += 3600;
            return failed;
        }
        int gettimeofday(struct timeval* now, void* zone) {
            struct timespec precise;
            (void)zone;
            int const failed = clock_gettime(CLOCK_REALTIME, &precise);
            now->tv_sec = precise.tv_sec, now->tv_usec = precise.tv_nsec / 1000;
            return failed;
        }
        time_t time(time_t* now) {
            struct timespec precise;
            clock_gettime(CLOCK_REALTIME, &precise);
            return now ? *now = precise.tv_sec : precise.tv_sec;
        }
    """

    def test_that_jumps(self):
        with tempfile.TemporaryDirectory(prefix="faults-") as scratch:
            library = os.path.join(scratch, "jumping.so")
            subprocess.run(["cc", "-D_GNU_SOURCE", "-shared", "-fPIC", "-x", "c", "-o", library, "-", "-ldl"], input=self.jumping, text=True,
                           check=True, timeout=DEADLINE)
            jumps = {"LD_PRELOAD": library}
            hours = {int(subprocess.run(["date", "+%s"], env={**os.environ, **jumps}, capture_output=True, check=True,
                                        timeout=DEADLINE).stdout) // 1800 for _ in range(40)}
            self.assertGreater(len(hours), 1, "the clock does not jump")
            digests = set()
            for odd in ((), (1,), (0, 2), (0, 1, 2)):
                for words in (("share=0",), ()):
                    with Job(3, command("steps=60", "pause=10", *words), lambda rank: jumps if rank in odd else {}) as job:
                        job.wait()
                        self.assertEqual([r.code for r in job.ranks.values()], [0] * 3, job.story())
                        self.assertEqual({r.err for r in job.ranks.values()}, {""}, job.story())
                        digests |= {line["digest"] for r in job.ranks.values() for line in r.said("done")}
            self.assertEqual(len(digests), 1)
            # What has to be noticed is noticed in the same time.
            for fault, pattern, bound in (("1:kill:backward:3", gone(1), SOON),
                                          ("1:stop:backward:3", "^DDP-E203 .*rank 1 has sent nothing", DEAD + SOON)):
                def attempt():
                    with Job(3, command(f"fault={fault}"), jumps) as job:
                        job.wait(which=[0, 2])
                        os.kill(job.ranks[1].pid, signal.SIGKILL)
                        job.wait()
                        self.agree(job, pattern, [0, 2], bound)
                self.in_time(attempt)


class SomethingElse(FaultCase):
    """Ranks that do not do the same thing."""

    def everybody(self, faults, pattern, size, *words):
        self.strike(size, faults, pattern, [], *words, survivors=range(size))

    def test_another_model(self):
        for size, rank in ((2, 1), (3, 2), (4, 1)):
            self.everybody([f"{rank}:model:construct:0"],
                           rf"^DDP-E102 model differs: rank {rank} .*parameter #7 is 'w7' \[4 x 5000\] float on rank 0 "
                           rf"and 'w7' \[4 x 5001\] float on rank {rank}", size)
        self.everybody(["0:model:construct:0"], r"E102 .*rank 1 .*parameter #7 is 'w7' \[4 x 5001\]", 3)

    def test_other_settings(self):
        self.everybody(["1:rate:construct:0"], r"^DDP-E102 model differs: rank 1 .*optimizer or its settings", 3)

    def test_settings_on_which_no_result_depends(self):
        for size, odd, words, variables, said in (
                (2, [1], ["dead=2500"], {}, "timing.dead is 1500 ms on rank 0, 2500 ms on rank 1"),
                (3, [1, 2], ["straggler=700", "join=20000"], {"DDP_TCP_CONGESTION": "reno"},
                 "timing.straggler is 3000 ms on rank 0, 700 ms on rank 1, 700 ms on rank 2; timing.join is 5000 ms on rank 0, "
                 "20000 ms on rank 1, 20000 ms on rank 2; TCP congestion control is default on rank 0, reno on rank 1, reno on rank 2"),
                (3, [0], [], {"DDP_SHARE_MEMORY": "0"}, "path of messages within a host is TCP on rank 0, memory on rank 1, memory on rank 2"),
                (2, [0], ["thread=rests"], {}, "communication thread is rests on rank 0, drives on rank 1")):
            said = re.sub(r"(\d+) ms", lambda ms: f"{int(ms[1]) * SCALE} ms", said)
            with self.subTest(size=size, odd=odd, words=words), Job(size, command(), without=range(size)) as job:
                for rank in range(size):
                    job.command = command(*(words if rank in odd else []))
                    job.start(rank, **(variables if rank in odd else {}))
                job.wait()
                self.assertEqual([r.code for r in job.ranks.values()], [0] * size, job.story())
                self.assertIn(f"ddp: warning: ranks have different settings: {said}. No result depends on them", job.ranks[0].err)
                for rank in range(1, size):
                    self.assertNotIn("different settings", job.ranks[rank].err)

    def test_another_operation(self):
        for size in (2, 3, 4):
            self.everybody([f"{size - 1}:other:barrier:2"], r"^DDP-E205 mismatch: .*(allreduce.*barrier|barrier.*allreduce)",
                           size)

    def test_another_count(self):
        for size in (2, 3, 4):
            self.everybody(["1:count:allreduce:2"], r"^DDP-E205 mismatch: .*(9.*10|10.*9) double", size)

    def test_another_root(self):
        # Two roots of two ranks only send: the broadcast itself ends well, and what comes next tells.
        for size in (2, 3, 4):
            self.everybody(["1:root:broadcast:2"],
                           r"^DDP-E205 mismatch: .*(root (0.*root 1|1.*root 0)|different arguments, such as the root|another operation)",
                           size)
        # Everybody but ranks 2 and 3 is in the next step when they notice.
        self.everybody(["2:root:broadcast:2"], r"^DDP-E205 mismatch: .*broadcast", 4)

    def test_a_step_left_out(self):
        for size, rank in ((2, 1), (3, 0), (4, 2)):
            self.everybody([f"{rank}:skip:between:3"], r"^DDP-E205 mismatch: ", size, "collective=1000")

    def test_reports_of_backward(self):
        for kind, words in (("twice", "reported parameter #1 'w1' twice"), ("never", "never reported parameter #0 'w0'"),
                            ("stray", "reported parameter #15, but the model has 8")):
            for size, rank in ((2, 0), (3, 1)):
                with self.subTest(kind=kind, size=size):
                    with Job(size, command(f"fault={rank}:{kind}:backward:2")) as job:
                        job.wait()
                        texts = {job.ranks[r].error() for r in range(size)}
                        self.assertEqual(len(texts), 1, job.story())
                        self.assertRegex(texts.pop(), rf"^DDP-E103 gradient: rank {rank}: backward .*{words}")

    def test_no_samples(self):
        everybody = [f"fault={r}:empty:between:2" for r in range(3)]
        with Job(3, command(*everybody)) as job:
            job.wait()
            texts = {job.ranks[r].error() for r in range(3)}
            self.assertEqual(len(texts), 1, job.story())
            self.assertRegex(texts.pop(), "^DDP-E104 no samples: .*empty on every rank")
        with Job(3, command(*everybody[1:])) as job:
            job.wait()
            self.assertEqual([r.code for r in job.ranks.values()], [0, 0, 0], job.story())


class ComingTogether(FaultCase):
    def test_a_rank_that_never_starts(self):
        for size, missing in ((2, [1]), (4, [1, 3])):
            with self.subTest(size=size):
                begin = time.monotonic()
                with Job(size, command("join=1200"), without=missing) as job:
                    job.wait()
                    texts = {r.error() for r in job.ranks.values()}
                    self.assertEqual(len(texts), 1, job.story())
                    check_flight_records(job.records.name, {r: job.ranks[r].error() for r in job.ranks})
                    who = ", ".join(map(str, missing))
                    self.assertRegex(texts.pop(), rf"^DDP-E201 rendezvous: ranks \{{{who}\}} never joined "
                                                  rf"\({size - len(missing)} of {size} present after \d.* s\)")
                self.assertLess(time.monotonic() - begin, (1.2 + 3) * SCALE)

    def test_rank_0_that_never_starts(self):
        for size in (2, 4):
            with self.subTest(size=size), Job(size, command("join=1000"), without=[0], inherit=False) as job:
                job.wait((1.0 + 4) * SCALE)
                for rank, process in job.ranks.items():
                    self.assertRegex(process.error(),
                                     rf"^DDP-E201 .*rank {rank} cannot reach rank 0 at 127.0.0.1:{job.port} .*refused")

    def test_a_rank_started_twice_is_refused_and_the_job_goes_on(self):
        spent = []
        for size, rank in ((3, 1), (4, 2), (4, 1)):  # of two ranks, rank 1 would complete the job
            with self.subTest(size=size, rank=rank), Job(size, command(), without=[size - 1]) as job:
                came = time.monotonic()
                twin = job.start(rank, "twin")
                end = came + DEADLINE
                while all([job.ranks[rank].poll() is None, twin.poll() is None]) and time.monotonic() < end:
                    time.sleep(0.01)
                refused, held = (job.ranks[rank], twin) if job.ranks[rank].code is not None else (twin, job.ranks[rank])
                spent.append(refused.ended - came)
                self.assertEqual(refused.code, 201, job.story())
                self.assertRegex(refused.error(),
                                 rf"^DDP-E201 .*rank {rank} \(pid {refused.pid} .* connected a second time: pid {held.pid} ")
                job.start(size - 1)
                job.wait()
                self.assertEqual([r.code for r in job.ranks.values() if r is not refused], [0] * size, job.story())
        self.assertLess(min(spent), 1 * SCALE, "its start included")

    def test_a_rank_started_again_when_all_have_met(self):
        for size in (2, 3, 4):
            with self.subTest(size=size), Job(size, command("pause=50", "steps=30", "join=1000")) as job:
                for rank in range(size):
                    job.wait_for("start", rank)
                late = job.start(size - 1, "late")
                job.wait()
                self.assertEqual([job.ranks[rank].code for rank in range(size)], [0] * size, job.story())
                self.assertEqual(late.code, 201, job.story())
                self.assertRegex(late.error(), rf"^DDP-E201 .*cannot reach rank 0 .*started twice, or with a larger WORLD_SIZE \({size}\)")

    def test_a_rank_that_dies_while_others_are_awaited(self):
        for size, rank in ((3, 1), (4, 2)):
            with self.subTest(size=size), Job(size, command(), without=[size - 1]) as job:
                end = time.monotonic() + DEADLINE
                others = [r for r in range(size - 1) if r != rank]
                while not all(listening_ports(r.pid) for r in job.ranks.values()) and time.monotonic() < end:
                    time.sleep(0.01)
                os.kill(job.ranks[rank].pid, signal.SIGKILL)
                job.wait(JOIN)
                for r in others:
                    self.assertRegex(job.ranks[r].error(), rf"^DDP-E201 .*rank {rank} \(pid .*ended during start-up")
                check_flight_records(job.records.name, {r: job.ranks[r].error() for r in others})

    def test_over_ipv6(self):
        try:
            with socket.socket(socket.AF_INET6) as probe:
                probe.bind(("::1", 0))
        except OSError as problem:
            self.skipTest(f"no IPv6 here: {problem}")
        over_v6, digests = {"MASTER_ADDR": "::1", "DDP_SHARE_MEMORY": "0"}, set()
        for variables in ({"DDP_SHARE_MEMORY": "0"}, over_v6):
            with Job(3, command(), variables, inherit="MASTER_ADDR" not in variables) as job:
                job.wait()
                self.assertEqual([r.code for r in job.ranks.values()], [0] * 3, job.story())
                digests |= {line["digest"] for r in job.ranks.values() for line in r.said("done")}
        self.assertEqual(len(digests), 1)

        def attempt():
            with Job(3, command("fault=1:kill:backward:3"), over_v6, inherit=False) as job:
                job.wait()
                self.agree(job, gone(1), [0, 2], SOON)
                self.assertIn("[::1]:", self.verdict)
        self.in_time(attempt)

    def test_world_sizes_that_differ(self):
        for size in (2, 3, 4):
            with self.subTest(size=size):
                last = size - 1
                with Job(size, command(), lambda rank: {"WORLD_SIZE": str(size + 1)} if rank == last else {}) as job:
                    job.wait()
                    texts = {job.ranks[r].error() for r in range(size)}
                    self.assertEqual(len(texts), 1, job.story())
                    self.assertRegex(texts.pop(), rf"^DDP-E201 .*rank {last} .*WORLD_SIZE {size + 1}, rank 0 has {size}")

    def test_a_port_in_use(self):
        with socket.socket() as holder:
            holder.bind(("127.0.0.1", 0))
            holder.listen(16)
            port = holder.getsockname()[1]
            for size in (2, 4):
                with self.subTest(size=size), Job(size, command("join=1000"), inherit=False, port=port) as job:
                    job.wait()
                    self.assertRegex(job.ranks[0].error(), rf"^DDP-E201 .*port {port} is in use by another program on "
                                     rf"127.0.0.1:{port} \(pid {os.getpid()}, [^)]+\), or by another process")
                    for rank in range(1, size):
                        self.assertRegex(job.ranks[rank].error(), rf"^DDP-E201 .*127.0.0.1:{port} .*MASTER_PORT")

    def test_an_environment_that_makes_no_sense(self):
        right = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        wrong = [({"MASTER_PORT": None, "MASTER_ADDR": None}, "RANK, WORLD_SIZE set, but not MASTER_ADDR, MASTER_PORT"),
                 ({"RANK": None}, "WORLD_SIZE, MASTER_ADDR, MASTER_PORT set, but not RANK"),
                 ({"RANK": None, "WORLD_SIZE": None}, "set, but not RANK, WORLD_SIZE"),
                 ({"RANK": "2"}, r'RANK is "2"; expected a rank below WORLD_SIZE \(2\)'),
                 ({"RANK": "-1"}, 'RANK is "-1"'), ({"RANK": "one"}, 'RANK is "one"'), ({"RANK": "1 "}, 'RANK is "1 "'),
                 ({"RANK": ""}, 'RANK is ""'), ({"WORLD_SIZE": "0"}, 'WORLD_SIZE is "0"'),
                 ({"WORLD_SIZE": "2.0"}, 'WORLD_SIZE is "2.0"'), ({"WORLD_SIZE": "99999999999"}, 'WORLD_SIZE is "99999999999"'),
                 ({"MASTER_PORT": "65536"}, 'MASTER_PORT is "65536"'), ({"MASTER_PORT": "http"}, 'MASTER_PORT is "http"'),
                 ({"MASTER_ADDR": ""}, "MASTER_ADDR is empty"), ({"LOCAL_RANK": "x"}, 'LOCAL_RANK is "x"'),
                 ({"DDP_TIMEOUT_DEAD": "soon"}, 'DDP_TIMEOUT_DEAD is "soon"'),
                 ({"DDP_COMMUNICATION_THREAD": "sleeps"}, 'DDP_COMMUNICATION_THREAD is "sleeps"')]
        for change, pattern in wrong:
            with self.subTest(change=change):
                variables = {k: v for k, v in {**right, **change}.items() if v is not None}
                # Before any socket: it need not wait for anybody.
                done = subprocess.run(command("join=60000"), env=environment(**variables), capture_output=True, text=True,
                                      timeout=DEADLINE / 2, check=False)
                self.assertEqual(done.returncode, 101)
                self.assertRegex(done.stderr, f"^DDP-E101 environment: .*{pattern}")

    def test_an_address_beyond_this_host_wants_to_be_asked_for(self):
        env = environment(RANK="0", WORLD_SIZE="2", MASTER_ADDR="192.0.2.1", MASTER_PORT="29500")
        done = subprocess.run(command(), env=env, capture_output=True, text=True, timeout=DEADLINE, check=False)
        self.assertRegex(done.stderr, "^DDP-E201 .*192.0.2.1.* which other hosts can reach.*set DDP_INSECURE=1, "
                         "run_options.insecure")


class FewDescriptors(FaultCase):
    """One rank starts under `ulimit -n`. Each socket, and the memory of the host, may be the one too many."""

    # How many of rank 1, and of rank 0, which also serves the others, are too few to tell anybody; and how many are enough.
    silent = {1: (4, 6), 0: (4, 8)}
    too_few = {1: (7, 8, 9, 10, 12), 0: (10, 11, 13, 14, 15, 16)}
    # What that rank then cannot open.
    missing = {(1, 4): "any socket", (1, 6): "a socket to rank 0 at ", (1, 7): "a socket for the other ranks",
               (1, 8): "a socket to rank 0 (", (1, 9): "the sockets of rank 2 (", (1, 12): "the memory that ranks of this host share",
               (0, 4): "any socket", (0, 8): "what serves the other ranks"}
    either = ("the sockets of all ranks", "a socket to rank 0 at ")  # of rank 0 with 10: what comes first

    def limited(self, rank, count, secret):
        words = ("steps=2", "tensors=3", "elements=400")
        with Job(3, command(*words), without=[rank], inherit=False,
                 variables={"DDP_SECRET_FILE": secret} if secret else {}) as job:
            job.command = ["bash", "-c", f'ulimit -n {count}; exec "$0" "$@"', *command(*words)]
            begin = time.monotonic()
            limited = job.start(rank)
            told = range(3) if count in self.too_few[rank] else [rank]
            job.wait(which=told)
            seconds, story = time.monotonic() - begin, f"ulimit -n {count} on rank {rank}\n{job.story()}"
            texts = {job.ranks[r].error() for r in told}
            self.assertEqual(len(texts), 1, story)
            self.assertRegex(texts.pop(), rf"^DDP-E201 .*rank {rank} on host .* cannot open .*Too many open files. Its limit is "
                                          rf"{count} descriptors \(ulimit -n\).*needs up to \d+ .*: ulimit -n 1024$", story)
            self.assertNotIn("firewall", limited.error(), story)
            self.assertEqual({job.ranks[r].code for r in told}, {201}, story)
            missing = self.either if (rank, count) == (0, 10) else (self.missing.get((rank, count), ""),)
            self.assertTrue(any(" cannot open " + what in limited.error() for what in missing), story)
            return seconds

    def test_all_ranks_hear_of_the_limit_at_once(self):
        with tempfile.TemporaryDirectory() as scratch, concurrent.futures.ThreadPoolExecutor(4) as pool:
            secret = os.path.join(scratch, "secret")
            with open(os.open(secret, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
                file.write(os.urandom(32))
            cases = [(rank, count, secret if proves else None) for rank in (1, 0)
                     for count in (*self.silent[rank], *self.too_few[rank]) for proves in (False, True)]
            seconds = list(pool.map(lambda case: self.limited(*case), cases))
        self.assertLess(max(seconds), JOIN / 2, dict(zip(cases, seconds)))

    def test_what_is_needed_is_enough(self):
        for rank, needed, memory in ((1, 14, "1"), (0, 21, "1"), (1, 10, "0"), (0, 16, "0")):
            with self.subTest(rank=rank, memory=memory):
                with Job(3, command("steps=2"), without=[rank], inherit=False, variables={"DDP_SHARE_MEMORY": memory}) as job:
                    job.command = ["bash", "-c", f'ulimit -n {needed}; exec "$0" "$@"', *command("steps=2")]
                    job.start(rank)
                    job.wait()
                    self.assertEqual([(r.code, r.err) for r in job.ranks.values()], [(0, "")] * 3, job.story())


@unittest.skipUnless(SCALE == 1, "sanitizers need memory")
class LittleMemory(FaultCase):
    def test_a_rank_that_starts_under_a_limit_is_named(self):
        """One rank starts under `ulimit -v`, less each time, until its libraries cannot be loaded."""
        failed = 0
        for mebibytes in range(64, 0, -2):
            with self.subTest(mebibytes=mebibytes), Job(3, command("steps=2", "join=2500"), without=[1], inherit=False) as job:
                job.command = ["sh", "-c", f"ulimit -v {mebibytes << 10}; exec {FAULT_PROGRAM} steps=2 join=2500"]
                job.start(1)
                job.wait()
                codes = [job.ranks[r].code for r in range(3)]
                if codes[1] == 127:
                    break
                texts = {job.ranks[r].error() for r in (0, 2)}
                self.assertEqual(job.left_behind(), [], "processes are left")
                if codes == [0, 0, 0]:
                    continue
                failed += 1
                self.assertNotIn(0, codes, job.story())
                self.assertEqual(len(texts), 1, job.story())
                self.assertRegex(min(texts), r"^DDP-E\d+ [a-z ]+: (rank 1\b|ranks \{1\} never joined)", job.story())
                self.assertNotIn("exited cleanly", min(texts), job.story())
                self.assertRegex(job.ranks[1].err, "memory", job.story())
        self.assertGreater(failed, 2)


class Strangers(FaultCase):
    """Whoever else connects is dropped; the job comes together all the same, and listens no longer than it must."""

    garbage = [b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", b"\0" * 4096, bytes(range(256)) * 40, b"!", b"\xff" * 96]

    def pester(self, port, silent):
        sockets = []
        for text in [*self.garbage, *[b""] * silent]:
            s = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE)
            if text:
                try:
                    s.sendall(text)
                except OSError:
                    pass  # dropped already
            sockets.append(s)
        return sockets

    def test_at_the_rendezvous(self):
        listener_first = Job(3, command(), without=[0, 1, 2])
        with listener_first as job:
            strangers = self.pester(job.port, 40)  # before rank 0 has begun to serve
            job.start(0)
            job.start(1)
            strangers += self.pester(job.port, 90)
            job.start(2)
            job.wait()
            self.assertEqual([r.code for r in job.ranks.values()], [0, 0, 0], job.story())
            for s in strangers:
                s.close()

    def test_at_the_port_of_a_rank(self):
        with Job(3, command(), without=[2]) as job:
            strangers = []
            for rank in (0, 1):
                own = []
                end = time.monotonic() + DEADLINE
                while not own and time.monotonic() < end:
                    own = [p for p in listening_ports(job.ranks[rank].pid) if p != job.port]
                    time.sleep(0.01)
                self.assertEqual(len(own), 1, job.story())
                strangers += self.pester(own[0], 70)
            job.start(2)
            job.wait()
            self.assertEqual([r.code for r in job.ranks.values()], [0, 0, 0], job.story())
            for s in strangers:
                s.close()

    def test_the_ranks_of_one_machine_listen_on_loopback_only(self):
        with Job(3, command(), without=[2], inherit=False) as job:
            end = time.monotonic() + DEADLINE
            while len(found := listening_ports(job.ranks[0].pid) + listening_ports(job.ranks[1].pid)) < 3 and time.monotonic() < end:
                time.sleep(0.01)
            rows = []
            for table in filter(os.path.exists, ("/proc/net/tcp", "/proc/net/tcp6")):  # a kernel may lack IPv6
                with open(table) as lines:
                    rows += [line.split() for line in lines.readlines()[1:]]
            places = [row[1] for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) in found]
            self.assertEqual({place.partition(":")[0] for place in places}, {"0100007F"}, f"{found}: {places}")
            self.assertEqual(len(places), 3, "the rendezvous, and a port of each rank")
            job.start(2)
            job.wait()
            self.assertEqual([r.code for r in job.ranks.values()], [0, 0, 0], job.story())

    def test_nobody_listens_once_all_have_met(self):
        with Job(3, command("fault=0:sleep:between:1:700")) as job:
            job.wait_for("fault", 0)
            self.assertEqual([listening_ports(r.pid) for r in job.ranks.values()], [[], [], []])
            job.wait()
            self.assertEqual([r.code for r in job.ranks.values()], [0, 0, 0], job.story())


@unittest.skipUnless(DDPRUN, "DDPRUN names no launcher")
class UnderTheLauncher(FaultCase):
    def launch(self, size, *words):
        return Rank([DDPRUN, "-n", str(size), "--", *command(*words)], environment(), start_new_session=True).finish()

    def test_the_rank_that_was_killed_is_named_last(self):
        code, out, err = self.launch(3, "fault=1:kill:backward:3")
        self.assertEqual(code, 128 + signal.SIGKILL, out + err)
        summary = err[err.rindex("\nddprun: "):]
        self.assertRegex(summary, r"^\nddprun: rank 1\b.*SIGKILL")
        for rank in (0, 2):
            self.assertRegex(err, rf"(?m)^\[{rank}\] DDP-E202 peer closed: rank 1 is gone")

    def test_the_rank_that_threw_is_named_last(self):
        code, out, err = self.launch(3, "fault=2:throw:forward:3")
        self.assertEqual(code, 1, out + err)
        self.assertRegex(err, r"(?m)^\[2\] the lamp fell over")
        self.assertRegex(err, r"(?m)^\[0\] DDP-E206 remote exception: rank 2 ")

    def test_a_good_end(self):
        code, out, err = self.launch(4)
        self.assertEqual((code, err), (0, ""), out)
        self.assertEqual(len(set(re.findall(r"digest=(\w+)", out))), 1)


if __name__ == "__main__":
    unittest.main()
