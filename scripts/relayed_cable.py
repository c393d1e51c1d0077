#!/usr/bin/env python3
"""Two hosts, which are network namespaces, joined by a cable with a rate, a delay and a loss of packets.

Linux's netem does the same inside the kernel, where a kernel has it. Here a process carries packets from one TUN device to the
other, so that root and /dev/net/tun are enough. Where no packets are to be lost the devices take segments of up to 64 KiB
(TCP segmentation offload), and carrying 100 Mbit/s costs some percent of a core.

    with RelayedCable(rate=100e6, delay=0.010) as cable:  # a round trip of 20 ms
        subprocess.run(cable.command(0, "ping", "-c", "3", cable.addresses[1]))

usage as a process: relayed_cable.py NAMESPACE NAMESPACE RATE DELAY LOSS SEED. It says "ready", and when its
standard input ends how many packets it has carried and lost.
"""
import collections
import ctypes
import fcntl
import itertools
import os
import random
import select
import struct
import subprocess
import sys
import time

DEVICE = "cable"
QUEUE = 1 << 20  # bytes that wait for the cable in one direction; what comes beyond is lost
TUNSETIFF, TUNSETOFFLOAD, TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4 = 0x01, 0x02
CLONE_NEWNET = 0x40000000
HEADER = 10  # bytes of virtio_net_hdr before each packet


def ip(*words, check=True):
    subprocess.run(["ip", *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=check)


class RelayedCable:
    """Hosts 10.77.0.1 and 10.77.0.2. rate in bits per second, delay in seconds one way, loss as a share of packets.

    Afterwards carried and lost are the numbers of packets that arrived, and that were lost for the sake of `loss`.
    """

    addresses = ("10.77.0.1", "10.77.0.2")
    made = itertools.count()

    def __init__(self, rate, delay=0.0, loss=0.0, seed=1):
        number = next(self.made)
        self.names = tuple(f"ddp-cable-{os.getpid()}-{number}{side}" for side in "ab")
        self.settings = [str(value) for value in (rate, delay, loss, seed)]
        self.relay = None
        self.carried = self.lost = 0

    def __enter__(self):
        try:
            for name in self.names:
                ip("netns", "add", name)
            self.relay = subprocess.Popen([sys.executable, __file__, *self.names, *self.settings], stdin=subprocess.PIPE,
                                          stdout=subprocess.PIPE, text=True)
            if self.relay.stdout.readline() != "ready\n":
                raise OSError("the relay did not start")
            for name, address in zip(self.names, self.addresses):
                ip("-n", name, "addr", "add", address + "/24", "dev", DEVICE)
                for device in ("lo", DEVICE):
                    ip("-n", name, "link", "set", device, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        if self.relay:
            counts, _ = self.relay.communicate(timeout=30)
            self.carried, self.lost = (int(word) for word in counts.split()) if self.relay.returncode == 0 else (0, 0)
        for name in self.names:
            ip("netns", "del", name, check=False)

    def command(self, side, *words):
        return ["ip", "netns", "exec", self.names[side], *words]


def device_in(namespace, offload):
    """A descriptor of a new TUN device in that namespace. The calling process stays there."""
    with open(f"/run/netns/{namespace}", "rb") as there:
        if ctypes.CDLL(None, use_errno=True).setns(there.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), IFF_TUN | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(tun, TUNSETVNETHDRSZ, struct.pack("i", HEADER))
    fcntl.ioctl(tun, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 if offload else 0)
    return tun


class Way:
    """One direction: packets leave one after the other at the rate, and arrive after the delay."""

    def __init__(self, source, target, rate, delay, loss, dice):
        self.source, self.target, self.rate, self.delay, self.loss, self.dice = source, target, rate, delay, loss, dice
        self.free = 0.0  # when the last packet has left
        self.travelling = collections.deque()  # (time of arrival, packet)
        self.carried = self.lost = 0

    def take(self, now):
        while True:
            try:
                packet = os.read(self.source, 1 << 17)
            except BlockingIOError:
                return
            if self.loss and self.dice.random() < self.loss:
                self.lost += 1
                continue
            begins = max(now, self.free)
            if (begins - now) * self.rate > 8 * QUEUE:
                continue
            self.free = begins + 8 * (len(packet) - HEADER) / self.rate
            self.travelling.append((self.free + self.delay, packet))

    def deliver(self, now):
        while self.travelling and self.travelling[0][0] <= now:
            try:
                os.write(self.target, self.travelling.popleft()[1])
                self.carried += 1
            except OSError:
                pass  # a device that is down or full loses packets, as any does


def relay(names, rate, delay, loss, seed):
    devices = [device_in(name, loss == 0) for name in names]
    dice = random.Random(seed)
    ways = [Way(devices[i], devices[1 - i], rate, delay, loss, dice) for i in (0, 1)]
    print("ready", flush=True)
    while True:
        now = time.monotonic()
        due = [way.travelling[0][0] for way in ways if way.travelling]
        readable, _, _ = select.select([*devices, sys.stdin], [], [], max(0.0, min(due) - now) if due else None)
        if sys.stdin in readable:
            print(sum(way.carried for way in ways), sum(way.lost for way in ways))
            return
        now = time.monotonic()
        for way in ways:
            way.take(now)
            way.deliver(now)


if __name__ == "__main__":
    relay(sys.argv[1:3], *(float(value) for value in sys.argv[3:6]), int(sys.argv[6]))
