"""Loading in a process that has not used a device scope."""

import json

import pytest

from tests.model_parallel.test_device_scope import functional
from tests.multiprocess import harness

LOADING = """
import json, sys
import tensorflow as tf
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 3
)
import keras, tfdist
plain = keras.saving.load_model(sys.argv[1])
model = tfdist.load_model(sys.argv[1])
print(json.dumps([[one.value.device[-5:] for one in each.variables] for each in (plain, model)]))
"""


@pytest.mark.multiprocess
def test_tfdist_loads_the_devices(tmp_path):
    functional().save(tmp_path / "model.keras")
    program = tmp_path / "loading.py"
    program.write_text(LOADING)
    (ended,) = harness.run([str(program), str(tmp_path / "model.keras")], 1)
    plain, ours = json.loads(ended.output.splitlines()[-1])
    assert plain == ["CPU:0"] * 4
    assert ours == ["CPU:1", "CPU:1", "CPU:2", "CPU:2"]
