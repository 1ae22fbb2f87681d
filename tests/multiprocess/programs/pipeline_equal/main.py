"""Trains many small models as plain Keras does and as pipelines of all processes; writes what came out of both.

The checks of the number of processes are in the other files of this folder. Each is run twice: once without a strategy,
by one of the processes, and then in stages by all. `test_pipeline_strategy.py` compares the results.
"""

import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from world import CHECKS, Place

import tfdist

for file in sorted(Path(__file__).parent.glob("*.py")):
    if file.stem not in ("main", "world"):
        importlib.import_module(file.stem)


def run(check, place):
    keras.backend.clear_session()
    keras.utils.set_random_seed(7)
    try:
        return check.function(place)
    except Exception as error:
        traceback.print_exc()
        if isinstance(error, tfdist.PeerLostError):
            raise
        return {"error": f"{type(error).__name__}: {error}"}


def main():
    folder = Path(sys.argv[1])
    tfdist.init()
    rank, size = tfdist.rank(), tfdist.size()
    chosen = os.environ.get("TEST_CHECKS", "").split(",")
    checks = [
        candidate
        for candidate in CHECKS.values()
        if candidate.size == size and (chosen == [""] or candidate.name in chosen)
    ]
    for place, check in enumerate(checks):
        if place % size == rank:
            (folder / check.name / "plain").mkdir(parents=True)
            begin = time.process_time()
            results = run(check, Place(folder / check.name / "plain"))
            print("SECONDS", check.name, "plain", round(time.process_time() - begin, 1), flush=True)
            write(folder / check.name / "plain.json", results)
    strategies = {}
    for check in checks:
        key = str(sorted(check.arguments.items(), key=str))
        strategy = strategies[key] = strategies.get(key) or tfdist.PipelineStrategy(**check.arguments)
        (folder / check.name / str(rank)).mkdir(parents=True)
        print("CHECK", check.name, flush=True)
        begin = time.process_time()
        results = run(check, Place(folder / check.name / str(rank), strategy))
        print("SECONDS", check.name, round(time.process_time() - begin, 1), flush=True)
        write(folder / check.name / f"{rank}.json", results)
    print("DONE", flush=True)


def write(path, results):
    path.write_text(json.dumps(results, default=lambda value: np.asarray(value).tolist()))


tf.get_logger().setLevel("ERROR")
main()
