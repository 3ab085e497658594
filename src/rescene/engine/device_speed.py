"""How fast a device works, and how long a round and a run take at that speed.

A rate is measured by the very steps that a run consists of, on as many random pictures as take half a second, two at least: SGD
on a shard or condensation for the clients, and on a GPU SGD on a pool for the server. Times are estimates: a client with few images
is slower per FLOP, and checkpoints and the search for near-copies are left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean

import torch

from rescene.core.rng import Rng, seeded_generator
from rescene.data import Images, Shard, Task, Transform
from rescene.engine.experiment import Experiment
from rescene.engine.forecast import Forecast, Moment
from rescene.methods.base import Client
from rescene.nets import Arch
from rescene.nets.cost import FlopMeter
from rescene.training import Condensation, Training, condense, fit_pool, fit_shard

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
