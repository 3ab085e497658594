"""Networks with features(x), a head and a forward pass; the head grows with the classes."""

from rescene.nets.base import NAMES, Arch, Net, build, check_fits, grow_head
from rescene.nets.cost import (
    FLOAT_BYTES,
    body_cost,
    count_passes,
    flops_to,
    forward_flops,
    layer_flops,
    model_bytes,
    num_parameters,
    state_bytes,
    tell_flops,
)
from rescene.nets.weights import load_weights

__all__ = [
    "FLOAT_BYTES",
    "NAMES",
    "Arch",
    "Net",
    "body_cost",
    "build",
    "check_fits",
    "count_passes",
    "flops_to",
    "forward_flops",
    "grow_head",
    "layer_flops",
    "load_weights",
    "model_bytes",
    "num_parameters",
    "state_bytes",
    "tell_flops",
]
