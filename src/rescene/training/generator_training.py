"""Two ways to train a generator of images: against a network that judges its pictures (AC-GAN), or against a frozen one.

AC-GAN: a network judges the generator's pictures and names their class; the two are trained against each other.
The network's head names the class. One more score on the same features says whether a picture is real.
in each step: one step of Adam on network and score, then one on the generator      (functional/image_losses.py)

Against a frozen network, without any image (MFCL: Babakniya et al., NeurIPS 2023):
in each step: z ~ N(0, I), x = G(z), logits = F(x); one step of Adam on the weights of G for
    w_ce CE(logits / T, argmax logits) + w_ie L_ie + w_bn L_div + w_pr L_pr            (functional/image_losses.py)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rescene.core.errors import RunError
from rescene.core.hyperparameters import Hyperparameters, hyper
from rescene.data import Transform
from rescene.functional.image_losses import acgan_loss, conditioned, divergence_loss, evenness_loss, roughness_loss
from rescene.nets import count_passes, is_rehearsal
from rescene.training.generator import ImageGenerator, tell_painting
from rescene.training.synthesis import LEVELS, Statistics

BETAS = (0.5, 0.99)  # of Adam (official code of FedCIL)
DECAY = 1e-5  # weight decay of Adam (the same)


class AdversarialTraining(Hyperparameters):
    """Settings of the GAN; the defaults are those of FedCIL's official code."""

    latent_size: int = hyper(100, "-", "official code", "numbers of noise in the generator's input", ge=1)
    generator_width: int = hyper(64, "-", "official code", "base channels of the generator", ge=1)
    gan_lr: float = hyper(1e-4, "-", "official code", "learning rate of network and generator (Adam)", gt=0)
    synthetic_batch: int = hyper(32, "-", "official code", "painted images of each kind in a step", ge=2)


@dataclass
class Painter:
    """A generator, and how its pictures become input of the network."""

    generator: ImageGenerator
    latent_size: int
    transform: Transform
    side: int  # of the network's pictures in pixels: in a rehearsal less than the generator's
    augment: bool  # as real images are, so that nothing but their content tells them apart
    source: torch.Generator

    def draw_labels(self, classes: Sequence[int], num: int) -> Tensor:
        """``num`` labels, each class as likely."""
        place = torch.randint(len(classes), (num,), generator=self.source, device=self.source.device)
        return torch.tensor(classes, device=self.source.device)[place]

    def paint(self, labels: Tensor, learns: bool = False) -> Tensor:
        """Pictures [n, 3, s, s] with these labels, normalised. ``learns``: the generator gets gradients from them."""
        num_inputs, channels = self.generator.first.in_features, len(self.transform.mean)
        passes = 3 if learns else 1
        tell_painting(len(labels), passes, num_inputs, self.generator.channels // 2, self.generator.image_size)
        if is_rehearsal():
            return torch.zeros(len(labels), channels, self.side, self.side, requires_grad=learns)
        noise = torch.randn(len(labels), self.latent_size, generator=self.source, device=self.source.device)
        with torch.set_grad_enabled(learns):
            pixels = self.generator(conditioned(noise, labels, num_inputs - self.latent_size))
            x = self.transform.normalise(pixels * LEVELS)
            return self.transform.augment(x, self.source) if self.augment else x


@dataclass
class Gan:
    """The network with its second output, and the generator that learns from both."""

    net: nn.Module
    realness: nn.Linear  # features -> score
    painter: Painter

    def judge(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(scores [n], class logits [n, C]) of pictures."""
        features = self.net.features(x)  # type: ignore[operator]
        return self.realness(features).squeeze(1), self.net.head(features)  # type: ignore[operator]

    def critic_loss(self, x: Tensor, labels: Tensor, classes: Sequence[int], num: int) -> tuple[Tensor, Tensor]:
        """(L_real of x + L_fake of ``num`` painted pictures of ``classes``, the class logits of x)."""
        scores, logits = self.judge(x)
        fake_labels = self.painter.draw_labels(classes, num)
        fake = acgan_loss(*self.judge(self.painter.paint(fake_labels)), fake_labels, is_real=False)
        return acgan_loss(scores, logits, labels, is_real=True) + fake, logits

    def generator_loss(self, classes: Sequence[int], num: int) -> Tensor:
        """L_real of ``num`` painted pictures of ``classes``: they should pass for real ones."""
        labels = self.painter.draw_labels(classes, num)
        return acgan_loss(*self.judge(self.painter.paint(labels, learns=True)), labels, is_real=True)


class AdversarialSteps:
    """The optimiser of an AC-GAN: each step moves network and score by the given loss, then the generator by its own."""

    def __init__(self, gan: Gan, classes: Sequence[int], settings: AdversarialTraining) -> None:
        self.lr, self._gan, self._classes, self._num = settings.gan_lr, gan, classes, settings.synthetic_batch
        self._critic = [p for part in (gan.net, gan.realness) for p in part.parameters() if p.requires_grad]
        options = {"lr": self.lr, "betas": BETAS, "weight_decay": DECAY}
        self._critic_adam = torch.optim.Adam(self._critic, **options)  # type: ignore[arg-type]
        self._generator_adam = torch.optim.Adam(gan.painter.generator.parameters(), **options)  # type: ignore[arg-type]

    def step(self, loss: Tensor) -> None:
        """Move network and score along the gradient of ``loss``, then the generator along that of its loss."""
        self._critic_adam.zero_grad()
        loss.backward()
        self._critic_adam.step()
        for parameter in self._critic:  # the generator's gradient passes through them and leaves nothing there
            parameter.requires_grad_(False)
        self._generator_adam.zero_grad()
        self._gan.generator_loss(self._classes, self._num).backward()
        self._generator_adam.step()
        for parameter in self._critic:
            parameter.requires_grad_(True)


def check_finite(loss: float) -> None:
    """Raise RunError E330 if the loss of a GAN is not a finite number."""
    if not math.isfinite(loss):
        raise RunError(
            "E330",
            "the loss of the server's consolidation is not finite",
            why="a site's generator or the averaged network has diverged",
            fix="lower method.gan_lr, or method.consolidation_steps=0 to go without consolidation",
        )


SHOWN = 2  # passes of a painted image through the frozen network: forward, and back to the pixels


class DataFree(Hyperparameters):
    """Settings of the generator; the defaults are the public code's for CIFAR-100."""

    generator_steps: int = hyper(100, "pi", "[public code]", "Adam steps of the generator after each task", ge=1)
    generator_batch: int = hyper(128, "-", "[public code]", "images per step of the generator", ge=2)
    generator_lr: float = hyper(0.001, "-", "[public code]", "learning rate of the generator", gt=0)
    latent_size: int = hyper(1000, "-", "[public code]", "dimension of the generator's input", ge=1)
    generator_width: int = hyper(64, "-", "[public code]", "base channels of the generator", ge=1)
    certainty_weight: float = hyper(1.0, "w_CE", "[public code]", "weight of the network's certainty", ge=0)
    certainty_temperature: float = hyper(1000.0, "-", "[public code]", "divides the logits of that term", gt=0)
    evenness_weight: float = hyper(1.0, "w_IE", "[public code]", "weight of an equal share of all classes", ge=0)
    statistics_weight: float = hyper(50.0, "w_BN", "[public code]", "weight of BatchNorm's statistics", ge=0)
    roughness_weight: float = hyper(0.001, "w_pr", "[public code]", "weight of fine noise in the images", ge=0)


def generator_loss(x: Tensor, statistics: Statistics, settings: DataFree) -> Tensor:
    """What the generator minimises, for painted images x [n, 3, s, s] as the network sees them."""
    s = settings
    logits, divergence = statistics(x)
    certainty = F.cross_entropy(logits / s.certainty_temperature, logits.argmax(dim=1))
    return (
        s.certainty_weight * certainty
        + s.evenness_weight * evenness_loss(logits)
        + s.statistics_weight * divergence / max(1, len(statistics.layers))
        + s.roughness_weight * roughness_loss(x)
    )


def train_generator(
    generator: ImageGenerator, teacher: nn.Module, transform: Transform, settings: DataFree, source: torch.Generator
) -> float:
    """Train ``generator`` in place against ``teacher``, which stays as it is; returns the last loss.

    Without BatchNorm in the teacher the term of the statistics is 0.
    """
    s, size = settings, (settings.latent_size, settings.generator_width, generator.image_size)
    if is_rehearsal():
        tell_painting(s.generator_steps * s.generator_batch, 3, *size)
        count_passes(teacher, SHOWN * s.generator_steps * s.generator_batch)
        return 0.0
    statistics = Statistics(teacher.eval().requires_grad_(False), 0.0, divergence_loss)
    optimiser = torch.optim.Adam(generator.train().parameters(), s.generator_lr)
    last = math.nan
    for step in range(s.generator_steps):
        z = torch.randn(s.generator_batch, s.latent_size, generator=source, device=source.device)
        x = transform.normalise(generator(z) * LEVELS)
        tell_painting(s.generator_batch, 3, *size)
        loss = generator_loss(x, statistics, s)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        last = float(loss.detach())
        if not math.isfinite(last):
            raise RunError(
                "E330",
                "the generator's loss is not finite",
                where=f"step {step + 1}",
                why="the global model has diverged, or the generator has",
                fix="lower train.lr or method.generator_lr",
            )
    generator.eval()
    return last
