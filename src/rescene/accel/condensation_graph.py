"""Condensation on a GPU: each step is a handful of recorded CUDA graphs over all classes of all participants.

    move        theta' = anchor + eps min(1, rho / ||eps||) on one flat buffer
    real        features and logits of a chunk of real images, added to the sums of their groups; as often as there are chunks
    descend     Eq. 1 and its gradient for every surrogate, clip, update

The mathematics is that of ``rescene.training.condensation``; the noise is drawn on the device, in one piece.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rescene.accel.cuda_graph import TURN, WARM_UP, KeptRecordings, recorded
from rescene.accel.fused_layers import FlatWeights, fuse, look
from rescene.accel.fused_net import Folded
from rescene.accel.sgd_graph import rows_of
from rescene.core.rng import seeded_generator
from rescene.data import Shard
from rescene.functional import group_means, matching_loss

CHUNKS = (1024, 256)  # real images of 32 x 32 pixels that pass through the network at once; the rest fills the smaller


KEPT = KeptRecordings(3)


def descend_captured(
    net: Any,
    shard: Shard,
    pixels: Tensor,
    owner: Tensor,
    real: Tensor,
    real_owner: Tensor,
    settings: Any,
    noise_seed: int,
    num_groups: int,
    most_groups: int,
) -> tuple[Tensor, Tensor]:
    """Gradient descent on ``pixels`` [rows]; returns them and the loss of each group at the last step.

    owner [rows] and real_owner [b] number the groups; real [steps, b] are positions into the shard's images. Rounds with at
    most ``most_groups`` groups share a recording.
    """
    condenser = _condenser_for(net, shard, most_groups, settings)
    return condenser.run(net, pixels, owner, real, real_owner, num_groups, noise_seed)


def _condenser_for(net: Any, shard: Shard, groups: int, settings: Any) -> Condenser:
    capacity = (groups * settings.ipc, groups, rows_of(len(net.head.bias)))
    shapes = tuple((name, tuple(value.shape)) for name, value in net.body.state_dict().items())
    fixed = (
        settings.image_lr,
        settings.image_momentum,
        settings.radius,
        settings.clip,
        settings.step,
        settings.reduction,
    )
    images = shard.images.pixels
    key = (shapes, capacity, fixed, settings.match_logits, settings.precision, images.data_ptr(), shard.transform)
    return KEPT.get(key, lambda: Condenser(net, shard, *capacity, settings))


class Condenser:
    """A network of its own, fixed places for everything a step reads, and the recorded parts of a step.

    Spare rows of the surrogates belong to a group of their own, one beyond the last, as do spare real images. Spare rows of
    the head are zero and stay so, and their logits match without doing anything.
    """

    def __init__(self, net: Any, shard: Shard, rows: int, groups: int, classes: int, settings: Any) -> None:
        images, device = shard.images.pixels, shard.device
        self.settings, self.transform, self.images, self.labels = settings, shard.transform, images, shard.images.labels
        self.half = device.type == "cuda" and settings.precision != "float32"
        self.valid = torch.ones((), dtype=torch.int32, device=device)
        self.net = fuse(net, self.valid)
        self.net.head = nn.utils.skip_init(nn.Linear, net.head.in_features, classes, device=device)
        self.net.eval()
        self.weights = FlatWeights(self.net, self.half)
        body = self.net.body
        self.folded = Folded(body, self.weights) if Folded.is_possible(body) else None
        self.net.requires_grad_(False)
        self.anchor, self.eps, self.live = (torch.zeros_like(self.weights.theta) for _ in range(3))
        self.per_logit = torch.ones((), device=device)
        self.pixels, self.velocity = (torch.zeros(rows, *images.shape[1:], device=device) for _ in range(2))
        self.owner = torch.full((rows,), groups, device=device)
        self.lanes = torch.arange(groups + 1, device=device).unsqueeze(1)
        self.sums = torch.zeros(groups + 1, net.feature_size + classes, device=device)
        self.counts, self.losses = torch.ones(groups + 1, 1, device=device), torch.zeros(groups + 1, device=device)
        self.start = torch.zeros((), dtype=torch.long, device=device)
        self.order, self.order_owner = (torch.zeros(0, dtype=torch.long, device=device) for _ in range(2))
        area = images.shape[2] * images.shape[3]
        self.chunks = [max(1, chunk * 1024 // area) for chunk in CHUNKS]
        self._replays: dict[str | int, Callable[[], None]] = {}
        self._all_recorded = True

    def run(
        self,
        net: Any,
        pixels: Tensor,
        owner: Tensor,
        real: Tensor,
        real_owner: Tensor,
        groups: int,
        noise_seed: int,
    ) -> tuple[Tensor, Tensor]:
        """Condense all groups by replaying the recorded step.

        ``owner`` and ``real_owner`` name the group of each surrogate and of each real image. Returns the surrogates and each
        group's loss at the last step.
        """
        self._load(net, pixels, owner)
        plan = self._plan(real, real_owner)
        move, descend = self._recorded("move", self._move), self._recorded("descend", self._descend)
        chunks = {chunk: self._recorded(chunk, partial(self._real, chunk)) for chunk in set(plan)}
        noise = seeded_generator(noise_seed, self.eps.device)
        with TURN.given_up() if self._all_recorded else nullcontext():
            for _ in range(len(real)):
                self.eps.normal_(generator=noise)
                move()
                for chunk in plan:
                    chunks[chunk]()
                descend()
        return self.pixels[: len(owner)].clone(), self.losses[:groups].clone()

    def _load(self, net: Any, pixels: Tensor, owner: Tensor) -> None:
        with torch.no_grad():
            self.live.fill_(1.0)
            for own, given in zip(self.net.parameters(), net.parameters(), strict=True):
                for flat, value in ((self.weights.theta, given), (self.live, 1.0)):
                    piece = self.weights.part(flat, own)
                    piece[: len(given)] = value
                    piece[len(given) :] = 0.0  # the head's spare rows
            if self.settings.reduction == "mean":
                self.per_logit.fill_(1.0 / len(net.head.bias))
            self.anchor.copy_(self.weights.theta)
            for name, statistic in self.net.named_buffers():
                if name.endswith(("running_mean", "running_var")):
                    statistic.copy_(net.get_buffer(name))
        self.velocity.zero_()
        self.pixels[: len(owner)], self.pixels[len(owner) :] = pixels, 0.0
        self.owner.fill_(len(self.lanes) - 1)
        self.owner[: len(owner)] = owner
        self.start.zero_()

    def _plan(self, real: Tensor, real_owner: Tensor) -> list[int]:
        """Lay the real images of all steps in a row, each step filled up to whole chunks; returns the chunks of a step."""
        large, small = self.chunks
        count = real.shape[1]
        plan = [large] * (count // large) + [small] * -(-(count % large) // small)
        spare, total = sum(plan) - count, len(real) * sum(plan)
        room = total + WARM_UP * large  # a recording runs on from the start a few times, however few the steps are
        if room > len(self.order):  # the recordings read these places
            self.order, self.order_owner = (torch.zeros(room, dtype=torch.long, device=real.device) for _ in range(2))
            self._replays.clear()
        row = torch.cat([real_owner, real_owner.new_full((spare,), len(self.lanes) - 1)])
        self.order[:total] = torch.nn.functional.pad(real, (0, spare)).flatten()
        self.order_owner[:total] = row.repeat(len(real))
        self.counts.fill_(1.0)
        counted = torch.bincount(real_owner).unsqueeze(1)
        self.counts[: len(counted)] = counted.float()
        return plan

    def _recorded(self, name: str | int, work: Callable[[], None]) -> Callable[[], None]:
        if name not in self._replays:
            self._replays[name] = work
            if self.eps.is_cuda:
                state = [self.start, self.sums, self.pixels, self.velocity]
                before = [tensor.clone() for tensor in state]
                self._replays[name] = recorded(work)
                for tensor, value in zip(state, before, strict=True):  # recording ran the work a few times
                    tensor.copy_(value)
            self._all_recorded = self._all_recorded and self._replays[name] is not work
        return self._replays[name]

    @torch.no_grad()
    def _move(self) -> None:
        self.eps.mul_(self.live)
        norm = torch.linalg.vector_norm(self.eps, dtype=torch.float64)
        scale = (self.settings.radius / norm.clamp(min=1e-30)).clamp(max=1.0).float()
        torch.addcmul(self.anchor, self.eps, scale, out=self.weights.theta)
        self.weights.refresh()
        if self.folded is not None:
            self.folded.refresh()
        self.sums.zero_()

    def _embedding(self, x: Tensor, body: Any) -> Tensor:
        """[features, logits] in float32, side by side."""
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.half, cache_enabled=False):
            features = body(x).float()
        with torch.autocast(x.device.type, enabled=False):
            return torch.cat([features, self.net.head(features)], dim=1)

    @torch.no_grad()
    def _real(self, chunk: int) -> None:
        kind = torch.bfloat16 if self.half else torch.float32
        shape = (chunk, *self.images.shape[1:])
        x = torch.empty(shape, dtype=kind, device=self.eps.device, memory_format=torch.channels_last)
        y = torch.empty(chunk, dtype=torch.long, device=self.eps.device)
        look(self.images, self.labels, self.order, (self.start, self.start), None, x, y, self.valid, self.transform)
        owner = self.order_owner[self.start + torch.arange(chunk, device=self.eps.device)]
        self.sums.addmm_((owner == self.lanes).float(), self._embedding(x, self.folded or self.net.body))
        self.start += chunk

    def _descend(self) -> None:
        settings, groups = self.settings, len(self.lanes)
        x = self.pixels.detach().requires_grad_(True)
        with torch.enable_grad():
            embedding = self._embedding(x.contiguous(memory_format=torch.channels_last), self.net.body)
            means, real = group_means(embedding, self.owner, groups), self.sums / self.counts
            d = self.net.feature_size
            loss = matching_loss(means[:, :d], real[:, :d], settings.reduction)
            if settings.match_logits:
                loss = loss + self.per_logit * matching_loss(means[:, d:], real[:, d:])
            (gradient,) = torch.autograd.grad(loss[:-1].sum(), x)
        gradient = settings.bounded(gradient, loss.detach(), self.owner)
        self.velocity.mul_(settings.image_momentum).add_(gradient)
        self.pixels.sub_(settings.image_lr * self.velocity)
        self.losses.copy_(loss.detach())
