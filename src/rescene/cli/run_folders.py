"""Run folders: list them, make room, repeat a run, and look at uploads that were put apart."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

import typer

from rescene.cli.terminal import position, print_rows
from rescene.core.documents import parse_yaml, read_yaml
from rescene.core.errors import ConfigError, command, did_you_mean
from rescene.core.json_files import Row, json_object
from rescene.core.recipe_keys import flatten
from rescene.core.results import read_status, results_of_row
from rescene.core.run_state import Busy, is_done, state_of, working_in
from rescene.report.formatting import bytes_text
from rescene.report.load import is_run

PRUNABLE = ("checkpoints", "interrupted", "failed")
QUIET = timedelta(hours=1)  # a run that says it is going may be going on another machine that shares this disk
ZOOM = 2
MOST_SHOWN = 12  # pictures of a group on the sheet
QUARANTINE = {"name": "name", "client": "site", "class": "class", "images": "pictures", "why": "why"}
_HEADS = {"bytes": "size", "near_copies": "near-copies"}


def find_runs(folder: Path) -> list[Path]:
    """The folder itself if it is a run, else every run below it, in name order."""
    if (folder / "config.yaml").is_file():
        return [folder]
    return sorted(path.parent for path in folder.rglob("config.yaml")) if folder.is_dir() else []


def run_config(folder: Path) -> Path:
    """The recipe of a run folder; an error if there is none."""
    config = folder / "config.yaml"
    if not config.is_file():
        raise ConfigError(
            "E108", "not a run folder", where=str(folder), why="it has no config.yaml", fix="rescene runs"
        )
    return config


def run_rows(folder: Path) -> list[Row]:
    """One row per run under a folder."""
    return [_row(path) for path in find_runs(folder)]


def _row(path: Path) -> Row:
    """Of one run. If its results cannot be read, the row says so and shows what its status holds."""
    unreadable: list[str] = []
    status = read_status(path)
    results = results_of_row(json_object(path / "results.json", unreadable), [])
    row = {
        "run": str(path),
        "method": status.method or results.method or "-",
        "state": "unreadable" if unreadable else state_of(path),
        "progress": f"{status.done}/{'?' if status.steps is None else status.steps}",
        "bytes": _size(path),
        "aa": status.aa if results.aa is None else results.aa,
        "aia": results.aia,
        "near_copies": results.leakage.near_copies if results.leakage else None,
    }
    return row | ({"problem": unreadable[0]} if unreadable else {})


def show_runs(folder: Path, as_json: bool) -> None:
    """Print the runs under a folder, with their state, size and accuracy."""
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
            close = did_you_mean(word, PRUNABLE)
            fix = f"did you mean {close}?" if close else f"one or more of: {','.join(PRUNABLE)}"
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


def read_growth(words: list[str]) -> tuple[list[list[str]] | None, str | None]:
    """New tasks and the place of their images, from the words behind ``rescene continue RUN``.

    >>> read_growth(["tasks+=[[boots, sandals], [gloves]]", "data.path=may"])
    ([['boots', 'sandals'], ['gloves']], 'may')
    >>> read_growth(["tasks+=[boots, 9]"])
    ([['boots', '9']], None)
    """
    tasks, path = None, None
    for word in words:
        key, equals, value = word.partition("=")
        if key == "data.path" and value:
            path = value
        elif key == "tasks+" and equals:
            tasks = _named_tasks(parse_yaml(value, "tasks+"))
        else:
            raise ConfigError(
                "E509",
                f"{key!r} cannot change in a run that goes on",
                why="what ran stays true, so only tasks and images may be new",
                fix="'tasks+=[[new, classes]]', data.path=FOLDER; for anything else a new run",
            )
    return tasks, path


def _named_tasks(value: Any) -> list[list[str]]:
    """A list of lists of names; a plain list of names is one task."""
    rows = value if isinstance(value, list) else [value]
    rows = rows if any(isinstance(row, list) for row in rows) else [rows]
    names = [name for row in rows if isinstance(row, list) for name in row]
    if not all(isinstance(row, list) for row in rows) or not all(type(name) in (str, int) for name in names):
        raise ConfigError(
            "E511",
            "the new tasks are not lists of names",
            where="tasks+",
            why="a name such as yes, 1.0 or null needs quotes",
            fix="""'tasks+=[[boots, sandals], ["yes"]]'""",
        )
    return [[str(name) for name in row] for row in rows]


def rerun(folder: Path, out: Path | None, quiet: bool, as_json: bool) -> bool:
    """Run the recipe of a finished run again in a folder beside it. True if every number is the same."""
    from rescene.api import load
    from rescene.cli.running import run_one
    from rescene.config import resolve

    before = load(folder)
    config = run_config(folder)
    if before.record.forgotten:
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
    history = {"continued"}  # how the run came to its tasks, not what came out
    told = [{k: v for k, v in one.values.items() if k not in history} for one in (before, load(target))]
    then, now = (flatten(values, into_lists=True) for values in told)
    known = {key: value for key, value in now.items() if key in then}  # the others are newer than that run
    numbers = _differences(then, known)
    machines = _differences(*(json_object(path / "env.json", []) for path in (folder, target)))
    if as_json:
        facts = {"folder": str(target), "identical": not numbers, "numbers": numbers, "environment": machines}
        print(json.dumps(facts))
    else:
        _print_differences(numbers, machines)
    return not numbers


def _print_differences(numbers: list[Row], machines: list[Row]) -> None:
    if not numbers:
        print("\nidentical: every number of results.json is the same")
    else:
        print(f"\n{len(numbers)} numbers of results.json differ:")
        print_rows(numbers[:20])
    if machines:
        print("\nother differences:")
        print_rows(machines)


def _beside(folder: Path) -> Path:
    """RUN-again, RUN-again2, ...: the first that holds no finished run."""
    names = (folder.with_name(f"{folder.name}-again{n if n > 1 else ''}") for n in count(1))
    return next(path for path in names if not is_done(path))


def _differences(before: Row, after: Row) -> list[Row]:
    keys = dict.fromkeys([*before, *after])
    return [{"what": k, "before": before.get(k), "now": after.get(k)} for k in keys if before.get(k) != after.get(k)]


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
        close = did_you_mean(name, [row["name"] for row in rows])
        fix = f"did you mean {close}?" if close else f"{command('deploy', 'quarantine', run)} lists them"
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
