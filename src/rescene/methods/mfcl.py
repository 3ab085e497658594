"""MFCL (Babakniya et al., NeurIPS 2023): the server trains a generator from the global model alone; sites paint the past with it.

start of task t > 0, before the head grows:
    server: F <- theta, frozen; train the generator G against F (``training/generator_training.py``); send F and G, once, to everybody
each round of task t:
    server: broadcast theta
    client: E epochs of SGD; beside each real batch (x, y) a fresh painted one, x~ = G(z) with labels y~ = argmax F(x~):
            CE(new outputs, real) + w_FT CE(all outputs of the head on fixed features, real and painted)
            + w_KD ||W_F (phi_theta - phi_F)||^2 / C_old over real and painted; send theta_k, n_k
    server: theta <- sum_k (n_k / sum n) theta_k
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rescene.core.hyperparameters import hyper
from rescene.core.method_style import PURPLE
from rescene.core.record import Tree, record
from rescene.core.rng import Rng
from rescene.core.verification import Verified
from rescene.data import Task
from rescene.functional.distillation import feature_distillation_loss
from rescene.methods.averaging import PaintingMethod
from rescene.methods.base import Client, Federation, Model, Payload, weights_of
from rescene.methods.nominal_cost import TRAINING_PASSES, NominalReplay, Setting
from rescene.methods.registry import register
from rescene.nets import FLOAT_BYTES, Arch, is_rehearsal, model_bytes, real_side
from rescene.training import Batch, Loss, fit_shard
from rescene.training.generator import (
    fresh_generator,
    generator_flops,
    generator_parameters,
    restored_generator,
    tell_painting,
)
from rescene.training.generator_training import SHOWN, DataFree, train_generator
from rescene.training.synthesis import LEVELS


@record
class ServerState:
    """The server's state: the model, and the generator, which goes on learning from task to task."""

    model: Model
    generator: Model | None
    notes: dict[str, float]


@register
class MFCL(DataFree, PaintingMethod):
    """FedAvg with a generator that the server trains without data, and that paints old classes at the sites."""

    name: ClassVar[str] = "mfcl"
    title: ClassVar[str] = "MFCL"
    colour: ClassVar[str] = PURPLE
    marker: ClassVar[str] = "^"
    paper: ClassVar[str] = "Babakniya et al., NeurIPS 2023"
    verified: ClassVar[tuple[Verified, ...]] = (
        Verified(
            "hand computation", "tests/methods/test_mfcl.py::test_one_step_equals_the_formula", "1e-3, a step of a site"
        ),
        Verified(
            "hand computation",
            "tests/methods/test_mfcl.py::test_the_generators_loss_is_the_weighted_sum",
            "1e-5, the loss of the generator",
        ),
    )
    compute: ClassVar[tuple[str, str] | None] = ("O(R K E D_loc F)", "O(S_gen B_syn F)")
    remembers: ClassVar[str] = "the model of the task before, and a generator of images of all old classes"
    unprotected: ClassVar[str] = "each local step also learns from painted images, for which dp-sgd has no place"

    kd_weight: float = hyper(0.1, "w_KD", "[public code]", "weight of distillation through the old head", ge=0)
    balance_weight: float = hyper(1.0, "w_FT", "[public code]", "weight of the head's training on fixed features", ge=0)
    synthetic_batch: int = hyper(128, "-", "[public code]", "painted images beside each real batch", ge=1)

    def init(self, net: nn.Module, rng: Rng) -> ServerState:
        return ServerState(model=weights_of(net), generator=None, notes={})

    def begin_task(self, state: ServerState, task: Task, federation: Federation, rng: Rng) -> ServerState:
        """Train the generator while the model still is the one of the task before; then grow the head."""
        if task.index > 0:
            state = self._send_past(state, federation, rng.at("generator"))
        grown: ServerState = super().begin_task(state, task, federation, rng)
        return grown

    def _send_past(self, state: ServerState, federation: Federation, rng: Rng) -> ServerState:
        size = (self.latent_size, self.generator_width, real_side(self.asked_size(federation)))
        if state.generator is None:
            generator = fresh_generator(*size, rng.at("weights").generator(federation.device))
        else:
            generator = restored_generator(state.generator, *size)
        source = rng.at("latents").generator(federation.device)
        loss = train_generator(generator, federation.net(state.model), federation.transform, self, source)
        sent = weights_of(generator)
        federation.ask(federation.clients, "receive_generator", {"teacher": state.model, "generator": sent})
        return replace(state, generator=sent, notes={"generator_loss": loss})

    def receive_generator(self, payload: Payload, shard: Client, client_state: Tree, rng: Rng) -> tuple[Payload, Tree]:
        """Site: the new teacher and generator replace the old ones: they speak for all classes seen so far."""
        return {}, {"teacher": payload["teacher"], "generator": payload["generator"]}

    def client_round(self, payload: Payload, shard: Client, client_state: Tree, rng: Rng) -> tuple[Payload, Tree]:
        if len(shard) == 0:
            return {"num_images": 0}, client_state
        net, beside, loss = shard.net(payload["model"]), None, None
        if client_state is not None:  # else the first task, or joined late
            loss = self._loss(shard, client_state["teacher"])
            beside = self._painted(client_state["generator"], shard, rng.at("latents"))
        generator = rng.at("sgd").generator(shard.device)
        final = fit_shard(net, shard, self.train, generator, loss, beside=beside)
        upload = {"model": weights_of(net), "num_images": len(shard), "notes": {"local_loss": final}}
        return upload, client_state

    def _loss(self, shard: Client, old_model: Model) -> Loss:
        old = shard.net(old_model).eval().requires_grad_(False)
        first = min(shard.task.classes)  # domain-incremental tasks bring all labels, so that all outputs are new there

        def loss(net: nn.Module, batch: Batch) -> Tensor:
            assert batch.beside is not None
            x = torch.cat([batch.x, batch.beside])
            # A single real image has painted ones beside it. Without batch statistics w_KD would let the weights run away.
            net.train(len(x) > 1)
            features, num_real = net.features(x), len(batch.x)  # type: ignore[operator]
            with torch.no_grad():
                old_features = old.features(x)  # type: ignore[operator]
                painted_labels = old.head(old_features[num_real:]).argmax(dim=1)  # type: ignore[operator]
            head = net.head
            learned = F.cross_entropy(head(features[:num_real])[:, first:], batch.y - first)  # type: ignore[operator]
            everything = torch.cat([batch.y, painted_labels])
            balanced = F.cross_entropy(head(features.detach()), everything)  # type: ignore[operator]
            kept = feature_distillation_loss(features, old_features, old_model["head.weight"].to(x))
            return learned + self.balance_weight * balanced + self.kd_weight * kept

        return loss

    def _painted(self, weights: Model, shard: Client, rng: Rng) -> Callable[[], Tensor]:
        """A fresh batch of painted images each time, ready for the network."""
        side, source = shard.images.pixels.shape[-1], rng.generator(shard.device)
        size = (self.latent_size, self.generator_width, real_side(side))
        generator = restored_generator(weights, *size).requires_grad_(False)

        def beside() -> Tensor:
            tell_painting(self.synthetic_batch, 1, *size)
            if is_rehearsal():
                return torch.zeros(self.synthetic_batch, 3, side, side)
            z = torch.randn(self.synthetic_batch, self.latent_size, generator=source, device=source.device)
            return shard.transform.normalise(generator(z) * LEVELS)

        return beside

    def nominal_memory_bytes(self, arch: Arch, num_classes: int) -> float:
        """The model of the task before, and the generator."""
        size = (self.latent_size, self.generator_width, arch.image_size)
        return model_bytes(arch, num_classes) + FLOAT_BYTES * generator_parameters(*size)

    def nominal_client_flops(self, setting: Setting) -> float:
        """From the second task on the old model sees every image, and beside every real batch comes a painted one."""
        batches = sum(setting.local_batches(t) for t in range(1, len(setting.tasks)))
        real = sum(setting.local_images(t) for t in range(1, len(setting.tasks)))
        painting = generator_flops(self.latent_size, self.generator_width, setting.arch.image_size)
        painted = batches * self.synthetic_batch * ((TRAINING_PASSES + 1) * setting.forward + painting)
        more = setting.turns * setting.train.local_epochs * (real * setting.forward + painted)
        return super().nominal_client_flops(setting) + more

    def nominal_server_flops(self, setting: Setting, task: int) -> float:
        """Each step of the generator: there and back through it and through the frozen model."""
        painting = generator_flops(self.latent_size, self.generator_width, setting.arch.image_size)
        each = TRAINING_PASSES * painting + SHOWN * setting.forward
        steps = self.generator_steps * self.generator_batch * (task > 0)
        return super().nominal_server_flops(setting, task) + float(steps * each)

    def nominal_replay(self, setting: Setting) -> NominalReplay | None:
        return NominalReplay(0, 0, 0)  # painted anew in every step
