"""Faults at drawn moments of real jobs over TCP, and what every rank then says: a driver for many injections.

    python3 tests/process/chaos.py --injections 200 --ranks 2,3,4 --json chaos.json
    python3 tests/process/chaos.py --rows 31 --ranks 3 --seed 7 --only 12      # one injection again

Rows are those of the fault matrix (docs/faults.md has the table). Ranks are killed, stopped and so on by themselves, at a
named phase (fault_program.cpp); connections are harmed by a proxy between the ranks (chaos_proxy.py). A sixth of the jobs over
TCP proves a secret on all connections, and another sixth uses TLS on all. Everything that is drawn depends on seed, row, number
of ranks and number of the injection only. After each injection:

  - every rank that still runs has thrown, all the same text, which names the right rank or connection; or, where the fault
    is one that must not end a job, the job has ended with the digest of an undisturbed one
  - ranks that have completed the same number of steps hold the same bits, and those of an undisturbed job, unless the
    trainer calls them torn
  - the time from the injection to the error of the last rank is below the row's bound
  - each of these ranks has written a flight record, whose verdict has the same code and culprit
  - no process and no temporary file is left

FAULT_PROGRAM (or DDP_PROGRAMS, its directory) names the binary. Rows over MPI need fault_program_mpi, which is built where MPI
is; without it they are left out.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import typing
import zlib

from chaos_proxy import Harm, Proxy
from jobs import DEADLINE, SCALE, Job, check_flight_records, check_process_named, listening_ports, program

FAULT_PROGRAM = program("FAULT_PROGRAM", "DDP_PROGRAMS", "fault_program")
FAULT_PROGRAM_MPI = program("FAULT_PROGRAM_MPI", "DDP_PROGRAMS", "fault_program_mpi")
MPIEXEC = os.environ.get("MPIEXEC") or "mpiexec"
OPEN_MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1",
            "OMPI_MCA_hwloc_base_binding_policy": "none", "OMPI_MCA_btl_vader_single_copy_mechanism": "none"}
DEAD = 1.5 * SCALE  # ddp::timing::for_tests, which fault_program takes
DEFAULT_DEAD = 3.0 * SCALE
SOON = 0.5 * SCALE
MOST_SLOWER = 1.05 if SCALE == 1 else 1.5  # a step, for strangers at the job's ports; a sanitizer's steps are few
ENDLESS = "steps=1000000"

SHAPES = (("tensors=8", "elements=20000"), ("tensors=4", "elements=800", "bucket=4096"),
          ("tensors=3", "elements=300000", "bucket=1000000"))
MESSAGES = (("share=0",), ("algorithm=ring",), ("update=sharded", "share=0"), ("algorithm=recursive_doubling",),
            ("algorithm=direct",), ("algorithm=naive",))
WAYS = MESSAGES + ((), (), ("update=replicated",), ("update=sharded",))  # and in memory that ranks share
OWN_CODE = ("construct", "bind", "forward", "backward", "between", "end", "reduced")  # a rank runs its own code
STEPPING = ("stepping",)  # it writes new values, with shared memory into the other ranks' replicas as well
INSIDE = ("waiting", "barrier", "allreduce", "broadcast", "array")  # it waits for others in a call
BEFORE_OR_AFTER = ("construct", "bind", "end")  # no step's number


@dataclasses.dataclass
class Plan:
    """One injection, and what has to come of it."""

    size: int
    words: tuple  # options of fault_program: what decides the digest
    faults: tuple = ()
    steps: str = "steps=6"
    more: tuple = ()  # options that change no digest
    harm: typing.Callable | None = None  # (job, proxy): what the network or the driver does; may return how long the job took to end
    verdicts: tuple = ()  # (ranks, pattern): all of these ranks throw one text that matches
    bound: float = SOON
    well: bool = False  # the job must end well instead
    patience: float = DEADLINE  # seconds in which it must
    thawed: int | None = None  # a stopped rank that says the same when it is continued
    frozen: int | None = None  # a rank that stays stopped and is killed in the end
    a_host: int = 0  # so many ranks take each other for ranks of one host, and all others for ranks of other hosts
    proxied: bool = False
    links: dict = dataclasses.field(default_factory=dict)  # what the proxy does to all links from the start: see Link.set
    inproc: bool = False  # ranks are threads
    mpi: bool = False  # under mpiexec
    launcher: tuple = ()  # options of mpiexec
    killed: bool = False  # all that MPI promises: the job ends, within the bound, and not well
    tracer: tuple = ()  # a command before the program's, for one rank
    secured: str = ""  # "proof", "tls": all ranks have a secret, and every connection begins with a proof of it or with TLS
    count: int = 1  # injections in it


class Wrong(Exception):
    """What must not be."""


class Missed(Exception):
    """The rank had left the call before it was struck: the machine was busy, and nothing was injected."""


class Late(Exception):
    """Everything was right, but late."""

    def __init__(self, text, seconds):
        super().__init__(text)
        self.seconds = seconds


def gone(rank):
    return rf"^DDP-E202 peer closed: rank {rank} is gone\b"


def quiet(rank):
    return rf"^DDP-E203 peer silent: rank {rank} has sent nothing"


def drawn_words(draw, ways=WAYS):
    # Where a fault is within the allreduce of an array, it has 100,000 floats unless its size is given: too many to hand over.
    return draw.choice(SHAPES) + draw.choice(ways) + draw.choice(((), (), ("array=100",)))


def drawn_place(draw, phases):
    phase = draw.choice(phases)
    return phase, 0 if phase in BEFORE_OR_AFTER else draw.randint(1, 5)


def without(size, *ranks):
    return tuple(r for r in range(size) if r not in ranks)


# Rows: what is injected. Each makes a Plan of a generator of random numbers and the number of ranks; None: the row needs more
# ranks.

def on_hosts(make):
    """Some of the jobs that have room for it are of two hosts, one or both with two ranks, which share memory there."""
    def plan(draw, size):
        made = make(draw, size)
        if size > 2 and not made.inproc and draw.random() < 0.4:
            made = dataclasses.replace(made, words=draw.choice(SHAPES) + draw.choice(((), ("update=sharded",))), a_host=2)
        return made
    return plan


def kill(draw, size, rank):
    phase, step = drawn_place(draw, OWN_CODE + INSIDE + STEPPING)
    return Plan(size, drawn_words(draw), (f"{rank}:kill:{phase}:{step}",), verdicts=((without(size, rank), gone(rank)),))


def row_10(draw, size):
    return kill(draw, size, draw.randint(1, size - 1))


def row_11(draw, size):
    return kill(draw, size, 0)


def row_12(draw, size):
    if size < 3:
        return None
    count = draw.randint(2, size - 1)
    ranks = draw.sample(range(size), count)
    phase, step = drawn_place(draw, ("forward", "backward", "between", "reduced"))
    faults = [f"{ranks[0]}:kill:{phase}:{step}"]
    for rank in ranks[1:]:
        if draw.random() < 0.5:  # while the news of the first spreads
            faults.append(f"{rank}:sleep:{phase}:{step}:{draw.randint(1, 250)}")
        faults.append(f"{rank}:kill:{phase}:{step}")
    return Plan(size, drawn_words(draw), tuple(faults), bound=2 * SOON,
                verdicts=((without(size, *ranks), gone("[" + "".join(map(str, ranks)) + "]")),))


def row_13(draw, size):
    rank = draw.randrange(size)
    phase, step = drawn_place(draw, OWN_CODE)
    inproc = draw.random() < 0.25 and phase != "reduced"
    return Plan(size, drawn_words(draw), (f"{rank}:throw:{phase}:{step}",), inproc=inproc,
                verdicts=((without(size, rank), rf"^DDP-E206 remote exception: rank {rank} .*the lamp fell over"),))


def row_14(draw, size):
    rank = draw.randrange(size)
    kind = draw.choice(("segv", "abort", "memory") if SCALE == 1 else ("segv", "abort"))  # sanitizers need memory
    phases = ("forward", "backward", "between") if kind == "memory" else OWN_CODE
    phase, step = drawn_place(draw, phases)
    pattern = rf"^DDP-E206 remote exception: rank {rank} .*bad_alloc" if kind == "memory" else gone(rank)
    return Plan(size, drawn_words(draw), (f"{rank}:{kind}:{phase}:{step}",), verdicts=((without(size, rank), pattern),))


def row_15(draw, size):
    rank = draw.randrange(size)
    kind = draw.choice(("return", "exit"))
    if kind == "return":
        place, pattern = f"between:{draw.randint(1, 5)}", rf"^DDP-E202 peer closed: rank {rank} exited cleanly"
    else:
        phase, step = drawn_place(draw, ("construct", "bind", "forward", "backward", "between"))
        place, pattern = f"{phase}:{step}", gone(rank)
    return Plan(size, drawn_words(draw), (f"{rank}:{kind}:{place}",), verdicts=((without(size, rank), pattern),))


def row_18(draw, size):
    rank = draw.randrange(size)
    phase, step = drawn_place(draw, ("bind", "forward", "backward", "reduced", "between", *STEPPING, *INSIDE))
    thaws = draw.random() < 0.5
    length = f":{int(1000 * DEAD / SCALE) + 1500}" if thaws else ""
    return Plan(size, drawn_words(draw), (f"{rank}:stop:{phase}:{step}{length}",), bound=DEAD + SOON,
                thawed=rank if thaws else None, frozen=None if thaws else rank,
                verdicts=((without(size, rank), quiet(rank)),))


def row_18_default(draw, size):
    plan = row_18(draw, size)
    rank = plan.thawed if plan.thawed is not None else plan.frozen
    plan.faults = (":".join(plan.faults[0].split(":")[:4]),)
    plan.more, plan.bound, plan.thawed, plan.frozen = ("times=default",), DEFAULT_DEAD + SOON, None, rank
    return plan


def row_19(draw, size):
    faults = [f"{draw.randrange(size)}:stop:{draw.choice(('forward', 'backward', 'between', 'reduced'))}:{step}:"
              f"{int(1000 * draw.uniform(0.02, 0.5) * DEAD / SCALE)}" for step in range(1, 6)]
    return Plan(size, drawn_words(draw), tuple(faults), well=True, count=len(faults))


def row_20(draw, size):
    pause = draw.uniform(0.0, 0.2) * SCALE

    def harm(job, _):
        time.sleep(pause)
        for signo in (signal.SIGSTOP, signal.SIGCONT):
            for rank in job.ranks.values():
                os.kill(rank.pid, signo)
            time.sleep(1.3 * DEAD)
    return Plan(size, drawn_words(draw), steps="steps=40", more=("pause=10",), harm=harm, well=True)


def row_21(draw, size):
    rank = draw.randrange(size)
    phase, step = drawn_place(draw, ("forward", "backward", "between"))
    return Plan(size, drawn_words(draw), (f"{rank}:{draw.choice(('sleep', 'spin'))}:{phase}:{step}:1500",),
                more=("collective=600",), bound=0.6 * SCALE + SOON, inproc=draw.random() < 0.25,
                verdicts=((tuple(range(size)), rf"^DDP-E204 deadline: rank {rank} did not take part in .* in time"),))


def row_22(draw, size):
    rank = draw.randrange(size)
    step = draw.randint(1, 5)
    fault, pattern = draw.choice((
        (f"{rank}:other:barrier:{step}", r"^DDP-E205 mismatch: .*(allreduce.*barrier|barrier.*allreduce)"),
        (f"{rank}:count:allreduce:{step}", r"^DDP-E205 mismatch: .*(9.*10|10.*9) double"),
        (f"{max(1, rank)}:root:broadcast:{step}", r"^DDP-E205 mismatch: "),
        (f"{rank}:skip:between:{step}", r"^DDP-E205 mismatch: "),
        (f"{rank}:rate:construct:0", r"^DDP-E102 model differs: .*optimizer or its settings"),
        (f"{rank}:model:construct:0", r"^DDP-E102 model differs: .*parameter #\d+ is ")))
    # Threads have no heartbeats: what shows in no message of its own is found at the deadline.
    inproc = draw.random() < 0.25 and ":skip:" not in fault and ":root:" not in fault
    return Plan(size, drawn_words(draw), (fault,), inproc=inproc, verdicts=((tuple(range(size)), pattern),))


def row_23(draw, size):
    rate = draw.choice((1.25e6, 1.25e5))
    small = ("tensors=4", "elements=800", "bucket=4096")
    return Plan(size, small + draw.choice(MESSAGES), steps="steps=20", links={"rate": rate / SCALE}, proxied=True, well=True)


def row_23_gradients(draw, size):
    """2 MB of gradients, default times: what a connection carries is not heard from the other end for seconds."""
    if size < 3:
        return None
    return Plan(size, ("tensors=3", "elements=170000") + draw.choice((("share=0",), ("update=sharded", "share=0"))),
                steps="steps=1", more=("times=default",), links={"rate": 1.25e5 / SCALE}, proxied=True, well=True,
                patience=4 * DEADLINE)


def drawn_link(draw, size):
    return tuple(sorted(draw.sample(range(size), 2)))


def whom_it_concerns(size, a, b, code, what):
    """Of two ranks each names the other; of more all name the connection."""
    if size == 2:
        return (((0,), rf"^DDP-{code} .*rank 1 {what}"), ((1,), rf"^DDP-{code} .*rank 0 {what}"))
    link = rf"the connection between rank ({a} and rank {b}|{b} and rank {a})\b"
    return ((tuple(range(size)), rf"^DDP-{code} .*{link}"),)


def harmed(draw, size, harm, verdicts, bound, **more):
    """A job without end, struck while steps run or while a rank is in a phase of its own."""
    faults = ()
    if draw.random() < 0.5:
        phase, step = drawn_place(draw, ("forward", "backward", "between", *INSIDE))
        faults = (f"{draw.randrange(size)}:sleep:{phase}:{step + 2}:60",)
    pause = draw.uniform(0, 0.1) * SCALE

    def strike(job, proxy):
        if faults:
            job.wait_for("fault", int(faults[0][0]))
        else:
            time.sleep(pause)
        harm(proxy)
    return Plan(size, drawn_words(draw, MESSAGES), faults, steps=ENDLESS, harm=strike, proxied=True, verdicts=verdicts,
                bound=bound, **more)


def row_25(draw, size):
    a, b = drawn_link(draw, size)
    rate = draw.choice((0, 3e5))
    stop = draw.uniform(0.1, 0.5) * DEAD

    turns = [draw.choice((a, b)) for _ in range(3)]

    def harm(_, proxy):
        for writer in turns:
            proxy.link(a, b).stall((writer,))
            time.sleep(stop)
            proxy.link(a, b).stall(stalled=False)
            time.sleep(0.02)
    if rate:
        return Plan(size, draw.choice(SHAPES[:2]) + draw.choice(MESSAGES), steps="steps=4", links={"rate": rate / SCALE},
                    proxied=True, well=True)
    return Plan(size, draw.choice(SHAPES[:2]) + draw.choice(MESSAGES), steps="steps=40", more=("pause=10",), harm=harm,
                proxied=True, well=True)


def row_26(draw, size):
    a, b = drawn_link(draw, size)
    return harmed(draw, size, lambda proxy: proxy.link(a, b).silence(),
                  whom_it_concerns(size, a, b, "E203", "has sent nothing"), DEAD + 1.0 * SCALE)


def row_26_default(draw, size):
    plan = row_26(draw, size)
    plan.more, plan.bound = ("times=default",), DEFAULT_DEAD + 1.0 * SCALE
    return plan


def row_27(draw, size):
    a, b = drawn_link(draw, size)
    writer = draw.choice((a, b))
    verdicts = whom_it_concerns(size, a, b, "E203", "has sent nothing")
    if size == 2:  # the other end hears of it, and says the same
        other = a + b - writer
        verdicts = (((other,), rf"^DDP-E203 .*rank {writer} has sent nothing"), ((writer,), rf"^DDP-E20[23] .*rank ({a}|{b}) "))
    return harmed(draw, size, lambda proxy: proxy.link(a, b).silence((writer,)), verdicts, DEAD + 1.0 * SCALE)


def row_28(draw, size):
    if size < 3:
        return None
    side = sorted(draw.sample(range(size), draw.randint(1, size - 1)))
    other = without(size, *side)

    def harm(proxy):
        for a in side:
            for b in other:
                proxy.link(a, b).silence()

    def said(away):
        if len(away) > 1:  # a lone rank may have died instead
            return (r"^DDP-E20[23] .*rank [" + "".join(map(str, away)) + r"]\b.*(is gone|has sent nothing.* Nothing came from "
                    r"ranks? \d.*, the network is partitioned)")
        return r"^DDP-E20[23] .*rank [" + "".join(map(str, away)) + r"]\b.*(has sent nothing|is gone)"
    return harmed(draw, size, harm, ((tuple(side), said(other)), (other, said(side))), DEAD + 1.0 * SCALE)


def row_29(draw, size):
    flaps = [(drawn_link(draw, size), draw.uniform(0.05, 0.5) * DEAD, draw.uniform(0, 0.1) * SCALE) for _ in range(2)]
    steps, delay, jitter = draw.choice(((40, 0, 0), (30, 0.001, 0.003), (8, 0.01, 0.01)))

    def harm(_, proxy):
        for (a, b), down, up in flaps:
            proxy.link(a, b).stall()
            time.sleep(down)
            proxy.link(a, b).stall(stalled=False)
            time.sleep(up)
    return Plan(size, drawn_words(draw, MESSAGES), steps=f"steps={steps}", more=("pause=10",), harm=harm, proxied=True,
                well=True,
                links={"delay": delay * SCALE, "jitter": jitter * SCALE})


def row_30(draw, size):
    rank = draw.randrange(size)
    others = without(size, rank)

    def harm(proxy):
        for other in others:
            proxy.link(rank, other).silence()
    return harmed(draw, size, harm, ((others, quiet(rank)), ((rank,), r"^DDP-E203 .*rank \d has sent nothing")),
                  DEAD + 1.0 * SCALE)


def row_31(draw, size):
    a, b = drawn_link(draw, size)
    kind = draw.choice(("cut", "end", "half"))
    writer = draw.choice((a, b))
    after = draw.choice((None, draw.randrange(0, 200000)))
    code = "E202"

    def harm(proxy):
        proxy.link(a, b).way(writer).plan(Harm(kind), after or 0)
    return harmed(draw, size, harm, whom_it_concerns(size, a, b, code, "is gone"), SOON)


def row_32(draw, size):
    small = ("tensors=2", "elements=400", "bucket=4096") + draw.choice(MESSAGES)
    interrupts = draw.random() >= 0.5
    if interrupts and shutil.which("strace") is None:
        print("not tried: interrupted calls (row 32), because there is no strace", flush=True)
    if not interrupts or shutil.which("strace") is None:
        return Plan(size, small, steps="steps=3", links={"segment": draw.choice((1, 7))}, proxied=True, well=True)
    calls = draw.choice(("sendmsg", "recvmsg", "sendmsg,recvmsg", "poll,ppoll"))
    error = "EINTR" if "poll" in calls else draw.choice(("EINTR", "EAGAIN"))
    inject = f"inject={calls}:error={error}:when={draw.randint(20, 60)}+{draw.randint(2, 5)}"
    return Plan(size, small, steps="steps=3", well=True,
                tracer=(draw.randrange(size), ["strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={calls}", "-e", inject]))


def corrupt(size, a, b, extra=""):
    if size == 2:
        return (((0,), rf"^DDP-E207 .*rank 1\b{extra}"), ((1,), rf"^DDP-E207 .*rank 0\b{extra}"))
    return ((tuple(range(size)), rf"^DDP-E207 .*(rank {a}\b.*rank {b}|rank {b}\b.*rank {a})\b{extra}"),)


def row_33(draw, size):
    a, b = drawn_link(draw, size)
    kind = draw.choice(("header", "header", "payload", "flip"))
    writer = draw.choice((a, b))
    bit = draw.randrange(512) if kind == "header" else draw.randrange(8 * 400)
    after = draw.randrange(0, 300000)

    def harm(proxy):
        proxy.link(a, b).way(writer).plan(Harm(kind, bit=bit), after)
    return harmed(draw, size, harm, corrupt(size, a, b), SOON, a_host=1)


def row_34(draw, size):
    a, b = drawn_link(draw, size)
    kind = draw.choice(("replay", "swap", "lose", "drop", "repeat", "insert", "short"))
    writer = draw.choice((a, b))
    after = draw.randrange(0, 300000)
    count = draw.randint(1, draw.choice((8, 64, 4000)))
    noise = draw.randbytes(draw.randint(1, 200))

    def harm(proxy):
        proxy.link(a, b).way(writer).plan(Harm(kind, count=count, bytes=noise), after)
    verdicts = corrupt(size, a, b)
    if kind == "short":  # a stream that ends within a frame
        verdicts = whom_it_concerns(size, a, b, "E20[27]", "")
    # What is left out is noticed when as many bytes have followed; on a quiet link these are heartbeats.
    bound = SOON + (0.05 * SCALE * count / 64 if kind == "drop" else 0)
    return harmed(draw, size, harm, verdicts, bound, a_host=1)


def over_mpi(make, **change):
    def plan(draw, size):
        made = make(draw, size)
        if made is None or not os.path.exists(FAULT_PROGRAM_MPI):
            return None
        made = dataclasses.replace(made, mpi=True, inproc=False, **change)
        # Without heartbeats a mismatch that shows in no message of its own is found at the deadline.
        if any(word in fault for word in (":skip:", ":root:") for fault in made.faults):
            made.more, made.bound = ("collective=600",), 1.2 * SCALE + SOON
        return made
    return plan


def row_18_mpi(draw, size):
    """Stopped for good. Who calls MPI without a thread of its own sends no heartbeats: peers wait until the deadline."""
    rank = draw.randrange(size)
    phase, step = drawn_place(draw, ("forward", "backward", "between", *INSIDE))
    return Plan(size, drawn_words(draw), (f"{rank}:stop:{phase}:{step}",), more=("collective=600",),
                verdicts=((without(size, rank), rf"^DDP-E204 deadline: rank {rank} did not take part in .* in time"),))


def row_18_multiple(draw, size):
    """Stopped for good, where a thread of the library's sends heartbeats over MPI."""
    rank = draw.randrange(size)
    phase, step = drawn_place(draw, ("forward", "backward", "between", "reduced", *STEPPING, *INSIDE))
    return Plan(size, drawn_words(draw), (f"{rank}:stop:{phase}:{step}",), bound=DEAD + SOON,
                verdicts=((without(size, rank), quiet(rank)),))


def at_multiple(make):
    """Over MPI, where a thread of the library's may call it: with heartbeats, as over TCP."""
    def plan(draw, size):
        made = make(draw, size)
        if made is None or not os.path.exists(FAULT_PROGRAM_MPI):
            return None
        return dataclasses.replace(made, mpi=True, inproc=False, more=(*made.more, "mpi=multiple"), bound=made.bound + SOON)
    return plan


def children_of(pid):
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as children:
            return [int(child) for child in children.read().split()]
    except OSError:
        return []


def left_alone(make):
    """Ranks die, and mpiexec leaves the others alone: these wait until the deadline, and the program ends the job."""
    def plan(draw, size):
        made = over_mpi(make, launcher=("--enable-recovery",), more=("collective=600",))(draw, size)
        if made is None or any(":memory:" in fault for fault in made.faults):  # that one is alive, and says what it has thrown
            return made
        dead = sorted({int(fault.partition(":")[0]) for fault in made.faults})
        made.verdicts = ((without(size, *dead), rf"^DDP-E204 deadline: rank [{''.join(map(str, dead))}] did not take part in .* in time"),)
        made.bound = 1.2 * SCALE + SOON
        return made
    return plan


def running(pids):
    """Those that have not ended."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as stat:
            if stat.read().rpartition(")")[2].split()[0] != "Z":
                found.append(pid)
    return found


def row_17_mpi(draw, size):
    """The launcher is killed: its ranks do not go on without it."""
    pause, signo = draw.uniform(0.0, 0.2) * SCALE, draw.choice((signal.SIGKILL, signal.SIGTERM, signal.SIGINT))

    def harm(job, _):
        time.sleep(pause)
        launcher, = job.ranks.values()
        ranks = ranks_below(job, size)
        os.kill(launcher.pid, signo)
        began = time.monotonic()
        while left := running(ranks):
            if time.monotonic() > began + 10 * SCALE:
                for pid in left:
                    os.kill(pid, signal.SIGKILL)
                raise Wrong(f"{len(left)} of {size} ranks outlive their launcher, {signo.name}\n{job.story()}")
            time.sleep(0.02)
        return time.monotonic() - began
    return Plan(size, drawn_words(draw), steps=ENDLESS, more=("pause=10",), harm=harm, killed=True)


def row_15_mpi(draw, size):
    """Returns early; or exits without MPI_Finalize, after which MPI promises no more than that the job ends."""
    plan = row_15(draw, size)
    if ":exit:" in plan.faults[0]:
        plan.killed, plan.bound = True, 3.0 * SCALE
    return plan


def ranks_below(job, size):
    launcher, = job.ranks.values()
    ranks = children_of(launcher.pid)
    if len(ranks) != size:
        raise Wrong(f"{len(ranks)} processes below the launcher, not {size}\n{job.story()}")
    return ranks


def row_20_mpi(draw, size):
    """What a batch system does to suspend a job: all ranks stop, and the launcher does not."""
    pause = draw.uniform(0.0, 0.2) * SCALE

    def harm(job, _):
        time.sleep(pause)
        ranks = ranks_below(job, size)
        for signo in (signal.SIGSTOP, signal.SIGCONT):
            for pid in ranks:
                os.kill(pid, signo)
            time.sleep(1.3 * DEAD)
    return Plan(size, drawn_words(draw), steps="steps=40", more=("pause=10",), harm=harm, well=True)


@dataclasses.dataclass
class Row:
    number: str
    what: str
    plan: typing.Callable
    lanes: int = 1  # jobs at a time, where they mostly wait
    share: float = 1.0  # of the injections that are asked for


RECOVERY = ", and `mpiexec --enable-recovery` leaves the others alone (`collective`: 0.6 s)"
ROWS = [Row("10", "a rank other than 0 is killed", on_hosts(row_10)),
        Row("11", "rank 0 is killed", on_hosts(row_11)),
        Row("12", "two or three ranks are killed, together or one after another", row_12),
        Row("13", "a rank throws", on_hosts(row_13)),
        Row("14", "a rank crashes, aborts, or has no memory left", on_hosts(row_14)),
        Row("15", "a rank returns early, or exits", row_15),
        Row("18", "a rank stops for longer than `dead` (1.5 s)", on_hosts(row_18), 4),
        Row("18d", "the same with default times (3 s)", row_18_default, 4, 0.1),
        Row("19", "a rank stops for less than `dead`", on_hosts(row_19), 2),
        Row("20", "all ranks stop together", row_20, 4, 0.25),
        Row("21", "a rank is stuck in its own code (`collective`: 0.6 s)", on_hosts(row_21), 2),
        Row("22", "ranks do different things", row_22),
        Row("23", "all connections are slow (10 and 1 Mbit/s)", row_23, 2, 0.25),
        Row("23g", "2 MB of gradients at 1 Mbit/s, default times", row_23_gradients, 2, 0.05),
        Row("25", "a peer reads slowly, or for a while nothing", row_25, 3, 0.5),
        Row("26", "a connection carries nothing any more", row_26, 4),
        Row("26d", "the same with default times", row_26_default, 4, 0.1),
        Row("27", "a connection carries nothing in one direction", row_27, 4),
        Row("28", "the network is partitioned", row_28, 4),
        Row("29", "links are down for less than `dead`; delays, jitter", row_29, 2, 0.5),
        Row("30", "a host vanishes", row_30, 4),
        Row("31", "a connection is reset, closed or half-closed", row_31),
        Row("32", "segments of 1 byte; EINTR, EAGAIN", row_32, 1, 0.5),
        Row("33", "one bit is flipped", row_33),
        Row("34", "bytes or frames are left out, doubled, swapped, inserted, cut off", row_34),
        Row("10m", "over MPI a rank is killed: the whole job ends", over_mpi(row_10, killed=True, bound=3.0 * SCALE), 1, 0.25),
        Row("13m", "over MPI a rank throws", over_mpi(row_13), 1, 0.25),
        Row("14m", "over MPI a rank crashes, aborts, or has no memory left: the whole job ends",
            over_mpi(row_14, killed=True, bound=3.0 * SCALE), 1, 0.25),
        Row("15m", "over MPI a rank returns early, or exits", over_mpi(row_15_mpi), 1, 0.25),
        Row("17m", "over MPI the launcher is killed: the ranks end too", over_mpi(row_17_mpi, bound=4.0 * SCALE), 3, 0.25),
        Row("18m", "over MPI a rank stops for good (`collective`: 0.6 s)",
            over_mpi(row_18_mpi, bound=2.2 * SCALE + SOON), 1, 0.25),
        Row("18t", "at MPI_THREAD_MULTIPLE a rank stops for longer than `dead` (1.5 s)",
            at_multiple(row_18_multiple), 3, 0.25),
        Row("19m", "over MPI a rank stops for less than `dead`", over_mpi(row_19), 1, 0.25),
        Row("20m", "over MPI all ranks stop together", over_mpi(row_20_mpi), 4, 0.25),
        Row("21m", "over MPI a rank is stuck in its own code (`collective`: 0.6 s)",
            over_mpi(row_21, bound=1.2 * SCALE + SOON), 1, 0.25),
        Row("22m", "over MPI ranks do different things", over_mpi(row_22), 1, 0.25),
        Row("13t", "at MPI_THREAD_MULTIPLE a rank throws", at_multiple(row_13), 1, 0.25),
        Row("19t", "at MPI_THREAD_MULTIPLE a rank stops for less than `dead`", at_multiple(row_19), 1, 0.25),
        Row("21t", "at MPI_THREAD_MULTIPLE a rank is stuck in its own code (`collective`: 0.6 s)", at_multiple(row_21), 1, 0.25),
        Row("22t", "at MPI_THREAD_MULTIPLE ranks do different things", at_multiple(row_22), 1, 0.25),
        Row("10r", f"over MPI a rank other than 0 is killed{RECOVERY}", left_alone(row_10), 3, 0.25),
        Row("11r", f"over MPI rank 0 is killed{RECOVERY}", left_alone(row_11), 3, 0.25),
        Row("12r", f"over MPI two or three ranks are killed{RECOVERY}", left_alone(row_12), 3, 0.25),
        Row("14r", f"over MPI a rank crashes, aborts, or has no memory left{RECOVERY}", left_alone(row_14), 3, 0.25)]


class References:
    """Digests of undisturbed jobs, by step."""

    def __init__(self):
        self.known = {}
        self.lock = threading.Lock()

    def of(self, size, words):
        with self.lock:
            if (size, words) not in self.known:
                with Job(size, [FAULT_PROGRAM, *words, "steps=40", "digests=1"]) as job:
                    job.wait()
                    said = {(line["number"], line["digest"]) for r in job.ranks.values() for line in r.said("step")}
                    if len(said) != 40 or any(r.code != 0 for r in job.ranks.values()):
                        raise Wrong(f"an undisturbed job went wrong: {sorted(said)}\n{job.story()}")
                self.known[size, words] = {int(number): digest for number, digest in said}
            return self.known[size, words]


REFERENCES = References()


def owner_finder(job):
    """Whose port it is: asked by the proxy while the ranks connect."""
    def find(port):
        with open("/proc/net/tcp") as table:
            for line in table.readlines()[1:]:
                row = line.split()
                if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port:
                    inode = f"socket:[{row[9]}]"
                    break
            else:
                raise OSError(f"nobody listens at {port}")
        for rank, process in job.ranks.items():
            try:
                for fd in os.listdir(f"/proc/{process.pid}/fd"):
                    if os.readlink(f"/proc/{process.pid}/fd/{fd}") == inode:
                        return rank
            except OSError:
                continue
        raise OSError(f"none of the ranks listens at {port}")
    return find


def errors_of(job):
    """By rank, what it threw, and what else that line says."""
    found = {}
    for r in job.ranks.values():
        for line in r.said("error"):
            found[int(line["rank"])] = line
    return found


def check_values(job, plan):
    """Equal numbers of steps are equal bits, and the right ones."""
    by_steps = {}
    for r in job.ranks.values():
        for line in r.said("values"):
            if line["torn"] == "0":
                by_steps.setdefault(int(line["steps"]), set()).add(line["digest"])
    right = REFERENCES.of(plan.size, plan.words)
    for steps, digests in by_steps.items():
        if len(digests) != 1 or (steps in right and digests != {right[steps]}):
            raise Wrong(f"after {steps} steps: {digests}, expected {right.get(steps)}\n{job.story()}")
    if by_steps and max(by_steps) - min(by_steps) > 1:
        raise Wrong(f"ranks are more than a step apart: {sorted(by_steps)}\n{job.story()}")


def check_well(job, plan):
    done = [line for r in job.ranks.values() for line in r.said("done")]
    wrong = [r.code for r in job.ranks.values()] != [0] * len(job.ranks) or len(done) != plan.size
    if wrong:
        raise Wrong(f"a false alarm\n{job.story()}")
    digests = {line["digest"] for line in done}
    right = REFERENCES.of(plan.size, plan.words)[int(plan.steps.partition("=")[2])]
    if digests != {right} or {line["replicas"] for line in done} != {"identical"}:
        raise Wrong(f"other weights than without the fault: {digests}, expected {right}\n{job.story()}")


def check_channels(job, plan, proxy):
    """Where there is a secret every connection proves it or is encrypted: of a rank those to all others and to the store, and on
    the wire nothing is outside of records."""
    if plan.mpi:
        return
    least = plan.size if plan.secured else 0
    made = [int(line["channels"]) for r in job.ranks.values() for line in r.said("start")]
    if any(n < least or (n > 0 and not plan.secured) for n in made):
        raise Wrong(f"connections that prove or encrypt: {made}, although it is {plan.secured or 'plain'}\n{job.story()}")
    if proxy is not None and (plain := proxy.not_in_records()):
        raise Wrong(f"not in records of {plan.secured}: {plain}\n{job.story()}")


def check_killed(job, took):
    """The launcher has ended the job, or its end has: seconds from the kill to the end, if they are not known yet."""
    launcher, = job.ranks.values()
    if launcher.code == 0 or launcher.said("done") or not launcher.said("start"):
        raise Wrong(f"the job went on\n{job.story()}")
    struck = launcher.said("fault")  # Open MPI may lose the last words of a rank that is killed
    return launcher.ended - int(struck[-1]["at"]) * 1e-9 if struck else took


def check_verdicts(job, plan, proxy, records):
    errors = errors_of(job)
    if any(f":{phase}:" in fault for phase in INSIDE for fault in plan.faults) and all(r.said("done") for r in job.ranks.values()):
        raise Missed
    who = list(plan.verdicts)
    if plan.thawed is not None:
        (ranks, pattern), = who
        if plan.size > 2:
            who = [((*ranks, plan.thawed), pattern)]
        else:  # the other has left, perhaps within a message: then its verdict is not read
            who.append(((plan.thawed,), rf"{pattern}|^DDP-E202 peer closed: rank {1 - plan.thawed} is gone"))
    for ranks, pattern in who:
        missing = [r for r in ranks if r not in errors]
        if missing:
            raise Wrong(f"no error of ranks {missing}\n{job.story()}")
        texts = {errors[r]["text"] for r in ranks}
        if len(texts) != 1:
            raise Wrong(f"not one verdict: {texts}\n{job.story()}")
        if not re.search(pattern, next(iter(texts))):
            raise Wrong(f"another verdict than {pattern}: {texts}\n{job.story()}")
        if not plan.inproc:
            check_process_named(job, next(iter(texts)), plan.mpi)
        if not plan.inproc and not plan.mpi:
            codes = {job.ranks[r].code for r in ranks}
            if codes != {1}:
                raise Wrong(f"exit codes {codes}\n{job.story()}")
    if any(r.said("done") for r in job.ranks.values()) and "end" not in str(plan.faults):
        raise Wrong(f"a rank ended well\n{job.story()}")
    check_values(job, plan)
    check_flight_records(records, {r: errors[r]["text"] for ranks, _ in who for r in ranks})
    struck = [int(line["at"]) for r in job.ranks.values() for line in r.said("fault")]
    if proxy is not None:
        if proxy.struck() is None:
            raise Wrong(f"nothing was injected: {proxy.failure}\n{job.story()}")
        struck = [proxy.struck()]
    measured = [r for ranks, _ in plan.verdicts for r in ranks]
    return max((int(errors[r]["at"]) - max(max(struck), int(errors[r]["since"]))) * 1e-9 for r in measured)


def end_launcher_of_the_dead(job, deadline):
    """mpiexec of Open MPI 4 crashes or hangs in about a fifth of the jobs in which one rank is in MPI_Finalize while others call
    MPI_Abort, also where the program uses nothing but MPI. Once all ranks have ended it need not be waited for."""
    launcher, = job.ranks.values()
    end, alone = time.monotonic() + deadline, 0
    while launcher.poll() is None and time.monotonic() < end and alone < 150:
        alone = alone + 1 if not running(children_of(launcher.pid)) and launcher.said("start") else 0
        time.sleep(0.02)
    if launcher.poll() is None and alone:
        os.kill(launcher.pid, signal.SIGKILL)


def inject(plan):
    """Seconds until the last rank threw; None where the job ended well, as it should."""
    with tempfile.TemporaryDirectory(prefix="chaos") as scratch:
        records = os.path.join(scratch, "records")
        os.mkdir(records)
        variables = {"TMPDIR": scratch, "DDP_FLIGHT_DIR": records}
        if plan.proxied or plan.a_host != 2 and zlib.crc32(" ".join(plan.words + plan.faults).encode()) % 3 == 0:
            variables["DDP_SHARE_MEMORY"] = "0"  # the proxy is to see the bytes; of the others, a third
        if plan.secured:
            variables.update(secret_in(scratch))
        if plan.secured == "tls":
            variables["DDP_TLS"] = "1"
        if plan.tracer:  # leaks cannot be looked for under ptrace
            variables["ASAN_OPTIONS"] = os.environ.get("ASAN_OPTIONS", "") + ":detect_leaks=0"
        words = [*plan.words, plan.steps, *plan.more, *(f"fault={f}" for f in plan.faults)]
        if plan.secured == "proof":
            words.append("prove=1")
        size = plan.size
        started = [FAULT_PROGRAM, *words]
        if plan.mpi:
            started = [MPIEXEC, *plan.launcher, "-n", str(size), FAULT_PROGRAM_MPI, *words]
            variables.update(OPEN_MPI)
        if plan.inproc:
            started += ["transport=inproc", f"ranks={size}"]
        if plan.inproc or plan.mpi:
            variables.update({"RANK": None, "WORLD_SIZE": None, "MASTER_ADDR": None, "MASTER_PORT": None})
            size = 1
        def with_host(rank):
            return {**variables, "DDP_HOST": f"host{rank // plan.a_host}"} if plan.a_host else variables

        with Job(size, started, with_host, without=range(size)) as job:
            proxy = Proxy(owner_finder(job), plan.links, plan.secured) if plan.proxied else None
            took = None
            try:
                if proxy:
                    variables["CHAOS_PROXY"] = str(proxy.port)
                for rank in range(size):
                    if plan.tracer and plan.tracer[0] == rank:
                        job.command = plan.tracer[1] + job.command
                    job.start(rank)
                    if plan.tracer and plan.tracer[0] == rank:
                        job.command = job.command[len(plan.tracer[1]):]
                if plan.harm:
                    for rank in range(size):
                        job.wait_for("start", rank)
                    if proxy:
                        proxy.expect({(a, b) for b in range(size) for a in range(b)}, DEADLINE)
                    if any(r.poll() is not None for r in job.ranks.values()):
                        raise Wrong(f"it ended before anything was injected\n{job.story()}")
                    took = plan.harm(job, proxy)
                # A job without end that does not notice must not take the minute that everything else is given.
                deadline = plan.bound + 20 * SCALE if plan.steps == ENDLESS else plan.patience
                if plan.mpi and not plan.well:
                    end_launcher_of_the_dead(job, deadline)
                job.wait(deadline, which=without(size, plan.frozen))
                if plan.frozen is not None:
                    os.kill(job.ranks[plan.frozen].pid, signal.SIGKILL)
                    job.wait()
                seconds = None
                if plan.well:
                    check_well(job, plan)
                elif plan.killed:
                    seconds = check_killed(job, took)
                else:
                    seconds = check_verdicts(job, plan, proxy, records)
                check_channels(job, plan, proxy)
                if job.left_behind():
                    raise Wrong(f"processes are left: {job.left_behind()}\n{job.story()}")
                # Open MPI's own is of a job that it ends.
                left = [name for name in os.listdir(scratch) if not name.startswith("ompi.") and name not in ("records", "secret")]
                if left:
                    raise Wrong(f"files are left: {left}")
                if seconds is not None and seconds > plan.bound:
                    raise Late(f"{seconds:.3f} s instead of {plan.bound} s\n{job.story()}", seconds)
                return seconds
            finally:
                if proxy:
                    proxy.__exit__()


def plan_of(row, size, seed, number):
    which = f"{seed}/{row.number}/{size}/{number}"
    plan = row.plan(random.Random(which), size)
    if plan is not None and not plan.inproc and not plan.mpi:  # of its own, so that nothing else that is drawn depends on it
        plan.secured = {0: "proof", 1: "tls"}.get(random.Random(which + "/secured").randrange(6), "")
    return plan


def attempt(row, size, seed, number, secured=None):
    """What came of one injection. secured: of the plan, instead of what is drawn."""
    plan = plan_of(row, size, seed, number)
    if secured is not None:
        plan.secured = secured
    result = {"row": row.number, "ranks": size, "number": number, "count": plan.count, "seconds": None, "late": "", "wrong": "",
              "missed": 0, "secured": plan.secured}
    again = f"--rows {row.number} --ranks {size} --seed {seed} --only {number}" + (f" ({plan.secured})" if plan.secured else "")
    try:
        result["seconds"] = inject(plan)
    except Missed:
        result["count"], result["missed"] = 0, 1
    except Late as late:
        result["seconds"], result["late"] = late.seconds, f"{again}: {late}"
    except (Wrong, AssertionError) as problem:
        result["wrong"] = f"{again}: faults {plan.faults} words {plan.words}\n{problem}"
    return result


def plans_to_starve(seconds):
    """Every way to train, with messages first and then in shared memory; a run of less than a minute comes no further than that."""
    plans = [Plan(2 + k % 3, SHAPES[0] + WAYS[k % len(WAYS)], steps="steps=40", more=("times=default",), well=True)
             for k in range(3 * len(WAYS))]
    return plans if seconds >= 60 else plans[:len(MESSAGES)]


def starve(seconds, load, seed):
    """Jobs with default times beside `load` processes that only count: how many there were, and what went wrong."""
    plans = plans_to_starve(seconds)
    for plan in plans:  # before the machine is busy
        REFERENCES.of(plan.size, plan.words)
    jobs, wrong, end = 0, [], time.monotonic() + seconds
    with busy_processes(load):
        while time.monotonic() < end:
            plan = plans[jobs % len(plans)]
            size = plan.size
            try:
                inject(plan)
            except (Wrong, AssertionError) as problem:
                wrong.append(f"starved, {size} ranks, seed {seed}: {problem}")
            jobs += 1
    return jobs, wrong


@contextlib.contextmanager
def busy_processes(count):
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def starve_at_length(seconds, load, size, words):
    """One job with default times that trains for so long beside `load` processes that only count: how long it took, and how
    many steps it made."""
    def digest_after(steps):
        with Job(size, [FAULT_PROGRAM, *words, f"steps={steps}", "times=default"]) as job:
            began = time.monotonic()
            job.wait(10 * seconds)
            took = time.monotonic() - began
            done = {line["digest"] for r in job.ranks.values() for line in r.said("done")}
            if len(done) != 1 or any(r.code != 0 for r in job.ranks.values()):
                raise Wrong(f"a false alarm, or different values, after {took:.0f} s of {size} ranks {words}\n{job.story()}")
        return done, took

    with busy_processes(load):
        some = 200
        while (took := digest_after(some)[1]) < seconds / 10:
            some *= 3
        steps = int(some * 1.1 * seconds / took)
        digest, took = digest_after(steps)
    if digest != digest_after(steps)[0]:
        raise Wrong(f"other values than alone after {steps} steps of {size} ranks {words}")
    return took, steps


def peak_memory(pid):
    """In KiB; 0 once it has ended."""
    try:
        with open(f"/proc/{pid}/status") as file:
            return int(re.search(r"VmHWM:\s+(\d+)", file.read())[1])
    except (OSError, TypeError):
        return 0


def open_descriptors(pid):
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


PROOF = b"ddpprov\x01"  # how the dialling side of a proof begins


class Crowd:
    """Strangers at every port that the ranks have ever listened on, until stopped: who is silent, who talks nonsense, who
    sends a byte a second, who says again what a rank of another job has said, who claims to be rank 1."""

    slow = 20  # of those who send a byte a second

    def __init__(self, ports, recorded, slow_at=None):
        printed = subprocess.run([FAULT_PROGRAM, "claim=1:2"], check=True, capture_output=True, text=True).stdout
        claims = [bytes.fromhex(text) for text in re.findall(r"claim=(\w+)", printed)]
        self.words = [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(4096), recorded, *claims, recorded[:40], b"\xff" * 64]
        self.held, self.refused, self.connected, self.answers = collections.deque(), 0, 0, []
        self.let_in = None  # how many were connected when the job began to train
        self.recorded, self.slow_at = recorded, slow_at  # the port where they send slowly; none: nobody does
        self.most_heard, self.hung_up = 0, 0  # bytes that a slow one sent before it was hung up on; how many were
        self.stop = False
        self.go_on(ports, 5000)
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def visit(self, port, words):
        try:
            s = socket.create_connection(("127.0.0.1", port), timeout=1)
        except OSError:
            self.refused += 1
            return
        self.connected += 1
        try:
            s.sendall(words)
            s.setblocking(False)
        except OSError:
            pass  # dropped already
        self.held.append((s, words))
        if len(self.held) > 1000:
            self.leave(*self.held.popleft())

    def drip(self):
        """Some send a hello, a byte a second, until they are hung up on; nobody else is there yet."""
        slow = [socket.create_connection(("127.0.0.1", self.slow_at), timeout=DEADLINE) for _ in range(self.slow)]
        for s in slow:
            s.setblocking(False)
        for sent in range(1, 10):
            for s in slow:
                with contextlib.suppress(OSError):
                    s.send(self.recorded[sent - 1:sent])
            time.sleep(SCALE)
            for s in list(slow):
                try:
                    if s.recv(1, socket.MSG_PEEK):
                        continue
                except BlockingIOError:
                    self.most_heard = max(self.most_heard, sent)
                    continue
                except OSError:
                    pass
                s.close()
                slow.remove(s)
                self.hung_up += 1
            if not slow or self.stop:
                break
        for s in slow:
            s.close()

    def leave(self, s, words):
        try:
            if answer := s.recv(4096):
                self.answers.append((words, answer))
        except OSError:
            pass
        s.close()

    def go_on(self, ports, rate):
        """At these ports from now on, so many a second."""
        self.ports, self.pace = sorted(ports), (time.monotonic(), self.refused + self.connected, rate)

    def run(self):
        turn = 0
        if self.slow_at is not None:
            self.drip()
            self.go_on(self.ports, self.pace[2])
        while not self.stop:
            ports = self.ports
            self.visit(ports[turn % len(ports)], self.words[turn // len(ports) % len(self.words)])
            turn += 1
            began, before, rate = self.pace
            ahead = began + (self.refused + self.connected - before) / rate - time.monotonic()
            if ahead > 0:
                time.sleep(ahead)

    def end(self):
        self.stop = True
        self.thread.join()
        while self.held:
            self.leave(*self.held.popleft())


def recorded_hello():
    """The first bytes of a rank of another job, with another secret."""
    with socket.socket() as listener, tempfile.TemporaryDirectory() as scratch:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with Job(2, [FAULT_PROGRAM, "join=2000"], secret_in(scratch), without=(0,), inherit=False,
                 port=listener.getsockname()[1]):
            listener.settimeout(DEADLINE)
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(DEADLINE)
                return connection.recv(4096)


def secret_in(directory):
    path = os.path.join(directory, "secret")
    with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
        file.write(os.urandom(32))
    return {"DDP_SECRET_FILE": path}


def besieged(steps, recorded, rate, elsewhere=False):
    """A job of two ranks beside strangers (recorded: None for none; elsewhere: while it trains, at a port that was never its
    own): digest, median step in ms, peak memory in KiB, most descriptors, and the crowd."""
    words = [FAULT_PROGRAM, "tensors=8", "elements=60000", "digests=1", f"steps={steps}", "join=20000", "handshake=3500"]
    crowd, descriptors, memory = None, 0, 0
    with tempfile.TemporaryDirectory() as scratch, Job(2, words, secret_in(scratch), without=(1,)) as job:
        try:
            ports = {job.port}
            end = time.monotonic() + DEADLINE
            while len(ports) < 2 and time.monotonic() < end:
                ports.update(listening_ports(job.ranks[0].pid))
                time.sleep(0.002)
            if recorded is not None and not elsewhere:
                crowd = Crowd(ports, recorded, job.port)
                while crowd.connected < 1000 and time.monotonic() < end:  # before rank 1 comes
                    time.sleep(0.01)
            job.start(1)
            while not job.ranks[1].said("start"):
                ports.update(listening_ports(job.ranks[1].pid))
                if time.monotonic() > end:
                    raise Wrong(f"the job did not come together\n{job.story()}")
                time.sleep(0.002)
            if elsewhere:
                with socket.socket() as unused:
                    unused.bind(("127.0.0.1", 0))
                    crowd = Crowd({unused.getsockname()[1]}, recorded)
            if crowd:
                crowd.go_on(crowd.ports if elsewhere else ports, rate)
            for rank in (0, 1):  # from here on nobody listens
                job.wait_for("step", rank)
            if crowd:
                crowd.let_in = crowd.connected
            while any(r.poll() is None for r in job.ranks.values()):
                for r in job.ranks.values():
                    descriptors = max(descriptors, open_descriptors(r.pid))
                    memory = max(memory, peak_memory(r.pid))
                if time.monotonic() > end + DEADLINE:
                    raise Wrong(f"it hangs\n{job.story()}")
                time.sleep(0.02)
        finally:
            if crowd:
                crowd.end()
        done = [line for r in job.ranks.values() for line in r.said("done")]
        if len(done) != 2 or len({line["digest"] for line in done}) != 1:
            raise Wrong(f"it did not end well\n{job.story()}")
        took = [int(line["took"]) * 1e-6 for line in job.ranks[0].said("step")]
        return done[0]["digest"], statistics.median(took), memory, descriptors, crowd


def strangers(pairs, steps, rate=1000):
    """Besieged and undisturbed jobs in turns. What was measured, in words, what was wrong, and how much longer the median step
    takes beside strangers at the job's own ports than beside as many at another port."""
    recorded = recorded_hello()
    alone, elsewhere, beside, wrong = [], [], [], []
    for _ in range(pairs):
        alone.append(besieged(steps, None, rate))
        elsewhere.append(besieged(steps, recorded, rate, elsewhere=True))
        beside.append(besieged(steps, recorded, rate))
        # Who begins a proof is told a random number and shown the other side's proof: 64 bytes, never the same.
        answers = beside[-1][4].answers
        wrong += [f"{words[:40]!r} was answered: {answer[:80]!r}" for words, answer in answers
                  if not words.startswith(PROOF) or len(answer) != 64]
        if len({answer[:32] for _, answer in answers}) != len(answers):
            wrong.append("a number was given twice")
    slow = [(run[4].most_heard, run[4].hung_up) for run in beside]
    if any(most not in (2, 3) or hung_up != Crowd.slow for most, hung_up in slow):  # a hello may take 3.5 s
        wrong.append(f"of those who sent a byte a second (bytes that one could send, connections that were closed): {slow}")
    if later := [run[4].connected - run[4].let_in for run in beside if run[4].connected > run[4].let_in + 1]:  # one may be on its way
        wrong.append(f"strangers were let in while the job trained: {later}")
    if len({run[0] for run in alone + elsewhere + beside}) != 1:
        wrong.append("other weights beside strangers")
    medians = [statistics.median(run[1] for run in runs) for runs in (alone, elsewhere, beside)]
    memory = [max(run[2] for run in runs) for runs in (alone, beside)]
    descriptors = [max(run[3] for run in runs) for runs in (alone, beside)]
    if memory[1] > memory[0] + (16 if SCALE == 1 else 128) * 1024:  # sanitizers keep what was freed for a while
        wrong.append(f"memory grows: {memory} KiB")
    if descriptors[1] > descriptors[0] + 8:
        wrong.append(f"descriptors grow after the start: {descriptors}")
    taken, refused = (sum(getattr(run[4], name) for run in beside) for name in ("connected", "refused"))
    said = (f"{taken} connections at the start, {sum(hung_up for _, hung_up in slow)} that sent a byte a "
            f"second were closed, {refused} refused while {pairs} jobs train: median step {medians[0]:.2f} ms "
            f"alone, {medians[1]:.2f} ms beside as many at another port (x {medians[1] / medians[0]:.3f}), {medians[2]:.2f} ms "
            f"beside those at the job's (x {medians[2] / medians[0]:.3f}); peak memory {memory[0]} and {memory[1]} KiB; "
            f"descriptors {descriptors[0]} and {descriptors[1]}")
    return said, wrong, medians[2] / medians[1]


def seconds_to_start(silent):
    """From the start of the last of two ranks until both have started, while `silent` connections to their ports say nothing."""
    words = [FAULT_PROGRAM, "steps=1", "tensors=1", "elements=8", "join=20000"]
    held = []
    with tempfile.TemporaryDirectory() as scratch, Job(2, words, secret_in(scratch), without=(1,)) as job:
        try:
            end = time.monotonic() + DEADLINE
            while len(ports := listening_ports(job.ranks[0].pid)) < 2 and time.monotonic() < end:
                time.sleep(0.002)
            for turn in range(silent):
                held.append(socket.create_connection(("127.0.0.1", ports[turn % len(ports)]), timeout=DEADLINE))
            began = time.monotonic()
            job.start(1)
            for rank in (0, 1):
                job.wait_for("start", rank)
            job.wait()
            if any(r.code != 0 for r in job.ranks.values()):
                raise Wrong(f"it did not end well beside {silent} silent connections\n{job.story()}")
            return max(int(r.said("start")[0]["at"]) for r in job.ranks.values()) * 1e-9 - began
        finally:
            for connection in held:
                connection.close()


def most_beside_silent_ones(alone):
    """Seconds to start: 50 ms later, or where a start itself takes long, as much longer."""
    return alone + max(0.05 * SCALE, 3 * alone)


def silence(pairs, silent=1000):
    """Medians of seconds_to_start() without and with silent connections, in turns."""
    runs = [(seconds_to_start(0), seconds_to_start(silent)) for _ in range(pairs)]
    return tuple(statistics.median(run[i] for run in runs) for i in (0, 1))


def percentile(values, share):
    values = sorted(values)
    return values[min(len(values) - 1, int(share * len(values)))]


def summary(row, results):
    """A line of the table."""
    seconds = [r["seconds"] for r in results if r["seconds"] is not None]
    times = "no error, as it should be | | "
    if seconds:
        times = f"{statistics.median(seconds):.3f} | {percentile(seconds, 0.99):.3f} | {max(seconds):.3f}"
    sizes = ", ".join(str(s) for s in sorted({r["ranks"] for r in results}))
    wrong, late = sum(bool(r["wrong"]) for r in results), sum(bool(r["late"]) for r in results)
    return f"| {row.number} | {row.what} | {sizes} | {sum(r['count'] for r in results)} | {wrong} | {late} | {times} |"


HEAD = ("| row | fault | ranks | injections | wrong | late | median, s | p99, s | longest, s |\n"
        "|---|---|---|---|---|---|---|---|---|")


def main():
    words = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    words.add_argument("--rows", default="", help="such as 10,31 or 26-30; default: all")
    words.add_argument("--ranks", default="2,3,4", help="numbers of ranks")
    words.add_argument("--injections", type=int, default=6, help="of a row, over all numbers of ranks")
    words.add_argument("--seed", type=int, default=1)
    words.add_argument("--only", type=int, help="the number of one injection, to repeat it")
    words.add_argument("--starve", type=float, default=0, help="seconds of jobs, and of one job, beside 20 busy processes")
    words.add_argument("--strangers", type=int, default=0, help="jobs, each alone and beside strangers")
    words.add_argument("--lanes", type=int, default=4, help="most jobs at a time, in rows that mostly wait")
    words.add_argument("--json", help="a file for all results")
    words.add_argument("--table", help="a file for the table, written after every row")
    asked = words.parse_args()
    sizes = [int(s) for s in asked.ranks.split(",")]
    all_results, lines, failures = [], [], []
    for row in chosen_rows(asked.rows):
        cases = cases_of(row, sizes, asked.seed, asked.injections, asked.only)
        if not cases:
            continue
        begin = time.monotonic()
        results = run_cases(row, cases, asked.seed, asked.lanes)
        all_results += results
        lines.append(summary(row, results))
        print(f"{lines[-1]}  {time.monotonic() - begin:.0f} s", flush=True)
        for text in [r["wrong"] or r["late"] for r in results if r["wrong"] or r["late"]]:
            failures.append(text)
            print(text, flush=True)
        write(asked, all_results, lines)
    if asked.starve:
        jobs, wrong = starve(asked.starve, 20, asked.seed)
        lines.append(f"| 24 | {jobs} jobs in {asked.starve:.0f} s beside 20 busy processes | 2, 3, 4 | {jobs} | {len(wrong)} "
                     "| 0 | no error, as it should be | | |")
        print(lines[-1], *wrong, sep="\n")
        failures += wrong
        for size, words in (4, SHAPES[0] + MESSAGES[0]), (3, SHAPES[0]):  # with messages, and in memory that ranks share
            try:
                took, steps = starve_at_length(asked.starve, 20, size, words)
            except (Wrong, AssertionError) as problem:
                failures.append(f"starved for {asked.starve} s, {size} ranks: {problem}")
                print(failures[-1])
                continue
            lines.append(f"| 24 | one job of {steps} steps beside 20 busy processes, for {took:.0f} s | {size} | 1 | 0 "
                         "| 0 | no error, as it should be | | |")
            print(lines[-1])
        write(asked, all_results, lines)
    if asked.strangers:
        said, wrong, ratio = strangers(asked.strangers, 600)
        alone, beside = silence(asked.strangers)
        print("strangers: " + said, *wrong, sep="\n")
        print(f"silent connections: {alone * 1000:.1f} ms to start without them, {beside * 1000:.1f} ms beside 1,000")
        failures += wrong
        if ratio > MOST_SLOWER or beside > most_beside_silent_ones(alone):
            failures.append("strangers cost time")
    return 1 if failures else 0


def write(asked, results, lines):
    if asked.json:
        with open(asked.json, "w") as file:
            json.dump(results, file, indent=1)
    if asked.table:
        with open(asked.table, "w") as file:
            file.write("\n".join([HEAD, *lines]) + "\n")


def chosen_rows(text):
    if not text:
        return ROWS
    numbers = set()
    for word in text.split(","):
        low, _, high = word.partition("-")
        numbers |= {str(n) for n in range(int(low), int(high) + 1)} if high else {word}
    return [row for row in ROWS if row.number in numbers]


def cases_of(row, sizes, seed, injections, only=None):
    """(ranks, number): the same share for each number of ranks that the row can have."""
    sizes = [s for s in sizes if plan_of(row, s, seed, 0) is not None]
    wanted = max(1, round(injections * row.share))
    cases, made = [], 0
    if only is not None:
        return [(size, only) for size in sizes]
    while sizes and made < wanted:
        size = sizes[len(cases) % len(sizes)]
        cases.append((size, len(cases) // len(sizes)))
        made += plan_of(row, size, seed, cases[-1][1]).count
    return cases


def run_cases(row, cases, seed, lanes):
    with concurrent.futures.ThreadPoolExecutor(min(row.lanes, lanes)) as pool:
        return list(pool.map(lambda case: attempt(row, case[0], seed, case[1]), cases))


if __name__ == "__main__":
    sys.exit(main())
