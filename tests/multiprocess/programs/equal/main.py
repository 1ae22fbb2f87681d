"""Trains many small models the same way on any number of processes and devices; writes what came out.

Each case is a function that returns numbers. They must not depend on how the batch was dealt out, nor on the rank that
asks. `test_equal_mathematics.py` compares them with one process.
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
from world import CASES, strategy

for file in sorted(Path(__file__).parent.glob("*.py")):
    if file.stem not in ("main", "world"):
        importlib.import_module(file.stem)


def main():
    chosen = os.environ["TEST_CASES"].split(",")
    results = {}
    for name, function in CASES.items():
        if name not in chosen:
            continue
        keras.backend.clear_session()
        keras.utils.set_random_seed(7)
        tf.random.set_seed(None)
        print("CASE", name, flush=True)
        begin = time.process_time()
        try:
            results[name] = function()
        except Exception as error:
            traceback.print_exc()
            if strategy.extended.group.failure is not None:
                raise
            results[name] = {"error": f"{type(error).__name__}: {error}"}
        print("SECONDS", name, round(time.process_time() - begin, 1), flush=True)
    with open(f"{sys.argv[1]}/{strategy.rank}.json", "w") as file:
        json.dump(results, file, default=np.ndarray.tolist)


main()
