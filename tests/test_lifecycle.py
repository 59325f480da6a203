"""Lifecycle events: what Choria's own parser takes and refuses, and the event that the provisioner publishes."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provisioner.choria import lifecycle
from provisioner.choria.lifecycle import Event, EventError

FIXTURES = Path(__file__).parent / "fixtures"
PARSE_CASES: list[dict[str, str]] = json.loads((FIXTURES / "agents" / "lifecycle-parse-cases.json").read_text())
#: Choria refuses a wrapper with an extension attribute that is an object; there is no harm in it, so it is taken.
TAKEN_ALL_THE_SAME = "invalid CloudEvents value"
VERDICT = re.compile(r'OK type=\d+ typestr=(?P<type>\w+) identity=(?P<identity>".*") component=')


@pytest.mark.parametrize("case", PARSE_CASES, ids=lambda case: case["payload"][:60])
def test_verdicts_are_those_of_choria(case: dict[str, str]) -> None:
    payload = case["payload"].encode()
    verdict = VERDICT.match(case["result"])
    if verdict:
        identity = json.loads(verdict["identity"].replace("\\x00", "\\u0000"))
        assert lifecycle.parse(payload) == Event(type=verdict["type"], identity=identity)
    elif TAKEN_ALL_THE_SAME not in case["result"]:
        with pytest.raises(EventError):
            lifecycle.parse(payload)


@pytest.mark.parametrize("path", sorted((FIXTURES / "agents").glob("lifecycle-*-*.*json")), ids=lambda path: path.name)
def test_published_events_parse(path: Path) -> None:
    if path.name == "lifecycle-parse-cases.json":
        return
    event_type = path.stem.removeprefix("lifecycle-").split("-")[1].split(".")[0]
    event = lifecycle.parse(path.read_bytes())

    assert event.type == event_type
    assert event.identity


def test_our_own_event_has_the_form_of_the_recorded_one() -> None:
    recorded: dict[str, Any] = json.loads(
        (FIXTURES / "v1" / "lifecycle" / "insecure-provisioner-startup.json").read_bytes()
    )
    ours = json.loads(lifecycle.startup(identity=recorded["identity"], component="provisioner", version="0.0.0"))

    assert {key: type(value) for key, value in ours.items()} == {key: type(value) for key, value in recorded.items()}
    for key in ("protocol", "identity", "component"):
        assert ours[key] == recorded[key]


def test_endless_wrappers_are_refused() -> None:
    event: object = {}
    for _ in range(50):
        event = {"specversion": "1.0", "source": "io.choria.lifecycle", "data": event}
    with pytest.raises(EventError, match="wrappers"):
        lifecycle.parse(json.dumps(event).encode())


FIELDS = st.sampled_from(
    ["protocol", "identity", "timestamp", "specversion", "source", "data", "data_base64", "time", "component"]
)
VALUES = st.recursive(
    st.none()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["io.choria.lifecycle.v1.startup", "1.0", "io.choria.lifecycle", "e30="]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(FIELDS, inner, max_size=4),
    max_leaves=10,
)


@given(st.binary(max_size=300) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_anything_gives_an_event_or_the_typed_error(payload: bytes) -> None:
    with contextlib.suppress(EventError):
        assert isinstance(lifecycle.parse(payload), Event)
