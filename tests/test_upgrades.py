"""When a server is sent to another version, and when no more."""

from __future__ import annotations

import functools
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provisioner.errors import HostError
from provisioner.host.upgrades import ATTEMPTS, FORGET_SECONDS, Attempts, UpgradeError, compare, is_due

REPOSITORY = "https://example.net/choria"
VERSIONS = st.text("0129aZ.~^:-_", max_size=12) | st.text(max_size=8)


class TestCompare:
    """As rpm does."""

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            ("0.30.0", "0.30.0"),
            ("01.0", "1.0"),
            ("1.000", "1.0"),
            ("0:1.0", "1.0"),
            (":1.0", "1.0"),
            ("1.0", "1_0"),
            ("1.0.", "1.0"),
            ("2.0.1a", "2.0.1a"),
            ("1b.fc17", "1b.fc17"),
            ("1.0~rc1", "1.0~rc1"),
            ("1.0^git1", "1.0^git1"),
            ("1.0-1", "1.0-01"),
            ("", ""),
        ],
    )
    def test_equal(self, one: str, other: str) -> None:
        assert compare(one, other) == 0

    @pytest.mark.parametrize(
        ("older", "newer"),
        [
            ("0.29.4", "0.30.0"),
            ("0.9", "0.10"),
            ("1.0", "1.0.1"),
            ("1.0", "1:0.1"),
            ("1.0", "1.0a"),
            ("2.0.1", "2.0.1a"),
            ("5.5p1", "5.5p2"),
            ("5.5p1", "5.5p10"),
            ("10xyz", "10.1xyz"),
            ("xyz10", "xyz10.1"),
            ("xyz.4", "2"),
            ("xyz.4", "8"),
            ("5.5p10", "5.6p1"),
            ("5.6p1", "6.5p1"),
            ("6.0", "6.0.rc1"),
            ("10a2", "10b2"),
            ("20101121", "20101122"),
            ("1.0~rc1", "1.0"),
            ("1.0~rc1", "1.0~rc2"),
            ("1.0~rc1~git123", "1.0~rc1"),
            ("1.0", "1.0^"),
            ("1.0", "1.0^git1"),
            ("1.0^git1", "1.0^git2"),
            ("1.0^git1", "1.01"),
            ("1.0^20160101", "1.0.1"),
            ("1.0^20160101^git1", "1.0^20160102"),
            ("1.0~rc1^git1", "1.0"),
            ("1.0^git1~pre", "1.0^git1"),
            ("1.0", "1.0-1"),
            ("1.0-9", "1.0-10"),
            ("1.0-rc-1", "1.0-rc-2"),
            ("1.0~rc1", "1.0-1"),
        ],
    )
    def test_older_and_newer(self, older: str, newer: str) -> None:
        assert compare(older, newer) < 0
        assert compare(newer, older) > 0

    @given(VERSIONS, VERSIONS, VERSIONS)
    def test_any_texts_have_one_order(self, one: str, two: str, three: str) -> None:
        assert compare(one, one) == 0
        assert compare(one, two) == -compare(two, one)
        ordered = sorted([one, two, three], key=functools.cmp_to_key(compare))
        assert all(compare(older, newer) <= 0 for older, newer in itertools.combinations(ordered, 2))

    @given(VERSIONS)
    def test_a_tilde_makes_older_and_a_caret_newer(self, version: str) -> None:
        assert compare(f"{version}~a", version) < 0 < compare(f"{version}^a", version)


def due(version: str, target: str, *, upgradable: bool = True, repository: str = REPOSITORY) -> bool:
    return is_due(version=version, upgradable=upgradable, target=target, repository=repository)


class TestIsDue:
    """What the helper names is compared with what the server says it runs."""

    @pytest.mark.parametrize("target", ["0.30.0", "0.28", "0.29.4~rc1", "1:0.29.4"])
    def test_another_version_older_or_newer(self, target: str) -> None:
        assert due("0.29.4", target)

    def test_the_same_version_needs_nothing(self) -> None:
        assert not due("0.29.4", "0.29.04")
        assert not due("0.29.4", "0.29.4", upgradable=False, repository="")

    def test_a_server_that_does_not_say_its_version(self) -> None:
        with pytest.raises(UpgradeError, match="does not say which version"):
            due("", "0.30.0")

    def test_a_server_that_cannot(self) -> None:
        with pytest.raises(UpgradeError, match=r"from 0\.29\.4 to 0\.30\.0: .*upgradable is false"):
            due("0.29.4", "0.30.0", upgradable=False)

    def test_no_repository(self) -> None:
        with pytest.raises(UpgradeError, match="upgrades_repository is not set"):
            due("0.29.4", "0.30.0", repository="")

    @pytest.mark.parametrize(
        "target", ["..", "../1", "1/2", " 1", "1\n", "", "1" * 33, "-1", "a b", "1?x", "1%2f", "١"]
    )
    def test_a_version_that_is_none(self, target: str) -> None:
        with pytest.raises(UpgradeError, match="is not one"):
            due("0.29.4", target)

    @given(st.text(), st.text(), st.booleans(), st.text())
    def test_any_text(self, version: str, target: str, upgradable: bool, repository: str) -> None:
        try:
            wanted = is_due(version=version, upgradable=upgradable, target=target, repository=repository)
        except HostError as error:
            assert str(error).isprintable()  # noqa: PT017 -- most texts are refused, a few are not
        else:
            assert wanted == (compare(version, target) != 0)


class TestAttempts:
    """Upgrades that lead nowhere do not go on for ever."""

    def test_after_two_it_is_an_error_that_names_both_versions(self) -> None:
        attempts = Attempts()
        for _ in range(ATTEMPTS):
            attempts.check("n1", version="0.29.4", target="0.30.0")
            attempts.add("n1", "0.30.0")
        with pytest.raises(UpgradeError, match=r"0\.30\.0 .* still runs 0\.29\.4"):
            attempts.check("n1", version="0.29.4", target="0.30.0")

    def test_other_servers_and_other_targets_are_not_touched(self) -> None:
        attempts = Attempts()
        for _ in range(ATTEMPTS):
            attempts.add("n1", "0.30.0")
        attempts.check("n2", version="0.29.4", target="0.30.0")
        attempts.check("n1", version="0.29.4", target="0.31.0")

    def test_one_that_arrived_starts_anew(self) -> None:
        attempts = Attempts()
        for _ in range(ATTEMPTS):
            attempts.add("n1", "0.30.0")
        attempts.arrived("n1", "0.30.0")
        attempts.arrived("n2", "0.30.0")
        attempts.check("n1", version="0.29.4", target="0.30.0")

    def test_it_is_forgotten_after_a_day_and_takes_no_room(self) -> None:
        now = 0.0
        attempts = Attempts(clock=lambda: now)
        for _ in range(ATTEMPTS):
            attempts.add("n1", "0.30.0")
        now = FORGET_SECONDS - 1
        attempts.add("n2", "0.30.0")
        with pytest.raises(UpgradeError):
            attempts.check("n1", version="0.29.4", target="0.30.0")
        now = FORGET_SECONDS
        attempts.check("n1", version="0.29.4", target="0.30.0")
        assert len(attempts) == 1
