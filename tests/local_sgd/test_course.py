"""A course does what the numbers of its turns say; here that of rounds."""

import numpy as np
import pytest

from tests.local_sgd.test_rounds import made
from tfdist.local_sgd.course import Progress, Turn


@pytest.mark.parametrize(
    ("settings", "replacing"),
    [
        ({}, [True]),
        ({"fragments": 2}, [True, True]),
        ({"delay": 1}, [False, True]),
        ({"start_after": 1}, [True, True]),
        ({"fragments": 2, "delay": 1, "start_after": 1}, [False, False, True, True, True]),
    ],
)
def test_only_replacing_turns_return_new_values(settings, replacing):
    course = made(interval=4, **settings)
    assert course.turns == len(replacing)
    assert [course.replaces(what) for what in range(course.turns)] == replacing
    turn = Turn(0, 0)
    seen = set()
    for step in range(1, 40):
        what = turn.what
        turn, new = course.take(what, Progress(step, step), 0.1, [np.ones(3)] * len(course.places(what)))
        assert len(new) == (len(course.places(what)) if replacing[what] else 0)
        seen.add(what)
    assert seen <= set(range(course.turns))
    assert seen >= set(range(course.turns - bool(settings.get("start_after"))))
