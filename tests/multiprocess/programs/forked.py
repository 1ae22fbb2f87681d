"""Says what a process is made of, and ends in the way that it is told."""

import atexit
import json
import os
import random
import signal
import sys
import threading
import time

import keras
import numpy as np
import tensorflow as tf

atexit.register(print, "at the end", flush=True)
result = {
    "arguments": sys.argv,
    "folder": os.getcwd(),
    "first on the path": sys.path[0],
    "settings": {name: value for name, value in os.environ.items() if name in ("TEST_END", "TEST_FORKED")},
    "task": json.loads(os.environ["TF_CONFIG"])["task"]["index"],
    "leads a session": os.getsid(0) == os.getpid(),
    "MPI": "mpi4py.MPI" in sys.modules,
    "python": random.random(),
    "numpy": np.random.random(),
    "tensorflow": float(tf.random.uniform([])),
    "keras": float(keras.initializers.RandomUniform()(shape=())),
    "hash": hash("a string"),
}
print("RESULT", json.dumps(result), flush=True)
match os.environ["TEST_END"]:
    case "exit":
        while not os.path.exists("go"):
            time.sleep(0.01)
        sys.exit(7)
    case "raise":
        raise ValueError("to be shown")
    case "interrupt":
        signal.raise_signal(signal.SIGINT)
    case "thread":
        threading.Timer(0.1, lambda: print("the thread has ended", flush=True)).start()
