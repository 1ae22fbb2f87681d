"""Keras is imported as where nothing but tfdist is installed, which takes two thirds of the time.

It imports scikit-learn, pandas and matplotlib if they are there, as they are for some tests. Scripts may import them.
"""

import sys

NAMES = "matplotlib", "pandas", "sklearn"


class Hidden:
    """A finder that tells Keras, and no one else, that there are no such packages."""

    def find_spec(self, name, path=None, target=None):
        keras = sys.modules.get("keras")
        if name in NAMES and keras is not None and keras.__spec__._initializing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def hide():
    sys.meta_path.insert(0, Hidden())
