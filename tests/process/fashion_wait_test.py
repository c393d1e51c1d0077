"""What the Fashion-MNIST example says of the time that it waits for others. FASHION_MNIST (or DDP_EXAMPLES) as in demo_test.py."""

import os
import re
import signal
import tempfile
import time
import unittest

from demo_test import FASHION_DATA, FASHION_MNIST, FILES, cut
from jobs import Job

STILL = 1.5  # seconds: half of what a silent rank is given
WAITED = re.compile(r"^result: .* seconds=(\d+\.\d) .* communication_wait=(\d+\.\d)% ", re.MULTILINE)


@unittest.skipUnless(os.path.isfile(os.path.join(FASHION_DATA, "train-images-idx3-ubyte.gz")),
                     f"no Fashion-MNIST in {FASHION_DATA} (Debian: apt install dataset-fashion-mnist)")
class CommunicationWait(unittest.TestCase):
    def test_counts_the_time_in_which_another_rank_stands_still(self):
        with tempfile.TemporaryDirectory(prefix="ddp-wait-test-") as few:
            for name, count in FILES.items():
                with open(os.path.join(few, name), "wb") as file:
                    file.write(cut(name, count if name.startswith("train") else 2))  # almost all of it are steps
            # After five steps no more losses are summed, and evaluations are few: what waits is a step.
            words = ["--data", few, "--hidden", "8", "--epochs", "80", "--batch", "10", "--losses", "5"]
            with Job(2, [FASHION_MNIST, *words]) as job:
                job.wait_for("loss", 0, count=5)
                os.kill(job.ranks[1].pid, signal.SIGSTOP)
                time.sleep(STILL)
                os.kill(job.ranks[1].pid, signal.SIGCONT)
                job.wait()
                match = WAITED.search(job.ranks[0].out)
                self.assertTrue(match, job.story())
                # The share is of the time in steps, which is no longer than the whole.
                seconds, share = float(match[1]), float(match[2])
                self.assertGreater(seconds * share / 100, 0.8 * STILL, job.story())
                self.assertLessEqual(share, 100)


if __name__ == "__main__":
    unittest.main()
