"""Networks with features(x), a head and a forward pass; the head grows with the classes."""

from rescene.nets.arch import NAMES, Arch, Net, build, check_fits, grow_head, is_recordable
from rescene.nets.cost import (
    FLOAT_BYTES,
    alike,
    body_cost,
    count_passes,
    flops_to,
    forward_flops,
    is_rehearsal,
    laps,
    layer_flops,
    model_bytes,
    num_parameters,
    real_side,
    rehearsal,
    state_bytes,
    tell_flops,
)
from rescene.nets.own_networks import OwnBody, OwnModel, is_own, own_model, own_names, register_model
from rescene.nets.prompts import PromptPool, pool_of, pool_state, prompted_features
from rescene.nets.vit import attention_weights
from rescene.nets.weights import load_weights

__all__ = [
    "FLOAT_BYTES",
    "NAMES",
    "Arch",
    "Net",
    "OwnBody",
    "OwnModel",
    "PromptPool",
    "alike",
    "attention_weights",
    "body_cost",
    "build",
    "check_fits",
    "count_passes",
    "flops_to",
    "forward_flops",
    "grow_head",
    "is_own",
    "is_recordable",
    "is_rehearsal",
    "laps",
    "layer_flops",
    "load_weights",
    "model_bytes",
    "num_parameters",
    "own_model",
    "own_names",
    "pool_of",
    "pool_state",
    "prompted_features",
    "register_model",
    "real_side",
    "rehearsal",
    "state_bytes",
    "tell_flops",
]
