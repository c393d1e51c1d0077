"""Strangers at every port of a job: what chaos.py measures of them."""

import collections
import contextlib
import os
import re
import socket
import statistics
import subprocess
import tempfile
import threading
import time

from chaos_rows import FAULT_PROGRAM, Wrong
from jobs import DEADLINE, SCALE, Job, listening_ports

MOST_SLOWER = 1.05 if SCALE == 1 else 1.5  # a step, for strangers at the job's ports; a sanitizer's steps are few


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
