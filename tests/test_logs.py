"""The log: one line per record whatever is in it, in the place it is wanted, and never at the daemon's expense."""

from __future__ import annotations

import json
import logging
import os
import pty
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provisioner import logs
from provisioner.errors import HostError, ProvisionerError
from tests.waiting import PATIENCE_SECONDS

SetUp = Callable[..., Path]


@pytest.fixture(autouse=True)
def _undo_setup(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave the process's logging and hooks as they were."""
    for module, hook in (
        (sys, "excepthook"),
        (sys, "unraisablehook"),
        (threading, "excepthook"),
        (warnings, "showwarning"),
    ):
        monkeypatch.setattr(module, hook, getattr(module, hook))
    monkeypatch.delenv("JOURNAL_STREAM", raising=False)
    root = logging.getLogger()
    level = root.level
    yield
    for handler in [each for each in root.handlers if isinstance(each, logs.Handler)]:
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)


@pytest.fixture
def log_to_file(tmp_path: Path) -> SetUp:
    """Log to a file; give its path."""

    def setup(*, level: str = "info", log_format: str | None = "json", debug: bool = False) -> Path:
        path = tmp_path / "provisioner.log"
        logs.setup(destination=str(path), level=level, log_format=log_format, debug=debug)
        return path

    return setup


def logger(name: str = "provisioner.hosts.listener") -> logging.Logger:
    return logging.getLogger(name)


def objects(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(
    script: str, *arguments: str, stdout: int | BinaryIO = subprocess.PIPE, cwd: Path | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run a script in a process of its own."""
    command = [sys.executable, "-c", script, *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        command,
        stdout=stdout,
        stderr=subprocess.PIPE,
        cwd=cwd,
        env=environment,
        timeout=PATIENCE_SECONDS,
        check=False,
    )


SETUP = """
import logging, sys
from provisioner import logs
logs.setup(destination=sys.argv[1], level="info", log_format="json", debug=False)
log = logging.getLogger("provisioner.test")
"""


# -- the line


def test_a_json_line_has_the_fields_of_the_original(log_to_file: SetUp) -> None:
    path = log_to_file()
    logger().warning("no reply within %d s", 2, extra={"identity": "node1.example.net", "seconds": 1.5})
    (line,) = objects(path)
    assert list(line) == ["time", "level", "component", "msg", "identity", "seconds"]
    moment = datetime.fromisoformat(line.pop("time"))
    assert moment.tzinfo is not None
    assert line == {
        "level": "warning",
        "component": "hosts.listener",
        "msg": "no reply within 2 s",
        "identity": "node1.example.net",
        "seconds": 1.5,
    }


def test_an_identity_is_there_only_when_there_is_one(log_to_file: SetUp) -> None:
    path = log_to_file()
    logger().info("started")
    logger().info("started", extra={"identity": ""})
    logger().info("started", extra={"identity": None})
    assert [sorted(line) for line in objects(path)] == [["component", "level", "msg", "time"]] * 3


def test_levels_have_the_names_of_the_original(log_to_file: SetUp) -> None:
    path = log_to_file(level="debug")
    for level in (5, logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL):
        logger().log(level, "x")
    assert [line["level"] for line in objects(path)] == ["debug", "info", "warning", "error", "fatal"]


@pytest.mark.parametrize(
    ("level", "debug", "expected"),
    [
        ("debug", False, ["debug", "info", "warning", "error", "fatal"]),
        ("info", False, ["info", "warning", "error", "fatal"]),
        ("warn", False, ["warning", "error", "fatal"]),
        ("error", False, ["error", "fatal"]),
        ("fatal", False, ["fatal"]),
        ("fatal", True, ["debug", "info", "warning", "error", "fatal"]),
    ],
)
def test_the_level_is_the_least_that_is_logged(
    log_to_file: SetUp, level: str, debug: bool, expected: list[str]
) -> None:
    path = log_to_file(level=level, debug=debug)
    for number in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL):
        logger().log(number, "x")
    assert [line["level"] for line in objects(path)] == expected


@pytest.mark.parametrize(
    ("name", "component"),
    [
        ("provisioner.host.node", "host.node"),
        ("provisioner", "provisioner"),
        ("provisionery", "provisionery"),
        ("dns.resolver", "dns.resolver"),
    ],
)
def test_the_component_is_the_place_in_the_package(log_to_file: SetUp, name: str, component: str) -> None:
    path = log_to_file()
    logger(name).info("x")
    assert objects(path)[0]["component"] == component


def test_a_text_line_is_for_people(log_to_file: SetUp) -> None:
    path = log_to_file(log_format="text")
    logger().error("could not provision", extra={"identity": "node1", "reason": 'says "no"', "tries": 3})
    time, rest = path.read_text().split(" ", 1)
    assert datetime.fromisoformat(time).tzinfo is not None
    assert rest == 'ERROR   hosts.listener: could not provision identity=node1 reason="says \\"no\\"" tries=3\n'


@pytest.mark.parametrize("log_format", ["json", "text"])
@pytest.mark.parametrize("debug", [False, True])
@given(message=st.text(), identity=st.text(), error=st.text())
def test_nothing_in_a_record_can_forge_a_line(
    log_format: str, debug: bool, message: str, identity: str, error: str
) -> None:
    record = logging.LogRecord("provisioner.x", logging.INFO, __file__, 1, "%s", (message,), None)
    record.identity = identity
    record.exc_info = (HostError, HostError(error), None)
    line = logs._renderer(-1, log_format, tracebacks=debug)(record)
    first, *others = line.split("\n")
    assert line.replace("\n", "").isprintable()
    assert bool(others) == (debug and log_format == "text")
    assert all(other.startswith("    ") for other in others)
    if log_format == "json":
        assert json.loads(first)["msg"].startswith(message)
    else:
        assert first.split(" ", 2)[1] == "INFO"


def test_control_characters_are_shown_and_do_nothing(log_to_file: SetUp) -> None:
    path = log_to_file(log_format="text")
    logger().info("a\r\nb\x1b[2Jc\u2028d\u202ee\tf\ud800 é")
    assert path.read_text().endswith("listener: a\\r\\nb\\x1b[2Jc\\u2028d\\u202ee\\tf\\ud800 é\n")


def test_an_endless_message_is_cut(log_to_file: SetUp) -> None:
    path = log_to_file()
    logger().info("x" * 1_000_000)
    assert objects(path)[0]["msg"] == "x" * logs.MESSAGE_LIMIT_CHARACTERS + "..."


def test_a_wrong_log_call_is_a_line_and_no_exception(tmp_path: Path) -> None:
    script = f"""{SETUP}
class Unspeakable:
    def __str__(self):
        raise RuntimeError("never")

log.info("%d nodes", "many")
log.info("%s", Unspeakable())
log.info("x", extra={{"value": Unspeakable()}})
"""
    result = run(script, str(tmp_path / "log"))
    assert (result.returncode, result.stderr) == (0, b"")
    lines = objects(tmp_path / "log")
    assert [line["level"] for line in lines] == ["error"] * 3
    assert [line["msg"].split(":")[0] for line in lines] == ["bad log call at <string>"] * 3


def test_an_extra_cannot_pass_for_a_field_of_the_log(log_to_file: SetUp) -> None:
    path = log_to_file()
    logger().info("x", extra={"level": "fatal", "time": 0, "component": "y"})
    (line,) = objects(path)
    assert (line["level"], line["component"], line["msg"]) == ("info", "hosts.listener", "x")


# -- exceptions


def test_an_exception_is_told_by_type_and_text_and_where_a_bug_is(log_to_file: SetUp) -> None:
    path = log_to_file(log_format="text")
    for error in (HostError("helper failed:\nno"), KeyError("x")):
        try:
            raise error
        except (HostError, KeyError):
            logger().exception("could not go on")
    first, second = path.read_text().splitlines()
    assert first.endswith("listener: could not go on: HostError: helper failed:\\nno")
    assert "listener: could not go on: KeyError: 'x' (test_logs.py:" in second


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_in_debug_mode_the_traceback_follows(log_to_file: SetUp, log_format: str) -> None:
    path = log_to_file(debug=True, log_format=log_format)
    try:
        raise KeyError("x")
    except KeyError:
        logger().exception("could not go on")
    if log_format == "json":
        (line,) = objects(path)
        assert line["traceback"].startswith("Traceback (most recent call last):\n")
    else:
        first, *others = path.read_text().splitlines()
        assert "could not go on: KeyError: 'x'" in first
        assert others[0] == "    Traceback (most recent call last):"
        assert others[-1] == "    KeyError: 'x'"


def test_an_exception_nobody_caught_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    path = tmp_path / "log"
    result = run(f"{SETUP}\nraise ValueError('a bug')", str(path))
    assert (result.returncode, result.stdout, result.stderr) == (1, b"", b"")
    (line,) = objects(path)
    assert line["level"] == "fatal"
    assert line["msg"].startswith("uncaught exception: ValueError: a bug (")


def test_the_end_of_a_thread_by_an_exception_is_logged_with_its_name(log_to_file: SetUp) -> None:
    def bug() -> None:
        raise ValueError("a bug")

    path = log_to_file()
    for target in (bug, sys.exit):
        thread = threading.Thread(target=target, name="worker-3")
        thread.start()
        thread.join()
    (line,) = objects(path)
    assert line["level"] == "error"
    assert line["msg"].startswith("thread worker-3 ended by an exception: ValueError: a bug (")


def test_an_exception_that_python_has_to_ignore_is_logged(tmp_path: Path) -> None:
    script = f"{SETUP}\nclass Bad:\n    def __del__(self): raise ValueError('a bug')\nBad()"
    result = run(script, str(tmp_path / "log"))
    assert (result.returncode, result.stderr) == (0, b"")
    (line,) = objects(tmp_path / "log")
    assert line["msg"].startswith("exception ignored in <function Bad.__del__")
    assert "ValueError: a bug" in line["msg"]


def test_warnings_of_python_are_logged(tmp_path: Path) -> None:
    result = run(f"{SETUP}\nimport warnings\nwarnings.warn('out\\nof fashion')", str(tmp_path / "log"))
    assert result.stderr == b""
    (line,) = objects(tmp_path / "log")
    assert (line["level"], line["component"]) == ("warning", "py.warnings")
    assert line["msg"].startswith("UserWarning: out\nof fashion (")


# -- the destination


@pytest.mark.parametrize("destination", ["", "stdout", "STDOUT", "/dev/stdout"])
def test_it_goes_to_standard_output(destination: str) -> None:
    result = run(f"{SETUP}\nlog.info('hello')", destination)
    assert json.loads(result.stdout)["msg"] == "hello"
    assert result.stderr == b""


@pytest.mark.parametrize("destination", ["stderr", "StdErr", "/dev/stderr"])
def test_it_goes_to_standard_error(destination: str) -> None:
    result = run(f"{SETUP}\nlog.info('hello')", destination)
    assert json.loads(result.stderr)["msg"] == "hello"
    assert result.stdout == b""


def test_it_goes_nowhere(tmp_path: Path) -> None:
    result = run(f"{SETUP}\nlog.error('hello')", "Discard", cwd=tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (0, b"", b"")
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_appended_to(log_to_file: SetUp, tmp_path: Path) -> None:
    (tmp_path / "provisioner.log").write_text("before\n")
    path = log_to_file()
    logger().info("after")
    before, after = path.read_text().splitlines()
    assert before == "before"
    assert json.loads(after)["msg"] == "after"


def test_a_file_that_was_moved_away_is_made_anew(log_to_file: SetUp, tmp_path: Path) -> None:
    path = log_to_file()
    logger().info("one")
    path.rename(tmp_path / "provisioner.log.1")
    logger().info("two")
    assert [line["msg"] for line in objects(tmp_path / "provisioner.log.1")] == ["one"]
    assert [line["msg"] for line in objects(path)] == ["two"]
    path.rename(tmp_path / "provisioner.log.2")
    path.touch()  # as logrotate does with "create"
    logger().info("three")
    assert [line["msg"] for line in objects(path)] == ["three"]


@pytest.mark.parametrize("level", ["info", "fatal"])
def test_on_request_it_is_made_anew_before_there_is_anything_to_say(
    log_to_file: SetUp, tmp_path: Path, level: str
) -> None:
    path = log_to_file(level=level)
    reopening = logs.Reopening()
    path.rename(tmp_path / "provisioner.log.1")
    reopening()
    assert not path.exists()
    reopening.request()
    reopening()
    assert [line["msg"] for line in objects(path)] == ["opened the log anew, as asked"] * (level == "info")
    reopening()
    assert len(objects(path)) == (level == "info")


def test_a_request_that_cannot_be_met_is_told_in_the_old_file(log_to_file: SetUp, tmp_path: Path) -> None:
    path = log_to_file()
    elsewhere = tmp_path.with_name("elsewhere-as-well")
    tmp_path.rename(elsewhere)
    reopening = logs.Reopening()
    reopening.request()
    reopening()
    elsewhere.rename(tmp_path)
    assert objects(path)[0]["msg"] == "cannot open the log anew, going on in the old file: No such file or directory"


def test_a_request_is_no_problem_for_a_log_that_is_no_file() -> None:
    script = f"{SETUP}\nreopening = logs.Reopening()\nreopening.request()\nreopening()\nlog.info('hello')"
    result = run(script, "stdout")
    assert result.stderr == b""
    assert [json.loads(line)["msg"] for line in result.stdout.splitlines()] == [
        "opened the log anew, as asked",
        "hello",
    ]


def test_a_file_that_is_copied_and_truncated_goes_on_from_its_start(log_to_file: SetUp) -> None:
    path = log_to_file()
    logger().info("one")
    os.truncate(path, 0)
    logger().info("two")
    assert [line["msg"] for line in objects(path)] == ["two"]


def test_a_folder_that_is_gone_costs_no_line_of_the_old_file(log_to_file: SetUp, tmp_path: Path) -> None:
    path = log_to_file()
    elsewhere = tmp_path.with_name("elsewhere")
    tmp_path.rename(elsewhere)
    logger().info("one")
    elsewhere.rename(tmp_path)
    assert [line["msg"] for line in objects(path)] == ["one"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing/x.log", "No such file or directory"),
        ("", "Is a directory"),
        ("file/x.log", "Not a directory"),
        ("nul\0.log", ".*embedded null .*"),
        ("pipe", "No such device or address"),
    ],
)
def test_a_file_that_cannot_be_opened_is_an_error_that_names_the_setting(
    tmp_path: Path, name: str, reason: str
) -> None:
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    handlers = logging.getLogger().handlers[:]
    with pytest.raises(ProvisionerError, match=rf"^logfile: cannot open '{tmp_path}.*': {reason}$"):
        logs.setup(destination=f"{tmp_path}/{name}", level="info", log_format=None, debug=False)
    assert logging.getLogger().handlers == handlers


def test_a_later_setup_replaces_the_earlier_one(log_to_file: SetUp, tmp_path: Path) -> None:
    path = log_to_file()
    logs.setup(destination=str(tmp_path / "other.log"), level="info", log_format="json", debug=False)
    logger().info("hello")
    assert path.read_text() == ""
    assert [line["msg"] for line in objects(tmp_path / "other.log")] == ["hello"]


# -- the format by default


def test_a_file_gets_json_by_default(log_to_file: SetUp) -> None:
    path = log_to_file(log_format=None)
    logger().info("hello")
    assert objects(path)[0]["msg"] == "hello"


def test_a_terminal_gets_text_by_default() -> None:
    terminal, end = pty.openpty()
    try:
        script = SETUP.replace('"json"', "None")
        run(f"{script}\nlog.info('hello')", "stdout", stdout=end)
        line = os.read(terminal, 1000).decode()
    finally:
        os.close(terminal)
        os.close(end)
    assert line.endswith(" INFO    test: hello\r\n")


def test_the_journal_gets_text_with_priorities_by_default() -> None:
    script = """
import os, logging
from provisioner import logs
status = os.fstat(2)
os.environ["JOURNAL_STREAM"] = f"{status.st_dev}:{status.st_ino}"
logs.setup(destination="stderr", level="debug", log_format=None, debug=False)
log = logging.getLogger("provisioner.test")
log.debug("a"); log.info("b"); log.warning("c\\n<0>d"); log.error("e"); log.critical("f")
try:
    raise ValueError("g\\n<0>h")
except ValueError:
    log.exception("i")
"""
    lines = run(script).stderr.decode().splitlines()
    assert lines[:5] == ["<7>test: a", "<6>test: b", "<4>test: c\\n<0>d", "<3>test: e", "<2>test: f"]
    assert len(lines) > 7
    assert all(line.startswith("<3>    ") for line in lines[6:])


def test_text_elsewhere_under_systemd_has_no_priorities(log_to_file: SetUp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOURNAL_STREAM", "1:2")
    path = log_to_file(log_format="text")
    logger().info("hello")
    assert path.read_text()[:4].isdigit()


# -- a destination that fails


def test_a_closed_pipe_costs_neither_thread_nor_exit_code() -> None:
    script = f"""{SETUP}
import threading
print("buffered")
for _ in range(100):
    log.info("x" * 1000)
thread = threading.Thread(target=log.info, args=("from a thread",))
thread.start()
thread.join()
sys.stderr.write("alive")
sys.exit(3)
"""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        result = run(script, "stdout", stdout=writer)
    finally:
        os.close(writer)
    assert (result.returncode, result.stderr) == (3, b"alive")


def test_a_full_disk_costs_neither_thread_nor_exit_code() -> None:
    with Path("/dev/full").open("wb") as full:
        for destination in ("stdout", "/dev/full"):
            script = f"{SETUP}\nprint('buffered')\nlog.info('x')\nsys.stderr.write('alive')\nsys.exit(3)"
            result = run(script, destination, stdout=full)
            assert (result.returncode, result.stderr) == (3, b"alive")


@pytest.mark.parametrize("destination", ["stdout", "stderr"])
def test_a_stream_that_was_closed_at_the_start_is_not_taken_for_what_has_its_number_now(
    destination: str, tmp_path: Path
) -> None:
    script = f"""
import sys
victim = open(sys.argv[2], "w")
assert victim.fileno() in (1, 2), victim.fileno()
{SETUP}
log.info("x")
"""
    shell = 'exec "$0" -c "$1" "$2" "$3" ' + (">&-" if destination == "stdout" else "2>&-")
    command = ["/bin/sh", "-c", shell, sys.executable, script, destination, str(tmp_path / "victim")]
    assert subprocess.run(command, check=False, timeout=PATIENCE_SECONDS).returncode == 0
    assert (tmp_path / "victim").read_text() == ""


def test_lost_lines_are_counted_and_told_when_it_works_again(
    log_to_file: SetUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = log_to_file()
    logger().info("one")

    def fail(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "write", fail)
        logger().info("two")
        logger().info("three")
    logger().info("four")
    logger().info("five")
    assert [(line["level"], line["msg"]) for line in objects(path)] == [
        ("info", "one"),
        ("warning", "2 log lines were lost: No space left on device"),
        ("info", "four"),
        ("info", "five"),
    ]


def test_half_a_line_is_ended_before_the_next_one(log_to_file: SetUp, monkeypatch: pytest.MonkeyPatch) -> None:
    path = log_to_file()
    write = os.write
    room = [10, 0]

    def short(descriptor: int, data: memoryview) -> int:
        if not (left := room.pop(0)):
            raise OSError(28, "No space left on device")
        return write(descriptor, data[:left])

    with monkeypatch.context() as full:
        full.setattr(os, "write", short)
        logger().info("one")
    logger().info("two")
    half, note, line = path.read_text().splitlines()
    assert half == '{"time": "'
    assert json.loads(note)["msg"] == "1 log lines were lost: No space left on device"
    assert json.loads(line)["msg"] == "two"


def test_a_reader_that_stands_still_costs_lines_and_not_the_daemon() -> None:
    script = f"""
from provisioner import logs
logs.WRITE_LIMIT_SECONDS = 0.01
{SETUP}
for number in range(2000):
    log.info("line %d %s", number, "x" * 300)
print("alive", file=sys.stderr, flush=True)
sys.stdin.readline()
log.info("the last one")
"""
    command = [sys.executable, "-c", script, "stdout"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stderr.readline() == b"alive\n"  # nothing was read of the 600 kB until here
        pieces: list[bytes] = []
        reader = threading.Thread(target=lambda: pieces.extend(iter(lambda: os.read(out, 65536), b"")))
        out = process.stdout.fileno()
        pieces.append(os.read(out, 65536))
        process.stdin.write(b"\n")
        process.stdin.close()
        reader.start()
        reader.join(PATIENCE_SECONDS)
    lines = [line for line in b"".join(pieces).split(b"\n") if line.startswith(b"{") and line.endswith(b"}")]
    messages = [json.loads(line)["msg"] for line in lines]
    kept = [message for message in messages if message.startswith("line ")]
    assert kept == [f"line {number} {'x' * 300}" for number in range(len(kept))]
    assert messages[len(kept) :] == [f"{2000 - len(kept)} log lines were lost: nobody reads them", "the last one"]
