"""Rows 1 to 9 of the fault matrix, faults of the start, for chaos.py: each draws who is at fault, how, when and in what job, and
makes a Plan whose trial does all of it.

After each injection: who must fail has said what docs/faults.md, launching.md and security.md promise, in one text where they
promise one, with the exit code that belongs to it, neither late nor, where a rank might yet come, early; a job that must go on
has ended with the digest of an undisturbed one; each rank of a job that never started has left a flight record with its error, as
have those that refuse each other's model, and no other rank has; no process and no other file is left.
"""

import contextlib
import os
import re
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time

from chaos_rows import FAULT_PROGRAM, REFERENCES, SOON, Late, Plan, Row, Wrong, over_mpi, without
from chaos_strangers import PROOF, recorded_hello, secret_in
from jobs import DEADLINE, SCALE, Job, check_flight_records, environment, exit_code_of, flight_record, listening_ports

JOIN = 1.5 * SCALE  # of ranks that wait in vain; those that must meet have the 5 s of ddp::timing::for_tests
SHORT = f"join={round(1000 * JOIN / SCALE)}"
HANDSHAKE = 0.5 * SCALE
IN_VAIN = JOIN + 2 * HANDSHAKE  # docs/faults.md, "Times"
LATE_RANK = 1.5  # a rank 0 that has failed waits so long for ranks that have not come (tcp_store_server.hpp)
WORDS = ("tensors=4", "elements=800", "bucket=4096")
STEPS = 6
# A third of the jobs has a secret: proved to rank 0 only, shown to it (ddp::tcp), proved between all ranks, and with TLS.
WAYS = ("",) * 8 + ("secret", "shown", "proof", "tls")
PROVEN = ("secret", "proof", "tls")
HERE = re.escape(socket.gethostname())
STRANGE = "connections with another secret, DDP_TLS or DDP_JOB_ID"


def process(rank):
    return rf"pid {rank.pid} on {HERE}"


class Start(Job):
    """A job that is started rank by rank, in a directory of its own; way: one of WAYS."""

    def __init__(self, size, way, *words, memory=True, steps=STEPS, **how):
        self.scratch = tempfile.TemporaryDirectory(prefix="chaos")
        self.way, self.steps = way, steps
        self.records = os.path.join(self.scratch.name, "records")
        os.mkdir(self.records)
        variables = {"TMPDIR": self.scratch.name, "DDP_FLIGHT_DIR": self.records}
        if way:
            variables.update(secret_in(self.scratch.name))
        if way == "tls":
            variables["DDP_TLS"] = "1"
        if not memory:
            variables["DDP_SHARE_MEMORY"] = "0"
        words = (*WORDS, f"steps={steps}", "digests=1", *{"proof": ("prove=1",), "shown": ("protect=0",)}.get(way, ()), *words)
        super().__init__(size, [FAULT_PROGRAM, *words], variables, without=range(size), **how)

    def begin(self, rank, *words, name=None, **variables):
        """Starts it, with options and variables of its own. When that was."""
        command, inherit, began = self.command, self.inherit, time.monotonic()
        self.command = [*command, *words]
        self.inherit = inherit and not isinstance(name, str)  # a process too many has no socket of this job
        try:
            self.start(rank, name, **variables).began = began
        finally:
            self.command, self.inherit = command, inherit
        return began

    def begin_all(self, order, *words):
        """(pause, rank) after the other. When the last was started."""
        began = 0.0
        for pause, rank in order:
            time.sleep(pause)
            began = self.begin(rank, *words)
        return began

    def __exit__(self, *what):
        super().__exit__(*what)
        self.scratch.cleanup()

    def wrong(self, text):
        return Wrong(f"{text}\n{self.story()}")

    def told(self, whose, pattern, in_chorus=True):
        """All of these have failed with a text that matches, and if in_chorus with one; the texts."""
        texts = {w: self.ranks[w].error() for w in whose}
        if in_chorus and len(set(texts.values())) > 1:
            raise self.wrong(f"not one verdict: {texts}")
        for w, text in texts.items():
            if not re.search(pattern, text):
                raise self.wrong(f"of {w} another error than {pattern}: {text}")
            if self.ranks[w].code != exit_code_of(text):
                raise self.wrong(f"exit code {self.ranks[w].code} of {w}, not {exit_code_of(text)}")
            if text not in self.ranks[w].err.splitlines():
                raise self.wrong(f"run_main of {w} does not say: {text}")
            if self.ranks[w].said("done") or self.ranks[w].said("step"):
                raise self.wrong(f"{w} has trained")
        return texts

    def went_on(self, whose):
        """These are the ranks of a job that has ended well, as if nothing had been."""
        codes = [self.ranks[w].code for w in whose]
        done = [line for w in whose for line in self.ranks[w].said("done")]
        if codes != [0] * self.size or sorted(line["rank"] for line in done) != [str(r) for r in range(self.size)]:
            raise self.wrong(f"the job did not go on: exit codes {codes}")
        right = REFERENCES.of(self.size, WORDS)[self.steps]
        if {line["digest"] for line in done} != {right} or {line["replicas"] for line in done} != {"identical"}:
            raise self.wrong(f"other weights than without the fault, which are {right}")
        made = [int(line["channels"]) for w in whose for line in self.ranks[w].said("start")]
        least = {"": 0, "shown": 0, "secret": 1}.get(self.way, self.size)  # with rank 0's store, or all others as well
        if min(made) < least or (least == 0 and max(made) > 0):
            raise self.wrong(f"connections that prove or encrypt: {made}, although it is {self.way or 'plain'}")

    def never_came(self, missing, since, and_then=""):
        """All others have waited for them in vain, rank 0 since then: not less than it takes."""
        here = without(self.size, *missing)
        names = ", ".join(map(str, missing))
        self.told(here, rf"^DDP-E201 rendezvous: ranks \{{{names}\}} never joined "
                        rf"\({len(here)} of {self.size} present after \d+ s\)\. Check .*{and_then}")
        self.not_early(here, since)

    def no_rank_0(self, whose, where, last):
        """Each of them has looked for rank 0 there, and gave up when its time was over, not before."""
        for w in whose:
            self.told([w], rf"^DDP-E201 rendezvous: rank {w} cannot reach rank 0 at {re.escape(where)} "
                           rf"\([1-9]\d* attempts?, the last: {last}\)\. Check ")
            self.not_early([w], self.ranks[w].began)

    def not_early(self, whose, since):
        for w in whose:
            if self.ranks[w].ended - since < 0.8 * JOIN:  # ranks end their waits up to a pause before
                raise self.wrong(f"{w} waited for {self.ranks[w].ended - since:.3f} s only")

    def seconds(self, whose, since, bound):
        """From then until the last of them had ended."""
        took = max(self.ranks[w].ended for w in whose) - since
        if took > bound:
            raise Late(f"{took:.3f} s instead of {bound} s until {list(whose)} had ended\n{self.story()}", took)
        return took

    def nothing_left(self, errors=()):
        """errors: by rank, of a job that has started. Who was refused, or waited in vain, has a flight record as well."""
        if left := self.left_behind():
            raise self.wrong(f"left behind: {left}")
        if left := set(os.listdir(self.scratch.name)) - {"records", "secret"}:
            raise self.wrong(f"files are left: {left}")
        if errors:
            check_flight_records(self.records, errors)
        records = {}
        for name in os.listdir(self.records):
            lines = flight_record(os.path.join(self.records, name))
            records[lines[0]["pid"]] = name, lines
        for which, rank in self.ranks.items():
            name, lines = records.pop(rank.pid, ("", []))
            text = rank.error()
            if rank.code in (0, -signal.SIGKILL) or which in errors or rank.code == 101 and not lines:
                if lines and which not in errors:
                    raise self.wrong(f"{which} has written the flight record {name}")
                continue
            told = [line["text"] for line in lines if line["event"] == "verdict_text"]
            kept = {line["event"]: line for line in lines}
            if (len(told) != 1 or told[0].removesuffix("...") not in text or kept["verdict"]["code"] != rank.code
                    or not {"start", "joining", "failed", "dump"} <= kept.keys()):
                raise self.wrong(f"the flight record {name or 'that is missing'} of {which}: {lines}")
        if records:
            raise self.wrong(f"flight records of nobody: {records}")


def in_use(port, by):
    """by: the process, which /proc does not know where the port is bound and nothing listens."""
    who = rf" \(pid {by}, [^)]+\)" if by else ""
    return (rf"port {port} is in use by another program on 127\.0\.0\.1:{port}{who}, or by another process with RANK=0\. "
            "Choose another MASTER_PORT, or start the job with ddprun")


def planned(size, trial, way, *drawn):
    """drawn: in words, all that the trial will do."""
    def guarded():
        try:
            return trial()
        except (OSError, ValueError, LookupError) as problem:  # such as of a socket: the job is not as it should be
            raise Wrong(f"{type(problem).__name__}: {problem}") from problem
    return Plan(size, (), (*drawn, way or "no secret"), secured=way, trial=guarded)


def drawn_job(draw):
    """How it is protected, and whether its ranks share memory."""
    return draw.choice(WAYS), draw.random() < 0.75


def drawn_order(draw, ranks, most=0.15):
    """(pause, rank): all of them, half of the time at once."""
    most *= SCALE * draw.randrange(2)
    return [(draw.uniform(0, most), rank) for rank in draw.sample(list(ranks), len(ranks))]


@contextlib.contextmanager
def closed_port():
    """A port of 127.0.0.1 that refuses connections, and that nobody else gets."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@contextlib.contextmanager
def black_hole():
    """A port that neither takes connections nor refuses them: a queue that is full."""
    with contextlib.ExitStack() as held:
        wall = held.enter_context(socket.socket())
        wall.bind(("127.0.0.1", 0))
        wall.listen(0)
        for _ in range(4):
            visitor = held.enter_context(socket.socket())
            visitor.setblocking(False)
            visitor.connect_ex(wall.getsockname())
        yield wall.getsockname()[1]


class Program:
    """Another program that listens: words: what it says to each that connects, once it has heard `after` bytes; None: it takes
    nobody's connection. closes: it then hangs up."""

    def __init__(self, words, after=0, closes=True):
        self.words, self.after, self.closes, self.held = words, after, closes, []
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=16)
        self.port = self.listener.getsockname()[1]
        self.thread = threading.Thread(target=self.serve, daemon=True)
        if words is not None:
            self.thread.start()

    def serve(self):
        with contextlib.suppress(OSError):
            while True:
                visitor, _ = self.listener.accept()
                with contextlib.suppress(OSError):
                    visitor.settimeout(DEADLINE)
                    heard = b""
                    while len(heard) < self.after and (more := visitor.recv(4096)):
                        heard += more
                    visitor.sendall(self.words)
                    if self.closes:
                        visitor.close()
                self.held.append(visitor)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)  # ends accept()
        self.listener.close()
        if self.words is not None:
            self.thread.join(DEADLINE)
        for visitor in self.held:
            visitor.close()


def row_1(draw, size):
    """Ranks that never start."""
    missing = sorted(draw.sample(range(size), draw.randint(1, size - 1)))
    order = drawn_order(draw, without(size, *missing))
    way, memory = drawn_job(draw)

    def trial():
        with contextlib.ExitStack() as held:
            port = held.enter_context(closed_port()) if 0 in missing else None
            job = held.enter_context(Start(size, way, SHORT, memory=memory, inherit=port is None, port=port))
            began = job.begin_all(order)
            job.wait()
            here = without(size, *missing)
            if 0 in missing:
                job.no_rank_0(here, f"127.0.0.1:{port}", "Connection refused")
            else:
                job.never_came(missing, job.ranks[0].began)
            job.nothing_left()
            return job.seconds(here, began, IN_VAIN)
    return planned(size, trial, way, f"{missing} never start", f"{order}", f"memory {memory}")


def row_2(draw, size):
    """A rank is started two or three times: before all have come, together with all, or when they train."""
    when = draw.choice(("early", "together", "late"))
    rank = draw.randrange(size)
    if when == "early" and size == 2:
        rank = 0  # with rank 1 the job is complete
    last = draw.choice(without(size, 0, rank)) if when == "early" else None
    names = [f"twin {n}" for n in range(draw.randint(1, 2))]
    everybody = [*without(size, *([last] if when == "early" else [])), *(names if when == "together" else [])]
    order = draw.sample(everybody, len(everybody))
    pause = draw.uniform(0, 0.1) * SCALE
    way, memory = drawn_job(draw)

    def trial():
        short = (SHORT,) if when != "early" else ()
        with Start(size, way, *short, *(("pause=20", "digests=0") if when == "late" else ()), memory=memory,
                   steps=40 if when == "late" else STEPS) as job:
            if rank == 0 and when == "together":
                order.sort(key=lambda who: who in names)  # the socket of this job is for the first
            for who in order:
                job.begin(rank if who in names else who, name=who)
            if when == "late":
                for r in range(size):
                    job.wait_for("start", r)
            time.sleep(pause)
            if when == "late" and any(job.ranks[r].poll() is not None for r in range(size)):
                raise job.wrong("it ended before anything was injected")
            if when != "together":
                for name in names:
                    job.begin(rank, name=name)
            twins = [rank, *names]
            began = job.ranks[names[-1]].began
            if when == "early":
                end = time.monotonic() + DEADLINE
                while len([w for w in twins if job.ranks[w].poll() is None]) > 1 and time.monotonic() < end:
                    time.sleep(0.005)
                job.begin(last)
            job.wait()
            held, *more = [w for w in twins if job.ranks[w].code == 0] or [None]
            if held is None or more:
                raise job.wrong(f"not one of {twins} is in the job")
            refused = [w for w in twins if w != held]
            second = (rf"rank {rank} \(PROCESS\) connected a second time: {process(job.ranks[held])} already has that rank\. "
                      "Give every process a RANK of its own")
            if rank == 0:
                second = in_use(job.port, r"\d+")
                if when != "early":  # the holder may have met its ranks before it can be named
                    second = f"({second}|{in_use(job.port, None)})"
            # Who comes when all have met finds nobody. A rank 0 waits for others, if no connection or third one holds the port.
            gone = (r"ranks \{.*\} never joined \(1 of \d present" if rank == 0 else
                    rf"rank {rank} cannot reach rank 0 at 127\.0\.0\.1:{job.port} ")
            for w in refused:
                pattern = {"early": second, "late": f"({second}|{gone})" if rank == 0 else gone,
                           "together": f"({second}|{gone})"}[when].replace("PROCESS", process(job.ranks[w]))
                job.told([w], rf"^DDP-E201 rendezvous: {pattern}")
            job.went_on([w for w in (*range(size), *names) if w not in refused])
            job.nothing_left()
            took = job.seconds(refused, began, SOON if when == "early" else IN_VAIN)
            return took if when == "early" else None
    return planned(size, trial, way, f"rank {rank} {len(names)} more times, {when}", f"{order}", f"last {last}",
                   f"pause {pause:.3f}", f"memory {memory}")


def row_3(draw, size):
    """RANK or WORLD_SIZE makes no sense on one rank, or there are two numbers of ranks."""
    return draw.choice((nonsense, nonsense, two_sizes))(draw, size)


def nonsense(draw, size):
    rank = draw.randrange(size)
    numbers = ("", "one", " 1", "1 ", "0x1", "1.5", "+1", "9" * 20, f"-{draw.randint(1, 99999)}", "1,2")
    name = draw.choice(("RANK", "WORLD_SIZE"))
    if name == "RANK":
        value = draw.choice((None, *numbers, str(size), str(size + draw.randint(0, 99999))))
    else:
        value = draw.choice((None, *numbers, "0", str(draw.randint(65537, 10**9)), *([str(rank)] * 3 if rank > 0 else [])))
    pattern = rf'{name} is "{re.escape(value)}"; expected ' if value is not None else rf"set, but not {name}\. "
    if name == "WORLD_SIZE" and value == str(rank) and rank > 0:
        pattern = rf'RANK is "{rank}"; expected a rank below WORLD_SIZE \({rank}\)'
    mended = draw.random() < 0.5
    order = drawn_order(draw, range(size))
    way, memory = drawn_job(draw)

    def trial():
        with contextlib.ExitStack() as held:
            port = held.enter_context(closed_port()) if rank == 0 and not mended else None
            short = () if mended else (SHORT,)
            job = held.enter_context(Start(size, way, *short, memory=memory, inherit=port is None, port=port))
            for pause, r in order:
                time.sleep(pause)
                if r == rank:
                    job.begin(r, name="wrong", **{name: value})
                else:
                    job.begin(r)
            began = time.monotonic()
            job.wait(which=["wrong"])
            if mended:
                job.begin(rank)
            job.wait()
            job.told(["wrong"], "^DDP-E101 environment: .*" + pattern)
            if mended:
                job.went_on(range(size))
            elif rank == 0:
                job.no_rank_0(range(1, size), f"127.0.0.1:{port}", "Connection refused")
            else:
                job.never_came([rank], job.ranks[0].began)
            job.nothing_left()
            if not mended:
                job.seconds(without(size, rank), began, IN_VAIN)
            return job.seconds(["wrong"], job.ranks["wrong"].began, SOON)
    return planned(size, trial, way, f"{name}={value!r} on rank {rank}{', then right' if mended else ''}", f"{order}",
                   f"memory {memory}")


def two_sizes(draw, size):
    odd = draw.randrange(size)
    other = draw.choice([n for n in range(max(2, odd + 1), size + 4) if n != size])
    order = drawn_order(draw, range(size))
    way, memory = drawn_job(draw)

    def trial():
        with Start(size, way, SHORT, memory=memory) as job:
            for pause, rank in order:
                time.sleep(pause)
                began = job.begin(rank, **({"WORLD_SIZE": str(other), "LOCAL_WORLD_SIZE": str(other)} if rank == odd else {}))
            job.wait()
            everybody = range(size)
            said = r"rank {0} \({1}\) has WORLD_SIZE {2}, rank 0 has {3}\. All ranks must be started with the same"
            if odd > 0:
                job.told(everybody, "^DDP-E201 rendezvous: " + said.format(odd, process(job.ranks[odd]), other, size))
            else:  # each of the others differs from rank 0: all hear of the first that came
                own = "|".join(said.format(r, process(job.ranks[r]), size, other) for r in range(1, size))
                first, = job.told([0], f"^DDP-E201 rendezvous: ({own})").values()
                late = r"|^DDP-E201 rendezvous: rank \d cannot reach rank 0 at " if other < size else ""
                for r in range(1, size):  # who comes when rank 0 has told all that it expected finds nobody
                    job.told([r], f"^{re.escape(first)}${late}")
            job.nothing_left()
            # Rank 0 waits for those that it still expects to come.
            bound = SOON if odd > 0 else SOON + LATE_RANK if other > size else IN_VAIN
            return job.seconds(everybody, began, bound)
    return planned(size, trial, way, f"WORLD_SIZE={other} on rank {odd}", f"{order}", f"memory {memory}")


# How rank 0 refuses who is of another version.
HELLO = struct.Struct("<QIIiiQ72s64s")  # tcp_store_protocol.hpp: store_hello
OURS = "another version of ddp"


def claim_of(rank, size, secret=b"", **variables):
    """The fields of what a rank of this program says first."""
    env = environment(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT="1", **variables)
    printed = subprocess.run([FAULT_PROGRAM, f"claim={rank}:{size}"], env=env, check=True, capture_output=True, text=True).stdout
    fields = list(HELLO.unpack(bytes.fromhex(re.findall(r"claim=(\w+)", printed)[0])))
    fields[-1] = secret.ljust(64, b"\0")
    return fields


def heard_from(connection):
    """All that comes until the other side hangs up."""
    heard = b""
    with contextlib.suppress(ConnectionResetError):
        while more := connection.recv(4096):
            heard += more
    return heard


def row_4(draw, size):
    """A rank of another version of the library, which a socket of ours plays."""
    return (rank_0_of_another_version if draw.random() < 0.25 else rank_of_another_version)(draw, size)


def rank_of_another_version(draw, size):
    rank = draw.randrange(size)
    mended = rank == 0 or draw.random() < 0.5  # the right one comes as well
    field = draw.choice(("version", "version", "record_bytes"))
    change = draw.choice((1, 3, 1 << draw.randrange(32), draw.randrange(1, 1 << 32)))
    last = rank or draw.randint(1, size - 1)  # until it comes the job waits
    order = drawn_order(draw, without(size, last))
    way, memory = drawn_job(draw)

    def trial():
        with Start(size, way, *(() if mended else (SHORT,)), memory=memory) as job:
            secret = b""
            if way == "shown":
                with open(os.path.join(job.scratch.name, "secret"), "rb") as file:
                    secret = file.read()
            hello = claim_of(rank, size, secret)
            version = hello[1]
            hello[{"version": 1, "record_bytes": 2}[field]] ^= change
            job.begin_all(order)
            with socket.create_connection(("127.0.0.1", job.port), timeout=DEADLINE) as stranger:
                stranger.sendall(HELLO.pack(*hello))
                began = time.monotonic()
                heard = heard_from(stranger)
                took = time.monotonic() - began
            said = (f"rank {rank} (pid 1 on elsewhere) was built with {OURS}: {hello[1]}, rank 0 has {version}. "
                    "All ranks must run the same program")
            proves = way in PROVEN  # nothing is read of who does not
            if not proves and heard != struct.pack("<4I", 5, 0, len(said), 0) + said.encode():
                raise job.wrong(f"answered {heard}, not: {said}")
            if proves and heard != b"":
                raise job.wrong(f"who did not prove the secret heard {heard}")
            if mended:
                job.begin(last)
            job.wait()
            if mended:
                job.went_on(range(size))
            else:
                job.never_came([rank], job.ranks[0].began, re.escape("; " + said) if not proves else f"; {STRANGE}: 1")
                job.seconds(without(size, rank), job.ranks[order[-1][1]].began, IN_VAIN)
            job.nothing_left()
            if took > SOON:
                raise Late(f"{took:.3f} s instead of {SOON} s until it was refused\n{job.story()}", took)
            return took
    return planned(size, trial, way, f"rank {rank} of another {field}, {change}{', then the right one' if mended else ''}",
                   f"{order}, then {last}", f"memory {memory}")


def rank_0_of_another_version(draw, size):
    version = draw.choice((101, 99, draw.randrange(1, 1 << 32)))
    order = drawn_order(draw, range(1, size))
    way, memory = draw.choice(("", "", "shown", "secret", "proof", "tls")), draw.random() < 0.75
    said = f"rank 1 (pid 1 on elsewhere) was built with {OURS}: 100, rank 0 has {version}. All ranks must run the same program"

    def trial():
        answer = struct.pack("<4I", 5, 0, len(said), 0) + said.encode()
        with Program(answer, 40) as other, Start(size, way, SHORT, memory=memory, inherit=False, port=other.port) as job:
            began = job.begin_all(order)
            job.wait()
            here = range(1, size)
            if way in ("", "shown"):
                job.told(here, f"^DDP-E201 rendezvous: {re.escape(said)}$")
            else:
                job.told(here, "^DDP-E201 rendezvous: " + NO_PROOF, in_chorus=False)
            job.nothing_left()
            return job.seconds(here, began, SOON if way in ("", "shown") else IN_VAIN)
    return planned(size, trial, way, f"rank 0 of version {version}", f"{order}", f"memory {memory}")


NO_PROOF = r"rank \d( has reached .*, but what answers there does not know this job's secret\. | cannot reach rank 0 at )"


def other_parameters(draw, size):
    """Some ranks have other parameters: options of all, those of each odd rank, and what all ranks say."""
    tensors, elements = draw.randint(2, 8), draw.choice((8, 400, 20000))
    odd = sorted(draw.sample(range(size), draw.randint(1, size - 1)))
    kind = draw.choice(("shape", "all shapes", "count", "order"))
    count, width = tensors, elements // 4
    if kind == "count":
        count = draw.choice([n for n in range(1, tensors + 3) if n != tensors])
    elif kind == "all shapes":
        width = draw.choice([n for n in (1, width - 1, width + 1, 2 * width) if n not in (0, width)])
    named = odd[0] if 0 not in odd else without(size, *odd)[0]

    def shape(number, is_odd):
        if number >= (count if is_odd else tensors):
            return "absent"
        last = kind == "shape" and is_odd and number + 1 == tensors
        name = tensors - 1 - number if kind == "order" and is_odd else number
        return f"'w{name}' [4 x {(width if is_odd else elements // 4) + last}] float"
    first = next(n for n in range(10) if shape(n, True) != shape(n, False))
    said = (f"rank {named} differs from rank 0: parameter #{first} is {shape(first, 0 in odd)} on rank 0 and "
            f"{shape(first, 0 not in odd)} on rank {named}. Build the same model with the same trainer settings on all ranks.")
    fault = {"shape": "model", "order": "order"}.get(kind)
    own = {rank: (f"fault={rank}:{fault}:construct:0",) if fault else (f"tensors={count}", f"elements={4 * width}") for rank in odd}
    return (f"tensors={tensors}", f"elements={elements}"), own, f"^DDP-E102 model differs: {re.escape(said)}"


def row_5(draw, size):
    words, own, pattern = other_parameters(draw, size)
    order = drawn_order(draw, range(size))
    way, memory = drawn_job(draw)

    def trial():
        with Start(size, way, *words, memory=memory) as job:
            for pause, rank in order:
                time.sleep(pause)
                job.begin(rank, *own.get(rank, ()))
            return refused_model(job, pattern)
    return planned(size, trial, way, f"{words}, {own}: {pattern}", f"{order}", f"memory {memory}")


def row_5_mpi(draw, size):
    words, own, pattern = other_parameters(draw, size)
    return Plan(size, words, own=own, verdicts=((tuple(range(size)), pattern),))


def refused_model(job, pattern):
    """All ranks say so before any step; seconds from when the last of them was there."""
    everybody = range(job.size)
    job.wait()
    texts = job.told(everybody, pattern)
    if any(job.ranks[r].said("values") for r in everybody):
        raise job.wrong("a trainer was made")
    job.nothing_left(texts)
    began = max(int(line["at"]) for r in everybody for line in job.ranks[r].said("start"))
    took = (max(int(line["at"]) for r in everybody for line in job.ranks[r].said("error")) - began) * 1e-9
    if took > SOON:
        raise Late(f"{took:.3f} s instead of {SOON} s\n{job.story()}", took)
    return took


EXCHANGE, AUTO = "another allreduce algorithm, exchange or strategy", r"auto\(.*\)"
COMPARED = (  # an option of the program; what is said to differ; that of most ranks, and of those with the option
    ("fault={0}:rate:construct:0", "another optimizer or its settings", r"sgd\(lr 0\.1\d*, .*\)", r"sgd\(lr 0\.2\d*, .*\)"),
    ("bucket=8192", "another bucket policy", "5 buckets", "3 buckets"),
    ("bucket=1000", "another bucket policy", "5 buckets", "17 buckets"),
    *((f"algorithm={name}", EXCHANGE, AUTO, name + r"(\(.*\))?")
      for name in ("ring", "naive", "direct", "recursive_doubling", "halving_doubling")),
    *((f"exchange={name}", EXCHANGE, AUTO, name + r"\(.*feedback .*\)")
      for name in ("bfloat16", "half", "int8", "top_k", "random_k", "power_sgd")),
    ("update=sharded", r"another training_options\.update or overlap_gather", "replicated", "sharded"),
    ("update=replicated", r"another training_options\.update or overlap_gather", "sharded", "replicated"),
    ("clip=1", r"another training_options\.clip", "none", "clip_by_global_norm 1"),
    ("strategy=averaging", "", r"(share_memory|data_parallel) #1.*", "local_parallel #1"))
# What may differ, and what rank 0 says of it, if it does.
FREE = (("share=0", {}, ""), ("", {"DDP_SHARE_MEMORY": "0"}, "path of messages within a host is"),
        ("thread=rests", {}, "communication thread is"), ("", {"DDP_COMMUNICATION_THREAD": "rests"}, "communication thread is"),
        ("join=20000", {}, r"timing\.join is"), ("handshake=900", {}, r"timing\.handshake is"), ("pause=3", {}, ""),
        ("collective=9000", {}, r"timing\.collective is"), ("straggler=2000", {}, r"timing\.straggler is"),
        ("dead=2500", {}, r"timing\.dead is"))
SENSELESS = ({"DDP_SHARE_MEMORY": "yes"}, {"DDP_TLS": "maybe"}, {"DDP_TIMEOUT_DEAD": "soon"}, {"DDP_TIMEOUT_JOIN": "-1"},
             {"DDP_COMMUNICATION_THREAD": "sleeps"}, {"DDP_PORTS": "0"}, {"DDP_INSECURE": "perhaps"})


def row_6(draw, size):
    """Some ranks have other settings."""
    return draw.choice((compared, compared, compared, free, senseless, apart, apart))(draw, size)


def other_settings(draw, size, memory):
    """Some ranks have another setting that changes results: options of each of them, and what all ranks say."""
    odd = sorted(draw.sample(range(size), draw.randint(1, size - 1)))
    # `automatic` is sharded where ranks share memory, and replicated elsewhere.
    same = f"update={'sharded' if memory else 'replicated'}"
    word, what, usual, other = draw.choice([one for one in COMPARED if one[0] != same])
    named = odd[0] if 0 not in odd else without(size, *odd)[0]
    zero, here = (other, usual) if 0 in odd else (usual, other)
    pattern = (rf"^DDP-E102 model differs: rank {named} differs from rank 0: {what} "
               rf"\({zero} on rank 0, {here} on rank {named}\)\. ")
    if word.startswith("strategy"):  # another trainer, which begins with another collective
        pattern = (rf"^DDP-E205 mismatch: ranks disagree about operation #1: rank \d is in ({usual}, rank \d in {other}|"
                   rf"{other}, rank \d in {usual})\. ")
    return {rank: (word.format(rank),) for rank in odd}, pattern


def compared(draw, size):
    way, memory = drawn_job(draw)
    order = drawn_order(draw, range(size))
    own, pattern = other_settings(draw, size, memory)

    def trial():
        with Start(size, way, memory=memory) as job:
            for pause, rank in order:
                time.sleep(pause)
                job.begin(rank, *own.get(rank, ()))
            return refused_model(job, pattern)
    return planned(size, trial, way, f"{own}: {pattern}", f"{order}", f"memory {memory}")


def row_6_mpi(draw, size):
    own, pattern = other_settings(draw, size, memory=True)
    return Plan(size, WORDS, own=own, verdicts=((tuple(range(size)), pattern),))


def free(draw, size):
    """What changes none: the job goes on."""
    odd = sorted(draw.sample(range(size), draw.randint(1, size - 1)))
    word, variables, said = draw.choice(FREE)
    order = drawn_order(draw, range(size))
    way, memory = drawn_job(draw)
    if "DDP_SHARE_MEMORY" in variables and not memory:  # all of them have that setting
        said = ""

    def trial():
        with Start(size, way, memory=memory) as job:
            for pause, rank in order:
                time.sleep(pause)
                job.begin(rank, *([word] if rank in odd and word else []), **(variables if rank in odd else {}))
            job.wait()
            job.went_on(range(size))
            job.nothing_left()
            told = re.findall("ranks have different settings: (.*)", job.ranks[0].err)
            if len(told) != bool(said) or not all(re.match(said, line) for line in told):
                raise Wrong(f"rank 0 was to say {said!r}, and said {told}\n{job.story()}")
    return planned(size, trial, way, f"{word} {variables} on {odd}", f"{order}", f"memory {memory}")


def senseless(draw, size):
    """A variable that has no such value: that rank says so at once, and the others wait for it in vain."""
    rank = draw.randrange(size)
    variables = draw.choice(SENSELESS)
    (name, value), = variables.items()
    order = drawn_order(draw, range(size))
    way, memory = drawn_job(draw)

    def trial():
        with contextlib.ExitStack() as held:
            port = held.enter_context(closed_port()) if rank == 0 else None
            job = held.enter_context(Start(size, way, SHORT, memory=memory, inherit=port is None, port=port))
            for pause, r in order:
                time.sleep(pause)
                began = job.begin(r, **(variables if r == rank else {}))
            job.wait()
            job.told([rank], f'^DDP-E101 environment: {name} is "{value}"; expected ')
            if rank == 0:
                job.no_rank_0(range(1, size), f"127.0.0.1:{port}", "Connection refused")
            else:
                job.never_came([rank], job.ranks[0].began)
            job.nothing_left()
            job.seconds(without(size, rank), began, IN_VAIN)
            return job.seconds([rank], job.ranks[rank].began, SOON)
    return planned(size, trial, way, f"{variables} on rank {rank}", f"{order}", f"memory {memory}")


def apart(draw, size):
    """Another secret, DDP_TLS or DDP_JOB_ID: ranks of two jobs, which do not meet. Or only one rank proves the secret to all
    others, or does not: rank 0 knows all of them, and their own connections fail."""
    rank = draw.randrange(size)
    kind = draw.choice(("secret", "no secret", "tls", "job", "prove"))
    if kind == "prove":
        return proved_by_some(draw, size, rank)
    way = draw.choice({"secret": WAYS[-4:], "no secret": WAYS[-4:-1], "tls": ("", "secret", "tls", "shown"), "job": WAYS}[kind])
    memory = draw.random() < 0.75
    order = drawn_order(draw, range(size))

    def trial():
        with Start(size, way, SHORT, memory=memory) as job, tempfile.TemporaryDirectory() as elsewhere:
            variables = {"secret": secret_in(elsewhere), "no secret": {"DDP_SECRET_FILE": None}, "job": {"DDP_JOB_ID": "another"},
                         "tls": {"DDP_TLS": None if way == "tls" else "1"}}[kind]
            for pause, r in order:
                time.sleep(pause)
                began = job.begin(r, **(variables if r == rank else {}))
            job.wait()
            others = without(size, rank)
            alone = kind == "tls" and way in ("", "shown") or kind == "no secret" and way == "proof"
            if alone:
                job.told([rank], r"^DDP-E101 environment: DDP_TLS=1 .* asks for what this rank cannot do: ")
            outside = [r for r in ([rank] if rank > 0 else others) if not (alone and r == rank)]
            if not (alone and rank == 0):
                job.told(outside, "^DDP-E201 rendezvous: " + NO_PROOF, in_chorus=False)
                inside = others if rank > 0 else [0]
                names = ", ".join(map(str, without(size, *inside)))
                job.told(inside, rf"^DDP-E201 rendezvous: ranks \{{{names}\}} never joined \({len(inside)} of {size} present "
                                 "after .*" + ("" if alone else f"; {STRANGE}: [1-9]"))
                job.not_early(inside, job.ranks[0].began)
            else:  # its socket is gone
                job.told(outside, r"^DDP-E201 rendezvous: (rank \d cannot reach rank 0 at |the connection to rank 0 )",
                         in_chorus=False)
            job.nothing_left()
            return job.seconds(range(size), began, IN_VAIN)
    return planned(size, trial, way, f"another {kind} on rank {rank}", f"{order}", f"memory {memory}")


def proved_by_some(draw, size, rank):
    way, memory = draw.choice(("secret", "proof")), draw.random() < 0.75
    order = drawn_order(draw, range(size))

    def trial():
        with Start(size, way, SHORT, memory=memory) as job:
            for pause, r in order:
                time.sleep(pause)
                began = job.begin(r, *((f"prove={int(way == 'secret')}",) if r == rank else ()))
            job.wait()
            text, = set(job.told(range(size), r"^DDP-E201 rendezvous: rank \d (\(pid .* closed \d+ connections of rank \d|"
                                              r"\(pid .* did not answer rank \d$|was not reached by rank \d|"
                                              r"reaches rank 0, but not rank \d \(pid )").values())
            if not re.search(rf"\brank {rank}\b", text):
                raise job.wrong(f"rank {rank} is not named: {text}")
            job.nothing_left()
            return job.seconds(range(size), began, IN_VAIN)
    return planned(size, trial, way, f"rank {rank} differs in whether it proves", f"{order}", f"memory {memory}")


def row_7(draw, size):
    """Somebody else has rank 0's port."""
    return draw.choice((port_of_another_program, port_of_another_program, port_of_another_job))(draw, size)


def port_of_another_program(draw, size):
    kind = draw.choice(("silent", "full", "bound", "closes", "noise", "HTTP", "a few bytes"))
    noise = draw.randbytes(draw.choice((64, 200, 5000)))
    order = drawn_order(draw, range(size))
    way, memory = drawn_job(draw)
    proves = way in PROVEN

    def trial():
        with contextlib.ExitStack() as held:
            if kind in ("bound", "full"):
                port = held.enter_context(closed_port() if kind == "bound" else black_hole())
            else:
                words = {"silent": (None,), "closes": (b"",), "noise": (noise, 0, False), "a few bytes": (b"220\r\n", 0, False),
                         "HTTP": (b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n", 1)}[kind]
                port = held.enter_context(Program(*words)).port
            job = held.enter_context(Start(size, way, SHORT, memory=memory, inherit=False, port=port))
            began = job.begin_all(order)
            job.wait()
            where = f"127.0.0.1:{port}"
            job.told([0], "^DDP-E201 rendezvous: " + in_use(port, os.getpid() if kind != "bound" else None))
            others = range(1, size)
            if kind in ("bound", "full", "closes"):
                job.no_rank_0(others, where, {"bound": "Connection refused", "full": "Connection timed out",
                                              "closes": "Connection reset by peer"}[kind])
            else:
                place = re.escape(where)
                choose = "Choose another MASTER_PORT$"
                mute = rf"rank 0 at {place} took the connection but did not answer in time: "
                strange = NO_PROOF if proves else rf"what answers at {place} is not rank 0 of a ddp job\. {choose}"
                said = {"silent": mute, "a few bytes": f"({mute}|{NO_PROOF})" if proves else mute}.get(kind, strange)
                job.told(others, "^DDP-E201 rendezvous: " + said, in_chorus=False)
                for w in others:
                    if re.search(mute, job.ranks[w].error()):
                        job.not_early([w], job.ranks[w].began)
            job.nothing_left()
            job.seconds([0], job.ranks[0].began, SOON)
            return job.seconds(range(size), began, SOON if kind == "noise" else IN_VAIN)
    return planned(size, trial, way, f"{kind}", noise.hex()[:20], f"{order}", f"memory {memory}")


def port_of_another_job(draw, size):
    """That one waits for its last rank. Without a secret and a DDP_JOB_ID of their own the two mix, and two numbers of ranks end
    both."""
    kind = draw.choice(("job", "secret", "size"))
    way, their_way = draw.choice({
        "job": (("", ""), ("", ""), ("secret", "secret")), "size": (("", ""),),
        "secret": (("secret", "secret"), ("", "secret"), ("secret", ""), ("tls", "secret"), ("shown", "shown"), ("", "shown"),
                   ("tls", "tls"), ("proof", "tls"))}[kind])
    their_size = draw.choice([n for n in (2, 3, 4) if n != size or kind != "size"])
    last = draw.randint(1, their_size - 1)
    order, their_order = drawn_order(draw, range(size)), drawn_order(draw, without(their_size, last))
    memory = draw.random() < 0.75

    def trial():
        with Start(their_size, their_way, memory=memory) as theirs, \
                Start(size, way, SHORT, memory=memory, inherit=False, port=theirs.port) as ours:
            if kind == "job" and way:
                with open(os.path.join(theirs.scratch.name, "secret"), "rb") as one, \
                        open(os.path.join(ours.scratch.name, "secret"), "wb") as other:
                    other.write(one.read())
            theirs.begin_all(their_order)
            if kind == "size":  # before the other job has ended
                order.sort(key=lambda one: one[1])
            for pause, rank in order:
                time.sleep(pause)
                began = ours.begin(rank, **({"DDP_JOB_ID": "ours"} if kind == "job" else {}))
                if kind == "size" and rank == 0:
                    ours.wait()
            others = range(1, size)
            ours.wait()
            ours.told([0], "^DDP-E201 rendezvous: " + in_use(theirs.port, r"\d+"))
            theirs.begin(last)
            theirs.wait()
            if kind == "size":
                said = {r: (rf"rank {r} \({process(ours.ranks[r])}\) has WORLD_SIZE {size}, rank 0 has {their_size}\. All ranks "
                            "must be started with the same; two jobs at once need different MASTER_PORTs") for r in others}
                there = without(their_size, *([last] if last in others else []))
                first, = set(theirs.told(there, f"^DDP-E201 rendezvous: ({'|'.join(said.values())})$").values())
                if last in others:  # rank 0 has taken ours for this one, and does not wait for it
                    theirs.told([last], rf"^({re.escape(first)}$|DDP-E201 rendezvous: rank {last} cannot reach rank 0 at )")
                for r in others:  # who comes when rank 0 has told all that it expected finds nobody
                    ours.told([r], rf"^({re.escape(first)}$|DDP-E201 rendezvous: rank {r} cannot reach rank 0 at )")
                ours.seconds(others, began, IN_VAIN)
            else:
                theirs.went_on(range(their_size))
                ours.told(others, "^DDP-E201 rendezvous: " + NO_PROOF, in_chorus=False)
                ours.seconds(others, began, IN_VAIN)
            theirs.nothing_left()
            ours.nothing_left()
            return ours.seconds([0], ours.ranks[0].began, SOON)
    return planned(size, trial, way, f"{kind} differs; they are {their_size}, {their_way or 'no secret'}", f"{order}",
                   f"{their_order}, {last} last", f"memory {memory}")


def row_8(draw, size):
    """Some ranks, or all but rank 0, look for rank 0 where it is not."""
    wrong = sorted(draw.sample(range(1, size), draw.randint(1, size - 1)))
    kind = draw.choice(("refused", "full", "another address", "no name"))
    order = drawn_order(draw, range(size))
    way, memory = drawn_job(draw)
    address = f"127.{draw.randint(1, 254)}.{draw.randint(0, 255)}.{draw.randint(1, 254)}"

    def trial():
        with contextlib.ExitStack() as held:
            port = held.enter_context(black_hole() if kind == "full" else closed_port())
            job = held.enter_context(Start(size, way, SHORT, memory=memory))
            variables = {"refused": {"MASTER_PORT": str(port)}, "full": {"MASTER_PORT": str(port)},
                         "another address": {"MASTER_ADDR": address}, "no name": {"MASTER_ADDR": "no-such-host.invalid"}}[kind]
            for pause, rank in order:
                time.sleep(pause)
                began = job.begin(rank, **(variables if rank in wrong else {}))
            job.wait()
            if kind == "no name":
                job.told(wrong, r'^DDP-E201 rendezvous: MASTER_ADDR "no-such-host\.invalid" has no address: .*\. '
                                "Expected the name or address of rank 0's host$")
            else:
                where = f"127.0.0.1:{port}" if kind != "another address" else f"{address}:{job.port}"
                job.no_rank_0(wrong, where, "Connection timed out" if kind == "full" else "Connection refused")
            job.never_came(wrong, job.ranks[0].began)
            job.nothing_left()
            return job.seconds(range(size), began, IN_VAIN)
    return planned(size, trial, way, f"{kind} for {wrong}", address, f"{order}", f"memory {memory}")


class Strangers:
    """Connections to ports of a job, until the end of the block: of these kinds, each with its words."""

    def __init__(self, ports, words):
        self.ports, self.words, self.held, self.slow, self.stop = ports, words, [], [], threading.Event()

    def __enter__(self):
        for turn, text in enumerate(self.words):
            with contextlib.suppress(ConnectionRefusedError):
                s = socket.create_connection(("127.0.0.1", self.ports[turn % len(self.ports)]), timeout=DEADLINE)
                self.held.append((s, text))
                if isinstance(text, list):
                    self.slow.append(self.held[-1])
                    continue
                with contextlib.suppress(OSError):  # dropped already
                    s.sendall(text)
        self.thread = threading.Thread(target=self.drip, daemon=True)
        self.thread.start()
        return self

    def drip(self):
        """A byte a second each."""
        for sent in range(round(DEADLINE)):
            for s, text in self.slow:
                with contextlib.suppress(OSError):
                    s.send(text[0][sent % len(text[0]):][:1])
            if self.stop.wait(1):
                return

    def answers(self):
        """(words, answer) of each that got one."""
        found = []
        for s, text in self.held:
            s.setblocking(False)
            with contextlib.suppress(OSError):
                if answer := s.recv(4096):
                    found.append((text, answer))
        return found

    def __exit__(self, *_):
        self.stop.set()
        self.thread.join()
        for s, _ in self.held:
            s.close()


def row_9(draw, size):
    """Others connect to the ports of the job while it starts."""
    kinds = draw.sample(("silent", "HTTP", "noise", "slow", "replayed", "another job's", "half"), draw.randint(1, 3))
    count = draw.choice((draw.randint(1, 200), draw.randint(1, 20)))
    noise = [draw.randbytes(draw.choice((1, 7, 64, 168, 4096))) for _ in range(8)]
    last = draw.randint(1, size - 1)
    order = drawn_order(draw, without(size, last))
    when = draw.choice(("before rank 0", "before the last"))
    pause = draw.choice((0.0, draw.uniform(0, 0.3), 1.2)) * SCALE
    half = draw.randint(9, 160)
    way, memory = drawn_job(draw)

    def trial():
        replayed = recorded_hello()
        claim = HELLO.pack(*claim_of(last, size, DDP_JOB_ID="another"))
        words = {"silent": [b""], "HTTP": [b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"], "noise": noise,
                 "slow": [[claim], [replayed], [noise[0]]], "replayed": [replayed, replayed[:40]], "another job's": [claim],
                 "half": [claim[:half], claim[:8], claim[:167]]}
        said = [words[kinds[n % len(kinds)]][n // len(kinds) % len(words[kinds[n % len(kinds)]])] for n in range(count)]
        with contextlib.ExitStack() as held:
            job = held.enter_context(Start(size, way, memory=memory))
            ports = [job.port]
            crowds = []
            if when == "before rank 0":
                crowds.append(held.enter_context(Strangers(ports, said[:100])))  # the queue of its socket is not longer
            job.begin_all(order)
            if when == "before the last":
                end = time.monotonic() + DEADLINE
                while len(ports) < size and time.monotonic() < end:  # rank 0 has two
                    ports = sorted({p for r in without(size, last) for p in listening_ports(job.ranks[r].pid)})
                    time.sleep(0.005)
                crowds.append(held.enter_context(Strangers(ports, said)))
            if not all(crowd.held for crowd in crowds):
                raise job.wrong("nobody has connected")
            time.sleep(pause)
            began = job.begin(last)
            for rank in range(size):
                job.wait_for("start", rank)
            job.wait()
            job.went_on(range(size))
            if said_by_us := [rank.err for rank in job.ranks.values() if rank.err]:
                raise job.wrong(f"strangers are reported: {said_by_us}")
            job.nothing_left()
            for text, answer in [both for crowd in crowds for both in crowd.answers()]:
                begins = (text[0] if isinstance(text, list) else text).startswith(PROOF)
                if not (begins and way in ("secret", "proof") and len(answer) == 64):
                    raise job.wrong(f"a stranger that said {text[:40]} was answered {answer}")
            took = max(int(line["at"]) for r in range(size) for line in job.ranks[r].said("start")) * 1e-9 - began
            bound = SOON + 0.1 * SCALE * (count / 64 + 1)
            if took > bound:
                raise Late(f"{took:.3f} s instead of {bound:.3f} s to start beside {count} strangers\n{job.story()}", took)
    return planned(size, trial, way, f"{count} strangers {when}: {kinds}", f"{[text.hex()[:8] for text in noise]}",
                   f"{order}, then {last}", f"pause {pause:.3f}", f"half {half}", f"memory {memory}")


ROWS_OF_THE_START = [
    Row("1", "ranks never start (`join`: 1.5 s)", row_1, 4),
    Row("2", "a rank is started twice", row_2, 2),
    Row("3", "RANK or WORLD_SIZE makes no sense, or ranks differ in it", row_3, 3),
    Row("4", "another version", row_4, 3),
    Row("5", "other parameters", row_5),
    Row("6", "other settings", row_6, 2),
    Row("7", "the port is in use", row_7, 4),
    Row("8", "rank 0 cannot be reached (`join`: 1.5 s)", row_8, 4),
    Row("9", "other programs connect while the job starts", row_9, 2),
    Row("5m", "over MPI, other parameters", over_mpi(row_5_mpi), 1, 0.25),
    Row("6m", "over MPI, other settings", over_mpi(row_6_mpi), 1, 0.25)]
