"""rescene data inspect: what is in the images, a contact sheet, and the command that suits them."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rescene.cli.costing import duration
from rescene.cli.terminal import print_rows
from rescene.config import resolve
from rescene.core.errors import ResceneError, command
from rescene.core.json_files import Row
from rescene.data import Dataset, inspect, load_readable, plan_tasks
from rescene.data.inspection import contact_sheet, found_files, propose_settings, why_not
from rescene.data.loading import detect
from rescene.engine import pick_device
from rescene.lens import seconds_to_look
from rescene.report.galleries import write_inspection

MOST_CLASSES = 40  # listed on a terminal; --json has them all
SHEET = "contact-sheet"
REASON = (
    "recipe own: sites send sums of what a frozen lens sees, and nothing is trained. On 2,000 photographs it was the most "
    "accurate of the recipes that were tried (docs/own-images.md). Exact sums are for a simulation like this one: they guarantee nothing"
)

WHY_SMALL = (
    "larger pictures give more numbers through the lens of recipe own, which cost time and, behind a guarantee, more noise. "
    "data.image_size=SIDE takes another size"
)


def inspect_data(path: str, layout: str, columns: Mapping[str, str], out: Path | None, as_json: bool) -> None:
    """Print what was found; write the sheet, with ``--json`` only where ``--out`` asks for it."""
    here = Path(path).exists()
    dataset, told = load_readable("auto" if here else path, path if here else None, layout, columns=columns)
    found = inspect(dataset, told)
    found["files"] = found_files(Path(path)) if here and detect(Path(path)) in ("folder", "office31") else {}
    found["tasks"] = _tasks(dataset, found)
    given = _given(path, here, layout, columns, any(warning.code == "W203" for warning in told))
    found |= _advice(dataset, given)
    found["lines"] = _lines(found)
    found["odd"] = [text for text in found["warnings"] if not (found["files"] and text.startswith("not read: "))]
    if not as_json or out is not None:
        root = Path(os.environ.get("RESCENE_RUNS", "runs"))
        found["sheet"] = _write_sheet(dataset, found, out or root / "inspect" / dataset.name)
    if as_json:
        print(json.dumps(found))
    else:
        _print(found)


def _given(path: str, here: bool, layout: str, columns: Mapping[str, str], skip: bool) -> list[str]:
    """What the command must say about the data."""
    words = [f"data.path={path}" if here else f"data.name={path}"]
    words += [f"data.layout={layout}"] if layout != "auto" else []
    words += [f"data.columns.{role}={name}" for role, name in columns.items()]
    return words + (["data.skip_unreadable=true"] if skip else [])


def _advice(dataset: Dataset, given: Sequence[str]) -> Row:
    """The command that suits the images and why, and the same with a guarantee; no command where none makes sense."""
    problem = why_not(dataset)
    if problem:
        return {"reason": problem, "command": "", "guarantee": "", "run_image_size": None, "looking_s": 0.0}
    exact, private = (command("run", "own", *given, *propose_settings(dataset, exact)) for exact in (True, False))
    own = resolve("own").recipe
    side = own.images.image_size or dataset.image_size
    num = len(dataset.train) + len(dataset.test)
    seconds = round(seconds_to_look(str(own.model.lens), side, num, pick_device("auto")), 2)
    return {"reason": REASON, "command": exact, "guarantee": private, "run_image_size": side, "looking_s": seconds}


def _lines(found: Row) -> list[str]:
    """Facts about the files in sentences."""
    split = "as given" if found["split"] == "given" else f"drawn from each class ({found['split']})"
    size, files = f"{found['image_size']}x{found['image_size']} pixels", found["files"]
    lines = []
    if files:
        kinds = ", ".join(f"{num:,} {kind}" for kind, num in files["found"].items())
        lines.append(f"files: {kinds or 'no picture'}")
        lines += (
            [f"sizes: {', '.join(f'{name} {text}' for name, text in files['sizes'].items())}"] if files["sizes"] else []
        )
        lines += [_not_read(row) for row in files["not_read"]]
    return [*lines, f"read for this look at {size}; test images {split}", *found["notes"], *_run_size(found)]


def _run_size(found: Row) -> list[str]:
    """The size at which the recommended run reads the pictures, and why; nothing where no run is recommended."""
    side = found["run_image_size"]
    if side is None:
        return []
    if side == found["image_size"]:
        return [f"the recommended run reads them at {side}x{side} pixels, too"]
    return [f"the recommended run reads them at {side}x{side} pixels: {WHY_SMALL}"]


def _not_read(row: Row) -> str:
    return (
        f"not read: {row['count']:,} {row['what']} ({', '.join(row['examples'])}{', ...' if row['count'] > 3 else ''})"
    )


def _write_sheet(dataset: Dataset, found: Row, folder: Path) -> list[str]:
    """PNG and HTML; both hold the pictures themselves."""
    folder.mkdir(parents=True, exist_ok=True)
    stream = io.BytesIO()
    contact_sheet(dataset).save(stream, "PNG")
    png = folder / f"{SHEET}.png"
    png.write_bytes(stream.getvalue())
    return [str(png), str(write_inspection(found, stream.getvalue(), folder / f"{SHEET}.html"))]


def _print(found: Row) -> None:
    print(f"{found['name']}: {found['num_train']:,} training and {found['num_test']:,} test images")
    for line in found["lines"]:
        print(line)
    for title in ("classes", "sites", "domains"):
        if rows := found[title]:
            print(
                f"\n{len(rows)} {title if len(rows) != 1 else title.removesuffix('es' if title == 'classes' else 's')}"
            )
            print_rows(rows[:MOST_CLASSES])
            if len(rows) > MOST_CLASSES:
                print(f"... and {len(rows) - MOST_CLASSES} more (--json)")
    if found["tasks"]:
        print("\nproposed tasks")
        print_rows([row | {"task": row["task"] + 1} for row in found["tasks"]])
    print("\nwarnings" + (": none" if not found["odd"] else "".join(f"\n  {text}" for text in found["odd"])))
    print(f"\ncontact sheet: {' and '.join(found['sheet'])}")
    print(f"\n{found['reason']}")
    if found["command"]:
        print(f"run it: {found['command']}")
        print(
            f"looking at all images through the lens takes about {duration(found['looking_s'])} on this machine, once"
        )
        print(f"\nwith a guarantee of epsilon 8 for each image, as real sites would run it; {found['noise']}")
        print(f"run it: {found['guarantee']}")


def _tasks(dataset: Dataset, found: Row) -> list[dict[str, Any]]:
    """The proposed tasks. If the data set cannot be split so, the warnings say why."""
    try:
        planned, tasks = plan_tasks(dataset, **found["proposed_tasks"])
    except ResceneError as error:
        found["warnings"].append(f"{error.what} ({error.fix})" if error.fix else error.what)
        return []
    return [
        {
            "task": task.index,
            "brings": planned.domains[task.domain]
            if task.domain is not None
            else ", ".join(planned.classes[c] for c in task.classes),
            "train": len(task.train),
            "test": len(task.test),
        }
        for task in tasks
    ]
