"""Keras layers for parameter servers, and the classes of their arguments."""

from tfdist.strategies import require_tensorflow

require_tensorflow()

from tfdist.parameter_server.options.initial_rows import InitialRows  # noqa: E402
from tfdist.parameter_server.options.row_policy import RowPolicy  # noqa: E402
from tfdist.parameter_server.tables.row_cache import CachePolicy  # noqa: E402
from tfdist.strategies.embeddings.dynamic_embedding import DynamicEmbedding  # noqa: E402

__all__ = ["CachePolicy", "DynamicEmbedding", "InitialRows", "RowPolicy"]
