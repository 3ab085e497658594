"""A generator trained against a frozen network, without any image (MFCL: Babakniya et al., NeurIPS 2023).

in each step: z ~ N(0, I), x = G(z), logits = F(x); one step of Adam on the weights of G for
    w_ce CE(logits / T, argmax logits) + w_ie L_ie + w_bn L_div + w_pr L_pr            (functional/inversion.py)
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rescene.core.errors import RunError
from rescene.core.hyperparameters import Hyperparameters, hyper
from rescene.data import Transform
from rescene.functional.inversion import divergence_loss, evenness_loss, roughness_loss
from rescene.nets import count_passes, is_rehearsal
from rescene.training.generator import ImageGenerator, tell_painting
from rescene.training.synthesis import LEVELS, Statistics

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
