"""How close an uploaded image is to a real one. Only a simulation can know, so only a simulation can tell.

Distances are RMS over pixels in normalised units (a standard deviation of the data is 1) and PSNR in dB with pixels in
[0, 1]. A PSNR above 30 dB is an image that a person would take for the same picture: a near-copy. That figure looks at every
upload and sees plain copies only.

A *traced* upload is one whose source stands out among all real images, after mirror, small moves, gain, offset, negative and blur are
undone (``margins``). It takes longer, so it looks at ``MOST_TRACED`` uploads of a task. Beside it stands the same
figure for as many images that no site had: what pictures of this kind score by chance.

Is a picture a copy of one of these? It is compared with pictures that nobody can have copied, and after undoing what hides a copy.
A copy that was mirrored, moved by a few pixels, blurred, made negative, brighter, paler or noisy is far from its source pixel by pixel,
and a person still sees it. So two pictures are compared in every position within ``REACH`` pixels, mirrored and not, by the absolute
correlation (which no gain, offset or negative changes) of six views of them:

    colour   as they are                      edges    how the grey picture changes from pixel to pixel
    blurred  both without fine detail         channel  the best single channel
    softer   only the candidate is blurred    values   the sorted values of each channel, wherever they stand

Real pictures of one kind are alike without being copies. The figure is therefore a comparison: how much nearer is the nearest of the
pictures that may be the source than the nearest of others that cannot be?

    margin = log (1 - r_unseen) / (1 - r_seen)    in the view in which the two differ most; above 0: the nearest of all may be the source
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, interpolate, normalize, pad

from rescene.data import Transform

SIDE = 32  # larger pictures are made this small first
REACH = 3  # pixels
SHORTLIST = 8  # candidates for each picture that are compared in full, and half as many found by their values alone
CHUNK = 4096  # candidates at a time
FEW_CHANNELS = 3  # above, a "picture" is what a lens gave, and its channels are no colours
CUT = 1.5  # margin from which a picture is called traced: the other distance is four and a half times as long
BLURS = (("gauss", 1.0), ("gauss", 1.4), ("box", 1.0), ("box", 2.0))  # that a copy may have had; pixels to one side
_LEAST = 1e-4  # distances below this are all alike: rounding to eight bits takes about a tenth of it
_LEAST_VALUES = 1e-5  # sorted values agree better than that only where they are the same


@torch.no_grad()
def margins(pictures: Tensor, seen: Tensor, unseen: Tensor) -> Tensor:
    """[m] how much nearer each picture's nearest among ``seen`` is than its nearest among ``unseen``. All [n, C, H, W], any units."""
    pictures, seen, unseen = (_small(part) for part in (pictures, seen, unseen))
    own, others = _shortlist(pictures, seen), _shortlist(pictures, unseen)
    found = []
    for one, a, b in zip(pictures, own, others, strict=True):
        r = _compared(one, torch.cat([seen[a], unseen[b]]))  # [views, candidates]
        distance = 1 - torch.stack([r[:, : len(a)].amax(dim=1), r[:, len(a) :].amax(dim=1)])
        least = torch.full_like(distance, _LEAST)
        least[:, -1] = _LEAST_VALUES
        near, far = (distance + least).log()
        margin = far - near
        margin[-1] /= 2  # values are few numbers in effect, so that chance brings them close more often
        found.append(margin[margin.abs().argmax()])
    return torch.stack(found) if found else pictures.new_zeros(0)


def _small(pictures: Tensor) -> Tensor:
    found = pictures.float()
    if max(found.shape[-2:]) > SIDE:
        found = interpolate(found, size=(SIDE, SIDE), mode="area")
    return found


def _reach(side: int) -> int:
    """Pixels by which pictures are moved; those of a lens are too small for it."""
    return min(REACH, side // 8)


def _shortlist(pictures: Tensor, pool: Tensor) -> Tensor:
    """[m, k] positions of the candidates that look most alike at a coarse scale, and of those with the most similar values."""
    reach = _reach(pool.shape[-1])
    views = _windows(_mirrored(_coarse_forms(pictures)), reach)  # [m, forms, registrations, ...]
    queries = _unit(_pooled(views))
    values, scale = _values(pictures), _values(pool).std(dim=0).clamp(min=1e-6)
    alike, same_values = [], []
    for part in pool.split(CHUNK):
        forms = _coarse_forms(part)
        middle = _unit(_pooled(forms[..., reach : forms.shape[-2] - reach, reach : forms.shape[-1] - reach]))
        score = torch.stack([(queries[:, f] @ middle[:, f].T).abs().amax(dim=1) for f in range(forms.shape[1])])
        alike.append(score.amax(dim=0))
        same_values.append(-torch.cdist(values / scale, _values(part) / scale))
    first = torch.cat(alike, dim=1).topk(min(SHORTLIST, len(pool)), dim=1).indices
    second = torch.cat(same_values, dim=1).topk(min(SHORTLIST // 2, len(pool)), dim=1).indices
    return torch.cat([first, second], dim=1)


def _coarse_forms(x: Tensor) -> Tensor:
    """[n, forms, c, H, W]: the grey picture, each channel and the edges; of a lens' picture everything at once."""
    if x.shape[1] > FEW_CHANNELS:
        return x.unsqueeze(1)
    soft = _blurred(x)
    strength = _edges(soft).square().sum(dim=1, keepdim=True).sqrt()
    return torch.cat([soft.mean(dim=1, keepdim=True), soft, strength], dim=1).unsqueeze(2)


def _mirrored(x: Tensor) -> Tensor:
    """A second copy of everything, mirrored, in a new dimension after the forms: [n, forms, 2, c, H, W]."""
    return torch.stack([x, x.flip(-1)], dim=2)


def _windows(x: Tensor, reach: int) -> Tensor:
    """[..., k, c, h, w] -> [..., k * positions, c, h', w']: all windows that moving by ``reach`` leaves, side by side."""
    height, width = x.shape[-2] - 2 * reach, x.shape[-1] - 2 * reach
    offsets = range(2 * reach + 1)
    return torch.cat([x[..., i : i + height, j : j + width] for i in offsets for j in offsets], dim=-4)


def _pooled(x: Tensor) -> Tensor:
    """Every second pixel's mean of the last three dimensions, flat."""
    flat = x.flatten(0, -4)
    if min(flat.shape[-2:]) >= 2 * REACH:
        flat = avg_pool2d(flat, 2)
    return flat.flatten(1).reshape(*x.shape[:-3], -1)


def _values(x: Tensor) -> Tensor:
    """[n, 4 C] what the values of each channel are like, wherever they stand: mean, deviation and two higher moments."""
    flat = x.flatten(2)
    mean = flat.mean(dim=2, keepdim=True)
    away = flat - mean
    square = away.square()
    third, fourth = (square * away).mean(dim=2), square.square().mean(dim=2)
    return torch.cat(
        [mean.squeeze(2), square.mean(dim=2).sqrt(), third.sign() * third.abs() ** (1 / 3), fourth**0.25], 1
    )


def _compared(one: Tensor, candidates: Tensor) -> Tensor:
    """[views, k] the largest absolute correlation of one picture [C, H, W] with each of these [k, C, H, W], over all registrations."""
    both = torch.cat([one.unsqueeze(0), candidates])
    soft, reach = _blurred(both), _reach(one.shape[-1])
    few = both.shape[1] <= FEW_CHANNELS
    views = {
        "colour": [(one, candidates)],
        "softer": [(one, _blurred(candidates, *blur)) for blur in BLURS] if few else [],
        "blurred": [(soft[0], soft[1:])],
        "edges": [(edges[0], edges[1:]) for edges in (_edges(soft),)] if few else [],
        "channel": [(one[c : c + 1], candidates[:, c : c + 1]) for c in range(both.shape[1])] if few else [],
    }
    found = [
        torch.stack([_correlation(*pair, reach) for pair in pairs]).amax(dim=0) for pairs in views.values() if pairs
    ]
    values = _unit(both.flatten(2).sort(dim=2).values.flatten(1))
    return torch.stack([*found, values[1:] @ values[0]])


def _correlation(one: Tensor, candidates: Tensor, reach: int) -> Tensor:
    """[k] the middle of one picture, mirrored or not, against all windows of each candidate; each channel has its own mean."""
    height, width = one.shape[-2:]
    middle = one[:, reach : height - reach, reach : width - reach]
    middle = middle - middle.mean(dim=(1, 2), keepdim=True)
    size = middle.shape[-2:]
    query = torch.fft.rfft2(pad(torch.stack([middle, middle.flip(-1)]), (0, 2 * reach, 0, 2 * reach)))
    # nothing wraps around within the reach
    product = (torch.fft.rfft2(candidates).unsqueeze(1) * query.conj()).sum(dim=2)
    inner = torch.fft.irfft2(product, s=(height, width))[..., : 2 * reach + 1, : 2 * reach + 1]
    square = (_means(candidates.square(), size) - _means(candidates, size).square()).sum(1, keepdim=True)
    norm = (square.clamp(min=0) * size.numel()).sqrt() * middle.norm()
    found: Tensor = (inner / norm.clamp(min=1e-6)).abs().amax(dim=(1, 2, 3))
    return found


def _means(x: Tensor, size: torch.Size) -> Tensor:
    """The mean of every window of this size, by running sums."""
    total = pad(x.double(), (1, 0, 1, 0)).cumsum(-1).cumsum(-2)
    h, w = size
    found = total[..., h:, w:] - total[..., :-h, w:] - total[..., h:, :-w] + total[..., :-h, :-w]
    return (found / (h * w)).to(x.dtype)


def _unit(x: Tensor) -> Tensor:
    """Vectors with mean 0 and norm 1; a constant one becomes 0, which is like nothing."""
    return normalize(x - x.mean(dim=-1, keepdim=True), dim=-1)


def _blurred(x: Tensor, kind: str = "gauss", width: float = 1.5) -> Tensor:
    """By a Gaussian or a box of so many pixels; beyond the border the picture goes on as it ends."""
    down, right = (_blur(side, kind, width).to(x) for side in x.shape[-2:])
    return down @ x @ right.T


@lru_cache
def _blur(side: int, kind: str, width: float) -> Tensor:
    """[side, side] the blur of a column as a matrix; a small picture, a lens' say, stays as it is."""
    if side < 8:
        return torch.eye(side)
    away = torch.arange(-4, 5)
    weights = (-away.square() / (2 * width**2)).exp() if kind == "gauss" else (away.abs() <= width).float()
    weights = weights / weights.sum()
    rows = torch.arange(side).unsqueeze(1)
    return torch.zeros(side, side).scatter_add(1, (rows + away).clamp(0, side - 1), weights.expand(side, -1))


def _edges(x: Tensor) -> Tensor:
    """[n, 2, H, W] differences of the grey picture to the right and downwards."""
    grey = x.mean(dim=1)
    right = pad(grey[..., :, 1:] - grey[..., :, :-1], (0, 1))
    down = pad(grey[..., 1:, :] - grey[..., :-1, :], (0, 0, 0, 1))
    return torch.stack([right, down], dim=1)


NEAR_COPY_DB = 30.0
EXACT_RMS = 1e-6  # normalised units; below it an upload is the real image up to rounding
MOST_TRACED = 12  # uploads of a task, and unseen images beside them


@torch.no_grad()
def nearest_real(images: Tensor, real_pixels: Tensor, transform: Transform) -> tuple[Tensor, Tensor]:
    """For each normalised image its nearest real one: (RMS distance [m], position into ``real_pixels`` [m]).

    Candidates come from |a|^2 + |b|^2 - 2 a.b in chunks of the real side; the distance to the winner is then computed
    directly, because the expansion loses the digits that matter for near-copies.
    """
    a = images.flatten(1)
    best = torch.full((len(a),), torch.inf, device=a.device)
    where = torch.zeros(len(a), dtype=torch.long, device=a.device)
    for first in range(0, len(real_pixels), CHUNK):
        b = transform.normalise(real_pixels[first : first + CHUNK]).flatten(1)
        square = b.square().sum(dim=1) - 2.0 * (a @ b.T)
        value, index = square.min(dim=1)
        closer = value < best
        best, where = torch.where(closer, value, best), torch.where(closer, index + first, where)
    difference = a - transform.normalise(real_pixels[where]).flatten(1)
    return difference.square().mean(dim=1).sqrt(), where


def psnr(images: Tensor, others: Tensor, transform: Transform) -> Tensor:
    """Peak signal-to-noise ratio in dB of normalised images against others, pixels in [0, 1]; identical ones give 100.

    The three channels have different standard deviations, so this is not a function of the RMS alone.
    """
    std = torch.tensor(transform.std, device=images.device).reshape(1, -1, 1, 1)
    mse = ((images - others) * std).square().flatten(1).mean(dim=1)
    return -10.0 * mse.clamp(min=1e-10).log10()


def summarise(rms: Tensor, decibel: Tensor) -> dict[str, Any]:
    """The figures that stand beside every accuracy. Empty input gives zero images and no distances."""
    if len(rms) == 0:
        return {"num_images": 0}
    return {
        "num_images": len(rms),
        "nearest_rms_mean": float(rms.mean()),
        "nearest_rms_median": float(rms.median()),
        "nearest_rms_min": float(rms.min()),
        "nearest_psnr_median_db": float(decibel.median()),
        "near_copies": float((decibel > NEAR_COPY_DB).float().mean()),
        "exact_copies": int((rms < EXACT_RMS).sum()),
    }


def evenly(count: int, most: int) -> Tensor:
    """At most so many positions below ``count``, spread over all of it.

    >>> evenly(10, 4).tolist()
    [0, 3, 6, 9]
    """
    return torch.linspace(0, count - 1, min(count, most)).round().long() if count else torch.zeros(0, dtype=torch.long)


def summarise_traced(images: Tensor, seen: Tensor, unseen: Tensor, transform: Transform) -> dict[str, Any]:
    """How many of these normalised images can be traced to one of the ``seen`` pixels, and how many unseen ones by chance.

    Half of the unseen images at most stand in for uploads; the others are what a source must stand out from.
    """
    chance = evenly(len(unseen), min(len(images), len(unseen) // 2))
    if not len(chance):
        return {}
    others = torch.ones(len(unseen), dtype=torch.bool)
    others[chance] = False
    had, never = transform.normalise(seen), transform.normalise(unseen[others.to(unseen.device)])
    found = margins(torch.cat([images, transform.normalise(unseen[chance.to(unseen.device)])]), had, never).cpu()
    sent, control = found[: len(images)], found[len(images) :]
    return {
        "num_traced": len(images),
        "traced": float((sent > CUT).float().mean()),
        "traced_by_chance": float((control > CUT).float().mean()),
        "nearest_seen": float((sent > 0).float().mean()),
        "nearest_seen_by_chance": float((control > 0).float().mean()),
    }


def summarise_starts(rms: Tensor, decibel: Tensor) -> dict[str, Any]:
    """The same against each surrogate's own start image (real or not): how far condensation moved it."""
    return {
        "start_rms_mean": float(rms.mean()),
        "start_rms_median": float(rms.median()),
        "start_rms_min": float(rms.min()),
        "start_psnr_median_db": float(decibel.median()),
        "unmoved": int((rms < EXACT_RMS).sum()),
    }
