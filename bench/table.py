"""Markdown tables that are printed line by line, as their figures come."""

from __future__ import annotations

#: Of a column of figures, in characters.
LEAST_WIDTH = 7


class Table:
    """Prints its heading when it is made.

    :param first: title of the first column
    :param columns: titles of the others, which hold figures and stand to the right
    :param width: of the first column, where what is in it is longer than its title
    """

    def __init__(self, first: str, *columns: str, width: int = 0) -> None:
        self._widths = [max(width, len(first)), *(max(LEAST_WIDTH, len(column)) for column in columns)]
        print()
        self.row(first, *columns)
        lines = ["-" * self._widths[0], *("-" * (width - 1) + ":" for width in self._widths[1:])]
        self.row(*lines)

    def row(self, *cells: object) -> None:
        """Print a row."""
        first, *figures = zip(map(str, cells), self._widths, strict=True)
        texts = [first[0].ljust(first[1]), *(text.rjust(width) for text, width in figures)]
        print(f"| {' | '.join(texts)} |", flush=True)
