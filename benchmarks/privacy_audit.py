"""Is the audit itself to be trusted? Sound mechanisms must never be refuted, broken ones always; every result is a line of JSON.

python benchmarks/privacy_audit.py OUT.jsonl [PART ...]      resumable

Parts: release, per-example, waves-dp, waves-dp-pixels, moments, dp-sgd, controls, membership, glfc.
glfc is no audit of ours: it measures how near the pictures are that GLFC's server gets back from the gradients it is sent.
moments and dp-sgd are audited by one canary in two worlds, on made-up features of eight numbers; the others by many canaries in one run.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from sigma_sweep import PIXELS, PIXELS_DP
from torch import Tensor

from rescene.audit import run_controls, stage_of
from rescene.audit.canaries import canary_audit
from rescene.audit.membership import membership_attack
from rescene.audit.stage import as_promised, without_noise
from rescene.audit.sums import DELTA, ONCE, canary_scores, claimed_gradients, claimed_sums, gradient_scores, pictures
from rescene.config import resolve
from rescene.data import load
from rescene.engine.experiment import prepare
from rescene.privacy.accounting import epsilon_of
from rescene.privacy.epsilon_bounds import two_world_bound
from rescene.privacy.mechanism import Mechanism
from rescene.training.reconstruction import Inversion, encoder_gradients, encoder_weights, reconstruct

SMALL = ["method.num_steps=3", "method.ipc=1", "method.start=noise"]
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
SETTINGS = {
    "real start": ["demo"],
    "white noise start": ["demo", "method.start=noise"],
    "recipe waves": ["waves"],
    "recipe waves-dp": ["waves-dp"],
    "recipe waves, pixels": [*PIXELS],
    "recipe waves-dp, pixels": [*PIXELS_DP],
    "release, epsilon 8": ["demo", "method.start=noise", "privacy.mechanism=release", "privacy.epsilon=8"],
}


def sound(kind: str, seed: int, epsilon: float, num_canaries: int) -> dict[str, Any]:
    """One participation at this epsilon, exactly as promised: what the attacks show must stay below."""
    settings = [f"privacy.epsilon={epsilon}", "privacy.max_participations=1", f"seed={seed}"]
    small = [*SMALL, f"privacy.mechanism={kind}"]
    base = {"waves-dp": ["waves-dp"], "waves-dp-pixels": [*PIXELS_DP]}.get(kind, ["demo", *small])
    recipe = resolve(base[0], [*base[1:], *settings]).recipe
    promise = recipe.promise(1)
    assert promise is not None
    stage, mechanism = stage_of(prepare(recipe)), promise.mechanism
    rows = canary_audit(stage, as_promised(mechanism), without_noise(mechanism), promise.delta, num_canaries)
    shown = max(row["epsilon"] for row in rows)
    held = shown <= (promise.epsilon() or 0.0)
    return {"epsilon": epsilon, "shown": shown, "held": held, "num_canaries": num_canaries, "rows": rows}


def gradient_canaries(mechanism: Mechanism, draws: int, seed: int) -> tuple[Tensor, Tensor]:
    """Scores of one canary in worlds with it and without any image."""
    z = pictures(1, torch.Generator().manual_seed(seed))
    worlds: tuple[Tensor, Tensor] = (z, z[:0])
    inside, outside = (torch.stack([gradient_scores(mechanism, z, held)[0] for _ in range(draws)]) for held in worlds)
    return inside, outside


TWO_DRAWS = {
    "moments": (claimed_sums, canary_scores),
    "dp-sgd": (claimed_gradients, gradient_canaries),
}


def two_draws(kind: str, seed: int, epsilon: float, draws: int) -> dict[str, Any]:
    """One canary in so many worlds with it and as many without: the bound must stay below what is promised."""
    mechanism, scores = TWO_DRAWS[kind]
    sound = mechanism(epsilon)
    shown = two_world_bound(*scores(sound, draws, seed), DELTA)
    return {"epsilon": epsilon, "shown": shown, "held": shown <= epsilon_of(sound.sigma, ONCE, DELTA), "draws": draws}


def controls(seed: int) -> dict[str, Any]:
    rows = run_controls(stage_of(prepare(resolve("demo", [f"seed={seed}"]).recipe)), 200)
    return {"fired": sum(row["fired"] for row in rows), "rows": rows}


def membership(name: str, seed: int) -> dict[str, Any]:
    base, *settings = SETTINGS[name]
    recipe = resolve(base, [*settings, f"seed={seed}"]).recipe
    promise = recipe.promise(1)
    return membership_attack(stage_of(prepare(recipe)), as_promised(promise and promise.mechanism), 64, 64)


def glfc(data: str, num_inversions: int) -> dict[str, Any]:
    """The first training image of each class as GLFC's server gets it back, with the method's defaults but for the calls."""
    dataset = load(data)
    first = [int((dataset.train.labels == label).nonzero()[0]) for label in range(len(dataset.classes))]
    images, labels = dataset.train.pixels[first].float() / 255, dataset.train.labels[first]
    side = dataset.image_size
    encoder = encoder_weights(0, len(labels), side, side)
    gradients = encoder_gradients(encoder, images, labels)
    settings, generator = Inversion(num_inversions=num_inversions), torch.Generator().manual_seed(0)
    found = reconstruct(encoder, gradients, (side, side), settings, generator)
    mse = (found.images[:, -1] - images).square().flatten(1).mean(dim=1)  # all searches stay finite, so rows agree
    decibel = (-10 * mse.log10()).tolist()
    return {
        "encoder_seed": 0,
        "image_size": side,
        "inversion_steps": settings.inversion_steps,
        "psnr_db": [round(value, 1) for value in decibel],
        "labels_right": int((found.labels == labels).sum()),
        "losses": [float(f"{loss:.3g}") for loss in found.losses.tolist()],
        "machine": f"{platform.machine()}, 1 thread, torch {torch.__version__}",
    }


def work() -> Iterator[tuple[dict[str, Any], Any]]:
    """What identifies a line, and how to get the rest of it."""
    for kind, num_canaries in (("release", 400), ("per-example", 100), ("waves-dp", 400), ("waves-dp-pixels", 400)):
        for seed in range(20):
            epsilon = EPSILONS[seed % len(EPSILONS)]
            yield {"part": kind, "seed": seed}, lambda a=(kind, seed, epsilon, num_canaries): sound(*a)
    for kind, draws in (("moments", 400), ("dp-sgd", 120)):
        for seed in range(20):
            epsilon = EPSILONS[seed % len(EPSILONS)]
            yield {"part": kind, "seed": seed}, lambda a=(kind, seed, epsilon, draws): two_draws(*a)
    for seed in range(3):
        yield {"part": "controls", "seed": seed}, lambda seed=seed: controls(seed)
    for name in SETTINGS:
        for seed in range(3):
            yield {"part": "membership", "setting": name, "seed": seed}, lambda a=(name, seed): membership(*a)
    for data in ("fashion-mini", "cifar10"):
        for calls in (250, 20):
            yield {"part": "glfc", "data": data, "num_inversions": calls}, lambda a=(data, calls): glfc(*a)


def main(out: str, *parts: str) -> None:
    torch.set_num_threads(1)
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for key, measure in work():
        if (parts and key["part"] not in parts) or any(key.items() <= line.items() for line in lines):
            continue
        began = time.process_time()
        line = json.dumps(key | measure() | {"cpu_seconds": round(time.process_time() - began, 1)})
        print(line[:160], flush=True)
        with path.open("a") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
