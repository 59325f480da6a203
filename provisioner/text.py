"""Text that came from elsewhere, made fit for one line of a log."""

from __future__ import annotations

from collections.abc import Iterable

#: What a secret is shown as.
MASK = "***"
#: Longest text of somebody else's that goes into an error or a log line.
SHOWN_CHARACTERS = 300


def printable(text: str | bytes) -> str:
    """A text without anything that could end the line, move the cursor or fill the log."""
    if isinstance(text, bytes):
        text = text[: 4 * SHOWN_CHARACTERS + 4].decode(errors="replace")
    line = plain_line(text[: SHOWN_CHARACTERS + 1])
    return line if len(line) <= SHOWN_CHARACTERS else line[:SHOWN_CHARACTERS] + "..."


def plain_line(text: str) -> str:
    """The same for a text that is to be shown whole, however long."""
    return "".join(character if character.isprintable() else " " for character in text)


def escaped(line: str) -> str:
    """A line of a log with all in it that could end it, move the cursor or turn the direction of writing escaped."""
    if line.isprintable():
        return line
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in line
    )


def masked(text: str, secrets: Iterable[str]) -> str:
    """A text without the secrets that stand in it."""
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        text = text.replace(secret, MASK)
    return text
