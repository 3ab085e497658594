"""Stored results against the paper's bands, and its claims against them, as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from rescene.paper.claims import Verdict
from rescene.paper.compare import DIFFERS, Finding
from rescene.paper.paper_tables import folders
from rescene.paper.table_columns import label
from rescene.report.table_formats import Entry, TableCell, TableGrid

FAILED = ("open", "not supported")
KINDS = {"accuracy": "accuracy", "measured cost": "measured costs", "formula": "formulas (no run)"}


def failed(judged: Iterable[Finding | Verdict]) -> bool:
    """Whether one of these verdicts is a failure."""
    return any(one.verdict in FAILED for one in judged)


def band_grid(found: Sequence[Finding], everything: bool = False) -> TableGrid:
    """One row per figure of ours that lies outside the band the paper leaves; ``everything``: also those inside."""
    notes = [_counted(kind, found) for kind in KINDS if any(finding.kind == kind for finding in found)]
    if not found:
        notes = [
            "nothing stored of these tables has a band (AA, AIA, bytes and FLOPs have); rescene paper table NAME shows them"
        ]
    if any(finding.verdict == DIFFERS for finding in found):
        notes.append("measured costs follow our ledger and not the paper's formulas: docs/cost.md; --all lists them")
    rows = [_row(finding) for finding in found if everything or finding.verdict not in ("in band", DIFFERS)]
    columns = ("table", "cell", "metric", "ours", "paper", "allowed", "verdict", "why", "where")
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
    rows: list[tuple[Entry, ...]] = []
    for kind, title in KINDS.items():
        own = Counter(finding.verdict for finding in found if finding.kind == kind)
        if own:
            rows.append((title, str(sum(own.values())), *(str(own[verdict]) for verdict in columns)))
    return TableGrid("", ("figures of the paper", "compared", *columns), tuple(rows))


def claims_grid(verdicts: Iterable[Verdict], stand_ins: Mapping[str, str]) -> TableGrid:
    """Every claim with its verdict; ``stand_ins``: cells that were run in another form only, and in which."""
    rows: list[tuple[Entry, ...]] = [
        (v.says, v.place, "–" if v.figure is None else f"{v.figure:.2f}", f"{v.known}/{v.needed}", v.verdict, v.why)
        for v in verdicts
    ]
    told = ", ".join(f"{where} ({form})" for where, form in sorted(stand_ins.items()))
    notes = (f"judged on the reading that treats kept pictures as the paper's method does: {told}",) if told else ()
    return TableGrid("", ("claim", "in the paper", "ours", "figures measured", "verdict", "why"), tuple(rows), notes)


def _row(finding: Finding) -> tuple[Entry, ...]:
    line, metric, ours = finding.line, finding.metric, finding.ours
    paper, (low, high) = line.paper[metric], finding.allowed
    name = line.cell.name + (f" {line.variant}" if line.variant else "")
    return (
        finding.table,
        name,
        label(metric) + (" measured" if finding.kind == "measured cost" else ""),
        TableCell(ours.mean, ours.std, ours.num, digits=paper.digits),
        TableCell(paper.mean, paper.std, digits=paper.digits),
        f"{low:.2f} to {high:.2f}",
        finding.verdict,
        finding.why,
        "formula" if finding.kind == "formula" else folders(line),
    )
