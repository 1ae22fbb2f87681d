import ast
import threading
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

import tfdist
from tfdist.comm.buffers import BufferPool
from tfdist.engine import host_calls
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
    used = {
        file.name
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "py_function"
    }
    assert used == {"host_calls.py"}


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


LARGE = host_calls._SMALL_BYTES
"""Number of elements that are too many for `tf.numpy_function`."""
SIZES = pytest.mark.parametrize("size", [10, LARGE])


def test_python_keeps_what_belongs_to_a_thread_between_calls():
    of_thread, first, later = threading.local(), [], []

    def call(value):
        (later if hasattr(of_thread, "seen") else first).append(threading.get_ident())
        of_thread.seen = True
        return value

    step = tf.function(lambda value: host_call(call, [value], tf.TensorSpec([], tf.float32), name="call"))
    for _ in range(100):
        step(tf.zeros([]))
    assert len(first) == len(set(first)) < 100


def assigned(result, size, argument):
    """A variable that has been assigned a result of a host function."""
    variable = tf.Variable(tf.zeros(size))

    @tf.function
    def take():
        variable.assign(host_call(lambda _: result, [argument], tf.TensorSpec([size], tf.float32), name="call"))

    take()
    return variable


def test_memory_of_small_results_is_shared_and_tensorflow_does_not_write_to_it():
    given = BufferPool().take(4000).view(np.float32)
    given[:] = 1
    variable = assigned(given, 1000, tf.zeros([]))
    given[0] = 5
    assert variable[0] == 5, "the memory is not shared"
    tf.function(lambda: variable.assign_add(tf.ones(1000)))()
    assert variable[1] == 2
    assert given[1] == 1


@SIZES
def test_read_only_memory_of_results_is_not_shared(size):
    """The next message comes to the memory of the last one."""
    memory = BufferPool().take(4000).view(np.float32)
    memory[:] = 1
    message = memory[:]
    message.flags.writeable = False
    variable = assigned(message, 1000, tf.zeros(size))
    memory[:] = 7
    assert np.all(variable == 1)


@SIZES
def test_arguments_share_the_memory_of_variables(size):
    variable, places = tf.Variable(tf.zeros(size)), []

    def call(array):
        places.append(array.ctypes.data)
        return np.float32(0)

    step = tf.function(lambda: host_call(call, [variable.read_value()], tf.TensorSpec([], tf.float32), name="call"))
    step()
    step()
    assert len(set(places)) == 1


@pytest.mark.parametrize(
    ("size", "result", "places_in_use"),
    [
        (10, tf.float32, 1),
        (10, tf.TensorSpec([1000], tf.float32), 2),
        (LARGE, tf.TensorSpec([1000], tf.float32), 1),
        (10, tf.TensorSpec([LARGE], tf.float32), 1),
    ],
)
def test_memory_of_results_returns_to_its_pool_at_once_unless_all_is_known_to_be_small(size, result, places_in_use):
    pool, places = BufferPool(), []
    elements = 1000 if result is tf.float32 else result.shape[0]

    def call(_):
        made = pool.take(4 * elements).view(np.float32)
        places.append(made.ctypes.data)
        return made

    @tf.function
    def steps():
        for _ in tf.range(10):
            host_call(call, [tf.zeros(size)], result, name="call")

    steps()
    assert len(set(places)) == places_in_use


VALUES = [tf.constant(value, dtype) for dtype in (tf.bfloat16, tf.half, tf.int8, tf.int64) for value in (1, [1], [])]
VALUES += [tf.constant(True), tf.constant("a"), tf.constant(["a", "bc"])]


@pytest.mark.parametrize("more", [[], [tf.zeros(LARGE)]], ids=["small", "large"])
@pytest.mark.parametrize("convert", [lambda function: function, tf.function], ids=["eager", "graph"])
def test_arguments_are_read_only_arrays_of_all_dtypes_and_may_be_results(convert, more):
    def call(*arrays):
        assert all(isinstance(array, np.ndarray) for array in arrays)
        assert not any(array.flags.writeable for array in arrays)
        return arrays[: len(VALUES)]

    specs = [tf.TensorSpec.from_tensor(value) for value in VALUES]
    results = convert(lambda: host_call(call, [*VALUES, *more], specs, name="call"))()
    for result, value in zip(results, VALUES, strict=True):
        assert result.dtype == value.dtype
        assert result.shape == value.shape
        assert tf.reduce_all(result == value)


@pytest.mark.parametrize("call", [lambda: None, lambda: []], ids=["None", "[]"])
def test_a_function_may_return_nothing(call):
    called = []

    def function():
        called.append(1)
        return call()

    def step():
        host_call(function, [], [], name="call")

    step()
    tf.function(step)()
    assert called == [1, 1]


def test_arguments_of_unknown_shape_and_results_with_shapes():
    @tf.function(input_signature=[tf.TensorSpec([None, 2])])
    def doubled(value):
        result = host_call(lambda array: 2 * array, [value], tf.TensorSpec([None, 2], tf.float32), name="call")
        assert result.shape.as_list() == [None, 2]
        return result

    assert np.all(doubled(tf.ones([3, 2])) == 2)


def test_arrays_of_the_program_stay_writable():
    given = np.ones(3, np.float32)
    host_call(lambda array: array + 1, [given], tf.float32, name="call")
    given *= 2


def test_errors_of_eager_calls_are_the_functions_own():
    with pytest.raises(KeyError, match="missing"):
        host_call(lambda: {}["missing"], [], tf.int64, name="call")
