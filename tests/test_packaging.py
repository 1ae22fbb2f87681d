"""The contents of `pip install -e` and of a source distribution."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PARTS = ("tfdist", "docs", "examples", "tests", "benchmarks")


@pytest.fixture
def clone(tmp_path):
    """A clone called tfdist, as `git clone` makes it."""
    pytest.importorskip("setuptools")
    pytest.importorskip("wheel")
    clone = tmp_path / "tfdist"
    clone.mkdir()
    for part in PARTS:
        shutil.copytree(ROOT / part, clone / part, ignore=shutil.ignore_patterns("__pycache__", "_build"))
    for path in ROOT.iterdir():
        if path.is_file() and path.name != ".git":
            shutil.copy(path, clone)
    return clone


def build(clone, hook):
    program = f"from setuptools import build_meta; print(build_meta.{hook}(sys.argv[1]))"
    ended = subprocess.run(
        [sys.executable, "-c", f"import sys; {program}", str(clone.parent)],
        cwd=clone,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return clone.parent / ended.stdout.splitlines()[-1]


def test_script_beside_the_clone_finds_the_package(clone):
    """An import hook of setuptools would come after Python's own, which takes the clone's folder for the package."""
    with zipfile.ZipFile(build(clone, "build_editable")) as wheel:
        (path,) = (name for name in wheel.namelist() if name.endswith(".pth"))
        assert wheel.read(path).decode().strip() == str(clone)


def test_source_distribution_is_whole(clone):
    with tarfile.open(build(clone, "build_sdist")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in ("Makefile", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "examples/digits.py", "docs/index.md"):
        assert name in names
    assert {
        "tests/test_docs.py",
        "tests/multiprocess/harness.py",
        "benchmarks/fit.py",
        "tfdist/py.typed",
        "tfdist/engine/shared_sums.c",
    } <= names
    assert not [name for name in names if name.endswith(".pyc")]
