"""What tfdist does that is deprecated is an error, in pytest and, as Python imports this by itself, in all processes.

Python tells by warnings. TensorFlow tells by its logger, and names the file that called.
"""

import importlib.util
import logging
import os
import warnings


class Refuses(logging.Filter):
    """Raises for what TensorFlow says of calls in a folder."""

    def __init__(self, folder):
        super().__init__()
        self._prefix = f"From {folder}{os.sep}"

    def filter(self, record):
        message = record.getMessage()
        if message.startswith(self._prefix) and "deprecated" in message:
            raise DeprecationWarning(message)
        return True


def install():
    package = importlib.util.find_spec("tfdist")
    if package is not None:
        warnings.filterwarnings("error", category=DeprecationWarning, module=r"tfdist(\.|$)")
        logging.getLogger("tensorflow").addFilter(Refuses(os.path.dirname(package.origin)))


install()
if __name__ == "sitecustomize":  # not in pytest, whose tests may give Keras data of pandas
    import optional_packages

    optional_packages.hide()
