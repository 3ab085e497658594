"""Pictures from gradients: what a GLFC client sends about a prototype, and how the proxy server gets the picture back.

A client encodes a picture as the gradient of a small fixed network (the encoder) on it. The proxy knows the encoder, reads
the label off the last layer's gradient and searches for the picture whose gradient is the same (Zhu et al., NeurIPS 2019).
This is a known attack on private images, here used on purpose: whoever sees the gradients and the encoder's seed can do it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap

from rescene.core.hyperparameters import Hyperparameters, hyper
from rescene.core.rng import seeded_generator
from rescene.data import Transform
from rescene.nets import is_rehearsal, laps, tell_flops
from rescene.training.lbfgs import Objective, minimise

CHUNK = 32  # prototypes searched for at once; bounds memory, not results
CHANNELS, KERNEL, STRIDES = 12, 5, (2, 2, 1)
GRADIENT_PASSES = 3  # of the encoder for a gradient with respect to its weights
INVERSION_PASSES = 7  # for the gradient of a distance between such gradients with respect to the pixels (counted: 7.1)

Encoder = Mapping[str, Tensor]


class Inversion(Hyperparameters):
    """Settings of the search for pictures."""

    num_inversions: int = hyper(250, "I", "App. A", "L-BFGS calls per prototype", ge=1)
    inversion_lr: float = hyper(0.1, "-", "App. A", "step size of L-BFGS, without line search", gt=0)
    inversion_steps: int = hyper(20, "-", "[public code]", "steps within one L-BFGS call, at most", ge=1)
    inversion_history: int = hyper(100, "-", "[public code]", "steps whose curvature L-BFGS remembers", ge=1)
    num_iterates: int = hyper(
        20, "-", "[public code]", "last iterates of a search kept as monitor images of its prototype", ge=1
    )


class Reconstruction(NamedTuple):
    """Pictures in [0, 1] [p, m, 3, H, W] (m iterates for each of p prototypes), labels [p], last gradient distance [p]."""

    images: Tensor
    labels: Tensor
    losses: Tensor


def perturb(
    net: nn.Module,
    images: Tensor,
    labels: Tensor,
    transform: Transform | None,
    *,
    num_steps: int,
    lr: float,
    weight_decay: float,
) -> Tensor:
    """Pictures moved by plain SGD towards what ``net`` (eval mode) takes for their label; binary cross-entropy.

    images [p, 3, H, W] in [0, 1], labels [p] -> new images, which may leave [0, 1] a little. The network sees them normalised
    by ``transform``, or as they are without one. Each picture moves as if it were alone.
    """
    targets = F.one_hot(labels, len(net.head.bias)).to(images)  # type: ignore[union-attr, arg-type]
    net.eval().requires_grad_(False)
    for _ in laps(num_steps):
        x = images.detach().requires_grad_(True)
        logits = net(x if transform is None else transform.normalise(255 * x))
        terms = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
        (slope,) = torch.autograd.grad(terms.mean(dim=1).sum(), x)
        images = images - lr * (slope + weight_decay * images)
    net.requires_grad_(True)
    return images.detach()


def encoder_weights(seed: int, num_classes: int, height: int, width: int) -> dict[str, Tensor]:
    """The LeNet-type encoder: three 5x5 convolutions of 12 channels with sigmoids, one linear layer; uniform(-.5, .5).

    Everybody who knows the seed has the same weights. An encoder with more classes has the same weights plus further rows,
    so the encoder stays fixed while classes arrive. Drawn on the CPU, the same on every device.
    """
    generator = seeded_generator(seed)
    weights, channels = {}, 3
    for i, stride in enumerate(STRIDES):
        weights[f"conv{i}.weight"] = torch.rand(CHANNELS, channels, KERNEL, KERNEL, generator=generator) - 0.5
        weights[f"conv{i}.bias"] = torch.rand(CHANNELS, generator=generator) - 0.5
        channels, height, width = CHANNELS, -(-height // stride), -(-width // stride)
    num_features = CHANNELS * height * width
    rows = torch.stack([torch.rand(num_features + 1, generator=generator) - 0.5 for _ in range(num_classes)])
    return weights | {"head.weight": rows[:, :-1].contiguous(), "head.bias": rows[:, -1].contiguous()}


def encode(encoder: Encoder, x: Tensor) -> Tensor:
    """Logits of the encoder for pictures in [0, 1]: [n, 3, H, W] -> [n, C]."""
    for i, stride in enumerate(STRIDES):
        weight, bias = encoder[f"conv{i}.weight"], encoder[f"conv{i}.bias"]
        x = torch.sigmoid(F.conv2d(x, weight, bias, stride=stride, padding=KERNEL // 2))
    return F.linear(x.flatten(1), encoder["head.weight"], encoder["head.bias"])


@lru_cache(maxsize=64)
def encoder_flops(num_classes: int, height: int, width: int) -> int:
    """FLOPs of encoding one picture: each weight meets every place that its stride leaves."""
    encoder, flops = encoder_weights(0, num_classes, height, width), 0
    for i, stride in enumerate(STRIDES):
        height, width = -(-height // stride), -(-width // stride)
        flops += 2 * encoder[f"conv{i}.weight"].numel() * height * width
    return flops + 2 * encoder["head.weight"].numel()


def encoder_gradients(encoder: Encoder, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Gradient of the cross-entropy with respect to the encoder's weights, for each picture by itself.

    images [p, 3, H, W] in [0, 1], labels [p] -> for each weight of shape s a tensor [p, *s]; differentiable in the images.
    """

    def loss(encoder: Encoder, image: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(encode(encoder, image.unsqueeze(0)), label.unsqueeze(0))

    forward = encoder_flops(len(encoder["head.bias"]), *images.shape[2:])
    tell_flops(GRADIENT_PASSES * len(images) * forward)
    gradients: dict[str, Tensor] = vmap(grad(loss), in_dims=(None, 0, 0))(dict(encoder), images, labels)
    return gradients


def labels_from_gradients(gradients: Mapping[str, Tensor]) -> Tensor:
    """The label of each prototype: [p], from the last layer's gradient [p, C, f].

    Row c of it is (q_c - [c = y]) h with softmax outputs q and features h > 0 (sigmoids), so only row y has a negative sum.
    """
    return gradients["head.weight"].sum(dim=2).argmin(dim=1)


def reconstruct(
    encoder: Encoder,
    gradients: Mapping[str, Tensor],
    shape: tuple[int, int],
    settings: Inversion,
    generator: torch.Generator,
) -> Reconstruction:
    """Pictures of height and width ``shape`` whose encoder gradients match the given ones, searched from white noise.

    Each prototype is its own problem and runs as if it were alone; they only share the passes through the encoder. A
    search that leaves the finite numbers is left out of the answer.
    """
    labels = labels_from_gradients(gradients)
    start = torch.randn(len(labels), 3, *shape, generator=generator).to(labels.device)
    if is_rehearsal():  # as many as a search takes that never stops early
        evaluations = settings.num_inversions * settings.inversion_steps + 1
        tell_flops(evaluations * len(labels) * INVERSION_PASSES * encoder_flops(len(encoder["head.bias"]), *shape))
        num_kept = min(settings.num_iterates, settings.num_inversions)
        return Reconstruction(start.unsqueeze(1).repeat(1, num_kept, 1, 1, 1), labels, torch.zeros(len(labels)))
    parts = []
    for rows in torch.split(torch.arange(len(labels), device=labels.device), CHUNK):
        wanted = {name: values[rows] for name, values in gradients.items()}
        objective = _gradient_distance(encoder, wanted, labels[rows], shape)
        found = minimise(
            objective,
            start[rows].flatten(1),
            lr=settings.inversion_lr,
            calls=settings.num_inversions,
            steps=settings.inversion_steps,
            history=settings.inversion_history,
            keep=settings.num_iterates,
        )
        parts.append(found)
    iterates, losses = (torch.cat(part) for part in zip(*parts, strict=True))
    finite = torch.isfinite(iterates).flatten(1).all(dim=1) & torch.isfinite(losses)
    images = iterates[finite].clamp(0, 1).reshape(-1, iterates.shape[1], 3, *shape)
    return Reconstruction(images, labels[finite], losses[finite])


def _gradient_distance(
    encoder: Encoder, wanted: Mapping[str, Tensor], labels: Tensor, shape: tuple[int, int]
) -> Objective:
    """Squared distance between the encoder gradients of candidate pictures and the wanted ones, with its gradient."""

    def objective(points: Tensor) -> tuple[Tensor, Tensor]:
        x = points.detach().requires_grad_(True)
        found = encoder_gradients(encoder, x.reshape(-1, 3, *shape), labels)
        values = torch.stack([(found[name] - wanted[name]).square().flatten(1).sum(dim=1) for name in found]).sum(dim=0)
        (slope,) = torch.autograd.grad(values.sum(), x)
        forward = encoder_flops(len(encoder["head.bias"]), *shape)
        tell_flops((INVERSION_PASSES - GRADIENT_PASSES) * len(points) * forward)
        return values.detach(), slope

    return objective
