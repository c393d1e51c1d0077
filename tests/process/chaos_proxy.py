"""A proxy for the connections between the ranks of a job, which harms them on request.

fault_program calls it instead of the other ranks if CHAOS_PROXY is set, and says first whose connection it is and which port
it meant: 4 numbers of 32 bits. What ranks say to each other is passed on as it is, so the proxy does not depend on the
rendezvous. A link is the connection of two ranks, a way is one of its directions.

    with Proxy(owner_of_port) as proxy:            # owner_of_port(port): the rank that listens there
        proxy.expect({(0, 1), (0, 2), (1, 2)})     # waits until these links stand
        proxy.link(0, 2).cut()                     # at once, or:
        proxy.link(0, 2).way(2).plan(Harm("flip", bit=17), after=40000)

Every harm notes the time of the monotonic clock when it happened, in nanoseconds: link.struck.
"""

import collections
import random
import select
import socket
import struct
import threading
import time

PREAMBLE = struct.Struct("<8sII")
HEADER = struct.Struct("<HBBIII")  # magic and version, type, flags, payload, sequence, consumed: the first 16 of 64 bytes
HEADER_BYTES = 64
MOST_PAYLOAD = 256 << 10
QUEUED = 1 << 20  # bytes that wait in a way; above this its source is not read
HISTORY = 1 << 16


class Harm:
    """What happens at one place of a way. kind:

    flip       bit `bit` of the byte there is turned
    drop       `count` bytes from there are left out
    repeat     the last `count` bytes come again
    insert     `bytes` come in between
    end        nothing more comes: both sides see the end of the stream (FIN)
    cut        both sides see a reset (RST)
    half       FIN to the reader; what its peer writes is thrown away, the other way goes on
    silence    what is written from there on is thrown away
    replay     a frame comes twice, its last byte being at the place or after it
    swap       two frames come in the wrong order
    lose       a whole frame is left out
    header     bit `bit` of the next frame's header is turned
    payload    bit `bit`, modulo its length, of the payload of the next frame that has one is turned
    short      the next frame ends after `count` bytes, then the stream (FIN)

    In a job that proves its secret or uses TLS these are records instead of frames. There, bytes are harmed within a record
    only, behind its length: what is wrong about a record is found when all of it has come, and a length that is read from
    other bytes may be one of 64 KiB. Of a length itself only those bits are turned that make a record impossible or little longer:
    if what is missing does not come, the other end is called silent.
    """

    by_frame = ("replay", "swap", "lose", "header", "payload", "short")
    by_byte = ("flip", "drop", "repeat", "insert")

    def __init__(self, kind, **more):
        self.kind = kind
        self.bit = more.get("bit", 0)
        self.count = more.get("count", 0)
        self.bytes = more.get("bytes", b"")

    def __repr__(self):
        return f"{self.kind}(bit={self.bit}, count={self.count}, bytes={len(self.bytes)})"


class Frames:
    """Where frames begin in a stream, found by their headers: nothing else is known of what comes before the first."""

    head, least = HEADER_BYTES, HEADER.size  # bytes of a header, and of it those that say how long the frame is
    turned = range(HEADER_BYTES)  # bytes of it that may be harmed

    def __init__(self):
        self.seen = bytearray()  # until the first is found
        self.left = None  # bytes until the next header; None: not found yet

    def size_at(self, data):
        """Of the frame that begins with `data`; None: no frame does."""
        found = self.looks_like(data, 0)
        return None if found is None else self.head + found[0]

    @staticmethod
    def looks_like(data, at, sequence=None):
        if len(data) - at < HEADER.size:
            return None
        magic, kind, flags, payload, number, _ = HEADER.unpack_from(data, at)
        fits = magic == 0xDD01 and kind < 16 and flags < 16 and payload <= MOST_PAYLOAD and number < 1 << 20
        return (payload, number) if fits and (sequence is None or number == sequence) else None

    def search(self, data):
        """Three or more headers in a row that end where `data` does, or none yet."""
        self.seen += data
        begin = 0
        while (at := self.seen.find(b"\x01\xdd", begin)) >= 0:
            begin, where, sequence, count = at + 1, at, None, 0
            while where < len(self.seen):
                found = self.looks_like(self.seen, where, sequence)
                if found is None:
                    break
                where += HEADER_BYTES + found[0]
                sequence = found[1] + 1
                count += 1
            if where >= len(self.seen) and count >= 3:
                self.left = where - len(self.seen)
                self.seen = bytearray()
                return
        del self.seen[:-(MOST_PAYLOAD * 8)]


class Records(Frames):
    """The same for a stream of records of a proof (`secured`: "proof") or of TLS ("tls"), which are known from the first byte on.
    Their payloads are not looked at."""

    def __init__(self, secured, dials):
        super().__init__()
        self.tls = secured == "tls"
        self.left = 0 if self.tls else 72 if dials else 64  # the proof
        self.head = self.least = 5 if self.tls else 4
        self.turned = (0, 1, 2, 4) if self.tls else (0, 2, 3)  # not what makes it up to 16 or 32 KiB longer
        self.count = 0

    def size_at(self, data):
        if len(data) < self.head:
            return None
        size = int.from_bytes(data[3:5], "big") if self.tls else int.from_bytes(data[:4], "little")
        if self.tls and (not 20 <= data[0] <= 23 or data[1] != 3 or not 0 < size <= 16384 + 256) or not 0 < size <= 65536:
            return None
        self.count += 1
        return self.head + size + (0 if self.tls else 16)


class Way:
    """One direction: what `source` writes."""

    def __init__(self, link, source, sink, rank):
        self.link, self.source, self.sink, self.rank = link, source, sink, rank
        self.queue = collections.deque()  # (due, bytes)
        self.queued = 0
        self.passed = 0  # bytes read so far
        self.delay = self.jitter = 0.0  # seconds
        self.rate = 0.0  # bytes a second; 0: any
        self.segment = 0  # most bytes written at once; 0: any
        self.silent = self.stalled = False
        self.ended = False  # nothing more is passed on
        self.told = False  # sink has been told so
        self.over = False  # nothing more can be read
        self.plans = []  # (place, latest time, harm)
        self.dropping = 0
        self.history = b""
        self.frame = bytearray()  # of a harm by frame: what is held back
        secured = link.proxy.secured
        self.frames = Records(secured, rank == link.ranks[1]) if secured else Frames()
        self.plain = None  # of a stream of records, where one should begin: what is none
        self.unparsed = b""
        self.by_frame = None
        self.tokens, self.filled = 0.0, time.monotonic()
        self.latest = 0.0

    def plan(self, harm, after=0, within=1.0):
        """The harm happens `after` bytes from now; on a quiet link at the first byte after `within` seconds."""
        with self.link.proxy.lock:
            self.plans.append((self.passed + after, time.monotonic() + within, harm))
            self.plans.sort(key=lambda p: p[0])
        self.link.proxy.wake()

    # The following on the proxy's thread.

    def take(self, data):
        if self.silent:
            return
        while data:
            if self.plans and (self.plans[0][0] <= self.passed or self.plans[0][1] <= time.monotonic()):
                data = self.strike(self.plans.pop(0)[2], data)
                continue
            size = len(data)
            if self.plans:
                size = min(size, self.plans[0][0] - self.passed)
            self.emit(data[:size])
            data = data[size:]

    def emit(self, data):
        self.passed += len(data)
        if self.dropping:
            gone = min(self.dropping, len(data))
            self.dropping -= gone
            data = data[gone:]
        if not data or self.silent:
            return
        self.history = (self.history + data)[-HISTORY:]
        for piece in self.follow(data):
            self.send(piece)

    def send(self, data):
        if not data:
            return
        due = 0.0
        if self.delay or self.jitter:
            due = max(self.latest, time.monotonic() + self.delay + self.jitter * self.link.proxy.random.random())
            self.latest = due
        self.queue.append((due, bytes(data)))
        self.queued += len(data)

    def struck(self):
        self.link.note()

    def strike(self, harm, data):
        """What of `data` is still to be looked at. It is not empty."""
        kind = harm.kind
        if kind in Harm.by_frame:
            self.by_frame = harm
            self.frame = bytearray()
            return data
        if kind in Harm.by_byte and self.link.proxy.secured and self.frames.left == 0:
            size = self.frames.head - len(self.unparsed)
            self.emit(data[:size])
            self.plans.insert(0, (self.passed, 0.0, harm))
            return data[size:]
        if kind == "flip":
            changed = bytearray(data[:1])
            changed[0] ^= 1 << harm.bit % 8
            self.struck()
            self.emit(bytes(changed))
            return data[1:]
        if kind == "repeat":
            self.struck()
            again = self.history[-max(1, harm.count):]
            self.queue.append((0.0, again))
            self.queued += len(again)
            return data
        if kind == "insert":
            self.struck()
            self.queue.append((0.0, harm.bytes))
            self.queued += len(harm.bytes)
            return data
        if kind == "drop":
            self.struck()
            self.dropping = harm.count
            return data
        if kind == "silence":
            self.struck()
            self.silent = True
            return b""
        if kind == "end":
            self.link.close_after(self)
            return b""
        if kind == "half":
            self.struck()
            self.silent = self.ended = True
            return b""
        if kind == "cut":
            self.link.reset()
            return b""
        raise ValueError(kind)

    def follow(self, data):
        """Cuts the stream at headers, and harms frames. Yields what is passed on."""
        if self.frames.left is None:
            self.frames.search(data)
            yield data  # a harm waits until frames are found
            return
        data = self.unparsed + data
        self.unparsed = b""
        while data:
            if self.frames.left > 0:
                size = min(self.frames.left, len(data))
                self.frames.left -= size
                if self.frame:
                    self.frame += data[:size]
                    if self.frames.left == 0:
                        yield from self.whole_frame()
                else:
                    yield data[:size]
                data = data[size:]
                continue
            found = self.frames.size_at(data)
            if found is None:
                if len(data) < self.frames.least:
                    self.unparsed = data  # a piece of a header waits for the rest
                    return
                if self.link.struck is None:
                    self.plain = data[:64]
                yield data  # no header: the other side has ended, or it is out of step
                return
            self.frames.left = found
            if self.by_frame:
                size = min(self.frames.left, len(data))
                self.frame += data[:size]
                self.frames.left -= size
                data = data[size:]
                if self.frames.left == 0:
                    yield from self.whole_frame()

    def whole_frame(self):
        frame, self.frame = bytes(self.frame), bytearray()
        harm = self.by_frame
        head = self.frames.head
        payload = len(frame) - head
        kind = harm.kind
        if kind == "payload" and payload == 0:
            yield frame
            return
        self.by_frame = None
        if kind == "replay":
            self.struck()
            yield frame
            yield frame
        elif kind == "lose":
            self.struck()
        elif kind == "swap":
            self.by_frame = Harm("second", bytes=frame)
        elif kind == "second":
            self.struck()
            yield frame
            yield harm.bytes
        elif kind in ("header", "payload"):
            changed = bytearray(frame)
            turned = self.frames.turned if kind == "header" else range(head, head + payload)
            changed[turned[harm.bit // 8 % len(turned)]] ^= 1 << harm.bit % 8
            self.struck()
            yield bytes(changed)
        elif kind == "short":
            yield frame[:max(1, min(harm.count, len(frame) - 1))]
            self.link.close_after(self)

    def readable(self):
        return not self.over and not self.stalled and self.queued < QUEUED

    def writable(self, now):
        return bool(self.queue) and self.queue[0][0] <= now and self.allowance(now) > 0

    def allowance(self, now):
        if not self.rate:
            return MOST_PAYLOAD
        self.tokens = min(self.rate / 20 + 1, self.tokens + self.rate * (now - self.filled))
        self.filled = now
        return int(self.tokens)

    def write(self, now):
        while self.writable(now):
            due, data = self.queue[0]
            size = min(len(data), self.allowance(now), self.segment or len(data))
            try:
                n = self.sink.send(data[:size])
            except BlockingIOError:
                return
            self.tokens -= n
            self.queued -= n
            self.queue.popleft()
            if n < len(data):
                self.queue.appendleft((due, data[n:]))

    def wake_at(self, now):
        if not self.queue:
            return None
        at = self.queue[0][0]
        if at <= now and self.rate:
            at = now + 0.002 if self.allowance(now) == 0 else now
        return at


class Link:
    """The connection of two ranks; the higher one has called."""

    def __init__(self, proxy, low, high, down, up):
        self.proxy, self.ranks = proxy, (low, high)
        self.ways = {high: Way(self, up, down, high), low: Way(self, down, up, low)}  # by who writes
        self.struck = None
        self.dead = False

    def way(self, writer):
        return self.ways[writer]

    def note(self):
        if self.struck is None:
            self.struck = time.monotonic_ns()

    def do(self, action):
        with self.proxy.lock:
            action()
        self.proxy.wake()

    def cut(self):
        """Both sides see a reset."""
        self.do(self.reset)

    def close(self):
        """Both sides see the end of the stream, without a goodbye."""
        self.do(lambda: self.close_after(None))

    def silence(self, writers=None):
        """Nothing arrives any more; nobody is told."""
        def action():
            self.note()
            for rank, way in self.ways.items():
                if writers is None or rank in writers:
                    way.silent = True
                    way.queue.clear()
                    way.queued = 0
        self.do(action)

    def stall(self, writers=None, stalled=True):
        """What is written is kept, as by a link that is down for a while."""
        def action():
            if stalled:
                self.note()
            for rank, way in self.ways.items():
                if writers is None or rank in writers:
                    way.stalled = stalled
        self.do(action)

    def set(self, **values):
        """delay, jitter, rate, segment of both ways."""
        def action():
            for way in self.ways.values():
                for name, value in values.items():
                    setattr(way, name, value)
        self.do(action)

    # The following with the proxy's lock held.

    def sockets(self):
        return [way.source for way in self.ways.values()]

    def reset(self):
        if self.dead:
            return
        self.dead = True
        self.note()
        for s in self.sockets():
            try:
                s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            except OSError:
                pass
            s.close()

    def close_after(self, way):
        """FIN to both; what `way` has passed on arrives first."""
        if self.dead:
            return
        self.note()
        for each in self.ways.values():
            each.ended = each.silent = True
            if each is not way:
                each.queue.clear()
                each.queued = 0


class Proxy:
    """links: what all links are set to from their first byte on (see Link.set). secured: "proof" or "tls" if what ranks say is in
    records."""

    def __init__(self, owner_of_port, links=None, secured=""):
        self.owner_of_port = owner_of_port
        self.secured = secured
        self.settings = links or {}
        self.random = random.Random(0)
        self.lock = threading.RLock()
        self.links = {}
        self.failure = None
        self.stop = False
        self.listener = socket.socket()
        self.listener.bind(("127.0.0.1", 0))
        self.listener.listen(64)
        self.port = self.listener.getsockname()[1]
        self.bell, self.rope = socket.socketpair()
        for s in (self.listener, self.bell, self.rope):
            s.setblocking(False)
        self.thread = threading.Thread(target=self.guarded, daemon=True)
        self.thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *what):
        self.stop = True
        self.wake()
        self.thread.join()
        for link in self.links.values():
            for s in link.sockets():
                s.close()
        for s in (self.listener, self.bell, self.rope):
            s.close()

    def wake(self):
        try:
            self.rope.send(b"!")
        except OSError:
            pass  # it rings already

    def link(self, a, b):
        return self.links[min(a, b), max(a, b)]

    def expect(self, pairs, deadline):
        """Waits until these links stand."""
        end = time.monotonic() + deadline
        while not pairs <= set(self.links):
            if time.monotonic() > end or self.failure:
                raise AssertionError(f"links {sorted(self.links)} instead of {sorted(pairs)}: {self.failure}")
            time.sleep(0.002)

    def not_in_records(self):
        """What was sent outside of records in a job that is secured, before any harm."""
        ways = [way for link in self.links.values() for way in link.ways.values()]
        return [f"rank {way.rank}: {way.plain!r} after {way.frames.count} records" for way in ways
                if self.secured and (way.plain is not None or way.frames.count == 0)]

    def struck(self):
        """When the last of all harms happened, in nanoseconds."""
        times = [link.struck for link in self.links.values() if link.struck is not None]
        return max(times) if times else None

    def guarded(self):
        try:
            self.serve()
        except Exception as problem:  # pylint: disable=broad-except
            self.failure = repr(problem)
            raise

    def serve(self):
        while not self.stop:
            now = time.monotonic()
            poller = select.poll()
            watched = {}

            def watch(s, events, what, poller=poller, watched=watched):
                fd = s.fileno()
                known = watched.setdefault(fd, [0, what])
                known[0] |= events
                poller.register(fd, known[0])

            watch(self.listener, select.POLLIN, None)
            watch(self.bell, select.POLLIN, None)
            wait = 1.0
            with self.lock:
                for link in self.links.values():
                    if link.dead:
                        continue
                    for way in link.ways.values():
                        if way.readable():
                            watch(way.source, select.POLLIN, link)
                        if way.writable(now) and not way.stalled:
                            watch(way.sink, select.POLLOUT, link)
                        at = way.wake_at(now)
                        if at is not None and not way.stalled and not (way.writable(now)):
                            wait = min(wait, max(0.0, at - now))
            ready = poller.poll(wait * 1000 if wait < 1 else 1000)
            for fd, events in ready:
                if fd == self.listener.fileno():
                    self.accept()
                elif fd == self.bell.fileno():
                    try:
                        self.bell.recv(4096)
                    except BlockingIOError:
                        pass
            with self.lock:
                by_fd = dict(ready)
                for link in list(self.links.values()):
                    self.move(link, by_fd)

    def move(self, link, by_fd):
        for way in link.ways.values():
            if link.dead:
                return
            try:
                fd = way.source.fileno()
                if by_fd.get(fd, 0) and way.readable():
                    data = way.source.recv(1 << 16)
                    way.take(data)
                    if not data:
                        way.over = True
                        way.ended = way.ended or not way.silent
                if link.dead:
                    return
                if way.stalled:
                    continue
                way.write(time.monotonic())
                if way.ended and not way.queue and not way.told:
                    way.told = True
                    way.sink.shutdown(socket.SHUT_WR)
            except BlockingIOError:
                continue
            except OSError:  # a reset is passed on as one, except into a hole
                if any(w.silent and not w.ended for w in link.ways.values()):
                    way.over = True
                    continue
                struck = link.struck
                link.reset()
                link.struck = struck
                return

    def accept(self):
        try:
            up, _ = self.listener.accept()
        except OSError:
            return
        up.setblocking(True)
        up.settimeout(2)
        try:
            words = b""
            while len(words) < PREAMBLE.size:
                more = up.recv(PREAMBLE.size - len(words))
                if not more:
                    raise OSError("no preamble")
                words += more
            magic, rank, port = PREAMBLE.unpack(words)
            owner = self.owner_of_port(port)
            if magic != b"chaos\0\0\0":
                raise OSError("no preamble")
            down = socket.create_connection(("127.0.0.1", port), timeout=2)
        except OSError:
            up.close()
            return
        for s in (up, down):
            s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            s.setblocking(False)
        link = Link(self, owner, rank, down, up)
        link.set(**self.settings)
        with self.lock:
            self.links[min(owner, rank), max(owner, rank)] = link
