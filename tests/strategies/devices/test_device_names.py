"""Names of devices are those of TensorFlow."""

import pytest

from tfdist.strategies.devices.device_names import all_resolved, resolved


@pytest.mark.parametrize(
    "name", ["CPU:0", "/cpu:0", "cpu:0", "/device:CPU:0", "/job:localhost/replica:0/task:0/device:CPU:0"]
)
def test_spellings_resolve_to_one_device_name(name):
    assert resolved(name) == "/device:CPU:0"


def test_device_name_without_number_means_first_device():
    assert resolved("CPU") == "/device:CPU:0"


@pytest.mark.parametrize(
    "name",
    ["CPU:7", "gpu", "", "CPU:*", "x", b"CPU:1", None, "/job:worker/task:1/device:CPU:0", "/replica:1/device:CPU:0"],
)
def test_unknown_or_remote_device_raises(name):
    with pytest.raises(ValueError, match=r"expected a device of this process; got .* Choose from CPU:0"):
        resolved(name)


def test_all_resolved_resolves_each_name():
    assert all_resolved("f", ["CPU:0", "cpu:0"]) == ["/device:CPU:0"] * 2
