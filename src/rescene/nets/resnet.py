"""Residual networks with the CIFAR stem: ResNet-18 (basic blocks) and ResNet-50 (bottlenecks)."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

from rescene.nets.layers import ConvBody, conv_norm

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
