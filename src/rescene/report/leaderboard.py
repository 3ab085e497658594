"""The leaderboard: one row for each method in each setting, from run folders, as a page without a server and as CSV.

Runs that differ in nothing but the seed are one row. Rows are only comparable within a problem: the same data, tasks, split, sites,
rounds and network. The page groups by it, and its filters choose one. Costs are as counted, accuracies in percent.

A run folder that somebody hands in is checked: whether it agrees with itself, and with its first rounds held again.
"""

from __future__ import annotations

import base64
import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from rescene import functional as fn
from rescene.core.errors import ConfigError, command
from rescene.core.json_files import Row, json_lines, json_object, yaml_object
from rescene.core.recipe_keys import flatten
from rescene.core.verification import NOT_VERIFIED
from rescene.report.formatting import NONE, bytes_text, count, flops_text, percent, plain, server_work, site_work
from rescene.report.groups import RunGroup, Spread, group_runs
from rescene.report.load import RunRecord, load_run
from rescene.report.page import put_page, render_page
from rescene.report.table_formats import csv_text

PAPER_DATA = ("cifar10", "cifar100", "tinyimagenet", "office31")
BEHIND = " behind "  # a network that sees pictures through a lens


@dataclass(frozen=True)
class InPaper:
    """Where a run stands in the paper: whether its settings are read as the paper's, and the AA it prints."""

    reading: str = "ours"
    aa: str = ""


@dataclass(frozen=True)
class Problem:
    """What rows must share to be compared."""

    data: str
    tasks: str
    split: str
    sites: str
    rounds: str
    network: str

    @property
    def text(self) -> str:
        """In words, for a heading.

        >>> Problem("cifar10", "5 class tasks", "beta 0.5", "10 of 20 sites", "20 rounds", "resnet18").text
        'cifar10, 5 class tasks, beta 0.5, 10 of 20 sites, 20 rounds, resnet18'
        """
        return ", ".join((self.data, self.tasks, self.split, self.sites, self.rounds, self.network))


@dataclass(frozen=True)
class BoardRow:
    """One row. Bytes are those that all sites send up in the whole run, over sites and tasks; FLOPs are of the whole run."""

    problem: Problem
    label: str
    method: str
    n: int
    aa: Spread
    aia: Spread | None
    worst_task: Spread | None
    bytes_per_site_and_task: float | None
    client_flops: float | None
    server_flops: float | None
    leaves: str
    near_copies: float | None
    epsilon: float | None
    reference: str
    reading: str
    paper_aa: str
    verified: str
    folders: tuple[Path, ...]

    @property
    def leaves_text(self) -> str:
        """What leaves a site, and for images how many of them are near-copies of real ones."""
        if self.leaves != "images" or self.near_copies is None:
            return self.leaves
        return f"images, {100 * self.near_copies:.0f} % near-copies"

    @property
    def guarantee(self) -> str:
        """The epsilon of the whole run, or none."""
        return "none" if self.epsilon is None else f"epsilon {self.epsilon:g}"

    @property
    def client_flops_text(self) -> str:
        """FLOPs of all clients; the look through a lens is not among them, and this says so."""
        return site_work(self.client_flops, BEHIND in self.problem.network)


def entries(
    runs: Sequence[RunRecord],
    in_paper: Mapping[Path, InPaper] | None = None,
    verified: Mapping[str, str] | None = None,
    data_names: Mapping[str, str] | None = None,
) -> list[BoardRow]:
    """A row for each method in each setting, best AA first within a problem; unfinished runs have no row.

    Problems stand in the order of their data, the paper's sets first, and those with most methods before the others.

    ``data_names``: what data sets are called that some runs read from a file of another name.
    """
    problems: dict[Problem, list[RunRecord]] = {}
    for run in runs:
        if run.finished and run.results.aa is not None:
            problem = _problem(run)
            name = (data_names or {}).get(problem.data, problem.data)
            problems.setdefault(replace(problem, data=plain(name, 40)), []).append(run)
    found = []
    for problem in sorted(problems, key=lambda problem: _place(problem, problems[problem])):
        for group in group_runs(problems[problem]):
            found.append(_entry(problem, group, in_paper or {}, verified or {}))
    return found


def _place(problem: Problem, runs: Sequence[RunRecord]) -> tuple[int, str, int, str]:
    """The paper's data sets first, in its order, the others by name; of one set the problem with most methods first."""
    order = PAPER_DATA.index(problem.data) if problem.data in PAPER_DATA else len(PAPER_DATA)
    return order, problem.data, -len({run.method for run in runs}), problem.text


def _problem(run: RunRecord) -> Problem:
    told = run.settings
    scenario = told.get("tasks.scenario") or "class"
    split = f"beta {told.get('federation.beta')}" if _by_beta(told) else str(told.get("federation.partition"))
    drift = f", drift {told['tasks.drift']}" if told.get("tasks.drift") else ""
    orders = ", an order for each site" if told.get("tasks.order") == "per-site" else ""
    seen = told.get("model.lens")
    return Problem(
        data=plain(run.data or told.get("data.name") or "unknown", 40),
        tasks=count(len(run.tasks), f"{scenario} task") + drift + orders,
        split=split,
        sites=f"{told.get('federation.per_round')} of {told.get('federation.num_clients')} sites",
        rounds=count(int(told.get("federation.num_rounds") or 0), "round"),
        network=f"{told.get('model.name')}{BEHIND}{Path(str(seen)).name}" if seen else str(told.get("model.name")),
    )


def _by_beta(told: Mapping[str, Any]) -> bool:
    return told.get("federation.partition") not in ("sites", "iid") and told.get("federation.beta") is not None


def _entry(
    problem: Problem, group: RunGroup, in_paper: Mapping[Path, InPaper], verified: Mapping[str, str]
) -> BoardRow:
    runs = group.finished
    aa = group.spread(lambda run: run.results.aa)
    assert aa is not None  # entries() takes finished runs alone
    place = next((in_paper[key] for run in runs if (key := run.folder.resolve()) in in_paper), InPaper())

    def mean(pick: Callable[[RunRecord], float | None]) -> float | None:
        found = group.spread(pick)
        return None if found is None else found.mean

    return BoardRow(
        problem=problem,
        label=group.label,
        method=group.method,
        n=len(runs),
        aa=aa,
        aia=group.spread(lambda run: run.results.aia),
        worst_task=group.spread(worst_task),
        bytes_per_site_and_task=mean(bytes_per_site_and_task),
        client_flops=mean(lambda run: run.results.cost.measured.client_flops),
        server_flops=mean(lambda run: run.results.cost.measured.server_flops),
        leaves=_leaves(runs[0]),
        near_copies=mean(lambda run: run.near_copies),
        epsilon=runs[0].epsilon if runs[0].privacy.private else None,
        reference=group.style.reference,
        reading=place.reading,
        paper_aa=place.aa,
        verified=verified.get(group.method, NOT_VERIFIED),
        folders=tuple(run.folder for run in runs),
    )


def _leaves(run: RunRecord) -> str:
    """The kind of what is sent. Behind a mechanism that sends sums, images are only drawn from them on the server."""
    return "sums" if run.privacy.images == "drawn" else run.style.uploads or "unknown"


def worst_task(run: RunRecord) -> float | None:
    """The lowest accuracy of a task after the last one, in percent."""
    final = (
        [value for value in run.results.accuracy_matrix[-1] if value is not None] if run.results.accuracy_matrix else []
    )
    return min(final, default=None)


def bytes_per_site_and_task(run: RunRecord) -> float | None:
    """Bytes sent up in the whole run, divided by all sites and tasks."""
    sent, sites = run.results.cost.measured.uplink_bytes, run.settings.get("federation.num_clients")
    return sent / (sites * len(run.tasks)) if sent is not None and sites and run.tasks else None


def csv_of(rows: Sequence[BoardRow], root: Path) -> str:
    """The rows as CSV; folders are relative to ``root``."""
    return csv_text([_csv_row(row, root) for row in rows])


def _csv_row(row: BoardRow, root: Path) -> dict[str, Any]:
    problem = row.problem
    return {
        **{"data": problem.data, "tasks": problem.tasks, "split": problem.split, "sites": problem.sites},
        **{"rounds": problem.rounds, "network": problem.network, "method": row.method, "label": row.label, "n": row.n},
        **_two("aa", row.aa),
        **_two("aia", row.aia),
        **_two("worst_task", row.worst_task),
        "bytes_per_site_and_task": _whole(row.bytes_per_site_and_task),
        "client_flops": _whole(row.client_flops),
        "server_flops": _whole(row.server_flops),
        "leaves_site": row.leaves,
        "near_copies": None if row.near_copies is None else round(row.near_copies, 4),
        **{"epsilon": row.epsilon, "reference": row.reference, "reading": row.reading, "paper_aa": row.paper_aa},
        **{"verified": row.verified, "folders": " ".join(_under(folder, root) for folder in row.folders)},
    }


def _two(name: str, value: Spread | None) -> dict[str, float | None]:
    mean = None if value is None else round(value.mean, 2)
    return {name: mean, f"{name}_std": None if value is None or value.std is None else round(value.std, 2)}


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def _under(folder: Path, root: Path) -> str:
    return Path(os.path.relpath(folder.resolve(), root.resolve())).as_posix()


def write_leaderboard(rows: Sequence[BoardRow], out: Path, root: Path) -> list[Path]:
    """index.html and leaderboard.csv in the folder ``out``. ``root`` is what the folders' names begin under."""
    out.mkdir(parents=True, exist_ok=True)
    table = out / "leaderboard.csv"
    table.write_text(csv_of(rows, root), "utf-8", newline="")
    return [put_page(page_of(rows, out, root), out / "index.html"), table]


def page_of(rows: Sequence[BoardRow], out: Path, root: Path) -> str:
    """The page, as it lies in ``out``: its links lead from there to the run folders."""
    script = (files("rescene.report") / "leaderboard.js").read_text("utf-8")
    names = ("data", "split", "setting", "leaves", "guarantee", "reading")
    shown = [_shown(row, out, root) for row in rows]
    return render_page(
        "leaderboard.html.j2",
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(f"\n{script}".encode()).digest()).decode(),
        rows=shown,
        filters={name: sorted({row[name] for row in shown}) for name in names},
        num_runs=sum(row.n for row in rows),
    )


def _shown(row: BoardRow, out: Path, root: Path) -> dict[str, Any]:
    """A row as the template shows it: texts, and beside them the numbers to sort by."""
    problem = row.problem
    return {
        **{"data": problem.data, "split": problem.split, "label": row.label, "n": row.n, "reading": row.reading},
        "setting": ", ".join((problem.tasks, problem.sites, problem.rounds, problem.network)),
        "aa": _figure(row.aa),
        "aia": _figure(row.aia),
        "worst": _figure(row.worst_task),
        "bytes": _amount(row.bytes_per_site_and_task, bytes_text),
        "client": _amount(row.client_flops, flops_text) | {"text": row.client_flops_text},
        "server": _amount(row.server_flops, server_work),
        **{"leaves": row.leaves, "leaves_text": row.leaves_text, "reference": row.reference},
        **{"guarantee": row.guarantee, "paper_aa": row.paper_aa, "verified": row.verified},
        "links": [(_under(folder, out), _under(folder, root)) for folder in row.folders],
    }


def _figure(value: Spread | None) -> dict[str, str]:
    if value is None:
        return {"sort": "", "text": NONE, "std": ""}
    std = "" if value.std is None else f"± {value.std:.2f}"
    return {"sort": f"{value.mean:.4f}", "text": percent(value.mean, 2), "std": std}


def _amount(value: float | None, words: Callable[[float | None], str]) -> dict[str, str]:
    return {"sort": "" if value is None else f"{value:.6g}", "text": words(value)}


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
    recorded = {_step_of(row): row for row in json_lines(folder / "metrics.jsonl", [])}
    found = []
    for row in held:
        if _step_of(row) not in recorded:
            found.append(f"{_words(row)}: metrics.jsonl does not have it")
            continue
        found += _row_differences(recorded[_step_of(row)], row, exact=not moved)
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


def _step_of(row: Row) -> tuple[Any, ...]:
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
