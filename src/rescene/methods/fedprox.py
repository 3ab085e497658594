"""FedProx (Li et al., MLSys 2020): a site that trains for long stays near the model it was sent. Nothing protects old tasks.

server: broadcast w^t
client: E epochs of SGD on its images, cross-entropy over all seen classes + mu/2 ||w - w^t||^2; send w_k and n_k
server: w^{t+1} <- sum_k (n_k / sum n) w_k

With mu = 0 it is FedAvg, to the bit.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from rescene.core.hyperparameters import hyper
from rescene.core.method_style import GREY
from rescene.core.record import Tree
from rescene.core.rng import Rng
from rescene.core.verification import Verified
from rescene.functional.model_average import proximal_term
from rescene.methods.averaging import AveragingMethod, first_learned, trained
from rescene.methods.base import Client, Payload
from rescene.methods.registry import register


@register
class FedProx(AveragingMethod):
    """FedAvg with a spring, in local training, between the site's weights and those that the server sent."""

    name: ClassVar[str] = "fedprox"
    title: ClassVar[str] = "FedProx"
    colour: ClassVar[str] = GREY
    marker: ClassVar[str] = "<"
    open_ended: ClassVar[bool] = True
    own_orders: ClassVar[bool] = True
    late_verbs: ClassVar[tuple[str, ...]] = ("client_round",)
    paper: ClassVar[str] = "Li et al., MLSys 2020"
    verified: ClassVar[tuple[Verified, ...]] = (
        Verified(
            "hand computation", "tests/methods/test_fedprox.py::test_two_steps_equal_the_formula", "1e-6, two steps"
        ),
    )
    mechanisms: ClassVar[tuple[str, ...]] = ("none", "dp-sgd")

    mu: float = hyper(0.01, "mu", "[ours]", "weight of the proximal term; the paper tunes it from 0.001 to 1", ge=0)
    local_ce: Literal["all", "new"] = hyper(
        "all", "-", "[ours]", "cross-entropy over all seen classes, or this task's only"
    )

    def client_round(self, payload: Payload, shard: Client, client_state: Tree, rng: Rng) -> tuple[Payload, Tree]:
        net = shard.net(payload["model"])
        w = dict(net.named_parameters())  # of the network being trained: the term must move it

        def spring() -> Tensor:
            return proximal_term(w, payload["model"], self.mu)

        first = first_learned(shard.task, self.local_ce)
        generator = rng.at("sgd").generator(shard.device)
        penalty = spring if self.mu > 0 else None  # without it the step is FedAvg's, on a GPU too
        return trained(net, shard, self.train, generator, first_class=first, penalty=penalty), client_state
