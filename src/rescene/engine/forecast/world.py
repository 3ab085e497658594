"""What the cost of a run depends on: who holds how many images, who takes part when, and what a network weighs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from rescene.data import LazySplit
from rescene.engine.experiment import Experiment
from rescene.nets import Arch, forward_flops
from rescene.record import num_bytes

FLOAT, LABEL, DOUBLE = 4, 8, 8  # bytes of a float32, an int64 and a float64
TRAINING = 3  # passes of an image from which weights learn: forward, and twice that backward
PIXELS = 2  # passes of an image whose pixels learn: the weights' half of the backward pass falls away


@dataclass
class Exchange:
    """One call of ``ask``: what each client computes and sends, and what each of them receives."""

    flops: dict[int, int]
    up: dict[int, int]
    down: int

    @property
    def down_bytes(self) -> int:
        return self.down * len(self.up)


@dataclass
class Moment:
    """One step of the schedule: the beginning of a task, a round (``round`` >= 0), or the end of a task."""

    task: int
    round: int | None
    exchanges: list[Exchange] = field(default_factory=list)
    server_flops: int = 0
    pool: int = 0  # images that the server trains on
    herded: tuple[int, ...] = ()  # candidates of each class among which the buffer is chosen

    @property
    def asked(self) -> set[int]:
        """The clients that take part, in however many exchanges."""
        return {client for exchange in self.exchanges for client in exchange.up}

    @property
    def client_flops(self) -> int:
        return sum(sum(exchange.flops.values()) for exchange in self.exchanges)

    @property
    def up_bytes(self) -> int:
        return sum(sum(exchange.up.values()) for exchange in self.exchanges)

    @property
    def down_bytes(self) -> int:
        return sum(exchange.down_bytes for exchange in self.exchanges)


@lru_cache(maxsize=64)
def _smallest(arch: Arch) -> tuple[int, int, int]:
    """Of a network with one class: features, bytes of the whole state, bytes of the parameters."""
    net = arch.skeleton(1)
    return net.feature_size, num_bytes(net.state_dict()), num_bytes(dict(net.named_parameters()))


class World:
    """An experiment seen through its sizes. Bytes count tensors; plain numbers for the log are small change."""

    def __init__(self, experiment: Experiment, stands_for: float = 1) -> None:
        self.experiment, self.method = experiment, experiment.method
        self.stands_for = stands_for  # sites that each of the participants stands for in the server's pool
        self._labels = experiment.dataset.train.labels.cpu()
        self._held: dict[tuple[int, int], dict[int, int]] = {}
        self.tasks, self.train = experiment.tasks, experiment.recipe.train
        self.num_rounds = experiment.recipe.federation.num_rounds
        self.clients = experiment.clients
        self.image_values = experiment.arch.channels * experiment.arch.image_size**2
        self.feature_size, self._model_bytes, self._weight_bytes = _smallest(experiment.arch)
        self._row_bytes = (self.feature_size + 1) * FLOAT  # of the head, the part that grows

    def held(self, task: int, client: int) -> dict[int, int]:
        """Images of each class that the client has any of, ascending labels; asked of those who take part only."""
        if (task, client) not in self._held:
            shards = self.experiment.shards[task]
            if isinstance(shards, LazySplit):
                self._held[task, client] = shards.counts(client)
            else:
                values, counts = self._labels[shards[client].cpu()].unique(return_counts=True)
                self._held[task, client] = dict(zip(values.tolist(), counts.tolist(), strict=True))
        return self._held[task, client]

    def images(self, task: int, client: int) -> int:
        return sum(self.held(task, client).values())

    def participants(self, task: int, round: int) -> list[int]:
        return self.experiment.participants(self.tasks[task], round)

    def seen(self, task: int) -> int:
        """Rows of the head during this task."""
        return self.tasks[task].num_seen

    def flops(self, num_classes: int) -> int:
        """F, one image forward."""
        return forward_flops(self.experiment.arch, num_classes)

    def model_bytes(self, num_classes: int) -> int:
        """The whole state as it travels, BatchNorm's statistics and counters included."""
        return self._model_bytes + (num_classes - 1) * self._row_bytes

    def weight_bytes(self, num_classes: int) -> int:
        """Trainable parameters only."""
        return self._weight_bytes + (num_classes - 1) * self._row_bytes


class Pricer:
    """The verbs of a method, told as costs. One per method, in the order in which time runs."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.unsure: dict[
            str, str
        ] = {}  # figure -> why training decides it: "at most, since ..." or "about, since ..."
        self.settings: Any = world.method

    def begin(self, moment: Moment) -> None:
        pass

    def round(self, moment: Moment, participants: list[int]) -> None:
        raise NotImplementedError

    def end(self, moment: Moment) -> None:
        pass

    def remembered(self) -> Mapping[int, int]:
        """Bytes each client keeps between rounds beside the model."""
        return {}


def nothing(participants: list[int]) -> Exchange:
    """A round in which the participants are asked for nothing."""
    return Exchange(dict.fromkeys(participants, 0), dict.fromkeys(participants, 0), 0)


def epoch_images(num_images: int, batch_size: int) -> int:
    """Images that one epoch of SGD sees: a trailing batch of one is dropped unless it is the only one.

    >>> [epoch_images(n, 4) for n in (0, 1, 4, 5, 6)]
    [0, 1, 4, 4, 6]
    """
    return num_images - (num_images % batch_size == 1 and num_images > 1)


def epoch_batches(num_images: int, batch_size: int) -> int:
    return -(-epoch_images(num_images, batch_size) // batch_size)
