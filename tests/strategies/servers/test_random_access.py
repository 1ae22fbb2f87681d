"""Batches by index are those that Keras makes from the same arguments."""

import threading

import keras
import numpy as np
import pandas
import pytest
import scipy.sparse
import tensorflow as tf

from tests.sweeps import crossed
from tfdist.parameter_server.dealing.dealer import Dealer
from tfdist.parameter_server.dealing.dealt_epoch import Batch, EpochOver
from tfdist.parameter_server.dealing.plan import order
from tfdist.private.keras import array_slicing, data_adapters, tree
from tfdist.strategies.servers.dealt_batches import dataset
from tfdist.strategies.servers.random_access import source_of

ROWS = 10


def in_order(source):
    """Tickets of all batches, as without shuffling."""
    step = source.items_per_batch
    return [(start, np.arange(start, min(start + step, source.items))) for start in range(0, source.items, step)]


def keras_dataset(x, y=None, sample_weight=None, batch_size=None, class_weight=None, steps=None):
    return data_adapters.get_data_adapter(
        x, y, sample_weight, batch_size, steps, shuffle=False, class_weight=class_weight
    ).get_tf_dataset()


def leaves_of(batch):
    return [
        part.to_tensor(-1) if isinstance(part, tf.RaggedTensor)
        else tf.sparse.to_dense(part) if isinstance(part, tf.SparseTensor) else part
        for part in tree.flatten(batch)
    ]  # fmt: skip


def assert_equal(batch, expected):
    tree.assert_same_structure(batch, expected)
    for leaf, other in zip(tree.flatten(batch), tree.flatten(expected), strict=True):
        assert type(leaf) is type(other)
    for leaf, other in zip(leaves_of(batch), leaves_of(expected), strict=True):
        if other is not None:
            assert leaf.dtype == other.dtype
            np.testing.assert_array_equal(leaf.numpy(), other.numpy())


def numbers(*shape, dtype="float32"):
    return np.arange(ROWS * int(np.prod(shape))).reshape(ROWS, *shape).astype(dtype)


class Sized:
    """Any object that NumPy can convert."""

    shape = (ROWS, 2)

    def __array__(self, dtype=None, copy=None):
        return numbers(2, dtype="float64")


ARRAYS = {
    "x": {"x": numbers(3)},
    "x and y": {"x": numbers(3), "y": numbers(1, dtype="int64")},
    "weights": {"x": numbers(2), "y": numbers(), "sample_weight": np.linspace(0, 1, ROWS)},
    "doubles become floats": {"x": numbers(3, dtype="float64"), "y": numbers(dtype="float16")},
    "other numbers": {"x": numbers(2, dtype="uint8"), "y": numbers(dtype="bool"), "sample_weight": numbers()},
    "images": {"x": numbers(4, 5, 3), "y": np.eye(ROWS)},
    "a view": {"x": numbers(6)[:, ::2], "y": np.asfortranarray(numbers(4))},
    "tensors": {"x": tf.constant(numbers(3)), "y": tf.constant(numbers(dtype="float64"))},
    "nested": {
        "x": {"b": numbers(2), "a": [tf.constant(numbers(1)), (numbers(3), numbers())]},
        "y": {"first": numbers(), "second": numbers(2)},
        "sample_weight": {"first": numbers(), "second": numbers()},
    },
    "one weight for all outputs": {"x": numbers(2), "y": [numbers(), numbers(2)], "sample_weight": numbers()},
    "a list": {"x": [numbers(2), numbers(3)]},
    "an input that is missing": {"x": {"here": numbers(2), "none": None}, "y": numbers()},
    "strings": {"x": tf.constant([f"word {row}" for row in range(ROWS)]), "y": numbers()},
    "bytes in another order": {"x": numbers(2, dtype=">f4"), "y": numbers(dtype=">i4")},
    "objects that are strings": {"x": np.array([f"word {row}" for row in range(ROWS)], object), "y": numbers()},
    "ragged": {"x": tf.ragged.range(tf.range(ROWS)), "y": numbers()},
    "sparse": {"x": tf.sparse.from_dense(np.tri(ROWS, 4, dtype="float32")), "y": numbers()},
    "scipy": {"x": scipy.sparse.csr_matrix(np.tri(ROWS, 4)), "y": numbers()},
    "class weights": {"x": numbers(2), "y": numbers() % 3, "class_weight": {0: 2.0, 2: 0.5}},
    "class weights, one-hot": {"x": numbers(2), "y": np.eye(3)[np.arange(ROWS) % 3], "class_weight": {1: 7.0}},
    "anything with __array__": {"x": Sized(), "y": numbers()},
}


@pytest.mark.parametrize(("name", "batch_size"), [*crossed([*ARRAYS], [4, 5]), ("x and y", 64)])
def test_batches_of_arrays_are_those_of_keras(name, batch_size):
    expected = keras_dataset(**ARRAYS[name], batch_size=batch_size)
    source = source_of(**ARRAYS[name], batch_size=batch_size)
    assert source.items == ROWS
    assert source.batches == len(in_order(source)) == -(-ROWS // batch_size)
    made = dataset(source, lambda: iter(in_order(source)))
    assert made.element_spec == expected.element_spec
    batches = list(made)
    for batch, other, (_, indices) in zip(batches, expected, in_order(source), strict=True):
        assert_equal(batch, other)
        assert_equal(source.batch(indices), other)


def test_batches_have_the_rows_of_their_indices():
    source = source_of(**ARRAYS["nested"], batch_size=4)
    indices = np.array([7, 0, 0, 3])
    (batch,) = dataset(source, lambda: iter([(0, indices)]))
    wanted = tree.map_structure(lambda part: tf.constant(np.asarray(part)[indices]), source_of_structure("nested"))
    assert_equal(batch, wanted)
    assert_equal(source.batch(indices), wanted)


def source_of_structure(name):
    given = ARRAYS[name]
    return tree.lists_to_tuples((given["x"], given["y"], given["sample_weight"]))


def test_data_frames_are_indexed_as_keras_does():
    x = pandas.DataFrame({"a": numbers(), "b": numbers(dtype="float64")}, index=range(ROWS, 0, -1))
    y = pandas.Series(numbers(dtype="int64"), index=x.index)
    source = source_of(x, y, batch_size=4)
    for batch, other in zip(dataset(source, lambda: iter(in_order(source))), keras_dataset(x, y, None, 4), strict=True):
        assert_equal(batch, other)
    assert source.element_spec == keras_dataset(x, y, None, 4).element_spec


def test_a_batch_is_no_view_of_the_users_array():
    x = numbers(2)
    source = source_of(x, batch_size=ROWS)
    before = x.copy()
    batch = source.batch(np.arange(ROWS))
    x[:] = -1
    np.testing.assert_array_equal(batch, before)


def test_batch_size_follows_from_the_steps_or_is_32():
    assert source_of(numbers(), steps_per_epoch=4).items_per_batch == 3
    assert source_of(numbers(), batch_size=2, steps_per_epoch=4).items_per_batch == 2
    assert source_of(numbers()).items_per_batch == 32


@pytest.mark.parametrize("shuffle", [True, False, "batch"])
def test_arrays_are_shuffled_as_the_user_wants(shuffle):
    assert source_of(numbers(), shuffle=shuffle).shuffle == shuffle


def test_source_reads_training_part_of_validation_split():
    inputs = (numbers(2), numbers(), None)
    (x, y, _), _ = array_slicing.train_validation_split(inputs, 0.3)
    source = source_of(x, y, batch_size=4)
    assert source.items == 7
    assert_equal(source.batch([6]), (tf.constant(inputs[0][6:7]), tf.constant(inputs[1][6:7])))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": numbers(), "y": np.zeros(3)}, "Data cardinality is ambiguous"),
        ({"x": numbers(), "y": numbers(), "sample_weight": numbers(), "class_weight": {}}, "at the same time"),
        ({"x": tf.data.Dataset.range(3), "y": numbers()}, "`y` should not be passed"),
    ],
)
def test_arguments_refused_by_keras_raise(arguments, message):
    with pytest.raises(ValueError, match=message):
        source_of(**arguments)


class Batches(keras.utils.PyDataset):
    """A dataset whose batches differ in their rows, and whose memory is used again."""

    def __init__(self, make, count=3, **kwargs):
        super().__init__(**kwargs)
        self.make, self.count = make, count

    @property
    def num_batches(self):
        return self.count

    def __getitem__(self, number):
        return self.make(number)


PY_DATASETS = {
    "x": lambda number: np.full((2 + number, 3), number),
    "x and y": lambda number: (np.full((4, 3), number, "float32"), np.arange(4.0)),
    "weights": lambda number: (np.ones((2, 1)), np.full(2, number), np.full(2, 0.5, "float32")),
    "dict": lambda number: {"b": np.full((2, 2), number), "a": np.zeros((2, 1), "float16")},
    "nested": lambda number: ({"b": np.full((2, 2), number), "a": (np.ones(2), np.zeros(2, "uint8"))}, np.ones(2)),
    "shapes that differ": lambda number: (np.full((2, 3 + number), number), np.ones(2)),
    "strings": lambda number: (tf.constant(["a", "b" * number]), np.ones(2)),
    "tensors": lambda number: (tf.fill([2, 3], number), tf.ones([2])),
    "ragged": lambda number: (tf.ragged.constant([[1.0] * number, [2.0]], ragged_rank=1), np.ones(2)),
    "sparse": lambda number: (tf.sparse.from_dense(tf.eye(2 + number, 4) * number), np.ones(2 + number)),
}


@pytest.mark.parametrize("name", PY_DATASETS)
def test_batches_of_a_py_dataset_are_those_of_keras(name):
    expected = keras_dataset(Batches(PY_DATASETS[name]))
    source = source_of(Batches(PY_DATASETS[name]))
    assert (source.items, source.items_per_batch, source.batches, source.shuffle) == (3, 1, 3, True)
    assert source.element_spec == expected.element_spec
    made = dataset(source, lambda: iter(in_order(source)))
    assert made.element_spec == expected.element_spec
    for batch, other, (_, indices) in zip(made, expected, in_order(source), strict=True):
        assert_equal(batch, other)
        assert_equal(source.batch(indices), other)
    (last,) = dataset(source, lambda: iter([(0, [2])]))
    assert_equal(last, list(expected)[2])


def test_lists_in_a_py_dataset_are_tuples():
    """Which Keras cannot read."""
    source = source_of(Batches(lambda number: [[np.full(2, number), np.ones(2)], np.zeros(2)]))
    assert_equal(source.batch([1]), ((tf.constant([1, 1], tf.int64), tf.ones(2, tf.float64)), tf.zeros(2, tf.float64)))


def test_class_weights_of_py_dataset_equal_keras():
    data = Batches(lambda number: (np.zeros((3, 2)), np.array([0, 1, number])))
    source = source_of(data, class_weight={1: 4.0, 2: 0.25})
    for batch, other in zip(
        dataset(source, lambda: iter(in_order(source))), keras_dataset(data, class_weight={1: 4.0, 2: 0.25}),
        strict=True,
    ):  # fmt: skip
        assert_equal(batch, other)
    np.testing.assert_array_equal(source.batch([2])[2], [1, 4, 0.25])


def test_batches_survive_reused_memory_of_py_dataset():
    space = np.zeros(64 * 64 + 16, "float32")
    begin = -space.ctypes.data % 64 // 4  # TensorFlow uses arrays in place if they begin at multiples of 64 bytes
    memory = space[begin : begin + 64 * 64].reshape(64, 64)

    def make(number):
        memory[:] = number
        return memory

    source = source_of(Batches(make))
    batches = list(dataset(source, lambda: iter(in_order(source)), prefetch=2))
    assert [float(batch[0][0, 0]) for batch in batches] == [0, 1, 2]


def test_batch_of_another_shape_raises():
    source = source_of(Batches(lambda number: np.zeros((2, 3 if number < 2 else 4))))
    with pytest.raises(ValueError, match=r"an array of shape \(2, 4\); its first batches have \(None, 3\)"):
        source.batch([2])
    with pytest.raises(tf.errors.OpError, match=r"an array of shape \(2, 4\)"):
        list(dataset(source, lambda: iter([(0, [2])])))


def slices():
    return tf.data.Dataset.from_tensor_slices(({"a": numbers(2)}, numbers()))


def doubled(x, y):
    return {"a": 2 * x["a"]}, y


DATASETS = {
    "batch": lambda: slices().batch(4),
    "batch of full ones": lambda: slices().batch(4, drop_remainder=True),
    "map, batch": lambda: slices().map(doubled).batch(4),
    "parallel map, batch, map": lambda: (
        slices().map(doubled, num_parallel_calls=tf.data.AUTOTUNE).batch(4).map(doubled).prefetch(tf.data.AUTOTUNE)
    ),
    "Python": lambda: slices().batch(4).map(
        lambda x, y: (tf.numpy_function(lambda a: a + 1, [x["a"]], tf.float32), y)
    ),
    "cache": lambda: slices().cache().batch(4),
    "zip": lambda: tf.data.Dataset.zip(slices(), slices()).map(lambda left, right: (left[0]["a"], right[1])).batch(4),
    "repeated": lambda: slices().repeat(2).batch(4),
    "a part": lambda: slices().skip(1).take(8).shard(2, 1).batch(3),
    "options": lambda: slices().batch(4).with_options(tf.data.Options()),
}  # fmt: skip


@pytest.mark.parametrize("name", DATASETS)
def test_batches_of_a_dataset_are_those_of_keras(name):
    data = DATASETS[name]()
    expected = list(data)
    source = source_of(data)
    assert (source.items, source.items_per_batch, source.batches) == (len(expected), 1, len(expected))
    assert not source.shuffle, "Keras leaves a dataset in its order"
    made = dataset(source, lambda: iter(reversed(in_order(source))))
    assert made.element_spec == data.element_spec
    for batch, other in zip(made, reversed(expected), strict=True):
        assert_equal(batch, other)
    for number in np.random.default_rng(0).integers(len(expected), size=8):  # in any order, after the iterator has gone
        assert_equal(source.batch([number]), expected[number])


def test_class_weights_of_dataset_equal_keras():
    data = tf.data.Dataset.from_tensor_slices((numbers(2), np.arange(ROWS) % 3)).batch(4)
    source = source_of(data, class_weight={0: 5.0, 2: 3.0})
    for batch, other in zip(
        dataset(source, lambda: iter(in_order(source))), keras_dataset(data, class_weight={0: 5.0, 2: 3.0}),
        strict=True,
    ):  # fmt: skip
        assert_equal(batch, other)
    np.testing.assert_array_equal(source.batch([0])[2], [5, 1, 3, 5])


class Hooked(Batches):
    def on_epoch_end(self):
        self.count += 1


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (lambda: slices().shuffle(4, seed=1).batch(4), "the dataset shuffles, in another order on each worker"),
        (lambda: slices().batch(4).repeat(), "the dataset has no end"),
        (lambda: slices().batch(4).take(0), "the dataset has no batches"),
        (lambda: slices().batch(4).unbatch().batch(2), "the dataset does not know how many batches it has"),
        (lambda: slices().batch(4, num_parallel_calls=2), "tf.data has no random access to ParallelBatchDataset"),
        (lambda: slices().padded_batch(4), "tf.data has no random access to PaddedBatchDatasetV2"),
        (
            lambda: tf.data.Dataset.from_generator(lambda: iter([1]), output_signature=tf.TensorSpec([])).apply(
                tf.data.experimental.assert_cardinality(1)
            ),
            "tf.data has no random access to FlatMapDataset",
        ),
        (
            lambda: slices().batch(4).concatenate(slices().map(doubled).batch(4)),
            "tf.data has no safe random access to concatenated datasets",
        ),
        (lambda: Batches(PY_DATASETS["x"], count=None), "Batches has no end"),
        (lambda: Batches(PY_DATASETS["x"], count=0), "Batches has no batches"),
        (
            lambda: Hooked(PY_DATASETS["x"]),
            "Hooked.on_epoch_end may change its batches, and differently on each worker",
        ),
        (lambda: (row for row in range(3)), "data of type generator can only be read in its order"),
    ],
)
def test_data_without_random_access(data, reason):
    assert source_of(data()) == reason


def test_nothing_is_read_from_a_generator():
    data = iter(range(3))
    read = (batch for batch in data)
    assert isinstance(source_of(read), str)
    assert next(data) == 0


def model_of():
    keras.utils.set_random_seed(0)
    inputs = {"a": keras.Input([2], name="a"), "b": keras.Input([1], name="b")}
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()([inputs["a"], inputs["b"]])))
    model.compile(keras.optimizers.SGD(1e-4, momentum=0.5), "mse", weighted_metrics=["mae"])
    return model


def test_a_fit_is_equal_to_that_of_keras():
    x, y = {"a": numbers(2), "b": numbers(1, dtype="float64")}, numbers() % 3
    given = {"class_weight": {0: 2.0, 1: 0.5}, "batch_size": 4}
    plain, ours = model_of(), model_of()
    expected = plain.fit(x, y, shuffle=False, epochs=3, verbose=0, **given)
    source = source_of(x, y, **given)
    history = ours.fit(dataset(source, lambda: iter(in_order(source))), epochs=3, verbose=0)
    assert history.history == expected.history
    for weight, other in zip(ours.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, other)


class Together:
    """A dealer that several `fit` calls use, in threads: a take waits for the commits of others."""

    def __init__(self, source, seed):
        self.dealer, self.source, self.seed = Dealer(limit=2), source, seed
        self.changed = threading.Condition()

    def tickets(self, worker):
        epochs = iter(range(100))

        def of_epoch():
            epoch = (0, next(epochs))
            with self.changed:
                plan = self.dealer.begin(worker, epoch, self.source.items, self.source.items_per_batch, self.seed)
            places = order(plan, epoch)
            while True:
                with self.changed:
                    while not isinstance(answer := self.dealer.take(worker, epoch), Batch | EpochOver):
                        assert self.changed.wait(60)
                if isinstance(answer, EpochOver):
                    return
                yield answer.ticket, places[answer.start : answer.stop]

        return of_epoch

    def commit(self, worker, ticket):
        with self.changed:
            self.dealer.commit(worker, ticket)
            self.changed.notify_all()


def test_workers_share_the_samples_of_each_epoch():
    """With batches that are made ahead, of which the last ones keep other workers waiting."""
    x = np.arange(50)
    source = source_of(x, batch_size=3)
    together = Together(source, seed=4)
    seen = {epoch: [] for epoch in range(3)}
    failures = []

    def train(worker):
        try:
            made = dataset(source, together.tickets(worker), with_tickets=True)
            for epoch in range(3):
                for ticket, batch in made:
                    seen[epoch] += batch.numpy().tolist()
                    together.commit(worker, int(ticket))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=train, args=[worker]) for worker in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    for epoch in range(3):
        assert sorted(seen[epoch]) == x.tolist()
    assert seen[0] != seen[1]
