"""A generator, and a network that judges its pictures and names their class, trained against each other (AC-GAN).

The network's head names the class. One more score on the same features says whether a picture is real.
in each step: one step of Adam on network and score, then one on the generator      (functional/acgan.py)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rescene.core.errors import RunError
from rescene.core.hyperparameters import Hyperparameters, hyper
from rescene.data import Transform
from rescene.functional.acgan import acgan_loss, conditioned
from rescene.nets import is_rehearsal
from rescene.training.generator import ImageGenerator, tell_painting
from rescene.training.synthesis import LEVELS

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
