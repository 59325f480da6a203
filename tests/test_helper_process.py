"""The helper process: what it is given, what is taken from it, how it is ended. Every helper here is a real process."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provisioner.contract import ANSWER_LIMIT_BYTES
from provisioner.errors import HostError
from provisioner.host import helper_process
from provisioner.host.helper_process import HelperError, Output, one_line
from tests.waiting import PATIENCE_SECONDS, wait_until


def never() -> bool:
    return False


def run_sh(
    script: str, document: bytes = b"{}", *, timeout: float = PATIENCE_SECONDS, cancelled: Callable[[], bool] = never
) -> Output:
    return helper_process.run(["sh", "-c", script], document, timeout=timeout, cancelled=cancelled)


def failure(script: str, *, timeout: float = PATIENCE_SECONDS, cancelled: Callable[[], bool] = never) -> str:
    with pytest.raises(HelperError) as caught:
        run_sh(script, timeout=timeout, cancelled=cancelled)
    return str(caught.value)


def content(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def is_running(pid: int) -> bool:
    """Not gone, nor a zombie that nobody has waited for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children() -> set[int]:
    listed = Path("/proc/self/task").glob("*/children")
    return {int(pid) for file in listed for pid in file.read_text().split()}


@pytest.fixture
def background(tmp_path: Path) -> Iterator[Path]:
    """A file in which a helper notes the number of a process it leaves behind; that one is ended with the test."""
    path = tmp_path / "pid"
    yield path
    if pid := content(path).strip():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


@pytest.fixture(params=["told of the exit", "looking for the exit"])
def exit_notice(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to learn of an exit: systems without process descriptors lack the function."""
    if request.param == "looking for the exit":
        monkeypatch.delattr(os, "pidfd_open")


# what it is given


@pytest.mark.parametrize("size", [0, 1, 64 * 1024, 64 * 1024 + 1, 900_000])
def test_the_document_arrives_whole_whatever_its_size(size: int) -> None:
    document = bytes(itertools.islice(itertools.cycle(b"0123456789abcdef\n"), size))
    assert run_sh("printf 'got '; cat", document).stdout == b"got " + document


def test_arguments_reach_the_helper_as_they_are_without_a_shell() -> None:
    arguments = ["$HOME", "a b", "*", ";"]
    output = helper_process.run(["printf", "%s|", *arguments], b"", timeout=PATIENCE_SECONDS, cancelled=never)
    assert output.stdout == b"$HOME|a b|*|;|"


def test_the_helper_leads_a_process_group_of_its_own() -> None:
    pid, group = run_sh('echo $$ $(cut -d" " -f5 /proc/$$/stat)').stdout.split()
    assert pid == group != str(os.getpgrp()).encode()


def test_no_descriptor_leaks_into_the_helper() -> None:
    leak = os.dup2(0, 200, inheritable=True)
    try:
        output = helper_process.run(["ls", "/proc/self/fd"], b"", timeout=PATIENCE_SECONDS, cancelled=never)
    finally:
        os.close(leak)
    assert output.stdout.split() == [b"0", b"1", b"2", b"3"], "the last is the directory that is being read"


@pytest.mark.usefixtures("exit_notice")
def test_all_descriptors_of_ours_are_closed_again() -> None:
    def all_kinds() -> None:
        run_sh("echo {}")
        failure("exit 1")
        failure("sleep 1000", timeout=0.01)
        with pytest.raises(HelperError):
            helper_process.run(["/nonexistent"], b"", timeout=1, cancelled=never)

    all_kinds()
    before = os.listdir("/proc/self/fd")  # noqa: PTH208
    all_kinds()
    assert os.listdir("/proc/self/fd") == before  # noqa: PTH208


# what is taken from it


@pytest.mark.usefixtures("exit_notice")
def test_output_of_several_reads_comes_whole() -> None:
    output = run_sh("i=0; while [ $i -lt 3000 ]; do echo $i-$i-$i-$i-$i-$i-$i-$i; i=$((i+1)); done")
    expected = "".join("-".join([str(i)] * 8) + "\n" for i in range(3000))
    assert output.stdout.decode() == expected


def test_chatter_on_standard_error_does_no_harm_and_is_kept() -> None:
    output = run_sh("echo '[INFO] asking the CA' >&2; echo '[WARNING] slow' >&2; echo '{}'")
    assert output.stdout == b"{}\n"
    assert output.stderr == "[INFO] asking the CA | [WARNING] slow"


def test_of_much_standard_error_the_end_is_kept() -> None:
    output = run_sh("head -c 300000 /dev/zero | tr '\\0' x >&2; printf '\nthe end' >&2; echo '{}'")
    assert output.stderr.endswith("xxx | the end")
    assert len(output.stderr) < 2 * helper_process.STDERR_KEPT_BYTES


def test_secrets_are_masked_in_standard_error_in_every_form_it_may_have() -> None:
    script = r'''cat >&2; echo "{}"'''
    told = helper_process.run(
        ["sh", "-c", script],
        b'one s3cret, s3cret-too, {"a": "quo\\"ted"} and quo"ted',
        timeout=PATIENCE_SECONDS,
        cancelled=never,
        secrets={"s3cret", "s3cret-too", 'quo"ted', ""},
    ).stderr
    assert told == 'one ***, ***, {"a": "***"} and ***'


def test_no_half_of_a_secret_is_told_where_standard_error_is_cut() -> None:
    secret = "s3cret" * 10
    text = secret + "x" * (helper_process.STDERR_KEPT_BYTES - 30)
    told = helper_process.run(
        ["sh", "-c", "cat >&2; echo '{}'"],
        text.encode(),
        timeout=PATIENCE_SECONDS,
        cancelled=never,
        secrets={secret},
    ).stderr
    assert told.strip("x") == ""
    assert len(told) > helper_process.STDERR_KEPT_BYTES - 2 * len(secret)


def test_what_lies_in_a_large_pipe_at_the_exit_comes_whole(tmp_path: Path) -> None:
    script = f"""
import fcntl, os
fcntl.fcntl(1, fcntl.F_SETPIPE_SZ, 1024 * 1024)
os.write(1, b"x" * 500_000)
open({str(tmp_path / "pid")!r}, "w").write(f"{{os.getpid()}}.")
"""
    asked = itertools.count()

    def cancelled() -> bool:
        if next(asked) == 1:  # it has been started, and nothing has been read yet
            wait_until(lambda: content(tmp_path / "pid").endswith("."))
            wait_until(lambda: not is_running(int(content(tmp_path / "pid")[:-1])))
        return False

    output = helper_process.run([sys.executable, "-c", script], b"", timeout=2 * PATIENCE_SECONDS, cancelled=cancelled)
    assert len(output.stdout) == 500_000


def test_an_output_of_exactly_the_limit_is_taken() -> None:
    assert len(run_sh(f"head -c {ANSWER_LIMIT_BYTES} /dev/zero").stdout) == ANSWER_LIMIT_BYTES


def test_an_output_over_the_limit_is_an_error_and_ends_the_helper() -> None:
    before = children()
    text = failure("head -c 100000000 /dev/zero; sleep 1000")
    assert text == "the helper printed more than 1048576 bytes on its standard output"
    assert children() == before


def test_a_helper_that_never_reads_its_input_is_fine() -> None:
    assert run_sh("echo '{}'", b"x" * 500_000).stdout == b"{}\n"


def test_a_helper_that_closes_its_input_is_fine() -> None:
    assert run_sh("exec <&-; sleep 0.1; echo '{}'", b"x" * 500_000).stdout == b"{}\n"


def test_a_helper_that_closes_its_output_is_waited_for(tmp_path: Path) -> None:
    run_sh(f"echo '{{}}'; exec >&- 2>&-; sleep 0.1; echo finished > {tmp_path}/end")
    assert content(tmp_path / "end") == "finished\n"


@pytest.mark.usefixtures("exit_notice")
def test_a_process_left_in_the_background_is_neither_waited_for_nor_ended(background: Path) -> None:
    output = run_sh(f"sleep 1000 & echo $! > {background}; echo '{{}}'")
    assert output.stdout == b"{}\n"
    assert is_running(int(content(background)))


def test_a_process_left_in_the_background_that_fills_standard_error_does_not_hold_us(background: Path) -> None:
    assert run_sh(f"yes >&2 & echo $! > {background}; echo '{{}}'").stdout == b"{}\n"


@pytest.mark.usefixtures("exit_notice")
def test_no_zombie_is_left() -> None:
    before = children()
    run_sh("echo '{}'")
    failure("exit 3")
    failure("sleep 1000", timeout=0.01)
    assert children() == before


def test_output_is_not_shown_in_the_repr() -> None:
    assert repr(Output(b"s3cret", "s3cret too")) == "Output()"


# how it fails


def test_an_exit_status_is_an_error_even_with_output_and_carries_standard_error_alone() -> None:
    text = failure("echo '{\"key\": \"s3cret\"}'; echo 'no such CA' >&2; exit 7")
    assert text == "the helper exited with status 7; its standard error: no such CA"


def test_of_a_long_standard_error_an_error_carries_the_end_on_one_line() -> None:
    text = failure("i=0; while [ $i -lt 1000 ]; do echo line $i >&2; i=$((i+1)); done; exit 1")
    assert text.startswith("the helper exited with status 1; its standard error: …")
    assert text.endswith(" | line 999")
    assert len(text) < 600
    assert "\n" not in text


def test_death_by_a_signal_is_named() -> None:
    assert failure("kill -SEGV $$") == "the helper was killed by SIGSEGV"
    assert failure("kill -40 $$") == "the helper was killed by signal 40"


def test_no_output_is_an_error() -> None:
    assert failure("exit 0") == "the helper printed nothing: zero bytes on its standard output"


def test_helper_errors_concern_one_host() -> None:
    assert issubclass(HelperError, HostError)


def executable(path: Path, text: str, mode: int = 0o755) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_a_helper_that_cannot_be_started_says_why(tmp_path: Path) -> None:
    script = "#!/bin/sh\necho '{}'\n"
    reasons = {
        "no-such-command-anywhere": "it does not exist",
        str(tmp_path / "missing"): "it does not exist",
        executable(tmp_path / "plain", script, 0o644): "it, or the interpreter in its first line, is not executable",
        str(tmp_path): "it, or the interpreter in its first line, is not executable",
        executable(tmp_path / "stale", "#!/no/such/perl\n"): "the interpreter in its first line does not exist",
        executable(tmp_path / "bare", "echo '{}'\n"): (
            "it is not a program, nor a script with an interpreter in its first line"
        ),
        "nul\0": "its command line holds a NUL character",
        str(tmp_path / ("x" * 300)): "File name too long",
    }
    for program, reason in reasons.items():
        with pytest.raises(HelperError) as caught:
            helper_process.run([program], b"{}", timeout=PATIENCE_SECONDS, cancelled=never)
        assert str(caught.value) == f"the helper {program} could not be started: {reason}"


def test_running_out_of_descriptors_is_an_error_of_the_host_and_no_crash() -> None:
    script = """
import resource
from provisioner.host import helper_process
resource.setrlimit(resource.RLIMIT_NOFILE, (7, 7))
try:
    helper_process.run(["true"], b"", timeout=9, cancelled=lambda: False)
except helper_process.HelperError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "the helper true could not be started: Too many open files\n"


# how it is ended


@pytest.mark.usefixtures("exit_notice")
def test_a_timeout_ends_the_helper() -> None:
    before = children()
    text = failure("trap '' TERM INT HUP; echo waiting >&2; sleep 1000", timeout=0.2)
    assert text.startswith("the helper was killed: it had not finished in the time it is given (helper_timeout)")
    assert children() == before


def test_a_helper_that_prints_for_ever_is_ended_by_the_timeout() -> None:
    assert "helper_timeout" in failure("exec yes >&2", timeout=0.1)


def test_a_timeout_ends_a_helper_that_has_closed_its_pipes() -> None:
    assert "helper_timeout" in failure("exec <&- >&- 2>&-; sleep 1000", timeout=0.1)


@pytest.mark.usefixtures("exit_notice")
def test_a_cancellation_ends_the_helper_and_all_it_started(background: Path) -> None:
    text = failure(
        f"trap '' TERM INT HUP; sleep 1000 & echo $! > {background}; wait",
        cancelled=lambda: content(background).endswith("\n"),
    )
    assert text == "the helper was killed: the work on this host was cancelled"
    wait_until(lambda: not is_running(int(content(background))))


def test_an_error_in_the_question_for_cancellation_leaves_no_process_behind() -> None:
    answers = iter([False])
    before = children()
    with pytest.raises(StopIteration):
        run_sh("sleep 1000", cancelled=lambda: next(answers))
    assert children() == before


def test_cancelled_before_the_start_nothing_is_started(tmp_path: Path) -> None:
    text = failure(f"touch {tmp_path}/started; echo '{{}}'", cancelled=lambda: True)
    assert text == "the helper was not started: the work on this host was cancelled"
    assert not (tmp_path / "started").exists()


# among many threads


@pytest.mark.usefixtures("exit_notice")
def test_many_threads_run_helpers_at_once_and_each_gets_its_own_answer() -> None:
    over = threading.Event()
    idle = [threading.Thread(target=over.wait) for _ in range(100)]
    for thread in idle:
        thread.start()
    try:
        before = children()
        with ThreadPoolExecutor(16) as pool:
            documents = [f"document {i} ".encode() * (1 + 700 * (i % 11)) for i in range(160)]
            answers = list(pool.map(lambda document: run_sh("cat", document).stdout, documents))
        assert answers == documents
        assert children() == before
    finally:
        over.set()
        for thread in idle:
            thread.join()


def test_descriptors_beyond_a_thousand_are_no_obstacle() -> None:
    script = """
import os, resource
from provisioner.host import helper_process
resource.setrlimit(resource.RLIMIT_NOFILE, (2000, 2000))
held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1500)]
print(helper_process.run(["echo", "fine"], b"", timeout=9, cancelled=lambda: False).stdout)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "b'fine\\n'\n"


# text for the log


def test_text_for_the_log_is_one_harmless_line() -> None:
    assert one_line(b"  a\r\n\n\x1b[31mred\t1\x00 \xff\xe2\x80\xaeevil\n") == (
        "a | \\x1b[31mred\\t1\\x00 \N{REPLACEMENT CHARACTER}\\u202eevil"
    )


@given(st.binary())
def test_whatever_comes_on_standard_error_is_printable(raw: bytes) -> None:
    assert one_line(raw).isprintable()
