"""Condensation by moments: pixels are moved until many statistics of a class agree with the real ones.

Every statistic is a mean over the class of something computed per image, taken once per (client, class) and round before
the first step; the descent sees these numbers and never the images again. The statistics:

    features, logits   as in Eq. 1
    stages             activations of each stage pooled to 4 x 4, and their squares
    pixels             the picture pooled to 16 x 16
    covariance         products of all pairs of cells of the picture pooled to 8 x 8

Each squared distance is divided by the size of its real side. They are taken under the broadcast network and under others of
the same form with fresh weights, in turn: surrogates of all tasks then fit the same kind of network and carry no mark of one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rescene.core.errors import ConfigError
from rescene.core.rng import seeded_generator
from rescene.data import Shard
from rescene.functional import group_means
from rescene.nets import count_passes, is_rehearsal
from rescene.nets.bodies import ConvBody

EPS = 1e-6
NetState = dict[str, Tensor]


class MomentSettings(Protocol):
    """What this descent needs to know; ``Condensation`` has it all."""

    @property
    def match(self) -> tuple[str, ...] | None:
        """Names of the statistics to match."""

    @property
    def num_steps(self) -> int:
        """Steps of Adam."""

    @property
    def image_lr(self) -> float:
        """Learning rate of the pixels."""

    @property
    def own_net(self) -> bool:
        """Whether statistics are taken under the broadcast network."""

    @property
    def random_nets(self) -> int:
        """Number of freshly drawn networks that statistics are also taken under."""


@dataclass(frozen=True)
class Target:
    """A network's weights (None: no network is needed) and each group's real means under it: statistic -> [g, d]."""

    state: NetState | None
    means: dict[str, Tensor]


def descend_moments(
    net: nn.Module,
    shard: Shard,
    members: Sequence[Tensor],
    pixels: Tensor,
    owner: Tensor,
    settings: MomentSettings,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """Adam on the pixels of all groups with a cosine rate; returns them and each group's loss at the last step.

    ``members`` are the positions of each group's real images, ``owner`` the group of each surrogate.
    """
    num_nets = _num_nets(settings)
    passes = num_nets * sum(len(m) for m in members) + 2 * settings.num_steps * len(owner) * (num_nets > 0)
    if is_rehearsal():  # its small network has no stages, and the cost is known
        count_passes(net, passes)
        return pixels, torch.zeros(len(members), device=pixels.device)
    _check(net)
    net.eval().requires_grad_(False)
    original = _state(net)
    fixed, moving = _targets(net, shard, members, settings, seed)
    pixels = pixels.clone().requires_grad_(True)
    optimiser = torch.optim.Adam([pixels], settings.image_lr)
    losses = torch.zeros(len(members), device=pixels.device)
    for step in range(settings.num_steps):
        optimiser.param_groups[0]["lr"] = settings.image_lr * 0.5 * (1 + math.cos(math.pi * step / settings.num_steps))
        losses = torch.zeros_like(losses)
        for target in fixed + moving[step % max(len(moving), 1) :][:1]:
            if target.state is not None:
                net.load_state_dict(target.state)
            for name, values in _statistics(net, pixels, settings.match or (), target.state is None):
                if name in target.means:
                    losses = losses + _distance(group_means(values, owner, len(members)), target.means[name])
        (pixels.grad,) = torch.autograd.grad(losses.sum(), pixels)
        optimiser.step()
        with torch.no_grad():
            pixels.copy_(shard.transform.possible(pixels))
    net.load_state_dict(original)
    net.requires_grad_(True)
    count_passes(net, passes)  # no hook of the network saw its stages called one by one
    return pixels.detach(), losses.detach()


def _num_nets(settings: MomentSettings) -> int:
    """The networks whose statistics are matched; a redrawn network has no logits to match."""
    terms = set(settings.match or ())
    own = settings.own_net and bool(terms & {"features", "logits", "stages"})
    return int(own) + settings.random_nets * bool(terms & {"features", "stages"})


@torch.no_grad()
def _targets(
    net: nn.Module, shard: Shard, members: Sequence[Tensor], settings: MomentSettings, seed: int
) -> tuple[list[Target], list[Target]]:
    """The real side of the loss: of the pixels, and under the network as it is and redrawn ones."""
    owner = torch.repeat_interleave(torch.arange(len(members)), torch.tensor([len(m) for m in members]))
    owner, real, terms = owner.to(shard.device), shard.pictures(torch.cat(list(members))), settings.match or ()

    def means(terms: Sequence[str], bare: bool) -> dict[str, Tensor]:
        return {name: group_means(v, owner, len(members)) for name, v in _statistics(net, real, terms, bare)}

    bare = means(terms, True)
    moving = []
    generator = seeded_generator(seed, shard.device)
    if settings.own_net:
        moving.append(Target(_state(net), means(terms, False)))
    for _ in range(settings.random_nets):
        net.body.initialise(generator)  # type: ignore[union-attr,operator]
        moving.append(Target(_state(net), means([t for t in terms if t != "logits"], False)))
    return [Target(None, bare)] if bare else [], [target for target in moving if target.means]


def _statistics(net: nn.Module, x: Tensor, terms: Sequence[str], bare: bool) -> Iterator[tuple[str, Tensor]]:
    """Name and value [n, d] of each per-image statistic: those of the picture (``bare``) or those of the network."""
    if bare:
        if "pixels" in terms:
            yield "pixels", _cells(x, 16)
        if "covariance" in terms:
            cells = _cells(x.mean(dim=1, keepdim=True), 8)
            yield "covariance", (cells.unsqueeze(2) * cells.unsqueeze(1)).flatten(1)
        return
    for name, stage in net.body.named_children():  # type: ignore[union-attr]
        if name == "pool":
            break
        x = stage(x)
        if "stages" in terms:
            yield name, _cells(x, 4)
            yield f"{name} squares", _cells(x.square(), 4)
    features = x.mean(dim=(2, 3))
    if "features" in terms:
        yield "features", features
    if "logits" in terms:
        yield "logits", net.head(features)  # type: ignore[operator]


def _cells(x: Tensor, grid: int) -> Tensor:
    """[n, c, s, s] -> averages over cells, flat; adaptive pooling would do, but is several times slower on a CPU."""
    return F.avg_pool2d(x, max(1, x.shape[-1] // grid)).flatten(1)


def _distance(synthetic: Tensor, real: Tensor) -> Tensor:
    """Squared distance of means, divided by the squared length of the real side: [g, d], [g, d] -> [g]."""
    return (synthetic - real).square().sum(dim=1) / (real.square().sum(dim=1) + EPS)


def _state(net: nn.Module) -> NetState:
    return {key: value.clone() for key, value in net.state_dict().items()}


def _check(net: nn.Module) -> None:
    if not isinstance(net.body, ConvBody):
        raise ConfigError(
            "E148",
            "method.match needs a convolutional network",
            where="method.match",
            why="its statistics are taken at the stages of such a network",
            fix="model.name=resnet18 or convnet, or method.match=null",
        )
