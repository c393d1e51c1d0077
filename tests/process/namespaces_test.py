"""Two hosts: the Fashion-MNIST example and faults of the network between two network namespaces that this test makes and
removes. Skipped, with the reason, where that is not allowed.

FASHION_MNIST (or DDP_EXAMPLES), FAULT_PROGRAM (or DDP_PROGRAMS) and DDPRUN name the binaries. FASHION_DATA names the data
set's directory, if not where Debian puts it.
"""

import ctypes
import functools
import hmac
import os
import pathlib
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import unittest

from jobs import DEADLINE, SCALE, Rank, check_flight_records, environment, exit_code_of, program, ways_to_write

sys.path.append(str(pathlib.Path(__file__).parents[2] / "scripts"))
from relayed_cable import CLONE_NEWNET, RelayedCable  # noqa: E402

FASHION_MNIST = program("FASHION_MNIST", "DDP_EXAMPLES", "fashion_mnist")
FAULT_PROGRAM = program("FAULT_PROGRAM", "DDP_PROGRAMS", "fault_program")
QUICK_START = program("QUICK_START", "DDP_EXAMPLES", "quick_start")
DDPRUN = os.environ.get("DDPRUN", "")
FASHION_DATA = os.environ.get("FASHION_DATA", "/usr/share/datasets/fashion-mnist")
PORT = "29511"  # in a namespace of our own every port is free
SKIPPED = 77


def ip(*words, check=True):
    return subprocess.run(["ip", *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=check)


class Hosts:
    """Two namespaces, joined by a cable (a veth pair): 10.77.0.1 and 10.77.0.2."""

    addresses = ("10.77.0.1", "10.77.0.2")

    def __init__(self):
        self.names = tuple(f"ddp-test-{os.getpid()}-{side}" for side in "ab")
        self.plugs = tuple(f"ddp{os.getpid()}{side}" for side in "ab")  # at most 15 characters

    def make(self):
        for name in self.names:
            ip("netns", "add", name)
        ip("link", "add", self.plugs[0], "netns", self.names[0], "type", "veth", "peer", "name", self.plugs[1], "netns",
           self.names[1])
        for name, plug, address in zip(self.names, self.plugs, self.addresses):
            ip("-n", name, "addr", "add", address + "/24", "dev", plug)
            for device in ("lo", plug):
                ip("-n", name, "link", "set", device, "up")

    def remove(self):
        for name in self.names:
            ip("netns", "del", name, check=False)  # the cable goes with its ends

    def command(self, side, *words):
        return ["ip", "netns", "exec", self.names[side], *words]

    def lose_full_packets(self):
        """What the second host receives has at most 600 bytes a packet, and nobody says so to the first."""
        ip("-n", self.names[1], "link", "set", self.plugs[1], "mtu", "600")
        ip("-n", self.names[1], "route", "change", "10.77.0.0/24", "dev", self.plugs[1], "advmss", "1460")
        ip("-n", self.names[0], "link", "set", self.plugs[0], "gso_max_segs", "1")

    def cable(self, state):
        ip("-n", self.names[1], "link", "set", self.plugs[1], state)

    def largest_packet(self, size):
        """Of both ends, which say so to each other."""
        for name, plug in zip(self.names, self.plugs):
            ip("-n", name, "link", "set", plug, "mtu", str(size))


def obstacle():
    """Why this test cannot run here, or nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    probe = Hosts()
    try:
        probe.make()
    except (OSError, subprocess.SubprocessError) as problem:
        return f"no network namespaces here: {problem} {getattr(problem, 'stderr', '') or ''}".strip()
    finally:
        try:
            probe.remove()
        except OSError:
            pass  # no ip at all
    return None


class Capture:
    """All packets at a device of a namespace, in both directions: what somebody sees who has the cable in hand."""

    def __init__(self, namespace, device):
        self.namespace, self.device = namespace, device
        self.packets = []
        self.done = threading.Event()

    def listen(self):
        with open(f"/run/netns/{self.namespace}", "rb") as there:  # for this thread alone
            if ctypes.CDLL(None, use_errno=True).setns(there.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"setns to {self.namespace}")
        all_protocols, so_rcvbufforce, room = 3, 33, 1 << 26
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(all_protocols)) as tap:
            tap.setsockopt(socket.SOL_SOCKET, so_rcvbufforce, room)
            tap.bind((self.device, all_protocols))
            tap.settimeout(0.1)
            self.ready.set()
            while True:
                try:
                    self.packets.append(tap.recv(1 << 17))
                except TimeoutError:
                    if self.done.is_set():
                        break
            sol_packet, packet_statistics = 263, 6
            _, self.missed = struct.unpack("II", tap.getsockopt(sol_packet, packet_statistics, 8))

    def __enter__(self):
        self.ready, self.missed = threading.Event(), None
        self.thread = threading.Thread(target=self.listen, daemon=True)
        self.thread.start()
        if not self.ready.wait(30):
            raise OSError("no capture")
        return self

    def __exit__(self, *_):
        self.done.set()
        self.thread.join()

    def streams(self):
        """What was sent through each connection, in each direction, in the order of the sender. Nothing of it is missing."""
        assert self.missed == 0, f"{self.missed} packets were not captured"
        pieces = {}
        for packet in self.packets:
            if packet[12:14] != b"\x08\x00" or packet[23] != socket.IPPROTO_TCP:
                continue
            (length,) = struct.unpack_from(">H", packet, 16)
            segment = packet[14 + 4 * (packet[14] & 15):14 + length]
            number, flags = struct.unpack_from(">I", segment, 4)[0], segment[13]
            ends = packet[26:34] + segment[:4]
            if flags & 2:  # SYN, which has a number of its own
                pieces[ends] = (number + 1 & 0xffffffff, {})
            data = segment[4 * (segment[12] >> 4):]
            if not data:
                continue  # perhaps the last word of a connection of before
            first, known = pieces[ends]
            at = number - first & 0xffffffff
            if len(data) > len(known.get(at, b"")):
                known[at] = data
        whole = []
        for _, known in pieces.values():
            stream = bytearray()
            for at in sorted(known):
                assert at <= len(stream) or at > 1 << 31, "a hole in what was captured"
                stream += known[at][max(0, len(stream) - at):] if at <= len(stream) else b""  # else a probe, before the first byte
            whole.append(bytes(stream))
        return whole


class BetweenHosts(unittest.TestCase):
    dead = 1.5 * SCALE  # ddp::timing::for_tests, which fault_program takes

    def setUp(self):
        self.hosts = Hosts()
        self.addCleanup(self.hosts.remove)
        self.hosts.make()
        self.running = []
        self.addCleanup(self.end_all)

    @functools.cached_property
    def secret(self):
        """What ranks of one job on two hosts share."""
        file = tempfile.NamedTemporaryFile(prefix="ddp-test-secret-")  # nobody else can read it
        self.addCleanup(file.close)
        file.write(os.urandom(32))
        file.flush()
        return {"DDP_SECRET_FILE": file.name}

    def end_all(self):
        for process in self.running:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except OSError:
                pass
            process.process.wait()

    def start(self, side, command, **variables):
        process = Rank(self.hosts.command(side, *command), environment(**variables), start_new_session=True)
        self.running.append(process)
        return process

    def rank(self, side, rank, size, command, **variables):
        return self.start(side, command, **{"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_PORT": PORT,
                                            "MASTER_ADDR": self.hosts.addresses[0], **variables})

    def digest(self, ranks):
        """What all of them hold in the end."""
        self.wait(ranks)
        self.assertEqual({r.code for r in ranks}, {0}, self.story(ranks))
        digests = {line["digest"] for r in ranks for line in r.said("done")}
        self.assertEqual(len(digests), 1, self.story(ranks))
        return digests.pop()

    def launcher(self, side, variables, *command):
        """ddprun on one of two hosts, two ranks each."""
        return self.start(side, [DDPRUN, "-n", "2", "--nnodes", "2", "--node-rank", str(side), "--master-addr",
                                 self.hosts.addresses[0], "--master-port", PORT, "--prefix", "none", "--", *command],
                          **variables)

    def wait(self, processes, deadline=DEADLINE):
        end = time.monotonic() + deadline
        while any([p.poll() is None for p in processes]):
            if time.monotonic() > end:
                self.fail("still running:\n" + self.story(processes))
            time.sleep(0.005)

    def wait_for(self, process, word, deadline=DEADLINE):
        end = time.monotonic() + deadline
        while not process.said(word):
            if time.monotonic() > end or process.poll() is not None:
                self.fail(f"nobody said '{word}'\n" + self.story(self.running))
            time.sleep(0.005)

    def in_time(self, attempt, repair):
        """attempt() strikes a job and returns when, and its ranks, of which each has said an error within `dead` and a second. A
        measured time may be the machine's fault: then repair(), and once more."""
        for number in (1, 2, 3):
            struck, ranks = attempt()
            late = max(int(r.said("error")[-1]["at"]) * 1e-9 for r in ranks) - struck
            if late <= self.dead + SCALE:
                return
            print(f"{self.id()}: attempt {number} of 3 took {late:.2f} s, allowed {self.dead + SCALE}", flush=True)
            repair()
        self.fail(f"it took {late:.2f} s\n" + self.story(ranks))

    def endless(self, where, *words, at=None, steps=True):
        """Ranks that train for ever, one host for each of `where`, and are among their steps, unless they cannot step (False) or start
        (None); at: a rank, and the phase of its step 5 in which it is now."""
        words = ["pause=10", "steps=100000", "digests=1", *words, *([f"fault={at[0]}:sleep:{at[1]}:5:60"] if at else [])]
        records = tempfile.TemporaryDirectory(prefix="ddp-test-records-")
        self.addCleanup(records.cleanup)
        self.records = records.name
        ranks = [self.rank(side, r, len(where), [FAULT_PROGRAM, *words], DDP_FLIGHT_DIR=self.records, **self.secret)
                 for r, side in enumerate(where)]
        for r in ranks if steps is not None else ():
            self.wait_for(r, "step" if steps else "start")
        if at:
            self.wait_for(ranks[at[0]], "fault")
        else:
            time.sleep(0.2)
        return ranks

    def check_failed(self, ranks):
        """Each rank of endless() has written its flight record and ended with the code of its error, and those that have completed
        as many steps as others hold the same bits."""
        errors = {r: process.error() for r, process in enumerate(ranks)}
        check_flight_records(self.records, errors)
        self.assertEqual([process.code for process in ranks], [exit_code_of(text) for text in errors.values()], self.story(ranks))
        said = [line for process in ranks for line in process.said("values")]
        self.assertEqual(len(said), len(ranks), self.story(ranks))
        held = {(int(line["steps"]), line["digest"]) for line in said if line["torn"] == "0"}
        steps = [step for step, _ in held]
        self.assertEqual(len(steps), len(set(steps)), self.story(ranks))
        self.assertLessEqual(max(steps, default=0) - min(steps, default=0), 1, self.story(ranks))

    @staticmethod
    def story(processes):
        return "\n".join(f"--- {i}: exit code {p.code}\n{p.out[-1500:]}{p.err[-1500:]}" for i, p in enumerate(processes))


class Demo(BetweenHosts):
    def test_the_example_trains_to_the_same_bits_as_on_one_host(self):
        if not os.path.isdir(FASHION_DATA):
            self.skipTest(f"no Fashion-MNIST in {FASHION_DATA}")
        words = [FASHION_MNIST, "--epochs", "1", "--hidden", "32", "--batch", "512", "--data", FASHION_DATA]
        here = subprocess.run([DDPRUN, "-n", "4", "--prefix", "none", "--", *words], env=environment(), capture_output=True,
                              text=True, timeout=2 * DEADLINE, check=True)
        shape = r"result: test_accuracy=(\S+) ranks=4 transport=tcp memory=shared .* replicas=identical parameters=([0-9a-f]{16})$"
        expected = re.search(shape, here.stdout.strip())
        self.assertTrue(expected, here.stdout)
        for variables in (self.secret, {**self.secret, "DDP_TLS": "1", "DDP_HOST": "named"}, {"DDP_INSECURE": "1"}):
            with self.subTest(variables=variables):
                there = [self.launcher(side, variables, *words) for side in (0, 1)]
                self.wait(there, 2 * DEADLINE)
                self.assertEqual([p.code for p in there], [0, 0], self.story(there))
                self.assertNotIn("result:", there[1].out, "only rank 0 speaks")
                found = re.search(shape, there[0].out.strip())
                self.assertTrue(found, there[0].out)
                self.assertEqual(found.groups(), expected.groups())
                # The two ranks of each host see each other's memory; those of the other are not expected to, and not told off.
                for process in there:
                    self.assertNotIn("each other's memory", process.err)
                # That these are two hosts may be a mistake, unless they have names: rank 0 says it once.
                said = [process.err.count("ranks 0 to 3 are on one machine in 2 network namespaces (ranks 0 and 1; ranks 2 "
                                          "and 3), which is typical of containers") for process in there]
                self.assertEqual(said, [0 if "DDP_HOST" in variables else 1, 0], self.story(there))
                warned = [process.err.count("ddp: warning: connections between hosts") for process in there]
                self.assertEqual(warned, [int("DDP_INSECURE" in variables), 0], "rank 0 alone warns")

    def test_it_has_to_be_asked_for(self):
        ranks = [self.rank(side, side, 2, [FAULT_PROGRAM]) for side in (0, 1)]
        self.wait(ranks)
        for r in ranks:
            self.assertEqual(r.code, 201, self.story(ranks))
            self.assertRegex(r.err, r"^DDP-E201 .*10\.77\.0\.1.*which other hosts can reach.*DDP_INSECURE=1")

    def test_ranks_listen_only_where_rank_0_reaches_them(self):
        for variables in ({"DDP_INSECURE": "1"}, {**self.secret, "DDP_TLS": "1"}):
            with self.subTest(variables=variables):
                self.listen_only_where_rank_0_reaches_them(variables)

    def listen_only_where_rank_0_reaches_them(self, variables):
        ranks = [self.rank(0, 0, 3, [FAULT_PROGRAM], **variables), self.rank(1, 1, 3, [FAULT_PROGRAM], **variables)]
        end = time.monotonic() + DEADLINE
        for side in (0, 1):
            wanted = 2 if side == 0 else 1  # the rendezvous too
            while True:
                table = subprocess.run(self.hosts.command(side, "sh", "-c", "cat /proc/net/tcp; cat /proc/net/tcp6 || true"),
                                       capture_output=True, text=True, timeout=30, check=True).stdout
                # Listening sockets, whose number of the state is 0A; addresses are little-endian.
                listening = [line.split()[1] for line in table.splitlines() if line.split()[3] == "0A"]
                if len(listening) == wanted:
                    break
                self.assertLess(time.monotonic(), end, self.story(ranks))
                time.sleep(0.02)
            for address in listening:
                self.assertEqual(address.split(":")[0], f"0{side + 1}004D0A", "on that interface, not on all")
        ranks.append(self.rank(1, 2, 3, [FAULT_PROGRAM], **variables))
        self.wait(ranks)
        self.assertEqual([r.code for r in ranks], [0, 0, 0], self.story(ranks))
        self.assertIn("ranks 0 to 2 are on one machine in 2 network namespaces (rank 0; ranks 1 and 2)", ranks[0].err)


class Eavesdropping(BetweenHosts):
    """What the cable between two hosts carries."""

    def captured(self, command, **variables):
        with Capture(self.hosts.names[0], self.hosts.plugs[0]) as wire:
            ranks = [self.rank(side, side, 2, command, **variables) for side in (0, 1)]
            self.wait(ranks)
        self.assertEqual([r.code for r in ranks], [0, 0], self.story(ranks))
        return ranks, wire.streams()

    def test_with_tls_nothing_can_be_read_and_with_the_proof_everything(self):
        command = [FAULT_PROGRAM, "times=default", "steps=4", "elements=2000", "array=5000"]
        ways = {"plain": {"DDP_INSECURE": "1"}, "proof": self.secret, "TLS": {**self.secret, "DDP_TLS": "1"},
                "TLS and insecure": {**self.secret, "DDP_TLS": "1", "DDP_INSECURE": "1"}}
        digests, wires = {}, {}
        for way, variables in ways.items():
            ranks, wires[way] = self.captured(command, **variables)
            digests[way] = {line["digest"] for r in ranks for line in r.said("done")}
        self.assertEqual(len(set().union(*digests.values())), 1, "in all of them the same numbers were sent")
        # Of the plain job every 32 bytes, but for those that are mostly alike.
        pieces = {stream[at:at + 32] for stream in wires["plain"] for at in range(0, len(stream) - 31, 32)}
        pieces = {piece for piece in pieces if len(set(piece)) > 12}
        self.assertGreater(len(pieces), 5000)
        size = {way: sum(map(len, streams)) for way, streams in wires.items()}
        # Before they add up an array of 5000 floats, rank 0 fills its own with 1 and rank 1 with 2.
        known = [struct.pack("<16f", *16 * [number]) for number in (1.0, 2.0)]
        for way, streams in wires.items():
            with self.subTest(way=way):
                found = {stream[at:at + 32] for stream in streams for at in range(len(stream) - 31)} & pieces
                seen = [any(pattern in stream for stream in streams) for pattern in known]
                named = any(b"rank/1" in stream for stream in streams)
                self.assertGreater(size[way], 0.9 * size["plain"], "it sends less than the plain job")
                if "TLS" in way:
                    self.assertEqual((len(found), seen, named), (0, [False, False], False))
                else:  # or this test could not fail
                    self.assertGreater(len(found), 0.9 * len(pieces))
                    self.assertEqual((seen, named), ([True, True], True))

    def test_the_secret_is_never_sent_to_another_host(self):
        with open(self.secret["DDP_SECRET_FILE"], "rb") as file:
            secret = file.read()
        # What is made from it, and serves a whole job: as good as the secret.
        keys = [hmac.digest(secret.ljust(64, b"\0"), use, "sha256") for use in (b"ddp: proof", b"ddp: TLS 1.3")]
        short = [FAULT_PROGRAM, "times=default", "steps=2", "elements=200"]
        for command, variables in ((short, {}), (short, {"DDP_TLS": "1"}), (short, {"DDP_INSECURE": "1"}),
                                   ([QUICK_START], {"DDP_INSECURE": "1"})):  # without OpenSSL
            with self.subTest(command=command[0], variables=variables):
                _, streams = self.captured(command, **self.secret, **variables)
                self.assertGreater(sum(map(len, streams)), 2000)
                for form in (form for known in (secret, *keys) for form in ways_to_write(known)):
                    self.assertFalse(any(form in stream for stream in streams), "the secret is on the cable")


class Network(BetweenHosts):
    def test_a_rank_that_looks_for_rank_0_does_not_meet_itself(self):
        """The system gives it the very port on which nobody listens yet: then it is connected to itself."""
        few = "echo 40000 40007 > /proc/sys/net/ipv4/ip_local_port_range"
        many = "echo 32768 60999 > /proc/sys/net/ipv4/ip_local_port_range"
        there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "40000"}
        subprocess.run(self.hosts.command(0, "sh", "-c", few), check=True)
        self.addCleanup(subprocess.run, self.hosts.command(0, "sh", "-c", many), check=True)
        first = self.rank(0, 1, 2, [FAULT_PROGRAM], **there)
        time.sleep(1.5 * SCALE)
        ranks = [self.rank(0, 0, 2, [FAULT_PROGRAM], **there), first]
        self.wait(ranks)
        self.assertEqual([r.code for r in ranks], [0, 0], self.story(ranks))

    def job(self, where, *words):
        ranks = [self.rank(side, r, len(where), [FAULT_PROGRAM, *words], **self.secret) for r, side in enumerate(where)]
        for r in ranks:
            self.wait_for(r, "start")
        return ranks

    def lost(self, where, culprits, strike, at=None):
        """All ranks tell of the loss within dead + 1 s; all of one side blame the same rank of the other."""
        def attempt():
            ranks = self.endless(where, at=at)
            struck = time.monotonic()
            strike()
            self.wait(ranks)
            self.check_failed(ranks)
            for r, process in enumerate(ranks):
                self.assertRegex(process.error(),
                                 rf"^DDP-E20[23] .*: rank {culprits[r]} (has sent nothing|is gone)", self.story(ranks))
            for side in set(where):
                self.assertEqual(len({p.error() for p, s in zip(ranks, where) if s == side}), 1, self.story(ranks))
            return struck, ranks

        self.in_time(attempt, self.plug_in_again)

    def plug_in_again(self):
        self.hosts.cable("up")
        time.sleep(0.5)

    def test_the_interface_goes_down(self):
        self.lost((0, 1), {0: 1, 1: 0}, lambda: self.hosts.cable("down"))

    def test_two_and_two_in_a_phase_of_one_of_them(self):
        for rank, phase in ((0, "forward"), (2, "allreduce"), (3, "between")):
            with self.subTest(rank=rank, phase=phase):
                self.lost((0, 0, 1, 1), {0: "[23]", 1: "[23]", 2: "[01]", 3: "[01]"}, lambda: self.hosts.cable("down"),
                          at=(rank, phase))
                self.plug_in_again()

    def test_three_and_one(self):
        self.lost((0, 0, 0, 1), {0: 3, 1: 3, 2: 3, 3: "[012]"}, lambda: self.hosts.cable("down"))

    def test_the_interface_is_gone(self):
        def attempt():
            ranks = self.endless((0, 1, 0))
            struck = time.monotonic()
            ip("-n", self.hosts.names[1], "link", "del", self.hosts.plugs[1])
            self.wait(ranks)
            self.check_failed(ranks)
            # With its address the first host loses the way from itself to itself: everybody is alone.
            for r, culprit in ((0, "[12]"), (1, "[02]"), (2, "[01]")):
                self.assertRegex(ranks[r].error(), rf"^DDP-E20[23] .*: rank {culprit} (has sent nothing|is gone)", self.story(ranks))
            return struck, ranks

        def new_cable():
            self.hosts.remove()
            self.hosts.make()

        self.in_time(attempt, new_cable)

    def test_a_flap_shorter_than_that_is_no_fault(self):
        words = ("pause=10", "steps=60")
        ranks = self.job((0, 1, 1), *words)
        for _ in range(2):
            time.sleep(0.15)
            self.hosts.cable("down")
            time.sleep(0.15)
            self.hosts.cable("up")
        self.digest(ranks)

    def test_an_outage_is_survived_if_dead_is_longer_and_else_both_sides_are_told(self):
        """Two jobs over one cable that is down for longer than the default 3 s: only the one that was told so goes on."""
        words = [FAULT_PROGRAM, "times=default", "pause=10"]
        where = (0, 1, 1)
        patient = [self.rank(side, r, 3, [*words, "steps=40"], DDP_TIMEOUT_DEAD="15", **self.secret)
                   for r, side in enumerate(where)]
        usual = [self.rank(side, side, 2, [*words, "steps=100000"], MASTER_PORT=str(int(PORT) + 1), **self.secret)
                 for side in (0, 1)]
        for r in (*patient, *usual):
            self.wait_for(r, "start")
        time.sleep(0.1)
        self.hosts.cable("down")
        struck = time.monotonic()
        while time.monotonic() < struck + 2:  # so long nobody is missed
            self.assertEqual([r.poll() for r in (*patient, *usual)], [None] * 5, self.story(self.running))
            time.sleep(0.02)
        self.wait(usual)
        for r, process in enumerate(usual):
            self.assertEqual(process.code, 203, self.story(usual))
            self.assertRegex(process.error(), rf"^DDP-E203 .*: rank {1 - r} has sent nothing", self.story(usual))
            late = int(process.said("error")[-1]["at"]) * 1e-9 - struck
            self.assertTrue(2.5 < late < 4, f"told after {late:.2f} s")
        self.assertEqual([r.poll() for r in patient], [None] * 3, "they were done before the outage\n" + self.story(patient))
        self.hosts.cable("up")
        after = self.digest(patient)
        self.assertEqual(after, self.digest([self.rank(side, r, 3, [*words[:2], "steps=40"], **self.secret)
                                             for r, side in enumerate(where)]))

    def test_small_packets_carry_the_same_bits(self):
        def train(**more):
            return self.digest([self.rank(side, r, 4, [FAULT_PROGRAM, "times=default", "steps=4"], **{**self.secret, **more})
                                for r, side in enumerate((0, 1, 1, 0))])
        usual = train()
        for size in (576, 256):
            with self.subTest(size=size):
                self.hosts.largest_packet(size)
                self.assertEqual(train(), usual)
        self.assertEqual(train(DDP_TLS="1"), usual)

    def test_full_packets_are_lost_on_the_way(self):
        self.hosts.lose_full_packets()
        for where in ((0, 1), (0, 1, 1, 0)):
            with self.subTest(where=where):
                more = len(where) > 2  # what each rank is told of all others fills a packet: such a job does not start
                ranks = self.endless(where, steps=None if more else False)
                self.wait(ranks)
                check_flight_records(self.records, {r: process.error() for r, process in enumerate(ranks)})
                for process in ranks:
                    self.assertRegex(process.error(), r"^DDP-E201 .* large packets are lost on the way \(MTU\)" if more else
                                     r"^DDP-E203 .* At most \d+ bytes at once have come from rank 0: large packets may be lost on the way "
                                     r"\(MTU\)\.", self.story(ranks))

    def test_a_reset_connection(self):
        if subprocess.run(["ss", "-h"], capture_output=True, timeout=30, check=False).returncode != 0:
            self.skipTest("no ss here")
        ranks = self.endless((0, 1))
        struck = time.monotonic()
        subprocess.run(self.hosts.command(0, "ss", "-K", "dst", self.hosts.addresses[1]), capture_output=True, timeout=30,
                       check=True)
        end = struck + 3
        while any([r.poll() is None for r in ranks]):
            if time.monotonic() > end and all(r.poll() is None for r in ranks):
                self.skipTest("this kernel does not destroy sockets")
            self.assertLess(time.monotonic(), struck + DEADLINE, self.story(ranks))
            time.sleep(0.005)
        self.check_failed(ranks)
        for r in (0, 1):
            self.assertRegex(ranks[r].error(), rf"^DDP-E202 .*: rank {1 - r} is gone", self.story(ranks))


class OverRelayedCable(BetweenHosts):
    """Its hosts are those of a RelayedCable, which the test makes."""

    def setUp(self):
        try:
            os.close(os.open("/dev/net/tun", os.O_RDWR))
        except OSError as problem:
            self.skipTest(f"no TUN devices here: {problem}")
        self.running = []
        self.addCleanup(self.end_all)


class Lossy(OverRelayedCable):
    """A cable that loses packets at random, in both directions. Whatever arrives in the end arrives right."""

    def train(self, loss, *words):
        self.hosts = RelayedCable(rate=100e6, delay=0.001, loss=loss)
        command = [FAULT_PROGRAM, "times=default", "steps=8", *words]
        with self.hosts:
            ranks = [self.rank(side, r, 3, command, **self.secret) for r, side in enumerate((0, 1, 1))]
            self.wait(ranks, 3 * DEADLINE)
            self.end_all()
        self.assertEqual([r.code for r in ranks], [0, 0, 0], self.story(ranks))
        digests = {line["digest"] for r in ranks for line in r.said("done")}
        self.assertEqual(len(digests), 1, self.story(ranks))
        return digests.pop(), self.hosts.lost

    def test_lost_packets_cost_time_and_nothing_else(self):
        whole, none = self.train(0)
        self.assertEqual(none, 0)
        digest, lost = self.train(0.05)  # 20 %: slow_links_test.py
        self.assertEqual(digest, whole)
        self.assertGreater(lost, 50)


class Star(Hosts):
    """Namespaces and a router between them: hosts 10.78.0.1, 10.78.0.2 and so on."""

    def __init__(self, count=3):
        super().__init__()
        self.addresses = tuple(f"10.78.0.{i + 1}" for i in range(count))
        self.router = f"ddp-test-{os.getpid()}-router"
        self.names = tuple(f"ddp-test-{os.getpid()}-{side}" for side in "cdefgh"[:count])

    def make(self):
        ip("netns", "add", self.router)
        subprocess.run(["ip", "netns", "exec", self.router, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"],
                       capture_output=True, timeout=30, check=True)
        for i, (name, address) in enumerate(zip(self.names, self.addresses)):
            plug, gateway = f"p{i}", f"10.79.0.{i + 1}"
            ip("netns", "add", name)
            ip("link", "add", "e", "netns", name, "type", "veth", "peer", "name", plug, "netns", self.router)
            ip("-n", name, "addr", "add", address + "/32", "dev", "e")
            ip("-n", self.router, "addr", "add", gateway + "/32", "dev", plug)
            for where, device in ((name, "lo"), (name, "e"), (self.router, plug)):
                ip("-n", where, "link", "set", device, "up")
            ip("-n", self.router, "route", "add", address + "/32", "dev", plug)
            ip("-n", name, "route", "add", gateway + "/32", "dev", "e")
            ip("-n", name, "route", "add", "default", "via", gateway)

    def remove(self):
        super().remove()
        ip("netns", "del", self.router, check=False)

    def sever(self, side, other):
        """Nothing that `side` sends arrives at `other` any more."""
        ip("-n", self.names[side], "route", "add", "blackhole", self.addresses[other] + "/32")

    def mend(self, side, other):
        ip("-n", self.names[side], "route", "del", "blackhole", self.addresses[other] + "/32")


class Firewalled(Star):
    """The same, with rules of nftables in the router: no host sees that its packets are dropped."""

    def nft(self, *words):
        return subprocess.run(["ip", "netns", "exec", self.router, "nft", *words], stdin=subprocess.DEVNULL, capture_output=True,
                              text=True, timeout=30, check=False)

    def make(self):
        super().make()
        for words in (("add", "table", "inet", "cut"), ("add", "chain inet cut passing { type filter hook forward priority 0; }")):
            done = self.nft(*words)
            if done.returncode != 0:
                raise unittest.SkipTest(f"no nftables here: {done.stderr}")

    def rule(self, side, other, *verdict):
        done = self.nft("add", "rule", "inet", "cut", "passing", "ip", "saddr", self.addresses[side], "ip", "daddr",
                        self.addresses[other], *verdict)
        if done.returncode != 0:
            raise OSError(done.stderr)

    def sever(self, side, other):
        self.rule(side, other, "counter", "drop")

    def dropped(self):
        """How many packets."""
        return sum(int(n) for n in re.findall(r"counter packets (\d+)", self.nft("list", "table", "inet", "cut").stdout))

    def mend(self, side, other):
        self.nft("flush", "chain", "inet", "cut", "passing")


class Routed(BetweenHosts):
    count = 3
    kind = Star

    def setUp(self):
        self.hosts = self.kind(self.count)
        self.addCleanup(self.hosts.remove)
        self.hosts.make()
        self.running = []
        self.addCleanup(self.end_all)

    def cut(self, *ways, at=None):
        def attempt():
            ranks = self.endless(range(self.count), at=at)
            struck = time.monotonic()
            for side, other in ways:
                self.hosts.sever(side, other)
            self.wait(ranks)
            self.check_failed(ranks)
            errors = {r.error() for r in ranks}
            a, b = sorted(ways[0])
            self.assertEqual(len(errors), 1, self.story(ranks))
            self.assertRegex(errors.pop(), rf"the connection between rank ({a} and rank {b}|{b} and rank {a})\b")
            return struck, ranks

        self.in_time(attempt, lambda: [self.hosts.mend(side, other) for side, other in ways])


class Links(Routed):
    """One connection of three fails, and all hosts run: everybody names that connection, alike."""

    def test_a_rank_that_cannot_be_reached_at_the_start(self):
        self.hosts.sever(1, 2)  # rank 1 gets rank 2's packets, and its answers get lost
        ranks = [self.rank(r, r, 3, [FAULT_PROGRAM], **self.secret) for r in range(3)]
        self.wait(ranks)
        errors = {r.error() for r in ranks}
        self.assertEqual(len(errors), 1, self.story(ranks))
        self.assertRegex(errors.pop(), r"^DDP-E201 .*: rank 2 reaches rank 0, but not rank 1 \(pid \d+ on \S+\) at 10\.78\.0\.2:"
                         r"\d+: Connection timed out\. Check firewalls, and that all hosts use the same network$")

    def test_a_rank_that_can_be_reached_late(self):
        self.hosts.sever(1, 2)
        ranks = [self.rank(r, r, 3, [FAULT_PROGRAM, "times=default"], **self.secret) for r in range(3)]
        time.sleep(4.5)  # longer than the first attempt to connect may take
        self.hosts.mend(1, 2)
        self.wait(ranks)
        self.assertEqual([r.code for r in ranks], [0, 0, 0], self.story(ranks))

    def test_between_0_and_1(self):
        self.cut((0, 1), (1, 0))

    def test_from_0_to_2(self):
        self.cut((0, 2))

    def test_from_1_to_0(self):
        self.cut((1, 0))

    def test_between_1_and_2(self):
        self.cut((1, 2), (2, 1))


class Firewall(Routed):
    """A router begins to drop or to refuse what one host sends to another, in a phase of a step of one of the ranks."""

    kind = Firewalled

    def test_in_one_direction(self):
        for rank, phase, *way in ((0, "forward", 1, 2), (2, "backward", 2, 0), (1, "waiting", 1, 0), (0, "allreduce", 0, 2),
                                  (1, "between", 0, 1)):
            with self.subTest(rank=rank, phase=phase, way=way):
                self.cut(way, at=(rank, phase))
                self.assertGreater(self.hosts.dropped(), 0)
                self.hosts.mend(*way)

    def test_in_both_directions(self):
        for rank, phase, a, b in ((0, "backward", 0, 1), (2, "forward", 1, 2)):
            with self.subTest(rank=rank, phase=phase, between=(a, b)):
                self.cut((a, b), (b, a), at=(rank, phase))
                self.hosts.mend(a, b)

    def test_refused_with_a_reset(self):
        def attempt():
            ranks = self.endless(range(3))
            struck = time.monotonic()
            self.hosts.rule(1, 2, "meta", "l4proto", "tcp", "reject", "with", "tcp", "reset")
            self.wait(ranks)
            self.check_failed(ranks)
            errors = {r.error() for r in ranks}
            self.assertEqual(len(errors), 1, self.story(ranks))
            self.assertRegex(errors.pop(), r"^DDP-E202 .*the connection between rank (1 and rank 2|2 and rank 1)\b")
            return struck, ranks

        self.in_time(attempt, lambda: self.hosts.mend(1, 2))


class FourHosts(Routed):
    count = 4
    kind = Firewalled

    def test_between_1_and_3(self):
        self.cut((1, 3), (3, 1))

    def test_four_hosts_hold_the_bits_of_one(self):
        words = [FAULT_PROGRAM, "times=default", "steps=4"]
        on_one = self.digest([self.rank(0, r, 4, words, **self.secret) for r in range(4)])
        for where in ((0, 1, 2, 3), (3, 0, 1, 2, 3, 0, 2)):  # the second: some have two ranks, which are no neighbours
            with self.subTest(where=where):
                address = {"MASTER_ADDR": self.hosts.addresses[where[0]], **self.secret}
                found = self.digest([self.rank(side, r, len(where), words, **address) for r, side in enumerate(where)])
                if len(where) == 4:
                    self.assertEqual(found, on_one)
        one = [self.rank(0, r, 7, words, **self.secret) for r in range(7)]
        self.assertEqual(self.digest(one), found)

    def test_a_slow_cable_is_no_fault_and_changes_no_bit(self):
        words = [FAULT_PROGRAM, "times=default", "steps=2"]

        def train():
            begin = time.monotonic()
            return self.digest([self.rank(r, r, 4, words, **self.secret) for r in range(4)]), time.monotonic() - begin
        usual, soon = min((train() for _ in range(2)), key=lambda each: each[1])
        for where, device in ((self.hosts.names[3], "e"), (self.hosts.router, "p3")):  # in both directions
            done = subprocess.run(["tc", "-n", where, "qdisc", "add", "dev", device, "root", "tbf", "rate", "10mbit", "burst", "32kbit",
                                   "latency", "400ms"], capture_output=True, text=True, timeout=30, check=False)
            if done.returncode != 0:
                self.skipTest(f"no token bucket filter here: {done.stderr}")
        slow, seconds = train()
        self.assertEqual(slow, usual)
        # 2 steps of 640 kB of gradients, of which at least the rank's own quarters of the others' pass the cable.
        self.assertGreater(seconds, soon + 0.5, "nothing was slow")

    def test_a_partition_into_two_and_two(self):
        ways = [way for a in (0, 2) for b in (1, 3) for way in ((a, b), (b, a))]
        for at in (None, (2, "backward"), (1, "waiting")):
            with self.subTest(at=at):
                def attempt():
                    ranks = self.endless(range(4), "tensors=2", "elements=20", at=at)  # nothing fills a packet
                    struck = time.monotonic()
                    for way in ways:
                        self.hosts.sever(*way)
                    self.wait(ranks)
                    for side, others in (((0, 2), "13"), ((1, 3), "02")):
                        errors = {ranks[r].error() for r in side}
                        self.assertEqual(len(errors), 1, self.story(ranks))
                        told = errors.pop()
                        self.assertRegex(told, rf"^DDP-E203 .*: rank [{others}] has sent nothing.*the network is partitioned, "
                                               r".*the ranks on this side\.( \(rank \d: .*\))?$", self.story(ranks))
                        self.assertNotIn("large packets", told)
                    return struck, ranks

                def repair():
                    for way in ways:
                        self.hosts.mend(*way)
                self.in_time(attempt, repair)
                repair()


if __name__ == "__main__":
    why = obstacle()
    if why:
        print("skipped:", why)
        sys.exit(SKIPPED)
    unittest.main()
