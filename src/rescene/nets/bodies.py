"""Bodies of networks (images -> features): a small ConvNet, residual networks, and none or one hidden layer.

    ConvNet    strided; 94 thousand parameters, quick enough for a laptop's CPU
    ResNet     with the CIFAR stem: ResNet-18 (basic blocks) and ResNet-50 (bottlenecks)
    MLP        no hidden layer or one over all values of the picture: for pictures whose lens has already done the looking

The convolutional ones share normalisation layers, the conv + norm pair, and their initial values.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

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


CONVNET_WIDTH = 32


def convnet_body(*, norm: str, width: int | None = None) -> ConvBody:
    """Three times conv3x3 (stride 2), norm, ReLU of widths w, 2w, 4w; 4w features (128 by default)."""
    width = CONVNET_WIDTH if width is None else width
    stages: OrderedDict[str, nn.Module] = OrderedDict()
    channels = 3
    for i in range(3):
        wider = width * 2**i
        stages[f"stage{i + 1}"] = conv_norm(channels, wider, kernel=3, stride=2, norm=norm).append(nn.ReLU())
        channels = wider
    return ConvBody(stages, feature_size=channels)


MLP_WIDTH = 256


class Perceptron(nn.Sequential):
    """Pictures [n, channels, s, s] -> [n, width]: linear, ReLU."""

    def __init__(self, num_values: int, width: int | None = None) -> None:
        self.feature_size = MLP_WIDTH if width is None else width
        super().__init__(nn.Flatten(), nn.Linear(num_values, self.feature_size), nn.ReLU())

    def initialise(self, generator: torch.Generator) -> None:
        """Kaiming-normal weights (fan in, ReLU), no bias."""
        linear = self[1]
        assert isinstance(linear, nn.Linear)
        nn.init.kaiming_normal_(linear.weight, nonlinearity="relu", generator=generator)
        nn.init.zeros_(linear.bias)


class Identity(nn.Flatten):
    """Pictures [n, channels, s, s] -> their values, [n, channels * s * s]: the head is then the whole network."""

    def __init__(self, num_values: int) -> None:
        super().__init__()
        self.feature_size = num_values

    def initialise(self, generator: torch.Generator) -> None:
        """There is nothing to set."""


STEM_WIDTH = 64
WIDTHS = (64, 128, 256, 512)
MAX_POOL_FROM = 64  # image side in pixels from which a max-pool follows the stem (TinyImageNet in the paper)


class Residual(nn.Module):
    """relu(main(x) + shortcut(x)); the shortcut is a 1x1 conv + norm where the shape changes, else the identity."""

    def __init__(self, main: nn.Sequential, channels_in: int, channels_out: int, *, stride: int, norm: str) -> None:
        super().__init__()
        self.main = main
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = conv_norm(channels_in, channels_out, kernel=1, stride=stride, norm=norm)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.main(x) + self.shortcut(x))
        return out


def basic_block(channels_in: int, width: int, *, stride: int, norm: str) -> Residual:
    """Two 3x3 convolutions; ``width`` channels out."""
    main = nn.Sequential(
        conv_norm(channels_in, width, kernel=3, stride=stride, norm=norm),
        nn.ReLU(),
        conv_norm(width, width, kernel=3, norm=norm),
    )
    return Residual(main, channels_in, width, stride=stride, norm=norm)


def bottleneck(channels_in: int, width: int, *, stride: int, norm: str) -> Residual:
    """1x1, 3x3 (which carries the stride), 1x1 convolutions; ``4 * width`` channels out."""
    main = nn.Sequential(
        conv_norm(channels_in, width, kernel=1, norm=norm),
        nn.ReLU(),
        conv_norm(width, width, kernel=3, stride=stride, norm=norm),
        nn.ReLU(),
        conv_norm(width, 4 * width, kernel=1, norm=norm),
    )
    return Residual(main, channels_in, 4 * width, stride=stride, norm=norm)


BLOCKS = {18: (basic_block, 1, (2, 2, 2, 2)), 50: (bottleneck, 4, (3, 4, 6, 3))}  # block, widening, blocks per stage


def resnet_body(depth: int, *, image_size: int, norm: str) -> ConvBody:
    """The body of ResNet-``depth`` (18 or 50): 512 or 2048 features.

    From 64 pixels on, a parameter-free max-pool halves the stem's output, so the weights fit either image size.
    """
    block, widening, num_blocks = BLOCKS[depth]
    stages: OrderedDict[str, nn.Module] = OrderedDict()
    stages["stem"] = conv_norm(3, STEM_WIDTH, kernel=3, norm=norm).append(nn.ReLU())
    if image_size >= MAX_POOL_FROM:
        stages["max_pool"] = nn.MaxPool2d(3, stride=2, padding=1)
    channels = STEM_WIDTH
    for i, (width, count) in enumerate(zip(WIDTHS, num_blocks, strict=True)):
        blocks = nn.Sequential()
        for j in range(count):
            stride = 2 if i > 0 and j == 0 else 1
            blocks.append(block(channels, width, stride=stride, norm=norm))
            channels = width * widening
        stages[f"stage{i + 1}"] = blocks
    return ConvBody(stages, feature_size=channels)
