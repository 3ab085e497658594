"""Stored results against the paper's bands, as a table."""

from __future__ import annotations

import math
from collections.abc import Iterable

from rescene.paper.compare import Finding, findings
from rescene.paper.metrics import label
from rescene.paper.recipes import PaperRecipe
from rescene.paper.store import Store
from rescene.report.formats import Cell, Entry, Grid


def band_grid(recipes: Iterable[PaperRecipe], store: Store) -> Grid:
    """One row per stored figure that the paper leaves a band for."""
    rows = [_row(finding) for recipe in recipes for finding in findings(recipe, store)]
    columns = ("table", "cell", "metric", "ours", "paper", "allowed", "verdict", "why")
    notes = [] if rows else ["no stored result belongs to these tables; rescene paper list says how to make one"]
    if any(row[-1] and "E_srv=100" in str(row[-1]) for row in rows):
        notes.append("compared with E_srv=100: the paper prints E_srv=10 for CIFAR-10 at beta 0.1 only")
    return Grid("", columns, tuple(rows), tuple(notes))


def _row(finding: Finding) -> tuple[Entry, ...]:
    line, metric = finding.line, finding.metric
    ours, paper = line.ours[metric], line.paper[metric]
    low, high = finding.allowed
    allowed = f"at least {low:.2f}" if math.isinf(high) else f"{low:.2f} to {high:.2f}"
    name = line.cell.name + (f" {line.variant}" if line.variant else "")
    why = finding.why or ("compared with E_srv=100" if line.other_epochs else "")
    return (
        finding.table,
        name,
        label(metric),
        Cell(ours.mean, ours.std, ours.num, digits=paper.digits),
        Cell(paper.mean, paper.std, digits=paper.digits),
        allowed,
        finding.verdict,
        why,
    )
