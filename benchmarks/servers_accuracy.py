"""Fashion-MNIST on parameter servers: accuracy and time by mode, staleness policy and delay. 2 workers, one server.

Every run uses the same number of gradients of 64 images; the modes that average two gradients make half as many
updates. With a delay, the last worker sleeps in each step, so that its gradients are stale. The chief keeps its
parameters now and then, and evaluates them after training: evaluating takes no time of the training. Seconds are
counted from its first steps on, without starting and tracing.

    python benchmarks/servers_accuracy.py [--quick]
"""

import contextlib
import statistics
import sys
import time

import servers
import side_by_side

BATCH = 64
LEARNING_RATE, MOMENTUM = 0.05, 0.9
"""The rate falls linearly to zero, so that seeds differ less."""
TARGET = 0.88
READINGS = 40
FIRST = 5
"""Steps of the chief that are not timed, in which functions are traced."""
ENDLESS = 10**6
"""Epochs; the training ends after a number of updates."""
ALONE = "one process"
POLICIES = ("Unscaled()", "Inverse()", "Exponential(0.1)", "DropBeyond(4)")
WITH_POLICIES = ("Asynchronous()", "BoundedStaleness(4)", "SoftSync(1)")
RUNS = {
    ALONE: (ALONE, None),
    servers.ALL_REDUCE: (servers.ALL_REDUCE, "Unscaled()"),
    "Synchronous()": ("Synchronous()", "Unscaled()"),
    **{f"{mode}, {policy}": (mode, policy) for mode in WITH_POLICIES for policy in POLICIES},
    "Hogwild()": ("Hogwild()", "Unscaled()"),
}
AVERAGING = (servers.ALL_REDUCE, "Synchronous()", "SoftSync(1)")
"""Modes whose updates contain a gradient of each of two workers."""
OWN = ("Hogwild()",)
"""Modes in which each worker counts its own updates: it makes half of them."""
QUICK = (
    ALONE,
    servers.ALL_REDUCE,
    "Synchronous()",
    "BoundedStaleness(4), Unscaled()",
    "Asynchronous(), Unscaled()",
    *OWN,
)


def train(name, delay, gradients, seed):
    """Trains on every worker; the chief reports seconds, updates and test accuracy in the course of the training."""
    mode, policy = RUNS[name]
    import fashion

    (x, y), test = fashion.load()
    strategy = None if mode == ALONE else servers.strategy(mode, policy)
    import keras

    rank, workers = servers.rank(), 1 if mode == ALONE else 2
    updates = gradients // 2 if mode in (*AVERAGING, *OWN) else gradients
    keras.utils.set_random_seed(seed)
    batch = BATCH
    if mode == servers.ALL_REDUCE:  # it divides the same batches over the workers
        batch = workers * BATCH
    else:
        x, y = x[rank::workers], y[rank::workers]

    def compiled():
        model = fashion.mlp()
        model.compile(
            keras.optimizers.SGD(
                keras.optimizers.schedules.PolynomialDecay(LEARNING_RATE, updates, end_learning_rate=0.0), MOMENTUM
            ),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        return model

    class Course(keras.callbacks.Callback):
        """Sleeps on the last worker, keeps the chief's parameters, and ends the training after so many updates."""

        def __init__(self):
            super().__init__()
            self.kept = []
            self.steps = 0
            self.has_ended = False

        def on_train_batch_begin(self, batch, logs=None):
            if rank == workers - 1:
                time.sleep(delay)

        def on_train_batch_end(self, batch, logs=None):
            if self.has_ended:  # all-reduce ends its epoch, by now at a learning rate of zero
                return
            self.steps += 1
            if self.steps == FIRST:
                self.begun = time.perf_counter()
            made = int(self.model.optimizer.iterations)
            self.has_ended = self.model.stop_training = made >= updates
            due = made >= (len(self.kept) + 1) * updates / READINGS
            if rank == 0 and self.steps > FIRST and (due or self.has_ended):
                self.kept.append((time.perf_counter() - self.begun, made, self.model.get_weights()))

    with strategy.scope() if strategy else contextlib.nullcontext():
        model = compiled()
    course = Course()
    servers.meet(workers)
    model.fit(x, y, batch_size=batch, epochs=ENDLESS, verbose=0, callbacks=[course])
    if rank:
        servers.report({"steps": course.steps})
        return
    judge = compiled()  # not on the servers
    readings = []
    for seconds, made, weights in course.kept:
        judge.set_weights(weights)
        readings.append([seconds, made, judge.evaluate(*test, batch_size=1000, verbose=0)[1]])
    servers.report({"steps": course.steps, "readings": readings})


def seconds_to(run, target):
    """Returns the seconds after which a run reached an accuracy; None if it did not reach it."""
    return next((seconds for seconds, _, accuracy in run["readings"] if accuracy >= target), None)


def measured(name, delay, gradients, seed):
    workers = 1 if name == ALONE else 2
    parameter_servers = 0 if name in (ALONE, servers.ALL_REDUCE) else 1
    command = [__file__, "--train", name, str(delay), str(gradients), str(seed)]
    reports = servers.run(command, workers, parameter_servers, cores="all", deadline=3600)
    return {"readings": reports[0]["readings"], "steps": [report["steps"] for report in reports]}


def row(runs, target):
    accuracies = [100 * run["readings"][-1][2] for run in runs]
    reached = [seconds_to(run, target) for run in runs]
    figures = {
        "accuracy, %": statistics.median(accuracies),
        "± %": (max(accuracies) - min(accuracies)) / 2,
        "s": statistics.median(run["readings"][-1][0] for run in runs),
    }
    if None not in reached:
        figures[f"s to {target:.0%}"] = statistics.median(reached)
    return figures


def main():
    parser = side_by_side.parser(__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=float, default=6, help="passes of all workers together over the images")
    parser.add_argument("--delays", type=float, nargs="+", default=[0, 20], help="of one worker's step, milliseconds")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS), metavar="RUN", help=", ".join(RUNS))
    parser.add_argument("--target", type=float, default=TARGET)
    parser.add_argument("--quick", action="store_true", help="one seed and some of the runs, 2 epochs, to 85 %%")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.epochs, options.runs, options.target = 1, min(options.epochs, 2), QUICK, 0.85
    gradients = int(options.epochs * 60000 / BATCH)
    results = {str(delay): {name: [] for name in options.runs} for delay in options.delays}
    figures = {"target": options.target, "gradients": gradients, "delays": results}
    for seed in range(options.seeds):
        for delay in options.delays:
            for name in options.runs:
                if name == ALONE and delay:
                    continue
                run = measured(name, delay / 1e3, gradients, seed)
                results[str(delay)][name].append(run)
                print(f"delay {delay:g} ms, seed {seed}, {name}: {row([run], options.target)}", file=sys.stderr)
                side_by_side.save(options.json, figures)
    columns = ["accuracy, %", "± %", "s", f"s to {options.target:.0%}"]
    for delay, runs in results.items():
        rows = [(name, row(of_name, options.target)) for name, of_name in runs.items() if of_name]
        side_by_side.table(rows, columns, f"Fashion-MNIST, one worker of two delayed by {float(delay):g} ms a step")
    side_by_side.save(options.json, figures)


if __name__ == "__main__":
    if "--train" in sys.argv:
        train(sys.argv[2], float(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
    else:
        main()
