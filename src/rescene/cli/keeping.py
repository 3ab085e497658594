"""rescene runs and rescene rerun: what is there, what can go, and whether it comes out the same again."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

import typer

from rescene.cli.listing import find_runs, print_rows
from rescene.documents import read_yaml
from rescene.errors import ConfigError, did_you_mean
from rescene.report.reading import json_object
from rescene.report.runs import number, table
from rescene.report.words import bytes_text
from rescene.run_state import Busy, is_done, state_of, working_in

Row = dict[str, Any]
PRUNABLE = ("checkpoints", "interrupted", "failed")
QUIET = timedelta(hours=1)  # a run that says it is going may be going on another machine that shares this disk


def run_rows(folder: Path) -> list[Row]:
    """One row per run under a folder."""
    return [_row(path) for path in find_runs(folder)]


def _row(path: Path) -> Row:
    """A run whose results cannot be read says so; its status may still tell something."""
    unreadable: list[str] = []
    status, results = json_object(path / "status.json", []), json_object(path / "results.json", unreadable)
    row = {
        "run": str(path),
        "method": str(status.get("method") or results.get("method") or "-"),
        "state": "unreadable" if unreadable else state_of(path),
        "progress": f"{status.get('done', 0)}/{status.get('steps', '?')}",
        "bytes": _size(path),
        "aa": number(results.get("aa", status.get("aa"))),
        "aia": number(results.get("aia")),
        "near_copies": number(table(results, "leakage").get("near_copies")),
    }
    return row | ({"problem": unreadable[0]} if unreadable else {})


def show_runs(folder: Path, as_json: bool) -> None:
    rows = run_rows(folder)
    if as_json:
        print(json.dumps(rows))
        return
    print_rows({_HEADS.get(k, k): _shown(k, v) for k, v in row.items() if k != "problem"} for row in rows)
    for row in rows:
        if "problem" in row:
            print(f"{row['run']}: {row['problem']}")
    if rows:
        print(f"{len(rows)} runs, {bytes_text(sum(row['bytes'] for row in rows))}")


_HEADS = {"bytes": "size", "near_copies": "near-copies"}


def _shown(key: str, value: Any) -> Any:
    if key == "bytes":
        return bytes_text(value)
    if key == "near_copies":
        return None if value is None else f"{100 * value:.0f} %"
    return round(value, 2) if isinstance(value, float) else value


def prune(folder: Path, what: str, yes: bool) -> None:
    """Remove checkpoints of finished runs, or whole runs that were interrupted or failed; asks first."""
    wanted = [word.strip() for word in what.split(",")]
    for word in wanted:
        if word not in PRUNABLE:
            close = did_you_mean(word, PRUNABLE)
            fix = f"did you mean {close}?" if close else f"one or more of: {','.join(PRUNABLE)}"
            raise ConfigError("E185", f"cannot prune {word!r}", where="--prune", fix=fix)
    found = {run: what for run in find_runs(folder) if (what := _removable(run, wanted))}
    if not found:
        print("nothing to remove")
        return
    sizes = {run: _size(path) for run, (path, _) in found.items()}
    print_rows(
        {"remove": str(path), "size": bytes_text(sizes[run]), "because": why} for run, (path, why) in found.items()
    )
    total = bytes_text(sum(sizes.values()))
    if not yes and not typer.confirm(f"Remove these {total}? This cannot be undone"):
        print("nothing was removed")
        return
    removed = [run for run in found if _remove(run, wanted)]
    for run in found.keys() - removed:
        print(f"left alone, because it goes on by now: {run}")
    print(f"removed {bytes_text(sum(sizes[run] for run in removed))}")


def _removable(run: Path, wanted: list[str], mine: bool = False) -> tuple[Path, str] | None:
    """What of a run may go, and why; None if nothing. A run with results is done, so it is never removed as a whole."""
    state, store = state_of(run, mine), run / "checkpoints"
    if run.is_symlink():
        return None
    if state in wanted:
        status = json_object(run / "status.json", [])
        if status.get("state") != "running" or _is_quiet(status):
            return run, f"the run was {state}" if state == "interrupted" else "the run failed"
    if "checkpoints" in wanted and state == "done" and store.is_dir() and not _may_grow(run):
        return store, "the run is finished and needs them no more"
    return None


def _remove(run: Path, wanted: list[str]) -> bool:
    """Remove what may go of a run, unless it has gone on since it was listed."""
    with suppress(Busy), working_in(run):
        found = _removable(run, wanted, mine=True)
        if found:
            shutil.rmtree(found[0])
            return True
    return False


def _is_quiet(status: Row) -> bool:
    try:
        return datetime.now(UTC) - datetime.fromisoformat(status["updated"]) > QUIET
    except (KeyError, TypeError, ValueError):
        return False


def _may_grow(run: Path) -> bool:
    """A federation's plan may get new tasks, and then its run goes on from its last checkpoint."""
    try:
        return read_yaml(run / "config.yaml").get("sites") is not None
    except (OSError, AttributeError, ConfigError):
        return True


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def rerun(folder: Path, out: Path | None, quiet: bool, as_json: bool) -> bool:
    """Run the recipe of a finished run again in a folder beside it; whether every number came out the same."""
    from rescene.api import load
    from rescene.cli.running import run_one
    from rescene.config import resolve

    before = load(folder)
    config = folder / "config.yaml"
    if not config.is_file():
        raise ConfigError(
            "E108", "not a run folder", where=str(folder), why="it has no config.yaml", fix="rescene runs"
        )
    if before.values.get("forgotten"):
        raise ConfigError(
            "E163",
            "a run that forgot a site cannot be repeated from its recipe alone",
            where=str(folder),
            why="its recipe is that of a run which never saw the site",
            fix="rescene rerun the run it was made from, then rescene forget",
        )
    target = out or _beside(folder)
    if target.resolve() == folder.resolve():
        raise ConfigError("E186", "a run cannot be repeated in its own folder", where="--out", fix="another --out")
    run_one(resolve(config), target, quiet, as_json=False, told=not as_json)
    then, now = _flat(before.values), _flat(load(target).values)
    known = {key: value for key, value in now.items() if key in then}  # others were not recorded then
    numbers = _differences(then, known)
    machines = _differences(*(json_object(path / "env.json", []) for path in (folder, target)))
    if as_json:
        facts = {"folder": str(target), "identical": not numbers, "numbers": numbers, "environment": machines}
        print(json.dumps(facts))
    else:
        _tell(numbers, machines)
    return not numbers


def _tell(numbers: list[Row], machines: list[Row]) -> None:
    if not numbers:
        print("\nidentical: every number of results.json came out the same")
    else:
        print(f"\n{len(numbers)} numbers of results.json differ:")
        print_rows(numbers[:20])
    if machines:
        print("\nwhat else differs:")
        print_rows(machines)


def _beside(folder: Path) -> Path:
    """RUN-again, RUN-again2, ...: the first that is free, or holds a repetition that was interrupted."""
    names = (folder.with_name(f"{folder.name}-again{n if n > 1 else ''}") for n in count(1))
    return next(path for path in names if not is_done(path))


def _flat(value: Any, key: str = "") -> Row:
    """Nested values under dotted keys."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        return {key: value}
    return {k: v for name, inner in items for k, v in _flat(inner, f"{key}.{name}" if key else str(name)).items()}


def _differences(before: Row, after: Row) -> list[Row]:
    keys = dict.fromkeys([*before, *after])
    return [{"what": k, "before": before.get(k), "now": after.get(k)} for k in keys if before.get(k) != after.get(k)]
