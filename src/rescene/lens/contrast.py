"""Training of a lens by contrast (SimCLR, Chen et al. 2020): two views of a picture lie close, all other pictures far.

    z_i, z_j   normalised outputs of two views of one picture
    loss       -log exp(z_i z_j / tau) / sum_{k != i} exp(z_i z_k / tau), averaged over all views

Only procedural pictures are used (:mod:`rescene.lens.leaves`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rescene.core.record import record
from rescene.core.rng import Rng
from rescene.lens.features import MEAN, STD
from rescene.lens.leaves import draw_leaves
from rescene.lens.network import WIDTHS, LensNet


@record
class Contrast:
    """Settings of the training; the defaults made the lens that ships."""

    num_pictures: int = 1_500_000
    num_steps: int = 37_987
    num_pairs: int = 1024
    widths: tuple[int, ...] = WIDTHS
    view: int = 32  # side of a view in pixels
    tau: float = 0.2
    lr: float = 0.5
    momentum: float = 0.9
    weight_decay: float = 1e-4
    warm_up: int = 500  # steps
    least_crop: float = 0.15  # part of the picture's area

    def taking(self, num_steps: int) -> Contrast:
        """The same settings for another number of steps."""
        return replace(self, num_steps=num_steps, warm_up=min(self.warm_up, num_steps))


# minutes on a CPU
SMALL = Contrast(num_pictures=4_000, num_steps=150, num_pairs=128, widths=(8, 16, 32, 32), warm_up=20)


class Head(nn.Sequential):
    """What the loss sees of the last stage; thrown away after the training."""

    def __init__(self, channels: int) -> None:
        super().__init__(nn.Linear(channels, 1024), nn.BatchNorm1d(1024), nn.ReLU(), nn.Linear(1024, 128))


def train_network(
    settings: Contrast, seed: int, device: torch.device, tell: Callable[[int, float], None] = lambda step, loss: None
) -> LensNet:
    """A network trained from ``seed``. The same seed gives the same weights on the same device and torch release."""
    rng = Rng(seed).at("lens")
    with torch.random.fork_rng(devices=[]):  # torch's layers draw their first weights from the global stream
        torch.manual_seed(rng.at("weights").integer() % 2**31)
        net, head = LensNet(settings.widths), Head(settings.widths[-1])
    both = nn.ModuleList([net, head]).to(device).train()
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    pictures = picture_pool(settings.num_pictures, rng.at("pictures").generator(device))
    sgd = torch.optim.SGD(both.parameters(), settings.lr, settings.momentum, weight_decay=settings.weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(sgd, lambda step: _rate(step, settings))
    fast = device.type == "cuda"

    def loss_of(x: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=fast):
            z = head(net(x)[-1].mean(dim=(2, 3)))
        return contrast(F.normalize(z.float(), dim=1), settings.tau)

    step_loss = torch.compile(loss_of) if fast else loss_of
    view = torch.compile(views) if fast else views
    stream = rng.at("views").generator(device)
    for step, index in enumerate(_batches(settings, rng.at("batches").generator(device))):
        chosen = pictures[index]
        x = torch.cat([view(chosen, draws(len(chosen), stream, settings), settings.view) for _ in range(2)])
        loss = step_loss(x.contiguous(memory_format=torch.channels_last))
        sgd.zero_grad(set_to_none=True)
        loss.backward()
        sgd.step()
        schedule.step()
        if step % 200 == 0:
            tell(step, loss.item())
    return net.float().eval()


def contrast(z: Tensor, tau: float) -> Tensor:
    """The loss of normalised outputs [2n, d] whose rows i and n + i belong together.

    >>> round(float(contrast(torch.eye(2).repeat(2, 1), tau=1.0)), 4)  # log(1 + 2 exp(-1))
    0.5514
    """
    n = len(z) // 2
    scores = (z @ z.T / tau).fill_diagonal_(-math.inf)
    partner = torch.arange(2 * n, device=z.device).roll(n)
    return F.cross_entropy(scores, partner)


def picture_pool(num: int, generator: torch.Generator) -> Tensor:
    """``num`` procedural pictures, uint8 [num, 3, 64, 64], drawn in chunks."""
    pool = torch.empty(num, 3, 64, 64, dtype=torch.uint8, device=generator.device)
    for part in pool.split(4096):
        part.copy_(draw_leaves(len(part), generator))
    return pool


def draws(n: int, generator: torch.Generator, settings: Contrast) -> dict[str, Tensor]:
    """All random numbers of n views."""
    device = generator.device

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(n, generator=generator, device=device)

    area, ratio = uniform(settings.least_crop, 1), torch.exp(uniform(math.log(3 / 4), math.log(4 / 3)))
    width, height = (area * ratio).sqrt().clamp_max(1), (area / ratio).sqrt().clamp_max(1)
    return {
        "width": width,
        "height": height,
        "left": uniform(-1, 1) * (1 - width),
        "top": uniform(-1, 1) * (1 - height),
        "mirror": uniform(0, 1).lt(0.5).float() * -2 + 1,
        "light": uniform(0.6, 1.4),
        "contrast": uniform(0.6, 1.4),
        "saturation": uniform(0.6, 1.4),
        "hue": uniform(-0.1, 0.1) * 2 * math.pi,
        "jitter": uniform(0, 1).lt(0.8).float(),
        "grey": uniform(0, 1).lt(0.2).float(),
        "blur": uniform(0, 1).lt(0.3).float() * uniform(0.1, 1.0),
    }


def views(pictures: Tensor, d: dict[str, Tensor], side: int) -> Tensor:
    """A crop of each picture with other light and colour, normalised: uint8 [n, 3, s, s] -> float [n, 3, side, side]."""
    x = _crop(pictures.float() / 255, d, side)
    wide = {name: value[:, None, None, None] for name, value in d.items()}
    x = x + wide["jitter"] * (_recoloured(x, wide, d["hue"]) - x)
    grey = x.mean(dim=1, keepdim=True)
    x = x + wide["grey"] * (grey - x)
    blurred = F.avg_pool2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
    x = x + wide["blur"] * (blurred - x)
    return (x - MEAN) / STD


def _crop(x: Tensor, d: dict[str, Tensor], side: int) -> Tensor:
    """Sampled at twice the side and averaged, so that large crops do not alias."""
    zero = torch.zeros_like(d["left"])
    across = torch.stack([d["width"] * d["mirror"], zero, d["left"]], dim=1)
    down = torch.stack([zero, d["height"], d["top"]], dim=1)
    grid = F.affine_grid(torch.stack([across, down], dim=1), [len(x), 3, 2 * side, 2 * side], align_corners=False)
    return F.avg_pool2d(F.grid_sample(x, grid, mode="bilinear", padding_mode="reflection", align_corners=False), 2)


def _recoloured(x: Tensor, wide: dict[str, Tensor], hue: Tensor) -> Tensor:
    x = (x * wide["light"]).clamp(0, 1)
    x = x.mean(dim=(1, 2, 3), keepdim=True) * (1 - wide["contrast"]) + x * wide["contrast"]
    grey = x.mean(dim=1, keepdim=True)
    x = grey + wide["saturation"] * (x - grey)
    # a rotation about the grey axis
    cos, sin = hue.cos(), hue.sin() / math.sqrt(3)
    a, b, c = (1 + 2 * cos) / 3, (1 - cos) / 3 - sin, (1 - cos) / 3 + sin
    turn = torch.stack([a, b, c, c, a, b, b, c, a], dim=1).reshape(-1, 3, 3)
    return torch.einsum("nij,njhw->nihw", turn, x).clamp(0, 1)


def _batches(settings: Contrast, generator: torch.Generator) -> Iterator[Tensor]:
    for _ in range(settings.num_steps):
        yield torch.randint(settings.num_pictures, (settings.num_pairs,), generator=generator, device=generator.device)


def _rate(step: int, settings: Contrast) -> float:
    """A linear start, then half a cosine down to zero."""
    if step < settings.warm_up:
        return (step + 1) / settings.warm_up
    done = (step - settings.warm_up) / max(1, settings.num_steps - settings.warm_up)
    return 0.5 * (1 + math.cos(math.pi * done))
