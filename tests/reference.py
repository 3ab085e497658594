"""The steps written the plain way: what the fast path must equal, and what its speed is measured against.

One site at a time, one class at a time, a copy of the model for every condensation step, pictures one by one through their
transform and stacked into batches as a data loader does it, torch.optim.SGD without options. Draws come from the same
generators in the same order as in the fast path, so that both see the same batches.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rescene.core.rng import seeded_generator
from rescene.data import Shard, Transform
from rescene.functional import perturbed
from rescene.training import Condensation, Training

Picture = Callable[[int], Tensor]


def normalised(pixels: Tensor, look: Transform) -> Tensor:
    """One uint8 picture [3, H, W] as the network sees it."""
    mean, std = torch.tensor(look.mean).reshape(3, 1, 1), torch.tensor(look.std).reshape(3, 1, 1)
    return (pixels.float() / 255 - mean) / std


def cropped(picture: Tensor, down: int, right: int, mirror: int, look: Transform) -> Tensor:
    """One normalised picture, padded with black, cut out at (down, right), mirrored or not."""
    _, height, width = picture.shape
    black = torch.tensor(look.fill).reshape(3, 1, 1)
    padded = black.repeat(1, height + 2 * look.pad, width + 2 * look.pad)
    padded[:, look.pad : look.pad + height, look.pad : look.pad + width] = picture
    window = padded[:, down : down + height, right : right + width]
    return window.flip(-1) if mirror else window


def load(picture: Picture, index: Tensor, draws: Tensor | None, look: Transform) -> Tensor:
    """A batch, picture by picture; ``draws`` [3, n] says how each is cropped."""
    pictures = [picture(i) for i in index.tolist()]
    if draws is not None:
        pictures = [cropped(p, *draw, look) for p, draw in zip(pictures, draws.T.tolist(), strict=True)]
    return torch.stack(pictures)


def train(
    net: nn.Module, epochs: Iterator[tuple[float, Iterator[tuple[Tensor, Tensor]]]], settings: Training, loss: Callable
) -> None:
    """SGD over (rate, batches) of each epoch."""
    optimiser = torch.optim.SGD(
        net.parameters(), settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay
    )
    net.train()
    for rate, batches in epochs:
        optimiser.param_groups[0]["lr"] = rate
        for x, y in batches:
            optimiser.zero_grad()
            loss(net(x), y).backward()
            optimiser.step()
    net.eval()


def batches_of(order: Tensor, size: int) -> list[Tensor]:
    """An epoch cut into batches; a single picture at its end is left out."""
    return [batch for batch in order.split(size) if len(batch) > 1]


def local_training(net: nn.Module, shard: Shard, settings: Training, generator: torch.Generator) -> None:
    """One site's E epochs on its own images."""
    look, pixels, labels = shard.transform, shard.images.pixels, shard.images.labels

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        order = shard.index[torch.randperm(len(shard), generator=generator)]
        for index in batches_of(order, settings.batch_size):
            draws = look.draw(len(index), generator) if settings.augment else None
            yield load(lambda i: normalised(pixels[i], look), index, draws, look), labels[index]

    train(net, ((settings.lr, batches()) for _ in range(settings.local_epochs)), settings, F.cross_entropy)


def server_training(
    net: nn.Module,
    images: Tensor,
    labels: Tensor,
    look: Transform,
    settings: Training,
    generator: torch.Generator,
    *,
    num_classes: int,
    alpha: float,
    tau: float,
) -> None:
    """E_srv epochs on the pool: q_c ~ n_c^alpha, CE(f(x) + tau log pi, y), cosine rate (Sec. 3.4)."""
    counts = [(labels == c).sum().item() for c in range(num_classes)]
    total = sum(n**alpha for n in counts if n)
    weights = torch.tensor([counts[y] ** alpha / total / counts[y] for y in labels.tolist()])
    prior = torch.tensor([math.log(n / len(labels)) if n else -1e9 for n in counts])

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.multinomial(weights, len(labels), replacement=True, generator=generator)
        draws = look.draw(len(labels), generator) if settings.augment else None
        for place in batches_of(torch.arange(len(labels)), settings.batch_size):
            own = None if draws is None else draws[:, place]
            yield load(lambda i: images[i], order[place], own, look), labels[order[place]]

    epochs = settings.server_epochs
    rates = [settings.lr * (1 + math.cos(math.pi * epoch / epochs)) / 2 for epoch in range(epochs)]
    train(net, ((rate, batches()) for rate in rates), settings, lambda f, y: F.cross_entropy(f + tau * prior, y))


def condensation(
    net: nn.Module,
    shard: Shard,
    starts: dict[int, Tensor],
    settings: Condensation,
    noise_seed: int,
    generator: torch.Generator,
) -> dict[int, Tensor]:
    """One site: for every step a perturbed copy of the model, then Eq. 1 and its clipped gradient class by class."""
    noise, surrogates = seeded_generator(noise_seed), dict(starts)
    for _ in range(settings.num_steps):
        moved = copy.deepcopy(net).eval()
        values = perturbed(list(net.parameters()), settings.radius, noise)
        with torch.no_grad():
            for parameter, value in zip(moved.parameters(), values, strict=True):
                parameter.copy_(value)
        for label, own in surrogates.items():
            members = shard.by_class()[label]
            size = settings.real_batch_size(len(members), len(own))
            if size < len(members):
                members = members[torch.randperm(len(members), generator=generator)[:size]]
            pixels, look = shard.images.pixels, shard.transform
            real = load(lambda i: normalised(pixels[i], look), members, None, look)  # noqa: B023 called here and now
            x = own.clone().requires_grad_(True)
            with torch.no_grad():
                real_features = moved.features(real)
            features = moved.features(x)
            pairs = [(features, real_features), (moved.head(features), moved.head(real_features).detach())]
            sum((a.mean(0) - b.mean(0)).square().sum() for a, b in pairs).backward()
            scale = 1.0 if settings.clip is None else max(1.0, float(x.grad.norm()) / settings.clip)
            surrogates[label] = own - settings.image_lr * x.grad / scale
    return surrogates


def counted_flops(function: Callable[..., Tensor], *inputs: Tensor) -> int:
    """FLOPs of one call of any function, without gradients; on the meta device nothing is computed."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, torch.no_grad():
        function(*inputs)
    counts, ops = counter.get_flop_counts()["Global"], torch.ops.aten
    # Convolutions and linear layers only: attention's two products (bmm or a fused kernel) are left out, as in the paper.
    return sum(int(counts.get(op, 0)) for op in (ops.convolution, ops.addmm, ops.mm))
