"""What a shard answers."""

import keras
import numpy as np
import pytest

from tests.parameter_server.shard.talk import ONES, Talk
from tfdist.parameter_server.options.staleness import DelayCompensated, Unscaled
from tfdist.parameter_server.options.synchronization import Asynchronous
from tfdist.parameter_server.protocol.messages import AssignValues, Push
from tfdist.parameter_server.protocol.state import TrainingState
from tfdist.parameter_server.shard.feature import ShardFeature


def test_answers_to_pushes_do_not_change():
    talk = Talk()
    talk.push()
    _, (values,) = talk.answers[3][0]
    talk.push(clock=1)
    np.testing.assert_array_equal(values, -ONES[0], "later updates do not change what was answered")


def test_pull_returns_state_and_averages():
    talk = Talk(optimizer=keras.optimizers.SGD(1.0, momentum=0.5, use_ema=True, ema_momentum=0.5))
    for clock in range(2):
        talk.push(clock=clock)
    answer = talk.pull(what="state")
    state = TrainingState.of_arrays(talk.answers[talk.number][0][1], 2, answer.slots, answer.scalars)
    np.testing.assert_array_equal(state.values[0], np.full((4, 3), -2.5))
    np.testing.assert_array_equal(state.slots[0]["momentum"], np.full((4, 3), -1.5))
    np.testing.assert_array_equal(state.slots[1]["average"], np.full(3, -1.75))
    assert int(state.scalars["iteration"]) == 2
    talk.pull(what="averages")
    np.testing.assert_array_equal(talk.answers[talk.number][0][1][0], np.full(15, -1.75))


def test_after_fit_values_are_averages_unless_something_is_assigned():
    talk = Talk(optimizer=keras.optimizers.SGD(1.0, momentum=0.5, use_ema=True, ema_momentum=0.5))

    def final():
        talk.pull(what="final")
        return talk.answers[talk.number][0][1][0]

    for clock in range(2):
        talk.push(clock=clock)
    np.testing.assert_array_equal(final(), np.full(15, -1.75))
    talk.shard.heard(AssignValues(99, 0, 1), [np.full(15, 3.0, np.float32)], lambda *answer: None)
    np.testing.assert_array_equal(final(), np.full(15, 3.0))
    talk.push(clock=2)
    assert not np.any(final() == 3.0), "averages again"


@pytest.mark.parametrize(("late", "reads"), [(Unscaled(), 0), (DelayCompensated(1.0), 4)], ids=str)
def test_whole_parameters_are_copied_only_for_parts_that_read_them(late, reads, monkeypatch):
    talk = Talk(Asynchronous(late), workers=2)
    talk.shard.features = [*talk.shard.features, ShardFeature()]
    vectors, copies = talk.shard.store.vectors, []
    monkeypatch.setattr(talk.shard.store, "vectors", lambda *kinds: copies.append(kinds) or vectors(*kinds))
    talk.pull(1)
    talk.push(0)
    talk.shard.heard(Push(90, 1, 1, 0, 0, 0, 1.0), ONES, lambda *answer: None)
    assert talk.shard.ledger.staleness[1] == 1
    assert copies.count(()) == reads
