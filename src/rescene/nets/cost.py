"""What a network costs: bytes of its state and FLOPs of a forward pass, in the paper's conventions.

A hook on the network counts its own work (the engine's ledger). Networks that only a step knows, such as a generator of
images, tell their FLOPs to whoever listens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from rescene.nets.base import COUNTER, Arch

# Convolutions and linear layers only: attention's two products (bmm or a fused kernel) are left out, as in the paper.
COUNTED = (torch.ops.aten.convolution, torch.ops.aten.addmm, torch.ops.aten.mm)


def state_bytes(state: Mapping[str, Tensor]) -> int:
    """Bytes of the parameters and of BatchNorm's running mean and variance, each in its dtype.

    BatchNorm's step counters are not counted: with that, ResNet-18 with 10 classes takes the paper's 44.73 MB.

    >>> state_bytes({"w": torch.zeros(3), "num_batches_tracked": torch.tensor(0)})
    12
    """
    return sum(value.numel() * value.element_size() for key, value in state.items() if not key.endswith(COUNTER))


def forward_flops(arch: Arch, num_classes: int) -> int:
    """FLOPs of one image's forward pass: two per multiply-add, convolutions and linear layers only.

    Counted on the meta device, so nothing is computed. A backward pass is twice as much (paper's cost table).
    """
    body, feature_size = _body_flops(arch)
    return body + 2 * feature_size * num_classes


@lru_cache(maxsize=64)
def _body_flops(arch: Arch) -> tuple[int, int]:
    """FLOPs of one image up to its features, and how many features there are: the head is the part that grows."""
    net = arch.skeleton(1).eval()
    image = torch.empty(1, 3, arch.image_size, arch.image_size, device="meta")
    return counted_flops(net.features, image), net.feature_size


def counted_flops(function: Callable[..., Tensor], *inputs: Tensor) -> int:
    """FLOPs of one call without gradients; on the meta device nothing is computed."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        function(*inputs)
    counts = counter.get_flop_counts()["Global"]
    return sum(int(counts.get(op, 0)) for op in COUNTED)


_listener: ContextVar[Callable[[int], None] | None] = ContextVar("flops listener", default=None)


def tell_flops(flops: int, otherwise: Callable[[int], None] | None = None) -> None:
    """Report work to whoever listens, else to ``otherwise``; nobody need listen."""
    listener = _listener.get() or otherwise
    if listener is not None:
        listener(flops)


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
