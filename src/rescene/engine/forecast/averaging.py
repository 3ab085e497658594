"""Costs of the methods whose clients train the model: FedAvg, FedEWC, FedLwF, TARGET, and one site alone."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

from rescene.engine.forecast.world import (
    PIXELS,
    TRAINING,
    Exchange,
    Moment,
    Pricer,
    World,
    epoch_batches,
    epoch_images,
    nothing,
)
from rescene.steps.generator import generator_flops


class FedAvg(Pricer):
    """E epochs on what the client trains on. The others say how much that is, and what a batch costs besides."""

    def trained_on(self, task: int, client: int) -> int:
        return self.world.images(task, client)

    def extra_flops(self, task: int, client: int) -> int:
        """Work of a round beside the training passes."""
        return 0

    def training_flops(self, task: int, client: int) -> int:
        train, n = self.world.train, self.trained_on(task, client)
        passes = train.local_epochs * epoch_images(n, train.batch_size) * TRAINING
        return passes * self.world.flops(self.world.seen(task)) + (self.extra_flops(task, client) if n else 0)

    def round(self, moment: Moment, participants: list[int]) -> None:
        t = moment.task
        model = self.world.model_bytes(self.world.seen(t))
        flops = {k: self.training_flops(t, k) for k in participants}
        up = {k: model if self.trained_on(t, k) else 0 for k in participants}
        moment.exchanges.append(Exchange(flops, up, model))

    def tell_everybody(self, moment: Moment, down: int, flops: Mapping[int, int] | None = None, up: int = 0) -> None:
        """An exchange with all N clients at the beginning or end of a task."""
        clients = self.world.clients
        moment.exchanges.append(
            Exchange({k: (flops or {}).get(k, 0) for k in clients}, dict.fromkeys(clients, up), down)
        )


class FedEWC(FedAvg):
    """One more forward and backward pass over the client's images, for the Fisher diagonal."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.fisher: dict[int, int] = {}  # bytes, by client
        self.anchor: dict[int, int] = {}
        self.pending: dict[int, int] = {}

    def begin(self, moment: Moment) -> None:
        if moment.task == 0 or self.settings.anchor != "task_end":
            return
        anchor = self.world.weight_bytes(self.world.seen(moment.task - 1))
        self.tell_everybody(moment, anchor)
        for k in self.fisher.keys() | self.pending.keys():  # the clients with a history
            self.anchor[k] = anchor
        self.fisher |= self.pending
        self.pending = {}

    def extra_flops(self, task: int, client: int) -> int:
        return self.world.images(task, client) * TRAINING * self.world.flops(self.world.seen(task))

    def round(self, moment: Moment, participants: list[int]) -> None:
        super().round(moment, participants)
        weights = self.world.weight_bytes(self.world.seen(moment.task))
        for k in participants:
            if not self.trained_on(moment.task, k):
                continue
            if self.settings.anchor == "task_end":
                self.pending[k] = weights
            else:
                self.fisher[k] = self.anchor[k] = weights

    def remembered(self) -> Mapping[int, int]:
        parts = (self.fisher, self.anchor, self.pending)
        return {k: sum(part.get(k, 0) for part in parts) for k in self.world.clients}


class FedLwF(FedAvg):
    """The teacher looks at every training image."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.teacher = 0  # rows of its head

    def begin(self, moment: Moment) -> None:
        if moment.task > 0:
            self.teacher = self.world.seen(moment.task - 1)
            self.tell_everybody(moment, self.world.model_bytes(self.teacher))

    def extra_flops(self, task: int, client: int) -> int:
        train, n = self.world.train, self.trained_on(task, client)
        teacher = self.world.flops(self.teacher) if self.teacher else 0
        return train.local_epochs * epoch_images(n, train.batch_size) * teacher

    def remembered(self) -> Mapping[int, int]:
        teacher = self.world.model_bytes(self.teacher) if self.teacher else 0
        return dict.fromkeys(self.world.clients, teacher)


class Target(FedAvg):
    """The server paints images; beside every real batch a client passes a synthetic one through student and teacher."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.teacher, self.kept = 0, 0  # rows of the teacher's head, synthetic images on a client

    def begin(self, moment: Moment) -> None:
        if moment.task == 0:
            return
        s, world = self.settings, self.world
        self.teacher = world.seen(moment.task - 1)
        painted = s.synthesis_rounds * s.synthesis_batch
        self.kept = min(painted, s.images_per_client or painted)
        self.tell_everybody(moment, 0)  # how large pictures are
        moment.server_flops += self.synthesis_flops()
        self.tell_everybody(moment, world.model_bytes(self.teacher) + painted * world.image_values)

    def synthesis_flops(self) -> int:
        """Searches: generator both ways, teacher and (from the warm-up on) student to the pixels. Student: distillation."""
        s, forward = self.settings, self.world.flops(self.teacher)
        adversarial = s.adversarial_weight > 0
        image_size = self.world.experiment.arch.image_size
        painting = TRAINING * generator_flops(s.latent_size, s.generator_width, image_size) + PIXELS * forward
        searches = s.synthesis_rounds * painting
        if adversarial:
            searches += max(0, s.synthesis_rounds - max(0, s.warmup_rounds - 1)) * PIXELS * forward
        distilled = max(0, s.synthesis_rounds - s.warmup_rounds) * s.student_steps if adversarial else 0
        steps = s.generator_steps * searches + distilled * (TRAINING + 1) * forward
        return int(s.synthesis_batch * steps)

    def extra_flops(self, task: int, client: int) -> int:
        if not self.teacher or self.settings.kd_weight == 0:
            return 0
        train, world = self.world.train, self.world
        batches = train.local_epochs * epoch_batches(self.trained_on(task, client), train.batch_size)
        each = TRAINING * world.flops(world.seen(task)) + world.flops(self.teacher)
        return cycled_images(self.kept, self.settings.synthetic_batch, batches) * each

    def remembered(self) -> Mapping[int, int]:
        if not self.teacher:
            return {}
        each = self.world.model_bytes(self.teacher) + self.kept * self.world.image_values
        return dict.fromkeys(self.world.clients, each)


class Local(FedAvg):
    """One site trains in every round; nobody else does anything."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        rng = world.experiment.rng.at("server", 0).at("begin")
        self.site = self.settings._choose(SimpleNamespace(clients=world.clients), rng)

    def round(self, moment: Moment, participants: list[int]) -> None:
        super().round(moment, [self.site])
        moment.exchanges.append(nothing(participants))


def cycled_images(num_items: int, batch_size: int, num_batches: int) -> int:
    """Images in this many batches of a set that is shuffled again whenever it is used up; a single last one waits.

    >>> cycled_images(10, 4, 3), cycled_images(10, 4, 4), cycled_images(9, 4, 3)
    (10, 14, 12)
    """
    sizes = [min(batch_size, num_items - first) for first in range(0, num_items, batch_size)]
    sizes = [size for size in sizes if size > 1 or num_items == 1]
    whole, rest = divmod(num_batches, len(sizes))
    return whole * sum(sizes) + sum(sizes[:rest])
