"""FOT (Bakman et al., ICLR 2024): updates of new tasks stay orthogonal to what old tasks put into each layer.

each round:
    server: broadcast theta
    client: E epochs of SGD on its images, cross-entropy over this task's classes; send theta_k and n_k
    server: for each layer l: dW <- sum_k (n_k / sum n) W_k - W;   W <- W + dW (I - O_l O_l^T)
after a task (global principal subspace extraction, GPSE):
    server: send theta to every client
    client: for each layer l: send A_k = X_k Omega_k, X_k the layer's inputs as columns, Omega_k random and its own
    server: A <- sum_k A_k;   O_l <- O_l and the leading singular vectors of (I - O_l O_l^T) A that hold eps of ||A||^2

An input of an old task that lies in the span of O_l then gives the same output whatever is learned later. A convolution sees patches
as its inputs. What the projection does not cover is held from the second task on (``others``): biases, norms with their
statistics, and the rows of old classes in the head. With domains all classes are old, and the head is projected as a layer.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from rescene.core.hyperparameters import hyper
from rescene.core.method_style import PURPLE
from rescene.core.record import Tree, record
from rescene.core.rng import Rng
from rescene.core.verification import Verified
from rescene.data import Task
from rescene.functional.subspace import extended_subspace, orthogonal_update, sketch
from rescene.methods.averaging import AveragingMethod, trained
from rescene.methods.base import Client, Federation, Model, Payload, Uploads, weights_of
from rescene.methods.nominal_cost import Setting
from rescene.methods.registry import register
from rescene.methods.upload_schema import NOTHING, Form, Place, either, fields, tensor
from rescene.nets import alike
from rescene.training import Batch, Loss
from rescene.training.layer_inputs import input_grams, input_layers

BATCH = 64  # images whose patches are held at a time


@record
class FotState:
    """The server's memory."""

    model: Model
    subspace: Model  # O_l by the name of the layer's weight, float64 [d, k]
    notes: dict[str, float]


@register
class FOT(AveragingMethod):
    """FedAvg whose server takes out of every update what would change the answers to old inputs."""

    name: ClassVar[str] = "fot"
    title: ClassVar[str] = "FOT"
    colour: ClassVar[str] = PURPLE
    marker: ClassVar[str] = "P"
    paper: ClassVar[str] = "Bakman et al., ICLR 2024"
    verified: ClassVar[tuple[Verified, ...]] = (
        Verified(
            "hand computation",
            "tests/methods/test_fot.py::test_complete_sketches_give_the_svd_of_the_pooled_inputs",
            "1e-8, the subspace",
        ),
        Verified(
            "hand computation",
            "tests/methods/test_fot.py::test_the_update_is_the_projected_update_of_the_average",
            "1e-5, a round of the server",
        ),
    )
    leaves_site: ClassVar[str] = (
        "model weights and the number of local images; after each task random combinations of the inputs of every layer"
    )
    leaves_in_short: ClassVar[str] = "weights, input sketches"
    compute: ClassVar[tuple[str, str] | None] = ("O(R K E D_loc F + N D_loc F)", "O(R K P)")

    energy: float = hyper(
        0.9,
        "eps",
        "official code",
        "share of the inputs' energy that the subspace of a layer must hold",
        gt=0,
        le=1,
    )
    energy_step: float = hyper(0.001, "-", "official code", "added to the share after each task", ge=0, lt=1)
    sketch_columns: int | None = hyper(
        None, "m", "[ours]", "columns of a layer's sketch at most; null: as many as the layer has inputs", ge=1
    )
    others: Literal["held", "free"] = hyper(
        "held", "-", "[ours]", "what no projection covers from the second task on: biases, norms, rows of old classes"
    )
    local_ce: Literal["new", "all"] = hyper(
        "new", "-", "[ours]", "cross-entropy over this task's classes only, or over all seen classes"
    )

    def init(self, net: nn.Module, rng: Rng) -> FotState:
        return FotState(model=weights_of(net), subspace={}, notes={})

    def client_round(self, payload: Payload, shard: Client, client_state: Tree, rng: Rng) -> tuple[Payload, Tree]:
        net = shard.net(payload["model"])
        first = min(shard.task.classes) if self.local_ce == "new" else 0
        holds = self.others == "held" and shard.task.index > 0
        loss = _with_others_held(net, _covered(net, shard.task), first) if holds else None
        generator = rng.at("sgd").generator(shard.device)
        return trained(net, shard, self.train, generator, loss, first_class=first), client_state

    def server_round(self, state: FotState, uploads: Uploads, round: int, federation: Federation, rng: Rng) -> FotState:
        averaged: FotState = super().server_round(state, uploads, round, federation, rng)
        if averaged is state or federation.task.index == 0:
            return averaged
        model = self._held(state.model, averaged.model, federation) if self.others == "held" else dict(averaged.model)
        for name, basis in state.subspace.items():
            model[name] = state.model[name] + orthogonal_update(averaged.model[name] - state.model[name], basis)
        return replace(averaged, model=model)

    def _held(self, before: Model, after: Model, federation: Federation) -> Model:
        """The average, in which everything that no projection covers is as it was, new classes' rows of the head aside."""
        covered, task = _covered(federation.net(before), federation.task), federation.task
        held = {name: after[name] if name in covered else value for name, value in before.items()}
        if task.domain is None:
            old = min(task.classes)
            held |= {n: torch.cat([before[n][:old], after[n][old:]]) for n in ("head.weight", "head.bias")}
        return held

    def end_task(self, state: FotState, task: Task, federation: Federation, rng: Rng) -> FotState:
        """GPSE: sum the sketches of all sites, layer by layer, and extend the subspaces."""
        sizes = {name: state.model[name][0].numel() for name in _covered(federation.net(state.model), task)}
        shapes = {name: [d, self.sent_size("inputs", d)] for name, d in sizes.items()}
        asked = federation.ask(federation.clients, "sketch_inputs", {"model": state.model, "shapes": shapes})
        sketches = [upload["sketches"] for upload in asked.values() if upload]
        if not sketches:
            return state
        energy, subspace = min(1.0, self.energy + task.index * self.energy_step), {}
        for name, (d, _) in shapes.items():
            total = torch.stack([one[name] for one in sketches]).double().sum(dim=0)
            basis = state.subspace.get(name, total.new_zeros(d, 0))
            subspace[name] = extended_subspace(basis, total, energy)
        taken = sum(basis.shape[1] for basis in subspace.values()) / max(sum(sizes.values()), 1)
        return replace(state, subspace=subspace, notes={"subspace_share": taken})

    def sketch_inputs(self, payload: Payload, shard: Client, client_state: Tree, rng: Rng) -> tuple[Payload, Tree]:
        """Site: A_k of every layer over its images of the task, which are not augmented; nothing without images."""
        if len(shard) == 0:
            return {}, client_state
        net, shapes = shard.net(payload["model"]), payload["shapes"]
        layers = {name: layer for name, layer in input_layers(net).items() if name in shapes}
        grams = input_grams(net, layers, (shard.pictures(part) for part in alike(list(shard.index.split(BATCH)))))
        sketches = {}
        for name, gram in grams.items():
            generator = rng.at("omega", name).generator()
            omega = torch.randn(*shapes[name], generator=generator, dtype=torch.float64).to(gram.device)
            sketches[name] = sketch(gram, omega).float()
        return {"sketches": {name: sketches[name] for name in shapes}}, client_state

    def sent_size(self, kind: Literal["features", "inputs", "outputs"], size: int) -> int:
        return min(size, self.sketch_columns or size) if kind == "inputs" else size

    def expects(self, verb: str, payload: Payload, place: Place) -> Form:
        if verb != "sketch_inputs":
            return super().expects(verb, payload, place)
        forms = {name: tensor(torch.float32, *shape) for name, shape in payload["shapes"].items()}
        return either(NOTHING, fields({"sketches": fields(forms)}))

    def nominal_client_flops(self, setting: Setting) -> float:
        """One more forward pass over the images of every site after each task."""
        images = sum(setting.local_images(t) for t in range(len(setting.tasks)))
        return super().nominal_client_flops(setting) + setting.num_clients * images * setting.forward


def _covered(net: nn.Module, task: Task) -> Collection[str]:
    """Names of the weights that are projected: those of the body's layers, and with domains the head's."""
    return [name for name in input_layers(net) if not name.startswith("head.") or task.domain is not None]


def _with_others_held(net: nn.Module, covered: Collection[str], first: int) -> Loss:
    """Cross-entropy from class ``first`` on, for a network of which only covered weights and (by new classes) the head learn."""
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(name in covered or (name.startswith("head.") and "head.weight" not in covered))
    norms = [module for module in net.modules() if isinstance(module, _BatchNorm)]

    def loss(net: nn.Module, batch: Batch) -> Tensor:
        for norm in norms:
            norm.eval()  # its statistics are those of the server, in training as in use
        return F.cross_entropy(net(batch.x)[:, first:], batch.y - first)

    return loss
