"""Models of several processes, here threads with real links and bookkeeping."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.cluster.settings import Timeouts
from tfdist.comm.local import LocalWorld
from tfdist.engine.engine import Engine
from tfdist.engine.group import ProcessGroup
from tfdist.errors import PeerLostError
from tfdist.local_sgd.intervals import Every
from tfdist.local_sgd.rules import Averaging
from tfdist.quorum.course import QuorumRoundsFactory
from tfdist.strategies.keras import keras_seams
from tfdist.strategies.rounds.quorum_extended import QuorumExtended


class Meets(tf.distribute.Strategy):
    """As `tfdist.QuorumStrategy`, of a test's members."""

    def __init__(self, members):
        keras_seams.install()
        self.engine = Engine(LocalWorld(1).communicator(0), None, Timeouts())
        courses = QuorumRoundsFactory(members, Every(2), Averaging, None, "")
        super().__init__(QuorumExtended(self, ProcessGroup(self.engine), ["CPU:0"], courses, members.task, 2))
        self.rank = members.task


def built(members, run_eagerly=True):
    """A strategy and a model, whose steps are eager but where a test is about what they end with."""
    strategy = Meets(members)
    keras.utils.set_random_seed(strategy.rank)
    with strategy.scope():
        model = keras.Sequential(
            [keras.layers.Input((4,)), keras.layers.Dense(3), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
        )
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9, use_ema=True)
        model.compile(optimizer, "mse", run_eagerly=run_eagerly)
    return strategy, model


def data(rank, rows=24):
    generator = np.random.default_rng(rank)
    x = generator.normal(size=(rows, 4)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, x.sum(axis=1, keepdims=True))).batch(8)


def test_processes_end_epochs_with_equal_weights_statistics_and_averages(job):
    made = job(2, quorum=2)
    models = {task: built(made.members[task], run_eagerly=False) for task in range(2)}

    def work(task):
        strategy, model = models[task]
        model.fit(data(task), epochs=2, shuffle=False, verbose=0)
        averages = strategy.extended.moving_averages(model)
        return [variable.numpy() for variable in (*model.weights, *averages)], int(model.optimizer.iterations)

    (values, steps), (other_values, _) = made.side_by_side(work, range(2))
    for value, its in zip(values, other_values, strict=True):
        assert value.tobytes() == its.tobytes()
    assert steps == 6
    extended = models[0][0].extended
    assert extended.totals.rounds == 4, "a whole round and a rest in each epoch"
    assert extended.is_writer
    assert not models[1][0].extended.should_checkpoint


def test_a_process_that_comes_later_begins_where_the_others_are(job):
    made = job(2)
    (_, first), (strategy, second) = (built(made.members[task]) for task in range(2))
    seen = {}

    class Comes(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                seen["epoch"] = strategy.extended.begin_fit(second)
                seen["weights"] = second.get_weights()
                seen["slots"] = [
                    variable.numpy() for variable in second.optimizer.variables if "momentum" in variable.path
                ]
                seen["iterations"] = int(second.optimizer.iterations)
                seen["expected"] = [
                    variable.numpy() for variable in first.optimizer.variables if "momentum" in variable.path
                ]
                seen["own"] = first.get_weights()
                strategy.extended.end_fit(second)

    first.fit(data(0), epochs=3, shuffle=False, verbose=0, callbacks=[Comes()])
    assert seen["epoch"] == 2
    assert seen["iterations"] == 6
    for actual, expected in (("weights", "own"), ("slots", "expected")):
        for array, other in zip(seen[actual], seen[expected], strict=True):
            np.testing.assert_array_equal(array, other)
    assert strategy.extended.begin_fit(second) == 0, "of the next call of fit"


@pytest.mark.parametrize(("at", "expected"), [(0, 1.0), (2, 0.25)])
def test_late_process_gets_learning_rate_before_epoch_callbacks(job, at, expected):
    made = job(2)
    (_, first), (strategy, second) = (built(made.members[task]) for task in range(2))
    seen = []

    class Comes(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1 and len(self.model.history.epoch) == at:
                seen.append((strategy.extended.begin_fit(second), float(second.optimizer.learning_rate)))
                strategy.extended.end_fit(second)

    halves = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    first.optimizer.learning_rate = 1.0
    first.fit(data(0), epochs=3, shuffle=False, verbose=0, callbacks=[halves, Comes()])
    assert seen == [(at, expected)]


def test_process_joining_after_fit_takes_final_weights(job):
    made = job(2)
    (_, first), (_, second) = (built(made.members[task]) for task in range(2))
    first.fit(data(0), epochs=2, shuffle=False, verbose=0)
    history = second.fit(data(1), epochs=2, shuffle=False, verbose=0)
    assert history.epoch == []
    for weight, other in zip(first.get_weights(), second.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, other)
    made.running_at_once = True  # the next call of fit waits for the other process no longer than for a late one
    assert second.fit(data(1), epochs=1, shuffle=False, verbose=0).epoch == [0]


def test_optimizer_numbers_count_fits_already_over(job):
    """Rounds are known by these numbers, and a process that comes later takes no step in the fits before."""
    made = job(2, quorum=1)
    for task in range(2):
        strategy, model = built(made.members[task])
        model.fit(data(task), epochs=1, shuffle=False, verbose=0)
        with strategy.scope():
            other = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
            other.compile("adam", "mse", run_eagerly=True)
        other.fit(data(task), epochs=1, shuffle=False, verbose=0)
        assert [strategy.extended._number(each_model.optimizer) for each_model in (model, other)] == [0, 1]


def test_process_joining_after_all_left_logs_warning(job, caplog):
    made = job(2)
    (_, first), (_, second) = (built(made.members[task]) for task in range(2))
    first.fit(data(0), epochs=1, shuffle=False, verbose=0)
    with made.changed:
        made.quorums.gone(0, lost=False)
    made.running_at_once = True
    second.fit(data(1), epochs=1, shuffle=False, verbose=0)
    assert "no process is left that has its weights: this process keeps its own weights" in caplog.text


@pytest.mark.parametrize("has_backup", [False, True])
def test_chief_that_comes_back_after_all_left_does_not_pass_initial_weights_off_as_trained(
    job, caplog, monkeypatch, has_backup
):
    made = job(2)
    (_, first), (_, chief) = (built(made.members[task]) for task in range(2))
    first.fit(data(0), epochs=1, shuffle=False, verbose=0)
    with made.changed:
        made.quorums.gone(0, lost=False)
    made.running_at_once = True
    monkeypatch.setattr(QuorumExtended, "is_writer", True)
    if has_backup:
        chief.optimizer.iterations.assign(3)
        assert chief.fit(data(0), epochs=1, shuffle=False, verbose=0).epoch == []
        assert "keeps its own weights" in caplog.text
    else:
        with pytest.raises(PeerLostError, match=r"the chief, .* came back too late, and has initial weights only"):
            chief.fit(data(0), epochs=1, shuffle=False, verbose=0)


@pytest.mark.parametrize(("others", "own", "expected"), [(3, 3, False), (4, 3, True)])
def test_epochs_end_when_others_are_further(job, others, own, expected):
    made = job(1)
    strategy, model = built(made.members[0])
    strategy.extended.begin_epoch(model, own)
    made.members[0].others = others
    assert strategy.extended.epoch_has_ended(model) is expected
    assert strategy.extended.fit_is_over(model) is False
