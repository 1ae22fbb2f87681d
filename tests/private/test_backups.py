"""Private members of `BackupAndRestore`, on one."""

import keras
import numpy as np
import pytest

from tfdist.private import backups

X = np.ones((4, 2), np.float32)


@pytest.fixture
def model():
    made = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    made.compile("sgd", "mse")
    return made


def test_replaced_load_and_save_are_called(tmp_path, model):
    called = []
    callback = keras.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)
    load, save = backups.methods_of(callback)
    backups.replace_methods(callback, lambda: called.append("load") or load(), lambda: called.append("save") or save())
    model.fit(X, X[:, :1], epochs=2, verbose=0, callbacks=[callback])
    assert called == ["load", "save", "save"]
    assert backups.position_of(callback) == {"epoch": 2, "batch": 0}
    paths = backups.paths_of(callback)
    assert sorted(paths) == sorted(str(path) for path in tmp_path.iterdir() if not path.name.endswith(".bkp"))


def test_with_paths_loads_another_file(tmp_path, model):
    callback = keras.callbacks.BackupAndRestore(tmp_path)
    callback.set_model(model)
    before = model.get_weights()
    model.save_weights(tmp_path / "other.weights.h5")
    model.set_weights([array + 1 for array in before])
    with backups.with_paths(callback, str(tmp_path / "other.weights.h5"), "none"):
        backups.methods_of(callback)[0]()
    np.testing.assert_array_equal(model.get_weights()[0], before[0])
    assert backups.paths_of(callback)[0].endswith("latest.weights.h5")
