"""Gossip: trajectories against NumPy, everything of Keras beside it, and what becomes of failures."""

import pytest

from tests.multiprocess import harness
from tests.multiprocess.conftest import checks
from tests.sweeps import sweep

pytestmark = pytest.mark.multiprocess

PROGRAM = str(harness.PROGRAMS / "in_rounds" / "gossip.py")
TOPOLOGY = ["synchronous", "uneven", "stopped", "waits_for_nobody", "compressed"]
"""Which three show better than two, who are each other's only neighbours."""
KERAS = ["features", "loops", "again", "restarted"]
"""Which meet processes, not a topology, and are code of all rounds."""


@checks(
    {
        1: [sweep("synchronous"), sweep("golden")],
        2: [*map(sweep, ("golden", "recorded", *KERAS))],
        3: ["golden", sweep("recorded"), *TOPOLOGY],
    }
)
def test_gossip(size, check, passes):
    passes(size, check)


@pytest.mark.parametrize(
    ("case", "size", "message"),
    [
        ("mismatched", 2, r"MismatchError: ranks differ in .*rank 0 has topology=Ring\(\)"),
        ("unfit", 3, "ValueError: the topology is a graph of 2 processes, but 3 train"),
    ],
)
def test_unfit_topologies_raise(case, size, message, tmp_path):
    harness.assert_all_fail([PROGRAM, str(tmp_path)], message, size, TEST_CASES=case)


@pytest.mark.parametrize("settings", [{}, {"TEST_ASYNCHRONOUS": "1"}], ids=["in rounds", "in pairs"])
def test_killed_rank_is_named(settings, tmp_path):
    harness.assert_killed_rank_is_named([PROGRAM, str(tmp_path)], TEST_CASES="endless", **settings)
