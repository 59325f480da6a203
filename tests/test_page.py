"""The status page: well-formed and small whatever it has to show, and fit for people in a real browser."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import os
import re
import time
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest

from provisioner.monitor import chart as charts
from provisioner.monitor import page
from provisioner.monitor.chart import chart
from provisioner.monitor.http import MonitorServer
from provisioner.monitor.status import (
    Attempt,
    Connection,
    Known,
    Look,
    Minute,
    Outcome,
    Queue,
    Role,
    Status,
    Trouble,
    WorkerState,
    reasons,
)
from provisioner.simulate.misbehaviour import Misbehaviour
from provisioner.simulate.server import Server
from provisioner.text import printable
from tests import browser
from tests.browser import Tab
from tests.conftest import Eventually, StartFleet
from tests.installation import SITE
from tests.scheduled import MakeDaemon, ScheduledDaemon, servers

#: In the middle of a day, wherever the tests run.
NOW = time.mktime((2026, 11, 30, 12, 0, 0, 0, 0, -1))
HOUR = 3600.0
DAY = 86400.0

#: What somebody may send to harm those who look at the page. All that is visible of it must be shown as text.
HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "</td></tr></table></style><h1>hacked</h1>",
    "<!-- ",
    "]]>",
    "&lt;b&gt; &amp; &#60;",
    "{{ 7 * 7 }}{% raw %}",
    "javascript:alert(1)",
    "\u202egro.live\u2066\u200f",
    "a\x00b\x1b[31m\r\nSet-Cookie: a=b",
    "\ud800",
    "x" * 300,
    "W\u0336\u0489" * 100,
]

_VOID = {"meta", "link", "input"}
#: What ends an element without an end tag of its own, by its name.
_IMPLIED = {
    "th": {"th", "thead"},
    "td": {"td", "tr", "tbody"},
    "tr": {"tr", "thead", "tbody"},
}


class Document(html.parser.HTMLParser):
    """A page, read strictly: every element must be ended, by its own end tag or where the standard lets that out.

    :ivar elements: all of them with their attributes, in order
    :ivar text: all that a reader sees, in one line
    """

    def __init__(self, source: bytes) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self._texts: list[str] = []
        self._open: list[str] = []
        self.style = ""
        self.feed(source.decode())
        self.close()
        assert self._open == [], "not ended"
        self.text = " ".join(" ".join(self._texts).split())

    def all(self, name: str) -> list[dict[str, str]]:
        return [attributes for tag, attributes in self.elements if tag == name]

    def values(self, attribute: str) -> list[str]:
        return [attributes[attribute] for _, attributes in self.elements if attribute in attributes]

    @property
    def outline(self) -> list[str]:
        return [tag for tag, _ in self.elements]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        while self._open and tag in _IMPLIED.get(self._open[-1], ()):
            self._open.pop()
        attributes = {name: value or "" for name, value in attrs}
        assert len(attributes) == len(attrs), f"an attribute twice in {tag}"
        self.elements.append((tag, attributes))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert "svg" in self._open, f"<{tag}/>"
        self.handle_starttag(tag, attrs)
        self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        while self._open[-1] != tag and tag in _IMPLIED.get(self._open[-1], {"table"}):
            self._open.pop()
        assert self._open.pop() == tag, f"</{tag}>"

    def handle_data(self, data: str) -> None:
        if "style" in self._open:
            self.style += data
        elif data.strip():
            self._texts.append(data)

    def handle_comment(self, data: str) -> None:
        pytest.fail(f"a comment: {data}")


def document(status: Status, *, still: bool = False) -> Document:
    return Document(page.render(status, still=still))


def attempt(number: int = 0, outcome: Outcome = Outcome.PROVISIONED, reason: str = "", **changes: Any) -> Attempt:
    made = Attempt(
        identity=f"web{number:04}.example.net",
        worker="worker-1",
        ended=NOW - number,
        seconds=1.234,
        outcome=outcome,
        step="rpcutil#inventory" if reason else "",
        reason=reason,
    )
    return attrs.evolve(made, **changes)


def trouble(number: int = 0, **changes: Any) -> Trouble:
    made = Trouble(
        identity=f"db{number:04}.example.net",
        failures=7,
        since=NOW - HOUR,
        last=NOW - 60,
        step="helper",
        reason="the helper exited with code 1",
        next_try=NOW + 750,
    )
    return attrs.evolve(made, **changes)


def status(**changes: Any) -> Status:
    """An instance that has done nothing yet, unless told otherwise."""
    recent = changes.pop("recent", [])
    troubled = changes.pop("troubled", [])
    made = Status(
        time=NOW,
        identity="prov.example.net",
        site="lab",
        version="1.2.3",
        started=NOW - 2 * HOUR,
        role=Role.ALONE,
        problems=[],
        connection=Connection(
            connected=True, broker="nats://broker.example.net:4222", since=NOW - HOUR, reconnections=0, error=""
        ),
        queue=Queue(waiting=0, queued=0, busy=0),
        workers=[WorkerState(name=f"worker-{number}") for number in range(1, 5)],
        troubled=troubled,
        troubled_count=len(troubled),
        recent=recent,
        reasons=reasons(recent),
        minutes=[Minute(start=NOW - 60 * ago, outcomes={}) for ago in reversed(range(60))],
        expiries={},
    )
    return attrs.evolve(made, **changes)


def full(
    text: str = "no reply within 22 s, so that nobody knows what has become of the request and of the server",
) -> Status:
    """An instance with all that the page can show, 64 workers and 300 outcomes.

    :param text: the reason of one failure in ten
    """
    recent = [attempt(number, Outcome.FAILED, text) if number % 10 == 0 else attempt(number) for number in range(300)]
    return status(
        role=Role.LEADER,
        queue=Queue(waiting=50_000, queued=49_900, busy=64),
        workers=[
            WorkerState(name=f"worker-{number}", identity=f"db{number}.example.net", step="helper", since=NOW - number)
            for number in range(1, 65)
        ],
        troubled=[trouble(number, reason=text) for number in range(page.ROWS)],
        troubled_count=50_000,
        recent=recent,
        minutes=[
            Minute(start=NOW - 60 * ago, outcomes={Outcome.PROVISIONED: 300 + ago, Outcome.FAILED: 1 + ago % 3})
            for ago in reversed(range(60))
        ],
        expiries={"certificate": NOW + 200 * DAY, "token": NOW + 3 * DAY},
    )


def spoilt(text: str) -> Status:
    """An instance in which all that may come from elsewhere is `text`."""
    return status(
        identity=text,
        site=text,
        problems=[text],
        connection=Connection(connected=False, broker=text, since=NOW, reconnections=1, error=text),
        workers=[WorkerState(name="worker-1", identity=text, step=text, since=NOW)],
        troubled=[trouble(identity=text, step=text, reason=text)],
        recent=[attempt(0, Outcome.FAILED, text, identity=text, step=text)],
        expiries={text: NOW},
    )


def spoilt_search(text: str) -> Status:
    known = Known(identity=text, sighted=NOW, step=text, worker=text)
    return attrs.evolve(spoilt(text), search=text, known=[known], refused=text)


class TestForm:
    """What holds for every page, whatever it shows."""

    @pytest.fixture(params=["empty", "full", "still", "spoilt", "found", "not found"])
    def shown(self, request: pytest.FixtureRequest) -> Document:
        pages: dict[str, Callable[[], Document]] = {
            "empty": lambda: document(status()),
            "full": lambda: document(full()),
            "still": lambda: document(full(), still=True),
            "spoilt": lambda: document(spoilt("<>")),
            "found": lambda: document(spoilt_search("<>"), still=True),
            "not found": lambda: document(status(search="x", refused="denied"), still=True),
        }
        return pages[str(request.param)]()

    def test_it_says_what_it_is(self, shown: Document) -> None:
        assert shown.elements[0] == ("html", {"lang": "en"})
        assert shown.all("meta")[0] == {"charset": "utf-8"}
        assert shown.outline.count("title") >= 1
        assert shown.outline.count("h1") == shown.outline.count("main") == 1

    def test_it_needs_nothing_from_elsewhere(self, shown: Document) -> None:
        assert not {"script", "img", "iframe", "object", "base"} & set(shown.outline)
        assert shown.values("src") == shown.values("style") == shown.values("action") == []
        assert all(re.match(r"/(?!/)|#|data:,$", link) for link in shown.values("href"))
        assert "url(" not in shown.style
        assert "@import" not in shown.style

    def test_its_parts_have_names(self, shown: Document) -> None:
        names = shown.values("id")
        assert len(names) == len(set(names))
        for attribute in ("aria-labelledby", "for"):
            assert set(shown.values(attribute)) <= set(names)
        assert {link[1:] for link in shown.values("href") if link.startswith("#")} <= set(names)
        assert all("aria-labelledby" in section for section in shown.all("section"))
        assert all(header == {"scope": "col"} for header in shown.all("th"))
        assert shown.outline.count("table") == shown.outline.count("thead")

    def test_the_policy_permits_its_style_and_no_other(self, shown: Document) -> None:
        digest = base64.b64encode(hashlib.sha256(shown.style.encode()).digest()).decode()
        assert f"style-src 'sha256-{digest}';" in page.CONTENT_SECURITY_POLICY
        assert page.CONTENT_SECURITY_POLICY.startswith("default-src 'none';")


class TestEscaping:
    """Texts from the network stay texts."""

    @pytest.mark.parametrize("text", HOSTILE)
    @pytest.mark.parametrize("make", [spoilt, spoilt_search])
    def test_a_text_makes_no_elements_and_is_shown(self, text: str, make: Callable[[str], Status]) -> None:
        shown, harmless = document(make(text), still=True), document(make("harmless"), still=True)

        assert shown.outline == harmless.outline
        assert [set(attributes) for _, attributes in shown.elements] == [
            set(attributes) for _, attributes in harmless.elements
        ]
        assert shown.text.count(" ".join(printable(text).split())) >= 5
        assert not any(character in shown.text for character in "\x00\x1b\u202e\u2066\u200f\ud800")

    @pytest.mark.parametrize("identity", ["a&b=c#d", 'a"b', "a%41+b", "\u00fc" * 120, "a/../b?c"])
    def test_a_link_leads_to_the_identity(self, identity: str) -> None:
        shown = document(status(troubled=[trouble(identity=identity)]))
        [link] = [link for link in shown.values("href") if link.startswith("/?identity=") and link != "/?identity="]

        assert urllib.parse.parse_qs(urllib.parse.urlsplit(link).query) == {"identity": [identity]}

    def test_what_is_searched_for_is_in_the_field(self) -> None:
        shown = document(status(search='a" onfocus="alert(1)'), still=True)
        assert shown.all("input")[0]["value"] == 'a" onfocus="alert(1)'


class TestSize:
    """The page is small."""

    def test_with_64_workers_and_300_outcomes(self) -> None:
        body = page.render(full(), still=False)
        assert len(body) < 50 * 1024
        assert body.count(b"web0") >= 300

    def test_when_everything_fails_for_the_longest_of_reasons(self) -> None:
        failed = [attempt(number, Outcome.FAILED, f"{number:03} {'x' * 1000}") for number in range(500)]
        assert len(page.render(attrs.evolve(full("x" * 1000), recent=failed), still=False)) < 110 * 1024

    def test_the_whole_reason_is_on_the_page_that_stands_still(self) -> None:
        reason = f"it is {'very ' * 40}broken"
        known = status(recent=[attempt(0, Outcome.FAILED, reason)])
        assert reason not in document(attrs.evolve(known, reasons=[])).text
        assert reason in document(attrs.evolve(known, reasons=[]), still=True).text


class TestContents:
    """What the page says."""

    def test_the_live_page_loads_itself_and_the_still_one_can_be_searched(self) -> None:
        live, still = document(status()), document(status(), still=True)

        assert {"http-equiv": "refresh", "content": str(page.REFRESH_SECONDS)} in live.all("meta")
        assert "/?identity=" in live.values("href")
        assert not {"form", "input"} & set(live.outline)
        assert not any("http-equiv" in meta for meta in still.all("meta"))
        assert still.all("form") == [{"role": "search"}]
        assert still.all("input")[0]["name"] == "identity"
        assert "/" in still.values("href")

    @pytest.mark.parametrize("role", Role)
    def test_the_role_comes_first(self, role: Role) -> None:
        assert document(status(role=role)).text.startswith(f"{role.title()}, 0 waiting")

    def test_a_connection_that_is_there(self) -> None:
        text = document(status()).text
        assert "Connected to nats://broker.example.net:4222, since 11:00:00 (1h00m) Queue" in text

    def test_a_connection_that_came_back(self) -> None:
        back = Connection(connected=True, broker="nats://b:1", since=NOW, reconnections=2, error="the broker went away")
        text = document(status(connection=back)).text
        assert "since 12:00:00 (0s); 2 reconnections Last error: the broker went away" in text

    def test_a_connection_that_is_not_there(self) -> None:
        gone = Connection(connected=False, broker="nats://b:1", since=NOW - 5, reconnections=1, error="refused")
        text = document(status(connection=gone, problems=["broker: not connected"])).text
        assert "Something is wrong broker: not connected" in text
        assert "Not connected was to nats://b:1, since 11:59:55 (5s); 1 reconnection Reason: refused" in text

    def test_the_queue_with_large_numbers(self) -> None:
        text = document(full()).text
        assert "Queue 49,900 wait for a worker; 64 of 64 workers busy; 50,000 nodes known" in text
        assert "In trouble 50,000 nodes whose last attempt failed" in text

    def test_workers_at_work_the_longest_first(self) -> None:
        workers = [
            WorkerState(name="worker-1"),
            WorkerState(name="worker-2", identity="n2", step="helper", since=NOW - 3),
            WorkerState(name="worker-3", identity="n3", since=NOW - 200),
        ]
        text = document(status(workers=workers)).text
        assert "n3 11:56:40 (3m20s) begins worker-3 n2 11:59:57 (3s) helper worker-2 1 is idle." in text
        assert "All 4 are idle." in document(status()).text

    def test_nodes_in_trouble(self) -> None:
        once = trouble(1, failures=1, next_try=0.0, step="rpcutil#inventory", reason="rpcutil#inventory: no reply")
        text = document(status(troubled=[trouble(), once])).text
        assert (
            "db0000.example.net 7 times since 11:00:00 in 12m30s the helper exited with code 1 "
            "db0001.example.net once, 11:59:00 with the next discovery rpcutil#inventory: no reply"
        ) in text
        assert "all of the 50,000" in document(full()).text

    def test_outcomes_and_reasons(self) -> None:
        recent = [
            attempt(1),
            attempt(2, Outcome.FAILED, "rpcutil#inventory: no reply"),
            attempt(3, Outcome.DEFERRED, "wait"),
        ]
        text = document(status(recent=recent)).text
        assert "web0001.example.net 11:59:59 provisioned 1.23 web0002" in text
        assert "web0002.example.net 11:59:58 failed 1.23 rpcutil#inventory: no reply web0003" in text
        assert "1 failed 11:59:58 rpcutil#inventory: no reply 1 deferred 11:59:57 rpcutil#inventory wait" in text

    def test_days_other_than_today(self) -> None:
        assert "2026-11-28 12:00" in document(status(recent=[attempt(ended=NOW - 2 * DAY)])).text

    def test_times_are_those_of_the_zone_of_the_machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        try:
            with monkeypatch.context() as change:
                change.setenv("TZ", "Asia/Kolkata")
                time.tzset()
                assert "Live: 17:30:00 UTC+05:30" in document(status(time=1796040000.0)).text
        finally:
            time.tzset()

    def test_credentials(self) -> None:
        expiries = {"certificate": NOW + 200 * DAY, "signing_token": NOW + DAY, "token": NOW - 1, "x": 1e20}
        text = document(status(expiries=expiries)).text
        assert "Certificate expires on 2027-06-18, in 200 days" in text
        assert "Signing token expires on 2026-12-01, in 1d00h" in text
        assert "Token expired on 2026-11-30" in text
        assert "X expires on a day beyond all calendars" in text
        assert "None that expire." in document(status()).text

    def test_a_search_shows_who_is_on_its_way(self) -> None:
        known = [
            Known(identity="n1", sighted=NOW - 5, step="", worker=""),
            Known(identity="n2", sighted=NOW - 5, step="helper", worker="worker-2"),
            Known(identity="n3", sighted=NOW - 5, step="choria_provision#restart", worker=""),
        ]
        text = document(status(search="n", known=known), still=True).text
        assert "n1 11:59:55 (5s) waits for a worker n2 11:59:55 (5s) with worker-2, helper n3" in text
        assert text.count("done with, leaving") == 1
        assert "Role" not in text

    def test_a_search_that_finds_nothing_says_why_as_far_as_that_is_known(self) -> None:
        text = document(status(search="db1", refused="'^db' in deny is found in it"), still=True).text
        assert "No node of that name waits here at the moment." in text
        assert "would be left alone: '^db' in deny is found in it." in text

    def test_a_search_that_finds_many_has_a_link_to_all(self) -> None:
        found = status(search="d&b", troubled=[trouble(number) for number in range(page.ROWS)])
        assert document(found, still=True).values("href").count("/status.json?identity=d%26b") == 1


class TestChart:
    """The figures behind the picture of the last hour."""

    @staticmethod
    def minute(**outcomes: int) -> Minute:
        return Minute(start=NOW, outcomes={Outcome[name]: count for name, count in outcomes.items()})

    def test_bars_stand_on_one_another(self) -> None:
        drawn = chart([self.minute(), self.minute(PROVISIONED=5, UPGRADING=2, DEFERRED=1, LEFT_ALONE=1, FAILED=1)])

        assert drawn.top == 10
        assert drawn.paths == {
            "good": "M4 100v-47h3v47z",
            "away": "M4 53v-19h3v19z",
            "later": "M4 34v-19h3v19z",
            "failed": "M4 15v-9h3v9z",
        }

    def test_one_failure_among_thousands_is_seen(self) -> None:
        assert chart([self.minute(PROVISIONED=9999, FAILED=1)]).paths["failed"] == "M0 6v-2h3v2z"

    @pytest.mark.parametrize(
        ("most", "top"),
        [
            (0, 5),
            (1, 5),
            (5, 5),
            (6, 6),
            (7, 8),
            (9, 10),
            (10, 10),
            (11, 20),
            (21, 30),
            (81, 100),
            (230, 300),
            (50_000, 50_000),
        ],
    )
    def test_the_scale_ends_with_a_round_number(self, most: int, top: int) -> None:
        assert chart([self.minute(PROVISIONED=most)]).top == top

    def test_nothing_is_higher_than_the_drawing(self) -> None:
        drawn = chart([self.minute(PROVISIONED=49_997, UPGRADING=1, DEFERRED=1, FAILED=1)])
        tops = [
            int(y) - int(height) for path in drawn.paths.values() for y, height in re.findall(r" (\d+)v-(\d+)", path)
        ]
        assert min(tops) >= 0
        assert charts.BAR_HEIGHT + 3 * charts.SMALLEST_HEIGHT <= charts.HEIGHT

    def test_the_whole_hour_is_told_in_words(self) -> None:
        shown = document(status(minutes=[self.minute(PROVISIONED=3, FAILED=1), self.minute(PROVISIONED=2)]))
        assert "Attempts by minute in the last hour: 5 provisioned, 1 failed" in shown.values("aria-label")
        assert "12:00: 3 provisioned, 1 failed" in shown.text
        assert "5 provisioned 1 failed" in shown.text


#: Texts that stand out too little from what is behind them.
FAINT = """
(() => {
  const parse = color => color.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(c => c / 255)
    .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = element => {
    const color = parse(getComputedStyle(element).backgroundColor);
    return color[3] === 0 ? behind(element.parentElement) : color;
  };
  const faint = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement;
    if (!texts.currentNode.data.trim() || element.closest("svg")) continue;
    const pair = [light(parse(getComputedStyle(element).color)), light(behind(element))].sort();
    if ((pair[1] + 0.05) / (pair[0] + 0.05) < 4.5) faint.push(texts.currentNode.data.trim());
  }
  return faint;
})()
"""


@pytest.fixture(scope="module")
def _browser() -> Iterator[Tab]:
    program = browser.program()
    if program is None:
        if os.environ.get("CI") == "true":
            pytest.fail("there must be a browser: install chromium")
        pytest.skip("there is no chromium")
    with browser.start(program) as tab:
        yield tab


@pytest.fixture
def tab(_browser: Tab) -> Iterator[Tab]:
    """A window in which no page may run scripts."""
    _browser.forbid_scripts()
    _browser.show(width=1440)
    yield _browser
    _browser.open("about:blank")
    complaints, _browser.complaints = _browser.complaints, []
    assert complaints == []


Serve = Callable[[Look], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serves what a look gives; gives the URL of the page."""
    servers: list[MonitorServer] = []

    def start(look: Look) -> str:
        server = MonitorServer("127.0.0.1", 0, metrics=bytes, liveness={}, readiness={}, status=look)
        servers.append(server.__enter__())
        return f"http://127.0.0.1:{server.port}/"

    yield start
    for server in servers:
        server.__exit__()


class TestBrowser:
    """What users see, without any JavaScript."""

    @pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
    @pytest.mark.parametrize("width", [360, 1440])
    @pytest.mark.parametrize("text", ["no reply within 22 s", "x" * 300, "<script>alert(1)</script>"])
    def test_it_fits_and_can_be_read(self, tab: Tab, serve: Serve, width: int, dark: bool, text: str) -> None:
        shown = attrs.evolve(full(text), problems=[text], recent=[attempt(0, Outcome.FAILED, text, identity=text)] * 3)
        url = serve(lambda *_: shown)
        tab.show(width=width, dark=dark)
        for path in ("", "?identity="):
            tab.open(url + path)
            assert tab.evaluate("document.documentElement.scrollWidth") == width
            assert tab.evaluate(FAINT) == []
            assert tab.evaluate("document.scripts.length") == 0
            assert tab.evaluate("getComputedStyle(document.body).maxWidth") != "none", "its style is not applied"

    def test_it_loads_itself_anew(self, tab: Tab, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(page, "REFRESH_SECONDS", 1)
        looks: list[str] = []

        def look(search: str = "", limit: int | None = None) -> Status:  # noqa: ARG001
            looks.append(search)
            return status(queue=Queue(waiting=len(looks), queued=len(looks), busy=0))

        tab.open(serve(look))
        tab.await_load()
        tab.await_load()
        assert re.fullmatch("Alone, [3-9] waiting \u2013 prov.example.net", tab.evaluate("document.title"))

    def test_somebody_looks_for_a_node(
        self,
        tab: Tab,
        serve: Serve,
        make_daemon: MakeDaemon,
        start_fleet: StartFleet,
        eventually: Eventually,
    ) -> None:
        daemon: ScheduledDaemon = make_daemon()
        bad = Server(identity="bad.example.net", site=SITE, misbehaviour=Misbehaviour.ERROR_STATUS)
        start_fleet(*servers(5), bad)
        daemon.start()
        eventually(lambda: len(daemon.scheduler.history.recent()) == 6)

        tab.open(serve(daemon.scheduler.overview.look))
        assert tab.evaluate("document.querySelector('.outcomes tbody').rows.length") == 6
        tab.evaluate("document.querySelector('nav a').focus()")
        tab.press_enter()
        tab.await_load()
        # by itself
        eventually(lambda: tab.evaluate("document.activeElement.id") == "identity")
        tab.type("BAD.example")
        tab.press_enter()
        tab.await_load()
        assert tab.evaluate("location.search") == "?identity=BAD.example"
        rows = tab.evaluate("[...document.querySelectorAll('tbody tr')].map(row => row.innerText)")
        assert len(rows) == 2, "its trouble and its one outcome"
        assert all(row.startswith("bad.example.net") for row in rows)
        assert all("rpcutil#inventory: refused" in row for row in rows)
