"""Recorded steps: the order of the actions is that of the table, in graphs and eagerly; timelines of all processes."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.pipeline import models
from tests.sweeps import sweep
from tfdist.pipeline import recording
from tfdist.pipeline.actions import parse
from tfdist.pipeline.recording import Recording, Stamps

PARTS = 4
SCHEDULES = {
    "gpipe": {"stages": 3},
    "1f1b": {"stages": 3},
    "zero_bubble": {"stages": 3},
    "interleaved": {"stages": 4, "devices": ["CPU:0", "CPU:1"]},
}


@functools.cache
def trained(schedule, record, eagerly):
    strategy = tfdist.PipelineStrategy(micro_batches=PARTS, schedule=schedule, record=record, **SCHEDULES[schedule])
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = models.perceptron()
        model.compile("sgd", "mse", run_eagerly=eagerly)
    x, y = models.data_of(model)
    rows = 4 if schedule == "zero_bubble" else 8  # two steps; in others the second is smaller, which is another trace
    model.fit(x[0][: 2 * rows], y[0][: 2 * rows], batch_size=rows, verbose=0)
    return strategy, model


def actions(timeline):
    return [[str(span.action) for span in row] for row in timeline.spans]


@pytest.mark.parametrize(
    ("schedule", "eagerly"),
    [
        ("zero_bubble", False),
        ("interleaved", False),
        ("1f1b", True),
        *(sweep(name, False) for name in ("gpipe", "1f1b")),
    ],
)
def test_the_order_is_that_of_the_table(schedule, eagerly):
    strategy, _ = trained(schedule, True, eagerly)
    for step in (-2, -1):
        timeline = strategy.recorded(step)
        assert actions(timeline) == actions(strategy.schedule)
        for row in timeline.spans:
            times = [time for span in row for time in (span.begin, span.end)]
            assert times == sorted(times)
    assert "worker 1" in str(strategy.recorded())


@pytest.mark.parametrize("schedule", [sweep("1f1b"), "zero_bubble"])
def test_actions_begin_after_those_that_they_need(schedule):
    """Not after their ends: a result may be there before all of the action's are."""
    strategy, model = trained(schedule, True, False)
    table = strategy.extended.of_model(model).table
    spans = {span.action: span for row in strategy.recorded().spans for span in row}
    for action, span in spans.items():
        assert all(spans[needed].begin < span.begin for needed in table.needs(action))


def test_stamps_wait_for_their_own_action_only():
    """Its inputs, and what it computes: stamps that wait for each other would keep workers from acting together."""

    def step(x):
        stamps = Stamps(lambda *_: None)
        for name in ("0F0", "1F0"):
            stamps.around(parse(name), [tf.negative(x)], lambda: [tf.square(x).op])
        stamps.close()

    graph = tf.function(step, autograph=False).get_concrete_function(tf.TensorSpec([])).graph
    stamps = [operation for operation in graph.get_operations() if operation.type == "Timestamp"]
    waits = [[other.type for other in operation.control_inputs] for operation in stamps]
    assert waits == [["Neg"], ["Square"]] * 2
    computed = [operation for operation in graph.get_operations() if operation.type == "Square"]
    assert [operation.control_inputs for operation in computed] == [[begin] for begin in stamps[::2]]


def test_recording_changes_no_weights():
    weights = [trained("zero_bubble", record, False)[1].get_weights() for record in (False, True)]
    for weight, other in zip(*weights, strict=True):
        np.testing.assert_array_equal(weight, other)


def test_only_training_steps_are_recorded():
    strategy, model = trained("zero_bubble", True, False)
    model.predict(models.data_of(model)[0][0], verbose=0)
    assert actions(strategy.recorded()) == actions(strategy.schedule)
    with pytest.raises(ValueError, match=r"the times of 2 training steps .* no step -3"):
        strategy.recorded(-3)


def test_nothing_is_recorded_unless_it_is_asked_for():
    strategy, _ = trained("zero_bubble", False, False)
    with pytest.raises(ValueError, match="record=True"):
        strategy.recorded()


def test_a_timeline_of_several_processes(ranks):
    def work(group):
        made = Recording(group)
        for number in range(recording.KEPT + 1):
            stamps = made.of_step([0, 1])
            for name in ("F", "B") if group.rank else ("F", "F"):
                stamps.around(parse(f"{group.rank}{name}{number}"), [tf.ones([])], list)
            stamps.close()
        with pytest.raises(ValueError, match="no step"):
            made.timeline(recording.KEPT)
        return made.timeline()

    first, second = ranks(2)(work)
    assert first == second
    last = recording.KEPT
    assert actions(first) == [[f"0F{last}", f"0F{last}"], [f"1F{last}", f"1B{last}"]]
    assert min(row[0].begin for row in first.spans) == 0
