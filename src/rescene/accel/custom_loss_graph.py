"""SGD with a loss of one's own on a GPU: the step of each batch size recorded as a CUDA graph for the length of one call.

What a recording freezes is everything but the tensors it reads; so it is used for losses that say they are ``repeatable``.
Batches are put together outside, draws included. The network runs as ``rescene.accel.fused_net`` has it. The mathematics is that of
``rescene.training.sgd.fit``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial

import torch
from torch import Tensor, nn

from rescene.accel.cuda_graph import repeated
from rescene.accel.fused_net import Passes, SgdSettings, is_half
from rescene.data import Batch
from rescene.nets import is_recordable


def fit_repeated(
    net: nn.Module,
    plan: Callable[[], Tensor],
    fetch: Callable[[Tensor], Batch],
    loss: Callable[[nn.Module, Batch], Tensor],
    settings: SgdSettings,
    rates: list[float],
    after_epoch: Callable[[int], None] | None = None,
) -> float:
    """Train ``net`` in place for one epoch at each of ``rates``; returns the mean loss of the last one."""
    steps, count = Repeated(net, loss, settings), 0
    for epoch, rate in enumerate(rates, 1):
        steps.lr.fill_(rate)
        steps.total.zero_()
        batches = plan().split(settings.batch_size)
        steps.seen.train(len(batches[0]) > 1)
        kept = [index for index in batches if len(index) > 1 or len(batches) == 1]
        for index in kept:
            steps.train(fetch(index))
        count = len(kept)
        steps.seen.eval()
        if after_epoch is not None:
            after_epoch(epoch)
    steps.seen.release()
    return float(steps.total) / max(count, 1)  # the only time that anybody waits for the device


def _place(batch: Batch) -> Batch:
    """Room for batches of this size; pictures with the channels last, which convolutions in bfloat16 want."""
    pictures = partial(torch.clone, memory_format=torch.channels_last)
    beside = None if batch.beside is None else pictures(batch.beside)
    return Batch(pictures(batch.x), batch.y.clone(), batch.index.clone(), beside)


class Repeated:
    """One network, one loss; a recorded step for each batch size, its gradient cut to norm ``clip`` where one is given."""

    def __init__(
        self,
        net: nn.Module,
        loss: Callable[[nn.Module, Batch], Tensor],
        settings: SgdSettings,
        clip: float | None = None,
    ) -> None:
        self.loss, self.settings, self.clip = loss, settings, clip
        device = next(net.parameters()).device
        self.recordable = is_recordable(net)
        self.seen = Passes(net, is_half(settings, device) and self.recordable)
        self.weights = self.seen.weights
        self.lr, self.total = torch.zeros((), device=device), torch.zeros((), device=device)
        self.places: dict[tuple[int, int], Batch] = {}
        self.steps: dict[tuple[int, int], Callable[[], None]] = {}

    def train(self, batch: Batch) -> None:
        """One step on this batch."""
        size = (len(batch.y), 0 if batch.beside is None else len(batch.beside))
        if size not in self.steps:
            self.places[size] = place = _place(batch)
            often = size[0] == self.settings.batch_size  # the last batch of an epoch has another size at every site
            state = [*self.seen.state(), self.total]
            step = lambda: self._step(place)  # noqa: E731
            self.steps[size] = repeated(step, state, search=often) if self.recordable else step
        for field in fields(Batch):
            if (own := getattr(self.places[size], field.name)) is not None:
                own.copy_(getattr(batch, field.name))
        self.steps[size]()

    def _step(self, batch: Batch) -> None:
        value = self.loss(self.seen, batch)
        gradients = self.seen.gradients(value)
        self.weights.step(gradients, self.lr, self.settings.momentum, self.settings.weight_decay, self.clip)
        self.total += value.detach()
