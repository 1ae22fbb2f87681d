"""Runs programs one after the other in this process, and writes their results as JSON.

    tfdist run -n 2 tests/programs/runner.py vae unet       # two processes
    TEST_PLAIN=1 python tests/programs/runner.py vae unet   # plain Keras

A program is a script that sets ``results``, a dict of numbers, and may set ``TOLERANCE``. If one fails, its
traceback is written and the process ends, so that the other ranks, which would wait for it, end too.
`test_programs.py` starts the remaining programs again. It imports Keras here so that its processes can be forks.
"""

import faulthandler
import gc
import json
import os
import runpy
import sys
import time
import traceback
from pathlib import Path

import keras  # noqa: F401
import numpy as np
import tensorflow as tf

HERE = Path(__file__).parent
SECONDS = 240
"""After which a program that has not ended prints where each thread stands, and the process ends."""


PLAIN_EAGERLY = "compute_loss_override custom_train_step fine_tuning keras_tuner_search own_metrics".split()
PLAIN_EAGERLY += "step_in_a_function stopping_early train_on_batch vae".split()
"""Programs whose plain Keras is eager, as it would trace longer than it trains. The others take as long, or
have other random numbers or roundings in a graph."""


def as_json(value):
    if isinstance(value, dict):
        return {str(name): as_json(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(part) for part in value]
    if isinstance(value, (str, bool, int, float)) or value is None:
        return value
    array = np.asarray(value)
    if array.dtype.kind in "OSU":
        return [part.decode() if isinstance(part, bytes) else str(part) for part in array.ravel()]
    return (array if array.dtype.kind in "biu" else array.astype(np.float64)).tolist()


def run(name):
    """Runs one program and returns the results to compare."""
    namespace = runpy.run_path(str(HERE / f"{name}.py"), run_name="__main__")
    return {"results": as_json(namespace["results"]), "tolerance": namespace.get("TOLERANCE", 1e-9)}


def main(names):
    rank = json.loads(os.environ.get("TF_CONFIG", '{"task": {"index": 0}}'))["task"]["index"]
    out = Path(os.environ["TEST_FOLDER"]) if "TEST_FOLDER" in os.environ else None
    for name in names:
        print("PROGRAM", name, flush=True)
        tf.config.run_functions_eagerly(os.environ.get("TEST_PLAIN") == "1" and name in PLAIN_EAGERLY)
        begun = time.process_time()
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        try:
            outcome = run(name)
        except BaseException as error:
            if out:
                said = "".join(traceback.format_exception(error))
                (out / f"{name}.{rank}.json").write_text(json.dumps({"error": said, "time": time.time()}))
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()
        outcome["cpu_seconds"] = round(time.process_time() - begun, 1)
        if out:
            (out / f"{name}.{rank}.json").write_text(json.dumps(outcome))
        else:
            print(json.dumps(outcome["results"])[:2000], outcome["cpu_seconds"], flush=True)
        del outcome
        gc.collect()


if __name__ == "__main__":
    main(sys.argv[1:])
