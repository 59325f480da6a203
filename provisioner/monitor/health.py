"""What a check of the daemon's health says."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TypeAlias

import attrs


@attrs.frozen
class Health:
    """The result of one check.

    :ivar problem: one line that says what is wrong; None when all is well
    :ivar note: one line for whoever asks for details
    """

    problem: str | None = None
    note: str = ""


#: Named checks. They are quick and never raise.
Checks: TypeAlias = Mapping[str, Callable[[], Health]]


def complaints(checks: Checks) -> list[str]:
    """What checks have to complain about, one line each."""
    results = ((name, check()) for name, check in checks.items())
    return [f"{name}: {result.problem}" for name, result in results if result.problem]


def of_turn(began: float, limit: float) -> Health:
    """The health of a thread whose present turn began at `began`, by the monotonic clock.

    :param limit: seconds after which the turn is a sign that the thread is stuck
    """
    age = time.monotonic() - began
    problem = f"the turn has lasted {age:.0f} s" if age > limit else None
    return Health(problem, f"last turn {age:.1f} s ago")
