"""Runs programs one after the other on parameter servers, as one worker of a job, and says what came out.

    tfdist run -n 2 --ps 1 tests/programs/servers/runner.py FOLDER vae tutorial

Programs are those of the folder above, and those beside this file. FOLDER is where the workers meet after each one.
"""

import faulthandler
import functools
import gc
import json
import os
import runpy
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
SECONDS = 90
"""After which a program that has not ended prints where each thread stands, and the process ends."""

sys.path[:0] = [str(HERE.parent), str(HERE.parents[2])]
os.environ["TEST_SERVERS"] = "1"

import common  # noqa: E402
import keras  # noqa: E402
import numpy as np  # noqa: E402

TIMES = 4
"""So many times the epochs of a program: a worker's share of a few batches says little about whether a model learns."""


def recorded(fits):
    """`fit`, which trains longer, and notes models and their losses."""
    original = keras.Model.fit

    def fit(self, *args, epochs=1, **kwargs):
        history = original(self, *args, epochs=TIMES * epochs, **kwargs)
        fits.append((self, [float(np.mean(loss)) for loss in history.history.get("loss", [])]))
        return history

    return fit


def meet(folder, name, worker, workers):
    """Waits until all workers have ended a program."""
    (folder / f"{name}.{worker}").touch()
    while not all((folder / f"{name}.{other}").exists() for other in range(workers)):
        time.sleep(0.01)


def run(name, fits, together):
    """Runs one program.

    Args:
        name: name of the program's file, without its ending.
        fits: gets each call of `fit`.
        together: waits for the other workers.

    Returns:
        The losses of the epochs of each call of `fit`, and the sums of the newest weights of each model.
    """
    path = next(path for path in (HERE / f"{name}.py", HERE.parent / f"{name}.py") if path.exists())
    namespace = runpy.run_path(str(path), run_name="__main__")
    together()
    models = [model for model, _ in fits] + [value for value in namespace.values() if isinstance(value, keras.Model)]
    sums, updates = [], []
    for model in {id(model): model for model in models}.values():
        for link in model.distribute_strategy.extended.links(model):
            link.refresh()
            updates.append(int(link.session.iterations))
        sums.append(float(sum(np.abs(weight.numpy()).sum() for weight in model.trainable_variables)))
    losses = [losses for _, losses in fits] + namespace.get("losses_of_loops", [])
    return {
        "losses": [epoch_losses for epoch_losses in losses if len(epoch_losses) > 1],
        "sums": sums,
        "updates": updates,
    }


def main(folder, *names):
    common.strategy()  # a server stays here
    config = json.loads(os.environ["TF_CONFIG"])
    worker, workers = config["task"]["index"], len(config["cluster"]["worker"])
    folder, fits = Path(folder), []
    keras.Model.fit = recorded(fits)
    for name in names:
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        outcome = run(name, fits, functools.partial(meet, folder, name, worker, workers))
        meet(folder, f"{name}-read", worker, workers)  # nobody trains on before all have read
        faulthandler.cancel_dump_traceback_later()
        print("RESULT", json.dumps({"name": name, **outcome}), flush=True)
        fits.clear()
        del outcome
        gc.collect()


if __name__ == "__main__":
    main(*sys.argv[1:])
