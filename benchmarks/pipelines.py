"""`fit` of an MLP in two stages, on two processes with one core each; against one process, and PyTorch's pipelines.

- *samples per second*: plain Keras on one core; `tfdist.PipelineStrategy`; `torch.distributed.pipelining` on Gloo with
  the same network, batches and micro-batches. Rounds alternate between them; the ratios are those of a round. The
  seconds of processor time, of all processes, tell what other programs on the machine cannot change much.
- *idle*: the share of the workers' time in which they wait, as `strategy.recorded()` has it; by the formula for equal
  stages; and of a dry run in which every action takes the median of its recorded times.
- *memory*: weights and Adam's slots of the largest stage, and of the best division into contiguous stages.

PyTorch has a Python of its own, with `pip install torch numpy`; without ``--torch-python`` it is left out.

    python -m venv torch-venv && torch-venv/bin/pip install torch numpy
    python benchmarks/pipelines.py --torch-python torch-venv/bin/python
"""

import collections
import itertools
import json
import os
import statistics
import sys
import time

import side_by_side

STAGES = 2
CLASSES = 10
SCHEDULES = ("gpipe", "1f1b", "zero_bubble")
OF_TORCH = ("gpipe", "1f1b")
PLAIN = "plain Keras"


def make_model(settings, optimizer):
    import keras

    units = settings["units"]
    hidden = [keras.layers.Dense(units, "relu") for _ in range(settings["layers"])]
    model = keras.Sequential([keras.Input((units,)), *hidden, keras.layers.Dense(CLASSES)])
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def make_data(settings, rows):
    import numpy as np

    generator = np.random.default_rng(0)
    return generator.normal(size=(rows, settings["units"])).astype("float32"), generator.integers(0, CLASSES, rows)


def measure_plain(settings):
    import keras

    report_fit(make_model(settings, keras.optimizers.SGD(settings["learning_rate"])), settings)


def measure_pipeline(settings, schedule):
    import keras

    import tfdist

    tfdist.init()
    strategy = tfdist.PipelineStrategy(
        stages=STAGES, micro_batches=settings["micro_batches"], schedule=schedule, record=True
    )
    with strategy.scope():
        model = make_model(settings, keras.optimizers.SGD(settings["learning_rate"]))
    report_fit(model, settings, strategy)


def report_fit(model, settings, strategy=None):
    """Reports samples per second of the best epoch but the first, and processor seconds of an epoch."""
    rows = settings["batch"] * settings["steps"]
    x, y = make_data(settings, rows)
    seconds, processor = [], []
    for _ in range(settings["epochs"]):
        begun, used = time.perf_counter(), time.process_time()
        model.fit(x, y, batch_size=settings["batch"], shuffle=False, verbose=0)
        seconds.append(time.perf_counter() - begun)
        processor.append(time.process_time() - used)
    figures = {"samples_per_s": rows / min(seconds[1:])}
    processor_seconds = min(processor[1:])
    if strategy is None:
        side_by_side.report({**figures, "processor": processor_seconds})
        return
    import tfdist

    figures["processor"] = float(tfdist.all_reduce(processor_seconds, "sum"))
    table = strategy.extended.of_model(model).table
    steps = [strategy.recorded(-number) for number in range(1, 1 + settings["steps"])]
    if strategy.rank == 0:
        figures["idle"] = statistics.median(step.idle_share for step in steps)
        figures["of dry run"] = replayed(table, steps).idle_share
        figures["picture"] = str(min(steps, key=lambda step: abs(step.idle_share - figures["idle"])))
        side_by_side.report(figures)


def replayed(table, steps):
    """The dry run of a table whose actions take the median of their recorded times, by stage and kind."""
    from tfdist.pipeline.dry_run import dry_run

    times = collections.defaultdict(list)
    for span in itertools.chain(*(row for step in steps for row in step.spans)):
        times[span.action.stage, span.action.kind].append(span.end - span.begin)
    return dry_run(table, lambda action: statistics.median(times[action.stage, action.kind]))


def measure_memory(settings):
    """Reports the bytes of weights and of Adam's slots that each process holds."""
    import tensorflow as tf

    import tfdist

    tfdist.init()
    strategy = tfdist.PipelineStrategy(stages=STAGES, micro_batches=settings["micro_batches"])
    with strategy.scope():
        model = make_model(settings, "adam")
    x, y = make_data(settings, settings["batch"])
    model.fit(x, y, batch_size=settings["batch"], verbose=0)
    placement = strategy.extended.of_model(model).placement
    state = [*model.variables, *model.optimizer.variables]
    held = sum(
        variable.value.dtype.size * variable.shape.num_elements()
        for variable in state
        if variable.shape and placement.holds(variable)
    )
    everyone = tfdist.all_gather(tf.constant([float(held)], tf.float64))
    if strategy.rank == 0:
        side_by_side.report({"largest": float(max(everyone))})


def best_division(settings):
    """Bytes of the largest of two stages of whole layers, with Adam's two slots, where the cut is best."""
    units = settings["units"]
    sizes = [4 * 3 * (units + 1) * made for made in (*[units] * settings["layers"], CLASSES)]
    return min(max(sum(sizes[:cut]), sum(sizes[cut:])) for cut in range(1, len(sizes)))


def by_formula(schedule, micro_batches):
    """The idle share of equal stages, by what `tfdist.pipeline.schedules` says."""
    waits = STAGES - 1
    return waits / ((3 if schedule == "zero_bubble" else 1) * micro_batches + waits)


def of_torch(python, name, settings):
    script = os.path.join(os.path.dirname(__file__), "pipelines_torch.py")
    one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [script, name, json.dumps({**settings, "classes": CLASSES})]
    return side_by_side.measure(command, STAGES, one_thread, cores=True, python=python)


def main():
    parser = side_by_side.parser(__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--units", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=4096, help="of an epoch")
    parser.add_argument("--torch-python", metavar="PATH", help="a Python with PyTorch: see above")
    options = parser.parse_args()
    settings = {name: getattr(options, name) for name in ("batch", "micro_batches", "layers", "units")}
    settings.update(steps=options.samples // options.batch, epochs=4, learning_rate=0.01)
    if options.torch_python is None:
        print(
            "PyTorch is left out. To compare with it: python -m venv torch-venv && torch-venv/bin/pip install torch "
            "numpy, then --torch-python torch-venv/bin/python"
        )
    rounds = []
    for _ in range(options.rounds):
        rounds.append(one_round(settings, options.torch_python))
        rates = ", ".join(f"{name} {figures['samples_per_s']:.0f}" for name, figures in rounds[-1].items())
        print(f"samples/s: {rates}", flush=True)
    show_rates(rounds)
    show_idle(rounds, settings["micro_batches"])
    largest = side_by_side.measure(child("memory", settings), STAGES, way="tfdist")["largest"]
    best = best_division(settings)
    print(f"\nweights and Adam's slots of the largest stage: {largest / 2**20:.1f} MiB; best {best / 2**20:.1f} MiB")
    side_by_side.save(options.json, {"settings": settings, "rounds": rounds, "largest": largest, "best": best})


def child(name, settings):
    return [__file__, f"--measure={name}", json.dumps(settings)]


def one_round(settings, torch_python):
    """What each way has reported, by its name."""
    reports = {PLAIN: side_by_side.measure(child(PLAIN, settings), 1, {"TF_NUM_INTRAOP_THREADS": "1"}, cores=True)}
    for name in SCHEDULES:
        reports[f"tfdist {name}"] = side_by_side.measure(child(name, settings), STAGES, way="tfdist")
        if torch_python is not None and name in OF_TORCH:
            reports[f"torch {name}"] = of_torch(torch_python, name, settings)
    return reports


def show_rates(rounds):
    pairs = [(f"tfdist {name}", other) for name in SCHEDULES for other in (PLAIN, f"torch {name}")]
    rows = []
    for way, other in (pair for pair in pairs if pair[1] in rounds[0]):
        for title, figure in (("samples/s", "samples_per_s"), ("processor s", "processor")):
            ratios = [each[way][figure] / each[other][figure] for each in rounds]
            values = dict(zip(("median", "from", "to"), side_by_side.median_and_spread(ratios), strict=True))
            rows.append((f"{way} : {other}, {title}", values))
    side_by_side.table(rows, ["median", "from", "to"], "ratios, by rounds")


def show_idle(rounds, micro_batches):
    rows = []
    for name in SCHEDULES:
        reports = [each[f"tfdist {name}"] for each in rounds]
        middle, least, most = side_by_side.median_and_spread([100 * report["idle"] for report in reports])
        values = {"formula": 100 * by_formula(name, micro_batches), "median": middle, "from": least, "to": most}
        values["dry run"] = 100 * statistics.median(report["of dry run"] for report in reports)
        rows.append((name, values))
    side_by_side.table(rows, ["formula", "dry run", "median", "from", "to"], "idle share of a step, %")
    calmest = min(
        (each[f"tfdist {name}"] for each in rounds for name in SCHEDULES[:1]), key=lambda figures: figures["idle"]
    )
    print(f"\n{SCHEDULES[0]}, a step as recorded:\n{calmest['picture']}")


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].startswith("--measure="):
        name, settings = sys.argv[1].partition("=")[2], json.loads(sys.argv[2])
        if name == "memory":
            measure_memory(settings)
        elif name == PLAIN:
            measure_plain(settings)
        else:
            measure_pipeline(settings, name)
    else:
        main()
