"""rescene deploy check: every fault of a server or site is one row with a fix, and a trial sends nothing."""

import base64
import http.server
import json
import os
import shutil
import socket
import ssl
import threading
import time
from dataclasses import replace
from email.utils import formatdate
from functools import partial

import pytest
import torch
import yaml
from local_sites import sites
from own_sites import NAMES, own_sites, plan_of
from PIL import Image
from typer.testing import CliRunner

from rescene.cli.app import app
from rescene.config import resolve
from rescene.core.errors import ConfigError, DataError, RunError
from rescene.deploy import checks
from rescene.deploy.checks import check_site, data_rows, privacy_rows
from rescene.deploy.plan_file import with_plan
from rescene.deploy.site import Site
from rescene.deploy.site_config import experiment_of
from rescene.deploy.trial import NoPost, try_round


def say(*words):
    found = CliRunner().invoke(app, ["deploy", "check", *map(str, words)])
    return found.exit_code, found.output


def problems(rows):
    return {row["check"]: (row["problem"], row["fix"]) for row in rows if row["problem"]}


def of(rows, check):
    return next(row for row in rows if row["check"] == check)


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """Two federations with keys and certificates: one is ours, the other is a stranger."""
    pytest.importorskip("flwr", reason="Flower is not installed: pip install 'rescene[deploy]'")
    from rescene.deploy.federation_folder import init

    root = tmp_path_factory.mktemp("made")
    return [init(root / name, ["north", "south"], port=free_port()) for name in ("ours", "strange")]


@pytest.fixture
def ours(made, tmp_path):
    from rescene.deploy.federation_folder import FederationFolder

    shutil.copytree(made[0].path, tmp_path / "ours")
    return FederationFolder.open(tmp_path / "ours")


def free_port():
    from rescene.deploy.processes import free_port as free

    return free()


class Door(http.server.BaseHTTPRequestHandler):
    """What a site meets at /v1/fleet/: a status and the time on the server's clock."""

    status, ahead_s = 404, 0.0

    def do_GET(self):
        self.send_response_only(self.status)
        self.send_header("Date", formatdate(time.time() + self.ahead_s, usegmt=True))
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.fixture
def door(made):
    """A web server with the certificate of ours; yields its address and its handler."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made[0].server / "server.pem", made[0].server / "server.key")
    handler = type("Handler", (Door,), {})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"127.0.0.1:{server.server_address[1]}", handler
    server.shutdown()
    server.server_close()


def test_a_fresh_server_is_well_and_each_fault_of_it_is_a_row(ours, made, monkeypatch):
    from rescene.deploy.checks import check_server

    monkeypatch.setattr(checks, "check_port", partial(checks.check_port, patience_s=0.1))
    rows = check_server(ours)
    assert not problems(rows).keys() - {"Flower", "disk", "memory"}
    assert "node.key is still here" in of(rows, "site north")["result"]
    (ours.server / "server.key").chmod(0o644)
    (ours.site("north") / "node.pub").unlink()
    shutil.copy(made[1].server / "ca.crt", ours.site("south"))
    ours.path.chmod(0o755)
    os.utime(ours.path / "federation.yaml", (time.time() + 9000,) * 2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", ours.port))
        taken.listen()
        found = problems(check_server(ours))
    assert found["server.key"] == ("others can read it (mode 0644)", f"chmod 600 {ours.server / 'server.key'}")
    assert "node.pub is missing" in found["site north"][0] and "is not the server's" in found["site south"][0]
    assert (
        "Address already in use" in found["port"][0]
        and "federation.yaml, server/nginx.conf and every site.yaml" in found["port"][1]
    )
    assert "mode 0755" in found["folder"][0] and "before the day" in found["clock"][0]


def test_certificates_are_seen_as_a_site_would_see_them(ours, made, monkeypatch):
    row = checks.certificate_row(ours.server, "127.0.0.1")
    assert row["result"].startswith("valid until 20") and not row["problem"]
    assert "not for fl.example.org" in checks.certificate_row(ours.server, "fl.example.org")["problem"]
    now = time.time()
    monkeypatch.setattr(checks.time, "time", lambda: now + 800 * 86_400)
    assert "within 30 days" in checks.certificate_row(ours.server, "localhost")["problem"]
    monkeypatch.setattr(checks.time, "time", lambda: now + 900 * 86_400)
    assert "expired" in checks.authority_row(ours.server / "ca.crt")["problem"]
    monkeypatch.setattr(checks.time, "time", lambda: now - 86_400)
    assert "clock" in checks.authority_row(ours.server / "ca.crt")["fix"]
    monkeypatch.undo()
    shutil.copy(made[1].server / "server.key", ours.server / "server.key")
    assert "does not belong" in checks.certificate_row(ours.server, "localhost")["problem"]
    shutil.copy(made[1].server / "server.pem", ours.server / "server.pem")
    assert "not signed by this ca.crt" in checks.certificate_row(ours.server, "localhost")["problem"]


def test_the_command_says_which_folder_it_takes_and_exits_with_5(ours, tmp_path):
    code, output = say(tmp_path)
    assert code == 2 and "E195" in output
    (ours.site("north") / "node.pub").unlink()
    code, output = say(ours.path, "--json")
    rows = json.loads(output)["checks"]
    assert code == 5 and of(rows, "site north")["fix"]


def test_a_wrong_key_is_told_before_the_server_refuses_it(ours, made):
    folder = ours.site("north")
    assert checks.key_row(folder)["result"] == "mode 0600, belongs to node.pub"
    shutil.copy(made[1].site("north") / "node.key", folder)
    assert checks.key_row(folder)["problem"] == "node.pub is not its other half"
    (folder / "node.key").write_text("-----BEGIN\n" + base64.b64encode(b"rsa").decode() + "\n-----END")
    assert "no key that" in checks.key_row(folder)["problem"]
    (folder / "node.key").unlink()
    assert checks.key_row(folder)["problem"] == "it is missing"


def test_a_site_with_the_number_of_another_one_is_told_by_its_own_commands(ours):
    """peers.pub has the number of each key, so nobody needs to be asked."""
    folder = ours.site("south")
    assert not of(check_site(folder), "site.yaml")["problem"]
    text = (folder / "site.yaml").read_text()
    (folder / "site.yaml").write_text(text.replace("client: 1", "client: 0"))
    told = of(check_site(folder), "site.yaml")
    assert told["problem"] == "`client: 0` is the number of another site; by its key this is site 1"
    assert told["fix"].startswith("client: 1 in site.yaml")
    found = CliRunner().invoke(app, ["deploy", "site", str(folder)])
    assert found.exit_code == 2 and "E515" in found.output and not (folder / "logs").exists()
    (folder / "peers.pub").unlink()  # a folder of an older version
    assert not of(check_site(folder), "site.yaml")["problem"]


def test_a_wrong_authority_a_wrong_name_and_a_server_that_is_away(ours, made, door, monkeypatch):
    address, _ = door
    own, strange = ours.server / "ca.crt", made[1].server / "ca.crt"
    assert not problems(checks.server_rows(address, own))
    (problem, fix) = problems(checks.server_rows(address, strange))["TLS"]
    assert "not signed by this ca.crt" in problem and "operator" in fix
    assert checks.server_rows(address, ours.path / "federation.yaml") == []  # its own row says that it is none
    monkeypatch.setattr(checks, "TIMEOUT_S", 2.0)
    away = problems(checks.server_rows(f"127.0.0.1:{free_port()}", own))["server reachable"]
    assert "Connection refused" in away[0] and "firewall" in away[1]


def test_a_door_that_is_shut_and_a_plain_web_server(ours, door):
    address, handler = door
    handler.status = 403
    assert "forbids" in problems(checks.server_rows(address, ours.server / "ca.crt"))["server reachable"][0]
    plain = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Door)
    threading.Thread(target=plain.serve_forever, daemon=True).start()
    try:
        found = problems(checks.server_rows(f"127.0.0.1:{plain.server_address[1]}", ours.server / "ca.crt"))
    finally:
        plain.shutdown()
        plain.server_close()
    assert found["TLS"][0].startswith("no TLS")


@pytest.mark.parametrize(("ahead_s", "wrong"), [(0, False), (200, False), (400, True), (-60, True)])
def test_a_clock_that_flower_would_refuse(ours, door, ahead_s, wrong):
    """``ahead_s``: of the server. A site may be five minutes behind it, but only seconds ahead."""
    address, handler = door
    handler.ahead_s = ahead_s
    row = of(checks.server_rows(address, ours.server / "ca.crt"), "clock")
    assert bool(row["problem"]) == wrong and ("NTP" in row["fix"]) == wrong


def test_a_proxy_is_used_as_the_node_would_use_it(ours, monkeypatch):
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("no_proxy", "")
    row = of(checks.server_rows("fl.example.org:8443", ours.server / "ca.crt"), "server reachable")
    assert "through the proxy 127.0.0.1" in row["problem"]


def test_another_flower_a_full_disk_and_little_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "version", lambda name: "1.43.0")
    assert checks._flower() == checks.row("Flower", "1.43.0", "needs 1.41.* or 1.42.*", 'pip install "rescene[deploy]"')
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    assert "less than 2 GB" in problems(checks.machine_rows(tmp_path))["disk"][0]
    monkeypatch.setattr(checks.tempfile, "gettempdir", lambda: "/proc")  # another disk than the folder's
    assert "less than 0.1 GB" in problems(checks.machine_rows(tmp_path))["disk of /proc"][0]
    monkeypatch.setattr(checks, "ENOUGH_MEMORY_GB", 1e9)
    assert checks._memory()["problem"]


@pytest.mark.parametrize("cut", ["pyproject.toml", "rescene_app/client.py", "rescene_app/__init__.py"])
def test_a_copy_of_the_app_that_a_full_disk_cut_short_is_told(ours, cut):
    from rescene.deploy.checks import check_server
    from rescene.deploy.federation_folder import APP

    for folder, check in ((ours.site("north"), check_site), (ours.server, lambda _: check_server(ours))):
        assert not of(check(folder), "app")["problem"]
        app = folder / "flwr" / "apps" / "rescene.rescene-app.1.0.0.0a1b2c3d"
        (app / "rescene_app").mkdir(parents=True)
        for name, text in APP.items():
            (app / name).write_text(text)
        assert not of(check(folder), "app")["problem"]
        (app / cut).unlink() if cut.endswith("__init__.py") else (app / cut).write_text("")  # that one is empty anyway
        row = of(check(folder), "app")
        assert app.name in row["problem"] and cut in row["problem"] and "make room" in row["fix"]


@pytest.mark.parametrize("lost", ["node", "executor"])
def test_a_site_of_which_one_process_has_ended_is_told(ours, lost):
    from rescene.deploy.processes import start, stop

    folder = ours.site("north")
    (left,) = {"node", "executor"} - {lost}
    assert not problems(check_site(folder)).keys() & {"node", "executor"}
    start(folder, left, ["sleep", "600"], os.environ)
    try:
        assert "while the other runs" in problems(check_site(folder))[lost][0]
        assert of(check_site(folder), left)["result"] == "up"
    finally:
        stop(folder)


def folder_site(root, images, **more):
    (folder,) = sites(root, count=1, data={"path": str(images), "image_size": 16}, **more)
    return folder


def test_images_are_counted_and_what_is_odd_about_them_is_told(tmp_path, image_folder):
    (image_folder / "train" / "ant" / "0.png").write_bytes(b"no picture")
    for number in range(3, 20):
        (image_folder / "train" / "bee" / f"{number}.png").unlink()
    rows = data_rows(Site.open(folder_site(tmp_path, image_folder)))
    assert of(rows, "classes")["result"] == "ant 19, bee 3, cat 20, dog 20, eel 20"
    found = problems(rows)
    assert "bee (3)" in found["at least 10 training images per class"][0] and "0.png" in found["images readable"][0]


def test_a_site_reads_what_is_promised_for_its_images(tmp_path, image_folder):
    site = Site.open(folder_site(tmp_path, image_folder, privacy={"epsilon_max": 8}))
    release = ["method.start=noise", "privacy.mechanism=release", "privacy.epsilon=4"]
    rows = privacy_rows(site, resolve("demo", release).recipe)
    assert "epsilon 8 at delta 1e-05" in of(rows, "privacy limit")["result"]
    said = of(rows, "privacy of the recipe")["result"]
    assert "(4.00, 1e-05)" in said and "takes its place" in said and "each site adds the whole noise" in said
    assert "no mechanism" in of(privacy_rows(site, resolve("demo", []).recipe), "privacy of the recipe")["result"]
    again = resolve(
        "demo", ["method=refed", "model.norm=group", "privacy.mechanism=dp-sgd", "privacy.epsilon=8"]
    ).recipe
    assert "number of tasks" in of(privacy_rows(site, again), "privacy of the recipe")["result"]


@pytest.mark.parametrize("fill", ["nothing", "no such folder", "an empty class"])
def test_an_empty_data_folder_is_told_and_the_rest_is_still_checked(tmp_path, fill):
    images = tmp_path / "images"
    if fill != "no such folder":
        (images / "cat").mkdir(parents=True) if fill == "an empty class" else images.mkdir()
    code, output = say(folder_site(tmp_path, images), "--json")
    rows = json.loads(output)["checks"]
    assert code == 5 and of(rows, "images")["problem"][:4] in ("E201", "E204", "E205") and of(rows, "images")["fix"]
    assert of(rows, "trial round")["problem"] and of(rows, "disk")["result"]


def test_a_site_file_that_makes_no_sense_is_one_row(tmp_path):
    (tmp_path / "site.yaml").write_text("client: -1")
    rows = check_site(tmp_path)
    assert "E120" in of(rows, "site.yaml")["problem"] and len(rows) == 7


@pytest.mark.parametrize(
    ("text", "why", "fix"),
    [
        ("{client: 0, holdout: 0.2}", "holdout: there is no such key", "did you mean hold_out?"),
        ("{client: 0, data: {pth: x}}", "data.pth: there is no such key", "did you mean path?"),
        ("{client: 0, zzz: 1}", "zzz: there is no such key", "the keys are client, server"),
        ("{client: 0, hold_out: 2}", "hold_out: Input should be less than 1", "correct hold_out in site.yaml"),
        ("{client: 0, holds: own}", "holds: own needs data", "docs/deploy.md"),
        ("{client: 0, holds: own, data: {path: x, held_out: last}}", "data.held_out has no meaning", "docs/deploy.md"),
    ],
)
def test_a_mistake_in_site_yaml_has_a_fix(tmp_path, text, why, fix):
    (tmp_path / "site.yaml").write_text(text)
    with pytest.raises(ConfigError, match="E120") as told:
        Site.open(tmp_path)
    assert told.value.why.startswith(why) and fix in told.value.fix and "type=" not in str(told.value)


def test_a_trial_shows_what_would_leave_and_leaves_nothing(tmp_path, image_folder):
    folder = folder_site(tmp_path, image_folder)
    code, output = say(folder, "--recipe", "smoke", "--steps", "1", "--json")
    told, page = json.loads(output), (folder / "check.html").read_text()
    assert code == 5  # this folder has no keys
    assert told["sent"] == "nothing" and "bytes in" in told["upload on the wire"]
    assert page.count('class="pair"') == 4 and "near-copy" in page and "http" not in page.replace("http-equiv", "")
    assert (folder / "check.html").stat().st_mode & 0o077 == 0
    assert sorted(path.name for path in folder.iterdir()) == ["check.html", "site.yaml"]


def test_a_trial_measures_the_very_answer_of_a_real_round(tmp_path):
    (folder,) = sites(tmp_path, count=1)
    found = try_round(Site.open(folder), resolve("smoke", ["method.ipc=6"]))
    assert (
        found.num_images == 12
        and len(found.pairs) == 10
        and {p["class"] for p in found.pairs} == {"T-shirt", "Trouser"}
    )
    assert found.surrogates.dtype == torch.uint8 and found.surrogates.shape == found.nearest.shape == (10, 3, 32, 32)
    pictures = 12 * 3 * 32 * 32 * 4
    assert pictures < found.num_bytes < pictures + 2000 and found.seconds > 0


def test_a_method_without_pictures_says_what_leaves(tmp_path):
    (folder,) = sites(tmp_path, count=1)
    found = try_round(Site.open(folder), resolve("smoke", ["method=fedaf"]))
    assert [one.verb for one in found.answers] == ["class_logits", "client_round"]
    found = try_round(Site.open(folder), resolve("smoke", ["method=fedavg"]))
    assert found.num_images == 0 and "weights" in found.leaves_site and not found.pairs


def test_sums_leave_where_pictures_are_only_drawn_from_them(tmp_path):
    (folder,) = sites(tmp_path, count=1)
    release = ["privacy.mechanism=release", "privacy.epsilon=8", "method.start=coloured", "method.num_steps=0"]
    found = try_round(Site.open(folder), resolve("smoke", [*release, "privacy.send=sums"]))
    assert found.drawn and found.num_images == 4 and "no image" in found.leaves_site
    # two classes, means of 8 x 8 cells, products of 4 x 4, the count
    numbers = 2 * (3 * 8 * 8 + 4**2 * 17 // 2 + 1) * 4
    assert numbers < found.num_bytes < numbers + 2000


def test_a_trial_that_fails_says_why(tmp_path, monkeypatch):
    (folder,) = sites(tmp_path, count=1)
    monkeypatch.setattr(NoPost, "nodes", lambda self: [])
    with pytest.raises(RunError) as failed:
        try_round(Site.open(folder), resolve("smoke"))
    assert "E348" in failed.value.why
    monkeypatch.undo()

    def empty(*given):
        found = experiment_of(*given)
        return replace(found, shards=[[part[:0] for part in parts] for parts in found.shards])

    for module in ("site", "trial"):
        monkeypatch.setattr(f"rescene.deploy.{module}.experiment_of", empty)
    with pytest.raises(DataError, match="has no image"):
        try_round(Site.open(folder), resolve("smoke"))


def test_a_site_with_its_own_images_sees_them_under_the_federations_names(tmp_path, image_folder):
    labels = {"ant": "insect", "bee": "insect", "eel": None}
    folder = folder_site(tmp_path, image_folder, holds="own", labels=labels)
    found = try_round(Site.open(folder), resolve("smoke"))
    assert {pair["class"] for pair in found.pairs} == {"insect", "cat", "dog"} and found.num_bytes > 0


@pytest.mark.parametrize("hold_out", [0.0, 0.2, 0.5])
def test_the_check_describes_the_split_that_the_site_uses(tmp_path, hold_out):
    floor = {"epsilon_max": 8, "evaluation_sigma": 2}
    folder = own_sites(tmp_path, count=20, hold_out=hold_out, labels={"ant": "bee", "dog": None}, privacy=floor)[0]
    section = yaml.safe_load((folder / "site.yaml").read_text())
    section["data"]["image_size"] = 16
    (folder / "site.yaml").write_text(yaml.safe_dump(section))
    site, plan = Site.open(folder), plan_of((("bee", "cat"), 1))
    recipe = with_plan(resolve("smoke", ["device=cpu"]), plan, 3, tmp_path / "none").recipe
    used = experiment_of(site.section, recipe).dataset
    rows = check_site(folder, recipe)
    numbers = f"{len(used.train)} to learn from, {len(used.test)} to test with (hold_out {hold_out:g}"
    assert of(rows, "images")["result"].startswith(numbers) and len(used.train) + len(used.test) == 60
    assert of(rows, "classes")["result"].startswith(f"bee {int((used.train.labels == 0).sum())}, cat ")
    accuracy = of(rows, "accuracy")["result"]
    assert "holds out no image" in accuracy if hold_out == 0 else "measured on images held out here" in accuracy
    assert "test images of every class" not in problems(rows)


def test_the_check_tells_of_pictures_in_a_row(tmp_path):
    """Each picture four times, a little darker each time; a site with a test split of its own draws none."""
    folder = own_sites(tmp_path, count=40)[0]
    assert "series [W563]" not in {row["check"] for row in data_rows(Site.open(folder))}
    for name in ("ant", "bee"):
        files = sorted((tmp_path / "images-0" / name).iterdir())
        for i, file in enumerate(files):
            with Image.open(files[i - i % 4]) as first:
                shown = first.point(lambda value, i=i: value - i % 4)
            shown.save(file)
    (row,) = (row for row in data_rows(Site.open(folder)) if row["check"] == "series [W563]")
    assert "hold_out is not used then" in row["result"] and not row["problem"]
    section = yaml.safe_load((folder / "site.yaml").read_text())
    (folder / "site.yaml").write_text(yaml.safe_dump(section | {"hold_out": 0.0}))
    assert "series [W563]" not in {row["check"] for row in data_rows(Site.open(folder))}
    (folder / "site.yaml").write_text(yaml.safe_dump(section))
    for split in ("train", "test"):
        shutil.copytree(tmp_path / "images-0" / "ant", tmp_path / "images-0" / split / "ant")
    for name in NAMES:
        shutil.rmtree(tmp_path / "images-0" / name)
    assert "series [W563]" not in {row["check"] for row in data_rows(Site.open(folder))}
