"""Many processes end where one does: losses, metrics and weights of every case in `programs/equal`.

Each number of processes and devices is launched once and runs all of its selected cases; each case is one test.
"""

import json
import re
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import pytest

from tests.multiprocess import harness
from tests.sweeps import sweep

PROGRAM = harness.PROGRAMS / "equal" / "main.py"
SOURCE = "\n".join(file.read_text() for file in sorted(PROGRAM.parent.glob("*.py")))
OPTIMIZERS = re.findall(r'^    "(\w+)": \{', SOURCE, re.MULTILINE)
IN_SWEEPS = [
    # Optimizers that update each weight by its gradient alone, as others do: where sums are right, they are.
    *(f"optimizer_{name}" for name in "RMSprop AdamW Adadelta Adagrad Adamax Nadam Ftrl Lion".split()),
    # Updates of a variable by norms of its own, as Adafactor and Muon, too; what most other cases train with.
    *("optimizer_Lamb", "optimizer_SGD"),
    # What programs (tests/programs) and other cases have, too.
    *"infinite_dataset steps_per_epoch initial_epoch class_weight learning_rate_schedule clipping_by_value".split(),
    *"clipping_that_does_nothing prediction_in_larger_executions small_table_with_rmsprop".split(),
    *"arrays_shuffled_with_a_seed sum_over_valid_steps".split(),
    *"generator several_inputs_and_outputs own_train_step mixed_bfloat16 weight_decay_and_ema".split(),
    *"pydataset validation_split sample_weight train_on_batch mixed_float16 own_compute_loss".split(),
    *"stateful_metrics logs_of_a_traced_step".split(),
    # What tests of callbacks and of loss scaling have, too.
    *"batch_normalization_is_equal_on_all_ranks loss_scale_optimizer".split(),
    # One more layer, loss or kind of clipping, where others show what is the same for all.
    *"depthwise_convolution_without_samples recurrence_without_samples ctc_without_samples".split(),
    *"synchronized_normalization_without_samples words_and_positions gradient_noise_of_parts".split(),
    *"batch_not_divisible clipping_by_norm mean_by_sample_weights added_mean compute_average_loss_in_fit".split(),
    *"embedding_where_dense_is_cheaper small_table_with_adagrad_and_clipping regularization several_outputs".split(),
    *"convolution_and_recurrence mixed_float16_without_samples prediction_over_files run_eagerly".split(),
    "attention_without_samples",
    # What programs (batch_logs, custom_train_step), groups (sparse gradients, accumulation and normalization
    # on two devices of each process), and optimizers in parts and wrapped ones have.
    *"logs_of_batches logs_of_own_steps embedding optimizer_Adam optimizer_Muon averages_of_weights".split(),
    *"steps_per_execution gradient_accumulation synchronized_batch_normalization optimizer_Adafactor".split(),
    # What tests of losses and gradients have within one process.
    *"scale_summed_loss_in_fit sum_reduction no_reduction clipping_by_global_norm".split(),
    # Custom loops, as programs have them, and data of tf.data, as most of the other cases and programs have.
    *"hand_written_loop dataset".split(),
    *"a_root_of_a_mean_is_of_the_share added_mean_without_samples several_outputs_without_samples".split(),
]
ALL = re.findall(r"^@(?:case|spread)\ndef (\w+)", SOURCE, re.MULTILINE) + [f"optimizer_{name}" for name in OPTIMIZERS]
SPREAD = [*re.findall(r"^@spread\ndef (\w+)", SOURCE, re.MULTILINE), "optimizer_SGD", "optimizer_Adam"]

TOLERANCES = {"float32": 1e-5, "low": 2e-2, "near": 5e-2, None: 1e-9}
"""Relative to the largest value, by the name of the group in a case's result. Bfloat16 keeps 8 bits; what is near only
is of each share."""


@cache
def world(size, devices, cases, folder):
    folder.mkdir()
    in_memory = str(int(devices == 1))  # where processes have several devices, sums are in Python
    settings = {"TEST_DEVICES": str(devices), "TEST_CASES": cases, "TFDIST_MACHINE_CODE": in_memory}
    harness.run([str(PROGRAM), str(folder)], size, settings=settings)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


@pytest.fixture(scope="session")
def worlds(tmp_path_factory):
    root = tmp_path_factory.mktemp("worlds")

    def launch(*given):
        """Worlds that are asked for together run at the same time: that of one process leaves a core to others."""

        def start(configuration):
            size, devices, cases = configuration
            return world(size, devices, cases, root / f"{size}x{devices}-{zlib.crc32(cases.encode()):x}")

        with ThreadPoolExecutor() as threads:
            return list(threads.map(start, given))

    return launch


def check(name, ranks, single):
    for results in (*ranks, single):
        assert "error" not in results[name], results[name]["error"]
    for rank, results in enumerate(ranks):
        assert json.dumps(results[name]) == json.dumps(ranks[0][name]), f"rank {rank} differs from rank 0"
    expected, got = dict(harness.leaves(single[name])), dict(harness.leaves(ranks[0][name]))
    assert expected.keys() == got.keys()
    for path, value in expected.items():
        if path[0] in ("ranks_only", "ranks_only_history"):
            continue
        tolerance = TOLERANCES.get(path[0], TOLERANCES[None])
        value = np.asarray(value, np.float64)
        scale = np.abs(value).max(initial=1e-12)
        np.testing.assert_allclose(got[path], value, rtol=0, atol=tolerance * scale, err_msg=f"{name}: {path}")


def cases():
    """Each case on two processes, or, where their number may matter, on three or on two devices of each of two."""
    for name in ALL:
        in_sweeps = name in IN_SWEEPS or name in SPREAD
        yield (sweep if in_sweeps else pytest.param)(2, 1, name, id=f"two-processes-{name}")
    for place, name in enumerate(SPREAD):
        odd = place % 2
        in_sweeps = name in IN_SWEEPS
        yield (sweep if odd or in_sweeps else pytest.param)(3, 1, name, id=f"three-processes-{name}")
        yield (pytest.param if odd and not in_sweeps else sweep)(2, 2, name, id=f"two-devices-each-{name}")


@pytest.fixture(scope="session")
def asked(request):
    """The names of the cases that are selected, by number of processes and devices; one process has all."""
    by_world = {(1, 1): {}}
    for item in request.session.items:
        if getattr(item, "originalname", "") == "test_case":
            given = item.callspec.params
            for world in ((given["size"], given["devices"]), (1, 1)):
                by_world.setdefault(world, {})[given["name"]] = True
    return {world: ",".join(names) for world, names in by_world.items()}


@pytest.mark.multiprocess
@pytest.mark.parametrize(("size", "devices", "name"), cases())
def test_case(size, devices, name, worlds, asked):
    ranks, (single,) = worlds((size, devices, asked[size, devices]), (1, 1, asked[1, 1]))
    if name.startswith("optimizer_") and name not in single:
        pytest.skip("this version of Keras does not ship it")
    check(name, ranks, single)
