"""Networks with features(x), a head and a forward pass; the head grows with the classes."""

from rescene.nets.base import NAMES, Arch, Net, build, check_fits, grow_head
from rescene.nets.cost import forward_flops, state_bytes
from rescene.nets.weights import load_weights

__all__ = [
    "NAMES",
    "Arch",
    "Net",
    "build",
    "check_fits",
    "forward_flops",
    "grow_head",
    "load_weights",
    "state_bytes",
]
