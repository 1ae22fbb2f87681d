import tests.devices  # noqa: F401
from tests.engine.ranks import ranks  # noqa: F401  (a fixture)
