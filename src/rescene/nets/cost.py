"""What a network costs: bytes of its state and FLOPs of a forward pass, in the paper's conventions.

A hook on the network counts its own work (the engine's ledger). Networks that only a step knows, such as a generator of
images, tell their FLOPs to whoever listens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rescene.nets.base import COUNTER, Arch

FLOAT_BYTES = 4


def state_bytes(state: Mapping[str, Tensor]) -> int:
    """Bytes of the parameters and of BatchNorm's running mean and variance, each in its dtype.

    BatchNorm's step counters are not counted: with that, ResNet-18 with 10 classes takes the paper's 44.73 MB.

    >>> state_bytes({"w": torch.zeros(3), "num_batches_tracked": torch.tensor(0)})
    12
    """
    return sum(value.numel() * value.element_size() for key, value in state.items() if not key.endswith(COUNTER))


def model_bytes(arch: Arch, num_classes: int) -> int:
    """``state_bytes`` of a network that nobody has to build: forecasts ask for the same few again and again."""
    body = body_cost(arch)
    return body.state_bytes + FLOAT_BYTES * num_classes * (body.feature_size + 1)


def num_parameters(arch: Arch, num_classes: int) -> int:
    """Values that are trained, of a network that nobody has to build."""
    body = body_cost(arch)
    return body.num_parameters + num_classes * (body.feature_size + 1)


def forward_flops(arch: Arch, num_classes: int) -> int:
    """FLOPs of one image's forward pass: two per multiply-add, convolutions and linear layers only.

    A backward pass is twice as much (paper's cost table).
    """
    body = body_cost(arch)
    return body.flops + 2 * body.feature_size * num_classes


class BodyCost(NamedTuple):
    """A network up to its features; FLOPs of one image."""

    flops: int
    feature_size: int
    state_bytes: int
    num_parameters: int


@lru_cache(maxsize=64)
def body_cost(arch: Arch) -> BodyCost:
    """Found once for every head: that is the part that grows."""
    net = arch.skeleton(1)
    empty = {key: torch.zeros(value.shape, dtype=value.dtype) for key, value in net.state_dict().items()}
    net.load_state_dict(empty, assign=True)
    image = torch.zeros(1, arch.channels, arch.image_size, arch.image_size)
    num_parameters = sum(value.numel() for value in net.body.parameters())
    return BodyCost(layer_flops(net.body, image), net.feature_size, state_bytes(net.body.state_dict()), num_parameters)


def layer_flops(net: nn.Module, x: Tensor) -> int:
    """FLOPs of one pass through a network that consists of layers; convolutions and linear layers count.

    torch's own counter, and the meta device, would load its compiler: 800 modules and 200 MB, in every process that
    Flower starts for a message.
    """
    flops = 0

    def count(layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        nonlocal flops
        flops += 2 * output.numel() * layer.weight[0].numel()  # type: ignore[index]

    layers = [layer for layer in net.modules() if isinstance(layer, (nn.Conv2d, nn.Linear))]
    handles = [layer.register_forward_hook(count) for layer in layers]
    with torch.no_grad():
        net.eval()(x)
    for handle in handles:
        handle.remove()
    return flops


_listener: ContextVar[Callable[[int], None] | None] = ContextVar("flops listener", default=None)


def tell_flops(flops: int, otherwise: Callable[[int], None] | None = None) -> None:
    """Report work to whoever listens, else to ``otherwise``; nobody need listen."""
    listener = _listener.get() or otherwise
    if listener is not None:
        listener(flops)


def count_passes(net: nn.Module, num_passes: int) -> None:
    """Report passes of images through ``net`` that its hooks could not see, if it is metered at all."""
    count = getattr(net, "count_passes", None)
    if count is not None:
        count(num_passes)


@contextmanager
def flops_to(listener: Callable[[int], None]) -> Iterator[None]:
    """What is told inside goes to ``listener``.

    >>> heard = []
    >>> with flops_to(heard.append):
    ...     tell_flops(3)
    >>> heard
    [3]
    """
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
