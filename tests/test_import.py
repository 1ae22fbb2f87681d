"""What `import tfdist` does, and does not, bring along."""

import subprocess
import sys

import pytest

import tfdist


def test_public_names_exist():
    for name in tfdist.__all__:
        assert getattr(tfdist, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = tfdist.nonsense


def python(program):
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)


def test_import_does_not_wait_for_tensorflow():
    program = "import sys, tfdist, tfdist.cli.main, tfdist.cluster.server; print('tensorflow' in sys.modules)"
    assert python(program).stdout == "False\n"


def test_without_tensorflow_one_clear_line():
    program = (
        "import importlib.util as u; find = u.find_spec;"
        "u.find_spec = lambda name, *a: None if name == 'tensorflow' else find(name, *a);"
        "import tfdist; tfdist.AllReduceStrategy"
    )
    last = python(program).stderr.splitlines()[-1]
    assert "TensorFlowMissingError: tfdist needs TensorFlow" in last
    assert "`pip install tensorflow-cpu`" in last


def test_only_one_file_imports_private_modules_of_tensorflow():
    found = subprocess.run(
        ["grep", "-rlE", r"(from|import) tensorflow\.(python|compiler|core)", tfdist.__path__[0], "--include=*.py"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split()
    assert [path.rpartition("/")[2] for path in found] == ["tensorflow_private.py"]
