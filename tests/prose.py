"""Finds docstrings and pages that are hard to read: `python -m tests.prose` lists them.

It looks for texts of arguments and attributes that cannot be read alone, docstrings of fewer than three words or that
only refer to another one, and pages and paragraphs that are too long.
"""

import ast
import collections
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parent.parent
FOLDERS = ("tfdist", "tests", "benchmarks", "examples")
WORDS_OF_A_PAGE = 1_500
"""About three screens."""
SENTENCES_OF_A_PARAGRAPH = 5

_NO_PHRASE = re.compile(r"(of|as of|that|likewise|it|it is|see)\b(?!-)", re.IGNORECASE)
_ENTRY = re.compile(r"(\*{0,2}\w[\w., *`/]*?)(?: \(([^)]*)\))?: *(.*)$")
_SECTION = re.compile(r"(Args|Arguments|Attributes|Returns|Raises|Yields|References|Example|Examples|Note|Notes):$")
_END = re.compile(r"[.?!:](?=\s|$)")


def docstrings(tree):
    """Yields (line, text) of each docstring, also of those below assignments."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for number, statement in enumerate(body):
            if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
                continue
            if not isinstance(statement.value.value, str):
                continue
            before = body[number - 1] if number else None
            has_own = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            if (number == 0 and has_own) or isinstance(before, ast.Assign | ast.AnnAssign):
                yield statement.lineno, statement.value.value


def entries(text):
    """Yields (name, text) of each documented argument, attribute and error of a docstring."""
    lines = text.expandtabs().splitlines()
    section, margin, entry = None, 0, None
    documented = []
    for line in lines:
        bare = line.strip()
        indent = len(line) - len(line.lstrip())
        if _SECTION.match(bare):
            section, margin, entry = bare[:-1], indent, None
        elif not bare:
            continue
        elif section and indent <= margin:
            section = None
        elif section in ("Args", "Arguments", "Attributes", "Raises"):
            match = _ENTRY.match(bare)
            if match and indent <= margin + 4:
                entry = [match[1], match[3]]
                documented.append(entry)
            elif entry is not None:
                entry[1] = f"{entry[1]} {bare}".strip()
        elif section in ("Returns", "Yields"):
            if entry is None or entry[0] != section:
                entry = [section, bare]
                documented.append(entry)
            else:
                entry[1] += f" {bare}"
    return documented


def faults_of_docstrings(path):
    """Yields (line, fault) of a file of Python."""
    for line, text in docstrings(ast.parse(path.read_text())):
        first = text.strip().split("\n\n")[0]
        words = re.findall(r"[\w`.]+", first)
        if len(words) < 3:
            yield line, f"docstring of fewer than three words: {first}"
        elif _NO_PHRASE.match(first):
            yield line, f"docstring that cannot be read alone: {first[:60]}"
        for name, entry in entries(text):
            if _NO_PHRASE.match(entry):
                yield line, f"text that cannot be read alone: {name}: {entry[:60]}"
            elif not entry:
                yield line, f"no text: {name}"


def paragraphs(text):
    """Yields (line, text) of each paragraph and each item of a list; not tables, code, or headings."""
    fence, begin, lines = False, 0, []
    for number, line in enumerate([*text.splitlines(), ""], 1):
        bare = line.strip()
        if bare.startswith("```"):
            fence = not fence
            bare = ""
        elif fence or bare.startswith(("|", "#", "![", "<", ":::")):
            bare = ""
        if not bare or re.match(r"([-*]|\d+\.) ", bare):
            if lines:
                yield begin, " ".join(lines)
            lines = []
        if bare:
            begin = begin if lines else number
            lines.append(bare)


def faults_of_pages(path):
    """Yields (line, fault) of a page of Markdown."""
    text = path.read_text()
    words = sum(len(words.split()) for _, words in paragraphs(text))
    if words > WORDS_OF_A_PAGE:
        yield 1, f"a page of {words} words"
    for line, paragraph in paragraphs(text):
        plain = re.sub(r"`[^`]*`", "code", paragraph)
        plain = re.sub(r"\b(e\.g|i\.e|vs|Inc|cf|et al)\.", r"\1", plain)
        sentences = len(re.findall(r"[.?!](?=[\s)]|$)", plain))
        if sentences > SENTENCES_OF_A_PARAGRAPH:
            yield line, f"a paragraph of {sentences} sentences"


def faults():
    """Yields (path, line, fault)."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for line, fault in faults_of_docstrings(path):
                yield path.relative_to(ROOT), line, fault
    for path in [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]:
        if path.name != "CHANGELOG.md":
            for line, fault in faults_of_pages(path):
                yield path.relative_to(ROOT), line, fault


def main():
    counts = collections.Counter()
    for path, line, fault in faults():
        print(f"{path}:{line}: {fault}")
        counts["/".join(path.parts[:2]) if path.parts[0] == "tfdist" else path.parts[0]] += 1
    print(dict(counts.most_common()), file=sys.stderr)
    return 1 if counts else 0


if __name__ == "__main__":
    sys.exit(main())
