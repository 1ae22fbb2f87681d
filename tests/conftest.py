import gc
import os
import random
import signal
import threading
import zlib

import numpy as np
import pytest

import tests.strict.sitecustomize  # noqa: F401

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells have it for what they start in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
for number in (signal.SIGHUP, signal.SIGQUIT):  # under nohup, and as with SIGINT
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
# What XLA compiles runs a few times: LLVM need not make it fast.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")

# Ranks that are threads of one process (tests/engine/ranks.py) share TensorFlow's threads, and each keeps some of them
# waiting for the others. By default there are as many as cores.
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "16")

pytest_plugins = ["tests.costs", "tests.failures"]

GARBAGE = 20_000, 10, 10
"""Thresholds of collections: tracing makes many objects, of which few are garbage that only a collection finds."""


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="also run tests that are marked as part of a sweep (slow)")


def pytest_report_header(config):
    from tfdist.engine import machine_code

    how = "in machine code" if machine_code.path() else "in Python, as there is no library in machine code"
    return f"tfdist: processes of one machine sum gradients {how}"


def pytest_configure(config):
    if config.getoption("--all"):
        os.environ["TEST_SWEEP"] = "1"  # for programs, some of which leave out cases of their own


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    if not config.getoption("--all"):
        left_out = [item for item in items if item.get_closest_marker("sweep")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("sweep")]
    # Files that start processes come first: they take longest, and wait much of it, while another worker computes.
    items.sort(key=lambda item: item.get_closest_marker("multiprocess") is None)


@pytest.fixture(autouse=True)
def the_same_is_drawn_each_time(request):
    """Seeds Python, from which Keras draws seeds of weights, and NumPy; TensorFlow is left unseeded."""
    random.seed(request.node.nodeid)
    np.random.seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(autouse=True)
def nothing_has_been_said():
    """Lets each test hear what is said once."""
    from tfdist import notices

    notices.forget()


@pytest.fixture(autouse=True)
def no_timer_is_left():
    """Fails a test whose timer would act within a later one."""
    yield
    timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    left = [timer.name for timer in timers if not timer.finished.is_set()]
    assert not left, f"timers are still running: {left}; cancel them"


def pytest_collection_finish(session):
    """Collects garbage seldom, and not among what has been imported: a quarter of the time of tests in one process."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GARBAGE)
