"""How fast this machine runs the steps everything consists of: ``rescene doctor --speed``.

On a GPU the sizes are those of the paper's CIFAR-10 runs (ResNet-18, 32 x 32 pixels); on a CPU those of the demo, with fewer
images. The images are random numbers: speed does not depend on them. Work is also given as a share of the rate of a large
matrix product on the same device, which is the most that arithmetic can reach here.
"""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rescene.accel.cuda_graph import TURN, Streams
from rescene.core.rng import Rng, seeded_generator
from rescene.data import Batch, Images, Shard, Task, Transform
from rescene.engine import wire
from rescene.functional import herd_classes, perturbed
from rescene.functional.distillation import distillation_loss
from rescene.methods.base import Client
from rescene.nets import Arch, forward_flops
from rescene.training import (
    Condensation,
    Training,
    class_scores,
    condense,
    fit_pool,
    fit_shard,
    frozen,
    repeatable,
    sgd,
)
from rescene.training.per_image import gradient_norms

LOOK = Transform(mean=(0.49, 0.48, 0.45), std=(0.25, 0.24, 0.26), pad=4)
CLASSES, SITES = 2, 10


@dataclass(frozen=True)
class Size:
    """What is measured on a kind of device."""

    arch: Arch
    pool: int  # images of the server's pool
    server_epochs: int
    real: int  # real images per class and step of condensation, and of each class at a site
    num_steps: int
    matrix: int
    candidates: int
    budget: int


SIZES = {
    "cuda": Size(Arch("resnet18", 32), 12800, 5, 256, 25, 8192, 2000, 1000),
    "cpu": Size(Arch("convnet", 32), 1280, 1, 64, 5, 1024, 400, 200),
}


@dataclass(frozen=True)
class SpeedFigure:
    """One measurement. ``goal`` is stated for an H200 only; ``share`` is of the matrix rate."""

    name: str
    value: float
    unit: str
    goal: str = ""
    share: float | None = None


def measure(device: torch.device) -> Iterator[SpeedFigure]:
    """All figures, one after the other; each is the best of three after a first call that warms up."""
    size = SIZES[device.type]
    rate = matrix_rate(device, size.matrix)
    yield SpeedFigure("large matrix product", rate / 1e12, "TFLOP/s", share=1.0)
    yield SpeedFigure("first server epoch, with recording", _first_epoch(device, size), "s")
    for precision in ("bfloat16", "float32") if device.type == "cuda" else ("float32",):
        speed = server_speed(device, size, 1, precision)
        goal = ">= 65,000" if precision == "bfloat16" else ""
        yield _work(f"server training, one run, {precision}", speed, 3, size, rate, goal)
    if device.type == "cuda":
        yield _work("server training, three runs at once", server_speed(device, size, 3), 3, size, rate, ">= 95,000")
        yield from _agreement(device)
    yield from _condensation(device, size, rate)
    yield _work(f"local training of {SITES} sites", local_speed(device, size), 3, size, rate)
    taught = local_speed(device, size, _taught)
    yield _work("the same with a teacher (a loss of one's own)", taught, 4, size, rate)
    if device.type == "cuda":
        yield SpeedFigure("the last against plain steps", taught / local_speed(device, size, _taught_plainly), "x")
    yield _work("norms of single images' gradients", norms_speed(device, size), 3, size, rate)
    yield _work("evaluation", evaluation_speed(device, size), 1, size, rate)
    picks = herding_seconds(device, size)
    yield SpeedFigure(f"herding, 10 classes, B={size.budget} of {size.candidates}", picks, "s", "<= 0.2")


def report(device: torch.device, figures: Sequence[SpeedFigure]) -> dict[str, Any]:
    """For the JSON file: what was measured, on what, with what."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    versions = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    return {"schema": 1, "device": name, **versions, "figures": [asdict(figure) for figure in figures]}


def matrix_rate(device: torch.device, side: int) -> float:
    """FLOP/s of a product of two square matrices with this side: bfloat16 on a GPU, float32 elsewhere."""
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(side, side, device=device, dtype=kind) for _ in range(2))
    return 10 * 2 * side**3 / best(device, lambda: [a @ b for _ in range(10)])


def best(device: torch.device, work: Callable[[], Any], count: int = 3) -> float:
    """Seconds of the fastest of ``count`` calls, after one that is not timed."""
    work()
    return min(_seconds(device, work) for _ in range(count))


def _seconds(device: torch.device, work: Callable[[], Any]) -> float:
    _finish(device)
    begin = time.perf_counter()
    work()
    _finish(device)
    return time.perf_counter() - begin


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _work(name: str, images_per_s: float, passes: int, size: Size, rate: float, goal: str = "") -> SpeedFigure:
    flops = passes * images_per_s * forward_flops(size.arch, 10)
    return SpeedFigure(name, images_per_s, "images/s", goal, flops / rate)


def _pool(device: torch.device, count: int) -> tuple[Tensor, Tensor]:
    generator = seeded_generator(0, device)
    images = torch.randn(count, 3, 32, 32, generator=generator, device=device)
    return images, torch.randint(10, (count,), generator=generator, device=device)


def _train(net: nn.Module, pool: tuple[Tensor, Tensor], epochs: int, precision: str = "auto") -> None:
    settings, device = Training(server_epochs=epochs, precision=precision), pool[0].device
    fit_pool(net, *pool, LOOK, settings, seeded_generator(0, device), num_classes=10, alpha=0.5, tau=1.0)


def _net(device: torch.device, size: Size, classes: int = 10) -> nn.Module:
    return size.arch.build(classes, seeded_generator(0)).to(device)


def _first_epoch(device: torch.device, size: Size) -> float:
    pool, net = _pool(device, 256), _net(device, size)
    return _seconds(device, lambda: _train(net, pool, 1))


def server_speed(device: torch.device, size: Size, runs: int, precision: str = "auto") -> float:
    """Images per second of server training, of all runs together."""
    pool = _pool(device, size.pool)
    nets = [_net(device, size) for _ in range(runs)]
    if runs == 1:
        return (
            size.server_epochs * size.pool / best(device, lambda: _train(nets[0], pool, size.server_epochs, precision))
        )
    streams, all_here = Streams(device, runs), threading.Barrier(runs)

    def one(net: nn.Module) -> None:
        _train(net, pool, size.server_epochs)

    def meet(net: nn.Module) -> None:
        """The first time each thread waits for the others, so that every one of them has recorded its step."""
        one(net)
        with TURN.given_up():
            all_here.wait()

    list(streams.outcomes(meet, nets))
    return runs * size.server_epochs * size.pool / best(device, lambda: list(streams.outcomes(one, nets)))


def _agreement(device: torch.device) -> Iterator[SpeedFigure]:
    """The fast path is the same computation: its distance from float64 beside that of the plain path, as shares of the way."""
    recorded, plain, exact = ways(device, num_steps=1)
    for name, way in (("recorded", recorded), ("plain", plain)):
        yield SpeedFigure(f"one {name} step in float32 against float64, share of the way", apart(way, exact), "")
    recorded, plain, _ = ways(device, num_steps=5)
    yield SpeedFigure("five recorded against five plain steps in float32, share of the way", apart(recorded, plain), "")


def apart(way: Tensor, other: Tensor) -> float:
    """||way - other|| / ||other||"""
    return float((way - other).norm() / other.norm())


def ways(device: torch.device, num_steps: int) -> list[Tensor]:
    """theta - theta_0 after steps of 128 images: recorded, plain, plain in float64; no reduced precision anywhere."""
    size, tf32, recorded = SIZES["cuda"], torch.backends.cudnn.allow_tf32, sgd.is_recorded
    nets = [_net(device, size) for _ in range(3)]
    nets[2].double()
    start = nn.utils.parameters_to_vector(nets[2].parameters()).detach()
    images, labels = _pool(device, num_steps * 128)
    torch.backends.cudnn.allow_tf32 = False
    try:
        _train(nets[0], (images, labels), 1, "float32")
        sgd.is_recorded = lambda *_: False
        _train(nets[1], (images, labels), 1, "float32")
        _train(nets[2], (images.double(), labels), 1, "float32")
    finally:
        sgd.is_recorded, torch.backends.cudnn.allow_tf32 = recorded, tf32
    return [nn.utils.parameters_to_vector(net.parameters()).detach().double() - start for net in nets]


def _shards(device: torch.device, size: Size) -> list[Client]:
    count = SITES * CLASSES * size.real
    pixels = torch.randint(256, (count, 3, 32, 32), generator=seeded_generator(0), dtype=torch.uint8).to(device)
    images = Images(pixels, torch.arange(count, device=device) % CLASSES)
    everything = torch.arange(count, device=device)
    task = Task(0, tuple(range(CLASSES)), CLASSES, None, everything, everything[:0])
    return [Client(images, part, task, LOOK, size.arch.restore) for part in everything.chunk(SITES)]


def _condensation(device: torch.device, size: Size, rate: float) -> Iterator[SpeedFigure]:
    shards, rngs, net = _shards(device, size), [Rng(0).at(k) for k in range(SITES)], _net(device, size, CLASSES)
    settings = Condensation(num_steps=size.num_steps, real_batch=size.real)
    together = best(device, lambda: condense(net, shards, rngs, settings, 1))
    passes = size.num_steps * SITES * CLASSES * (size.real + 2 * settings.ipc)
    share = passes * forward_flops(size.arch, CLASSES) / together / rate
    sizes = f"{SITES} sites x {CLASSES} classes, {size.num_steps} steps, {size.real} real images"
    yield SpeedFigure(f"condensation of a round, {sizes}", together, "s", "<= 0.25", share)
    pairs = list(zip(shards, rngs, strict=True))
    alone = best(device, lambda: [condense(net, [s], [r], settings, 1) for s, r in pairs], 1)
    yield SpeedFigure("condensation, all sites together against one at a time", alone / together, "x", ">= 4")
    if device.type == "cuda":  # a move of one's own, even this one, is never recorded

        def plainly(theta: Sequence[Tensor], noise: torch.Generator) -> Sequence[Tensor]:
            return perturbed(theta, settings.radius, noise)

        step_by_step = best(device, lambda: [condense(net, [s], [r], settings, 1, move=plainly) for s, r in pairs], 1)
        yield SpeedFigure("the same against one at a time, not recorded", step_by_step / together, "x", ">= 4")
    made = condense(net, shards, rngs, settings, 1)[0]
    for form in wire.FORMS:
        yield SpeedFigure(f"upload of one site, {form}", len(wire.encode(made.images, form)) / 1e6, "MB", "<= 0.07")


def _taught_plainly(teacher: nn.Module) -> sgd.Loss:
    """Cross-entropy and distillation, as FedLwF has them."""

    def loss(net: nn.Module, batch: Batch) -> Tensor:
        logits = net(batch.x)
        with torch.no_grad():
            targets = teacher(batch.x)
        return F.cross_entropy(logits, batch.y) + distillation_loss(logits, targets, 2.0)

    return loss


def _taught(teacher: nn.Module) -> sgd.Loss:
    return repeatable(_taught_plainly(teacher))


def local_speed(device: torch.device, size: Size, loss_of: Callable[[nn.Module], sgd.Loss] | None = None) -> float:
    """Images per second of a round of local training, as the engine does it: some sites at a time on a GPU."""
    shards, settings = _shards(device, size), Training(local_epochs=4)
    model = _net(device, size, CLASSES).state_dict()

    def site(shard: Shard) -> None:
        loss = None if loss_of is None else loss_of(frozen(size.arch.restore(model), settings))
        fit_shard(size.arch.restore(model), shard, settings, seeded_generator(0, device), loss)

    streams = Streams(device, 2) if device.type == "cuda" else None
    seconds = best(device, lambda: list(streams.outcomes(site, shards) if streams else map(site, shards)))
    return 4 * sum(len(shard) for shard in shards) / seconds


def norms_speed(device: torch.device, size: Size) -> float:
    """Images per second of per-image gradient norms."""
    net, (images, labels) = _net(device, size).eval(), _pool(device, size.real)
    return size.real / best(device, lambda: gradient_norms(net, images, labels))


def evaluation_speed(device: torch.device, size: Size) -> float:
    """Images per second of evaluation."""
    net, images = _net(device, size), _pool(device, size.pool)[0]
    return size.pool / best(device, lambda: class_scores(net, images))


def herding_seconds(device: torch.device, size: Size) -> float:
    """Seconds to herd ten classes."""
    z = F.normalize(torch.randn(10, size.candidates, 512, generator=seeded_generator(0)).to(device), dim=2)
    targets = [own.mean(dim=0) for own in z]
    return best(device, lambda: herd_classes(list(z), targets, size.budget))
