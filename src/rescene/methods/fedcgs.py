"""FedCGS: class means and one covariance of all features, a Gaussian for each class (Guan et al. 2025).

each site and task: the sums of ``moments``: n_c, s_c = sum z for each class, S = sum z z'
server:             m = sum_c s_c / n,  T = (S - n m m') / (n - 1),  m_c = s_c / n_c
                    score_c(z) = m_c' (T + g I)^-1 z - m_c' (T + g I)^-1 m_c / 2 + log(n_c / n)

``moments`` takes the covariance within the classes and no prior: only the head differs.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from rescene.core.method_style import PURPLE
from rescene.core.verification import Verified
from rescene.functional.discriminant import regularised_solve
from rescene.methods.moments import Moments
from rescene.methods.registry import register


@register
class FedCGS(Moments):
    """One Gaussian for each class over frozen features, all with one covariance, from the sums of all sites."""

    name: ClassVar[str] = "fedcgs"
    title: ClassVar[str] = "FedCGS"
    colour: ClassVar[str] = PURPLE
    marker: ClassVar[str] = "s"
    paper: ClassVar[str] = "Guan et al., AAAI 2025"
    verified: ClassVar[tuple[Verified, ...]] = (
        Verified(
            "published code",
            "tests/oracles/test_oracles.py::test_fedcgs_scores_differ_by_one_number_per_image",
            "1e-4 of the scores, up to what all classes share",
        ),
        Verified(
            "hand computation",
            "tests/methods/test_neighbours.py::test_fedcgs_is_a_gaussian_per_class_with_the_covariance_of_all",
            "to rounding",
        ),
    )

    def _head(
        self, counts: Tensor, sums: Tensor, second: Tensor, ridge: float, floor: float, noise: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return gaussian_head(counts, sums, second, ridge, floor)


def gaussian_head(
    counts: Tensor, sums: Tensor, second: Tensor, ridge: float, floor: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Weights [C, d] and biases [C]; classes without images never win. ``ridge`` is in units of the mean variance."""
    counts, sums, second = counts.double(), sums.double(), second.double()
    present = counts > 0
    n = counts[present].sum().clamp_min(1e-12)
    mean = sums[present].sum(dim=0) / n
    total = (second - n * mean.outer(mean)) / (n - 1).clamp_min(1.0)
    variance = float(total.diagonal().mean().clamp_min(1e-12))
    means = torch.where(present[:, None], sums / counts.clamp_min(1e-12)[:, None], 0.0)
    # m' T^-1 z and its bias are the same for all classes; they are left out, because they dwarf the rest with few images
    solved = regularised_solve(total, (means - mean).T, ridge * variance, floor)
    bias = (counts.clamp_min(1e-12) / n).log() - 0.5 * ((means + mean).T * solved).sum(dim=0)
    return solved.T.contiguous(), torch.where(present, bias, -1e9)
