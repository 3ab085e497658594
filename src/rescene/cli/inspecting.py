"""rescene data inspect: what is in a folder of images, what is odd about it, and the command that runs on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rescene.cli.listing import print_rows
from rescene.data import inspect, load_readable, plan_tasks
from rescene.errors import ResceneError, command

WITHOUT_NOISE = "privacy.mechanism=none"
MOST_CLASSES = 40  # listed on a terminal; --json has them all


def show_inspection(path: str, layout: str, as_json: bool) -> None:
    here = Path(path).exists()
    dataset, told = load_readable("auto" if here else path, path if here else None, layout)
    found = inspect(dataset, told)
    found["tasks"] = _tasks(dataset, found)
    found["command"] = _command(path, here, layout, any(warning.code == "W203" for warning in told), found)
    found["simulation"] = f"{found['command'].replace(' model.lens=waves', '')} {WITHOUT_NOISE}"
    if as_json:
        print(json.dumps(found))
        return
    print(f"{found['name']}: {found['num_train']:,} training and {found['num_test']:,} test images, {_size(found)}")
    print(f"test images: {_split(found['split'])}")
    for note in found["notes"]:
        print(f"note: {note}")
    classes, domains = found["classes"], found["domains"]
    print(f"\n{len(classes)} classes")
    print_rows(classes[:MOST_CLASSES])
    if len(classes) > MOST_CLASSES:
        print(f"... and {len(classes) - MOST_CLASSES} more (--json)")
    if domains:
        print(f"\n{len(domains)} domains")
        print_rows(domains)
    print("\nproposed tasks")
    print_rows(found["tasks"])
    print("\nwarnings" + (": none" if not found["warnings"] else "".join(f"\n  {text}" for text in found["warnings"])))
    print(f"\nnoise: {found['noise']}")
    print(f"run it: {found['command']}")
    print(f"as a simulation, with exact sums and no guarantee: {found['simulation']}")


def _tasks(dataset: Any, found: dict[str, Any]) -> list[dict[str, Any]]:
    """The proposal carried out; a data set that cannot be planned says why in the warnings."""
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


def _command(path: str, here: bool, layout: str, skip: bool, found: dict[str, Any]) -> str:
    """In one line from these images to a report."""
    data = [f"data.path={path}" if here else f"data.name={path}"]
    data += [f"data.layout={layout}"] if layout != "auto" else []
    data += ["data.skip_unreadable=true"] if skip else []
    return command("run", "own", *data, *found["proposed_settings"])


def _size(found: dict[str, Any]) -> str:
    return f"{found['image_size']}x{found['image_size']} pixels"


def _split(told: str) -> str:
    return "as given" if told == "given" else f"drawn from each class ({told})"
