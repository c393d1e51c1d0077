"""A sample of chaos.py: a few injections of every row at 2, 3 and 4 ranks, and strangers at the ports of a job that trains.

FAULT_PROGRAM (or DDP_PROGRAMS, its directory) and DDPRUN name the binaries. DDP_TEST_SEED draws other injections.
"""

import concurrent.futures
import os
import shutil
import sys
import unittest

import chaos
from chaos_launch import DDPRUN
from jobs import SCALE

SEED = int(os.environ.get("DDP_TEST_SEED", "1"))
SIZES = (4, 3, 2), (4, 2, 3)  # the rows take turns: every one is seen with four ranks, and with two or three
TRIES = 3  # a measured time may be the machine's fault; what was said may not
EACH = 2 if SCALE == 1 else 1  # injections of a row; sanitizers look for other things


class Sampled(unittest.TestCase):
    def sample(self, *numbers, each=EACH, rows_at_once=1):
        chosen = [(row, chaos.cases_of(row, SIZES[(place + SEED) % len(SIZES)], SEED, max(1, round(each / row.share))))
                  for place, row in enumerate(chaos.ROWS) if row.number in numbers]

        def run(one):
            return *one, chaos.run_cases(*one, SEED, lanes=4)
        with concurrent.futures.ThreadPoolExecutor(rows_at_once) as pool:
            for row, cases, results in (pool.map if rows_at_once > 1 else map)(run, chosen):
                self.check(row, cases, results)

    def check(self, row, cases, results):
        self.assertTrue(cases, f"row {row.number}: something that it needs is not here")
        for result in results:
            for _ in range(2 * TRIES):
                if result["missed"]:  # another in its place
                    result = chaos.attempt(row, result["ranks"], SEED, result["number"] + 100)
            tries = 1
            while result["late"] and not result["wrong"] and tries < TRIES:
                print(f"late, tried again: {result['late'].splitlines()[0]}", flush=True)
                result = chaos.attempt(row, result["ranks"], SEED, result["number"])
                tries += 1
            with self.subTest(row=row.number, ranks=result["ranks"], number=result["number"]):
                self.assertEqual((result["wrong"] or result["late"], result["missed"]), ("", 0))
        print(f"row {row.number}, {row.what}: {len(cases)} jobs", flush=True)


class Sample(Sampled):
    def test_the_start(self):
        self.sample("1", "2", "3", "4", "5", "6", "7", "8", "9", rows_at_once=3)

    def test_ranks_that_die(self):
        self.sample("10", "11", "12", "13", "14", "15")

    def test_ranks_that_stop(self):
        self.sample("18", "19", rows_at_once=2)
        self.sample("20", "18d", each=1, rows_at_once=2)

    def test_ranks_that_are_late_or_do_something_else(self):
        self.sample("21", each=max(1, EACH // 2))
        self.sample("22")

    def test_connections_that_carry_nothing(self):
        self.sample("26", "27", "28", "30", each=max(1, EACH // 2), rows_at_once=4)
        self.sample("26d", each=1)

    def test_connections_that_are_slow_or_down_for_a_while(self):
        self.sample("23", "25", "29", "32", each=max(1, EACH // 2))

    def test_connections_that_end(self):
        self.sample("31")

    def test_memory_of_one_rank_that_is_wrong(self):
        self.sample("35", "36", each=2)

    def test_signals_and_a_launcher_that_is_killed(self):
        self.assertTrue(os.path.isfile(DDPRUN), "DDPRUN names no launcher")
        self.sample("16", "17", each=2)

    def test_bytes_that_are_not_those_that_were_sent(self):
        self.sample("33", "34", each=EACH + 2)

    def test_bytes_that_are_not_those_that_were_sent_to_who_shares_a_secret(self):
        rows = {row.number: row for row in chaos.ROWS}
        # Of two ranks, the one that sent them hears what is wrong from the other only.
        for number, size, secured in (("33", 2, "proof"), ("33", 3, "tls"), ("34", 3, "proof"), ("34", 2, "tls")):
            with self.subTest(row=number, size=size, secured=secured):
                result = chaos.attempt(rows[number], size, SEED, 0, secured)
                for _ in range(1, TRIES):
                    if result["wrong"] or not result["late"]:
                        break
                    print(f"late, tried again: {result['late'].splitlines()[0]}", flush=True)
                    result = chaos.attempt(rows[number], size, SEED, 0, secured)
                self.assertEqual(result["wrong"] or result["late"], "")


@unittest.skipUnless(os.path.exists(chaos.FAULT_PROGRAM_MPI) and SCALE == 1, "no MPI here, or a sanitizer")
class OverMpi(Sampled):
    def test_a_killed_rank(self):
        self.sample("10m", "14m", each=1)

    def test_a_killed_rank_that_the_others_outlive(self):
        self.sample("10r", "11r", "12r", "14r", each=1)

    @unittest.skipUnless(shutil.which(chaos.OPEN_MPI_5), "no Open MPI 5 here (scripts/setup.sh launchers)")
    def test_ranks_that_end_where_mpi_says_which(self):
        self.sample("10u", "11u", "12u", "13u", "14u", "15u", each=1)

    def test_where_a_thread_of_the_library_calls_mpi(self):
        self.sample("13t", "18t", "19t", "21t", "22t", each=1)

    def test_a_killed_launcher(self):
        self.sample("17m", each=2)

    def test_a_rank_that_throws(self):
        self.sample("13m", each=1)

    def test_a_frozen_rank(self):
        self.sample("18m", "19m", "20m", each=1)

    def test_memory_of_one_rank_that_is_wrong(self):
        self.sample("35m", "36m", each=1)

    def test_ranks_that_end_early_are_late_or_disagree(self):
        self.sample("15m", "21m", "22m", each=1)

    def test_ranks_that_are_about_to_train_different_things(self):
        self.sample("5m", "6m", each=2)


class Starved(unittest.TestCase):
    def test_the_plans_of_a_minute_have_training_in_shared_memory(self):
        starved = {plan.words for plan in chaos.plans_to_starve(60)}  # as scripts/faults.sh says
        self.assertLessEqual({chaos.SHAPES[0] + way for way in chaos.WAYS}, starved)

    def test_no_false_alarm_beside_busy_processes(self):
        jobs, wrong = chaos.starve(10 if SCALE == 1 else 5, 20, SEED)
        print(f"row 24: {jobs} jobs beside 20 busy processes", flush=True)
        self.assertEqual(wrong, [])
        self.assertGreater(jobs, 0)


class Strangers(unittest.TestCase):
    def test_at_every_port_a_job_has_listened_on(self):
        for left in reversed(range(2 * TRIES)):  # one of two processes that compete with a third for two cores is easily slower
            said, wrong, ratio = chaos.strangers(1, 600 if SCALE == 1 else 60)
            print(said, flush=True)
            self.assertEqual(wrong, [])
            if ratio <= chaos.MOST_SLOWER:
                return
            print(f"slower, tried again ({left} left)", flush=True)
        self.fail(f"a step takes {ratio:.3f} times as long beside strangers at the job's ports as beside those elsewhere")

    def test_silent_ones_hardly_delay_the_start(self):
        for left in reversed(range(2 * TRIES)):
            alone, beside = chaos.silence(3)
            print(f"{alone * 1000:.1f} ms to start without, {beside * 1000:.1f} ms with 1,000 silent connections", flush=True)
            if beside <= chaos.most_beside_silent_ones(alone):
                return
            print(f"later, tried again ({left} left)", flush=True)
        self.fail(f"{beside:.3f} s to start beside 1,000 silent connections, {alone:.3f} s without")


class SlowLink(unittest.TestCase):
    """2 MB of gradients at 1 Mbit/s take more than a minute, in which nearly nothing runs: the job starts before all others."""

    job = None

    @classmethod
    def begin(cls):
        row, = (row for row in chaos.ROWS if row.number == "23g")
        cls.job = cls.job or concurrent.futures.ThreadPoolExecutor(1).submit(chaos.attempt, row, 3, SEED, 0)
        return cls.job

    @unittest.skipUnless(SCALE == 1, "a sanitizer")
    def test_what_takes_longer_than_dead_is_no_false_alarm(self):
        result = SlowLink.begin().result()
        self.assertEqual(result["wrong"] or result["late"], "")


def setUpModule():
    if SCALE == 1 and all(word.startswith("-") for word in sys.argv[1:]) and "-k" not in sys.argv:
        SlowLink.begin()


class Repeatable(unittest.TestCase):
    def test_the_seed_decides_everything_that_is_drawn(self):
        for row in chaos.ROWS:
            for size in sorted(SIZES[0]):
                plans = [chaos.plan_of(row, size, SEED, 3) for _ in range(2)]
                shown = [plan and (plan.words, plan.faults, plan.steps, plan.more, plan.verdicts, plan.secured) for plan in plans]
                self.assertEqual(shown[0], shown[1])


if __name__ == "__main__":
    unittest.main()
