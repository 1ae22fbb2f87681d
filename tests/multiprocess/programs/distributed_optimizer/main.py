"""Optimizers that average gradients: each process with its share, against plain Keras with the whole batch.

The checks are in the other files of this folder; `test_distributed_optimizer.py` names those that a launch is for.
"""

import importlib
from pathlib import Path

import keras
from checking import run_checks

import tfdist

checks = {}
for file in sorted(Path(__file__).parent.glob("*.py")):
    if file.stem != "main":
        checks |= vars(importlib.import_module(file.stem))
run_checks(checks, lambda: keras.backend.set_floatx("float64"))
tfdist.barrier()
