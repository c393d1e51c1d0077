"""A real Slurm of two nodes on this one machine, without munge, cgroups or systemd: `srun program` with nothing around it,
a batch script with and without srun, ddprun and mpirun inside an allocation, and the scripts of docs/launching.md and
docs/checkpoints.md.

Skipped where Debian's slurmctld, slurmd and slurm-client are not installed (scripts/setup.sh slurm), and where this is not
root or may not make a network namespace. Without authentication whoever reaches the daemons is root, so they run in a
namespace where nobody else can.
"""

import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest

from checkpoints_test import FASHION_MNIST, TO_BE_RESUMED, write_data
from jobs import DEADLINE, environment, program

FAULT_PROGRAM = os.path.abspath(program("FAULT_PROGRAM", "DDP_PROGRAMS", "fault_program"))
DDPRUN = os.path.abspath(os.environ.get("DDPRUN", ""))
MPIEXEC = os.environ.get("MPIEXEC", "")
TOOLS = ("slurmctld", "slurmd", "srun", "sbatch", "sinfo", "scancel", "scontrol")
TRAINING = ["steps=4", "tensors=3", "elements=1000"]
SKIPPED = 77
DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"

# NodeAddr names one machine for both nodes, and their names are addresses: rank 0 is found by the first one's name. A job that is
# requeued waits until its credentials have expired: usually for two minutes.
CONFIGURATION = """
ClusterName=ddp
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_min_interval=0,sched_interval=1,batch_sched_delay=0
KillWait=2
ReturnToService=2
SlurmctldPort=6817
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
NodeName=127.0.0.[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[6821-6822] CPUs=8 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE
"""


class Cluster:
    def __init__(self):
        self.owner = tempfile.TemporaryDirectory(prefix="ddp-slurm-")
        self.directory = self.owner.name
        configuration = os.path.join(self.directory, "slurm.conf")
        os.mkdir(os.path.join(self.directory, "state"))
        with open(configuration, "w") as file:
            file.write(CONFIGURATION.format(host=socket.gethostname().split(".")[0], directory=self.directory))
        self.env = environment(SLURM_CONF=configuration)
        self.daemons = [self.daemon("slurmctld")]
        self.wait_until(lambda: "is UP" in self.run("scontrol", "ping").stdout)  # nodes that come first wait long
        self.daemons += [self.daemon("slurmd", "-N", f"127.0.0.{i}") for i in (1, 2)]
        self.wait_until(lambda: self.run("sinfo", "-h", "-o", "%D %t").stdout.strip() == "2 idle")

    def wait_until(self, condition):
        end = time.monotonic() + DEADLINE
        while not condition():
            if time.monotonic() > end or any(daemon.poll() is not None for daemon in self.daemons):
                said = self.logs()
                self.stop()
                raise AssertionError("Slurm does not start:\n" + said)
            time.sleep(0.05)

    def daemon(self, *words):
        return subprocess.Popen([*words, "-D"], env=self.env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                stderr=subprocess.DEVNULL, start_new_session=True)

    def logs(self):
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}"
                         for path in sorted(pathlib.Path(self.directory).glob("*.log")))

    def run(self, *words, **variables):
        return subprocess.run(words, env={**self.env, **variables}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              timeout=DEADLINE, check=False)

    def stop(self):
        self.run("scancel", "--user=root")
        for daemon in self.daemons:
            daemon.send_signal(signal.SIGTERM)
        for daemon in self.daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self.owner.cleanup()


class Slurm(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.cluster = Cluster()
        cls.addClassCleanup(cls.cluster.stop)

    def trained(self, text, ranks):
        digests = re.findall(r"^done rank=(\d+) digest=(\w+) steps=4", text, re.M)
        self.assertEqual(sorted(int(rank) for rank, _ in digests), list(range(ranks)), text)
        self.assertEqual(len({digest for _, digest in digests}), 1, text)

    def test_srun_alone_on_one_node_and_on_two(self):
        for options, ranks in ((["-N1", "-n3"], 3), (["-N2", "-n3", "--ntasks-per-node=2"], 3), (["-N2", "-n4"], 4)):
            done = self.cluster.run("srun", *options, FAULT_PROGRAM, *TRAINING)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.trained(done.stdout, ranks)

    def test_the_place_on_the_node_and_the_meeting_point(self):
        done = self.cluster.run("srun", "-N2", "-n3", "--label", DDPRUN, "--explain")
        self.assertEqual(done.returncode, 0, done.stderr)
        for rank, place in enumerate(("0 of 2", "1 of 2", "0 of 1")):
            self.assertRegex(done.stdout, f"(?m)^{rank}: rank {rank} of 3; local rank {place}$")
        self.assertEqual(len(set(re.findall(r"meeting at 127\.0\.0\.1:(\d+) \(the first host of "
                                            r"SLURM_STEP_NODELIST=127\.0\.0\.\[1-2\]", done.stdout))), 1, done.stdout)

    def test_a_batch_script(self):
        train = f"{FAULT_PROGRAM} {' '.join(TRAINING)}"
        parts = {"alone": train,  # without srun: the classic hang
                 "srun": f"srun {train}",
                 "two steps": f"(srun -n2 --overlap {train} & srun -n2 --overlap {train} & wait -n && wait -n)",
                 "ddprun": f"{DDPRUN} --prefix none -n 3 {train}"}
        if MPIEXEC:
            parts["mpirun"] = f"OMPI_MCA_oob_tcp_if_include=lo {MPIEXEC} -n 3 --oversubscribe {train}"
        path = os.path.join(self.cluster.directory, "script")
        with open(path, "w") as file:
            file.write("#!/bin/bash\n" + "".join(f"{command} 2>&1\necho \"== {name} $?\"\n" for name, command in parts.items()))
        done = self.cluster.run("sbatch", "--wait", "-N1", "-n4", "--output", path + ".out", path)
        said = pathlib.Path(path + ".out").read_text()
        self.assertEqual(done.returncode, 0, done.stderr + said)
        pieces = re.split(r"^== (.*) (\d+)\n", said, flags=re.M)
        said = {name: (code, text) for text, name, code in zip(pieces[0::3], pieces[1::3], pieces[2::3])}
        self.assertEqual({name: code for name, (code, _) in said.items()},
                         {name: "101" if name == "alone" else "0" for name in parts}, said)
        self.assertRegex(said["alone"][1], r"DDP-E101 .*SLURM_NTASKS=4 .*Put srun in front of the program")
        self.trained(said["srun"][1], 4)
        self.assertEqual(sorted(re.findall(r"^done rank=(\d)", said["two steps"][1], re.M)), ["0", "0", "1", "1"], said)
        for name in ("ddprun", "mpirun") if MPIEXEC else ("ddprun",):
            self.trained(said[name][1], 3)

    def write(self, name, text):
        """A program, under this name in a directory of its own."""
        path = pathlib.Path(tempfile.mkdtemp(dir=self.cluster.directory), name)
        path.write_text("#!/bin/bash\n" + text.removeprefix("#!/bin/bash\n"))
        path.chmod(0o755)
        return path

    def submit(self, page, program_of_page, text, *options):
        """The number of the job that is the only script of this page with srun, and its directory. The program that the script
        names is `text`."""
        scripts = [block for block in re.findall(r"(?ms)^```bash\n(.*?)^```$", (DOCS / page).read_text()) if "\nsrun " in block]
        self.assertEqual(len(scripts), 1, scripts)
        directory = self.write(program_of_page, text).parent
        script = self.write("script", scripts[0])
        done = self.cluster.run("sbatch", "--parsable", f"--chdir={directory}", "--output=out", *options, script,
                                HOME=str(directory))
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout.strip(), directory

    def wait_for(self, condition, job, directory):
        end = time.monotonic() + DEADLINE
        while not condition():
            if time.monotonic() > end:
                self.fail(f"{self.shown(job)}\n{(directory / 'out').read_text()}\n{self.cluster.logs()}")
            time.sleep(0.02)

    def shown(self, job):
        return dict(word.split("=", 1) for word in self.cluster.run("scontrol", "show", "job", job).stdout.split() if "=" in word)

    def ended(self, job, directory):
        """State and exit code of a job."""
        states = ("COMPLETED", "FAILED", "NODE_FAIL", "CANCELLED", "TIMEOUT")
        self.wait_for(lambda: self.shown(job).get("JobState") in states, job, directory)
        shown = self.shown(job)
        return shown["JobState"], shown["ExitCode"]

    def test_the_scripts_of_the_pages_end_with_the_code_of_srun(self):
        for page, name, options in (("launching.md", "train", ("--nodes=1", "--ntasks-per-node=2")),
                                    ("checkpoints.md", "fashion_mnist", ("-N1", "-n2"))):
            for code in (0, 1):
                with self.subTest(page=page, code=code):
                    secret = '[ -z "$DDP_SECRET_FILE" ] || stat -c "%a %s" "$DDP_SECRET_FILE"\n'
                    job, directory = self.submit(page, name, f"{secret}exit {code}\n", *options)
                    said = (("COMPLETED", "0:0"), ("FAILED", "1:0"))[code]
                    self.assertEqual(self.ended(job, directory), said, (directory / "out").read_text())
                    if page == "launching.md":
                        self.assertEqual((directory / "out").read_text().splitlines()[:2], ["600 32"] * 2)
                    self.assertEqual(sorted(path.name for path in directory.iterdir()), sorted([name, "out"]))

    def test_a_job_that_is_told_to_stop_is_requeued_and_goes_on(self):
        data = tempfile.mkdtemp(dir=self.cluster.directory)
        write_data(data)
        noting = "trap : USR1\nnote() { echo \"start $SLURM_RESTART_COUNT rank $SLURM_PROCID ended with $1\" >> codes; }\n"
        train = f"{os.path.abspath(FASHION_MNIST)} --data {data} --hidden 64 --batch 60 --epochs 250 --transport tcp \"$@\"\n"
        job, directory = self.submit("checkpoints.md", "fashion_mnist", f"{noting}{train}code=$?\nnote $code\nexit $code\n", "-N1", "-n2")
        self.wait_for((directory / "kept/latest").exists, job, directory)
        self.assertEqual(self.cluster.run("scancel", "--signal=USR1", job).returncode, 0)
        self.wait_for(lambda: self.shown(job).get("Restarts") == "1", job, directory)
        said = (directory / "out").read_text()
        stopped = re.findall(r"(?m)^stopped after step (\d+)$", said)
        self.assertEqual(len(stopped), 1, said)
        codes = (directory / "codes").read_text().splitlines()
        self.assertEqual(sorted(codes), [f"start  rank {rank} ended with {TO_BE_RESUMED}" for rank in range(2)], said)
        state = self.ended(job, directory)
        said = (directory / "out").read_text()
        self.assertEqual(state, ("COMPLETED", "0:0"), said)
        self.assertIn(f"resumed after step {stopped[0]}\n", said)
        self.assertRegex(said, r"(?m)^result: .* replicas=identical ")


def obstacle():
    """Why this test cannot run here, or nothing."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"there is no Slurm here ({', '.join(missing)} missing: scripts/setup.sh slurm)"
    if os.geteuid() != 0:
        return "slurmd needs root"
    return None


if __name__ == "__main__":
    why = obstacle()
    if why is None and "DDP_SLURM_NAMESPACE" not in os.environ:
        # Processes have a namespace of their own too: with it end the daemons of steps, which Slurm leaves behind.
        unshare = ["unshare", "--net", "--pid", "--fork", "--mount-proc", "--kill-child"]
        if subprocess.run([*unshare, "true"], capture_output=True, timeout=30, check=False).returncode == 0:
            os.environ["DDP_SLURM_NAMESPACE"] = "1"
            os.execvp("unshare", [*unshare, sys.executable, *sys.argv])
        why = "no namespaces here"
    if why:
        print("slurm: skipped:", why)
        sys.exit(SKIPPED)
    for words in (["link", "set", "lo", "up"], ["addr", "add", "192.0.2.1/32", "dev", "lo"]):  # Slurm asks for AI_ADDRCONFIG
        subprocess.run(["ip", *words], timeout=30, check=True)
    unittest.main()
