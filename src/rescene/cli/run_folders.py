"""Run folders: list them, make room, and look at uploads that were put apart."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import typer

from rescene.cli.shared_options import find_runs
from rescene.cli.terminal import position, print_rows
from rescene.core.documents import read_yaml
from rescene.core.errors import ConfigError, command, did_you_mean
from rescene.core.json_files import Row, json_object
from rescene.core.results import read_status, results_of_row
from rescene.core.run_state import Busy, state_of, working_in
from rescene.report.formatting import bytes_text, count
from rescene.report.load import is_run

PRUNABLE = ("checkpoints", "interrupted", "failed")
QUIET = timedelta(hours=1)  # a run that says it is going may be going on another machine that shares this disk
ZOOM = 2
MOST_SHOWN = 12  # pictures of a group on the sheet
QUARANTINE = {"name": "name", "client": "site", "class": "class", "images": "pictures", "why": "why"}
_HEADS = {"bytes": "size", "near_copies": "near-copies"}


def _row(path: Path) -> Row:
    """One run. If its results cannot be read, the row says so and shows what its status holds."""
    unreadable: list[str] = []
    status = read_status(path)
    results = results_of_row(json_object(path / "results.json", unreadable), [])
    row = {
        "run": str(path),
        "method": status.method or results.method or "-",
        "state": "unreadable" if unreadable else state_of(path),
        "progress": f"{status.done}/{'?' if status.steps is None else status.steps}",
        "bytes": _size(path),
        "aa": results.aa,
        "aa_so_far": status.aa_so_far if results.aa is None else "",
        "aia": results.aia,
        "near_copies": results.leakage.near_copies if results.leakage else None,
    }
    return row | ({"problem": unreadable[0]} if unreadable else {})


def show_runs(folder: Path, as_json: bool) -> None:
    """Print the runs under a folder, with their state, size and accuracy."""
    rows = [_row(path) for path in find_runs(folder)]
    if as_json:
        print(json.dumps(rows))
        return
    print_rows(_cells(row) for row in rows)
    for row in rows:
        if "problem" in row:
            print(f"{row['run']}: {row['problem']}")
    if rows:
        print(f"{count(len(rows), 'run')}, {bytes_text(sum(row['bytes'] for row in rows))}")


def _cells(row: Row) -> Row:
    """A run for people: an accuracy that is not the last one says so."""
    told = {key: value for key, value in row.items() if key not in ("problem", "aa_so_far")}
    told["aa"] = row["aa_so_far"] or row["aa"]
    return {_HEADS.get(key, key): _shown(key, value) for key, value in told.items()}


def _shown(key: str, value: Any) -> Any:
    if key == "bytes":
        return bytes_text(value)
    if key == "near_copies":
        return None if value is None else f"{100 * value:.0f} %"
    return round(value, 2) if isinstance(value, float) else value


def prune(folder: Path, what: str, yes: bool) -> None:
    """Remove checkpoints of finished runs, or whole runs that were interrupted or failed, after a question."""
    wanted = [word.strip() for word in what.split(",")]
    for word in wanted:
        if word not in PRUNABLE:
            fix = did_you_mean(word, PRUNABLE) or f"one or more of: {','.join(PRUNABLE)}"
            raise ConfigError("E185", f"cannot prune {word!r}", where="--prune", fix=fix)
    found = {run: part for run in find_runs(folder) if (part := _removable(run, wanted))}
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
        print(f"kept, because it is running again: {run}")
    print(f"removed {bytes_text(sum(sizes[run] for run in removed))}")


def _removable(run: Path, wanted: list[str], mine: bool = False) -> tuple[Path, str] | None:
    """What of a run may be removed, and why; None if nothing. A run with results is never removed as a whole."""
    state, store = state_of(run, mine), run / "checkpoints"
    if run.is_symlink():
        return None
    if state in wanted:
        status = json_object(run / "status.json", [])
        if status.get("state") != "running" or _is_quiet(status):
            return run, f"the run was {state}" if state == "interrupted" else "the run failed"
    if "checkpoints" in wanted and state == "done" and store.is_dir() and not _may_grow(run):
        return store, "the run is finished; only rescene continue would need them"
    return None


def _remove(run: Path, wanted: list[str]) -> bool:
    """Remove what may be removed of a run, unless it was continued since it was listed."""
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
    """Whether new tasks may be planned for the run: it then continues from its last checkpoint."""
    try:
        return read_yaml(run / "config.yaml").get("sites") is not None
    except (OSError, AttributeError, ConfigError):
        return True


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def quarantined(run: Path, admit: list[str], sheet: Path | None, as_json: bool) -> None:
    """Print the uploads of a run that its screen put apart, draw them, or admit some of them."""
    if not is_run(run):
        raise ConfigError("E178", "no run folder there", where=str(run), fix="rescene runs")
    folder = run / "quarantine"
    rows = [json_object(path, []) for path in sorted(folder.glob("*.json"))]
    rows = [row | {"state": _state(folder, row)} for row in rows if row]
    if not rows:
        if admit or sheet:
            raise ConfigError("E178", "nothing is in quarantine there", where=str(run))
        print("[]" if as_json else "nothing is in quarantine")
        return
    for name in admit:
        _admit(run, rows, name)
    if sheet is not None:
        _draw(folder, rows, sheet)
        print(f"{sheet}: {len(rows)} groups, in the order of the table")
    elif not admit:
        print_rows(
            rows
            if as_json
            else [{t: row.get(k) for k, t in QUARANTINE.items()} | {"state": row["state"]} for row in rows],
            as_json,
        )


def _state(folder: Path, row: dict[str, Any]) -> str:
    if row.get("admitted") is not None:
        return f"admitted in round {row['admitted'] + 1}"
    return "will be admitted" if (folder / f"{row['name']}.admit").exists() else "put apart"


def _admit(run: Path, rows: list[dict[str, Any]], name: str) -> None:
    """Let a group join the next round of its own task. After the last round of the task it is too late."""
    row = next((row for row in rows if row["name"] == name), None)
    if row is None:
        listed = f"{command('deploy', 'quarantine', run)} lists them"
        fix = did_you_mean(name, [row["name"] for row in rows]) or listed
        raise ConfigError("E178", f"no {name!r} is in quarantine", where=str(run), fix=fix)
    status = read_status(run)
    if state_of(run) == "done" or status.task > row["task"] or status.round + 1 >= (status.num_rounds or 0):
        raise ConfigError(
            "E178",
            f"it is too late to admit {name}",
            where=str(run),
            why=f"{position(row['task'])} has no round left, so nothing would be trained on it",
            fix="federation.screen=none in a new run",
        )
    (run / "quarantine" / f"{name}.admit").touch()
    print(f"{name} joins the next round")


def _draw(folder: Path, rows: list[dict[str, Any]], sheet: Path) -> None:
    """Draw one group per line, with its name above it."""
    from PIL import Image, ImageDraw
    from safetensors.numpy import load_file

    groups = [load_file(folder / f"{row['name']}.safetensors")["pixels"][:MOST_SHOWN] for row in rows]
    side, line = groups[0].shape[-1] * ZOOM, groups[0].shape[-1] * ZOOM + 16
    image = Image.new("RGB", (max(MOST_SHOWN * side, 480), line * len(rows)), "white")
    draw = ImageDraw.Draw(image)
    for i, (row, group) in enumerate(zip(rows, groups, strict=True)):
        draw.text(
            (2, i * line + 2),
            f"site {row['client']}  {row['class']}  {row['ratio']:.1f} times as far  {row['name']}",
            "black",
        )
        for j, pixels in enumerate(group):
            picture = Image.fromarray(pixels.transpose(1, 2, 0)).resize((side, side), Image.Resampling.NEAREST)
            image.paste(picture, (j * side, i * line + 16))
    image.save(sheet)
