"""Which feature's wrappers stand within which other's, where they meet on one function of Keras or TensorFlow."""

from __future__ import annotations

_INNER_TO_OUTER = (
    "seams.hooks",  # asks hooks, which have this order among themselves
    "seams.optimizer",  # likewise
    "strategies.tensorflow_private",
    "strategies.keras_seams",
    "strategies.keras_unsynchronized",
    "strategies.keras_callbacks",
    "strategies.keras_epochs",  # whose callback is the last one
    "strategies.keras_backup",
    "strategies.keras_comparison",  # of what others make equal around it
    "strategies.collective_gradients",
    "strategies.keras_steps",
    "strategies.keras_losses",
    "strategies.keras_metrics",
    "strategies.keras_variables",
    "strategies.keras_data",
    "strategies.keras_noise",  # is added to sums, which are made around it
    "strategies.keras_optimizers",
    "strategies.keras_saving",
    "strategies.keras_servers",
    "strategies.sequential_build",
    "strategies.keras_embeddings",  # splits rows off, and leaves the rest to servers
    "strategies.keras_shared_data",
    "strategies.keras_rounds",
    "strategies.keras_quorum",
    "strategies.keras_delayed",
    "strategies.keras_scope",
    "strategies.keras_agreement",  # before all that calls collectives
    "strategies.sidecar_evaluator",  # in place of all of it
    "optimizers.keras_optimizers",
    "pipeline.described_variables",
    "pipeline.model_steps",
    "pipeline.stage_optimizers",
    "pipeline.keras_pipelines",
    "model_parallel.placed_variables",
    "model_parallel.keras_placement",
    "model_parallel.keras_placement_saving",
)
_PLACES = {f"tfdist.{module}": place for place, module in enumerate(_INNER_TO_OUTER)}


def place_of(module: str) -> int:
    """Where the wrappers of a module stand; higher is further out. Those of unknown ones are the outermost.

    Args:
        module: its full name.
    """
    return _PLACES.get(module, len(_PLACES))
