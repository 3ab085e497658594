"""What an operator does and sees: a run is submitted and watched; who has answered, who is late, what was left out.

A run is judged by its listed status: the exit code of `flwr run` says nothing. Who is there, who has answered and whom we
wait for is written as sites.json into the run folder, beside what the run itself writes; the report reads files only.

A site can leave its federation: the run goes on without it in another folder, and nobody asks the site again.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from rescene.config import Resolved
from rescene.config.compose import explain
from rescene.config.site_sections import SitesSection
from rescene.core.documents import read_yaml
from rescene.core.errors import DECLINED, ConfigError, ResceneError, RunError, command, error_in
from rescene.core.json_files import Row, json_object
from rescene.core.noised_accuracy import noise_line
from rescene.core.results import EventRecord, read_events, read_metrics, read_status, read_waiting, results_of_row
from rescene.core.run_state import is_done, read_object, state_of
from rescene.deploy.exchange import Patience
from rescene.deploy.federation_folder import FederationFolder, require_flower
from rescene.deploy.plan_file import Held, accuracy_warning, read_plan, with_plan
from rescene.deploy.processes import flwr, no_server, nodes, registered, running, runs, toml_string
from rescene.engine import RunFolder
from rescene.engine.checkpoint import save_atomically, write_json
from rescene.engine.run_context import with_site_names
from rescene.lens import absolute

LOOK_S = 5.0
SUBMISSIONS = 3  # in a row that finish no step
COMPLETED, LOST = "finished:completed", "lost with the server"
LASTING = ("E377",)  # all sites decline: somebody must change a floor
PASSING = ("E410", "E422")  # a disk may get room again, and the process of the run before ends in a while
RETURN_S = 600.0  # for a server that ended to be started again
TOLD = ("status.json", "waiting.json")  # what a run tells of itself; the first comes with its first step
MOST_LEFT_OUT = 20  # uploads left out, the newest


def federation_of(run: Path) -> FederationFolder | None:
    """The federation on whose server this run folder lies; None if it lies elsewhere."""
    folder = run.resolve()
    root = folder.parents[2] if len(folder.parents) > 2 else folder
    inside = folder.parent == root / "server" / "runs" and (root / "federation.yaml").is_file()
    return FederationFolder.open(root) if inside else None


def place_without(federation: FederationFolder, run: Path, client: int) -> Path:
    """The folder in which the run goes on: where `rescene deploy run` looks for it. Refuses one that was left behind."""
    if _is_of_plan(run.resolve()) and run.resolve() != federation.plan_run:
        raise ConfigError(
            "E165", "the federation goes on elsewhere", where=str(run), fix=command("forget", federation.plan_run)
        )
    gone = sorted({*federation.exclude, client})
    return run.with_name("-without-".join([run.resolve().name.split("-without-")[0], *map(str, gone)]))


def _is_of_plan(run: Path) -> bool:
    """Whether a folder holds a plan's run, before or after a site has left."""
    return re.split("-without-|-summed-again-", run.name)[0] == "plan"


def leave(federation: FederationFolder, names: Iterable[str], run: Path, earlier_sums: int = 0) -> FederationFolder:
    """Write into federation.yaml that the sites have left, where a plan goes on, and how often its images were summed before."""
    path = federation.path / "federation.yaml"
    facts = read_yaml(path)
    facts["left"] = sorted({*federation.left, *names})
    if _is_of_plan(run):
        facts |= {"plan_folder": run.name} | ({"earlier_sums": earlier_sums} if earlier_sums else {})
    save_atomically(path, yaml.safe_dump(facts, sort_keys=False).encode())
    return FederationFolder.open(federation.path)


def leave_sums(federation: FederationFolder, resolved: Resolved) -> FederationFolder:
    """Secure sums that are taken anew without some sites are their withdrawal, which is written down before anybody is asked.

    From then on the plan goes on in the folder of the new sums, and no later command asks these sites.
    """
    earlier, gone = resolved.recipe.privacy.earlier_sums, resolved.recipe.federation.exclude or ()
    if earlier is None or earlier == federation.earlier_sums:
        return federation
    if earlier < federation.earlier_sums:
        raise ConfigError(
            "E531",
            f"the images of this federation were summed {federation.earlier_sums} times before, not {earlier}",
            where="privacy.earlier_sums",
            fix="leave it out: federation.yaml has the number",
        )
    names = [federation.sites[client] for client in gone if client < len(federation.sites)]
    try:
        without_left(replace(federation, left=[*federation.left, *names]), resolved)
    except ValidationError as error:
        raise ConfigError(
            "E532",
            f"{', '.join(names)} cannot leave",
            why=explain(error, resolved.origins, {}).why,
            fix="nothing was changed: it stays, or the others begin a new federation",
        ) from None
    before = federation.plan_folder.split("-summed-again-")[0]
    grown = federation.plan_run.with_name(f"{before}-summed-again-{earlier}")
    return leave(federation, names, grown if federation.plan.exists() else federation.server, earlier)


def without_left(federation: FederationFolder, resolved: Resolved) -> Resolved:
    """The recipe without the sites that left, and with the number of the secure sums that they were in."""
    recipe = resolved.recipe
    for client in federation.exclude:
        if client < recipe.federation.num_clients:
            recipe = recipe.without(client)
    if federation.earlier_sums and recipe.privacy.honest_sites is not None:
        privacy = recipe.privacy.model_copy(update={"earlier_sums": federation.earlier_sums})
        recipe = recipe.model_copy(update={"privacy": privacy})
    return replace(resolved, recipe=recipe)


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
    resolved = _for_sites(federation, resolved, out)
    if warning := accuracy_warning(resolved.recipe):
        tell(str(warning))
    tell(f"the server waits {patience.deadline_s:g} seconds at most for the answers of a round (--deadline)")
    out = out.resolve()
    config = _run_config(federation, _with_whole_paths(resolved), out, patience, elsewhere)
    fruitless = 0
    while fruitless < SUBMISSIONS:
        done = read_status(out).done
        answer = flwr(federation, "run", str(federation.app), "--run-config", config)
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
        why="\n".join(f"{one.code} {one.message}" for one in read_events(out, []) if one.level == "error") or None,
        fix=f"see {federation.server / 'logs' / 'executor.log'}; the same command goes on from the last round",
    )


def _for_sites(federation: FederationFolder, resolved: Resolved, out: Path) -> Resolved:
    """The recipe for the sites of this federation; refuses one that cannot run there."""
    plan = read_plan(federation.plan)
    if plan is not None:
        resolved = with_plan(resolved, plan, len(federation.sites), out)
    resolved = without_left(federation, resolved)
    if plan is not None:
        RunFolder(out).check(resolved)
    if not running(federation.server):
        raise no_server(federation)
    if resolved.recipe.tasks.drift is not None:
        raise ConfigError("E167", "only a simulation can let classes drift in", where="tasks.drift", fix="leave it out")
    num_clients = resolved.recipe.federation.num_clients
    if num_clients > len(federation.sites):
        raise ConfigError(
            "E129",
            f"the recipe has {num_clients} sites, the federation {len(federation.sites)}",
            fix=f"federation.num_clients={len(federation.sites)}",
        )
    return resolved


def _run_config(
    federation: FederationFolder, resolved: Resolved, out: Path, patience: Patience, elsewhere: bool
) -> str:
    """What the server app is told on the command line of `flwr run`; the recipe lies in a file."""
    recipe = federation.server / "recipes" / f"{resolved.name}-{resolved.digest()}.yaml"
    recipe.parent.mkdir(exist_ok=True)
    save_atomically(recipe, yaml.safe_dump(resolved.recipe.model_dump(mode="json"), sort_keys=False).encode())
    config = {"recipe": str(recipe), "out": str(out), "gather-s": patience.gather_s}
    config |= {"deadline-s": patience.deadline_s, "poll-s": patience.poll_s}
    config |= {"plan": str(federation.plan)} if federation.plan.exists() else {}
    config |= {"elsewhere": True} if elsewhere else {}
    return " ".join(
        f"{key}={toml_string(value) if isinstance(value, str) else json.dumps(value)}" for key, value in config.items()
    )


def _with_whole_paths(resolved: Resolved) -> Resolved:
    """The recipe with the full paths of the model's files: the server works in its own folder."""
    model = resolved.recipe.model
    lens = absolute(model.lens) if model.lens else None
    init = str(Path(model.init).expanduser().absolute()) if model.init else None
    model = model.model_copy(update={"lens": lens, "init": init})
    return replace(resolved, recipe=resolved.recipe.model_copy(update={"model": model}))


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


def _may_pass(error: ResceneError) -> bool:
    """Sites come back; what else a server app refuses, it refuses every time, but for two things."""
    return (error.code.startswith("E3") and error.code not in LASTING) or error.code in PASSING


def _wait_for_link(federation: FederationFolder, look_s: float) -> None:
    """A server that ended and took the run with it may come back; if not, the next command says so."""
    until = time.monotonic() + RETURN_S
    while time.monotonic() < until:
        with contextlib.suppress(RunError):
            runs(federation)
            return
        time.sleep(look_s)


def _again(federation: FederationFolder) -> str:
    return command("deploy", "server", federation.path)


def progress(out: Path, sites: Sequence[str] = ()) -> str:
    """One line: how far the run is and whom it waits for, if somebody is missing until when; ``sites`` are their names."""
    status, state, waiting = read_status(out), state_of(out), read_waiting(out)
    late = with_site_names(", ".join(waiting.waiting_for), sites)
    until = _until(out) if waiting.missing else ""
    wait = f"; waiting for {late}{until}" if late and state == "running" else ""
    if status.steps is None:
        return f"starting{wait}"
    told = f"{status.aa:.1f}" if state == "done" and status.aa is not None else status.aa_so_far
    aa = f", AA {told}" if told else ""
    return f"{state}: {status.done} of {status.steps} steps{aa}{wait}"


def status_rows(federation: FederationFolder) -> list[dict[str, Any]]:
    """One row for the server, each site, each run, the task under way and each upload left out: what it is, how it is."""
    up = {one.name for one in running(federation.server)}
    rows = [{"what": "server", "name": part, "state": "up" if part in up else "down"} for part in ("link", "executor")]
    listed = {node["node-id"]: str(node["status"]) for node in nodes(federation)} if "link" in up else {}
    known, folders = registered(federation), run_folders(federation)
    answers = site_answers(folders, federation.sites)
    for name in federation.sites:
        state = "left" if name in federation.left else listed.get(known.get(name, ""), "unknown")
        rows.append({"what": "site", "name": name, "state": f"{state}; {answers[name]}" if name in answers else state})
    for folder in folders:
        rows.append({"what": "run", "name": folder.name, "state": progress(folder, federation.sites)})
        rows += accuracy_rows(folder)
    return rows + task_rows(read_plan(federation.plan), federation.plan_run) + left_out_rows(folders, federation.sites)


def accuracy_rows(run: Path) -> list[Row]:
    """How far noise on the sites' counts moves the accuracy; no row where there is none."""
    line = noise_line(read_events(run, []), results_of_row(json_object(run / "results.json", []), []))
    return [{"what": "accuracy", "name": run.name, "state": line}] if line else []


def run_folders(federation: FederationFolder) -> list[Path]:
    """The run folders on the server, by name; one that waits for its first sites has no status yet."""
    return sorted({path.parent for name in TOLD for path in (federation.server / "runs").glob(f"*/{name}")})


def newest_run(federation: FederationFolder) -> Path | None:
    """The run folder that was touched last."""

    def touched(folder: Path) -> float:
        return max((folder / name).stat().st_mtime for name in TOLD if (folder / name).exists())

    return max(run_folders(federation), key=touched, default=None)


def site_answers(runs: list[Path], sites: list[str], now: datetime | None = None) -> dict[str, str]:
    """For each site that a running run has asked: that it has answered, or since when it is waited for."""
    found: dict[str, str] = {}
    for run in runs:
        waiting = read_waiting(run)
        if state_of(run) != "running" or not waiting.asked:
            continue
        asked = datetime.fromisoformat(waiting.asked)
        minutes = int(((now or datetime.now(UTC)) - asked).total_seconds() // 60)
        found |= dict.fromkeys(_names(waiting.answered, sites), "answered")
        words = f"waited for since {asked:%Y-%m-%d %H:%M} UTC ({minutes} min){_until(run)}"
        found |= dict.fromkeys(_names(waiting.waiting_for, sites), words)
    return found


def _until(run: Path) -> str:
    """Until when the run waits at most, to the full minute; empty where its waiting.json does not say."""
    with contextlib.suppress(ValueError):
        end = datetime.fromisoformat(read_waiting(run).until)
        return f", until {end + timedelta(seconds=59):%Y-%m-%d %H:%M} UTC at the latest"
    return ""


def task_rows(plan: SitesSection | None, run: Path) -> list[Row]:
    """The tasks of the plan: classes, rounds held, and whether it is ended, running or waiting for its turn."""
    if plan is None:
        return []
    held, rows = Held.of(run), []
    finished = held.task if held.task is not None else read_status(run).num_tasks or 0
    for number, task in enumerate(plan.tasks):
        state = "ended" if number < finished else "not begun"
        if number == held.task:
            state = f"{held.rounds} of {task.rounds} rounds held" + (", closing" if task.closed else "")
        rows.append({"what": "task", "name": str(number + 1), "state": f"{state}: {', '.join(task.classes)}"})
    return rows


def left_out_rows(runs: list[Path], sites: list[str]) -> list[Row]:
    """Uploads that did not count, with code and reason; the newest last."""
    rows = []
    for run in runs:
        for event in read_events(run, []):
            if event.left_out and event.client is not None:
                place = _place(event)
                name = sites[event.client] if event.client < len(sites) else f"site {event.client}"
                rows.append({"what": "left out", "name": name, "state": f"{place}: {event.code} {event.message}"})
    return rows[-MOST_LEFT_OUT:]


def declined(run: Path, sites: Sequence[str]) -> list[str]:
    """Sites that did not send what they were asked for, each reason once: the model was made without it."""
    found = [
        f"{sites[event.client]}, {_place(event)}: {event.message}"
        for event in read_events(run, [])
        if event.code == DECLINED and event.client is not None and event.client < len(sites)
    ]
    return list(dict.fromkeys(found))


def missed(run: Path, sites: Sequence[str]) -> list[str]:
    """Which task was learned without which site: the site failed in it, and sent nothing that counts in any of its rounds."""
    failed = [event for event in read_events(run, []) if event.level == "error" and event.client is not None]
    counted = {(row.task, client) for row in read_metrics(run, [])[0] for client in row.counted}
    absent = {(event.task or 0, event.client or 0) for event in failed} - counted
    told = [f"task {task + 1} was learned without site {client}" for task, client in sorted(absent)]
    return [with_site_names(words, sites) for words in told]


def _names(told: Sequence[str], sites: list[str]) -> list[str]:
    """Names of the sites that the server calls by number."""
    numbers = [int(found[1]) for word in told if (found := re.fullmatch(r"site (\d+)", word))]
    return [sites[k] for k in numbers if k < len(sites)]


def _place(event: EventRecord) -> str:
    task, round = event.task or 0, -1 if event.round is None else event.round
    return f"task {task + 1}" + (f", round {round + 1}" if round >= 0 else "")


def watch_sites(federation: FederationFolder, run: Path) -> None:
    """Write down how each site is now; what the link cannot tell stays unknown."""
    states: dict[str, str] = {}
    with contextlib.suppress(RunError):  # the link is busy, or away
        states = {str(row["name"]): str(row["state"]) for row in status_rows(federation) if row["what"] == "site"}
    told = read_waiting(run)
    sites = [
        {
            "client": client,
            "name": name,
            "state": states.get(name, "unknown"),
            "last_answer": told.heard.get(f"site {client}"),
            "waiting_since": told.asked if f"site {client}" in told.waiting_for else None,
        }
        for client, name in enumerate(federation.sites)
    ]
    now = datetime.now(UTC).isoformat(timespec="seconds")
    facts = {"schema": 1, "federation": federation.name, "updated": now, "sites": sites}
    write_json(run / "sites.json", facts, sync="none")
