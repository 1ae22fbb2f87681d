"""Several processes, in graphs of `fit`: `tests/multiprocess/test_distributed_optimizer.py`."""

import keras
import pytest

from tfdist.optimizers.gradients import GradientAverager
from tfdist.optimizers.initial_weight_check import InitialWeightCheck

TOLD = "begin to train with different weights"


def begin(group, seed, is_local=False):
    kernel = keras.initializers.RandomNormal(seed=seed)
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1, kernel_initializer=kernel)])
    gradients = GradientAverager(group)
    if is_local:
        gradients.keep_local(model.layers[0].kernel)
    callback = InitialWeightCheck(gradients)
    callback.set_model(model)
    for batch in range(2):
        callback.on_train_batch_begin(batch)


@pytest.mark.parametrize(
    ("size", "differs", "is_local", "told"), [(1, 1, 0, 0), (2, 0, 0, 0), (2, 1, 0, 2), (2, 1, 1, 0)]
)
def test_different_weights_are_warned_of_once_a_process(ranks, caplog, size, differs, is_local, told):
    ranks(size)(lambda group: begin(group, 1 + group.rank * differs, is_local))
    assert caplog.text.count(TOLD) == told
