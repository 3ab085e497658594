"""The mathematics: tensors in, tensors out, the paper's symbols, nothing of the framework."""

from rescene.functional.balance import logit_adjusted_cross_entropy, sampling_probabilities
from rescene.functional.herding import herd, herd_classes, recent_window
from rescene.functional.matching import clip_groups, group_means, matching_loss, perturbed
from rescene.functional.metrics import (
    average_accuracy,
    average_incremental_accuracy,
    backward_transfer,
    balanced_accuracy,
    forgetting,
    old_and_recent,
)
from rescene.functional.model_average import weighted_average

__all__ = [
    "average_accuracy",
    "average_incremental_accuracy",
    "backward_transfer",
    "balanced_accuracy",
    "clip_groups",
    "forgetting",
    "group_means",
    "herd",
    "herd_classes",
    "logit_adjusted_cross_entropy",
    "matching_loss",
    "old_and_recent",
    "perturbed",
    "recent_window",
    "sampling_probabilities",
    "weighted_average",
]
