"""What a run will cost, before anything is trained: FLOPs, bytes and state as the ledger will count them.

The method's own code goes through the whole schedule on a miniature of the experiment: the same tasks, sites, labels and
participants, pictures of a few pixels, and a network of one small layer. Its passes are counted at the price of the real network,
and tensors that cross the wire at their real size, which their shape tells. Loops run once and count as often as they would run
(``rescene.nets.laps``). A site's first turn in a task is rehearsed, and the second if it remembers something; later ones cost the
same as that.

How long a round and a run take follows from the speed of a device. A rate is measured by the very steps that a run consists of, on
as many random pictures as take half a second, two at least: SGD on a shard or condensation for the clients, and on a GPU SGD on a
pool for the server. Times are estimates: a client with few images is slower per FLOP, and checkpoints and the search for near-copies
are left out.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from rescene.core.errors import ConfigError
from rescene.core.record import Tree, num_bytes, tensors
from rescene.core.rng import Rng, seeded_generator
from rescene.data import Images, Shard, Task, Transform
from rescene.engine.experiment import Experiment
from rescene.methods import Payload, Uploads
from rescene.methods.base import Client
from rescene.nets import FLOAT_BYTES, Arch, body_cost, flops_to, forward_flops, model_bytes, pool_of, rehearsal
from rescene.nets.cost import FlopMeter
from rescene.privacy.mechanism import Mechanism
from rescene.privacy.totals import Total, added
from rescene.training import Condensation, Training, condense, fit_pool, fit_shard
from rescene.training.layer_inputs import input_layers

SIDE = 4  # pixels of a rehearsed picture
FEATURES = 37  # of a rehearsed image: a number that nothing else is likely to have, so that shapes tell what they count
TURNS = 2  # that a site with a memory rehearses in a task: the first may differ from the others


@dataclass
class Exchange:
    """One call of ``ask``: what each client computes and sends, and what each of them receives."""

    flops: dict[int, int] = field(default_factory=dict)
    up: dict[int, int] = field(default_factory=dict)
    down: int = 0

    @property
    def down_bytes(self) -> int:
        """Bytes that all clients receive together."""
        return self.down * len(self.up)


@dataclass
class Moment:
    """One step of the schedule: the beginning of a task, a round (``round`` >= 0), or the end of a task.

    ``pool`` and ``kept`` are the pictures of each class that the server holds after it: of this task, and of finished ones.
    """

    task: int
    round: int | None
    exchanges: list[Exchange] = field(default_factory=list)
    server_flops: int = 0
    trained_on: int = 0  # images that the server trains on
    pool: Counter[int] = field(default_factory=Counter)
    kept: Counter[int] = field(default_factory=Counter)

    @property
    def asked(self) -> set[int]:
        """The clients that take part, in however many exchanges."""
        return {client for exchange in self.exchanges for client in exchange.up}

    @property
    def client_flops(self) -> int:
        """FLOPs of all clients together."""
        return sum(sum(exchange.flops.values()) for exchange in self.exchanges)

    @property
    def up_bytes(self) -> int:
        """Bytes that all clients send together."""
        return sum(sum(exchange.up.values()) for exchange in self.exchanges)

    @property
    def down_bytes(self) -> int:
        """Bytes that all clients receive together."""
        return sum(exchange.down_bytes for exchange in self.exchanges)


@dataclass(frozen=True)
class Forecast:
    """The whole run, step by step."""

    moments: tuple[Moment, ...]
    client_state_bytes: int
    evaluation_flops: int

    @property
    def rounds(self) -> list[Moment]:
        """The steps that are rounds."""
        return [moment for moment in self.moments if moment.round is not None]

    def measured(self) -> dict[str, float]:
        """The figures that the ledger of the run will hold, under the same names."""
        turns = max(sum(len(moment.asked) for moment in self.rounds), 1)
        return {
            "uplink_bytes": sum(moment.up_bytes for moment in self.moments),
            "downlink_bytes": sum(moment.down_bytes for moment in self.moments),
            "uplink_bytes_per_message": sum(moment.up_bytes for moment in self.rounds) / turns,
            "downlink_bytes_per_message": sum(moment.down_bytes for moment in self.rounds) / turns,
            "client_state_bytes": self.client_state_bytes,
            "client_flops": sum(moment.client_flops for moment in self.moments),
            "server_flops": sum(moment.server_flops for moment in self.moments),
        }


def forecast(experiment: Experiment) -> Forecast | None:
    """Rehearse the run; None behind a privacy mechanism, where classes drift in and where answers come late.

    A method that cannot be rehearsed on other pictures and another network is a ConfigError (E189).
    """
    recipe = experiment.recipe
    if recipe.privacy.mechanism != "none" or recipe.tasks.drift is not None or recipe.federation.delay:
        return None
    small = Miniature(experiment)
    try:
        with torch.random.fork_rng(devices=[]), rehearsal(small.pixels), flops_to(small.meter.add):
            moments, largest, looks = _schedule(experiment, small)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            "E189",
            f"the cost of {experiment.method.title} cannot be counted in advance: {str(error).partition(chr(10))[0]}",
            why="a forecast runs the method on small pictures and a small network, and the method refuses these",
            fix="run it with tasks.limit=1 federation.num_rounds=1 and read the cost in results.json",
        ) from error
    return Forecast(tuple(moments), largest, looks * _evaluation_flops(experiment))


def _schedule(experiment: Experiment, small: Miniature) -> tuple[list[Moment], int, int]:
    """Every step of the run, the bytes of the largest client state, and how often the final model looks at a picture."""
    method: Any = experiment.method
    rng, moments, largest = experiment.rng.at("server"), [], 0
    state = method.init(small.arch.build(experiment.tasks[0].num_seen), rng.at("init"))
    for task in experiment.tasks:
        small.move(task, None, small.clients)
        state = method.begin_task(state, task, small, rng.at(task.index, "begin"))
        moments.append(small.told(state))
        for r in range(small.num_rounds):
            small.move(task, r, experiment.participants(task, r))
            payload = method.broadcast(state, r, small, rng.at(task.index, r, "broadcast"))
            uploads = small.ask(small.participants, "client_round", payload)
            state = method.server_round(state, uploads, r, small, rng.at(task.index, r, "round"))
            moments.append(small.told(state))
            prompts = small.sizes.num_bytes(list(pool_of(state.model) or ()))
            largest = max(largest, model_bytes(experiment.arch, task.num_seen) + prompts + small.largest_state())
        small.move(task, None, small.clients)
        state = method.end_task(state, task, small, rng.at(task.index, "end"))
        moments.append(small.told(state))
    return moments, largest, 1 if pool_of(state.model) is None else 2


class Miniature:
    """The experiment in small, as the federation that a method sees (``methods.base.Federation``)."""

    mechanism: Mechanism | None = None

    def __init__(self, experiment: Experiment) -> None:
        self.experiment, self.method = experiment, experiment.method
        self.clients: Sequence[int] = experiment.clients
        self.participants = self.clients
        self.num_rounds, self.device = experiment.recipe.federation.num_rounds, torch.device("cpu")
        self.arch, self.sizes = _small_arch(experiment), Sizes(experiment)
        self.pixels = (experiment.arch.image_size / self.arch.image_size) ** 2
        self.transform = Transform((0.5,) * self.arch.channels, (0.25,) * self.arch.channels, 1)
        self.meter = FlopMeter(experiment.arch)
        self.client_states: dict[int, Tree] = {}
        train, side = experiment.dataset.train, self.arch.image_size
        shape = (len(train.labels), self.arch.channels, side, side)
        pixels = torch.randint(256, shape, dtype=torch.uint8, generator=seeded_generator(0))
        self._images = Images(pixels, train.labels.cpu(), None if train.domains is None else train.domains.cpu())
        self._turns: dict[tuple[int, str, int], list[tuple[Payload, int]]] = {}

    def move(self, task: Task, round: int | None, participants: Sequence[int]) -> None:
        """Begin the next step of the schedule."""
        self.task, self.participants = task, participants
        self.moment = Moment(task.index, round)
        self._server_flops = self.meter.flops["server"]
        self._place = self.experiment.rng.at("client", task.index, -1 if round is None else round)

    def told(self, state: Any) -> Moment:
        """The step that ends here."""
        self.moment.server_flops = self.meter.flops["server"] - self._server_flops
        self.moment.trained_on = int(getattr(state, "notes", {}).get("pool_size", 0))
        for name, found in (("pool", self.moment.pool), ("buffers", self.moment.kept)):
            for part in getattr(state, name, ()):
                labels, counts = part.labels.unique(return_counts=True)
                found.update(dict(zip(labels.tolist(), counts.tolist(), strict=True)))
        return self.moment

    def largest_state(self) -> int:
        """Bytes of the largest client state so far, at its real size."""
        return max(map(self.sizes.num_bytes, self.client_states.values()), default=0)

    def net(self, model: Mapping[str, Tensor]) -> nn.Module:
        """The small network with these weights, counted at the price of the real one."""
        return self.meter.attach(self.arch.restore(model), len(model["head.weight"]))

    def vacant(self) -> Client:
        """A client without images."""
        return self._shard(torch.zeros(0, dtype=torch.int64))

    def _shard(self, index: Tensor) -> Client:
        return Client(self._images, index.cpu(), self.task, self.transform, self.net)

    def ask(self, clients: Sequence[int], verb: str, payload: Payload, late: bool = False) -> Uploads:
        """The clients' uploads; notes what each computes, sends and receives."""
        rng, exchange = self._place.at(verb, len(self.moment.exchanges)), Exchange(down=self.sizes.num_bytes(payload))
        self.moment.exchanges.append(exchange)
        uploads = {}
        for client in sorted(clients):
            uploads[client], exchange.flops[client] = self._turn(client, verb, payload, rng.at(client))
            exchange.up[client] = self.sizes.num_bytes(uploads[client])
        return self.method.opened(uploads, payload, self, rng)

    def total(self, clients: Sequence[int], verb: str, payload: Payload, late: bool = False) -> Total:
        """The sum of the clients' uploads, as a secure sum would tell it."""
        parts = {client: upload for client, upload in self.ask(clients, verb, payload).items() if upload}
        return Total(added(parts.values()) if parts else {}, tuple(parts))

    def _turn(self, client: int, verb: str, payload: Payload, rng: Rng) -> tuple[Payload, int]:
        """What the client sends, and its FLOPs."""
        turns = self._turns.setdefault((self.task.index, verb, client), [])
        remembers = self.client_states.get(client) is not None
        if self.moment.round is not None and len(turns) >= (TURNS if remembers else 1):
            return turns[-1]
        before, shard = self.meter.flops["client"], self._shard(self.experiment.shards[self.task.index][client])
        with self.meter.on("client"):
            upload, kept = getattr(self.method, verb)(payload, shard, self.client_states.get(client), rng)
        self.client_states[client] = kept
        turns.append((upload, self.meter.flops["client"] - before))
        return turns[-1]


class Sizes:
    """From tensors of the miniature to bytes of the real ones. Plain numbers are small change and not counted."""

    def __init__(self, experiment: Experiment) -> None:
        small, real = _small_arch(experiment), experiment.arch
        features, seen = body_cost(real).feature_size, body_cost(small).feature_size
        sent_size = experiment.method.sent_size
        used = sent_size("features", features)
        self._picture = (small.channels, small.image_size, small.image_size)
        self._picture_values = real.channels * real.image_size**2
        self._body = (seen, small.channels * small.image_size**2)  # shape of the miniature's only body weight
        whole = num_bytes(real.skeleton(1).body.state_dict())  # BatchNorm's counters included, as they travel
        self._body_values = whole // FLOAT_BYTES - features  # its bias is counted as features are
        weights = [layer.weight for layer in input_layers(real.skeleton(1).body).values()]
        inputs = [weight[0].numel() for weight in weights]  # type: ignore[index]
        # a matrix over the inputs of the only layer stands for those of all layers, and so do its rows that are sent
        self._sketch = (self._body[1], sent_size("inputs", self._body[1]))
        self._sketch_values = sum(d * sent_size("inputs", d) for d in inputs)
        self._rows = (sent_size("outputs", seen), self._body[1])
        rows = [sent_size("outputs", len(weight)) for weight in weights]  # type: ignore[arg-type]
        self._rows_values = sum(n * d for n, d in zip(rows, inputs, strict=True))
        self._values = {seen: used, seen * (seen + 1) // 2: used * (used + 1) // 2}

    def num_bytes(self, tree: Tree) -> int:
        """Bytes of the real tensors that these small ones stand for."""
        return sum(self._values_of(tensor) * tensor.element_size() for tensor in tensors(tree))

    def _values_of(self, tensor: Tensor) -> int:
        shape = tuple(tensor.shape)
        if shape == self._body:
            return self._body_values
        if shape == self._rows:
            return self._rows_values
        if shape == self._sketch:
            return self._sketch_values
        if shape[-3:] == self._picture:
            return tensor[..., 0, 0, 0].numel() * self._picture_values
        num = 1
        for place, size in enumerate(reversed(shape)):
            num *= self._values.get(size, size) if place < 2 else size
        return num


def _small_arch(experiment: Experiment) -> Arch:
    """One layer behind small pictures; for a network that is only a head, pictures with as many values, unless a method paints them."""
    real = experiment.arch
    if real.name == "linear":
        return Arch("linear", SIDE) if experiment.method.paints else Arch("linear", 1, channels=FEATURES)
    return Arch("mlp", SIDE, width=FEATURES, channels=min(real.channels, FEATURES))


def _evaluation_flops(experiment: Experiment) -> int:
    """One pass over the test images of all tasks so far: every so many rounds, and after each task."""
    federation, total, images = experiment.recipe.federation, 0, 0
    for task in experiment.tasks:
        images += len(task.test)
        times = 1 + (federation.num_rounds // federation.evaluate_every if federation.evaluate_every else 0)
        total += times * images * forward_flops(experiment.arch, task.num_seen)
    return total


LONG_ENOUGH_S = 0.4
CLASSES = 10
SMALLEST = Arch("convnet", 16, width=1)


@dataclass(frozen=True)
class Rates:
    """FLOP/s of one client and of the server."""

    client: float
    server: float


@dataclass(frozen=True)
class Latency:
    """Seconds of one round: the slowest client's work and upload, exchange by exchange, then the server."""

    client_s: float
    upload_s: float
    server_s: float

    @property
    def total_s(self) -> float:
        """Seconds of the whole round."""
        return self.client_s + self.upload_s + self.server_s


def measured_rates(experiment: Experiment, found: Forecast | None = None) -> Rates:
    """This device's rates for the recipe's network, batch size and precision. On a CPU clients and server are equally fast.

    The forecast tells whether the server trains; without one it does if clients condense.
    """
    arch, device, train = experiment.arch, str(experiment.device), experiment.recipe.train
    condenses = isinstance(experiment.method, Condensation)
    client = _condensation_rate(arch, device) if condenses else _shard_rate(arch, device, train)
    trains_pool = any(moment.trained_on for moment in found.rounds) if found else condenses
    is_apart = trains_pool and experiment.device.type == "cuda"
    return Rates(client, _pool_rate(arch, device, train) if is_apart else client)


def round_latency(moment: Moment, rates: Rates, uplink_mbps: float) -> Latency:
    """Clients work at the same time and wait for each other at every exchange (synchronous learning, App. E)."""
    client_s = upload_s = 0.0
    for exchange in moment.exchanges:
        times = [(exchange.flops[k] / rates.client, 8 * up / (1e6 * uplink_mbps)) for k, up in exchange.up.items()]
        work, upload = max(times, key=sum, default=(0.0, 0.0))
        client_s, upload_s = client_s + work, upload_s + upload
    return Latency(client_s, upload_s, moment.server_flops / rates.server)


def mean_latency(rounds: list[Moment], rates: Rates, uplink_mbps: float) -> Latency:
    """The mean over rounds, part by part."""
    found = [round_latency(moment, rates, uplink_mbps) for moment in rounds]
    return Latency(*(fmean(getattr(one, key) for one in found) for key in ("client_s", "upload_s", "server_s")))


@lru_cache(maxsize=32)
def _shard_rate(arch: Arch, device: str, train: Training) -> float:
    once = train.model_copy(update={"local_epochs": 1})
    generator = seeded_generator(0)

    def work(net: torch.nn.Module, shard: Shard) -> None:
        fit_shard(net, shard, once, generator)

    return _rate(work, arch, device, 4 * train.batch_size)


@lru_cache(maxsize=32)
def _condensation_rate(arch: Arch, device: str) -> float:
    settings = Condensation(num_steps=1)

    def work(net: torch.nn.Module, shard: Shard) -> None:
        condense(net, [shard], [Rng(0)], settings, 0)

    return _rate(work, arch, device, 1024)


@lru_cache(maxsize=32)
def _pool_rate(arch: Arch, device: str, train: Training) -> float:
    once = train.model_copy(update={"server_epochs": 1})
    generator = seeded_generator(0, device)

    def work(net: torch.nn.Module, shard: Shard) -> None:
        pictures = shard.pictures(shard.index)
        fit_pool(net, pictures, shard.labels, shard.transform, once, generator, num_classes=CLASSES, alpha=0.5, tau=1.0)

    return _rate(work, arch, device, 16 * train.batch_size)


Work = Callable[[torch.nn.Module, Shard], None]


def _rate(work: Work, arch: Arch, device: str, most: int) -> float:
    """FLOP/s of ``work`` on as many images as make a call long enough to be timed, at most as many as in a run."""
    num_images, flops, seconds = min(2, most), 0, 0.0
    # The first call loads modules of torch, and on a GPU kernels; on a CPU the smallest network loads as much.
    _timed(work, arch if torch.device(device).type == "cuda" else SMALLEST, device, num_images)
    while seconds < LONG_ENOUGH_S:
        done, took = _timed(work, arch, device, num_images)
        if took < LONG_ENOUGH_S / 4 and num_images < most:
            num_images = min(most, 3 * num_images)
            continue
        flops, seconds = flops + done, seconds + took
    return flops / seconds


def _timed(work: Work, arch: Arch, device: str, num_images: int) -> tuple[int, float]:
    """FLOPs and seconds of one call, the making of network and pictures not included."""
    meter = FlopMeter(arch)
    net, shard = _net(meter, arch, device), _shard(meter, arch, device, num_images)
    _wait(device)
    begin = time.perf_counter()
    work(net, shard)
    _wait(device)
    return sum(meter.flops.values()), time.perf_counter() - begin


def _wait(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def _net(meter: FlopMeter, arch: Arch, device: str) -> torch.nn.Module:
    return meter.attach(arch.build(CLASSES).to(device), CLASSES)


def _shard(meter: FlopMeter, arch: Arch, device: str, num_images: int) -> Client:
    shape = (num_images, arch.channels, arch.image_size, arch.image_size)
    pixels = torch.randint(256, shape, dtype=torch.uint8, generator=seeded_generator(0)).to(device)
    labels = torch.arange(num_images, device=device) % 2
    index = torch.arange(num_images, device=device)
    task = Task(0, (0, 1), CLASSES, None, index, index)
    look = Transform((0.5,) * arch.channels, (0.25,) * arch.channels, 4)
    return Client(Images(pixels, labels), index, task, look, lambda model: meter.attach(arch.restore(model), CLASSES))
