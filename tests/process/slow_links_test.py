"""A minute on bad cables between two hosts: slow ones, whose bandwidth is used, and some that lose packets. All at the same time.
Skipped, with the reason, where namespaces or TUN devices are not allowed.

FAULT_PROGRAM (or DDP_PROGRAMS) names the binary.
"""

import contextlib
import dataclasses
import sys
import time
import unittest

import namespaces_test
from namespaces_test import FAULT_PROGRAM, SKIPPED, RelayedCable

MINUTE = 60.0


@dataclasses.dataclass
class Link:
    cable: RelayedCable
    where: tuple  # which host a rank is on
    words: tuple
    bytes_a_step: int = 0  # of gradients, on links whose use is measured
    loses: bool = False
    ranks: list = dataclasses.field(default_factory=list)


def gradients(tensors, elements):
    return {"words": (f"tensors={tensors}", f"elements={elements}"), "bytes_a_step": 4 * tensors * elements}


class Links(namespaces_test.OverRelayedCable):
    def start_on(self, link, *words):
        self.hosts = link.cable
        command = [FAULT_PROGRAM, "times=default", "digests=1", *link.words, *words]
        return [self.rank(side, r, len(link.where), command, **self.secret) for r, side in enumerate(link.where)]

    def steps_of(self, ranks):
        """Of each rank, its steps' digests and how long they took, by number."""
        return [{int(line["number"]): (line["digest"], int(line["took"]) * 1e-9) for line in r.said("step")} for r in ranks]

    def test_a_minute(self):
        links = {"10 Mbit/s": Link(RelayedCable(10e6, 0.001), (0, 1), **gradients(3, 170000)),
                 "1 Mbit/s": Link(RelayedCable(1e6, 0.005), (0, 1), **gradients(8, 20000)),
                 "5 % of packets lost": Link(RelayedCable(20e6, 0.001, 0.05), (0, 1, 1), (), loses=True),
                 "20 % of packets lost": Link(RelayedCable(20e6, 0.001, 0.2), (0, 1, 1), ("dead=30000",), loses=True)}
        with contextlib.ExitStack() as cables:
            for link in links.values():
                cables.enter_context(link.cable)
                link.ranks = self.start_on(link, "steps=1000000")
            for link in links.values():
                for rank in link.ranks:
                    self.wait_for(rank, "start")
            time.sleep(MINUTE)
            for name, link in links.items():
                self.assertEqual({r.poll() for r in link.ranks}, {None}, f"{name}\n{self.story(link.ranks)}")
            self.end_all()
        made = {name: self.steps_of(link.ranks) for name, link in links.items()}
        for name, link in links.items():
            with self.subTest(link=name):
                story = self.story(link.ranks)
                fewest, most = min(map(len, made[name])), max(map(len, made[name]))
                self.assertLessEqual(most - fewest, 1, story)
                if link.loses:
                    self.assertGreater(link.cable.lost, 500)
                    self.assertGreater(fewest, 8, story)
                else:
                    self.assertGreater(fewest, 4, story)
                with RelayedCable(1e9) as whole:
                    undisturbed = Link(whole, link.where, link.words)
                    ranks = self.start_on(undisturbed, f"steps={most}")
                    self.digest(ranks)
                    usual = self.steps_of(ranks)[0]
                    self.end_all()
                for steps in made[name]:
                    for number, (digest, _) in steps.items():
                        self.assertEqual(digest, usual[number][0], f"after step {number}")
                if link.bytes_a_step:
                    # Of two ranks each sends the other its part of the sum and half of the means: as many bytes as the gradients have.
                    rate = float(link.cable.settings[0])
                    # The first step waits for the last of what came before it.
                    times = [[took for number, (_, took) in steps.items() if number > 1] for steps in made[name]]
                    used = max(8 * link.bytes_a_step * len(took) / (rate * sum(took)) for took in times)
                    print(f"{name}: {used:.3f} of it was used in {fewest} steps", flush=True)
                    self.assertGreater(used, 0.85, story)
                else:
                    print(f"{name}: {link.cable.lost} of {link.cable.lost + link.cable.carried} packets in {fewest} steps", flush=True)


if __name__ == "__main__":
    why = namespaces_test.obstacle()
    if why:
        print("skipped:", why)
        sys.exit(SKIPPED)
    unittest.main()
