"""Speed on one GPU: server training, condensation and herding at the paper's CIFAR-10 sizes. Prints JSON.

python benchmarks/gpu.py [OUT.json]        needs CIFAR-10 (rescene data list)
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from rescene.config import resolve
from rescene.engine import prepare
from rescene.functional import herd
from rescene.nets import Arch, forward_flops
from rescene.rng import Rng
from rescene.steps import Training, condense, fit_pool
from rescene.steps.captured import fit_captured
from rescene.steps.sgd import PoolEpochs


def seconds(work: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def matrix_rate() -> float:
    """FLOP/s of a large bfloat16 matrix product, the ceiling everything else is held against."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    a @ b
    return 10 * 2 * 8192**3 / seconds(lambda: [a @ b for _ in range(10)])


def agreement(transform: Any) -> dict[str, float]:
    """Largest difference of the weights after two epochs, recorded step against plain step, in float32."""
    arch, settings = Arch("resnet18", 32), Training(server_epochs=2, precision="float32")
    images = torch.randn(1000, 3, 32, 32, device="cuda")
    labels = torch.randint(10, (1000,), device="cuda")
    net = arch.build(10, torch.Generator().manual_seed(0)).cuda()
    nets = [arch.restore(net.state_dict()) for _ in range(2)]
    generators = [torch.Generator("cuda").manual_seed(1) for _ in range(2)]
    fit_captured(nets[0], PoolEpochs(images, labels, 10, 0.5, transform, True, generators[0]), settings, 1.0)
    small = settings.model_copy(update={"batch_size": 128})
    from rescene.steps import sgd

    plain, sgd.fit_pool_is_captured = sgd.fit_pool_is_captured, lambda images, labels, settings: False
    fit_pool(nets[1], images, labels, transform, small, generators[1], num_classes=10, alpha=0.5, tau=1.0)
    sgd.fit_pool_is_captured = plain
    pairs = zip(nets[0].state_dict().values(), nets[1].state_dict().values(), strict=True)
    return {"largest_difference": max(float((a.float() - b.float()).abs().max()) for a, b in pairs)}


def server(transform: Any, precision: str) -> dict[str, float]:
    arch, n = Arch("resnet18", 32), 12800
    images, labels = torch.randn(n, 3, 32, 32, device="cuda"), torch.randint(10, (n,), device="cuda")
    net = arch.build(10, torch.Generator().manual_seed(0)).cuda()

    def run(epochs: int) -> None:
        settings = Training(server_epochs=epochs, precision=precision)
        generator = torch.Generator("cuda").manual_seed(0)
        fit_pool(net, images, labels, transform, settings, generator, num_classes=10, alpha=0.5, tau=1.0)

    first = seconds(lambda: run(5))
    taken = seconds(lambda: run(5))
    rate = 5 * n / taken
    return {"images_per_s": rate, "tflops": rate * 3 * forward_flops(arch, 10) / 1e12, "recording_s": first - taken}


def condensation(precision: str) -> dict[str, float]:
    recipe = resolve("cifar10", ["federation.beta=0.5", f"method.precision={precision}"]).recipe
    experiment = prepare(recipe)
    task = experiment.tasks[0]
    clients = experiment.participants(task, 0)
    shards = [experiment.shard(task, k, experiment.arch.restore) for k in clients]
    net, rngs = experiment.initial_net(), [Rng(0).at(k) for k in clients]

    def run() -> Any:
        return condense(net, shards, rngs, experiment.method, 1)

    run()
    alone = seconds(lambda: [condense(net, [s], [r], experiment.method, 1) for s, r in zip(shards, rngs, strict=True)])
    taken = seconds(run)
    moved = run()
    change = torch.cat([(m.images - m.start).flatten(1).square().mean(1).sqrt() for m in moved]).mean()
    return {"round_s": taken, "one_at_a_time_s": alone, "ratio": alone / taken, "mean_change_rms": float(change)}


def herding() -> dict[str, float]:
    z = F.normalize(torch.randn(10, 2000, 512, device="cuda"), dim=2)
    herd(z[0], z[0].mean(0), 1000)
    return {"ten_classes_s": seconds(lambda: [herd(part, part.mean(0), 1000) for part in z])}


def main() -> None:
    transform = prepare(resolve("demo", ["device=cpu"]).recipe).dataset.transform
    found = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "matrix_tflops": matrix_rate() / 1e12,
        "agreement": agreement(transform),
        "server_bfloat16": server(transform, "bfloat16"),
        "server_float32": server(transform, "float32"),
        "condensation_float32": condensation("float32"),
        "condensation_bfloat16": condensation("bfloat16"),
        "herding": herding(),
    }
    text = json.dumps(found, indent=1)
    print(text)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
