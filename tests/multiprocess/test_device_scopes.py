"""Device scopes nest with strategies, in real processes."""

import pytest

from tests.multiprocess import harness

pytestmark = pytest.mark.multiprocess

PROGRAM = str(harness.PROGRAMS / "device_scopes.py")
HOMES = ["CPU:1"] * 4 + ["CPU:2"] * 2
"""Of the kernels, biases and factors."""


def test_all_reduce_of_models_on_several_devices_equals_one_process():
    ended = harness.run([PROGRAM], 2)
    found = harness.results(ended)
    for one in found:
        assert one["homes"] == HOMES
        assert one["slots"] == ["CPU:1"] * 8 + ["CPU:2"] * 4
        assert one["error"] < 1e-5
        assert one["relocated"] == ["CPU:0"], "weights and slots, though two other devices compute"
        assert one["relocated error"] < 1e-5
    assert found[0]["sum"] == found[1]["sum"]
    harness.assert_nothing_left()


def test_parameter_servers_for_a_model_on_several_devices():
    given = harness.tf_configs(("chief", 0), ("ps", 0))
    with harness.started([PROGRAM], 2, per_rank=given) as processes:
        ended = processes.wait()
        assert [end.code for end in ended] == [0, 0], processes.outputs()
    (found,) = harness.results(ended[:1])
    assert found["homes"] == HOMES
    assert found["change"] > 0.01
    harness.assert_nothing_left()
