"""What a network costs: bytes of its state and FLOPs of a forward pass, in the paper's conventions."""

from __future__ import annotations

from collections.abc import Mapping
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


@lru_cache(maxsize=64)
def forward_flops(arch: Arch, num_classes: int) -> int:
    """FLOPs of one image's forward pass: two per multiply-add, convolutions and linear layers only.

    Counted on the meta device, so nothing is computed. A backward pass is twice as much (paper's cost table).
    """
    net = arch.skeleton(num_classes).eval()
    image = torch.empty(1, 3, arch.image_size, arch.image_size, device="meta")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        net(image)
    counts = counter.get_flop_counts()["Global"]
    return sum(int(counts.get(op, 0)) for op in COUNTED)
