"""Deprecated calls of tfdist's are errors in ranks, forked and started."""

import pytest

from tests.multiprocess import harness

pytestmark = pytest.mark.multiprocess

CALLED_BY_TFDIST = """
{imports}
import importlib.util, os, warnings
path = os.path.join(os.path.dirname(importlib.util.find_spec("tfdist").origin), "made_up.py")
exec(compile({call!r}, path, "exec"), {{"__name__": "tfdist.made_up"}})
"""
WARNS = "import warnings\nwarnings.warn('old', DeprecationWarning)"
LOGS = """
import tensorflow as tf
from tensorflow.python.util import deprecation
deprecation.deprecated(None, "Use another one.")(lambda: None)()
"""


@pytest.mark.parametrize("imports", ["import tensorflow", "import sys"], ids=["forked", "started"])
@pytest.mark.parametrize("call", [WARNS, LOGS], ids=["Python", "TensorFlow"])
def test_deprecated_calls_of_tfdist_are_errors(tmp_path, imports, call):
    script = tmp_path / "script.py"
    script.write_text(CALLED_BY_TFDIST.format(imports=imports, call=call))
    with harness.started([str(script)], 1) as processes:
        (end,) = processes.wait()
    assert end.code == 1, end.output
    assert "DeprecationWarning: " in end.output, end.output
