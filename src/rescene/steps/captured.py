"""The server's SGD on a GPU: one batch (gather, crop and flip, forward, loss, backward, update) recorded as a CUDA graph.

A step of a small network on small images is bound by launching kernels, not by arithmetic; a graph launches them all at
once. The recording reads its inputs from fixed places: the pool, the indices and crops of the batch, the prior, the rate.
The mathematics is that of ``fit_pool``; the draws are the same, so in float32 the two agree to rounding.
"""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rescene.data import Transform
from rescene.errors import ResceneWarning
from rescene.functional.balance import EXCLUDED, log_prior
from rescene.steps.sgd import PoolEpochs, Training, cosine_rate

KEEP = 3  # recordings of recent shapes (heads grow, pools grow); older ones are dropped with their memory
SMALLEST_POOL = 4096
_TRAINERS: OrderedDict[tuple[Any, ...], Trainer] = OrderedDict()


def fit_captured(net: nn.Module, epochs: PoolEpochs, settings: Training, tau: float) -> float:
    """Train ``net`` in place on the pool for E_srv epochs; returns the mean loss of the last epoch."""
    trainer = _trainer_for(net, epochs, settings)
    trainer.load(net, epochs, tau)
    mean = trainer.train(epochs, settings)
    trainer.store(net)
    count = getattr(net, "count_training", None)  # no hook of the network saw the replays
    if count is not None:
        count(settings.server_epochs * len(epochs.labels))
    return mean


def _trainer_for(net: nn.Module, epochs: PoolEpochs, settings: Training) -> Trainer:
    capacity = SMALLEST_POOL
    while capacity < len(epochs.labels):
        capacity *= 2
    shapes = tuple((name, tuple(value.shape)) for name, value in net.state_dict().items())
    key = (shapes, str(epochs.images.device), tuple(epochs.images.shape[1:]), capacity, epochs.transform, settings)
    if key not in _TRAINERS:
        _TRAINERS[key] = Trainer(net, epochs, settings, capacity)
        while len(_TRAINERS) > KEEP:
            _TRAINERS.popitem(last=False)
    _TRAINERS.move_to_end(key)
    return _TRAINERS[key]


class Trainer:
    """A network of its own, fixed input places, and the recorded step."""

    def __init__(self, net: nn.Module, epochs: PoolEpochs, settings: Training, capacity: int) -> None:
        device, size = epochs.images.device, settings.batch_size
        self.transform: Transform = epochs.transform
        self.settings, self.augment = settings, epochs.augment
        self.net = _copy_of(net).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.net.train()
        self.parameters = [p for p in self.net.parameters() if p.requires_grad]
        self.velocity = [torch.zeros_like(p) for p in self.parameters]
        self.pool = torch.zeros(capacity, *epochs.images.shape[1:], device=device)
        self.labels = torch.zeros(capacity, dtype=torch.long, device=device)
        self.adjustment = torch.zeros(epochs.num_classes, device=device)
        self.masked = torch.zeros(epochs.num_classes, dtype=torch.bool, device=device)
        self.index = torch.zeros(size, dtype=torch.long, device=device)
        self.crops = torch.zeros(3, size, dtype=torch.long, device=device)
        self.lr = torch.zeros((), device=device)
        self.total = torch.zeros((), device=device)
        self.half = settings.precision == "bfloat16" or (settings.precision == "auto" and device.type == "cuda")
        self.graph = self._record() if device.type == "cuda" else None

    def load(self, net: nn.Module, epochs: PoolEpochs, tau: float) -> None:
        """Bring this round's weights, pool and prior to their places; momentum starts at zero in every round."""
        self.net.load_state_dict(net.state_dict())
        torch._foreach_zero_(self.velocity)
        n = len(epochs.labels)
        self.pool[:n], self.labels[:n] = epochs.images, epochs.labels
        self.adjustment.copy_(tau * log_prior(epochs.counts) if tau > 0 else torch.zeros_like(self.adjustment))
        self.masked.copy_(epochs.counts == 0 if tau > 0 else torch.zeros_like(self.masked))

    def train(self, epochs: PoolEpochs, settings: Training) -> float:
        size, n = settings.batch_size, len(epochs.labels)
        whole = n - n % size
        for epoch in range(settings.server_epochs):
            order, crops = epochs.draw()
            self.lr.fill_(cosine_rate(settings.lr, epoch, settings.server_epochs))
            self.total.zero_()
            for first in range(0, whole, size):
                self.index.copy_(order[first : first + size])
                if crops is not None:
                    self.crops.copy_(crops[:, first : first + size])
                if self.graph is not None:
                    self.graph.replay()
                else:
                    self._step(self.index, self.crops)
            if n - whole > 1:  # the last, smaller batch is not worth a recording
                self._step(order[whole:], self.crops[:, :0] if crops is None else crops[:, whole:])
        return float(self.total) / (whole // size + (n - whole > 1))

    def store(self, net: nn.Module) -> None:
        """Hand the weights back."""
        net.load_state_dict(self.net.state_dict())
        net.eval()

    def _step(self, index: Tensor, crops: Tensor) -> None:
        x = self.pool[index]
        if self.augment:
            x = self.transform.apply(x, crops)
        x = x.contiguous(memory_format=torch.channels_last)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.half, cache_enabled=False):
            logits = self.net(x)
        logits = (logits.float() + self.adjustment).masked_fill(self.masked, EXCLUDED)
        loss = F.cross_entropy(logits, self.labels[index])
        gradients = list(torch.autograd.grad(loss, self.parameters))
        with torch.no_grad():
            # v <- momentum v + (g + decay theta); theta <- theta - lr v
            torch._foreach_add_(gradients, self.parameters, alpha=self.settings.weight_decay)
            torch._foreach_mul_(self.velocity, self.settings.momentum)
            torch._foreach_add_(self.velocity, gradients)
            torch._foreach_add_(self.parameters, torch._foreach_mul(self.velocity, -self.lr))
            self.total += loss.detach()

    def _record(self) -> torch.cuda.CUDAGraph | None:
        """Warm up on a side stream, then capture; a refusal leaves the plain step in place."""
        benchmark, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, True
        try:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    self._step(self.index, self.crops)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._step(self.index, self.crops)
            return graph
        except RuntimeError as error:
            first = str(error).splitlines()[0]
            warnings.warn(
                ResceneWarning("W302", f"CUDA graph capture was refused ({first}); running step by step"), stacklevel=2
            )
            return None
        finally:
            torch.backends.cudnn.benchmark = benchmark


def _copy_of(net: nn.Module) -> nn.Module:
    """The same network without hooks: work is counted once per call, not once per replay."""
    bare = copy.deepcopy(net)
    for module in bare.modules():
        module._forward_hooks.clear()
    return bare
