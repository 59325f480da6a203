"""The daemon's log: where it goes, how a line looks, and that writing it never harms the daemon.

A record becomes exactly one line, whatever its message holds, for much of what is logged came from the network; in
debug mode the indented lines of a traceback may follow. A destination that does not take what is written (a closed
pipe, a full disk, a reader that stands still) costs lines, never a thread.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import select
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from provisioner.errors import ProvisionerError
from provisioner.text import escaped

#: The values of the ``loglevel`` setting.
LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}

#: How long a line may wait for a reader that stands still. While lines are being lost, none waits at all.
WRITE_LIMIT_SECONDS = 1.0

#: A message is cut here: no node can fill the disk with one of its replies.
MESSAGE_LIMIT_CHARACTERS = 8192

#: So much at least fits into a pipe that can be written to.
CHUNK_BYTES = select.PIPE_BUF

_STREAMS = {"": 1, "stdout": 1, "/dev/stdout": 1, "stderr": 2, "/dev/stderr": 2}
_DISCARD = "discard"
_CLOSED = -1
_FILE_MODE = 0o644
#: Appending keeps the file whole when it is truncated by a rotation. Non-blocking matters for named pipes only.
_FILE_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK

#: Levels below the number, the Go original's name for them, and syslog's number.
_SEVERITIES = (
    (logging.INFO, "debug", 7),
    (logging.WARNING, "info", 6),
    (logging.ERROR, "warning", 4),
    (logging.CRITICAL, "error", 3),
)
_FATAL = ("fatal", 2)

#: What every record has; anything else was given as ``extra``.
_STANDARD_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

_PACKAGE = "provisioner"

LOG = logging.getLogger(_PACKAGE)


def setup(*, destination: str, level: str, log_format: str | None, debug: bool) -> None:
    """Send all logging of the process, its uncaught exceptions and Python's warnings to one place.

    Extras of a record (``extra={"identity": ...}``) become fields of the line; ``component`` is the logger's name
    within this package. Exceptions are told by type and text; at level debug with their traceback. A later call
    replaces what an earlier one set up.

    :param destination: ``stdout`` (also when empty), ``stderr`` or ``discard`` in any case, else a file to append to,
        which is opened anew when it is moved away
    :param level: one of :data:`LEVELS`
    :param log_format: ``json`` or ``text``; None means text for a terminal or the journal, else JSON
    :param debug: level debug, whatever ``level`` says
    :raises ProvisionerError: when the file cannot be opened; then all stays as it was
    """
    number = logging.DEBUG if debug else LEVELS[level]
    output = _open(destination)
    handler = Handler(output, _renderer(output.descriptor, log_format, tracebacks=number == logging.DEBUG))
    root = logging.getLogger()
    for earlier in [each for each in root.handlers if isinstance(each, Handler)]:
        root.removeHandler(earlier)
        earlier.close()
    root.addHandler(handler)
    root.setLevel(number)
    sys.excepthook = _log_uncaught
    sys.unraisablehook = _log_unraisable
    threading.excepthook = _log_end_of_thread
    warnings.showwarning = _log_warning
    atexit.unregister(_flush_standard_streams)
    atexit.register(_flush_standard_streams)


class Reopening:
    """Has the log file opened anew on request, as after a rotation that moved it away.

    Every line looks for that itself. This is for a daemon that has nothing to say, and for the program that is about to
    compress the old file.
    """

    _requested = False

    def request(self) -> None:
        """Ask for it. Safe in a signal handler."""
        self._requested = True

    def __call__(self) -> None:
        """Do it if it was asked for."""
        if not self._requested:
            return
        self._requested = False
        for handler in logging.getLogger().handlers:
            if isinstance(handler, Handler):
                handler.reopen()
        LOG.info("opened the log anew, as asked")


class Handler(logging.Handler):
    """Writes records to an output; counts those that it does not take, and tells the number when it does again."""

    def __init__(self, output: Output, render: Callable[[logging.LogRecord], str]) -> None:
        super().__init__()
        self._output = output
        self._render = render
        # Both under the handler's lock, which every call of emit holds.
        self._lost = 0
        self._reason = ""

    def emit(self, record: logging.LogRecord) -> None:
        data = self._line(record)
        if self._lost:
            data = self._line(_record(logging.WARNING, "%d log lines were lost: %s", self._lost, self._reason)) + data
        try:
            self._output.write(data, limit=0.0 if self._lost else WRITE_LIMIT_SECONDS)
        except OSError as error:
            self._lost += 1
            self._reason = error.strerror or type(error).__name__
        else:
            self._lost = 0

    def reopen(self) -> None:
        """Go on in the file that is under the log's path now."""
        try:
            with self.lock or contextlib.nullcontext():
                self._output.follow()
        except OSError as error:
            LOG.warning("cannot open the log anew, going on in the old file: %s", error.strerror)

    def close(self) -> None:
        with self.lock or contextlib.nullcontext():
            self._output.close()
        super().close()

    def _line(self, record: logging.LogRecord) -> bytes:
        try:
            text = self._render(record)
        except Exception as error:  # noqa: BLE001 - the arguments are anybody's objects, and a log call must not raise
            where = f"{record.pathname}:{record.lineno}"
            text = self._render(_record(logging.ERROR, "bad log call at %s: %s", where, type(error).__name__))
        return f"{text}\n".encode("utf-8", "backslashreplace")


class Output:
    """A file descriptor that lines are written to.

    :param descriptor: open for writing
    :param path: of a file that may be moved away, when the descriptor is one's own
    """

    def __init__(self, descriptor: int, path: Path | None = None) -> None:
        self.descriptor = descriptor
        self._path = path
        self._status = os.fstat(descriptor) if path else None
        self._inside_a_line = False

    def write(self, line: bytes, *, limit: float) -> None:
        """Write all, waiting up to ``limit`` seconds for a reader.

        :raises OSError: when that is impossible; a part may be written, which is ended before the next line
        """
        if self.descriptor == _CLOSED:  # a line of another thread that comes too late
            return
        with contextlib.suppress(OSError):  # then on with the old one: the next line tries again
            self.follow()
        deadline = time.monotonic() + limit
        rest = memoryview(b"\n" + line if self._inside_a_line else line)
        while rest:
            rest = rest[self._write(rest[:CHUNK_BYTES], deadline) :]
            self._inside_a_line = bool(rest)

    def _write(self, chunk: memoryview, deadline: float) -> int:
        if self._path is None:
            _wait_until_writable(self.descriptor, deadline - time.monotonic())
            return os.write(self.descriptor, chunk)
        while True:  # one's own, which never blocks: others may have filled it after it was looked at
            with contextlib.suppress(BlockingIOError):
                return os.write(self.descriptor, chunk)
            _wait_until_writable(self.descriptor, deadline - time.monotonic())
            if time.monotonic() > deadline:
                raise BlockingIOError(0, "nobody reads them")

    def follow(self) -> None:
        """Open the file anew when there is another one under its path, or none.

        :raises OSError: when that is impossible; then the old one stays
        """
        if self._path is None or self._is_in_place(self._path):
            return
        descriptor = os.open(self._path, _FILE_FLAGS, _FILE_MODE)
        os.close(self.descriptor)
        self.descriptor = descriptor
        self._status = os.fstat(descriptor)
        self._inside_a_line = False

    def _is_in_place(self, path: Path) -> bool:
        try:
            return self._status is not None and os.path.samestat(path.stat(), self._status)
        except OSError:
            return False

    def close(self) -> None:
        """Close the descriptor if it is one's own."""
        if self._path is not None and self.descriptor != _CLOSED:
            os.close(self.descriptor)
            self.descriptor = _CLOSED


def file(destination: str) -> Path | None:
    """The file that a destination of :func:`setup` names; None when it names a stream, or that nothing is wanted."""
    return None if destination.lower() in (*_STREAMS, _DISCARD) else Path(destination)


def _open(destination: str) -> Output:
    descriptor = _STREAMS.get(destination.lower())
    # None when the process was started without it: by now the number may mean anything, a broker's socket even.
    if descriptor is not None and (sys.__stdout__ if descriptor == 1 else sys.__stderr__) is not None:
        return Output(descriptor)
    path = (file(destination) or Path(os.devnull)).absolute()
    try:
        return Output(os.open(path, _FILE_FLAGS, _FILE_MODE), path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ProvisionerError(f"logfile: cannot open {str(path)!r}: {reason}") from error


def _wait_until_writable(descriptor: int, seconds: float) -> None:
    """Return when a write of :data:`CHUNK_BYTES` does not block, also when it is going to fail.

    The descriptor itself stays as it is: others share it, and would be surprised by one that does not block.
    """
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    if not poll.poll(max(0.0, seconds) * 1000):
        raise BlockingIOError(0, "nobody reads them")


def _renderer(descriptor: int, log_format: str | None, *, tracebacks: bool) -> Callable[[logging.LogRecord], str]:
    journal = _is_journal(descriptor)
    if log_format is None:
        log_format = "text" if journal or os.isatty(descriptor) else "json"
    if log_format == "json":
        return partial(_render_json, tracebacks=tracebacks)
    return partial(_render_text, tracebacks=tracebacks, journal=journal)


def _is_journal(descriptor: int) -> bool:
    """Tell whether systemd says that this very descriptor leads to its journal."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def _render_json(record: logging.LogRecord, *, tracebacks: bool) -> str:
    fields = {
        "time": _time(record),
        "level": _severity(record)[0],
        "component": _component(record),
        "msg": _message(record),
    }
    if tracebacks and (lines := _traceback(record)):
        fields["traceback"] = "\n".join(lines)
    # Once more at the end: an extra may not pass for one of ours.
    return json.dumps(fields | _extras(record) | fields, default=str)


def _render_text(record: logging.LogRecord, *, tracebacks: bool, journal: bool) -> str:
    level, priority = _severity(record)
    prefix = f"<{priority}>" if journal else ""
    start = "" if journal else f"{_time(record)} {level.upper():<7} "
    fields = "".join(f" {name}={_quoted(value)}" for name, value in _extras(record).items())
    lines = [f"{start}{_component(record)}: {_message(record)}{fields}"]
    if tracebacks:
        lines += [f"    {line}" for line in _traceback(record)]
    return "\n".join(prefix + escaped(line) for line in lines)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")


def _severity(record: logging.LogRecord) -> tuple[str, int]:
    for limit, name, priority in _SEVERITIES:
        if record.levelno < limit:
            return name, priority
    return _FATAL


def _component(record: logging.LogRecord) -> str:
    return record.name.removeprefix(f"{_PACKAGE}.")


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(record).items()
        if name not in _STANDARD_ATTRIBUTES and value is not None and value != ""
    }


def _message(record: logging.LogRecord) -> str:
    message = record.getMessage()
    if (error := _error(record)) is not None:
        message = f"{message}: {_summary(error)}"
    if len(message) > MESSAGE_LIMIT_CHARACTERS:
        message = f"{message[:MESSAGE_LIMIT_CHARACTERS]}..."
    return message


def _error(record: logging.LogRecord) -> BaseException | None:
    return record.exc_info[1] if record.exc_info else None


def _summary(error: BaseException) -> str:
    """Give type and text, and for an error that nobody expected the place, too: there may be no other trace of it."""
    summary = ": ".join(part for part in (type(error).__name__, str(error)) if part)
    if isinstance(error, ProvisionerError) or error.__traceback__ is None:
        return summary
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    return f"{summary} ({Path(frame.f_code.co_filename).name}:{line})"


def _traceback(record: logging.LogRecord) -> list[str]:
    error = _error(record)
    if error is None:
        return []
    return "".join(traceback.format_exception(error)).rstrip("\n").split("\n")


def _quoted(value: object) -> str:
    text = str(value)
    plain = text.isprintable() and not any(character in text for character in ' "=\\')
    return text if plain else json.dumps(text)


def _record(level: int, message: str, *arguments: object) -> logging.LogRecord:
    return logging.LogRecord(__name__, level, __file__, 0, message, arguments, None)


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        LOG.critical("uncaught exception", exc_info=(kind, error, trace))


def _log_unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    message = unraisable.err_msg or "exception ignored in"
    LOG.error("%s %r", message, unraisable.object, exc_info=unraisable.exc_value)


def _log_end_of_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_type is not SystemExit:
        name = args.thread.name if args.thread else "?"
        LOG.error("thread %s ended by an exception", name, exc_info=args.exc_value)


def _log_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,  # noqa: ARG001 - Python prescribes the signature
    line: str | None = None,  # noqa: ARG001
) -> None:
    logging.getLogger("py.warnings").warning("%s: %s (%s:%d)", category.__name__, message, filename, lineno)


def _flush_standard_streams() -> None:
    """Flush what was printed while a failure can still be dealt with: Python itself would make exit code 120 of it."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
