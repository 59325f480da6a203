"""Runs the site's helper: one process for one host, fed on standard input and watched until it exits.

How many helpers start in a second bounds the whole product, so this keeps to what subprocess starts by vfork: no
`preexec_fn`, no shell, no thread, one poll loop.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from typing import NoReturn

import attrs

from provisioner.contract import ANSWER_LIMIT_BYTES
from provisioner.errors import HostError
from provisioner.text import MASK, escaped

#: how much of the end of standard error is kept
STDERR_KEPT_BYTES = 4096
#: how much of the end of that an error's text carries
STDERR_IN_ERROR_CHARACTERS = 500
#: how often a running helper's cancellation is looked for
CANCEL_CHECK_SECONDS = 0.1
#: how often its exit is looked for where the system does not tell
EXIT_CHECK_SECONDS = 0.01
#: how long a killed helper is waited for; one that hangs in the kernel must not take a worker with it
KILL_WAIT_SECONDS = 2.0

#: one read; the usual size of a pipe, below the size from which malloc asks the kernel each time
_READ_BYTES = 64 * 1024
#: reads that empty the largest pipe a process may make for itself without privileges (1 MiB), and see its end
_READS_TO_EMPTY = 17


class HelperError(HostError):
    """The helper did not start, did not finish or failed; the text says which and ends with its standard error."""


class ExitError(HelperError):
    """The helper ended by itself, with another exit code than 0.

    :ivar code: the exit code
    """

    def __init__(self, text: str, code: int) -> None:
        self.code = code
        super().__init__(text)


@attrs.frozen
class Output:
    """What a helper that succeeded left behind.

    :ivar stdout: its standard output, at least one byte; holds secrets
    :ivar stderr: the end of its standard error on one line, fit for a log; may be empty
    """

    stdout: bytes = attrs.field(repr=False)
    stderr: str = attrs.field(repr=False)


def run(
    command: Sequence[str],
    document: bytes,
    *,
    timeout: float,
    cancelled: Callable[[], bool],
    secrets: Collection[str] = (),
) -> Output:
    """Run the helper to its end and return what it printed.

    The helper gets a session, and so a process group, of its own, and no descriptor but the standard three. It may
    ignore its input. What it leaves running in the background is left alone, and the output is what had arrived when
    the helper itself exited; but on timeout, cancellation and too much output the whole group is killed.

    :param command: program (looked up in `PATH`) and arguments, at least one element; no shell sees them
    :param document: all of its standard input
    :param timeout: seconds it may run
    :param cancelled: asked before the start and every `CANCEL_CHECK_SECONDS`; True ends the helper
    :param secrets: texts that are masked in its standard error: helpers like to quote what they choke on
    :raises HelperError: it did not start, was killed here, printed too much or nothing, or exited with anything but 0
    """
    started = time.monotonic()
    if cancelled():
        raise HelperError("the helper was not started: the work on this host was cancelled")
    with ExitStack() as ours:
        streams, process = _start(command, document, secrets, ours)
        try:
            _attend(process, streams, _exit_descriptor(process, ours), started + timeout, cancelled)
        finally:
            if process.returncode is None:
                _kill(process)
    if process.returncode > 0:
        raise ExitError(_with_complaints(f"the helper {_ending(process.returncode)}", streams), process.returncode)
    if process.returncode < 0:
        _fail(f"the helper {_ending(process.returncode)}", streams)
    if not streams.output:
        _fail("the helper printed nothing: zero bytes on its standard output", streams)
    return Output(bytes(streams.output), streams.complaints())


def one_line(raw: bytes | bytearray) -> str:
    """Output made fit for a log: lines joined with `|`, undecodable bytes replaced, control characters escaped."""
    lines = (line.strip() for line in raw.decode("utf-8", "replace").splitlines())
    return " | ".join(escaped(line) for line in lines if line)


@attrs.define
class _Streams:
    """Our ends of the helper's pipes, none of which ever blocks, and what went through them."""

    stdin: io.FileIO
    stdout: io.FileIO
    stderr: io.FileIO
    unsent: memoryview = attrs.field(repr=False)
    output: bytearray = attrs.field(factory=bytearray, repr=False)
    errors: bytearray = attrs.field(factory=bytearray, repr=False)
    secrets: Collection[str] = attrs.field(factory=tuple, repr=False)

    def complaints(self) -> str:
        """The end of its standard error, fit for a log."""
        errors = bytes(self.errors)
        forms = {form.encode() for secret in self.secrets if secret for form in (secret, json.dumps(secret)[1:-1])}
        for form in sorted(forms, key=len, reverse=True):
            errors = errors.replace(form, MASK.encode())
        if forms and len(self.errors) == STDERR_KEPT_BYTES:  # it may begin in the middle of one
            errors = errors[max(map(len, forms)) - 1 :]
        return one_line(errors)

    def send(self) -> bool:
        """Write what fits; False once there is nothing more to be written, or nobody to read it."""
        with contextlib.suppress(BrokenPipeError):
            self.unsent = self.unsent[self.stdin.write(self.unsent) or 0 :]
            if self.unsent:
                return True
        self.stdin.close()
        return False

    def take(self, stream: io.FileIO) -> bool:
        """Read once what there is, if anything; False at the end of the stream."""
        data = stream.read(_READ_BYTES)
        if not data:
            return data is None
        if stream is self.stderr:
            self.errors += data
            del self.errors[:-STDERR_KEPT_BYTES]
        else:
            self.output += data
            if len(self.output) > ANSWER_LIMIT_BYTES:
                _fail(f"the helper printed more than {ANSWER_LIMIT_BYTES} bytes on its standard output", self)
        return True

    def take_rest(self) -> None:
        """Read what has arrived and no more: a process left in the background may write for ever."""
        for stream in (self.stdout, self.stderr):
            for _ in range(_READS_TO_EMPTY):
                if not self.take(stream):
                    break


def _start(
    command: Sequence[str], document: bytes, secrets: Collection[str], ours: ExitStack
) -> tuple[_Streams, subprocess.Popen[bytes]]:
    """Start the helper; closing `ours` closes our ends of its pipes."""
    try:
        with ExitStack() as theirs:
            stdin_end, stdin = _pipe(theirs, ours, "w")
            stdout_end, stdout = _pipe(theirs, ours, "r")
            stderr_end, stderr = _pipe(theirs, ours, "r")
            streams = _Streams(stdin, stdout, stderr, memoryview(document), secrets=secrets)
            # nearly every document fits into the pipe: then it has been delivered before the helper even starts
            streams.send()
            process = subprocess.Popen(
                command, stdin=stdin_end, stdout=stdout_end, stderr=stderr_end, close_fds=True, start_new_session=True
            )
    except (OSError, ValueError) as error:
        raise HelperError(f"the helper {command[0]} could not be started: {_obstacle(command[0], error)}") from error
    return streams, process


def _pipe(theirs: ExitStack, ours: ExitStack, mode: str) -> tuple[int, io.FileIO]:
    """A new pipe: their end of it, and ours, which does not block; each is closed with its stack.

    :param mode: what we do with it, "r" or "w"
    """
    read_end, write_end = os.pipe()
    their_end, our_end = (write_end, read_end) if mode == "r" else (read_end, write_end)
    theirs.callback(os.close, their_end)
    stream = ours.enter_context(io.FileIO(our_end, mode))
    os.set_blocking(our_end, False)
    return their_end, stream


def _exit_descriptor(process: subprocess.Popen[bytes], ours: ExitStack) -> int | None:
    """A descriptor that is readable once the process has exited, None where there is no such thing."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except (AttributeError, OSError):
        return None
    ours.callback(os.close, descriptor)
    return descriptor


def _attend(
    process: subprocess.Popen[bytes],
    streams: _Streams,
    exit_descriptor: int | None,
    deadline: float,
    cancelled: Callable[[], bool],
) -> None:
    """Feed and read the helper until it has exited, whoever may still hold its pipes."""
    poller = select.poll()
    readable = {stream.fileno(): stream for stream in (streams.stdout, streams.stderr)}
    for descriptor in readable:
        poller.register(descriptor, select.POLLIN)
    if not streams.stdin.closed:
        poller.register(streams.stdin, select.POLLOUT)
    if exit_descriptor is not None:
        poller.register(exit_descriptor, select.POLLIN)
    longest_wait = EXIT_CHECK_SECONDS if exit_descriptor is None else CANCEL_CHECK_SECONDS
    while process.returncode is None:
        left = deadline - time.monotonic()
        if left <= 0:
            _fail("the helper was killed: it had not finished in the time it is given (helper_timeout)", streams)
        if cancelled():
            _fail("the helper was killed: the work on this host was cancelled", streams)
        for descriptor, _ in poller.poll(min(left, longest_wait) * 1000):
            if descriptor == exit_descriptor:
                continue
            stream = readable.get(descriptor)
            if not (streams.take(stream) if stream else streams.send()):
                poller.unregister(descriptor)
        process.poll()
    streams.take_rest()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the helper's group. It has not been waited for, so its number cannot be anyone else's yet."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    # one that outlives this (it changed its user, or hangs in the kernel) is reaped by subprocess at a later start
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILL_WAIT_SECONDS)


def _fail(what: str, streams: _Streams) -> NoReturn:
    raise HelperError(_with_complaints(what, streams))


def _with_complaints(what: str, streams: _Streams) -> str:
    tail = streams.complaints()
    if len(tail) > STDERR_IN_ERROR_CHARACTERS:
        tail = "…" + tail[-STDERR_IN_ERROR_CHARACTERS:]
    return f"{what}; its standard error: {tail}" if tail else what


def _ending(returncode: int) -> str:
    if returncode > 0:
        return f"exited with status {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"


def _obstacle(program: str, error: OSError | ValueError) -> str:
    """Why a program does not start, in words that tell the operator what to change."""
    if not isinstance(error, OSError):
        return "its command line holds a NUL character"
    if error.errno == errno.ENOENT:
        return "the interpreter in its first line does not exist" if shutil.which(program) else "it does not exist"
    if error.errno == errno.EACCES:
        return "it, or the interpreter in its first line, is not executable"
    if error.errno == errno.ENOEXEC:
        return "it is not a program, nor a script with an interpreter in its first line"
    return error.strerror or type(error).__name__
