"""Procedures that move a model or pixels for many iterations; shared by the methods, ignorant of who calls them."""

from rescene.accel.fused_net import frozen
from rescene.data import Batch
from rescene.training.condensation import Condensation, Surrogates, condense
from rescene.training.embed import class_scores, embed
from rescene.training.replay import with_replay
from rescene.training.sgd import Loss, Training, cross_entropy, fit, fit_pool, fit_shard, repeatable

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
