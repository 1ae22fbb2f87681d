"""Which feature's wrappers stand within which other's, where they meet on one function of Keras or TensorFlow."""

from __future__ import annotations

_INNER_TO_OUTER = (
    "seams.hooks",  # asks hooks, which have this order among themselves
    "seams.optimizer",  # likewise
    "strategies.data.tensorflow_iterators",
    "strategies.keras.keras_seams",
    "strategies.keras_unsynchronized",
    "strategies.keras.keras_callbacks",
    "strategies.keras.keras_epochs",  # whose callback is the last one
    "strategies.keras.keras_backup",
    "strategies.keras.keras_comparison",  # of what others make equal around it
    "strategies.keras.collective_gradients",
    "strategies.keras.synchronized_moments",
    "strategies.keras.keras_steps",
    "strategies.keras.keras_losses",
    "strategies.keras.keras_metrics",
    "strategies.keras.keras_variables",
    "strategies.keras.keras_data",
    "strategies.keras.keras_noise",  # is added to sums, which are made around it
    "strategies.keras.keras_optimizers",
    "strategies.keras.keras_saving",
    "strategies.servers.keras_servers",
    "strategies.keras.sequential_build",
    "strategies.embeddings.keras_embeddings",  # splits rows off, and leaves the rest to servers
    "strategies.servers.keras_shared_data",
    "strategies.rounds.keras_rounds",
    "strategies.rounds.keras_quorum",
    "strategies.all_reduce.keras_delayed",
    "strategies.keras.keras_xla",  # of the steps that others take on shares, or count
    "strategies.keras.keras_scope",
    "strategies.keras.keras_step_calls",
    "strategies.keras.keras_agreement",  # before all that calls collectives
    "strategies.servers.sidecar_evaluator",  # in place of all of it
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
