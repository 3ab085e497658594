"""The network of a lens: a narrow ResNet whose inner stages are read out."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from rescene.nets.bodies import basic_block, conv_norm

WIDTHS = (48, 96, 192, 192)


class LensNet(nn.Module):
    """A stem and four stages of two basic blocks, each stage after the first at half the resolution of the one before.

    ``forward`` gives the output of every stage: pictures [n, 3, s, s] -> [n, w_1, s, s], [n, w_2, s/2, s/2], ...
    """

    def __init__(self, widths: Sequence[int] = WIDTHS) -> None:
        super().__init__()
        self.widths = tuple(widths)
        self.stem = nn.Sequential(*conv_norm(3, widths[0], kernel=3, norm="batch"), nn.ReLU())
        self.stages = nn.ModuleList()
        channels = widths[0]
        for i, width in enumerate(widths):
            first = basic_block(channels, width, stride=1 if i == 0 else 2, norm="batch")
            self.stages.append(nn.Sequential(first, basic_block(width, width, stride=1, norm="batch")))
            channels = width

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.stem(x)
        outputs = []
        for stage in self.stages:
            x = stage(x)
            outputs.append(x)
        return outputs


def fold(net: nn.Module) -> None:
    """Put every BatchNorm into the convolution before it, in place: the same function, faster and smaller."""
    for module in list(net.modules()):
        if isinstance(module, nn.Sequential):
            for i in range(len(module) - 1):
                conv, norm = module[i], module[i + 1]
                if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                    module[i], module[i + 1] = fuse_conv_bn_eval(conv.eval(), norm.eval()), nn.Identity()
