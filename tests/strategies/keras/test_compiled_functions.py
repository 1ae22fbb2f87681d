import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.engine.host_calls import HostCallError, host_call
from tfdist.private.keras import backend, tf_core
from tfdist.private.models import logits_of, set_logits
from tfdist.strategies.keras import compiled_functions
from tfdist.strategies.keras.keras_assignments import MERGED_BY, Assigned
from tfdist.strategies.keras.keras_metrics import infer_merge_rule


def in_graph(function, *arguments):
    return tf.function(lambda *given: compiled_functions.call(function, *given), autograph=False)(*arguments)


def test_structures_come_out_as_they_are_returned():
    other = object()
    kept = []

    def function(given):
        return {"passed": given["a"], "computed": (given["a"] + 1, None), "other": other}

    def outer(a):
        outputs, losses = compiled_functions.call(function, {"a": a})
        kept.append(outputs["passed"] is a)
        assert outputs["other"] is other
        assert losses == []
        return outputs["computed"]

    computed, none = tf.function(outer, autograph=False)(tf.constant(2.0))
    assert (float(computed), none, kept) == (3.0, None, [True])


def test_state_is_assigned_outside_and_read_inside(monkeypatch):
    variable, untouched = keras.Variable(1.0), keras.Variable(5.0)
    assigned, graphs = [], []

    def note(self, value):
        assigned.append((self, tf.compat.v1.get_default_graph()))
        self._value.assign(value)

    def function(given):
        variable.assign(variable + given)
        variable.assign_add(untouched)
        return variable.value * 1

    def outer(given):
        graphs.append(tf.compat.v1.get_default_graph())
        return compiled_functions.call(function, given)[0]

    monkeypatch.setattr(tf_core.Variable, "_direct_assign", note)
    assert float(tf.function(outer, autograph=False)(tf.constant(2.0))) == 8.0
    assert assigned == [(variable, graphs[0])]
    assert (float(variable.value), float(untouched.value)) == (8.0, 5.0)


@pytest.mark.parametrize(
    ("combine", "expected"), [(keras.ops.maximum, "max"), (keras.ops.minimum, "min"), (keras.ops.add, "sum")]
)
def test_how_metrics_are_merged_is_found_in_what_is_compiled(caplog, combine, expected):
    """Outside of the compiled graph, the value that is assigned shows no more than that a function has been called."""
    variable, assigned = keras.Variable(0.0, aggregation="sum"), Assigned()

    def outer(given):
        assigned.note(variable, given)  # as an assignment in a replica does
        compiled_functions.call(lambda inside: variable.assign(combine(variable, inside)), given)
        infer_merge_rule(variable, assigned.values[id(variable)])

    with assigned.noted():
        tf.function(outer, autograph=False)(tf.constant(2.0))
    assert getattr(variable, MERGED_BY, "sum") == expected
    assert not caplog.records, "it is not taken for overwritten"


def test_masks_logits_and_losses_are_kept():
    layer = keras.layers.Layer()

    def function(given):
        np.testing.assert_array_equal(backend.get_keras_mask(given).shape, [2])
        layer.add_loss(tf.reduce_sum(given))
        outputs = given * 2
        backend.set_keras_mask(outputs, backend.get_keras_mask(given))
        set_logits(outputs, given * 3)
        return outputs

    def outer(given):
        backend.set_keras_mask(given, given > 1)
        outputs, losses = compiled_functions.call(function, given)
        return backend.get_keras_mask(outputs), logits_of(outputs), losses

    mask, logits, losses = tf.function(outer, autograph=False)(tf.constant([1.0, 2.0]))
    assert mask.numpy().tolist() == [False, True]
    assert logits.numpy().tolist() == [3.0, 6.0]
    assert [float(loss) for loss in losses] == [3.0]


def test_gradients_equal_those_without_compilation():
    """Also sparse ones, and of what was assigned within."""
    table = keras.Variable(np.arange(6.0, dtype=np.float32).reshape(3, 2))
    count = keras.Variable(0.0, trainable=False)

    def function(rows):
        count.assign_add(1.0)
        return tf.reduce_sum(tf.square(tf.gather(table.value, rows))) * count.value

    def outer(rows):
        with tf.GradientTape() as tape:
            outputs = compiled_functions.call(function, rows)[0]
        return tf.convert_to_tensor(tape.gradient(outputs, table.value))

    gradient = tf.function(outer, autograph=False)(tf.constant([2, 0, 2]))
    np.testing.assert_allclose(gradient, [[0, 2], [0, 0], [16, 20]])
    assert float(count.value) == 1.0


def test_regularizers_read_weights():
    layer = keras.layers.Dense(2, kernel_regularizer="l2", kernel_initializer="ones")
    layer.build((None, 3))
    assert float(in_graph(lambda given: given + tf.add_n(layer.losses), tf.constant(0.0))[0]) == pytest.approx(0.06)


def test_functions_are_compiled_by_xla():
    with pytest.raises(tf.errors.OpError, match=r"(?i)xla|tf2xla"):
        in_graph(lambda given: tf.strings.as_string(given), tf.constant(1.0))


def test_calls_of_the_host_are_refused():
    variable = keras.Variable(1.0)

    def function(given):
        variable.assign(given)
        return host_call(lambda value: value, [given], tf.float32, "sum")

    def outer(given):
        with pytest.raises(HostCallError, match="cannot compile calls of host functions, such as sum"):
            compiled_functions.call(function, given)
        return host_call(lambda value: value + 1, [given], tf.float32, "sum")

    assert float(tf.function(outer, autograph=False)(tf.constant(2.0))) == 3.0
    assert float(variable.value) == 1.0, "nothing was assigned"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (tf.constant(1.0), True),
        (None, True),
        (tf.constant("text"), False),
        (tf.ragged.constant([[1], [2, 3]]), False),
        (tf.sparse.from_dense([[1]]), False),
    ],
    ids=str,
)
def test_can_take_refuses_strings_ragged_and_sparse(value, expected):
    assert compiled_functions.can_take(value) is expected
