"""Jobs that are killed while they write checkpoints, or told to stop, and then resumed: they end with the bits of one that
nothing has disturbed.

FASHION_MNIST (or DDP_EXAMPLES, its directory) and DDPRUN name the binaries, MPIEXEC the launcher of MPI. `checkpoints_test.py --kills N` tries N moments instead of 20;
DDP_TEST_SEED repeats them. The data is made here: nothing is needed but the program.
"""

import os
import random
import re
import shutil
import signal
import struct
import sys
import tempfile
import time
import unittest

from jobs import Job, Rank, SCALE, environment, program

FASHION_MNIST = program("FASHION_MNIST", "DDP_EXAMPLES", "fashion_mnist")
DDPRUN = os.environ.get("DDPRUN", "")
MPIEXEC = os.environ.get("MPIEXEC") or shutil.which("mpiexec") or ""
RANKS = 3
KILLS = 20
SEED = int(os.environ.get("DDP_TEST_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 30)
TO_BE_RESUMED = 75


def write_data(directory):
    """Images of noise in IDX files: what they show does not matter."""
    draws = random.Random(1)
    for split, count in (("train", 1200), ("t10k", 100)):
        with open(os.path.join(directory, f"{split}-images-idx3-ubyte"), "wb") as file:
            file.write(struct.pack(">4I", 0x803, count, 12, 12) + draws.randbytes(count * 144))
        with open(os.path.join(directory, f"{split}-labels-idx1-ubyte"), "wb") as file:
            file.write(struct.pack(">2I", 0x801, count) + bytes(draws.randrange(10) for _ in range(count)))


class Checkpoints(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.owner = tempfile.TemporaryDirectory(prefix="ddp-checkpoints-test-")
        cls.data = os.path.join(cls.owner.name, "data")
        os.mkdir(cls.data)
        write_data(cls.data)
        cls.expected = {update: cls.finished(cls, update) for update in ("sharded", "replicated")}

    @classmethod
    def tearDownClass(cls):
        cls.owner.cleanup()

    def command(self, update, *words):
        return [FASHION_MNIST, "--data", self.data, "--hidden", "64", "--epochs", "3", "--batch", "60", "--update", update,
                "--transport", "tcp", *words]

    def digest(self, job):
        for rank in job.ranks.values():
            assert rank.code == 0, job.story()
        return self.digest_in(job.ranks[0].out, job.story())

    @staticmethod
    def digest_in(out, story):
        found = re.search(r"(?m)^result: .* replicas=identical parameters=([0-9a-f]{16})$", out)
        assert found, story
        return found.group(1)

    def finished(self, update, *words, ranks=RANKS):
        with Job(ranks, Checkpoints.command(self, update, *words)) as job:
            job.wait()
            return Checkpoints.digest(self, job)

    def kept(self, directory, *more):
        return ("--checkpoint", directory, "--every", "1", "--keep", "2", "--resume", *more)

    def test_killed_at_any_moment(self):
        draws = random.Random(SEED)
        kills = resumed = writing = 0
        with tempfile.TemporaryDirectory(dir=self.owner.name) as parent:
            directory, update, words = "", "", ()
            # Half of the kills or so come while a checkpoint is written; with none there is more to try.
            while kills < KILLS or (writing == 0 and kills < 5 * KILLS):
                if not directory:  # every fourth job or so begins anew
                    directory = os.path.join(parent, f"kept-{kills}")
                    update = draws.choice(("sharded", "replicated"))
                    words = self.kept(directory, *draws.choice(((), ("--background",), ("--loader", "background"))))
                before = self.expected_step(directory)
                with Job(RANKS, self.command(update, *words)) as job:
                    victim = job.ranks[draws.randrange(RANKS)]
                    whole_host = draws.random() < 0.33  # all of them at once, as when power fails
                    goal, end = self.newest(directory) + draws.randrange(1, 6), time.monotonic() + 30 * SCALE
                    while self.newest(directory) < goal and victim.poll() is None and time.monotonic() < end:
                        time.sleep(0.0005)
                    time.sleep(draws.uniform(0, 0.03))  # a few steps, each with a checkpoint
                    if victim.poll() is None:
                        for rank in list(job.ranks.values()) if whole_host else [victim]:
                            if rank.poll() is None:
                                os.kill(rank.pid, signal.SIGKILL)
                    job.wait()
                    kills += 1
                    ended = all(rank.code == 0 for rank in job.ranks.values())  # it came too late
                    story = f"DDP_TEST_SEED={SEED}\n{job.story()}"
                    self.assertEqual(self.resumed_after(job), before, story)
                    resumed += before > 0
                left = [name for name in os.listdir(directory) if name.endswith(".tmp")] if os.path.isdir(directory) else []
                writing += bool(left)
                self.assertNotIn("is not used", story)  # no kill damages a checkpoint
                if ended or draws.random() < 0.25:
                    self.assertEqual(self.ended(update, directory, words), self.expected[update], story)
                    self.assertEqual([n for n in os.listdir(directory) if n.endswith(".tmp")], [])
                    directory = ""
            if directory:
                self.assertEqual(self.ended(update, directory, words), self.expected[update], f"DDP_TEST_SEED={SEED}")
        print(f"{kills} kills, {writing} while a checkpoint was written, {resumed} jobs resumed", file=sys.stderr)
        self.assertGreater(resumed, 0)
        self.assertGreater(writing, 0)

    def ended(self, update, directory, words):
        """The digest of a job that goes on from the newest checkpoint to its end."""
        before = self.expected_step(directory)
        with Job(RANKS, self.command(update, *words)) as job:
            job.wait()
            digest = self.digest(job)
            self.assertEqual(self.resumed_after(job), before, job.story())
            return digest

    def test_what_is_written_in_the_background_counts_before_the_next_save(self):
        with tempfile.TemporaryDirectory(dir=self.owner.name) as parent:
            kept = os.path.join(parent, "kept")
            words = self.command("replicated", "--checkpoint", kept, "--every", "1500", "--background", "--resume")
            words[words.index("--epochs") + 1] = "100"  # 2,000 steps: there is no second save
            with Job(RANKS, words) as job:
                end = time.monotonic() + 60 * SCALE
                while self.newest(kept) == 0 and job.ranks[0].poll() is None and time.monotonic() < end:
                    time.sleep(0.001)
                for rank in job.ranks.values():
                    if rank.poll() is None:
                        os.kill(rank.pid, signal.SIGKILL)
                job.wait()
                self.assertIn("epoch 70/100", job.ranks[0].out)
                self.assertNotIn("epoch 100/100", job.ranks[0].out, "only wait() has made it a checkpoint")
            self.assertEqual(self.newest(kept), 1500)

    @staticmethod
    def resumed_after(job):
        found = re.search(r"(?m)^resumed after step (\d+)$", job.ranks[0].out)
        return int(found[1]) if found else 0

    def expected_step(self, directory):
        """After which step a job resumes: the one that is named, which is the newest, but where a kill came between the two."""
        newest, latest = self.newest(directory), self.latest(directory)
        self.assertIn(newest - latest, (0, 1), os.path.isdir(directory) and os.listdir(directory))
        return latest or newest

    @staticmethod
    def newest(directory):
        try:
            names = os.listdir(directory)
        except OSError:
            return 0
        return max((int(n[5:]) for n in names if re.fullmatch(r"step-\d{12}", n)), default=0)

    def test_a_signal_to_one_rank_stops_all_and_loses_nothing(self):
        for signo in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            with self.subTest(signo=signo), tempfile.TemporaryDirectory(dir=self.owner.name) as parent:
                directory = os.path.join(parent, "kept")
                words = ("--checkpoint", directory, "--every", "7", "--resume")
                with Job(RANKS, self.command("sharded", *words)) as job:
                    end = time.monotonic() + 30 * SCALE
                    while self.newest(directory) == 0 and time.monotonic() < end:
                        time.sleep(0.001)
                    os.kill(job.ranks[1].pid, signo)
                    job.wait()
                    self.assertEqual({r.code for r in job.ranks.values()}, {TO_BE_RESUMED}, job.story())
                    stopped = int(re.search(r"(?m)^stopped after step (\d+)$", job.ranks[0].out)[1])
                self.assertEqual(self.newest(directory), stopped)
                self.assertEqual(self.finished("sharded", *words), self.expected["sharded"])

    def test_ranks_that_step_by_themselves(self):
        # Saved when ranks have met, which changes no bit; where they hold different values for good, saving makes them alike, so that
        # only runs with the same --every end alike.
        for strategy, period, signo in (("local_sgd", "4", signal.SIGTERM), ("diloco", "4", signal.SIGKILL),
                                        ("gossip", "2", signal.SIGKILL), ("stale", "2", signal.SIGKILL),
                                        ("elastic", "3", signal.SIGTERM), ("stale", "2", signal.SIGTERM)):
            with self.subTest(strategy=strategy, signo=signo), tempfile.TemporaryDirectory(dir=self.owner.name) as parent:
                plain = ("--strategy", strategy, "--period", period)
                agrees = strategy in ("local_sgd", "diloco")
                alone = (*plain, "--checkpoint", os.path.join(parent, "alone"), "--every", "5", "--keep", "99")
                expected = self.finished("replicated", *(plain if agrees else alone))
                for attempt in range(5):  # it may end before the signal comes
                    directory = os.path.join(parent, f"kept-{attempt}")
                    words = (*plain, "--checkpoint", directory, "--every", "5", "--keep", "99", "--resume")
                    with Job(RANKS, self.command("replicated", *words)) as job:
                        end = time.monotonic() + 30 * SCALE
                        while self.latest(directory) == 0 and time.monotonic() < end:
                            time.sleep(0.001)
                        os.kill(job.ranks[1].pid, signo)
                        job.wait()
                        codes, story = {r.code for r in job.ranks.values()}, job.story()
                    if codes != {0}:
                        break
                self.assertNotEqual(codes, {0}, story)
                if signo == signal.SIGTERM:
                    self.assertEqual(codes, {TO_BE_RESUMED}, story)
                    stopped = int(re.search(r"(?m)^stopped after step (\d+)$", story)[1])
                    self.assertEqual(self.newest(directory), stopped)
                    if agrees:
                        self.assertEqual(stopped % int(period), 0)
                with Job(RANKS, self.command("replicated", *words)) as job:
                    job.wait()
                    self.assertIn("resumed after step", job.ranks[0].out, job.story())
                    if agrees or signo == signal.SIGKILL:
                        self.assertEqual(self.digest(job), expected, job.story())
                    else:
                        self.digest(job)  # the signal has made them alike once more
                steps = sorted(int(n[5:]) for n in os.listdir(directory) if re.fullmatch(r"step-\d{12}", n))
                if signo == signal.SIGKILL:  # or at the first meeting behind them
                    self.assertEqual(steps, [-(-s // 4) * 4 if agrees else s for s in range(5, 61, 5)])

    def test_ddprun_that_is_told_to_stop_ends_with_75_and_resumes(self):
        expected = self.finished("sharded", ranks=2)
        noting = 'echo $$ > "$NOTES/$RANK"; exec "$@"'
        for signo, victim in ((signal.SIGTERM, None), (signal.SIGUSR1, None), (signal.SIGINT, None), (signal.SIGTERM, 1)):
            with self.subTest(signo=signo, victim=victim), tempfile.TemporaryDirectory(dir=self.owner.name) as parent:
                directory = os.path.join(parent, "kept")
                words = ("--checkpoint", directory, "--every", "5", "--resume")
                command = [DDPRUN, "-n", "2", "--restarts", "2", "--prefix", "none", "--", "sh", "-c", noting, "sh",
                           *self.command("sharded", *words)]
                job = Rank(command, environment(NOTES=parent), start_new_session=True)
                self.addCleanup(job.err_file.close)
                self.addCleanup(job.out_file.close)
                try:
                    end = time.monotonic() + 30 * SCALE
                    while self.latest(directory) == 0 and job.poll() is None and time.monotonic() < end:
                        time.sleep(0.0005)
                    pid = job.pid
                    if victim is not None:
                        with open(os.path.join(parent, str(victim))) as file:
                            pid = int(file.read())
                    os.kill(pid, signo)
                finally:
                    code, out, err = job.finish()
                self.assertEqual(code, TO_BE_RESUMED, f"{out}{err}")
                self.assertTrue(err.endswith("ddprun: the job has stopped and can be resumed: all ranks ended with exit code 75\n"),
                                err)
                self.assertNotIn("failed", err)
                self.assertNotIn("again", err)
                stopped = int(re.search(r"(?m)^stopped after step (\d+)$", out)[1])
                self.assertEqual(self.latest(directory), stopped)
                job = Rank(command, environment(NOTES=parent), start_new_session=True)
                self.addCleanup(job.err_file.close)
                self.addCleanup(job.out_file.close)
                code, out, err = job.finish()
                self.assertEqual(code, 0, f"{out}{err}")
                self.assertIn(f"resumed after step {stopped}\n", out)
                self.assertEqual(self.digest_in(out, err), expected)

    @unittest.skipUnless(MPIEXEC and SCALE == 1, "no MPI here, or a sanitizer: what Open MPI leaks")
    def test_mpiexec_that_is_told_to_stop_saves_and_resumes(self):
        expected = self.finished("sharded", ranks=2)
        for signo in (signal.SIGUSR1, signal.SIGTERM):  # it passes both on; a second after SIGTERM it kills
            with self.subTest(signo=signo), tempfile.TemporaryDirectory(dir=self.owner.name) as parent:
                directory = os.path.join(parent, "kept")
                command = [MPIEXEC, "-n", "2", "--oversubscribe", *self.command("sharded", "--checkpoint", directory, "--every", "5", "--resume")]
                command[command.index("tcp")] = "mpi"

                def start():
                    job = Rank(command, environment(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1"),
                               start_new_session=True)
                    self.addCleanup(job.err_file.close)
                    self.addCleanup(job.out_file.close)
                    return job

                job = start()
                try:
                    end = time.monotonic() + 30 * SCALE
                    while self.latest(directory) == 0 and job.poll() is None and time.monotonic() < end:
                        time.sleep(0.0005)
                    os.kill(job.pid, signo)
                finally:
                    code, out, err = job.finish()
                self.assertEqual(code, TO_BE_RESUMED if signo == signal.SIGUSR1 else 1, f"{out}{err}")
                stopped = self.latest(directory)
                if signo == signal.SIGUSR1:
                    self.assertIn(f"stopped after step {stopped}\n", out)
                code, out, err = start().finish()
                self.assertEqual(code, 0, f"{out}{err}")
                self.assertIn(f"resumed after step {stopped}\n", out)
                self.assertEqual(self.digest_in(out, err), expected)

    def test_another_number_of_ranks_goes_on(self):
        with tempfile.TemporaryDirectory(dir=self.owner.name) as parent:
            words = self.kept(os.path.join(parent, "kept"))
            with Job(RANKS, self.command("sharded", *words)) as job:
                while self.newest(words[1]) < 5:
                    self.assertIsNone(job.ranks[0].poll(), job.story())
                os.kill(job.ranks[2].pid, signal.SIGKILL)
                job.wait()
            with Job(2, self.command("replicated", *words)) as job:
                job.wait()
                self.digest(job)
                self.assertIn("resumed after step", job.ranks[0].out)

    @staticmethod
    def latest(directory):
        """What a job that resumes begins with: the newest directory may be there a moment before it is named."""
        try:
            with open(os.path.join(directory, "latest")) as file:
                return int(file.read().removeprefix("step-"))
        except OSError:
            return 0

    def test_ddprun_starts_a_killed_job_again(self):
        if not os.path.isfile(DDPRUN):
            self.fail("DDPRUN names no launcher")
        expected = self.finished("sharded", ranks=2)
        with tempfile.TemporaryDirectory(dir=self.owner.name) as parent:
            directory = os.path.join(parent, "kept")
            noting = 'echo $$ > "$NOTES/$DDP_RESTART_COUNT.$RANK"; exec "$@"'  # each rank leaves its process id
            job = Rank([DDPRUN, "-n", "2", "--max-restarts", "2", "--prefix", "none", "--", "sh", "-c", noting, "sh",
                        *self.command("sharded", *self.kept(directory))], environment(NOTES=parent), start_new_session=True)
            self.addCleanup(job.err_file.close)
            self.addCleanup(job.out_file.close)
            try:
                goals = []
                for attempt, victim in enumerate((1, 0)):
                    goals.append(self.latest(directory) + 5)  # of 60 steps
                    end = time.monotonic() + 30 * SCALE
                    while self.latest(directory) < goals[-1]:
                        self.assertIsNone(job.poll(), f"it ended before its rank was killed\n{job.out}{job.err}")
                        self.assertLess(time.monotonic(), end, job.out + job.err)
                        time.sleep(0.0005)
                    with open(os.path.join(parent, f"{attempt}.{victim}")) as file:
                        os.kill(int(file.read()), signal.SIGKILL)
            finally:
                code, out, err = job.finish()
            story = f"{out}{err}"
            self.assertEqual(code, 0, story)
            self.assertEqual(re.findall(r"(?m)^ddprun: starting all ranks again: restart (\d) of 2$", err), ["1", "2"], story)
            steps = [int(step) for step in re.findall(r"(?m)^resumed after step (\d+)$", out)]
            self.assertEqual(len(steps), 2, story)
            for step, goal in zip(steps, goals):
                self.assertGreaterEqual(step, goal, story)
            self.assertNotIn("is not used", story)
            self.assertEqual(self.digest_in(out, story), expected)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background has it ignored, and ranks would honour that
    if "--kills" in sys.argv:
        at = sys.argv.index("--kills")
        KILLS = int(sys.argv[at + 1])
        del sys.argv[at:at + 2]
    unittest.main()
