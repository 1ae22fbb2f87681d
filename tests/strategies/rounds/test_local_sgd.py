"""The strategy on one process; `tests/multiprocess/test_local_sgd.py` has it on several."""

import keras
import numpy as np
import pytest

import tfdist
from tests.strategies import outer_weights
from tfdist.local_sgd import rules


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"sync_every": 0}, ValueError, "got sync_every=0"),
        ({"sync_every": "8"}, ValueError, "got sync_every='8'"),
        ({"fragments": 0}, ValueError, r"LocalSGDStrategy\(fragments=…\) is a number from 1; got 0"),
        ({"delay": True}, ValueError, "a number from 0; got True"),
        ({"slots": "mean"}, ValueError, "is 'keep' or 'average'; got 'mean'"),
        ({"outer": "sgd"}, TypeError, "is an optimizer of Keras 3, such as .*; got 'sgd'"),
        ({"elastic": 1.5}, ValueError, "above 0 and at most 1; got 1.5"),
        ({"elastic": "0.5"}, ValueError, "above 0 and at most 1; got '0.5'"),
        ({"mix": "0.5"}, ValueError, "at least 0 and below 1; got '0.5'"),
        ({"mix": -0.5}, ValueError, "at least 0 and below 1; got -0.5"),
        ({"elastic": 0.5, "mix": 0.5}, ValueError, "leave out outer= and mix="),
        ({"sync_every": 8, "fragments": 2, "delay": 4}, ValueError, "choose a delay below 4"),
        ({"sync_every": 8, "fragments": 9}, ValueError, "a round has only 8 steps"),
        ({"slots": "average", "delay": 1}, ValueError, "exchanged at once"),
        ({"compression": 8}, TypeError, "8"),
        ({"algorithm": "rings"}, ValueError, "got 'rings'"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        tfdist.LocalSGDStrategy(**arguments)


def test_names_of_outer_optimizers_do_not_matter():
    one, other = (rules.described(keras.optimizers.SGD(0.7, momentum=0.9, name=name)) for name in ("a", "b"))
    assert one == other
    assert "0.9" in one


def test_numbers_of_numpy_are_numbers():
    assert tfdist.LocalSGDStrategy(sync_every=np.int64(8)).size == 1


def test_a_process_alone_moves_its_outer_weights():
    half = tfdist.LocalSGDStrategy(sync_every=2, outer=keras.optimizers.SGD(0.5))
    outer_weights.assert_moved(half)
