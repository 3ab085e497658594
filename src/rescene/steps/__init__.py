"""Procedures that move a model or pixels for many iterations; shared by the methods, ignorant of who calls them."""

from rescene.steps.condense import condense
from rescene.steps.embed import class_scores, embed
from rescene.steps.groups import Condensation, Surrogates
from rescene.steps.passes import frozen
from rescene.steps.replay import with_replay
from rescene.steps.sgd import Batch, Loss, Training, cross_entropy, fit, fit_pool, fit_shard, repeatable

__all__ = [
    "Batch",
    "Condensation",
    "Loss",
    "Surrogates",
    "Training",
    "class_scores",
    "condense",
    "cross_entropy",
    "embed",
    "fit",
    "fit_pool",
    "fit_shard",
    "frozen",
    "repeatable",
    "with_replay",
]
