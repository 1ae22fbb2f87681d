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


@pytest.mark.parametrize("name", private.__all__)
def test_exported_names_exist(name):
    assert callable(getattr(private, name)) or name in ("input_lib", "multi_device_iterator_ops")


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


@pytest.mark.parametrize("asked", [None, True, False])
def test_a_dataset_is_not_tuned_unless_the_user_says_so(asked):
    dataset = tf.data.Dataset.range(4)
    if asked is not None:
        options = tf.data.Options()
        options.autotune.enabled = asked
        dataset = dataset.with_options(options)
    untuned = private.not_tuned(dataset)
    assert untuned.options().autotune.enabled is bool(asked)
    assert list(untuned.as_numpy_iterator()) == [0, 1, 2, 3]


def test_parts_of_lists_all_input_datasets():
    first, second = tf.data.Dataset.range(3), tf.data.Dataset.range(4)
    both = tf.data.Dataset.zip((first.map(lambda x: x + 1), second)).batch(2)
    names = [type(part).__name__ for part in private.parts_of(both)]
    assert len(names) == 5
    assert names[0] == type(both).__name__
    assert sum("Range" in name for name in names) == 2


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


@pytest.mark.parametrize(
    "spec", [tf.TensorSpec([None, 3], tf.float16), tf.RaggedTensorSpec([None, None]), tf.TensorSpec([None], tf.string)]
)
def test_without_rows_makes_empty_batch_of_spec(spec):
    batch = private.without_rows(spec)
    assert batch.dtype == spec.dtype
    assert batch.shape[0] in (0, None)
    rows = batch.nrows() if isinstance(batch, tf.RaggedTensor) else tf.shape(batch)[0]
    assert int(rows) == 0


def test_local_replica_id_is_zero_inside_replicas(ranks):
    both = ranks(2)
    assert private.local_replica_id() in (0, None)
    replica_ids = both(lambda group: Ranked(group).run(private.local_replica_id))
    assert [int(replica_id) for replica_id in replica_ids] == [0, 0]


def test_infinite_datasets_with_partial_batches_are_counted_each_step(ranks):
    """And a dataset that ends earlier on one rank keeps the others in step."""

    def work(group):
        strategy = Ranked(group)
        seen = []

        def dataset(context):
            return tf.data.Dataset.range(5 if context.input_pipeline_id == 0 else 3).batch(2)

        distributed = strategy.distribute_datasets_from_function(dataset)
        for batch in distributed:
            (local,) = strategy.experimental_local_results(batch)
            seen.append((local.numpy().tolist(), int(strategy.extended.shares.total())))
        return seen

    first, second = ranks(2)(work)
    assert first == [([0, 1], 4), ([2, 3], 3), ([4], 1)]
    assert second == [([0, 1], 4), ([2], 3), ([], 1)]


def test_a_generated_dataset_has_a_state_for_each_iteration():
    left = {}
    ended = []

    def start():
        left[len(left)] = iter(range(3))
        return len(left) - 1

    def following(number):
        value, row = tf.numpy_function(
            lambda number: (next(left[int(number)]), np.full([2], number, np.float32)), [number], [tf.int64, tf.float32]
        )
        return {"value": value, "row": row}

    spec = {"value": tf.TensorSpec([], tf.int64), "row": tf.TensorSpec([2])}
    made = private.generated(start, following, ended.append, spec)
    assert made.element_spec == spec
    first = iter(made)
    assert not left
    assert next(first)["value"] == 0
    second = list(made)
    assert [int(element["value"]) for element in second] == [0, 1, 2]
    np.testing.assert_array_equal(second[0]["row"], [1, 1])
    assert ended == [1]
    assert next(first)["value"] == 1
    del first
    assert ended == [1, 0]


def test_none_in_dataset_elements_has_none_spec():
    made = tf.data.Dataset.range(1).map(lambda number: (number, None))
    assert made.element_spec[1] == private.NoneSpec()


def test_shards_and_unseeded_shuffles_are_detected():
    made = tf.data.Dataset.range(8)
    assert private.shard_of(made) is None
    assert private.shard_of(made.shard(3, 1)) == (3, 1)
    assert not private.shuffles_by_chance(made)
    assert private.shuffles_by_chance(made.shuffle(8))
    assert not private.shuffles_by_chance(made.shuffle(8, seed=1))


def test_passes_that_are_shuffled_anew_within_an_iteration_are_detected():
    made = tf.data.Dataset.range(8)
    shuffled = made.shuffle(8, seed=1)
    for anew in (
        shuffled.repeat(),
        shuffled.batch(2).repeat(2).map(lambda x: x + 1),
        made.concatenate(shuffled.repeat()),
    ):
        assert private.shuffles_anew(anew)
    same = made.shuffle(8, seed=1, reshuffle_each_iteration=False)
    for other in (made, shuffled, made.repeat(), made.repeat().shuffle(8, seed=1), same.repeat()):
        assert not private.shuffles_anew(other)


def test_local_spec_is_that_of_first_replica(mirrored):
    spec = tf.TensorSpec([2])
    assert private.local_spec(spec) is spec
    both = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    values = both.run(lambda: tf.ones(2))
    assert private.local_spec(tf.type_spec_from_value(values)) == spec


def test_function_of_finds_functions_of_graph():
    inner = tf.function(lambda x: x + 1)
    graph = tf.function(lambda x: inner(x)).get_concrete_function(tf.constant(1.0)).graph
    (call,) = [operation for operation in graph.get_operations() if "PartitionedCall" in operation.type]
    assert private.function_of(graph, call.get_attr("f").name) is not None
    assert private.function_of(graph, "another") is None


def test_unordered_operations_wait_for_no_other_ones():
    def times():
        return tf.timestamp(), tf.timestamp(), private.unordered(tf.timestamp()), tf.timestamp()

    first, *others = tf.function(times, autograph=False).get_concrete_function().graph.get_operations()[:4]
    assert [operation.control_inputs for operation in others] == [[first], [], [others[0]]]
    assert float(private.unordered(tf.timestamp())) > 0, "eagerly, too"


def test_container_of_copy_is_its_distributed_variable(mirrored):
    with mirrored.scope():
        variable = tf.Variable(1.0)
    (copy,) = private.copies(variable)
    assert any(private.container_of(part) is variable for part in (copy, copy.handle))
    assert private.container_of(tf.Variable(1.0)) is None
