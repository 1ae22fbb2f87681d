"""The strategy on one process; `tests/multiprocess/test_local_sgd.py` has it on several."""

import keras
import numpy as np
import pytest

import tfdist
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
    assert tfdist.LocalSGDStrategy(np.int64(8)).size == 1


def test_a_process_alone_moves_its_outer_weights():
    """Half of what a round of two steps changes."""
    x, y = np.ones([8, 1], "float32"), np.zeros([8, 1], "float32")

    def trained(strategy, steps):
        with strategy.scope():
            model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1, use_bias=False)])
            model.compile(keras.optimizers.SGD(0.125), "mse")
        model.set_weights([np.ones([1, 1], "float32")])
        model.fit(x[: 2 * steps], y[: 2 * steps], batch_size=2, verbose=0)
        return model.get_weights()[0].item()

    whole = trained(tfdist.AllReduceStrategy(), 2)
    half = tfdist.LocalSGDStrategy(sync_every=2, outer=keras.optimizers.SGD(0.5))
    assert trained(half, 2) == pytest.approx(1 + (whole - 1) / 2)
    assert trained(half, 4) == pytest.approx((1 + (whole - 1) / 2) ** 2)
