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
    found = harness.results(harness.run([PROGRAM], 2))
    harness.assert_nothing_left()
    return found


def test_weights_and_slots_are_where_the_scopes_say(ranks):
    for found in ranks:
        assert found["homes"] == HOMES
        assert found["slots"] == ["CPU:1"] * 8 + ["CPU:2"] * 4


def test_all_reduce_of_models_on_several_devices_equals_one_process(ranks):
    assert ranks[0]["sum"] == ranks[1]["sum"]
    for found in ranks:
        assert found["error"] < 1e-5


def test_weights_are_on_the_host_though_two_other_devices_compute(ranks):
    for found in ranks:
        assert found["relocated"] == ["CPU:0"]
        assert found["relocated error"] < 1e-5


def test_parameter_servers_for_a_model_on_several_devices():
    given = harness.tf_configs(("chief", 0), ("ps", 0))
    with harness.started([PROGRAM], 2, per_rank=given) as processes:
        ended = processes.wait()
        assert [end.code for end in ended] == [0, 0], processes.outputs()
    (found,) = harness.results(ended[:1])
    assert found["homes"] == HOMES
    assert found["change"] > 0.01
    harness.assert_nothing_left()
