"""Line charts as plain SVG: panels one below the other over one axis, readable on light and on dark ground."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from xml.etree import ElementTree

import attrs

#: Lengths are in the picture's own pixels.
WIDTH = 1000
LEFT, RIGHT, TOP, BOTTOM = 130, 24, 58, 46
PANEL_HEIGHT = 104
#: Above a panel, for its title and its legend.
HEADING_HEIGHT = 34
#: Of one kind of marks.
ROW_HEIGHT = 14
#: A mark of no length is drawn so wide, that it can be seen.
LEAST_WIDTH = 2.0
#: Of a line, no more than its lowest and its highest point is drawn for every so many pixels.
COLUMN_WIDTH = 2.0
#: A line of no more points than this shows each of them.
DOTTED_POINTS = 30
#: An axis that begins within this part of its length from 0 begins at 0.
NEAR_ZERO = 0.05
#: What a character of the legend takes, and one of a heading, roughly.
CHARACTER_WIDTH, BOLD_CHARACTER_WIDTH = 6.6, 7.4
COLORS_ON_LIGHT = ("#0969da", "#bc4c00", "#1a7f37", "#8250df", "#bf3989")
COLORS_ON_DARK = ("#58a6ff", "#f0883e", "#3fb950", "#bc8cff", "#f778ba")

_LIGHT = (
    ".ground{fill:#ffffff}.ink{fill:#1f2328}.soft{fill:#59636e}.grid{stroke:#d1d9e0}.axis{stroke:#818b98}"
    ".band{fill:#cf222e;fill-opacity:.08}.mark{fill:#cf222e}"
)
_DARK = (
    ".ground{fill:#0d1117}.ink{fill:#e6edf3}.soft{fill:#9198a1}.grid{stroke:#2a313c}.axis{stroke:#656c76}"
    ".band{fill:#ff7b72;fill-opacity:.13}.mark{fill:#ff7b72}"
)
_ALWAYS = (
    "text{font:12px system-ui,sans-serif}.title{font-size:16px;font-weight:600}.heading{font-weight:600}"
    ".right{text-anchor:end}.middle{text-anchor:middle}.line{fill:none;stroke-width:1.6;stroke-linejoin:round}"
)


@attrs.frozen
class Series:
    """One line.

    :ivar points: pairs of x and y, ordered by x; a y of None is a gap in the line
    """

    name: str
    points: Sequence[tuple[float, float | None]]


@attrs.frozen
class Panel:
    """Lines that share a y axis, which begins at 0.

    :ivar unit: of the y axis; empty when it counts
    """

    title: str
    unit: str
    series: Sequence[Series]


@attrs.frozen
class Mark:
    """Something that lasted from one x to another, drawn in a row of its kind and through all panels."""

    kind: str
    start: float
    end: float
    text: str = ""


@attrs.frozen(kw_only=True)
class Chart:
    """A picture.

    :ivar x_title: what the common axis shows, with its unit
    :ivar x_names: of the ticks of the common axis, by where they are; None: round numbers
    :ivar note: a line below the title
    :ivar marks: the rows are in the order in which their kinds first come
    """

    title: str
    x_title: str
    panels: Sequence[Panel]
    x_names: Mapping[float, str] | None = None
    marks: Sequence[Mark] = ()
    note: str = ""

    def svg(self) -> str:
        """Give the picture as the text of an SVG document."""
        kinds = list(dict.fromkeys(mark.kind for mark in self.marks))
        top = TOP + len(kinds) * ROW_HEIGHT
        bottom = top + len(self.panels) * (HEADING_HEIGHT + PANEL_HEIGHT)
        root = _root(bottom + BOTTOM, self.title)
        _text(root, LEFT, 26, self.title, "title ink")
        _text(root, LEFT, 45, self.note, "soft")
        across = self._across()
        self._draw_marks(root, across, kinds, bottom)
        for number, panel in enumerate(self.panels):
            _draw_panel(root, panel, across, top + number * (HEADING_HEIGHT + PANEL_HEIGHT) + HEADING_HEIGHT)
        names = self.x_names or {tick: _number(tick) for tick in across.ticks(10)}
        for tick, name in names.items():
            _text(root, across(tick), bottom + 16, name, "soft middle")
        _text(root, (LEFT + WIDTH - RIGHT) / 2, bottom + 36, self.x_title, "ink middle")
        return ElementTree.tostring(root, encoding="unicode") + "\n"

    def _across(self) -> _Scale:
        ends = [end for mark in self.marks for end in (mark.start, mark.end)]
        ends += [x for panel in self.panels for series in panel.series for x, _ in series.points]
        low, high = min(ends, default=0.0), max(ends, default=0.0)
        if 0 < low < (high - low) * NEAR_ZERO:
            low = 0.0
        return _Scale(low, high if high > low else low + 1, LEFT, WIDTH - RIGHT)

    def _draw_marks(self, root: ElementTree.Element, across: _Scale, kinds: Sequence[str], bottom: float) -> None:
        for row, kind in enumerate(kinds):
            _text(root, LEFT - 8, TOP + row * ROW_HEIGHT + 11, kind, "soft right")
        for mark in self.marks:
            left, row = across(mark.start), kinds.index(mark.kind)
            width, y = max(LEAST_WIDTH, across(mark.end) - left), TOP + row * ROW_HEIGHT
            _add(root, "rect", x=left, y=y, width=width, height=bottom - y, **{"class": "band"})
            drawn = _add(root, "rect", x=left, y=y + 2, width=width, height=ROW_HEIGHT - 4, **{"class": "mark"})
            _add(drawn, "title").text = _printable(f"{mark.kind} {mark.text}".strip())


@attrs.frozen
class _Scale:
    """Where a value between `low` and `high` is, in pixels between `start` and `end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self, about: int) -> list[float]:
        """Give round numbers within the scale, about so many."""
        step = _round_step((self.high - self.low) / about)
        first = math.ceil(self.low / step - 1e-9)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, ... 0.5, 0.2, ... that is not smaller."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(step for step in (power, 2 * power, 5 * power, 10 * power) if step >= least * (1 - 1e-9))


def _draw_panel(root: ElementTree.Element, panel: Panel, across: _Scale, top: float) -> None:
    up = _up(panel, top)
    for tick in up.ticks(4):
        kind = "axis" if tick == 0 else "grid"
        _add(root, "line", x1=LEFT, x2=WIDTH - RIGHT, y1=up(tick), y2=up(tick), **{"class": kind})
        _text(root, LEFT - 8, up(tick) + 4, _number(tick), "soft right")
    heading = f"{panel.title}, {panel.unit}" if panel.unit else panel.title
    _text(root, LEFT, top - 10, heading, "heading ink")
    x = LEFT + len(heading) * BOLD_CHARACTER_WIDTH + 24
    for number, series in enumerate(panel.series):
        color = f"c{number % len(COLORS_ON_LIGHT)}"
        _draw_line(root, series, across, up, color)
        _add(root, "line", x1=x, x2=x + 18, y1=top - 14, y2=top - 14, **{"class": f"line {color}"})
        _text(root, x + 23, top - 10, series.name, "ink")
        x += 23 + len(series.name) * CHARACTER_WIDTH + 22


def _up(panel: Panel, top: float) -> _Scale:
    """Make the y axis, long enough for all values and for a round number at its end."""
    values = [y for series in panel.series for _, y in series.points if y is not None]
    low, high = min([0.0, *values]), max([0.0, *values])
    step = _round_step((high - low or 1) / 4)
    low, high = math.floor(low / step + 1e-9) * step, math.ceil((high or 1) / step - 1e-9) * step
    return _Scale(low, high, top + PANEL_HEIGHT, top)


def _draw_line(root: ElementTree.Element, series: Series, across: _Scale, up: _Scale, color: str) -> None:
    for known, stretch in itertools.groupby(series.points, lambda point: point[1] is not None):
        if not known:
            continue
        places = [(across(x), up(y)) for x, y in stretch if y is not None]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in _thinned(places))
        _add(root, "polyline", points=points, **{"class": f"line {color}"})
        if len(series.points) <= DOTTED_POINTS or len(places) == 1:
            for x, y in places:
                _add(root, "circle", cx=x, cy=y, r=2.5, **{"class": f"ground {color}"})


def _thinned(places: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Give the lowest and the highest of each column, in their order, and the two ends."""
    yield from places[:1]
    for _, column in itertools.groupby(places[1:-1], lambda place: place[0] // COLUMN_WIDTH):
        column_places = list(column)
        yield from sorted({min(column_places, key=_height), max(column_places, key=_height)})
    yield from places[1:][-1:]


def _height(place: tuple[float, float]) -> float:
    return place[1]


def _root(height: float, title: str) -> ElementTree.Element:
    root = ElementTree.Element(
        "svg",
        {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {WIDTH} {height:g}", "role": "img"},
    )
    _add(root, "title").text = _printable(title)
    light, dark = (
        "".join(f".c{number}{{stroke:{color}}}" for number, color in enumerate(colors))
        for colors in (COLORS_ON_LIGHT, COLORS_ON_DARK)
    )
    style = f"{_ALWAYS}{_LIGHT}{light}@media(prefers-color-scheme:dark){{{_DARK}{dark}}}"
    _add(root, "style").text = style
    _add(root, "rect", width=WIDTH, height=height, **{"class": "ground"})
    return root


def _add(parent: ElementTree.Element, tag: str, **attributes: float | str) -> ElementTree.Element:
    written = {name: value if isinstance(value, str) else f"{value:.2f}" for name, value in attributes.items()}
    return ElementTree.SubElement(parent, tag, written)


def _text(parent: ElementTree.Element, x: float, y: float, text: str, kind: str) -> None:
    _add(parent, "text", x=x, y=y, **{"class": kind}).text = _printable(text)


def _printable(text: str) -> str:
    """XML has no way to write most control characters."""
    return "".join(character if character.isprintable() else "�" for character in text)


def _number(value: float) -> str:
    return f"{value:,.10g}"
