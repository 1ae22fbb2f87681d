import keras

import tfdist
from tests.callbacks.fitting import fit
from tfdist.callbacks import processes


def test_callbacks_without_effect_log_once_in_single_process(caplog):
    caplog.set_level("INFO", "tfdist")
    for _ in range(2):
        fit(tfdist.callbacks.MetricAverage(), tfdist.callbacks.BroadcastVariables(), epochs=2)
    for name in ("MetricAverage", "BroadcastVariables"):
        assert caplog.text.count(f"the callback {name} does nothing: this process trains alone") == 1


def test_processes_of_model_are_group_of_strategy():
    with (strategy := tfdist.AllReduceStrategy()).scope():
        model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    assert processes.processes_of(model) is strategy.extended.group


def test_processes_of_model_are_group_of_optimizer():
    tfdist.init()
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    alone = tfdist.Group([0])
    model.compile(tfdist.DistributedOptimizer(keras.optimizers.SGD(), group=alone))
    assert processes.processes_of(model).members == (0,)
