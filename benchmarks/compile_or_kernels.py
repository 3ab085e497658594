"""Is the hand-written GPU path worth its code? torch.compile inside a CUDA graph against it, in one run on one GPU.

    python benchmarks/compile_or_kernels.py              needs a GPU; writes results/bench/compile_or_kernels.json
    python benchmarks/compile_or_kernels.py --autotune   the compiler tries its kernels for every layer: minutes more
    python benchmarks/compile_or_kernels.py --dry-run    every way on a CPU, small and without a compiler; writes nothing

The work is the server's training: ResNet-18, 32 x 32 pixels, batches of 128, crop and mirror, bfloat16. All ways make the same draws.

    kernels     one CUDA graph with the Triton kernels of rescene.accel: what rescene runs today
    operations  the same graph with torch's operations in the place of the kernels; step by step if it cannot be recorded
                (`recording_refused` in the result says so)
    compiled    batch, forward, loss and backward by torch.compile, with torch's fused SGD, recorded as one CUDA graph
    plain       step by step, as on a CPU

The same switch, kernels or torch's operations, is also measured for condensation and for local training with a teacher.

The rule: delete what does not win by 10 %. The kernels stay if `kernels` is at least 1.10 times as fast as the better of
`operations` and `compiled`; the graphs stay if the best way with a graph is at least 1.10 times as fast as `plain`. Ways take turns,
and the best of each counts, so that a GPU that slows down slows all of them.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rescene import bench
from rescene.accel import condensation_graph, fused_layers, sgd_graph
from rescene.accel.cuda_graph import recorded
from rescene.core.rng import Rng, seeded_generator
from rescene.functional import logit_adjusted_cross_entropy
from rescene.nets import Arch
from rescene.training import Condensation, Training, condense, sgd
from rescene.training.sgd import PoolEpochs, cosine_rate

OUT = Path(__file__).parents[1] / "results" / "bench" / "compile_or_kernels.json"
WIN = 1.10
SMALL = bench.Size(Arch("convnet", 32, width=4), 256, 2, 8, 2, 64, 40, 20)
Way = Callable[[nn.Module], float]  # trains the network and returns the mean loss of the last epoch


@contextmanager
def without_kernels() -> Iterator[None]:
    """Recordings inside use torch's operations. Those made before are forgotten, and so are those made inside."""
    with_kernels = fused_layers.kernels_for
    fused_layers.kernels_for = lambda tensor: None
    _forget_recordings()
    try:
        yield
    finally:
        fused_layers.kernels_for = with_kernels
        _forget_recordings()


def _forget_recordings() -> None:
    sgd_graph.KEPT.by_key.clear()
    condensation_graph.KEPT.by_key.clear()


@contextmanager
def unrecorded() -> Iterator[None]:
    before = sgd.is_recorded
    sgd.is_recorded = lambda net, images, labels: False
    try:
        yield
    finally:
        sgd.is_recorded = before


class Compiled:
    """Server training by torch.compile. The step reads fixed places in memory, so that a CUDA graph can replay it."""

    def __init__(
        self, net: nn.Module, pool: tuple[Tensor, Tensor], settings: Training, backend: dict[str, str]
    ) -> None:
        self.net, self.pool, self.settings = net, pool, settings
        device, size, count = pool[0].device, settings.batch_size, len(pool[1])
        self.half = sgd_graph.is_half(settings, device)
        self.order = torch.zeros(count, dtype=torch.long, device=device)
        self.crops = torch.zeros(3, count, dtype=torch.long, device=device)
        self.place = torch.arange(size, device=device)
        self.total = torch.zeros((), device=device)
        self.counts = torch.bincount(pool[1], minlength=10)
        self.lr = torch.tensor(settings.lr, device=device)
        options = {"momentum": settings.momentum, "weight_decay": settings.weight_decay, "fused": True}
        self.optimiser = torch.optim.SGD(net.parameters(), lr=self.lr, **options)
        self.loss = torch.compile(self._loss, dynamic=False, **backend)
        self.replay: Callable[[], None] | None = None

    def _loss(self, place: Tensor) -> Tensor:
        index = self.order[place]
        x = bench.LOOK.apply(self.pool[0][index], self.crops[:, place]).contiguous(memory_format=torch.channels_last)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.half):
            logits = self.net(x)
        return logit_adjusted_cross_entropy(logits.float(), self.pool[1][index], self.counts, 1.0)

    def _step(self) -> None:
        self.optimiser.zero_grad(set_to_none=True)
        loss = self.loss(self.place)
        loss.backward()
        self.optimiser.step()
        self.total += loss.detach()
        self.place += self.settings.batch_size

    def __call__(self, net: nn.Module) -> float:
        """Train from the weights of ``net``; a last, smaller batch is left out, which only helps this way."""
        size, count = self.settings.batch_size, len(self.pool[1])
        if self.replay is None:
            self.net.train()
            self.replay = recorded(self._step) if self.place.is_cuda else self._step
        with torch.no_grad():
            for own, given in zip(self.net.state_dict().values(), net.state_dict().values(), strict=True):
                own.copy_(given)
            for state in self.optimiser.state.values():
                state["momentum_buffer"].zero_()
        draws = PoolEpochs(*self.pool, 10, 0.5, bench.LOOK, True, seeded_generator(0, self.place.device))
        for epoch in range(self.settings.server_epochs):
            order, crops = draws.draw()
            self.order.copy_(order)
            self.crops.copy_(crops)
            self.lr.fill_(cosine_rate(self.settings.lr, epoch, self.settings.server_epochs))
            self.place.copy_(torch.arange(size))
            self.total.zero_()
            for _ in range(count // size):
                self.replay()
        return float(self.total) / (count // size)


def server_ways(device: torch.device, size: bench.Size, settings: Training, backend: dict[str, str]) -> dict[str, Way]:
    pool = bench._pool(device, size.pool)

    def fit(net: nn.Module) -> float:
        draws = seeded_generator(0, device)
        return sgd.fit_pool(net, *pool, bench.LOOK, settings, draws, num_classes=10, alpha=0.5, tau=1.0)

    def plain(net: nn.Module) -> float:
        with unrecorded():
            return fit(net)

    compiled = Compiled(bench._net(device, size).to(memory_format=torch.channels_last), pool, settings, backend)
    # compiled first: a recording that torch refuses leaves its random numbers in a state in which nothing can be compiled
    return {"compiled": compiled, "kernels": fit, "operations": fit, "plain": plain}


def server(
    device: torch.device, size: bench.Size, settings: Training, backend: dict[str, str], turns: int
) -> dict[str, Any]:
    """Images per second of each way, and the mean loss that each reached from the same weights."""
    ways = server_ways(device, size, settings, backend)
    losses, refused, seconds = {}, set(), dict.fromkeys(ways, float("inf"))
    for _ in range(turns):
        for name, way in ways.items():
            with without_kernels() if name == "operations" else nullcontext():
                with warnings.catch_warnings(record=True) as told:
                    warnings.simplefilter("always")
                    losses[name] = way(bench._net(device, size))  # records, compiles
                refused |= {name for one in told if "W302" in str(one.message)}
                work = partial(way, bench._net(device, size))
                seconds[name] = min(seconds[name], bench._seconds(device, work))
            print(
                f"{name}: {settings.server_epochs * size.pool / seconds[name]:,.0f} images/s",
                file=sys.stderr,
                flush=True,
            )
    speeds = {name: settings.server_epochs * size.pool / value for name, value in seconds.items()}
    return {"images_per_s": speeds, "last_mean_loss": losses, "recording_refused": sorted(refused)}


def others(device: torch.device, size: bench.Size) -> dict[str, Any]:
    """Kernels against torch's operations inside the other graphs: seconds of condensation, images/s with a teacher."""
    shards, rngs = bench._shards(device, size), [Rng(0).at(k) for k in range(bench.SITES)]
    settings = Condensation(num_steps=size.num_steps, real_batch=size.real)

    def measured() -> dict[str, float]:
        net = bench._net(device, size, bench.CLASSES)
        seconds = bench.best(device, lambda: condense(net, shards, rngs, settings, 1))
        return {"condensation_per_s": 1 / seconds, "with_teacher": bench.local_speed(device, size, bench._taught)}

    kernels = measured()
    with without_kernels():
        operations = measured()
    return {name: {"kernels": kernels[name], "operations": operations[name]} for name in kernels}


def verdicts(found: dict[str, Any]) -> dict[str, str]:
    """What the rule says about each hand-written part.

    >>> speeds = {"kernels": 62.0, "operations": 40.0, "compiled": 50.0, "plain": 9.0}
    >>> verdicts({"server": {"images_per_s": speeds}, "others": {}})
    {'kernels in server training': 'keep: 1.24x', 'CUDA graph in server training': 'keep: 6.89x'}
    """
    speeds = found["server"]["images_per_s"]
    graphs = max(speeds[name] for name in ("kernels", "operations", "compiled"))
    ratios = {
        "kernels in server training": speeds["kernels"] / max(speeds["operations"], speeds["compiled"]),
        "CUDA graph in server training": graphs / speeds["plain"],
    }
    ratios |= {f"kernels in {name}": way["kernels"] / way["operations"] for name, way in found["others"].items()}
    return {name: f"{'keep' if ratio >= WIN else 'DELETE'}: {ratio:.2f}x" for name, ratio in ratios.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, small, without a compiler; writes nothing")
    parser.add_argument("--autotune", action="store_true", help="torch.compile measures its kernels for every layer")
    parser.add_argument("--turns", type=int, default=3, help="how often each way is measured")
    options = parser.parse_args()
    if not options.dry_run and not torch.cuda.is_available():
        parser.exit(2, "needs a GPU; --dry-run goes through the code without one\n")
    device, size = (torch.device("cpu"), SMALL) if options.dry_run else (torch.device("cuda"), bench.SIZES["cuda"])
    settings = Training(server_epochs=size.server_epochs)
    compiler = {"backend": "aot_eager" if options.dry_run else "inductor"}
    if options.autotune:
        compiler["mode"] = "max-autotune-no-cudagraphs"
    found: dict[str, Any] = {
        "command": " ".join(["python benchmarks/compile_or_kernels.py", *sys.argv[1:]]),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "rule": f"delete what does not win by {WIN - 1:.0%}",
        "compiler": compiler,
        "server": server(device, size, settings, compiler, options.turns),
        "others": others(device, size),
    }
    if options.dry_run:
        print(json.dumps(found["server"]["last_mean_loss"]))
        print("Dry run: every way ran, and their losses must be near each other. Speeds on a CPU say nothing.")
        return
    found["verdicts"] = verdicts(found)
    print(json.dumps(found, indent=1))
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"written: {OUT}")


if __name__ == "__main__":
    main()
