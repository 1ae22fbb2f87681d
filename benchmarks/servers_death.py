"""A parameter server dies: what copies and snapshots are worth. Two workers and two servers on this machine.

Each worker's step takes about `SLEEP` seconds, and each push adds 1 to all weights, so that the weights of a server
tell how many updates it has. One of the servers is killed; where there are no copies, it is started again at once, as a
process manager would. Measured are the longest time between two steps of a worker, and the updates that are lost.

    python benchmarks/servers_death.py
"""

import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import servers
import side_by_side

STEPS, SLEEP, UNITS = 900, 0.02, 1 << 17  # of so many weights each server has half
KILLED_AFTER = 400
"""Steps of the chief, before which all have been traced."""
WAYS = {
    "copies": {"copies": 1},
    "snapshots, 5 s": {"snapshot_seconds": 5.0},
    "snapshots, 1 s": {"snapshot_seconds": 1.0},
}


def measure(given, folder):
    """Trains; the chief says when the server may be killed, and each worker reports."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tfdist

    kept = given if "copies" in given else {**given, "snapshots": f"{folder}/snapshots"}
    strategy = tfdist.ParameterServerStrategy(servers=tfdist.parameter_server.Servers(**kept))
    with strategy.scope():
        model = keras.Sequential(
            [keras.layers.Input((UNITS,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
        )
        model.compile(keras.optimizers.SGD(1.0), lambda y_true, y_pred: y_true - y_pred)
    data = tf.data.Dataset.from_tensors((np.ones((1, UNITS), np.float32), np.zeros((1, 1), np.float32))).repeat(STEPS)
    ends = []

    def note(batch, logs):
        time.sleep(SLEEP)
        ends.append(time.monotonic())
        if len(ends) == KILLED_AFTER and strategy.rank == 0:
            Path(folder, "kill").touch()

    model.fit(data, verbose=0, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=note)])
    time.sleep(1)  # until the other has ended, too
    model.evaluate(np.ones((1, UNITS), np.float32), np.zeros((1, 1), np.float32), verbose=0)  # reads the newest
    weights = model.get_weights()[0]
    gaps = np.diff(ends[KILLED_AFTER // 2 :])
    side_by_side.report({"gap": float(gaps.max()), "updates": [float(weights[0, 0]), float(weights[-1, 0])]})


def trained(given):
    """The seconds without a step, and the updates that are lost, when the second server dies."""
    with tempfile.TemporaryDirectory() as folder:
        ports = [side_by_side.free_port() for _ in range(4)]
        chief, worker, *of_servers = [f"127.0.0.1:{port}" for port in ports]
        cluster = {"chief": [chief], "worker": [worker], "ps": of_servers}

        def start(job, index):
            config = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
            return subprocess.Popen(
                [sys.executable, __file__, f"--measure={json.dumps([given, folder])}"],
                env={**side_by_side.of_one_core(), "TF_CONFIG": config, "TFDIST_HEARTBEAT_TIMEOUT": "60"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )

        popens = [start("chief", 0), start("worker", 0), start("ps", 0)]
        victim = start("ps", 1)

        def kill():
            while not Path(folder, "kill").exists():
                if popens[0].poll() is not None:
                    return
                time.sleep(0.01)
            victim.send_signal(signal.SIGKILL)
            if "copies" not in given:
                popens.append(start("ps", 1))

        killer = threading.Thread(target=kill)
        killer.start()
        reports = side_by_side.all_reported(popens[:2])
        killer.join()
        for popen in (*popens, victim):
            popen.communicate()
    pushed = 2 * STEPS
    return {
        "seconds without a step": max(report["gap"] for report in reports),
        "updates lost": pushed - max(min(report["updates"]) for report in reports),
    }


def main():
    options = side_by_side.parser(__doc__.partition("\n")[0])
    options.add_argument("--rounds", type=int, default=3)
    options = options.parse_args()
    rows = {way: [] for way in WAYS}
    for _ in range(options.rounds):
        for way, given in WAYS.items():
            rows[way].append(trained(given))
    figures = {}
    for way, runs in rows.items():
        figures[way] = {name: servers.spread([run[name] for run in runs]) for name in runs[0]}
        told = [
            f"{row['median']:.2f} {name} ({row['from']:.2f} to {row['to']:.2f})" for name, row in figures[way].items()
        ]
        print(f"{way:16}: {', '.join(told)}", flush=True)
    side_by_side.save(options.json, figures)


if __name__ == "__main__":
    asked = next((argument.partition("=")[2] for argument in sys.argv if argument.startswith("--measure=")), None)
    if asked is None:
        main()
    else:
        measure(*json.loads(asked))
