"""The nesting order of features' wrappers, where several wrap one function of Keras or TensorFlow."""

from __future__ import annotations

_INNER_TO_OUTER = (
    "seams.hooks",  # calls hooks, which are in this order among themselves
    "seams.optimizer",  # calls hooks, too
    "strategies.data.tensorflow_iterators",
    "strategies.keras.keras_seams",
    "strategies.keras_unsynchronized",
    "strategies.keras.keras_accumulation",
    "strategies.keras.keras_callbacks",
    "strategies.keras.keras_epochs",  # its callback is the last one
    "strategies.keras.keras_backup",
    "strategies.keras.keras_comparison",  # compares state that hooks further out have made equal
    "strategies.keras.collective_gradients",
    "strategies.keras.synchronized_moments",
    "strategies.keras.keras_steps",
    "strategies.keras.keras_losses",
    "strategies.keras.keras_metrics",
    "strategies.keras.keras_assignments",
    "strategies.keras.keras_variables",
    "strategies.keras.keras_building",
    "strategies.keras.keras_data",
    "strategies.keras.keras_noise",  # is added to sums, which hooks further out make
    "strategies.keras.keras_optimizers",
    "strategies.keras.keras_saving",
    "strategies.servers.keras_servers",
    "strategies.keras.sequential_build",
    "strategies.embeddings.keras_embeddings",  # splits rows off, and leaves the rest to servers
    "strategies.servers.keras_shared_data",
    "strategies.rounds.keras_rounds",
    "strategies.rounds.keras_quorum",
    "strategies.all_reduce.keras_delayed",
    "strategies.keras.keras_xla",  # compiles the steps that hooks further in take on shares, or count
    "strategies.keras.keras_scope",
    "strategies.keras.keras_step_calls",
    "strategies.keras.keras_agreement",  # runs before all that calls collectives
    "strategies.servers.sidecar_evaluator",  # replaces all of the above
    "optimizers.keras_optimizers",
    "strategies.all_reduce.keras_weight_parts",
    "strategies.divided.described_variables",
    "pipeline.model_steps",
    "strategies.divided.divided_updates",
    "strategies.all_reduce.keras_sharded",
    "pipeline.keras_pipelines",
    "model_parallel.split_layers",
    "model_parallel.parallel_features",
    "model_parallel.placed_variables",
    "model_parallel.keras_placement",
    "model_parallel.keras_placement_saving",
    "distribution.current",
)
_PLACES = {f"tfdist.{module}": place for place, module in enumerate(_INNER_TO_OUTER)}


def place_of(module: str) -> int:
    """Returns the place of a module's wrappers; higher is further out. Those of other packages are outermost.

    Args:
        module: full name of the module.

    Raises:
        LookupError: the module is one of tfdist's, and not listed.
    """
    if module.startswith("tfdist.") and module not in _PLACES:
        raise LookupError(f"{module} replaces functions of Keras, and has no place in tfdist/seams/order.py")
    return _PLACES.get(module, len(_PLACES))
