"""Whether a run folder that somebody hands in agrees with itself, and with its first rounds held again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rescene import functional as fn
from rescene.core.errors import ConfigError, command
from rescene.core.json_files import Row, json_lines, json_object, yaml_object
from rescene.core.recipe_keys import flatten
from rescene.report.load import RunRecord, load_run

NEEDED = ("config.yaml", "results.json", "env.json", "metrics.jsonl")
SAME = 1e-6  # results.json has ten decimals
MADE_ON = ("code", "torch", "threads", "cpu_capability", "device")  # with all of these equal, so are the bits
POINTS = 5.0  # of accuracy, where another machine or version holds the rounds again
BYTES = 0.01  # share: messages hold numbers whose length depends on their value
MOST = 12  # differences that are told


def check_record(folder: Path) -> RunRecord:
    """The run, if its files are whole and agree with each other; else an error with every difference (E541, E543, E545)."""
    _refuse_incomplete(folder)
    run = load_run(folder)
    if run.problems:
        raise ConfigError(
            "E545",
            "files of this folder are damaged",
            where=str(folder),
            why=_listed(run.problems),
            fix="hand in the folder as the run left it",
        )
    results, recipe = json_object(folder / "results.json", []), yaml_object(folder / "config.yaml", [])
    recipes = differences(
        flatten(recipe), flatten(results.get("config") or {}), "config.yaml", "results.json", {"device"}
    )
    if recipes:
        raise ConfigError(
            "E541",
            "the recipe is not the one that was run",
            where=str(folder),
            why=_listed(recipes),
            fix="hand in the folder as the run left it",
        )
    numbers = [*_own_numbers(run, results), *_recorded_tasks(run)]
    if numbers:
        raise ConfigError(
            "E543",
            "numbers of this run do not agree",
            where=str(folder),
            why=_listed(numbers),
            fix=f"run it again: {command('rerun', folder)}",
        )
    return run


def check_hashes(folder: Path, digest: str | None, environment: Mapping[str, Any] | None = None) -> None:
    """E542 if the folder's name has the hash of another recipe, or ``environment`` was made from other images.

    ``digest`` is the recipe's, None where it cannot be compared: a recipe of an older version has fewer keys.
    """
    told = folder.resolve().name.rpartition("-")
    found = []
    if digest and _is_digest(told[2]) and told[2] != digest:
        found.append(f"hash of the recipe: the folder's name says {told[2]}, config.yaml gives {digest}")
    before = json_object(folder / "env.json", [])
    if environment is not None and before.get("data_fingerprint") != environment.get("data_fingerprint"):
        found.append(
            f"fingerprint of the images: env.json says {before.get('data_fingerprint')}, "
            f"the images here give {environment.get('data_fingerprint')}"
        )
    if found:
        raise ConfigError(
            "E542",
            "a hash of this run does not agree",
            where=str(folder),
            why=_listed(found),
            fix="the same recipe and images, or another folder",
        )


def check_rounds(folder: Path, held: Sequence[Row], environment: Mapping[str, Any]) -> list[str]:
    """E544 if rounds that were ``held`` again differ from the recorded ones.

    On the machine and version that made the run every number must be the same. Elsewhere sites must be the same, bytes within a
    percent and accuracies within five points. Returns how they were compared: what differs of the machine, or nothing.
    """
    before = json_object(folder / "env.json", [])
    moved = [
        f"{key}: {before.get(key)} -> {environment.get(key)}"
        for key in MADE_ON
        if before.get(key) != environment.get(key)
    ]
    recorded = {_place(row): row for row in json_lines(folder / "metrics.jsonl", [])}
    found = []
    for row in held:
        if _place(row) not in recorded:
            found.append(f"{_words(row)}: metrics.jsonl does not have it")
            continue
        found += _row_differences(recorded[_place(row)], row, exact=not moved)
    if found:
        raise ConfigError(
            "E544",
            "the first rounds held again give other numbers",
            where=str(folder),
            why=_listed(found),
            fix=command("rerun", folder),
        )
    return moved


def differences(
    one: Row, other: Row, first: str, second: str, left_out: set[str] | frozenset[str] = frozenset()
) -> list[str]:
    """Keys whose values differ, as sentences.

    >>> differences({"a": 1, "b": 2}, {"a": 1, "b": 3}, "here", "there")
    ['b: here says 2, there says 3']
    """
    keys = [key for key in dict.fromkeys([*one, *other]) if key not in left_out and one.get(key) != other.get(key)]
    return [f"{key}: {first} says {one.get(key)!r}, {second} says {other.get(key)!r}" for key in keys]


def _refuse_incomplete(folder: Path) -> None:
    missing = [name for name in NEEDED if not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            "E545",
            "this folder cannot be checked",
            where=str(folder),
            why=f"it has no {', no '.join(missing)}",
            fix="hand in the folder of a finished run with all of its files",
        )


def _own_numbers(run: RunRecord, results: Row) -> list[str]:
    """What results.json says against what its own accuracy matrix and confusion table give."""
    matrix = run.results.accuracy_matrix
    sizes = None if run.settings.get("tasks.scenario") == "domain" else [task.test_size or 0 for task in run.tasks]
    old, recent = fn.old_and_recent(matrix)
    after = [value for value in run.results.incremental_accuracy if value is not None]
    own_orders = bool(run.results.orders) and bool(after)  # AA is then over the classes that anybody has met
    given = {
        "aa": after[-1] if own_orders else fn.average_accuracy(matrix, sizes),
        "aia": sum(after) / len(after) if own_orders else fn.average_incremental_accuracy(matrix, sizes),
        "forgetting": fn.forgetting(matrix),
        "bwt": fn.backward_transfer(matrix),
        "old": old,
        "recent": recent,
        "worst_task": min(value for value in matrix[-1] if value is not None),
    }
    if run.results.confusion:
        given["balanced_accuracy"] = fn.balanced_accuracy(run.results.confusion)
    found = [
        f"{name}: results.json says {results[name]}, its accuracy matrix gives {value:.10g}"
        for name, value in given.items()
        if results.get(name) is not None and not _equal(results[name], value)
    ]
    if run.results.seed != run.config.get("seed"):
        found.append(f"seed: results.json says {run.results.seed}, the recipe says {run.config.get('seed')}")
    return found


def _recorded_tasks(run: RunRecord) -> list[str]:
    """The accuracy matrix against what metrics.jsonl recorded when each task ended."""
    found = []
    if len(run.task_rows) != len(run.results.accuracy_matrix):
        found.append(f"tasks: results.json has {len(run.results.accuracy_matrix)}, metrics.jsonl {len(run.task_rows)}")
    for row, line in zip(run.task_rows, run.results.accuracy_matrix, strict=False):
        for j, (then, now) in enumerate(zip(row.accuracy, line, strict=False)):
            if not _equal(then, now):
                found.append(
                    f"accuracy on task {j + 1} after task {row.task + 1}: metrics.jsonl {then}, results.json {now}"
                )
    for row, now in zip(run.task_rows, run.results.incremental_accuracy, strict=False):
        if not _equal(row.aa, now):
            found.append(f"accuracy after task {row.task + 1}: metrics.jsonl {row.aa}, results.json {now}")
    sent = sum(row.uplink_bytes or 0 for row in run.rounds)
    total = run.results.cost.measured.uplink_bytes
    if total is not None and sent > total + 0.5:
        found.append(f"bytes up: the rounds of metrics.jsonl have {sent:.0f}, results.json says {total:.0f} in all")
    return found


def _row_differences(before: Row, now: Row, *, exact: bool) -> list[str]:
    if exact:
        then, again = flatten(before), flatten(now)
        return [f"{_words(now)}, {text}" for text in differences(then, again, "metrics.jsonl", "held again it")]
    found = []
    if before.get("participants") != now.get("participants"):
        found.append(f"sites: metrics.jsonl says {before.get('participants')}, held again {now.get('participants')}")
    for key in ("uplink_bytes", "downlink_bytes"):
        one, other = before.get(key), now.get(key)
        if one is not None and other is not None and abs(one - other) > BYTES * max(one, other):
            found.append(f"{key}: metrics.jsonl says {one}, held again {other}")
    one, other = before.get("accuracy"), now.get("accuracy")
    if isinstance(one, (int, float)) and isinstance(other, (int, float)) and abs(one - other) > POINTS:
        found.append(f"accuracy: metrics.jsonl says {one}, held again {other}")
    return [f"{_words(now)}, {text}" for text in found]


def _place(row: Row) -> tuple[Any, ...]:
    return row.get("kind"), row.get("task"), row.get("round")


def _words(row: Row) -> str:
    return f"task {row['task'] + 1}" + (f", round {row['round'] + 1}" if row.get("kind") == "round" else "")


def _equal(one: float | None, other: float | None) -> bool:
    missing = [value is None or math.isnan(value) for value in (one, other)]
    return all(missing) if any(missing) else abs(float(one or 0) - float(other or 0)) <= SAME


def _is_digest(text: str) -> bool:
    return len(text) == 8 and all(char in "0123456789abcdef" for char in text)


def _listed(found: Sequence[str]) -> str:
    more = [f"and {len(found) - MOST} more"] if len(found) > MOST else []
    return "\n".join([*found[:MOST], *more])
