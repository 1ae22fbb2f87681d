"""A small part of the suite, for other versions of TensorFlow and Keras: `make test-oldest` runs it."""

import pytest

from tests.multiprocess import harness, test_local_sgd, test_quorum, test_shared_sums
from tests.multiprocess.conftest import passed_in
from tests.multiprocess.test_equal_mathematics import check, worlds
from tests.multiprocess.test_parameter_server import cases, test_synchronous_steps_equal_one_process

NAMES = (
    "arrays_with_a_partial_batch",
    "fewer_samples_than_workers",
    "prediction",
    "generator",
    "several_inputs_and_outputs",
    "steps_per_execution",
    "optimizer_Adam",
    "gradient_accumulation",
    "loss_scale_optimizer",
    "embedding",
    "synchronized_batch_normalization",
    "stateful_metrics",
    "hand_written_loop",
)

__all__ = ["cases", "test_synchronous_steps_equal_one_process", "worlds"]


@pytest.mark.parametrize("name", NAMES)
def test_two_processes(name, worlds):
    two, (one,) = worlds((2, 1, ",".join(NAMES)), (1, 1, ",".join(NAMES)))
    check(name, two, one)


@test_shared_sums.needs_machine_code
def test_sums_in_shared_memory_on_two_processes():
    for end in harness.run([test_shared_sums.PROGRAM], 2, settings={"TEST_CASES": "bits,edges"}):
        assert "PASSED edges" in end.output, end.output


def test_local_sgd_on_two_processes(tmp_path):
    settings = {"TEST_CASES": "synchronous,restarted"}
    for end in harness.run([test_local_sgd.PROGRAM, str(tmp_path)], 2, settings=settings):
        assert "PASSED restarted" in end.output, end.output


def test_quorum_on_two_processes(tmp_path):
    settings = {"TEST_CASES": "golden,layers"}
    first, second = harness.run([test_quorum.PROGRAM, str(tmp_path)], 2, settings=settings)
    assert passed_in(first.output) == passed_in(second.output)
    assert passed_in(first.output).keys() == {"golden", "layers"}
