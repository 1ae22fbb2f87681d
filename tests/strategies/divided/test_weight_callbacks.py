"""Which callbacks need weights that are elsewhere, and who gives them."""

import keras
import pytest

from tfdist.strategies.divided import weight_callbacks


class Process:
    """Notes when the writer has something done that needs all weights."""

    def __init__(self, is_writer):
        self.is_writer, self.models = is_writer, []

    def run_on_writer(self, model, action):
        self.models.append(model)
        if self.is_writer:
            action()


class Shown(keras.callbacks.TensorBoard):
    epochs = ()

    def on_epoch_end(self, epoch, logs=None):
        self.epochs += (epoch,)


@pytest.mark.parametrize("is_writer", [True, False])
def test_only_the_writer_writes_histograms_of_all_weights(tmp_path, is_writer):
    process, model = Process(is_writer), keras.Sequential()
    board = Shown(tmp_path, histogram_freq=1)
    (adapted,) = weight_callbacks.adapted([board], process)
    assert (adapted is board) is is_writer
    adapted.set_model(model)
    adapted.on_epoch_end(3)
    assert process.models == [model]
    assert board.epochs == ((3,) if is_writer else ())


def test_callbacks_without_histograms_are_unchanged(tmp_path):
    given = [keras.callbacks.EarlyStopping(), keras.callbacks.TensorBoard(tmp_path)]
    assert weight_callbacks.adapted(given, Process(is_writer=False)) == given
