"""ReSCENE: the server keeps condensed surrogates of every task and trains on all of them at once.

each round of task t:
    server: broadcast theta and the noise seed of the round
    client: condense each class into at most IPC surrogates (Eq. 1) and send them
    server: S_t <- S_t + uploads; train theta for E_srv epochs on B_1..B_{t-1} + S_t,
            classes drawn with q_c ~ n_c^alpha, loss CE(f(x) + tau log pi, y)
end of task t:
    server: for each class, herd B surrogates of S_t towards the mean of its recent rounds (Eq. 2) into B_t; drop S_t
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rescene.data import Task
from rescene.functional import herd_classes, recent_window
from rescene.hyperparameters import hyper
from rescene.methods.base import Federation, Model, Uploads, weights_of
from rescene.methods.registry import register
from rescene.methods.surrogates import SurrogateMethod, gathered
from rescene.record import record
from rescene.rng import Rng
from rescene.steps import embed, fit_pool


@record
class Collected:
    """Surrogates on the server: one round's uploads in the pool, or one task's buffer."""

    images: Tensor
    labels: Tensor
    rounds: Tensor  # 1-based, as in the paper
    clients: Tensor  # who sent each one; -1: not recorded, by a version before that


@record
class ServerState:
    model: Model
    pool: tuple[Collected, ...]  # S_t, one entry per round, never changed once added
    buffers: tuple[Collected, ...]  # B_1 .. B_{t-1}
    notes: dict[str, float]
    closings: tuple[tuple[int, int], ...] = ()  # label, round: buffers closed where no end was announced


PATIENCE = 3  # rounds


@register
class ReSCENE(SurrogateMethod):
    name: ClassVar[str] = "rescene"
    title: ClassVar[str] = "ReSCENE"
    open_ended: ClassVar[bool] = True
    paper: ClassVar[str] = "Kang, Tu, Lee: ReSCENE, server-side replay for federated continual learning"
    sends_pictures_only: ClassVar[bool] = True

    can_forget: ClassVar[bool] = True

    step: Literal["fixed", "polyak"] = hyper(
        "polyak",
        "-",
        "[ours]",
        "fixed: image_lr as it is (the default under a mechanism); polyak: for each class at most its loss over its squared gradient",
    )
    budget: int = hyper(1000, "B", "Sec. 4.1", "surrogates kept per class after a task", ge=1)
    recent_fraction: float = hyper(
        0.75, "lambda", "Sec. 4.1", "fraction of rounds that forms the herding target", gt=0, le=1
    )
    alpha: float = hyper(
        0.5, "alpha", "App. A", "sampling exponent: 1 count-proportional, 0 class-balanced", ge=0, le=1
    )
    tau: float = hyper(1.0, "tau", "App. A", "strength of the logit adjustment", ge=0)
    buffer: Literal["temporal", "full-pool", "earliest", "latest", "random", "keep-all", "none"] = hyper(
        "temporal", "-", "Sec. 5.2", "which surrogates of a finished task are kept"
    )
    close_after: int | None = hyper(
        None, "W", "[ours]", f"where no end is announced: close a class away for so many rounds; null: {PATIENCE}", ge=1
    )
    accumulate: bool = hyper(True, "-", "Sec. 3.2", "keep the surrogates of earlier rounds of the task in the pool")

    def init(self, net: nn.Module, rng: Rng) -> ServerState:
        return ServerState(model=weights_of(net), pool=(), buffers=(), notes={})

    def server_round(
        self, state: ServerState, uploads: Uploads, round: int, federation: Federation, rng: Rng
    ) -> ServerState:
        pool = (state.pool if self.accumulate else ()) + _collect(uploads, round + 1)
        everything = _joined(state.buffers + pool)
        if everything is None:
            return state
        net = federation.net(state.model)
        loss = self._train(net, everything, federation, rng)
        notes = {"server_loss": loss, "pool_size": len(everything.labels)}
        state = replace(state, model=weights_of(net), pool=pool, notes=notes)
        return state if federation.task.announced else self._close_absent(state, round + 1, federation, rng)

    def _train(self, net: nn.Module, everything: Collected, federation: Federation, rng: Rng) -> float:
        return fit_pool(
            net,
            everything.images,
            everything.labels,
            federation.transform,
            self.train,
            rng.at("sgd").generator(federation.device),
            num_classes=federation.task.num_seen,
            alpha=self.alpha,
            tau=self.tau,
        )

    def end_task(self, state: ServerState, task: Task, federation: Federation, rng: Rng) -> ServerState:
        pool = _joined(state.pool)
        if pool is None or self.buffer == "none":
            return replace(state, pool=())
        if not task.announced:
            return self._close(state, pool.labels.unique(), federation, rng)
        chosen = self._herded(pool, task.classes, federation.num_rounds, state.model, federation, rng)
        return replace(state, pool=(), buffers=state.buffers + (chosen,))

    def _herded(
        self,
        pool: Collected,
        classes: Sequence[int],
        num_rounds: int | None,
        model: Model,
        federation: Federation,
        rng: Rng,
    ) -> Collected:
        """What is kept of these classes. Without a number of rounds each class counts those in which it came."""
        # z(s) = phi(s) / ||phi(s)|| under the task-end model, before the head grows (Sec. 3.3)
        z = F.normalize(embed(federation.net(model), pool.images), dim=1, eps=1e-12)
        labels = [label for label in classes if bool((pool.labels == label).any())]
        members = [(pool.labels == label).nonzero().squeeze(1) for label in labels]
        rngs = [rng.at("buffer", label) for label in labels]
        rounds = [pool.rounds[m] for m in members]
        if num_rounds is None:
            rounds = [own.unique(return_inverse=True)[1] + 1 for own in rounds]
        lengths = [num_rounds or int(own.max()) for own in rounds]
        kept = self._keep([z[m] for m in members], rounds, lengths, rngs)
        # stored in pool order, so that training does not depend on the order of the picks
        index = torch.cat([own[k] for own, k in zip(members, kept, strict=True)]).sort().values
        return _chosen(pool, index)

    def _close_absent(self, state: ServerState, now: int, federation: Federation, rng: Rng) -> ServerState:
        """Where no end is announced: close the classes that have not come for W rounds (docs/open-ended.md)."""
        pool, patience = _joined(state.pool), self.close_after or PATIENCE
        assert pool is not None
        seen = {label: int(pool.rounds[pool.labels == label].max()) for label in pool.labels.unique().tolist()}
        gone = [label for label, last in seen.items() if now - last >= patience]
        if not gone:
            return state
        closed = self._close(state, torch.tensor(gone, device=pool.labels.device), federation, rng)
        return replace(closed, closings=(*state.closings, *((label, now) for label in gone)))

    def _close(self, state: ServerState, labels: Tensor, federation: Federation, rng: Rng) -> ServerState:
        """Herd these classes into a buffer. One that was closed before and came back is herded with what was kept of it."""
        buffers, pool = _split(state.buffers, labels), _split(state.pool, labels)
        candidates = _joined(buffers[0] + pool[0])
        if candidates is None or self.buffer == "none":
            return replace(state, pool=pool[1])
        chosen = self._herded(candidates, labels.tolist(), None, state.model, federation, rng)
        return replace(state, pool=pool[1], buffers=(*buffers[1], chosen))

    def forget(
        self, state: ServerState, client: int, model: Model, num_rounds: int, federation: Federation, rng: Rng
    ) -> ServerState:
        """Without the client's surrogates; the fresh model is trained on the others as often as in so many rounds."""
        pool, buffers = (tuple(_chosen(p, p.clients != client) for p in parts) for parts in (state.pool, state.buffers))
        pool = tuple(part for part in pool if len(part.labels))  # buffers keep their places, one per task
        everything, net = _joined(buffers + pool), federation.net(model)
        if everything is not None and len(everything.labels):
            for r in range(num_rounds):
                self._train(net, everything, federation, rng.at(r))
        return replace(state, model=weights_of(net), pool=pool, buffers=buffers)

    def _keep(self, z: list[Tensor], rounds: list[Tensor], num_rounds: list[int], rngs: list[Rng]) -> list[Tensor]:
        """Positions of the candidates of each class that go into the buffer."""
        if self.buffer in ("temporal", "full-pool"):
            fraction = self.recent_fraction if self.buffer == "temporal" else 1.0
            windows = [recent_window(own, n, fraction) for own, n in zip(rounds, num_rounds, strict=True)]
            targets = [own[window].mean(dim=0) for own, window in zip(z, windows, strict=True)]  # m_{t,c}
            return herd_classes(z, targets, self.budget)
        return [self._keep_simply(len(own), rng).to(own.device) for own, rng in zip(z, rngs, strict=True)]

    def _keep_simply(self, n: int, rng: Rng) -> Tensor:
        """The pool is in order of rounds, and of clients within a round."""
        if self.buffer == "random":
            return torch.randperm(n, generator=rng.generator())[: self.budget]
        order = torch.arange(n)
        if self.buffer == "earliest":
            return order[: self.budget]
        return order[-self.budget :] if self.buffer == "latest" else order


def _collect(uploads: Uploads, round_number: int) -> tuple[Collected, ...]:
    """One round's uploads as one pool entry; none if nobody sent anything."""
    pictures = gathered(uploads)
    if pictures is None:
        return ()
    images, labels = pictures
    clients = torch.cat([torch.full_like(upload["labels"], client) for client, upload in uploads.items()])
    return (Collected(images, labels, torch.full_like(labels, round_number), clients),)


def _chosen(part: Collected, index: Tensor) -> Collected:
    return Collected(part.images[index], part.labels[index], part.rounds[index], part.clients[index])


def _split(parts: tuple[Collected, ...], labels: Tensor) -> tuple[tuple[Collected, ...], tuple[Collected, ...]]:
    """Pictures of these labels, and the others. A part that has none of them stays the very same, so it is saved once."""
    inside, outside = [], []
    for part in parts:
        own = torch.isin(part.labels, labels)
        if bool(own.any()):
            inside.append(_chosen(part, own))
            part = _chosen(part, ~own)
        if len(part.labels):
            outside.append(part)
    return tuple(inside), tuple(outside)


def _joined(parts: tuple[Collected, ...]) -> Collected | None:
    if not parts:
        return None
    names = ("images", "labels", "rounds", "clients")
    return Collected(*(torch.cat([getattr(p, name) for p in parts]) for name in names))
