"""A model as a small web service: one page to drop a picture on, and the same answers as JSON.

    GET  /             the page (with /page.css and /page.js)
    GET  /api/model    what the model is: classes, picture size, lens, what it was made from, accuracy, chance level
    POST /api/predict  a picture as the body of the request; ?top=N
    GET  /health       whether it answers

The service keeps no picture, has no password and speaks plain HTTP. It listens on this machine alone unless told otherwise.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch

from rescene import __version__
from rescene.core.errors import ConfigError, DataError, is_out_of_memory
from rescene.core.json_files import Row
from rescene.data.sources.decode import NO_PICTURE, decode, size_of
from rescene.use.model import Model

LOOPBACK = "127.0.0.1"
MAX_BYTES = 20 * 2**20  # of a picture's file
MAX_PIXELS = 2**26  # of a picture; decoded it takes three bytes for each
MAX_CONNECTIONS = 16  # at the same time; one of them is with the model, the others wait
SILENCE_S, REQUEST_S = 10, 60  # a client may say nothing for so long; a request may take so long in all
ASSETS = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
TOO_LARGE = "E219"  # what `decode` says of a picture that would take too much memory
READ = ("/", "/page.css", "/page.js", "/api/model", "/health")
PREDICT = "/api/predict"
HEADERS = {
    "Cache-Control": "no-store",
    "Connection": "close",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Refusal(Exception):
    """An answer other than 200: its HTTP status, and the error that goes into its body."""

    def __init__(self, status: int, error: DataError) -> None:
        super().__init__(status, error)
        self.status, self.error = status, error


@dataclass
class Service:
    """A model that answers one picture at a time. ``names``: the hosts it may be called by, besides this machine's own."""

    model: Model
    max_bytes: int = MAX_BYTES
    max_pixels: int = MAX_PIXELS
    names: frozenset[str] = frozenset()
    num_answered: int = 0
    _turn: threading.Lock = field(default_factory=threading.Lock)

    @cached_property
    def card(self) -> Row:
        """What the page and other programs are told about the model."""
        about, classes = self.model.about, self.model.classes
        lens = {"name": about["lens"], "made_from": about.get("lens_made_from")} if about.get("lens") else None
        return {
            "name": self.model.path.resolve().name,
            "classes": classes,
            "chance_percent": round(100 / len(classes), 2),
            "accuracy_percent": about.get("aa"),
            "picture_size": self.model.image_size,
            "network": about["arch"]["name"],
            "method": about.get("title") or about.get("method"),
            "data": about.get("data"),
            "lens": lens,
            "made_from": made_from(about),
            "privacy": about.get("privacy"),
            "max_bytes": self.max_bytes,
            "max_pixels": self.max_pixels,
            "rescene": __version__,
        }

    def answer(self, picture: bytes, top: int) -> Row:
        """The likeliest classes of a picture. Pictures wait for each other; whoever waits too long is told so."""
        if not self._turn.acquire(timeout=REQUEST_S / 2):
            raise Refusal(
                503, DataError("E286", "the service is busy", why="other pictures come first", fix="try again")
            )
        try:
            begin = time.monotonic()
            size, pixels = self._pixels(picture)
            shares = torch.softmax(self.model.scores(pixels), dim=1)[0]
            values, places = shares.topk(min(top, len(shares)))
            self.num_answered += 1
        finally:
            self._turn.release()
        classes = self.model.classes
        named = [{"class": classes[c], "confidence": v} for c, v in zip(places.tolist(), values.tolist(), strict=True)]
        seconds = round(time.monotonic() - begin, 4)
        return {"top": named, "chance": 1 / len(classes), "width": size[0], "height": size[1], "seconds": seconds}

    def _pixels(self, picture: bytes) -> tuple[tuple[int, int], torch.Tensor]:
        """The size of a picture, and its pixels as the model takes them. Its header is judged before it is decoded."""
        width, height = size_of(picture) or (0, 0)  # decoding says why a header cannot be read
        if width * height > self.max_pixels:
            raise self._too_large(f"it has {width:,} x {height:,} pixels")
        try:
            found = decode([picture], ["the picture"], self.model.image_size)
        except DataError as error:
            damage = None if error.why == NO_PICTURE else error.why
            raise (self._too_large(error.why or "") if error.code == TOO_LARGE else _no_picture(damage)) from None
        return (width, height), found.pixels

    def _too_large(self, why: str) -> Refusal:
        fix = f"shrink it to at most {self.max_pixels:,} pixels"
        return Refusal(413, DataError("E285", "the picture has too many pixels", why=why, fix=fix))


def made_from(about: Row) -> str:
    """One sentence about what a model was made from, from what its file says."""
    images = about.get("data") or "images that its file does not name"
    method = about.get("title") or about.get("method")
    how = f" with {method}" if method else ""
    words = f"Trained{how} on {images}."
    if about.get("lens"):
        source = about.get("lens_made_from") or "something that its file does not name"
        words += f" It looks through the lens {about['lens']}, which was made from {source}."
    return words


def _no_picture(why: str | None) -> Refusal:
    fix = "send a JPEG, PNG, WebP, GIF, BMP or TIFF file"
    return Refusal(415, DataError("E284", "this cannot be read as a picture", why=why, fix=fix))


class _PictureHandler(BaseHTTPRequestHandler):
    """One request on one connection. Whatever goes wrong becomes JSON with a code."""

    service: Service
    told: Callable[[str], None]
    timeout = SILENCE_S
    protocol_version = "HTTP/1.1"  # for clients that ask before they send much (Expect: 100-continue)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("do_"):  # every method of HTTP gets an answer of ours
            return self._respond
        raise AttributeError(name)

    def _respond(self) -> None:
        begin, kind = time.monotonic(), "application/json"
        try:
            status, kind, body = 200, *self._content()
        except Refusal as refusal:
            status, body = refusal.status, _error(refusal.error)
        except (TimeoutError, ConnectionError):
            self.close_connection = True
            return
        except Exception as error:  # of the model's runtime: one bad answer must not end the service
            status, body = 500, _error(_failed(error))
        self._send(status, kind, body)
        self.told(f"{self.command} {urlsplit(self.path).path} {status} {1000 * (time.monotonic() - begin):.0f} ms")

    def _content(self) -> tuple[str, bytes]:
        """Type and bytes of the answer."""
        self._check_names()
        address = urlsplit(self.path)
        if address.path == PREDICT:
            self._allow("POST")
            return "application/json", _json(self.service.answer(self._body(), _top(address.query)))
        if address.path not in READ:
            raise Refusal(404, DataError("E280", "there is nothing here", fix=f"{', '.join(READ)} or {PREDICT}"))
        self._allow("GET", "HEAD")
        if address.path in ASSETS:
            name, kind = ASSETS[address.path]
            return f"{kind}; charset=utf-8", (files("rescene.use") / "page" / name).read_bytes()
        if address.path == "/health":
            return "application/json", _json({"status": "ok", "answered": self.service.num_answered})
        return "application/json", _json(self.service.card)

    def _allow(self, *methods: str) -> None:
        if self.command not in methods:
            raise Refusal(405, DataError("E281", f"{self.command} is not possible here", fix=f"use {methods[0]}"))

    def _check_names(self) -> None:
        """A page elsewhere may give our address a name of its own, or send a form here. Both are refused."""
        host = self.headers.get("Host", "")
        if not self._is_ours(host):
            fix = "call it by its address, or start it with --allow-host NAME"
            raise Refusal(
                421, DataError("E282", "the service is not known by this name", why=f"Host: {host[:80]}", fix=fix)
            )
        origin = self.headers.get("Origin")
        if origin is not None and urlsplit(origin).netloc != host:
            why = f"Origin: {origin[:80]}"
            raise Refusal(
                403, DataError("E282", "a page of another site asks", why=why, fix="ask from the service's own page")
            )

    def _is_ours(self, host: str) -> bool:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        if name == "localhost" or name in self.service.names:
            return True
        with contextlib.suppress(ValueError):  # a page elsewhere can borrow a name, but no number
            listening = str(self.server.server_address[0])  # type: ignore[index]
            return ipaddress.ip_address(name).is_loopback or not ipaddress.ip_address(listening).is_loopback
        return False

    def _length(self) -> int:
        text = self.headers.get("Content-Length", "")
        if not text.isascii() or not text.isdigit():
            fix = "send a Content-Length, as curl --data-binary @photo.jpg does"
            raise Refusal(411, DataError("E283", "the length of the picture is not told", fix=fix))
        if not 0 < int(text[:20]) <= self.service.max_bytes:
            what = "the request has no body" if int(text[:20]) == 0 else "the file is too large"
            fix = f"send a picture of at most {self.service.max_bytes:,} bytes"
            raise Refusal(413 if int(text[:20]) else 400, DataError("E283", what, where=f"{text[:20]} bytes", fix=fix))
        return int(text)

    def _body(self) -> bytes:
        if self.headers.get_content_maintype() == "multipart":
            fix = "send the file itself: curl --data-binary @photo.jpg"
            raise Refusal(415, DataError("E284", "this cannot be read as a picture", why="it is a form", fix=fix))
        length = self._length()
        body = self.rfile.read(length)
        if len(body) < length:
            raise Refusal(
                400,
                DataError(
                    "E287", "the picture is cut off", where=f"{len(body)} of {length} bytes", fix="send it again"
                ),
            )
        return body

    def handle_expect_100(self) -> bool:
        """The client has not sent its picture yet: refuse one that is too large before it travels."""
        try:
            self._length()
        except Refusal as refusal:
            self._send(refusal.status, "application/json", _error(refusal.error))
            return False
        return super().handle_expect_100()

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):  # the client may be gone
            self.send_response(status)
            for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            if status == 405:
                self.send_header("Allow", "POST" if urlsplit(self.path).path == PREDICT else "GET, HEAD")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the standard library refuses, such as a line that is no HTTP, in our form."""
        self.command = getattr(self, "command", None) or "GET"
        self.path = getattr(self, "path", "/")
        self._send(
            int(code), "application/json", _error(DataError("E287", "this is no request that can be read", why=message))
        )

    def version_string(self) -> str:
        return "rescene"

    def log_message(self, format: str, *args: object) -> None:
        """Lines about requests are ours (``told``)."""


class _LimitedServer(ThreadingHTTPServer):
    """A thread per connection, a limited number of them, each for a limited time."""

    daemon_threads = True
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, address: tuple[str, int], handler: type[_PictureHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
            return
        body = _error(DataError("E286", "the service is busy", why="too many connections", fix="try again"))
        with contextlib.suppress(OSError):
            request.sendall(
                b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\n"
            )
            request.sendall(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        end = threading.Timer(REQUEST_S, _cut, [request])
        end.daemon = True
        end.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            end.cancel()
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""

    def shutdown_request(self, request: Any) -> None:
        """Take what the client is still sending before closing; else it would never read why it was refused."""
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_WR)
            request.settimeout(1)
            end = time.monotonic() + SILENCE_S
            while time.monotonic() < end and request.recv(2**16):
                pass
        self.close_request(request)


def _cut(request: socket.socket) -> None:
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


def _top(query: str) -> int:
    text = parse_qs(query).get("top", ["5"])[-1]
    if not (text.isascii() and text.isdigit() and int(text[:9]) > 0):
        raise Refusal(
            400,
            DataError("E288", f"top={text[:20]!r} is no number of classes", fix="a whole number from 1, as in ?top=3"),
        )
    return int(text[:9])


def _failed(error: Exception) -> DataError:
    if is_out_of_memory(error):
        return DataError(
            "E289", "the picture needs more memory than there is", fix="a smaller picture, or --max-pixels"
        )
    return DataError("E289", "the model failed on this picture", why=f"{type(error).__name__}: {error}"[:200])


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def _error(error: DataError) -> bytes:
    parts = {"code": error.code, "what": error.what, "where": error.where, "why": error.why, "fix": error.fix}
    return _json({"error": {key: value for key, value in parts.items() if value}})


@contextmanager
def serving(
    service: Service, host: str = LOOPBACK, port: int = 0, told: Callable[[str], None] = lambda line: None
) -> Iterator[str]:
    """Answer requests in threads; yields the address. ``told`` gets a line for each request."""
    handler = type("Handler", (_PictureHandler,), {"service": service, "told": staticmethod(told)})
    try:
        server = _LimitedServer((host, port), handler)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        fix = "another --port (0: any that is free), or --host 127.0.0.1"
        raise ConfigError(
            "E503", f"cannot listen on {host}, port {port}", where="--host, --port", why=why, fix=fix
        ) from None
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), name="service", daemon=True)
    thread.start()
    shown = f"[{host}]" if ":" in host else host
    try:
        yield f"http://{shown}:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
