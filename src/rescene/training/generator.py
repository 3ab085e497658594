"""The network that paints synthetic images, and the two ways in which its start weights learn from each search.

A search trains a copy of the generator. What the copy found out comes back to the base as a gradient: the sum of the copy's
gradients (first-order MAML) or the way it went (Reptile).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor, nn

from rescene.nets import layer_flops, tell_flops

LEAK = 0.2
REDUCTION = 4  # two doublings: the generator starts at a quarter of the image's side


class ImageGenerator(nn.Module):
    """Latent vectors [n, latent_size] -> images [n, 3, image_size, image_size] with values in [0, 1].

    A side that is no multiple of four is made a little larger and cut.
    """

    def __init__(self, latent_size: int, width: int, image_size: int) -> None:
        super().__init__()
        self.image_size, self.channels, self.start = image_size, 2 * width, math.ceil(image_size / REDUCTION)
        self.first = nn.Linear(latent_size, self.channels * self.start**2)
        self.rest = nn.Sequential(
            nn.BatchNorm2d(2 * width),
            *_doubling(2 * width, 2 * width),
            *_doubling(2 * width, width),
            nn.Conv2d(width, 3, 3, padding=1),
            nn.Sigmoid(),
        )

    def forward(self, z: Tensor) -> Tensor:
        coarse = self.first(z).view(len(z), self.channels, self.start, self.start)
        images: Tensor = self.rest(coarse)
        return images[..., : self.image_size, : self.image_size]


def _doubling(channels_in: int, channels_out: int) -> list[nn.Module]:
    conv = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False)
    return [nn.Upsample(scale_factor=2), conv, nn.BatchNorm2d(channels_out), nn.LeakyReLU(LEAK)]


def fresh_generator(latent_size: int, width: int, image_size: int, source: torch.Generator) -> ImageGenerator:
    """A generator in training mode on the source's device, every weight drawn from ``source`` as torch would draw it."""
    with torch.device("meta"):
        made = ImageGenerator(latent_size, width, image_size)
    made = made.to_empty(device=source.device)
    for module in made.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_parameters()
        elif isinstance(module, (nn.Linear, nn.Conv2d)):
            nn.init.kaiming_uniform_(module.weight, a=math.sqrt(5), generator=source)
            if module.bias is not None:
                bound = 1 / math.sqrt(module.weight[0].numel())
                nn.init.uniform_(module.bias, -bound, bound, generator=source)
    return made


def restored_generator(weights: Mapping[str, Tensor], latent_size: int, width: int, image_size: int) -> ImageGenerator:
    """The generator with (a copy of) these weights, in eval mode on their device."""
    with torch.device("meta"):
        made = ImageGenerator(latent_size, width, image_size)
    made.load_state_dict({name: value.clone() for name, value in weights.items()}, assign=True)
    return made.eval()


def grow_inputs(weights: Mapping[str, Tensor], num_inputs: int, source: torch.Generator) -> dict[str, Tensor]:
    """Weights of a generator with ``num_inputs`` inputs: the old ones are kept, new columns are drawn as torch would draw them."""
    first, grown = weights["first.weight"], {name: value.clone() for name, value in weights.items()}
    if num_inputs > first.shape[1]:
        bound = 1 / math.sqrt(num_inputs)
        columns = torch.empty(len(first), num_inputs - first.shape[1], device=source.device)
        grown["first.weight"] = torch.cat([first, columns.uniform_(-bound, bound, generator=source).to(first)], dim=1)
    return grown


def tell_painting(num_images: int, passes: int, latent_size: int, width: int, image_size: int) -> None:
    """Count ``passes`` passes of so many latent vectors through a generator of this very size, in a rehearsal too."""
    flops = generator_flops(latent_size, width, image_size)
    tell_flops(num_images * passes * flops, otherwise=lambda flops: None)


def generator_parameters(latent_size: int, width: int, image_size: int) -> int:
    """How many weights a generator has."""
    with torch.device("meta"):
        made = ImageGenerator(latent_size, width, image_size)
    return sum(p.numel() for p in made.parameters())


@lru_cache(maxsize=16)
def generator_flops(latent_size: int, width: int, image_size: int) -> int:
    """FLOPs of painting one image."""
    with torch.random.fork_rng(devices=[]):  # its values do not matter, and nobody else's draws change
        generator = ImageGenerator(latent_size, width, image_size)
    return layer_flops(generator, torch.zeros(1, latent_size))


@torch.no_grad()
def add_gradients(base: nn.Module, copy: nn.Module) -> None:
    """First-order MAML: the copy's present gradients are added to the base's, as if both were the same network."""
    for parameter, moved in zip(base.parameters(), copy.parameters(), strict=True):
        if moved.grad is not None:
            parameter.grad = moved.grad.clone() if parameter.grad is None else parameter.grad + moved.grad


@torch.no_grad()
def reptile_gradients(base: nn.Module, copy: nn.Module, scale: float) -> None:
    """Reptile: the base's gradient is scale * (base - copy), so that a descent step goes where the copy went."""
    for parameter, moved in zip(base.parameters(), copy.parameters(), strict=True):
        parameter.grad = scale * (parameter - moved)
