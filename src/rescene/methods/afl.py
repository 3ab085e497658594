"""AFL: ridge regression from features to classes, in closed form (He et al. 2025; in the form of ACIL, Zhuang et al. 2022).

each site and task: the sums of ``moments``: n_c, s_c = sum z for each class, S = sum z z'
server:             W = (S + g I)^-1 [s_1 ... s_C],  score_c(z) = w_c' z

The paper's sites send their own solutions W_k with S_k, which the server combines one after the other; ACIL updates the inverse
task by task. Both end at this W (``tests/methods/test_neighbours.py`` does them step by step), so the sums are sent instead: they
are as long, and the mechanism ``release`` covers them. Only the head differs from ``moments``.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from rescene.core.method_style import GREEN
from rescene.core.verification import Verified
from rescene.functional.discriminant import regularised_solve
from rescene.methods.moments import Moments
from rescene.methods.registry import register


@register
class AFL(Moments):
    """Analytic federated learning: ridge regression on frozen features, solved from the sums of all sites."""

    name: ClassVar[str] = "afl"
    title: ClassVar[str] = "AFL"
    colour: ClassVar[str] = GREEN
    marker: ClassVar[str] = "^"
    paper: ClassVar[str] = "He et al., CVPR 2025; Zhuang et al. (ACIL), NeurIPS 2022"
    verified: ClassVar[tuple[Verified, ...]] = (
        Verified(
            "published code", "tests/oracles/test_oracles.py::test_afl_joined_sites_and_the_ridge_taken_out", "1e-5"
        ),
        Verified("published code", "tests/oracles/test_oracles.py::test_acil_recursion", "1e-9"),
        Verified(
            "hand computation", "tests/methods/test_neighbours.py::test_afl_is_ridge_regression_on_all_images", "1e-9"
        ),
    )

    def _head(
        self, counts: Tensor, sums: Tensor, second: Tensor, ridge: float, floor: float, noise: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return ridge_head(counts, sums, second, ridge, floor)


def ridge_head(counts: Tensor, sums: Tensor, second: Tensor, ridge: float, floor: float = 0.0) -> tuple[Tensor, Tensor]:
    """Weights [C, d] and biases [C], which are 0; classes without images never win.

    ``ridge`` is in units of the mean variance of a feature, and ``floor`` in those of S / n.
    """
    counts, sums, second = counts.double(), sums.double(), second.double()
    n = counts.clamp_min(0).sum().clamp_min(1e-12)
    mean = sums.sum(dim=0) / n
    variance = float((second.diagonal() / n - mean.square()).mean().clamp_min(1e-12))
    solved = regularised_solve(second / n, sums.T / n, ridge * variance, floor)
    return solved.T.contiguous(), torch.where(counts > 0, 0.0, -1e9)
