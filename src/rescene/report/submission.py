"""The check of a run folder that somebody hands in for the leaderboard: whether its files agree, and with the first rounds held again.

What the recipe and the registered method give is derived anew by the caller (``Expected``) and compared. Numbers are compared with
what they follow from: the accuracy matrix, the figures of each task, and ``metrics.jsonl``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rescene import functional as fn
from rescene.core.errors import ConfigError, DataError, command
from rescene.core.json_files import Row, json_lines, json_object
from rescene.core.recipe_keys import flatten
from rescene.report.load import RunRecord, load_run

FILES = ("config.yaml", "results.json", "env.json")
ROUNDS = "metrics.jsonl"
REFUSALS = ("E541", "E542", "E543", "E544", "E545", "E546", "E547")
SAME = 1e-6  # results.json has ten decimals
MADE_ON = ("code", "torch", "threads", "cpu_capability", "device")  # with all of these equal, so are the bits
POINTS = 5.0  # of accuracy, where another machine or version holds the rounds again
BYTES = 0.01  # share: messages hold numbers whose length depends on their value
ACCOUNTING = 1e-3  # share: another version may compute the same guarantee more tightly
PROMISED = ("private", "epsilon", "epsilon_replaced", "delta", "mechanism", "noise_multiplier")
MOST = 12  # differences that are told


@dataclass(frozen=True)
class Expected:
    """What config.yaml, the registered method and this program give, so that no other file needs to be believed."""

    recipe: Row  # config.yaml, as sections
    digest: str  # hash of the keys that config.yaml has
    missing: tuple[str, ...]  # keys of today's recipes that config.yaml does not have
    style: Row  # how the registered method is shown
    privacy: Row  # what the recipe guarantees
    code: str  # hash of this program


def read_submission(folder: Path) -> RunRecord:
    """The run, with all files that a check needs; E545 if one is missing or damaged, E414 if a newer version wrote it."""
    refuse_missing(folder, (*FILES, ROUNDS))
    try:
        return load_run(folder)
    except DataError as error:
        refuse_damaged(folder, [f"results.json could not be read ({error.why})"])
        raise


def refuse_missing(folder: Path, names: Sequence[str]) -> None:
    """E545 if a folder does not have these files."""
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        fix = "hand in the folder of a finished run with all of its files"
        why = f"it has no {', no '.join(missing)}"
        raise ConfigError("E545", "this folder cannot be checked", where=str(folder), why=why, fix=fix)


def refuse_damaged(folder: Path, problems: Sequence[str]) -> None:
    """E545 if something in a folder's files cannot be read."""
    if problems:
        fix = "hand in the folder as the run left it"
        why = listed(problems)
        raise ConfigError("E545", "files of this folder are damaged", where=str(folder), why=why, fix=fix)


def compare_files(run: RunRecord, expected: Expected) -> list[str]:
    """What the files say that the board shows, against what it follows from. Returns what was compared, in sentences.

    E545: files are missing or damaged. E541: two recipes. E546: a recipe without keys that it must have. E542: another hash.
    E543: a number does not follow from the recorded ones. E547: method, style or guarantee are not those of the recipe.
    """
    folder = run.folder
    refuse_missing(folder, FILES)
    results, problems = json_object(folder / "results.json", []), [*run.problems, *_unusable_numbers(run)]
    refuse_damaged(folder, problems)
    same_code = run.env.get("code") == expected.code
    where = str(folder)
    fix = "hand in the folder as the run left it"
    if found := _two_recipes(expected.recipe, results):
        raise ConfigError("E541", "the recipe is not the one that was run", where=where, why=listed(found), fix=fix)
    if same_code and (found := [f"config.yaml has no {key}" for key in expected.missing]):
        raise ConfigError("E546", "the recipe is not whole", where=where, why=listed(found), fix=fix)
    if found := _other_hash(folder, expected.digest):
        why = listed(found)
        raise ConfigError(
            "E542", "a hash of this run does not agree", where=where, why=why, fix="the recipe of this run"
        )
    if found := _numbers(run, results, same_code):
        again = f"run it again: {command('rerun', folder)}"
        raise ConfigError("E543", "numbers of this run do not agree", where=where, why=listed(found), fix=again)
    if found := _claims(results, expected, same_code):
        what = "method, style or guarantee are not those of the recipe"
        raise ConfigError("E547", what, where=where, why=listed(found), fix=fix)
    return _compared(run, expected)


def check_images(folder: Path, environment: Mapping[str, Any]) -> None:
    """E542 if the images here, of which ``environment`` tells, are not those that the run was made from."""
    before = json_object(folder / "env.json", [])
    words = {"data_fingerprint": "fingerprint of the images", "data": "name of the images"}
    found = [
        f"{text}: env.json says {before.get(key)}, the images here give {environment.get(key)}"
        for key, text in words.items()
        if before.get(key) != environment.get(key)
    ]
    if found:
        what = "a hash of this run does not agree"
        raise ConfigError("E542", what, where=str(folder), why=listed(found), fix="the images of this run")


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
    recorded = {_step_of(row): row for row in json_lines(folder / ROUNDS, [])}
    found = []
    for row in held:
        if _step_of(row) not in recorded:
            found.append(f"{_words(row)}: {ROUNDS} does not have it")
            continue
        found += _row_differences(recorded[_step_of(row)], row, exact=not moved)
    if found:
        what = "the first rounds held again give other numbers"
        raise ConfigError("E544", what, where=str(folder), why=listed(found), fix=command("rerun", folder))
    return moved


def differences(
    one: Mapping[str, Any],
    other: Mapping[str, Any],
    first: str,
    second: str,
    left_out: set[str] | frozenset[str] = frozenset(),
    share: float = 0.0,
) -> list[str]:
    """Keys whose values differ, as sentences; numbers may differ by a ``share`` of themselves.

    >>> differences({"a": 1, "b": 2}, {"a": 1, "b": 3}, "here", "there")
    ['b: here says 2, there says 3']
    >>> differences({"epsilon": 8.0}, {"epsilon": 7.999}, "here", "there", share=0.001)
    []
    """
    keys = [key for key in dict.fromkeys([*one, *other]) if key not in left_out]
    return [
        f"{key}: {first} says {one.get(key)!r}, {second} says {other.get(key)!r}"
        for key in keys
        if not _alike(one.get(key), other.get(key), share)
    ]


def listed(found: Sequence[str]) -> str:
    """Differences, a line each; only the first of many."""
    more = [f"and {len(found) - MOST} more"] if len(found) > MOST else []
    return "\n".join([*found[:MOST], *more])


def _alike(one: Any, other: Any, share: float) -> bool:
    if isinstance(one, float) and isinstance(other, (int, float)) and not isinstance(other, bool):
        return math.isclose(one, other, rel_tol=share)
    return bool(one == other)


def _unusable_numbers(run: RunRecord) -> list[str]:
    """Whether an accuracy is there for each task after each task, and counts for each class, so that one can compute with them."""
    results, num = run.results, len(run.tasks)
    matrix, counts = results.accuracy_matrix, results.confusion
    measured = [value for i, row in enumerate(matrix) for value in row[: i + 1] if value is not None]
    square = len(matrix) == num and all(len(row) == num for row in matrix)
    found = []
    if not square or results.aa is None or not (results.orders or len(measured) == num * (num + 1) // 2 > 0):
        found.append(
            f"results.json: AA {results.aa} with {num} tasks and {len(measured)} accuracies in {len(matrix)} rows"
        )
    if any(len(row) != len(counts) or None in row for row in counts):
        found.append("results.json: the confusion table is not square")
    return found


def _two_recipes(recipe: Row, results: Row) -> list[str]:
    return differences(flatten(recipe), flatten(results.get("config") or {}), "config.yaml", "results.json", {"device"})


def _other_hash(folder: Path, digest: str) -> list[str]:
    told = _hash_in_name(folder)
    if not told or told == digest:
        return []
    return [f"hash of the recipe: the folder's name says {told}, config.yaml gives {digest}"]


def _hash_in_name(folder: Path) -> str:
    """The hash that the folder's name ends with; empty if it has none. ``-without-3`` names a site that was left out."""
    told = folder.resolve().name.partition("-without-")[0].rpartition("-")[2]
    return told if len(told) == 8 and all(char in "0123456789abcdef" for char in told) else ""


def _claims(results: Row, expected: Expected, same_code: bool) -> list[str]:
    """Method, style and guarantee. Words and styles change between versions, so they are compared within one version alone."""
    told, asked = results.get("method"), flatten(results.get("config") or {}).get("method.name")
    found = [] if told == asked else [f"method: results.json says {told!r}, the recipe says {asked!r}"]
    recorded = results.get("privacy") or {}
    if same_code:
        style, privacy = results.get("style") or {}, expected.privacy
        found += _under("style", differences(style, expected.style, "results.json", "the method"))
    else:
        privacy = {"private": False, "epsilon": None} | expected.privacy
        recorded = {key: recorded[key] for key in PROMISED if key in recorded} | {
            "private": bool(recorded.get("private"))
        }
        privacy = {key: privacy.get(key) for key in {**recorded, "epsilon": None}}
    share = SAME if same_code else ACCOUNTING
    return found + _under("privacy", differences(recorded, privacy, "results.json", "the recipe", share=share))


def _under(section: str, found: Sequence[str]) -> list[str]:
    return [f"{section}.{text}" for text in found]


def _numbers(run: RunRecord, results: Row, same_code: bool) -> list[str]:
    found = [*_own_numbers(run, results), *_own_leakage(run)]
    return (
        found
        if not run.task_rows and not same_code
        else [*found, *_recorded_tasks(run), *_recorded_costs(run, same_code)]
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
    if after and not _equal(run.results.aa, after[-1]):
        found.append(f"aa: results.json says {run.results.aa}, its accuracy after the last task is {after[-1]}")
    if run.results.seed != run.config.get("seed"):
        found.append(f"seed: results.json says {run.results.seed}, the recipe says {run.config.get('seed')}")
    return found


def _own_leakage(run: RunRecord) -> list[str]:
    """The near-copies of the whole run against those of its tasks. Nothing else in the folder tells of them."""
    whole = run.leakage
    if whole is None:
        return []
    num = sum(task.num_images or 0 for task in whole.per_task)
    copies = sum((task.near_copies or 0.0) * (task.num_images or 0) for task in whole.per_task)
    given = {
        "near_copies": copies / num if num else None,
        "num_images": num,
        "exact_copies": sum(task.exact_copies or 0 for task in whole.per_task),
    }
    return [
        f"leakage.{name}: results.json says {getattr(whole, name)}, its tasks give {value}"
        for name, value in given.items()
        if getattr(whole, name) is not None and not _equal(getattr(whole, name), value)
    ]


def _recorded_tasks(run: RunRecord) -> list[str]:
    """The accuracy matrix against what metrics.jsonl recorded when each task ended."""
    found = []
    if len(run.task_rows) != len(run.results.accuracy_matrix):
        found.append(f"tasks: results.json has {len(run.results.accuracy_matrix)}, {ROUNDS} {len(run.task_rows)}")
    for row, line in zip(run.task_rows, run.results.accuracy_matrix, strict=False):
        for j, (then, now) in enumerate(zip(row.accuracy, line, strict=False)):
            if not _equal(then, now):
                found.append(f"accuracy on task {j + 1} after task {row.task + 1}: {ROUNDS} {then}, results.json {now}")
    for row, now in zip(run.task_rows, run.results.incremental_accuracy, strict=False):
        if not _equal(row.aa, now):
            found.append(f"accuracy after task {row.task + 1}: {ROUNDS} {row.aa}, results.json {now}")
    return found


def _recorded_costs(run: RunRecord, same_code: bool) -> list[str]:
    """Bytes and FLOPs of the run against those that metrics.jsonl has at the end of the last task, and bytes against its rounds."""
    measured, found = run.results.cost.measured, []
    for name, then in _costs_at_the_end(run).items():
        now = getattr(measured, name)
        unknown = (then is None and not same_code) or (now is None and not then)  # older runs; sites that do not tell
        if not unknown and now != then:
            found.append(
                f"{name}: results.json says {_whole(now)}, {ROUNDS} {_whole(then)} at the end of the last task"
            )
    for name in ("uplink_bytes", "downlink_bytes"):
        sent, total = sum(getattr(row, name) or 0 for row in run.rounds), getattr(measured, name)
        if sent and (total is None or sent > total + 0.5):
            found.append(
                f"{name}: the rounds of {ROUNDS} have {_whole(sent)}, results.json says {_whole(total)} in all"
            )
    return found


def _costs_at_the_end(run: RunRecord) -> dict[str, float | None]:
    last = run.task_rows[-1] if run.task_rows else None
    names = {"client_flops": "client_flops", "server_flops": "server_flops"}
    names |= {f"{way}_bytes": f"{way}_bytes_so_far" for way in ("uplink", "downlink")}
    return {name: getattr(last, key, None) for name, key in names.items()}


def _compared(run: RunRecord, expected: Expected) -> list[str]:
    """What ``compare_files`` compared, and what an older run gave it no means to compare."""
    told, unknown = _hash_in_name(run.folder), [name for name, then in _costs_at_the_end(run).items() if then is None]
    hashed = f"the folder's name has their hash {told}" if told else "the folder's name has no hash"
    guarantee = f"epsilon {run.epsilon:g}" if run.epsilon is not None else "none"
    return [
        f"recipe: config.yaml and results.json agree, {hashed}",
        *_lacking(expected.missing),
        f"numbers: AA {run.results.aa} and AIA {run.results.aia} follow from the accuracy matrix and {ROUNDS}",
        *([f"older version: {ROUNDS} has no totals of {', '.join(unknown)} to compare with"] if unknown else []),
        f"method: {run.method}; guarantee: {guarantee}, as the recipe gives them",
    ]


def _lacking(missing: Sequence[str]) -> list[str]:
    """The mark of a recipe that an older version wrote.

    >>> _lacking(["federation.delay"])
    ['older version: config.yaml lacks keys of today (1: federation.delay), which stand at their defaults']
    """
    names = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
    words = f"older version: config.yaml lacks keys of today ({len(missing)}: {names}), which stand at their defaults"
    return [words] if missing else []


def _row_differences(before: Row, now: Row, *, exact: bool) -> list[str]:
    if exact:
        then, again = flatten(before), flatten(now)
        return [f"{_words(now)}, {text}" for text in differences(then, again, ROUNDS, "held again it")]
    found = []
    if before.get("participants") != now.get("participants"):
        found.append(f"sites: {ROUNDS} says {before.get('participants')}, held again {now.get('participants')}")
    for key in ("uplink_bytes", "downlink_bytes"):
        one, other = before.get(key), now.get(key)
        if one is not None and other is not None and abs(one - other) > BYTES * max(one, other):
            found.append(f"{key}: {ROUNDS} says {one}, held again {other}")
    one, other = before.get("accuracy"), now.get("accuracy")
    if isinstance(one, (int, float)) and isinstance(other, (int, float)) and abs(one - other) > POINTS:
        found.append(f"accuracy: {ROUNDS} says {one}, held again {other}")
    return [f"{_words(now)}, {text}" for text in found]


def _step_of(row: Row) -> tuple[Any, ...]:
    return row.get("kind"), row.get("task"), row.get("round")


def _words(row: Row) -> str:
    return f"task {row['task'] + 1}" + (f", round {row['round'] + 1}" if row.get("kind") == "round" else "")


def _whole(value: float | None) -> str:
    return "nothing" if value is None else f"{value:.0f}"


def _equal(one: float | None, other: float | None) -> bool:
    missing = [value is None or math.isnan(value) for value in (one, other)]
    return all(missing) if any(missing) else abs(float(one or 0) - float(other or 0)) <= SAME
