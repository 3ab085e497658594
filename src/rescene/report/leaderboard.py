"""The leaderboard: one row for each method in each setting, from run folders, as a page without a server and as CSV.

Runs that differ in nothing but the seed are one row. Rows are only comparable within a problem: the same data, tasks, split, sites,
rounds and network. The page groups by it, and its filters choose one. Costs are as counted, accuracies in percent.
Title, verification and what leaves a site come from the registered method and not from a run's files (``MethodFacts``).
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from rescene.core.method_style import MethodStyle
from rescene.core.verification import Verified, in_full, in_short
from rescene.report.formatting import NONE, bytes_text, count, flops_text, percent, plain, server_work, site_work
from rescene.report.groups import RunGroup, Spread, group_runs
from rescene.report.load import RunRecord
from rescene.report.page import put_page, render_page
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
    found = []
    for problem in sorted(problems, key=lambda problem: _place(problem, problems[problem])):
        for group in group_runs(problems[problem]):
            found.append(_entry(problem, group, facts[group.runs[0].folder], in_paper or {}))
    return found


def shown(run: RunRecord) -> bool:
    """Whether a run has what a row needs: it is finished and its accuracy was measured."""
    return run.finished and run.results.aa is not None


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


def _entry(problem: Problem, group: RunGroup, facts: MethodFacts, in_paper: Mapping[Path, InPaper]) -> BoardRow:
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
        leaves=facts.leaves,
        near_copies=mean(lambda run: run.near_copies),
        epsilon=runs[0].epsilon if runs[0].privacy.private else None,
        reference=group.style.reference,
        reading=place.reading,
        paper_aa=place.aa,
        verified=facts.verified,
        folders=tuple(run.folder for run in runs),
        num_recorded=sum(bool(run.task_rows) for run in runs),
        repeats=tuple((run.folder, _counted(run, runs)) for run in group.repeats),
    )


def _counted(run: RunRecord, runs: Sequence[RunRecord]) -> Path:
    """The folder that counts for the seed of a run that does not."""
    return next(other.folder for other in runs if other.seed == run.seed)


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
    script = (files("rescene.report") / "leaderboard.js").read_text("utf-8")
    names = ("data", "split", "setting", "leaves", "guarantee", "reading")
    told = [_shown(row, root) for row in rows]
    return render_page(
        "leaderboard.html.j2",
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(f"\n{script}".encode()).digest()).decode(),
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
