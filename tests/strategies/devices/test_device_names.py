"""Names of devices are those of TensorFlow."""

import pytest

from tfdist.strategies.devices.device_names import all_resolved, resolved


@pytest.mark.parametrize(
    "name", ["CPU:0", "/cpu:0", "cpu:0", "/device:CPU:0", "/job:localhost/replica:0/task:0/device:CPU:0"]
)
def test_names_of_one_device(name):
    assert resolved(name) == "/device:CPU:0"


def test_the_first_one_needs_no_number():
    assert resolved("CPU") == "/device:CPU:0"


@pytest.mark.parametrize(
    "name",
    ["CPU:7", "gpu", "", "CPU:*", "x", b"CPU:1", None, "/job:worker/task:1/device:CPU:0", "/replica:1/device:CPU:0"],
)
def test_what_is_no_device_of_this_process(name):
    with pytest.raises(ValueError, match=r"expected a device of this process; got .* Choose from CPU:0"):
        resolved(name)


def test_several():
    assert all_resolved("f", ["CPU:0", "cpu:0"]) == ["/device:CPU:0"] * 2
