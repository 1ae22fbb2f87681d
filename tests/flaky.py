"""Runs the tests that depend most on time again and again, on a machine that is busy with something else.

    make test-flaky
    python -m tests.flaky --times 3 --busy 4 tests/cli/test_stopping.py

A test that fails here depends on how fast things are.
"""

import argparse
import concurrent.futures
import contextlib
import os
import queue
import subprocess
import sys
import tempfile
import time

TESTS = (
    "tests/cli/test_stopping.py",
    "tests/cli/test_grace.py",
    "tests/multiprocess/test_collectives.py::test_a_rank_that_is_late_is_named_and_the_job_goes_on",
    "tests/multiprocess/test_failures.py::test_late_rank_causes_collective_timeout",
    "tests/multiprocess/test_failures.py::test_stopped_rank_is_noticed_by_heartbeats",
    "tests/multiprocess/test_gossip.py::test_killed_rank_is_named",
    "tests/multiprocess/test_groups.py::test_two_pairs_train_different_models_and_one_goes_on_when_a_rank_of_the_other_is_killed",
    "tests/multiprocess/test_servers_faults.py::test_servers_that_are_gone_are_an_error",
    "tests/multiprocess/test_start.py::test_tasks_that_never_come_are_listed",
    "tests/strategies/keras/test_keras_data.py::test_distributed_datasets_are_taken_by_fit_and_evaluate",
)
SESSIONS = 3
WORKERS = 3
"""Sessions of pytest at the same time, and workers of each, so that much of the time in which tests wait is used."""


@contextlib.contextmanager
def busy(count):
    """Context in which so many other processes compute all the time."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run(tests, slots):
    """Runs the tests once in a free slot; returns whether they passed, what pytest printed, and the time in seconds."""
    slot, begin = slots.get(), time.monotonic()
    environment = {**os.environ, "TEST_WORKERS_BEFORE": str(slot * WORKERS)}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "-q", "--numprocesses", str(WORKERS), "--dist", "loadfile"]
        command += ["--basetemp", f"{folder}/pytest", "-p", "no:cacheprovider", *tests]
        done = subprocess.run(
            command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
    slots.put(slot)
    return done.returncode == 0, done.stdout, time.monotonic() - begin


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", default=TESTS, help="what pytest takes; by default ten tests")
    parser.add_argument("--times", type=int, default=20, help="how often they run")
    parser.add_argument("--busy", type=int, default=20, help="how many processes compute beside them")
    options = parser.parse_args()
    failed, slots = 0, queue.Queue()
    for slot in range(SESSIONS):
        slots.put(slot)
    with busy(options.busy), concurrent.futures.ThreadPoolExecutor(SESSIONS) as pool:
        runs = [pool.submit(run, options.tests, slots) for _ in range(options.times)]
        for number, done in enumerate(concurrent.futures.as_completed(runs), 1):
            passed, output, seconds = done.result()
            failed += not passed
            if not passed:
                print(output)
            print(f"{number} of {options.times}: {seconds:.0f} s, {failed} failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
