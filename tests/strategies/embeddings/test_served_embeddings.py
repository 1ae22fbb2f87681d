"""Embeddings of a fixed size on parameter servers that are threads of this process, through `fit`."""

import keras
import numpy as np
import pytest

from tests.strategies.served import served
from tests.strategies.servers.trained import assert_close, fit, links
from tests.sweeps import sweep
from tfdist.errors import TfdistError
from tfdist.parameter_server import LocalSteps

ROWS, DIM = 20_000, 32
KEYS = np.random.default_rng(0).integers(0, ROWS, (200, 8))
TARGETS = np.random.default_rng(1).normal(size=(200, 1)).astype("float32")
TABLE = ROWS * DIM * 4


def embedded(strategy, optimizer, rows=ROWS, run_eagerly=False, **options):
    keras.utils.set_random_seed(0)

    def make():
        table = keras.layers.Embedding(rows, DIM, **options)
        layers = [keras.layers.Input((8,), dtype="int64"), table, keras.layers.Flatten(), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile(optimizer(), "mse", run_eagerly=run_eagerly or strategy is None)
        return model

    if strategy is None:
        return make()
    with strategy.scope():
        return make()


def sent(model):
    return sum(link.report().sent for link in links(model))


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(lambda: keras.optimizers.Adagrad(0.1), id="adagrad"),
        sweep(lambda: keras.optimizers.SGD(0.1), id="sgd"),
    ],
)
def test_sparse_gradients_send_only_used_rows(optimizer):
    """64 keys a batch, of a table that is split over two servers."""
    alone = embedded(None, optimizer)
    with served(servers=2) as (strategy,):
        model = embedded(strategy, optimizer)
        fit(model, KEYS[:8], y=TARGETS[:8], batch_size=8, epochs=1)
        before = sent(model)
        fit(model, KEYS[:80], y=TARGETS[:80], batch_size=8, epochs=1)
        assert sent(model) - before < TABLE + TABLE / 10, "one reading of all, and 10 steps"
        fit(alone, KEYS[:8], y=TARGETS[:8], batch_size=8, epochs=1)
        fit(alone, KEYS[:80], y=TARGETS[:80], batch_size=8, epochs=1)
        assert_close(model, alone)


@pytest.mark.parametrize("options", [{"embeddings_regularizer": "l2"}, {"embeddings_constraint": "max_norm"}])
def test_dense_gradients_and_constraints_send_whole_table(options):
    """A regularizer makes the gradient dense, and a constraint acts on all rows."""
    adagrad, some = lambda: keras.optimizers.Adagrad(0.1), KEYS % 500
    alone = embedded(None, adagrad, 500, **options)
    with served() as (strategy,):
        model = embedded(strategy, adagrad, 500, **options)
        for each_model in (alone, model):
            fit(each_model, some, y=TARGETS, batch_size=50)
        assert_close(model, alone)
        assert sent(model) > 12 * 500 * DIM * 4


@keras.saving.register_keras_serializable()
class Tied(keras.Model):
    """Predicts each of 300 words from the mean of others, by one table for both."""

    def __init__(self):
        super().__init__()
        self.table = keras.layers.Embedding(300, DIM)

    def call(self, words):
        mean = keras.ops.mean(self.table(words), 1)
        return keras.ops.matmul(mean, keras.ops.transpose(self.table.embeddings))


def test_tied_embedding_trains_as_one_process_does():
    """Its gradient is dense."""

    def made(strategy=None):
        keras.utils.set_random_seed(0)
        with strategy.scope() if strategy else keras.name_scope("alone"):
            model = Tied()
            model.compile(keras.optimizers.Adagrad(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    alone = made()
    with served() as (strategy,):
        model = made(strategy)
        for each_model in (alone, model):
            fit(each_model, KEYS % 300, y=KEYS[:, 0] % 300, batch_size=50)
        assert_close(model, alone)


def test_lazy_updates_send_rows_of_any_optimizer():
    with served(servers=2, is_lazy=True) as (strategy,):
        model = embedded(strategy, lambda: keras.optimizers.Adam(0.01))
        fit(model, KEYS[:8], y=TARGETS[:8], batch_size=8, epochs=1)
        before, losses = sent(model), fit(model, KEYS, y=TARGETS, batch_size=8, epochs=3).history["loss"]
        assert sent(model) - before < 3 * TABLE + TABLE / 2, "three readings of all, and 75 steps"
        assert losses[-1] < losses[0] / 2
        assert int(model.optimizer.iterations) == 76


def test_incompatible_lazy_updates_raise():
    with served(is_lazy=True) as (strategy,):
        model = embedded(strategy, lambda: keras.optimizers.Adam(use_ema=True), 500)
        with pytest.raises(TfdistError, match=r'sparse="lazy" .*\(use sparse="exact"\): Adam\(use_ema=…\)'):
            fit(model, KEYS % 500, y=TARGETS)
    with served(is_lazy=True) as (strategy,):
        model = embedded(strategy, lambda: keras.optimizers.Adam(), 500, embeddings_constraint="max_norm")
        with pytest.raises(ValueError, match=r"updates some rows of .*/embeddings, and its constraint"):
            fit(model, KEYS % 500, y=TARGETS)


def test_local_steps_exchange_whole_variables():
    adagrad, some = lambda: keras.optimizers.Adagrad(0.1), KEYS % 500
    alone = embedded(None, adagrad, 500)
    with served(pushes=LocalSteps(2)) as (strategy,):
        model = embedded(strategy, adagrad, 500)
        for each_model in (alone, model):
            fit(each_model, some, y=TARGETS, batch_size=50)
        assert_close(model, alone)
        assert sent(model) > 6 * 500 * DIM * 4
