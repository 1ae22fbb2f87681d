"""Private members of distributions."""

import keras
import numpy as np
import pytest

from tfdist.private import distributions
from tfdist.private.keras import data_adapters, tf_distribution
from tfdist.private.keras import distributions as distribution_lib

kd = keras.distribution


@pytest.fixture
def mesh():
    return kd.DeviceMesh((2,), ["batch"], ["cpu:0", "cpu:1"])


@pytest.fixture(autouse=True)
def two_processes(monkeypatch):
    for name, value in (("num_processes", 2), ("process_id", 0)):
        monkeypatch.setattr(tf_distribution, name, lambda value=value: value, raising=False)


def test_arrays_are_refused_until_data_are_left_alone(mesh, monkeypatch):
    distribution = kd.DataParallel(device_mesh=mesh)
    monkeypatch.setattr(distribution_lib, "distribution", lambda: distribution)
    with pytest.raises(ValueError, match=r"tf\.data\.Dataset"):
        data_adapters.get_data_adapter(np.ones((3, 2)))
    distributions.leave_data_alone(distribution)
    assert data_adapters.get_data_adapter(np.ones((3, 2)), batch_size=2).num_batches == 2
    assert distribution.distribute_dataset("no dataset of Keras's") == "no dataset of Keras's"


@pytest.mark.parametrize("given", [True, False])
def test_whether_processes_pass_the_same_data(mesh, given):
    distribution = kd.DataParallel(device_mesh=mesh, auto_shard_dataset=given)
    distributions.leave_data_alone(distribution)
    assert distributions.deals(distribution) is given


def test_layouts_of_both_kinds(mesh):
    layouts = kd.LayoutMap(mesh)
    assert distributions.layouts_of(kd.ModelParallel(layout_map=layouts)) is layouts
    assert distributions.layouts_of(kd.DataParallel(device_mesh=mesh)) is None
