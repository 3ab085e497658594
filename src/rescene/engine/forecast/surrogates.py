"""Costs of the methods whose clients send images: ReSCENE, FedDM, FedAF, raw upload, and joint training."""

from __future__ import annotations

from collections import Counter

from rescene.engine.forecast.world import (
    FLOAT,
    LABEL,
    PIXELS,
    TRAINING,
    Exchange,
    Moment,
    Pricer,
    World,
    epoch_images,
    nothing,
)
from rescene.methods.raw_upload import RawUpload


class Condensing(Pricer):
    """Every class of n images becomes m surrogates; a step passes b real images forward and m surrogates both ways."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        method = world.method
        self.settings = method._rescene if isinstance(method, RawUpload) else method

    def made(self, task: int, client: int) -> dict[int, int]:
        """Surrogates of each class."""
        counts = {c: self.settings.num_surrogates(n) for c, n in self.world.held(task, client).items()}
        return {c: m for c, m in counts.items() if m}

    def condensation_flops(self, task: int, client: int) -> int:
        held, passes, steps = self.world.held(task, client), 0, int(self.settings.num_steps)
        for label, m in self.made(task, client).items():
            passes += self.settings.real_batch_size(held[label], m) + PIXELS * m
        return steps * passes * self.world.flops(self.world.seen(task))

    def upload_bytes(self, num_images: int) -> int:
        return num_images * (self.world.image_values * FLOAT + LABEL)

    def condense(self, moment: Moment, participants: list[int]) -> Counter[int]:
        """The round's exchange; returns the surrogates of each class that arrive."""
        t, arrived = moment.task, Counter[int]()
        exchange = Exchange({}, {}, self.world.model_bytes(self.world.seen(t)))
        for k in participants:
            made = self.made(t, k)
            arrived.update(made)
            exchange.flops[k] = self.condensation_flops(t, k)
            exchange.up[k] = self.upload_bytes(sum(made.values()))
        moment.exchanges.append(exchange)
        return Counter({c: round(n * self.world.stands_for) for c, n in arrived.items()})

    def train(self, moment: Moment, pool_size: int) -> None:
        """E_srv epochs on the pool."""
        settings, forward = self.world.train, self.world.flops(self.world.seen(moment.task))
        moment.pool = pool_size
        moment.server_flops += (
            settings.server_epochs * epoch_images(pool_size, settings.batch_size) * TRAINING * forward
        )


class ReScene(Condensing):
    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.pool, self.buffered = Counter[int](), 0

    def round(self, moment: Moment, participants: list[int]) -> None:
        arrived = self.condense(moment, participants)
        self.pool = self.pool + arrived if self.settings.accumulate else arrived
        self.train(moment, self.buffered + self.pool.total())

    def end(self, moment: Moment) -> None:
        if self.settings.buffer != "none":
            moment.server_flops += self.pool.total() * self.world.flops(self.world.seen(moment.task))  # embedding
            if self.settings.buffer in ("temporal", "full-pool"):
                moment.herded = tuple(self.pool.values())
            budget = self.pool.total() if self.settings.buffer == "keep-all" else self.settings.budget
            self.buffered += sum(min(budget, count) for count in self.pool.values())
        self.pool = Counter()


class FedDM(Condensing):
    def round(self, moment: Moment, participants: list[int]) -> None:
        arrived = self.condense(moment, participants)
        self.train(moment, arrived.total())


class FedAF(Condensing):
    """FedDM, and means of logits and soft labels of every class a client owns, which are forward passes over its images."""

    def round(self, moment: Moment, participants: list[int]) -> None:
        world, t, settings = self.world, moment.task, self.settings
        forward, num_classes = world.flops(world.seen(t)), world.seen(t)
        row = 2 * LABEL + num_classes * FLOAT  # label, weight, mean of one class
        if settings.cdc_weight:
            first = Exchange({}, {}, world.model_bytes(num_classes))
            for k in participants:
                first.flops[k] = world.images(t, k) * forward
                first.up[k] = len(world.held(t, k)) * row
            moment.exchanges.append(first)
        arrived = self.condense(moment, participants)
        second = moment.exchanges[-1]
        if settings.cdc_weight:  # the model is there already; the means of all owners follow
            owned = set().union(*(world.held(t, k) for k in participants))
            second.down = len(owned) * (LABEL + num_classes * FLOAT)
        if settings.lgkm_weight:
            for k in participants:
                made, real = self.made(t, k), settings.soft_labels == "real"
                second.flops[k] += (world.images(t, k) if real else sum(made.values())) * forward
                second.up[k] += len(world.held(t, k) if real else made) * row
        self.train(moment, arrived.total())


class Joint(Condensing):
    """Every image is handed over once; the rounds are the server's alone."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.collected = 0

    def begin(self, moment: Moment) -> None:
        sizes = {k: self.world.images(moment.task, k) for k in self.world.clients}
        moment.exchanges.append(
            Exchange(dict.fromkeys(sizes, 0), {k: self.upload_bytes(n) for k, n in sizes.items()}, 0)
        )
        self.collected += sum(sizes.values())

    def round(self, moment: Moment, participants: list[int]) -> None:
        moment.exchanges.append(nothing(participants))
        self.train(moment, self.collected)
