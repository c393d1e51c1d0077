"""Jobs of real processes: started rank by rank as a launcher would, watched, and always ended."""

import base64
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
import unittest
import weakref

SCALE = int(os.environ.get("DDP_TEST_TIME_SCALE", "1"))  # of all times: sanitizers are slow
DEADLINE = 60.0 * SCALE  # for what must not hang: far above every bound of the library, so that a slow machine is no failure


class _ResultThatSaysWhy(unittest.TextTestResult):
    """unittest says of a skipped case nothing but `s`: scripts/skipped_tests.sh looks for this line."""

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        print(f"\ncase skipped: {test.id().removeprefix('__main__.')}: {reason}", flush=True)


unittest.TextTestRunner.resultclass = _ResultThatSaysWhy


def program(variable, directory_variable, name):
    """The path of one of our programs, by its own variable or the directory it was built in."""
    return os.environ.get(variable) or os.path.join(os.environ.get(directory_variable, ""), name)


def environment(**more):
    """Ours, without what another launcher has said."""
    kept = {k: v for k, v in os.environ.items()
            if not re.match(r"(DDP_|RANK$|WORLD_SIZE$|LOCAL_|MASTER_|OMP_|OMPI_COMM|PMI|SLURM_|MPI_LOCAL|PET_|TORCHELASTIC_)", k)}
    return {**kept, "OMP_NUM_THREADS": "1", "DDP_TEST_TIME_SCALE": str(SCALE), **more}


def listening_ports(pid):
    """The TCP ports on which a process listens, at any address of IPv4 or IPv6."""
    inodes = set()
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            match = re.match(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{fd}"))
            if match:
                inodes.add(match.group(1))
    except OSError:
        return []
    rows = []
    for name in ("tcp", "tcp6"):
        try:
            with open(f"/proc/net/{name}") as table:
                rows += [line.split() for line in table.readlines()[1:]]
        except FileNotFoundError:
            pass  # a kernel without IPv6
    return [int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in inodes]


def named_memory():
    """What somebody has named on this machine: abstract sockets as ours call them, and files of shared memory. Without those of
    Open MPI, which other tests kill."""
    with open("/proc/net/unix") as table:
        names = {line.split()[-1] for line in table if " @ddp-" in line}
    try:
        files = [entry.name for entry in os.scandir("/dev/shm") if entry.is_file()]  # fuzzers have directories there
    except OSError:
        files = []
    return names | {"/dev/shm/" + name for name in files if not re.match(r"(vader|sm)_segment", name)}


def flight_record(path):
    """The lines of a flight record, each of which has to be JSON."""
    with open(path, "rb") as file:
        text = file.read()
    assert text.endswith(b"\n"), text[-200:]
    return [json.loads(line) for line in text.decode("ascii").splitlines()]


def check_flight_records(directory, errors):
    """Each rank of `errors` (rank: the text that it threw) has written one flight record, and its verdict has the code of that
    text and a rank that the text names: the one that it names first, unless it names a connection or a mismatch of ranks."""
    found = {}
    for rank, text in errors.items():
        names = sorted(name for name in os.listdir(directory) if re.fullmatch(rf"rank-{rank}(\.\d)?\.jsonl", name))
        assert names == [f"rank-{rank}.jsonl"], f"rank {rank} threw, and wrote the flight records {names}: {text}"
        lines = flight_record(os.path.join(directory, names[0]))
        assert (lines[0]["event"], lines[0]["rank"]) == ("start", rank), lines[0]
        assert any(line["event"] == "dump" for line in lines), f"the flight record of rank {rank} has no end: {lines[-3:]}"
        code, culprit = re.match(r"DDP-E(\d+) [a-z ]+: (?:rank (\d+))?", text).groups()
        verdicts = [(line["peer"], line["code"]) for line in lines if line["event"] == "verdict"]
        assert len(verdicts) == 1 and verdicts[0][1] == int(code), f"rank {rank} threw {text}, and recorded {verdicts}"
        peer = verdicts[0][0]
        named = {int(culprit)} if culprit and code != "205" else {int(n) for n in re.findall(r"\brank (\d+)", text)}
        assert peer in named or peer == -1 and (code == "205" or not culprit), f"rank {rank} threw {text}, and recorded rank {peer} as the culprit"
        told = [line["text"] for line in lines if line["event"] == "verdict_text"]
        assert len(told) == 1 and told[0] in text, f"rank {rank} threw {text}, and recorded {told}"
        found.setdefault(text, set()).add(verdicts[0])
    for text, verdicts in found.items():
        assert len(verdicts) == 1, f"one text, and different culprits: {text}: {verdicts}"


def check_process_named(job, text, under_mpiexec=False):
    """A verdict over TCP or MPI that begins with the rank at fault says which process that is, once, if there is room: a text
    has 640 bytes, and a host's name may take 64 of them."""
    found = re.match(r"DDP-E20[2346] [a-z ]+: rank (\d+)\b", text)
    if found and len(text) < 540:
        pid = "[0-9]+" if under_mpiexec else job.ranks[int(found[1])].pid
        assert len(re.findall(f"pid {pid} on ", text)) == 1, f"the process of rank {found[1]}, pid {pid}, is not named, or twice: {text}"


def ways_to_write(secret):
    """How a program could write a secret of 32 bytes, whole or in half."""
    for part in (secret, secret[:16], secret[16:]):
        yield part
        for text in (part.hex(), base64.b64encode(part).decode().rstrip("=")[:20], " ".join(f"{b:02x}" for b in part),
                     "".join(f"\\x{b:02x}" for b in part), part.hex(":"), ", ".join(str(b) for b in part)):
            yield text.encode()
            yield text.upper().encode()


def exit_code_of(text):
    """What run_main returns after an error: the number of its code, unless it is too large or the error is not the library's."""
    found = re.match(r"(?:rank \d+: )?DDP-E(\d+) ", text)
    return int(found[1]) if found and int(found[1]) < 256 else 1


class Rank:
    """One process, its output in files: nobody has to read while it runs, and nothing is lost when it is killed."""

    def __init__(self, command, env, **more):
        self.out_file = tempfile.TemporaryFile("w+", errors="replace")
        self.err_file = tempfile.TemporaryFile("w+", errors="replace")
        for file in (self.out_file, self.err_file):
            weakref.finalize(self, file.close)
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self.out_file, stderr=self.err_file,
                                        env=env, **more)
        self.pid = self.process.pid
        self.ended = None  # when, on the monotonic clock, give or take 5 ms

    def poll(self):
        if self.ended is None and self.process.poll() is not None:
            self.ended = time.monotonic()
        return self.process.returncode

    @property
    def code(self):
        return self.process.returncode

    def finish(self, deadline=None):
        """Its exit code, output and errors, once it has ended; whatever happens, nothing of it runs after this."""
        end = time.monotonic() + (deadline or DEADLINE)
        try:
            while self.poll() is None:
                if time.monotonic() > end:
                    raise AssertionError(f"it hangs\n{self.out}{self.err}")
                time.sleep(0.01)
            return self.code, self.out, self.err
        finally:
            if self.poll() is None:
                os.killpg(self.pid, signal.SIGKILL)

    @staticmethod
    def read(file):
        # By position, never seek: the process shares our file offset.
        return os.pread(file.fileno(), 1 << 26, 0).decode(errors="replace")

    @property
    def out(self):
        return self.read(self.out_file)

    @property
    def err(self):
        return self.read(self.err_file)

    def said(self, word):
        """The fields of each line `word key=value … text=the rest`."""
        found = []
        for line in self.out.splitlines():
            if line.startswith(word + " "):
                head, _, text = line.partition(" text=")
                fields = dict(re.findall(r"(\w+)=(\S+)", head))
                fields["text"] = text
                found.append(fields)
        return found

    def error(self):
        """What its call threw: the text in the program, else the last line of stderr."""
        said = self.said("error")
        if said:
            return said[-1]["text"]
        lines = self.err.strip().splitlines()
        return lines[-1] if lines else ""


class Job:
    """`with Job(size, command) as job:` starts all ranks; the end of the block kills what is left of them.

    Rank 0 inherits a listening socket, so that no two jobs ever meet on a port. variables: more environment, or a
    function of the rank. without: ranks that are not started."""

    def __init__(self, size, command, variables=None, without=(), inherit=True, port=None):
        self.size = size
        self.ranks = {}
        self.before = named_memory()
        self.listener = socket.socket()
        self.listener.bind(("127.0.0.1", 0))
        self.listener.listen(128)
        self.port = port or self.listener.getsockname()[1]
        self.command, self.variables, self.inherit = command, variables, inherit
        if not inherit:
            self.listener.close()
        for rank in range(size):
            if rank not in without:
                self.start(rank)

    def start(self, rank, name=None, **more):
        env = environment(RANK=str(rank), WORLD_SIZE=str(self.size), LOCAL_RANK=str(rank),
                          LOCAL_WORLD_SIZE=str(self.size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(self.port))
        keep = ()
        if rank == 0 and self.inherit:
            env["DDP_LISTEN_FD"] = str(self.listener.fileno())
            keep = (self.listener.fileno(),)
        env.update(self.variables(rank) if callable(self.variables) else self.variables or {})
        env.update(more)
        process = Rank(self.command, {k: v for k, v in env.items() if v is not None}, pass_fds=keep,
                       start_new_session=True)
        self.ranks[rank if name is None else name] = process
        if rank == 0 and self.inherit:
            self.listener.close()
        return process

    def __enter__(self):
        return self

    def __exit__(self, *what):
        self.listener.close()
        for rank in self.ranks.values():
            try:
                os.killpg(rank.pid, signal.SIGKILL)  # its children too
            except OSError:
                pass
            rank.process.wait()
            rank.out_file.close()
            rank.err_file.close()

    def wait(self, deadline=DEADLINE, which=None):
        """Until all (or `which`) have ended. A hang is an error that shows what everybody had said."""
        watched = [self.ranks[w] for w in (which if which is not None else self.ranks)]
        end = time.monotonic() + deadline
        while any([rank.poll() is None for rank in watched]):  # a list: every rank's end is noted
            if time.monotonic() > end:
                raise AssertionError(f"still running after {deadline} s: "
                                     f"{[w for w, r in self.ranks.items() if r.poll() is None]}\n{self.story()}")
            time.sleep(0.005)
        return self

    def wait_for(self, word, rank, count=1, deadline=DEADLINE):
        end = time.monotonic() + deadline
        while len(self.ranks[rank].said(word)) < count:
            if time.monotonic() > end or self.ranks[rank].poll() is not None:
                raise AssertionError(f"rank {rank} never said '{word}'\n{self.story()}")
            time.sleep(0.005)

    def story(self):
        return "\n".join(f"--- rank {name}: exit code {r.code}\n{r.out[-1500:]}{r.err[-1500:]}"
                         for name, r in self.ranks.items())

    def left_behind(self, deadline=5.0):
        """Processes that still run in a session of one of the ranks, once they have had time to end; then names of sockets
        and shared memory that were not there before. Those of another job that runs now are gone as soon."""
        end = time.monotonic() + deadline
        new = named_memory() - self.before
        while True:
            new &= named_memory()
            left = self.children() or sorted(new)
            if not left or time.monotonic() > end:
                return left
            time.sleep(0.02)

    def children(self):
        sessions = {str(r.pid) for r in self.ranks.values()}
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/stat") as file:
                    fields = file.read().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[3] in sessions and fields[0] not in "ZX":
                found.append(int(pid))
        return found
