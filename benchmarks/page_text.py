"""What all tables of the documentation share."""

import statistics
from pathlib import Path

RESULTS = Path(__file__).parent.parent / "docs" / "benchmarks"


def table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)


def median_and_spread(values, form):
    """Cells of a table: the median, and from the lowest to the highest."""
    return [format(statistics.median(values), form), f"{min(values):{form}} – {max(values):{form}}"]
