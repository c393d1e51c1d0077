"""The launcher, with small programs as ranks. DDPRUN names the binary: DDPRUN=build/ddprun python3 ddprun_test.py"""

import fcntl
import os
import pathlib
import pty
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import time
import unittest

import jobs  # its runner says which cases were skipped

DDPRUN = os.environ.get("DDPRUN", "")
ROOT = pathlib.Path(__file__).resolve().parents[2]
CORES = len(os.sched_getaffinity(0))
SCALE = int(os.environ.get("DDP_TEST_TIME_SCALE", "1"))  # of all times: sanitizers are slow
DEADLINE = 30.0  # for whatever a test waits for: a hang is a failure, a slow machine is not


def environment(**more):
    ours = r"(DDP_|RANK|WORLD_SIZE|LOCAL_|MASTER_|OMP_|NO_COLOR|PET_|SLURM_|PMI|TORCHELASTIC_)"
    kept = {k: v for k, v in os.environ.items() if not re.match(ours, k)}
    return {**kept, **more}


def default_signals():
    """Test runners in the background of a shell have SIGINT ignored, and ddprun would honour that."""
    for signo in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(signo, signal.SIG_DFL)


def start(*words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=None, **more):
    return subprocess.Popen([DDPRUN, *words], stdin=stdin, stdout=stdout, stderr=stderr, env=env or environment(),
                            text=True, errors="replace", preexec_fn=default_signals, **more)


class Result:
    def __init__(self, process, out, err, seconds):
        self.code, self.out, self.err, self.seconds = process.returncode, out, err, seconds

    def lines(self, rank):
        mark = f"[{rank}] "
        return [line[len(mark):] for line in self.out.splitlines() if line.startswith(mark)]

    def variables(self, rank):
        return dict(line.split("=", 1) for line in self.lines(rank) if "=" in line)


def finish(process, text=None, deadline=DEADLINE):
    begin = time.monotonic()
    try:
        out, err = process.communicate(text, timeout=deadline)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate(timeout=10)
        raise AssertionError(f"ddprun hangs\nstdout: {out[-2000:]}\nstderr: {err[-2000:]}") from None
    return Result(process, out, err, time.monotonic() - begin)


def run(*words, **more):
    text = more.pop("text_in", None)
    if text is not None:
        more["stdin"] = subprocess.PIPE
    return finish(start(*words, **more), text)


def sh(script):
    return ["--", "sh", "-c", script]


def python(script):
    return ["--", sys.executable, "-S", "-c", script]


def alive(pid):
    """Running; a zombie that init has not yet collected does not count."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def eventually(condition, deadline=DEADLINE):
    end = time.monotonic() + deadline
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


class Directory:
    """Where ranks leave notes for the test: one that has written its note is ready."""

    def __enter__(self):
        self.owner = tempfile.TemporaryDirectory(prefix="ddprun-test-")
        self.path = self.owner.name
        return self

    def __exit__(self, *what):
        self.owner.cleanup()

    def note(self, name):
        try:
            with open(os.path.join(self.path, name)) as file:
                return file.read().strip()
        except OSError:
            return ""

    def wait_for(self, *names):
        if not eventually(lambda: all(self.note(name) for name in names)):
            raise AssertionError(f"no note from {[n for n in names if not self.note(n)]}")

    def env(self, **more):
        return environment(NOTES=self.path, **more)


class Environment(unittest.TestCase):
    def test_each_rank_knows_its_place(self):
        outer = dict.fromkeys(("DDP_TTY", "DDP_RANK", "DDP_WORLD_SIZE", "DDP_LOCAL_RANK", "DDP_LOCAL_WORLD_SIZE", "DDP_MASTER_ADDR",
                               "DDP_MASTER_PORT", "TORCHELASTIC_RUN_ID"), "7")
        result = run("-n", "3", *sh("env"), env=environment(RANK="7", DDP_LISTEN_FD="9", DDP_RESTART_COUNT="7", **outer))
        self.assertEqual(result.code, 0, result.err)
        ports = set()
        for rank in range(3):
            found = result.variables(rank)
            self.assertEqual((found["RANK"], found["LOCAL_RANK"]), (str(rank), str(rank)))
            self.assertEqual((found["WORLD_SIZE"], found["LOCAL_WORLD_SIZE"]), ("3", "3"))
            self.assertEqual((found["MASTER_ADDR"], found["OMP_NUM_THREADS"]), ("127.0.0.1", str(max(CORES // 3, 1))))
            self.assertEqual(outer.keys() & found.keys(), set(), "an outer launcher's must not shine through")
            self.assertNotEqual(found.get("DDP_RESTART_COUNT"), "7")
            self.assertEqual("DDP_LISTEN_FD" in found, rank == 0)
            ports.add(int(found["MASTER_PORT"]))
        self.assertEqual(len(ports), 1)
        self.assertGreater(ports.pop(), 0)

    def test_the_users_thread_count_stays(self):
        result = run("-n", "2", *sh("env"), env=environment(OMP_NUM_THREADS="3"))
        self.assertEqual([result.variables(rank)["OMP_NUM_THREADS"] for rank in (0, 1)], ["3", "3"])

    def test_names_of_torchrun(self):
        for words in (["--nproc-per-node=2"], ["--nproc_per_node", "2", "--standalone"], ["-np", "2"], ["-n2"],
                      ["--no-python", "--nproc-per-node=2"]):
            result = run(*words, *sh("echo WORLD_SIZE=$WORLD_SIZE"))
            self.assertEqual(result.variables(1), {"WORLD_SIZE": "2"}, words)

    def test_times_of_the_library(self):
        names = ("DDP_TIMEOUT_DEAD", "DDP_TIMEOUT_COLLECTIVE", "DDP_TIMEOUT_JOIN")
        others = ("heartbeat", "suspect", "straggler", "handshake", "shutdown")
        result = run("-n", "2", *(f"--{name}=0.{k}" for k, name in enumerate(others, 1)), *sh("env"))
        self.assertEqual([[result.variables(rank).get(f"DDP_TIMEOUT_{name.upper()}") for name in others] for rank in (0, 1)],
                         [["0.1", "0.2", "0.3", "0.4", "0.5"]] * 2)
        result = run("-n", "2", "--dead", "15", "--collective=600", "--join", "0.5", *sh("env"),
                     env=environment(DDP_TIMEOUT_DEAD="4"))
        self.assertEqual([[result.variables(rank).get(name) for name in names] for rank in (0, 1)], [["15", "600", "0.5"]] * 2)
        result = run("-n", "1", "--join", "7", *sh("env"), env=environment(DDP_TIMEOUT_DEAD="4"))
        self.assertEqual([result.variables(0).get(name) for name in names], ["4", None, "7"])

    def test_the_variables_of_kubeflows_torch_runtime(self):
        pet = environment(PET_NNODES="2", PET_NPROC_PER_NODE="2", PET_NODE_RANK="1", PET_MASTER_ADDR="192.0.2.1",
                          PET_MASTER_PORT="29400")
        found = run(*sh("env"), env=pet).variables(3)
        self.assertEqual([found[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")],
                         ["3", "4", "192.0.2.1", "29400"])
        self.assertEqual(run("-n", "3", "--nnodes=1", "--node-rank=0", "--master-addr=127.0.0.1", "--master-port=0",
                             *sh("echo WORLD_SIZE=$WORLD_SIZE"), env=pet).variables(2), {"WORLD_SIZE": "3"})

    def test_cores_are_divided_among_the_ranks(self):
        script = ("import os\n"
                  "print(sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'])\n")
        everywhere = f"{sorted(os.sched_getaffinity(0))} "
        ranks = min(CORES, 4)
        shares = [eval(run("-n", str(ranks), *python(script)).lines(rank)[0].rpartition(" ")[0]) for rank in range(ranks)]
        self.assertEqual(sorted(sum(shares, [])), sorted(os.sched_getaffinity(0)), "all of them, each once")
        self.assertLessEqual(max(map(len, shares)) - min(map(len, shares)), 1)
        result = run("-n", str(ranks), "--bind", "none", *python(script))
        self.assertEqual(result.lines(0), [everywhere + str(max(CORES // ranks, 1))])
        if CORES < 64:
            self.assertEqual(run("-n", str(CORES + 1), *python(script)).lines(CORES), [everywhere + "1"])

    def test_a_secret_of_the_job_that_all_ranks_share_and_nobody_else_sees(self):
        script = ("import fcntl, os\n"
                  "fd = int(os.environ['DDP_SECRET_FD'])\n"
                  "text = os.pread(fd, 100, 0)\n"
                  "try: os.pwrite(fd, b'x', 0)\n"
                  "except OSError: print(len(text), text.hex(), hex(fcntl.fcntl(fd, fcntl.F_GET_SEALS)))\n")
        said = set()
        for _ in range(2):
            result = run("-v", "-n", "3", *python(script), env=environment(DDP_SECRET_FD="98"))
            lines = [result.lines(rank)[-1].split() for rank in range(3)]
            self.assertEqual(lines[0], lines[1])
            self.assertEqual(lines[0], lines[2])
            self.assertEqual((lines[0][0], lines[0][2]), ("32", "0xf"))
            self.assertNotIn(lines[0][1], result.err)
            said.add(lines[0][1])
        self.assertEqual(len(said), 2, "another job, another secret")
        echo = sh("echo DDP_SECRET_FD=$DDP_SECRET_FD")
        self.assertEqual(run("-n", "1", *echo, env=environment(DDP_SECRET_FILE="/f")).variables(0)["DDP_SECRET_FD"], "")

    def test_one_rank_a_core_by_default_and_at_least_two(self):
        for words in ([], ["-n", "auto"]):
            result = run(*words, *sh("echo WORLD_SIZE=$WORLD_SIZE"))
            size = int(result.variables(0)["WORLD_SIZE"])
            self.assertGreaterEqual(size, 2)
            self.assertLessEqual(size, max(2, len(os.sched_getaffinity(0))))

    def test_rank_0_alone_inherits_a_listening_socket(self):
        script = ("import os, socket\n"
                  "if 'DDP_LISTEN_FD' in os.environ:\n"
                  "    s = socket.socket(fileno=int(os.environ['DDP_LISTEN_FD']))\n"
                  "    print('listens', s.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN), flush=True)\n"
                  "    print('there', s.getsockname() == ('127.0.0.1', int(os.environ['MASTER_PORT'])), flush=True)\n"
                  "    c, _ = s.accept(); print('heard', c.recv(5).decode())\n"
                  "else:\n"
                  "    kinds = [os.readlink(f'/proc/self/fd/{f}') for f in os.listdir('/proc/self/fd')\n"
                  "             if os.path.exists(f'/proc/self/fd/{f}') or os.path.islink(f'/proc/self/fd/{f}')]\n"
                  "    print('sockets', sum(k.startswith('socket:') for k in kinds))\n"
                  "    c = socket.create_connection(('127.0.0.1', int(os.environ['MASTER_PORT'])))\n"
                  "    c.sendall(b'hello')\n")
        result = run("-n", "2", *python(script))
        self.assertEqual(result.code, 0, result.err)
        self.assertEqual(result.lines(0), ["listens 1", "there True", "heard hello"])
        self.assertEqual(result.lines(1), ["sockets 0"])

    def test_a_port_by_number_and_one_that_is_taken(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
            taken.listen()
            result = run("-n", "2", "--master-port", str(port), *sh("echo never"))
            self.assertEqual((result.code, result.out), (125, ""))
            self.assertRegex(result.err, rf"127.0.0.1:{port}: the port is in use \(pid {os.getpid()}, [^)]+\)\. .*--master-port")
        result = run("-n", "2", "--master-port", str(port), *sh("echo MASTER_PORT=$MASTER_PORT"))
        self.assertEqual(result.variables(1), {"MASTER_PORT": str(port)})

    def test_several_machines(self):
        here = ["-n", "2", "--nnodes", "3", "--master-addr", "127.0.0.1", "--master-port"]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        result = run(*here, port, "--node-rank", "2", *sh("env"))
        found = result.variables(5)
        self.assertEqual((found["RANK"], found["LOCAL_RANK"], found["WORLD_SIZE"]), ("5", "1", "6"))
        self.assertNotIn("DDP_LISTEN_FD", result.variables(4), "rank 0 is elsewhere")
        self.assertNotIn("DDP_LISTEN_FD", found)
        self.assertIn("DDP_LISTEN_FD", run(*here, port, *sh("env")).variables(0))
        # An address that is not ours (a service in front of us): rank 0 has to serve by itself.
        away = ["-n", "2", "--nnodes", "2", "--master-addr", "192.0.2.1", "--master-port", port]
        result = run(*away, *sh("env"))
        self.assertEqual((result.code, result.variables(0)["MASTER_ADDR"]), (0, "192.0.2.1"))
        self.assertNotIn("DDP_LISTEN_FD", result.variables(0))
        # A name that the name service has yet to learn (Kubernetes): rank 0 waits for it until timing.join.
        late = ["--master-addr", "not-yet.invalid", "--master-port", port]
        result = run("-n", "2", "--nnodes", "2", *late, *sh("env"))
        self.assertEqual((result.code, result.variables(0).get("MASTER_ADDR")), (0, "not-yet.invalid"), result.err)
        self.assertNotIn("DDP_LISTEN_FD", result.variables(0))
        result = run("-n", "2", *late, *sh("echo never"))
        self.assertEqual((result.code, result.out), (125, ""))
        self.assertIn("not-yet.invalid", result.err)
        result = run("-n", "2", "--master-addr", "192.0.2.1", *sh("echo never"))
        self.assertEqual((result.code, result.out), (125, ""))

    def test_stdin_is_rank_0s(self):
        result = run("-n", "3", *sh("echo read: $(cat)"), text_in="some data")
        self.assertEqual([result.lines(rank) for rank in range(3)], [["read: some data"], ["read:"], ["read:"]])

    def test_ranks_find_the_signals_as_they_should_be(self):
        result = run("-n", "2", "grep", "-E", "Sig(Blk|Ign)", "/proc/self/status")
        self.assertEqual(result.lines(1)[0].split(), ["SigBlk:", "0" * 16])
        ignored = int(result.lines(1)[1].split()[1], 16)
        self.assertFalse(ignored & (1 << (signal.SIGPIPE - 1)), "a rank must die of a broken pipe")


class Output(unittest.TestCase):
    def test_lines_keep_their_stream_and_get_a_prefix(self):
        result = run("-n", "2", *sh("echo out; echo; echo err >&2"))
        self.assertEqual(sorted(result.out.splitlines()), ["[0] ", "[0] out", "[1] ", "[1] out"])
        self.assertEqual(sorted(result.err.splitlines()), ["[0] err", "[1] err"])

    def test_without_prefix_and_with_that_of_the_others(self):
        self.assertEqual(sorted(run("-n", "2", "--prefix", "none", *sh("echo $RANK")).out.split()), ["0", "1"])
        result = run("-n", "2", "--prefix=others", *sh("echo r$RANK"))
        self.assertEqual(sorted(result.out.splitlines()), ["[1] r1", "r0"])

    def test_lines_written_in_pieces_by_all_ranks_at_once_never_mix(self):
        script = ("import os\n"
                  "r = os.environ['RANK']\n"
                  "for i in range(400):\n"
                  "    for piece in (f'<{r}', f' {i} ', r * 50, '>\\n'): os.write(1, piece.encode())\n")
        for prefix in ("rank", "none"):
            result = run("-n", "4", "--prefix", prefix, *python(script))
            self.assertEqual(result.code, 0, result.err)
            lines = [re.sub(r"^\[\d\] ", "", line) for line in result.out.splitlines()]
            for rank in range(4):
                mine = [line for line in lines if line.startswith(f"<{rank}")]
                self.assertEqual(mine, [f"<{rank} {i} {str(rank) * 50}>" for i in range(400)])
            self.assertEqual(len(lines), 1600)

    def test_a_last_line_without_newline(self):
        for prefix, expected in (("rank", ["[0] tail", "[1] tail"]), ("none", ["tail", "tail"])):
            result = run("-n", "2", "--prefix", prefix, *sh("printf tail"))
            self.assertEqual(sorted(result.out.splitlines()), expected)
            self.assertTrue(result.out.endswith("\n"))

    def test_a_line_without_end_is_shown_in_pieces_and_nothing_is_lost(self):
        result = run("-n", "2", *python("import sys; sys.stdout.write('x' * 1000000 + 'end')"))
        lines = result.lines(1)
        self.assertEqual("".join(lines), "x" * 1000000 + "end")
        self.assertGreater(len(lines), 4)
        self.assertLessEqual(max(map(len, lines)), 1 << 16)

    def test_long_lines_of_both_streams_into_one_place_never_mix(self):
        script = ("import os\n"
                  "for i in range(100):\n"
                  "    for fd in (1, 2): os.write(fd, str(fd).encode() * 20000 + b'\\n')\n")
        result = run("-n", "2", "--prefix", "none", *python(script), stderr=subprocess.STDOUT)
        self.assertEqual(sorted(result.out.splitlines()), ["1" * 20000] * 200 + ["2" * 20000] * 200)

    def test_output_of_a_failed_rank_is_shown_to_the_end(self):
        result = run("-n", "2", *python("import os, sys\n"
                                        "for i in range(5000): print(i)\n"
                                        "sys.stdout.flush(); os._exit(9 if os.environ['RANK'] == '0' else 0)"))
        self.assertEqual((result.code, len(result.lines(0)), len(result.lines(1))), (9, 5000, 5000))

    def test_a_reader_that_leaves_does_not_end_the_job(self):
        with Directory() as notes:
            process = start("-n", "2", *sh('trap "" PIPE; for i in 1 2 3 4 5; do echo line; sleep 0.05; done;'
                                           ' echo done > $NOTES/$RANK'), env=notes.env())
            process.stdout.close()
            process.wait(DEADLINE)
            process.stderr.close()
            self.assertEqual((process.returncode, notes.note("0"), notes.note("1")), (0, "done", "done"))

    def test_a_reader_that_stands_still_does_not_keep_ddprun_from_its_signals(self):
        with Directory() as notes:
            process = start("-n", "2", *sh("echo $$ > $NOTES/$RANK; exec yes"), env=notes.env())
            notes.wait_for("0", "1")
            time.sleep(0.3)  # long enough to fill every pipe
            process.send_signal(signal.SIGINT)
            pids = [int(notes.note(name)) for name in ("0", "1")]
            self.assertTrue(eventually(lambda: not any(map(alive, pids))), "nobody reads, and the ranks live on")
            process.send_signal(signal.SIGINT)  # whether or not only output is left: without it, then
            self.assertEqual(process.wait(DEADLINE), 130)
            process.stdout.close()
            process.stderr.close()


    def test_a_full_disk_is_no_success(self):
        for words, code in ((["-n", "2", *sh("echo line")], 125), (["-n", "2", *sh("echo line; exit 3")], 3), (["--help"], 125)):
            with open("/dev/full", "w") as full:
                result = finish(start(*words, stdout=full))
            self.assertEqual(result.code, code, result.err)
            self.assertRegex(result.err, "could not be written")
        with open("/dev/full", "w") as full:
            self.assertEqual(finish(start("-n", "1", *sh("echo line >&2"), stderr=full)).code, 125)

    def test_output_goes_into_files_too_or_only(self):
        for words, in_files, shown in (([], "oe", "oe"), (["--tee", "1"], "o", "oe"), (["-r", "3"], "oe", ""),
                                       (["-r", "2", "-t1"], "oe", "o")):
            with Directory() as notes:
                logs = os.path.join(notes.path, "a", "b")
                result = run("-n", "2", "--log-dir", logs, *words, *sh("echo out$RANK; echo err$RANK >&2"))
                self.assertEqual(result.code, 0, result.err)
                self.assertEqual(notes.note("a/b/rank-1.out"), "out1" if "o" in in_files else "", words)
                self.assertEqual(notes.note("a/b/rank-0.err"), "err0" if "e" in in_files else "", words)
                self.assertEqual((result.lines(0), "err1" in result.err), (["out0"] if "o" in shown else [], "e" in shown))
        for redirects, tee, in_files, shown in (("3", "", "oe", ""), ("2", "1", "oe", "o"), ("", "1", "o", "oe")):
            with Directory() as notes:  # by the variables of torchrun
                logs = os.path.join(notes.path, "logs")
                result = run("-n", "2", *sh("echo out$RANK; echo err$RANK >&2"),
                             env=environment(PET_LOG_DIR=logs, PET_REDIRECTS=redirects, PET_TEE=tee))
                self.assertEqual(result.code, 0, result.err)
                self.assertEqual(notes.note("logs/rank-1.out"), "out1" if "o" in in_files else "", (redirects, tee))
                self.assertEqual(notes.note("logs/rank-0.err"), "err0" if "e" in in_files else "", (redirects, tee))
                self.assertEqual((result.lines(0), "err1" in result.err), (["out0"] if "o" in shown else [], "e" in shown))
        with Directory() as notes:
            os.symlink("/dev/full", os.path.join(notes.path, "rank-0.out"))
            result = run("-n", "2", "--log-dir", notes.path, *sh("echo out"))
            self.assertEqual(result.code, 125)
            self.assertRegex(result.err, "rank 0 in --log-dir .* could not be written: No space left")


class Terminal(unittest.TestCase):
    """ddprun on a terminal of its own."""

    def converse(self, words, steps=(), env=None):
        """Runs ddprun; when a text of `steps` has appeared, types what stands beside it. Returns output and status."""
        pid, terminal = pty.fork()
        if pid == 0:
            default_signals()
            os.execve(DDPRUN, [DDPRUN, *words], env or environment())
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
        seen, end, steps = b"", time.monotonic() + DEADLINE, list(steps)
        try:
            while time.monotonic() < end:
                if select.select([terminal], [], [], 0.1)[0]:
                    try:
                        data = os.read(terminal, 65536)
                    except OSError:  # the last descriptor on the other side was closed
                        break
                    if not data:
                        break
                    seen += data
                while steps and re.search(steps[0][0], seen):
                    action = steps.pop(0)[1]
                    if callable(action):
                        action()
                    else:
                        os.write(terminal, action)
            else:
                os.kill(pid, signal.SIGKILL)
                self.fail(f"ddprun hangs: {seen[-2000:]!r}")
        finally:
            os.close(terminal)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return seen.decode(errors="replace"), status

    def test_rank_0_learns_of_the_terminal_and_its_width(self):
        # The width is set after the fork: wait for it before ddprun looks.
        with Directory() as notes:
            wait = "while [ $(stty size < /dev/tty | cut -d' ' -f2) != 100 ]; do sleep 0.01; done; "
            for prefix, width in (("rank", "96"), ("none", "100")):
                inner = f'exec "$DDPRUN" -n 2 --prefix {prefix} -- sh -c \'echo "<$RANK:$DDP_TTY:$COLUMNS>"\''
                env = notes.env(DDPRUN=DDPRUN, NO_COLOR="1")
                env.pop("COLUMNS", None)
                pid, terminal = pty.fork()
                if pid == 0:
                    os.execve("/bin/sh", ["sh", "-c", wait + inner], env)
                fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
                seen = b""
                try:
                    while select.select([terminal], [], [], DEADLINE)[0]:
                        data = os.read(terminal, 65536)
                        if not data:
                            break
                        seen += data
                except OSError:
                    pass
                os.close(terminal)
                os.waitpid(pid, 0)
                self.assertIn(f"<0:1:{width}>".encode(), seen)
                self.assertIn(b"<1::>", seen)

    def test_a_terminal_that_stands_still(self):
        """As after Ctrl-S: ranks wait in their pipes, but signals and the launcher's end do not."""
        terminal, other = pty.openpty()
        process = start("-n", "2", "--grace", "0.5", *sh("yes $RANK | head -c 1000000; exec sleep 4713"), stdout=other, stderr=other)
        os.close(other)
        try:
            time.sleep(1.0 * SCALE)
            self.assertIsNone(process.poll())
            for _ in range(2):
                process.send_signal(signal.SIGINT)
                time.sleep(0.5)
            self.assertEqual(process.wait(10 * SCALE), 130)
        finally:
            process.kill()
            os.close(terminal)

    def test_a_progress_bar_is_seen_while_it_grows(self):
        script = ("import os, time\n"
                  "notes = os.environ['NOTES']\n"
                  "def wait(name):\n"
                  "    end = time.monotonic() + 20\n"
                  "    while not os.path.exists(notes + name) and time.monotonic() < end: time.sleep(0.01)\n"
                  "if os.environ['RANK'] == '0':\n"
                  "    os.write(1, b'\\rbar 10%'); wait('/10')\n"
                  "    os.write(1, b'\\rbar 20%'); wait('/20')\n"
                  "    os.write(1, b'\\rbar 30%\\n')\n"
                  "else:\n"
                  "    wait('/10'); wait('/other'); os.write(1, b'other\\n')\n")
        # Each step waits until the one before is on the screen. The other rank's line clears the bar, which comes back
        # with its next redraw.
        for words, expected in ((["--prefix", "none"], "\rbar 10%\rbar 20%\r\x1b[Kother\r\n\rbar 30%\r\n"),
                                ([], "\r[0] bar 10%\r[0] bar 20%\r\x1b[K[1] other\r\n\r[0] bar 30%\r\n")):
            with Directory() as notes:
                def touch(name):
                    return lambda: open(os.path.join(notes.path, name), "w").close()
                steps = [(b"10%", touch("10")), (b"20%", touch("other")), (b"other", touch("20"))]
                seen, status = self.converse(["-n", "2", *words, *python(script)], steps, notes.env(NO_COLOR="1"))
                self.assertEqual((seen, status), (expected, 0))

    def test_prefixes_have_colours_on_a_terminal_unless_unwanted(self):
        self.assertIn("\x1b[31m[0]\x1b[0m hello", self.converse(["-n", "1", *sh("echo hello")])[0])
        self.assertEqual(self.converse(["-n", "1", *sh("echo hello")], env=environment(NO_COLOR="1"))[0],
                         "[0] hello\r\n")

    def test_control_c_reaches_every_rank_exactly_once(self):
        script = ("import os, signal, time\n"
                  "count = 0\n"
                  "def on(*_):\n"
                  "    global count; count += 1\n"
                  "signal.signal(signal.SIGINT, on)\n"
                  "os.write(1, b'ready%s.\\n' % os.environ['RANK'].encode())\n"
                  "end = time.monotonic() + 20\n"
                  "while not count and time.monotonic() < end: time.sleep(0.01)\n"
                  "time.sleep(0.5)\n"
                  "os.write(1, b'rank %s: %d\\n' % (os.environ['RANK'].encode(), count))\n")
        seen, status = self.converse(["-n", "2", "--prefix", "none", *python(script)],
                                     [(rb"(?s)ready.*ready\d", b"\x03")])
        self.assertIn("rank 0: 1", seen)
        self.assertIn("rank 1: 1", seen)
        self.assertIn("SIGINT passed on", seen)
        self.assertEqual(status, 0, "the ranks took it well")


class Failure(unittest.TestCase):
    def block(self, result):
        """The last block on stderr: what people see first in the tail of a log."""
        start_of_block = result.err.rfind("\nddprun: rank") + 1
        return result.err[start_of_block:]

    def test_all_is_well(self):
        result = run("-n", "4", *sh("true"))
        self.assertEqual((result.code, result.out, result.err), (0, "", ""))

    def test_a_rank_that_is_done_early_ends_nobody(self):
        result = run("-n", "3", "--grace", "0", *sh("[ $RANK = 1 ] || sleep 0.7; echo done"))
        self.assertEqual((result.code, result.err), (0, ""))
        self.assertEqual([result.lines(rank) for rank in range(3)], [["done"]] * 3)

    def test_the_first_culprit_is_named_last_and_gives_the_exit_code(self):
        result = run("-n", "3", "--grace", "0.3",
                     *sh("echo line of $RANK >&2; [ $RANK = 2 ] || sleep 60; sleep 0.2; echo my reason >&2; exit 7"))
        self.assertEqual(result.code, 7, result.err)
        block = self.block(result)
        self.assertRegex(block, r"\Addprun: rank 2 failed first: exit code 7 \(pid \d+ on ")
        self.assertIn(socket.gethostname(), block)
        self.assertRegex(block, r"\d\.\d s after its start\)")
        self.assertIn("its last error line: my reason", block)
        self.assertIn("ranks 0, 1: ended by ddprun", block)
        self.assertRegex(block, r"\n        the others: ranks 0, 1: ended by ddprun\n\Z")  # nothing comes after it
        self.assertLess(result.seconds, 15)

    def test_death_by_signal(self):
        for signo, name in ((signal.SIGKILL, "SIGKILL"), (signal.SIGSEGV, "SIGSEGV")):
            script = f"ulimit -c 0; [ $RANK = 0 ] || kill -{int(signo)} $$; sleep 60"
            result = run("-n", "2", "--grace", "0.1", *sh(script))
            self.assertEqual(result.code, 128 + signo)
            self.assertIn(f"rank 1 failed first: killed by {name}", self.block(result))

    def test_of_ranks_found_dead_together_the_one_killed_by_a_signal_is_named(self):
        with Directory() as notes:
            process = start("-n", "2", *python("import os, resource, signal, time\n"
                                               "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
                                               "rank, notes = os.environ['RANK'], os.environ['NOTES']\n"
                                               "with open(f'{notes}/{rank}.new', 'w') as note: print(os.getpid(), file=note)\n"
                                               "os.rename(f'{notes}/{rank}.new', f'{notes}/{rank}')\n"
                                               "while not os.path.exists(f'{notes}/go'): time.sleep(0.01)\n"
                                               "if rank == '1': os.kill(os.getpid(), signal.SIGSEGV)\n"
                                               "os._exit(1)\n"), env=notes.env())
            self.assertTrue(eventually(lambda: notes.note("0") and notes.note("1")))
            process.send_signal(signal.SIGSTOP)  # both die before it looks
            with open(os.path.join(notes.path, "go"), "w"):
                pass
            self.assertTrue(eventually(lambda: not alive(notes.note("0")) and not alive(notes.note("1"))))
            process.send_signal(signal.SIGCONT)
            result = finish(process)
        self.assertEqual(result.code, 128 + signal.SIGSEGV, result.err)
        self.assertIn("rank 1 failed first: killed by SIGSEGV", self.block(result))
        self.assertIn("rank 0: exit code 1", self.block(result))

    def test_survivors_may_speak_before_they_are_ended(self):
        script = ("import os, sys, time\n"
                  "if os.environ['RANK'] == '1': os._exit(5)\n"
                  "time.sleep(0.6)\n"
                  "print('DDP-E202 peer closed: rank 1 died', file=sys.stderr, flush=True); os._exit(1)\n")
        result = run("-n", "3", "--grace", "20", *python(script))
        self.assertEqual(result.code, 5)
        self.assertEqual(result.err.count("DDP-E202"), 2)
        self.assertIn("rank 1 failed first: exit code 5", self.block(result))
        self.assertIn("ranks 0, 2: exit code 1", self.block(result))

    def test_who_accuses_a_peer_is_not_the_culprit(self):
        # A rank whose own code threw may take longer to end than the peers it has told.
        script = ("import os, sys, time\n"
                  "if os.environ['RANK'] == '0':\n"
                  "    print('DDP-E206 remote exception: rank 1 threw', file=sys.stderr, flush=True); os._exit(1)\n"
                  "time.sleep(0.4); print('bad batch', file=sys.stderr, flush=True); os._exit(3)\n")
        result = run("-n", "2", "--grace", "20", *python(script))
        self.assertEqual(result.code, 3)
        self.assertIn("rank 1 failed first: exit code 3", self.block(result))
        self.assertIn("its last error line: bad batch", self.block(result))

    def test_a_rank_of_another_machine_may_be_the_culprit(self):
        there = ["-n", "2", "--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1", "--master-port", "4711"]
        words = "DDP-E202 peer closed: rank %d is gone while rank 2 was in step #3: its connection closed"
        result = run(*there, "--grace", "20", *sh(f"echo '{words % 1}' >&2; exit 202"))
        self.assertEqual(result.code, 202)
        block = self.block(result)
        self.assertRegex(block, r"\Addprun: rank 1, on another machine, failed first\. Rank [23] here: exit code 202 \(pid \d+ on ")
        self.assertIn(f"its last error line: {words % 1}", block)
        self.assertRegex(block, "the others: rank [23]: exit code 202")
        result = run(*there, "--grace", "20", *sh(f"[ $RANK = 2 ] || exit 7; echo '{words % 3}' >&2; exit 202"))
        self.assertIn("rank 3 failed first: exit code 7", self.block(result))
        result = run(*there, "--grace", "20", *sh(f"echo '{words % 3}' >&2; exit 202"))
        self.assertRegex(self.block(result), r"\Addprun: rank [23] failed first: exit code 202 ")

    def test_who_has_said_that_it_failed_is_the_culprit(self):
        # communicator::fail(): all ranks throw one text, and another one may end first.
        said = "DDP-E206 remote exception: rank 1 failed in its own code after barrier: the solver diverged"
        result = run("-n", "2", "--grace", "20", *sh(f"[ $RANK = 1 ] && sleep 0.4; echo '{said}' >&2; exit $((3 + RANK))"))
        self.assertEqual(result.code, 4)
        self.assertIn("rank 1 failed first: exit code 4", self.block(result))

    def test_the_librarys_own_error_is_preferred_to_what_follows_it(self):
        result = run("-n", "2", *sh("[ $RANK = 0 ] && exit 0; echo '  what():  DDP-E302 format: cut short' >&2;"
                                    " echo Aborted >&2; exit 134"))
        self.assertIn("its last error line: what():  DDP-E302 format: cut short", self.block(result))

    def test_an_error_that_ends_in_a_colon_is_shown_with_the_line_after_it(self):
        result = run("-n", "2", *sh("[ $RANK = 0 ] && exit 0; echo 'DDP-E302 format: kept: is a checkpoint of another training:' >&2;"
                                    " echo '  it has another optimizer' >&2; echo '  and another sampler' >&2; exit 1"))
        self.assertRegex(self.block(result), r"(?m)its last error line: DDP-E302 .* training: it has another optimizer$")

    def test_who_ignores_sigterm_is_killed(self):
        with Directory() as notes:
            result = run("-n", "2", "--grace", "0.2",
                         *python("import os, signal, time\n"
                                 "signal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True))\n"
                                 "note = os.environ['NOTES'] + '/pid'\n"
                                 "if os.environ['RANK'] == '1':\n"
                                 "    while not os.path.exists(note): time.sleep(0.01)\n"
                                 "    os._exit(4)\n"
                                 "print(os.getpid(), file=open(note, 'w'), flush=True)\n"
                                 "while True: time.sleep(1)\n"), env=notes.env())
            self.assertEqual((result.code, result.lines(0)), (4, ["asked"]))
            self.assertFalse(alive(int(notes.note("pid"))))

    def test_a_stopped_rank_does_not_hold_up_the_end(self):
        result = run("-n", "2", "--grace", "0.2", *sh("trap 'echo woken; exit 0' TERM;"
                                                      " [ $RANK = 1 ] || kill -STOP $$; sleep 0.2; exit 6"))
        self.assertEqual((result.code, result.lines(0)), (6, ["woken"]))
        self.assertLess(result.seconds, 15)

    def test_a_program_that_cannot_be_run_is_said_once(self):
        with tempfile.TemporaryDirectory() as directory:
            plain = os.path.join(directory, "plain")
            orphan = os.path.join(directory, "orphan")
            with open(plain, "w") as file:
                file.write("text")
            with open(orphan, "w") as file:
                file.write("#!/no/such/interpreter\n")
            os.chmod(orphan, 0o755)
            for program, code, words in (("no-such-program-here", 127, "in PATH"), ("./no/such", 127, "No such file"),
                                         (plain, 126, r"chmod \+x"), (directory, 126, "directory"),
                                         (orphan, 127, "#!")):
                result = run("-n", "3", program, "argument")
                self.assertEqual((result.code, result.out), (code, ""), program)
                self.assertEqual(result.err.count("cannot run"), 1)
                self.assertRegex(result.err, words)


class Signals(unittest.TestCase):
    COUNTING = ("import os, signal, sys, time\n"
                "rank, notes = os.environ['RANK'], os.environ['NOTES']\n"
                "got = []\n"
                "for s in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):\n"
                "    signal.signal(s, lambda n, _: got.append(signal.Signals(n).name))\n"
                "print(os.getpid(), file=open(notes + '/' + rank, 'w'), flush=True)\n"
                "end = time.monotonic() + 20\n"
                "while len(got) < int(os.environ['WANTED']) and time.monotonic() < end: time.sleep(0.01)\n"
                "print(*got, flush=True)\n")

    def test_signals_are_passed_on_to_all_ranks(self):
        for signo in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
            with Directory() as notes:
                process = start("-n", "3", *python(self.COUNTING), env=notes.env(WANTED="1"))
                notes.wait_for("0", "1", "2")
                process.send_signal(signo)
                result = finish(process)
                self.assertEqual(result.code, 0, "the ranks exited cleanly")
                self.assertEqual([result.lines(rank) for rank in range(3)], [[signo.name]] * 3)

    def test_ranks_that_die_of_a_signal_passed_on(self):
        with Directory() as notes:
            process = start("-n", "2", *sh("echo $$ > $NOTES/$RANK; exec sleep 60"), env=notes.env())
            notes.wait_for("0", "1")
            process.send_signal(signal.SIGTERM)
            result = finish(process)
            self.assertEqual(result.code, 128 + signal.SIGTERM)
            self.assertIn("SIGTERM passed on to all ranks", result.err)
            self.assertTrue(result.err.endswith("ddprun: SIGTERM ended the job: it was sent to ddprun, which passed it on to "
                                                "all ranks\n        ranks 0, 1: killed by SIGTERM\n"), result.err)

    def test_a_checkpoint_at_the_end_gets_more_time_than_the_grace(self):
        with Directory() as notes:
            process = start("-n", "2", "--grace", "0.1",
                            *python("import os, signal, time\n"
                                    "rank, notes = os.environ['RANK'], os.environ['NOTES']\n"
                                    "def save(*_):\n"
                                    "    time.sleep(1.5 * int(rank)); print('saved', flush=True); os._exit(85)\n"
                                    "signal.signal(signal.SIGTERM, save)\n"
                                    "print('up', file=open(notes + '/' + rank, 'w'), flush=True)\n"
                                    "time.sleep(60)\n"), env=notes.env())
            notes.wait_for("0", "1")
            process.send_signal(signal.SIGTERM)
            result = finish(process)
            self.assertEqual((result.code, result.lines(0), result.lines(1)), (85, ["saved"], ["saved"]))

    def test_a_job_whose_ranks_all_want_to_be_resumed_has_not_failed(self):
        for signo, words in ((signal.SIGTERM, []), (signal.SIGUSR1, []), (None, []), (None, ["--grace", "0.1"])):
            with Directory() as notes:
                process = start("-n", "2", "--restarts", "3", *words,
                                *python("import os, signal, time\n"
                                        "rank, notes = os.environ['RANK'], os.environ['NOTES']\n"
                                        "def save(*_):\n"
                                        "    time.sleep(1.5 * int(rank)); print('saved', flush=True); os._exit(75)\n"
                                        "for s in signal.SIGTERM, signal.SIGUSR1: signal.signal(s, save)\n"
                                        "print(os.getpid(), file=open(notes + '/' + rank, 'a'), flush=True)\n"
                                        "time.sleep(60)\n"), env=notes.env())
                notes.wait_for("0", "1")
                if signo:
                    process.send_signal(signo)
                else:  # ranks tell each other
                    for rank in ("0", "1"):
                        os.kill(int(notes.note(rank)), signal.SIGUSR1)
                result = finish(process)
                self.assertEqual((result.code, result.lines(0), result.lines(1)), (75, ["saved"], ["saved"]), result.err)
                self.assertTrue(result.err.endswith("ddprun: the job has stopped and can be resumed: all ranks ended with exit "
                                                    "code 75\n"), result.err)
                self.assertNotIn("failed", result.err)
                self.assertEqual(len(notes.note("0").split()), 1, "it was not started again")
        result = run("-n", "2", "--restarts=1", *sh("exit $((75 - RANK))"))  # one does not: that is a failure
        self.assertIn(result.code, (74, 75))
        self.assertRegex(result.err, r"restart 1 of 1\n(?s:.*)rank [01] failed first: exit code 7[45]")

    def test_a_second_interrupt_kills(self):
        with Directory() as notes:
            process = start("-n", "2", *python(self.COUNTING), env=notes.env(WANTED="9"))
            notes.wait_for("0", "1")
            process.send_signal(signal.SIGINT)
            self.assertIn("SIGINT passed on to all ranks; once more kills", process.stderr.readline())
            process.send_signal(signal.SIGINT)
            result = finish(process)
            self.assertEqual(result.code, 130)
            self.assertLess(result.seconds, 15)
            self.assertFalse(any(alive(int(notes.note(name))) for name in ("0", "1")))

    def test_a_stop_from_the_terminal_stops_the_ranks_too(self):
        def state(pid):
            with open(f"/proc/{pid}/stat") as file:
                return file.read().rpartition(")")[2].split()[0]

        with Directory() as notes:
            process = start("-n", "2", *sh("echo $$ > $NOTES/$RANK; exec sleep 60"), env=notes.env())
            notes.wait_for("0", "1")
            pids = [int(notes.note(name)) for name in ("0", "1")]
            process.send_signal(signal.SIGTSTP)
            self.assertTrue(eventually(lambda: all(state(pid) == "T" for pid in [*pids, process.pid])))
            process.send_signal(signal.SIGCONT)
            self.assertTrue(eventually(lambda: all(state(pid) != "T" for pid in [*pids, process.pid])))
            process.send_signal(signal.SIGTERM)
            self.assertEqual(finish(process).code, 143)

    def test_what_nohup_ignores_stays_ignored(self):
        with Directory() as notes:
            words = [DDPRUN, "-n", "2", *sh("echo up > $NOTES/$RANK; sleep 0.5; echo done")]
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                       text=True, env=notes.env(),
                                       preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
            notes.wait_for("0", "1")
            process.send_signal(signal.SIGHUP)
            result = finish(process)
            self.assertEqual((result.code, result.lines(0), result.lines(1)), (0, ["done"], ["done"]))


    def test_a_signal_that_ranks_do_not_handle_is_said_to_come_from_ddprun(self):
        with Directory() as notes:
            process = start("-n", "2", *sh("echo up > $NOTES/$RANK; sleep 60"), env=notes.env())
            notes.wait_for("0", "1")
            process.send_signal(signal.SIGUSR1)
            result = finish(process)
            self.assertEqual(result.code, 128 + signal.SIGUSR1, result.err)
            self.assertIn("killed by SIGUSR1", result.err)
            self.assertIn("ddprun passed that signal on; it ends a rank that has no handler", result.err)
        result = run("-n", "2", "--grace", "0.1", *sh("[ $RANK = 1 ] && kill -USR1 $$; sleep 60"))
        self.assertIn("rank 1 failed first: killed by SIGUSR1", result.err)
        self.assertNotIn("passed that signal on", result.err)


class System(unittest.TestCase):
    """What the system refuses."""

    @unittest.skipIf(shutil.which("strace") is None, "no strace (scripts/setup.sh tests)")
    def test_a_system_without_close_range(self):
        """Linux before 5.9, or a sandbox that does not know it."""
        with Directory() as notes:
            words = ["strace", "-f", "-qq", "-o", os.path.join(notes.path, "trace"), "-e", "trace=close_range",
                     "-e", "inject=close_range:error=ENOSYS", DDPRUN, "-n", "2", *sh("echo here")]
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                       env=environment())
            result = finish(process)
            self.assertEqual((result.code, sorted(result.out.split("\n"))), (0, ["", "[0] here", "[1] here"]), result.err)
            self.assertIn("ENOSYS", notes.note("trace"))

    def test_a_program_that_is_not_loaded(self):
        """Its file system does not answer: exec() waits. ddprun says so, and ends when it is told to."""
        with Directory() as notes:
            library = os.path.join(notes.path, "waits.so")
            subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-o", library, "-"], text=True, check=True, timeout=DEADLINE,
                           input="int pause(void); int execvpe(char const* a, char* const* b, char* const* c) { return a && b && c ? pause() : 0; }")
            process = start("-n", "2", *sh("echo here"), env=environment(LD_PRELOAD=library))
            time.sleep(2.0 + SCALE)
            process.send_signal(signal.SIGTERM)
            result = finish(process)
            self.assertEqual((result.code, result.out), (143, ""), result.err)
            self.assertLess(result.seconds, 10 * SCALE, result.err)
            self.assertRegex(result.err, r"(?m)^ddprun: warning: rank 0 \(pid \d+\) does not run yet: the system is still loading 'sh' after 2000 ms\. "
                                         r"Does its file system answer\? ")
            self.assertNotIn("warning: rank 1", result.err)
            # exec() fails at last: the rank says why.
            subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-o", library, "-"], text=True, check=True, timeout=DEADLINE,
                           input="#include <errno.h>\n#include <unistd.h>\n"
                                 "int execvpe(char const* a, char* const* b, char* const* c) { (void)a, (void)b, (void)c; sleep(4); errno = EACCES; return -1; }")
            result = run("-n", "2", *sh("echo here"), env=environment(LD_PRELOAD=library))
            self.assertEqual((result.code, result.out), (126, ""), result.err)
            self.assertRegex(result.err, r"(?m)^\[[01]\] ddprun: cannot run 'sh': Permission denied")

    def test_a_limit_on_files(self):
        """`ulimit -f`: a log that reaches it ends neither ddprun nor the job."""
        with Directory() as notes:
            script = 'ulimit -f 8; exec "$0" -n 2 --log-dir "$1" -- sh -c "head -c 30000 /dev/zero | tr \\\\0 x; echo; echo end"'
            process = subprocess.Popen(["sh", "-c", script, DDPRUN, os.path.join(notes.path, "logs")], stdin=subprocess.DEVNULL,
                                       stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
            result = finish(process)
            self.assertEqual(result.code, 125, result.err)
            self.assertIn("File too large", result.err)
            self.assertEqual([result.lines(rank)[-1] for rank in range(2)], ["end"] * 2, result.err)

    @unittest.skipIf(shutil.which("flock") is None, "no flock")
    def test_what_clears_old_files_leaves_the_flight_records_alone(self):
        """systemd-tmpfiles does not touch a directory that is locked."""
        result = run("-n", "1", *sh('flock -n -x "$DDP_FLIGHT_DIR" true && echo free || echo held'))
        self.assertEqual(result.lines(0), ["held"], result.err)


class Restarts(unittest.TestCase):
    SCRIPT = ("echo id $DDP_JOB_ID count $DDP_RESTART_COUNT; echo x >> $NOTES/tries$RANK;"
              " [ $(wc -l < $NOTES/tries$RANK) -ge $ENOUGH ] || [ $RANK = 0 ] || exit 9")

    def test_all_ranks_start_again_until_it_goes_well(self):
        with Directory() as notes:
            result = run("-n", "2", "--max-restarts", "4", *sh(self.SCRIPT), env=notes.env(ENOUGH="3"))
            self.assertEqual(result.code, 0, result.err)
            self.assertEqual(len(notes.note("tries0").split()), 3)
            said = [line.split() for line in result.lines(0)]
            self.assertEqual([words[3] for words in said], ["0", "1", "2"])
            names, attempts = zip(*(words[1].split("/") for words in said))
            self.assertEqual((len(set(names)), attempts), (1, ("0", "1", "2")), "ranks of two attempts never meet")
            self.assertIn("restart 2 of 4", result.err)
        with Directory() as notes:
            result = run("-n", "2", *sh(self.SCRIPT), env=notes.env(ENOUGH="1", DDP_JOB_ID="night run"))
            self.assertRegex(result.lines(0)[0], r"^id night run/[0-9a-f]{8}/0 count")
        with Directory() as notes:  # by torchrun's variable, which the option overrides
            for words, enough, code in (([], "2", 0), (["--max-restarts=0"], "4", 9)):
                result = run("-n", "2", *words, *sh(self.SCRIPT), env=notes.env(ENOUGH=enough, PET_MAX_RESTARTS="1"))
                self.assertEqual((result.code, "restart 1 of 1" in result.err), (code, code == 0), result.err)

    def test_enough_is_enough(self):
        with Directory() as notes:
            result = run("-n", "2", "--max-restarts=1", "--log-dir", notes.path, *sh(self.SCRIPT), env=notes.env(ENOUGH="9"))
            self.assertEqual((result.code, len(notes.note("tries1").split())), (9, 2))
            self.assertTrue(notes.note("rank-1.out") and notes.note("rank-1.restart-1.out"))

    def test_what_the_user_ends_stays_ended(self):
        with Directory() as notes:
            process = start("-n", "2", "--max-restarts", "3", *sh("echo $$ >> $NOTES/$RANK; exec sleep 60"), env=notes.env())
            notes.wait_for("0", "1")
            process.send_signal(signal.SIGTERM)
            self.assertEqual(finish(process).code, 143)
            self.assertEqual(len(notes.note("0").split()), 1)


class Hosts(unittest.TestCase):
    """-H, with a command that does what ssh does: the words after the host's name are one line for a shell, whose processes
    do not end with the command."""

    def setUp(self):
        self.notes = Directory().__enter__()
        self.addCleanup(self.notes.__exit__)
        self.agent = os.path.join(self.notes.path, "agent")
        with open(self.agent, "w") as file:
            file.write("#!/bin/sh\n[ $1 != lost ] || { echo no route to $1 >&2; exit 255; }\n"
                       "echo \"$*\" >> $NOTES/agents\nexport HOST=$1; shift; cd /; unset DDP_CARRIED; exec setsid --wait sh -c \"$*\"\n")
        os.chmod(self.agent, 0o755)

    def start(self, hosts, *words, **more):
        return start("-H", hosts, "--launch-agent", self.agent, "--master-addr", "127.0.0.1", *words,
                     env=self.notes.env(**more))

    def test_ranks_on_several_hosts_are_one_job(self):
        script = ("import os\n"
                  "for name in ('HOST', 'RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'MASTER_PORT', 'DDP_CARRIED',\n"
                  "             'WITH', 'DDP_JOB_ID'): print(f'{name}={os.environ.get(name)}')\n"
                  "print('CWD=' + os.getcwd())\n"
                  "print('SECRET=' + os.pread(int(os.environ['DDP_SECRET_FD']), 64, 0).hex())\n")
        result = finish(self.start("a:2,b", "-x", "WITH=it's a blank", *python(script), DDP_CARRIED="yes"))
        self.assertEqual(result.code, 0, result.err)
        found = [result.variables(rank) for rank in range(3)]
        self.assertEqual([f["HOST"] for f in found], ["a", "a", "b"])
        self.assertEqual([(f["RANK"], f["LOCAL_RANK"], f["LOCAL_WORLD_SIZE"]) for f in found],
                         [("0", "0", "2"), ("1", "1", "2"), ("2", "0", "1")])
        for name, value in (("WORLD_SIZE", "3"), ("DDP_CARRIED", "yes"), ("WITH", "it's a blank"), ("CWD", os.getcwd())):
            self.assertEqual([f[name] for f in found], [value] * 3)
        for name in ("SECRET", "MASTER_PORT", "DDP_JOB_ID"):
            self.assertEqual(len({f[name] for f in found}), 1, name)
        self.assertEqual(len(found[0]["SECRET"]), 64)
        self.assertNotIn(found[0]["SECRET"], self.notes.note("agents"), "never in a list of processes")

    def test_a_launcher_whose_path_a_shell_would_take_apart(self):
        place = os.path.join(self.notes.path, "it's $(here); `now`")
        os.mkdir(place)
        copy = shutil.copy(DDPRUN, place)
        job = jobs.Rank([copy, "-H", "a,b", "--launch-agent", self.agent, "--master-addr", "127.0.0.1", *sh("echo RANK=$RANK")],
                   self.notes.env(), start_new_session=True)
        code, out, err = job.finish()
        self.assertEqual((code, sorted(re.findall(r"RANK=(\d)", out))), (0, ["0", "1"]), out + err)

    def test_a_restart_on_several_hosts(self):
        script = "echo COUNT=$DDP_RESTART_COUNT JOB=$DDP_JOB_ID; [ $RANK != 2 ] || [ $DDP_RESTART_COUNT = 1 ] || exit 7"
        result = finish(self.start("a:2,b", "--max-restarts", "1", *sh(script)))
        self.assertEqual(result.code, 0, result.err)
        lines = [line for rank in range(3) for line in result.lines(rank) if line.startswith("COUNT=1")]
        self.assertEqual(len(lines), 3, result.out + result.err)
        self.assertEqual(len(set(lines)), 1, "one job on both hosts")

    def test_a_file_of_hosts(self):
        path = os.path.join(self.notes.path, "hosts")

        def launch(lines, *words):
            with open(path, "w") as file:
                file.write(lines)
            return finish(start("--hostfile", path, "--launch-agent", self.agent, "--master-addr", "127.0.0.1", *words,
                                env=self.notes.env()))
        script = sh("echo HOST=$HOST LOCAL=$LOCAL_RANK DEAD=$DDP_TIMEOUT_DEAD")
        result = launch("# of the job\n\n a slots=2  # the first\nb:1\nc\n a\n", "--dead", "9", *script)
        self.assertEqual(result.code, 0, result.err)
        self.assertEqual([result.lines(rank) for rank in range(5)],
                         [[f"HOST={host} LOCAL={local} DEAD=9"] for host, local in
                          (("a", 0), ("a", 1), ("a", 2), ("b", 0), ("c", 0))])
        result = launch("fd00::1\n[fd00::2]\nme@[fd00::3]:2\n[fd00::2]:1\nme@fd00::3 slots=1\n", *script)  # IPv6
        self.assertEqual([result.lines(rank)[0] for rank in range(6)],
                         [f"HOST={host} LOCAL={local} DEAD=" for host, local in
                          (("fd00::1", 0), ("fd00::2", 0), ("fd00::2", 1), ("me@fd00::3", 0), ("me@fd00::3", 1),
                           ("me@fd00::3", 2))])
        result = launch("a slots=2\nb slots=2\nc slots=2\n", "-n", "3", *script)
        self.assertEqual([result.lines(rank)[0][:6] for rank in range(3)], ["HOST=a", "HOST=a", "HOST=b"])
        for lines, expected in (("a slots=0\n", "slots takes an integer from 1 to 4096, not '0'"),
                                ("a slots=two\n", "not 'two'"), ("a max_slots=2\n", "'max_slots=2' is not understood"),
                                ("a:b\n", "the number of slots of host a"), ("-x slots=1\n", "'-x' is not a host's name"),
                                ("[-x]\n", "'-x' is not a host's name"), ("[fd00::1]:x\n", "not 'x'"),
                                ("# nobody\n", "names no host")):
            result = launch(lines, "true")
            self.assertEqual(result.code, 2, lines)
            self.assertIn(expected, result.err)

    def test_a_host_that_cannot_run_the_program_is_named(self):
        result = finish(self.start("a,b", "-x", "DDP_TEST_UNSET", "./no_such_program"))
        self.assertEqual(result.code, 127, result.err)
        self.assertIn(f"ddprun: on {os.uname().nodename}: cannot run './no_such_program'", result.err)
        self.assertIn("warning: -x DDP_TEST_UNSET: no such variable is set here\n", result.err)

    def test_a_rank_that_fails_elsewhere_gives_the_exit_code(self):
        result = finish(self.start("a:2,b:2", "--grace", "0.3", *sh("[ $RANK != 3 ] || { echo why >&2; exit 7; }; sleep 60")))
        self.assertEqual(result.code, 7, result.err)
        self.assertRegex(result.err, r"ddprun: rank 3 failed first: exit code 7(?s:.*)its last error line: why")
        self.assertRegex(result.err, r"ddprun: host b \(ranks 2 to 3\) failed first: exit code 7 \(\d+\.\d s after its "
                                     r"start\)\n *its last error line: ddprun: rank 3 failed first: exit code 7")
        self.assertLess(result.seconds, 15)

    def test_a_host_whose_ranks_accuse_another_hosts_is_not_the_culprit(self):
        result = finish(self.start("a,b", "--grace", "20", *sh("[ $RANK = 1 ] || { echo DDP-E202 rank 1 is gone >&2; exit 1; };"
                                                               " sleep 0.7; exit 5")))
        self.assertEqual(result.code, 5, result.err)
        self.assertRegex(result.err, r"ddprun: host b \(rank 1\) failed first: exit code 5")

    def test_a_host_that_is_not_reached_ends_the_job(self):
        result = finish(self.start("a:2,lost", "--grace", "0.3", *sh("sleep 60")))
        self.assertEqual(result.code, 255, result.err)
        self.assertRegex(result.err, r"host lost \(rank 2\) failed first: exit code 255(?s:.*)no route to lost")

    def test_ranks_elsewhere_that_want_to_be_resumed(self):
        process = self.start("a:2,b", "--max-restarts", "2",
                             *sh("trap 'kill $!; exit 75' USR1; echo up >> $NOTES/$RANK; sleep 60 & wait"))
        self.notes.wait_for("0", "1", "2")
        process.send_signal(signal.SIGUSR1)
        result = finish(process)
        self.assertEqual((result.code, self.notes.note("2")), (75, "up"), result.err)
        self.assertEqual(result.err.count("the job has stopped and can be resumed"), 1)
        self.assertNotIn("failed", result.err)

    def test_signals_reach_them_and_nothing_outlives_the_launcher(self):
        for signo, code in ((signal.SIGTERM, 143), (signal.SIGKILL, -9)):
            for name in ("0", "1"):
                if os.path.exists(os.path.join(self.notes.path, name)):
                    os.unlink(os.path.join(self.notes.path, name))
            process = self.start("a,b", *sh("echo $$ > $NOTES/$RANK; exec sleep 300"))
            self.notes.wait_for("0", "1")
            pids = [int(self.notes.note(name)) for name in ("0", "1")]
            process.send_signal(signo)
            result = finish(process)
            self.assertEqual(result.code, code, result.err)
            self.assertTrue(eventually(lambda: not any(map(alive, pids))))
            if signo == signal.SIGTERM:
                self.assertNotIn("failed first", result.err)


class Orphans(unittest.TestCase):
    def test_a_killed_launcher_takes_everything_with_it(self):
        # Each rank is a shell that waits for a child of its own, which the kernel's parent-death signal does not reach.
        with Directory() as notes:
            process = start("-n", "2", *sh("sleep 300 & echo $! > $NOTES/child$RANK; echo $$ > $NOTES/$RANK; wait"),
                            env=notes.env())
            notes.wait_for("0", "1", "child0", "child1")
            pids = [int(notes.note(name)) for name in ("0", "1", "child0", "child1")]
            self.assertTrue(all(map(alive, pids)))
            process.kill()
            self.assertTrue(eventually(lambda: not any(map(alive, pids)), 2 * SCALE), [pid for pid in pids if alive(pid)])
            process.wait(DEADLINE)
            process.stdout.close()
            process.stderr.close()

    def test_a_killed_launcher_takes_what_left_the_ranks_groups_too(self):
        # A session of its own, a group of its own (timeout), and one without a parent that is left.
        far = ("setsid sh -c 'echo $$ > $NOTES/session$RANK; exec sleep 300' &"
               " timeout 1000 sh -c 'echo $$ > $NOTES/timed$RANK; exec sleep 300' &"
               " (setsid sh -c 'echo $$ > $NOTES/adopted$RANK; exec sleep 300' &);"
               " echo $DDPRUN_JOBS > $NOTES/mark$RANK;")
        names = [name + rank for name in ("session", "timed", "adopted") for rank in "01"]
        with Directory() as notes, Directory() as others:
            bystander = start("-n", "1", *sh("echo $$ > $NOTES/0; exec sleep 300"), env=others.env())
            process = start("-n", "2", *sh(far + " wait"), env=notes.env())
            notes.wait_for(*names)
            others.wait_for("0")
            pids = [int(notes.note(name)) for name in names]
            notes.wait_for("mark0")
            self.assertTrue(all(map(alive, pids)))
            # What a daemon has started with the job's environment, as atd does, is not the job's.
            handed = subprocess.Popen(["sleep", "300"], env={**os.environ, "DDPRUN_JOBS": notes.note("mark0").strip()})
            self.addCleanup(handed.wait)
            self.addCleanup(handed.kill)
            process.kill()
            self.assertTrue(eventually(lambda: not any(map(alive, pids)), 2 * SCALE), [pid for pid in pids if alive(pid)])
            time.sleep(0.2)
            self.assertTrue(alive(int(others.note("0"))))  # another job's
            self.assertIsNone(handed.poll())
            for one in (process, bystander):
                one.kill()
                one.wait(DEADLINE)
                one.stdout.close()
                one.stderr.close()

    def test_ranks_do_not_need_the_guardian_to_die(self):
        with Directory() as notes:
            process = start("-n", "2", *sh("echo $$ > $NOTES/$RANK; exec sleep 300"), env=notes.env())
            notes.wait_for("0", "1")
            pids = [int(notes.note(name)) for name in ("0", "1")]
            guardians = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc")))
                         if self.stat(pid)[0] == "ddprun-guardian" and self.stat(pid)[1] == process.pid]
            self.assertEqual(len(guardians), 1)
            os.kill(guardians[0], signal.SIGKILL)
            time.sleep(0.2)
            self.assertTrue(all(map(alive, pids)))
            process.kill()
            process.wait(DEADLINE)
            self.assertTrue(eventually(lambda: not any(map(alive, pids))))
            process.stdout.close()
            process.stderr.close()

    def test_a_kill_of_the_launchers_whole_group_leaves_nothing_either(self):
        with Directory() as notes:
            process = start("-n", "2", *sh("sleep 300 & echo $! > $NOTES/child$RANK; wait"), env=notes.env(),
                            start_new_session=True)
            notes.wait_for("child0", "child1")
            pids = [int(notes.note(name)) for name in ("child0", "child1")]
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(DEADLINE)
            self.assertTrue(eventually(lambda: not any(map(alive, pids))))
            process.stdout.close()
            process.stderr.close()

    def test_what_ranks_leave_behind_is_ended_and_holds_up_nothing(self):
        # One stays in the rank's group, one makes a session of its own; both hold the rank's stdout.
        for how in ("exit 0", "exit 3"):
            with Directory() as notes:
                result = run("-n", "2", "--grace", "0.2",
                             *sh("sleep 300 & echo $! > $NOTES/near$RANK;"
                                 " setsid sh -c 'echo $$ > $NOTES/far$RANK; exec sleep 300' &"
                                 " while [ ! -s $NOTES/far$RANK ]; do sleep 0.01; done; echo done; " + how),
                             env=notes.env())
                self.assertEqual(result.code, int(how[-1]), result.err)
                self.assertLess(result.seconds, 15)
                pids = [int(notes.note(name + rank)) for name in ("near", "far") for rank in "01"]
                self.assertFalse(any(map(alive, pids)))
                self.assertEqual((result.lines(0), result.lines(1)), (["done"], ["done"]))

    def test_a_filter_behind_a_rank_may_finish_its_output(self):
        result = run("-n", "1", *sh("(sleep 0.3; echo late) & echo early"))
        self.assertEqual(result.lines(0), ["early", "late"])

    def test_a_process_that_cannot_be_read_about_ends_nothing(self):
        # As one that is gone since its file was opened: /proc/1/stat opens, and reading it fails.
        place = ["unshare", "-m" if os.geteuid() == 0 else "-rm", "sh", "-c",
                 'mount --bind /proc/$$/mem /proc/1/stat || exit 77; "$@"; exit $?', "sh"]
        for code in (0, 3):
            done = subprocess.run([*place, DDPRUN, "-n", "2", *sh(f"exit {code}")], env=environment(), capture_output=True,
                                  text=True, timeout=DEADLINE, check=False)
            if done.returncode in (1, 77) and ("unshare" in done.stderr or "mount" in done.stderr):
                self.skipTest(f"no mount namespaces here: {done.stderr.strip()}")
            self.assertEqual(done.returncode, code, done.stderr)

    def test_no_process_of_ddprun_itself_stays(self):
        for script in ("true", "exit 3"):
            process = start("-n", "2", *sh(script), start_new_session=True)
            finish(process)
            left = [pid for pid in filter(str.isdigit, os.listdir("/proc")) if self.stat(pid)[2] == process.pid]
            self.assertEqual(left, [])

    @staticmethod
    def stat(pid):
        """Name, parent and session of a process."""
        try:
            with open(f"/proc/{pid}/stat") as file:
                name, _, rest = file.read().partition("(")[2].rpartition(")")
        except OSError:
            return "", -1, -1
        return name, int(rest.split()[1]), int(rest.split()[3])


class CommandLine(unittest.TestCase):
    def test_options_that_make_no_sense(self):
        for words, expected in (
                (["-n"], "needs a value"),
                (["-n", "0", "true"], "-n takes an integer from 1"),
                (["-n", "two", "true"], "not 'two'"),
                (["-n", "2x", "true"], "not '2x'"),
                (["--prefix", "some", "true"], "rank, others or none"),
                (["--grace", "-1", "true"], "--grace takes seconds"),
                (["--grace", "nan", "true"], "--grace takes seconds"),
                (["--dead", "0", "true"], "--dead takes seconds from 0.01"),
                (["--join", "1e3", "true"], "--join takes seconds"),
                (["--collective", "nan", "true"], "--collective takes seconds"),
                (["--master-port", "65536", "true"], "--master-port takes"),
                (["--frobnicate", "true"], "unknown option --frobnicate"),
                (["--verbose=2", "true"], "takes no value"),
                (["--nnodes", "2", "-n", "2", "true"], "--master-addr and --master-port"),
                (["--nnodes", "2", "--master-addr", "a", "--master-port", "1", "true"], "say -n N"),
                (["--nnodes", "2", "-n", "2", "--standalone", "true"], "contradict"),
                (["--node-rank", "1", "true"], "not below --nnodes 1"),
                (["--nnodes", "1:2", "-n", "2", "true"], "not the range"),
                (["--bind", "socket", "true"], "--bind takes cores or none"),
                (["--tee", "3", "true"], "--log-dir"),
                (["-H", "a:2", "-n", "3", "true"], "the hosts have 2 slots"),
                (["-H", "a:0", "true"], "the number of slots of host a"),
                (["-H", "-oProxyCommand=x", "true"], "is not a host's name"),
                (["-x", "=v", "true"], "-x takes NAME or NAME=VALUE, not '=v'"),
                (["-H", "a", "--nnodes", "2", "true"], "contradict"),
                (["--hostfile", "/no/such", "true"], "cannot be read"),
                (["-n", "2"], "no program"),
                (["-n", "2", "--"], "no program"),
                ([], "no program")):
            result = run(*words)
            self.assertEqual((result.code, result.out), (2, ""), words)
            self.assertIn(expected, result.err)
            self.assertIn("--help", result.err)

    def test_help_has_groups_and_fits_a_line(self):
        result = run("--help")
        self.assertEqual(result.code, 0)
        self.assertLess(len(result.out.splitlines()), 64)
        self.assertLessEqual(max(map(len, result.out.splitlines())), 80)
        for word in ("Ranks:", "-n,--np N", "--prefix", "--dry-run", "--nnodes M", "-H,--host LIST", "DDP_LISTEN_FD"):
            self.assertIn(word, result.out)

    def test_explain(self):
        result = run("--explain", env=environment(RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="4000",
                                                  PMI_RANK="3", PMI_SIZE="9"))
        self.assertEqual((result.code, result.err), (0, ""))
        for words in (r"(?m)^  RANK: +rank 1 of 2 .*<- used$", r"(?m)^  PMI: +rank 3 of 9", "meeting at 127.0.0.1:4000",
                      r"conflict: RANK says rank 1 of 2, PMI rank 3 of 9"):
            self.assertRegex(result.out, words)

    def test_explain_names_what_stands_for_options(self):
        kubeflow = environment(PET_NNODES="2", PET_NPROC_PER_NODE="4", PET_NODE_RANK="1", PET_MASTER_ADDR="trainer-0",
                               PET_MASTER_PORT="29500", PET_TEE="")
        result = run("--explain", env=kubeflow)
        self.assertIn("ddprun takes from the environment: --nproc-per-node='4' (PET_NPROC_PER_NODE) --nnodes='2' (PET_NNODES) "
                      "--node-rank='1' (PET_NODE_RANK) --master-addr='trainer-0' (PET_MASTER_ADDR) "
                      "--master-port='29500' (PET_MASTER_PORT)\n", result.out)
        self.assertNotIn("conflict", result.out)
        result = run("--explain", "--nnodes=3", "--nproc_per_node", "2", "--node-rank", "1", "-t", "3", "--log-dir", "x",
                     env=kubeflow | {"PET_TEE": "1"})
        self.assertIn("takes from the environment: --master-addr='trainer-0' (PET_MASTER_ADDR) --master-port='29500'", result.out)
        self.assertEqual(re.findall("conflict: the command line says (.*); the command line is used", result.out),
                         ["'--nproc-per-node=2', PET_NPROC_PER_NODE='4'", "'-t3', PET_TEE='1'", "'--nnodes=3', PET_NNODES='2'"])
        for words in (("-n", "2"), ("-n2",), ("-np", "2"), ("--np=2",), ("-H", "a:2,b:2"), ("--hostfile", "hosts")):
            result = run("--explain", *words, env=environment(PET_NPROC_PER_NODE="4"))
            self.assertIn("PET_NPROC_PER_NODE='4'; the command line is used", result.out)
            self.assertNotIn("takes from the environment", result.out)

    def test_explain_names_variables_that_nobody_reads(self):
        result = run("--explain", env=environment(DDP_SECRET_FIL="x", DDP_PORTS="20000-20063"))
        self.assertEqual(re.findall("note: (.*)", result.out),
                         ["'DDP_SECRET_FIL' is set, but the library has no variable of that name"])
        names = set()
        for page in ("getting_started", "launching", "faults", "security"):
            # (DDP_TEST_ is what tests read, not the library.)
            names |= set(re.findall(r"\bDDP_(?!TEST_)[A-Z_]+[A-Z]\b", (ROOT / f"docs/{page}.md").read_text()))
        self.assertGreater(len(names), 20)
        known = run("--explain", env=environment(**dict.fromkeys(names, "1")))
        self.assertIn("DDP_RANK", known.out, known.err)
        self.assertNotIn("no variable of that name", known.out)

    def test_version(self):
        self.assertRegex(run("--version").out, r"\Addprun \d+\.\d+\.\d+\n\Z")

    def test_the_programs_own_options_are_its_own(self):
        for dashes in ([], ["--"]):
            result = run("-n", "1", *dashes, "echo", "-n", "--prefix", "--", "x")
            self.assertEqual(result.lines(0), ["--prefix -- x"])

    def test_a_dry_run_prints_what_a_shell_can_read_and_starts_nothing(self):
        with Directory() as notes:
            result = run("-n", "2", "--master-port", "4711", "--dry-run", "touch", notes.path + "/it's here",
                         env=notes.env())
            self.assertEqual((result.code, os.listdir(notes.path)), (0, []))
            lines = result.out.splitlines()
            self.assertEqual(len(lines), 2)
            for rank, line in enumerate(lines):
                self.assertIn(f"RANK={rank} WORLD_SIZE=2 ", line)
                self.assertIn("MASTER_ADDR=127.0.0.1 MASTER_PORT=4711 ", line)
            subprocess.run(["sh", "-c", lines[1]], check=True, timeout=DEADLINE)
            self.assertEqual(os.listdir(notes.path), ["it's here"])

    def test_a_dry_run_prints_the_variables_of_options(self):
        result = run("-n", "2", "--dry-run", "--dead", "9", "-x", "WORD=it's here", "-x", "OMP_NUM_THREADS=5",
                     "-x", "DDP_TEST_UNSET", "env")
        self.assertEqual(result.err, "ddprun: warning: -x DDP_TEST_UNSET: no such variable is set here\n")
        self.assertNotIn("DDP_TEST_UNSET", result.out)
        for line in result.out.splitlines():
            shell = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True, timeout=DEADLINE,
                                   env={"PATH": os.environ["PATH"]})
            for words in ("DDP_TIMEOUT_DEAD=9", "WORD=it's here", "OMP_NUM_THREADS=5"):
                self.assertIn(words, shell.stdout.splitlines())
        self.assertRegex(run("-H", "198.51.100.1,198.51.100.2:2", "--dry-run", "true").out, r"\Arank 0: ssh .*\nranks 1 to 2: ssh .*\n\Z")

    def test_slots_of_the_command_line_are_not_replaced_by_the_environment(self):
        for count in ("4", "auto"):
            result = run("-H", "198.51.100.1,198.51.100.2:2", "--dry-run", "true", env=environment(PET_NPROC_PER_NODE=count))
            self.assertRegex(result.out, r"\Arank 0: ssh .*\nranks 1 to 2: ssh .*\n\Z", result.err)
        for option in (["--nproc-per-node", "3"], ["--nproc_per_node=3"]):
            result = run("-H", "198.51.100.1,198.51.100.2:2", *option, "--dry-run", "true", env=environment(PET_NPROC_PER_NODE="4"))
            self.assertRegex(result.out, r"\Aranks 0 to 2: ssh .*\nranks 3 to 5: ssh .*\n\Z", result.err)

    def test_this_machine_by_any_of_its_names_and_addresses_needs_no_ssh(self):
        own = ["localhost", "127.0.0.1", "127.0.0.2", "::1", socket.gethostname()]
        own += subprocess.run("hostname -I", shell=True, capture_output=True, text=True, check=False).stdout.split()
        for name in own:
            with self.subTest(name=name):
                result = run("-H", f"[{name}]:2" if ":" in name else name + ":2", "--dry-run", "true")
                self.assertRegex(result.out, r"\Aranks 0 to 1: /\S+ --agent\n\Z", result.err)
        for name in ("198.51.100.1", "[2001:db8::1]"):  # for documentation only
            self.assertRegex(run("-H", name, "--dry-run", "true").out, r"\Arank 0: ssh ")

    def test_one_of_several_ddpruns_says_that_each_starts_a_job(self):
        warning = "warning: another launcher has started this as one of several"
        srun = dict(SLURM_JOB_ID="7", SLURM_STEP_ID="0", SLURM_PROCID="0", SLURM_STEP_NUM_TASKS="2", SLURM_LOCALID="0")
        result = run("-n", "2", "true", env=environment(**srun))
        self.assertEqual((result.code, result.err.count(warning)), (0, 1), result.err)
        self.assertIn("SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2", result.err)
        batch = dict(SLURM_JOB_ID="7", SLURM_PROCID="0", SLURM_NTASKS="8")  # a script without srun runs once
        for words, variables in (([], {**srun, "SLURM_PROCID": "1"}), ([], {**srun, "SLURM_STEP_NUM_TASKS": "1"}), ([], batch),
                                 ([], {}), (["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", "4711"], srun)):
            result = run("-n", "2", *words, "true", env=environment(**variables))
            self.assertEqual((result.code, result.err), (0, ""), variables)

    def test_verbose_says_what_is_started(self):
        result = run("-v", "-n", "2", "true")
        self.assertRegex(result.err, r"ranks 0 to 1 of 2, meeting at 127\.0\.0\.1:\d+")
        self.assertIn("OMP_NUM_THREADS=1", result.err)
        self.assertRegex(result.err, r"rank 1 is pid \d+")


if __name__ == "__main__":
    if not os.access(DDPRUN, os.X_OK):
        sys.exit("DDPRUN must name the ddprun binary")
    DDPRUN = os.path.abspath(DDPRUN)
    with tempfile.TemporaryDirectory(prefix="ddprun-test-") as left:  # a ddprun that is killed leaves its flights
        os.environ["TMPDIR"] = left
        unittest.main(verbosity=1)
