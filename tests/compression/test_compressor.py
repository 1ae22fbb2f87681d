"""The state of a process's compressed tensors, and how it is saved."""

import io
from types import SimpleNamespace

import numpy as np
import pytest

from tfdist import compression as c
from tfdist.compression.compressor import Compressor


def gradient(dtype="float32"):
    return SimpleNamespace(dtype=SimpleNamespace(name=dtype))


def made():
    compressor = Compressor(c.TopK(0.1), rank=1, size=2)
    variables = {"a": ("dense/kernel", (50, 40)), "b": ("dense/bias", (40,)), "c": ("conv/kernel", (5, 5, 8, 8))}
    compressor.register(variables)
    return compressor


def states(compressor):
    return [compressor.tensor(name, gradient()).state for name in ("a", "c")]


def test_tensors_are_those_of_the_policy():
    compressor = made()
    assert compressor.tensor("b", gradient()) is None
    assert compressor.tensor("a", gradient("int32")) is None
    assert made().tensor("a", gradient("bfloat16")) is not None
    first, second = states(made())
    assert (first.shape, first.rank, first.size, second.shape) == ((50, 40), 1, 2, (5, 5, 8, 8))
    assert states(compressor := made())[0] is states(compressor)[0]
    assert list(compressor.traffic()) == ["dense/kernel", "conv/kernel"]


def test_a_model_that_is_loaded_counts_from_the_first_tensor(tmp_path):
    """As where it was trained, although the strategy has trained it, or another one, before."""
    compressor = made()
    earlier = states(compressor)[0]
    earlier.step = 3
    assert compressor.number_of_variables == 3
    compressor.save(tmp_path / "model.keras")
    compressor.begin_model()
    assert compressor.number_of_variables == 0
    assert compressor.load(tmp_path / "model.keras")
    compressor.register({"d": ("dense_1/kernel", (50, 40))})
    assert compressor.tensor("d", gradient()).state.step == 3
    compressor.tensor("d", gradient()).state.step = 4
    assert earlier.step == 3
    assert compressor.number_of_variables == 1
    compressor.save(tmp_path / "model.keras")
    earlier.step = compressor.tensor("d", gradient()).state.step = 0
    compressor.load(tmp_path / "model.keras")
    compressor.adopt()
    assert (earlier.step, compressor.tensor("d", gradient()).state.step) == (0, 4), "the last model's"


@pytest.mark.parametrize("late", [True, False])
def test_saved_states_are_restored(tmp_path, late):
    compressor = made()
    first, second = states(compressor)
    first.step, second.step = 3, 3
    first.array("residual", np.ones(2000, np.float32))[...] = 7
    second.part("for 1").array("residual", np.ones(5, np.float64))[...] = 8
    compressor.save(tmp_path / "model.keras")
    assert [path.name for path in tmp_path.iterdir()] == ["model.keras.compression-1-of-2.npz"]
    again = made()
    if not late:
        states(again)[0].array("residual", np.ones(3, np.float32))
    assert again.load(tmp_path / "model.keras") == made().load(tmp_path / "model.keras") != 0
    if not late:
        again.adopt()
    first, second = states(again)
    assert (first.step, second.step) == (3, 3)
    np.testing.assert_array_equal(first.array("residual", np.ones(2000, np.float32)), 7)
    np.testing.assert_array_equal(second.part("for 1").array("residual", np.ones(5, np.float64)), 8)
    again.forget()
    assert not first.arrays
    assert first.step == 0


def test_saved_state_is_restored_only_to_its_variable(tmp_path):
    """Here the first layer is frozen after it was saved, so that others take its place."""
    compressor = made()
    states(compressor)[0].array("residual", np.ones(2000, np.float32))[...] = 7
    compressor.save(tmp_path / "x")
    again = made()
    again.register({"d": ("model/other/kernel", (50, 40)), "e": ("dense_7/kernel", (50, 40))})
    again.load(tmp_path / "x")
    assert not again.tensor("d", gradient()).state.arrays
    again = made()
    again.register({"e": ("model_3/dense_7/kernel", (50, 40)), "f": ("dense_4/kernel", (50, 40))})
    again.load(tmp_path / "x")
    assert "residual" in again.tensor("f", gradient()).state.arrays  # numbers in paths count what was built before
    assert not again.tensor("e", gradient()).state.arrays


def test_loaded_but_unused_state_is_saved_again(tmp_path):
    compressor = made()
    states(compressor)[0].step = 5
    compressor.save(tmp_path / "x")
    again = made()
    again.load(tmp_path / "x")
    again.save(tmp_path / "y")
    last = made()
    assert last.load(tmp_path / "y") != 0
    assert states(last)[0].step == 5


def test_remote_files_and_other_process_counts_are_ignored(tmp_path, caplog):
    made().save("gs://bucket/model.keras")
    assert "only to local files" in caplog.text
    Compressor(c.TopK(0.1), rank=0, size=3).save(tmp_path / "x")
    assert Compressor(c.TopK(0.1), rank=0, size=2).load(tmp_path / "x") == 0
    assert "by another number of processes" in caplog.text


def test_load_number_depends_on_the_step(tmp_path):
    numbers = []
    for step in (1, 2):
        compressor = made()
        for state in states(compressor):
            state.step = step
        compressor.save(tmp_path / "x")
        numbers.append(made().load(tmp_path / "x"))
    assert numbers[0] != numbers[1]


def test_missing_file_is_ignored_and_damaged_file_raises(tmp_path):
    compressor = made()
    assert compressor.load(tmp_path / "x") == 0
    stream = io.BytesIO()
    np.save(stream, np.ones(3))
    for content in (b"PK nonsense", stream.getvalue(), b""):
        compressor.file(tmp_path / "x").write_bytes(content)
        with pytest.raises(OSError, match="delete it to start without residuals"):
            compressor.load(tmp_path / "x")
