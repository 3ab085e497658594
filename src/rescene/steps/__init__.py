"""Procedures that move a model or pixels for many iterations; shared by the methods, ignorant of who calls them."""

from rescene.steps.condense import Condensation, Surrogates, condense
from rescene.steps.embed import class_scores, embed
from rescene.steps.sgd import Training, fit, fit_pool, fit_shard

__all__ = [
    "Condensation",
    "Surrogates",
    "Training",
    "class_scores",
    "condense",
    "embed",
    "fit",
    "fit_pool",
    "fit_shard",
]
