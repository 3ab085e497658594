"""The way to the server, looked at before anything is sent: is it there, is it ours, and what time does it have?"""

from __future__ import annotations

import ssl
import time
import urllib.request
from email.utils import parsedate_to_datetime
from http.client import HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rescene.deploy.findings import Row, row

AHEAD_S, BEHIND_S = 4.0, 300.0  # Flower refuses a signature from 5 s in its future or 305 s in its past
SOON_S = 30 * 86_400.0
TIMEOUT_S = 10.0
_FOREIGN = {7, 18, 19, 20, 21, 30}  # OpenSSL's codes: another authority signed, or none that we know
_OTHER_NAME = {62, 64}
_NOT_YET, _EXPIRED = 9, 10


def server_rows(server: str, authority: Path) -> list[Row]:
    """Reach the server as a node would, through the proxy if there is one; ask it for nothing but its time."""
    host, port = split(server)
    try:
        context = ssl.create_default_context(cafile=authority)
    except (OSError, ssl.SSLError):
        return []  # the row of ca.crt says so
    connection, way = _connection(host, port, context)
    try:
        connection.request("GET", "/v1/fleet/", headers={"Connection": "close"})
        answer = connection.getresponse()
    except ssl.SSLError as error:
        return [row("server reachable", f"{server}{way}"), row("TLS", "", *explain(error, host))]
    except (OSError, HTTPException) as error:
        why = f"{getattr(error, 'strerror', None) or error or type(error).__name__}"
        fix = "is the server up, the port open in the firewall, `server` in site.yaml right, HTTPS_PROXY right?"
        return [row("server reachable", "", f"no connection to {server}{way}: {why}", fix)]
    finally:
        connection.close()
    shut = "the door forbids /v1/fleet/" if answer.status == 403 else ""
    return [
        row("server reachable", f"{server}{way}", shut, "the operator's proxy must forward it: server/nginx.conf"),
        row("TLS", "the server's certificate is this federation's"),
        _clock(answer),
    ]


def split(server: str) -> tuple[str, int]:
    """
    >>> split("fl.example.org:8443"), split("[::1]:8443"), split("10.0.0.7")
    (('fl.example.org', 8443), ('::1', 8443), ('10.0.0.7', 443))
    """
    parts = urlsplit(f"//{server}")
    return parts.hostname or server, parts.port or 443


def _connection(host: str, port: int, context: ssl.SSLContext) -> tuple[HTTPSConnection, str]:
    proxy = urllib.request.getproxies().get("https")
    if not proxy or urllib.request.proxy_bypass(host):
        return HTTPSConnection(host, port, timeout=TIMEOUT_S, context=context), ""
    way = urlsplit(proxy)
    made = HTTPSConnection(way.hostname or "", way.port or 3128, timeout=TIMEOUT_S, context=context)
    made.set_tunnel(host, port)
    return made, f" through the proxy {way.hostname}"


def explain(error: ssl.SSLError, host: str) -> tuple[str, str]:
    """Problem and fix in words."""
    code = getattr(error, "verify_code", None)
    if code in _FOREIGN:
        return "the server's certificate is not signed by this ca.crt", "ask the operator for the federation's ca.crt"
    if code in _OTHER_NAME:
        return (
            f"the server's certificate is not for {host}",
            "`server` in site.yaml must be the --host of `deploy init`",
        )
    if code == _NOT_YET:
        return "the certificate is not valid yet", "set this machine's clock (NTP)"
    if code == _EXPIRED:
        return "the certificate has expired", "the operator makes a new federation; or this clock is wrong"
    return f"no TLS: {error.reason or error}", "is this the server's port, and not a plain web server?"


def _clock(answer: HTTPResponse) -> Row:
    told = answer.headers.get("Date")
    if not told:
        return row("clock", "the server does not tell its time")
    ahead = time.time() - parsedate_to_datetime(told).timestamp()
    words = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the server's"
    wrong = not -BEHIND_S < ahead < AHEAD_S
    return row("clock", words, "the server would refuse this site" if wrong else "", "set the clock of both (NTP)")


def authority_row(path: Path) -> Row:
    """ca.crt can be read and is valid today."""
    try:
        (found, *_) = ssl.create_default_context(cafile=path).get_ca_certs() or [{}]
    except OSError as error:
        return row("ca.crt", "", f"cannot be used: {error.strerror or error}", "ask the operator for it")
    if not found:
        return row("ca.crt", "", "it holds no authority's certificate", "ask the operator for it")
    return row("ca.crt", *_validity(found))


def certificate_row(folder: Path, host: str) -> Row:
    """The server's certificate as a site at ``host`` would see it: a handshake without a socket."""
    try:
        found = _handshake(folder, host)
    except ssl.SSLCertVerificationError as error:
        return row(f"certificate for {host}", "", explain(error, host)[0], "rescene deploy init, and new site folders")
    except (OSError, ssl.SSLError) as error:
        why = "server.key does not belong to server.pem" if isinstance(error, ssl.SSLError) else str(error)
        return row(f"certificate for {host}", "", why, "restore server/ from a backup")
    return row(f"certificate for {host}", *_validity(found))


def _handshake(folder: Path, host: str) -> dict[str, Any]:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "server.pem", folder / "server.key")
    client = ssl.create_default_context(cafile=folder / "ca.crt")
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    there, here = client.wrap_bio(down, up, server_hostname=host), server.wrap_bio(up, down, server_side=True)
    for side in (there, here, there):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue  # the other one's turn
    return there.getpeercert() or {}


def _validity(certificate: dict[str, Any]) -> tuple[str, str, str]:
    """Result, problem and fix of a certificate's dates."""
    begins, ends = (ssl.cert_time_to_seconds(certificate[key]) for key in ("notBefore", "notAfter"))
    left = ends - time.time()
    until = f"valid until {time.strftime('%Y-%m-%d', time.gmtime(ends))}"
    if time.time() < begins:
        return until, "it is not valid yet", "set this machine's clock (NTP)"
    problem = "it has expired" if left < 0 else "it ends within 30 days" if left < SOON_S else ""
    return until, problem, "the operator makes a new federation (rescene deploy init) and new site folders"
