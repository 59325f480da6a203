"""docs/configuration.md says of every key what the code does with it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from provisioner import config
from provisioner.choria import settings
from provisioner.choria.settings import Settings
from provisioner.config import Config
from provisioner.errors import ConfigurationError

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "docs" / "configuration.md"
#: For each type in the reference for provisioner.yaml: values that it takes, and values that it refuses.
EXAMPLES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "boolean": (("true", "false", "no"), ("'true'", "1", "x")),
    "integer": (("5", "0"), ("'5'", "-1", "1.5", "x")),
    "duration": (("5m", "1h30m", "2w"), ("5", "x", "-1m")),
    "string": (("x", "'5'"), ("5", "true", "[x]")),
    "path": (("/x/y", "x"), ("5", "[x]")),
    "URL": (("https://x.example.net/y", "http://x"), ("ftp://x", "5")),
    "patterns": (("[x, '^y$']", "[/x/]"), ("x", "[5]", "['(']")),
    "command line": (("/x 'y z'",), ('"/x \'y"', "5")),
    "anything": (("5", "x", "[x]", "{x: y}"), ()),
}
#: The same for choria.cfg: how the code calls the types.
CHORIA_TYPES = {
    "string": settings._text,
    "path": settings._path,
    "list": settings._list,
    "boolean": settings._boolean,
    "integer": settings._integer,
    "duration": settings._duration,
}
#: Keys of choria.cfg that end a start when they are set.
REFUSED = "refused"
ISSUER = "plugin.security.issuer.NAME.public"


@attrs.frozen
class Row:
    """A key in the reference, with what the other columns say; without the marks of Markdown, but for the text."""

    key: str
    type: str
    default: str | None
    text: str


def rows(heading: str) -> Iterator[Row]:
    """The keys in a section of the reference."""
    section = REFERENCE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    for line in section.splitlines():
        cells = re.split(r" *\| *", line)[1:-1] if line.startswith("| `") else []
        if len(cells) == 4:
            key, kind, default, text = cells
            yield Row(key.strip("`"), kind.replace("`", ""), default.strip("`") if default else None, text)


OURS = list(rows("provisioner.yaml"))
CHORIAS = list(rows("choria.cfg"))


def load(directory: Path, lines: dict[str, str]) -> Config:
    """Load a provisioner.yaml with these values; a dot in a key stands for a mapping in a mapping."""
    top = {key: value for key, value in ({"helper": "/x"} | lines).items() if "." not in key}
    nested = {key.partition(".")[2]: value for key, value in lines.items() if "." in key}
    text = "".join(f"{key}: {value}\n" for key, value in top.items())
    if nested:
        text += "features:\n" + "".join(f"  {key}: {value}\n" for key, value in nested.items())
    file = directory / "provisioner.yaml"
    file.write_text(text)
    return config.load(file)


def values(loaded: Config) -> dict[str, Any]:
    fields = attrs.asdict(loaded, recurse=True, filter=lambda field, _: not field.name.startswith("_"))
    for name in ("cert_deny_list", "allow", "deny"):
        fields[name] = [pattern.pattern for pattern in fields[name]]
    return fields


def ids(row: Row) -> str:
    return row.key


class TestOurs:
    """The part about provisioner.yaml."""

    def test_every_key_is_there_once_and_no_other(self) -> None:
        known = [name for name, row in config._SCHEMA.items() if not isinstance(row, dict)]
        nested = [f"{name}.{key}" for name, row in config._SCHEMA.items() if isinstance(row, dict) for key in row]
        assert sorted(row.key for row in OURS) == sorted(known + nested)

    @pytest.mark.parametrize("row", OURS, ids=ids)
    def test_the_default_is_what_is_loaded_without_the_key(self, row: Row, tmp_path: Path) -> None:
        if row.key == "helper":
            assert row.default is None
            assert "Needed" in row.text
            with pytest.raises(ConfigurationError, match="helper: given nothing"):
                load(tmp_path, {"helper": ""})
        elif row.default is None:
            assert values(load(tmp_path, {})).get(row.key) is None
        else:
            assert values(load(tmp_path, {row.key: row.default})) == values(load(tmp_path, {}))

    @pytest.mark.parametrize("row", OURS, ids=ids)
    def test_the_type_is_what_is_taken(self, row: Row, tmp_path: Path) -> None:
        choices = tuple(row.type.split(", "))
        taken, refused = EXAMPLES[row.type] if len(choices) == 1 else (choices, ("other", "5"))
        key = config._FEATURES.get(row.key.partition(".")[2]) or config._SCHEMA[row.key]
        assert isinstance(key, config._Key)
        assert key.many == (row.type == "patterns")
        assert not [problem for example in taken for problem in problems_of(tmp_path, row.key, example)]
        assert all(problems_of(tmp_path, row.key, example) for example in refused)

    @pytest.mark.parametrize(
        ("key", "phrase", "least", "less"),
        [
            ("interval", "1m or more", "1m", "59s"),
            ("helper_timeout", "more than 0", "1ms", "0s"),
            ("server_jwt_validity", "more than 0", "1s", "0s"),
            ("shutdown_grace", "0s or more", "0s", "-1s"),
            ("monitor_port", "at most 65535", "65535", "65536"),
        ],
    )
    def test_limits_are_named(self, key: str, phrase: str, least: str, less: str, tmp_path: Path) -> None:
        assert phrase in next(row.text for row in OURS if row.key == key)
        load(tmp_path, {key: least})
        with pytest.raises(ConfigurationError):
            load(tmp_path, {key: less})

    @pytest.mark.parametrize(
        ("key", "needed"),
        [
            ("features.jwt", "jwt_verify_cert"),
            ("features.ed25519", "jwt_signing_key"),
            ("features.upgrades", "upgrades_repository"),
        ],
    )
    def test_what_a_feature_needs_is_named(self, key: str, needed: str, tmp_path: Path) -> None:
        assert f"eeds `{needed}`" in next(row.text for row in OURS if row.key == key)
        with pytest.raises(ConfigurationError, match=f"{needed}: given nothing"):
            load(tmp_path, {key: "true"})


def problems_of(directory: Path, key: str, value: str) -> list[str]:
    """What is wrong with a value by itself; which other keys it wants is another matter."""
    try:
        load(directory, {key: value})
    except ConfigurationError as error:
        return [problem for problem in error.problems if f": {key}: given " in problem]
    return []


class TestChorias:
    """The part about choria.cfg."""

    def test_every_key_is_there_once_and_no_other(self) -> None:
        assert sorted(row.key for row in CHORIAS) == sorted([*settings._KEYS, ISSUER])

    @pytest.mark.parametrize("row", CHORIAS, ids=ids)
    def test_type_default_and_environment_are_those_of_the_code(self, row: Row) -> None:
        if row.key == ISSUER:
            assert row.type == "string"
            return
        key = settings._KEYS[row.key]
        assert CHORIA_TYPES[row.type] is key.convert
        named = re.findall(r"`((?:CHORIA|MCOLLECTIVE)_[A-Z_]+)`", row.text)
        assert named == ([key.environment] if key.environment else [])
        assert ("where a file sets it" in row.text) == bool(key.environment and not key.always)
        if key.attribute:
            default = attrs.fields_dict(Settings)[key.attribute].default
            assert default == key.convert(row.default, "") if row.default else not default
        else:
            assert row.default in (None, "false")

    @pytest.mark.parametrize("row", CHORIAS, ids=ids)
    def test_what_is_not_supported_is_told(self, row: Row, tmp_path: Path) -> None:
        value = {"boolean": "true", "integer": "60", "duration": "2s"}.get(row.type, "x:1")
        file = tmp_path / "choria.cfg"
        file.write_text(f"identity = n\n{row.key} = {value}\nplugin.security.provider = file\n")
        problems: tuple[str, ...] = ()
        warnings: tuple[str, ...] = ()
        try:
            warnings = settings.load(file, environ={}, cwd=tmp_path, uid=0).warnings
        except ConfigurationError as error:
            problems = error.problems
        told = [line for line in (*problems, *warnings) if f": {row.key}: " in line]
        assert bool(told) == ("Not supported" in row.text or row.key in ("plugin.nats.user",))
        assert bool(problems) == (REFUSED in row.text)

    def test_the_files_that_are_looked_for_are_named(self) -> None:
        text = REFERENCE.read_text()
        assert "`, `".join([*(f"~/{name}" for name in settings.HOME_FILES)]) in text
        assert all(f"`{name}`" in text for name in (*settings.SYSTEM_FILES, settings.PROJECT_FILE))
