"""What chaos.py does to jobs under ddprun: signals that ask them to end (row 16), and launchers that are killed (row 17). DDPRUN
names the binary. Each plan brings its own trial, which starts jobs, strikes them, and checks all that has to come of it."""

import contextlib
import os
import re
import signal
import tempfile
import threading
import time
import uuid

from chaos_rows import ENDLESS, FAULT_PROGRAM, MESSAGES, SHAPES, SOON, WAYS, Late, Missed, Plan, Row, Wrong, running
from jobs import DEADLINE, SCALE, Rank, environment, exit_code_of, named_memory

DDPRUN = os.environ.get("DDPRUN", "")
TO_BE_RESUMED = 75
STOPPED_BY = 1.0 * SCALE  # one step, and a checkpoint on a disk that others use as well
OUTLIVED = 1.0 * SCALE
MARK = "CHAOS_LAUNCH"  # an environment variable that is another in every job


def default_signals():
    """Who runs tests in the background of a shell has SIGINT ignored, and ddprun would honour that."""
    for signo in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(signo, signal.SIG_DFL)


class Launched:
    """`with Launched(…) as job:` is a ddprun with its ranks; the end of the block kills whatever is left of them."""

    def __init__(self, size, words, scratch, secured="", messages=False, wrap=()):
        self.size, self.mark = size, uuid.uuid4().hex
        self.before = named_memory()
        more = {MARK: self.mark, "TMPDIR": scratch}
        if messages:
            more["DDP_SHARE_MEMORY"] = "0"
        if secured == "tls":
            more["DDP_TLS"] = "1"
        if secured == "proof":
            words = (*words, "prove=1")
        self.process = Rank([DDPRUN, "-n", str(size), "--prefix", "none", "--bind", "none", "--", *wrap, FAULT_PROGRAM, *words],
                            environment(**more), start_new_session=True, preexec_fn=default_signals)
        self.pid = self.process.pid

    def __enter__(self):
        return self

    def __exit__(self, *what):
        while left := running(self.processes()):
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        self.process.process.wait()
        self.process.out_file.close()
        self.process.err_file.close()

    def processes(self):
        """All that were started with this job's environment: ddprun, its guardian, the ranks, and what they have started."""
        found, mark = [], f"{MARK}={self.mark}".encode()
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
                if mark in file.read().split(b"\0"):
                    found.append(int(pid))
        return found

    def ranks(self):
        """The process of each rank, by its number."""
        found = {}
        for pid in self.processes():
            with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
                rank = re.search(rb"(?:^|\0)RANK=(\d+)\0", file.read())
                if rank and os.path.samefile(f"/proc/{pid}/exe", FAULT_PROGRAM):
                    found[int(rank[1])] = pid
        return found

    def guardian(self):
        for pid in self.processes():
            with contextlib.suppress(OSError), open(f"/proc/{pid}/comm") as file:
                if file.read().strip() == "ddprun-guardian":
                    return pid
        return None

    def wait_for(self, word, ranks):
        """Until so many ranks have said it."""
        end = time.monotonic() + DEADLINE
        while len(self.process.said(word)) < ranks:
            if time.monotonic() > end or self.process.poll() is not None:
                raise Wrong(f"not all said '{word}'\n{self.story()}")
            time.sleep(0.002)

    def wait(self, deadline=DEADLINE):
        end = time.monotonic() + deadline
        while self.process.poll() is None:
            if time.monotonic() > end:
                raise Wrong(f"ddprun still runs after {deadline} s\n{self.story()}")
            time.sleep(0.002)
        return self.process.code

    def story(self):
        return f"ddprun's exit code {self.process.code}\n{self.process.out[-2500:]}{self.process.err[-2500:]}"

    def expect(self, right, what):
        if not right:
            raise Wrong(f"{what}\n{self.story()}")

    def expect_nothing_left(self, scratch, allowed):
        """No process, no named memory, and no file but one that matches `allowed`."""
        end, new = time.monotonic() + 5.0, named_memory() - self.before
        while new or running(self.processes()):
            if time.monotonic() > end:
                raise Wrong(f"left: {sorted(new)} {running(self.processes())}\n{self.story()}")
            time.sleep(0.02)
            new &= named_memory()
        left = os.listdir(scratch)
        self.expect(len(left) <= 1 and all(re.fullmatch(allowed, name) for name in left), f"files are left: {left}")

    def check_channels(self, secured):
        """As in chaos.py; ddprun itself gives a secret, which rank 0's store asks for."""
        least = self.size if secured else 1
        made = [int(line["channels"]) for line in self.process.said("start")]
        self.expect(all(n >= least for n in made), f"connections that prove or encrypt: {made} ({secured or 'plain'})")


class Undisturbed:
    """Digests of jobs that nothing disturbs, by step."""

    def __init__(self):
        self.known, self.lock = {}, threading.Lock()

    def of(self, size, words, step):
        with self.lock:
            if step not in self.known.get((size, words), {}):
                words_here = (*words, f"steps={max(60, 2 * step)}", "digests=1")
                with tempfile.TemporaryDirectory(prefix="chaos") as scratch, Launched(size, words_here, scratch) as job:
                    job.expect(job.wait() == 0, "an undisturbed job went wrong")
                    said = {(int(line["number"]), line["digest"]) for line in job.process.said("step")}
                    job.expect(len(said) == max(60, 2 * step), "ranks of an undisturbed job differ")
                self.known[size, words] = dict(said)
            return self.known[size, words][step]


UNDISTURBED = Undisturbed()


def drawn_job(draw):
    words = draw.choice(SHAPES[:2]) + draw.choice(WAYS)
    messages = draw.random() < 1 / 3 and words[2:] not in MESSAGES
    return words, messages, {0: "proof", 1: "tls"}.get(draw.randrange(6), "")


def under_ddprun(make):
    def plan(draw, size):
        return make(draw, size) if os.path.isfile(DDPRUN) else None
    return plan


def row_16(draw, size):
    """A signal to ddprun or to one rank of a job that trains. Where the program stops on request all ranks stop after the same
    step and save, and the job that is started again ends as if nothing had been. Where it does not, the signal ends the job."""
    words, messages, secured = drawn_job(draw)
    signo = draw.choice((signal.SIGTERM, signal.SIGINT, signal.SIGUSR1))
    victim = draw.choice((None, draw.randrange(size)))
    stops, every = draw.random() < 0.7, draw.choice((0, 5))
    pause = draw.uniform(0.0, 0.25) * SCALE
    asks = stops
    name = signo.name

    def trial():
        with tempfile.TemporaryDirectory(prefix="chaos") as scratch:
            kept = (f"checkpoint={scratch}/kept", f"every={every}", "stops=1") if stops else ()
            with Launched(size, (*words, ENDLESS, "pause=15", *kept), scratch, secured, messages) as job:
                job.wait_for("ready" if stops else "start", size)
                time.sleep(pause)
                ranks = job.ranks()
                job.expect(len(ranks) == size, f"{len(ranks)} ranks run")
                began = time.monotonic()
                os.kill(job.pid if victim is None else ranks[victim], signo)
                job.wait(10.0 * SCALE)
                took = job.process.ended - began
                stopped = check_asked(job, size) if asks else check_ended(job, signo, victim, size)
                job.expect_nothing_left(scratch, "kept")
                job.check_channels(secured)
            if stops:
                check_resumed(stopped, scratch)
        bound = STOPPED_BY if asks else SOON + 0.3 * SCALE
        if took > bound:
            raise Late(f"{took:.3f} s instead of {bound} s from {name} to the end of ddprun\n{job_text}", took)
        return took

    def check_resumed(stopped, scratch):
        saved = last_saved(f"{scratch}/kept")
        expected = UNDISTURBED.of(size, words, saved + 5)
        again = (*words, f"steps={saved + 5}", f"checkpoint={scratch}/kept", "stops=1")
        with Launched(size, again, scratch, secured, messages) as job:
            job.expect(job.wait() == 0, "the job that was started again has failed")
            begun = {int(line["resumed"]) for line in job.process.said("ready")}
            job.expect(len(begun) == 1, f"ranks were resumed after {begun}")
            begun, = begun
            job.expect(begun == saved and (not asks or begun == stopped),
                       f"resumed after {begun}; saved {saved}, stopped after {stopped}")
            done = job.process.said("done")
            job.expect({line["digest"] for line in done} == {expected} and len(done) == size, f"other weights than {expected}")
            job.expect_nothing_left(scratch, "kept")
    job_text = f"{name} to {'ddprun' if victim is None else f'rank {victim}'} of {size} ranks {words}"
    faults = (f"{name} to {'ddprun' if victim is None else victim} after {pause:.3f} s", *(("stops",) if stops else ()))
    return Plan(size, words, faults, more=(f"every={every}", f"messages={messages}"), trial=trial, secured=secured)


def last_saved(directory):
    """The step of the checkpoint that `latest` names; if it was ended before it has ever done so, of the only one. 0: none."""
    with contextlib.suppress(OSError):
        with open(os.path.join(directory, "latest")) as file:
            return int(file.read().removeprefix("step-"))
    with contextlib.suppress(OSError):
        return max((int(name[5:]) for name in os.listdir(directory) if re.fullmatch(r"step-\d+", name)), default=0)
    return 0


def check_asked(job, size):
    """All ranks have stopped after the same step, which is returned, and saved."""
    job.expect(job.process.code == TO_BE_RESUMED, f"exit code {job.process.code}")
    job.expect(job.process.err.endswith("ddprun: the job has stopped and can be resumed: all ranks ended with exit code 75\n"),
               "ddprun does not say that the job can be resumed")
    lines = job.process.said("stopped")
    found = {(line["number"], line["digest"]) for line in lines}
    job.expect(len(lines) == size and len(found) == 1 and not job.process.said("done"), f"ranks stopped after {found}")
    return int(lines[0]["number"])


def check_ended(job, signo, victim, size):
    """ddprun says which signal has ended what, and ends with its code."""
    err, name = job.process.err, signo.name
    job.expect(job.process.code == 128 + signo, f"exit code {job.process.code}")
    job.expect(not job.process.said("done") and not job.process.said("stopped"), "a rank went on")
    everybody = ", ".join(map(str, range(size)))
    if victim is not None:
        job.expect(f"\nddprun: rank {victim} failed first: killed by {name} (pid " in f"\n{err}",
                   "ddprun names another rank or signal")
        job.expect("passed" not in err, "ddprun says that it has passed a signal on")
        others = [r for r in range(size) if r != victim]
        errors = {int(line["rank"]): line["text"] for line in job.process.said("error")}
        job.expect(sorted(errors) == others, f"ranks {sorted(errors)} threw")
        job.expect(all(re.match(rf"DDP-E202 peer closed: rank {victim} is gone\b", text) for text in errors.values())
                   and len(set(errors.values())) == 1, "not one verdict")
        code = exit_code_of(next(iter(errors.values())))
        whose = f"rank {others[0]}: " if len(others) == 1 else f"ranks {', '.join(map(str, others))}: "
        job.expect(f"the others: {whose}exit code {code}\n" in err, f"the others should have ended with {code}")
    elif signo == signal.SIGUSR1:
        job.expect(re.search(r"(?m)^ddprun: rank \d failed first: killed by SIGUSR1 \(pid ", err),
                   "ddprun names no rank, or another signal")
        job.expect("ddprun passed that signal on; it ends a rank that has no handler" in err,
                   "ddprun does not say whose signal it was")
    else:
        job.expect(f"ddprun: {name} ended the job: it was sent to ddprun, which passed it on to all ranks\n"
                   f"        ranks {everybody}: killed by {name}\n" in err, "ddprun does not say what ended the job")


def row_17(draw, size):
    """ddprun is killed: while it starts, while the ranks train, when they end; alone, with its guardian, or with its whole group.
    Ranks may be children of a shell, which the kernel does not end with ddprun: then the guardian does."""
    words, messages, secured = drawn_job(draw)
    moment = draw.choice(("start", "training", "training", "end"))
    how = draw.choice(("ddprun", "ddprun", "guardian first", "group"))
    below = how != "guardian first" and draw.random() < 0.5
    pause = draw.uniform(0.0, {"start": 0.06, "training": 0.2, "end": 0.005}[moment]) * SCALE
    steps = "steps=20" if moment == "end" else ENDLESS
    wrap = ("sh", "-c", '"$@" & wait $!', "sh") if below else ()

    def trial():
        with tempfile.TemporaryDirectory(prefix="chaos") as scratch, \
                Launched(size, (*words, steps, "pause=5"), scratch, secured, messages, wrap) as job:
            if moment != "start":
                job.wait_for(*(("start", size) if moment == "training" else ("done", 1)))
            time.sleep(pause)
            guardian = job.guardian() if how == "guardian first" else None  # there may be none yet, or no more
            if guardian is not None:
                os.kill(guardian, signal.SIGKILL)
            before = running(job.processes())
            began = time.monotonic()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL) if how == "group" else os.kill(job.pid, signal.SIGKILL)
            if job.wait() != -signal.SIGKILL and moment == "end":
                raise Missed
            job.expect(job.process.code == -signal.SIGKILL, "ddprun has ended before it was killed")
            while left := running(job.processes()):
                if time.monotonic() > began + 10 * SCALE:
                    raise Wrong(f"{len(left)} of {len(before)} processes outlive ddprun: {left}\n{job.story()}")
                time.sleep(0.005)
            took = time.monotonic() - began
            if moment == "training":
                expected = size * (2 if below else 1) + (1 if how == "guardian first" else 2)
                job.expect(len(set(before) - {guardian}) == expected, f"{len(before)} processes ran, not {expected}")
                job.expect(not job.process.said("done"), "a rank has ended well")
                job.check_channels(secured)
            job.expect_nothing_left(scratch, r"ddprun-\w+")
            if took > OUTLIVED:
                raise Late(f"{took:.3f} s instead of {OUTLIVED} s until all had ended\n{job.story()}", took)
            return took
    faults = (f"SIGKILL to {how} at the {moment} after {pause:.3f} s", *(("below a shell",) if below else ()))
    return Plan(size, words, faults, more=(f"messages={messages}",), trial=trial, secured=secured)


ROWS_OF_LAUNCHES = [
    Row("16", "a signal to `ddprun` or a rank asks the job to end", under_ddprun(row_16), 3),
    Row("17", "`ddprun` is killed", under_ddprun(row_17), 2)]
