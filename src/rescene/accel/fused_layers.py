"""Training and looking at images with few, large operations: the parts of a step that a GPU runs as one kernel each.

Each function has a Triton form (``rescene.accel.triton_kernels``) for CUDA tensors and a plain form for everything else; both
compute the same thing. ``fuse`` prepares a copy of a network for it; networks without batch normalisation pass unchanged.
"""

from __future__ import annotations

import copy
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rescene.data import Transform
from rescene.nets import is_recordable
from rescene.nets.bodies import Residual

LANES = 8  # channels at least


@cache
def _kernels() -> ModuleType | None:
    """The Triton kernels, or None where Triton is not installed."""
    try:
        from rescene.accel import triton_kernels as kernels
    except ImportError:
        return None
    return kernels


def kernels_for(tensor: Tensor) -> ModuleType | None:
    """The Triton kernels for a tensor on a GPU; None for any other tensor, or without Triton."""
    return _kernels() if tensor.is_cuda else None


class SideStream:
    """Gradients of weights on a second stream, beside the gradients of inputs, which are what the next layer waits for."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._held: list[Any] = []  # used there; not to be given to others before ``join``

    def convolution_weight_gradient(self, dy: Tensor, x: Tensor, weight: Tensor, settings: tuple[Any, ...]) -> Tensor:
        """Complete only after ``join``: nothing outside this stream may read it before."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            wide = widened(x, weight)
            gradient = _convolution_backward(dy, *wide, settings, (False, True, False))[1][:, : weight.shape[1]]
        self._held.append((dy, x, wide, gradient))
        return gradient

    def join(self) -> None:
        """Let the current stream wait for the side stream, and release the tensors that it used."""
        torch.cuda.current_stream().wait_stream(self.stream)
        self._held.clear()


def _convolution_backward(
    dy: Tensor, x: Tensor, weight: Tensor, settings: tuple[Any, ...], wanted: tuple[bool, bool, bool]
) -> tuple[Tensor, ...]:
    stride, padding, dilation, groups = settings
    result: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
        dy, x, weight, None, stride, padding, dilation, False, (0, 0), groups, wanted
    )
    return result


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, settings: tuple[Any, ...], side: SideStream) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.settings, ctx.side = settings, side
        return _convolved(x, weight, settings)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gradient = ctx.side.convolution_weight_gradient(dy, x, weight, ctx.settings)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = _convolution_backward(dy, x, weight, ctx.settings, (True, False, False))[0]
        return dx, gradient, None, None


class FusedConv(nn.Conv2d):
    """A convolution without bias whose weight gradient runs beside the rest of the backward pass."""

    side: SideStream | None

    def forward(self, x: Tensor) -> Tensor:
        x, weight = x.to(self.weight.dtype), self.weight
        settings = (self.stride, self.padding, self.dilation, self.groups)
        if self.side is None or not (torch.is_grad_enabled() and self.weight.requires_grad):
            return _convolved(x, weight, settings)
        out: Tensor = _Convolution.apply(x, weight, settings, self.side)  # type: ignore[no-untyped-call]
        return out


def _convolved(x: Tensor, weight: Tensor, settings: tuple[Any, ...]) -> Tensor:
    stride, padding, dilation, groups = settings
    return F.conv2d(*widened(x, weight), None, stride, padding, dilation, groups)


def widened(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """On a GPU three channels would keep the tensor cores from working: some more, all zero."""
    if not x.is_cuda or x.shape[1] >= LANES or x.shape[1] != weight.shape[1]:
        return x, weight
    more = (0, 0, 0, 0, 0, LANES - x.shape[1])
    return F.pad(x, more), F.pad(weight, more)


class FusedNorm(nn.BatchNorm2d):
    """Batch normalisation with what may follow it; training looks at the first ``valid`` images of a batch only."""

    valid: Tensor  # int32, on the network's device
    sums: Tensor  # int64 [2, 2, channels], where the kernels collect; zero when a step begins

    def forward(self, x: Tensor, shortcut: Tensor | None = None, relu: bool = False) -> Tensor:
        """relu(norm(x) + shortcut), the last two optional."""
        kernels = kernels_for(x)
        learns = torch.is_grad_enabled() and self.weight.requires_grad
        if kernels is not None and (self.training or not learns):
            out: Tensor = kernels.NormAct.apply(x, self.weight, self.bias, shortcut, relu, self.training, _places(self))
            return out
        valid = int(self.valid) if self.training else len(x)
        normed = super().forward(x[:valid])
        x = normed if valid == len(x) else torch.cat([normed, x[valid:].detach()])
        x = x if shortcut is None else x + shortcut
        return F.relu(x) if relu else x


class FusedStage(nn.Sequential):
    """conv, norm, ReLU."""

    def forward(self, x: Tensor) -> Tensor:
        conv, norm = self[0], self[1]
        out: Tensor = norm(conv(x), relu=True)
        return out


class FusedResidual(Residual):
    """relu(main(x) + shortcut(x)) with every norm, addition and ReLU in one operation."""

    def forward(self, x: Tensor) -> Tensor:
        shortcut: Any = self.shortcut(x)  # conv, norm; or the identity
        *inner, last = [layer for layer in self.main if not isinstance(layer, nn.ReLU)]
        pair: Any
        for pair in inner:
            x = pair[1](pair[0](x), relu=True)
        pair = last
        out: Tensor = pair[1](pair[0](x), shortcut, relu=True)
        return out


def fuse(net: nn.Module, valid: Tensor, side: SideStream | None = None) -> Any:
    """A copy of ``net`` without hooks, channels-last, whose convolutions and norms are the fused ones.

    ``valid`` says how many images of a batch count in training; ``sums`` of the copy must be set to zero before every
    training step. BatchNorm's step counters, which influence nothing, stop.
    """
    bare: Any = copy.deepcopy(net).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    known = is_recordable(net)
    for module in bare.modules():
        module._forward_hooks.clear()
        if not known:  # a network of the user's: nobody knows what surrounds its layers
            if getattr(module, "momentum", None) is not None and hasattr(module, "num_batches_tracked"):
                module.num_batches_tracked = None
        elif isinstance(module, nn.BatchNorm2d):
            module.num_batches_tracked = None
            module.__class__, module.valid = FusedNorm, valid
        elif isinstance(module, nn.Conv2d) and module.bias is None:
            module.__class__, module.side = FusedConv, side  # type: ignore[assignment]
        elif isinstance(module, nn.Sequential) and [type(m) for m in module][1:] == [nn.BatchNorm2d, nn.ReLU]:
            module.__class__ = FusedStage
        elif isinstance(module, Residual) and all(not isinstance(m, nn.GroupNorm) for m in module.modules()):
            module.__class__ = FusedResidual
    norms = [m for m in bare.modules() if isinstance(m, FusedNorm)]
    bare.sums = torch.zeros(sum(4 * m.num_features for m in norms), dtype=torch.int64, device=valid.device)
    for norm, part in zip(norms, bare.sums.split([4 * m.num_features for m in norms]), strict=True):
        norm.sums = part.view(2, 2, -1)
    return bare


def _places(norm: FusedNorm) -> dict[str, Any]:
    names = ("running_mean", "running_var", "valid", "sums", "momentum", "eps")
    return {name: getattr(norm, name) for name in names}


class FlatWeights:
    """The weights of a network that learn, as views of two flat buffers, so that one operation updates them all.

    ``theta`` holds every weight in float32. With ``half`` the network's convolutions and linear layers read a bfloat16
    copy, which the update writes as well; the small rest (norms, biases, head) reads ``theta`` itself.
    """

    def __init__(self, net: nn.Module, half: bool) -> None:
        layers = [m for m in net.body.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]  # type: ignore[union-attr]
        large = {id(m.weight) for m in layers} if half else set()
        self.parameters = [p for p in net.parameters() if p.requires_grad]
        self._large = [p for p in self.parameters if id(p) in large]
        self._small = [p for p in self.parameters if id(p) not in large]
        device, count = self.parameters[0].device, sum(p.numel() for p in self._large)
        self.theta = torch.empty(sum(p.numel() for p in self.parameters), device=device)
        self.velocity = torch.zeros_like(self.theta)
        self.low = torch.empty(count, dtype=torch.bfloat16, device=device) if count else None
        self._count = count
        self._offsets: dict[int, int] = {}
        offset = 0
        for parameter in self._large + self._small:
            self._offsets[id(parameter)] = offset
            self.master(parameter).copy_(parameter.detach())
            large_one = id(parameter) in large and self.low is not None
            parameter.data = self.part(self.low, parameter) if large_one else self.master(parameter)  # type: ignore[arg-type]
            offset += parameter.numel()
        self.refresh()

    def part(self, flat: Tensor, parameter: Tensor) -> Tensor:
        """The piece of a flat buffer that belongs to a parameter of the network, in its shape."""
        offset = self._offsets[id(parameter)]
        return _like(flat[offset : offset + parameter.numel()], parameter)

    def master(self, parameter: Tensor) -> Tensor:
        """The float32 value of a parameter of the network."""
        return self.part(self.theta, parameter)

    def refresh(self) -> None:
        """After ``theta`` was written from outside: bring the half-precision copy up to date."""
        if self.low is not None:
            self.low.copy_(self.theta[: self._count])

    @torch.no_grad()
    def step(
        self, gradients: list[list[Tensor]], lr: Tensor, momentum: float, decay: float, clip: float | None = None
    ) -> None:
        """One step of SGD; lists of gradients in the order of ``parameters``, which are added (to norm ``clip`` at most)."""
        parts = [(self._large, slice(0, self._count), self.low), (self._small, slice(self._count, None), None)]
        kept = [(self._summed(gradients, parameters), place, low) for parameters, place, low in parts if parameters]
        if clip is not None:
            norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient, _, _ in kept]
            share = (clip / torch.linalg.vector_norm(torch.stack(norms))).clamp(max=1)
            kept = [(gradient * share, place, low) for gradient, place, low in kept]
        for gradient, place, low in kept:
            sgd_(self.theta[place], self.velocity[place], gradient, low, lr, momentum, decay)

    def _summed(self, gradients: list[list[Tensor]], parameters: list[nn.Parameter]) -> Tensor:
        rows = []
        for one in gradients:
            by_id = {id(p): g for p, g in zip(self.parameters, one, strict=True)}
            rows.append(torch.cat([_flat(by_id[id(p)]) for p in parameters]))
        return rows[0] if len(rows) == 1 else sum((row.float() for row in rows[1:]), rows[0].float())


def sgd_(
    theta: Tensor, velocity: Tensor, gradient: Tensor, low: Tensor | None, lr: Tensor, momentum: float, decay: float
) -> None:
    """v <- momentum v + (g + decay theta); theta <- theta - lr v; ``low`` receives theta in half precision."""
    kernels = kernels_for(theta)
    if kernels is not None:
        kernels.sgd_(theta, velocity, gradient, low, lr, momentum, decay)
        return
    velocity.mul_(momentum).add_(gradient.float() + decay * theta)
    theta.sub_(lr * velocity)
    if low is not None:
        low.copy_(theta)


def look(
    pictures: Tensor, labels: Tensor, order: Tensor, span: tuple[Tensor, Tensor], crops: Tensor | None,
    x: Tensor, y: Tensor, valid: Tensor, transform: Transform,
) -> None:  # fmt: skip
    """Fill ``x`` and ``y`` with the next batch of an epoch, normalised, cropped and mirrored; ``valid`` says how many count.

    ``span`` holds two places of ``order``: where the batch begins, where the epoch ends.
    """
    kernels = kernels_for(x) if x.shape[1] == 3 else None  # the kernel knows three channels; a lens gives thousands
    if kernels is not None:
        kernels.look(pictures, labels, order, span, crops, x, y, valid, transform)
        return
    start, end = span
    place = start + torch.arange(len(x), device=x.device)
    index = order[place]
    images = pictures[index]
    images = transform.normalise(images) if images.dtype == torch.uint8 else images
    x.copy_(images if crops is None else transform.apply(images, crops[:, place]))
    y.copy_(labels[index])
    valid.copy_((end - start).clamp(max=len(x)))


def loss_and_gradient(logits: Tensor, adjustment: Tensor, y: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """CE(logits + adjustment, y) / valid of each image [n], and the gradient of their sum [n, C]; 0 for those that do not count."""
    kernels = kernels_for(logits)
    if kernels is not None:
        found: tuple[Tensor, Tensor] = kernels.loss_and_gradient(logits, adjustment, y, valid)
        return found
    share = (torch.arange(len(y), device=y.device) < valid) / valid
    log_p = F.log_softmax(logits + adjustment, dim=1)
    losses = -log_p.gather(1, y.unsqueeze(1)).squeeze(1) * share
    return losses, (log_p.exp() - F.one_hot(y, logits.shape[1])) * share.unsqueeze(1)


def _flat(value: Tensor) -> Tensor:
    """As one row, in the order it lies in memory when channels-last."""
    return (value.permute(0, 2, 3, 1) if value.ndim == 4 else value).reshape(-1)


def _like(part: Tensor, parameter: Tensor) -> Tensor:
    """A piece of a flat buffer in the shape of a parameter, channels-last as ``_flat`` has it."""
    if parameter.ndim != 4:
        return part.view(parameter.shape)
    k, c, h, w = parameter.shape
    return part.view(k, h, w, c).permute(0, 3, 1, 2)
