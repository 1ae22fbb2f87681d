"""Values that each thread has for itself, and threads that Python has started or not."""

import _thread
import threading

import pytest

from tfdist.thread_values import ThreadValue, is_beside_main_thread


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


def test_a_thread_of_the_program_is_told_from_those_of_libraries():
    told, ended = [], threading.Lock()

    def tell():
        told.append(is_beside_main_thread())

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    thread.join()
    assert not is_beside_main_thread()
    assert told == [True]

    def tell_and_end():
        tell()
        ended.release()

    ended.acquire()
    _thread.start_new_thread(tell_and_end, ())  # of which `threading` knows as little as of a library's
    assert ended.acquire(timeout=30)
    assert told == [True, False]
