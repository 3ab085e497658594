"""The operator's page: one page, on loopback, for those who ask for it by its own name."""

import http.client
import socket
import threading

import pytest

from rescene.cli import progress
from rescene.core.errors import ConfigError
from rescene.deploy.federation_folder import FederationFolder


def ask(address, path="/", method="GET", host=None):
    name = address.removeprefix("http://").rstrip("/")
    connection = http.client.HTTPConnection(name, timeout=10)
    connection.request(method, path, headers={"Host": host or name})
    answer = connection.getresponse()
    return answer.status, answer.read(), dict(answer.getheaders())


def test_only_the_page_and_only_here():
    with progress.serving(lambda: b"<p>page", 0) as address:
        assert address.startswith("http://127.0.0.1:")
        status, body, headers = ask(address)
        assert (status, body) == (200, b"<p>page") and headers["Cache-Control"] == "no-store"
        assert ask(address, method="HEAD")[:2] == (200, b"")
        for path in ("/report.html", "/..", "/../etc/passwd", "/server.key", "/plots/"):
            assert ask(address, path)[0] == 404
        for method in ("POST", "PUT", "DELETE"):
            assert ask(address, method=method)[0] == 501
        for host in ("evil.example.org", "127.0.0.1", "localhost:1"):
            assert ask(address, host=host)[0] == 421
        port = address.rsplit(":", 1)[1].rstrip("/")
        assert ask(address, host=f"localhost:{port}")[0] == 200
    with pytest.raises(ConnectionRefusedError):
        ask(address)
    assert not [one for one in threading.enumerate() if one.name == "page"]


def test_a_page_is_made_when_somebody_looks_but_not_too_often(monkeypatch):
    now, made = [100.0], []
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])

    def build():
        made.append(now[0])
        now[0] += 10.0  # a slow one
        return str(len(made)).encode()

    page = progress.ServedPage(build)
    assert not made and page.get() == page.get() == b"1"
    now[0] += 49.0
    assert page.get() == b"1"
    now[0] += 1.0
    assert page.get() == b"2"


def test_a_port_that_is_taken_is_told():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="E196"), progress.serving(bytes, taken.getsockname()[1]):
            pass


def test_before_the_first_round_it_says_so(tmp_path, capsys):
    federation = FederationFolder(tmp_path, "clinic", "127.0.0.1", 9000, ["north"])
    with progress.operator_page(federation, lambda: None, 0):
        address = capsys.readouterr().out.split()[-1]
        status, body, _ = ask(address)
    assert status == 200 and b"No round has been held yet" in body and b"clinic" in body
