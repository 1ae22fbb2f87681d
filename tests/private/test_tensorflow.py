import gc

import numpy as np
import pytest
import tensorflow as tf

from tests.private.private_modules import importers
from tests.strategies.ranked import Ranked
from tfdist.private import tensorflow as private


@pytest.fixture
def mirrored():
    return tf.distribute.MirroredStrategy(["CPU:0"])


def test_private_modules_of_tensorflow_are_imported_here_only():
    assert importers("tensorflow.python") == {"private/tensorflow.py"}
    assert importers("tensorflow") > importers("tensorflow.python"), "the search finds nothing"


@pytest.mark.parametrize("on_read", [False, True])
@pytest.mark.parametrize(("value", "number"), [(2.75, (2.75, 2)), (3, (3.0, 3))])
def test_as_number_adds_float_and_int_to_variable(mirrored, on_read, value, number):
    with mirrored.scope():
        synchronization = "ON_READ" if on_read else "AUTO"
        variable = tf.Variable(
            value,
            synchronization=tf.VariableSynchronization[synchronization],
            aggregation=tf.VariableAggregation.SUM,
        )
    kind = type(variable)
    with pytest.raises(TypeError):
        float(variable)
    assert private.as_number(variable) is variable
    assert isinstance(variable, kind)
    assert (float(variable), int(variable)) == number
    variable.assign(value + 1)
    assert int(variable) == number[1] + 1
    assert private.as_number(variable) is variable
    with mirrored.scope():
        other = tf.Variable(1.0)
    with pytest.raises(TypeError):  # others are left alone
        float(other)


def test_other_variables_are_numbers_already():
    variable = tf.Variable(1.5)
    kind = type(variable)
    assert type(private.as_number(variable)) is kind
    assert float(variable) == 1.5


def test_copies_returns_components_of_distributed_variable(mirrored):
    plain = tf.Variable([1.0])
    with mirrored.scope():
        distributed = tf.Variable([2.0])
    assert private.copies(plain) == (plain,)
    assert [type(copy) for copy in private.copies(distributed)] == [type(plain)]
    assert private.is_distributed_variable(distributed)
    assert not private.is_distributed_variable(plain)
    assert not private.is_distributed_variable(3.0)
    (copy,) = private.copies(distributed)
    copy.assign([5.0])
    np.testing.assert_array_equal(distributed, [5.0])


def test_weighed_options_hold_variables_and_weight():
    options = private.WeighedOptions(["a", "b"], 0.5)
    assert (options.variables, options.weight) == (("a", "b"), 0.5)
    assert isinstance(options, tf.distribute.experimental.CommunicationOptions | private.collective_util.Options)
    assert (private.WeighedOptions().variables, private.WeighedOptions().weight) == ((), None)


def test_seeded_operations_repeat_without_changing_global_generator():
    def order():
        return [int(value) for value in tf.data.Dataset.range(20).shuffle(20)]

    try:
        tf.random.set_seed(3)
        expected = [order(), order()]
        tf.random.set_seed(3)
        orders, inside = [order()], []
        for _ in range(2):
            with private.seeded(11):
                assert private.global_seed() == 11
                inside.append(order())
        orders.append(order())
        assert private.global_seed() == 3
    finally:
        private.context.set_global_seed(None)
    assert private.global_seed() is None
    assert orders == expected
    assert inside[0] == inside[1]


def test_local_replica_id_is_zero_inside_replicas(ranks):
    both = ranks(2)
    assert private.local_replica_id() in (0, None)
    replica_ids = both(lambda group: Ranked(group).run(private.local_replica_id))
    assert [int(replica_id) for replica_id in replica_ids] == [0, 0]


def test_container_of_copy_is_its_distributed_variable(mirrored):
    with mirrored.scope():
        variable = tf.Variable(1.0)
    (copy,) = private.copies(variable)
    assert any(private.container_of(part) is variable for part in (copy, copy.handle))
    assert private.container_of(tf.Variable(1.0)) is None


@pytest.mark.parametrize("elements", [0, 3, 1 << 16])
def test_tensor_of_an_array_is_a_copy(elements):
    array = np.arange(2 * elements, dtype=np.float32)[::2]
    with tf.device("CPU:1"):
        tensor = private.tensor_of(array)
    assert tensor.device.endswith("CPU:0")
    expected = array.copy()
    array[:] = -1
    np.testing.assert_array_equal(tensor, expected)


def test_call_of_a_graph_keeps_it_and_updates_what_it_captures():
    variable = tf.Variable([1.0, 2.0])

    def update(gradient):
        variable.assign_sub(gradient)
        return [variable.read_value(), tf.reduce_sum(gradient)]

    called = private.call_of(tf.function(update).get_concrete_function(tf.TensorSpec((2,))))
    gc.collect()
    value, total = called([tf.constant([0.5, 1.0])])
    np.testing.assert_array_equal(value, [0.5, 1.0])
    assert total == 1.5
    with pytest.raises(tf.errors.InvalidArgumentError):
        called([tf.constant([1, 2])])
