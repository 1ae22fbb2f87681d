"""What the writer does with variables that other processes hold, and what these do meanwhile."""

import contextlib

import pytest

from tfdist.strategies.divided_abilities import DealsVariables, DividesUpdates


class Remote:
    """Writes down how it is used."""

    def __init__(self, said):
        self.said = said

    def answer(self):
        self.said.append("answers")

    @contextlib.contextmanager
    def led(self):
        self.said.append("leads")
        yield
        self.said.append("has led")


@pytest.fixture
def made(monkeypatch):
    """Makes a strategy's `extended` that has nothing but the ability, and what its process says."""

    def make(is_writer, ability=DividesUpdates):
        monkeypatch.setattr(ability, "__abstractmethods__", frozenset())
        said = []

        class Extended(ability):
            def __init__(self):
                self.local = 0

            def remote(self, model):
                return Remote(said)

            @contextlib.contextmanager
            def local_only(self):
                said.append("alone")
                yield

        Extended.is_writer = is_writer
        return Extended(), said

    return make


def test_the_writer_leads_once_and_others_answer(made):
    extended, said = made(is_writer=True)
    assert extended.takes_part_in_saving
    assert extended.run_on_writer(None, lambda: extended.run_on_writer(None, lambda: 7)) == 7
    assert said == ["leads", "alone", "has led"]
    extended, said = made(is_writer=False)
    assert extended.run_on_writer(None, lambda: 7) is None
    assert said == ["answers"]


def test_the_writer_leads_again_after_an_error(made):
    extended, said = made(is_writer=True)
    with pytest.raises(ZeroDivisionError):
        extended.run_on_writer(None, lambda: 1 / 0)
    assert extended.run_on_writer(None, lambda: 7) == 7
    assert said == ["leads", "alone", "leads", "alone", "has led"]


def test_ability_without_required_methods_raises():
    with pytest.raises(TypeError, match="deal"):
        DealsVariables()
