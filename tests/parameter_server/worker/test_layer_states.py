import numpy as np
import pytest

from tests.parameter_server.serving import connected, serving
from tfdist.parameter_server.protocol.messages import CompareState, Refused, StateDiffers, Waiting
from tfdist.parameter_server.worker.client import MessageRefusedError
from tfdist.parameter_server.worker.layer_states import LayerStateStore, digest, take

ONES, TWOS = np.ones(3, np.float32), np.full((2, 2), 2.0, np.float32)


def given(arrays, worker=0, model="model", occurrence=0, place=0, incarnation=1, described=("a", "b")):
    def message(id, sent):
        fields = model, occurrence, place, described, tuple(map(digest, arrays))
        return CompareState(id, worker, incarnation, *fields, tuple(sent))

    return message


class Heard:
    """A server's states, and what is answered."""

    def __init__(self):
        self.states, self.answers = LayerStateStore(), []

    def __call__(self, message, arrays=()):
        self.states.heard(message, arrays, lambda answer, arrays: self.answers.append((answer, list(arrays))))
        return self.answers[-1]


def test_worker_receives_arrays_that_differ_from_the_chiefs():
    with serving() as server, connected(server) as chief, connected(server) as worker:
        assert take(chief, given([ONES, TWOS]), [ONES, TWOS]) == {}
        received = take(worker, given([ONES, ONES], 1), [ONES, ONES])
    assert list(received) == [1]
    np.testing.assert_array_equal(received[1], TWOS)


def test_only_arrays_unknown_to_the_server_are_sent():
    """Other models may have the same frozen weights."""
    heard = Heard()
    assert heard(given([ONES, TWOS])(0, ()))[0] == StateDiffers(0, (0, 1))
    assert heard(given([ONES, TWOS])(1, (0, 1)), [ONES, TWOS])[0] == StateDiffers(1, ())
    assert heard(given([ONES], model="other", place=1)(2, ()))[0] == StateDiffers(2, ())


def test_workers_wait_for_the_chief():
    heard = Heard()
    assert heard(given([ONES], 1)(0, ()))[0] == Waiting(0, (0,))
    assert heard(given([ONES], 2)(0, ()))[0] == Waiting(0, (0,))
    heard.states.lost(2)
    heard(given([TWOS])(0, (0,)), [TWOS])
    (_, _, to_chief, to_worker) = heard.answers
    assert (to_chief[0], to_worker[0]) == (StateDiffers(0, ()), StateDiffers(0, (0,)))
    np.testing.assert_array_equal(to_worker[1][0], TWOS)


@pytest.mark.parametrize("chief_comes_first", [True, False])
def test_another_model_than_the_chiefs_is_refused(chief_comes_first):
    heard = Heard()
    chief, other = given([], model="a", described=("x",)), given([], 1, model="b", described=("y",))
    for message in (chief, other) if chief_comes_first else (other, chief):
        heard(message(0, ()))
    (refusal,) = [answer for answer, _ in heard.answers if isinstance(answer, Refused)]
    assert "variable 1 is y, the chief's is x" in refusal.why


def test_restarted_worker_may_skip_models():
    """The worker begins with the model that the chief has begun last."""
    heard = Heard()
    for occurrence, values in enumerate((ONES, TWOS)):
        heard(given([values], occurrence=occurrence, place=occurrence)(occurrence, (0,)), [values])
    heard(given([ONES], 1, model="before", incarnation=1, place=7)(0, ()))
    answer, arrays = heard(given([ONES], 1, incarnation=2, occurrence=5)(1, ()))
    assert answer == StateDiffers(1, (0,))
    np.testing.assert_array_equal(arrays[0], TWOS)


def test_values_that_the_chief_replaces_are_forgotten():
    heard = Heard()
    for values in (ONES, TWOS):
        heard(given([values])(0, (0,)), [values])
    assert list(heard.states.arrays) == [digest(TWOS)]


def test_arrays_with_a_wrong_digest_are_not_kept():
    heard = Heard()
    assert heard(given([ONES])(0, (0,)), [TWOS])[0] == StateDiffers(0, (0,))


def test_workers_do_not_wait_for_a_lost_chief():
    """The chief ended while a worker waited, or before the server was started again."""
    heard = Heard()
    heard(given([ONES], 1)(0, ()))
    heard.states.lost(0)
    assert heard.answers[-1] == (StateDiffers(0, (), is_known=False), [])
    again = Heard()
    again.states = LayerStateStore(lambda: False)
    assert again(given([ONES], 1)(0, ())) == (StateDiffers(0, (), is_known=False), [])


def test_missing_values_of_the_chief_log_a_warning(caplog):
    with serving() as server, connected(server) as worker:
        server._shards.states._is_chief_there = lambda: False
        assert take(worker, given([ONES], 1), [ONES]) == {}
    assert "the chief is gone" in caplog.text
    assert "this worker begins with its own" in caplog.text


def test_a_refusal_is_raised():
    with serving() as server, connected(server) as chief, connected(server) as worker:
        take(chief, given([], model="a", described=("x",)), [])
        with pytest.raises(MessageRefusedError, match="another model"):
            take(worker, given([], 1, model="b", described=("y",)), [])
