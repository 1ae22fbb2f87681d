"""Docstrings can be read alone, and pages to their end; what the script finds is found."""

import pytest

from tests import prose


def test_no_docstring_or_page_has_faults():
    assert [f"{path}:{line}: {fault}" for path, line, fault in prose.faults()] == []


GOOD = '''
class Shares:
    """Shares of a batch, one for each replica.

    Args:
        rows: number of rows
            of each share.

    Raises:
        ValueError: the rows are not divisible.
    """

    def first(self):
        """Returns the first share."""


LIMIT = 3
"""Largest number of shares."""
'''


@pytest.mark.parametrize(
    ("replaced", "by", "fault"),
    [
        ("number of rows\n", "of a batch\n", "text that cannot be read alone: rows: of a batch of each share."),
        ("number of rows\n", "as of `Shares`\n", "text that cannot be read alone: rows"),
        ("number of rows\n            of each share.", "", "no text: rows"),
        ("the rows are not divisible", "it is odd", "text that cannot be read alone: ValueError"),
        ("Returns the first share.", "One share.", "docstring of fewer than three words: One share."),
        ("Returns the first share.", "See `Batch` and `Row`.", "docstring that cannot be read alone"),
        ("Largest number of shares.", "Of the shares of a batch.", "docstring that cannot be read alone"),
    ],
)
def test_docstrings_that_cannot_be_read_alone_are_found(tmp_path, replaced, by, fault):
    path = tmp_path / "shares.py"
    path.write_text(GOOD)
    assert list(prose.faults_of_docstrings(path)) == []
    assert replaced in GOOD
    path.write_text(GOOD.replace(replaced, by))
    ((_, message),) = prose.faults_of_docstrings(path)
    assert message.startswith(fault)


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("One.\nTwo.\nThree.\nFour.\nFive.\n", []),
        ("One.\nTwo.\nThree.\nFour.\nFive.\nSix.\n", [(1, "a paragraph of 6 sentences")]),
        ("# A page\n\n- One. Two. Three.\n- One. Two. Three.\n", []),
        ("```\nA. B. C. D. E. F. G.\n```\n", []),
        ("See `a.b. c. d. e. f. g.` for e.g. this.\n", []),
        ("word " * 1500, []),
        ("word " * 1501, [(1, "a page of 1501 words")]),
    ],
)
def test_pages_and_paragraphs_that_are_too_long_are_found(tmp_path, text, faults):
    path = tmp_path / "page.md"
    path.write_text(text)
    assert list(prose.faults_of_pages(path)) == faults
