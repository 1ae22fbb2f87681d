"""SIGINT is never lost, and comes out as KeyboardInterrupt."""

import signal
import sys

import pytest

from tests.multiprocess import harness
from tfdist.cluster.interrupts import InterruptWatch, excepthook, interrupt


@pytest.fixture
def watch():
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    watch = InterruptWatch()
    yield watch
    watch.close()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


class InConstructor(ValueError):
    built = 0

    def __init__(self):
        super().__init__()
        signal.raise_signal(signal.SIGINT)
        InConstructor.built += 1


class InDestructor:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)


def fail():
    raise InConstructor


def destroy():
    InDestructor()


def test_interrupt_in_a_constructor_of_an_error_comes_after_it(watch):
    for number in range(1, 100):
        with pytest.raises(KeyboardInterrupt):
            fail()
        assert InConstructor.built == number
    assert watch.interrupted()


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_interrupt_in_a_destructor_comes_after_it(watch):
    for _ in range(100):
        with pytest.raises(KeyboardInterrupt):
            destroy()


def test_interrupt_elsewhere_comes_at_once(watch):
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_handler_of_the_user_is_left_alone(watch):
    heard = []
    signal.signal(signal.SIGINT, lambda *arguments: heard.append(arguments))
    signal.raise_signal(signal.SIGINT)
    assert heard
    assert not watch.interrupted()
    signal.signal(signal.SIGINT, signal.default_int_handler)


def end_of_a_script(told, is_all):
    """Runs an excepthook; SIGINT comes where it begins, and where it has told the error."""

    def last_words(error, traceback):
        told.append("the job")
        signal.raise_signal(signal.SIGINT)
        return is_all

    def original(*arguments):
        told.append("the user")
        signal.raise_signal(signal.SIGINT)

    def interrupt_calls(frame, event, argument):
        if frame.f_code in (hook.__code__, last_words.__code__):
            interrupt(signal.SIGINT, frame)

    hook = excepthook(last_words, original)
    before = sys.gettrace()
    sys.settrace(interrupt_calls)
    try:
        hook(ValueError, ValueError(), None)
    finally:
        sys.settrace(before)


def test_interrupt_at_the_end_of_a_script_is_ignored(watch):
    told = []
    end_of_a_script(told, is_all=True)
    assert told == ["the job"]


def test_excepthook_of_the_user_can_be_interrupted(watch):
    told = []
    with pytest.raises(KeyboardInterrupt):
        end_of_a_script(told, is_all=False)
    assert told == ["the job", "the user"]


@pytest.mark.multiprocess
def test_interrupted_tensorflow_step_raises_keyboard_interrupt():
    """Before Python 3.12 pybind11 said "MISMATCH of original and normalized active exception types" instead."""
    (ends,) = harness.results(harness.run([str(harness.PROGRAMS / "interrupted.py")], 1))
    assert sum(count for name, count in ends.items() if "KeyboardInterrupt" in name) >= 90, ends
    assert "RuntimeError" not in ends, ends
