"""The pid file names the daemon that runs, and only one daemon at a time can have it."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from provisioner import pidfile
from provisioner.errors import ProvisionerError
from provisioner.pidfile import PidFile

HOLDER = """
import sys
from pathlib import Path
from provisioner.errors import ProvisionerError
from provisioner.pidfile import PidFile

try:
    with PidFile(Path(sys.argv[1])):
        print("held", flush=True)
        sys.stdin.read()
except ProvisionerError as error:
    print(error, flush=True)
"""


@contextmanager
def holder(path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run another process that wants the file, until the block ends; give it and what it said."""
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "provisioner.pid"


def test_a_named_pipe_in_its_place_is_not_waited_for(path: Path) -> None:
    os.mkfifo(path)
    assert pidfile.owner(path) is None


def test_it_holds_the_number_of_the_process_while_it_runs(path: Path) -> None:
    with PidFile(path):
        assert path.read_text() == f"{os.getpid()}\n"
        assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert list(path.parent.iterdir()) == []


def test_everybody_may_read_it_whatever_the_umask(path: Path) -> None:
    before = os.umask(0o077)
    try:
        with PidFile(path):
            assert stat.S_IMODE(path.stat().st_mode) == 0o644
    finally:
        os.umask(before)


def test_it_goes_when_the_daemon_fails(path: Path) -> None:
    with pytest.raises(RuntimeError), PidFile(path):
        raise RuntimeError("a bug")
    assert not path.exists()


def test_the_file_of_a_live_process_is_left_alone(path: Path) -> None:
    with holder(path) as (process, said):
        assert said == "held"
        with pytest.raises(ProvisionerError) as caught, PidFile(path):
            pytest.fail("two hold it")
        assert str(caught.value) == f"pid file {path}: another provisioner is running, process {process.pid}"
        assert path.read_text() == f"{process.pid}\n"
        assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_the_file_of_a_killed_process_is_replaced(path: Path) -> None:
    with holder(path) as (process, said):
        assert said == "held"
        process.kill()
        process.wait()
    assert path.read_text() == f"{process.pid}\n"
    with PidFile(path):
        assert path.read_text() == f"{os.getpid()}\n"


@pytest.mark.parametrize("content", [f"{os.getppid()}\n", "1\n", "", "not a number", "\udcff"])
def test_a_stale_file_is_replaced_though_its_number_is_another_process_by_now(path: Path, content: str) -> None:
    path.write_bytes(content.encode(errors="surrogateescape"))
    with PidFile(path):
        assert path.read_text() == f"{os.getpid()}\n"


def test_a_stale_file_is_replaced_as_a_whole(path: Path) -> None:
    path.write_text("99999999\n")
    with path.open() as reader, PidFile(path):
        assert reader.read() == "99999999\n"


def test_another_process_gets_it_afterwards(path: Path) -> None:
    with PidFile(path):
        pass
    with holder(path) as (_, said):
        assert said == "held"


def test_of_many_that_start_at_once_over_a_stale_file_one_gets_it(path: Path) -> None:
    path.write_text("99999999\n")
    start, end = threading.Barrier(8), threading.Barrier(8)
    got: list[bool] = []

    def run() -> None:
        start.wait()
        try:
            with PidFile(path):
                got.append(True)
                end.wait()
        except ProvisionerError:
            got.append(False)
            end.wait()

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == [False] * 7 + [True]
    assert list(path.parent.iterdir()) == []


def test_a_daemon_that_starts_between_a_look_at_the_stale_file_and_its_lock_keeps_its_own(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_text("99999999\n")
    lock = fcntl.flock
    other = PidFile(path)
    locks: list[int] = []

    def start_other_first(descriptor: int, operation: int) -> None:
        locks.append(descriptor)
        if len(locks) == 2:  # the first lock is on one's own file, the second one on the stale file
            other.__enter__()
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", start_other_first)
    with pytest.raises(ProvisionerError, match="another provisioner is running"), PidFile(path):
        pytest.fail("two hold it")
    assert path.read_text() == f"{os.getpid()}\n"
    other.__exit__(None, None, None)
    assert not path.exists()


def test_a_file_that_became_another_ones_is_not_removed(path: Path) -> None:
    with PidFile(path):
        path.unlink()
        path.write_text("123\n")
    assert path.read_text() == "123\n"
    with PidFile(path):
        path.unlink()
        path.write_text(f"{os.getpid()}\n")  # of a process with the same number in another container
    assert path.exists()
    with PidFile(path):
        path.write_text("456\n")
    assert path.read_text() == "456\n"


def test_a_file_that_is_gone_is_no_problem(path: Path) -> None:
    with PidFile(path):
        path.unlink()


def test_a_place_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "link.pid").symlink_to("/etc/passwd")
    (tmp_path / "folder.pid").mkdir()
    for name, reason in [
        ("missing/x.pid", "No such file or directory"),
        ("link.pid", "Too many levels of symbolic links"),
        ("folder.pid", "Is a directory"),
    ]:
        with pytest.raises(ProvisionerError) as caught, PidFile(tmp_path / name):
            pytest.fail("it was written")
        assert str(caught.value) == f"pid file {tmp_path / name}: {reason}"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["folder.pid", "link.pid"]


class TestOwner:
    """Who holds a pid file, seen from another process."""

    def test_nobody_does_when_there_is_none(self, tmp_path: Path) -> None:
        assert pidfile.owner(tmp_path / "pid") is None

    def test_nobody_does_when_it_is_stale(self, tmp_path: Path) -> None:
        path = tmp_path / "pid"
        path.write_text("1\n")
        assert pidfile.owner(path) is None
        with PidFile(path):
            pass

    def test_the_process_that_holds_it_does(self, tmp_path: Path) -> None:
        path = tmp_path / "pid"
        with PidFile(path):
            assert pidfile.owner(path) == str(os.getpid())
            assert pidfile.owner(path) == str(os.getpid())
        assert pidfile.owner(path) is None

    @pytest.mark.parametrize("text", ["", "x", "-1", "12 34"])
    def test_what_is_no_number_is_not_shown(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "pid"
        path.write_text(text)
        with path.open() as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            assert pidfile.owner(path) == "?"

    def test_a_link_is_not_followed(self, tmp_path: Path) -> None:
        (tmp_path / "pid").symlink_to(tmp_path / "other")
        with pytest.raises(ProvisionerError, match="pid file"):
            pidfile.owner(tmp_path / "pid")
