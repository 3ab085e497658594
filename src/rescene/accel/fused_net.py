"""A network as a recorded step sees it: with few, large operations, and in bfloat16 where ``train.precision`` allows it.

``Passes`` is a network that learns from a loss of one's own, ``frozen`` one that only answers. Features and logits come back in
float32 either way.

A network that only answers has every norm folded into the convolution before it, so that none is left to compute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rescene.accel.fused_layers import (
    FlatWeights,
    FusedConv,
    FusedNorm,
    FusedResidual,
    FusedStage,
    SideStream,
    fuse,
    widened,
)
from rescene.nets import count_passes, is_recordable


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


class SgdSettings(Protocol):
    """What a recorded step of SGD needs to know; ``rescene.training.Training`` has it all."""

    @property
    def batch_size(self) -> int:
        """Images in a batch."""

    @property
    def smallest_batch(self) -> int:
        """A last batch of fewer images is left out."""

    @property
    def momentum(self) -> float:
        """Momentum of SGD."""

    @property
    def weight_decay(self) -> float:
        """L2 penalty of SGD."""

    @property
    def precision(self) -> str:
        """``float32``, ``bfloat16``, or ``auto``: bfloat16 on a GPU."""

    @property
    def augment(self) -> bool | str:
        """Whether images are cropped and flipped at random; ``new``: those that are not remembered."""


def is_half(settings: SgdSettings, device: torch.device) -> bool:
    """Whether training on this device computes in bfloat16."""
    return settings.precision == "bfloat16" or (settings.precision == "auto" and device.type == "cuda")


class Passes(nn.Module):
    """``net``, ready for a loss that may look through it several times in a step.

    Each look has a fused copy to itself: what a norm sums and the gradients of weights (which a second stream may still be
    writing) belong to one look. All copies share the weights and the running statistics, and so does ``net``: its own
    parameters are the float32 weights while it learns, so that a penalty on them is part of the loss.
    """

    def __init__(self, net: nn.Module, half: bool) -> None:
        super().__init__()
        self.net, self.is_half = net, half
        self.own = [p for p in net.parameters() if p.requires_grad]
        self.device = self.own[0].device
        self.side = SideStream(self.device) if self.device.type == "cuda" else None
        self.looks = 0  # so far in this step
        self.batches = torch.zeros((), dtype=torch.long, device=self.device)  # seen by norms in training
        first = self._copy()
        self.weights = FlatWeights(first, half)
        self.copies = [first]
        for own, master in zip(self.own, self.weights.parameters, strict=True):
            own.data = self.weights.master(master)

    def _copy(self) -> Any:
        valid = torch.zeros((), dtype=torch.int32, device=self.device)
        copy = fuse(self.net, valid, self.side)
        copy.valid = valid
        for mine, given in zip(copy.modules(), self.net.modules(), strict=True):
            for name, statistic in mine._buffers.items():
                if statistic is not None:
                    mine._buffers[name] = given._buffers[name]
        return copy

    def _another(self) -> Any:
        copy = self._copy()
        for mine, shared in zip(copy.parameters(), self.copies[0].parameters(), strict=True):
            mine.data = shared.data
        return copy

    def train(self, mode: bool = True) -> Passes:
        """Set training mode for this network and for all its copies."""
        for copy in getattr(self, "copies", []):
            copy.train(mode)
        return super().train(mode)

    def features(self, x: Tensor) -> Tensor:
        """Features of a batch. Each call in a step uses a copy of its own, because each copy holds one batch's statistics."""
        if self.looks == len(self.copies):
            self.copies.append(self._another())
        copy = self.copies[self.looks]
        self.looks += 1
        copy.sums.zero_()
        copy.valid.fill_(len(x))
        self.batches += int(copy.training)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.is_half, cache_enabled=False):
            out: Tensor = copy.features(x)
        count_passes(self.net, (3 if out.requires_grad else 1) * len(x))  # the copies have no hooks
        return out.float()

    def head(self, features: Tensor) -> Tensor:
        """Logits of features. All copies share one head."""
        out: Tensor = self.copies[0].head(features)
        return out

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))

    def state(self) -> list[Tensor]:
        """All that a step changes."""
        low = [] if self.weights.low is None else [self.weights.low]
        return [self.weights.theta, self.weights.velocity, *low, *self.net.buffers(), self.batches]

    def gradients(self, value: Tensor) -> list[list[Tensor]]:
        """Gradients of the loss: one list for each forward pass and one for ``net`` itself. The caller adds them."""
        used, self.looks = self.copies[: max(self.looks, 1)], 0
        leaves = [[p for p in copy.parameters() if p.requires_grad] for copy in used] + [self.own]
        found = torch.autograd.grad(value, [p for group in leaves for p in group], allow_unused=True)
        if self.side is not None:
            self.side.join()
        count = len(self.own)
        groups = [list(found[i : i + count]) for i in range(0, len(found), count)]
        return [
            [torch.zeros_like(p) if g is None else g for p, g in zip(self.own, group, strict=True)]
            for group in groups
            if any(g is not None for g in group)
        ]

    @torch.no_grad()
    def release(self) -> None:
        """``net`` gets weights of its own again."""
        for own in self.own:
            own.data = own.data.clone(memory_format=torch.contiguous_format)
        for name, value in self.net.named_buffers():
            if name.endswith("num_batches_tracked"):
                value += self.batches


def frozen(net: nn.Module, settings: SgdSettings) -> nn.Module:
    """``net`` as a teacher: it answers in eval mode, in the arithmetic of recorded steps, and nothing of it learns."""
    half = is_half(settings, next(net.parameters()).device) and is_recordable(net)
    return _Answers(net) if half else net.eval().requires_grad_(False)


class _Answers(nn.Module):
    """Logits of a network in bfloat16, its norms folded into the convolutions where that is possible."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net.eval()
        self.fused: Any = fuse(net, torch.zeros((), dtype=torch.int32, device=next(net.parameters()).device))
        weights = FlatWeights(self.fused.requires_grad_(True), half=True)
        self.requires_grad_(False)
        self.folded = Folded(self.fused.body, weights) if Folded.is_possible(self.fused.body) else None
        if self.folded is not None:
            self.folded.refresh()

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, cache_enabled=False):
            features = self.fused.features(x) if self.folded is None else self.folded(x.bfloat16())
        count_passes(self.net, len(x))
        return F.linear(features.float(), self.fused.head.weight, self.fused.head.bias)
