"""What every method shares whose sites train the model and whose server averages: the weights of the average."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal

from rescene.functional import weighted_average
from rescene.hyperparameters import hyper
from rescene.methods.base import Federation, Method, Uploads
from rescene.rng import Rng


class AveragingMethod(Method):
    """Not a method of its own: theta <- sum_k (n_k / sum n) theta_k over the sites that sent one.

    An upload holds ``num_images`` and, where that is positive, ``model``.
    """

    leaves_site: ClassVar[str] = "model weights and the number of local images"

    weighting: Literal["size", "uniform"] = hyper("size", "n_k", "[ours]", "weight of a client: its images, or equal")

    def server_round(self, state: Any, uploads: Uploads, round: int, federation: Federation, rng: Rng) -> Any:
        senders = [upload for upload in uploads.values() if upload["num_images"] > 0]
        if not senders:
            return state
        weights = [upload["num_images"] if self.weighting == "size" else 1 for upload in senders]
        return replace(state, model=weighted_average([upload["model"] for upload in senders], weights))
