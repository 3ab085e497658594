"""The walk of a reader through `condense`: which files of the package one call of it enters, in which order.

    python benchmarks/walk.py

One small ReSCENE run on the CPU without a privacy mechanism (recipe smoke); its first call of ``condense`` is watched with
``sys.setprofile``. What is counted:

    call     a Python function of the package begins; going on with a generator that has begun is not a call
    stay     consecutive calls into one file; a stay that comes from the same file as an earlier stay in its file is not counted
             again, so that a loop over steps, classes or sites counts once
    return   a stay in a file that had been left before; the file of ``condense`` is the home of the walk and does not count

The home is counted as a stay, not as a return. Prints each stay with the functions that it calls, and the totals.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import rescene
from rescene.training.condensation import condense

SOURCE = Path(rescene.__file__).parent


@dataclass
class Walk:
    """The calls during the first call of ``condense``: file and function of each, in order."""

    calls: list[tuple[str, str]] = field(default_factory=list)
    begun: set[FrameType] = field(default_factory=set)  # frames, kept so that none is met twice
    first: FrameType | None = None
    over: bool = False

    def watch(self, frame: FrameType, event: str, argument: Any) -> None:
        """What ``sys.setprofile`` calls."""
        if self.over or event not in ("call", "return"):
            return
        if event == "return":
            self.over = frame is self.first
            return
        if frame.f_code is condense.__code__:
            self.first = frame
        path = Path(frame.f_code.co_filename)
        if self.first is not None and SOURCE in path.parents and frame not in self.begun:
            self.begun.add(frame)
            self.calls.append((path.relative_to(SOURCE).as_posix(), frame.f_code.co_name))


def stays(calls: list[tuple[str, str]]) -> list[tuple[str, set[str]]]:
    """Each stay once: the file, and the functions that are called in it."""
    found: dict[tuple[str, str], set[str]] = {}
    before, arrow = "", ("", "")
    for place, function in calls:
        if place != before:
            arrow = (before, place)
        found.setdefault(arrow, set()).add(function)
        before = place
    return [(place, functions) for (_, place), functions in found.items()]


def returns(found: list[tuple[str, set[str]]]) -> list[bool]:
    """For each stay whether it comes back to a file that had been left; the first file is the home."""
    places = [place for place, _ in found]
    return [place != places[0] and place in places[:number] for number, place in enumerate(places)]


def walk_of_condense(out: Path) -> list[tuple[str, set[str]]]:
    """The stays of the first call of ``condense`` in a small run, whose folder is ``out``."""
    walk = Walk()
    sys.setprofile(walk.watch)
    try:
        rescene.run("smoke", out=out, device="cpu", method="rescene", progress=lambda event: None)
    finally:
        sys.setprofile(None)
    return stays(walk.calls)


def main() -> None:
    """Run, and print the walk."""
    with tempfile.TemporaryDirectory() as folder:
        found = walk_of_condense(Path(folder) / "run")
    back = returns(found)
    for number, ((place, functions), is_return) in enumerate(zip(found, back, strict=True), 1):
        shown = ", ".join(sorted(name for name in functions if not name.startswith("<")))
        print(f"{number:3} {'return ' if is_return else '       '}{place:32} {shown}")
    print(f"{len(found)} stays in {len({place for place, _ in found})} files, {sum(back)} returns")


if __name__ == "__main__":
    main()
