"""With Flower: the apps through a grid without sockets, and a real federation of two nodes and two rounds."""

import base64
import gc
import hashlib
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import weakref
from functools import partial

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'rescene[deploy]'")

import httpx
from flwr.app import Context, Error, Message, RecordDict
from flwr.cli.build import build_fab_from_disk
from flwr.common.config import parse_config_args
from flwr.serverapp import Grid
from local_sites import PATIENT, TINY, across, events, hashes, in_process, sites, without_starts

from rescene.config import resolve
from rescene.core.errors import ConfigError, RunError
from rescene.deploy import operator, processes
from rescene.deploy.exchange import Letter, Patience, Undelivered
from rescene.deploy.federation_folder import APP, FederationFolder, broken_apps, init
from rescene.deploy.flower import FlowerPost, client
from rescene.deploy.operator import run as run_deployed
from rescene.deploy.processes import (
    alive,
    check_port,
    end_orphans,
    environment,
    free_port,
    running,
    start,
    start_server,
    start_site,
    stop,
)
from rescene.engine import RunFolder, checkpoint
from rescene.engine import run_parts as parts
from rescene.engine.run_folder import made_on

identity = pytest.importorskip("flwr.supercore.task_identity", reason="this Flower has no task identity")


class LocalGrid(Grid):
    """Calls the client app in this process; fails with HTTP 500 as often as it is told to."""

    def __init__(self, folders, failures=0):
        self.folders, self.failures, self.sent = dict(enumerate(folders, start=10)), failures, {}
        tasks = identity.TaskIdentity
        tasks.task_id, tasks.run_id, tasks.node_id = 1, 1, 1

    def set_run(self, run):
        raise NotImplementedError

    run = property(lambda self: None)
    create_message = send_and_receive = None

    def get_node_ids(self):
        return list(self.folders)

    def push_messages(self, messages):
        if self.failures:
            self.failures -= 1
            raise httpx.HTTPStatusError("locked", request=None, response=httpx.Response(500))
        for message in messages:
            message.metadata.__dict__["_message_id"] = f"m{len(self.sent)}"
            self.sent[message.metadata.message_id] = message
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, message_ids):
        return [self._answered(self.sent[number]) for number in message_ids]

    def _answered(self, message):
        node = message.metadata.dst_node_id
        context = Context(1, node, {"folder": str(self.folders[node])}, RecordDict(), {})
        return client(message, context)


def test_the_same_bits_through_flowers_apps(tmp_path):
    resolved = resolve("smoke", [*TINY, "method=fedewc", "tasks.limit=1"])
    waits = []
    post = FlowerPost(LocalGrid(sites(tmp_path), failures=2), ttl_s=60, sleep=waits.append)
    assert across(resolved, tmp_path / "there", post, PATIENT) == in_process(resolved, tmp_path / "here")
    assert hashes(tmp_path / "there") == hashes(tmp_path / "here")
    assert waits == [1, 2]


def test_a_message_is_let_go_once_it_is_read(tmp_path):
    """It holds a model, and Python looks for cycles of old objects only now and then."""
    grid = LocalGrid(sites(tmp_path, count=1))
    post = FlowerPost(grid, ttl_s=60)
    gc.disable()
    try:
        (number,) = post.push({10: Letter(b"x", b"model")})
        left = [weakref.ref(grid.sent[number].content)]
        answer = grid._answered(grid.sent[number])
        left.append(weakref.ref(answer.content))
        grid._answered = lambda message, answers=[answer]: answers.pop()
        del answer
        assert post.pull([number])[number]
        grid.sent.clear()
        assert [content() for content in left] == [None, None]
    finally:
        gc.enable()


def test_an_error_below_is_a_lost_letter_and_other_refusals_are_raised(tmp_path):
    grid = LocalGrid(sites(tmp_path, count=1))
    post = FlowerPost(grid, ttl_s=60)
    (number,) = post.push({10: Letter(b"x")})
    grid._answered = lambda message: Message(Error(5, "node unavailable"), reply_to=message)
    assert post.pull([number]) == {number: Undelivered("Flower's error 5, node unavailable")}
    grid._answered = lambda message: Message(RecordDict(), reply_to=message)
    assert post.pull([number]) == {number: b""}
    refused = httpx.HTTPStatusError("no", request=None, response=httpx.Response(403))
    grid.get_node_ids = lambda: (_ for _ in ()).throw(refused)
    with pytest.raises(httpx.HTTPStatusError):
        post.nodes()


def test_the_server_app_goes_on_elsewhere_only_if_it_is_told_to(tmp_path, monkeypatch):
    from localgrid import serve

    monkeypatch.setattr(sys, "argv", sys.argv)  # the app writes its own
    resolved = resolve("smoke", [*TINY, "method=fedewc", "tasks.limit=1"])
    grid, out = LocalGrid(sites(tmp_path)), tmp_path / "run"

    def stop_at(place):
        if place == "step done" and (out / "metrics.jsonl").exists():
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "watcher", stop_at)
    with pytest.raises(KeyboardInterrupt):
        serve(grid, resolved, tmp_path, out)
    monkeypatch.setattr(checkpoint, "watcher", None)
    monkeypatch.setattr(parts, "made_on", lambda device: made_on(device) | {"torch": "9.9"})
    with pytest.raises(RunError, match="E416"):
        serve(grid, resolved, tmp_path, out)
    assert not (out / "results.json").exists() and events(out)[-1]["code"] == "E416"
    serve(grid, resolved, tmp_path, out, elsewhere=True)
    (part,) = json.loads((out / "results.json").read_text())["elsewhere"]
    assert part["step"] >= 1 and part["changed"]["torch"][1] == "9.9"
    assert "W403" in {event["code"] for event in events(out)}


def test_the_operators_word_elsewhere_reaches_the_server_app(tmp_path, monkeypatch):
    federation, said = init(tmp_path / "fed", ["a", "b", "c"], port=9000), []

    def flwr(federation, *words):
        said.append(words[-1])
        raise RunError("E352", "no link here")

    monkeypatch.setattr(operator, "flwr", flwr)
    monkeypatch.setattr(operator, "running", lambda folder: [object()])
    for elsewhere in (False, True):
        with pytest.raises(RunError, match="E352"):
            run_deployed(federation, resolve("smoke", TINY), tmp_path / "run", elsewhere=elsewhere)
    assert [parse_config_args([words]).get("elsewhere") for words in said] == [None, True]


def test_init_keeps_secrets_and_never_replaces_a_key(tmp_path):
    federation = init(tmp_path / "fed", ["north", "south"], port=9000)
    assert FederationFolder.open(tmp_path / "fed") == federation
    for secret in ("server/ca.key", "server/server.key", "sites/north/node.key", "sites/south/node.key"):
        assert stat.S_IMODE((federation.path / secret).stat().st_mode) == 0o600
    assert not list(federation.path.glob("sites/*/ca.key"))
    with pytest.raises(ConfigError, match="E123"):
        init(tmp_path / "fed", ["north"])
    for names in (["North"], ["a", "a"], [], ["a b"]):
        with pytest.raises(ConfigError, match="E124"):
            init(tmp_path / "other", names)
    with pytest.raises(ConfigError, match="E128"):
        run_deployed(federation, resolve("smoke"), tmp_path / "run")
    (federation.site("north") / "node.key").unlink()
    with pytest.raises(ConfigError, match="lacks node.key"):
        start_site(federation.site("north"))


def test_a_port_that_is_taken_is_told(tmp_path, monkeypatch):
    import socket

    monkeypatch.setattr(processes, "check_port", partial(check_port, patience_s=0.1))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        federation = init(tmp_path / "fed", ["a"], port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match="E125"):
            start_server(federation)


def test_a_port_that_is_let_go_a_moment_later_is_waited_for():
    """A killed process is gone before its last thread, which still holds the port."""
    import socket

    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    leaving = threading.Timer(0.5, taken.close)
    leaving.start()
    check_port("127.0.0.1", taken.getsockname()[1], patience_s=60)
    leaving.join()


def test_a_process_is_ended_with_its_children(tmp_path):
    code = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    one = start(tmp_path, "parent", [sys.executable, "-c", code], environment(tmp_path))
    log = tmp_path / "logs" / "parent.log"
    while not log.read_text().strip():
        assert alive(one)
    child = int(log.read_text())
    assert [p.name for p in running(tmp_path)] == ["parent"]
    assert stop(tmp_path) == ["parent"] and not running(tmp_path) and stop(tmp_path) == []
    found = subprocess.run(["ps", "-o", "stat=", "-p", str(child)], capture_output=True, text=True).stdout.strip()
    assert found[:1] in ("", "Z")  # a second letter is its priority


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc")
@pytest.mark.parametrize("ending", [end_orphans, stop])
def test_what_a_killed_process_leaves_behind_is_ended_and_nothing_else(tmp_path, ending):
    """Flower's app of a node that was killed would try for ever to reach it."""
    env = environment(tmp_path / "flwr")
    one = start(tmp_path, "node", ["sh", "-c", "sleep 600 & echo $!; exec sleep 600"], env)
    other = subprocess.Popen(["sleep", "600"], env=env)  # the same home, but nobody's child here
    log = tmp_path / "logs" / "node.log"
    while not log.read_text().strip():
        assert alive(one)
    child = processes.Started("child", int(log.read_text()), processes._facts(int(log.read_text()))["began"], "")
    try:
        end_orphans(tmp_path)
        assert alive(one) and alive(child)  # it is no orphan yet
        os.kill(one.pid, signal.SIGKILL)
        while alive(one):
            assert alive(child)
        ending(tmp_path)
        assert not alive(child) and other.poll() is None
    finally:
        other.kill()
        other.wait()
        if alive(child):
            os.kill(child.pid, signal.SIGKILL)


def secrets_in(folders, federation):
    """Files, other than the secrets themselves and the link's database, in which a key, an executor's secret or a token stands."""
    keys, secrets = list(federation.path.rglob("*.key")), list(federation.path.rglob("executor.secret"))
    lines = [line for key in keys for line in key.read_bytes().splitlines() if not line.startswith(b"-----")]
    values = [secret.read_bytes() for secret in secrets]
    words = [*lines, *values, *(value.hex().encode() for value in values), *map(base64.b64encode, values)]
    words += [b"PRIVATE KEY", b"--token"]
    assert len(lines) > len(keys) >= 4 and len({*values}) == 1 + len(federation.sites)
    assert {stat.S_IMODE(secret.stat().st_mode) for secret in secrets} == {0o600}
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    own = {*keys, *secrets}
    open_files = [path for path in files if path not in own and not path.name.startswith("state.db")]
    return [str(path) for path in open_files if any(word in path.read_bytes() for word in words)]


def broken_app(federation, site):
    """What a disk that was full at first contact leaves behind: Flower takes an installed app as it is."""
    digest = hashlib.sha256(build_fab_from_disk(federation.app)).hexdigest()[:8]
    app = federation.site(site) / "flwr" / "apps" / f"rescene.rescene-app.1.0.0.{digest}"
    for name in APP:
        (app / name).parent.mkdir(parents=True, exist_ok=True)
        (app / name).touch()
    return app


@pytest.mark.slow
def test_two_nodes_and_two_rounds_over_tls_with_node_keys(tmp_path):
    """In a folder whose path has all that files and command lines quote, and with a site that once ran out of disk."""
    resolved = resolve(
        "smoke",
        ["federation.num_clients=2", "tasks.limit=1", "federation.engine=one-by-one", "model.width=8", "device=cpu"],
    )
    root = tmp_path / """it's "100%" 😀 a?b#c\\d %s"""
    root.mkdir()
    federation = init(root / "fed", ["north", "south"], port=free_port())
    app = broken_app(federation, "north")
    assert broken_apps(federation.site("north") / "flwr") == {app: "pyproject.toml"}
    places = [federation.server, *map(federation.site, federation.sites)]
    try:
        start_server(federation)
        for name in federation.sites:
            start_site(federation.site(name))
        look_s = 4  # every look is a process of Flower's, which takes a second of a core that the sites need
        found = run_deployed(federation, resolved, root / "across", Patience(300, 300, 0.5), lambda line: None, look_s)
    finally:
        started = [one for place in places for one in running(place)]
        for place in places:
            stop(place)
    assert len(started) == 6 and not any(map(alive, started))
    assert app.is_dir() and not broken_apps(federation.site("north") / "flwr")
    assert without_starts(found) == without_starts(in_process(resolved, tmp_path / "here"))
    models = [(at / "model" / "final.safetensors").read_bytes() for at in (root / "across", tmp_path / "here")]
    assert models[0] == models[1]
    assert (root / "across" / "command.txt").read_text().startswith("rescene deploy run ")  # and no token of Flower's
    assert os.path.exists(federation.server / "logs" / "link.log")
    assert secrets_in([federation.path, root / "across"], federation) == []
    assert RunFolder(root / "across").finished and os.listdir(federation.site("north") / "state")
    with pytest.raises(ConfigError, match="E128"):
        run_deployed(federation, resolved, tmp_path / "again")
    with pytest.raises(RunError, match="E352"):
        from rescene.deploy.processes import nodes

        nodes(federation)
