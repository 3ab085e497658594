"""Was this image among the data? A likelihood ratio for each image, from many condensations with and without it.

LiRA (Carlini et al., "Membership inference attacks from first principles", 2022), with condensations in the place of trained
models. What counts is the share found out while almost nobody is accused wrongly, not the average over easy and hard.

    x  [s, t, k]  k statistics of target t as seen in condensation s; NaN where nothing was uploaded
    z  [s, t]     whether target t was among the data of condensation s

Each shadow is a site that holds a random half of the targets. The attacker sees pictures alone, as the server does, and knows the
law of everything: how uploads look when a target is in and when it is not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rescene.audit.stage import At, Seen, Stage, uploads
from rescene.training import embed


def log_likelihood_ratios(x: Tensor, z: Tensor) -> Tensor:
    """log p(x | in) - log p(x | out) for every pair [s, t]; each condensation is judged by all the others.

    Normal laws, statistics taken as independent, a mean for each target and side, a variance for each side that all targets
    share (few condensations each). A missing statistic says nothing: 0.
    """
    there = torch.isfinite(x)
    value = torch.where(there, x, 0.0).double()

    def log_density(side: Tensor) -> Tensor:
        weight = (side.unsqueeze(2) & there).double()
        others = weight.sum(dim=0) - weight
        mean = ((weight * value).sum(dim=0) - weight * value) / others.clamp(min=1)
        square = (value - mean).square()
        known = weight * (others > 0)
        variance = ((known * square).sum(dim=(0, 1)) / known.sum(dim=(0, 1)).clamp(min=1)).clamp(min=1e-12)
        return torch.where(there & (others > 0), -0.5 * (square / variance + variance.log()), torch.nan)

    return (log_density(z) - log_density(~z)).nan_to_num(nan=0.0).sum(dim=2)


def true_positive_rate(inside: Tensor, outside: Tensor, false_positive_rate: float) -> float:
    """Share of ``inside`` scores above a threshold that at most this share of ``outside`` scores exceeds.

    >>> true_positive_rate(torch.tensor([5., 3., 1.]), torch.tensor([4., 2., 0., 0.]), 0.25)
    0.6666666666666666
    """
    allowed = int(false_positive_rate * len(outside))
    threshold = outside.sort(descending=True).values[allowed]
    return float((inside > threshold).double().mean())


def area_under_curve(inside: Tensor, outside: Tensor) -> float:
    """Chance that a member scores above a non-member; ties count half.

    >>> area_under_curve(torch.tensor([2., 1.]), torch.tensor([1., 0.]))
    0.875
    """
    ordered = outside.sort().values
    below = torch.searchsorted(ordered, inside.contiguous(), right=False)
    not_above = torch.searchsorted(ordered, inside.contiguous(), right=True)
    return float((below + not_above).double().mean() / (2 * len(outside)))


FALSE_POSITIVE_RATES = (0.001, 0.01)
RESAMPLES = 200  # of the targets, for the spread


def membership_attack(
    stage: Stage, real: At, num_shadows: int, num_targets: int, participations: int = 1
) -> dict[str, Any]:
    """What the attack finds out, over all pairs of a shadow and a target; the spread is over draws of the targets."""
    generator = stage.rng.at("shadows").generator()
    per_class = max(1, num_targets // len(stage.task.classes))
    targets = torch.cat([own[:per_class] for own in stage.known.values()])
    member = (torch.rand(num_shadows, len(targets), generator=generator) < 0.5).to(targets.device)
    held = [targets[row] for row in member]
    rounds = [uploads(stage, held, real, turn) for turn in range(participations)]
    shown = [_together(seen) for seen in zip(*rounds, strict=True)]
    ratios = log_likelihood_ratios(_statistics(stage, shown, targets), member)
    return {
        "num_shadows": num_shadows,
        "num_targets": len(targets),
        "num_in": int(member.sum()),
        "num_out": int((~member).sum()),
        "num_pictures": sum(len(labels) for _, labels in shown),
        **_figures(ratios, member),
        "spread": _spread(ratios, member, generator),
    }


def _together(rounds: tuple[Seen, ...]) -> tuple[Tensor, Tensor]:
    return torch.cat([seen.images for seen in rounds]), torch.cat([seen.labels for seen in rounds])


@torch.no_grad()
def _statistics(stage: Stage, shown: list[tuple[Tensor, Tensor]], targets: Tensor) -> Tensor:
    """[shadows, targets, 2]: log distance to the nearest picture of the class, and likeness to the class's mean features."""
    real = stage.transform.normalise(stage.images.pixels[targets])
    labels, features = stage.images.labels[targets], _unit(embed(stage.net, real))
    found = torch.full((len(shown), len(targets), 2), torch.nan, dtype=torch.float64)
    for row, (images, own) in zip(found, shown, strict=True):
        for label in own.unique().tolist():
            mine, pictures = labels == label, images[own == label]
            distance = torch.cdist(real[mine].flatten(1), pictures.flatten(1)).min(dim=1).values
            row[mine.cpu(), 0] = distance.clamp(min=1e-6).log().double().cpu()
            row[mine.cpu(), 1] = (features[mine] @ _unit(embed(stage.net, pictures)).mean(dim=0)).double().cpu()
    return found


def _unit(features: Tensor) -> Tensor:
    return torch.nn.functional.normalize(features, dim=1)


def _figures(ratios: Tensor, member: Tensor) -> dict[str, float]:
    inside, outside = ratios[member.cpu()], ratios[~member.cpu()]
    rates = {f"tpr_at_{fpr:g}": true_positive_rate(inside, outside, fpr) for fpr in FALSE_POSITIVE_RATES}
    return rates | {"auc": area_under_curve(inside, outside)}


def _spread(ratios: Tensor, member: Tensor, generator: torch.Generator) -> dict[str, float]:
    """Standard deviation of each figure when targets are drawn again."""
    num = ratios.shape[1]
    draws = [torch.randint(num, (num,), generator=generator) for _ in range(RESAMPLES)]
    rows = [_figures(ratios[:, draw], member[:, draw.to(member.device)]) for draw in draws]
    return {key: float(torch.tensor([row[key] for row in rows]).std()) for key in rows[0]}
