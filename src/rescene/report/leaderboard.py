"""The leaderboard: its rows from run folders, as a page without a server and as CSV; and the check of a folder that is handed in.

Runs that differ in nothing but the seed are one row. Rows are only comparable within a problem: the same data, tasks, split, sites,
rounds and network. The page groups by it, and its filters choose one. Costs are as counted, accuracies in percent.
Title, verification and what leaves a site come from the registered method and not from a run's files (``MethodFacts``).

A check derives anew what the recipe and the registered method give (``Expected``, made by the caller) and compares it with the
files. Numbers are compared with what they follow from: the accuracy matrix, the figures of each task, and ``metrics.jsonl``.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

from rescene import functional as fn
from rescene.core.errors import ConfigError, DataError, command
from rescene.core.json_files import Row, json_lines, json_object
from rescene.core.method_style import MethodStyle
from rescene.core.recipe_keys import flatten
from rescene.core.results import Results
from rescene.core.verification import Verified, in_full, in_short
from rescene.report.formatting import (
    NONE,
    bytes_text,
    count,
    flops_text,
    percent,
    plain,
    put_page,
    render_page,
    server_work,
    site_work,
)
from rescene.report.groups import RunGroup, Spread, group_runs
from rescene.report.load import RunRecord, load_run
from rescene.report.tables import csv_text

PAPER_DATA = ("cifar10", "cifar100", "tinyimagenet", "office31")
BEHIND = " behind "  # a network that sees pictures through a lens
LONG_WORD = 14  # letters that a column of the page has room for


@dataclass(frozen=True)
class InPaper:
    """Where a run stands in the paper: whether its settings are read as the paper's, and the AA it prints."""

    reading: str = "ours"
    aa: str = ""


@dataclass(frozen=True)
class MethodFacts:
    """What the registered method says of a run: its style, what leaves a site behind the run's mechanism, its comparisons."""

    style: MethodStyle
    leaves: str
    verified: tuple[Verified, ...] = ()


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
        return ", ".join(astuple(self))


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
    verified: tuple[Verified, ...]
    folders: tuple[Path, ...]
    num_recorded: int  # of these folders, those that have the record of their rounds
    repeats: tuple[tuple[Path, Path], ...]  # folders with a recipe and seed again, each with the one that counts

    @property
    def leaves_text(self) -> str:
        """What leaves a site, and for images how many of them are near-copies of real ones."""
        if "images" not in self.leaves or self.near_copies is None:
            return self.leaves
        return f"{self.leaves}, {100 * self.near_copies:.0f} % near-copies"

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
    facts: Mapping[Path, MethodFacts],
    in_paper: Mapping[Path, InPaper] | None = None,
    data_names: Mapping[str, str] | None = None,
) -> list[BoardRow]:
    """A row for each method in each setting, best AA first within a problem; unfinished runs have no row.

    Problems stand in the order of their data, the paper's sets first, and those with most methods before the others.

    ``facts``: what the registered method says of each run, by its folder. ``data_names``: what data sets are called that some runs
    read from a file of another name.
    """
    problems: dict[Problem, list[RunRecord]] = {}
    for run in filter(shown, runs):
        problem = _problem(run)
        name = (data_names or {}).get(problem.data, problem.data)
        run = replace(run, style=facts[run.folder].style)
        problems.setdefault(replace(problem, data=plain(name, 40)), []).append(run)
    return [
        _entry(problem, group, facts[group.runs[0].folder], in_paper or {})
        for problem in sorted(problems, key=lambda problem: _place(problem, problems[problem], in_paper or {}))
        for group in group_runs(problems[problem])
    ]


def shown(run: RunRecord) -> bool:
    """Whether a run has what a row needs: it is finished and its accuracy was measured."""
    return run.finished and run.results.aa is not None


def _place(
    problem: Problem, runs: Sequence[RunRecord], in_paper: Mapping[Path, InPaper]
) -> tuple[int, str, int, int, str]:
    """The paper's data sets first, in its order, the others by name; of one set the problem with most of the paper's figures
    first, then that with most methods."""
    order = PAPER_DATA.index(problem.data) if problem.data in PAPER_DATA else len(PAPER_DATA)
    printed = sum(in_paper.get(run.folder.resolve(), InPaper()).aa != "" for run in runs)
    return order, problem.data, -printed, -len({run.method for run in runs}), problem.text


def _problem(run: RunRecord) -> Problem:
    told = run.settings
    scenario = told.get("tasks.scenario") or "class"
    beta, partition = (told.get(f"federation.{key}") for key in ("beta", "partition"))
    drift = f", drift {told['tasks.drift']}" if told.get("tasks.drift") else ""
    orders = ", an order for each site" if told.get("tasks.order") == "per-site" else ""
    test = ", the last images as test" if told.get("data.held_out") == "last" else ""
    seen = told.get("model.lens")
    return Problem(
        data=plain(run.data or told.get("data.name") or "unknown", 40),
        tasks=count(len(run.tasks), f"{scenario} task") + drift + orders + test,
        split=str(partition) if beta is None or partition in ("sites", "iid") else f"beta {beta}",
        sites=f"{told.get('federation.per_round')} of {told.get('federation.num_clients')} sites",
        rounds=count(int(told.get("federation.num_rounds") or 0), "round"),
        network=f"{told.get('model.name')}{BEHIND}{Path(str(seen)).name}" if seen else str(told.get("model.name")),
    )


def _entry(problem: Problem, group: RunGroup, facts: MethodFacts, in_paper: Mapping[Path, InPaper]) -> BoardRow:
    runs = group.finished
    assert group.aa is not None  # entries() takes finished runs alone
    place = next((in_paper[key] for run in runs if (key := run.folder.resolve()) in in_paper), InPaper())
    return BoardRow(
        problem=problem,
        label=group.label,
        method=group.method,
        n=len(runs),
        aa=group.aa,
        aia=group.spread(lambda run: run.results.aia),
        worst_task=group.spread(worst_task),
        bytes_per_site_and_task=group.mean(bytes_per_site_and_task),
        client_flops=group.mean(lambda run: run.results.cost.measured.client_flops),
        server_flops=group.mean(lambda run: run.results.cost.measured.server_flops),
        leaves=facts.leaves,
        near_copies=group.mean(lambda run: run.near_copies),
        epsilon=runs[0].epsilon if runs[0].privacy.private else None,
        reference=group.style.reference,
        reading=place.reading,
        paper_aa=place.aa,
        verified=facts.verified,
        folders=tuple(run.folder for run in runs),
        num_recorded=sum(bool(run.task_rows) for run in runs),
        repeats=tuple(
            (run.folder, counted.folder) for run in group.repeats for counted in runs if counted.seed == run.seed
        ),
    )


def worst_task(run: RunRecord) -> float | None:
    """The lowest accuracy of a task after the last one, in percent."""
    final = run.results.accuracy_matrix[-1:]
    return min((value for row in final for value in row if value is not None), default=None)


def bytes_per_site_and_task(run: RunRecord) -> float | None:
    """Bytes sent up in the whole run, divided by all sites and tasks."""
    sent, sites = run.results.cost.measured.uplink_bytes, run.settings.get("federation.num_clients")
    return sent / (sites * len(run.tasks)) if sent is not None and sites and run.tasks else None


def csv_of(rows: Sequence[BoardRow], root: Path) -> str:
    """The rows as CSV; folders are relative to ``root``."""
    return csv_text([_csv_row(row, root) for row in rows])


def _csv_row(row: BoardRow, root: Path) -> dict[str, Any]:
    return {
        **asdict(row.problem),
        **{"method": row.method, "label": row.label, "n": row.n},
        **_two("aa", row.aa),
        **_two("aia", row.aia),
        **_two("worst_task", row.worst_task),
        "bytes_per_site_and_task": _whole(row.bytes_per_site_and_task),
        "client_flops": _whole(row.client_flops),
        "server_flops": _whole(row.server_flops),
        "leaves_site": row.leaves,
        "near_copies": None if row.near_copies is None else round(row.near_copies, 4),
        **{"epsilon": row.epsilon, "reference": row.reference, "reading": row.reading, "paper_aa": row.paper_aa},
        **{"verified": in_short(row.verified), "verified_where": "; ".join(in_full(row.verified))},
        **{"rounds_recorded": row.num_recorded, "folders": " ".join(_under(folder, root) for folder in row.folders)},
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
    return [put_page(page_of(rows, root), out / "index.html"), table]


def page_of(rows: Sequence[BoardRow], root: Path) -> str:
    """The page. It names folders relative to ``root`` and does not link them: it also lies in the built site, where none is."""
    names = ("data", "split", "setting", "leaves", "guarantee", "reading")
    told = [_shown(row, root) for row in rows]
    return render_page(
        "leaderboard.html.j2",
        script="leaderboard.js",
        rows=told,
        filters={name: sorted({row[name] for row in told}) for name in names},
        num_runs=sum(row.n for row in rows),
    )


def _shown(row: BoardRow, root: Path) -> dict[str, Any]:
    """A row as the template shows it: texts, and beside them the numbers to sort by."""
    problem = row.problem
    return {
        **{"data": problem.data, "split": problem.split, "n": row.n, "reading": row.reading},
        "label_parts": breakable(row.label),
        "setting": ", ".join((problem.tasks, problem.sites, problem.rounds, problem.network)),
        "aa": _figure(row.aa),
        "aia": _figure(row.aia),
        "worst": _figure(row.worst_task),
        "bytes": _amount(row.bytes_per_site_and_task, bytes_text),
        "client": _amount(row.client_flops, flops_text) | {"text": row.client_flops_text},
        "server": _amount(row.server_flops, server_work),
        **{"leaves": row.leaves, "leaves_text": row.leaves_text.replace(" %", "\u00a0%"), "reference": row.reference},
        **{"guarantee": row.guarantee, "paper_aa": row.paper_aa},
        **{"verified": in_short(row.verified), "comparisons": in_full(row.verified)},
        "folders": [_under(folder, root) for folder in row.folders],
        "unrecorded": row.n - row.num_recorded,
    }


def breakable(label: str) -> list[str]:
    """A label in parts between which a line may break: a long word may after each of _ = / …

    >>> breakable("ReSCENE E_srv=10 surrogates_per_class=min")
    ['ReSCENE ', 'E_srv=10 ', 'surrogates_', 'per_', 'class=', 'min']
    """
    words = re.split("(?<= )", label)
    return [part for word in words for part in (re.split("(?<=[_=/…])", word) if len(word) > LONG_WORD else [word])]


def _figure(value: Spread | None) -> dict[str, str]:
    if value is None:
        return {"sort": "", "text": NONE, "std": ""}
    std = "" if value.std is None else f"± {value.std:.2f}"
    return {"sort": f"{value.mean:.4f}", "text": percent(value.mean, 2), "std": std}


def _amount(value: float | None, words: Callable[[float | None], str]) -> dict[str, str]:
    return {"sort": "" if value is None else f"{value:.6g}", "text": words(value)}


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
OTHER_HASH = "a hash of this run does not agree"
AS_IT_WAS_LEFT = "hand in the folder as the run left it"


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
    missing = ", no ".join(name for name in names if not (folder / name).is_file())
    fix = "hand in the folder of a finished run with all of its files"
    error = ConfigError("E545", "this folder cannot be checked", fix=fix)
    _refuse(folder, [f"it has no {missing}"] if missing else [], error)


def refuse_damaged(folder: Path, problems: Sequence[str]) -> None:
    """E545 if something in a folder's files cannot be read."""
    _refuse(folder, problems, ConfigError("E545", "files of this folder are damaged", fix=AS_IT_WAS_LEFT))


def _refuse(folder: Path, found: Sequence[str], error: ConfigError) -> None:
    """Raise the error if something was found in the folder, with a line for each and only the first of many."""
    if found:
        more = [f"and {len(found) - MOST} more"] if len(found) > MOST else []
        error.where, error.why = str(folder), "\n".join([*found[:MOST], *more])
        raise error


def compare_files(run: RunRecord, expected: Expected) -> list[str]:
    """What the files say that the board shows, against what it follows from. Returns what was compared, in sentences.

    E545: files are missing or damaged. E541: two recipes. E546: a recipe without keys that it must have. E542: another hash.
    E543: a number does not follow from the recorded ones. E547: method, style or guarantee are not those of the recipe.
    """
    refuse_missing(run.folder, FILES)
    refuse_damaged(run.folder, [*run.problems, *unusable_numbers(run.results)])
    _compare_recipe(run, expected)
    _compare_numbers(run, expected)
    return _compared(run, expected)


def _compare_recipe(run: RunRecord, expected: Expected) -> None:
    found = differences(flatten(expected.recipe), _recorded(run), "config.yaml", "results.json", {"device"})
    _refuse(run.folder, found, ConfigError("E541", "the recipe is not the one that was run", fix=AS_IT_WAS_LEFT))
    found = [f"config.yaml has no {key}" for key in expected.missing] if _same_code(run, expected) else []
    _refuse(run.folder, found, ConfigError("E546", "the recipe is not whole", fix=AS_IT_WAS_LEFT))
    found = _other_hash(run.folder, expected.digest)
    _refuse(run.folder, found, ConfigError("E542", OTHER_HASH, fix="the recipe of this run"))


def _compare_numbers(run: RunRecord, expected: Expected) -> None:
    same_code = _same_code(run, expected)
    found, fix = _numbers(run, same_code), f"run it again: {command('rerun', run.folder)}"
    _refuse(run.folder, found, ConfigError("E543", "numbers of this run do not agree", fix=fix))
    found = _claims(run.raw, _recorded(run).get("method.name"), expected, same_code)
    what = "method, style or guarantee are not those of the recipe"
    _refuse(run.folder, found, ConfigError("E547", what, fix=AS_IT_WAS_LEFT))


def _recorded(run: RunRecord) -> Row:
    return flatten(run.raw.get("config") or {})


def _same_code(run: RunRecord, expected: Expected) -> bool:
    return bool(run.env.get("code") == expected.code)


def check_images(folder: Path, environment: Mapping[str, Any]) -> None:
    """E542 if the images here, of which ``environment`` tells, are not those that the run was made from."""
    before = json_object(folder / "env.json", [])
    words = {"data_fingerprint": "fingerprint of the images", "data": "name of the images"}
    found = [
        f"{text}: env.json says {before.get(key)}, the images here give {environment.get(key)}"
        for key, text in words.items()
        if before.get(key) != environment.get(key)
    ]
    _refuse(folder, found, ConfigError("E542", OTHER_HASH, fix="the images of this run"))


def check_rounds(folder: Path, held: Sequence[Row], environment: Mapping[str, Any]) -> list[str]:
    """E544 if rounds that were ``held`` again differ from the recorded ones.

    On the machine and version that made the run every number must be the same. Elsewhere sites must be the same, bytes within a
    percent and accuracies within five points. Returns how they were compared: what differs of the machine, or nothing.
    """
    made_on = json_object(folder / "env.json", [])
    pairs = {key: (made_on.get(key), environment.get(key)) for key in MADE_ON}
    moved = [f"{key}: {then} -> {now}" for key, (then, now) in pairs.items() if then != now]
    recorded = {_step_of(row): row for row in json_lines(folder / ROUNDS, [])}
    found = []
    for row in held:
        before = recorded.get(_step_of(row))
        if before is None:
            found.append(f"{_words(row)}: {ROUNDS} does not have it")
        else:
            found += _row_differences(before, row, exact=not moved)
    what = "the first rounds held again give other numbers"
    _refuse(folder, found, ConfigError("E544", what, fix=command("rerun", folder)))
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


def _alike(one: Any, other: Any, share: float) -> bool:
    if isinstance(one, float) and isinstance(other, (int, float)) and not isinstance(other, bool):
        return math.isclose(one, other, rel_tol=share)
    return bool(one == other)


def unusable_numbers(results: Results) -> list[str]:
    """Whether an accuracy is there for each task after each task, and counts for each class, so that one can compute with them."""
    matrix, counts, num = results.accuracy_matrix, results.confusion, len(results.tasks)
    measured = [value for i, row in enumerate(matrix) for value in row[: i + 1] if value is not None]
    square = len(matrix) == num and all(len(row) == num for row in matrix)
    found = []
    if not square or results.aa is None or not (results.orders or len(measured) == num * (num + 1) // 2 > 0):
        accuracies = f"{len(measured)} accuracies in {len(matrix)} rows"
        found.append(f"results.json: AA {results.aa} with {num} tasks and {accuracies}")
    if any(len(row) != len(counts) or None in row for row in counts):
        found.append("results.json: the confusion table is not square")
    return found


def _other_hash(folder: Path, digest: str) -> list[str]:
    told = _hash_in_name(folder)
    if not told or told == digest:
        return []
    return [f"hash of the recipe: the folder's name says {told}, config.yaml gives {digest}"]


def _hash_in_name(folder: Path) -> str:
    """The hash that the folder's name ends with; empty if it has none. ``-without-3`` names a site that was left out."""
    told = folder.resolve().name.partition("-without-")[0].rpartition("-")[2]
    return told if len(told) == 8 and all(char in "0123456789abcdef" for char in told) else ""


def _claims(results: Row, asked: Any, expected: Expected, same_code: bool) -> list[str]:
    """Method, style and guarantee. Words and styles change between versions, so they are compared within one version alone."""
    told, recorded, privacy = results.get("method"), results.get("privacy") or {}, expected.privacy
    found = [] if told == asked else [f"method: results.json says {told!r}, the recipe says {asked!r}"]
    if same_code:
        styles = differences(results.get("style") or {}, expected.style, "results.json", "the method")
        found += [f"style.{text}" for text in styles]
    else:
        private = {"private": bool(recorded.get("private"))}
        recorded = {key: recorded[key] for key in PROMISED if key in recorded} | private
        privacy = {key: ({"private": False} | privacy).get(key) for key in {**recorded, "epsilon": None}}
    share = SAME if same_code else ACCOUNTING
    promises = differences(recorded, privacy, "results.json", "the recipe", share=share)
    return found + [f"privacy.{text}" for text in promises]


def _numbers(run: RunRecord, same_code: bool) -> list[str]:
    found = [*_own_numbers(run), *_own_leakage(run)]
    if run.task_rows or same_code:
        found += [*_recorded_tasks(run), *_recorded_costs(run, same_code)]
    return found


def _own_numbers(run: RunRecord) -> list[str]:
    return contradictions(run.results, run.raw, run.settings)


def contradictions(results: Results, raw: Row, settings: Mapping[str, Any]) -> list[str]:
    """What results.json (``raw``: as it stands) says against its own accuracy matrix, confusion table and recipe.

    ``settings``: the recipe's dotted keys. The numbers are those that ``unusable_numbers`` lets pass.
    """
    matrix = results.accuracy_matrix
    sizes = None if settings.get("tasks.scenario") == "domain" else [task.test_size or 0 for task in results.tasks]
    old, recent = fn.old_and_recent(matrix)
    after = [value for value in results.incremental_accuracy if value is not None]
    # AA is then over the classes that anybody has met
    own_orders = settings.get("tasks.order") == "per-site" and bool(after)
    given = {
        "aa": after[-1] if own_orders else fn.average_accuracy(matrix, sizes),
        "aia": sum(after) / len(after) if own_orders else fn.average_incremental_accuracy(matrix, sizes),
        "forgetting": fn.forgetting(matrix),
        "bwt": fn.backward_transfer(matrix),
        "old": old,
        "recent": recent,
        "worst_task": min(value for value in matrix[-1] if value is not None),
    }
    if results.confusion:
        given["balanced_accuracy"] = fn.balanced_accuracy(results.confusion)
    found = [
        f"{name}: results.json says {raw[name]}, its accuracy matrix gives {value:.10g}"
        for name, value in given.items()
        if raw.get(name) is not None and not _equal(raw[name], value)
    ]
    if after and not _equal(results.aa, after[-1]):
        found.append(f"aa: results.json says {results.aa}, its accuracy after the last task is {after[-1]}")
    if results.seed != settings.get("seed"):
        found.append(f"seed: results.json says {results.seed}, the recipe says {settings.get('seed')}")
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
    matrix, rows = run.results.accuracy_matrix, run.task_rows
    found = [f"tasks: results.json has {len(matrix)}, {ROUNDS} {len(rows)}"] if len(rows) != len(matrix) else []
    pairs = [
        (f"accuracy on task {j + 1} after task {row.task + 1}", then, now)
        for row, line in zip(rows, matrix, strict=False)
        for j, (then, now) in enumerate(zip(row.accuracy, line, strict=False))
    ]
    after = zip(rows, run.results.incremental_accuracy, strict=False)
    pairs += [(f"accuracy after task {row.task + 1}", row.aa, now) for row, now in after]
    found += [f"{what}: {ROUNDS} {then}, results.json {now}" for what, then, now in pairs if not _equal(then, now)]
    return found


def _recorded_costs(run: RunRecord, same_code: bool) -> list[str]:
    """Bytes and FLOPs of the run against those that metrics.jsonl has at the end of the last task, and bytes against its rounds."""
    measured, found = run.results.cost.measured, []
    for name, then in _costs_at_the_end(run).items():
        now = getattr(measured, name)
        unknown = (then is None and not same_code) or (now is None and not then)  # older runs; sites that do not tell
        if not unknown and now != then:
            last = f"{ROUNDS} {_digits(then)} at the end of the last task"
            found.append(f"{name}: results.json says {_digits(now)}, {last}")
    for name in ("uplink_bytes", "downlink_bytes"):
        sent, total = sum(getattr(row, name) or 0 for row in run.rounds), getattr(measured, name)
        if sent and (total is None or sent > total + 0.5):
            whole = f"results.json says {_digits(total)} in all"
            found.append(f"{name}: the rounds of {ROUNDS} have {_digits(sent)}, {whole}")
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


def _digits(value: float | None) -> str:
    return "nothing" if value is None else f"{value:.0f}"


def _equal(one: float | None, other: float | None) -> bool:
    missing = [value is None or math.isnan(value) for value in (one, other)]
    return all(missing) if any(missing) else abs(float(one or 0) - float(other or 0)) <= SAME
