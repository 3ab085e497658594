"""Attacks on released sums: `moments` behind `release`, and weights behind `dp-sgd`.

The attacker is the server. It knows every other image of the site, the features and all settings, and sees what the site sends. Sites
are made up: features of ``D`` whole numbers, few images. The method's own verb answers, so what is attacked is what runs.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rescene.audit.lattice import vectors_of
from rescene.audit.rows import Found
from rescene.core.rng import Rng
from rescene.data import Images, Task, Transform
from rescene.methods.base import Client
from rescene.methods.moments import Moments, Sums, added, received
from rescene.nets import Arch
from rescene.privacy.accounting import Composition, epsilon_of, sigma_for
from rescene.privacy.epsilon_bounds import most_identified, success_lower_bound, two_world_bound
from rescene.privacy.feature_sums import RADIUS, STEPS, deviations, on_diagonal, packed, unpacked
from rescene.privacy.ledger import Ledger
from rescene.privacy.mechanism import Mechanism, SitePrivacy
from rescene.privacy.noise import Noise
from rescene.training import Training

D = 8  # numbers of a feature
CLASSES = 2
CLAIM, DELTA = 1.0, 1e-5
WEAK = 8.0  # a control has so many times less noise than it claims
DRAWS = 400  # of each world
CANDIDATES = 64
TRIES = 120
SIZES = (1, 3, 5)  # images of the class
RISK = 0.05
SURE = 1e-4  # risk of a false alarm where the best attack reaches the bound itself: it is run again and again

ONCE = Composition(1, 1)
MODEL = {"model": Arch("linear", 1, channels=D).build(CLASSES).state_dict()}


def claimed_sums(epsilon: float = CLAIM) -> Mechanism:
    """The mechanism of the recipes lens-*-dp, with the noise that this epsilon takes."""
    sigma = sigma_for(epsilon, ONCE, DELTA)
    return Mechanism("release", sigma, 1.0, ONCE, DELTA, kappa=0.3, covariance_weight=1.5)


def weaker(mechanism: Mechanism) -> Mechanism:
    """The same mechanism with less noise, for the positive control."""
    return replace(mechanism, sigma=mechanism.sigma / WEAK)


def pictures(count: int, generator: torch.Generator) -> Tensor:
    """Features [n, D] in steps, all with the largest norm that is not clipped: the worst case that the guarantee covers."""
    return int(RADIUS * STEPS) * (2 * torch.randint(2, (count, D), generator=generator) - 1)


def told(z: Tensor, labels: Tensor, mechanism: Mechanism | None) -> Sums:
    """What the server has after a site with these features was asked once, in steps."""
    upload = _upload(z, None if mechanism is None else SitePrivacy(mechanism, Noise()), labels)
    return received(0, upload, tuple(range(CLASSES)), mechanism, float(mechanism is not None))


def _upload(z: Tensor, site: SitePrivacy | None, labels: Tensor | None = None) -> dict[str, Any]:
    """What the site itself sends; all its images are of class 0 unless it is said otherwise."""
    shard = _shard(z, torch.zeros(len(z), dtype=torch.int64) if labels is None else labels, site)
    return dict(Moments().sum_up(MODEL, shard, None, Rng(0))[0])


def _shard(z: Tensor, labels: Tensor, site: SitePrivacy | None) -> Client:
    n = len(z)
    task = Task(0, tuple(range(CLASSES)), CLASSES, None, torch.arange(n), torch.arange(0))
    transform = Transform((128 / 255,) * D, (STEPS / 255,) * D, 0)
    images = Images((z + 128).to(torch.uint8).reshape(n, D, 1, 1), labels)
    return Client(images, torch.arange(n), task, transform, Arch("linear", 1, channels=D).restore, site)


def likelihood(seen: Sums, known: Sums, candidates: Tensor, mechanism: Mechanism) -> Tensor:
    """[k] log-likelihood ratio of "one of class 0 more, with these features" against "nothing more than what is known"."""
    of_count, of_sum, of_square = deviations(mechanism, D)
    count = (seen.counts[0] - known.counts[0]).double()
    total = (seen.sums[0] - known.sums[0]).double()
    second = (seen.second - known.second).double()
    weight = torch.where(on_diagonal(D, second.device), 1.0, 2.0).double() / of_square**2
    products = torch.stack([packed(torch.outer(z, z)) for z in candidates.double()])
    z = candidates.double()
    return (
        (2 * count - 1) / of_count**2
        + (2 * z @ total - z.square().sum(dim=1)) / of_sum**2
        + (weight * (2 * products * second - products.square())).sum(dim=1)
    ) / 2


def canary_scores(mechanism: Mechanism, draws: int, seed: int, honest: int = 1) -> tuple[Tensor, Tensor]:
    """Scores of one canary in ``draws`` worlds with it and as many without; the site holds two other images.

    With ``honest`` sites the server sees the sum of so many; the others hold the same two images and no canary.
    """
    generator = torch.Generator().manual_seed(seed)
    z = pictures(3, generator)
    labels = torch.tensor([0, 1, 0])
    known = summed([told(z[:2], labels[:2], None)] * honest)

    def score(n: int) -> Tensor:
        seen = summed([told(z[:k], labels[:k], mechanism) for k in (n, *[2] * (honest - 1))])
        return likelihood(seen, known, z[2:], mechanism)[0]

    inside, outside = (torch.stack([score(n) for _ in range(draws)]) for n in (3, 2))
    return inside, outside


def summed(parts: Sequence[Sums]) -> Sums:
    """What the server sees of sites in one secure sum."""
    return reduce(added, parts)


def membership(draws: int = DRAWS, seed: int = 0) -> Found:
    """Canaries on two draws: how much epsilon do the noised sums show?"""
    sound = claimed_sums()
    shown = two_world_bound(*canary_scores(sound, draws, seed), DELTA, RISK)
    broken = two_world_bound(*canary_scores(weaker(sound), draws, seed), DELTA, RISK)
    return Found(
        shown, epsilon_of(sound.sigma, ONCE, DELTA), broken > CLAIM, "epsilon", f"noise / {WEAK:g} shows {broken:.2f}"
    )


def reconstruction(tries: int = TRIES, seed: int = 0) -> Found:
    """Which of 64 pictures does a class of 1, 3 or 5 images hold? The others of it are known."""
    sound = claimed_sums()
    limit = most_identified(CANDIDATES, sound.sigma)
    shown = max(_identified(n, sound, tries, seed) for n in SIZES)
    broken = _identified(1, weaker(sound), tries, seed)
    return Found(shown, limit, broken > limit, "share", f"noise / {WEAK:g} gives {broken:.0%}")


def _identified(size: int, mechanism: Mechanism, tries: int, seed: int) -> float:
    """The share of right answers, at least."""
    generator = torch.Generator().manual_seed(seed)
    right = 0
    for _ in range(tries):
        candidates, others = pictures(CANDIDATES, generator), pictures(size - 1, generator)
        secret = int(torch.randint(CANDIDATES, (), generator=generator))
        labels = torch.zeros(size, dtype=torch.int64)
        seen = told(torch.cat([others, candidates[secret : secret + 1]]), labels, mechanism)
        known = told(others, labels[1:], None) if size > 1 else _nothing(seen)
        right += int(likelihood(seen, known, candidates, mechanism).argmax()) == secret
    return success_lower_bound(right, tries, SURE / len(SIZES))


def _nothing(like: Sums) -> Sums:
    counts, sums, second = (torch.zeros_like(part) for part in (like.counts, like.sums, like.second))
    return replace(like, counts=counts, sums=sums, second=second)


def lattice(seed: int = 0) -> Found:
    """Lattice reduction (LLL) of the second moment of five images: how many come back to the last digit?"""
    sound = claimed_sums()
    found, exact = _solved(5, sound, seed), _solved(5, None, seed)
    return Found(found, 0.0, exact == 5, "of 5 images", f"exact sums give {exact} of 5")


def _solved(count: int, mechanism: Mechanism | None, seed: int) -> int:
    generator = torch.Generator().manual_seed(seed)
    z = torch.randint(-20, 21, (count, D), generator=generator)
    seen = told(z, torch.zeros(count, dtype=torch.int64), mechanism)
    second = unpacked(seen.second.double(), D).round().long()
    found = vectors_of(second.tolist()) or _spectral(second.double(), count)
    return sum(row in found or [-x for x in row] in found for row in z.tolist())


def _spectral(second: Tensor, count: int) -> list[list[int]]:
    """The best that is left without a lattice: the largest directions at their lengths."""
    value, vector = torch.linalg.eigh(second)
    rows = (vector * value.clamp(min=0).sqrt()).T.flip(0)[:count]
    return [[int(x) for x in row.round()] for row in rows]


def whole_numbers(seed: int = 0, count: int = 200_000) -> Found:
    """Floating-point noise has gaps. Is every released number one that both worlds can give?

    A number is a certain proof if no value of the noise leads to it in one of two worlds. Whole numbers on a grid with noise over all of
    them cannot be; for floats the gaps are looked for, in a generator of 30 bits (the control) and by the type of what leaves.
    """
    site = SitePrivacy(claimed_sums(), Noise())
    upload = _upload(pictures(3, torch.Generator().manual_seed(seed)), site)
    floats = [name for name, part in upload.items() if isinstance(part, Tensor) and part.is_floating_point()]
    proofs = _certain(torch.Generator().manual_seed(seed), count, bits=26)
    note = f"{', '.join(floats)} leave as floats: values exist that only one world can give" if floats else ""
    return Found(
        len(floats), 0, proofs > 0, "parts in floats", f"noise of 2^26 values: {proofs} proofs in {count:,}", note
    )


def _certain(generator: torch.Generator, count: int, bits: int) -> int:
    """Releases of 1 + noise that 0 + noise cannot have given, for normal noise by inversion of so many bits, released as float32."""
    u = (torch.randint(2**bits, (count,), generator=generator).double() + 0.5) / 2**bits
    released = (1.0 + torch.special.ndtri(u)).float().double()
    place = torch.special.ndtr(released) * 2**bits - 0.5  # the draw that would lead there without the record
    nearest = torch.special.ndtri((place.round().clamp(0, 2**bits - 1) + 0.5) / 2**bits)
    return int((nearest.float().double() != released).sum())


def differencing(seed: int = 0) -> Found:
    """Two sums that differ by one site give that site away if the others answer in both. In how many is a site's image?

    The server claims that the site remembers nothing, and asks for the same images in the rounds of two sums.
    """
    z, sound = pictures(3, torch.Generator().manual_seed(seed)), claimed_sums()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the site says that it declines
        books = Ledger(Path(folder) / "ledger.jsonl")
        kept, lost = (
            _answers(z, [SitePrivacy(sound, Noise(), "audit", 0, r, 1, book) for r in (0, 1)]) for book in (books, None)
        )
    return Found(kept, 1, lost == 2, "sums", "a site without a ledger is in both")


def _answers(z: Tensor, sites: list[SitePrivacy]) -> int:
    """How many different releases these places of one site give."""
    found: list[Tensor] = []
    for site in sites:
        upload = _upload(z, site)
        if "second" in upload and not any(torch.equal(upload["second"], one) for one in found):
            found.append(upload["second"])
    return len(found)


def gradient_scores(mechanism: Mechanism, pick: Tensor, shown: Tensor) -> Tensor:
    """[k] likelihood of each candidate picture [k, D], if this one ``shown`` [n, D] trained the weights that the site sent."""
    from rescene.privacy.dp_sgd import fit_privately

    net = Arch("linear", 1, channels=D).build(CLASSES)
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    site = SitePrivacy(mechanism, Noise())
    shard = _shard(shown, torch.zeros(len(shown), dtype=torch.int64), site)
    settings = Training(lr=1.0, momentum=0.0, weight_decay=0.0, augment=False)
    fit_privately(net, shard, settings, torch.Generator().manual_seed(0), site)
    moved = torch.cat([(before[name] - value).flatten() for name, value in net.state_dict().items()]).double()
    seen = moved * mechanism.typical_count * CLASSES * mechanism.composition.rate
    features = pick.double() / STEPS
    push = torch.tensor([-0.5, 0.5], dtype=torch.float64)  # softmax of a zero head, less the label
    names = list(before)
    parts = {
        "head.weight": torch.einsum("c,kd->kcd", push, features).flatten(1),
        "head.bias": push.expand(len(pick), -1),
    }
    gradients = torch.cat([parts[name] for name in names], dim=1)
    gradients = gradients * (mechanism.clip / gradients.norm(dim=1, keepdim=True)).clamp(max=1)
    likelihoods: Tensor = (gradients @ seen - gradients.square().sum(dim=1) / 2) / mechanism.deviation**2
    return likelihoods


def claimed_gradients(epsilon: float = CLAIM) -> Mechanism:
    """The mechanism of one step of DP-SGD that promises this epsilon."""
    return Mechanism("dp-sgd", sigma_for(epsilon, ONCE, DELTA), 1.0, ONCE, DELTA, typical_count=1.0)


def gradient_inversion(tries: int = TRIES, seed: int = 0) -> Found:
    """Which of 64 pictures trained these weights? A linear network's gradient is the picture."""
    sound = claimed_gradients()
    limit = most_identified(CANDIDATES, sound.sigma)
    faint = weaker(weaker(sound))
    shown, broken = (_inverted(m, tries, seed) for m in (sound, faint))
    return Found(shown, limit, broken > limit, "share", f"noise / {WEAK**2:g} gives {broken:.0%}")


def _inverted(mechanism: Mechanism, tries: int, seed: int) -> float:
    generator, right = torch.Generator().manual_seed(seed), 0
    for _ in range(tries):
        candidates = pictures(CANDIDATES, generator)
        secret = int(torch.randint(CANDIDATES, (), generator=generator))
        right += int(gradient_scores(mechanism, candidates, candidates[secret : secret + 1]).argmax()) == secret
    return success_lower_bound(right, tries, SURE)
