"""What a process holds (memory, descriptors, threads), and whether it grows: the judgement of ``trust_soak.py``."""

from __future__ import annotations

import os
import resource
import statistics
from pathlib import Path
from typing import Any

import numpy as np

DATABASE = "state.db"  # of Flower's link
# What the link may hold of it. Two pools (messages, objects), with SQLAlchemy's defaults: each keeps five connections and opens
# at most fifteen at once. A connection holds the database and its log; when it is closed, SQLite keeps the first for the next.
KEPT_OPEN = 2 * (5 + 15) + 1  # and one file for all of them
IN_FLIGHT = 1  # by how much the middle of what comes and goes with the letters may differ between two halves
PER_ROUND_MB = 0.02  # how fast memory may grow, once everything is loaded
Sample = dict[str, Any]


def held_by(pid: int | str = "self") -> Sample:
    """What a process holds now, the files of Flower's database apart from the others; nothing if it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        files = [target(Path(f"/proc/{pid}/fd/{number}")) for number in os.listdir(f"/proc/{pid}/fd")]
        database = sum(path.name.startswith(DATABASE) for path in files)
        counts = {"files": len(files) - database, "threads": len(os.listdir(f"/proc/{pid}/task"))}
    except OSError:
        return {}
    counts |= {"database": database} if database else {}
    return {"mb": pages * resource.getpagesize() / 2**20, **counts} if pages else {}  # one that has ended holds none


def target(file: Path) -> Path:
    """What a descriptor is of; itself if it was closed just now."""
    try:
        return file.readlink()
    except OSError:
        return file


def slope(samples: list[Sample]) -> float:
    """MB a round, by least squares.

    >>> round(slope([{"round": r, "mb": 100 + r / 4} for r in range(9)]), 6)
    0.25
    """
    return float(np.polyfit([one["round"] for one in samples], [one["mb"] for one in samples], 1)[0])


def last_of_each_round(samples: list[Sample]) -> list[Sample]:
    return list({one["round"]: one for one in samples}.values())


def middle_of_each_round(samples: list[Sample]) -> list[Sample]:
    """
    >>> middle_of_each_round([{"round": 0, "files": 4}, {"round": 0, "files": 9}, {"round": 0, "files": 5}])
    [{'round': 0, 'files': 5}]
    """
    rounds: dict[int, list[Sample]] = {}
    for one in samples:
        rounds.setdefault(one["round"], []).append(one)
    return [middle(part) for part in rounds.values()]


def middle(samples: list[Sample]) -> Sample:
    """The median of each value; of the keys that all have."""
    keys = [key for key in samples[0] if all(key in one for one in samples)]
    return {key: statistics.median_low([one[key] for one in samples]) for key in keys}


def judged(samples: list[Sample], begin: int) -> dict[str, Any]:
    """The growth after round ``begin``: of memory by its slope, of what is counted by its least in the first and last tenth.

    The least, because a checkpoint is written by a thread of its own, into a temporary file, while a round goes on.
    """
    later = [one for one in samples if one["round"] >= begin]
    tenth = max(min(5, len(later)), len(later) // 10)  # one sample alone has no least
    counted = [key for key in later[0] if key not in ("round", "mb")]
    first, last = ({key: min(one[key] for one in part) for key in counted} for part in (later[:tenth], later[-tenth:]))
    return {**memory(later), "first": first, "last": last, "rounds": len(samples), "after": begin}


def judged_by_halves(samples: list[Sample], begin: int) -> dict[str, Any]:
    """The same for Flower's own processes: what is counted by its middle in the first half and in the second.

    Their connections and pools of threads breathe with the letters in flight, so the least and the most of a few samples are
    luck. The middle of hundreds is not, and whatever is never given back lifts it: one file a round by nine in 30 rounds, one
    in ten rounds by four in 90. Connections to the database are kept on purpose, so they have a bound (``KEPT_OPEN``) instead.
    """
    later = [one for one in samples if one["round"] >= begin]
    half = len(later) // 2
    first, last = (without(middle(part), "round", "mb") for part in (later[:half], later[half:]))
    return {**memory(later), "first": first, "last": last, "rounds": len(samples), "after": begin}


def memory(later: list[Sample]) -> dict[str, float]:
    return {"mb_per_round": slope(later), "mb_begin": later[0]["mb"], "mb_end": later[-1]["mb"]}


def without(sample: Sample, *keys: str) -> Sample:
    return {key: value for key, value in sample.items() if key not in keys}


def flat(found: dict[str, Any]) -> bool:
    more = [key for key in found["first"] if found["last"][key] > found["first"][key]]
    return found["mb_per_round"] < PER_ROUND_MB and not more


def bounded(found: dict[str, Any]) -> bool:
    """Whether one of Flower's processes holds no more files and threads; its memory is told, and no promise of ours.

    >>> bounded({"first": {"files": 20, "database": 11}, "last": {"files": 21, "database": 21}})
    True
    >>> bounded({"first": {"files": 20}, "last": {"files": 22}})
    False
    >>> bounded({"first": {"database": 39}, "last": {"database": 43}})
    False
    """
    limits = {key: count + IN_FLIGHT for key, count in found["first"].items()} | {"database": KEPT_OPEN}
    return all(count <= limits[key] for key, count in found["last"].items())
