"""Prints what stands on each function of Keras and TensorFlow when all features are installed.

    python -m tests.seams.standing > tests/seams/standing.txt

With the argument ``backwards`` features are installed in the other order, which must make no difference. It imports
Keras so that `test_order.py` can run it in forks.
"""

import sys

import keras  # noqa: F401

from tfdist.distribution import current
from tfdist.model_parallel import keras_placement, split_layers
from tfdist.optimizers import keras_optimizers
from tfdist.pipeline import keras_pipelines
from tfdist.seams import optimizer, registry, trainer
from tfdist.strategies import keras_unsynchronized
from tfdist.strategies.all_reduce import keras_delayed, keras_sharded, keras_weight_parts
from tfdist.strategies.embeddings import keras_embeddings
from tfdist.strategies.keras import keras_seams
from tfdist.strategies.rounds import keras_quorum, keras_rounds
from tfdist.strategies.servers import keras_servers, keras_shared_data, sidecar_evaluator

FEATURES = [
    keras_seams,
    keras_delayed,
    keras_sharded,
    keras_weight_parts,
    keras_rounds,
    keras_quorum,
    keras_servers,
    keras_shared_data,
    sidecar_evaluator,
    keras_embeddings,
    keras_optimizers,
    keras_pipelines,
    keras_placement,
    split_layers,
    current,
]


def main():
    installs = [*(feature.install for feature in FEATURES), keras_unsynchronized.warn_in_fit]
    for install in reversed(installs) if sys.argv[1:] == ["backwards"] else installs:
        install()
    hooks = trainer.points.standing() | optimizer.points.standing()
    for name, wrappers in sorted(registry.standing().items()):
        print(
            name,
            *(f"    {entry}" for entry in wrappers),
            *(f"        {entry}" for entry in hooks.get(name, [])),
            sep="\n",
        )


if __name__ == "__main__":
    main()
