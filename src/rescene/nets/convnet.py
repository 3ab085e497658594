"""A small strided ConvNet: 94 thousand parameters, quick enough for a laptop's CPU."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from rescene.nets.layers import ConvBody, conv_norm

DEFAULT_WIDTH = 32


def convnet_body(*, norm: str, width: int | None = None) -> ConvBody:
    """Three times conv3x3 (stride 2), norm, ReLU of widths w, 2w, 4w; 4w features (128 by default)."""
    width = DEFAULT_WIDTH if width is None else width
    stages: OrderedDict[str, nn.Module] = OrderedDict()
    channels = 3
    for i in range(3):
        wider = width * 2**i
        stages[f"stage{i + 1}"] = conv_norm(channels, wider, kernel=3, stride=2, norm=norm).append(nn.ReLU())
        channels = wider
    return ConvBody(stages, feature_size=channels)
