"""Reproduction status: every table of the paper with what was run so far, made from ``results/``."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

RESULTS = Path(__file__).parents[2] / "results"
INTRODUCTION = """# Reproduction status

Made from `results/` when this site was built. How a table is run and compared: [](../paper.md); where we depart from the paper:
[](../deviations.md); what each stored run is: [](../results.md).
"""


def page() -> str:
    from rescene.paper.compare import compare
    from rescene.paper.pages import judged_claims
    from rescene.paper.paper_tables import results_grid, status_grid, table_grid
    from rescene.paper.recipes import paper_recipe, recipe_names
    from rescene.paper.store import Store
    from rescene.report.tables import render

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a split that no draw makes even, told by the runs themselves
        store = Store([RESULTS])
        lines = [INTRODUCTION]
        for title, grid in (
            ("Results so far", results_grid),
            ("Tables of the paper", status_grid),
            ("Claims", judged_claims),
        ):
            lines += [f"## {title}", "", render(grid(store), "markdown")]
        for recipe in map(paper_recipe, recipe_names(lite=False)):
            done = sorted({line.cell.name for line in compare(recipe, store, costs=False) if line.runs})
            if done:
                grid = table_grid(recipe, store, done, commands=False)
                lines += [f"## {recipe.title}", "", render(replace(grid, notes=()), "markdown")]
    return "\n".join(lines)
