"""Programs as users write them give the same results on 1, 2 and 3 processes and in plain Keras.

Each script beside this file is one program. It ends with a dict ``results``, of which every leaf must be equal on
all ranks to the last bit, and equal to plain Keras's within the program's ``TOLERANCE``, relative to the leaf's
largest value. Two keys have a meaning:

- ``ranks_only``: results that cannot be compared with one process (random masks, a batch's own statistics); they must
  be equal on all ranks and finite. The program's docstring says why.
- ``close``: results that the mathematics of shares changes slightly; they must agree within a fifth.

Each runs on 2 or 3 processes, which are dealt out; with ``--all`` on 1, 2 and 3, and once more with
``AllReduceStrategy(shard="optimizer")``.

One launch runs many programs, as TensorFlow takes seconds to import, but only the selected ones
(``pytest tests/programs -k vae``, or ``-k 2-vae``). A program that fails ends its launch; the rest is launched again.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.multiprocess import harness
from tests.sweeps import sweep

HERE = Path(__file__).parent
PROGRAMS = sorted(
    path.stem
    for path in HERE.glob("*.py")
    if path.stem not in ("__init__", "common", "runner") and not path.stem.startswith("test_")
)
IN_SWEEPS = [
    # Parts that other programs have: augmentation, losses of layers, recurrence, attention, steps of two optimizers.
    *"image_classifier siamese timeseries translation vision_transformer wasserstein_gan gan".split(),
    # And own steps, own losses; what is of a share only.
    *"diffusion distillation metric_learning".split(),
    # What cases of the equal mathematics have: losses of one number, and replicas without samples.
    *"ctc scalar_mean_losses scalar_losses segmentation loss_reductions optimizer_options learning_rates".split(),
    # A model of parts that others have, on other data.
    *"structured_data text_generation recommender callbacks_in_scope multiple_outputs masked_sequences".split(),
    # Where features meet that others have one by one.
    "state_beside_optimizers",
    # An own step and trackers, as others have, of a model without `call`, as test_backup.py trains one.
    "vae",
    # A custom loop, as other programs have, and state of layers, which the equal mathematics has.
    *"reinforcement layer_state".split(),
    # Gradients averaged by a function: `test_distributed_optimizer.py`, and an example as Horovod's users write it.
    "horovod_style",
]
ON_TWO = ["class_weights", "custom_train_step", "keras_tuner_search", "stopping_early", "vae"]
"""The dearest ones, which three processes show no better than two."""
NOT_SHARDED = {
    "horovod_style": "trains without a strategy",
    "learning_rates": "reads all of the optimizer's variables on each process, which has some",
}
"""Programs that do not run with optimizers in parts, and why."""
OF_TWO_WEIGHTS = "batch_logs data_sources files fine_tuning layer_state own_metrics scalar_losses".split()
OF_TWO_WEIGHTS += "step_in_a_function wasserstein_gan".split()
"""Programs with an optimizer that three processes do not divide, as it has two weights."""
CLOSE = 0.2
SMALL = 1e-3
"""The largest value of a leaf counts as at least this: some weights are nothing but rounding."""
LAUNCH_DEADLINE = 1500.0
SHOWN = 12
"""How many differences of a program are told."""


def read(folder, name, size):
    """What each rank wrote about a program; None for a rank that wrote nothing."""
    paths = [folder / f"{name}.{rank}.json" for rank in range(size)]
    return [json.loads(path.read_text()) if path.exists() else None for path in paths]


def launch(size, shard, names, folder):
    """Runs the programs on ``size`` processes (0: plain Keras); returns the results of each, or its error."""
    results, left = {}, list(names)
    ranks = max(size, 1)
    settings = {"TEST_PLAIN": "1" if size == 0 else "0", "TEST_FOLDER": str(folder)}
    if shard is not None:
        settings["TEST_SHARD"] = shard
    while left:
        with harness.started([str(HERE / "runner.py"), *left], ranks, settings) as processes:
            try:
                processes.wait(LAUNCH_DEADLINE)
            except AssertionError as error:
                hanging = str(error).splitlines()[0]
            else:
                hanging = "ended without a result"
            outputs = [processes.output(rank) for rank in range(ranks)]
        for name in list(left):
            left.remove(name)
            said = read(folder, name, ranks)
            if all(report is not None and "results" in report for report in said):
                results[name] = said
                continue
            results[name] = why(said, outputs, hanging)
            break
    return results


def why(said, outputs, otherwise):
    """All ranks' errors, the earliest first, as the others may only report that this rank was lost."""
    errors = sorted(
        (report["time"], rank, report["error"]) for rank, report in enumerate(said) if report and "error" in report
    )
    told = [f"--- rank {rank} ---\n{error}" for _, rank, error in errors]
    silent = [rank for rank, report in enumerate(said) if report is None]
    told += [f"--- rank {rank} {otherwise} ---\n{outputs[rank][-6000:]}" for rank in silent]
    return "\n".join(told)


@pytest.fixture(scope="session")
def worlds(tmp_path_factory, request):
    """The results of the selected programs, by the number of processes and what is divided among them."""
    root = tmp_path_factory.mktemp("worlds")
    asked = {
        tuple(item.callspec.params[key] for key in ("name", "size", "shard"))
        for item in request.session.items
        if getattr(item, "originalname", "") == "test_program"
    }

    def start(world):
        folder = root / "-".join(map(str, world))
        folder.mkdir()
        plain = world == (0, None)  # runs for all others
        names = {name for name, *its_world in asked if plain or world == tuple(its_world)}
        return launch(*world, sorted(names), folder)

    @cache
    def results_of(*together):
        with ThreadPoolExecutor() as threads:
            return dict(zip(together, threads.map(start, together), strict=True))

    def result_of(size, shard=None):
        # Two alone take two cores, as two together do.
        return results_of(*(((0, None), (1, None)) if size < 2 else ((size, shard),)))[size, shard]

    return result_of


def leaves(value, path=()):
    if isinstance(value, dict):
        for key, part in value.items():
            yield from leaves(part, (*path, key))
    elif isinstance(value, list) and any(isinstance(part, (dict, list)) for part in value):
        try:
            yield path, np.asarray(value, np.float64)
        except (TypeError, ValueError):
            for index, part in enumerate(value):
                yield from leaves(part, (*path, index))
    elif isinstance(value, str) or (isinstance(value, list) and any(isinstance(part, str) for part in value)):
        yield path, np.asarray(value, np.str_)
    elif value is not None:
        yield path, np.asarray(value, np.float64)


def compare(ranks, plain):
    """The differences as lines, the largest first; empty if there are none."""
    complaints = []
    results = [rank["results"] for rank in ranks]
    for rank, result in enumerate(results[1:], start=1):
        for (path, first), (_, other) in zip(leaves(results[0]), leaves(result), strict=True):
            if first.shape != other.shape or first.tobytes() != other.tobytes():
                complaints.append((np.inf, f"{path}: rank {rank} differs from rank 0: {short(other)} {short(first)}"))
    expected, got = dict(leaves(plain["results"])), dict(leaves(results[0]))
    if expected.keys() != got.keys():
        complaints.append((np.inf, f"results differ in their keys: {sorted(map(str, expected.keys() ^ got.keys()))}"))
    for path in expected.keys() & got.keys():
        if path[0] == "ranks_only":
            if not np.isfinite(got[path]).all():
                complaints.append((np.inf, f"{path}: not finite: {short(got[path])}"))
            continue
        tolerance = CLOSE if path[0] == "close" else plain["tolerance"]
        error = relative_error(got[path], expected[path], floor=1e-12 if path[0] == "close" else SMALL)
        if not error <= tolerance:
            says = f"off by {error:.2g} (of {tolerance}): {short(got[path])}, plain Keras {short(expected[path])}"
            complaints.append((np.nan_to_num(error, nan=np.inf), f"{path}: {says}"))
    return [line for _, line in sorted(complaints, reverse=True)]


def relative_error(value, wanted, floor):
    """Returns the error of a leaf, relative to its largest value; infinite if shapes or texts differ."""
    if value.shape != wanted.shape:
        return np.inf
    if "U" in (value.dtype.kind, wanted.dtype.kind):
        return 0.0 if np.array_equal(value, wanted) else np.inf
    return np.abs(value - wanted).max(initial=0.0) / np.abs(wanted).max(initial=floor)


def short(array):
    return np.array2string(array.ravel()[:4], precision=6)


def pytest_generate_tests(metafunc):
    if "size" in metafunc.fixturenames:
        sizes = {name: 3 if place % 3 == 2 and name not in ON_TWO else 2 for place, name in enumerate(PROGRAMS)}
        cases = [
            (pytest.param if size == sizes[name] and name not in IN_SWEEPS else sweep)(
                name, size, None, id=f"{size}-{name}"
            )
            for size in (1, 2, 3)
            for name in PROGRAMS
        ]
        sharded = {name: 2 if name in OF_TWO_WEIGHTS else 5 - sizes[name] for name in PROGRAMS}
        cases += [
            sweep(name, size, "optimizer", id=f"{size}-{name}-sharded")
            for name, size in sharded.items()
            if name not in NOT_SHARDED
        ]
        metafunc.parametrize(("name", "size", "shard"), cases)


@pytest.mark.multiprocess
def test_program(name, size, shard, worlds):
    (plain,) = succeeded(worlds(0)[name], "plain Keras")
    complaints = compare(succeeded(worlds(size, shard)[name], f"{size} processes"), plain)
    if complaints:
        pytest.fail(f"{len(complaints)} differences\n" + "\n".join(complaints[:SHOWN]), pytrace=False)


def succeeded(outcome, where):
    if isinstance(outcome, str):
        pytest.fail(f"{where}:\n{outcome}", pytrace=False)
    return outcome
