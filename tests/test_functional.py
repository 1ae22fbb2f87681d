"""The functional interface on one process; `tests/multiprocess/test_functional.py` has it on several."""

import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist import initialization


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setattr(initialization, "_initialized", None)


def test_collectives_of_one_process_return_their_input():
    tfdist.init()
    assert tfdist.is_initialized()
    assert (tfdist.rank(), tfdist.size(), tfdist.local_rank(), tfdist.local_size()) == (0, 1, 0, 1)
    x = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    group = tfdist.Group([0])
    for result in (
        tfdist.all_reduce(x),
        tfdist.all_reduce(x, "product", group),
        tfdist.all_gather(x, axis=1),
        tfdist.reduce_scatter(x, "mean"),
        tfdist.broadcast(x),
        tfdist.all_to_all(x),
        tfdist.all_to_all(x, [2])[0],
    ):
        np.testing.assert_array_equal(result, x)
    slices = tfdist.all_reduce(tf.IndexedSlices(x, [0, 3], [5, 2]))
    np.testing.assert_array_equal(slices.indices, [0, 3])
    assert tfdist.join() == 0
    tfdist.barrier()


def test_gradient_of_sum_is_defined_and_of_max_raises():
    tfdist.init()
    x = tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(tfdist.all_reduce(x, "sum") * 3.0)
    np.testing.assert_array_equal(tape.gradient(y, x), [3.0, 3.0])
    with tf.GradientTape() as tape:
        y = tfdist.all_reduce(x, "max")
    with pytest.raises(ValueError, match="a gradient for 'sum' and 'mean', not for 'max'"):
        tape.gradient(y, x)


def test_numbers_that_would_be_rounded_are_refused():
    tfdist.init()
    with pytest.raises(ValueError, match="mean of IndexedSlices of integers would round each process's rows"):
        tfdist.all_reduce(tf.IndexedSlices(tf.constant([[1]]), [0], [5, 1]))
    with pytest.raises(TypeError, match="splits must be whole numbers of rows; got float32"):
        tfdist.all_to_all([1.0, 2.0], [1.5])


def test_a_group_must_be_one():
    tfdist.init()
    with pytest.raises(TypeError, match=r"group= must be a tfdist\.Group, such as tfdist\.Group\(\[0, 1\]\); got 'x'"):
        tfdist.all_reduce(1.0, group="x")
