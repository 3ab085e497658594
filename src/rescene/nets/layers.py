"""What the convolutional bodies share: normalisation layers, the conv + norm pair, and their initial values."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

NORMS = ("batch", "group")
MAX_GROUPS = 32


def norm_layer(norm: str, channels: int) -> nn.Module:
    """BatchNorm ("batch") or GroupNorm ("group") over ``channels``.

    GroupNorm has min(32, channels) groups; where that does not divide the channels, the next smaller number that does.
    """
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    groups = max(g for g in range(1, MAX_GROUPS + 1) if channels % g == 0)
    return nn.GroupNorm(groups, channels)


def conv_norm(channels_in: int, channels_out: int, *, kernel: int, stride: int = 1, norm: str) -> nn.Sequential:
    """Convolution without bias (the norm has one), padded to keep the size at stride 1, then the norm."""
    conv = nn.Conv2d(channels_in, channels_out, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(conv, norm_layer(norm, channels_out))


class ConvBody(nn.Sequential):
    """Named stages, then global average pooling: images [n, 3, s, s] -> features [n, feature_size].

    The stages stay reachable by name (``body.stem``, ``body.stage1``, ...) for losses that look at inner layers.
    """

    def __init__(self, stages: OrderedDict[str, nn.Module], feature_size: int) -> None:
        pooled = OrderedDict(stages)
        pooled["pool"] = nn.AdaptiveAvgPool2d(1)
        pooled["flatten"] = nn.Flatten()
        super().__init__(pooled)
        self.feature_size = feature_size

    def initialise(self, generator: torch.Generator) -> None:
        """Kaiming-normal convolutions (fan out, ReLU); norms start as the identity with empty statistics."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu", generator=generator)
            elif isinstance(module, (nn.BatchNorm2d, nn.GroupNorm)):
                module.reset_parameters()
