"""Releases that prove an image's presence: how many with floating-point noise, how many with discrete noise.

    python benchmarks/certain_proofs.py [--releases 1000000] [--seed 0]

A site has one image of a class, or none. The attacker knows both sums and the law of the noise. A release that no noise could
make out of the sum without the image proves that the image was there. Floating-point noise: sum + deviation x normal number of
52 random bits, as releases had it before. Discrete noise: what ``Mechanism.noised`` does now. Each is looked at as
float64, as the site holds it, and as float32, as it is sent.

Writes results/privacy/certain-proofs.json.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from rescene.privacy.accounting import Composition, sigma_for
from rescene.privacy.mechanism import Mechanism, class_sums
from rescene.privacy.noise import Noise, largest

OUT = Path(__file__).parents[1] / "results" / "privacy" / "certain-proofs.json"
SIZE = 16  # coordinates of a release, the count included
AT_ONCE = 20_000
WINDOW = 24  # neighbouring random words that are tried; ndtr and erfinv are off by a few units in the last place


def mechanism_of(epsilon: float = 8.0) -> Mechanism:
    once = Composition(1, 1)
    return Mechanism("release", sigma_for(epsilon, once, 1e-5), 1.0, once, kappa=1 / 3)


def one_image(m: Mechanism, seed: int) -> Tensor:
    """What an image adds, in whole steps [SIZE]."""
    psi = torch.randn(1, SIZE - 1, generator=torch.Generator().manual_seed(seed))
    return class_sums(3 * psi, torch.zeros(1, dtype=torch.int64), 1, m.clip, m.kappa, m.step)[0]


def floating(sums: Tensor, m: Mechanism, noise: Noise) -> Tensor:
    return sums + m.deviation * noise.normal(*sums.shape)


def no_floating_noise(seen: Tensor, without: Tensor, m: Mechanism) -> Tensor:
    """Where no random word gives ``seen`` from the sum ``without``: mask as ``seen``, float64 or float32."""
    guess = (torch.special.ndtr((seen.double() - without) / m.deviation) * 2.0**52 - 0.5).round()
    words = guess.unsqueeze(-1) + torch.arange(-WINDOW, WINDOW + 1, dtype=torch.float64)
    words = words.clamp(0, 2.0**52 - 1)
    given = (without.unsqueeze(-1) + m.deviation * _normal(words)).to(seen.dtype)
    between = (given[..., 0] < seen) & (seen < given[..., -1])  # otherwise the window is not the place to look
    return between & ~(given == seen.unsqueeze(-1)).any(dim=-1)


def no_discrete_noise(seen: Tensor, without: Tensor, m: Mechanism) -> Tensor:
    """The same for discrete noise; ``without`` in whole steps."""
    total = (seen.double() / m.step).round().long()
    same = (total.double() * m.step).to(seen.dtype) == seen
    return ~same | ((total - without).abs() > largest(m.steps(seen.shape[-1])))


def proofs(releases: int, seed: int, noise: Noise) -> dict[str, int]:
    """Releases of a site with the image that prove it."""
    m = mechanism_of()
    units = one_image(m, seed)
    nothing, found = torch.zeros_like(units), {}
    for first in range(0, releases, AT_ONCE):
        held = units.expand(min(AT_ONCE, releases - first), -1)
        old, new = floating(held.double() * m.step, m, noise), m.noised(held, noise)
        for name, kind in (("float64", torch.float64), ("float32", torch.float32)):
            shown = {
                f"floating-point noise, {name}": no_floating_noise(old.to(kind), nothing.double(), m),
                f"discrete noise, {name}": no_discrete_noise(new.to(kind), nothing, m),
            }
            for what, mask in shown.items():
                found[what] = found.get(what, 0) + int(mask.any(dim=-1).sum())
    return found


def floating_near_zero(count: int, seed: int = 0) -> dict[str, float]:
    """Floating-point noise sent as float32. Near 0 float32 is finer than the noise, so that is where its proofs are.

    ``count`` of the 2^28 random words that make a number of a site with the image almost 0 are looked at.
    """
    m, width = mechanism_of(), 2.0**28
    added = torch.full((count,), 0.25, dtype=torch.float64)
    middle = torch.special.ndtr(-added / m.deviation) * 2.0**52
    words = (middle + width * (torch.rand(count, generator=torch.Generator().manual_seed(seed)).double() - 0.5)).round()
    seen = (added + m.deviation * _normal(words)).float()
    proved = float(no_floating_noise(seen, torch.zeros_like(added), m).sum())
    return {"words": count, "proofs": int(proved), "chance_of_a_number": proved / count * width * 2.0**-52}


def _normal(words: Tensor) -> Tensor:
    """As ``Noise.normal`` makes a number of a word."""
    return torch.erfinv(words.add(0.5).mul(2.0**-52).mul(2).sub(1)).mul(math.sqrt(2))


def main() -> None:
    given = argparse.ArgumentParser()
    given.add_argument("--releases", type=int, default=1_000_000)
    given.add_argument("--seed", type=int, default=0)
    args = given.parse_args()
    torch.set_num_threads(1)
    began = time.time()
    found = {
        "command": " ".join(["python", "benchmarks/certain_proofs.py", *sys.argv[1:]]),
        "seed of the image": args.seed,
        "noise": "operating system",
        "releases": args.releases,
        "numbers of a release": SIZE,
        "epsilon": 8.0,
        "delta": 1e-5,
        "proofs": proofs(args.releases, args.seed, Noise()),
        "floating-point noise, float32, near 0": floating_near_zero(2**19),
        "machine": f"{platform.machine()}, 1 thread, torch {torch.__version__}",
        "seconds": round(time.time() - began),
    }
    OUT.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
