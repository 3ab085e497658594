"""Joint training: the upper reference. Every site hands over its raw images; the server trains on all of them for ever.

begin of task t:
    client: send every image of the task with its label (all N clients, once)
    server: D <- D + uploads
each round:
    server: train theta for E_srv epochs on D, shuffled, plain cross-entropy
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from rescene.core.method_style import GREY, UploadKind
from rescene.core.record import Tree, record
from rescene.core.rng import Rng
from rescene.core.verification import Verified
from rescene.data import Task
from rescene.methods.base import Client, Federation, Method, Model, Payload, Uploads, weights_of
from rescene.methods.registry import register
from rescene.methods.upload_schema import NOTHING, Form, Place, fields, pictures
from rescene.training import Batch, cross_entropy, fit


@record
class RealImages:
    """What the sites handed over for one task: uint8 [n, 3, H, W] and int64 [n]."""

    pixels: Tensor
    labels: Tensor


@record
class JointState:
    """The server's state: the model and all images handed over so far."""

    model: Model
    collected: tuple[RealImages, ...]  # one entry per task, never changed once added
    notes: dict[str, float]


@register
class Joint(Method):
    """Reference line: all sites hand their real images to the server, which trains on all of them."""

    name: ClassVar[str] = "joint"
    title: ClassVar[str] = "Joint"
    colour: ClassVar[str] = GREY
    marker: ClassVar[str] = "P"
    uploads: ClassVar[UploadKind] = "images"
    reference: ClassVar[str] = "upper bound"
    own_orders: ClassVar[bool] = True
    paper: ClassVar[str] = "reference line, not a method to use: central training on all real images"
    verified: ClassVar[tuple[Verified, ...]] = (
        Verified(
            "hand computation",
            "tests/methods/test_references.py::test_joint_step_is_plain_gradient_descent_on_all_real_images",
            "a step, to rounding",
        ),
    )
    leaves_site: ClassVar[str] = "every training image with its label, unchanged"
    leaves_in_short: ClassVar[str] = "all real images"

    def init(self, net: nn.Module, rng: Rng) -> JointState:
        return JointState(model=weights_of(net), collected=(), notes={})

    def begin_task(self, state: JointState, task: Task, federation: Federation, rng: Rng) -> JointState:
        state = super().begin_task(state, task, federation, rng)
        answers = federation.ask(federation.clients, "hand_over", {})
        if not any(len(answer["labels"]) for answer in answers.values()):
            return state
        images, labels = (torch.cat([answer[key] for answer in answers.values()]) for key in ("images", "labels"))
        return replace(state, collected=(*state.collected, RealImages(federation.transform.to_pixels(images), labels)))

    def hand_over(self, payload: Payload, shard: Client, client_state: Tree, rng: Rng) -> tuple[Payload, Tree]:
        """Site: send all images of the task."""
        # normalised, as all pictures travel, so that the leakage figures see what they are: exact copies
        return {"images": shard.pictures(shard.index), "labels": shard.labels}, client_state

    def expects(self, verb: str, payload: Payload, place: Place) -> Form:
        return fields(pictures(place)) if verb == "hand_over" else NOTHING

    def broadcast(self, state: JointState, round: int, federation: Federation, rng: Rng) -> Payload:
        return {}

    def client_round(self, payload: Payload, shard: Client, client_state: Tree, rng: Rng) -> tuple[Payload, Tree]:
        """Nothing is left to do: the server has the images."""
        return {}, client_state

    def server_round(
        self, state: JointState, uploads: Uploads, round: int, federation: Federation, rng: Rng
    ) -> JointState:
        if not state.collected:
            return state
        pixels = torch.cat([part.pixels for part in state.collected])
        labels = torch.cat([part.labels for part in state.collected])
        net, generator = federation.net(state.model), rng.at("sgd").generator(federation.device)

        def plan() -> Tensor:
            return torch.randperm(len(labels), generator=generator, device=generator.device).to(labels.device)

        def fetch(index: Tensor) -> Batch:  # bytes become floats one batch at a time: a quarter of the memory
            x = federation.transform.normalise(pixels[index])
            x = federation.transform.augment(x, generator) if self.train.augment else x
            return Batch(x, labels[index], index)

        loss = fit(net, plan, fetch, cross_entropy, self.train, epochs=self.train.server_epochs, cosine=True)
        return replace(state, model=weights_of(net), notes={"server_loss": loss, "pool_size": len(labels)})
