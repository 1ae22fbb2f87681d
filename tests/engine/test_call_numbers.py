import types

import pytest

from tfdist.engine.call_numbers import CallNumbers

SITE, OTHER = (None, "a sum"), (None, "another")


class Asked:
    """A control connection that keeps what it is asked."""

    def __init__(self):
        self.questions = []

    def ask(self, make, agreed, refused):
        self.questions.append((make(7), agreed, refused))


@pytest.fixture
def control():
    return Asked()


@pytest.fixture
def numbers(control):
    return CallNumbers(control, types.SimpleNamespace(calls=lambda site: 10 * (site == OTHER)))


def test_the_first_call_of_a_site_asks_for_its_number(numbers, control):
    answers = []
    for _ in range(2):
        assert numbers.agree(SITE, "float32", answers.append, answers.append) is None
        numbers.begin(SITE)
    ((question, agreed, _),) = control.questions
    assert (question.id, question.key, question.signature, question.members) == (7, "a sum", "float32", None)
    agreed(3)
    assert answers == [3]
    assert numbers.of(SITE) is None, "until it is taken"
    numbers.take(SITE, 3)
    assert numbers.of(SITE) == numbers.agree(SITE, "float32", print, print) == 3
    assert len(control.questions) == 1


def test_a_withdrawn_call_is_asked_for_again(numbers, control):
    for _ in range(2):
        numbers.agree(SITE, "", print, print)
        numbers.begin(SITE)
        numbers.withdraw(SITE)
    assert len(control.questions) == 2


def test_sites_of_one_process_ask_nobody(numbers, control):
    alone = CallNumbers(None, types.SimpleNamespace(calls=lambda site: 0))
    assert [alone.agree(site, "", print, print) for site in (SITE, OTHER, SITE)] == [-1, -2, -1]
    assert numbers.agree(((4,), "a sum"), "", print, print) == -1
    assert not control.questions


def test_calls_are_counted_with_those_beside_the_engine(numbers):
    numbers.take(SITE, 0)
    numbers.take(OTHER, 1)
    for site in (SITE, SITE, SITE, OTHER):
        numbers.begin(site)
    assert numbers.posted(OTHER) == 1
    assert numbers.counts() == {0: numbers.calls(SITE), 1: numbers.calls(OTHER)} == {0: 3, 1: 11}


def test_objects_are_counted_by_kind_and_group(numbers):
    assert [numbers.count((0, 1), "strategy") for _ in range(2)] == [0, 1]
    assert numbers.count((0, 1), "model") == numbers.count((1, 0), "strategy") == 0
