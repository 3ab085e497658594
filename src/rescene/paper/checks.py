"""Stored results against the paper's bands, and its claims against them, as tables."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from rescene.paper.claims import Verdict
from rescene.paper.compare import Finding
from rescene.paper.metrics import label
from rescene.report.formats import Cell, Entry, Grid

FAILED = ("out of band", "not supported")


def failed(judged: Iterable[Finding | Verdict]) -> bool:
    return any(one.verdict in FAILED for one in judged)


def band_grid(found: Sequence[Finding], everything: bool = False) -> Grid:
    """One row per figure of ours that lies outside the band the paper leaves; ``everything``: also those inside."""
    counts = Counter(finding.verdict for finding in found)
    notes = [
        f"{len(found)} figures have a band: " + ", ".join(f"{n} {verdict}" for verdict, n in sorted(counts.items()))
    ]
    if not found:
        notes = [
            "nothing stored of these tables has a band (AA, AIA, bytes and FLOPs have); rescene paper table NAME shows them"
        ]
    if any(finding.line.other_epochs for finding in found):
        notes.append("E_srv=10 is compared with E_srv=100: the paper prints it for CIFAR-10 at beta 0.1 only")
    rows = [_row(finding) for finding in found if everything or finding.verdict != "in band"]
    columns = ("table", "cell", "metric", "ours", "paper", "allowed", "verdict", "why")
    return Grid("", columns, tuple(rows), tuple(notes))


def claims_grid(verdicts: Iterable[Verdict], stand_ins: Mapping[str, str]) -> Grid:
    """Every claim with its verdict; ``stand_ins``: cells that were run in another form only, and in which."""
    rows: list[tuple[Entry, ...]] = [
        (v.says, v.place, "–" if v.figure is None else f"{v.figure:.2f}", f"{v.known}/{v.needed}", v.verdict, v.why)
        for v in verdicts
    ]
    told = ", ".join(f"{where} ({form})" for where, form in sorted(stand_ins.items()))
    notes = (f"another form where the cell itself was not run: {told}",) if told else ()
    return Grid("", ("claim", "in the paper", "ours", "figures measured", "verdict", "why"), tuple(rows), notes)


def _row(finding: Finding) -> tuple[Entry, ...]:
    line, metric = finding.line, finding.metric
    ours, paper = line.ours[metric], line.paper[metric]
    low, high = finding.allowed
    allowed = f"at least {low:.2f}" if math.isinf(high) else f"{low:.2f} to {high:.2f}"
    name = line.cell.name + (f" {line.variant}" if line.variant else "")
    return (
        finding.table,
        name,
        label(metric),
        Cell(ours.mean, ours.std, ours.num, digits=paper.digits),
        Cell(paper.mean, paper.std, digits=paper.digits),
        allowed,
        finding.verdict,
        finding.why,
    )
