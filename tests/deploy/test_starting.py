"""Starting what runs already, or half of it: what was there stays, what a failed start began ends."""

import os
import sys

import pytest
from typer.testing import CliRunner

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'rescene[deploy]'")

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from rescene.cli.app import app
from rescene.core.errors import RunError
from rescene.deploy import processes
from rescene.deploy.federation_folder import init
from rescene.deploy.keys import make_node_key
from rescene.deploy.node_key import fingerprint, listed_keys, public_key
from rescene.deploy.processes import Started, alive, running, start, stop

SLEEP = ["sleep", "600"]


def say(*words):
    found = CliRunner().invoke(app, ["deploy", *map(str, words)])
    return found.exit_code, found.output


@pytest.fixture
def federation(tmp_path):
    made = init(tmp_path / "fed", ["north"], port=9000)
    yield made
    for place in (made.server, made.site("north")):
        stop(place)


def parts(folder, *names):
    return [start(folder, name, SLEEP, os.environ) for name in names]


@pytest.mark.parametrize(("role", "names"), [("server", ("executor", "link")), ("site", ("executor", "node"))])
@pytest.mark.parametrize("wait", [[], ["--wait"]])
def test_what_runs_already_is_left_alone(federation, role, names, wait):
    folder, place = {
        "server": (federation.path, federation.server),
        "site": (federation.site("north"), federation.site("north")),
    }[role]
    there = parts(place, *names)
    code, output = say(role, folder, *wait)
    assert code == 2 and "E126" in output
    assert running(place) == there  # and they are still found, to be stopped
    assert say("stop", folder)[0] == 0 and not any(map(alive, there))


def test_a_failed_start_ends_what_it_began_and_nothing_else(federation, monkeypatch):
    def unknown(federation):
        began.extend(one for one in running(federation.server) if one.name == "executor")
        raise RunError("E352", "flwr supernode failed")

    began: list[Started] = []
    (link,) = parts(federation.server, "link")
    monkeypatch.setattr(processes, "_executor", lambda *words: SLEEP)
    monkeypatch.setattr(processes, "_register", unknown)
    code, output = say("server", federation.path)
    assert code == 4 and "E352" in output
    assert len(began) == 1 and not alive(began[0]) and running(federation.server) == [link]


def test_half_a_site_is_ended_and_a_whole_one_started(federation, monkeypatch, tmp_path):
    """A node alone takes letters and answers none."""
    folder = federation.site("north")
    (node,) = parts(folder, "node")
    sleeper = tmp_path / "sleeper"
    sleeper.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(600)\n")
    sleeper.chmod(0o755)
    monkeypatch.setattr(processes, "program", lambda name: str(sleeper))
    monkeypatch.setattr(processes, "_executor", lambda *words: SLEEP)
    started = processes.start_site(folder)
    assert not alive(node) and [one.name for one in started] == ["node", "executor"]
    assert {one.pid for one in running(folder)} == {one.pid for one in started}


@pytest.mark.parametrize(
    ("kind", "why"), [("OpenSSH", "node.pub is not its other half"), ("PKCS8", "it is no key that")]
)
def test_a_wrong_key_is_found_before_a_node_is_started(federation, kind, why):
    """The server would refuse it, or Flower would, in words that help nobody."""
    folder = federation.site("north")
    other = ec.generate_private_key(ec.SECP384R1())
    form = getattr(PrivateFormat, kind)
    (folder / "node.key").write_bytes(other.private_bytes(Encoding.PEM, form, NoEncryption()))
    code, output = say("site", folder)
    assert code == 2 and "E514" in output and why in output and not (folder / "logs").exists()


def with_new_key(federation, name):
    """The operator's copy of a site's folder after the site made another key; the fingerprint of the one before."""
    folder = federation.site(name)
    before = fingerprint(public_key(folder / "node.pub"))
    for file in ("node.key", "node.pub"):
        (folder / file).unlink()
    make_node_key(folder)
    return before


def test_a_new_key_is_registered_by_the_operators_word_alone(tmp_path, monkeypatch):
    """Neither a start of the server nor the replacement of another site's key lets it in."""
    federation, asked, in_use = init(tmp_path / "fed", ["north", "south", "west"], port=9000), [], []
    numbers = iter((1, 2, 3, 4))

    def flwr(federation, *words):
        asked.append(words[1:3])
        if words[1] == "list":
            return {"nodes": [{"node-id": number} for number in "123"]}
        if words[2] in in_use:
            raise RunError("E352", "flwr supernode failed", why="Public key already in use")
        return {"node-id": next(numbers)} if words[1] == "register" else {}

    monkeypatch.setattr(processes, "flwr", flwr)
    monkeypatch.setattr(processes, "_executor", lambda *words: SLEEP)
    processes._register(federation)
    first = listed_keys(federation.server / "peers.pub")
    before, pub = with_new_key(federation, "south"), federation.site("south") / "node.pub"
    with_new_key(federation, "west")
    asked.clear()
    try:
        parts(federation.server, "link")
        code, output = say("server", federation.path)
        assert code == 0 and "south: node.pub is not the key" in output and "rescene deploy replace-key" in output
        assert [words[0] for words in asked] == ["list"] and listed_keys(federation.server / "peers.pub") == first
        code, output = say("replace-key", federation.path, "south")
        new = public_key(pub)
        assert code == 0 and f"the key of south was replaced: {before} is refused" in output
        assert fingerprint(new) in output and asked[-2:] == [("register", str(pub)), ("unregister", "2")]
        assert processes.registered(federation) == {"north": "1", "south": "4", "west": "3"}
        for folder in (federation.server, *map(federation.site, federation.sites)):
            assert listed_keys(folder / "peers.pub") == first | {1: new}
        assert processes.changed_keys(federation) == ["west"]
        assert "E516" in say("replace-key", federation.path, "soth")[1]
        in_use.append(str(federation.site("north") / "node.pub"))
        assert "E517" in say("replace-key", federation.path, "north")[1]
    finally:
        stop(federation.server)
    assert "E128" in say("replace-key", federation.path, "west")[1]


def test_a_process_that_cannot_be_written_down_is_not_left_behind(tmp_path):
    (tmp_path / "processes" / "node.json").mkdir(parents=True)
    with pytest.raises(RunError, match="E410"):
        start(tmp_path, "node", ["sh", "-c", "echo $$; exec sleep 600"], os.environ)
    said = (tmp_path / "logs" / "node.log").read_text()
    assert not said or not os.path.exists(f"/proc/{said.strip()}")


@pytest.mark.parametrize("cut", [b"", b"short"])
def test_a_secret_that_a_full_disk_cut_short_is_made_anew(tmp_path, cut):
    (tmp_path / "executor.secret").write_bytes(cut)
    processes._make_secret(tmp_path)
    secret = (tmp_path / "executor.secret").read_bytes()
    processes._make_secret(tmp_path)
    assert len(secret) == processes.SECRET_BYTES and (tmp_path / "executor.secret").read_bytes() == secret


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "logs").write_text("in the way")
    with pytest.raises(RunError, match="E373"):
        start(tmp_path, "node", SLEEP, os.environ)
