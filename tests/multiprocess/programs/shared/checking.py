"""How a program runs the checks that a launch is for; each is a test (`passes` in `tests/multiprocess/conftest.py`)."""

import os
import time


def run_checks(checks, before=lambda: None, digest=lambda name: ""):
    """Runs those that TEST_CASES names, in turn; says which have passed, and with what all ranks must have alike.

    Args:
        checks: functions by name, such as ``globals()``.
        before: is called before each.
        digest: what is to be equal on all ranks after a check, by its name.
    """
    for name in os.environ["TEST_CASES"].split(","):
        before()
        begin = time.process_time()
        checks[name]()
        print("SECONDS", name, round(time.process_time() - begin, 1), flush=True)
        print("PASSED", name, digest(name), flush=True)
    print("DONE", flush=True)
