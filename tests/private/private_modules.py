"""Which modules of tfdist import something private of another package."""

import ast
from pathlib import Path

import tfdist

ROOT = Path(tfdist.__file__).parent


def importers(package):
    """The files, relative to tfdist, in which something of a package is imported, by name."""
    files = set()
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            if any(f"{name}.".startswith(f"{package}.") for name in names):
                files.add(path.relative_to(ROOT).as_posix())
    return files
