"""Attacks on pictures: uploads drawn with a seed that the server knows, and copies that hide from the near-copy figure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, pad

from rescene.audit.canaries import FEW, plan, rankings
from rescene.audit.lattice import vectors_of
from rescene.audit.rows import Found
from rescene.audit.stage import as_promised, stage_of, without_noise
from rescene.config import resolve
from rescene.engine.experiment import prepare
from rescene.functional.pictures import coloured_noise
from rescene.privacy.epsilon_bounds import bounds
from rescene.privacy.leakage import CUT, margins

CANARIES = 100


def known_seed(seed: int = 0) -> Found:
    """`waves` without a mechanism: y = mean + C^(1/2) z with noise z that the server can draw too.

    From enough draws it solves for the mean and the covariance. They give the second moment of whole numbers, and lattice reduction
    gives the images. Ten numbers a picture and 24 draws here; a real class takes a few rounds.
    """
    n, d, m = 4, 10, 24
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 40, (n, d, 1, 1), generator=generator)
    drawn = coloured_noise(images.double(), m, torch.Generator().manual_seed(seed)).flatten(1)
    found = _solved(drawn, torch.Generator().manual_seed(seed), n)
    guessed = _solved(drawn, torch.Generator().manual_seed(seed + 1), n)
    rows = images.flatten(1).tolist()
    right, blind = (sum(row in one or [-x for x in row] in one for row in rows) for one in (found, guessed))
    return Found(right, None, right == n and not blind, f"of {n} images", "solved; with another seed nothing is")


def _solved(drawn: Tensor, generator: torch.Generator, n: int) -> list[list[int]]:
    z = torch.randn(1, *drawn.shape, generator=generator)[0].to(drawn)
    design = torch.cat([torch.ones(len(z), 1, dtype=z.dtype), z], dim=1)
    solution = torch.linalg.lstsq(design, drawn).solution  # [1 + d, d]: the mean, and the root of the covariance
    mean, root = solution[0], solution[1:]
    second = n * (root @ root.T + torch.outer(mean, mean))
    return vectors_of(second.round().long().tolist()) or []


def changes(x: Tensor, seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Pictures [n, 3, H, W] in [0, 1] and what somebody may do to a copy of them."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(x.shape, generator=generator)
    channel = torch.rand(x.shape, generator=generator)
    channel[:, 1] = x[:, 1]
    yield "as it is", x
    yield "negative", 1 - x
    yield "mirror", x.flip(-1)
    for pixels in (1, 2, 3):
        yield f"moved by {pixels}", torch.roll(x, (pixels, -pixels), (2, 3))
    once = avg_pool2d(pad(x, (1, 1, 1, 1), mode="replicate"), 3, 1)
    yield "blurred", once
    yield "blurred twice", avg_pool2d(pad(once, (1, 1, 1, 1), mode="replicate"), 3, 1)
    yield "brighter by .05", (x + 0.05).clamp(0, 1)
    yield "noise of .02", (x + 0.02 * noise).clamp(0, 1)
    yield "contrast .8", (x - 0.5) * 0.8 + 0.5
    yield "one exact channel", channel
    order = torch.randperm(x[0, 0].numel(), generator=generator)
    yield "pixels permuted", x.flatten(2)[..., order].reshape(x.shape)


LEAST_TRACED = 0.75  # of copies after the change that hides best, which is blur
MOST_BY_CHANCE = 0.15


def blind_spots(count: int = 20) -> Found:
    """Copies of training images after each change: the share that is NOT traced, of the change that hides best."""
    missed, wrong = traced(count)
    plain = missed.pop("as it is")
    worst = max(missed, key=lambda name: missed[name])
    words = f"plain copies are all traced, {wrong:.0%} of unseen images are"
    note = f"hides best: {worst}" if missed[worst] else ""
    control = plain == 0 and wrong <= MOST_BY_CHANCE
    return Found(missed[worst], 1 - LEAST_TRACED, control, "share", words, note)


def traced(count: int, num_unseen: int | None = None) -> tuple[dict[str, float], float]:
    """By change, the share of copies of fashion-mini that are missed; and the share of unseen images that are traced all the same."""
    experiment = prepare(resolve("demo", []).recipe)
    task, data = experiment.tasks[0], experiment.dataset
    seen, unseen = (
        split.pixels[index].float() / 255 for split, index in ((data.train, task.train), (data.test, task.test))
    )
    num = num_unseen or count
    controls, others = unseen[: 2 * num : 2], torch.cat([unseen[1 : 2 * num : 2], unseen[2 * num :]])
    copies = seen[:: len(seen) // count][:count]
    missed = {name: 1 - float((margins(one, seen, others) > CUT).float().mean()) for name, one in changes(copies)}
    return missed, float((margins(controls, seen, others) > CUT).float().mean())


def canaries(recipe: str, *settings: str) -> Callable[[], Found]:
    """The one-run audit of a condensed or drawn release: an attacker who knows all but one photograph."""

    def attack() -> Found:
        resolved = resolve(recipe, [*settings, "privacy.max_participations=1"]).recipe
        promise = resolved.promise(1)
        assert promise is not None
        stage, mechanism = stage_of(prepare(resolved)), replace(promise.mechanism, threshold=0.0)
        shown = []
        for giant in (False, True):
            placed = plan(stage, CANARIES, giant, FEW)
            for one in (mechanism, replace(mechanism, sigma=0.0)):
                scores = rankings(stage, placed, as_promised(one), without_noise(one), ("replay",))["replay"]
                shown.append(bounds({"replay": (scores, placed.included.cpu())}, promise.delta)["replay"].epsilon)
        promised = promise.epsilon() or 0.0
        sound, broken = max(shown[::2]), max(shown[1::2])
        return Found(sound, promised, broken > promised, "epsilon", f"without noise {broken:.2f} is shown")

    return attack
