"""Training with compressed gradients, on real processes."""

import pytest

from tests.multiprocess import harness
from tests.multiprocess.conftest import selected
from tests.sweeps import sweep

pytestmark = pytest.mark.multiprocess

PROGRAM = str(harness.PROGRAMS / "compression.py")


def outputs_of(case, size, folder, codes=None, **settings):
    with harness.started([PROGRAM, str(folder)], size, {"TEST_CASE": case, **settings}) as processes:
        ended = processes.wait()
        assert [end.code for end in ended] == (codes or [0] * size), processes.outputs()
    harness.assert_nothing_left()
    return ended


@pytest.fixture(scope="module")
def learnt(request, tmp_path_factory):
    """What each method came to: the short version of benchmarks/compression_accuracy.py, 72 steps."""
    methods = ",".join(["none", *selected(request, "test_every_method_learns_digits")])
    return harness.results(outputs_of("accuracies", 2, tmp_path_factory.mktemp("ranks"), TEST_METHODS=methods))[0]


LOST = dict.fromkeys(("Float16", "Float8", "Int8", "QSGD", "schedule", "by name"), 0.03)
LOST.update(TopK=0.25, DGC=0.2, Strom=0.3, RandomK=0.4)  # few steps for what sends late and little
RATIOS = {"Float16": 1.9, "Float8": 3.8, "Int8": 3.8, "OneBit": 20, "SignSGD": 25, "TopK": 20}
METHODS = [
    *("Int8", "DGC", "PowerSGD"),
    *map(
        sweep,
        (
            "OneBit",
            "by name",
            "Float16",
            "Float8",
            "QSGD",
            "TernGrad",
            "SignSGD",
            "TopK",
            "RandomK",
            "Strom",
            "AtomoSVD",
            "schedule",
        ),
    ),
]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_learns_digits(name, learnt):
    assert learnt["none"]["accuracy"] > 0.88
    result = learnt[name]
    assert result["accuracy"] > learnt["none"]["accuracy"] - LOST.get(name, 0.12)
    assert result["ratio"] > RATIOS.get(name, 0.9)
    if name != "by name":
        assert [layer.rsplit("/", 1)[-1] for layer in result["layers"]] == ["kernel", "kernel"], result


def test_momentum_of_compression_replaces_optimizer_momentum(tmp_path):
    outputs_of("momentum", 2, tmp_path)


def test_interrupted_training_goes_on_with_its_residuals(tmp_path):
    outputs_of("goes on", 2, tmp_path)


def test_residuals_go_with_a_saved_model(tmp_path):
    ended = outputs_of("saved", 2, tmp_path)
    assert "the residuals of compression saved beside" in ended[0].output
    assert "those of rank(s) [1] are missing" in ended[0].output


def test_steps_that_are_not_finite_are_skipped(tmp_path):
    outputs_of("not finite", 3, tmp_path)


def test_gradient_missing_on_one_rank_is_reported(tmp_path):
    settings = {"TFDIST_STALL_TIMEOUT": "1", "TFDIST_COLLECTIVE_TIMEOUT": "5"}
    for rank, end in enumerate(outputs_of("absent", 2, tmp_path, codes=[5, 5], **settings)):
        assert "rank 0 has posted <lambda>: compressed sum of 1 float32" in end.output
        assert "rank 1 has posted <lambda>: compressed sum of 2 float32" in end.output
        assert f"rank {1 - rank}, worker {1 - rank}" in end.output
        assert "it has not posted <lambda>: compressed sum of" in end.output
        assert "TOLD" in end.output


def test_different_compression_on_two_ranks_is_reported(tmp_path):
    settings = {"TFDIST_STALL_TIMEOUT": "1", "TFDIST_COLLECTIVE_TIMEOUT": "20"}
    for end in outputs_of("differ", 2, tmp_path, codes=[5, 5], **settings):
        assert "TOLD" in end.output
        assert "by Schedule({0: ErrorFeedback(TopK(ratio=0.1))}" in end.output
        assert "by Schedule({0: ErrorFeedback(Int8(block=256, stochastic=False))}" in end.output
