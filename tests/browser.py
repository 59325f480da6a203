"""A real browser for tests: Chromium without a window, driven over its own protocol.

Commands and answers are JSON between null bytes, on two pipes. That is all there is to it, so no library is needed, and
none has to fit the version of the browser.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
from collections import deque
from collections.abc import Iterator
from typing import Any

from tests.waiting import PATIENCE_SECONDS

#: The names of the program in distributions.
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
#: How long it may take to leave.
LEAVE_SECONDS = 10.0

_FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-extensions",
    "--hide-scrollbars",
    "--no-first-run",
    # root and containers cannot have its sandbox; it sees pages of ours alone
    "--no-sandbox",
)
# the protocol is spoken on the descriptors 3 and 4
_SHELL = ("sh", "-c", 'exec "$0" "$@" 3<&0 4>&1 </dev/null >/dev/null 2>&1')


def program() -> str | None:
    """The path of the browser; None when there is none."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class Tab:
    """What a user sees and does in one tab of the browser.

    :ivar complaints: what the browser has found fault with, such as violations of the content security policy
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._numbers = itertools.count(1)
        self._events: deque[dict[str, Any]] = deque()
        self._received = b""
        self._session = ""
        self.complaints: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Log", "Runtime"):
            self.send(f"{domain}.enable")

    def show(self, *, width: int, dark: bool = False) -> None:
        """Set the width of the window, in CSS pixels, and the colours that the user wants."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def forbid_scripts(self) -> None:
        """Have the pages do without JavaScript; :meth:`evaluate` still works."""
        self.send("Emulation.setScriptExecutionDisabled", value=True)

    def open(self, url: str) -> None:
        """Load a page, and wait until it is complete."""
        self._events.clear()
        failure = self.send("Page.navigate", url=url).get("errorText")
        assert failure is None, f"{url}: {failure}"
        self.await_load()

    def await_load(self) -> None:
        """Wait until a page is complete that was asked for since the last call of `open` or `press_enter`."""
        self._await("Page.loadEventFired")

    def press_enter(self) -> None:
        """Press the key."""
        self._events.clear()
        for change in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=change, key="Enter", windowsVirtualKeyCode=13, text="\r")

    def type(self, text: str) -> None:
        """Type a text into the field that has the focus."""
        self.send("Input.insertText", text=text)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def close(self) -> None:
        """End the browser."""
        self._session = ""
        self.send("Browser.close")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command of the protocol and give the answer to it."""
        number = next(self._numbers)
        session = {"sessionId": self._session} if self._session else {}
        command = {"id": number, "method": method, "params": parameters, **session}
        assert self._process.stdin
        self._process.stdin.write(json.dumps(command).encode() + b"\0")
        self._process.stdin.flush()
        while (message := self._receive()).get("id") != number:
            self._note(message)
        assert "error" not in message, f"{method}: {message['error']}"
        result: dict[str, Any] = message["result"]
        return result

    def _await(self, event: str) -> None:
        while not self._events or self._events.popleft()["method"] != event:
            if not self._events:
                self._note(self._receive())

    def _note(self, message: dict[str, Any]) -> None:
        if message["method"] == "Log.entryAdded":
            self.complaints.append(message["params"]["entry"]["text"])
        self._events.append(message)

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._process.stdout], [], [], PATIENCE_SECONDS)
            assert ready, "the browser does not answer"
            data = os.read(self._process.stdout.fileno(), 65536)
            assert data, "the browser has ended"
            self._received += data
        text, _, self._received = self._received.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message


@contextlib.contextmanager
def start(program: str) -> Iterator[Tab]:
    """Start the browser with a profile of its own, and end it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [*_SHELL, program, *_FLAGS, f"--user-data-dir={profile}"]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        ) as process:
            try:
                tab = Tab(process)
                yield tab
                tab.close()
                process.wait(LEAVE_SECONDS)
            finally:
                process.kill()
