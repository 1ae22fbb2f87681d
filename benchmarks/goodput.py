"""Training while processes are killed: rounds of a quorum (DiLoCo) against an all-reduce that goes on from its backup.

    python benchmarks/goodput.py [--seeds 3] [--processes 4] [--every 15] [--seconds 120]

Fashion-MNIST, a perceptron of 235,146 parameters, 32 samples of each process per step. Every so many seconds one
process, in turn, is killed by SIGKILL and started again at once, as a supervisor does. With an all-reduce the others
end, too, and all are started again; they go on from the last epoch's backup (`BackupAndRestore`), 64 steps before at
most. With a quorum the others go on.

Useful is what the weights have learned from at the end: samples of rounds that count, and of steps that no restart has
undone. The share of time spent training, the goodput, is the rate of useful samples, divided by that of the same
strategy when nobody is killed. Time counts from the first step of any process. All processes are on this machine and
share its cores, on which a process takes some seconds to start. The accuracy is that of the last epoch's weights.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import side_by_side

BATCH, STEPS, EVERY = 32, 64, 64
STRATEGIES = ("quorum, DiLoCo", "all-reduce")


def train(name, folder, seed):
    """Runs as every process, until it is killed or a file says that it is enough."""
    import fashion

    (x, y), _ = fashion.load()
    import keras
    import tensorflow as tf

    import tfdist

    folder = Path(folder)
    is_quorum = name.startswith("quorum")
    outer = tfdist.local_sgd.Outer(keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True))
    strategy = (
        tfdist.QuorumStrategy(sync_every=EVERY, rule=outer, grace=2.0) if is_quorum else tfdist.AllReduceStrategy()
    )
    keras.utils.set_random_seed(int(seed))
    with strategy.scope():
        model = fashion.mlp()
        model.compile(
            keras.optimizers.SGD(0.02, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    if is_quorum:
        x, y = x[strategy.rank :: strategy.size], y[strategy.rank :: strategy.size]
    batch = BATCH if is_quorum else BATCH * strategy.size
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=int(seed)).repeat().batch(batch)
    log = (folder / f"useful.{strategy.rank}.{os.getpid()}").open("w")

    class Reports(keras.callbacks.Callback):
        """Writes what is useful so far; the weights of each epoch are written by one that is there."""

        count = 0

        def on_train_batch_end(self, batch, logs=None):
            if is_quorum:
                count = strategy.communication()["rounds"] * EVERY * BATCH
            else:
                count = int(self.model.optimizer.iterations) * BATCH  # of each process
            if count != self.count:
                self.count = count
                print(time.time(), count, file=log, flush=True)

        def on_epoch_end(self, epoch, logs=None):
            if is_quorum or strategy.rank == 0:
                partial = folder / f"{strategy.rank}.partial.npz"  # Keras's own files are the chief's
                np.savez(partial, *self.model.get_weights())
                partial.replace(folder / f"epoch.{epoch:06d}.{strategy.rank}.npz")
                for earlier in sorted(folder.glob(f"epoch.*.{strategy.rank}.npz"))[:-1]:
                    earlier.unlink()
            if (folder / "enough").exists():
                self.model.stop_training = True

    callbacks = [Reports()]
    if not is_quorum:
        callbacks.append(keras.callbacks.BackupAndRestore(folder / "backup", delete_checkpoint=False))
    model.fit(data, steps_per_epoch=STEPS, epochs=1_000_000, verbose=0, callbacks=callbacks)


class Supervised:
    """The processes of a job, which are started again when they end.

    Args:
        name: name of the strategy.
        size: number of processes.
        folder: folder for the processes' files.
        seed: seed of weights and batches.
    """

    def __init__(self, name, size, folder, seed):
        self.name, self.folder, self.seed = name, Path(folder), seed
        self.addresses = [f"127.0.0.1:{side_by_side.free_port()}" for _ in range(size)]
        self.popens = [self.start(rank) for rank in range(size)]

    def start(self, rank):
        task = {"cluster": {"worker": self.addresses}, "task": {"type": "worker", "index": rank}}
        environment = {**side_by_side.of_one_core(), "TF_CONFIG": json.dumps(task)}
        command = [sys.executable, __file__, "train", self.name, str(self.folder), str(self.seed)]
        log = (self.folder / f"{rank}.output").open("ab")
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)

    def look(self):
        """Starts again what has ended: with an all-reduce all of them, when the last one has."""
        ended = [rank for rank, popen in enumerate(self.popens) if popen.poll() is not None]
        if self.name == "all-reduce" and len(ended) < len(self.popens):
            return
        for rank in ended:
            if self.name != "all-reduce" and self.popens[rank].returncode != -signal.SIGKILL:
                raise RuntimeError((self.folder / f"{rank}.output").read_text())
            self.popens[rank] = self.start(rank)

    def readings(self):
        """By process, ever started, the lines that it has written."""
        readings = {}
        for path in self.folder.glob("useful.*"):
            lines = [line.split() for line in path.read_text().splitlines()]
            readings[path.name] = [(float(line[0]), float(line[1])) for line in lines if len(line) == 2]
        return readings

    def useful(self, begin, end):
        """Samples of all processes that the weights have learned from at a time, beyond those at another one."""
        readings = self.readings()
        if self.name != "all-reduce":
            return sum(_until(series, end) - _until(series, begin) for series in readings.values())
        alive = [series for series in readings.values() if series and series[0][0] <= end]
        last = max(alive, key=lambda lines: max(at for at, _ in lines if at <= end))
        return len(self.popens) * (_until(last, end) - max(_until(series, begin) for series in alive))

    def stop(self, deadline=20.0):
        (self.folder / "enough").touch()
        end = time.monotonic() + deadline
        for popen in self.popens:
            try:
                popen.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(popen.pid, signal.SIGKILL)
                popen.wait()


def _until(lines, when):
    return max((count for at, count in lines if at <= when), default=0.0)


def measure(name, size, seconds, every, seed):
    """One run. Nobody is killed if ``every`` is None."""
    with tempfile.TemporaryDirectory() as folder:
        job = Supervised(name, size, folder, seed)
        try:
            deadline = time.monotonic() + 120
            while not all(
                any(file_name.startswith(f"useful.{rank}.") for file_name in job.readings()) for rank in range(size)
            ):
                if time.monotonic() > deadline:
                    raise RuntimeError((Path(folder) / "0.output").read_text())
                time.sleep(0.05)
            begin = time.time()
            kills, victim = 0, 0
            while (now := time.time()) < begin + seconds:
                if every is not None and now - begin > (kills + 1) * every:
                    victim = (victim + 1) % size  # the chief is the last one in turn
                    os.killpg(job.popens[victim].pid, signal.SIGKILL)
                    kills += 1
                job.look()
                time.sleep(0.05)
            useful = job.useful(begin, begin + seconds)
        finally:
            job.stop()
        # Not the last one that was written: a chief that comes back when the others have ended begins anew.
        newest = max(Path(folder).glob("epoch.*.npz"))
        command = [sys.executable, __file__, "evaluate", str(newest)]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return {"samples/s": useful / seconds, "accuracy": float(output.split()[-1]), "kills": kills}


def evaluate(path):
    import fashion

    _, test = fashion.load()
    import keras

    model = fashion.mlp()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    model.set_weights(list(np.load(path).values()))
    print(model.evaluate(*test, batch_size=1000, verbose=0)[1])


def main():
    parser = side_by_side.parser(__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--every", type=float, default=15.0, help="seconds between two deaths")
    parser.add_argument("--seconds", type=float, default=120.0, help="of each run")
    parser.add_argument("--names", nargs="+", default=list(STRATEGIES))
    options = parser.parse_args()
    results = {name: {"nobody is killed": [], "one is killed": []} for name in options.names}
    for seed in range(options.seeds):  # in turn, so that a slow spell of the machine meets all
        for name in options.names:
            for case, every in (("nobody is killed", None), ("one is killed", options.every)):
                run = measure(name, options.processes, options.seconds, every, seed)
                results[name][case].append(run)
                print(f"{name}, {case}, seed {seed}: {run}", file=sys.stderr, flush=True)
                side_by_side.save(options.json, vars(options) | {"found": results})
    rows = []
    for name, cases in results.items():
        for case, runs in cases.items():
            row = {
                "samples/s": statistics.median(run["samples/s"] for run in runs),
                "accuracy, %": 100 * statistics.median(run["accuracy"] for run in runs),
            }
            if case == "one is killed":
                shares = [
                    100 * run["samples/s"] / base["samples/s"]
                    for run, base in zip(runs, cases["nobody is killed"], strict=True)
                ]
                row |= dict(zip(("goodput, %", "from", "to"), side_by_side.median_and_spread(shares), strict=True))
            rows.append((f"{name}, {case}", row))
    columns = ["goodput, %", "from", "to", "samples/s", "accuracy, %"]
    title = f"{options.processes} processes, one killed every {options.every:g} s for {options.seconds:g} s"
    side_by_side.table(rows, columns, title)


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if sys.argv[1:2] == ["train"]:
        train(*sys.argv[2:])
    elif sys.argv[1:2] == ["evaluate"]:
        evaluate(sys.argv[2])
    else:
        main()
