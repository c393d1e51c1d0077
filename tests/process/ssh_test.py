"""ddprun -H over a real ssh: two hosts, which are network namespaces on one cable, each with an sshd of its own.

Skipped where sshd is not installed (scripts/setup.sh ssh), and where this is not root or may not make namespaces.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

from jobs import DEADLINE, environment, program

FAULT_PROGRAM = os.path.abspath(program("FAULT_PROGRAM", "DDP_PROGRAMS", "fault_program"))
DDPRUN = os.path.abspath(os.environ.get("DDPRUN", ""))
HERE, THERE = "10.99.0.1", "10.99.0.2"
SSHD = shutil.which("sshd", path=os.environ.get("PATH", "") + ":/usr/sbin")
SKIPPED = 77


def run(*words, **more):
    return subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DEADLINE, check=False, **more)


def running(marker):
    """Processes of this test's namespace whose command has `marker` in it."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if marker.encode() in file.read() and int(pid) != os.getpid():
                    found.append(int(pid))
        except OSError:
            pass
    return found


class Ssh(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        owner = tempfile.TemporaryDirectory(prefix="ddp-ssh-")
        cls.addClassCleanup(owner.cleanup)
        directory = owner.name
        for key in ("host", "user"):
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{directory}/{key}").check_returncode()
        with open(f"{directory}/sshd_config", "w") as file:
            file.write(f"HostKey {directory}/host\nAuthorizedKeysFile {directory}/user.pub\nStrictModes no\nPidFile none\n"
                       "UsePAM no\nPermitRootLogin yes\nPasswordAuthentication no\n")
        os.makedirs("/run/sshd", exist_ok=True)
        sshd = [SSHD, "-f", f"{directory}/sshd_config"]
        run(*sshd, "-o", f"ListenAddress={HERE}").check_returncode()
        run("ip", "netns", "exec", "there", *sshd, "-o", f"ListenAddress={THERE}").check_returncode()
        with open(f"{directory}/ssh_config", "w") as file:
            file.write(f"IdentityFile {directory}/user\nStrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nLogLevel ERROR\nConnectTimeout 5\n")
        cls.agent = f"ssh -F {directory}/ssh_config -o BatchMode=yes"
        with open(f"{directory}/ssh", "w") as file:  # what ddprun starts by itself, with its own options, as if that were the user's configuration
            file.write(f"#!/bin/sh\nexec {shutil.which('ssh')} -F {directory}/ssh_config \"$@\"\n")
        os.chmod(f"{directory}/ssh", 0o755)
        cls.path = f"{directory}:{os.environ['PATH']}"
        for host in (HERE, THERE):
            done = run(*cls.agent.split(), host, "true")
            if done.returncode != 0:
                raise unittest.SkipTest(f"sshd lets nobody in: {done.stderr}")

    def start(self, hosts, *words, agent=(), **variables):
        return subprocess.Popen([DDPRUN, "-H", hosts, *agent, *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                text=True, env=environment(PATH=self.path, **variables))

    def finish(self, process):
        try:
            out, err = process.communicate(timeout=DEADLINE)
        except subprocess.TimeoutExpired:
            process.kill()
            self.fail("ddprun hangs")
        return process.returncode, out, err

    def test_two_hosts_train(self):
        process = self.start(f"{HERE}:1,{THERE}:2", "--prefix", "none", "-x", "WORDS=it's $HOME", "--", "sh", "-c",
                             'echo "$RANK at" $(ip -4 -o addr | grep -o "inet 10[0-9.]*") "$WORDS"; exec "$@"', "sh",
                             FAULT_PROGRAM, "steps=4", "tensors=3", "elements=1000",
                             agent=("--launch-agent", self.agent))
        code, out, err = self.finish(process)
        self.assertEqual(code, 0, out + err)
        # The job has a secret, so nobody has to say insecure. That these hosts are one machine is all that there is to say.
        self.assertRegex(err, r"^ddp: ranks 0 to 2 are on one machine in 2 network namespaces \(rank 0; ranks 1 and 2\), .*\n$")
        self.assertEqual(sorted(re.findall(r"(?m)^(\d) at inet (\S+) it's \$HOME$", out)),
                         [("0", HERE), ("1", THERE), ("2", THERE)])
        self.assertEqual(len(re.findall(r"(?m)^done rank=", out)), 3)
        self.assertEqual(len(set(re.findall(r"(?m)^done rank=.*digest=(\w+)", out))), 1)

    def test_the_culprit_is_named_wherever_it_ran(self):
        # "exit code 9" of a shell, and SIGKILL: with its process there, not with that of the ssh client here.
        for fault, rank_says, host_says in (("exit 9", "exit code 9", "exit code 9"),
                                            ("kill -KILL $$", "killed by SIGKILL", "exit code 137")):
            with self.subTest(fault=fault):
                code, _, err = self.finish(self.start(
                    f"{HERE},{THERE}:2", "--grace", "0.3", "--", "sh", "-c",
                    f"[ $RANK != 2 ] || {{ echo my reason $$ >&2; {fault}; }}; exec sleep 4711"))
                self.assertEqual(f"exit code {code}", host_says, err)
                pid = re.search(r"\[2\] my reason (\d+)\n", err)[1]
                # The host's end has no process of ours: seconds are all that is between the brackets.
                self.assertRegex(err, rf"(?m)^ddprun: host {THERE} \(ranks 1 to 2\) failed first: {host_says} "
                                      r"\(\d+\.\d s after its start\)\n"
                                      rf" *its last error line: ddprun: rank 2 failed first: {rank_says} \(pid {pid} on \S+, ")
                self.assertRegex(err, rf"its last error line: my reason {pid}")
                self.assertEqual(running("sleep\0004711"), [])

    def test_nothing_outlives_the_launcher(self):
        for signo, expected in ((signal.SIGTERM, 143), (signal.SIGKILL, -9)):
            process = self.start(f"{HERE},{THERE}", "--", "sleep", "4712")
            end = time.monotonic() + DEADLINE
            while len(running("sleep\0004712\0")) < 2 and time.monotonic() < end:
                time.sleep(0.02)
            process.send_signal(signo)
            code, _, err = self.finish(process)
            self.assertEqual(code, expected, err)
            while running("sleep\0004712\0") and time.monotonic() < end:
                time.sleep(0.02)
            self.assertEqual(running("sleep\0004712\0"), [], "on either host")


def make_hosts():
    os.makedirs("/run/netns", exist_ok=True)
    done = run("mount", "-t", "tmpfs", "none", "/run/netns")  # nothing of ours is left there
    if done.returncode != 0:
        return f"mount: {done.stderr.strip()}"
    for words in (["link", "set", "lo", "up"], ["netns", "add", "there"],
                  ["link", "add", "here0", "type", "veth", "peer", "name", "there0", "netns", "there"],
                  ["addr", "add", HERE + "/24", "dev", "here0"], ["link", "set", "here0", "up"],
                  ["-n", "there", "addr", "add", THERE + "/24", "dev", "there0"],
                  ["-n", "there", "link", "set", "there0", "up"], ["-n", "there", "link", "set", "lo", "up"]):
        done = run("ip", *words)
        if done.returncode != 0:
            return f"ip {' '.join(words)}: {done.stderr.strip()}"
    return None


def obstacle():
    """Why this test cannot run here, or nothing."""
    if not SSHD or not shutil.which("ssh") or not shutil.which("ssh-keygen"):
        return "there is no sshd here (scripts/setup.sh ssh)"
    if os.geteuid() != 0:
        return "namespaces need root"
    if "DDP_SSH_NAMESPACE" in os.environ:
        return make_hosts()
    unshare = ["unshare", "--net", "--pid", "--mount", "--fork", "--mount-proc", "--kill-child"]
    if run(*unshare, "true").returncode == 0:
        os.environ["DDP_SSH_NAMESPACE"] = "1"
        os.execvp("unshare", [*unshare, sys.executable, *sys.argv])
    return "no namespaces here"


if __name__ == "__main__":
    why = obstacle()
    if why:
        print("ssh: skipped:", why)
        sys.exit(SKIPPED)
    unittest.main()
