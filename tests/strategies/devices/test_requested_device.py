"""The device that was asked for, by thread."""

import threading

import pytest

from tfdist.strategies.devices import requested_device
from tfdist.strategies.devices.requested_device import creating, requested


def test_innermost_requested_device_counts_in_its_thread():
    assert requested_device.current() is None
    devices_in_thread = []
    with requested("/device:CPU:0"):
        with requested("/device:GPU:1"):
            assert requested_device.current() == "/device:GPU:1"
            thread = threading.Thread(target=lambda: devices_in_thread.append(requested_device.current()))
            thread.start()
            thread.join()
        assert requested_device.current() == "/device:CPU:0"
    assert devices_in_thread == [None]


def test_variables_of_strategies_with_several_replicas_are_refused():
    def create(**kwargs):
        return kwargs

    assert creating(create, 2) is create
    with requested("/device:CPU:0"):
        assert creating(create, 1)(name="w") == {"name": "w"}
        with pytest.raises(ValueError, match="this strategy has 2 replicas in each process"):
            creating(create, 2)
        creating(create, 2, home="/device:CPU:0")(name="w")
