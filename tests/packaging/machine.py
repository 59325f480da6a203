"""A Debian machine of its own for a test, to install packages in and to run services with real privileges.

It is a set of namespaces on a throw-away layer over a minimal system that is made once and kept in `build`. It has its
own root, processes, users and, if wanted, systemd; only the network is that of this machine, so that a daemon in it
reaches the brokers of the tests.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import PATIENCE_SECONDS

REPOSITORY = Path(__file__).parent.parent.parent

#: What is made once for all processes that run tests.
BUILD = REPOSITORY / "build"

#: The system's own Python, which packages made on it are for.
SYSTEM_PYTHON = Path("/usr/bin/python3").resolve()
#: What the package wants, and what its files are made for.
PACKAGES = (SYSTEM_PYTHON.name, "adduser", "init-system-helpers", "libstdc++6", "logrotate", "systemd")
SYSTEMD = "/lib/systemd/systemd"

#: Runs as the first process of the new namespaces: makes the machine's root, moves into it, and becomes its init.
_BOOT = """
set -e
system=$1 layer=$2 shared=$3
shift 3
mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs "$layer"
mkdir "$layer/upper" "$layer/work" "$layer/root"
mount -t overlay -o "lowerdir=$system,upperdir=$layer/upper,workdir=$layer/work" overlay "$layer/root"
cd "$layer/root"
mount -t proc proc proc
mount --bind proc/sys proc/sys
mount -o remount,bind,ro proc/sys
mount -t sysfs -o ro sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t tmpfs -o mode=755 tmpfs run
mkdir -p run/lock mnt/shared old
mount -t tmpfs -o mode=755 tmpfs dev
for device in 'null 1 3' 'zero 1 5' 'full 1 7' 'random 1 8' 'urandom 1 9' 'tty 5 0'; do
    mknod -m 666 "dev/${device%% *}" c ${device#* }
done
ln -s /proc/self/fd dev/fd
mkdir dev/shm dev/pts
mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts dev/pts
ln -s pts/ptmx dev/ptmx
mount --bind "$shared" mnt/shared
pivot_root . old
umount -l /old
# its kernel is that of this machine: hands off modules and the clock
exec env -i container=test PATH=/usr/bin setpriv --bounding-set=-sys_module,-sys_time,-sys_rawio,-sys_boot \
    env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$@" </dev/null
"""

#: An init for a machine without systemd: it only buries the dead.
_PLAIN_INIT = (
    str(SYSTEM_PYTHON),
    "-c",
    "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)\nwhile True: signal.pause()",
)
_SYSTEMD_INIT = (SYSTEMD, "--system", "--unit=multi-user.target", "--show-status=no")


def missing() -> str:
    """What keeps a machine from being made here; empty when nothing does."""
    if os.geteuid() != 0:
        return "only root can make namespaces and mounts"
    if Path("/etc/debian_version").exists() and platform.freedesktop_os_release().get("VERSION_CODENAME"):
        absent = [tool for tool in ("mmdebstrap", "unshare", "nsenter") if not shutil.which(tool)]
        if absent:
            return f"not installed: {', '.join(absent)}"
        hierarchy = _unified_hierarchy()
        if hierarchy is None or not os.access(hierarchy, os.W_OK):
            return "no cgroup2 is mounted that can be written to"
        attempt = (
            "unshare",
            "--mount",
            "--pid",
            "--fork",
            "--uts",
            "--ipc",
            "--cgroup",
            "mount",
            "-t",
            "proc",
            "proc",
            "/proc",
        )
        permitted = subprocess.run(attempt, capture_output=True, check=False).returncode == 0
        return "" if permitted else "namespaces and mounts are not permitted"
    return "this is no Debian release"


@contextlib.contextmanager
def alone(what: str) -> Iterator[int]:
    """Be the only process that makes this in :data:`BUILD`; gives the open lock, for programs that are to hold it."""
    BUILD.mkdir(exist_ok=True)
    with (BUILD / f".{what}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock.fileno()


class Machine:
    """Runs while in its ``with`` block.

    :param shared: a folder that is `/mnt/shared` in the machine
    :param systemd: whether it is run by systemd
    """

    def __init__(self, shared: Path, *, systemd: bool) -> None:
        self._shared = shared
        self._init = _SYSTEMD_INIT if systemd else _PLAIN_INIT
        self._systemd = systemd
        self._pid = 0
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Machine:
        with contextlib.ExitStack() as stack:
            layer = stack.enter_context(tempfile.TemporaryDirectory(prefix="choria-provisioner-machine-"))
            group = stack.enter_context(_control_group())
            command = ["unshare", "--mount", "--pid", "--fork", "--uts", "--ipc", "--cgroup", "--kill-child"]
            command += ["sh", "-c", _BOOT, "boot", str(_system()), layer, str(self._shared), *self._init]
            enter = f'echo $$ >{group}/cgroup.procs && exec "$@"'
            process = stack.enter_context(subprocess.Popen(["sh", "-c", enter, "enter", *command]))
            stack.callback(process.kill)
            self._pid = _await_init(process, self._init[0])
            if self._systemd:
                self.wait("systemctl is-system-running | grep -E 'running|degraded'")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, *command: str, check: bool = True, user: str = "root") -> subprocess.CompletedProcess[str]:
        """Run a command in the machine, with a clean environment.

        :raises AssertionError: with what it printed, when it fails and `check` is set
        """
        become = [] if user == "root" else ["runuser", "-u", user, "--"]
        done = subprocess.run(
            [
                *("nsenter", "--target", str(self._pid), "--mount", "--pid", "--uts", "--ipc", "--cgroup"),
                *("env", "-i", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8"),
                *("DEBIAN_FRONTEND=noninteractive", *become, *command),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_SECONDS * 2,
            check=False,
        )
        assert not check or done.returncode == 0, f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}"
        return done

    def sh(self, script: str, *, check: bool = True) -> str:
        """Run a shell script in the machine, as :meth:`run` does; give what it printed."""
        return self.run("sh", "-c", script, check=check).stdout

    def wait(self, condition: str) -> None:
        """Wait until a shell script succeeds in the machine."""
        give_up = time.monotonic() + PATIENCE_SECONDS
        while (done := self.run("sh", "-c", condition, check=False)).returncode:
            assert time.monotonic() < give_up, f"it never happened: {condition}\n{done.stdout}"
            time.sleep(0.05)

    def path(self, path: str) -> Path:
        """A path of the machine as this process sees it."""
        return Path(f"/proc/{self._pid}/root{path}")


def _system() -> Path:
    """The folder with the minimal system, made when it is not there yet."""
    release = platform.freedesktop_os_release()["VERSION_CODENAME"]
    folder = BUILD / "machine" / "-".join((release, *PACKAGES))
    with alone("machine") as lock:
        if not folder.exists():
            unfinished = folder.with_name("unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)  # of a run that was killed
            unfinished.parent.mkdir(exist_ok=True)
            options = ("--quiet", "--variant=minbase", f"--include={','.join(PACKAGES)}")
            command = ("mmdebstrap", *options, release, str(unfinished))
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL, pass_fds=[lock])
            unfinished.rename(folder)
    return folder


@contextlib.contextmanager
def _control_group() -> Iterator[Path]:
    """A group of processes, all of which are ended with the block."""
    hierarchy = _unified_hierarchy()
    assert hierarchy is not None
    group = Path(tempfile.mkdtemp(prefix="choria-provisioner-test-", dir=hierarchy))
    try:
        yield group
    finally:
        (group / "cgroup.kill").write_text("1")
        folders = [Path(folder) for folder, _, _ in os.walk(group, topdown=False)]
        for folder in folders:
            _remove_when_empty(folder)


def _remove_when_empty(folder: Path) -> None:
    give_up = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            folder.rmdir()
        except OSError:  # processes that were killed take a moment to go
            assert time.monotonic() < give_up, f"processes of {folder} do not end"
            time.sleep(0.01)
        else:
            return


def _unified_hierarchy() -> Path | None:
    for line in Path("/proc/mounts").read_text().splitlines():
        _, where, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(where)
    return None


def _await_init(process: subprocess.Popen[bytes], program: str) -> int:
    """The process id, as seen from here, of the machine's init, once it has taken over."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    give_up = time.monotonic() + PATIENCE_SECONDS
    while True:
        with contextlib.suppress(OSError, ValueError):
            pid = int(children.read_text())
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(program.encode() + b"\0"):
                return pid
        assert process.poll() is None, "the machine did not start"
        assert time.monotonic() < give_up, "the machine does not start"
        time.sleep(0.01)
