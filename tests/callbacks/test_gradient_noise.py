"""In a process with two devices or one; `tests/multiprocess/test_gradient_noise.py` has several."""

import keras
import numpy as np
import pytest

import tfdist
from tests.callbacks.fitting import fit


def test_single_process_records_no_diversity():
    report = tfdist.callbacks.GradientDiversity()
    fit(report)
    assert report.history == {}


@pytest.mark.parametrize("batch_size", [0, -1, 2.5, "8", True])
def test_invalid_batch_size_raises(batch_size):
    with pytest.raises(ValueError, match=r"GradientNoiseScale\(batch_size=…\) must be a number of samples, at least 1"):
        tfdist.callbacks.GradientNoiseScale(batch_size=batch_size)


def test_noise_scale_and_diversity_agree_on_two_devices(tmp_path, caplog):
    caplog.set_level("INFO", "tfdist")
    strategy = tfdist.AllReduceStrategy(devices=["CPU:0", "CPU:1"])
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.0), "mse")
    x = np.random.default_rng(0).normal(size=(40, 3))
    noise, diversity = tfdist.callbacks.GradientNoiseScale(log_dir=str(tmp_path)), tfdist.callbacks.GradientDiversity()
    history = model.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0, callbacks=[noise, diversity]).history
    scale, variance = noise.history["gradient_noise_scale"], noise.history["gradient_variance"]
    np.testing.assert_allclose(scale, np.maximum(0, np.divide(variance, noise.history["gradient_signal"])))
    np.testing.assert_allclose(diversity.history["gradient_diversity"], 1 + np.array(scale))
    np.testing.assert_allclose(history["gradient_noise_scale"], scale)
    assert list(tmp_path.iterdir())
    assert strategy.extended.norms is None
    assert "the gradient noise scale is" in caplog.text
    assert "gradient diversity allows for batches of" in caplog.text
    model.fit(x, x[:, :1], batch_size=8, verbose=0)
    assert len(noise.history["gradient_noise_scale"]) == 2
