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

from rescene.core.hyperparameters import hyper
from rescene.core.method_style import BLUE
from rescene.core.record import record
from rescene.core.rng import Rng
from rescene.core.verification import Verified
from rescene.data import Shard, Task
from rescene.functional import herd_classes, recent_window
from rescene.methods.base import Federation, Model, Uploads, weights_of
from rescene.methods.nominal_cost import NominalReplay, Setting
from rescene.methods.registry import register
from rescene.methods.rescene_extensions import (
    PATIENCE,
    Herd,
    chosen,
    close,
    close_absent,
    joined,
    kept_otherwise,
    without_client,
)
from rescene.methods.surrogates import SurrogateMethod, gathered
from rescene.training import Surrogates, condense, embed, fit_pool


@record
class Collected:
    """Surrogates on the server: one round's uploads in the pool, or one task's buffer."""

    images: Tensor
    labels: Tensor
    rounds: Tensor  # 1-based, as in the paper
    clients: Tensor  # who sent each one; -1: not recorded, by a version before that


@record
class ServerState:
    """The server's state: the model, the pool of this task, and the buffers of earlier tasks."""

    model: Model
    pool: tuple[Collected, ...]  # S_t, one entry per round, never changed once added
    buffers: tuple[Collected, ...]  # B_1 .. B_{t-1}
    notes: dict[str, float]
    closings: tuple[tuple[int, int], ...] = ()  # label, round: buffers closed where no end was announced


@register
class ReSCENE(SurrogateMethod):
    """The paper's method; the equations stand at the top of this file."""

    name: ClassVar[str] = "rescene"
    title: ClassVar[str] = "ReSCENE"
    colour: ClassVar[str] = BLUE
    marker: ClassVar[str] = "o"
    paper: ClassVar[str] = "Kang, Tu, Lee: ReSCENE, server-side replay for federated continual learning"
    verified: ClassVar[tuple[Verified, ...]] = (
        Verified(
            "published code",
            "tests/oracles/test_oracles.py::test_matching_loss_and_its_pixel_gradient",
            "1e-5, the features' term of Eq. 1 (distribution matching's code)",
        ),
        Verified(
            "published code", "tests/oracles/test_oracles.py::test_icarl_herding", "the same picks (iCaRL's code)"
        ),
        Verified(
            "paper figure",
            "results/controls/rescene-beta0.5-noaug-min-s0",
            "AA 68.19 against 67.96, AIA 73.45 against 73.53 (beta 0.5, E_srv=100, one seed)",
        ),
        Verified(
            "paper figure",
            "results/controls/rescene-beta0.1-esrv10-noaug-min-s0",
            "AA 54.71 against 53.45, AIA 66.00 against 65.03 (seed 0; five seeds: 54.08, 65.50; it chose server_augment)",
        ),
        Verified(
            "hand computation",
            "tests/methods/test_rounds_by_hand.py::test_a_server_round_of_rescene_trains_on_buffers_and_pool",
            "a round, to rounding",
        ),
    )
    compute: ClassVar[tuple[str, str] | None] = ("O(R K S IPC |C_t| F)", "O(R E_srv |B u S| F)")
    open_ended: ClassVar[bool] = True
    sends_pictures_only: ClassVar[bool] = True

    buffer: Literal["temporal", "full-pool", "earliest", "latest", "random", "keep-all", "none"] = hyper(
        "temporal", "-", "Sec. 5.2", "which surrogates of a finished task are kept"
    )
    close_after: int | None = hyper(
        None, "W", "[ours]", f"with tasks.drift: close a class after so many rounds without it; null: {PATIENCE}", ge=1
    )
    accumulate: bool = hyper(True, "-", "Sec. 3.2", "keep the surrogates of earlier rounds of the task in the pool")
    budget: int = hyper(1000, "B", "Sec. 4.1", "surrogates kept per class after a task", ge=1)
    recent_fraction: float = hyper(
        0.75, "lambda", "Sec. 4.1", "fraction of rounds that forms the herding target", gt=0, le=1
    )
    alpha: float = hyper(
        0.5, "alpha", "App. A", "sampling exponent: 1 count-proportional, 0 class-balanced", ge=0, le=1
    )
    tau: float = hyper(1.0, "tau", "App. A", "strength of the logit adjustment", ge=0)

    def init(self, net: nn.Module, rng: Rng) -> ServerState:
        return ServerState(model=weights_of(net), pool=(), buffers=(), notes={})

    def condensed(
        self, net: nn.Module, shards: Sequence[Shard], rngs: Sequence[Rng], noise_seed: int
    ) -> list[Surrogates]:
        """Client, Eq. 1: move m surrogates s of each class, which start as real images x, for S steps down the gradient of

            || mean phi(s) - mean phi(x) ||^2 + || mean f(s) - mean f(x) ||^2    under theta + noise, ||noise|| = rho

        with phi the features and f the logits (``training/condensation.py``).
        """
        return condense(net, shards, rngs, self, noise_seed)

    def server_round(
        self, state: ServerState, uploads: Uploads, round: int, federation: Federation, rng: Rng
    ) -> ServerState:
        """Server: S_t <- S_t + uploads, then train on all buffers and the pool."""
        pool = (state.pool if self.accumulate else ()) + _collect(uploads, round + 1)
        everything = joined(state.buffers + pool)
        if everything is None:
            return state
        net = federation.net(state.model)
        loss = self.fit_server(net, everything, federation, rng)
        notes = {"server_loss": loss, "pool_size": len(everything.labels)}
        state = replace(state, model=weights_of(net), pool=pool, notes=notes)
        if not federation.task.announced:
            herd = self._herd_of(state, federation, rng)
            state = close_absent(state, round + 1, self.close_after or PATIENCE, herd)
        return state

    def fit_server(self, net: nn.Module, everything: Collected, federation: Federation, rng: Rng) -> float:
        """E_srv epochs; a batch draws class c with q_c ~ n_c^alpha, and the loss is CE(f(x) + tau log pi, y)."""
        return fit_pool(
            net,
            everything.images,
            everything.labels,
            federation.transform,
            self.server_training,
            rng.at("sgd").generator(federation.device),
            num_classes=federation.task.num_seen,
            alpha=self.alpha,
            tau=self.tau,
        )

    def end_task(self, state: ServerState, task: Task, federation: Federation, rng: Rng) -> ServerState:
        """Server: B_t <- what herding keeps of S_t."""
        pool = joined(state.pool)
        if pool is None or self.buffer == "none":
            return replace(state, pool=())
        if not task.announced:
            closed: ServerState = close(state, pool.labels.unique(), self._herd_of(state, federation, rng))
            return closed
        kept = self.herded(pool, task.classes, federation.num_rounds, state.model, federation, rng)
        return replace(state, pool=(), buffers=state.buffers + (kept,))

    def herded(
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
        return chosen(pool, index)

    def _keep(self, z: list[Tensor], rounds: list[Tensor], num_rounds: list[int], rngs: list[Rng]) -> list[Tensor]:
        """Eq. 2: pick B surrogates of each class, one by one, whose mean stays nearest to m, the mean of its recent rounds."""
        if self.buffer not in ("temporal", "full-pool"):
            return [
                kept_otherwise(self.buffer, len(own), self.budget, r).to(own.device)
                for own, r in zip(z, rngs, strict=True)
            ]
        fraction = self.recent_fraction if self.buffer == "temporal" else 1.0
        windows = [recent_window(own, n, fraction) for own, n in zip(rounds, num_rounds, strict=True)]
        targets = [own[window].mean(dim=0) for own, window in zip(z, windows, strict=True)]  # m_{t,c}
        return herd_classes(z, targets, self.budget)

    def _herd_of(self, state: ServerState, federation: Federation, rng: Rng) -> Herd | None:
        """How a class is herded where nobody announces the end of its task; None where nothing is kept."""
        if self.buffer == "none":
            return None
        return lambda pool, classes: self.herded(pool, classes, None, state.model, federation, rng)

    def forget(
        self, state: ServerState, client: int, model: Model, num_rounds: int, federation: Federation, rng: Rng
    ) -> ServerState:
        """Without the client's surrogates; the fresh model is trained on the others as often as in so many rounds."""
        left: ServerState = without_client(state, client)
        everything, net = joined(left.buffers + left.pool), federation.net(model)
        if everything is not None and len(everything.labels):
            for r in range(num_rounds):
                self.fit_server(net, everything, federation, rng.at(r))
        return replace(left, model=weights_of(net))

    def kept_per_class(self) -> int:
        return self.budget

    def recent_share(self) -> float:
        return self.recent_fraction

    def nominal_pool(self, setting: Setting, task: int) -> float:
        """|B u S|, summed over the rounds: the pool grows, the buffers of earlier tasks stay."""
        per_round = setting.per_round * len(setting.tasks[task].classes) * self.ipc
        buffers = setting.old_classes(task) * min(self.budget, setting.turns * self.ipc)
        return setting.num_rounds * buffers + per_round * sum(range(1, setting.num_rounds + 1))

    def nominal_replay(self, setting: Setting) -> NominalReplay | None:
        kept = setting.num_classes * min(self.budget, setting.turns * self.ipc)
        return NominalReplay(self.budget, 0, kept)


def _collect(uploads: Uploads, round_number: int) -> tuple[Collected, ...]:
    """One round's uploads as one pool entry; none if nobody sent anything."""
    pictures = gathered(uploads)
    if pictures is None:
        return ()
    images, labels = pictures
    clients = torch.cat([torch.full_like(upload["labels"], client) for client, upload in uploads.items()])
    return (Collected(images, labels, torch.full_like(labels, round_number), clients),)
