"""Device scopes nest with strategies, in real processes."""

import pytest

from tests.multiprocess import harness

pytestmark = pytest.mark.multiprocess

PROGRAM = str(harness.PROGRAMS / "device_scopes.py")
HOMES = ["CPU:1"] * 4 + ["CPU:2"] * 2
"""Devices of the kernels, biases and factors."""


@pytest.fixture(scope="module")
def ranks():
    """What each of two processes found."""
    results = harness.results(harness.run([PROGRAM], 2))
    harness.assert_nothing_left()
    return results


def test_weights_and_slots_are_where_the_scopes_say(ranks):
    for result in ranks:
        assert result["homes"] == HOMES
        assert result["slots"] == HOMES


def test_all_reduce_of_models_on_several_devices_equals_one_process(ranks):
    assert ranks[0]["sum"] == ranks[1]["sum"]
    for result in ranks:
        assert result["error"] < 1e-5


def test_weights_are_on_the_host_though_two_other_devices_compute(ranks):
    for result in ranks:
        assert result["relocated"] == ["CPU:0"]
        assert result["relocated error"] < 1e-5


def test_parameter_servers_for_a_model_on_several_devices():
    given = harness.tf_configs(("chief", 0), ("ps", 0))
    with harness.started([PROGRAM], 2, per_rank=given) as processes:
        ended = processes.wait()
        assert [end.code for end in ended] == [0, 0], processes.outputs()
    (result,) = harness.results(ended[:1])
    assert result["homes"] == HOMES
    assert result["change"] > 0.01
    harness.assert_nothing_left()
