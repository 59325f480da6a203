"""The status page: one HTML document that needs nothing else, neither other files nor JavaScript.

The live page loads itself anew every few seconds, which would take away what somebody types at that moment. So the
field to search with is on a page that stands still, and the live page has a link to that.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import urllib.parse
from datetime import datetime
from pathlib import Path

import attrs
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from provisioner.durations import span
from provisioner.lifetimes import WARNING_SECONDS
from provisioner.monitor.chart import BAR_HEIGHT, HEIGHT, KIND_OF, MINUTE_WIDTH, chart
from provisioner.monitor.status import Role, Status
from provisioner.text import printable

#: How often the live page loads itself.
REFRESH_SECONDS = 5
#: Rows of the tables; what is beyond is in the JSON document, or can be searched for.
ROWS = 20
OUTCOMES_ROWS = 300
REASONS_ROWS = 10
#: A reason in the table of outcomes is cut to about this on the live page, so that it stays small whatever happens.
REASON_CHARACTERS = 100

_FOLDER = Path(__file__).parent
_STYLE = " ".join((_FOLDER / "page.css").read_text(encoding="utf-8").split())
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()

#: For the response: the page may use its own style and send its form to where it came from, and nothing else.
CONTENT_SECURITY_POLICY = (
    f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; img-src data:; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'"
)

_ROLES = {
    Role.LEADER: "Provisions, until another instance takes over.",
    Role.STANDBY: "Provisions nobody; waits for the leadership.",
    Role.ALONE: "Provisions; leader election is off.",
    Role.PAUSED: "Provisions nobody at the moment.",
}


def render(status: Status, *, still: bool) -> bytes:
    """The page, in UTF-8.

    :param still: it does not load itself anew, and has the field to search with
    """
    text = _template().render(
        status=status,
        still=still,
        refresh=REFRESH_SECONDS,
        role=_ROLES[status.role],
        chart=chart(status.minutes),
        at_work=sorted((each for each in status.workers if each.identity), key=lambda each: each.since),
        troubled=status.troubled[:ROWS],
        reasons=status.reasons[:REASONS_ROWS],
        outcomes=status.recent[:OUTCOMES_ROWS],
        moment=_Moment(status.time),
    )
    return text.encode("utf-8", "replace")


@attrs.frozen
class _Moment:
    """Tells times for people as they are seen from one time. All in seconds since the epoch.

    The zone is that of the log.
    """

    now: float

    def clock(self, seconds: float) -> str:
        """A time in the zone of this machine, with the date unless it is today."""
        then = _local(seconds)
        return then.strftime("%H:%M:%S" if then.date() == _local(self.now).date() else "%Y-%m-%d %H:%M")

    def minute(self, seconds: float) -> str:
        """A time of the last hour."""
        return _local(seconds).strftime("%H:%M")

    def date(self, seconds: float) -> str:
        """A day in the zone of this machine; credentials may name days beyond all calendars."""
        try:
            return _local(seconds).strftime("%Y-%m-%d")
        except (ValueError, OverflowError, OSError):
            return "a day beyond all calendars"

    def zone(self) -> str:
        """The zone that the times are in."""
        offset = _local(self.now).strftime("%z")
        return f"UTC{offset[:3]}:{offset[3:5]}"

    def since(self, seconds: float) -> str:
        """How long ago a time was."""
        return span(self.now - seconds)

    def until(self, seconds: float) -> str:
        """How long it is until a time."""
        days = (seconds - self.now) // 86400
        return f"{days:,.0f} days" if days > 1 else span(seconds - self.now)

    def soon(self, seconds: float) -> bool:
        """Whether something that expires then needs to be seen to."""
        return seconds - self.now < WARNING_SECONDS


def _local(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds).astimezone()


def _fit(value: object) -> object:
    """Make texts that come from the network fit for a page, beyond what escaping does."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _quoted(text: str) -> Markup:
    """A text as a part of a URL; made of a few ASCII characters, so that there is nothing left to be escaped."""
    return Markup(urllib.parse.quote(text, safe="", errors="replace"))


def _thousands(number: int) -> str:
    return f"{number:,}"


@functools.cache
def _template() -> Template:
    """Compiled with the first page, not with the start of every command."""
    environment = Environment(
        autoescape=True,
        finalize=_fit,
        loader=FileSystemLoader(_FOLDER),
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters.update(quoted=_quoted, thousands=_thousands)
    environment.globals.update(
        style=Markup(_STYLE),
        kind_of=KIND_OF,
        chart_height=HEIGHT,
        bar_height=BAR_HEIGHT,
        minute_width=MINUTE_WIDTH,
        rows=ROWS,
        reason_characters=REASON_CHARACTERS,
    )
    return environment.get_template("page.html")
