"""Private members that tfdist uses are used in `tfdist.private` and `tfdist.seams` only, where a new Keras is met."""

import ast
from pathlib import Path

import tfdist

ROOT = Path(tfdist.__file__).parent
OVERRIDES = {
    "optimizers/gradient_parts.py",  # methods of one optimizer
    "strategies/all_reduce/extended.py",  # `tf.distribute.StrategyExtended`
}
OF_PYTHON = {"os._exit", "atexit._run_exitfuncs"}
OWN = {"self", "cls", "super()"}


def names_in(tree):
    """What a file defines: functions, classes, variables, and attributes of `self`."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) in OWN:
            names.add(node.attr)
    return names


def uses_in(tree):
    """Private attributes: what they are of, their names, and the whole expressions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            yield ast.unparse(node.value), node.attr, ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            owner, name = node.args[:2]
            if isinstance(name, ast.Constant) and name.value.startswith("_"):
                yield ast.unparse(owner), name.value, ast.unparse(node)


def foreign(trees, allowed=OVERRIDES):
    """Uses of private members that the file does not define; on `self`, that nothing of tfdist does."""
    defined = {path: names_in(tree) for path, tree in trees.items()}
    anywhere = set().union(*defined.values())
    of_strategies = defined.get("strategies/abilities.py", set())
    for path, tree in trees.items():
        if path.startswith(("private/", "seams/")) or path in allowed:
            continue
        for owner, name, use in uses_in(tree):
            known = anywhere if owner in OWN else defined[path] | of_strategies
            if name not in known and not name.startswith(("__", "_tfdist_")) and use not in OF_PYTHON:
                yield f"{path}: {use}"


def test_private_members_of_others_are_used_in_two_folders_only():
    trees = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in ROOT.rglob("*.py")}
    assert list(foreign(trees)) == []
    assert {use.partition(":")[0] for use in foreign(trees, allowed=())} == OVERRIDES, "the search finds nothing"


def test_foreign_finds_private_members_of_others():
    file = """
class Own(Base):
    def __init__(self, model):
        self._kept = model
        self._nobodys.clear()
        model._layers
        model._kept, model._tfdist_mark, model.__dict__, self._kept
        getattr(model, "_by_name", None), os._exit(1), extended._declared
"""
    abilities = "class Ability:\n    def _declared(self): ..."
    trees = {"one.py": ast.parse(file), "strategies/abilities.py": ast.parse(abilities)}
    assert sorted(foreign(trees)) == [
        "one.py: getattr(model, '_by_name', None)",
        "one.py: model._layers",
        "one.py: self._nobodys",
    ]
