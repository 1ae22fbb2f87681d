"""Importing tfdist does not change TensorFlow or Keras, and the patches of its strategies do not affect others."""

import json
import subprocess
import sys

import pytest

from tests.multiprocess import harness

IMPORTS = """
import importlib, json, pkgutil, sys, types
import keras, tensorflow as tf

def is_theirs(name):
    return str(name).split(".")[0] in ("tensorflow", "keras")

def state():
    found = {}
    for name, module in list(sys.modules.items()):
        if not is_theirs(name) or not isinstance(module, types.ModuleType):
            continue
        for key, value in list(object.__getattribute__(module, "__dict__").items()):
            found[name, key] = value
            if isinstance(value, type) and is_theirs(value.__module__):
                found.update({(value.__module__, value.__qualname__, part): own for part, own in vars(value).items()})
    return found

def changes(before, after):
    loaded = {key[0] for key in before}
    changed = [key for key, value in before.items() if after.get(key) is not value]
    added = [key for key in after if key not in before and key[0] in loaded]
    # A module that is loaded when it is first used sets itself in its package.
    keys = [key for key in changed + added if not isinstance(after.get(key), types.ModuleType)]
    return sorted(".".join(map(str, key)) for key in keys)

loaded = state()
import tfdist
import tfdist.strategies
for name in tfdist.__all__:
    getattr(tfdist, name)
for module in pkgutil.walk_packages(tfdist.__path__, "tfdist."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
imported = state()
tfdist.AllReduceStrategy()
print(json.dumps([changes(loaded, imported), changes(imported, state())]))
"""


def test_imports_change_nothing():
    ended = subprocess.run(
        [sys.executable, "-c", IMPORTS],
        env=harness.environment(),
        capture_output=True,
        text=True,
        timeout=harness.DEADLINE,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    by_imports, by_a_strategy = json.loads(ended.stdout.splitlines()[-1])
    assert by_imports == []
    # The comparison sees what the first strategy changes, in modules and in classes.
    assert "tensorflow.python.distribute.input_lib._calculate_replicas_with_values" in by_a_strategy
    assert "keras.src.optimizers.base_optimizer.BaseOptimizer._clip_gradients" in by_a_strategy


PLAIN = """
import json, random, sys
import keras, numpy as np, tensorflow as tf

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
devices = ["CPU:0", "CPU:1"]
X = np.random.default_rng(0).normal(size=(30, 4))

def dense():
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dropout(0.2), keras.layers.Dense(1)])
    metrics = ["mae", keras.metrics.RootMeanSquaredError()]
    model.compile(keras.optimizers.SGD(0.05, clipnorm=1.0), "mse", metrics=metrics)
    return model

class Recording(keras.Sequential):
    seen = ()
    def train_step(self, data):
        self.seen += (float(data[0][0, 0]),)
        return super().train_step(data)

class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 6
    def __getitem__(self, index):
        return X[5 * index : 5 * index + 5], X[5 * index : 5 * index + 5, :1]

if sys.argv[1] == "with tfdist":
    import tfdist
    ours = tfdist.AllReduceStrategy(devices=devices)
    with ours.scope():
        model = dense()
    for workers in (1, 2):
        model.fit(Batches(workers=workers), epochs=2, verbose=0)
    model.evaluate(Batches(), verbose=0)
    # Until here tfdist was at work; what follows must not be different.

keras.backend.clear_session()
keras.utils.set_random_seed(5)
strategy = tf.distribute.MirroredStrategy(devices)
dataset = tf.data.Dataset.range(11).batch(4)

def read(distributed):
    iterator = iter(distributed)
    inner = iterator._iterators[0]._iterator
    tuned = [str(part._dataset.options().autotune.enabled) for part in inner._device_iterators]
    batches = [[part.numpy().tolist() for part in strategy.experimental_local_results(batch)] for batch in iterator]
    return [type(distributed).__name__, tuned, batches]

found = {
    "dataset": read(strategy.experimental_distribute_dataset(dataset)),
    "function": read(strategy.distribute_datasets_from_function(lambda context: dataset)),
}
with strategy.scope():
    model = dense()
    variable = tf.Variable(2.0)
found["history"] = model.fit(X, X[:, :1], batch_size=10, epochs=2, verbose=0).history
found["evaluated"] = model.evaluate(X, X[:, :1], batch_size=10, verbose=0)
found["predicted"] = model.predict(X, batch_size=10, verbose=0).tolist()
found["orders"] = []
for workers in (1, 2):
    recording = Recording([keras.layers.Input((4,)), keras.layers.Dense(1)])
    recording.compile("sgd", "mse", run_eagerly=True)
    random.seed(9)
    recording.fit(Batches(workers=workers), verbose=0)
    found["orders"].append(recording.seen)
try:
    found["number"] = float(variable)
except TypeError as error:
    found["number"] = str(error)
found["variable"] = [type(variable).__name__, hasattr(variable, "__float__")]
print(json.dumps(found))
"""


@pytest.mark.multiprocess
def test_mirrored_strategy_results_are_unchanged_by_tfdist(tmp_path):
    program = tmp_path / "plain.py"
    program.write_text(PLAIN)

    def results_of(how):
        (ended,) = harness.run([str(program), how], 1)
        return json.loads(ended.output.splitlines()[-1])

    without, beside = results_of("without"), results_of("with tfdist")
    assert without["dataset"][2] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10]]]
    assert without["orders"][0] == without["orders"][1] != sorted(without["orders"][0])  # both ways are shuffled
    for key, value in without.items():
        assert beside[key] == value, key
