"""The beginning of a run held again: enough to see whether a recipe gives the numbers that somebody recorded for it."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

from rescene.config import Resolved
from rescene.engine.loop import Run
from rescene.engine.run_folder import RunFolder
from rescene.engine.schedule import Step


class _Enough(Exception):
    """As many rounds as were asked for are held."""


class _Beginning(Run):
    """A run that stops after so many rounds, or once the time is over and a round is held."""

    num_rounds, end = 1, 0.0

    def _next(self, number: int) -> Step:
        held = sum(step.round is not None for step in self.parts.steps[:number])
        if held >= self.num_rounds or (held and time.monotonic() > self.end):
            raise _Enough
        return super()._next(number)


def first_rounds(resolved: Resolved, folder: Path, num_rounds: int, seconds: float) -> list[dict[str, Any]]:
    """The first rows of metrics.jsonl that this recipe gives here: at most so many rounds, and at least one.

    No round begins after ``seconds``. The files of the beginning stay in ``folder``, which must be new.
    """
    place = RunFolder(folder)
    with place:
        run = _Beginning(resolved, place)
        run.num_rounds, run.end = num_rounds, time.monotonic() + seconds
        with contextlib.suppress(_Enough):
            run.complete()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
