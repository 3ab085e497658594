"""Tables inside documents, kept up to date by a command: whatever stands between two marks is replaced.

<!-- rescene paper: results --> ... <!-- end --> and the same with any other name of BLOCKS
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from rescene.core.errors import ConfigError
from rescene.paper.band_check import claims_grid, verdicts_grid
from rescene.paper.claims import OurBook, judge
from rescene.paper.compare import findings
from rescene.paper.paper_tables import results_grid, status_grid, table_grid
from rescene.paper.reading_tables import open_grid, readings_grid, summary_grid
from rescene.paper.recipes import paper_recipe, recipe_names
from rescene.paper.store import Store
from rescene.report.table_formats import TableGrid, render

_BLOCK = re.compile(r"(<!-- rescene paper: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def judged_claims(store: Store) -> TableGrid:
    """Every claim of the text with its verdict on our results."""
    book = OurBook(store)
    return claims_grid(judge(book), book.stand_ins)


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
