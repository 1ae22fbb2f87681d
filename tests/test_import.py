"""What `import tfdist` imports, and what it does not."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tfdist
from tests.multiprocess import harness


def test_public_names_exist():
    for name in tfdist.__all__:
        assert getattr(tfdist, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = tfdist.nonsense


def test_lazy_names_equal_names_for_type_checkers():
    """The names for type checkers are those that exist at run time."""
    tree = ast.parse(Path(tfdist.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    homes = {name.name: node.module for node in block.body for name in node.names}
    modules = {name for name, home in homes.items() if home == "tfdist"}
    assert {name: home for name, home in homes.items() if name not in modules} == tfdist._HOMES
    assert {*homes, "__version__"} == set(tfdist.__all__)
    for name in modules:
        assert getattr(tfdist, name).__name__ == f"tfdist.{name}"


MISTAKES = """
import tfdist
reveal_type(tfdist.all_reduce)
reveal_type(tfdist.errors.PeerLostError)
tfdist.AllReduceStrategie()
tfdist.AllReduceStrategy(algoritm="ring")
tfdist.callbacks.Communication(logdir="logs")
tfdist.nonsense
"""
QUICKLY = "--ignore-missing-imports", "--no-site-packages"  # leaves NumPy unread


def test_type_checker_sees_the_public_names(tmp_path):
    (tmp_path / "user.py").write_text(MISTAKES)
    output = subprocess.run(
        [sys.executable, "-m", "mypy", *QUICKLY, "--cache-dir", str(tmp_path), "user.py"],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(Path(tfdist.__file__).parent.parent)},
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    lines = {
        int(line.split(":")[1]): line
        for line in output.splitlines()
        if line.startswith("user.py") and 'note: "' not in line
    }
    for number, words in {
        3: 'Revealed type is "def (value: Any, op: str =',
        4: "-> tfdist.errors.PeerLostError",
        5: 'no attribute "AllReduceStrategie"',
        6: 'Unexpected keyword argument "algoritm"',
        7: 'Unexpected keyword argument "logdir"',
        8: 'no attribute "nonsense"',
    }.items():
        assert words in lines[number], output


def test_errors_are_an_attribute_of_the_package():
    assert python("import tfdist; print(tfdist.errors.PeerLostError.__name__)").stdout == "PeerLostError\n"


def test_python_m_tfdist_runs_the_command():
    ended = subprocess.run([sys.executable, "-m", "tfdist", "--version"], capture_output=True, text=True, check=False)
    assert ended.stdout == f"tfdist {tfdist.__version__}\n"


def python(program):
    command, env = [sys.executable, "-c", program], harness.environment()
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_import_does_not_wait_for_tensorflow():
    program = (
        "import sys, tfdist, tfdist.cluster.server; from tfdist.cli import main; main.parser()\n"
        "print('tensorflow' in sys.modules)"
    )
    assert python(program).stdout == "False\n"


def test_launcher_imports_no_numpy():
    program = (
        "import sys; from tfdist.cli import main\n"
        "assert main.main(['run', '-n', '2', 'no_such_script.py']) == 2\n"
        "print('numpy' in sys.modules)"
    )
    assert python(program).stdout == "False\n"


def test_all_reduce_job_imports_no_parameter_server_modules():
    program = (
        "import sys, keras, numpy as np, tfdist\n"
        "with tfdist.AllReduceStrategy().scope():\n"
        "    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])\n"
        "    model.compile('sgd', 'mse')\n"
        "model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)\n"
        "theirs = 'tfdist.parameter_server', 'tfdist.strategies.servers'\n"
        "print([name for name in sys.modules if name.startswith(theirs)])"
    )
    assert python(program).stdout == "[]\n"


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
    paths = subprocess.run(
        ["grep", "-rlE", r"(from|import) tensorflow\.(python|compiler|core)", tfdist.__path__[0], "--include=*.py"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split()
    assert [path.rpartition("/")[2] for path in paths] == ["tensorflow.py"]
