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


DENSE = {f"k{place}": (f"dense_{place}/kernel", (50, 40)) for place in range(3)}
"""Weights of a model, all of one shape, as they are named in a process that has built other layers before."""


def of_model(first):
    """The same weights in a process in which a layer gets the number ``first``."""
    return {f"m{place}": (f"dense_{first + place}/kernel", (50, 40)) for place in range(3)}


@pytest.mark.parametrize("late", [True, False])
def test_weights_of_a_model_are_found_by_their_place(tmp_path, late):
    """Here the first layer was frozen, so that its gradients were the last ones to be compressed."""
    compressor = Compressor(c.RandomK(0.1))
    for used in (["k1", "k2"], ["k0", "k1", "k2"]):
        compressor.register({key: DENSE[key] for key in used})
        for key in used:
            compressor.tensor(key, gradient()).state.step = int(key[1]) + 1
    compressor.save(tmp_path / "x", DENSE)
    again = Compressor(c.RandomK(0.1))
    if not late:
        again.register(of_model(7))
        before = [again.tensor(key, gradient()).state for key in of_model(7)]
    assert again.load(tmp_path / "x", of_model(7)) != 0
    if not late:
        again.adopt()
    again.register(of_model(7))
    found = [again.tensor(key, gradient()).state for key in of_model(7)]
    assert late or found == before
    assert [state.step for state in found] == [1, 2, 3]
    states = [compressor.tensor(key, gradient()).state for key in DENSE]
    for state, other in zip(found, states, strict=True):
        assert state.generator().integers(1 << 30) == other.generator().integers(1 << 30)


def test_models_have_files_of_their_own(tmp_path):
    """Although one strategy trains them all; and what is read for one and not used yet stays with it."""
    compressor = Compressor(c.TopK(0.1))
    compressor.register({**DENSE, **of_model(3)})
    for place, key in enumerate([*DENSE, *of_model(3)]):
        compressor.tensor(key, gradient()).state.step = place + 1
    compressor.save(tmp_path / "first", DENSE)
    compressor.save(tmp_path / "second", of_model(3))
    again = Compressor(c.TopK(0.1))
    again.load(tmp_path / "second", of_model(0))
    again.load(tmp_path / "first", DENSE)
    again.forget({"m0": DENSE["k0"]})
    again.register({**DENSE, **of_model(0)})
    steps = [again.tensor(key, gradient()).state.step for key in [*DENSE, *of_model(0)]]
    assert steps == [1, 2, 3, 0, 5, 6]


def test_residuals_that_fit_no_weight_are_told_of(tmp_path, caplog):
    compressor = Compressor(c.TopK(0.1))
    compressor.register(DENSE)
    compressor.tensor("k0", gradient())
    compressor.save(tmp_path / "x", DENSE)
    again = Compressor(c.TopK(0.1))
    other = {"k0": ("dense/kernel", (50, 30))}
    again.load(tmp_path / "x", other)
    assert "has residuals of 1 variables that the model does not have, such as weight 0 dense.kernel" in caplog.text
    again.register(other)
    assert not again.tensor("k0", gradient()).state.arrays


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
    """In a loop, which tells no model, by the order in which variables are registered."""
    compressor = made()
    states(compressor)[0].array("residual", np.ones(2000, np.float32))[...] = 7
    compressor.save(tmp_path / "x")
    for path, is_restored in (("model/other/kernel", False), ("model_3/dense_7/kernel", True)):  # as numbers differ
        again = Compressor(c.TopK(0.1), rank=1, size=2)
        again.load(tmp_path / "x")
        again.register({"d": (path, (50, 40)), "e": ("dense_4/kernel", (50, 40))})
        assert not again.tensor("e", gradient()).state.arrays
        assert ("residual" in again.tensor("d", gradient()).state.arrays) is is_restored


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
