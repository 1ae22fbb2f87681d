from pathlib import Path

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

import tfdist
from tfdist.engine.host_calls import GradualUnderflow, host_call

SMALL = np.float32(1e-30)


def subnormal():
    """A subnormal product, and a product of a subnormal number; zeros where such numbers are taken for zero."""
    return float(SMALL * np.float32(1e-10)), float(np.float32(1e-40) * np.float32(1e10))


def in_graph(function):
    """What a host function gives in a thread of TensorFlow."""
    results = []

    def call(value):
        results.append(function())
        return value

    tf.function(lambda value: host_call(call, [value], tf.float32, name="call"))(tf.zeros([]))
    return results[0]


def test_subnormal_numbers_are_not_flushed_to_zero():
    assert all(subnormal())
    assert in_graph(subnormal) == subnormal()


def test_host_calls_compute_the_same_bits_as_other_threads():
    generator = np.random.default_rng(0)
    left = (generator.standard_normal((40, 3)) * 10.0 ** generator.integers(-40, 1, (40, 1))).astype("float32")
    right = generator.standard_normal((3, 30)).astype("float32")

    def compute():
        product = left @ right
        return (product + product[::-1]).tobytes()

    assert in_graph(compute) == compute()


def test_operations_of_host_functions_are_on_the_host():
    """A GPU would have to copy what they make, while a thread that Python has locked waits for it."""
    scopes = []

    def call(value):
        scopes.append(context.context().device_name)
        return value

    tf.function(lambda value: host_call(call, [value], tf.float32, name="call"))(tf.zeros([]))
    assert [scope.rpartition("/")[2] for scope in scopes] == ["device:CPU:0"]


def test_only_host_calls_module_uses_py_function():
    files = [*Path(tfdist.__file__).parent.rglob("*.py")]
    assert [file.name for file in files if "tf.py_function(" in file.read_text()] == ["host_calls.py"]


def test_floating_point_mode_is_restored_after_an_error():
    """Also after an error."""
    modes = []

    def call(value):
        modes.append(subnormal())
        try:
            with GradualUnderflow():
                modes.append(subnormal())
                raise KeyError
        except KeyError:
            modes.append(subnormal())
        return value

    tf.function(lambda value: tf.py_function(call, [value], tf.float32))(tf.zeros([]))
    before, within, after = modes
    assert within == subnormal()
    assert after == before


def test_host_call_returns_several_results():
    double = tf.function(lambda a, b: host_call(lambda x, y: [x + y, x * y], [a, b], [tf.float32] * 2, name="both"))
    assert [float(result) for result in double(tf.constant(2.0), tf.constant(3.0))] == [5, 6]
