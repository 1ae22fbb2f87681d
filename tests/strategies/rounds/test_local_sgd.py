"""The strategy on one process; `tests/multiprocess/test_local_sgd.py` has it on several."""

import keras
import numpy as np
import pytest

import tfdist
from tests.strategies import outer_weights
from tfdist.local_sgd import Averaging, Outer, Streaming


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"sync_every": 0}, ValueError, "got sync_every=0"),
        ({"sync_every": "8"}, ValueError, "got sync_every='8'"),
        ({"start_after": True}, ValueError, "a whole number of at least 0; got True"),
        ({"slots": "mean"}, ValueError, "must be 'keep' or 'average'; got 'mean'"),
        ({"rule": keras.optimizers.SGD(0.7)}, TypeError, r"a rule of tfdist.local_sgd, such as Outer\(.*; got <keras"),
        ({"rule": Averaging}, TypeError, "a rule of tfdist.local_sgd"),
        ({"streaming": 4}, TypeError, "a tfdist.local_sgd.Streaming; got 4"),
        ({"sync_every": 8, "streaming": Streaming(2, delay=4)}, ValueError, "choose a delay below 4"),
        ({"sync_every": 8, "streaming": Streaming(9)}, ValueError, "at least one step for each fragment; got 8 steps"),
        ({"slots": "average", "streaming": Streaming(delay=1)}, ValueError, "exchanged at once"),
        ({"compression": 8}, TypeError, "8"),
        ({"algorithm": "rings"}, ValueError, "got 'rings'"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        tfdist.LocalSGDStrategy(**arguments)


def test_numpy_integers_are_accepted():
    assert tfdist.LocalSGDStrategy(sync_every=np.int64(8)).size == 1


def test_a_process_alone_moves_its_outer_weights():
    half = tfdist.LocalSGDStrategy(sync_every=2, rule=Outer(keras.optimizers.SGD(0.5)))
    outer_weights.assert_moved(half)
