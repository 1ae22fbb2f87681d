"""Steps of TensorFlow that fail because SIGINT came, as those of a job do: what each of them ends with."""

import json
import os
import signal
import threading
from collections import Counter

import tensorflow as tf

from tfdist.cluster.interrupts import InterruptWatch

watch = InterruptWatch()


def wait_for_interrupt():
    """On a thread of TensorFlow's, while the main thread sits in the step."""
    if threading.current_thread() is not threading.main_thread():
        os.kill(os.getpid(), signal.SIGINT)
        while not watch.interrupted():
            pass
    raise RuntimeError("interrupted (Ctrl-C)")


@tf.function
def step():
    tf.py_function(wait_for_interrupt, [], [])


ends = Counter()
for _ in range(100):
    try:
        try:
            step()
            name = "nothing"
        except BaseException as error:
            name = type(error).__name__
        for _ in range(100):
            len("")  # an interrupt that was put off comes here at the latest
    except KeyboardInterrupt:
        name += ", then KeyboardInterrupt"
    ends[name] += 1
print("RESULT", json.dumps(ends), flush=True)
