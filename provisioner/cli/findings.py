"""What `check` finds: one line each, good or bad, whatever goes wrong on the way."""

from __future__ import annotations

import contextlib
import enum
import json
import logging
from collections.abc import Callable, Iterator
from types import TracebackType

import attrs

from provisioner.choria.connector import Connector
from provisioner.errors import ConfigurationError, ProvisionerError
from provisioner.text import plain_line


class Level(enum.StrEnum):
    """How good or bad it is."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@attrs.frozen
class Finding:
    """One line of the report.

    :ivar subject: what it is about, in a word or two
    """

    level: Level
    subject: str
    text: str


@attrs.define
class Report:
    """Takes findings, from any thread, and has each shown at once.

    In a ``with`` block what the parts of this program warn of in the log becomes findings, too.
    """

    show: Callable[[Finding], None]
    findings: list[Finding] = attrs.field(factory=list, init=False)
    _subject: str = attrs.field(default="", init=False)
    _handler: logging.Handler = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._handler = _FindingHandler(self)

    def ok(self, subject: str, text: str) -> None:
        """Something is as it should be."""
        self._add(Level.OK, subject, text)

    def warning(self, subject: str, text: str) -> None:
        """Something may be wrong, or will be."""
        self._add(Level.WARNING, subject, text)

    def error(self, subject: str, text: str) -> None:
        """With this the daemon would not start, or not do its work."""
        self._add(Level.ERROR, subject, text)

    def count(self, level: Level) -> int:
        """How many there are of a level."""
        return sum(finding.level is level for finding in self.findings)

    @contextlib.contextmanager
    def part(self, subject: str) -> Iterator[None]:
        """Whatever ends the block becomes a finding, so that all other parts are still checked."""
        self._subject = subject
        try:
            yield
        except ConfigurationError as error:
            for problem in error.problems:
                self.error(subject, problem)
        except ProvisionerError as error:
            self.error(subject, str(error))
        except OSError as error:  # a file that may not be looked at, say
            self.error(subject, ": ".join(str(part) for part in (error.filename, error.strerror) if part))
        except Exception as error:  # noqa: BLE001 - a defect in one check must not hide what the others find
            # its text may hold anything
            self.error(subject, f"could not be checked, for a defect of this program: {type(error).__name__}")

    def log_entry(self, text: str) -> None:
        """What was written to the log about the present part."""
        self.warning(self._subject, text)

    def as_json(self) -> str:
        """The whole report for programs."""
        errors, warnings = self.count(Level.ERROR), self.count(Level.WARNING)
        findings = [attrs.asdict(finding) for finding in self.findings]
        return json.dumps({"ok": not errors, "errors": errors, "warnings": warnings, "findings": findings}, indent=2)

    def __enter__(self) -> Report:
        logger = logging.getLogger()
        logger.addHandler(self._handler)
        # that a broker cannot be connected to is told by an exception as well
        logging.getLogger(Connector.__module__).setLevel(logging.ERROR)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        logging.getLogger().removeHandler(self._handler)
        logging.getLogger(Connector.__module__).setLevel(logging.NOTSET)

    def _add(self, level: Level, subject: str, text: str) -> None:
        finding = Finding(level, subject, plain_line(text))
        self.findings.append(finding)
        self.show(finding)


class _FindingHandler(logging.Handler):
    def __init__(self, report: Report) -> None:
        super().__init__(logging.WARNING)
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        self._report.log_entry(record.getMessage())
