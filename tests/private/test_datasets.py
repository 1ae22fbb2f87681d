import numpy as np
import pytest
import tensorflow as tf

from tests.strategies.ranked import Ranked
from tfdist.private import datasets, tensorflow


@pytest.mark.parametrize("asked", [None, True, False])
def test_a_dataset_is_not_tuned_unless_the_user_says_so(asked):
    dataset = tf.data.Dataset.range(4)
    if asked is not None:
        options = tf.data.Options()
        options.autotune.enabled = asked
        dataset = dataset.with_options(options)
    untuned = datasets.not_tuned(dataset)
    assert untuned.options().autotune.enabled is bool(asked)
    assert list(untuned.as_numpy_iterator()) == [0, 1, 2, 3]


def test_parts_of_lists_all_input_datasets():
    first, second = tf.data.Dataset.range(3), tf.data.Dataset.range(4)
    both = tf.data.Dataset.zip((first.map(lambda x: x + 1), second)).batch(2)
    names = [type(part).__name__ for part in datasets.parts_of(both)]
    assert len(names) == 5
    assert names[0] == type(both).__name__
    assert sum("Range" in name for name in names) == 2


@pytest.mark.parametrize(
    "spec", [tf.TensorSpec([None, 3], tf.float16), tf.RaggedTensorSpec([None, None]), tf.TensorSpec([None], tf.string)]
)
def test_without_rows_makes_empty_batch_of_spec(spec):
    batch = datasets.without_rows(spec)
    assert batch.dtype == spec.dtype
    assert batch.shape[0] in (0, None)
    rows = batch.nrows() if isinstance(batch, tf.RaggedTensor) else tf.shape(batch)[0]
    assert int(rows) == 0


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
    made = datasets.generated(start, following, ended.append, spec)
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
    assert made.element_spec[1] == datasets.NoneSpec()


def test_shards_and_unseeded_shuffles_are_detected():
    tensorflow.context.set_global_seed(None)  # other tests may have left one
    made = tf.data.Dataset.range(8)
    assert datasets.shard_of(made) is None
    assert datasets.shard_of(made.shard(3, 1)) == (3, 1)
    assert not datasets.shuffles_by_chance(made)
    assert datasets.shuffles_by_chance(made.shuffle(8))
    assert not datasets.shuffles_by_chance(made.shuffle(8, seed=1))


def test_passes_that_are_shuffled_anew_within_an_iteration_are_detected():
    made = tf.data.Dataset.range(8)
    shuffled = made.shuffle(8, seed=1)
    for anew in (
        shuffled.repeat(),
        shuffled.batch(2).repeat(2).map(lambda x: x + 1),
        made.concatenate(shuffled.repeat()),
    ):
        assert datasets.shuffles_anew(anew)
    same = made.shuffle(8, seed=1, reshuffle_each_iteration=False)
    for other in (made, shuffled, made.repeat(), made.repeat().shuffle(8, seed=1), same.repeat()):
        assert not datasets.shuffles_anew(other)


def test_local_spec_is_that_of_first_replica():
    spec = tf.TensorSpec([2])
    assert datasets.local_spec(spec) is spec
    both = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    values = both.run(lambda: tf.ones(2))
    assert datasets.local_spec(tf.type_spec_from_value(values)) == spec
