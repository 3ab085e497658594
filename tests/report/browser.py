"""A real browser for tests: Chromium without a window, spoken to over its DevTools pipe. Standard library only."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe"),
)
# Chromium reads commands from descriptor 3 and answers on 4.
_LAUNCH = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
_PATIENCE_S = 60


class Tab:
    """One page. ``requests`` lists every address it asked for."""

    def __init__(self, to: int, back: int) -> None:
        self.to, self.back, self.rest, self.count = to, back, b"", 0
        self.session: str | None = None
        self.requests: list[str] = []
        self.loads = 0
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Network.enable")
        self.call("Page.enable")

    def call(self, method: str, **params: Any) -> Any:
        """One command and its answer; events that arrive meanwhile are noted."""
        self.count += 1
        number, message = self.count, {"id": self.count, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == number:
                assert "error" not in found, found
                return found["result"]

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + _PATIENCE_S
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.back], [], [], max(0.0, end - time.monotonic()))
            chunk = os.read(self.back, 1 << 20) if ready else b""
            assert chunk, "the browser went silent"
            self.rest += chunk
        line, _, self.rest = self.rest.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        if found.get("method") == "Network.requestWillBeSent":
            self.requests.append(found["params"]["request"]["url"])
        self.loads += found.get("method") == "Page.loadEventFired"
        return found

    def open(self, page: Path | str, width: int = 1200, dark: bool = False, media: str = "screen") -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 500
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=media, features=[scheme])
        before = self.loads
        self.call("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        while self.loads == before:
            self._next()

    def wait_for_reload(self) -> None:
        before = self.loads
        while self.loads == before:
            self._next()

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def picture(self) -> bytes:
        """The page as it is seen, as PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip={**size, "scale": 1})
        return base64.b64decode(found["data"])


@contextmanager
def browser() -> Iterator[Tab]:
    """A fresh Chromium with an empty profile; it is gone afterwards."""
    read_commands, to = os.pipe()
    back, write_answers = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        ends = [str(read_commands), str(write_answers)]
        process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCH, *ends, CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(read_commands, write_answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_commands)
        os.close(write_answers)
        try:
            yield Tab(to, back)
        finally:
            process.kill()
            process.wait()
            os.close(to)
            os.close(back)
