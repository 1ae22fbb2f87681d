"""A script as Ray Train's guide has it: its `TensorflowTrainer` starts the workers and sets TF_CONFIG in each.

Run as ``python ray_train.py FOLDER``; every worker of two, and the only one of one, writes what it found there.
"""

import json
import sys
from pathlib import Path

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.tensorflow import TensorflowTrainer


def train(config):
    import keras
    import numpy as np

    import tfdist

    keras.utils.set_random_seed(3)
    strategy = tfdist.AllReduceStrategy()
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    history = model.fit(x, x.sum(axis=1), epochs=3, batch_size=10, verbose=0, shuffle=False)
    result = {
        "size": strategy.size,
        "loss": history.history["loss"],
        "weights": [weight.ravel().tolist() for weight in model.get_weights()],
    }
    (Path(config["folder"]) / f"{strategy.rank}-of-{strategy.size}.json").write_text(json.dumps(result))


folder = sys.argv[1]
ray.init(num_cpus=3, include_dashboard=False, object_store_memory=100 << 20, _node_ip_address="127.0.0.1")
for workers in (1, 2):
    trainer = TensorflowTrainer(
        train,
        train_loop_config={"folder": folder},
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=False),
        run_config=RunConfig(storage_path=f"{folder}/results"),
    )
    trainer.fit()
ray.shutdown()
print("DONE", flush=True)
