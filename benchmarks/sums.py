"""Noised sums on embedded images: accuracy against the number of images, and what one site that lies does to a secure sum.

    python benchmarks/sums.py size results/lens/own-size.csv poison results/lens/poisoned-sums.csv
    python benchmarks/sums.py noticed results/lens/noticed-sums.csv

``size`` is what `rescene data inspect` says of how many images are enough. ``poison`` is the accuracy if a false sum were used,
``noticed`` how often a run leaves it out. 500 training images of fashion-mini are held back to measure on; test images play no
part. Noise comes from the operating system.
"""

from __future__ import annotations

import csv
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from statistics import mean, stdev

import torch
from torch import Tensor

from rescene.config import resolve
from rescene.core.rng import Rng
from rescene.data import load
from rescene.lens import open_lens
from rescene.methods.moments import EVERYBODY, Moments, impossible, in_steps, merged, received
from rescene.nets import Arch
from rescene.privacy.feature_sums import exact_sums, noised_feature_sums
from rescene.privacy.mechanism import Mechanism, SitePrivacy
from rescene.privacy.noise import Noise
from rescene.privacy.totals import added

HELD_BACK, USED, CLASSES, PER_TASK, DRAWS = 500, 3500, 10, 2, 3
SUMS = 5
Lie = Callable[[dict[str, Tensor]], dict[str, Tensor]]


@lru_cache
def seen(lens: str) -> tuple[Tensor, Tensor]:
    """Features in whole steps and labels of some training images, in a random order."""
    train = load("fashion-mini").train
    chosen = torch.randperm(len(train.labels), generator=torch.Generator().manual_seed(0))[:USED]
    return looked(lens, train.pixels[chosen]), train.labels[chosen]


def looked(lens: str, pixels: Tensor) -> Tensor:
    looking = open_lens(lens)
    return in_steps((looking.look(pixels).flatten(1).float() - 128) / looking.step)


def mechanism(epsilon: float, honest: int | None) -> Mechanism:
    """That of the recipe `own`."""
    keys = [f"privacy.epsilon={epsilon}", "data.path=."]
    secure = [f"privacy.honest_sites={honest}", f"federation.num_clients={honest}", f"federation.per_round={honest}"]
    recipe = resolve("own", keys + (secure if honest else [])).recipe
    promise = recipe.promise(CLASSES // PER_TASK)
    assert promise is not None
    return promise.mechanism


def accuracy(
    z: Tensor, y: Tensor, count: int, sites: int, features: int | None, m: Mechanism | None, lie: Lie | None = None
) -> float:
    """On the images held back, of a federation with ``count`` images of each class."""
    rest, labels = z[HELD_BACK:, :features], y[HELD_BACK:]
    chosen = torch.cat([(labels == c).nonzero().flatten()[:count] for c in range(CLASSES)])
    owner = torch.randint(sites, (len(chosen),), generator=torch.Generator().manual_seed(1))
    method, parts = Moments(num_features=features), ()
    state = method.init(Arch("linear", 1, channels=z.shape[1]).build(CLASSES), Rng(0))
    for first in range(0, CLASSES, PER_TASK):
        classes = tuple(range(first, first + PER_TASK))
        answers = {}
        for site in range(sites):
            own = chosen[(owner == site) & (labels[chosen] >= first) & (labels[chosen] < first + PER_TASK)]
            told = rest[own], labels[own] - first, PER_TASK
            answers[site] = exact_sums(*told) if m is None else noised_feature_sums(*told, SitePrivacy(m, Noise()))
            if lie is not None and site == 0:
                answers[site] = lie(answers[site])
        noises = float(m is not None)
        if m is not None and m.honest_sites:
            answers, noises = {EVERYBODY: added(answers.values())}, sites / m.honest_sites
        new = [received(k, answer, classes, m, noises) for k, answer in answers.items()]
        parts = merged(parts, new, first + PER_TASK)
    model = method._solved(type(state)(state.model, parts, {}), m).model
    scores = z[:HELD_BACK] / 16 @ model["head.weight"].T + model["head.bias"]
    return 100 * float((scores.argmax(dim=1) == y[:HELD_BACK]).float().mean())


def sizes() -> Iterator[dict[str, object]]:
    for lens, choices in (("leaves", (512, 1024, 1728)), ("waves", (None,))):
        z, y = seen(lens)
        for count in (30, 60, 100, 175, 250):
            for features in choices:
                for epsilon in (None, 8, 1):
                    m = None if epsilon is None else mechanism(epsilon, None)
                    found = [accuracy(z, y, count, 3, features, m) for _ in range(1 if m is None else DRAWS)]
                    yield row(
                        lens=lens, images_per_class=count, sites=3, features=features, epsilon=epsilon, found=found
                    )


LIES: dict[str, Lie | None] = {
    "none": None,
    "labels swapped": lambda a: a | {"sums": a["sums"].flip(0), "counts": a["counts"].flip(0)},
    "labels swapped, ten times": lambda a: {k: 10 * v.flip(0) if k != "second" else v for k, v in a.items()},
    "second moment times -10": lambda a: a | {"second": -10 * a["second"]},
}
MORE_LIES: dict[str, Lie | None] = {
    "second moment times 10": lambda a: a | {"second": 10 * a["second"]},
    "class sums times 10": lambda a: a | {"sums": 10 * a["sums"]},
    "counts times 10": lambda a: a | {"counts": 10 * a["counts"]},
    "labels swapped, all ten times": lambda a: {k: 10 * (v.flip(0) if k != "second" else v) for k, v in a.items()},
}


def lies() -> Iterator[dict[str, object]]:
    """Ten sites, epsilon 8, a secure sum of all; the first site may send anything that fits 32 bits."""
    z, y = seen("leaves")
    m = mechanism(8, 10)
    for name, lie in LIES.items():
        found = [accuracy(z, y, 250, 10, 1728, m, lie) for _ in range(DRAWS)]
        yield row(lie=name, sites=10, images_per_class=250, epsilon=8, found=found)


def noticed() -> Iterator[dict[str, object]]:
    """The same sites in their first task: how many sums a run leaves out because no images have them."""
    train = load("fashion-mini").train
    chosen = torch.cat([(train.labels == c).nonzero().flatten()[:250] for c in range(PER_TASK)])
    z, y = looked("leaves", train.pixels[chosen])[:, :1728], train.labels[chosen]
    owner, classes = torch.randperm(len(y), generator=torch.Generator().manual_seed(1)) % 10, tuple(range(PER_TASK))
    for epsilon in (8, 1):
        m, left_out = mechanism(epsilon, 10), Counter[str]()
        for _ in range(SUMS):
            honest = [
                noised_feature_sums(z[owner == k], y[owner == k], PER_TASK, SitePrivacy(m, Noise())) for k in range(10)
            ]
            for name, lie in (LIES | MORE_LIES).items():
                total = added([honest[0] if lie is None else lie(honest[0]), *honest[1:]])
                left_out[name] += bool(impossible(received(EVERYBODY, total, classes, m, 1.0), m, classes))
        for name in LIES | MORE_LIES:
            facts = {"lie": name, "sites": 10, "images_per_class": 250, "epsilon": epsilon}
            yield facts | {"left_out": left_out[name], "sums": SUMS}


def row(found: list[float], **facts: object) -> dict[str, object]:
    spread = f"{stdev(found):.1f}" if len(found) > 1 else ""
    return facts | {"accuracy": f"{mean(found):.1f}", "deviation": spread, "n": len(found)}


def main() -> None:
    for part, path in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        write(Path(path), {"size": sizes, "poison": lies, "noticed": noticed}[part]())


def write(path: Path, rows: Iterator[dict[str, object]]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        for number, one in enumerate(rows):
            writer = csv.DictWriter(file, list(one))
            if not number:
                writer.writeheader()
            writer.writerow(one)
            file.flush()
            print(one, flush=True)


if __name__ == "__main__":
    main()
