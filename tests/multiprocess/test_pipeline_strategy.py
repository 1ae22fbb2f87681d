"""Pipelines of processes train, evaluate, predict and save as plain Keras does; and what becomes of failures.

Each number of processes is launched once and runs all checks of `programs/pipeline_equal` for it.
"""

import functools
import json
import re

import numpy as np
import pytest

from tests.multiprocess import harness
from tests.sweeps import sweep

EQUAL = harness.PROGRAMS / "pipeline_equal" / "main.py"
FAULTS = harness.PROGRAMS / "pipeline_faults.py"

TOLERANCES = {"low": 2e-2, "Adam": 1e-4, "AdamW": 1e-4}
"""Relative to the largest value, by the name of a group of results: numbers of 8 or 11 bits, and weights that Adam has
updated, which divides by roots of small numbers."""
OTHERS = 1e-5
ROUNDING = 1e-7
"""Tolerance of numbers that would be zero without rounding, such as a bias's gradient before BatchNormalization."""

pytestmark = pytest.mark.multiprocess


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    harness.assert_nothing_left()


def differences(ranks, plain):
    """What is wrong with the results of a check, in words."""
    for name, results in (
        ("plain Keras", plain),
        *((f"rank {rank}", rank_results) for rank, rank_results in enumerate(ranks)),
    ):
        if "error" in results:
            return [f"{name}: {results['error']}"]
    (results, *of_others), expected = [dict(harness.leaves(rank)) for rank in ranks], dict(harness.leaves(plain))
    of_all = {path: value for path, value in results.items() if "in file" not in path}
    wrong = [f"rank {rank} differs from rank 0" for rank, other in enumerate(of_others, start=1) if other != of_all]
    if results.keys() != expected.keys():
        return [*wrong, f"there are other results: {sorted(map(str, results.keys() ^ expected.keys()))}"]
    for path, value in expected.items():
        if isinstance(value, str):
            wrong += [f"{path}: {results[path]}, expected {value}"] * (results[path] != value)
            continue
        actual, other = np.asarray(results[path], np.float64), np.asarray(value, np.float64)
        tolerance = next((TOLERANCES[name] for name in path if name in TOLERANCES), OTHERS)
        error = np.abs(actual - other).max(initial=0) if actual.shape == other.shape else np.inf
        if not error <= tolerance * np.abs(other).max(initial=0) + ROUNDING:
            wrong.append(f"{path}: an error of {error:.1g}; {actual.ravel()[:4]}…, expected {other.ravel()[:4]}…")
    return wrong


SOURCE = "\n".join(file.read_text() for file in sorted(EQUAL.parent.glob("*.py")))
CHECKS = [
    *((int(size), name) for size, name in re.findall(r"^@check\((\d).*\)\ndef (\w+)", SOURCE, re.MULTILINE)),
    *((4, name) for name in re.findall(r"^@pipelines\(.*\)\ndef (\w+)", SOURCE, re.MULTILINE)),
    *(
        (int(size), name)
        for size, name in re.findall(r'^check\((\d).*\)\(\s*of_model\(\s*"(\w+)"', SOURCE, re.MULTILINE)
    ),
    *((2, name) for name in re.findall(r'^    "(\w+)": lambda: keras.optimizers', SOURCE, re.MULTILINE)),
]


@pytest.fixture(scope="module")
def trained(request, tmp_path_factory):
    """The folder with the results of all selected checks for a number of processes, which are launched once."""
    asked = {}
    for item in request.session.items:
        if getattr(item, "originalname", "") == "test_pipelines_are_equal_to_plain_keras":
            asked.setdefault(item.callspec.params["size"], []).append(item.callspec.params["check"])

    @functools.cache
    def launched(size):
        folder = tmp_path_factory.mktemp("pipelines")
        try:
            harness.run([str(EQUAL), str(folder)], size, {"TEST_CHECKS": ",".join(asked[size])})
        except AssertionError as error:
            return folder, str(error)
        return folder, ""

    return launched


IN_SWEEPS = (
    *("bfloat16", "on_batches", "frozen_layers", "dataset_with_steps"),
    *("weights_are_swapped_for_their_averages", "clipped_by_all_and_decayed", "pipelines_with_weights_of_samples"),
    *("several_outputs", "one_f_one_b_recomputing", "a_frozen_base", "zero_bubble_adam", "float16"),
    "interleaved_and_shuffled_with_a_seed",
    "training_stops_in_the_middle_of_an_epoch",  # as pipelines beside each other do
    "losses_of_samples_gpipe",
    "weights_of_samples_and_classes",  # as within one process, and as masks do
    *("four_stages", "skips"),  # as pipelines beside each other do, and steps of three processes (test_pipeline.py)
    "backup_and_restore",  # files are written by the first process, as by all callbacks, and loaded, as in "loading"
)


@pytest.mark.parametrize(
    ("size", "check"), [sweep(size, name) if name in IN_SWEEPS else (size, name) for size, name in CHECKS]
)
def test_pipelines_are_equal_to_plain_keras(size, check, trained):
    folder, error = trained(size)
    paths = [folder / check / f"{name}.json" for name in (*range(size), "plain")]
    if not all(path.exists() for path in paths):
        pytest.fail(error or f"there is no check {check} for {size} processes", pytrace=False)
    *ranks, plain = (json.loads(path.read_text()) for path in paths)
    wrong = differences(ranks, plain)
    assert not wrong, "\n".join(wrong[:5])


OTHER_DATA = "MismatchError rank {rank}: the processes of a pipeline have read different data"
SAVED_ALONE = "rank 0 waits in save, load or export of pipeline 0, which all processes call"
OTHER_LENGTH = "give all processes the same number of batches in each epoch and each validation"


@pytest.mark.parametrize(
    "expected",
    [
        {
            "weightless": "ValueError PipelineStrategy: worker 1, with the calls last to last, would have no weights",
            "own_clipping": "ValueError the optimizer own_clipping clips gradients in a method of its own, which may",
            "other_values": OTHER_DATA,
            "unseeded": OTHER_DATA,
            "other_sizes": OTHER_DATA,
            "longer_as_is_known": "x: a tf.data.Dataset of 5 batches on rank(s) [0], a tf.data.Dataset of 8 batches on",
            "longer": OTHER_LENGTH,
        },
        {"shorter_validation": OTHER_LENGTH},
        {"alone": SAVED_ALONE},
    ],
    ids=" ".join,
)
def test_errors_come_on_all_ranks(expected):
    for rank, end in enumerate(harness.run([str(FAULTS)], 2, settings={"TEST_DO": ",".join(expected)})):
        errors = {line.split()[1]: line for line in end.output.splitlines() if line.startswith("ERROR ")}
        for name, message in expected.items():
            assert message.format(rank=rank) in errors[name], end.output


def test_exception_on_one_rank_ends_the_other():
    with harness.started([str(FAULTS)], 2, {"TEST_DO": "raising"}) as processes:
        ended = processes.wait()
        assert [end.code for end in ended] == [1, 1], processes.outputs()
        assert "ERROR raising PeerLostError rank 1, worker 1" in ended[0].output, processes.outputs()
        assert "ERROR raising ValueError boom" in ended[1].output, processes.outputs()


@pytest.mark.parametrize(("size", "rank"), [sweep(2, 1), (3, 0)])
def test_killed_rank_is_named(size, rank):
    error = "PeerLostError .*"  # a rank that exchanges with another one only may hear of the death by its failure
    settings = {"TEST_DO": "endless", "TEST_STAGES": str(size)}
    harness.assert_killed_rank_is_named([str(FAULTS)], size, rank, error, **settings)
