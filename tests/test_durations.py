"""Durations: what Choria's configuration takes for one, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provisioner import durations
from provisioner.durations import DurationError

DAY = 86400.0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90.0),
        ("1m", 60.0),
        ("1h30m", 5400.0),
        ("1.5h", 5400.0),
        (".5s", 0.5),
        ("5.s", 5.0),
        ("1m1m", 120.0),
        ("01m", 60.0),
        ("250ms", 0.25),
        ("1\u00b5s", 1e-6),
        ("1\u03bcs", 1e-6),
        ("1us", 1e-6),
        ("1ns", 1e-9),
        ("+1m", 60.0),
        ("-1m", -60.0),
        (" 1m\n", 60.0),
        ("0s", 0.0),
        ("1d", DAY),
        ("1D", DAY),
        ("0.5d", DAY / 2),
        ("2w", 14 * DAY),
        ("2W", 14 * DAY),
        ("1M", 30 * DAY),
        ("1y", 365 * DAY),
        ("1Y", 365 * DAY),
        ("-1d", -DAY),
    ],
)
def test_a_duration_gives_its_seconds(text: str, seconds: float) -> None:
    assert durations.parse(text) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize("text", ["90", "0", "1.5", "-3", "1e3", "9" * 5000])
def test_a_number_without_a_unit_is_no_duration(text: str) -> None:
    with pytest.raises(DurationError, match="a number with a unit" if "e" not in text else "a duration"):
        durations.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "1H",
        "1S",
        "m",
        ".",
        ".s",
        "1h-1m",
        "1h 30m",
        "1d12h",
        "12h1d",
        "1..5s",
        "1:30",
        "1_0s",
        "\u0663m",
        "infs",
        "nand",
    ],
)
def test_anything_else_is_no_duration(text: str) -> None:
    with pytest.raises(DurationError, match="a duration, as in 90s"):
        durations.parse(text)


@pytest.mark.parametrize(
    "text", ["9223372037s", "293y", "9" * 400 + "d", "1" + "0" * 308 + "s" + "1" + "0" * 308 + "s"]
)
def test_a_duration_beyond_64_bits_of_nanoseconds_is_refused(text: str) -> None:
    with pytest.raises(DurationError, match="less than 292 years"):
        durations.parse(text)


def test_a_month_is_told_from_a_minute() -> None:
    assert durations.is_month("1M ")
    assert not durations.is_month("1m")


@given(st.text())
def test_any_text_is_a_duration_or_a_duration_error(text: str) -> None:
    try:
        seconds = durations.parse(text)
    except DurationError:
        return
    assert abs(seconds) <= durations.MAX_SECONDS


@given(
    # 20 times 100,000 hours are less than the longest duration
    st.lists(st.tuples(st.integers(0, 10**5), st.sampled_from(["ms", "s", "m", "h"])), min_size=1, max_size=20),
    st.sampled_from(["", "+", "-"]),
)
def test_a_written_go_duration_is_read_back(parts: list[tuple[int, str]], sign: str) -> None:
    unit_milliseconds = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000}
    text = sign + "".join(f"{number}{unit}" for number, unit in parts)
    total = sum(number * unit_milliseconds[unit] for number, unit in parts) / 1000
    assert durations.parse(text) == pytest.approx(-total if sign == "-" else total, rel=1e-12)


@given(st.integers(0, 290 * 365))
def test_days_are_read_back(days: int) -> None:
    assert durations.parse(f"{days}d") == days * DAY


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0s"), (59.9, "59s"), (61, "1m01s"), (3599, "59m59s"), (7260, "2h01m"), (86400 * 12 + 3600, "12d01h")],
)
def test_times_are_told_in_two_units(seconds: float, text: str) -> None:
    assert durations.span(seconds) == text
