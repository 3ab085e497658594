"""SGD on a GPU: one step (gather, crop and mirror, forward, loss, backward, update) recorded as a CUDA graph and replayed.

A step of a small network on small images is bound by launching kernels, not by arithmetic; a graph launches them all at
once. The recording reads everything from fixed places: pictures, the epoch's order and crops, where in it we are, the
rate. The last, smaller batch of an epoch is the same recording with fewer valid images, and a head that grows fits into
the recorded one, whose spare rows are left out of the softmax; so one recording serves rounds, tasks and clients.
The mathematics is that of ``rescene.training.sgd``, and so are the draws: in float32 the two agree to rounding.

With a loss of one's own (``fit_repeated``) the step of each batch size is recorded for the length of one call.
What a recording freezes is everything but the tensors it reads; so it is used for losses that say they are ``repeatable``.
Batches are put together outside, draws included. The network runs as ``rescene.accel.fused_net`` has it. The mathematics is that of
``rescene.training.sgd.fit``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rescene.accel.cuda_graph import TURN, KeptRecordings, recorded, repeated
from rescene.accel.fused_layers import FlatWeights, SideStream, fuse, look, loss_and_gradient
from rescene.accel.fused_net import Passes, SgdSettings, is_half
from rescene.data import Batch, Transform
from rescene.functional.balance import EXCLUDED
from rescene.functional.minibatches import minibatches, num_minibatches
from rescene.nets import count_passes, is_recordable

SMALLEST_POOL = 8192
HEAD_STEP = 32  # heads are recorded with a multiple of this many rows


class Epochs(Protocol):
    """What is trained on, and the draws of one epoch after the other."""

    images: Tensor  # normalised float32, or uint8
    labels: Tensor
    transform: Transform

    def draw(self) -> tuple[Tensor, Tensor | None]:
        """(order [n] into the images, crops [3, n] or None) of the next epoch, on their device."""


def fit_captured(net: Any, epochs: Epochs, settings: SgdSettings, rates: list[float], adjustment: Tensor) -> float:
    """Train ``net`` in place for one epoch at each of ``rates``; returns the mean loss of the last one.

    ``adjustment`` [classes] is added to the logits (EXCLUDED leaves a class out).
    """
    trainer = _trainer_for(net, epochs, settings)
    trainer.load(net, epochs, adjustment)
    mean = trainer.train(epochs, rates)
    trainer.store(net, len(rates) * trainer.num_steps)
    num_shown = min(len(epochs.labels), trainer.num_steps * trainer.size)  # images of an epoch
    count_passes(net, 3 * len(rates) * num_shown)  # no hook of the network saw the replays
    return mean


KEPT = KeptRecordings(4)


def rows_of(num_classes: int) -> int:
    """Rows that the recorded head has for so many classes: the next multiple of ``HEAD_STEP``."""
    return -(-num_classes // HEAD_STEP) * HEAD_STEP


def power_of_two(number: int, smallest: int) -> int:
    """The smallest power of two that is at least ``number`` and ``smallest``."""
    return max(smallest, 1 << (number - 1).bit_length())


def _trainer_for(net: Any, epochs: Epochs, settings: SgdSettings) -> Trainer:
    capacity = power_of_two(len(epochs.labels), SMALLEST_POOL)
    rows = rows_of(len(net.head.bias))
    body = tuple((name, tuple(value.shape)) for name, value in net.body.state_dict().items())
    batches = (settings.batch_size, settings.smallest_batch)
    fixed = (*batches, settings.momentum, settings.weight_decay, settings.precision, settings.augment)
    images = (str(epochs.images.device), epochs.images.dtype, tuple(epochs.images.shape[1:]), epochs.transform)
    key = (body, rows, capacity, images, fixed)
    return KEPT.get(key, lambda: Trainer(net, epochs, settings, capacity, rows))


class Trainer:
    """A network of its own, fixed places for everything a step reads, and the recorded step."""

    def __init__(self, net: Any, epochs: Epochs, settings: SgdSettings, capacity: int, rows: int) -> None:
        device, size = epochs.images.device, settings.batch_size
        self.settings, self.transform, self.size = settings, epochs.transform, size
        self.half = is_half(settings, device)
        integers = partial(torch.zeros, dtype=torch.long, device=device)
        self.valid = torch.full((), size, dtype=torch.int32, device=device)
        self.side = SideStream(device) if device.type == "cuda" else None
        self.net = fuse(net, self.valid, self.side)
        self.net.head = nn.utils.skip_init(nn.Linear, net.head.in_features, rows, device=device)
        self.net.train()
        self.weights = FlatWeights(self.net, self.half)
        self.pictures = torch.zeros(capacity, *epochs.images.shape[1:], dtype=epochs.images.dtype, device=device)
        self.labels = integers(capacity)
        self.order = integers(capacity + size)
        self.crops = integers(3, capacity + size) if settings.augment else None
        self.start, self.end = (integers(()) for _ in range(2))
        self.adjustment = torch.zeros(rows, device=device)
        self.lr, self.total = (torch.zeros((), device=device) for _ in range(2))
        kind = torch.bfloat16 if self.half else torch.float32
        x = torch.zeros(size, *epochs.images.shape[1:], dtype=kind, device=device)
        self.x, self.y = x.contiguous(memory_format=torch.channels_last), integers(size)
        self.num_steps = 0
        self.replay = recorded(self._step) if device.type == "cuda" else self._step

    @torch.no_grad()
    def load(self, net: Any, epochs: Epochs, adjustment: Tensor) -> None:
        """Bring weights, pictures and adjustment to their places; momentum starts at zero on every call."""
        for own, given in zip(self.net.parameters(), net.parameters(), strict=True):
            master = self.weights.master(own)
            if len(master) > len(given):  # the head's spare rows
                master[len(given) :].zero_()
            master[: len(given)].copy_(given)
        self.weights.refresh()
        self.weights.velocity.zero_()
        for name, value in self.net.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                value.copy_(net.get_buffer(name))
        n = len(epochs.labels)
        self.pictures[:n], self.labels[:n] = epochs.images, epochs.labels
        self.end.fill_(n)
        self.adjustment.fill_(EXCLUDED)
        self.adjustment[: len(adjustment)] = adjustment
        self.num_steps = num_minibatches(n, self.size, self.settings.smallest_batch)

    def train(self, epochs: Epochs, rates: list[float]) -> float:
        """Train one epoch for each learning rate and return the mean loss of the last epoch."""
        for rate in rates:
            order, crops = epochs.draw()
            self.order[: len(order)] = order
            if crops is not None and self.crops is not None:
                self.crops[:, : len(order)] = crops
            self.lr.fill_(rate)
            self.start.zero_()
            self.total.zero_()
            with TURN.given_up() if self.replay != self._step else nullcontext():
                for _ in range(self.num_steps):
                    self.replay()
        return float(self.total) / self.num_steps

    @torch.no_grad()
    def store(self, net: Any, num_steps: int) -> None:
        """Hand the weights back."""
        for own, given in zip(self.net.parameters(), net.parameters(), strict=True):
            given.copy_(self.weights.master(own)[: len(given)])
        for name, value in net.named_buffers():
            if name.endswith("num_batches_tracked"):
                value += num_steps
            else:
                value.copy_(self.net.get_buffer(name))
        net.eval()

    def _step(self) -> None:
        span = (self.start, self.end)
        self.net.sums.zero_()
        look(self.pictures, self.labels, self.order, span, self.crops, self.x, self.y, self.valid, self.transform)
        with torch.autocast(self.x.device.type, torch.bfloat16, enabled=self.half, cache_enabled=False):
            features = self.net.features(self.x)
        logits = F.linear(features.float(), self.net.head.weight, self.net.head.bias)
        losses, outer = loss_and_gradient(logits.detach(), self.adjustment, self.y, self.valid)
        gradients = list(torch.autograd.grad(logits, self.weights.parameters, outer))
        if self.side is not None:
            self.side.join()
        self.weights.step([gradients], self.lr, self.settings.momentum, self.settings.weight_decay)
        self.total += losses.sum()
        self.start += self.size


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
        batches = minibatches(plan(), settings.batch_size, settings.smallest_batch)
        steps.seen.train(len(batches[0]) > 1)
        for index in batches:
            steps.train(fetch(index))
        count = len(batches)
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
