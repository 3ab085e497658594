"""``rescene quarantine``: what the screen put apart in a run, as a table and as pictures; a person may admit it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rescene.cli.listing import print_rows
from rescene.errors import ConfigError, command, did_you_mean
from rescene.report.reading import json_object
from rescene.report.runs import is_run
from rescene.run_state import state_of

ZOOM = 2
SHOWN = 12  # pictures of a group on the sheet
COLUMNS = {"name": "name", "client": "site", "class": "class", "images": "pictures", "why": "why"}


def quarantined(run: Path, admit: list[str], sheet: Path | None, as_json: bool) -> None:
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
        print(f"{sheet}: {len(rows)} groups from above, as in the table")
    elif not admit:
        print_rows(
            rows
            if as_json
            else [{t: row.get(k) for k, t in COLUMNS.items()} | {"state": row["state"]} for row in rows],
            as_json,
        )


def _state(folder: Path, row: dict[str, Any]) -> str:
    if row.get("admitted") is not None:
        return f"admitted in round {row['admitted'] + 1}"
    return "to be admitted" if (folder / f"{row['name']}.admit").exists() else "apart"


def _admit(run: Path, rows: list[dict[str, Any]], name: str) -> None:
    """Groups join the next round of their own task; afterwards the model has moved on and there is no round to join."""
    row = next((row for row in rows if row["name"] == name), None)
    if row is None:
        close = did_you_mean(name, [row["name"] for row in rows])
        fix = f"did you mean {close}?" if close else f"{command('quarantine', run)} lists them"
        raise ConfigError("E178", f"no {name!r} is in quarantine", where=str(run), fix=fix)
    status = json_object(run / "status.json", [])
    at = (status.get("task", 0), status.get("round", -1) + 1)
    if state_of(run) == "done" or at[0] > row["task"] or at[1] >= status.get("num_rounds", 0):
        raise ConfigError(
            "E178",
            f"it is too late to admit {name}",
            where=str(run),
            why=f"task {row['task']} has no round left, so nothing would be trained on it",
            fix="federation.screen=none in a new run",
        )
    (run / "quarantine" / f"{name}.admit").touch()
    print(f"{name} joins the next round")


def _draw(folder: Path, rows: list[dict[str, Any]], sheet: Path) -> None:
    """One group per line, its name above it."""
    from PIL import Image, ImageDraw
    from safetensors.numpy import load_file

    groups = [load_file(folder / f"{row['name']}.safetensors")["pixels"][:SHOWN] for row in rows]
    side, line = groups[0].shape[-1] * ZOOM, groups[0].shape[-1] * ZOOM + 16
    image = Image.new("RGB", (max(SHOWN * side, 480), line * len(rows)), "white")
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
