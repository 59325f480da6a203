"""Credentials in files: named the way the configuration names them, and read again when they are replaced on disk."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import attrs
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from provisioner.errors import ProvisionerError

LOG = logging.getLogger(__name__)

#: How often at most it is looked whether files were replaced that every request needs.
LOOK_SECONDS = 0.1
#: How soon replaced files that could not be used are tried again, unless they change: it may take a while to read them.
RETRY_SECONDS = 10.0
#: How long a thread waits for another one that looks, when nobody has looked for long; their file system may hang.
LOOK_WAIT_SECONDS = 1.0

_SEED = re.compile(r"[0-9a-fA-F]{64}")

_T = TypeVar("_T")


class CredentialsError(ProvisionerError):
    """A file of credentials is of no use.

    :ivar problems: one line each, beginning with setting and file; nothing of what is in the file
    """

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(self.problems))


@attrs.frozen
class File:
    """A file that a setting names.

    :ivar path: may be empty, when the setting is
    """

    setting: str
    path: str

    def __str__(self) -> str:
        return f"{self.setting} ({self.path or 'not set'})"

    def read(self) -> bytes:
        """What is in it.

        :raises CredentialsError: it is not configured, not there, or cannot be read
        """
        if not self.path:
            raise self.error("not set, wanted the name of a file")
        try:
            return Path(self.path).read_bytes()
        except OSError as error:
            raise self.error(error.strerror or type(error).__name__) from None
        except ValueError:
            raise self.error("not the name of a file") from None

    def read_seed(self) -> Ed25519PrivateKey:
        """The Ed25519 key whose seed is in it.

        :raises CredentialsError: there is none in it, or as in :meth:`read`
        """
        text = self.read().decode("ascii", "replace").strip()
        if not _SEED.fullmatch(text):
            raise self.error("holds no seed, which is 64 hexadecimal digits")
        return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(text))

    def error(self, problem: str) -> CredentialsError:
        """The exception for something that is wrong with this file."""
        path = f"{self.path}: " if self.path else ""
        return CredentialsError([f"{self.setting}: {path}{problem}"])


class Cached(Generic[_T]):
    """What some files hold now, read again when one of them was replaced. For any thread.

    :param load: reads them
    """

    def __init__(self, files: Sequence[File], load: Callable[[], _T]) -> None:
        self._files = files
        self._load = load
        # replaced as a whole
        self._known: tuple[tuple[object, ...], _T] | None = None

    def __call__(self) -> _T:
        """What they hold.

        :raises CredentialsError: by `load`, for as long as the files are not right
        """
        known = self._known
        state = _states(self._files)
        if known is None or known[0] != state:
            self._known = known = (state, self._load())
        return known[1]


class LastGood(Generic[_T]):
    """What some files hold, or have held when they were all right the last time. For any thread.

    For what every request needs: files that belong together are replaced one after the other, and the first may be
    seen without the second; files may also be replaced by wrong ones. They are looked at every `LOOK_SECONDS` at most.

    :param load: reads them
    :raises CredentialsError: by `load`, which has to succeed once
    """

    def __init__(self, files: Sequence[File], load: Callable[[], _T]) -> None:
        self._files = files
        self._cached = Cached(files, load)
        self._value = self._cached()
        self._lock = threading.Lock()
        self._next_look = time.monotonic() + LOOK_SECONDS
        self._failed: tuple[object, ...] | None = None
        self._again = 0.0

    def __call__(self) -> _T:
        """Never raises."""
        now = time.monotonic()
        if now < self._next_look:
            return self._value
        # one thread looks; the others go on with what there is, unless it may be old
        wait = LOOK_WAIT_SECONDS if now >= self._next_look + LOOK_SECONDS else 0.0
        if self._lock.acquire(timeout=wait):
            try:
                if time.monotonic() >= self._next_look:
                    self._look()
                    self._next_look = time.monotonic() + LOOK_SECONDS
            finally:
                self._lock.release()
        return self._value

    def _look(self) -> None:
        state = _states(self._files)
        if state == self._failed and time.monotonic() < self._again:
            return
        try:
            value = self._cached()
        except CredentialsError as error:
            if state != self._failed:
                LOG.warning("replaced on disk by what cannot be used, the one read before stays in use: %s", error)
            self._failed, self._again = state, time.monotonic() + RETRY_SECONDS
            return
        self._failed = None
        if value is not self._value:
            self._value = value
            LOG.info("read again, since it was replaced on disk: %s", ", ".join(map(str, self._files)))


def _states(files: Iterable[File]) -> tuple[object, ...]:
    """What tells files from replaced ones. Look before reading: one that changes in between is read again then."""
    return tuple(_state(file.path) for file in files)


def _state(path: str) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)  # noqa: PTH116 - done for every request
    except (OSError, ValueError):
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino


def attempt(problems: list[str], make: Callable[[], _T]) -> _T | None:
    """The outcome of `make`; what is wrong with files goes into `problems` instead."""
    try:
        return make()
    except CredentialsError as error:
        problems += error.problems
        return None
