"""Durations: as Choria's configuration files write them, and for people."""

from __future__ import annotations

import re

from provisioner.errors import ProvisionerError

#: The longest duration, in seconds: what Go's 64 bits of nanoseconds hold, about 292 years.
MAX_SECONDS = (2**63 - 1) / 1e9

# Go takes both the micro sign and the Greek letter for micro.
_GO_UNITS = {"ns": 1e-9, "us": 1e-6, "\u00b5s": 1e-6, "\u03bcs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DAY = 86400.0
_LONG_UNITS = {"d": _DAY, "D": _DAY, "w": 7 * _DAY, "W": 7 * _DAY, "M": 30 * _DAY, "y": 365 * _DAY, "Y": 365 * _DAY}

_NUMBER = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_GO_PART = re.compile(f"({_NUMBER})({'|'.join(_GO_UNITS)})")
_GO_DURATION = re.compile(f"([+-]?)((?:{_GO_PART.pattern})+)")
_LONG_DURATION = re.compile(f"([+-]?{_NUMBER})([{''.join(_LONG_UNITS)}])")
_BARE_NUMBER = re.compile(f"[+-]?{_NUMBER}")


class DurationError(ProvisionerError):
    """A text is not a duration; ``str()`` says what would be one."""


def parse(text: str) -> float:
    """Turn a duration into seconds.

    :param text: a Go duration (``90s``, ``1h30m``, ``1.5h``), or one number with ``d``/``D`` (24 hours), ``w``/``W``
        (7 days), ``M`` (a month of 30 days, not a minute) or ``y``/``Y`` (365 days); white space around it is dropped
    :returns: seconds, negative when the text starts with a minus sign
    :raises DurationError: for anything else, a number without a unit, ``1H`` and an empty text included
    """
    text = text.strip()
    if match := _LONG_DURATION.fullmatch(text):
        seconds = float(match[1]) * _LONG_UNITS[match[2]]
    elif match := _GO_DURATION.fullmatch(text):
        seconds = sum(float(number) * _GO_UNITS[unit] for number, unit in _GO_PART.findall(match[2]))
        seconds = -seconds if match[1] == "-" else seconds
    elif _BARE_NUMBER.fullmatch(text):
        raise DurationError("a number with a unit, as in 90s, 5m, 1h30m or 1d")
    else:
        raise DurationError("a duration, as in 90s, 5m, 1h30m or 1d")
    if abs(seconds) > MAX_SECONDS:
        raise DurationError("a duration of less than 292 years")
    return seconds


def is_month(text: str) -> bool:
    """Whether a duration is given in months: ``1M``, which many mean to be a minute."""
    return text.rstrip().endswith("M")


def span(seconds: float) -> str:
    """A time for people: the two largest units of it."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02}h"
