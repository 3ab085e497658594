"""TARGET (Zhang et al., ICCV 2023): old tasks live on in images that the server paints from the global model alone.

start of task t > 0, before the head grows:
    server: teacher <- theta; synthesise images of all classes the teacher knows; send teacher and images, once, to everybody
    client: keep them, or a random part of the images, in place of those of the task before
each round of task t:
    server: broadcast theta
    client: E epochs of SGD, each step on a real and a synthetic batch: CE(new classes, real) + 25 KD(student, teacher, synthetic)
    server: theta <- sum_k (n_k / sum n) theta_k
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rescene.core.hyperparameters import hyper
from rescene.core.method_style import PURPLE
from rescene.core.record import Tree
from rescene.core.rng import Rng
from rescene.core.verification import Verified
from rescene.data import Task
from rescene.functional.distillation import distillation_loss
from rescene.methods.averaging import PaintingMethod, first_learned
from rescene.methods.base import Client, Federation, ModelState, Payload, weights_of
from rescene.methods.nominal_cost import TRAINING_PASSES, NominalBytes, NominalReplay, Setting, image_bytes
from rescene.methods.registry import register
from rescene.nets import Arch, model_bytes
from rescene.training import Batch, fit_shard, frozen, repeatable
from rescene.training.generator import generator_flops
from rescene.training.synthesis import Synthesis, shuffled_batches, synthesise


@register
class TARGET(Synthesis, PaintingMethod):
    """FedAvg with images that the server synthesises from the global model after each task."""

    name: ClassVar[str] = "target"
    title: ClassVar[str] = "TARGET"
    colour: ClassVar[str] = PURPLE
    marker: ClassVar[str] = "D"
    paper: ClassVar[str] = "Zhang et al., ICCV 2023"
    verified: ClassVar[tuple[Verified, ...]] = (
        Verified(
            "published code",
            "tests/oracles/test_oracles.py::"
            "test_target_search_finds_the_same_images_and_teaches_the_generator_the_same",
            "1e-5, two rounds of synthesis",
        ),
        Verified("published code", "tests/oracles/test_oracles.py::test_target_distillation", "1e-6"),
        Verified("paper figure", "results/cifar10/target-beta0.5-s0", "AA 18.59 against 21.66 +- 7.12 (n = 1)"),
    )
    compute: ClassVar[tuple[str, str] | None] = ("O(R K E D_loc F)", "O(R_syn S_kd B_syn F)")
    remembers: ClassVar[str] = "the model of the task before, and synthetic images of all old classes"
    unprotected: ClassVar[str] = "each local step also distils synthetic images, for which dp-sgd has no place"

    kd_weight: float = hyper(25.0, "-", "App. A", "weight of distillation on synthetic images; 0: none", ge=0)
    kd_temperature: float = hyper(2.0, "T_KD", "App. A", "temperature of the clients' distillation", gt=0)
    kd_t2: bool = hyper(False, "-", "[public code]", "multiply the clients' distillation by the squared temperature")
    kd_reduction: Literal["sum", "mean"] = hyper(
        "sum", "-", "[public code]", "the clients' distillation adds up the old classes, or averages over them"
    )
    synthetic_batch: int = hyper(128, "-", "[ours]", "synthetic images beside each real batch", ge=2)
    images_per_client: int | None = hyper(
        None, "-", "App. D.3", "matched memory (500): a client keeps this many images, drawn by itself", ge=2
    )
    local_ce: Literal["new", "all"] = hyper(
        "new", "-", "[public code]", "cross-entropy over this task's classes, or over all seen classes"
    )

    def begin_task(self, state: ModelState, task: Task, federation: Federation, rng: Rng) -> ModelState:
        """Paint the past while the model still is the one of the task before; then grow the head.

        This is the end of the previous task, told from the other side: nothing is painted after the last task.
        """
        if task.index > 0:
            state = self._send_past(state, federation, rng.at("synthesis"))
        return super().begin_task(state, task, federation, rng)  # type: ignore[no-any-return]

    def _send_past(self, state: ModelState, federation: Federation, rng: Rng) -> ModelState:
        image_size = self.asked_size(federation)
        made = synthesise(
            federation.net(state.model),
            federation.net(state.model),
            num_classes=len(state.model["head.weight"]),
            image_size=image_size,
            transform=federation.transform,
            settings=self,
            rng=rng,
        )
        federation.ask(federation.clients, "receive_past", {"teacher": state.model, "pixels": made.pixels})
        return replace(state, notes=made.notes)

    def receive_past(self, payload: Payload, shard: Client, client_state: Tree, rng: Rng) -> tuple[Payload, Tree]:
        """The new teacher and images replace the old ones: they speak for all classes seen so far."""
        pixels: Tensor = payload["pixels"]
        if self.images_per_client is not None:
            chosen = torch.randperm(len(pixels), generator=rng.at("subset").generator())[: self.images_per_client]
            pixels = pixels[chosen.to(pixels.device)]
        return {}, {"teacher": payload["teacher"], "pixels": pixels}

    def client_round(self, payload: Payload, shard: Client, client_state: Tree, rng: Rng) -> tuple[Payload, Tree]:
        if len(shard) == 0:
            return {"num_images": 0}, client_state
        net = shard.net(payload["model"])
        # Domain-incremental tasks bring all labels, so that "new" is everything there.
        first = first_learned(shard.task, self.local_ce)
        past = client_state if self.kd_weight > 0 else None  # None too if nothing was received: first task, joined late
        teacher = None if past is None else frozen(shard.net(past["teacher"]), self.train)

        @repeatable
        def loss(net: nn.Module, batch: Batch) -> Tensor:
            learned = F.cross_entropy(net(batch.x)[:, first:], batch.y - first)
            if teacher is None or batch.beside is None:
                return learned
            return learned + self.kd_weight * self._reminder(net, teacher, batch.beside)

        beside = None if past is None else self._past_batches(past["pixels"], shard, rng.at("synthetic"))
        final = fit_shard(net, shard, self.train, rng.at("sgd").generator(shard.device), loss, beside=beside)
        upload = {"model": weights_of(net), "num_images": len(shard), "notes": {"local_loss": final}}
        return upload, client_state

    def _past_batches(self, pixels: Tensor, shard: Client, rng: Rng) -> Callable[[], Tensor]:
        """The next batch of synthetic images each time, ready for the network."""
        source = rng.generator(shard.device)
        batches = shuffled_batches(pixels, self.synthetic_batch, source)

        def beside() -> Tensor:
            x = shard.transform.normalise(next(batches))
            return shard.transform.augment(x, source) if self.train.augment else x

        return beside

    def _reminder(self, net: nn.Module, teacher: nn.Module, x: Tensor) -> Tensor:
        """KD on a synthetic batch."""
        with torch.no_grad():
            targets = teacher(x)
        # A client with a single image learns it in eval mode; its synthetic batch is large enough for BatchNorm,
        # and at this weight only batch statistics keep the weights from running away.
        was_training = net.training
        net.train()
        loss = distillation_loss(net(x), targets, self.kd_temperature, self.kd_t2, self.kd_reduction)
        net.train(was_training)
        return loss

    def nominal_bytes(self, arch: Arch, classes_per_task: int, num_classes: int) -> NominalBytes | None:
        """The synthetic images go down in every round and stay; the teacher is not counted."""
        model = model_bytes(arch, num_classes)
        kept = model + self.synthesis_rounds * self.synthesis_batch * image_bytes(arch)
        return NominalBytes(up=model, down=kept, state=kept)

    def nominal_client_flops(self, setting: Setting) -> float:
        """Beside every real batch of a later task a synthetic one: student 3F, teacher F."""
        batches = sum(setting.local_batches(t) for t in range(1, len(setting.tasks)))
        passes = setting.turns * setting.train.local_epochs * batches * self.synthetic_batch * (TRAINING_PASSES + 1)
        return super().nominal_client_flops(setting) + passes * setting.forward

    def nominal_server_flops(self, setting: Setting, task: int) -> float:
        """R_syn searches through generator, teacher and, after the warm-up, student; then S_kd steps of distillation."""
        after, forward = max(0, self.synthesis_rounds - self.warmup_rounds), setting.forward
        painting = generator_flops(self.latent_size, self.generator_width, setting.arch.image_size) + forward
        searches = self.generator_steps * TRAINING_PASSES * (self.synthesis_rounds * painting + after * forward)
        distillation = after * self.student_steps * (TRAINING_PASSES + 1) * forward
        return super().nominal_server_flops(setting, task) + float(self.synthesis_batch * (searches + distillation))

    def nominal_replay(self, setting: Setting) -> NominalReplay | None:
        each = self.images_per_client or self.synthesis_rounds * self.synthesis_batch
        return NominalReplay(each, each, each * setting.num_clients)
