"""`fit` on data that are read in their order: the chief reads them for all; the servers are threads of this process."""

import keras
import numpy as np
import pytest

from tests.strategies.served import served
from tests.strategies.servers.test_keras_shared_data import (
    BATCH,
    BATCHES,
    SAMPLES,
    Stopping,
    X,
    counting_model,
    counts,
    pushes,
    slices,
    together,
)
from tests.sweeps import sweep
from tfdist.parameter_server.options.synchronization import BoundedStaleness, SoftSync, Synchronous


class Growing(keras.utils.PyDataset):
    """Its epochs differ, so that it cannot be read by index."""

    def __len__(self):
        return BATCHES

    def __getitem__(self, index):
        rows = X[index * BATCH : (index + 1) * BATCH]
        return rows, rows[:, :1]

    def on_epoch_end(self):
        pass


STREAMS = {
    "the dataset shuffles": lambda: {"x": slices().shuffle(9).batch(BATCH)},
    "how many batches it has": lambda: {"x": slices().filter(lambda x, y: True).batch(BATCH)},
    "the dataset has no end": lambda: {"x": slices().batch(BATCH).repeat(), "steps_per_epoch": BATCHES},
    "type generator": lambda: {"x": (batch for _ in range(2) for batch in slices().batch(BATCH)), "steps_per_epoch": 6},
    "Growing.on_epoch_end": lambda: {"x": Growing()},
    "steps_per_epoch is 3": lambda: {"x": X, "y": X[:, :1], "batch_size": BATCH, "steps_per_epoch": 3, "epochs": 4},
}


IN_SWEEPS = ["how many batches it has", "type generator", "the dataset has no end"]
"""Reasons that `test_random_access.py` has, too."""


@pytest.mark.parametrize("why", [sweep(why) if why in IN_SWEEPS else why for why in STREAMS])
def test_data_that_are_read_in_order_come_from_the_chief(why, caplog):
    with served(workers=2, servers=2, data="shared") as strategies:
        models = [counting_model(strategy) for strategy in strategies]
        together(*(lambda m=m: m.fit(**{"verbose": 0, "epochs": 2, **STREAMS[why]()}) for m in models))
        for model in models:
            np.testing.assert_array_equal(counts(model), 2)
        assert sum(pushes(*models)) == 2 * BATCHES
    assert "the chief reads the data of `fit`" in caplog.text
    assert why in caplog.text


@pytest.mark.parametrize("mode", [sweep(BoundedStaleness(0)), Synchronous(), sweep(SoftSync())], ids=str)
def test_streams_train_every_batch_in_synchronous_modes(mode):
    with served(workers=2, mode=mode, data="shared") as strategies:
        models = [counting_model(strategy) for strategy in strategies]
        data = slices().shuffle(SAMPLES).batch(BATCH)
        together(*(lambda m=m: m.fit(data, epochs=3, verbose=0) for m in models))
        assert sum(pushes(*models)) == 3 * BATCHES


@pytest.mark.parametrize("stops", [0, 1])
def test_a_worker_that_stops_leaves_a_stream(stops):
    """The chief takes the stream with it, and the epochs of the other one end."""
    with served(workers=2, data="shared") as strategies:
        models = [counting_model(strategy) for strategy in strategies]
        data = slices().batch(BATCH).repeat(20).shuffle(4)
        kinds = [{"callbacks": [Stopping()]} if number == stops else {} for number in range(2)]
        together(*(lambda m=m, o=o: m.fit(data, epochs=2, verbose=0, **o) for m, o in zip(models, kinds, strict=True)))
        push_counts = pushes(*models)
        assert push_counts[stops] <= 1
        assert stops == 0 or sum(push_counts) == 2 * 20 * BATCHES


def test_a_stream_that_fails_is_an_error_on_every_worker():
    def batches():
        for number in range(5):
            if number == 4:
                raise KeyError("no such column")
            yield X[:BATCH], X[:BATCH, :1]

    with served(workers=2, data="shared") as strategies:
        models = [counting_model(strategy) for strategy in strategies]
        failures = []

        def run(model):
            with pytest.raises(Exception, match="no such column") as failure:
                model.fit(batches(), verbose=0)
            failures.append(failure)

        together(*(lambda m=m: run(m) for m in models))
        assert len(failures) == 2


def test_an_unbuilt_model_is_built_from_the_types_of_a_stream():
    with served(data="shared") as (strategy,):
        with strategy.scope():
            model = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(1)])
            model.compile("sgd", "mse", metrics=["mae"])
        history = model.fit(slices().shuffle(9).batch(BATCH), verbose=0).history
        assert model.built
        assert history["mae"][0] > 0
