"""Noise from the operating system's entropy, as many numbers as ResNet-18 has weights: before and now, in one run.

    python benchmarks/noise.py

Before: every byte from the operating system, inversion in one piece. Now: blocks, a faster inverse, and a cipher under a key from
the operating system, or (without the package ``cryptography``) its own bytes. Discrete: whole numbers of deviation 2^30, which is
what mechanisms release with. One thread; the forms take turns, the median counts.
Writes results/bench/noise.json.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path
from unittest import mock

import torch

from rescene.privacy import noise
from rescene.privacy.noise import Noise, discrete_gaussian

OUT = Path(__file__).parents[1] / "results" / "bench" / "noise.json"
COUNT, TURNS = 11_173_962, 7


def before() -> torch.Tensor:
    raw = torch.frombuffer(bytearray(os.urandom(8 * COUNT)), dtype=torch.int64)
    return torch.special.ndtri(((raw & ((1 << 52) - 1)).double() + 0.5) * 2.0**-52)


def now() -> torch.Tensor:
    return Noise().normal(COUNT)


def without_cipher() -> torch.Tensor:
    with mock.patch.object(noise, "unforeseen", lambda: lambda count: bytearray(os.urandom(count))):
        return Noise().normal(COUNT)


def discrete() -> torch.Tensor:
    return discrete_gaussian(COUNT, 2.0**30, Noise())


def main() -> None:
    torch.set_num_threads(1)
    forms = {"before": before, "now": now, "now, no cipher": without_cipher, "discrete": discrete}
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(TURNS):
        for name, form in forms.items():
            began = time.perf_counter()
            form()
            seconds[name].append(time.perf_counter() - began)
    median = {name: statistics.median(found) for name, found in seconds.items()}
    found = {
        "numbers": COUNT,
        "turns": TURNS,
        "seconds": {name: round(value, 4) for name, value in median.items()},
        "times_as_fast": {name: round(median["before"] / value, 2) for name, value in median.items()},
        "torch": torch.__version__,
    }
    OUT.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
