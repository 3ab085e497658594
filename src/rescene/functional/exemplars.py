"""Images that clients remember: exemplars with their classifier, and draws by leverage.

Exemplars and their classifier (iCaRL: Rebuffi et al., CVPR 2017).

z    logits [n, C], g = sigmoid(z)                    u    logits of the old network [n, C_old], q = sigmoid(u)
y    labels                                           K    images that a site can remember
t    sets of exemplars (a class of a task is one)     m    exemplars of each set, K / t
phi  features of unit length                          P_y  exemplars of class y
t_ic = q_ic  on the old outputs of image i if it hears the old network, else [c = y_i]
L    = mean_i sum_c w_ic BCE(g_ic, t_ic)              w = lambda where t is q, else 1 (Algorithm 3 has lambda = 1)
mu_y = mean of phi over P_y, scaled to unit length    y* = argmin_y ||phi(x) - mu_y|| = argmax_y <mu_y, phi(x)>

Leverage scores and the draws they steer (FedCBDR, Sec. 3.2).

X_k   features of client k, [n_k, d]          X    all of them, one below the other, [n, d]
Q     orthogonal [d, d], shared by clients    P_k  orthogonal [n_k, n_k], private to client k
X'_k = P_k X_k Q   what the server sees       U'   left singular vectors of X' = concat_k X'_k
tau_j = ||row_j(P_k^T U'_k)||^2 = x_j (X^T X)^+ x_j^T    leverage of image j: in [0, 1], summing to the rank of X

Both rotations cancel: U' of the rotated matrix is diag(P_k) U, and (X'^T X')^+ = Q^T (X^T X)^+ Q. The scores are therefore
those of the features lying in one place, although nobody put them there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

NOT_HELD = -1e4  # score of a class without an exemplar: below that of every class that has one


def distilled_binary_loss(
    logits: Tensor,
    labels: Tensor,
    old_logits: Tensor | None,
    hears: Tensor,
    weight: float = 1.0,
    reduction: str = "sum",
) -> Tensor:
    """L: logits [n, C], labels [n], old_logits [n, C_old] or None, hears BoolTensor [n] -> one number.

    ``hears`` says which images take the old network's answers in the place of their label. ``reduction`` averages over images and
    sums (``sum``) or averages (``mean``) over outputs.

    >>> one = torch.zeros(1, 2), torch.tensor([1]), torch.zeros(1, 1), torch.tensor([True])
    >>> round(distilled_binary_loss(*one).item(), 4)  # 2 ln 2: all is uncertain, targets one half and one
    1.3863
    """
    outputs = torch.arange(logits.shape[1], device=logits.device)
    targets = (labels.unsqueeze(1) == outputs).to(logits)
    weights = torch.ones_like(logits)
    if old_logits is not None:
        num_new = logits.shape[1] - old_logits.shape[1]
        heard = hears.unsqueeze(1) & (outputs < old_logits.shape[1])
        targets = torch.where(heard, F.pad(torch.sigmoid(old_logits.detach()), (0, num_new)), targets)
        weights = torch.where(heard, weight, weights)
    terms = weights * F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    return terms.mean() if reduction == "mean" else terms.sum(dim=1).mean()


def exemplars_per_set(memory: int, num_sets: int) -> int:
    """m, the whole part of K / t; 0 without sets.

    >>> exemplars_per_set(2000, 30)
    66
    """
    return memory // num_sets if num_sets else 0


def first_of_each(sets: Tensor, m: int) -> Tensor:
    """Which members are among the first m of their set: numbers of the sets [n] -> BoolTensor [n] (Algorithm 5).

    >>> first_of_each(torch.tensor([7, 7, 3, 7, 3]), 2).tolist()
    [True, True, True, False, True]
    """
    same = sets.unsqueeze(1) == sets.unique()
    places: Tensor = same.cumsum(dim=0)[same]
    return places <= m


def class_sums(features: Tensor, labels: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of unit-length features and numbers of images: [n, d], [n], classes [c] -> ([c, d], int64 [c])."""
    own = labels.unsqueeze(0) == classes.unsqueeze(1)  # [c, n]
    return own.to(features) @ F.normalize(features, dim=1), own.sum(dim=1)


def nearest_mean_head(sums: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The classifier by the nearest mean as a linear head: sums [C, d], counts [C] -> weights [C, d], biases [C].

    phi(x) and mu_y have unit length, so the nearest mean is the one of the largest product, and the length of the features
    changes no order: the head may read them as they are.

    >>> nearest_mean_head(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([9, 0]))
    (tensor([[0.6000, 0.8000],
            [0.0000, 0.0000]]), tensor([     0., -10000.]))
    """
    weights = F.normalize(sums, dim=1)
    return weights, torch.where(counts > 0, torch.zeros_like(weights[:, 0]), NOT_HELD)


# Singular values below this fraction of the largest are rounding of float32 features: they do not count as rank.
RANK_TOLERANCE = 1e-6
# Stands for a leverage of zero: such an image is drawn when nothing better is left (otherwise with chance about 1e-12).
SMALLEST_SCORE = 1e-12


def random_orthogonal(size: int, generator: torch.Generator) -> Tensor:
    """A uniformly (Haar) distributed orthogonal matrix, float64 [size, size], on the generator's device."""
    gaussian = torch.randn(size, size, generator=generator, dtype=torch.float64, device=generator.device)
    orthogonal, triangle = torch.linalg.qr(gaussian)
    signs = torch.where(triangle.diagonal() < 0, -1.0, 1.0)
    uniform: Tensor = orthogonal * signs  # QR alone prefers some signs
    return uniform


def left_vectors(x: Tensor) -> Tensor:
    """U of the thin SVD, only the columns that carry rank: [n, d] -> [n, rank]. No rows or all zeros give [n, 0].

    The full U is square and orthogonal, so that all its rows have length 1: it would make all scores equal.
    """
    if x.numel() == 0:
        return x.new_zeros(len(x), 0)
    u, s, _ = torch.linalg.svd(x, full_matrices=False)
    ranked: Tensor = u[:, (s > RANK_TOLERANCE * s.max()) & (s > 0)]
    return ranked


def row_leverage(u: Tensor) -> Tensor:
    """||row_j(U)||^2: [n, rank] -> [n].

    >>> row_leverage(torch.tensor([[0.6, 0.0], [0.8, 0.0], [0.0, 1.0]], dtype=torch.float64)).tolist()
    [0.36, 0.6400000000000001, 1.0]
    """
    return u.square().sum(dim=1)


def gram_inverse(gram: Tensor) -> Tensor:
    """Moore-Penrose inverse of a symmetric positive semi-definite matrix: [d, d] -> [d, d]; zero for zero."""
    values, vectors = torch.linalg.eigh(gram)
    kept = (values > RANK_TOLERANCE**2 * values.max()) & (values > 0)  # eigenvalues are squared singular values
    basis = vectors[:, kept]
    inverse: Tensor = (basis / values[kept]) @ basis.T
    return inverse


def form_leverage(x: Tensor, inverse: Tensor) -> Tensor:
    """x_j G x_j^T for every row: [n, d], [d, d] -> [n]."""
    return ((x @ inverse) * x).sum(dim=1)


def draw_keys(scores: Tensor, generator: torch.Generator) -> Tensor:
    """One random key per image; the q largest keys are q draws without replacement with p ~ score.

    scores [n] -> float64 [n]. key = log score + Gumbel noise: the largest key falls on image j with probability
    score_j / sum score, and what is left again follows the same law (Yellott 1977; Efraimidis & Spirakis 2006). A draw
    thus needs no identities: whoever knows the keys can tell everybody the key from which on an image is taken.
    """
    noise = torch.rand(len(scores), generator=generator, dtype=torch.float64, device=generator.device)
    gumbel = -torch.log(-torch.log(noise.clamp(min=1e-300)))
    return scores.double().clamp(min=SMALLEST_SCORE).log() + gumbel.to(scores.device)


def independent_draws(scores: Tensor, num_draws: int, generator: torch.Generator) -> Tensor:
    """Which images come up in ``num_draws`` draws with replacement, p ~ score: [n] -> bool [n]; none of no images.

    >>> independent_draws(torch.tensor([1.0, 0.0, 1.0]), 50, torch.Generator().manual_seed(0)).tolist()
    [True, False, True]
    """
    if not len(scores):
        return scores.bool()
    chances = scores.double().clamp(min=SMALLEST_SCORE).to(generator.device)
    places = torch.multinomial(chances, num_draws, replacement=True, generator=generator)
    return (torch.bincount(places, minlength=len(scores)) > 0).to(scores.device)


class Cut(NamedTuple):
    """Per class: the smallest key that is still taken, the candidates, and the sum of their scores. All float64 [C]."""

    threshold: Tensor
    num_candidates: Tensor
    mass: Tensor


def class_cut(keys: Tensor, scores: Tensor, labels: Tensor, budget: int, num_classes: int) -> Cut:
    """Where to cut each class so that exactly min(budget, candidates) images remain.

    keys, scores, labels [n]. A class without candidates has threshold +inf.
    """
    threshold = keys.new_full((num_classes,), torch.inf)
    for label in torch.unique(labels).tolist():
        own = keys[labels == label]
        threshold[label] = own.topk(min(budget, len(own))).values[-1]
    count = torch.bincount(labels, minlength=num_classes).to(keys)
    return Cut(threshold, count, keys.new_zeros(num_classes).index_add(0, labels, scores.to(keys)))


def importance_weights(scores: Tensor, labels: Tensor, budget: int, cut: Cut) -> Tensor:
    """sqrt(1 / (n_c p)) for images drawn with p = score / mass of their class of n_c candidates. [n] -> float64 [n].

    The paper's sqrt(1 / (n_s p)), n_s draws, over the value it would have if all p were equal: an image that was likely
    to be drawn counts less than 1, an unlikely one more, and the loss keeps its scale. 1 where the whole class is taken,
    since nothing was drawn.
    """
    mean_score = (cut.mass / cut.num_candidates.clamp(min=1))[labels].clamp(min=SMALLEST_SCORE)
    weights = (mean_score / scores.double().clamp(min=SMALLEST_SCORE)).sqrt()
    return torch.where(cut.num_candidates[labels] > budget, weights, torch.ones_like(weights))
