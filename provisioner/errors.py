"""The root of the exception hierarchy.

Everything that may go wrong in operation is a :class:`ProvisionerError`: its text is one line, fit for an operator,
free of secrets. Anything else that reaches a thread's outermost frame is a bug and is logged as one.
"""

from __future__ import annotations

from collections.abc import Iterable


class ProvisionerError(Exception):
    """An expected failure; ``str()`` gives the one line to log."""


class ConfigurationError(ProvisionerError):
    """One or more problems in a configuration file, all of them found in one pass.

    :ivar problems: one line each: file, line and key where known, the value given, what would be right
    """

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(self.problems))


class HostError(ProvisionerError):
    """One host could not be provisioned in this cycle; it is retried when it is sighted again.

    :ivar hold: seconds in which trying again is of no use
    :ivar request_id: of the request that failed, as the server logs it; empty when it was no request
    """

    hold = 0.0
    request_id = ""


class SoftError(HostError):
    """The host was left alone for a reason that passes by itself: a deferral, a lock, a pause. Logged at info."""


class DeferredError(SoftError):
    """The helper wants the host to wait."""
