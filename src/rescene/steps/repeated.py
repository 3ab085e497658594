"""SGD with a loss of one's own on a GPU: the step of each batch size recorded as a CUDA graph for the length of one call.

What a recording freezes is everything but the tensors it reads; so it is used for losses that say they are ``repeatable``.
Batches are put together outside, draws included. The network runs in bfloat16 where ``train.precision`` allows it, its weights
and everything around it in float32. The mathematics is that of ``rescene.steps.sgd.fit``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial

import torch
from torch import Tensor, nn

from rescene.steps.recording import repeated
from rescene.steps.sgd import AfterEpoch, Batch, Training


def fit_repeated(
    net: nn.Module,
    plan: Callable[[], Tensor],
    fetch: Callable[[Tensor], Batch],
    loss: Callable[[nn.Module, Batch], Tensor],
    settings: Training,
    rates: list[float],
    after_epoch: AfterEpoch | None = None,
) -> float:
    """Train ``net`` in place for one epoch at each of ``rates``; returns the mean loss of the last one."""
    steps, mean = Repeated(net, loss, settings), 0.0
    for epoch, rate in enumerate(rates, 1):
        steps.lr.fill_(rate)
        steps.total.zero_()
        batches = plan().split(settings.batch_size)
        steps.seen.train(len(batches[0]) > 1)
        kept = [index for index in batches if len(index) > 1 or len(batches) == 1]
        for index in kept:
            steps.train(fetch(index))
        mean = float(steps.total) / max(len(kept), 1)
        steps.seen.eval()
        if after_epoch is not None:
            after_epoch(epoch)
    return mean


class HalfPrecision(nn.Module):
    """The network in bfloat16, with float32 answers."""

    def __init__(self, net: nn.Module, enabled: bool) -> None:
        super().__init__()
        self.net, self.enabled = net, enabled

    def features(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.enabled, cache_enabled=False):
            out: Tensor = self.net.features(x)  # type: ignore[operator]
        return out.float()

    def head(self, features: Tensor) -> Tensor:
        out: Tensor = self.net.head(features)  # type: ignore[operator]
        return out

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def _place(batch: Batch) -> Batch:
    """Room for batches of this size; pictures with the channels last, which convolutions in bfloat16 want."""
    pictures = partial(torch.clone, memory_format=torch.channels_last)
    beside = None if batch.beside is None else pictures(batch.beside)
    return Batch(pictures(batch.x), batch.y.clone(), batch.index.clone(), beside)


class Repeated:
    """One network, one loss; a recorded step for each batch size."""

    def __init__(self, net: nn.Module, loss: Callable[[nn.Module, Batch], Tensor], settings: Training) -> None:
        self.net, self.loss, self.settings = net, loss, settings
        self.parameters: list[Tensor] = [p for p in net.parameters() if p.requires_grad]
        self.device = self.parameters[0].device
        half = settings.precision == "bfloat16" or (settings.precision == "auto" and self.device.type == "cuda")
        self.seen = HalfPrecision(net, half)
        self.velocity = [torch.zeros_like(p) for p in self.parameters]
        self.lr, self.total = torch.zeros((), device=self.device), torch.zeros((), device=self.device)
        self.places: dict[tuple[int, int], Batch] = {}
        self.steps: dict[tuple[int, int], Callable[[], None]] = {}

    def train(self, batch: Batch) -> None:
        """One step on this batch."""
        size = (len(batch.y), 0 if batch.beside is None else len(batch.beside))
        if size not in self.steps:
            self.places[size] = place = _place(batch)
            often = size[0] == self.settings.batch_size  # the last batch of an epoch has another size at every site
            state = [*self.parameters, *self.net.buffers(), *self.velocity, self.total]
            self.steps[size] = repeated(lambda: self._step(place), state, search=often)
        for field in fields(Batch):
            if (own := getattr(self.places[size], field.name)) is not None:
                own.copy_(getattr(batch, field.name))
        self.steps[size]()

    def _step(self, batch: Batch) -> None:
        value = self.loss(self.seen, batch)
        found = torch.autograd.grad(value, self.parameters, allow_unused=True)
        gradients = [torch.zeros_like(p) if g is None else g for p, g in zip(self.parameters, found, strict=True)]
        with torch.no_grad():
            # v <- momentum v + (g + decay theta); theta <- theta - lr v
            torch._foreach_add_(gradients, self.parameters, alpha=self.settings.weight_decay)
            torch._foreach_mul_(self.velocity, self.settings.momentum)
            torch._foreach_add_(self.velocity, gradients)
            torch._foreach_add_(self.parameters, list(torch._foreach_mul(self.velocity, -self.lr)))
            self.total += value.detach()
