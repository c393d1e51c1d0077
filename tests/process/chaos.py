"""Faults at drawn moments of real jobs over TCP, and what every rank then says: a driver for many injections.

    python3 tests/process/chaos.py --injections 200 --ranks 2,3,4 --json chaos.json
    python3 tests/process/chaos.py --rows 31 --ranks 3 --seed 7 --only 12      # one injection again

Rows are those of the fault matrix (chaos_start.py: those of the start; chaos_launch.py: signals to ddprun; chaos_values.py: flipped bits
and NaN; chaos_rows.py: all others; docs/faults.md has the table). Ranks are killed, stopped and so on by themselves, at a named phase
(fault_program.cpp); connections are harmed by a proxy between the ranks (chaos_proxy.py). A sixth of the jobs over TCP proves a secret
on all connections, and another sixth uses TLS on all. Everything that is drawn depends on seed, row, number of ranks and number of the
injection only. After each injection:

  - every rank that still runs has thrown, all the same text, which names the right rank or connection; or, where the fault
    is one that must not end a job, the job has ended with the digest of an undisturbed one
  - ranks that have completed the same number of steps hold the same bits, and those of an undisturbed job, unless the
    trainer calls them torn
  - the time from the injection to the error of the last rank is below the row's bound
  - each of these ranks has written a flight record, whose verdict has the same code and culprit
  - no process and no temporary file is left
  - where ranks saved checkpoints, the job that is started again resumes from the last whole one, and ends as if nothing had been

FAULT_PROGRAM (or DDP_PROGRAMS, its directory) names the binary. Rows 16 and 17 need DDPRUN, and those over MPI fault_program_mpi,
which is built where MPI is; without it they are left out.
"""

import argparse
import concurrent.futures
import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import zlib

import chaos_rows
from chaos_launch import ROWS_OF_LAUNCHES
from chaos_proxy import Proxy
from chaos_rows import (ENDLESS, FAULT_PROGRAM, FAULT_PROGRAM_MPI, INSIDE, MESSAGES, OPEN_MPI_5, REFERENCES, SAVING, SHAPES, WAYS,
                        Late, Missed, Plan, Wrong, children_of, running, without)
from chaos_start import ROWS_OF_THE_START
from chaos_strangers import MOST_SLOWER, most_beside_silent_ones, secret_in, silence, strangers
from chaos_values import ROWS_OF_VALUES
from jobs import DEADLINE, SCALE, Job, check_flight_records, check_process_named, exit_code_of

# In order of number, those over MPI last.
ROWS = sorted([*ROWS_OF_THE_START, *chaos_rows.ROWS, *ROWS_OF_LAUNCHES, *ROWS_OF_VALUES],
              key=lambda row: (row.number[-1] in "mrtu", int(row.number.rstrip("dgmrtu"))))
MPIEXEC = os.environ.get("MPIEXEC") or "mpiexec"
OPEN_MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1",
            "OMPI_MCA_hwloc_base_binding_policy": "none", "OMPI_MCA_btl_vader_single_copy_mechanism": "none"}


def owner_finder(job):
    """Whose port it is: asked by the proxy while the ranks connect."""
    def find(port):
        with open("/proc/net/tcp") as table:
            for line in table.readlines()[1:]:
                row = line.split()
                if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port:
                    inode = f"socket:[{row[9]}]"
                    break
            else:
                raise OSError(f"nobody listens at {port}")
        for rank, process in job.ranks.items():
            try:
                for fd in os.listdir(f"/proc/{process.pid}/fd"):
                    if os.readlink(f"/proc/{process.pid}/fd/{fd}") == inode:
                        return rank
            except OSError:
                continue
        raise OSError(f"none of the ranks listens at {port}")
    return find


def errors_of(job):
    """By rank, what it threw, and what else that line says."""
    found = {}
    for r in job.ranks.values():
        for line in r.said("error"):
            found[int(line["rank"])] = line
    return found


def check_values(job, plan):
    """Equal numbers of steps are equal bits, and the right ones."""
    by_steps = {}
    for r in job.ranks.values():
        for line in r.said("values"):
            if line["torn"] == "0" and int(line["rank"]) not in plan.apart:
                by_steps.setdefault(int(line["steps"]), set()).add(line["digest"])
    right = REFERENCES.of(plan.size, plan.words + plan.reference)
    for steps, digests in by_steps.items():
        differs = plan.alike is not None and steps > plan.alike
        if len(digests) != 1 or (steps in right and (digests != {right[steps]}) != differs):
            raise Wrong(f"after {steps} steps: {digests}, expected {'another than ' * differs}{right.get(steps)}\n{job.story()}")
    if by_steps and max(by_steps) - min(by_steps) > 1:
        raise Wrong(f"ranks are more than a step apart: {sorted(by_steps)}\n{job.story()}")


def check_well(job, plan):
    done = [line for r in job.ranks.values() for line in r.said("done")]
    wrong = [r.code for r in job.ranks.values()] != [0] * len(job.ranks) or len(done) != plan.size
    if wrong:
        raise Wrong(f"a false alarm\n{job.story()}")
    digests = {line["digest"] for line in done}
    steps = int(plan.steps.partition("=")[2])
    right = REFERENCES.of(plan.size, plan.words + plan.reference)[steps]
    differs = plan.alike is not None and steps > plan.alike
    if len(digests) != 1 or (digests != {right}) != differs or {line["replicas"] for line in done} != {"identical"}:
        raise Wrong(f"weights: {digests}, without the fault {right}\n{job.story()}")


def check_channels(job, plan, proxy):
    """Where there is a secret every connection proves it or is encrypted: of a rank those to all others and to the store, and on
    the wire nothing is outside of records."""
    if plan.mpi:
        return
    least = plan.size if plan.secured else 0
    made = [int(line["channels"]) for r in job.ranks.values() for line in r.said("start")]
    if any(n < least or (n > 0 and not plan.secured) for n in made):
        raise Wrong(f"connections that prove or encrypt: {made}, although it is {plan.secured or 'plain'}\n{job.story()}")
    if proxy is not None and (plain := proxy.not_in_records()):
        raise Wrong(f"not in records of {plan.secured}: {plain}\n{job.story()}")


def check_killed(job, took):
    """The launcher has ended the job, or its end has: seconds from the kill to the end, if they are not known yet."""
    launcher, = job.ranks.values()
    if launcher.code == 0 or launcher.said("done") or not launcher.said("start"):
        raise Wrong(f"the job went on\n{job.story()}")
    struck = launcher.said("fault")  # Open MPI may lose the last words of a rank that is killed
    return launcher.ended - int(struck[-1]["at"]) * 1e-9 if struck else took


def check_verdicts(job, plan, proxy, records):
    errors = errors_of(job)
    done = sum(len(r.said("done")) for r in job.ranks.values())
    if any(f":{phase}:" in fault for phase in INSIDE + SAVING for fault in plan.faults) and done == plan.size:
        raise Missed
    who = list(plan.verdicts)
    if plan.thawed is not None:
        (ranks, pattern), = who
        if errors.get(plan.thawed, {}).get("text") == errors.get(ranks[0], {}).get("text"):
            who = [((*ranks, plan.thawed), pattern)]
        else:  # the others have left, each perhaps within a message: then their verdict is not read
            who.append(((plan.thawed,), rf"^DDP-E203 peer silent: rank {plan.thawed} was stopped for [0-9.]+ s "))
    for ranks, pattern in who:
        missing = [r for r in ranks if r not in errors]
        if missing and plan.ulfm and all(re.search(rf"(?m)^ *rank {r}: {pattern.removeprefix('^')}", job.ranks[0].err) for r in missing):
            raise Missed  # Open MPI 5 has lost what they wrote to stdout before another rank ended the job
        if missing:
            raise Wrong(f"no error of ranks {missing}\n{job.story()}")
        texts = {errors[r]["text"] for r in ranks}
        if len(texts) != 1:
            raise Wrong(f"not one verdict: {texts}\n{job.story()}")
        if not re.search(pattern, next(iter(texts))):
            raise Wrong(f"another verdict than {pattern}: {texts}\n{job.story()}")
        if not plan.inproc:
            check_process_named(job, next(iter(texts)), plan.mpi)
        if not plan.inproc and not plan.mpi:
            codes = {job.ranks[r].code for r in ranks}
            if codes != {exit_code_of(next(iter(texts)))}:
                raise Wrong(f"exit codes {codes}\n{job.story()}")
    if any(r.said("done") for r in job.ranks.values()) and "end" not in str(plan.faults):
        raise Wrong(f"a rank ended well\n{job.story()}")
    check_values(job, plan)
    check_flight_records(records, {r: errors[r]["text"] for ranks, _ in who for r in ranks})
    struck = [int(line["at"]) for r in job.ranks.values() for line in r.said("start" if plan.own else "fault")]
    if proxy is not None:
        if proxy.struck() is None:
            raise Wrong(f"nothing was injected: {proxy.failure}\n{job.story()}")
        struck = [proxy.struck()]
    if plan.ulfm:  # the rank that failed, if there is one, is the first to end the job
        own = any(f":{kind}:" in fault for kind in ("throw", "memory") for fault in plan.faults)
        code, = (r.code for r in job.ranks.values())
        if code != (1 if own else exit_code_of(next(iter(errors.values()))["text"])) and not job.hung:
            raise Wrong(f"mpirun ends with {code}\n{job.story()}")
    if not struck and plan.mpi:  # Open MPI may lose the last words of a rank that is killed
        return None
    measured = [r for ranks, _ in plan.verdicts for r in ranks]
    return max((int(errors[r]["at"]) - max(max(struck), int(errors[r]["since"]))) * 1e-9 for r in measured)


def end_launcher_of_the_dead(job, deadline):
    """mpiexec of Open MPI 4 crashes or hangs in about a fifth of the jobs in which one rank is in MPI_Finalize while others call
    MPI_Abort, also where the program uses nothing but MPI; that of Open MPI 5 rarely after MPI_Abort. Once all ranks have ended it
    need not be waited for, and is killed."""
    launcher, = job.ranks.values()
    end, alone = time.monotonic() + deadline, 0
    while launcher.poll() is None and time.monotonic() < end and alone < 150:
        alone = alone + 1 if not running(children_of(launcher.pid)) and launcher.said("start") else 0
        time.sleep(0.02)
    job.hung = launcher.poll() is None and alone > 0
    if job.hung:
        os.kill(launcher.pid, signal.SIGKILL)


def inject(plan):
    """Seconds until the last rank threw; None where the job ended well, as it should."""
    if plan.trial is not None:
        return plan.trial()
    with tempfile.TemporaryDirectory(prefix="chaos") as scratch:
        records = os.path.join(scratch, "records")
        os.mkdir(records)
        variables = {"TMPDIR": scratch, "DDP_FLIGHT_DIR": records}
        if plan.proxied or not plan.own and plan.a_host != 2 and zlib.crc32(" ".join(plan.words + plan.faults).encode()) % 3 == 0:
            variables["DDP_SHARE_MEMORY"] = "0"  # the proxy is to see the bytes; of the others, a third
        if plan.secured:
            variables.update(secret_in(scratch))
        if plan.secured == "tls":
            variables["DDP_TLS"] = "1"
        if plan.tracer:  # leaks cannot be looked for under ptrace
            variables["ASAN_OPTIONS"] = os.environ.get("ASAN_OPTIONS", "") + ":detect_leaks=0"
        size = plan.size
        saves = [f"checkpoint={scratch}/kept", "every=1"] if plan.saves else []
        started = command_of(plan, [*plan.more, *saves, *(f"fault={f}" for f in plan.faults)])
        if plan.mpi:
            variables.update(OPEN_MPI)
        if plan.ulfm:
            variables["LD_LIBRARY_PATH"] = os.path.join(os.path.dirname(OPEN_MPI_5), "../lib")
        if plan.inproc or plan.mpi:
            variables.update({"RANK": None, "WORLD_SIZE": None, "MASTER_ADDR": None, "MASTER_PORT": None})
            size = 1
        def with_host(rank):
            return {**variables, "DDP_HOST": f"host{rank // plan.a_host}"} if plan.a_host else variables

        with Job(size, started, with_host, without=range(size)) as job:
            proxy = Proxy(owner_finder(job), plan.links, plan.secured) if plan.proxied else None
            took = None
            try:
                if proxy:
                    variables["CHAOS_PROXY"] = str(proxy.port)
                for rank in range(size):
                    if plan.tracer and plan.tracer[0] == rank:
                        job.command = plan.tracer[1] + job.command
                    job.start(rank)
                    if plan.tracer and plan.tracer[0] == rank:
                        job.command = job.command[len(plan.tracer[1]):]
                if plan.harm:
                    for rank in range(size):
                        job.wait_for("start", rank)
                    if proxy:
                        proxy.expect({(a, b) for b in range(size) for a in range(b)}, DEADLINE)
                    if any(r.poll() is not None for r in job.ranks.values()):
                        raise Wrong(f"it ended before anything was injected\n{job.story()}")
                    took = plan.harm(job, proxy)
                # A job without end that does not notice must not take the minute that everything else is given.
                deadline = plan.bound + 20 * SCALE if plan.steps == ENDLESS else plan.patience
                if plan.mpi and not plan.well:
                    end_launcher_of_the_dead(job, deadline)
                job.wait(deadline, which=without(size, plan.frozen))
                if plan.frozen is not None:
                    os.kill(job.ranks[plan.frozen].pid, signal.SIGKILL)
                    job.wait()
                seconds = None
                if plan.well:
                    check_well(job, plan)
                elif plan.killed:
                    seconds = check_killed(job, took)
                else:
                    seconds = check_verdicts(job, plan, proxy, records)
                plan.hung = plan.mpi and not plan.well and job.hung
                if plan.also:
                    plan.also(job)
                check_channels(job, plan, proxy)
                if job.left_behind():
                    raise Wrong(f"processes are left: {job.left_behind()}\n{job.story()}")
                # Open MPI's own is of a job that it ends.
                kept = ("records", "secret", *["kept"] * plan.saves)
                left = [name for name in os.listdir(scratch) if not name.startswith("ompi.") and name not in kept]
                if left:
                    raise Wrong(f"files are left: {left}")
                if seconds is not None and seconds > plan.bound:
                    raise Late(f"{seconds:.3f} s instead of {plan.bound} s\n{job.story()}", seconds)
            finally:
                if proxy:
                    proxy.__exit__()
        if plan.saves:
            check_resumed(plan, Job(size, command_of(plan, saves), with_host))
        return seconds


def command_of(plan, more):
    """What starts a rank; over MPI, or as threads, all ranks."""
    words = [*plan.words, plan.steps, *more, *(["prove=1"] if plan.secured == "proof" else [])]
    if plan.inproc:
        return [FAULT_PROGRAM, *words, "transport=inproc", f"ranks={plan.size}"]
    if not plan.mpi:
        return [FAULT_PROGRAM, *words]
    launcher = [OPEN_MPI_5, "--oversubscribe", "--bind-to", "none", "--with-ft", "ulfm"] if plan.ulfm else [MPIEXEC]
    if not plan.own:
        return [*launcher, *plan.launcher, "-n", str(plan.size), FAULT_PROGRAM_MPI, *words]
    ranks = [["-n", "1", FAULT_PROGRAM_MPI, *words, *plan.own.get(rank, ())] for rank in range(plan.size)]
    return [*launcher, *plan.launcher, *ranks[0], *(word for rank in ranks[1:] for word in (":", *rank))]


def check_resumed(plan, again):
    """A rank was struck while the checkpoint of that step was saved."""
    struck = int(plan.faults[0].split(":")[3])
    with again as job:
        job.wait()
        begun = {int(line["resumed"]) for r in job.ranks.values() for line in r.said("ready")}
        done = [line for r in job.ranks.values() for line in r.said("done")]
        right = REFERENCES.of(plan.size, plan.words + plan.reference)[int(plan.steps.partition("=")[2])]
        if len(begun) != 1 or not begun <= {struck - 1, struck}:
            raise Wrong(f"struck in the save of step {struck}, resumed after {begun}\n{job.story()}")
        if len(done) != plan.size or {line["digest"] for line in done} != {right}:
            raise Wrong(f"the job that was started again has other weights than {right}: {done}\n{job.story()}")
        if any(r.code != 0 for r in job.ranks.values()) or job.left_behind():
            raise Wrong(f"the job that was started again has not ended well\n{job.story()}")


def plan_of(row, size, seed, number):
    which = f"{seed}/{row.number}/{size}/{number}"
    plan = row.plan(random.Random(which), size)
    if plan is not None and plan.trial is None and not plan.inproc and not plan.mpi:  # of its own, so that nothing else that is drawn depends on it
        plan.secured = {0: "proof", 1: "tls"}.get(random.Random(which + "/secured").randrange(6), "")
    return plan


def attempt(row, size, seed, number, secured=None):
    """What came of one injection. secured: of the plan, instead of what is drawn."""
    plan = plan_of(row, size, seed, number)
    if secured is not None:
        plan.secured = secured
    result = {"row": row.number, "ranks": size, "number": number, "count": plan.count, "seconds": None, "late": "", "wrong": "",
              "missed": 0, "hung": False, "secured": plan.secured}
    again = f"--rows {row.number} --ranks {size} --seed {seed} --only {number}" + (f" ({plan.secured})" if plan.secured else "")
    try:
        result["seconds"] = inject(plan)
        result["hung"] = plan.hung
    except Missed:
        result["count"], result["missed"] = 0, 1
    except Late as late:
        result["seconds"], result["late"] = late.seconds, f"{again}: {late}"
    except (Wrong, AssertionError) as problem:
        result["wrong"] = f"{again}: faults {plan.faults} words {plan.words}\n{problem}"
    return result


def plans_to_starve(seconds):
    """Every way to train, with messages first and then in shared memory; a run of less than a minute comes no further than that."""
    plans = [Plan(2 + k % 3, SHAPES[0] + WAYS[k % len(WAYS)], steps="steps=40", more=("times=default",), well=True)
             for k in range(3 * len(WAYS))]
    return plans if seconds >= 60 else plans[:len(MESSAGES)]


def starve(seconds, load, seed):
    """Jobs with default times beside `load` processes that only count: how many there were, and what went wrong."""
    plans = plans_to_starve(seconds)
    for plan in plans:  # before the machine is busy
        REFERENCES.of(plan.size, plan.words)
    jobs, wrong, end = 0, [], time.monotonic() + seconds
    with busy_processes(load):
        while time.monotonic() < end:
            plan = plans[jobs % len(plans)]
            size = plan.size
            try:
                inject(plan)
            except (Wrong, AssertionError) as problem:
                wrong.append(f"starved, {size} ranks, seed {seed}: {problem}")
            jobs += 1
    return jobs, wrong


@contextlib.contextmanager
def busy_processes(count):
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def starve_at_length(seconds, load, size, words):
    """One job with default times that trains for so long beside `load` processes that only count: how long it took, and how
    many steps it made."""
    def digest_after(steps):
        with Job(size, [FAULT_PROGRAM, *words, f"steps={steps}", "times=default"]) as job:
            began = time.monotonic()
            job.wait(10 * seconds)
            took = time.monotonic() - began
            done = {line["digest"] for r in job.ranks.values() for line in r.said("done")}
            if len(done) != 1 or any(r.code != 0 for r in job.ranks.values()):
                raise Wrong(f"a false alarm, or different values, after {took:.0f} s of {size} ranks {words}\n{job.story()}")
        return done, took

    with busy_processes(load):
        some = 200
        while (took := digest_after(some)[1]) < seconds / 10:
            some *= 3
        steps = int(some * 1.1 * seconds / took)
        digest, took = digest_after(steps)
    if digest != digest_after(steps)[0]:
        raise Wrong(f"other values than alone after {steps} steps of {size} ranks {words}")
    return took, steps


def percentile(values, share):
    values = sorted(values)
    return values[min(len(values) - 1, int(share * len(values)))]


def summary(row, results):
    """A line of the table."""
    seconds = [r["seconds"] for r in results if r["seconds"] is not None]
    times = "no error, as it should be | | "
    if seconds:
        times = f"{statistics.median(seconds):.3f} | {percentile(seconds, 0.99):.3f} | {max(seconds):.3f}"
    sizes = ", ".join(str(s) for s in sorted({r["ranks"] for r in results}))
    wrong, late = sum(bool(r["wrong"]) for r in results), sum(bool(r["late"]) for r in results)
    return f"| {row.number} | {row.what} | {sizes} | {sum(r['count'] for r in results)} | {wrong} | {late} | {times} |"


HEAD = ("| row | fault | ranks | injections | wrong | late | median, s | p99, s | longest, s |\n"
        "|---|---|---|---|---|---|---|---|---|")


def main():
    words = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    words.add_argument("--rows", default="", help="such as 10,31 or 26-30; default: all")
    words.add_argument("--ranks", default="2,3,4", help="numbers of ranks")
    words.add_argument("--injections", type=int, default=6, help="of a row, over all numbers of ranks")
    words.add_argument("--in-full", action="store_true", help="as many of the rows that take long as of the others, but for 23g")
    words.add_argument("--seed", type=int, default=1)
    words.add_argument("--only", type=int, help="the number of one injection, to repeat it")
    words.add_argument("--starve", type=float, default=0, help="seconds of jobs, and of one job, beside 20 busy processes")
    words.add_argument("--strangers", type=int, default=0, help="jobs, each alone and beside strangers")
    words.add_argument("--lanes", type=int, default=4, help="most jobs at a time, in rows that mostly wait")
    words.add_argument("--json", help="a file for all results")
    words.add_argument("--table", help="a file for the table, written after every row")
    asked = words.parse_args()
    sizes = [int(s) for s in asked.ranks.split(",")]
    all_results, lines, failures = [], [], []
    for row in chosen_rows(asked.rows):
        cases = cases_of(row, sizes, asked.seed, asked.injections, asked.only, asked.in_full)
        if not cases:
            print(f"not tried: row {row.number}, for which something is not here, or too few ranks", flush=True)
            continue
        begin = time.monotonic()
        results = run_cases(row, cases, asked.seed, asked.lanes)
        all_results += results
        lines.append(summary(row, results))
        hung = sum(r["hung"] for r in results)
        print(f"{lines[-1]}  {time.monotonic() - begin:.0f} s" + f", {hung} launchers hung" * (hung > 0), flush=True)
        for text in [r["wrong"] or r["late"] for r in results if r["wrong"] or r["late"]]:
            failures.append(text)
            print(text, flush=True)
        write(asked, all_results, lines)
    if asked.starve:
        jobs, wrong = starve(asked.starve, 20, asked.seed)
        lines.append(f"| 24 | {jobs} jobs in {asked.starve:.0f} s beside 20 busy processes | 2, 3, 4 | {jobs} | {len(wrong)} "
                     "| 0 | no error, as it should be | | |")
        print(lines[-1], *wrong, sep="\n")
        failures += wrong
        for size, words in (4, SHAPES[0] + MESSAGES[0]), (3, SHAPES[0]):  # with messages, and in memory that ranks share
            try:
                took, steps = starve_at_length(asked.starve, 20, size, words)
            except (Wrong, AssertionError) as problem:
                failures.append(f"starved for {asked.starve} s, {size} ranks: {problem}")
                print(failures[-1])
                continue
            lines.append(f"| 24 | one job of {steps} steps beside 20 busy processes, for {took:.0f} s | {size} | 1 | 0 "
                         "| 0 | no error, as it should be | | |")
            print(lines[-1])
        write(asked, all_results, lines)
    if asked.strangers:
        said, wrong, ratio = strangers(asked.strangers, 600)
        alone, beside = silence(asked.strangers)
        print("strangers: " + said, *wrong, sep="\n")
        print(f"silent connections: {alone * 1000:.1f} ms to start without them, {beside * 1000:.1f} ms beside 1,000")
        failures += wrong
        if ratio > MOST_SLOWER or beside > most_beside_silent_ones(alone):
            failures.append("strangers cost time")
    return 1 if failures else 0


def write(asked, results, lines):
    if asked.json:
        with open(asked.json, "w") as file:
            json.dump(results, file, indent=1)
    if asked.table:
        with open(asked.table, "w") as file:
            file.write("\n".join([HEAD, *lines]) + "\n")


def chosen_rows(text):
    if not text:
        return ROWS
    numbers = set()
    for word in text.split(","):
        low, _, high = word.partition("-")
        numbers |= {str(n) for n in range(int(low), int(high) + 1)} if high else {word}
    return [row for row in ROWS if row.number in numbers]


def cases_of(row, sizes, seed, injections, only=None, in_full=False):
    """(ranks, number): the same share for each number of ranks that the row can have."""
    sizes = [s for s in sizes if plan_of(row, s, seed, 0) is not None]
    wanted = max(1, round(injections * (1 if in_full and row.share > 0.05 else row.share)))  # of 23g, 200 would take two hours
    cases, made = [], 0
    if only is not None:
        return [(size, only) for size in sizes]
    while sizes and made < wanted:
        size = sizes[len(cases) % len(sizes)]
        cases.append((size, len(cases) // len(sizes)))
        made += plan_of(row, size, seed, cases[-1][1]).count
    return cases


def run_cases(row, cases, seed, lanes):
    with concurrent.futures.ThreadPoolExecutor(min(row.lanes, lanes)) as pool:
        return list(pool.map(lambda case: attempt(row, case[0], seed, case[1]), cases))


if __name__ == "__main__":
    sys.exit(main())
