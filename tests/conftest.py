import os
import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells have it for what they start in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

# Ranks that are threads of one process (tests/engine/ranks.py) share TensorFlow's threads, and each keeps some of them
# waiting for the others. By default there are as many as cores.
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "16")

pytest_plugins = ["tests.costs"]


def pytest_addoption(parser):
    parser.addoption(
        "--all-sizes", action="store_true", help="run each program of tests/programs on 1, 2 and 3 processes (slow)"
    )
