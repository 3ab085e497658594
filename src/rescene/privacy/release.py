"""Mechanism "release": one noised sum and count for each class of a task, and surrogates that are made from these numbers.

    released            all of it that touches images: noised sums and counts of every class of the task
    condense_released   surrogates from these numbers, the broadcast and public randomness; no image is looked at

A site may do both and send the surrogates, or send the sums (``privacy.send=sums``). Then the server does the second half with
shards that hold no image and the very streams of randomness that the sites would have used: the same surrogates, up to the
rounding of the sums to float32.

What is summed is psi(x) of each record, in one of two forms:

    embeddings   features and logits under the round's m perturbed networks; surrogates match the noised means by Eq. 1
    moments      of the picture itself (start ``coloured``); surrogates are drawn from the law with these moments

Moments do not depend on the model, so they are released once per task; every later round draws fresh surrogates from the same
numbers, which is free. They are the first and second ones at a low resolution: few numbers, so that little noise hides a record.

    p(x)    picture averaged over g x g cells, / g: its length is the picture's RMS        [channels g^2]
    q(x)    its grey version, or all its channels, averaged over h x h cells, / h         [h^2 or channels h^2]
    psi(x) = (p(x), w q(x) q(x)')         w = ``weight``; the symmetric matrix as its upper triangle, lengths kept

From a noised mean of psi pictures can be drawn at will: mean + noise with the covariance, both smoothed up to full size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rescene.core.rng import Rng, seeded_generator
from rescene.data import Shard
from rescene.functional import perturbed
from rescene.nets import count_passes
from rescene.privacy.mechanism import (
    Mechanism,
    SitePrivacy,
    class_sums,
    digest,
    moved_back,
    noised_means,
    refuse_batch_statistics,
)
from rescene.privacy.noise import Noise
from rescene.training.condensation import (
    CHUNK,
    Condensation,
    Gradient,
    Group,
    Move,
    Surrogates,
    assign,
    collect,
    descended,
    embedding,
    loss_and_gradient,
)


def released(
    net: nn.Module | None,
    shards: Sequence[Shard],
    settings: Condensation,
    noise_seed: int,
    sites: Sequence[SitePrivacy],
    centre: Tensor | None = None,
) -> list[Tensor | None]:
    """Each site's noised sums [classes, d + 1], from its ledger if it was asked before; None where it declines."""
    if settings.start == "coloured":
        return [released_moments(shard, site, centre) for shard, site in zip(shards, sites, strict=True)]
    assert net is not None  # only moments of pictures need none
    return released_embeddings(net, shards, settings, noise_seed, sites, centre)


def centre_of(
    net: nn.Module | None,
    pictures: Tensor,
    labels: Tensor,
    classes: Sequence[int],
    settings: Condensation,
    noise_seed: int,
    mechanism: Mechanism,
) -> Tensor:
    """a_c [classes, d]: mean psi of the class's pictures that earlier releases gave; where there are none, of all pictures."""
    if settings.start == "coloured":
        psi = moments_of(pictures, mechanism)
    else:
        assert net is not None
        before, thetas = networks(net.eval(), mechanism, settings, noise_seed, pictures.device)
        psi = embedded(net, lambda: pictures.split(CHUNK[pictures.device.type]), thetas, settings)
        assign(list(net.parameters()), before)
    own = [labels == label for label in classes]
    return torch.stack([psi[rows if bool(rows.any()) else slice(None)].mean(dim=0) for rows in own])


def condense_released(
    net: nn.Module | None,
    shards: Sequence[Shard],
    rngs: Sequence[Rng],
    settings: Condensation,
    noise_seed: int,
    mechanism: Mechanism,
    sums: Sequence[Tensor | None],
) -> list[Surrogates]:
    """Post-processing. The shards say which classes, what size and device; they may be empty."""
    if settings.start == "coloured":
        laws = _laws(sums, shards[0].images.pixels.shape[1:], mechanism)
        return [drawn_from_laws(shard, rng, own, settings) for shard, rng, own in zip(shards, rngs, laws, strict=True)]
    assert net is not None
    return condensed_embeddings(net, shards, rngs, settings, noise_seed, mechanism, sums)


def _laws(
    sums: Sequence[Tensor | None], shape: torch.Size, mechanism: Mechanism
) -> Iterable[list[PictureLaw | None] | None]:
    """What each site's pictures are drawn from, one site at a time; where sums are pooled found once, for all of them."""
    if not mechanism.pooled:
        return (None if own is None else laws_of(own, shape, mechanism, mechanism.deviation) for own in sums)
    total, deviation = pooled(sums, mechanism)
    together = None if total is None else laws_of(total, shape, mechanism, deviation)
    return (None if own is None else together for own in sums)


def pooled(sums: Sequence[Tensor | None], mechanism: Mechanism) -> tuple[Tensor | None, float]:
    """The sum of all that was sent, None if nothing was, and the deviation of the noise in it.

    Of a class that few sites sent the noise is less than that.
    """
    sent = [own for own in sums if own is not None]
    total = torch.stack(sent).sum(dim=0) if sent else None
    return total, mechanism.deviation * math.sqrt(len(sent))


def sums_upload(sums: Tensor | None, classes: Sequence[int], mechanism: Mechanism) -> dict[str, Any]:
    """What goes on the wire: the classes that are not suppressed, and their sums. A site that declines says just that."""
    if sums is None:
        return {"notes": {"num_declined": 1}}
    sums = sums.float()  # first, so that both sides compare the same numbers with the threshold
    _, enough = noised_means(sums.double(), mechanism.kappa, mechanism.least_count)
    return {"labels": torch.tensor(classes)[enough], "sums": sums[enough], "notes": {}}


def sums_received(upload: dict[str, Any], classes: Sequence[int]) -> Tensor | None:
    """Inverse of :func:`sums_upload`; a class that was suppressed has sum and count 0, so it is suppressed again."""
    if "sums" not in upload:
        return None
    own: Tensor = upload["sums"].cpu().double()
    where = torch.tensor([classes.index(label) for label in upload["labels"].tolist()], dtype=torch.int64)
    return own.new_zeros(len(classes), own.shape[1]).index_copy(0, where, own)


def sums_size(settings: Condensation, mechanism: Mechanism, head: torch.Size | None, channels: int = 3) -> int:
    """Numbers of one class, its count included. ``head``: shape [classes, features] of the broadcast network's last layer."""
    if settings.start == "coloured":
        rows = num_rows(mechanism, channels)
        return channels * mechanism.mean_grid**2 + rows * (rows + 1) // 2 + 1
    assert head is not None
    return mechanism.num_nets * (head[1] + head[0] * settings.match_logits) + 1


def noised_sums(
    parts: Iterable[Tensor], shard: Shard, mechanism: Mechanism, noise: Noise, centre: Tensor | None = None
) -> Tensor:
    """The one look at the data: a noised clipped sum and count for EVERY class of the task, float64 [classes, d + 1].

    ``parts`` [n_k, d] are the embeddings of the shard's records, in its order, and never needed all at once.
    """
    classes = torch.tensor(shard.task.classes, device=shard.device)
    groups = (shard.labels.unsqueeze(1) == classes).long().argmax(dim=1)
    first, units = 0, torch.zeros((), dtype=torch.int64, device=shard.device)
    for psi in parts:
        own = groups[first : first + len(psi)]
        units = units + class_sums(psi, own, len(classes), mechanism.clip, mechanism.kappa, mechanism.step, centre)
        first += len(psi)
    sums = mechanism.noised(units, noise)
    return sums if centre is None else moved_back(sums, centre, mechanism.kappa)


def released_embeddings(
    net: nn.Module,
    shards: Sequence[Shard],
    settings: Condensation,
    noise_seed: int,
    sites: Sequence[SitePrivacy],
    centre: Tensor | None = None,
) -> list[Tensor | None]:
    """Each site's noised sums under the round's networks, [classes, m (d + C) + 1]; None where it declines."""
    mechanism = sites[0].mechanism
    question = question_of(net, mechanism, settings, noise_seed)
    before, thetas = networks(net, mechanism, settings, noise_seed, shards[0].device)
    sums: list[Tensor | None] = []
    for shard, site in zip(shards, sites, strict=True):
        looked: list[int] = []

        def draw(shard: Shard = shard, site: SitePrivacy = site, looked: list[int] = looked) -> dict[str, Tensor]:
            looked.append(len(shard))
            psi = embeddings(net, shard, thetas, settings)
            return {"sums": noised_sums([psi], shard, mechanism, site.noise, centre)}

        found = site.answer(question, draw)
        if found is not None and not looked:  # replayed: the work was done once, and it counts once
            count_passes(net, len(thetas) * len(shard))
        sums.append(None if found is None else found["sums"])
    assign(list(net.parameters()), before)
    return sums


def condensed_embeddings(
    net: nn.Module,
    shards: Sequence[Shard],
    rngs: Sequence[Rng],
    settings: Condensation,
    noise_seed: int,
    mechanism: Mechanism,
    sums: Sequence[Tensor | None],
) -> list[Surrogates]:
    """Surrogates whose embeddings have the noised means, by Eq. 1 from white noise."""
    _, thetas = networks(net, mechanism, settings, noise_seed, shards[0].device)
    groups: list[Group] = []
    targets: list[Tensor] = []
    suppressed = [0] * len(shards)
    for client, (shard, rng, own) in enumerate(zip(shards, rngs, sums, strict=True)):
        if own is None:
            continue
        means, enough = noised_means(own, mechanism.kappa, mechanism.least_count)
        suppressed[client] = int((~enough).sum())
        for label, mean in zip(not_suppressed(shard.task.classes, enough), means[enough], strict=True):
            groups.append(Group(client, label, white_noise(shard, rng, label, settings), shard.index[:0], None))
            targets.append(mean.float() * math.sqrt(mechanism.num_nets))
    made = descended(
        net,
        shards,
        groups,
        settings,
        noise_seed,
        move=_in_turn(thetas),
        gradient=_towards(torch.stack(targets).to(shards[0].device), mechanism.num_nets, settings) if targets else None,
    )
    return [
        replace(m, num_declined=int(own is None), num_suppressed=s)
        for m, own, s in zip(made, sums, suppressed, strict=True)
    ]


def embeddings(net: nn.Module, shard: Shard, thetas: Sequence[Sequence[Tensor]], settings: Condensation) -> Tensor:
    """psi of every record of the shard: [n, m (d + C)]."""
    refuse_batch_statistics(net, settings.norm_statistics == "batch")
    parts = shard.index.split(CHUNK[shard.device.type])
    return embedded(net, lambda: map(shard.pictures, parts), thetas, settings)


@torch.no_grad()
def embedded(
    net: nn.Module,
    pictures: Callable[[], Iterable[Tensor]],
    thetas: Sequence[Sequence[Tensor]],
    settings: Condensation,
) -> Tensor:
    """psi(x) = m^-1/2 [phi_1, f_1, .., phi_m, f_m] of every picture, one pass per network."""
    parts = []
    for theta in thetas:
        assign(list(net.parameters()), theta)
        parts.append(torch.cat([row_of(net, part, settings) for part in pictures()]))
    return torch.cat(parts, dim=1) / math.sqrt(len(thetas))


def not_suppressed(classes: Sequence[int], enough: Tensor) -> list[int]:
    """The classes whose noised count reached the threshold."""
    return [c for c, e in zip(classes, enough.tolist(), strict=True) if e]


def question_of(net: nn.Module, mechanism: Mechanism, settings: Condensation, noise_seed: int) -> str:
    """A hash of everything that decides the answer, so that a repeated question gets the stored answer."""
    return digest(net.eval().state_dict().items(), mechanism, settings, noise_seed)


def networks(
    net: nn.Module, mechanism: Mechanism, settings: Condensation, noise_seed: int, device: torch.device
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """The broadcast weights, and the m perturbed ones that follow from the seed of the round for everybody alike."""
    before = [p.detach().clone() for p in net.parameters()]
    stream = seeded_generator(noise_seed, device)
    return before, [perturbed(before, settings.radius, stream) for _ in range(mechanism.num_nets)]


def _in_turn(thetas: Sequence[Sequence[Tensor]]) -> Move:
    turn = iter(range(10**9))
    return lambda theta, noise: thetas[next(turn) % len(thetas)]


def _towards(targets: Tensor, num_nets: int, settings: Condensation) -> Gradient:
    """Eq. 1 with noised means in the place of real ones; step s uses network s mod m and its part of the targets."""
    blocks = targets.chunk(num_nets, dim=1)

    def gradient(net: nn.Module, pixels: Tensor, owner: Tensor, step: int) -> tuple[Tensor, Tensor]:
        block, size = blocks[step % num_nets], int(net.feature_size)  # type: ignore[arg-type]
        labels = owner.new_zeros(len(targets))  # only a term would look at them
        losses, found = loss_and_gradient(
            net, pixels, owner, (block[:, :size], block[:, size:]), settings, labels, None
        )
        return losses, settings.bounded(found, losses, owner)

    return gradient


def white_noise(shard: Shard, rng: Rng, label: int, settings: Condensation) -> Tensor:
    """White noise to start from: no image of the site, and as many as the recipe says whatever the site holds."""
    generator = rng.at("condense", label).generator()
    return torch.randn((settings.ipc, *shard.images.pixels.shape[1:]), generator=generator).to(shard.device)


def row_of(net: nn.Module, x: Tensor, settings: Condensation) -> Tensor:
    """What one image adds to a sum: its features, and its logits if those are matched."""
    features, logits = embedding(net, x, settings)
    return torch.cat([features, logits], dim=1) if settings.match_logits else features


WHOLE_TASK = -1  # the round under which the ledger keeps what is released once per task


def released_moments(shard: Shard, site: SitePrivacy, centre: Tensor | None = None) -> Tensor | None:
    """The site's noised sums [classes, d + 1], the same in every round of the task; None if it declines."""
    mechanism = site.mechanism
    found = replace(site, round=WHOLE_TASK).answer(
        digest([], mechanism, *["colour"] * mechanism.covariance_colour),
        lambda: {"sums": _sums(shard, site, centre)},
    )
    return None if found is None else found["sums"]


def laws_of(sums: Tensor, shape: torch.Size, mechanism: Mechanism, deviation: float) -> list[PictureLaw | None]:
    """What pictures of this shape are drawn from, for each class of sums with noise of this deviation; None: suppressed."""
    means, enough = noised_means(sums, mechanism.kappa, mechanism.least_count)
    counts = sums[:, -1] / mechanism.kappa
    return [
        picture_law(mean.float(), deviation / float(count), shape, *_grids(mechanism)) if sent else None
        for mean, count, sent in zip(means, counts, enough, strict=True)
    ]


def drawn_from_laws(
    shard: Shard, rng: Rng, laws: Sequence[PictureLaw | None] | None, settings: Condensation
) -> Surrogates:
    """Surrogates; the shard says which classes, size and device, and may be empty. No laws: the site declined."""
    if laws is None:
        return replace(collect(shard, []), num_declined=1)
    classes, images = [], []
    for label, law in zip(shard.task.classes, laws, strict=True):
        if law is not None:
            noise = torch.randn(settings.ipc, len(law.scale), generator=rng.at("condense", label).generator())
            images.append(shard.transform.possible(drawn_pictures(law, noise).to(shard.device)))
            classes.append(label)
    suppressed = len(laws) - len(classes)
    if not images:
        return replace(collect(shard, []), num_suppressed=suppressed)
    labels = torch.tensor(classes, device=shard.device).repeat_interleave(settings.ipc)
    pixels = torch.cat(images)
    return Surrogates(pixels, labels, pixels, loss=0.0, num_fallbacks=0, num_suppressed=suppressed)


def _sums(shard: Shard, site: SitePrivacy, centre: Tensor | None = None) -> Tensor:
    """The one look at the images: a noised clipped sum and count for every class of the task."""
    parts = shard.index.split(CHUNK[shard.device.type]) if len(shard) else (shard.index,)
    psi = (moments_of(shard.pictures(part), site.mechanism) for part in parts)
    return noised_sums(psi, shard, site.mechanism, site.noise, centre)


def moments_of(pictures: Tensor, mechanism: Mechanism) -> Tensor:
    """First and second moments of pictures on the mechanism's grids."""
    return picture_moments(pictures, *_grids(mechanism))


def num_rows(mechanism: Mechanism, channels: int) -> int:
    """Rows of the covariance that is released."""
    return mechanism.covariance_grid**2 * (channels if mechanism.covariance_colour else 1)


def _grids(mechanism: Mechanism) -> tuple[int, int, float, bool]:
    m = mechanism
    return m.mean_grid, m.covariance_grid, m.covariance_weight, m.covariance_colour


def picture_moments(x: Tensor, grid: int, coarse: int, weight: float, colour: bool = False) -> Tensor:
    """psi(x) of each picture: [n, channels, s, s] -> [n, channels grid^2 + d (d + 1) / 2], d the numbers of q.

    >>> picture_moments(torch.ones(1, 1, 8, 8), 2, 1, 0.5).tolist()
    [[0.5, 0.5, 0.5, 0.5, 0.5]]
    """
    p, q = _cells(x, grid), _coarse(x, coarse, colour)
    rows, columns = torch.triu_indices(q.shape[1], q.shape[1], device=x.device)
    products = q[:, rows] * q[:, columns] * torch.where(rows == columns, 1.0, math.sqrt(2.0))
    return torch.cat([p, weight * products], dim=1)


class PictureLaw(NamedTuple):
    """What pictures are drawn from: their mean, and how far they vary along each axis of the coarse picture."""

    mean: Tensor  # [1, channels, s, s]
    axes: Tensor  # [d, d], one per column
    scale: Tensor  # [d]
    coarse: int  # side of what varies


def picture_law(
    mean: Tensor,
    deviation: float,
    shape: torch.Size,
    grid: int,
    coarse: int,
    weight: float,
    colour: bool = False,
) -> PictureLaw:
    """The law of pictures of this ``shape`` [channels, s, s] with the moments ``mean``, which carry noise of this ``deviation``.

    The mean picture is smoothed by :func:`without_noise`; of the covariance those directions are kept that stand out: the
    eigenvalues of a symmetric matrix of such noise end at 2 sqrt(d) times its deviation (Wigner's semicircle). Where the
    covariance is that of the whole picture, all other eigenvalues become their mean, which the noise disturbs least.
    """
    channels, size = shape[0], shape[-1]
    split = channels * grid * grid
    unit = grid * math.sqrt(channels)
    picture = without_noise((unit * mean[:split]).reshape(1, channels, grid, grid), unit * deviation)
    (q,) = _coarse(picture, coarse, colour)
    size_q = len(q)
    rows, columns = torch.triu_indices(size_q, size_q, device=mean.device)
    second = mean.new_zeros(size_q, size_q)
    second[rows, columns] = mean[split:] / weight / torch.where(rows == columns, 1.0, math.sqrt(2.0))
    second[columns, rows] = second[rows, columns].clone()
    values, axes = torch.linalg.eigh(second - torch.outer(q, q))
    edge = 2 * deviation / weight * math.sqrt(size_q / 2)  # off the diagonal entries carry the deviation / sqrt 2
    stands_out = values > edge
    rest = 0.0
    if colour and coarse == size and not bool(stands_out.all()):
        # nothing is smoothed away: keep what the others add up to
        rest = max(0.0, float(values[~stands_out].mean()))
    return PictureLaw(_smooth(picture, size), axes, torch.where(stands_out, values, rest).sqrt(), coarse)


def drawn_pictures(law: PictureLaw, noise: Tensor) -> Tensor:
    """A picture [channels, s, s] for each row of white ``noise`` [m, d]."""
    varied = (noise.to(law.mean) * law.scale) @ law.axes.T * math.sqrt(len(law.scale))
    return law.mean + _smooth(varied.reshape(len(noise), -1, law.coarse, law.coarse), law.mean.shape[-1])


def without_noise(picture: Tensor, deviation: float) -> Tensor:
    """Wiener's filter for a mean picture [..., g, g] with noise of this deviation on every cell.

    The power of wave (u, v) is taken to be g^2 / (1 + u^2 + v^2)^2: what averages of centred objects have, roughly, and no
    number that any image was asked for.
    """
    side = picture.shape[-1]
    wave = torch.arange(side, dtype=picture.dtype, device=picture.device)
    basis = torch.cos(math.pi / side * (wave + 0.5) * wave.unsqueeze(1)) * math.sqrt(2 / side)  # DCT-II, rows are waves
    basis[0] /= math.sqrt(2)
    power = side**2 / (1 + wave.square() + wave.square().unsqueeze(1)).square()
    return basis.T @ (basis @ picture @ basis.T * power / (power + deviation**2)) @ basis


def _cells(x: Tensor, side: int) -> Tensor:
    """Averages over side x side cells of each channel, as rows as long as the picture's RMS."""
    return F.adaptive_avg_pool2d(x, side).flatten(1) / (side * math.sqrt(x.shape[1]))


def _coarse(x: Tensor, side: int, colour: bool) -> Tensor:
    """q of each picture."""
    return _cells(x if colour else x.mean(dim=1, keepdim=True), side)


def _smooth(x: Tensor, size: int) -> Tensor:
    return F.interpolate(x, size=(size, size), mode="bicubic", align_corners=False)
