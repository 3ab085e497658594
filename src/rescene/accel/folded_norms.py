"""A fused network that only answers: every norm folded into the convolution before it, so that none is left to compute."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rescene.accel.fused_layers import FlatWeights, FusedConv, FusedNorm, FusedResidual, FusedStage, widened


@dataclass(frozen=True)
class FoldedConv:
    """A convolution with the norm behind it folded in: conv(x, weight) + bias."""

    weight: Tensor
    bias: Tensor
    stride: tuple[int, ...]
    padding: tuple[int, ...]

    def __call__(self, x: Tensor, shortcut: Tensor | None = None, extra_bias: Tensor | float = 0.0) -> Tensor:
        """relu(conv(x) + shortcut)."""
        bias = self.bias + extra_bias
        place = (self.stride, self.padding, (1, 1), 1)
        if not x.is_cuda:
            y = F.conv2d(x, self.weight, bias, self.stride, self.padding)
            return F.relu(y if shortcut is None else y + shortcut)
        x, weight = widened(x, self.weight)
        if shortcut is None:
            return torch.cudnn_convolution_relu(x, weight, bias, *place)
        return torch.cudnn_convolution_add_relu(x, weight, shortcut, 1.0, bias, *place)


class Folded:
    """The body of a fused network in eval mode, with every norm folded into the convolution before it.

    The folded weights follow ``weights`` on ``refresh``. The running statistics are those of the network at that time.
    """

    def __init__(self, body: nn.Module, weights: FlatWeights) -> None:
        self.body = body
        pairs = [(m[0], m[1]) for m in body.modules() if isinstance(m, nn.Sequential) and len(m) >= 2]
        self._pairs = [(c, n) for c, n in pairs if isinstance(c, FusedConv) and isinstance(n, FusedNorm)]
        self._weights = weights
        self._convs = {
            conv: FoldedConv(
                torch.empty_like(conv.weight),
                torch.empty(norm.num_features, dtype=conv.weight.dtype, device=norm.weight.device),
                conv.stride,
                conv.padding,  # type: ignore[arg-type]
            )
            for conv, norm in self._pairs
        }

    @staticmethod
    def is_possible(body: nn.Module) -> bool:
        """Every norm is a batch norm behind a convolution of its own."""
        norms = [m for m in body.modules() if isinstance(m, (nn.GroupNorm, nn.LayerNorm, nn.BatchNorm2d))]
        return bool(norms) and all(isinstance(norm, FusedNorm) for norm in norms)

    def refresh(self) -> None:
        """Compute the folded weights and biases again from the network's present weights and running statistics."""
        for conv, norm in self._pairs:
            scale = norm.weight * torch.rsqrt(norm.running_var + norm.eps)  # type: ignore[operator,arg-type]
            folded = self._convs[conv]
            torch.mul(self._weights.master(conv.weight), scale.view(-1, 1, 1, 1), out=folded.weight)
            folded.bias.copy_(norm.bias - norm.running_mean * scale)  # type: ignore[operator]

    def __call__(self, x: Tensor) -> Tensor:
        return self._through(self.body, x)

    def _through(self, module: nn.Module, x: Tensor) -> Tensor:
        if isinstance(module, FusedStage):
            return self._convs[module[0]](x)  # type: ignore[index]
        if isinstance(module, FusedResidual):
            *inner, last = [layer[0] for layer in module.main if not isinstance(layer, nn.ReLU)]  # type: ignore[index]
            shortcut, bias = x, torch.zeros((), dtype=x.dtype, device=x.device)
            if not isinstance(module.shortcut, nn.Identity):
                folded = self._convs[module.shortcut[0]]  # type: ignore[index]
                shortcut, bias = F.conv2d(x, folded.weight, None, folded.stride, folded.padding), folded.bias
            for conv in inner:
                x = self._convs[conv](x)
            return self._convs[last](x, shortcut, bias)
        if isinstance(module, nn.Sequential):
            for child in module:
                x = self._through(child, x)
            return x
        return module(x)  # type: ignore[no-any-return]
