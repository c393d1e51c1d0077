"""Ranks that are killed or stopped at their n-th system call of a kind while the job comes together: the others name that
rank, in time, and nothing hangs; half of the jobs have a secret. Strangers that connect meanwhile change nothing. Needs strace.

FAULT_PROGRAM (or DDP_PROGRAMS, its directory) and DDPRUN name the binaries. DDP_TEST_EVERY=1 takes every call instead of a sample.
"""

import concurrent.futures
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import unittest
from signal import SIGKILL

from jobs import DEADLINE, SCALE, Job, Rank, environment, program

FAULT_PROGRAM = program("FAULT_PROGRAM", "DDP_PROGRAMS", "fault_program")
DDPRUN = os.environ.get("DDPRUN", "")
SIZE = 3
DEAD, JOIN = 2 * SCALE, 5 * SCALE
# Leaks cannot be looked for under ptrace.
TIMES = {"DDP_TIMEOUT_DEAD": str(DEAD), "DDP_TIMEOUT_JOIN": str(JOIN),
         "ASAN_OPTIONS": os.environ.get("ASAN_OPTIONS", "") + ":detect_leaks=0"}
CALLS = ("socket", "bind", "listen", "connect", "accept", "accept4", "sendto", "sendmsg", "recvfrom", "recvmsg", "poll",
         "ppoll", "getsockopt", "setsockopt", "getsockname", "clone3", "close")


def ptrace_works():
    strace = shutil.which("strace")
    if strace is None:
        return "strace is not installed (scripts/setup.sh tests)"
    trial = subprocess.run([strace, "-o", "/dev/null", "true"], stderr=subprocess.PIPE, text=True)
    return "" if trial.returncode == 0 else f"strace cannot trace here: {trial.stderr.strip()}"


def counts(secret):
    """How often each system call is made by a rank until its job has come together, the most of any rank."""
    most = {}
    with Job(SIZE, ["strace", "-f", "-qq", "-o", "/dev/stderr", "-e", "trace=" + ",".join("?" + c for c in CALLS),
                    FAULT_PROGRAM, "steps=0", "tensors=1", "elements=8"], variables={**TIMES, **secret}) as job:
        job.wait()
        for rank in job.ranks.values():
            lines = rank.err.splitlines()
            for call in CALLS:
                most[call] = max(most.get(call, 0), sum(f" {call}(" in line for line in lines))
    return most


def strike(who, signal, call, number, secret):
    """What the other ranks say, those left out that had all they needed; the seconds from the signal until the last of them
    said so (or, where nothing says when that was, had ended); and what the job has left behind."""
    inject = f"inject={call}:signal={signal}:when={number}"
    with tempfile.NamedTemporaryFile("r", prefix="startup-") as trace, \
            Job(SIZE, [FAULT_PROGRAM, "steps=2", "tensors=1", "elements=8"], {**TIMES, **secret}, without=(who,)) as job:
        job.command = ["strace", "-f", "-q", "-ttt", "-o", trace.name, "-e", f"trace={call}", "-e", inject] + job.command
        job.start(who)
        others = [rank for rank in range(SIZE) if rank != who]
        job.wait(which=others, deadline=60 * SCALE)
        if signal == "SIGKILL":
            job.wait(which=[who])  # strace has written then
        wall = time.time() - time.monotonic()  # strace takes the time of day
        failed = [rank for rank in others if job.ranks[rank].code != 0]
        struck = re.findall(rf"(?m)^\d+ +(\d+\.\d+) (?:--- stopped|\+\+\+ killed) by {signal} ", trace.read())
        told = [int(said[-1]["at"]) * 1e-9 if (said := job.ranks[rank].said("error")) else job.ranks[rank].ended for rank in failed]
        seconds = max(told) + wall - float(struck[0]) if struck and failed else None
        if job.ranks[who].poll() is None:
            os.killpg(job.ranks[who].pid, SIGKILL)  # with its strace
            job.wait(which=[who])
        # Names of other jobs that run now last as long as a rank of theirs stays stopped.
        return {rank: job.ranks[rank].error() for rank in failed}, seconds, job.left_behind(JOIN + DEAD + 5 * SCALE)


class Startup(unittest.TestCase):
    maxDiff = None

    @staticmethod
    def never(who):
        """What is said of a rank that nobody has seen yet: it is waited for until `join`. Before rank 0 listens, others say where
        they looked."""
        return rf"ranks \{{{who}\}} never joined" + (r"|rank \d cannot reach rank 0|.*took the connection but" if who == 0 else "")

    def wrong(self, case, outcome):
        """What was said that is not about the rank that was struck, or came too late, and what is left of the job."""
        who, signal = case[:2]
        said, seconds, left = outcome
        left = [f"left behind: {left}"] if left else []
        if not said:
            return left
        about = re.compile(rf"DDP-E\d+ [a-z ]+: (rank {who} (\(|is gone|has sent nothing|exited|failed)|{self.never(who)}"
                           + (r"|.*rank 0 at 127\.0\.0\.1)" if who == 0 else ")"))
        wrong = left + [f"rank {rank}: {text}" for rank, text in said.items() if not about.match(text)]
        if seconds is None:
            return [*wrong, f"nobody was struck: {said}"]
        bound = (JOIN if self.was_awaited(case, said) else DEAD if signal == "SIGSTOP" else 0.5 * SCALE) + 1 * SCALE
        return [*wrong, f"after {seconds:.2f} s, allowed {bound}: {said}"] if seconds > bound else wrong

    def was_awaited(self, case, said):
        return any(re.match(rf"DDP-E201 [a-z ]+: ({self.never(case[0])})", text) for text in said.values())

    def test_at_every_kind_of_call(self):
        file = tempfile.NamedTemporaryFile(prefix="startup-secret-")  # nobody else can read it
        self.addCleanup(file.close)
        file.write(os.urandom(32))
        file.flush()
        ways = ({}, {"DDP_SECRET_FILE": file.name})
        made = [counts(way) for way in ways]
        for way in made:
            self.assertGreater(way["connect"], 0, made)
            self.assertGreater(way["sendto"] + way["sendmsg"], 2, made)
        everything = os.environ.get("DDP_TEST_EVERY") == "1"
        cases = []
        for call in CALLS:
            most = max(way[call] for way in made)
            numbers = range(1, most + 1)
            if not everything:  # the first, the last and one between
                numbers = sorted({1, (most + 1) // 2, most} - {0})
            for turn, number in enumerate(numbers):
                for signal in ("SIGKILL", "SIGSTOP"):
                    place = len(cases) // 2
                    cases.append(((place + turn) % SIZE, signal, call, number, ways[place % 2]))
        if SCALE > 1 and not everything:  # under a sanitizer a process takes a second to start
            cases = cases[::5]  # both signals, with a secret and without
        struck = {"SIGKILL": [], "SIGSTOP": [], "either, before anybody had seen the rank": []}
        odd = []
        with concurrent.futures.ThreadPoolExecutor(6) as pool:  # they mostly wait
            for case, outcome in zip(cases, pool.map(lambda c: strike(*c), cases)):
                if outcome[0]:
                    kind = "either, before anybody had seen the rank" if self.was_awaited(case, outcome[0]) else case[1]
                    struck[kind].append(outcome[1])
                if wrong := self.wrong(case, outcome):
                    odd.append(case)
                    print(f"{case}, while {len(cases)} jobs shared the machine: {wrong}; tried again alone")
        wrong = [f"{case}: {text}" for case in odd for text in self.wrong(case, strike(*case))]
        ended = sum(map(len, struck.values()))
        print(f"{len(cases)} injections, {ended} ended the job")
        for kind, seconds in struck.items():
            print(f"{kind}: {len(seconds)}, the longest until the last rank said so {max(filter(None, seconds), default=0):.2f} s")
        self.assertGreater(ended, len(cases) // 3)
        self.assertEqual(wrong, [])


class Strangers(unittest.TestCase):
    """Other users' processes on the machine, against a job that ddprun starts."""

    def test_nobody_takes_a_place_or_ends_the_job_whose_ranks_prove_the_secret(self):
        self.nobody_takes_a_place_or_ends_the_job("protect=1")

    def test_nobody_takes_a_place_or_ends_the_job_whose_ranks_show_the_secret(self):  # ddp::tcp, on loopback
        self.nobody_takes_a_place_or_ends_the_job("protect=0")

    def nobody_takes_a_place_or_ends_the_job(self, protection):
        # Claims are those of a rank of this job and version that lacks only the secret.
        script = (f"[ $RANK = 0 ] && {FAULT_PROGRAM} claim=1:2 && {FAULT_PROGRAM} claim=1:3; echo port=$MASTER_PORT; "
                  f"[ $RANK = 0 ] || sleep {2 * SCALE}; exec {FAULT_PROGRAM} steps=3 tensors=2 {protection}")
        command = [DDPRUN, "-n", "2", "--prefix", "none", "--", "sh", "-c", script]
        alone = Rank(command, environment(), start_new_session=True)
        disturbed = Rank(command, environment(), start_new_session=True)
        held = []
        try:
            end = time.monotonic() + DEADLINE
            while disturbed.out.count("port=") < 2 and time.monotonic() < end:
                time.sleep(0.01)
            claims = [bytes.fromhex(text) for text in re.findall(r"claim=(\w+)", disturbed.out)]
            self.assertEqual([len(claim) for claim in claims], [168] * 4)
            port = int(re.search(r"port=(\d+)", disturbed.out)[1])
            answers = b""
            for turn in range(300):  # claims of rank 1, of another size, silence, and noise
                try:
                    connection = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE)
                except OSError:
                    break  # the job has come together, and nobody listens any more
                held.append(connection)
                connection.sendall([*claims, b"", b"GET / HTTP/1.0\r\n\r\n"][turn % 6] or b"")
                time.sleep(0.005)
            for process in (alone, disturbed):
                process.process.wait(DEADLINE)
                process.poll()
            for connection in held:
                connection.setblocking(False)
                try:
                    answers += connection.recv(4096)
                except OSError:
                    pass
        finally:
            for connection in held:
                connection.close()
            for process in (alone, disturbed):
                try:
                    os.killpg(process.pid, 9)
                except OSError:
                    pass
                process.process.wait()
        self.addCleanup(lambda: [file.close() for p in (alone, disturbed) for file in (p.out_file, p.err_file)])
        digests = [sorted(line["digest"] for line in process.said("done")) for process in (alone, disturbed)]
        self.assertEqual((alone.code, disturbed.code), (0, 0), disturbed.out + disturbed.err)
        self.assertEqual(len(digests[0]), 2, alone.out)
        self.assertEqual(digests[0], digests[1])
        self.assertEqual(answers, b"", "a stranger was answered")
        self.assertGreater(len(held), 50)
        self.assertEqual(disturbed.out.count("start rank="), 2)
        self.assertEqual("channels=0" in disturbed.out, protection == "protect=0")


if __name__ == "__main__":
    problem = ptrace_works()
    if problem:
        print(f"skipped: {problem}")
        sys.exit(77)
    unittest.main()
