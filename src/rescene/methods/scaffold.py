"""SCAFFOLD (Karimireddy et al., ICML 2020): control variates take the drift out of local steps. Nothing protects old tasks.

server: broadcast x and c
client: y_i <- x; K steps y_i <- y_i - eta_l (g_i(y_i) - c_i + c), cross-entropy over all seen classes
        c_i+ <- c_i - c + (x - y_i) / (K eta_l)                     option II
        send y_i and c_i+ - c_i; c_i <- c_i+
server: x <- x + eta_g mean_S (y_i - x);   c <- c + |S|/N mean_S (c_i+ - c_i)

c_i is the site's idea of its own gradient and c that of everybody's, the mean over all N sites; both begin at 0. Then the first
round is FedAvg's, with the plain mean. Here steps have momentum, tasks change and the head grows:

momentum    K counts as the plain steps that the K steps are worth for a constant gradient (``effective_steps``)
new task    the gradients are those of other images: c and every c_i begin at 0 again (``new_task=keep``: they stay)
new class   its rows of the head begin at 0 in c and c_i
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from rescene.core.hyperparameters import hyper
from rescene.core.method_style import VERMILLION
from rescene.core.record import Tree, record
from rescene.core.rng import Rng
from rescene.core.verification import Verified
from rescene.data import Task
from rescene.functional import weighted_average
from rescene.functional.model_average import control_variate, effective_steps, grown_rows, linear_term
from rescene.methods.averaging import AveragingMethod, first_learned, trained
from rescene.methods.base import Client, Federation, Model, Payload, Uploads, weights_of
from rescene.methods.nominal_cost import NominalBytes, Setting
from rescene.methods.registry import register
from rescene.methods.upload_schema import Form, Place, either, fields, like, notes, whole
from rescene.nets import FLOAT_BYTES, Arch, num_parameters
from rescene.training import num_local_steps


@record
class ScaffoldState:
    """The server's memory."""

    model: Model  # x
    control: Model  # c, over trainable parameters by name
    notes: dict[str, float]


@record
class ControlVariate:
    """A site's memory."""

    own: Model  # c_i, over trainable parameters by name
    task: int  # number of the task in which it was measured


@register
class Scaffold(AveragingMethod):
    """FedAvg whose local steps are corrected by the difference between everybody's mean gradient and the site's own."""

    name: ClassVar[str] = "scaffold"
    title: ClassVar[str] = "SCAFFOLD"
    colour: ClassVar[str] = VERMILLION
    marker: ClassVar[str] = ">"
    paper: ClassVar[str] = "Karimireddy et al., ICML 2020"
    verified: ClassVar[tuple[Verified, ...]] = (
        Verified(
            "hand computation", "tests/methods/test_scaffold.py::test_two_rounds_equal_algorithm_1", "2e-5, two rounds"
        ),
    )
    own_orders: ClassVar[bool] = True
    leaves_site: ClassVar[str] = "model weights, the change of the site's mean gradient, and the number of local images"
    leaves_in_short: ClassVar[str] = "weights, mean gradient"
    remembers: ClassVar[str] = "its mean gradient of the task (control variate)"
    mechanisms: ClassVar[tuple[str, ...]] = ("none", "dp-sgd")

    server_lr: float = hyper(
        1.0, "eta_g", "Sec. 7", "server learning rate; 1 takes the mean of the sites' weights", gt=0
    )
    momentum_steps: Literal["effective", "plain"] = hyper(
        "effective", "K", "[ours]", "K as plain steps that steps with momentum are worth, or their number"
    )
    new_task: Literal["reset", "keep"] = hyper(
        "reset", "c", "[ours]", "control variates at a new task: begin at 0 again, or stay"
    )
    local_ce: Literal["all", "new"] = hyper(
        "all", "-", "[ours]", "cross-entropy over all seen classes, or this task's only"
    )
    weighting: Literal["uniform", "size"] = hyper(
        "uniform", "n_k", "Alg. 1", "weight of a client: equal, or its images"
    )

    def init(self, net: nn.Module, rng: Rng) -> ScaffoldState:
        return ScaffoldState(model=weights_of(net), control=_zeros(net), notes={})

    def begin_task(self, state: ScaffoldState, task: Task, federation: Federation, rng: Rng) -> ScaffoldState:
        grown: ScaffoldState = super().begin_task(state, task, federation, rng)
        kept = state.control if self.new_task == "keep" else {}
        like_model = {name: grown.model[name] for name in state.control}
        return replace(grown, control=grown_rows(kept, like_model))

    def broadcast(self, state: ScaffoldState, round: int, federation: Federation, rng: Rng) -> Payload:
        return {"model": state.model, "control": state.control}

    def client_round(self, payload: Payload, shard: Client, client_state: Tree, rng: Rng) -> tuple[Payload, Tree]:
        net = shard.net(payload["model"])
        x, c, y = weights_of(net), payload["control"], dict(net.named_parameters())
        stays = client_state is not None and (self.new_task == "keep" or client_state.task == shard.task.index)
        own = grown_rows(client_state.own if stays else {}, c)
        slope = {name: c[name] - own[name] for name in c}  # of <c - c_i, y_i>, whose gradient it is

        def correction() -> Tensor:
            return linear_term(y, slope)

        first = first_learned(shard.task, self.local_ce)
        penalty = correction if any(bool(value.any()) for value in slope.values()) else None
        generator = rng.at("sgd").generator(shard.device)
        upload = trained(net, shard, self.train, generator, first_class=first, penalty=penalty)
        if upload["num_images"] == 0:
            return upload, client_state
        new = control_variate(x, upload["model"], own, c, self._reach(shard))
        upload["control_change"] = {name: new[name] - own[name] for name in new}
        return upload, ControlVariate(new, shard.task.index)

    def _reach(self, shard: Client) -> float:
        """K eta_l, by which a constant gradient of 1 would have moved the weights."""
        steps = num_local_steps(len(shard), self.train)
        if shard.hidden:
            steps = shard.hidden.mechanism.composition.steps  # public, whatever the site holds
        momentum = self.train.momentum if self.momentum_steps == "effective" else 0.0
        return self.train.lr * effective_steps(steps, momentum)

    def server_round(
        self, state: ScaffoldState, uploads: Uploads, round: int, federation: Federation, rng: Rng
    ) -> ScaffoldState:
        senders = [upload for upload in uploads.values() if upload["num_images"] > 0]
        if not senders:
            return state
        weights = self.shares(senders)
        mean = weighted_average([upload["model"] for upload in senders], weights)
        change = weighted_average([upload["control_change"] for upload in senders], weights)
        share = len(senders) / len(federation.clients)  # |S| / N
        control = {name: c + share * change[name] for name, c in state.control.items()}
        norm = sum(float(c.square().sum()) for c in control.values()) ** 0.5
        return ScaffoldState(model=self._stepped(state, mean), control=control, notes={"control_norm": norm})

    def _stepped(self, state: ScaffoldState, mean: Model) -> Model:
        """x + eta_g (mean - x) of what is trained; statistics of BatchNorm are averaged. At eta_g = 1 it is the mean itself."""
        if self.server_lr == 1:
            return mean
        return mean | {name: torch.lerp(state.model[name], mean[name], self.server_lr) for name in state.control}

    def expects(self, verb: str, payload: Payload, place: Place) -> Form:
        absent = fields({"num_images": whole(0, 0)}, {"notes": notes})
        sent = {"model": like(payload["model"]), "num_images": whole(1), "control_change": like(payload["control"])}
        return either(absent, fields(sent, {"notes": notes}))

    def nominal_bytes(self, arch: Arch, classes_per_task: int, num_classes: int) -> NominalBytes | None:
        """Weights and a control variate, each way; the site keeps c_i."""
        plain = super().nominal_bytes(arch, classes_per_task, num_classes)
        control = num_parameters(arch, num_classes) * FLOAT_BYTES
        return plain and NominalBytes(plain.up + control, plain.down + control, plain.state + control)

    def nominal_server_flops(self, setting: Setting, task: int) -> float:
        """Two averages."""
        return 2 * super().nominal_server_flops(setting, task)


def _zeros(net: nn.Module) -> Model:
    return {name: torch.zeros_like(value, requires_grad=False) for name, value in net.named_parameters()}
