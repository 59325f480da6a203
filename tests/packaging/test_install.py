"""What `make install` lays out, from where it is, and what the packages made of it hold."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from provisioner import __version__
from tests.packaging.conftest import BUILD_SECONDS, NAME, make, need, once
from tests.packaging.machine import REPOSITORY, SYSTEM_PYTHON, Machine

PREFIX = "/opt/site"
OURS = "token: ours\n"
RECIPE = (REPOSITORY / "Dockerfile").read_text().replace("\\\n", " ")


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An installation for another place, in which a site has its configuration already."""

    def fill(tree: Path) -> None:
        configuration = tree / f"etc/{NAME}/provisioner.yaml"
        configuration.parent.mkdir(parents=True)
        configuration.touch(0o640)
        configuration.write_text(OURS)
        make("install", f"DESTDIR={tree}", f"PREFIX={PREFIX}")

    return once(tmp_path_factory, "tree", fill)


def test_it_lays_out_everything(tree: Path) -> None:
    library = tree / f"opt/site/lib/{NAME}"
    found = {str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file() and library not in path.parents}
    wanted = {
        f"etc/{NAME}/choria.cfg",
        f"etc/{NAME}/provisioner.yaml",
        f"etc/init.d/{NAME}",
        f"etc/logrotate.d/{NAME}",
        f"opt/site/bin/{NAME}",
        f"opt/site/lib/systemd/system/{NAME}.service",
        f"opt/site/share/bash-completion/completions/{NAME}",
        f"opt/site/share/{NAME}/prometheus/alerts.yaml",
        f"opt/site/share/{NAME}/prometheus/dashboard.json",
        f"opt/site/share/doc/{NAME}/README.md",
        f"opt/site/share/doc/{NAME}/docs/operating.md",
        f"opt/site/share/fish/vendor_completions.d/{NAME}.fish",
        f"opt/site/share/man/man8/{NAME}.8",
        f"opt/site/share/zsh/site-functions/_{NAME}",
    }
    helpers = {f"opt/site/share/{NAME}/helpers/{path.name}" for path in (REPOSITORY / "etc/helpers").iterdir()}
    assert wanted | helpers <= found
    assert {name for name in found - wanted - helpers if f"share/doc/{NAME}/" not in name} == set()


def test_the_program_runs_from_there(tree: Path) -> None:
    python = tree / f"opt/site/lib/{NAME}/bin/python3"
    done = subprocess.run(
        [python, "-I", "-m", "provisioner", "--version"], cwd="/", env={}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert __version__ in done.stdout
    subprocess.run([python, "-I", "-c", "from provisioner import helper"], cwd="/", env={}, check=True)
    # with nothing but its own libraries
    done = subprocess.run(
        [python, "-I", "-c", "import sys; print(*sys.path)"],
        cwd="/",
        env={},
        capture_output=True,
        text=True,
        check=True,
    )
    assert [path for path in done.stdout.split() if "packages" in path and not path.startswith(str(tree))] == []


def test_the_files_name_the_prefix_and_nothing_the_place_where_they_were_laid_out(tree: Path) -> None:
    assert f"ExecStart={PREFIX}/bin/{NAME} run" in (tree / f"opt/site/lib/systemd/system/{NAME}.service").read_text()
    assert f"\nDAEMON={PREFIX}/bin/{NAME}\n" in (tree / f"etc/init.d/{NAME}").read_text()
    launcher = tree / f"opt/site/lib/{NAME}/bin/{NAME}"
    assert launcher.read_text().startswith(f"#!{PREFIX}/lib/{NAME}/bin/python3 -I\n")
    assert (tree / f"opt/site/bin/{NAME}").resolve() == launcher
    for helper in (tree / f"opt/site/share/{NAME}/helpers").glob("*.py"):
        assert helper.read_text().startswith(f"#!{PREFIX}/lib/{NAME}/bin/python3 ")
        assert helper.stat().st_mode & 0o111 == 0o111
    for place in (tree, REPOSITORY):
        done = subprocess.run(["grep", "-rlF", str(place), tree], capture_output=True, text=True, check=False)
        assert done.stdout == ""


def test_only_the_owner_writes_and_not_everybody_reads_the_configuration(tree: Path) -> None:
    for path in (path for path in tree.rglob("*") if not path.is_symlink()):
        assert not path.stat().st_mode & 0o022, path
    for name in ("provisioner.yaml", "choria.cfg"):
        assert stat.S_IMODE((tree / f"etc/{NAME}/{name}").stat().st_mode) == 0o640


def test_the_configuration_of_a_site_survives_an_installation_and_its_end(tree: Path, tmp_path: Path) -> None:
    assert (tree / f"etc/{NAME}/provisioner.yaml").read_text() == OURS
    copy = shutil.copytree(tree, tmp_path / "copy", symlinks=True)
    make("uninstall", f"DESTDIR={copy}", f"PREFIX={PREFIX}")
    left = {str(path.relative_to(copy)) for path in copy.rglob("*") if not path.is_dir()}
    assert left == {f"etc/{NAME}/provisioner.yaml", f"etc/{NAME}/choria.cfg"}


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that the first stage of the Dockerfile hands to the second."""
    folder = tmp_path_factory.mktemp("image")
    source, made = folder / "source", folder / "opt"
    first_stage = RECIPE.split("\nFROM ")[1].splitlines()
    for line in (line for line in first_stage if line.startswith("COPY ")):
        *files, target = line.split()[1:]
        for name in files:
            path = REPOSITORY / name
            if path.is_dir():
                shutil.copytree(path, source / target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                (source / target).mkdir(exist_ok=True)
                shutil.copy(path, source / target)
    (run,) = (line.removeprefix("RUN ") for line in first_stage if line.startswith("RUN "))
    programs = Path(sys.prefix) / "bin"
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PIP_NO_COMPILE": "1"}
    command = run.replace(f"/opt/{NAME}", str(made))
    subprocess.run(["sh", "-c", command], cwd=source, env=environment, check=True, timeout=BUILD_SECONDS)
    yield made
    shutil.rmtree(folder)


class TestContainer:
    """What the Dockerfile does, done by hand: there may be no engine here."""

    def test_the_program_of_it_has_all_that_it_needs(self, image: Path) -> None:
        (installed,) = image.glob("lib/python*/site-packages/provisioner")
        ours = REPOSITORY / "provisioner"
        files = (path.relative_to(ours) for path in ours.rglob("*") if path.is_file())
        assert [str(file) for file in files if file.suffix != ".pyc" and not (installed / file).exists()] == []

    def test_it_runs(self, image: Path) -> None:
        entry, command = (
            [word.replace(f"/etc/{NAME}", str(REPOSITORY / "etc")) for word in json.loads(text)]
            for text in re.findall(r"^(?:ENTRYPOINT|CMD) (.*)$", RECIPE, re.MULTILINE)
        )
        program = entry[0].replace(f"/opt/{NAME}", str(image))
        version = subprocess.check_output([program, "--version"], cwd="/", env={}, text=True)
        assert __version__ in version
        # as far as the samples go: no credentials are there
        assert command[0] == "run"
        for name in ("run", "check"):
            words = [program, name, *command[1:]]
            done = subprocess.run(words, cwd="/", env={}, capture_output=True, text=True, check=False)
            said = done.stdout + done.stderr
            assert done.returncode == 1
            assert f"/etc/{NAME}/ssl/cert.pem: No such file or directory" in said
            assert "Traceback" not in said


class TestDeb:
    """The Debian package."""

    def test_lintian_has_no_more_to_say_than_we_know(self, deb: Path) -> None:
        need("lintian")
        command = ("lintian", "--allow-root", "--fail-on", "error,warning", str(deb))
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, "")

    def test_it_depends_on_the_python_it_was_made_for(self, deb: Path) -> None:
        fields = subprocess.check_output(["dpkg-deb", "--field", deb, "Version", "Depends"], text=True)
        assert f"Version: {__version__}-1\n" in fields
        assert f"Depends: {SYSTEM_PYTHON.name}, adduser, " in fields

    def test_it_installs_on_a_bare_system_and_runs(self, machine: Machine) -> None:
        assert __version__ in machine.sh(f"{NAME} --version")
        listed = machine.sh(f"stat --format '%U:%G %a' /etc/{NAME}/provisioner.yaml /etc/{NAME}/choria.cfg")
        assert listed.splitlines() == [f"root:{NAME} 640"] * 2
        # readable for the daemon, and it says what there is to be filled in
        done = machine.run(
            *(NAME, "--config", f"/etc/{NAME}/provisioner.yaml", "--choria-config", f"/etc/{NAME}/choria.cfg"),
            check=False,
            user=NAME,
        )
        assert done.returncode == 1
        assert "No such file or directory" in done.stdout
        assert "Traceback" not in done.stdout
        assert f"/usr/bin/{NAME}: " not in machine.sh(f"dpkg --verify {NAME}")

    def test_everything_of_it_is_gone_after_a_purge_and_only_the_program_after_a_removal(
        self, machine: Machine, deb: Path
    ) -> None:
        machine.sh(f"echo '# ours' >>/etc/{NAME}/choria.cfg; mkdir -p /var/log/{NAME} /var/lib/{NAME}")
        machine.run("dpkg", "--remove", NAME)
        assert machine.sh(f"tail -n 1 /etc/{NAME}/choria.cfg; ls /usr/lib/{NAME} 2>&1", check=False).startswith(
            f"# ours\nls: cannot access '/usr/lib/{NAME}'"
        )
        machine.run("dpkg", "--install", f"/mnt/shared/{deb.name}")
        assert machine.sh(f"tail -n 1 /etc/{NAME}/choria.cfg; stat --format %G /etc/{NAME}/choria.cfg").split("\n") == [
            "# ours",
            NAME,
            "",
        ]
        machine.run("dpkg", "--purge", NAME)
        left = machine.sh(f"find / -xdev -name '*{NAME}*' -not -path '/proc/*'")
        assert left == ""
        machine.run("dpkg", "--install", f"/mnt/shared/{deb.name}")


class TestRpm:
    """The RPM package."""

    def test_it_holds_the_program_and_the_configuration(self, rpm: Path, tmp_path: Path) -> None:
        listed = subprocess.check_output(["rpm", "--query", "--package", "--list", "--verbose", rpm], text=True)
        assert re.search(rf"^-rw-r----- .* root +choria-p\w* .* /etc/{NAME}/provisioner.yaml$", listed, re.MULTILINE)
        configuration = subprocess.check_output(["rpm", "--query", "--package", "--configfiles", rpm], text=True)
        assert f"/etc/{NAME}/choria.cfg" in configuration.split()
        subprocess.run(["rpm2archive", rpm], check=True)
        subprocess.run(["tar", "--extract", "--gzip", f"--file={rpm}.tgz", f"--directory={tmp_path}"], check=True)
        python = tmp_path / f"usr/lib/{NAME}/bin/python3"
        version = subprocess.check_output([python, "-I", "-m", "provisioner", "--version"], cwd="/", text=True)
        assert __version__ in version

    def test_it_wants_the_python_it_was_made_for(self, rpm: Path) -> None:
        wanted = subprocess.check_output(["rpm", "--query", "--package", "--requires", rpm], text=True)
        assert str(SYSTEM_PYTHON) in wanted.split()
