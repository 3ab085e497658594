"""Procedures that move a model or pixels for many iterations; shared by the methods, ignorant of who calls them."""

from rescene.accel.fused_net import frozen
from rescene.data import Batch
from rescene.training.condensation import Condensation, Surrogates, condense
from rescene.training.embed import class_scores, embed
from rescene.training.sgd import (
    AdamSteps,
    Loss,
    Penalty,
    Training,
    cross_entropy,
    cross_entropy_from,
    fit,
    fit_pool,
    fit_shard,
    num_local_steps,
    penalised,
    repeatable,
    with_replay,
)

__all__ = [
    "AdamSteps",
    "Batch",
    "Condensation",
    "Loss",
    "Penalty",
    "Surrogates",
    "Training",
    "class_scores",
    "condense",
    "cross_entropy",
    "cross_entropy_from",
    "embed",
    "fit",
    "fit_pool",
    "fit_shard",
    "frozen",
    "num_local_steps",
    "penalised",
    "repeatable",
    "with_replay",
]
