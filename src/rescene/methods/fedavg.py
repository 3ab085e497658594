"""FedAvg (McMahan et al., AISTATS 2017): local training, weighted averaging. Nothing protects old tasks.

server: broadcast theta
client: E epochs of SGD on its images, cross-entropy over all seen classes; send theta_k and n_k
server: theta <- sum_k (n_k / sum n) theta_k
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rescene.core.hyperparameters import hyper
from rescene.core.method_style import SLATE
from rescene.core.record import Tree
from rescene.core.rng import Rng
from rescene.core.verification import Verified
from rescene.methods.averaging import AveragingMethod, first_learned, trained
from rescene.methods.base import Client, Payload
from rescene.methods.registry import register


@register
class FedAvg(AveragingMethod):
    """Sites train on their own images, and the server averages the weights by number of images."""

    name: ClassVar[str] = "fedavg"
    title: ClassVar[str] = "FedAvg"
    colour: ClassVar[str] = SLATE
    marker: ClassVar[str] = "s"
    cost_unit: ClassVar[bool] = True
    open_ended: ClassVar[bool] = True
    own_orders: ClassVar[bool] = True
    late_verbs: ClassVar[tuple[str, ...]] = ("client_round",)
    paper: ClassVar[str] = "McMahan et al., AISTATS 2017"
    verified: ClassVar[tuple[Verified, ...]] = (
        Verified(
            "published code",
            "tests/oracles/test_oracles.py::test_glfc_average_is_ours_with_equal_weights",
            "1e-6, the average (GLFC's code)",
        ),
        Verified(
            "hand computation", "tests/methods/test_rounds_by_hand.py::test_a_round_of_fedavg", "a round, to rounding"
        ),
    )
    mechanisms: ClassVar[tuple[str, ...]] = ("none", "dp-sgd", "paper-experiment")

    local_ce: Literal["all", "new"] = hyper(
        "all", "-", "[ours]", "cross-entropy over all seen classes, or this task's only"
    )

    def client_round(self, payload: Payload, shard: Client, client_state: Tree, rng: Rng) -> tuple[Payload, Tree]:
        net = shard.net(payload["model"])
        first = first_learned(shard.task, self.local_ce)
        return trained(net, shard, self.train, rng.at("sgd").generator(shard.device), first_class=first), client_state
