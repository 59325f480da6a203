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
        event = lifecycle.parse(payload)
        assert (event.type, event.identity) == (verdict["type"], identity)
    elif TAKEN_ALL_THE_SAME not in case["result"]:
        with pytest.raises(EventError):
            lifecycle.parse(payload)


PUBLISHED = [
    *(FIXTURES / "agents").glob("lifecycle-real-*.json"),
    *(FIXTURES / "agents").glob("lifecycle-gen-*.json"),
    *(FIXTURES / "v1" / "lifecycle").glob("*.json"),
]


@pytest.mark.parametrize("path", sorted(PUBLISHED), ids=lambda path: path.name)
def test_published_events_parse(path: Path) -> None:
    event = lifecycle.parse(path.read_bytes())

    assert event.type in path.name
    assert event.identity
    assert event.timestamp is not None


@pytest.mark.parametrize("path", sorted((FIXTURES / "v2" / "wire").glob("08-*.json")), ids=lambda path: path.name)
def test_events_of_protocol_2_networks_parse(path: Path) -> None:
    assert lifecycle.parse(path.read_bytes()).type == "startup"


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
