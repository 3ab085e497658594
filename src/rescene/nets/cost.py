"""What a network costs: bytes of its state and FLOPs of a forward pass, in the paper's conventions.

A hook on the network counts its own work (``FlopMeter``). Networks that only a step knows, such as a generator of
images, tell their FLOPs to whoever listens. In a rehearsal, which a forecast is made of, a loop runs once and counts as often as
it would run.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rescene.nets.arch import COUNTER, Arch
from rescene.nets.own_networks import OwnBody

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
    if isinstance(net.body, OwnBody):
        net.body.settle()
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


@dataclass
class Rehearsal:
    """How often the work of this moment counts, and how many pixels each pixel of a rehearsed picture stands for."""

    pixels: float
    times: float = 1.0


_rehearsal: ContextVar[Rehearsal | None] = ContextVar("rehearsal", default=None)


@contextmanager
def rehearsal(pixels: float) -> Iterator[None]:
    """Work inside is counted, not done: see ``laps`` and ``alike``."""
    token = _rehearsal.set(Rehearsal(pixels))
    try:
        yield
    finally:
        _rehearsal.reset(token)


def is_rehearsal() -> bool:
    """For steps that know in a closed form what they cost."""
    return _rehearsal.get() is not None


def real_side(side: int) -> int:
    """The side in pixels of the pictures that those of a rehearsal stand for; outside of one, ``side`` itself.

    >>> with rehearsal(pixels=64):
    ...     real_side(4)
    32
    """
    now = _rehearsal.get()
    return side if now is None else round(side * now.pixels**0.5)


def laps(num: int) -> Iterator[int]:
    """0 .. num-1, for a loop whose laps cost the same. In a rehearsal only the first lap is made; its work counts ``num`` times.

    >>> heard = []
    >>> with flops_to(heard.append), rehearsal(pixels=1):
    ...     for lap in laps(5):
    ...         tell_flops(3)
    >>> heard
    [15]
    """
    if not is_rehearsal():
        yield from range(num)
    elif num:
        with _counted(num):
            yield 0


def alike(batches: Sequence[Tensor]) -> Iterator[Tensor]:
    """The batches; in a rehearsal one of each size, whose work counts for all of that size."""
    if not is_rehearsal():
        yield from batches
        return
    for size, times in Counter(map(len, batches)).items():
        with _counted(times):
            yield next(batch for batch in batches if len(batch) == size)


@contextmanager
def _counted(times: int) -> Iterator[None]:
    now = _rehearsal.get()
    assert now is not None
    before, now.times = now.times, now.times * times
    try:
        yield
    finally:
        now.times = before


def tell_flops(flops: int, otherwise: Callable[[int], None] | None = None) -> None:
    """Report work to whoever listens, else to ``otherwise``; nobody need listen.

    Work without ``otherwise`` is that of a step's own network, whose size follows the picture's.
    """
    now = _rehearsal.get()
    if now is not None:
        flops = round(flops * now.times * (1 if otherwise else now.pixels))
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


class FlopMeter:
    """Counts operations by a hook on the network's body.

    An image costs F going forward. A backward pass costs 2F when weights learn (gradients of inputs and of weights) and F
    when only pixels do. F counts convolutions and linear layers, two operations per multiply-add.
    """

    def __init__(self, arch: Arch) -> None:
        self.arch = arch
        self.side = "server"
        self.flops = {"client": 0, "server": 0, "evaluation": 0}
        self._lock = threading.Lock()

    @contextmanager
    def on(self, side: str) -> Iterator[None]:
        """Everything inside is work of this side."""
        before, self.side = self.side, side
        try:
            yield
        finally:
            self.side = before

    def add(self, flops: int) -> None:
        """Work of this side. Networks that no hook watches are told of by their steps."""
        with self._lock:  # clients may work side by side
            self.flops[self.side] += flops

    def attach(self, net: nn.Module, num_classes: int) -> nn.Module:
        """Count every pass through this network from now on, at the price of the real network."""
        cost = forward_flops(self.arch, num_classes)

        def count(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            passes = 1
            if torch.is_grad_enabled() and output.requires_grad:
                passes += 2 if any(p.requires_grad for p in module.parameters()) else 1
            tell_flops(_num_images(inputs[0]) * cost * passes, self.add)

        def count_passes(num_passes: int) -> None:
            """For steps that replay recorded work, which calls no hooks: images times passes through the network."""
            tell_flops(num_passes * cost, self.add)

        net.body.register_forward_hook(count)  # type: ignore[union-attr]
        net.count_passes = count_passes  # type: ignore[assignment]
        return net


def _num_images(x: Tensor) -> int:
    """Images in a batch, also inside vmap, where a batch of n looks like a single image."""
    return torch.func.debug_unwrap(x).numel() // x.shape[1:].numel()
