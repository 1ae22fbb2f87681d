"""Ranks that are killed in a phase of training in parts: making, forward and backward pass, saving, loading."""

import itertools
import re
import signal

import pytest

from tests.multiprocess import harness
from tests.sweeps import sweep

pytestmark = pytest.mark.multiprocess

PROGRAM = str(harness.PROGRAMS / "in_parts" / "dying.py")
ALWAYS = [("weights", "making", 1), ("mesh", "backward", 0), ("weights", "saving", 1)]
CASES = itertools.product(
    ("optimizer", "weights", "at once", "mesh"), ("making", "forward", "backward", "saving", "loading"), (0, 1)
)


@pytest.mark.parametrize(
    ("how", "phase", "victim"), [(pytest.param if case in ALWAYS else sweep)(*case) for case in CASES]
)
def test_the_other_rank_names_it(tmp_path, how, phase, victim):
    settings = {"TEST_HOW": how, "TEST_PHASE": phase, "TEST_VICTIM": str(victim)}
    with harness.started([PROGRAM, str(tmp_path)], 2, settings) as processes:
        ended = processes.wait()
        assert ended[victim].code == -signal.SIGKILL, processes.outputs()
        assert ended[1 - victim].code, processes.outputs()
        named = rf"PeerLostError: .*rank {victim}, worker {victim} [^\n]*died"  # Keras may say first what it has called
        assert re.search(named, ended[1 - victim].output, re.DOTALL), processes.outputs()
    harness.assert_nothing_left()
