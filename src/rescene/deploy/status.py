"""What an operator wants to know, from the files of a federation: who has answered, who is late, what was left out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rescene.config.site_sections import SitesSection
from rescene.core.errors import DECLINED
from rescene.core.json_files import Row
from rescene.core.results import EventRecord, read_events, read_status, read_waiting
from rescene.core.run_state import state_of
from rescene.deploy.plan_file import Held

MOST = 20  # uploads left out, the newest


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
        words = f"waited for since {asked:%Y-%m-%d %H:%M} UTC ({minutes} min)"
        found |= dict.fromkeys(_names(waiting.waiting_for, sites), words)
    return found


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
    return rows[-MOST:]


def declined(run: Path, sites: Sequence[str]) -> list[str]:
    """Sites that did not send what they were asked for, each reason once: the model was made without it."""
    found = [
        f"{sites[event.client]}, {_place(event)}: {event.message}"
        for event in read_events(run, [])
        if event.code == DECLINED and event.client is not None and event.client < len(sites)
    ]
    return list(dict.fromkeys(found))


def _names(told: Sequence[str], sites: list[str]) -> list[str]:
    """Names of the sites that the server calls by number."""
    numbers = [int(found[1]) for word in told if (found := re.fullmatch(r"site (\d+)", word))]
    return [sites[k] for k in numbers if k < len(sites)]


def _place(event: EventRecord) -> str:
    task, round = event.task or 0, -1 if event.round is None else event.round
    return f"task {task + 1}" + (f", round {round + 1}" if round >= 0 else "")
