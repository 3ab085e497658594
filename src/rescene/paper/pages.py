"""Tables inside documents, kept up to date by a command: whatever stands between two marks is replaced.

<!-- rescene paper: results --> ... <!-- end --> and the same with any other name of BLOCKS

Among the tables: stored results against the paper's bands, its claims against them, readings of the paper beside its rows, task by
task, and what is still to be run.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from statistics import fmean

from rescene.core.errors import ConfigError
from rescene.core.method_style import style_of
from rescene.paper.claims import OurBook, Verdict, judge
from rescene.paper.compare import DIFFERS, KEEPERS, Finding, Line, compare, findings, our_lines
from rescene.paper.missing_runs import Missing, missing_cells, predictor
from rescene.paper.numbers import printed
from rescene.paper.paper_tables import DATA, OURS, copies, folders, results_grid, status_grid, table_grid
from rescene.paper.recipes import paper_recipe, readings, recipe_names
from rescene.paper.store import Store, aia_of_last_rounds, label, last_rounds, last_tasks, over_seeds
from rescene.report.figures_theory import nearer_level_further
from rescene.report.groups import Spread, spread
from rescene.report.tables import TableCell, TableEntry, TableGrid, render

KINDS = {"accuracy": "accuracy", "measured cost": "measured costs", "formula": "formulas (no run)"}


def band_grid(found: Sequence[Finding], everything: bool = False) -> TableGrid:
    """One row per figure of ours that lies outside the band the paper leaves; ``everything``: also those inside."""
    notes = [_counted(kind, found) for kind in KINDS if any(finding.kind == kind for finding in found)]
    if not found:
        notes = [
            "no stored run of these tables has a figure with a band (AA, AIA, bytes and FLOPs have one). Runs are looked for in "
            "results/ and runs/ of this folder, or where --runs points; rescene paper table NAME shows what there is"
        ]
    if any(finding.verdict == DIFFERS for finding in found):
        notes.append("measured costs follow our ledger and not the paper's formulas: docs/cost.md; --all lists them")
    rows = [_row(finding) for finding in found if everything or finding.verdict not in ("in band", DIFFERS)]
    columns = ("table", "cell", "metric", "n", "ours", "paper", "allowed", "verdict", "why", "where")
    return TableGrid("", columns, tuple(rows), tuple(notes))


def _counted(kind: str, found: Sequence[Finding]) -> str:
    """Verdicts on the figures of one kind: kinds are never added up."""
    own = Counter(finding.verdict for finding in found if finding.kind == kind)
    told = ", ".join(f"{n} {verdict}" for verdict, n in sorted(own.items()))
    return f"{KINDS[kind]}: {told} of {sum(own.values())}"


def verdicts_grid(found: Sequence[Finding]) -> TableGrid:
    """How many figures of the paper that a stored run stands beside got each verdict, kind by kind."""
    verdicts = sorted({finding.verdict for finding in found} - {"in band", "open"})
    columns = ["in band", *verdicts, "open"]
    rows: list[tuple[TableEntry, ...]] = []
    for kind, title in KINDS.items():
        own = Counter(finding.verdict for finding in found if finding.kind == kind)
        if own:
            rows.append((title, str(sum(own.values())), *(str(own[verdict]) for verdict in columns)))
    return TableGrid("", ("figures of the paper", "compared", *columns), tuple(rows))


def claims_grid(verdicts: Sequence[Verdict]) -> TableGrid:
    """Every claim with its verdict, and how many got each; n is the number of seeds of the figure with the fewest."""
    rows: list[tuple[TableEntry, ...]] = [
        (
            v.says,
            v.place,
            "–" if v.figure is None else f"{v.figure:.2f}",
            "" if v.num is None else str(v.num),
            f"{v.known}/{v.needed}",
            v.verdict,
            v.why,
        )
        for v in verdicts
    ]
    notes = []
    for kind, title in KINDS.items():
        counted = Counter(v.verdict for v in verdicts if v.kind == kind)
        told = ", ".join(f"{n} {verdict}" for verdict, n in sorted(counted.items()))
        if told:
            notes.append(f"claims about {title}: {told} of {counted.total()}")
    columns = ("claim", "in the paper", "ours", "n", "figures measured", "verdict", "why")
    return TableGrid("", columns, tuple(rows), tuple(notes))


def _row(finding: Finding) -> tuple[TableEntry, ...]:
    line, metric, ours = finding.line, finding.metric, finding.ours
    paper, (low, high) = line.paper[metric], finding.allowed
    return (
        finding.table,
        line.name,
        label(metric) + (" measured" if finding.kind == "measured cost" else ""),
        "" if finding.kind == "formula" else str(ours.num),
        TableCell(ours.mean, ours.std, ours.num, digits=paper.digits),
        TableCell(paper.mean, paper.std, digits=paper.digits),
        f"{low:.2f} to {high:.2f}",
        finding.verdict,
        finding.why,
        "formula" if finding.kind == "formula" else folders(line),
    )


TABLES = ("main", "safl", "server-epochs", "office31")
CARD = "NVIDIA H200"  # the stored runs on a GPU were made on it
TAKEN = "taken"
KEPT_TOO = "kept images augmented too"
SHOWN = ("cifar10", "0.5")  # data and beta of our own rows in the short table


def lines_with_runs(store: Store) -> Iterator[Line]:
    """Every row of methods or server epochs that was run, in any reading, once."""
    seen = set()
    for name in TABLES:
        for line in compare(paper_recipe(name), store, costs=False):
            where = tuple(run.folder for run in line.runs)
            if where and where not in seen:
                seen.add(where)
                yield line


def readings_grid(store: Store) -> TableGrid:
    """Our rows, task by task, beside the paper's, then our own methods; ``distance``: root mean square over the tasks, in points.

    One round is a sample of sites. AA over the last ten rounds says how much it depends on them.
    """
    rows: list[tuple[TableEntry, ...]] = []
    lines = [*((line, "") for line in lines_with_runs(store)), *((line, OURS) for line in our_lines(store))]
    for line, mark in lines:
        ours, paper = _tasks(line), _printed_tasks(line)
        apart = _distance(ours, paper)
        rows.append(
            (
                *_row_name(line, mark),
                _per_task(ours),
                _per_task(paper) if paper else "–",
                "–" if apart is None else f"{apart:.1f}",
                _pair(line),
                _late(line),
                _papers_pair(line),
                copies(line),
                folders(line),
            )
        )
    columns = (
        "data, beta",
        "method",
        "E_srv",
        "reading",
        "n",
        "each task",
        "paper",
        "distance",
        "AA / AIA",
        "AA, last ten rounds",
        "paper AA / AIA",
        "near-copies",
        "where",
    )
    return TableGrid("", columns, tuple(rows))


# Ways to run a table, as overrides of its rows
AUGMENTED = {
    "all images": ("train.augment=true",),
    "new images only": ("train.augment=new",),
    "none": ("train.augment=false",),
}
WEIGHTED = {"by images trained on": ("method.weighting=size",), "equally": ("method.weighting=uniform",)}
TESTED_AND_AUGMENTED = {
    "the last fifth, none": ("data.held_out=last", "train.augment=false"),
    "the same, no small last batches": ("data.held_out=last", "train.augment=false", "train.smallest_batch=16"),
    "the last fifth, new images": ("data.held_out=last", "train.augment=new"),
    "drawn at random, none": ("data.held_out=drawn", "train.augment=false"),
    "drawn at random, new images": ("data.held_out=drawn", "train.augment=new"),
}
# How far from the paper. One round is a sample of sites, and the last ten say more.
DISTANCE, LATE, LATE_AIA = "tasks, distance", "AA of the last ten rounds", "AIA of the last ten rounds"
COMPARED = tuple(f"main:cifar10/0.5/{method}" for method in ("fedavg", *KEEPERS))
OFFICE31 = ("fedavg", "fedewc", "fedlwf", "target", "fedcbdr", "refed")  # run with two kinds of test images


def augmentation_grid(store: Store) -> TableGrid:
    """Which pictures sites crop and mirror: how far the methods lie from the paper."""
    return _apart_grid(store, "augmented", AUGMENTED)


def weights_grid(store: Store) -> TableGrid:
    """How sites are weighted in the average: how far the methods lie from the paper, with the augmentation that is taken."""
    return _apart_grid(store, "weighted", WEIGHTED)


def office31_grid(store: Store) -> TableGrid:
    """Which images of Office-31 are the test, and which pictures sites crop and mirror: how far the methods lie from the paper."""
    cells = [f"office31:office31/1.0/{method}" for method in OFFICE31]
    return _apart_grid(store, "test images, augmented", TESTED_AND_AUGMENTED, cells, (DISTANCE, "AA", "AIA", LATE_AIA))


def _apart_grid(
    store: Store,
    what: str,
    treatments: Mapping[str, tuple[str, ...]],
    cells: Sequence[str] = COMPARED,
    measures: Sequence[str] = (DISTANCE, LATE, "AIA", LATE_AIA),
) -> TableGrid:
    """For each measure and treatment how far seed 0 of each method lies from the paper; over all the root mean square.

    A dash is what no stored run tells; a treatment without runs has dashes alone.
    """
    methods = [cell.rpartition("/")[2] for cell in cells]
    found = {name: [_apart(store, cell, settings) for cell in cells] for name, settings in treatments.items()}
    rows: list[tuple[TableEntry, ...]] = []
    for measure in measures:
        form = "{:.1f}" if measure == DISTANCE else "{:+.1f}"
        for name, runs in found.items():
            values = [run.get(measure) for run in runs]
            known = [value for value in values if value is not None]
            total = f"{_rms(known):.1f}" if len(known) == len(values) else "–"
            rows.append((measure, name, *("–" if v is None else form.format(v) for v in values), total))
    names = (style_of(method).label for method in methods)
    return TableGrid("", ("from the paper", what, *names, "all"), tuple(rows))


def _apart(store: Store, cell: str, settings: tuple[str, ...]) -> dict[str, float]:
    """What is known of how far seed 0 with these settings lies from the paper: a distance, and differences."""
    table, _, name = cell.partition(":")
    line = compare(paper_recipe(table), store, [name], costs=False)[0]
    if line.cell.method not in KEEPERS:  # all its images are new
        settings = tuple("train.augment=true" if word == "train.augment=new" else word for word in settings)
    form = replace(line.cell, overrides=(*line.cell.overrides, *settings))
    line = replace(line, cell=form, runs=store.find(form.experiment, [0]))
    distance = _distance(_tasks(line), _printed_tasks(line))
    if distance is None:
        return {}
    aa, aia = line.paper["aa"].mean, line.paper["aia"].mean
    ours = {
        "AA": (over_seeds(line.runs, "aa"), aa),
        LATE: (_over_last_rounds(line), aa),
        "AIA": (over_seeds(line.runs, "aia"), aia),
        LATE_AIA: (spread(aia_of_last_rounds(run) for run in line.runs), aia),
    }
    return {DISTANCE: distance} | {name: value.mean - paper for name, (value, paper) in ours.items() if value}


def theory_grid(store: Store) -> TableGrid:
    """What the runs of each row recorded about the theory of the buffer, counted over their classes."""
    rows: list[tuple[TableEntry, ...]] = []
    for line in lines_with_runs(store):
        classes = [row for run in line.runs for row in run.results.theory.classes]
        if not classes:
            continue
        counts = (
            len(classes),
            sum(row.num_kept == row.num_pool for row in classes),
            sum(row.coverage_fails_at is not None for row in classes),
            sum(row.removed_bias > row.theorem_needs for row in classes),
            *nearer_level_further(classes),
        )
        rows.append((*_row_name(line), *map(str, counts)))
    columns = (
        *("data, beta", "method", "E_srv", "reading", "runs", "classes", "whole pool kept"),
        *("Assumption 1 fails", "Theorem 1's condition met", "nearer", "as near", "further"),
    )
    return TableGrid("", columns, tuple(rows))


def _row_name(line: Line, mark: str = "") -> tuple[str, ...]:
    return (
        f"{DATA.get(line.cell.data, line.cell.data)}, {line.cell.beta}",
        style_of(line.cell.method).label + mark,
        str(line.cell.resolve().recipe.train.server_epochs) if _server_trains(line) else "",
        line.reading or (line.cell.setting if mark else TAKEN),
        str(len(line.runs)),
    )


def open_grid(store: Store) -> TableGrid:
    """What the queue would run, group by group, with minutes on a card of which timings are stored."""
    predict = predictor(store, CARD)
    rows: list[tuple[TableEntry, ...]] = []
    for group, members in groupby(missing_cells(store), key=lambda one: one.group):
        for name, runs in groupby(members, key=lambda one: one.name):
            own = list(runs)
            known = [value for value in map(predict, own) if value is not None]
            unknown = f", {len(own) - len(known)} not known" if len(known) < len(own) else ""
            whole = f"{sum(known):.0f}" if sum(known) >= 1 else "less than 1"
            minutes = f"{whole}{unknown}" if known else "not known"
            rows.append((group, name, str(len(own)), minutes, _command(own[0])))
    columns = ("group", "cell", "runs", f"minutes, alone on one {CARD}", "command (first seed)")
    return TableGrid("", columns, tuple(rows))


def summary_grid(store: Store) -> TableGrid:
    """README's table of CIFAR-10: the paper's methods where it prints a figure to hold them against, then ours, with n and spread."""
    rows = [_summed(line, "") for line in lines_with_runs(store) if _is_summed(line)]
    rows += [_summed(line, OURS) for line in our_lines(store) if (line.cell.data, line.cell.beta) == SHOWN]
    columns = ("method", "beta", "reading", "n", "AA / AIA", "paper AA / AIA", "near-copies among uploads", "where")
    return TableGrid("", columns, tuple(rows))


def _is_summed(line: Line) -> bool:
    """The reading taken, and where sites keep images the other choices of what is augmented, and the code of a method's authors;
    one row for each E_srv printed."""
    told = line.reading in ("", "server augmentation, n // 2 surrogates")
    if KEPT_TOO in readings(line.cell.method):
        told = told or line.reading in (KEPT_TOO, "no augmentation", "as in its authors' code")
    other = line.other_epochs or line.cell.setting or style_of(line.cell.method).reference
    return told and line.cell.data == SHOWN[0] and not other


def _summed(line: Line, mark: str) -> tuple[TableEntry, ...]:
    epochs = line.cell.resolve().recipe.train.server_epochs if _server_trains(line) else ""
    reading = ", ".join(filter(None, (f"E_srv={epochs}" if epochs else "", line.reading or line.cell.setting or TAKEN)))
    name, figures = style_of(line.cell.method).label, (_pair(line), _papers_pair(line), copies(line), folders(line))
    return (f"{name}{mark}", line.cell.beta, reading, str(len(line.runs)), *figures)


def _server_trains(line: Line) -> bool:
    return style_of(line.cell.method).server_trains


def _tasks(line: Line) -> list[float]:
    found = (over_seeds(line.runs, f"task_{t}") for t in range(100))
    return [value.mean for value in iter(lambda: next(found), None)]


def _printed_tasks(line: Line) -> list[float]:
    """The row of Table 7 or 6, which is of E_srv=100; none for other epochs and for what is not the paper's method."""
    if _server_trains(line) and line.cell.resolve().recipe.train.server_epochs != 100:
        return []
    name = replace(line.cell, setting="").name
    rows = (*printed("per-task"), *printed("office31"))
    return [n.mean for n in rows if n.cell == name and n.metric.startswith("task_")]


def _distance(ours: list[float], paper: list[float]) -> float | None:
    """
    >>> _distance([3.0, 4.0], [0.0, 0.0]), _distance([3.0], [])
    (3.5355339059327378, None)
    """
    if not paper or len(ours) != len(paper):
        return None
    return _rms([a - b for a, b in zip(ours, paper, strict=True)])


def _rms(values: Sequence[float]) -> float:
    """
    >>> _rms([3.0, -3.0])
    3.0
    """
    return math.sqrt(sum(value**2 for value in values) / len(values))


def _per_task(tasks: list[float]) -> str:
    return " ".join(f"{value:.0f}" for value in tasks)


def _pair(line: Line) -> str:
    figures = [over_seeds(line.runs, metric) for metric in ("aa", "aia")]
    return " / ".join(f"{f.mean:.2f}" + (f" ± {f.std:.2f}" if f.std is not None else "") for f in figures if f)


def _over_last_rounds(line: Line) -> Spread | None:
    """AA over the last ten rounds of all runs."""
    return spread(aa for run in line.runs for aa in last_rounds(run))


def _late(line: Line) -> str:
    found = _over_last_rounds(line)
    rounds = [row for run in line.runs for row in last_tasks(run)]
    tasks = f" ({_per_task([fmean(column) for column in zip(*rounds, strict=True)])})" if rounds else ""
    return "–" if found is None else f"{found.mean:.1f} ± {found.std or 0.0:.1f}{tasks}"


def _papers_pair(line: Line) -> str:
    if "aa" in line.paper and not line.other_epochs:
        return " / ".join(line.paper[metric].text for metric in ("aa", "aia") if metric in line.paper)
    row = _printed_tasks(line)
    return f"{sum(row) / len(row):.2f} (mean of the tasks in Table 7) / –" if row and not line.fast else "–"


def _command(one: Missing) -> str:
    return " ".join(["rescene", *one.command])


_BLOCK = re.compile(r"(<!-- rescene paper: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def judged_claims(store: Store) -> TableGrid:
    """Every claim of the text with its verdict on our results."""
    return claims_grid(judge(OurBook(store)))


def _status_grid(store: Store) -> TableGrid:
    return replace(status_grid(store), notes=())


def judged_figures(store: Store) -> TableGrid:
    """What ``rescene paper check`` counts, over all tables."""
    return verdicts_grid(findings(recipe_names(lite=False), store))


def privacy_grid(store: Store) -> TableGrid:
    """The paper's sigma sweep in its lite form, of which results are stored."""
    return replace(table_grid(paper_recipe("privacy-lite"), store, commands=False), title="")


BLOCKS: dict[str, Callable[[Store], TableGrid]] = {
    "results": results_grid,
    "status": _status_grid,
    "claims": judged_claims,
    "privacy": privacy_grid,
    "readings": readings_grid,
    "augmentation": augmentation_grid,
    "weights": weights_grid,
    "office31": office31_grid,
    "theory": theory_grid,
    "open": open_grid,
    "summary": summary_grid,
    "check": judged_figures,
}


def refreshed(text: str, store: Store) -> str:
    """The document with every marked table made anew."""
    if not _BLOCK.search(text):
        raise ConfigError(
            "E152",
            "the document has no place for a table",
            why=f"a line <!-- rescene paper: NAME --> and a line <!-- end -->, NAME one of {', '.join(BLOCKS)}",
        )

    def fill(match: re.Match[str]) -> str:
        if match[2] not in BLOCKS:
            raise ConfigError("E152", f"unknown table {match[2]!r} in the document", why=f"known: {', '.join(BLOCKS)}")
        return match[1] + render(BLOCKS[match[2]](store), "markdown") + match[3]

    return _BLOCK.sub(fill, text)
