"""`rescene serve` over plain HTTP: answers, limits, refusals, and how it stops."""

import http.client
import io
import json
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import tomllib
import zlib
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import rescene
from rescene.cli.app import app
from rescene.core.errors import ConfigError
from rescene.nets import Arch
from rescene.use import Model, Service, exporting, open_model, serving, write_container
from rescene.use import http_service as services
from rescene.use.formats import WRITERS
from rescene.use.model import Whole

CLASSES = ["red <b>", "green", "blue"]
ABOUT = {
    "schema": 1,
    "arch": {"name": "mlp", "image_size": 16},
    "classes": CLASSES,
    "mean": [0.5] * 3,
    "std": [0.25] * 3,
}


def colours(pixels):
    """The score of each class is how much of its colour is in the picture."""
    return pixels.float().mean(dim=(2, 3)) / 32


def picture(colour=(250, 10, 10), size=(40, 30), kind="PNG"):
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, kind)
    return file.getvalue()


def bomb(width=60_000, height=60_000):
    """A PNG of a few kilobytes whose header promises 3.6 billion pixels."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(1 << 20))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@pytest.fixture
def service():
    return Service(Model(Path("colours.safetensors"), ABOUT, colours), max_bytes=200_000, max_pixels=100_000)


@pytest.fixture
def address(service):
    with serving(service) as found:
        yield found


def ask(address, path="/", method="GET", body=None, **headers):
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=20)
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    return answer.status, answer.read(), dict(answer.getheaders())


def code(found):
    return found[0], json.loads(found[1])["error"]["code"]


def test_a_picture_gets_its_classes_and_their_confidence(address):
    for kind in ("PNG", "JPEG", "GIF", "WEBP"):
        status, body, headers = ask(address, "/api/predict", "POST", picture(kind=kind))
        found = json.loads(body)
        assert status == 200 and headers["Content-Type"] == "application/json"
        assert found["top"][0]["class"] == "red <b>" and found["top"][0]["confidence"] > 0.99
        assert (found["width"], found["height"], found["chance"]) == (40, 30, 1 / 3)
        assert sum(one["confidence"] for one in found["top"]) == pytest.approx(1)
    found = json.loads(ask(address, "/api/predict?top=1", "POST", picture((0, 0, 255)))[1])
    assert [one["class"] for one in found["top"]] == ["blue"]


def test_it_says_what_the_model_is(address, service):
    told = json.loads(ask(address, "/api/model")[1])
    assert told["classes"] == CLASSES and told["chance_percent"] == 33.33 and told["picture_size"] == 16
    assert told["max_bytes"] == 200_000 and "does not name" in told["made_from"]
    ask(address, "/api/predict", "POST", picture())
    assert json.loads(ask(address, "/health")[1]) == {"status": "ok", "answered": 1}
    lens = {"lens": "leaves", "lens_made_from": "dead leaves", "title": "Moments", "data": "photos: 90 images"}
    words = services.made_from(ABOUT | lens)
    assert (
        words
        == "Trained with Moments on photos: 90 images. It looks through the lens leaves, which was made from dead leaves."
    )


def test_the_page_is_ours_alone_and_runs_no_foreign_script(address):
    status, body, headers = ask(address)
    assert status == 200 and b"What is in the picture?" in body
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    assert headers["X-Content-Type-Options"] == "nosniff" and headers["Referrer-Policy"] == "no-referrer"
    assert not re.search(rb"<script>|style=|onclick|https?://", body)
    assert ask(address, "/page.js")[2]["Content-Type"].startswith("text/javascript")
    assert ask(address, method="HEAD")[:2] == (200, b"")
    for path in (
        "/page/",
        "/..",
        "/../model.py",
        "/page/index.html",
        "/%2e%2e/model.py",
        "//etc/passwd",
        "/api/",
        "/runs",
    ):
        assert code(ask(address, path)) == (404, "E280")
    for method in ("PUT", "DELETE", "OPTIONS", "BREW"):
        assert code(ask(address, method=method)) == (405, "E281")
    assert code(ask(address, "/api/predict")) == (405, "E281")


def test_what_is_no_picture_is_refused_with_a_code(address):
    def sent(body, path="/api/predict", **headers):
        return code(ask(address, path, "POST", body, **headers))

    assert sent(b"no picture") == (415, "E284")
    assert sent(picture()[:60]) == (415, "E284")
    assert sent(b"<svg xmlns='http://www.w3.org/2000/svg'/>") == (415, "E284")
    assert sent(picture(), **{"Content-Type": "multipart/form-data; boundary=x"}) == (415, "E284")
    assert sent(b"") == (400, "E283")
    assert sent(bytes(200_001)) == (413, "E283")
    assert sent(bomb()) == (413, "E285") and sent(picture(size=(1000, 101))) == (413, "E285")
    for top in ("0", "-1", "x", "%C2%B2"):
        assert sent(picture(), f"/api/predict?top={top}") == (400, "E288")
    assert ask(address, "/api/predict", "POST", picture())[0] == 200  # and it goes on


def test_pages_elsewhere_cannot_use_it(address, service):
    port = urlsplit(address).port
    for host in ("evil.example.org", f"evil.example.org:{port}", "", "127.0.0.1.evil.org", "192.168.1.4"):
        assert code(ask(address, Host=host)) == (421, "E282")
    for host in (f"localhost:{port}", "127.0.0.1", f"[::1]:{port}", "localhost:9000"):  # also through a tunnel
        assert ask(address, Host=host)[0] == 200
    assert code(ask(address, "/api/predict", "POST", picture(), Origin="https://evil.example.org")) == (403, "E282")
    assert ask(address, "/api/predict", "POST", picture(), Origin=address.rstrip("/"))[0] == 200
    named = Service(service.model, names=frozenset({"model.clinic.org"}))
    with serving(named, "0.0.0.0") as open_to_all:
        here = open_to_all.replace("0.0.0.0", "127.0.0.1")
        assert ask(here, Host="model.clinic.org")[0] == 200 and ask(here, Host="192.168.1.4:80")[0] == 200
        assert code(ask(here, Host="evil.example.org")) == (421, "E282")


def raw(address, text):
    with socket.create_connection((urlsplit(address).hostname, urlsplit(address).port), timeout=20) as line:
        line.sendall(text)
        line.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: line.recv(4096), b""))


def test_odd_requests_are_answered(address):
    assert b"411" in raw(address, b"POST /api/predict HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert b"411" in raw(address, b"POST /api/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n")
    assert b"E287" in raw(address, b"POST /api/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\nhalf")
    assert b"E287" in raw(address, b"not http at all\r\n\r\n")
    waiting = (
        b"POST /api/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999999\r\nExpect: 100-continue\r\n\r\n"
    )
    assert b"413" in raw(address, waiting) and b"100 Continue" not in raw(address, waiting)


def test_one_picture_at_a_time_goes_into_the_model(service):
    inside, most = [], []

    def scores(pixels):
        inside.append(1)
        most.append(len(inside))
        threading.Event().wait(0.02)
        inside.pop()
        return colours(pixels)

    one = Service(Model(service.model.path, ABOUT, scores))
    with serving(one) as address:
        found = []
        threads = [
            threading.Thread(target=lambda: found.append(ask(address, "/api/predict", "POST", picture())[0]))
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [200] * 8 and max(most) == 1 and one.num_answered == 8


def test_it_refuses_more_connections_than_it_has_room_for(service, monkeypatch):
    monkeypatch.setattr(services, "MAX_CONNECTIONS", 1)
    with serving(service) as address:
        place = (urlsplit(address).hostname, urlsplit(address).port)
        with socket.create_connection(place) as silent:
            silent.sendall(b"GET / HT")  # and nothing more
            while (found := ask(address))[0] == 200:
                pass
            assert code(found) == (503, "E286")


def test_a_request_that_takes_too_long_is_cut(service, monkeypatch):
    monkeypatch.setattr(services, "REQUEST_S", 0.2)
    with (
        serving(service) as address,
        socket.create_connection((urlsplit(address).hostname, urlsplit(address).port)) as slow,
    ):
        slow.settimeout(20)
        slow.sendall(b"POST /api/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999\r\n\r\n")
        while slow.recv(4096):  # the end comes although SILENCE_S has not passed
            pass


def test_a_model_that_fails_does_not_end_the_service(service):
    def scores(pixels):
        raise RuntimeError("of the runtime")

    with serving(Service(Model(service.model.path, ABOUT, scores))) as address:
        assert code(ask(address, "/api/predict", "POST", picture())) == (500, "E289")
        assert ask(address, "/health")[0] == 200


def test_a_port_that_is_taken_is_told(service):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="E503"), serving(service, port=taken.getsockname()[1]):
            pass
    with pytest.raises(ConfigError, match="E503"), serving(service, host="no.such.host.invalid"):
        pass


@pytest.fixture
def file(tmp_path):
    """A real model in a file."""
    torch.manual_seed(0)
    path = tmp_path / "model.safetensors"
    WRITERS["safetensors"](Whole(Arch("mlp", 16).build(3), [0.5] * 3, [0.25] * 3), json.dumps(ABOUT), path)
    return path


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_the_command_serves_what_predict_says_and_stops_cleanly(file, tmp_path, number):
    (tmp_path / "a.png").write_bytes(picture())
    process = subprocess.Popen(
        [sys.executable, "-m", "rescene", "serve", str(file), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        address = process.stdout.readline().split()[0]
        found = json.loads(ask(address, "/api/predict?top=3", "POST", picture())[1])
    finally:
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0 and "POST /api/predict 200" in said and said.endswith("stopped\n")
    predicted = CliRunner().invoke(app, ["predict", str(file), str(tmp_path / "a.png"), "--format", "json"])
    (wanted,) = json.loads(predicted.stdout)
    assert [one["class"] for one in found["top"]] == [one["class"] for one in wanted["top"]]
    assert [one["confidence"] for one in found["top"]] == pytest.approx([one["confidence"] for one in wanted["top"]])


def test_a_pt2_file_needs_trust(tmp_path):
    (tmp_path / "m.pt2").write_bytes(b"")
    found = CliRunner().invoke(app, ["serve", str(tmp_path / "m.pt2")])
    assert found.exit_code == 2 and "error[E158]" in found.output


def test_a_plug_in_is_loaded_before_the_model(file, tmp_path):
    (tmp_path / "broken_network.py").write_text("1 / 0")
    found = CliRunner().invoke(app, ["serve", str(file), "--plugin", str(tmp_path / "broken_network.py")])
    assert found.exit_code == 2 and "ZeroDivisionError" in found.output


KNOWN = {"FROM", "RUN", "COPY", "ENV", "USER", "WORKDIR", "EXPOSE", "HEALTHCHECK", "STOPSIGNAL", "ENTRYPOINT"}


def instructions(text):
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [tuple(line.split(None, 1)) for line in "\n".join(lines).replace("\\\n", " ").splitlines()]


def test_the_container_holds_the_model_and_starts_the_service(file, tmp_path):
    result = CliRunner().invoke(app, ["serve", str(file), "--container", str(tmp_path / "service")])
    assert result.exit_code == 0, result.output
    folder = tmp_path / "service"
    assert sorted(path.name for path in folder.iterdir()) == [".dockerignore", "Containerfile", "model.safetensors"]
    assert open_model(folder / "model.safetensors").classes == CLASSES
    found = instructions((folder / "Containerfile").read_text())
    words = [word for word, _ in found]
    assert set(words) == KNOWN and words[0] == "FROM"
    assert max(i for i, word in enumerate(words) if word == "RUN") < words.index("USER") < words.index("ENTRYPOINT")
    parts = dict(found)
    assert int(parts["USER"]) > 0 and parts["COPY"].split()[1:] == ["model.safetensors", "/model/model.safetensors"]
    assert (folder / ".dockerignore").read_text().splitlines() == ["*", "!Containerfile", "!model.safetensors"]
    program, verb, model, *options = json.loads(parts["ENTRYPOINT"])
    assert (program, verb, model) == ("rescene", "serve", "/model/model.safetensors") and "--trust" not in options
    assert options[options.index("--port") + 1] == parts["EXPOSE"]
    help_text = CliRunner().invoke(app, ["serve", "--help"]).output
    assert all(word in help_text for word in options if word.startswith("--"))
    again = CliRunner().invoke(app, ["serve", str(file), "--container", str(folder)])
    assert again.exit_code == 2 and "error[E502]" in again.output


def test_the_container_installs_this_version_from_a_lock_of_the_wheel():
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())
    installs = next(rest for word, rest in instructions(exporting.containerfile("m.onnx")) if word == "RUN")
    assert f'--no-deps "rescene=={rescene.__version__}"' in installs
    assert "rescene/locks/base.txt" in project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"].values()
    assert "/locks/base.txt" in installs and exporting.TORCH in (root / "constraints.txt").read_text()
    for wanted in project["project"]["optional-dependencies"]["onnx"]:
        assert f'"{wanted}"' in installs
    start = dict(instructions(exporting.containerfile("m.pt2")))["ENTRYPOINT"]
    assert json.loads(start)[-1] == "--trust"


def test_the_health_check_of_the_container_follows_the_service(address):
    text = dict(instructions(exporting.containerfile("m.onnx")))["HEALTHCHECK"]
    _, flag, script = json.loads(re.search(r"CMD (\[.*\])", text)[1])

    def healthy(port):
        asked = script.replace(str(exporting.PORT), str(port))
        return subprocess.run([sys.executable, flag, asked], capture_output=True).returncode == 0

    assert healthy(urlsplit(address).port)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        assert not healthy(nobody.getsockname()[1])


def test_a_run_folder_becomes_a_container_too(tmp_path):
    small = {
        "federation.num_rounds": 1,
        "tasks.limit": 1,
        "model.width": 4,
        "train.server_epochs": 1,
        "train.local_epochs": 1,
    }
    run = rescene.run("smoke", out=tmp_path / "run", method="fedavg", **small).folder
    write_container(run, tmp_path / "service")
    opened = open_model(tmp_path / "service" / "model.safetensors")
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, 3, 32, 32), dtype=np.uint8))
    assert torch.allclose(opened.scores(pixels), open_model(run).scores(pixels), atol=1e-4)
    assert opened.about["data"] == "fashion-mini: 1,200 images, 4 sites"
