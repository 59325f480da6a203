"""The sample configurations and the recipe for a container are what the program reads."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from provisioner import config
from provisioner.choria import security, settings
from provisioner.errors import ConfigurationError
from tests.packaging.machine import REPOSITORY

ETC = REPOSITORY / "etc"
#: A line that is commented out, and would be a setting without the mark.
COMMENTED = re.compile(r"^#(?=[a-z_]+:( |$)|  - |plugin\.|identity |ttl |discovery_timeout )", re.MULTILINE)


def test_the_provisioner_configuration_is_good_as_it_is() -> None:
    assert config.load(ETC / "provisioner.yaml").warnings == ()


def test_the_choria_configuration_lacks_only_the_credentials() -> None:
    loaded = settings.load(ETC / "choria.cfg", insecure=False, provisioning_password="")
    assert loaded.warnings == ()
    with pytest.raises(ConfigurationError) as caught:
        security.choose(loaded, insecure=False)
    missing = {"certificate", "key", "ca"}
    assert {problem.split(": ")[1].rpartition(".")[2] for problem in caught.value.problems} == missing
    assert all("No such file or directory" in problem for problem in caught.value.problems)


def test_no_sample_is_unsafe_as_it_is() -> None:
    loaded = config.load(ETC / "provisioner.yaml")
    assert not loaded.choria_insecure
    assert loaded.token == ""
    assert loaded.broker_provisioning_password == ""


def test_what_is_commented_out_is_good_as_well(tmp_path: Path) -> None:
    sample, count = COMMENTED.subn("", (ETC / "provisioner.yaml").read_text())
    assert count > 20
    file = tmp_path / "provisioner.yaml"
    file.write_text(sample)
    assert config.load(file).warnings == ()


def test_the_container_is_made_of_files_that_are_there() -> None:
    recipe = (REPOSITORY / "Dockerfile").read_text().replace("\\\n", " ")
    copied = [shlex.split(line)[1:] for line in recipe.splitlines() if line.startswith("COPY ")]
    sources = [source for words in copied if not words[0].startswith("--from") for source in words[:-1]]
    assert sources
    assert all((REPOSITORY / source).exists() for source in sources)
