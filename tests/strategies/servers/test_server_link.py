"""An optimizer on parameter servers against the same optimizer alone; the servers run on threads."""

import contextlib
import ctypes
import gc
import itertools
import os
import platform
import statistics

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.parameter_server.serving import DEADLINE, serving
from tests.sweeps import some
from tfdist.parameter_server.options.arguments import Arguments
from tfdist.parameter_server.options.pushes import Gradients
from tfdist.parameter_server.options.synchronization import Asynchronous, Synchronous
from tfdist.parameter_server.worker.client import Connection, MessageRefusedError
from tfdist.strategies.servers.server_link import Attachment, Link

SHAPES = [(600, 150), (3,), (500, 2)]
"""The first is split over servers."""


def variables():
    generator = np.random.default_rng(1)
    return [keras.Variable(generator.normal(size=shape).astype("float32"), name=f"v{shape[0]}") for shape in SHAPES]


def gradients(step):
    """A dense one, none in every other step, and a sparse one with an index that occurs twice."""
    generator = np.random.default_rng(step)
    dense = [tf.constant(generator.normal(size=shape).astype("float32")) for shape in SHAPES[:2]]
    rows = tf.constant(generator.normal(size=(3, 2)).astype("float32"))
    return [
        dense[0],
        dense[1] if step % 2 else None,
        tf.IndexedSlices(rows, tf.constant([4, 0, 4]), tf.constant([500, 2])),
    ]


@contextlib.contextmanager
def linked(optimizer, servers=2, mode=Asynchronous()):  # noqa: B008
    """Makes links to the same servers; the optimizer is the chief's."""
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(serving(mode)) for _ in range(servers)]
        made = variables()
        optimizer.build(made)

        def link(worker=0, worker_variables=None, worker_optimizer=optimizer, prefetch=0):
            connections = [Connection(server.address, "ps", DEADLINE) for server in running]
            arguments = Arguments(mode, Gradients(prefetch=prefetch))
            link = Link(Attachment(connections, worker, arguments), worker_optimizer, worker_variables or made)
            stack.callback(link.close)
            return link

        yield link, made


def updated(optimizer, steps, is_scaled):
    """Variables after steps of an optimizer alone. Keras cannot scale sparse gradients."""
    made = variables()
    optimizer.build(made)
    for step in range(steps):
        given = gradients(step)
        optimizer.apply([*given[:2], tf.convert_to_tensor(given[2])] if is_scaled else given, made)
    return [variable.numpy() for variable in made]


OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.05),
    "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.5),
    "global_clipnorm": lambda: keras.optimizers.Adam(0.05, global_clipnorm=0.5),
    "accumulation": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2, clipnorm=0.5),
    "loss scale": lambda: keras.optimizers.SGD(0.1, loss_scale_factor=8.0, clipnorm=0.5),
    "decay": lambda: excluding(keras.optimizers.AdamW(0.05, weight_decay=0.1)),
}


def excluding(optimizer):
    optimizer.exclude_from_weight_decay(var_names=["v3"])
    return optimizer


@pytest.mark.parametrize(("name", "in_graph"), some(itertools.product(OPTIMIZERS, [True, False]), 3))
def test_updates_are_those_of_the_optimizer(name, in_graph):
    """On two servers; a variable is split, so that no server knows a norm."""
    optimizer = OPTIMIZERS[name]()
    with linked(optimizer) as (link, made):
        chief = link()

        def update(given):
            chief.update(given, made)

        if in_graph:
            update = tf.function(update)
        for step in range(4):
            update(gradients(step))
        is_scaled = optimizer.loss_scale_factor is not None
        for variable, other in zip(made, updated(OPTIMIZERS[name](), 4, is_scaled), strict=True):
            np.testing.assert_allclose(variable.numpy(), other, rtol=1e-5, atol=1e-6)
        assert int(optimizer._iterations) == 4


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs malloc_trim")
def test_steps_keep_no_memory():
    """TensorFlow keeps each Python number that becomes a tensor: those of the updates took 0.8 kB a step."""
    optimizer, small = (
        keras.optimizers.SGD(0.1),
        [keras.Variable(np.ones(shape, "float32")) for shape in ((3,), (5, 2))],
    )
    optimizer.build(small)
    with linked(keras.optimizers.SGD(0.1), servers=1) as (link, _):
        chief = link(0, small, optimizer)
        given = [tf.ones(3), tf.IndexedSlices(tf.ones((2, 2)), tf.constant([4, 0]), tf.constant([5, 2]))]
        update = tf.function(lambda: chief.update(given, small))

        readings = []
        for steps in (100, 250, 250, 250):
            for _ in range(steps):
                update()
            readings.append(resident())
        assert statistics.median(after - before for before, after in itertools.pairwise(readings)) < 100_000


def resident():
    """Bytes of this process."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_averages_are_clipped_by_servers():
    optimizer = keras.optimizers.SGD(0.1, clipnorm=0.5)
    with linked(optimizer, mode=Synchronous()) as (link, made):
        link().update(gradients(1), made)
        for variable, other in zip(made, updated_once(keras.optimizers.SGD(0.1, clipnorm=0.5)), strict=True):
            np.testing.assert_allclose(variable.numpy(), other, rtol=1e-5, atol=1e-6)


def updated_once(optimizer):
    made = variables()
    optimizer.build(made)
    optimizer.apply(gradients(1), made)
    return [variable.numpy() for variable in made]


def test_constraints_are_applied_by_servers():
    optimizer = keras.optimizers.SGD(0.1)
    with linked(optimizer) as (link, made):
        made[0].constraint = keras.constraints.MaxNorm(0.25)
        link().update([tf.zeros(shape) for shape in SHAPES], made)
        assert np.linalg.norm(made[0].numpy(), axis=0).max() < 0.2501


def test_a_worker_begins_with_the_chiefs_values_and_sees_its_updates():
    with linked(keras.optimizers.SGD(1.0)) as (link, made):
        chief = link()
        worker_variables, optimizer = variables(), keras.optimizers.SGD(1.0)
        for variable in worker_variables:
            variable.assign(tf.zeros(variable.shape))
        optimizer.build(worker_variables)
        worker = link(1, worker_variables, optimizer)
        assert_equal(worker_variables, made)
        chief.update([tf.ones(shape) for shape in SHAPES], made)
        worker.refresh()
        assert_equal(worker_variables, made)
        worker.update([tf.ones(shape) for shape in SHAPES], worker_variables)
        chief.refresh()
        assert_equal(worker_variables, made)


def assert_equal(actual, expected):
    for variable, same in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(variable.numpy(), same.numpy())


def test_options_of_a_worker_are_those_of_the_chief_except_its_rate():
    def worker(link, number, **options):
        worker_variables, optimizer = variables(), keras.optimizers.SGD(**options)
        optimizer.build(worker_variables)
        return link(number, worker_variables, optimizer)

    with linked(keras.optimizers.SGD(0.1, momentum=0.9)) as (link, _):
        link()
        worker(link, 1, learning_rate=0.5, momentum=0.9)
        why = r"another optimizer than the chief's: momentum=0\.5, the chief's momentum=0\.9"
        with pytest.raises(MessageRefusedError, match=why):
            worker(link, 2, learning_rate=0.1, momentum=0.5)


def test_the_learning_rate_of_the_chief_counts():
    optimizer = keras.optimizers.SGD(1.0)
    with linked(optimizer) as (link, made):
        chief, before = link(), made[1].numpy()
        step = tf.function(lambda: chief.update([tf.ones(shape) for shape in SHAPES], made))
        step()
        optimizer.learning_rate = 0.25
        step()
        np.testing.assert_allclose(made[1].numpy(), before - 1.25, rtol=1e-6)


def test_the_optimizers_state_is_fetched_and_given():
    """As a model is saved, and loaded again by the chief of another job."""
    optimizer = keras.optimizers.Adam(0.05)
    with linked(optimizer) as (link, made):
        chief = link()
        for step in range(2):
            chief.update(gradients(step), made)
        chief.fetch()
        alone, expected = keras.optimizers.Adam(0.05), variables()
        alone.build(expected)
        for step in range(2):
            alone.apply(gradients(step), expected)
        for mine, other in zip(optimizer.variables, alone.variables, strict=True):
            np.testing.assert_allclose(mine.numpy(), other.numpy(), rtol=1e-4, atol=1e-7, err_msg=mine.path)
        kept = [variable.numpy() for variable in made]
    again = keras.optimizers.Adam(0.05)
    with linked(again, servers=1) as (link, made):
        for variable, value in zip(made, kept, strict=True):
            variable.assign(value)
        for mine, other in zip(again.variables, alone.variables, strict=True):
            mine.assign(other)
        link().update(gradients(2), made)
        alone.apply(gradients(2), expected)
        for variable, other in zip(made, expected, strict=True):
            np.testing.assert_allclose(variable.numpy(), other.numpy(), rtol=1e-5, atol=1e-6)


def test_moving_averages_are_the_final_values():
    optimizer = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)
    with linked(optimizer) as (link, made):
        chief = link()
        for step in (1, 3):
            chief.update(gradients(step), made)
        chief.finalize()
        alone, expected = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5), variables()
        alone.build(expected)
        for step in (1, 3):
            alone.apply(gradients(step), expected)
        alone.finalize_variable_values(expected)
        for variable, other in zip(made, expected, strict=True):
            np.testing.assert_allclose(variable.numpy(), other.numpy(), rtol=1e-5, atol=1e-6)


def test_values_assigned_by_chief_replace_server_values():
    with linked(keras.optimizers.SGD(1.0, momentum=0.5)) as (link, made):
        chief = link()
        chief.update([tf.ones(shape) for shape in SHAPES], made)
        for variable in made:
            variable.assign(tf.zeros(variable.shape))
        chief.refresh()
        for variable in made:
            np.testing.assert_array_equal(variable.numpy(), np.zeros(variable.shape))
        chief.update([tf.ones(shape) for shape in SHAPES], made)
        for variable in made:
            np.testing.assert_allclose(variable.numpy(), np.full(variable.shape, -1.5), rtol=1e-6)


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("read", ["refresh", "fetch"])
def test_a_worker_keeps_what_its_program_has_assigned_until_servers_have_it_too(read, prefetch):
    ones = [tf.ones(shape) for shape in SHAPES]
    with linked(keras.optimizers.SGD(1.0)) as (link, made):
        chief, others, optimizer = link(), variables(), keras.optimizers.SGD(1.0)
        optimizer.build(others)
        worker = link(1, others, optimizer, prefetch)
        worker.update(ones, others)

        def assign(assigning, assigned, value):
            for variable in assigned:
                variable.assign(tf.fill(variable.shape, value))
                assigning.assigned(variable)

        def read_by_worker():
            getattr(worker, read)()
            return {float(value) for variable in others for value in np.unique(variable.numpy())}

        assign(worker, others, 5.0)
        assert read_by_worker() == {5.0}
        assert read_by_worker() == {5.0}
        assign(chief, made, 6.0)
        chief.refresh()
        assert read_by_worker() == {6.0}, "the chief's counts"
        assign(worker, others, 7.0)
        chief.update(ones, made)
        assert read_by_worker() == {5.0}, "servers have gone on"


@pytest.mark.parametrize("prefetch", [0, 1])
def test_values_assigned_within_an_epoch_go_to_servers_with_the_next_step(prefetch):
    """A step under way is finished before, with the old values."""
    ones = [tf.ones(shape) for shape in SHAPES]
    with linked(keras.optimizers.SGD(1.0)) as (link, made):
        chief = link(prefetch=prefetch)
        for _ in range(2):
            chief.update(ones, made)
        for variable in made:
            variable.assign(tf.fill(variable.shape, 5.0))
            chief.assigned(variable)
        for _ in range(3):
            chief.update(ones, made)
        chief.refresh()
        for variable in made:
            np.testing.assert_allclose(variable.numpy(), np.full(variable.shape, 2.0), rtol=1e-6)


def test_a_gradient_that_does_not_fit_reaches_no_server():
    optimizer = keras.optimizers.SGD(0.1)
    with linked(optimizer) as (link, made):
        chief, before = link(), values(made)
        dense = gradients(1)[:2]
        with pytest.raises(ValueError, match="rows from 0 to 500 of a variable with 500 rows"):
            chief.update([*dense, tf.IndexedSlices(tf.ones((2, 2)), tf.constant([500, 0]), [500, 2])], made)
        chief.refresh()
        np.testing.assert_equal(values(made), before)
        assert chief.report().version == 0


def test_servers_without_variables_count_all_the_same():
    optimizer, small = keras.optimizers.SGD(1.0), [keras.Variable(np.zeros(2, "float32"))]
    optimizer.build(small)
    with linked(keras.optimizers.SGD(1.0), servers=3) as (link, _):
        chief = link(0, small, optimizer)
        for step in range(1, 4):
            chief.update([tf.ones(2)], small)
            assert int(optimizer.iterations) == step
        chief.refresh()
        assert int(optimizer.iterations) == 3


def test_gradients_go_to_their_variables():
    """Some at a time, in any order."""
    with linked(keras.optimizers.SGD(1.0)) as (link, made):
        chief, before = link(), [variable.numpy() for variable in made]
        chief.update([tf.ones(SHAPES[2]), tf.ones(SHAPES[0])], [made[2], made[0]])
        chief.update([tf.ones(SHAPES[1])], [made[1]])
        for variable, value in zip(made, before, strict=True):
            np.testing.assert_allclose(variable.numpy(), value - 1, rtol=1e-5)
        with pytest.raises(ValueError, match="was built without other"):
            chief.update([tf.ones(2)], [keras.Variable(np.ones(2, "float32"), name="other")])


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("read", ["refresh", "fetch", "suspend"])
def test_values_read_from_servers_do_not_count_as_assigned(read, prefetch):
    """Also where another worker has pushed since, or a step was under way."""
    with linked(keras.optimizers.SGD(1.0)) as (link, made):
        chief, before = link(prefetch=prefetch), made[1].numpy()
        worker_variables, optimizer = variables(), keras.optimizers.SGD(1.0)
        optimizer.build(worker_variables)
        worker = link(1, worker_variables, optimizer)
        ones = [tf.ones(shape) for shape in SHAPES]
        for _ in range(3):
            chief.update(ones, made)
            getattr(chief, read)()
            worker.update(ones, worker_variables)
        chief.refresh()
        np.testing.assert_allclose(made[1].numpy(), before - 6, rtol=1e-5)


def rows_of(place, indices, rows):
    return tf.IndexedSlices(tf.constant(rows, tf.float32), tf.constant(indices), tf.constant(SHAPES[place]))


def in_graph_of(link, variables):
    return tf.function(lambda given: link.update(given, variables))


def table_gradients(worker, step, rows=20):
    """A dense one, none, and sparse ones, of a table that is split over servers and of one that is not."""
    generator = np.random.default_rng((worker, step))
    first, last = (generator.integers(0, SHAPES[place][0], rows) for place in (0, 2))
    return [
        rows_of(0, first, generator.normal(size=(rows, 150))),
        None if step % 3 else tf.constant(generator.normal(size=3), tf.float32),
        rows_of(2, last, generator.normal(size=(rows, 2))),
    ]


ROW_LOCAL = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "adadelta": lambda: keras.optimizers.Adadelta(1.0),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01),
    "ftrl": lambda: keras.optimizers.Ftrl(0.1),
}


@pytest.mark.parametrize(("name", "prefetch"), some(itertools.product(ROW_LOCAL, [0, 1]), 3))
def test_rows_that_workers_get_are_those_of_the_optimizer(name, prefetch):
    """Two workers in turn push other rows, and two servers have them; read by row or whole, values are the same."""
    make = ROW_LOCAL[name]
    with linked(make()) as (link, made):
        pairs = [(link(prefetch=prefetch), made)]
        worker_variables, optimizer = variables(), make()
        optimizer.build(worker_variables)
        pairs.append((link(1, worker_variables, optimizer, prefetch), worker_variables))
        steps = [(each_link, in_graph_of(each_link, worker_variables)) for each_link, worker_variables in pairs]
        alone, expected = make(), variables()
        alone.build(expected)
        for step in range(6):
            for worker, (each_link, update) in enumerate(steps):
                given = table_gradients(worker, step)
                update(given)
                each_link.report()  # servers answer in turn: the push, which may still be under way, has been applied
                alone.apply(given, expected)
                if step == 3 and not worker:  # as a checkpoint within an epoch
                    each_link.fetch()
        for each_link, _ in pairs:
            each_link.suspend()
        before = [variable.numpy() for variable in worker_variables]
        sent = pairs[0][0].report().sent
        if not prefetch:
            for variable, other in zip(worker_variables, expected, strict=True):
                np.testing.assert_allclose(variable.numpy(), other.numpy(), rtol=1e-5, atol=1e-6)
        for each_link, values in pairs:
            each_link.refresh()
            for variable, other in zip(values, expected, strict=True):
                np.testing.assert_allclose(variable.numpy(), other.numpy(), rtol=1e-5, atol=1e-6)
        if not prefetch:
            for variable, value in zip(worker_variables, before, strict=True):
                assert variable.numpy().tobytes() == value.tobytes(), "read by rows"
        whole = sum(4 * int(np.prod(shape)) for shape in SHAPES)
        assert (sent < 8 * whole) == (name != "ftrl"), "of 2 readings of all, one with slots, and 12 steps"


def test_workers_read_changed_rows_after_dense_gradients_and_assignments():
    with linked(keras.optimizers.SGD(1.0)) as (link, made):
        chief, before = link(), [variable.numpy() for variable in made]
        worker_variables, optimizer = variables(), keras.optimizers.SGD(1.0)
        optimizer.build(worker_variables)
        worker = link(1, worker_variables, optimizer)
        named = [
            tf.IndexedSlices(tf.ones((1, 150)), [7], SHAPES[0]),
            None,
            tf.IndexedSlices(tf.ones((1, 2)), [7], SHAPES[2]),
        ]
        worker.update(named, worker_variables)
        chief.update([tf.ones(shape) for shape in SHAPES], made)
        worker.update(named, worker_variables)
        for variable, value, place in zip(worker_variables, before, range(3), strict=True):
            expected = value - 1
            if place != 1:
                expected[7] -= 2
            np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-5, atol=1e-5)
        for variable in made:
            variable.assign(tf.zeros(variable.shape))
        chief.refresh()
        worker.update(named, worker_variables)
        assert worker_variables[0].numpy()[7].tolist() == [-1] * 150
        assert not worker_variables[0].numpy()[8:].any()
        chief.update([None, tf.ones(3), None], made)
        assert made[0].numpy()[7].tolist() == [-1] * 150, "whole where this step has no gradient"
        chief.update(named, made)
        chief.refresh()
        assert made[2].numpy()[6:9, 0].tolist() == [0, -2, 0], "what came by rows is not taken for assigned"


@contextlib.contextmanager
def averaging():
    """Links of a chief and of a worker whose optimizers average, each with its variables."""
    optimizers, of_worker = [keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.5) for _ in range(2)], variables()
    optimizers[1].build(of_worker)
    with linked(optimizers[0]) as (link, of_chief):
        yield link(), of_chief, link(1, of_worker, optimizers[1]), of_worker


def test_averages_are_overwritten_by_the_next_step():
    """What is not brought by rows would stay."""
    with averaging() as (chief, made, worker, worker_variables):
        named = [rows_of(0, [7], np.ones((1, 150))), None, None]
        for _ in range(2):
            worker.update(named, worker_variables)
        worker.finalize()
        worker.update([rows_of(0, [8], np.ones((1, 150))), None, None], worker_variables)
        chief.refresh()
        assert_equal(worker_variables, made)


def test_state_fetched_during_prefetch_does_not_count_as_assigned():
    with linked(keras.optimizers.SGD(1.0)) as (link, made):
        chief, before = link(prefetch=1), made[0].numpy()
        worker_variables, optimizer = variables(), keras.optimizers.SGD(1.0)
        optimizer.build(worker_variables)
        worker = link(1, worker_variables, optimizer)

        def named(row):
            return [rows_of(0, [row], np.ones((1, 150))), None, None]

        for _ in range(3):
            chief.update(named(7), made)
            worker.update(named(8), worker_variables)
            chief.fetch()
        chief.update(named(7), made)
        chief.refresh()
        before[7] -= 4
        before[8] -= 3
        np.testing.assert_allclose(made[0].numpy(), before, rtol=1e-5, atol=1e-5)


def values(of_variables):
    return [variable.numpy() for variable in of_variables]


def test_reading_after_fit_leaves_the_training_of_others():
    """The chief has averages then; they are the newest values when it goes on."""
    with averaging() as (chief, made, worker, worker_variables):
        chief.update(gradients(1), made)
        chief.finalize()
        for name in ("newest", "newest_state"):
            worker.update(gradients(2), worker_variables)
            worker.refresh()
            trained, before = values(worker_variables), values(made)
            with getattr(chief, name)():
                assert not np.array_equal(made[0].numpy(), before[0]), "the averages contain the worker's update"
            worker.refresh()
            np.testing.assert_equal(values(worker_variables), trained)
        worker.finalize()
        with chief.newest():
            assert_equal(worker_variables, made)
        averages = values(made)
        chief.refresh()
        np.testing.assert_equal(values(made), averages)
        worker.update([None] * len(SHAPES), worker_variables)
        np.testing.assert_equal(values(worker_variables), averages)


@pytest.mark.parametrize("name", ["newest", "newest_state"])
def test_what_the_chief_assigns_after_fit_is_what_it_reads(name):
    """Also where another worker's update comes at once."""
    with averaging() as (chief, made, worker, worker_variables):
        chief.update(gradients(1), made)
        chief.finalize()
        worker.update(gradients(2), worker_variables)
        for variable in made:
            variable.assign(tf.fill(variable.shape, 7.0))
            chief.assigned(variable)
        with getattr(chief, name)():
            pass
        worker.update(gradients(3), worker_variables)
        with getattr(chief, name)():
            read = values(made)
        worker.refresh()
        np.testing.assert_equal(values(worker_variables), read)
