"""The file that tells an init script which process the daemon is, and keeps a second daemon from starting beside it."""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
from pathlib import Path
from types import TracebackType

from provisioner.errors import ProvisionerError

#: Anybody may read it, status scripts do.
FILE_MODE = 0o644

#: Neither a symbolic link is followed nor a named pipe waited for: the folder may be open to others.
_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

LOG = logging.getLogger(__name__)


class PidFile:
    """Holds the pid file while in its ``with`` block.

    A lock on the file says whether its owner lives; it goes with the process, however that ends. The number in the file
    says nothing about that, for after a crash or in a container it may be another process's by now. The file appears
    under its name complete and locked, so that neither a reader nor another daemon ever sees it half made.

    :param path: where; its folder exists
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._text = ""
        self._descriptor = -1

    def __enter__(self) -> PidFile:
        """Take the file.

        :raises ProvisionerError: when another live process holds it, or it cannot be written
        """
        self._text = f"{os.getpid()}\n"
        try:
            self._descriptor = _take(self._path, self._text)
        except OSError as error:
            raise ProvisionerError(f"pid file {self._path}: {error.strerror}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the file if it is still the one that was written."""
        try:
            if _is_under(self._path, self._descriptor) and self._path.read_text() == self._text:
                self._path.unlink()
        except (OSError, ValueError) as problem:
            LOG.warning("cannot remove pid file %s: %s", self._path, problem)
        finally:
            os.close(self._descriptor)


def owner(path: Path) -> str | None:
    """Which live process holds a pid file, as a text: its number, or ``?``; None when none does.

    :raises ProvisionerError: when the file cannot be looked at
    """
    try:
        descriptor = os.open(path, _OPEN_FLAGS)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ProvisionerError(f"pid file {path}: {error.strerror}") from error
    try:
        # shared and for a moment only
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _number(descriptor)
    finally:
        os.close(descriptor)
    return None


def _number(descriptor: int) -> str:
    text = os.read(descriptor, 20).decode("ascii", "replace").strip()
    return text if text.isdigit() else "?"


def _take(path: Path, text: str) -> int:
    """Put a locked file with this text under the path; give its descriptor."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    complete = Path(name)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(descriptor, text.encode())
        os.fchmod(descriptor, FILE_MODE)
        while not (_create(complete, path) or _replace(complete, path)):
            pass  # the file came or went in between
    except BaseException:
        os.close(descriptor)
        raise
    finally:
        complete.unlink(missing_ok=True)
    return descriptor


def _create(complete: Path, path: Path) -> bool:
    """Give the file its name if there is none of that name."""
    try:
        path.hardlink_to(complete)
    except FileExistsError:
        return False
    return True


def _replace(complete: Path, path: Path) -> bool:
    """Put the file in the place of a stale one; False when that is gone.

    The stale one stays locked meanwhile: of two daemons that find it, one replaces it and the other one sees a live
    owner.
    """
    try:
        stale = os.open(path, _OPEN_FLAGS)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(stale, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_under(path, stale):
            return False
        complete.rename(path)
    except BlockingIOError:
        raise ProvisionerError(f"pid file {path}: another provisioner is running, process {_number(stale)}") from None
    finally:
        os.close(stale)
    return True


def _is_under(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False
