"""One page on this machine's loopback: nothing else is served, nobody else is answered, nothing can be changed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from rescene.errors import ConfigError

HOST, PORT = "127.0.0.1", 8765
LEAST_S, SHARE = 5.0, 1 / 5  # between two pages; of the time that may go into them
HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class LivePage:
    """What ``build`` makes, made again when somebody looks, but not more often than it is worth."""

    def __init__(self, build: Callable[[], bytes]) -> None:
        self._build, self._lock = build, threading.Lock()
        self._page, self._made, self._seconds = b"", -float("inf"), 0.0

    def get(self) -> bytes:
        with self._lock:
            begin = time.monotonic()
            if begin - self._made >= max(LEAST_S, self._seconds / SHARE):
                self._page = self._build()
                self._made = time.monotonic()
                self._seconds = self._made - begin
            return self._page


@contextmanager
def serving(build: Callable[[], bytes], port: int) -> Iterator[str]:
    """Serve the page in a thread of its own; yields its address."""
    page = LivePage(build)

    class Handler(_Handler):
        live = page

    try:
        server = ThreadingHTTPServer((HOST, port), Handler)
    except OSError as error:
        why = f"{error.strerror}: another program, or another page of ours, is there"
        raise ConfigError("E196", f"cannot serve the page on {HOST}:{port}", why=why, fix="another --port") from None
    server.daemon_threads = False  # the end waits for a page that is being made: nothing else may write it meanwhile
    thread = threading.Thread(target=server.serve_forever, name="page", daemon=True)
    thread.start()
    try:
        yield f"http://{HOST}:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    live: LivePage
    timeout = 10  # a client that says nothing holds no thread
    protocol_version = "HTTP/1.0"

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, with_body: bool) -> None:
        port = self.server.server_address[1]  # type: ignore[index]
        if self.headers.get("Host") not in {f"{HOST}:{port}", f"localhost:{port}"}:
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST)  # a web page elsewhere that names itself like us
            return
        if self.path.partition("?")[0] != "/":
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        body = self.live.get()
        self.send_response(HTTPStatus.OK)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def version_string(self) -> str:
        return "rescene"

    def log_message(self, format: str, *args: object) -> None:
        """The terminal belongs to the run."""
