"""Which folder may import which, and no import cycles."""

import ast
from pathlib import Path

import pytest

import tfdist

ROOT = Path(tfdist.__file__).parent
ORDER = (
    ("_version", "errors", "notices", "other_names", "sharding", "thread_values", "whole_numbers"),
    ("private",),
    ("tensors",),
    ("comm",),
    ("collectives",),
    ("compression",),
    ("cluster",),
    ("parameter_server",),
    ("engine",),
    ("local_sgd", "runtime"),
    ("gossip", "quorum"),
    ("seams",),
    ("strategies",),
    ("model_parallel",),
    ("pipeline",),
    ("initialization",),
    ("functional", "layers"),
    ("distribution",),
    ("optimizers",),
    ("callbacks",),
    ("cli",),
    ("__init__", "__main__"),
)
"""Each imports only what stands before it. Nothing but the public names stands in `__init__`."""
WINGS = {
    "parameter_server": (
        *("options", "protocol", "worker", "dealing", "snapshots", "shard", "tables", "hierarchy", "server"),
    ),
    "strategies": ("", "devices", "data", "keras", "embeddings", "servers", "divided", "all_reduce", "rounds"),
}
"""Folders within folders, likewise; "" are the files beside them."""
APART = {("cluster", "compression"), ("cluster", "collectives"), ("comm", "tensors")}
"""Pairs of which the first, though later, needs nothing of the second: membership knows no collectives."""


def module_of(path):
    return ".".join(("tfdist", *path.relative_to(ROOT).with_suffix("").parts))


MODULES = {module_of(path): path for path in ROOT.rglob("*.py")}


def imported(path):
    """Modules of tfdist that a file imports anywhere, except under TYPE_CHECKING."""
    modules = set()

    def visit(node):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tfdist"):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                modules.add(full if full in MODULES or f"{full}.__init__" in MODULES else node.module)
        elif isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names if alias.name.startswith("tfdist"))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return modules


def room(module):
    return module.split(".")[1] if "." in module else "__init__"


def test_folders_depend_one_way():
    level = {name: place for place, names in enumerate(ORDER) for name in names}
    wrong = [
        f"{module} imports {other}"
        for module, path in MODULES.items()
        for other in imported(path)
        if room(module) != room(other) and other != "tfdist"
        if level[room(other)] >= level[room(module)] or (room(module), room(other)) in APART
    ]
    assert not wrong, wrong


@pytest.mark.parametrize("wing", WINGS)
def test_wings_depend_one_way(wing):
    def place(module):
        parts = module.split(".")[2:]
        return WINGS[wing].index(parts[0] if len(parts) > 1 else "")

    paths = {module: path for module, path in MODULES.items() if room(module) == wing and path.stem != "__init__"}
    wrong = [
        f"{module} imports {other}"
        for module, path in paths.items()
        for other in imported(path)
        if other in paths and place(other) > place(module)
    ]
    assert not wrong, wrong
    assert {place(module) for module in paths} == set(range(len(WINGS[wing])))


def test_no_files_import_each_other_in_a_circle():
    graph = {module: {other for other in imported(path) if other in MODULES} for module, path in MODULES.items()}
    done, path = set(), []

    def visit(module):
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            path.append(module)
            for other in sorted(graph[module]):
                visit(other)
            path.pop()
            done.add(module)

    for module in sorted(graph):
        visit(module)


def test_private_modules_are_imported_in_one_file_each():
    for library, home in (("tensorflow", "tensorflow"), ("keras", "keras")):
        private = (f"from {library}.python", f"import {library}.python", f"from {library}.src", f"import {library}.src")
        using = {path.stem for path in ROOT.rglob("*.py") if any(text in path.read_text() for text in private)}
        assert using == {home}, using


def test_every_module_has_a_test_file_of_its_name():
    tests = Path(__file__).parent
    files = {path.relative_to(ROOT) for path in ROOT.rglob("*.py") if not path.name.startswith("_")}
    missing = [str(path) for path in files if not (tests / path.parent / f"test_{path.name}").exists()]
    assert not missing, missing
