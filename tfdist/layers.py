"""Keras layers that are split over processes or kept on parameter servers, and the classes of their arguments."""

from tfdist.strategies import require_tensorflow

require_tensorflow()

from tfdist.model_parallel.split_layers import (  # noqa: E402
    ColumnParallelDense,
    ParallelEmbedding,
    RowParallelDense,
)
from tfdist.parameter_server.options.initial_rows import InitialRows  # noqa: E402
from tfdist.parameter_server.options.row_policy import RowPolicy  # noqa: E402
from tfdist.parameter_server.tables.row_cache import CachePolicy  # noqa: E402
from tfdist.strategies.embeddings.dynamic_embedding import DynamicEmbedding  # noqa: E402

__all__ = [
    "CachePolicy",
    "ColumnParallelDense",
    "DynamicEmbedding",
    "InitialRows",
    "ParallelEmbedding",
    "RowParallelDense",
    "RowPolicy",
]
