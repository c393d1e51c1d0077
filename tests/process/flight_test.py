"""Flight records: what each rank of a job did last, in files of JSON lines, and the story that ddprun makes of them.

FAULT_PROGRAM (or DDP_PROGRAMS, its directory) and DDPRUN name the binaries.
"""

import os
import re
import signal
import socket
import stat
import subprocess
import tempfile
import time
import unittest

from jobs import DEADLINE, SCALE, Job, Rank, environment, program, ways_to_write
from jobs import flight_record as read

FAULT_PROGRAM = program("FAULT_PROGRAM", "DDP_PROGRAMS", "fault_program")
FAULT_PROGRAM_MPI = program("FAULT_PROGRAM_MPI", "DDP_PROGRAMS", "fault_program_mpi")
DDPRUN = os.environ["DDPRUN"]
LATE = 2.0 * SCALE  # timing.collective of the jobs in which a rank comes late


class FlightCase(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.scratch = directory.name  # TMPDIR of ddprun: what it leaves there is found

    def launch(self, size, *words, options=(), **variables):
        return Rank([DDPRUN, "-n", str(size), *options, "--", FAULT_PROGRAM, "dead=20000", *words],
                    environment(TMPDIR=self.scratch, **variables), start_new_session=True)

    def run_job(self, size, *words, options=(), **variables):
        return self.launch(size, *words, options=options, **variables).finish()

    def nothing_left(self):
        self.assertEqual([f for f in os.listdir(self.scratch) if f.startswith("ddprun-")], [])

    def story(self, err):
        return err[err.rindex("\nddprun: "):]


class Stories(FlightCase):
    def test_a_rank_that_hangs_in_its_own_code(self):
        code, out, err = self.run_job(4, "collective=2000", "fault=2:spin:forward:3:60000")
        self.assertEqual(code, 204, out + err)
        story = self.story(err)
        self.assertRegex(story, r"\n        rank 2 was in forward of step 3 for \d+\.\d( to \d+\.\d)? s\n")
        self.assertRegex(story, r"\n        ranks 0, 1, 3 waited for the others in step 3 for \d+\.\d( to \d+\.\d)? s\n")
        seconds = float(re.search(r"forward of step 3 for ([\d.]+)", story)[1])
        self.assertTrue(0.8 * LATE < seconds < LATE + 10 * SCALE, story)
        self.assertNotIn("flight records are in", story)
        self.nothing_left()

    def test_a_rank_that_is_late_for_a_collective(self):
        code, out, err = self.run_job(3, "collective=2000", "fault=1:sleep:barrier:2:300", "fault=0:sleep:between:3:60000")
        self.assertEqual(code, 204, out + err)
        self.assertRegex(self.story(err), r"\n        rank 0 was in the program's own code after broadcast #\d+ for \d")
        self.assertRegex(self.story(err), r"\n        ranks 1, 2 waited for the others in step 3 for \d")

    def test_a_rank_that_is_killed_in_a_collective_of_the_program(self):
        code, out, err = self.run_job(3, "fault=1:kill:barrier:2")
        self.assertEqual(code, 128 + signal.SIGKILL, out + err)
        self.assertRegex(self.story(err), r"\n        rank 0 waited for the others in barrier #\d+ for \d")
        self.assertRegex(self.story(err), r"\n        rank 1 waited for the others in barrier #\d+ for \d\.\d s, and was killed by SIGKILL\n")

    def test_a_rank_that_throws(self):
        code, out, err = self.run_job(3, "fault=1:throw:backward:2")
        self.assertEqual(code, 1, out + err)
        self.assertRegex(self.story(err), r"\n        rank 1 was in backward of step 2 for \d\.\d s, and threw an exception\n")
        self.assertRegex(self.story(err), r"(?m)^        its last error line: the lamp fell over$")

    def test_a_rank_that_is_killed(self):
        code, out, err = self.run_job(3, "fault=1:kill:backward:3")
        self.assertEqual(code, 128 + signal.SIGKILL, out + err)
        self.assertRegex(self.story(err), r"\n        rank 1 was in backward of step 3 for \d\.\d s, and was killed by SIGKILL\n")
        self.assertRegex(self.story(err), r"\n        ranks? (0|2|0, 2) waited for the others in step 3 for \d")
        self.nothing_left()

    def test_what_a_rank_that_is_gone_has_left(self):
        """Its last events are in a file as if it had written them. A program that ends by itself has left some too; one
        between ddprun and the rank that takes the memory away is told of."""
        kept = os.path.join(self.scratch, "kept")
        code, out, err = self.run_job(2, "fault=0:segv:between:3", options=("--flight-dir", kept))
        self.assertEqual(code, 128 + signal.SIGSEGV, out + err)
        self.assertRegex(self.story(err), r"\n        rank 0 was in the program's own code after [^\n]* for \d\.\d s, and was killed by SIGSEGV\n")
        lines = read(os.path.join(kept, "rank-0.jsonl"))
        pid = int(re.search(r"rank 0 failed first: killed by SIGSEGV \(pid (\d+) on ", err)[1])
        self.assertEqual((lines[0]["rank"], lines[0]["size"], lines[0]["pid"], lines[0]["transport"]), (0, 2, pid, "tcp"))
        self.assertEqual(lines[-1]["why"], "gone")
        numbers = [line["number"] for line in lines if line["event"] == "entered" and line["name"] == "step"]
        self.assertEqual(numbers, [1, 2], lines)
        self.assertEqual([line["seq"] for line in lines if "seq" in line], list(range(len(lines) - 2)))
        self.assertNotIn("left", [line["event"] for line in lines])

        job = Rank([DDPRUN, "-n", "2", "--", "sh", "-c", '"$0" "$@"; [ $RANK != 1 ] || exit 7', FAULT_PROGRAM, "dead=20000",
                    "fault=1:exit:forward:2"], environment(TMPDIR=self.scratch), start_new_session=True)
        code, out, err = job.finish()
        self.assertEqual(code, 7, out + err)
        self.assertRegex(self.story(err), r"\n        rank 1 was in forward of step 2 for \d\.\d s, and ended with exit code 7\n")
        self.nothing_left()

        job = Rank([DDPRUN, "-n", "2", "--", "sh", "-c", '"$0" "$@"; exit 3', FAULT_PROGRAM], environment(TMPDIR=self.scratch),
                   start_new_session=True)
        code, out, err = job.finish()
        self.assertEqual(code, 3, out + err)
        self.assertNotIn("what the ranks were doing", err)  # they had left the job

        job = Rank([DDPRUN, "-n", "2", "--", "sh", "-c", 'eval "exec $DDP_FLIGHT_FD</dev/null"; exec "$0" "$@"', FAULT_PROGRAM],
                   environment(TMPDIR=self.scratch), start_new_session=True)
        code, out, err = job.finish()
        self.assertEqual(code, 0, out + err)
        self.assertEqual(len(re.findall(r"(?m)^(\[\d\] )?ddp: warning: DDP_FLIGHT_FD is \d+, which is not the memory that ddprun of "
                                        r"this version hands down: if this rank crashes, nobody can say what it was doing$", err)), 2, err)

    def test_restarts_have_stories_of_their_own(self):
        code, out, err = self.run_job(2, "fault=1:kill:forward:2", options=("--max-restarts", "1"))
        self.assertEqual(code, 128 + signal.SIGKILL, out + err)
        self.assertEqual(len(re.findall(r"rank 1 was in forward of step 2 for \d\.\d s, and was killed by SIGKILL\n", err)), 2, err)
        self.nothing_left()

    def test_nothing_is_said_where_nobody_wrote(self):
        done = subprocess.run([DDPRUN, "-n", "2", "--", "false"], env=environment(TMPDIR=self.scratch), capture_output=True,
                              text=True, timeout=DEADLINE, check=False)
        self.assertEqual(done.returncode, 1)
        self.assertNotIn("what the ranks were doing", done.stderr)
        self.nothing_left()


class Secrets(FlightCase):
    """The job's secret is in nothing that people read, send around or list."""

    size = 3

    def hidden(self, secret, text, where):
        for form in ways_to_write(secret):
            self.assertNotIn(form, text, where)

    @staticmethod
    def files(directory):
        for path, _, names in os.walk(directory):
            for name in names:
                with open(os.path.join(path, name), "rb") as file:
                    yield os.path.join(path, name), file.read()

    def test_of_a_job_that_fails(self):
        kept, noted = os.path.join(self.scratch, "kept"), os.path.join(self.scratch, "noted")
        given = os.path.join(self.scratch, "given")
        with open(os.open(given, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
            file.write(os.urandom(32))
        # Where the launcher makes one, the ranks' own look at it is the only copy.
        note = (f'[ -z "$DDP_SECRET_FD" ] || cat /proc/self/fd/$DDP_SECRET_FD > {noted}.$RANK; exec "$@"')
        for variables in ({}, {"DDP_SECRET_FILE": given}, {"DDP_SECRET_FILE": given, "DDP_TLS": "1"}):
            with self.subTest(variables=list(variables)):
                job = Rank([DDPRUN, "-n", str(self.size), "-v", "--flight-dir", kept, "--log-dir", kept, "--", "sh", "-c", note,
                            "sh", FAULT_PROGRAM, "times=default", "steps=100000", "pause=5"],
                           environment(TMPDIR=self.scratch, **variables), start_new_session=True)
                try:
                    end = time.monotonic() + DEADLINE
                    while job.out.count("start rank=") < self.size:
                        self.assertLess(time.monotonic(), end, job.out + job.err)
                        time.sleep(0.02)
                    paths = [given] if variables else [f"{noted}.{rank}" for rank in range(self.size)]
                    secrets = set()
                    for path in paths:
                        with open(path, "rb") as file:
                            secrets.add(file.read())
                        if not variables:
                            os.remove(path)
                    self.assertEqual(len(secrets), 1)
                    secret = secrets.pop()
                    self.assertEqual(len(secret), 32)
                    job.process.send_signal(signal.SIGUSR2)  # it tells what the ranks are doing
                    while "SIGUSR2 was passed on" not in job.err:
                        self.assertLess(time.monotonic(), end, job.out + job.err)
                        time.sleep(0.02)
                    ranks = []
                    for pid, arguments, variables_of_it in self.processes():
                        self.hidden(secret, arguments, "cmdline of a process of the job")
                        self.hidden(secret, variables_of_it, "environ of a process of the job")
                        ranks += [pid] * (b"\0RANK=" in variables_of_it)
                    self.assertGreaterEqual(len(ranks), self.size)
                    remember = [self.remembers(pid, secret) for pid in ranks if os.path.samefile(f"/proc/{pid}/exe", FAULT_PROGRAM)]
                    self.assertEqual(remember, [False] * self.size, "a rank that trains has the secret in its memory")
                    os.kill(int(ranks[-1]), signal.SIGABRT)
                    code, out, err = job.finish()
                finally:
                    if job.poll() is None:
                        os.killpg(job.pid, signal.SIGKILL)
                self.assertNotEqual(code, 0)
                self.assertIn("failed first", err)
                self.hidden(secret, (out + err).encode(), "what ddprun printed")
                records = 0
                for path, text in self.files(self.scratch):
                    if path != given:
                        self.hidden(secret, text, path)
                        records += path.endswith(".jsonl")
                self.assertGreaterEqual(records, self.size - 1)
        for words in (("--explain",), ("-n", "2", "--dry-run", "true"), ("--version",)):
            told = subprocess.run([DDPRUN, *words], env=environment(DDP_SECRET_FILE=given), capture_output=True,
                                  timeout=DEADLINE, check=True)
            self.hidden(secret, told.stdout + told.stderr, words)

    @staticmethod
    def remembers(pid, secret):
        """Whether half of it is somewhere in what the process may write."""
        with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb") as memory:
            for line in maps:
                first, last, rights = re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+)", line).groups()
                if rights.startswith("rw"):
                    memory.seek(int(first, 16))
                    try:
                        held = memory.read(int(last, 16) - int(first, 16))
                    except OSError:
                        continue  # it has been given back
                    if secret[:16] in held or secret[16:] in held:
                        return True
        return False

    def processes(self):
        """The pids of all processes with our TMPDIR, with their arguments and variables."""
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                text = []
                for name in ("cmdline", "environ"):
                    with open(f"/proc/{pid}/{name}", "rb") as file:
                        text.append(file.read())
            except OSError:
                continue  # it has ended, or is not ours
            if f"TMPDIR={self.scratch}\0".encode() in text[1]:
                yield pid, *text

    def descriptors(self, pid):
        """What a process keeps open that whoever started the job did not give to it as standard input, output or errors."""
        directory = f"/proc/{pid}/fd"
        end = time.monotonic() + 0.5
        while True:
            try:
                found = {number: os.readlink(f"{directory}/{number}") for number in os.listdir(directory) if int(number) > 2}
            except FileNotFoundError:  # closed while we looked
                found = {"?": "one that has just been closed"}
            if not found or time.monotonic() > end:
                return found
            time.sleep(0.01)  # a program that is being loaded has its libraries open

    def look_at_what_a_rank_starts(self, jobs, secret, ranks):
        """Waits for the processes that a rank starts while it is stopped, and looks at all of the job."""
        end = time.monotonic() + DEADLINE
        while True:
            self.assertLess(time.monotonic(), end, [job.out + job.err for job in jobs])
            self.assertEqual([job.poll() for job in jobs], [None] * len(jobs), [job.out + job.err for job in jobs])
            found = list(self.processes())
            started = [pid for pid, arguments, _ in found if arguments.startswith((b"sh\0-c\0sleep ", b"sleep\0"))]
            if len(started) == 2:
                break
            time.sleep(0.02)
        of_ranks = 0
        for pid, arguments, variables in found:
            self.hidden(secret, arguments, "cmdline of a process of the job")
            self.hidden(secret, variables, "environ of a process of the job")
            if pid in started:
                self.assertEqual(self.descriptors(pid), {}, "what a program of a rank has inherited")
            else:
                of_ranks += arguments.startswith(FAULT_PROGRAM.encode() + b"\0")
        self.assertEqual(of_ranks, ranks)

    def test_of_programs_that_ranks_start(self):
        given, noted = os.path.join(self.scratch, "given"), os.path.join(self.scratch, "noted")
        with open(os.open(given, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
            file.write(os.urandom(32))
        inherited = os.open(given, os.O_RDONLY)
        self.addCleanup(os.close, inherited)
        by_file, by_descriptor, tls = {"DDP_SECRET_FILE": given}, {"DDP_SECRET_FD": str(inherited)}, {"DDP_TLS": "1"}
        # The number of ranks, whether ddprun starts them, and what they are told.
        for number, (size, launched, variables) in enumerate((
                (2, True, {}), (2, True, {**by_file, **tls}), (1, True, {}), (2, False, by_file), (2, False, {**by_file, **tls}),
                (2, False, by_descriptor), (2, False, {**by_descriptor, **tls}), (1, False, by_descriptor))):
            with self.subTest(size=size, launched=launched, variables=list(variables)):
                kept = os.path.join(self.scratch, f"kept-{number}")
                os.mkdir(kept)
                words = [FAULT_PROGRAM, "dead=20000", f"fault={size - 1}:stop:backward:3:{1000 * SCALE}", "fault=0:throw:forward:5"]
                settings = environment(TMPDIR=self.scratch, DDP_FLIGHT_DIR=kept, **variables)
                if launched:
                    # Where the launcher makes a secret, the ranks' own look at it is the only copy.
                    note = f'[ -z "$DDP_SECRET_FD" ] || cat /proc/self/fd/$DDP_SECRET_FD > {noted}; exec "$@"'
                    jobs = [Rank([DDPRUN, "-n", str(size), "-v", "--log-dir", kept, "--", "sh", "-c", note, "sh", *words], settings,
                                 start_new_session=True)]
                else:
                    with socket.socket() as free:
                        free.bind(("127.0.0.1", 0))
                        settings.update(WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
                    passed = [inherited] if "DDP_SECRET_FD" in variables else []
                    jobs = [Rank(words, {**settings, "RANK": str(rank)}, start_new_session=True, pass_fds=passed)
                            for rank in range(size)]
                try:
                    end = time.monotonic() + DEADLINE
                    while not any(f"fault rank={size - 1}" in job.out for job in jobs):
                        self.assertLess(time.monotonic(), end, [job.out + job.err for job in jobs])
                        time.sleep(0.01)
                    with open(given if {**by_file, **by_descriptor}.keys() & variables else noted, "rb") as file:
                        secret = file.read()
                    self.assertEqual(len(secret), 32)
                    self.look_at_what_a_rank_starts(jobs, secret, size)
                    for job in jobs:
                        code, out, err = job.finish()
                        self.assertNotEqual(code, 0)
                        self.hidden(secret, (out + err).encode(), "what the job printed")
                    self.assertIn("the lamp fell over", jobs[0].err)
                finally:
                    for job in jobs:
                        if job.poll() is None:
                            os.killpg(job.pid, signal.SIGKILL)
                            job.process.wait()
                records = dict(self.files(kept))
                self.assertEqual(len([path for path in records if path.endswith(".jsonl")]), size)
                for path, text in records.items():
                    self.hidden(secret, text, path)
        with open(given, "rb") as file:
            secret = file.read()
        for variables in (by_file, by_descriptor):
            told = subprocess.run([DDPRUN, "--explain"], env=environment(RANK="1", WORLD_SIZE="2", **variables), timeout=DEADLINE,
                                  capture_output=True, pass_fds=[inherited], check=False)
            self.assertIn(b"rank", told.stdout + told.stderr)
            self.hidden(secret, told.stdout + told.stderr, "--explain")

    def test_of_errors_about_it(self):
        secret = bytes(range(65, 73))  # too short, and printable
        cases = {"short": (secret, 0o600), "readable": (4 * secret, 0o644), "long": (1000 * secret, 0o600)}
        for name, (content, mode) in cases.items():
            path = os.path.join(self.scratch, name)
            with open(path, "wb") as file:
                file.write(content)
            os.chmod(path, mode)
            code, out, err = self.run_job(2, DDP_SECRET_FILE=path)
            self.assertEqual(code, 101, out + err)
            self.assertIn("DDP_SECRET_FILE", err)
            for form in ways_to_write(secret):
                if len(form) >= 8:
                    self.assertNotIn(form, (out + err).encode(), name)
        # Two ranks that know different secrets: neither says its own.
        paths = []
        for letter in (b"P", b"Q"):
            paths.append(os.path.join(self.scratch, letter.decode()))
            with open(os.open(paths[-1], os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
                file.write(letter * 32)
        with Job(2, [FAULT_PROGRAM, "join=1000"], lambda rank: {"DDP_SECRET_FILE": paths[rank]}) as job:
            job.wait()
            for rank in job.ranks.values():
                self.assertEqual(rank.code, 201)
                self.assertRegex(rank.error(), "^DDP-E201 ")
                for letter in (b"P", b"Q"):
                    self.hidden(letter * 32, (rank.out + rank.err).encode(), "an error")


class Files(FlightCase):
    def test_a_step_that_changes_nothing(self):
        kept = os.path.join(self.scratch, "kept")
        code, out, err = self.run_job(3, "nonfinite=stop", "fault=1:nan:backward:3:1234", options=("--flight-dir", kept))
        self.assertEqual(code, 105, out + err)
        self.assertRegex(self.story(err), r"error_of_all #\d+ for ")
        self.assertNotRegex(self.story(err), r" step \d+ for ")
        for rank in range(3):
            entries = read(os.path.join(kept, f"rank-{rank}.jsonl"))
            ends = [(e["event"], e["number"]) for e in entries if e["event"] in ("updated", "unchanged")]
            self.assertEqual(ends, [("updated", 1), ("updated", 2), ("unchanged", 3)])

    def test_kept(self):
        kept = os.path.join(self.scratch, "kept")
        os.mkdir(kept)
        with open(os.path.join(kept, "rank-1.jsonl"), "w") as earlier:
            earlier.write("from an earlier job\n")
        code, out, err = self.run_job(3, "collective=2000", "fault=0:sleep:backward:3:60000", options=("--flight-dir", kept),
                                      DDP_JOB_ID='a "job"\n', DDP_COMMUNICATION_THREAD="rests")
        self.assertEqual(code, 204, out + err)
        self.assertIn(f"\n        their flight records are in {kept}\n", self.story(err))
        for rank in range(3):
            path = os.path.join(kept, f"rank-{rank}.jsonl")
            self.assertEqual(stat.S_IMODE(os.stat(path).st_mode), 0o600)
            lines = read(path)
            start = lines[0]
            self.assertEqual((start["event"], start["rank"], start["size"], start["transport"]), ("start", rank, 3, "tcp"))
            self.assertEqual(start["thread"], "rests")
            entries = [line for line in lines if "seq" in line]
            self.assertEqual([e["seq"] for e in entries], list(range(len(entries))))
            of_step_2 = [e["event"] for e in entries if e.get("number") == 2 and
                         (e.get("name") == "step" or e.get("name") in ("forward", "backward") or e["event"] in ("forward", "backward", "gradient", "reported", "reduced",
                                                                    "updated"))]
            for event, times in (("forward", 1), ("backward", 1), ("gradient", 1), ("reported", 1), ("waits", 1), ("finished", 3)):
                self.assertEqual(of_step_2.count(event), times, of_step_2)
            for event in ("entered", "reduced", "updated"):
                self.assertEqual(of_step_2.count(event), 1, of_step_2)
            self.assertLess(of_step_2.index("reduced"), of_step_2.index("updated"))
            verdicts = [e for e in entries if e["event"] == "verdict"]
            self.assertEqual([(e["peer"], e["code"]) for e in verdicts], [(0, 204)])
            self.assertIn("rank 0 did not take part in step #3", [e for e in lines if e["event"] == "verdict_text"][0]["text"])

    def test_without_ddprun(self):
        kept = os.path.join(self.scratch, "kept")
        os.mkdir(kept)
        with Job(2, [FAULT_PROGRAM, "fault=1:throw:forward:2"], {"DDP_FLIGHT_DIR": kept}) as job:
            job.wait()
            self.assertEqual([r.code for r in job.ranks.values()], [206, 1], job.story())
        self.assertEqual(sorted(os.listdir(kept)), ["rank-0.jsonl", "rank-1.jsonl"])
        self.assertEqual([e["kind"] for e in read(os.path.join(kept, "rank-1.jsonl")) if e["event"] == "failed"], ["threw"])

    def test_what_cannot_be_written_changes_nothing_else(self):
        words = ("fault=1:throw:forward:2",)
        expected = self.run_job(3, *words)[0]
        file = os.path.join(self.scratch, "file")
        with open(file, "w"):
            pass
        for directory in (file, "/proc/self", "/" + "x" * 600):
            with self.subTest(directory=directory[:20]):
                code, out, err = self.run_job(3, *words, options=("--flight-dir", directory))
                self.assertEqual(code, expected)
                if directory != "/proc/self":  # whether that can be written into shows only there
                    self.assertIn(f"ddprun: warning: --flight-dir: cannot write into {directory}: ", err)
                self.assertRegex(err, r"(?m)^\[1\] the lamp fell over$")
                self.assertRegex(err, r"(?m)^\[0\] DDP-E206 remote exception: rank 1 ")
                self.assertEqual(len(re.findall(r"(?m)^\[0\] ddp: rank 0: the flight record cannot be written: ", err)), 1, err)
                self.assertRegex(self.story(err), "^\nddprun: rank 1 failed first: exit code 1")

    def test_a_full_disk(self):
        full = os.path.join(self.scratch, "full")
        os.mkdir(full)
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k", "none", full], capture_output=True,
                          check=False).returncode != 0:
            self.skipTest("no right to mount a small file system")
        try:
            with Job(2, [FAULT_PROGRAM, "steps=50", "fault=1:throw:forward:40"], {"DDP_FLIGHT_DIR": full}) as job:
                job.wait()
                self.assertEqual([r.code for r in job.ranks.values()], [206, 1], job.story())
                self.assertIn("the lamp fell over", job.ranks[1].err)
                self.assertIn("E206", job.ranks[0].err)
                self.assertEqual(sum(r.err.count("the flight record cannot be written") for r in job.ranks.values()), 2,
                                 job.story())
            for name in os.listdir(full):
                path = os.path.join(full, name)
                if os.path.getsize(path) != 0:
                    read(path)
        finally:
            subprocess.run(["umount", full], check=True)


class OnRequest(FlightCase):
    def ready(self, job, size, steps=3):
        """Until every rank is among its steps."""
        end = time.monotonic() + DEADLINE
        while len(job.said("start")) + len(re.findall(r"(?m)^\[\d\] start ", job.out)) < size:
            self.assertLess(time.monotonic(), end, job.out + job.err)
            self.assertIsNone(job.poll(), job.out + job.err)
            time.sleep(0.01)
        time.sleep(0.2 * SCALE)

    def ask(self, job, size, pause=0.0):
        """SIGUSR2 that long after all are among their steps; then its end."""
        try:
            self.ready(job, size)
            time.sleep(pause * SCALE)
            os.kill(job.pid, signal.SIGUSR2)
        finally:
            ended = job.finish()
        return ended

    def test_a_healthy_job_goes_on_to_the_same_digest(self):
        words = ("pause=20", "steps=100")
        digest = r"digest=(\w+) steps=100 replicas=identical"
        code, out, err = self.run_job(3, *words)
        self.assertEqual((code, err), (0, ""), out)
        expected = set(re.findall(digest, out))
        self.assertEqual(len(expected), 1)
        kept = os.path.join(self.scratch, "kept")
        job = self.launch(3, *words, options=("--flight-dir", kept))
        try:
            self.ready(job, 3)
            for again in range(2):
                os.kill(job.pid, signal.SIGUSR2)
                end = time.monotonic() + 5 * SCALE
                while job.err.count("SIGUSR2 was passed on") <= again and time.monotonic() < end:
                    time.sleep(0.02)
        finally:
            code, out, err = job.finish()
        self.assertEqual(code, 0, out + err)
        self.assertEqual(set(re.findall(digest, out)), expected)
        stories = err.split("ddprun: SIGUSR2 was passed on; the ranks here say:")
        self.assertEqual(len(stories), 3, err)
        for one in stories[1:]:
            ranks = re.findall(r"(?m)^        ranks? ([\d, ]+) (?:was in|were in|waited for)", one)
            self.assertEqual(sorted(", ".join(ranks).split(", ")), ["0", "1", "2"], one)
        for rank in range(3):
            lines = read(os.path.join(kept, f"rank-{rank}.jsonl"))
            self.assertEqual([line["why"] for line in lines if line["event"] == "dump"], ["SIGUSR2", "SIGUSR2", "end"])

    def test_the_answer_is_told_though_another_signal_ends_the_job(self):
        job = self.launch(3, "pause=20", "steps=100000")
        try:
            self.ready(job, 3)
            os.kill(job.pid, signal.SIGUSR2)
            time.sleep(0.2)  # less than ddprun waits for answers
            os.kill(job.pid, signal.SIGTERM)
        finally:
            code, _, err = job.finish()
        self.assertEqual(code, 128 + signal.SIGTERM, err)
        self.assertEqual(err.count("ddprun: SIGUSR2 was passed on; the ranks here say:"), 1, err)
        ranks = re.findall(r"(?m)^        ranks? ([\d, ]+) (?:was in|were in|waited for)", err)
        self.assertEqual(sorted(", ".join(ranks).split(", ")), ["0", "1", "2"], err)

    def test_on_several_hosts_there_is_one_story(self):
        kept = os.path.join(self.scratch, "kept")
        job = Rank([DDPRUN, "-H", "localhost:2,127.0.0.1:1", "--flight-dir", kept, "--", FAULT_PROGRAM, "dead=20000",
                    "fault=2:spin:forward:2:3000", "fault=2:kill:forward:4", "collective=60000"],
                   environment(TMPDIR=self.scratch), start_new_session=True)
        code, out, err = self.ask(job, 3, 0.5)
        self.assertEqual(code, 128 + signal.SIGKILL, out + err)
        self.assertEqual(len(re.findall(r"(?m)^ddprun: SIGUSR2 was passed on; the ranks say:\n"
                                        r"        rank 2 was in forward of step 2 for \d+\.\d s\n"
                                        r"        ranks 0, 1 waited for the others in step 2 for \d", err)), 1, err)
        self.assertEqual(err.count("SIGUSR2 was passed on"), 1, err)
        self.assertRegex(err, r"(?m)^ddprun: host 127\.0\.0\.1 \(rank 2\) failed first: [^\n]*\n(        .*\n)*"
                              r"        what the ranks were doing:\n"
                              r"        rank 2 was in forward of step 4 for \d\.\d s, and was killed by SIGKILL\n"
                              r"        ranks 0, 1 waited for the others in step 4 for \d[^\n]*\n"
                              rf"        their flight records are in {kept} on each host\n\Z")
        self.assertEqual(err.count("what the ranks were doing"), 1, err)
        self.assertNotIn("ddprun-report", out + err)
        self.nothing_left()

    def test_a_program_cannot_report_for_others(self):
        script = 'echo "ddprun-report 0000000000000000 0 5 1 1 0 0 1 was a liar"; echo ddprun-report; printf "ddprun-rep"; exit 3'
        job = Rank([DDPRUN, "-H", "localhost:1", "--prefix", "none", "--", "sh", "-c", script], environment(TMPDIR=self.scratch),
                   start_new_session=True)
        code, out, err = job.finish()
        self.assertEqual(code, 3, out + err)
        self.assertEqual(out, "ddprun-report 0000000000000000 0 5 1 1 0 0 1 was a liar\nddprun-report\nddprun-rep\n")
        self.assertNotIn("liar", err)

    def test_a_rank_that_hangs_in_its_own_code_answers(self):
        job = self.launch(2, "fault=1:spin:forward:2:4000", "collective=60000")
        code, out, err = self.ask(job, 2, 1.0)
        self.assertEqual(code, 0, out + err)
        self.assertRegex(err, r"the ranks here say:\n        rank 1 was in forward of step 2 for \d+\.\d s\n"
                              r"        rank 0 waited for the others in step 2 for \d+\.\d s\n")

    def test_an_answer_from_before_is_no_last_word(self):
        job = self.launch(2, "fault=1:spin:forward:2:2500", "fault=1:kill:forward:3", "collective=60000")
        code, out, err = self.ask(job, 2)
        self.assertEqual(code, 128 + signal.SIGKILL, out + err)
        self.assertRegex(self.story(err), r"        rank 1 was in forward of step 3 for \d\.\d s, and was killed by SIGKILL\n")

    def wait_until(self, job, condition):
        end = time.monotonic() + DEADLINE
        while not condition():
            self.assertLess(time.monotonic(), end, job.out + job.err)
            self.assertIsNone(job.poll(), job.out + job.err)
            time.sleep(0.01)

    def test_a_rank_outside_run_is_not_killed(self):
        """Rank 1 waits before ddp::run, and both ranks after it, in a program that does not handle SIGUSR2."""
        notes = os.path.join(self.scratch, "notes")
        os.mkdir(notes)
        script = ('touch "$NOTES/up$RANK"; while [ $RANK = 1 ] && ! [ -e "$NOTES/go" ]; do sleep 0.05; done; '
                  '"$0" "$@" || exit; touch "$NOTES/left$RANK"; while ! [ -e "$NOTES/end" ]; do sleep 0.05; done')
        job = Rank([DDPRUN, "-n", "2", "--", "sh", "-c", script, FAULT_PROGRAM, "dead=20000"],
                   environment(TMPDIR=self.scratch, NOTES=notes), start_new_session=True)

        def ask(again):
            os.kill(job.pid, signal.SIGUSR2)
            self.wait_until(job, lambda: job.err.count("SIGUSR2 was passed on") == again)

        try:
            for name in ("up0", "up1"):
                self.wait_until(job, lambda name=name: os.path.exists(os.path.join(notes, name)))
            ask(1)
            open(os.path.join(notes, "go"), "w").close()
            for name in ("left0", "left1"):
                self.wait_until(job, lambda name=name: os.path.exists(os.path.join(notes, name)))
            ask(2)
            open(os.path.join(notes, "end"), "w").close()
        finally:
            code, out, err = job.finish()
        self.assertEqual(code, 0, out + err)
        self.assertEqual(len(re.findall(r"digest=\w+ .*replicas=identical", out)), 2, out)
        answer = ("ddprun: SIGUSR2 was passed on; the ranks here say:\n"
                  "        ranks 0, 1 were not asked: they had no handler for SIGUSR2\n")
        self.assertEqual(err, 2 * answer)

    def test_a_rank_before_run_is_not_asked(self):
        script = f'if [ $RANK = 1 ]; then sleep {3 * SCALE}; fi; exec "$0" "$@"'
        kept = os.path.join(self.scratch, "kept")
        job = Rank([DDPRUN, "-n", "2", "--flight-dir", kept, "--", "sh", "-c", script, FAULT_PROGRAM, "dead=20000"],
                   environment(TMPDIR=self.scratch), start_new_session=True)
        try:
            time.sleep(1.0 * SCALE)
            os.kill(job.pid, signal.SIGUSR2)
        finally:
            code, out, err = job.finish()
        self.assertEqual(code, 0, out + err)
        self.assertIn("rank 1 was not asked: it had no handler for SIGUSR2\n", err)
        self.assertNotIn("rank 0 was not asked", err)

    @unittest.skipUnless(os.path.exists(FAULT_PROGRAM_MPI) and SCALE == 1, "no MPI here, or a sanitizer")
    def test_over_mpi(self):
        """mpiexec passes the signal on; at MPI_THREAD_MULTIPLE a thread of the library's calls MPI, below it none."""
        for level in ((), ("mpi=multiple",)):
            with self.subTest(level=level), tempfile.TemporaryDirectory() as records:
                job = Rank([os.environ.get("MPIEXEC") or "mpiexec", "-n", "2", FAULT_PROGRAM_MPI, "fault=1:spin:forward:2:2500",
                            "collective=60000", *level],
                           environment(DDP_FLIGHT_DIR=records, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
                                       OMPI_MCA_rmaps_base_oversubscribe="1", OMPI_MCA_hwloc_base_binding_policy="none",
                                       OMPI_MCA_btl_vader_single_copy_mechanism="none"), start_new_session=True)
                try:
                    self.wait_until(job, lambda: job.said("fault"))
                    time.sleep(0.5)
                    os.kill(job.pid, signal.SIGUSR2)
                    asked = time.monotonic_ns()
                finally:
                    code, out, err = job.finish()
                self.assertEqual(code, 0, out + err)
                for rank, event in ((0, "waits"), (1, "forward")):
                    lines = read(os.path.join(records, f"rank-{rank}.jsonl"))
                    dump, end = (n for n, line in enumerate(lines) if line["event"] == "dump")
                    self.assertEqual([lines[n]["why"] for n in (dump, end)], ["SIGUSR2", "end"])
                    self.assertLess(lines[dump]["t_ns"] - asked, 1e9)
                    last = max(lines[1:dump], key=lambda line: line["seq"])
                    self.assertEqual((last["event"], last.get("number")), (event, 2), lines)

    def test_without_a_directory_a_line_says_what_it_does(self):
        with Job(1, [FAULT_PROGRAM, "fault=0:spin:forward:2:2000"]) as job:
            job.wait_for("fault", 0)
            for _ in range(3):
                os.kill(job.ranks[0].pid, signal.SIGUSR2)
                time.sleep(0.2)
            job.wait()
            self.assertEqual(job.ranks[0].code, 0, job.story())
            self.assertRegex(job.ranks[0].err, r'^ddp: rank 0: \d+ ms ago: \{.*"event":"forward","number":2\}; DDP_FLIGHT_DIR=')
            self.assertEqual(len(job.ranks[0].err.splitlines()), 3)


if __name__ == "__main__":
    unittest.main()
