"""A server's updates against the same optimizer in a plain model."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.sweeps import some
from tfdist.parameter_server.protocol.gradients import PushedGradients, weighted_sum
from tfdist.parameter_server.protocol.state import HeldRows, TrainingState
from tfdist.parameter_server.shard.store import Store, is_elementwise

SHAPES = [(4, 3), (3,), (5, 2), ()]
ALL = ("dense",) * 4


def values():
    generator = np.random.default_rng(0)
    return [np.asarray(generator.normal(size=shape), np.float32) for shape in SHAPES]


def gradients(step):
    generator = np.random.default_rng(step + 1)
    return [np.asarray(generator.normal(size=shape), np.float32) for shape in SHAPES]


def held(**options):
    rows = [len(value) if value.ndim else 1 for value in values()]
    return [HeldRows(f"v{place}", 0, count, count, **options) for place, count in enumerate(rows)]


def store_of(optimizer, described=None, state=None, is_lazy=False):
    config = keras.saving.serialize_keras_object(optimizer)
    return Store(described or held(), state or TrainingState(values()), config, is_lazy)


def pushed(store, arrays, kinds=ALL, sparse=None):
    return PushedGradients(kinds, store.shapes.layout(kinds).vectors(arrays), sparse or {})


def arrays(store):
    return store.state().values


def plain(optimizer, updates, adapt=lambda variables, optimizer: None):
    """The variables after updates by the optimizer itself."""
    variables = [keras.Variable(value, name=f"v{place}") for place, value in enumerate(values())]
    adapt(variables, optimizer)
    optimizer.build(variables)
    for update in updates:
        given = [
            gradient if gradient is None or isinstance(gradient, tf.IndexedSlices) else tf.constant(gradient)
            for gradient in update
        ]
        optimizer.apply(given, variables)
    return [variable.numpy() for variable in variables]


def assert_close(actual, expected, rtol=1e-5, atol=1e-6):
    for array, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(array, other, rtol=rtol, atol=atol)


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "sgd clipnorm": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, clipnorm=0.5),
    "adam global_clipnorm": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.7),
    "adam amsgrad": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "adam clipvalue schedule": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5), clipvalue=0.3
    ),
    "rmsprop ema": lambda: keras.optimizers.RMSprop(0.01, use_ema=True, ema_overwrite_frequency=2),
    "rmsprop centered": lambda: keras.optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "adamax": lambda: keras.optimizers.Adamax(0.01),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "adadelta": lambda: keras.optimizers.Adadelta(1.0),
    "ftrl": lambda: keras.optimizers.Ftrl(0.1, l1_regularization_strength=0.01),
    "lion": lambda: keras.optimizers.Lion(0.01),
    "adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "lamb": lambda: keras.optimizers.Lamb(0.01),
    "accumulation": lambda: keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2),
}
for name in ("ScheduleFreeAdamW", "Muon"):  # not in the oldest Keras that is supported, or fails there by itself
    if hasattr(keras.optimizers, name) and not (name == "Muon" and keras.__version__.startswith("3.10.")):
        OPTIMIZERS[name] = lambda name=name: getattr(keras.optimizers, name)(0.01)


@pytest.mark.parametrize("name", some(OPTIMIZERS, 4))
def test_updates_are_those_of_the_optimizer(name):
    store = store_of(OPTIMIZERS[name]())
    for step in range(5):
        store.update(pushed(store, gradients(step)))
    assert_close(arrays(store), plain(OPTIMIZERS[name](), [gradients(step) for step in range(5)]))
    assert store.iterations == 5


@pytest.mark.parametrize("name", some(sorted(OPTIMIZERS, key="adafactor".__ne__), 4))
def test_store_continues_from_a_saved_state(name):
    store = store_of(OPTIMIZERS[name]())
    for step in range(3):
        store.update(pushed(store, gradients(step)))
    again = store_of(OPTIMIZERS[name](), state=store.state())
    for each_store in (store, again):
        for step in range(3, 6):
            each_store.update(pushed(each_store, gradients(step)))
    assert again.iterations == 6
    for array, other in zip(store.state().arrays(), again.state().arrays(), strict=True):
        np.testing.assert_array_equal(array, other)


def test_elementwise_optimizers_use_one_vector():
    assert is_elementwise(keras.optimizers.Adam())
    assert not is_elementwise(keras.optimizers.Adam(clipnorm=1.0))
    assert not is_elementwise(keras.optimizers.Adam(global_clipnorm=1.0))
    assert not is_elementwise(keras.optimizers.Lamb())

    class Own(keras.optimizers.Adam):
        pass

    assert not is_elementwise(Own()), "nobody knows what it does"
    assert len(store_of(keras.optimizers.Adam())._blocks) == 1
    assert len(store_of(keras.optimizers.Lamb())._blocks) == 4


def test_weight_decay_skips_excluded_variables():
    described = held()
    described[1] = HeldRows("v1", 0, 3, 3, decays=False)

    def exclude(variables, optimizer):
        optimizer.exclude_from_weight_decay(var_names=["v1"])

    def make():
        return keras.optimizers.AdamW(0.1, weight_decay=0.5)

    store = store_of(make(), described)
    store.update(pushed(store, gradients(0)))
    assert_close(arrays(store), plain(make(), [gradients(0)], exclude))


def test_constraints_are_applied_after_the_update():
    described = held()
    described[0] = HeldRows("v0", 0, 4, 4, constraint=keras.constraints.serialize(keras.constraints.MaxNorm(0.5)))

    def constrain(variables, optimizer):
        variables[0].constraint = keras.constraints.MaxNorm(0.5)

    store = store_of(keras.optimizers.SGD(0.1), described)
    store.update(pushed(store, gradients(0)))
    expected = plain(keras.optimizers.SGD(0.1), [gradients(0)], constrain)
    assert_close(arrays(store), expected)
    assert np.linalg.norm(arrays(store)[0], axis=0).max() <= 0.5 + 1e-6


def test_variables_without_a_gradient_stay_and_so_do_their_slots():
    """The first one is part of a vector by then, with momentum."""

    def make():
        return keras.optimizers.Adam(0.1)

    updates = [gradients(0), [None, *gradients(1)[1:]], gradients(2), [None] * 3 + gradients(3)[3:]]
    store = store_of(make())
    for update in updates:
        kinds = tuple("none" if gradient is None else "dense" for gradient in update)
        store.update(pushed(store, update, kinds))
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        expected = plain(make(), updates)
    assert_close(arrays(store), expected)
    store.update(pushed(store, [None] * 4, ("none",) * 4))
    assert store.iterations == 5, "other servers had gradients"


@pytest.mark.parametrize("make", [lambda: keras.optimizers.Adam(0.1), lambda: keras.optimizers.Adagrad(0.1)])
def test_sparse_gradients_equal_keras(make):
    """An index occurs twice; the variable is part of a vector at first."""
    rows, indices = np.ones((3, 2), np.float32), np.array([0, 2, 2])
    slices = tf.IndexedSlices(tf.constant(rows), tf.constant(indices), tf.constant([5, 2]))
    store = store_of(make())
    store.update(pushed(store, gradients(0)))
    kinds = ("dense", "dense", "sparse", "dense")
    for step in (1, 2):
        store.update(pushed(store, gradients(step), kinds, {2: (rows, indices)}))
    others = [[*gradients(step)[:2], slices, gradients(step)[3]] for step in (1, 2)]
    assert_close(arrays(store), plain(make(), [gradients(0), *others]))


@pytest.mark.parametrize("is_lazy", [False, True])
def test_kinds_of_gradients_may_change_from_push_to_push(is_lazy):
    rows, indices = np.ones((3, 2), np.float32), np.array([0, 2, 2], np.int32)
    slices = tf.IndexedSlices(tf.constant(rows), tf.constant(indices), tf.constant([5, 2]))
    store, alone = store_of(keras.optimizers.Adagrad(0.1), is_lazy=is_lazy), []
    for step, kind in enumerate(("dense", "sparse", "dense", "none", "sparse", "dense", "sparse")):
        kinds = ("dense", "dense", kind, "dense")
        given = [*gradients(step)[:2], {"dense": gradients(step)[2], "sparse": slices}.get(kind), gradients(step)[3]]
        store.update(pushed(store, given, kinds, {2: (rows, indices)} if kind == "sparse" else {}))
        alone.append(given)
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        expected = plain(keras.optimizers.Adagrad(0.1), alone)
    assert_close(arrays(store), expected)


def test_several_pushes_make_one_update():
    store = store_of(keras.optimizers.SGD(0.1, momentum=0.9))
    pushes = [pushed(store, gradients(step)) for step in range(3)]
    store.update(weighted_sum(pushes, [0.5, 0.25, 0.125], store.shapes))
    mean = [0.5 * a + 0.25 * b + 0.125 * c for a, b, c in zip(*map(gradients, range(3)), strict=True)]
    assert_close(arrays(store), plain(keras.optimizers.SGD(0.1, momentum=0.9), [mean]))
    assert store.iterations == 1


def test_values_are_not_changed_by_later_updates():
    store = store_of(keras.optimizers.SGD(1.0))
    before = store.vectors()
    kept = [vector.copy() for vector in before]
    for step in range(2):
        store.update(pushed(store, gradients(step)))
        between, copies = store.vectors(), [vector.copy() for vector in store.vectors()]
    store.update(pushed(store, gradients(2)))
    for original, copied in zip([*before, *between], [*kept, *copies], strict=True):
        np.testing.assert_array_equal(original, copied)


def test_moving_averages_equal_keras():
    def make():
        return keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)

    store, alone = store_of(make()), make()
    for step in range(3):
        store.update(pushed(store, gradients(step)))
    plain(alone, [gradients(step) for step in range(3)])
    averages = store.shapes.layout().arrays(store.averages()).values()
    assert_close(averages, [average.numpy() for average in alone._model_variables_moving_average])
    assert store_of(keras.optimizers.SGD(0.1)).averages() is None


def test_dtypes_are_kept_in_separate_vectors():
    mixed = [np.ones(3, np.float32), np.ones(2, np.float64), np.ones(4, np.float32)]
    described = [HeldRows(f"v{place}", 0, len(value), len(value)) for place, value in enumerate(mixed)]
    store = store_of(keras.optimizers.SGD(1.0), described, TrainingState(mixed))
    assert [vector.dtype.name for vector in store.vectors()] == ["float32", "float64"]
    kinds = ("dense",) * 3
    store.update(PushedGradients(kinds, store.shapes.layout(kinds).vectors(mixed)))
    for value in arrays(store):
        np.testing.assert_array_equal(value, np.zeros_like(value))


def test_the_learning_rate_can_be_set():
    store = store_of(keras.optimizers.SGD(1.0))
    store.update(pushed(store, gradients(0)))
    store.set_learning_rate(0.5)
    store.update(pushed(store, gradients(1)))
    expected = [
        value - first - 0.5 * second for value, first, second in zip(values(), gradients(0), gradients(1), strict=True)
    ]
    assert_close(arrays(store), expected)


def test_setting_the_rate_of_a_schedule_raises():
    store = store_of(keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)))
    with pytest.raises(TypeError, match="LearningRateSchedule"):
        store.set_learning_rate(0.5)


@keras.saving.register_keras_serializable("tests")
class Uncompilable(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule that asks Python."""

    def __call__(self, step):
        return tf.py_function(lambda step: 1.0 / (1.0 + float(step)), [step], tf.float32)

    def get_config(self):
        return {}


def test_uncompilable_schedule_runs_without_xla():
    store = store_of(keras.optimizers.SGD(Uncompilable()))
    for _ in range(2):
        store.update(pushed(store, [np.ones(shape, np.float32) for shape in SHAPES]))
    assert_close(arrays(store), [value - 1.5 for value in values()])
