"""Server and sites as processes: start them, register keys, submit a run, watch it, see who is there, stop everything.

Flower in its robust mode: the link keeps its messages in a database and the apps run under an executor of their own, so a
link that dies and comes back costs nothing. Link and nodes give tasks only to an executor that has their secret. A run is
judged by its listed status: the exit code of `flwr run` says nothing.

A site can leave its federation: the run goes on without it in another folder, and nobody asks the site again.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from rescene.config import Resolved
from rescene.core.documents import read_yaml
from rescene.core.errors import ConfigError, ResceneError, RunError, command, error_in
from rescene.core.json_files import json_object
from rescene.core.results import read_events, read_status, read_waiting
from rescene.core.run_state import is_done, read_object, state_of
from rescene.deploy.exchange import Patience
from rescene.deploy.federation_folder import FederationFolder, check_path, require_flower
from rescene.deploy.plan_file import accuracy_warning, read_plan, with_plan
from rescene.deploy.processes import (
    Started,
    alive,
    cannot_write,
    check_port,
    environment,
    free_port,
    program,
    running,
    start,
    stop,
    wait_for_port,
)
from rescene.deploy.site import Site, tighten
from rescene.deploy.site_config import local_images
from rescene.deploy.status import left_out_rows, site_answers, task_rows
from rescene.engine import RunFolder
from rescene.engine.checkpoint import save_atomically, write_json
from rescene.engine.run_context import with_site_names
from rescene.lens import absolute


def federation_of(run: Path) -> FederationFolder | None:
    """The federation on whose server this run folder lies; None if it lies elsewhere."""
    folder = run.resolve()
    root = folder.parents[2] if len(folder.parents) > 2 else folder
    inside = folder.parent == root / "server" / "runs" and (root / "federation.yaml").is_file()
    return FederationFolder.open(root) if inside else None


def place_without(federation: FederationFolder, run: Path, client: int) -> Path:
    """The folder in which the run goes on: where `rescene deploy run` looks for it. Refuses one that was left behind."""
    if run.resolve().name.split("-without-")[0] == "plan" and run.resolve() != federation.plan_run:
        raise ConfigError(
            "E165", "the federation goes on elsewhere", where=str(run), fix=command("forget", federation.plan_run)
        )
    gone = sorted({*federation.exclude, client})
    return run.with_name("-without-".join([run.resolve().name.split("-without-")[0], *map(str, gone)]))


def leave(federation: FederationFolder, name: str, run: Path) -> None:
    """Write into federation.yaml that the site has left, and where a plan goes on."""
    path = federation.path / "federation.yaml"
    facts = read_yaml(path)
    facts["left"] = sorted({*federation.left, name})
    if run.name.split("-without-")[0] == "plan":
        facts["plan_folder"] = run.name
    save_atomically(path, yaml.safe_dump(facts, sort_keys=False).encode())


def without_left(federation: FederationFolder, resolved: Resolved) -> Resolved:
    """The recipe without the sites that left."""
    recipe = resolved.recipe
    for client in federation.exclude:
        if client < recipe.federation.num_clients:
            recipe = recipe.without(client)
    return replace(resolved, recipe=recipe)


LINK = "here"  # the name of our link in Flower's own configuration
SECRET_BYTES = 32
LOOK_S = 5.0
SUBMISSIONS = 3  # in a row that finish no step
COMPLETED, LOST = "finished:completed", "lost with the server"
LASTING = ("E377",)  # all sites decline: somebody must change a floor
PASSING = ("E410", "E422")  # a disk may get room again, and the process of the run before ends in a while
RETURN_S = 600.0  # for a server that ended to be started again


def start_server(federation: FederationFolder) -> list[Started]:
    """Link and executor, whichever is not there, then the keys of all sites: an unknown one is turned away for good."""
    require_flower()
    folder, host, port = federation.server, "127.0.0.1", federation.port  # its control API has no login
    up = {one.name: one for one in running(folder)}
    if len(up) == 2:
        raise ConfigError("E126", "the server is already running", where=str(folder), fix="rescene deploy stop FOLDER")
    check_path(folder)
    secret = _secret(folder)
    env, address, ca = environment(folder / "flwr"), f"{host}:{port}", str(folder / "ca.crt")
    if "link" not in up:
        check_port(host, port)
        up["link"] = start(folder, "link", [
            program("flower-superlink"), "--isolation", "process", "--host", host, "--port", str(port),
            "--ssl-ca-certfile", ca, "--ssl-certfile", str(folder / "server.pem"),
            "--ssl-keyfile", str(folder / "server.key"),
            "--database", "sqlite:///state.db",  # in its folder, whose path may hold what an address cannot
            "--enable-supernode-auth", "--superexec-auth-secret-file", str(secret),
            "--disable-runtime-dependency-installation",
        ], env)  # fmt: skip
        wait_for_port(up["link"], host, port)
    if "executor" not in up:
        up["executor"] = start(folder, "executor", _executor(address, ca, secret), env)
    home = folder / "flwr"
    home.mkdir(exist_ok=True)
    settings = {"address": address, "root-certificates": ca}
    lines = ["[superlink]", f"default = {toml_string(LINK)}", f"[superlink.{LINK}]"]
    lines += [f"{key} = {toml_string(value)}" for key, value in settings.items()]
    save_atomically(home / "config.toml", "\n".join(lines).encode())
    _register(federation)
    return list(up.values())


def _executor(address: str, authority: str, secret: Path, *more: str) -> list[str]:
    return [
        sys.executable, "-P", "-m", "rescene.deploy.executor", "--runtime-api-address", address,
        "--root-certificates", authority, "--superexec-auth-secret-file", str(secret), *more,
    ]  # fmt: skip


def _secret(folder: Path) -> Path:
    """What an executor proves itself with; made anew if a full disk cut it short."""
    from rescene.deploy.keys import write_secret

    path = folder / "executor.secret"
    try:
        if not path.exists() or path.stat().st_size != SECRET_BYTES:
            path.unlink(missing_ok=True)
            write_secret(path, secrets.token_bytes(SECRET_BYTES))
    except OSError as error:
        raise cannot_write(path, error) from None
    return path


def toml_string(text: str) -> str:
    """A string as Flower reads it from its file and from its command line, where a quotation mark may not stand.

    >>> print(toml_string('a "b" 😀'))
    "a \\u0022b\\u0022 😀"
    """
    return '"' + json.dumps(text, ensure_ascii=False)[1:-1].replace('\\"', "\\u0022") + '"'


def _register(federation: FederationFolder) -> None:
    """Make the sites' keys known to the link, each once; it lists nodes by its own numbers, so we keep whose is whose."""
    from rescene.deploy.keys import write_peers

    known, there = registered(federation), {node["node-id"] for node in nodes(federation)}
    for name in federation.sites:
        if known.get(name) not in there and name not in federation.left:
            key = str(federation.site(name) / "node.pub")
            try:
                known[name] = flwr(federation, "supernode", "register", key, LINK, "--format", "json")["node-id"]
            except RunError as error:
                if "already in use" not in (error.why or ""):
                    raise
                continue  # nodes.json was lost; the link knows the key
            write_json(federation.server / "nodes.json", known)
    there_are = {number: path for number, path in federation.public_keys.items() if path.is_file()}
    write_peers(federation.server / "peers.pub", there_are)


def registered(federation: FederationFolder) -> dict[str, str]:
    """Name of a site -> the link's number for its node."""
    return {name: str(number) for name, number in json_object(federation.server / "nodes.json", []).items()}


def seats_of(federation: FederationFolder) -> dict[int, int]:
    """The link's number for a node -> its client, so that a site can answer with its own key only."""
    known = registered(federation)
    return {int(known[name]): client for client, name in enumerate(federation.sites) if name in known}


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
    if len(running(folder)) == 2:
        raise ConfigError("E126", "the site is already running", where=str(folder), fix="rescene deploy stop FOLDER")
    stop(folder)  # half a site, and what a node left behind that was killed
    tighten(folder)
    door = _door(folder)
    port, env = free_port(), environment(folder / "flwr")
    node = start(folder, "node", [
        program("flower-supernode"), "--superlink", site.section.server, "--root-certificates", str(folder / "ca.crt"),
        "--auth-supernode-private-key", str(folder / "node.key"), "--node-config", f"folder={toml_string(str(folder))}",
        "--isolation", "process", "--superexec-auth-secret-file", str(door / "executor.secret"),
        "--host", "127.0.0.1", "--port", str(port), "--ssl-ca-certfile", str(door / "ca.crt"),
        "--ssl-certfile", str(door / "server.pem"), "--ssl-keyfile", str(door / "server.key"),
    ], env)  # fmt: skip
    address, authority = f"127.0.0.1:{port}", str(door / "ca.crt")
    argv = _executor(address, authority, door / "executor.secret", "--parent-pid", str(node.pid))
    return [node, start(folder, "executor", argv, env)]


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
    _secret(door)
    return door


def _with_whole_paths(resolved: Resolved) -> Resolved:
    """The recipe with the full paths of the model's files: the server works in its own folder."""
    model = resolved.recipe.model
    lens = absolute(model.lens) if model.lens else None
    init = str(Path(model.init).expanduser().absolute()) if model.init else None
    model = model.model_copy(update={"lens": lens, "init": init})
    return replace(resolved, recipe=resolved.recipe.model_copy(update={"model": model}))


def run(
    federation: FederationFolder,
    resolved: Resolved,
    out: Path,
    patience: Patience = Patience(),
    tell: Callable[[str], None] = print,
    look_s: float = LOOK_S,
    elsewhere: bool = False,
) -> dict[str, Any]:
    """Submit, watch, and submit again what failed: the run goes on from its checkpoint. Returns its results.

    A federation with a plan runs that: all its sites, in the plan's own run folder.
    """
    require_flower()
    plan = read_plan(federation.plan)
    if plan is not None:
        resolved = with_plan(resolved, plan, len(federation.sites), out)
    resolved = without_left(federation, resolved)
    if plan is not None:
        RunFolder(out).check(resolved)
    _check_can_run(federation, resolved)
    if warning := accuracy_warning(resolved.recipe):
        tell(str(warning))
    resolved = _with_whole_paths(resolved)
    out = out.resolve()
    recipe = federation.server / "recipes" / f"{resolved.name}-{resolved.digest()}.yaml"
    recipe.parent.mkdir(exist_ok=True)
    save_atomically(recipe, yaml.safe_dump(resolved.recipe.model_dump(mode="json"), sort_keys=False).encode())
    config = {"recipe": str(recipe), "out": str(out), "gather-s": patience.gather_s}
    config |= {"deadline-s": patience.deadline_s, "poll-s": patience.poll_s}
    config |= {"plan": str(federation.plan)} if plan else {}
    config |= {"elsewhere": True} if elsewhere else {}
    text = " ".join(
        f"{key}={toml_string(value) if isinstance(value, str) else json.dumps(value)}" for key, value in config.items()
    )
    fruitless = 0
    while fruitless < SUBMISSIONS:
        done = read_status(out).done
        answer = flwr(federation, "run", str(federation.app), LINK, "--format", "json", "--run-config", text)
        status, why = _watch(federation, int(answer["run-id"]), out, tell, look_s)
        if status == COMPLETED and is_done(out):
            return read_object(out / "results.json")
        error = error_in(why)
        if error and not _may_pass(error):
            raise error
        status = f"{status} ({why})" if why else status
        fruitless = fruitless + 1 if read_status(out).done <= done else 0
        tell(f"ended as {status}; submissions in a row without a finished step: {fruitless} of {SUBMISSIONS}")
        if status == LOST:
            break
        _wait_for_link(federation, look_s)
    raise RunError(
        "E351",
        f"the run ended as {status}",
        where=str(out),
        why=_last_events(out),
        fix=f"see {federation.server / 'logs' / 'executor.log'}; the same command goes on from the last round",
    )


def _check_can_run(federation: FederationFolder, resolved: Resolved) -> None:
    if not running(federation.server):
        raise ConfigError("E128", "the server is not running", fix=_again(federation))
    if resolved.recipe.tasks.drift is not None:
        raise ConfigError("E167", "only a simulation can let classes drift in", where="tasks.drift", fix="leave it out")
    num_clients = resolved.recipe.federation.num_clients
    if num_clients > len(federation.sites):
        raise ConfigError(
            "E129",
            f"the recipe has {num_clients} sites, the federation {len(federation.sites)}",
            fix=f"federation.num_clients={len(federation.sites)}",
        )


def _again(federation: FederationFolder) -> str:
    return command("deploy", "server", federation.path)


def _wait_for_link(federation: FederationFolder, look_s: float) -> None:
    """A server that ended and took the run with it may come back; if not, the next command says so."""
    until = time.monotonic() + RETURN_S
    while time.monotonic() < until:
        with contextlib.suppress(RunError):
            runs(federation)
            return
        time.sleep(look_s)


def _may_pass(error: ResceneError) -> bool:
    """Sites come back; what else a server app refuses, it refuses every time, but for two things."""
    return (error.code.startswith("E3") and error.code not in LASTING) or error.code in PASSING


def _watch(
    federation: FederationFolder, run_id: int, out: Path, tell: Callable[[str], None], look_s: float
) -> tuple[str, str]:
    """Until the run is listed as finished: as what, and why. Tells each step once. A link that is gone may come back,
    and the run with it.
    """
    told, lost_at = "", 0.0
    while True:
        gone = {"link", "executor"} - {one.name for one in running(federation.server)}
        again = f"the {' and the '.join(sorted(gone))} of the server ended; {_again(federation)}"
        line = again if gone else progress(out, federation.sites)
        if not told and not gone and is_done(out):  # what the folder says of the tasks before
            line = "starting"
        if line != told:
            tell(line)
            told = line
        lost_at = (lost_at or time.monotonic()) if gone else 0.0
        if gone and time.monotonic() - lost_at > RETURN_S:
            return LOST, ""
        with contextlib.suppress(RunError):  # the link is busy, or away
            found = next((r for r in runs(federation) if str(r["run-id"]) == str(run_id)), {})
            status = str(found.get("status", ""))
            if status.startswith("finished"):
                return status, str(found.get("status-details") or "")
        time.sleep(look_s)


def progress(out: Path, sites: Sequence[str] = ()) -> str:
    """One line: how far the run is and whom it waits for; ``sites`` are their names."""
    status = read_status(out)
    if status.steps is None:
        return "starting"
    aa = "" if status.aa is None else f", AA {status.aa:.1f}"
    late = with_site_names(", ".join(read_waiting(out).waiting_for), sites)
    state = state_of(out)
    wait = f"; waiting for {late}" if late and state == "running" else ""
    return f"{state}: {status.done} of {status.steps} steps{aa}{wait}"


def status_rows(federation: FederationFolder) -> list[dict[str, Any]]:
    """One row for the server, each site, each run, the task under way and each upload left out: what it is, how it is."""
    up = {one.name for one in running(federation.server)}
    rows = [{"what": "server", "name": part, "state": "up" if part in up else "down"} for part in ("link", "executor")]
    listed = {node["node-id"]: str(node["status"]) for node in nodes(federation)} if "link" in up else {}
    known = registered(federation)
    folders = [path.parent for path in sorted((federation.server / "runs").glob("*/status.json"))]
    answers = site_answers(folders, federation.sites)
    for name in federation.sites:
        state = "left" if name in federation.left else listed.get(known.get(name, ""), "unknown")
        rows.append({"what": "site", "name": name, "state": f"{state}; {answers[name]}" if name in answers else state})
    rows += [{"what": "run", "name": folder.name, "state": progress(folder, federation.sites)} for folder in folders]
    return rows + task_rows(read_plan(federation.plan), federation.plan_run) + left_out_rows(folders, federation.sites)


def nodes(federation: FederationFolder) -> list[dict[str, Any]]:
    """The registered nodes with their status, as the link lists them."""
    found: list[dict[str, Any]] = flwr(federation, "supernode", "list", LINK, "--format", "json").get("nodes", [])
    return found


def runs(federation: FederationFolder) -> list[dict[str, Any]]:
    """The runs that Flower's server knows, as ``flwr list`` tells them."""
    found: list[dict[str, Any]] = flwr(federation, "list", LINK, "--format", "json").get("runs", [])
    return found


def flwr(federation: FederationFolder, *words: str) -> dict[str, Any]:
    """A command of Flower's own, with what it prints as JSON where it does."""
    env = environment(federation.server / "flwr")
    done = subprocess.run([program("flwr"), *words], capture_output=True, text=True, env=env, cwd=federation.server)
    try:
        found = json.loads(done.stdout) if "json" in words else {}
    except ValueError:
        found = {"success": False}
    if done.returncode or found.get("success") is False:
        said = (found.get("error-message") or done.stderr or done.stdout).strip()
        raise RunError("E352", f"flwr {words[0]} failed", where=str(federation.server), why=said[-500:] or None)
    return dict(found)


def stay(started: list[Started]) -> None:
    """Until one of them ends, which is an error: whoever watches this process starts it again."""
    while all(map(alive, started)):
        time.sleep(1)
    gone = next(one for one in started if not alive(one))
    raise RunError("E350", f"{gone.name} has ended", where=gone.log)


def _last_events(out: Path) -> str | None:
    return (
        "\n".join(f"{event.code} {event.message}" for event in read_events(out, []) if event.level == "error") or None
    )
