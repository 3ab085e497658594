"""The paper's tables and figures: its numbers, how to run each cell, and our results beside them.

numbers/*.csv   what the paper prints, one file per table
recipes.yaml    how each table is run here        claims.yaml    what the text says of its tables
explained.csv   what we know of differences
"""

from rescene.paper.numbers import Printed, printed, table_names
from rescene.paper.recipes import PaperCell, PaperRecipe, paper_recipe, recipe_names
from rescene.paper.store import Store

__all__ = [
    "PaperCell",
    "PaperRecipe",
    "Printed",
    "Store",
    "paper_recipe",
    "printed",
    "recipe_names",
    "table_names",
]
