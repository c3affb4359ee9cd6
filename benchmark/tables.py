"""Markdown tables."""

import re
from collections.abc import Iterable, Sequence

NUMERIC = re.compile(r"(?:[-+≈ ]*\d.*|\[[-+]?\d[^]]*\]|–)?")


def markdown(header: Sequence[str], rows: Iterable[Sequence]) -> str:
    """A table; columns whose cells all begin with a number (or are empty) are right-aligned."""
    cells = [[str(cell) for cell in row] for row in rows]
    columns = zip(*cells, strict=True) if cells else [[""]] * len(header)
    rules = ["--:" if all(map(NUMERIC.fullmatch, column)) else "---" for column in columns]
    lines = [" | ".join(row) for row in (header, *cells)]
    return (
        "\n".join([f"| {lines[0]} |", f"|{'|'.join(rules)}|", *(f"| {x} |" for x in lines[1:])])
        + "\n"
    )
