"""Synthesis: images of all classes a network knows, made on the server from the network alone (methods page, TARGET).

for each synthesis round:
    search: from fresh latents z and random labels y, a copy of the generator G and z itself take a few Adam steps on
            w_bn L_bn + w_oh CE(teacher(x'), y) + w_adv L_adv,  x = G(z), x' = x cropped, mirrored, normalised;
            the images of lowest loss join the pool, and G learns from the copy (first-order MAML or Reptile)
    after the warm-up: a student is distilled from the teacher on the pool, which gives L_adv its meaning
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rescene.accel.fused_net import frozen
from rescene.accel.sgd_graph import Repeated
from rescene.core.errors import RunError
from rescene.core.hyperparameters import Hyperparameters, hyper
from rescene.core.rng import Rng
from rescene.data import Batch, Transform
from rescene.functional.distillation import distillation_loss
from rescene.functional.image_losses import MeanAndVariance, adversarial_loss, blend, channel_moments, statistics_loss
from rescene.nets import count_passes, is_rehearsal, tell_flops
from rescene.training.generator import add_gradients, fresh_generator, generator_flops, reptile_gradients
from rescene.training.sgd import Training

BETAS = (0.5, 0.999)  # of every Adam here
NORM_STD = 0.02  # spread of the student's first BatchNorm weights around 1
LEVELS = 255  # of a pixel in [0, 1] stored as uint8


class Synthesis(Hyperparameters):
    """Settings of synthesis; the defaults are the paper's for CIFAR."""

    synthesis_rounds: int = hyper(100, "R_syn", "App. A", "synthesis rounds after each task", ge=1)
    synthesis_batch: int = hyper(256, "B_syn", "App. A", "images per synthesis round and per student step", ge=2)
    warmup_rounds: int = hyper(20, "-", "App. A", "synthesis rounds before the student is trained", ge=0)
    latent_size: int = hyper(256, "-", "App. A", "dimension of the generator's input", ge=1)
    generator_width: int = hyper(64, "-", "App. A", "base channels of the generator", ge=1)
    generator_steps: int = hyper(10, "-", "App. A", "Adam steps of a search (TinyImageNet: 50)", ge=1)
    generator_lr: float = hyper(0.002, "-", "App. A", "learning rate of the copy (TinyImageNet: 0.0002)", gt=0)
    latent_lr: float = hyper(0.01, "-", "[public code]", "learning rate of the latents", gt=0)
    meta_update: Literal["fomaml", "reptile"] = hyper(
        "fomaml", "-", "[public code]", "how the generator learns from its copy (TinyImageNet: reptile)"
    )
    reptile_scale: float = hyper(67.0, "-", "[public code]", "factor of the Reptile gradient", gt=0)
    bn_weight: float = hyper(
        10.0, "lambda_BN", "App. A", "weight of the BatchNorm statistics (TinyImageNet: 0.1)", ge=0
    )
    onehot_weight: float = hyper(0.5, "lambda_OH", "App. A", "weight of the labels (TinyImageNet: 0.1)", ge=0)
    adversarial_weight: float = hyper(
        1.0, "lambda_adv", "App. A", "weight of the adversarial term; 0: no student", ge=0
    )
    statistics_momentum: float = hyper(
        0.9, "mu", "[public code]", "share of earlier rounds in the batch statistics", ge=0, lt=1
    )
    student_steps: int = hyper(400, "S_kd", "App. A", "distillation steps of the student per synthesis round", ge=1)
    student_temperature: float = hyper(20.0, "-", "App. A", "temperature of the student (TinyImageNet: 5)", gt=0)
    student_lr: float = hyper(0.2, "-", "[public code]", "first learning rate of the student", gt=0)
    student_lr_min: float = hyper(2e-4, "-", "[public code]", "last learning rate of its cosine", ge=0)
    student_lr_period: int = hyper(200, "-", "[public code]", "student rounds from first to last learning rate", ge=1)
    student_clip: float | None = hyper(
        5.0, "-", "[ours]", "longest gradient of the student; none: as long as it is", gt=0
    )
    student_momentum: float = hyper(0.9, "-", "[public code]", "SGD momentum of the student", ge=0, lt=1)
    student_weight_decay: float = hyper(1e-4, "-", "[public code]", "SGD weight decay of the student", ge=0)


@dataclass(frozen=True)
class Synthetic:
    """uint8 images [synthesis_rounds * synthesis_batch, 3, s, s] in order of their making, and numbers worth logging."""

    pixels: Tensor
    notes: dict[str, float]


def synthesise(
    teacher: nn.Module,
    student: nn.Module,
    *,
    num_classes: int,
    image_size: int,
    transform: Transform,
    settings: Synthesis,
    rng: Rng,
) -> Synthetic:
    """Images of the teacher's classes 0..num_classes-1, without any data.

    The teacher runs in eval mode and its weights are frozen, not changed. The student is a second network of the same
    shape; it is re-initialised here and used up. Both may be of any architecture: without BatchNorm, L_bn is 0.
    """
    device = next(teacher.parameters()).device
    if is_rehearsal():
        count_synthesis(teacher, settings, image_size)
        num_images = settings.synthesis_rounds * settings.synthesis_batch
        return Synthetic(torch.zeros(num_images, 3, image_size, image_size, dtype=torch.uint8), {})
    reinitialise(student, rng.at("student").generator(device))
    search = Search(teacher, student, num_classes, image_size, transform, settings, rng)
    learning = StudentTraining(teacher, student, transform, settings)
    pool: list[Tensor] = []
    notes: dict[str, float] = {}
    for r in range(settings.synthesis_rounds):
        images, notes["synthesis_loss"] = search.round(r)
        pool.append((images * LEVELS).round().to(torch.uint8))
        if r >= settings.warmup_rounds and settings.adversarial_weight > 0:
            notes["student_loss"] = learning.round(torch.cat(pool), rng.at("distil", r).generator(device))
    return Synthetic(
        torch.cat(pool), notes | {"synthetic_images": settings.synthesis_rounds * settings.synthesis_batch}
    )


def count_synthesis(teacher: nn.Module, s: Synthesis, image_size: int) -> None:
    """Tell what :func:`synthesise` costs without doing it.

    A search passes the generator both ways and the teacher down to the pixels, from the warm-up on the student as well; then
    the student learns from the teacher's answers.
    """
    searches = s.generator_steps * s.synthesis_rounds
    tell_flops(s.synthesis_batch * searches * 3 * generator_flops(s.latent_size, s.generator_width, image_size))
    passes = 2 * searches
    if s.adversarial_weight > 0:
        passes += 2 * s.generator_steps * max(0, s.synthesis_rounds - max(0, s.warmup_rounds - 1))
        passes += 4 * s.student_steps * max(0, s.synthesis_rounds - s.warmup_rounds)
    count_passes(teacher, s.synthesis_batch * passes)


class Search:
    """The generator of one task: a call of :meth:`round` finds one batch of images and moves the generator."""

    def __init__(
        self,
        teacher: nn.Module,
        student: nn.Module,
        num_classes: int,
        image_size: int,
        transform: Transform,
        settings: Synthesis,
        rng: Rng,
    ) -> None:
        self.device = next(teacher.parameters()).device
        self.statistics = Statistics(teacher.eval().requires_grad_(False), settings.statistics_momentum)
        self.student, self.num_classes, self.transform = student, num_classes, transform
        self.settings, self.rng = settings, rng
        source = rng.at("generator").generator(self.device)
        self.generator = fresh_generator(settings.latent_size, settings.generator_width, image_size, source)
        # The base takes one step where the copy took many, hence the factor.
        meta_lr = settings.generator_lr * settings.generator_steps
        self.painting_flops = 3 * generator_flops(settings.latent_size, settings.generator_width, image_size)
        self.meta = torch.optim.Adam(self.generator.parameters(), meta_lr, betas=BETAS)

    def round(self, r: int) -> tuple[Tensor, float]:
        """The images [synthesis_batch, 3, s, s] in [0, 1] of lowest loss among the steps of round ``r``, and that loss."""
        s, source = self.settings, self.rng.at("search", r).generator(self.device)
        z = torch.randn(s.synthesis_batch, s.latent_size, generator=source, device=self.device).requires_grad_()
        labels = torch.randint(self.num_classes, (s.synthesis_batch,), generator=source, device=self.device)
        start, copy = z.detach().clone(), deepcopy(self.generator)
        optimiser = torch.optim.Adam(copy.parameters(), s.generator_lr, betas=BETAS)
        optimiser.add_param_group({"params": [z], "lr": s.latent_lr})
        self.student.eval().requires_grad_(False)
        best: Tensor | None = None
        best_loss = torch.full((), torch.inf, device=self.device)
        for _ in range(s.generator_steps):
            images = copy(z)
            tell_flops(s.synthesis_batch * self.painting_flops)  # both ways: the generator is not the global network
            # Rounds count from 1 in this rule: L_adv joins in round `warmup_rounds`, the student learns a round later.
            loss = self.loss(images, labels, adversarial=r + 1 >= s.warmup_rounds, source=source)
            better = loss.detach() < best_loss  # decided on the device: nobody waits for it
            best = images.detach() if best is None else torch.where(better, images.detach(), best)
            best_loss = torch.where(better, loss.detach(), best_loss)
            optimiser.zero_grad()
            loss.backward()
            if s.meta_update == "fomaml":
                add_gradients(self.generator, copy)
            optimiser.step()
        found = float(best_loss)
        if best is None or math.isinf(found):
            raise _diverged(r, self._broken(start))
        self._learn_from(copy)
        return best, found

    @torch.no_grad()
    def _broken(self, z: Tensor) -> str:
        """Whose values are not finite where the round began, when its copy still was the generator itself."""
        images = self.generator(z)
        x = self.transform.normalise(images * LEVELS)
        logits, statistics = self.statistics(x)
        parts = {"generator": images, "teacher": logits, "statistics": statistics, "student": self.student(x)}
        return next((part for part, value in parts.items() if not bool(value.isfinite().all())), "generator")

    def _learn_from(self, copy: nn.Module) -> None:
        """One step of the base generator, and the batch statistics of the round's last step into their average."""
        if self.settings.meta_update == "reptile":
            reptile_gradients(self.generator, copy, self.settings.reptile_scale)
        self.meta.step()
        self.meta.zero_grad()
        self.statistics.remember()

    def loss(self, images: Tensor, labels: Tensor, *, adversarial: bool, source: torch.Generator) -> Tensor:
        """The weighted sum that the search minimises, for images in [0, 1]."""
        x = self.transform.augment(self.transform.normalise(images * LEVELS), source)
        logits, statistics = self.statistics(x)
        total = self.settings.bn_weight * statistics + self.settings.onehot_weight * F.cross_entropy(logits, labels)
        if adversarial and self.settings.adversarial_weight > 0:
            total = total + self.settings.adversarial_weight * adversarial_loss(self.student(x), logits)
        return total


class Statistics:
    """A network whose pass also tells how far the inputs of its BatchNorm layers are from what the layers remember."""

    def __init__(
        self,
        net: nn.Module,
        momentum: float,
        distance: Callable[[MeanAndVariance, MeanAndVariance], Tensor] = statistics_loss,
    ) -> None:
        self.net, self.momentum, self.distance = net, momentum, distance
        self.layers = [module for module in net.modules() if isinstance(module, nn.BatchNorm2d)]
        self.averages: list[MeanAndVariance | None] = [None] * len(self.layers)
        self.latest: list[MeanAndVariance] = []

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, and L_bn of this batch blended with the average over earlier rounds; 0 for a net without BatchNorm."""
        inputs: dict[nn.Module, Tensor] = {}

        def keep(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
            inputs[layer] = args[0]

        handles = [layer.register_forward_pre_hook(keep) for layer in self.layers]
        try:
            logits = self.net(x)
        finally:
            for handle in handles:
                handle.remove()
        self.latest = [channel_moments(inputs[layer]) for layer in self.layers]
        loss = logits.new_zeros(())
        for layer, moments, average in zip(self.layers, self.latest, self.averages, strict=True):
            running = (layer.running_mean, layer.running_var)
            loss = loss + self.distance(blend(moments, average, self.momentum), running)  # type: ignore[arg-type]
        return logits, loss

    def remember(self) -> None:
        """Take the latest batch into the average: once per synthesis round, from its last step."""
        detached = [(mean.detach(), variance.detach()) for mean, variance in self.latest]
        self.averages = [blend(m, a, self.momentum) for m, a in zip(detached, self.averages, strict=True)]


class StudentTraining:
    """Distillation of the student: T^2 KL(teacher || student), SGD whose rate falls by a cosine over student rounds."""

    def __init__(self, teacher: nn.Module, student: nn.Module, transform: Transform, settings: Synthesis) -> None:
        s, self.student, self.transform, self.settings = settings, student, transform, settings
        student.requires_grad_(True)
        sgd = Training(batch_size=s.synthesis_batch, momentum=s.student_momentum, weight_decay=s.student_weight_decay)
        answers = frozen(teacher, sgd)

        def loss(net: nn.Module, batch: Batch) -> Tensor:
            with torch.no_grad():
                targets = answers(batch.x)
            return distillation_loss(net(batch.x), targets, s.student_temperature, t2=True)

        self.steps = Repeated(student, loss, sgd, s.student_clip)
        self.rounds = 0

    def round(self, pixels: Tensor, source: torch.Generator) -> float:
        """``student_steps`` steps on shuffled batches of the pool; returns the mean loss."""
        self.student.requires_grad_(True)
        self.steps.seen.train()
        self.steps.total.zero_()
        self.steps.lr.fill_(self.rate())
        batches = shuffled_batches(pixels, self.settings.synthesis_batch, source)
        for _ in range(self.settings.student_steps):
            x = self.transform.augment(self.transform.normalise(next(batches)), source)
            none = torch.zeros(len(x), dtype=torch.long, device=x.device)  # the teacher says what they are
            self.steps.train(Batch(x, none, none))
        self.rounds += 1
        return float(self.steps.total) / self.settings.student_steps

    def rate(self) -> float:
        """The learning rate of the next round."""
        s = self.settings
        wave = 0.5 * (1 + math.cos(math.pi * self.rounds / s.student_lr_period))
        return s.student_lr_min + (s.student_lr - s.student_lr_min) * wave


def shuffled_batches(items: Tensor, size: int, source: torch.Generator) -> Iterator[Tensor]:
    """Batches of a set without end, every item once before any comes twice; a trailing single item waits (BatchNorm)."""
    while True:
        for index in torch.split(torch.randperm(len(items), generator=source, device=source.device), size):
            if len(index) > 1 or len(items) == 1:
                yield items[index.to(items.device)]


def reinitialise(net: nn.Module, source: torch.Generator) -> None:
    """Fresh weights in place: Xavier-normal, zero biases, BatchNorm weights N(1, 0.02); the rest as in a new network."""
    net.body.initialise(source)  # type: ignore[union-attr, operator]
    for module in net.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            nn.init.xavier_normal_(module.weight, generator=source)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight, 1.0, NORM_STD, generator=source)


BROKEN = {  # part: why no loss is finite, what helps
    "generator": ("its images or their loss are not finite", "lower method.generator_lr or method.latent_lr"),
    "teacher": ("the global model has non-finite outputs", "lower train.lr"),
    "statistics": ("what flows into the global model's BatchNorm layers is not finite", "lower train.lr"),
    "student": ("it has diverged while it was distilled", "lower method.student_lr or method.student_clip"),
}


def _diverged(r: int, part: str) -> RunError:
    why, fix = BROKEN[part]
    return RunError(
        "E330",
        "synthesis found no image with a finite loss",
        where=f"synthesis round {r}, {part}",
        why=why,
        fix=fix,
    )
