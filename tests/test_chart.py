"""Charts: that the picture is a document, that everything in it is where it belongs, and that nothing in it is lost."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from bench.chart import LEFT, PANEL_HEIGHT, RIGHT, WIDTH, Chart, Mark, Panel, Series

Place = tuple[float, float]
PLOT_WIDTH = WIDTH - LEFT - RIGHT


def drawn(*series: Series, marks: tuple[Mark, ...] = (), title: str = "title") -> ElementTree.Element:
    chart = Chart(title=title, x_title="minutes", panels=[Panel("panel", "MB", series)], marks=marks)
    return ElementTree.fromstring(chart.svg())


def elements(root: ElementTree.Element, tag: str, kind: str = "") -> list[ElementTree.Element]:
    found = root.iter(f"{{http://www.w3.org/2000/svg}}{tag}")
    return [element for element in found if not kind or kind in (element.get("class") or "").split()]


def lines(root: ElementTree.Element) -> list[list[Place]]:
    written = [polyline.attrib["points"].split() for polyline in elements(root, "polyline")]
    return [[(float(x), float(y)) for x, y in (point.split(",") for point in points)] for points in written]


def labels(root: ElementTree.Element) -> dict[str, Place]:
    return {text.text or "": (float(text.attrib["x"]), float(text.attrib["y"])) for text in elements(root, "text")}


def test_points_are_where_the_axes_say() -> None:
    root = drawn(Series("line", [(10, 0), (15, 2), (20, 4)]))

    (line,) = lines(root)
    bottom = line[0][1]
    assert line == [
        (LEFT, bottom),
        (LEFT + PLOT_WIDTH / 2, bottom - PANEL_HEIGHT / 2),
        (WIDTH - RIGHT, bottom - PANEL_HEIGHT),
    ]
    # labels of the y axis stand beside the values, those of the x axis below them
    assert labels(root)["4"][1] == pytest.approx(line[2][1], abs=5)
    assert labels(root)["2"][1] == pytest.approx(line[1][1], abs=5)
    assert labels(root)["15"][0] == pytest.approx(line[1][0])


def test_an_axis_ends_with_a_round_number_above_the_highest_value() -> None:
    root = drawn(Series("one", [(0, 3), (1, 61_234)]), Series("other", [(0, 0), (1, 17)]))

    assert "80,000" in labels(root)
    highest = min(y for line in lines(root) for _, y in line)
    assert labels(root)["80,000"][1] < highest < labels(root)["60,000"][1]


def test_a_gap_is_left_where_nothing_is_known() -> None:
    known = [(0.0, 1.0), (1.0, 1.0), (2.0, None), (3.0, None), (4.0, 1.0), (5.0, 1.0)]

    first, second = lines(drawn(Series("line", known)))
    assert first[-1][0] == pytest.approx(LEFT + PLOT_WIDTH / 5)
    assert second[0][0] == pytest.approx(LEFT + PLOT_WIDTH * 4 / 5, abs=0.1)


def test_of_many_points_the_outliers_are_kept() -> None:
    values = [5.0] * 100_000
    values[70_000], values[30_000] = 10.0, 0.0

    (line,) = lines(drawn(Series("line", list(enumerate(values)))))
    assert len(line) < 2_000
    heights = sorted(y for _, y in line)
    assert heights[-1] - heights[0] == pytest.approx(PANEL_HEIGHT, abs=0.2)
    assert line == sorted(line)


def test_points_of_a_short_line_are_shown_one_by_one() -> None:
    assert len(elements(drawn(Series("line", [(x, x) for x in range(10)])), "circle")) == 10
    assert not elements(drawn(Series("line", [(x, x) for x in range(1000)])), "circle")


def test_marks_have_a_row_for_each_kind_and_can_be_seen_however_short_they_are() -> None:
    marks = (Mark("cut", 5, 5), Mark("frozen", 2, 4, "for 2 s"), Mark("cut", 10, 10))
    root = drawn(Series("line", [(0, 0), (10, 1)]), marks=marks)

    cut, frozen, second = elements(root, "rect", "mark")
    assert float(cut.attrib["x"]) == pytest.approx(LEFT + PLOT_WIDTH / 2)
    assert float(cut.attrib["width"]) >= 1
    assert float(frozen.attrib["x"]) == pytest.approx(LEFT + PLOT_WIDTH / 5)
    assert float(frozen.attrib["width"]) == pytest.approx(PLOT_WIDTH / 5, abs=0.02)
    assert cut.attrib["y"] == second.attrib["y"] != frozen.attrib["y"]
    assert [title.text for title in elements(frozen, "title")] == ["frozen for 2 s"]
    for row, kind in ((cut, "cut"), (frozen, "frozen")):
        assert labels(root)[kind][1] == pytest.approx(float(row.attrib["y"]) + 9, abs=3)


def test_text_is_text_whatever_is_in_it() -> None:
    title = "</text><script>1 & 2</script> \"'"
    root = drawn(Series("a < b\x00\x1b", [(0, 0), (1, 1)]), title=title)

    assert title in labels(root)
    assert "a < b��" in labels(root)
    assert not elements(root, "script")


def test_every_line_has_its_entry_in_the_legend_and_a_color_on_either_ground() -> None:
    root = drawn(*(Series(f"line {number}", [(0, number), (1, number)]) for number in range(4)))

    (style,) = (element.text or "" for element in elements(root, "style"))
    light, dark = style.split("@media(prefers-color-scheme:dark)")
    colors = [(polyline.get("class") or "").split()[1] for polyline in elements(root, "polyline")]
    assert len(set(colors)) == 4
    assert [(line.get("class") or "").split()[1] for line in elements(root, "line", "line")] == colors
    for number, color in enumerate(colors):
        assert f"line {number}" in labels(root)
        assert f".{color}{{stroke:" in light
        assert f".{color}{{stroke:" in dark


@pytest.mark.parametrize("points", [[], [(0.0, None)], [(3.0, 0.0)], [(0.0, 0.0), (1.0, 0.0)]])
def test_a_line_without_much_in_it_is_drawn_all_the_same(points: list[tuple[float, float | None]]) -> None:
    assert "1" in labels(drawn(Series("line", points)))
