"""Mistakes of a first day, each with the message it gets: what happened, where, and what to do now. The mistakes that a
compiler finds are in tests/compile_fail.

NEWCOMER_PROGRAM (or DDP_PROGRAMS, its directory), DDPRUN and MPIEXEC name the binaries.
"""

import contextlib
import os
import re
import socket
import subprocess
import tempfile
import time
import unittest

from jobs import DEADLINE, SCALE, Job, Rank, environment, exit_code_of, program

NEWCOMER = program("NEWCOMER_PROGRAM", "DDP_PROGRAMS", "newcomer_program")
DDPRUN = os.environ.get("DDPRUN", "")
MPIEXEC = os.environ.get("MPIEXEC", "")
JOIN = 1.5 * SCALE  # what the program sets, in seconds


def run(*words, **variables):
    return subprocess.run(words, env=environment(**variables), stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          timeout=DEADLINE, check=False)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Case(unittest.TestCase):
    def says(self, text, *words):
        """In this order, each of them literally, and nothing that only its author understands."""
        self.assertRegex(text, "(?s)" + ".*".join(re.escape(word) for word in words))
        self.assertNotRegex(text, r"terminate called|what\(\):|std::|basic_string|Assertion", text)

    def alone(self, *words, **variables):
        done = run(NEWCOMER, *words, **variables)
        self.assertEqual((done.returncode, done.stdout), (exit_code_of(done.stderr), ""), done.stderr)
        self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
        return done.stderr


class Launching(Case):
    def test_without_a_mistake(self):
        done = run(NEWCOMER)
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "trained\n", ""))

    def test_the_launcher_is_forgotten(self):
        self.says(self.alone("ranks", "4"), "DDP-E101 environment", "does not know the others", "ddprun -n 4 -- PROGRAM")

    def test_another_number_of_ranks_than_the_program_wants(self):
        with Job(2, [NEWCOMER, "ranks", "4"]) as job:
            job.wait()
            self.says(job.ranks[0].error(), "DDP-E101", "WORLD_SIZE is 2, but 4 ranks were asked for", "ddprun -n 4")

    def test_half_of_the_environment(self):
        self.says(self.alone(WORLD_SIZE="2", RANK="0"), "RANK, WORLD_SIZE set, but not MASTER_ADDR, MASTER_PORT",
                  "ddprun or torchrun, set all four, or none to run alone")

    @unittest.skipUnless(MPIEXEC, "MPIEXEC names no mpiexec")
    def test_mpirun_of_a_program_without_mpi_meets_over_tcp(self):
        done = run(MPIEXEC, "--oversubscribe", "-n", "2", NEWCOMER)
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "trained\n" * 2, ""))
        done = run(MPIEXEC, "--oversubscribe", "-n", "2", NEWCOMER, "ranks", "4")
        self.says(done.stderr, "DDP-E101", "WORLD_SIZE is 2, but 4 ranks were asked for")

    def test_ranks_of_srun_meet_without_a_word(self):
        def variables(rank):
            said = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
            return {**said, "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank),
                    "SLURM_LOCALID": str(rank), "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NODELIST": "node1",
                    "SLURM_STEP_TASKS_PER_NODE": "3"}

        with Job(3, [NEWCOMER], variables, inherit=False) as job:
            job.wait()
            self.assertEqual([(r.code, r.out) for r in job.ranks.values()], [(0, "trained\n")] * 3, job.story())

    def test_a_batch_script_without_srun(self):
        self.says(self.alone(SLURM_JOB_ID="7", SLURM_NTASKS="8", SLURM_PROCID="0"), "DDP-E101", "SLURM_NTASKS=8",
                  "this process is none of them", "Put srun in front of the program")
        self.says(self.alone(SLURM_STEP_NUM_TASKS="8"), "DDP-E101 environment: SLURM_STEP_NUM_TASKS=8", "would train alone")
        done = run(NEWCOMER, SLURM_JOB_ID="7", SLURM_STEP_ID="0", SLURM_STEP_NUM_TASKS="1", SLURM_PROCID="0")
        self.assertEqual((done.returncode, done.stdout), (0, "trained\n"), done.stderr)

    def test_several_hosts_that_meet_over_loopback_are_told_why_they_do_not(self):
        text = self.alone(RANK="2", WORLD_SIZE="4", LOCAL_RANK="0", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
                          MASTER_PORT=str(free_port()))
        self.says(text, "DDP-E201 rendezvous:", "MASTER_ADDR is 127.0.0.1, which every host resolves to itself",
                  "LOCAL_WORLD_SIZE=2", "set it to an address of rank 0's host")

    @unittest.skipUnless(DDPRUN, "DDPRUN names no launcher")
    def test_a_program_that_does_not_exist(self):
        done = run(DDPRUN, "-n", "2", "./no_such_program")
        self.assertEqual(done.returncode, 127)
        self.says(done.stderr, "ddprun: cannot run './no_such_program': No such file")
        done = subprocess.run([DDPRUN, "-n", "2", "newcomer_program"], cwd=os.path.dirname(NEWCOMER), env=environment(),
                              capture_output=True, text=True, timeout=DEADLINE, check=False)
        self.assertEqual(done.returncode, 127)
        self.says(done.stderr, "Did you mean ./newcomer_program?")

    @unittest.skipUnless(DDPRUN, "DDPRUN names no launcher")
    def test_more_ranks_than_cores_are_no_mistake(self):
        ranks = min(os.cpu_count() + 1, 17)
        done = run(DDPRUN, "-n", str(ranks), "--prefix", "none", NEWCOMER)
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "trained\n" * ranks, ""))


class Meeting(Case):
    @unittest.skipIf(SCALE > 1, "sanitizers need address space of their own")
    def test_more_ranks_than_the_system_starts_threads(self):
        # Stacks so large that there is no room for one more while there is for everything else.
        done = subprocess.run(["bash", "-c", 'ulimit -s 65536 -v 1000000; exec "$0" "$@"', NEWCOMER, "threads", "400"],
                              env=environment(MALLOC_ARENA_MAX="1"), stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              timeout=DEADLINE, check=False)
        self.assertEqual(done.returncode, 101, done.stderr)
        self.says(done.stderr, "DDP-E101", "does not start the thread of rank", "ulimit -u")

    @unittest.skipIf(SCALE > 1, "sanitizers need address space of their own")
    def test_no_room_for_the_thread_of_the_store(self):
        done = subprocess.run(["bash", "-c", 'ulimit -s 1000000 -v 1000000; exec "$0" "$@"', NEWCOMER],
                              env=environment(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port())),
                              stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DEADLINE, check=False)
        self.assertEqual(done.returncode, 101, done.stderr)
        self.says(done.stderr, "DDP-E101", "the thread of the rendezvous store did not start", "ulimit -u")

    def test_fewer_ranks_than_world_size_says(self):
        with Job(3, [NEWCOMER], without=[2]) as job:
            job.wait()
            for rank in (0, 1):
                self.says(job.ranks[rank].error(), "DDP-E201 rendezvous: ranks {2} never joined (2 of 3 present",
                          "Check that they were started", "look at their output", "set WORLD_SIZE to")

    def test_rank_0_was_not_started(self):
        port = free_port()
        self.says(self.alone(RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)),
                  "DDP-E201", f"rank 1 cannot reach rank 0 at 127.0.0.1:{port}", "refused", "Check that rank 0 runs",
                  "MASTER_PORT", "firewall")

    def test_two_jobs_on_one_port(self):
        with Job(2, [NEWCOMER], without=[1]) as first:  # its rank 0 waits for rank 1
            second = Rank([NEWCOMER], environment(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
                                                  MASTER_PORT=str(first.port)), start_new_session=True)
            first.ranks["of the second job"] = second
            first.wait(which=["of the second job"])
            self.says(second.error(), "DDP-E201", f"port {first.port} is in use by another program on 127.0.0.1",
                      "(pid ",
                      "or by another process with RANK=0", "Choose another MASTER_PORT, or start the job with ddprun")
            first.start(1)
            first.wait(which=[0, 1])
            self.assertEqual([first.ranks[r].code for r in (0, 1)], [0, 0], first.story())

    def test_ranks_with_different_names_of_the_job(self):
        with Job(2, [NEWCOMER], lambda rank: {"DDP_JOB_ID": f"job {rank}"}) as job:
            job.wait()
            self.says(job.ranks[0].error(), "DDP-E201", "ranks {1} never joined",
                      "; connections with another secret, DDP_TLS or DDP_JOB_ID: ")
            self.says(job.ranks[1].error(), "DDP-E201", "Rank 0 closes the connections of ranks whose secret",
                      "DDP_TLS, DDP_JOB_ID or ddprun --max-restarts")

    def test_a_rank_that_meets_another_job(self):
        with Job(3, [NEWCOMER], without=[2]) as job:
            stray = job.start(1, "of another job")
            end = time.monotonic() + DEADLINE
            while all([stray.poll() is None, job.ranks[1].poll() is None]) and time.monotonic() < end:
                time.sleep(0.01)
            refused = stray if stray.code is not None else job.ranks[1]
            self.says(refused.error(), "DDP-E201", "connected a second time", "every job a MASTER_PORT of its own")
        with Job(3, [NEWCOMER], lambda rank: {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"} if rank == 1 else {}) as job:
            job.wait()
            self.says(job.ranks[1].error(), "rank 1", "has WORLD_SIZE 2, rank 0 has 3", "different MASTER_PORTs")

    def test_an_address_that_others_reach(self):
        self.says(self.alone(RANK="0", WORLD_SIZE="2", MASTER_ADDR="192.0.2.1", MASTER_PORT="29500"), "DDP-E201",
                  'MASTER_ADDR "192.0.2.1"', "which other hosts can reach", "there is no secret", "DDP_SECRET_FILE",
                  "use 127.0.0.1", "DDP_INSECURE=1")

    def test_a_name_that_is_no_host(self):
        self.says(self.alone(RANK="1", WORLD_SIZE="2", MASTER_ADDR="no-such-host.invalid", MASTER_PORT="29500"), "DDP-E201",
                  'MASTER_ADDR "no-such-host.invalid" has no address', "Expected the name or address of rank 0's host")

    def test_a_firewall_that_drops_everything(self):
        # A listener whose queue is full drops what comes, as a firewall does: nobody refuses, nobody answers.
        with contextlib.ExitStack() as open_sockets:
            wall = open_sockets.enter_context(socket.socket())
            wall.bind(("127.0.0.1", 0))
            wall.listen(0)
            port = wall.getsockname()[1]
            for _ in range(4):
                visitor = open_sockets.enter_context(socket.socket())
                visitor.setblocking(False)
                visitor.connect_ex(("127.0.0.1", port))
            begin = time.monotonic()
            text = self.alone(RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        self.says(text, f"DDP-E201 rendezvous: rank 1 cannot reach rank 0 at 127.0.0.1:{port}", "timed out",
                  "no firewall drops connections between the hosts")
        self.assertGreater(time.monotonic() - begin, 0.9 * JOIN, "rank 0 might have started later")


class Training(Case):
    def test_a_missing_data_directory(self):
        self.says(self.alone("data", "/no/such/directory"), "DDP-E301 file: /no/such/directory: is not a directory",
                  "Give the one that holds train-images-idx3-ubyte")
        with tempfile.TemporaryDirectory() as empty:
            self.says(self.alone("data", empty), f"DDP-E301 file: {empty}: none of train-images-idx3-ubyte",
                      "Give the directory that holds the data")
            with open(os.path.join(empty, "train-images-idx3-ubyte.gz"), "wb"):
                pass
            self.says(self.alone("data", empty), "train-images-idx3-ubyte.gz is: load it with gzip_source", "gzip.hpp")

    def test_a_label_out_of_range(self):
        self.says(self.alone("label", "10"), "DDP-E100 usage", "label 10 at position 1 of the batch is outside [0, 10)",
                  "give the last layer one output a class, or correct the data")

    def test_data_of_another_width(self):
        self.says(self.alone("features", "3"), "DDP-E100 usage", "the batch has 3 features a sample, the model takes 4",
                  "give its first layer as many inputs")

    def test_a_learning_rate_that_makes_no_sense(self):
        for rate in ("-0.1", "nan", "inf"):
            self.says(self.alone("rate", rate), "DDP-E100 usage", f"lr is {rate}", "finite number >= 0", "is usual")

    def test_nobody_has_any_samples(self):
        with Job(2, [NEWCOMER, "empty", "all"]) as job:
            job.wait()
            for rank in job.ranks.values():
                self.says(rank.error(), "DDP-E104 no samples", "empty on every rank", "calls trainer.join()")

    def test_settings_that_differ(self):
        with Job(2, [NEWCOMER], without=[1]) as job:
            job.command = [NEWCOMER, "rate", "0.2"]
            job.start(1)
            job.wait()
            self.assertEqual(job.ranks[0].error(), job.ranks[1].error())
            self.says(job.ranks[0].error(), "DDP-E102 model differs: rank 1 differs from rank 0",
                      "another optimizer or its settings (", "sgd(lr 0.2, momentum 0, weight_decay 0, nesterov false) on rank 1",
                      "same trainer settings on all ranks")

    def test_a_rank_that_calls_something_else(self):
        with Job(3, [NEWCOMER, "barrier", "1"]) as job:
            job.wait()
            self.assertEqual(len({rank.error() for rank in job.ranks.values()}), 1, job.story())
            self.says(job.ranks[0].error(), "DDP-E205 mismatch", "rank 0 is in step #3, rank 1 in barrier",
                      "All ranks must call the same collectives in the same order")

    def test_a_rank_that_has_less_data(self):
        with Job(3, [NEWCOMER, "ends", "1"]) as job:
            job.wait()
            self.says(job.ranks[0].error(), "DDP-E202 peer closed: rank 1 exited cleanly", "step #3",
                      "a rank that is out of data calls trainer.join()")

    @unittest.skipUnless(DDPRUN, "DDPRUN names no launcher")
    def test_the_launcher_ends_with_the_cause(self):
        done = run(DDPRUN, "-n", "3", NEWCOMER, "data", "/no/such/directory")
        self.assertEqual(done.returncode, 1)
        summary = done.stderr[done.stderr.rindex("\nddprun: ") + 1:]
        self.says(summary, "failed first: exit code 1", "its last error line: DDP-E301 file: /no/such/directory")


if __name__ == "__main__":
    unittest.main()
