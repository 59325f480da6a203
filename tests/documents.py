"""The documentation as tests see it: its links, its headings, and the code in it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import attrs

ROOT = Path(__file__).parent.parent
#: All that is documentation.
FILES = (ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md")))

_FENCE = re.compile(r"\s*```(?P<language>\S*)")
_HEADING = re.compile(r"#+ (?P<text>.+)")
_INLINE = re.compile(r"`([^`]+)`")
_LINK = re.compile(r"\]\((?P<target>[^()\s]+)\)|(?:src|srcset|href)=\"(?P<html>[^\"]+)\"")
_HERE_DOCUMENT = re.compile(r"<<-?\s*['\"]?(\w+)")


@attrs.frozen
class Block:
    """A block of code.

    :ivar language: what stands behind the marks at its beginning; may be empty
    :ivar chapter: the heading of the second level under which it stands
    """

    language: str
    chapter: str
    lines: tuple[str, ...]

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + "\n"

    def commands(self) -> Iterator[str]:
        """Its lines, continued ones put together, without prompts and what is in here documents."""
        lines = iter(self.lines)
        for line in lines:
            whole = line
            while whole.endswith("\\"):
                whole = whole[:-1] + next(lines, "").lstrip()
            yield whole.removeprefix("$ ")
            if here := _HERE_DOCUMENT.search(whole):
                for inside in lines:
                    if inside.strip() == here[1]:
                        break


@attrs.frozen
class Page:
    """One file of the documentation.

    :ivar prose: its lines that are in no block of code
    :ivar blocks: the blocks of code
    """

    path: Path
    prose: tuple[str, ...]
    blocks: tuple[Block, ...]

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    def inline(self) -> list[str]:
        """The code in its text."""
        return [code for line in self.prose for code in _INLINE.findall(line)]

    def links(self) -> list[str]:
        """Where it leads, pictures included."""
        text = _INLINE.sub("", "\n".join(self.prose))
        return [match["target"] or match["html"] for match in _LINK.finditer(text)]

    def anchors(self) -> set[str]:
        """What a link may name behind the sign `#`, as GitHub makes it of the headings."""
        seen: Counter[str] = Counter()
        found = set()
        for line in self.prose:
            if heading := _HEADING.fullmatch(line):
                text = re.sub(r"[^\w\- ]", "", heading["text"].lower()).replace(" ", "-")
                found.add(f"{text}-{seen[text]}" if seen[text] else text)
                seen[text] += 1
        return found


def load(path: Path) -> Page:
    """Read a page."""
    prose: list[str] = []
    blocks: list[Block] = []
    chapter = ""
    lines = iter(path.read_text().splitlines())
    for line in lines:
        if fence := _FENCE.match(line):
            inside = []
            for each in lines:
                if each.strip() == "```":
                    break
                inside.append(each)
            blocks.append(Block(fence["language"], chapter, tuple(inside)))
            continue
        if line.startswith("## "):
            chapter = line.removeprefix("## ")
        prose.append(line)
    return Page(path, tuple(prose), tuple(blocks))


def pages() -> list[Page]:
    """All pages."""
    return [load(path) for path in FILES]
