"""Values that each thread has for itself."""

import threading

import pytest

from tfdist.thread_values import ThreadValue


def test_contexts_replace_the_value_one_within_another():
    state = ThreadValue("outside")
    with state.set_to("outer"):
        with state.set_to("inner"):
            assert state.value == "inner"
        assert state.value == "outer"
    assert state.value == "outside"


def test_the_value_comes_back_after_an_error():
    state = ThreadValue(1)
    with pytest.raises(KeyError), state.set_to(2):
        raise KeyError
    assert state.value == 1


def test_other_threads_have_the_default():
    state, read = ThreadValue(1), []
    with state.set_to(2):
        thread = threading.Thread(target=lambda: read.append(state.value))
        thread.start()
        thread.join()
    assert read == [1]
