"""Every private module of Keras that tfdist uses, imported here and nowhere else.

Checked on Keras 3.10 and 3.15. `tests/seams/standing.txt` lists the functions in them that tfdist replaces.
"""

from tfdist.private.versions import incompatible

try:
    from keras.src import backend, tree
    from keras.src.backend.common import global_state, symbolic_scope
    from keras.src.backend.tensorflow import core as tf_core
    from keras.src.backend.tensorflow import distribution_lib as tf_distribution
    from keras.src.backend.tensorflow import nn as tf_nn
    from keras.src.backend.tensorflow import optimizer as tf_optimizer
    from keras.src.backend.tensorflow import trainer as tf_trainer
    from keras.src.distribution import distribution_lib as distributions
    from keras.src.layers import layer
    from keras.src.losses import loss as losses
    from keras.src.models import cloning, functional, sequential
    from keras.src.ops import function, node, operation
    from keras.src.optimizers import base_optimizer
    from keras.src.random import seed_generator
    from keras.src.saving import saving_api, saving_lib, serialization_lib
    from keras.src.trainers import data_adapters
    from keras.src.trainers import trainer as base_trainer
    from keras.src.trainers.data_adapters import (
        array_slicing,
        data_adapter_utils,
        py_dataset_adapter,
        tf_dataset_adapter,
    )
    from keras.src.utils import naming
except ImportError as error:
    raise incompatible(str(error)) from error

__all__ = [
    "array_slicing",
    "backend",
    "base_optimizer",
    "base_trainer",
    "cloning",
    "data_adapter_utils",
    "data_adapters",
    "distributions",
    "function",
    "functional",
    "global_state",
    "layer",
    "losses",
    "naming",
    "node",
    "operation",
    "py_dataset_adapter",
    "saving_api",
    "saving_lib",
    "seed_generator",
    "sequential",
    "serialization_lib",
    "symbolic_scope",
    "tf_core",
    "tf_dataset_adapter",
    "tf_distribution",
    "tf_nn",
    "tf_optimizer",
    "tf_trainer",
    "tree",
]
