import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.strategies.ranked import on_ranks
from tfdist import compression as c
from tfdist.strategies import atomic_files
from tfdist.strategies.keras import keras_saving


def model_in(strategy, value=None):
    """A model; its weights are of one value if one is given."""
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    if value is not None:
        model.set_weights([np.full(weight.shape, value) for weight in model.get_weights()])
    return model


def values(model):
    return {float(value) for weight in model.get_weights() for value in np.ravel(weight)}


SAVES = {
    "model.keras": lambda model, path: model.save(path),
    "model.h5": lambda model, path: model.save(path),
    "model.weights.h5": lambda model, path: model.save_weights(path),
    "by.keras": lambda model, path: keras.saving.save_model(model, path),
}


@pytest.mark.parametrize("name", SAVES)
def test_a_file_appears_whole_or_not_at_all(strategy, tmp_path, monkeypatch, name):
    """What was there before stays where writing fails; nothing is left over."""
    path = tmp_path / name
    SAVES[name](model_in(strategy, 1.0), path)
    before = path.read_bytes()
    assert list(tmp_path.iterdir()) == [path]
    model, replaced = model_in(strategy, 2.0), []

    def fails(source, target):
        replaced.append((source.parent, target))
        raise OSError("disk full")

    monkeypatch.setattr(keras_saving.os, "replace", fails)
    with pytest.raises(OSError, match="disk full"):
        SAVES[name](model, path)
    assert replaced == [(tmp_path, path)]
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == before


def test_next_save_removes_leftover_partial_files(strategy, tmp_path):
    """Only partial files of the saved file are removed."""
    path, other = tmp_path / "model[1].keras", tmp_path / "model1.keras"
    left, kept = atomic_files.partial_name(path), atomic_files.partial_name(other)
    for file in (left, kept):
        file.write_text("half")
    model_in(strategy).save(path)
    assert sorted(tmp_path.iterdir()) == sorted([path, kept])


@pytest.mark.parametrize(
    ("name", "arguments", "is_one"),
    [
        ("a.keras", {}, True),
        ("a.weights.h5", {}, True),
        ("a", {}, False),
        ("gs://bucket/a.keras", {}, False),
        ("there.keras", {}, True),
        ("there.keras", {"overwrite": False}, False),  # Keras asks the user first
        ("a.weights.h5", {"max_shard_size": 1}, False),
        ("a.keras", {"zipped": True}, True),
        ("a.keras", {"zipped": False}, False),
    ],
)
def test_only_single_new_files_are_written_atomically(tmp_path, name, arguments, is_one):
    (tmp_path / "there.keras").touch()
    path = name if "://" in name else tmp_path / name
    assert keras_saving._is_one_new_file({"filepath": path, "overwrite": True, **arguments}) is is_one


@pytest.mark.parametrize("name", ["model.keras", "model.weights.h5"])
def test_one_rank_writes(ranks, tmp_path, name):
    def work(strategy):
        folder = tmp_path / str(strategy.rank)
        folder.mkdir()
        SAVES[name](model_in(strategy), folder / name)
        return [file.name for file in folder.iterdir()]

    assert on_ranks(ranks(2), work) == [[name], []]


def test_one_rank_reads_for_all(ranks, tmp_path):
    """Also where only it has the file."""
    path = tmp_path / "0" / "model.weights.h5"
    path.parent.mkdir()

    def work(strategy):
        model_in(strategy, 5.0).save_weights(path)
        model = model_in(strategy, 1.0)
        model.load_weights(path if strategy.rank == 0 else tmp_path / "missing.weights.h5")
        return values(model)

    assert on_ranks(ranks(2), work) == [{5.0}] * 2


class TwoOptimizers(keras.Model):
    """Trains with a step of its own and no `call`, each variable by an optimizer."""

    def __init__(self, built):
        super().__init__()
        self.kernels = [self.add_weight(shape=(2, 1), name=name) for name in ("first", "second")]
        self.built = True
        self.compile()
        self.optimizers = [keras.optimizers.Adam(0.1), keras.optimizers.SGD(0.1)]
        for optimizer, kernel in zip(self.optimizers, self.kernels if built else [], strict=built):
            optimizer.build([kernel])

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ self.kernels[0] + x @ self.kernels[1] - y) ** 2)
        gradients = tape.gradient(loss, [kernel.value for kernel in self.kernels])
        for optimizer, kernel, gradient in zip(self.optimizers, self.kernels, gradients, strict=True):
            optimizer.apply([gradient], [kernel])
        return {"loss": loss}

    def state(self):
        owners = (self, self.optimizer, *self.optimizers)
        return [[variable.numpy().tolist() for variable in owner.variables] for owner in owners]


@pytest.mark.filterwarnings("ignore:Skipping variable loading")
@pytest.mark.parametrize("built", [True, False])
def test_checkpoint_restores_several_optimizers_as_keras_does(ranks, tmp_path, built):
    """All ranks load what plain Keras does, which skips an optimizer with slots that is not built."""
    path = tmp_path / "model.weights.h5"

    def work(strategy):
        with strategy.scope():
            trained, loaded = TwoOptimizers(built), TwoOptimizers(built)
        callback = keras.callbacks.ModelCheckpoint(path, save_weights_only=True)
        x = np.ones((4, 2), np.float32)
        trained.fit(x, x[:, :1], epochs=2, verbose=0, shuffle=False, callbacks=[callback])
        loaded.load_weights(path)
        return loaded.state()

    first, second = on_ranks(ranks(2), work)
    plain = TwoOptimizers(built)
    plain.load_weights(path)
    assert first == second == plain.state()
    assert [optimizer.iterations for optimizer in plain.optimizers] == [2 if built else 0, 2]


def test_unreadable_file_raises_on_all_ranks(ranks, tmp_path):
    errors = []

    def work(strategy):
        model = model_in(strategy, 1.0)
        try:
            model.load_weights(tmp_path / "missing.weights.h5")
        except OSError as error:
            errors.append((strategy.rank, str(error)))
        return values(model)

    assert on_ranks(ranks(2), work) == [{1.0}] * 2
    (_, chief_error), (_, told) = sorted(errors)
    assert "its own error says why" not in chief_error
    assert "the chief could not load the weights from" in told


def test_in_the_scope_all_load_what_the_chief_has_written(ranks, tmp_path):
    path = tmp_path / "model.keras"

    def work(strategy):
        model_in(strategy, 3.0).save(path)
        with strategy.scope():
            model = keras.models.load_model(path)
        return values(model), model.distribute_strategy is strategy

    assert on_ranks(ranks(2), work) == [({3.0}, True)] * 2


def residuals(strategy):
    """Trains a step in which something is left unsent; the compressor."""
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((40,)), keras.layers.Dense(50)])
        model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(4, 40)).astype(np.float32)
    model.fit(x, np.zeros((4, 50), np.float32), shuffle=False, verbose=0)
    return strategy.extended.compressor, model


@pytest.mark.parametrize("missing", [None, 1], ids=["all", "one is missing"])
def test_residuals_are_saved_by_each_and_taken_back_by_all_or_none(ranks, tmp_path, caplog, missing):
    path = tmp_path / "model.weights.h5"

    def work(strategy):
        compressor, model = residuals(strategy)
        model.save_weights(path)
        strategy.extended.exchange.barrier()
        if strategy.rank == missing:
            compressor.file(path).unlink()
        strategy.extended.exchange.barrier()
        adopted, forgotten = [], []
        compressor.adopt, compressor.forget = lambda: adopted.append(True), lambda weights: forgotten.append(True)
        model.load_weights(path)
        return bool(adopted), bool(forgotten)

    expected = (missing is None, missing is not None)
    assert on_ranks(ranks(2), work, compression=c.TopK(0.1)) == [expected] * 2
    assert ("those of rank(s) [1] are missing" in caplog.text) == (missing is not None)


def test_without_compression_there_is_nothing_to_take_back(strategy, tmp_path):
    assert keras_saving.compressor_of(strategy.extended) is None
    before = strategy.extended.group.engine.statistics.collectives
    keras_saving.restore_compression(strategy.extended, tmp_path / "x")
    assert strategy.extended.group.engine.statistics.collectives == before
