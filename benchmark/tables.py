"""Markdown tables."""

from collections.abc import Iterable, Sequence


def markdown(header: Sequence[str], rows: Iterable[Sequence]) -> str:
    """A table whose first column is text and whose other columns are right-aligned."""
    lines = [
        "| " + " | ".join(header) + " |",
        "|---|" + "--:|" * (len(header) - 1),
        *("| " + " | ".join(map(str, row)) + " |" for row in rows),
    ]
    return "\n".join(lines) + "\n"
