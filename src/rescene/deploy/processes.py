"""Server and sites as processes on this machine: started apart, found again by their id, ended with all their children.

An id is only trusted together with the time its process began, so that a number used again is never hit.

Flower runs in its robust mode: the link keeps its messages in a database and the apps run under an executor of their own,
so a link that dies and comes back costs nothing. Link and nodes give tasks only to an executor that has their secret.

A site's node is started until the server has taken it, or it is said why it never will. After a crash the link believes for up to a
minute that the old node is still there, and refuses the new one with the very words it has for a key that it does not know. So a
refusal is only believed when it lasts.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rescene.core.errors import ConfigError, RunError, command, did_you_mean
from rescene.core.json_files import json_object
from rescene.deploy.federation_folder import FederationFolder, check_path, require_flower
from rescene.deploy.node_key import fingerprint, key_fault, listed_keys, number_fault, public_key
from rescene.deploy.site import Site, tighten
from rescene.deploy.site_config import local_images
from rescene.engine.checkpoint import save_atomically, write_json

CLOSED_NETWORK = {  # Flower asks the internet for nothing
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
LINK = "here"  # the name of our link in Flower's own configuration
LOOPBACK = "127.0.0.1"  # Flower's control API has no login
SECRET, SECRET_BYTES = "executor.secret", 32
GRACE_S = 10.0
COME_UP_S = 120.0  # until a process listens on its port


@dataclass(frozen=True)
class Started:
    """A process that was started here: its id, and when it began, so that another process with that id is not taken for it."""

    name: str
    pid: int
    began: str
    log: str


def environment(home: Path) -> dict[str, str]:
    """Closed network, this Python's programs first, a Flower home of its own."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**os.environ, **CLOSED_NETWORK, "PATH": path, "FLWR_HOME": str(home), "PYTHONUNBUFFERED": "1"}


def program(name: str) -> str:
    """The path of a program beside this Python."""
    return str(Path(sys.executable).parent / name)


def start(folder: Path, name: str, argv: Sequence[str], env: Mapping[str, str]) -> Started:
    """Start a program in a group of its own; its output goes to logs/<name>.log, its id to processes/<name>.json."""
    log = folder / "logs" / f"{name}.log"
    try:
        for place in ("logs", "processes"):
            (folder / place).mkdir(parents=True, exist_ok=True)
        log.touch()
    except OSError as error:
        raise cannot_write(log, error) from None
    with open(log, "ab") as out:
        child = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, cwd=folder, start_new_session=True
        )
    started = _seen(name, child.pid, str(log))
    try:
        write_json(folder / "processes" / f"{name}.json", asdict(started), sync="none")
    except RunError:
        _end(started)  # nobody would find it again
        raise
    return started


def cannot_write(path: Path, error: OSError) -> RunError:
    """The error for a file that cannot be written (E373)."""
    why, fix = error.strerror or str(error), "make room, or give the folder to the user who runs this"
    return RunError("E373", f"cannot write {path.name}", where=str(path.parent), why=why, fix=fix)


def running(folder: Path) -> list[Started]:
    """Those started from this folder that are still there."""
    return [one for one in _recorded(folder) if alive(one)]


def _recorded(folder: Path) -> list[Started]:
    found = []
    for path in sorted((folder / "processes").glob("*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError):
            found.append(Started(**json.loads(path.read_text(encoding="utf-8"))))
    return found


def alive(one: Started) -> bool:
    """Whether this very process still runs."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(one.pid, os.WNOHANG)  # one of ours that has ended is not there any more
    if not Path("/proc/self/stat").exists():
        with contextlib.suppress(OSError):
            os.kill(one.pid, 0)
            return True
        return False
    facts = _facts(one.pid)
    return bool(facts) and facts["began"] == one.began and facts["state"] != "Z"


def stop(folder: Path, but: Sequence[Started] = ()) -> list[str]:
    """End everything started from this folder, except ``but``, politely, then not; returns their names."""
    ended = [one for one in running(folder) if one not in but]
    for one in ended:
        _end(one)
    end_orphans(folder)
    kept = {one.name for one in but}
    for path in (folder / "processes").glob("*.json"):
        if path.stem not in kept:
            path.unlink(missing_ok=True)
    return [one.name for one in ended]


def end_orphans(folder: Path) -> None:
    """End what outlived the program it belonged to: the app of a node that was killed tries for ever to reach it.

    It is in the session of a program started here, and has its Flower home: a session's number may be used again.
    """
    dead = {str(one.pid) for one in _recorded(folder) if not alive(one)}
    home = f"FLWR_HOME={folder.resolve() / 'flwr'}".encode()
    for pid, facts in _everybody().items():
        with contextlib.suppress(OSError):  # another's, or gone
            if facts["session"] in dead and home in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                _end(Started("orphan", pid, facts["began"], ""))


def _end(one: Started) -> None:
    family = [_seen(one.name, pid) for pid in [one.pid, *_descendants(one.pid)]]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for member in family:
            if alive(member):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member.pid, number)
        until = time.monotonic() + GRACE_S
        while any(map(alive, family)) and time.monotonic() < until:
            time.sleep(0.1)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(one.pid, signal.SIGKILL)  # what was born in its group meanwhile


def _descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for member, facts in _everybody().items():
        children.setdefault(int(facts["parent"]), []).append(member)
    found, todo = [], [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def _seen(name: str, pid: int, log: str = "") -> Started:
    return Started(name, pid, _facts(pid).get("began", ""), log)


def _everybody() -> dict[int, dict[str, str]]:
    """The facts of all processes that are there."""
    found = {int(path.name): _facts(int(path.name)) for path in Path("/proc").glob("[0-9]*")}
    return {pid: facts for pid, facts in found.items() if facts}


def _facts(pid: int) -> dict[str, str]:
    """State, parent, session and birth of a process, from /proc; nothing if it is gone (or the system has no /proc)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return {}
    return {"state": fields[0], "parent": fields[1], "session": fields[3], "began": fields[19]}


def free_port() -> int:
    """A TCP port on this machine that nobody uses now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def check_port(host: str, port: int, patience_s: float = 5.0) -> None:
    """E125 if the port stays taken. A process that was killed holds its port until the last of its threads is gone."""
    until = time.monotonic() + patience_s
    while True:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                return probe.bind((host, port))
            except OSError as error:
                why = error.strerror
        if time.monotonic() > until:
            raise ConfigError(
                "E125",
                f"cannot listen on {host}:{port}: {why}",
                fix="rescene deploy stop FOLDER, if it is ours; else a new port in federation.yaml, server/nginx.conf and every site.yaml",
            )
        time.sleep(0.2)


def wait_for_port(one: Started, port: int) -> None:
    """Wait until the process listens on this port of the machine itself; E350 with the end of its log if it does not within two minutes."""
    until = time.monotonic() + COME_UP_S
    while time.monotonic() < until and alive(one):
        with contextlib.suppress(OSError), socket.create_connection((LOOPBACK, port), timeout=1):
            return
        time.sleep(0.2)
    raise RunError(
        "E350",
        f"{one.name} did not come up",
        where=one.log,
        why="\n".join(Path(one.log).read_text(encoding="utf-8", errors="replace").splitlines()[-5:]),
    )


def start_server(federation: FederationFolder) -> list[Started]:
    """Link and executor, whichever is not there, then the keys of all sites: an unknown one is turned away for good."""
    require_flower()
    folder, port = federation.server, federation.port
    up = {one.name: one for one in running(folder)}
    if len(up) == 2:
        raise ConfigError("E126", "the server is already running", where=str(folder), fix="rescene deploy stop FOLDER")
    check_path(folder)
    _make_secret(folder)
    env = environment(folder / "flwr")
    if "link" not in up:
        check_port(LOOPBACK, port)
        up["link"] = start(folder, "link", [
            program("flower-superlink"), *_listening(folder, port),
            "--database", "sqlite:///state.db",  # in its folder, whose path may hold what an address cannot
            "--enable-supernode-auth", "--disable-runtime-dependency-installation",
        ], env)  # fmt: skip
        wait_for_port(up["link"], port)
    if "executor" not in up:
        up["executor"] = start(folder, "executor", _executor(folder, port), env)
    home = folder / "flwr"
    home.mkdir(exist_ok=True)
    settings = {"address": f"{LOOPBACK}:{port}", "root-certificates": str(folder / "ca.crt")}
    lines = ["[superlink]", f"default = {toml_string(LINK)}", f"[superlink.{LINK}]"]
    lines += [f"{key} = {toml_string(value)}" for key, value in settings.items()]
    save_atomically(home / "config.toml", "\n".join(lines).encode())
    _register(federation)
    return list(up.values())


def _listening(folder: Path, port: int) -> list[str]:
    """Arguments of a program that gives out tasks at this port, to an executor that has the secret of the folder."""
    files = {"ssl-ca-certfile": "ca.crt", "ssl-certfile": "server.pem", "ssl-keyfile": "server.key"}
    files["superexec-auth-secret-file"] = SECRET
    named = [word for key, file in files.items() for word in (f"--{key}", str(folder / file))]
    return ["--isolation", "process", "--host", LOOPBACK, "--port", str(port), *named]


def _executor(folder: Path, port: int, *more: str) -> list[str]:
    return [
        sys.executable, "-P", "-m", "rescene.deploy.executor", "--runtime-api-address", f"{LOOPBACK}:{port}",
        "--root-certificates", str(folder / "ca.crt"), "--superexec-auth-secret-file", str(folder / SECRET), *more,
    ]  # fmt: skip


def _register(federation: FederationFolder) -> None:
    """Make the sites' keys known to the link, each once; it lists nodes by its own numbers, so we keep whose is whose."""
    from rescene.deploy.keys import write_peers

    known, there = registered(federation), {node["node-id"] for node in nodes(federation)}
    for name in federation.sites:
        if known.get(name) not in there and name not in federation.left:
            node = _node_of(federation, federation.site(name) / "node.pub")
            if node is not None:  # else nodes.json was lost
                known[name] = node
                write_json(federation.server / "nodes.json", known)
    if not changed_keys(federation):
        there_are = {number: path for number, path in federation.public_keys.items() if path.is_file()}
        write_peers(federation.server / "peers.pub", there_are)


def _node_of(federation: FederationFolder, key: Path) -> str | None:
    """Register a key: the link's number for its node, or None if the link knows the key already."""
    try:
        node: str = flwr(federation, "supernode", "register", str(key))["node-id"]
        return node
    except RunError as error:
        if "already in use" not in (error.why or ""):
            raise
    return None


def changed_keys(federation: FederationFolder) -> list[str]:
    """Sites whose node.pub is another key than the one that is registered. Nothing but ``replace_key`` lets the new one in."""
    known, listed = registered(federation), listed_keys(federation.server / "peers.pub")
    now = {number: public_key(path) for number, path in federation.public_keys.items()}
    new = {federation.sites[number] for number, key in listed.items() if now.get(number, "") not in ("", key)}
    return [name for name in federation.sites if name in new & known.keys() and name not in federation.left]


def replace_key(federation: FederationFolder, name: str) -> tuple[str, str]:
    """Register the present node.pub of a site in the place of its old key, which the link refuses from then on.

    Returns the fingerprints of the old and the new key. The lists of keys in the federation's folder get the new one.
    """
    from rescene.deploy.keys import replace_peer

    staying = [site for site in federation.sites if site not in federation.left]
    if name not in staying:
        fix = did_you_mean(name, staying) or f"sites: {', '.join(staying)}"
        raise ConfigError("E516", f"the federation has no site {name!r}", where=str(federation.path), fix=fix)
    if not running(federation.server):
        raise no_server(federation)
    number, known, peers = federation.sites.index(name), registered(federation), federation.server / "peers.pub"
    path, before = federation.public_keys[number], listed_keys(peers).get(number, "")
    new = _node_of(federation, path)
    if new is None:
        raise ConfigError(
            "E517",
            f"this key of {name} was registered before",
            where=str(path),
            why="it is the site's present key, or one that was replaced and stays refused",
            fix="put the site's new node.pub there, then the same command",
        )
    write_json(federation.server / "nodes.json", known | {name: new})
    if name in known:
        flwr(federation, "supernode", "unregister", known[name])
    for folder in (federation.server, *map(federation.site, federation.sites)):
        if (folder / "peers.pub").is_file():
            replace_peer(folder / "peers.pub", number, path)
    return fingerprint(before), fingerprint(public_key(path))


def no_server(federation: FederationFolder) -> ConfigError:
    """The error for what needs the server while it does not run (E128)."""
    return ConfigError("E128", "the server is not running", fix=command("deploy", "server", federation.path))


def registered(federation: FederationFolder) -> dict[str, str]:
    """Name of a site -> the link's number for its node."""
    return {name: str(number) for name, number in json_object(federation.server / "nodes.json", []).items()}


def seats_of(federation: FederationFolder) -> dict[int, int]:
    """The link's number for a node -> its client, so that a site can answer with its own key only."""
    known = registered(federation)
    return {int(known[name]): client for client, name in enumerate(federation.sites) if name in known}


def nodes(federation: FederationFolder) -> list[dict[str, Any]]:
    """The registered nodes with their status, as the link lists them."""
    found: list[dict[str, Any]] = flwr(federation, "supernode", "list").get("nodes", [])
    return found


def runs(federation: FederationFolder) -> list[dict[str, Any]]:
    """The runs that Flower's server knows, as ``flwr list`` tells them."""
    found: list[dict[str, Any]] = flwr(federation, "list").get("runs", [])
    return found


def flwr(federation: FederationFolder, *words: str) -> dict[str, Any]:
    """What a command of Flower's own, given to this federation's link, prints as JSON."""
    env, argv = environment(federation.server / "flwr"), [program("flwr"), *words, LINK, "--format", "json"]
    done = subprocess.run(argv, capture_output=True, text=True, env=env, cwd=federation.server)
    try:
        found = json.loads(done.stdout)
    except ValueError:
        found = {"success": False}
    if done.returncode or found.get("success") is False:
        said = (found.get("error-message") or done.stderr or done.stdout).strip()
        raise RunError("E352", f"flwr {words[0]} failed", where=str(federation.server), why=said[-500:] or None)
    return dict(found)


def toml_string(text: str) -> str:
    """A string as Flower reads it from its file and from its command line, where a quotation mark may not stand.

    >>> print(toml_string('a "b" 😀'))
    "a \\u0022b\\u0022 😀"
    """
    return '"' + json.dumps(text, ensure_ascii=False)[1:-1].replace('\\"', "\\u0022") + '"'


def start_site(folder: Path) -> list[Started]:
    """The node of one site, which keeps trying until the server is there, and the executor of its apps."""
    require_flower()
    folder = folder.resolve()
    site = Site.open(folder)
    check_path(folder)
    if site.section.holds == "own":
        local_images(site.section)  # what is wrong with them is told here and now, not in a log
    missing = [name for name in ("ca.crt", "node.key") if not (folder / name).is_file()]
    if missing or not site.section.server:
        lacks = missing[0] if missing else "server: host:port in site.yaml"
        raise ConfigError("E127", f"the site's folder lacks {lacks}", where=str(folder), fix="ask the operator for it")
    wrong, fix = key_fault(folder)
    if wrong:
        raise ConfigError("E514", "node.key is not the key of this site", where=str(folder), why=wrong, fix=fix)
    wrong, fix = number_fault(folder, site.section.client)
    if wrong:
        where = str(folder / "site.yaml")
        raise ConfigError("E515", "this site has the number of another one", where=where, why=wrong, fix=fix)
    if len(running(folder)) == 2:
        raise ConfigError("E126", "the site is already running", where=str(folder), fix="rescene deploy stop FOLDER")
    stop(folder)  # half a site, and what a node left behind that was killed
    tighten(folder)
    door = _door(folder)
    port, env = free_port(), environment(folder / "flwr")
    node = start(folder, "node", [
        program("flower-supernode"), "--superlink", site.section.server, "--root-certificates", str(folder / "ca.crt"),
        "--auth-supernode-private-key", str(folder / "node.key"), "--node-config", f"folder={toml_string(str(folder))}",
        *_listening(door, port),
    ], env)  # fmt: skip
    return [node, start(folder, "executor", _executor(door, port, "--parent-pid", str(node.pid)), env)]


def _door(folder: Path) -> Path:
    """Secret and certificate of the port at which a node gives out its tasks, new at every start.

    Without them anyone on this machine could take a task and answer it, or hand the executor a task of his own.
    """
    from rescene.deploy.keys import make_certificates

    door = folder / "door"
    try:
        shutil.rmtree(door, ignore_errors=True)
        door.mkdir(mode=0o700)
        make_certificates(door, "node", "localhost")
        (door / "ca.key").unlink()  # it has signed the one certificate it is for
    except OSError as error:
        raise cannot_write(door, error) from None
    _make_secret(door)
    return door


def _make_secret(folder: Path) -> None:
    """What an executor proves itself with; made anew if a full disk cut it short."""
    from rescene.deploy.keys import write_secret

    path = folder / SECRET
    try:
        if not path.exists() or path.stat().st_size != SECRET_BYTES:
            path.unlink(missing_ok=True)
            write_secret(path, secrets.token_bytes(SECRET_BYTES))
    except OSError as error:
        raise cannot_write(path, error) from None


def stay(started: list[Started]) -> None:
    """Until one of them ends, which is an error: whoever watches this process starts it again."""
    while all(map(alive, started)):
        time.sleep(1)
    gone = next(one for one in started if not alive(one))
    raise RunError("E350", f"{gone.name} has ended", where=gone.log)


ONLINE, REFUSED = "SuperNode ID", "Failed to activate"  # Flower's words in the node's log
ENDED_BY_ITSELF = "terminated gracefully"  # without having been online: its signature was not accepted
PATIENCE_S, PAUSE_S, SETTLE_S = 90.0, 10.0, 20.0


def start_kept(
    folder: Path,
    begin: Callable[[], Sequence[Started]],
    tell: Callable[[str], None] = print,
    patience_s: float = PATIENCE_S,
    pause_s: float = PAUSE_S,
    settle_s: float = SETTLE_S,
) -> list[Started]:
    """Start the node and what goes with it, again while the link refuses it; a server that is not there yet is no reason to give up."""
    log = folder / "logs" / "node.log"
    until = time.monotonic() + patience_s
    while True:
        seen = log.stat().st_size if log.exists() else 0
        started = begin()
        node = started[0]
        said = _first_words(node, log, seen, settle_s)
        if alive(node) and ONLINE not in said:
            tell("the server does not answer yet; the node goes on trying")
            said = _first_words(node, log, seen, until - time.monotonic())  # on a busy machine a refusal comes late
        if alive(node):
            if ONLINE in said:
                tell("the server has taken this site")
            return list(started)
        if REFUSED not in said or time.monotonic() > until:
            raise ended(folder, said)
        tell(f"refused: the server may believe for a minute that this site is still there; again in {pause_s:.0f} s")
        time.sleep(pause_s)


def _first_words(node: Started, log: Path, seen: int, settle_s: float) -> str:
    """What the node has logged when it is online, has ended, or has not got far in ``settle_s``."""
    until = time.monotonic() + settle_s
    while True:
        going = alive(node)
        said = log.read_bytes()[seen:].decode(errors="replace") if log.exists() else ""
        if ONLINE in said or not going or time.monotonic() > until:
            return said
        time.sleep(0.2)


def ended(folder: Path, said: str) -> RunError:
    """Why the node ended, as far as its log tells."""
    where, look = str(folder), command("deploy", "check", folder)
    if REFUSED in said:
        why = "it does not know this node.key, or another node with the same key is running"
        fix = (
            "stop the other node; or, if this site has a new key, bring node.pub to the operator, who then runs\n"
            "rescene deploy replace-key FEDERATION SITE"
        )
        return RunError("E361", "the server refuses this site", where=where, why=why, fix=fix)
    if "CERTIFICATE_VERIFY_FAILED" in said:
        why = "its certificate is not signed by this site's ca.crt, not for this name, or not valid today"
        return RunError("E362", "the server is not the one this site trusts", where=where, why=why, fix=look)
    if ENDED_BY_ITSELF in said or "401 Unauthorized" in said:
        why = "the clocks of the two differ too much, or node.key is damaged"
        return RunError("E363", "the server does not believe this site's signature", where=where, why=why, fix=look)
    return RunError("E350", "node has ended", where=str(folder / "logs" / "node.log"), why=_reason(said))


def _reason(said: str) -> str:
    """The lines in which Flower says why it exits, else the last ones."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", said).strip().splitlines()
    first = next((i for i, line in enumerate(lines) if "Exit Code" in line), max(len(lines) - 5, 0))
    return "\n".join(lines[first : first + 5])
