"""Frozen transformers that learn little: prompts, low-rank changes, prototypes.

Prompts that an image mixes for itself (CODA-Prompt: Smith et al., CVPR 2023), and the loss that Fed-CPrompt learns them with.

q      features of an image from the network without prompts [d]
K, A   a key and an attention vector for each of M prompts, [M, d]         P   the prompts [M, length, width]
w_m    = cos(q * softmax(A_m), K_m), softmax over the d entries            p   = sum_m w_m P_m, the prompt of the image [length, width]
z      features with the prompts that a site learns now                    z_g the same with the prompts that it received
z_o    features with the prompts of earlier tasks alone
C2L    = max(0, sum_i (pull ||z - z_g||^2 - push ||z - z_o||^2) + margin), over the images i of a batch

Low-rank changes of attention layers (LoRA: Hu et al., ICLR 2022; PILoRA: Guo et al., ECCV 2024).

W    weights of a layer that gives queries, keys and values, [3 d, d]
A    [2, r, d], B [2, d, r]: the pair of queries and that of values; keys are not changed
W + [B_q A_q; 0; B_v A_v] is the layer with the change

A learned prototype for each class, and the nearest one as the answer (PILoRA: Guo et al., ECCV 2024).

f    features of an image [d]                          m_c  prototype of class c [d]
d_c  = sqrt(||f - m_c||^2 / d)                         p_c  = exp(-d_c) / sum_j exp(-d_j)
L    = mean_i ( -log p_{y_i} + lambda d_{y_i} )        distance-based cross-entropy, and what pulls features to their prototype
u_j  mean feature of the class at site j               D_k  = sum_j ||m_k - u_j||, of the prototype that site k learned
w    = softmax(s / tau), s = (1 / D - min 1 / D) / (max 1 / D - min 1 / D)
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

LEAST_LENGTH = 1e-24  # of a squared length: the square root has no slope at 0


def prompt_weights(query: Tensor, attention: Tensor, keys: Tensor) -> Tensor:
    """w: queries [n, d], A and K [..., M, d] -> [..., n, M].

    <q * a, k> = <q, a * k> and ||q * a||^2 = <q^2, a^2>, so that no tensor of n M d numbers is needed.

    >>> prompt_weights(torch.tensor([[3.0, 4.0]]), torch.zeros(1, 2), torch.tensor([[0.0, 2.0]])).item()  # 4 / 5
    0.800000011920929
    """
    a = attention.softmax(dim=-1)
    along = query @ (a * F.normalize(keys, dim=-1)).mT
    length = (query.square() @ a.square().mT).clamp(min=LEAST_LENGTH).sqrt()
    return along / length


def mixed_prompts(weights: Tensor, prompts: Tensor) -> Tensor:
    """p: weights [..., n, M] and P [..., M, length, width] -> [..., n, length, width].

    >>> mixed_prompts(torch.tensor([[2.0, -1.0]]), torch.tensor([[[1.0, 1.0]], [[0.0, 3.0]]])).tolist()
    [[[2.0, -1.0]]]
    """
    flat = weights @ prompts.flatten(start_dim=-2)
    return flat.view(*flat.shape[:-1], *prompts.shape[-2:])


def orthogonal_rows(num: int, size: int, generator: torch.Generator) -> Tensor:
    """``num`` random rows of length 1 that are orthogonal to each other; if there are more than entries, the columns are.

    >>> rows = orthogonal_rows(2, 5, torch.Generator().manual_seed(0))
    >>> torch.allclose(rows @ rows.T, torch.eye(2), atol=1e-6)
    True
    """
    return torch.nn.init.orthogonal_(torch.empty(num, size, device=generator.device), generator=generator)


def contrastive_continual_loss(
    z: Tensor, received: Tensor, earlier: Tensor | None, pull: float, push: float, margin: float
) -> Tensor:
    """C2L of features [n, d]; without an earlier task only what pulls: pull sum_i ||z - z_g||^2.

    >>> z, g, o = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 2.0]])
    >>> [contrastive_continual_loss(z, g, other, 3.0, 0.5, 1.5).item() for other in (o, None)]  # 3 * 1 - 0.5 * 4 + 1.5, and 3 * 1
    [2.5, 3.0]
    """
    near = pull * (z - received).square().sum()
    if earlier is None:
        return near
    return (near - push * (z - earlier).square().sum() + margin).relu()


def changed_layer(weight: Tensor, pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """W [3 d, d] with the changes of pairs (A [2, r, d], B [2, d, r]) added up.

    >>> a, b = torch.tensor([[[2.0]], [[3.0]]]), torch.tensor([[[5.0]], [[7.0]]])
    >>> changed_layer(torch.ones(3, 1), [(a, b)]).flatten().tolist()
    [11.0, 1.0, 22.0]
    """
    changed, d = weight.clone(), weight.shape[1]
    for a, b in pairs:
        changed[:d] += b[0] @ a[0]
        changed[2 * d :] += b[1] @ a[1]
    return changed


def change_of_output(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """What the pair adds to the output of its layer for inputs x [..., d]: [..., 3 d]."""
    queries, values = (x @ a[kind].T @ b[kind].T for kind in (0, 1))
    return torch.cat([queries, torch.zeros_like(queries), values], dim=-1)


def overlap(a: Tensor, earlier: Iterable[Tensor]) -> Tensor:
    """sum_i |A_i A^T|_1 over the pairs of earlier tasks, for A and A_i [..., r, d]: 0 if all rows are orthogonal.

    >>> overlap(torch.eye(2)[:1], [torch.eye(2)[1:], torch.tensor([[-3.0, 1.0]])]).item()
    3.0
    """
    return sum(((other @ a.mT).abs().sum() for other in earlier), a.new_zeros(()))


LEAST_DISTANCE = 1e-12  # of a squared distance: the square root has no slope at 0


def prototype_distances(features: Tensor, prototypes: Tensor) -> Tensor:
    """d: features [n, d], prototypes [C, d] -> [n, C].

    >>> prototype_distances(torch.tensor([[3.0, 4.0]]), torch.zeros(1, 2)).square()
    tensor([[12.5000]])
    """
    squares = features.square().sum(dim=1, keepdim=True) + prototypes.square().sum(dim=1)
    squared = squares - 2 * features @ prototypes.T
    return (squared / features.shape[1]).clamp(min=LEAST_DISTANCE).sqrt()


def prototype_loss(distances: Tensor, labels: Tensor, weight: float) -> Tensor:
    """L for distances [n, C] and labels [n]; ``weight`` is lambda."""
    own = distances.gather(1, labels.unsqueeze(1))
    return F.cross_entropy(-distances, labels) + weight * own.mean()


def prototype_weights(prototypes: Tensor, means: Tensor, temperature: float) -> Tensor:
    """w: prototypes [K, d] of one class and its mean features [J, d] -> [K], which add up to 1.

    Equal where no site has an image of the class, and where all prototypes are as far away.

    >>> prototype_weights(torch.tensor([[1.0], [2.0]]), torch.zeros(1, 1), 1.0).tolist() == [
    ...     *torch.tensor([1.0, 0.0]).softmax(dim=0).tolist()
    ... ]
    True
    """
    if len(means) == 0:
        return prototypes.new_full((len(prototypes),), 1 / len(prototypes))
    # not torch.cdist, whose fast way loses digits of small distances
    far = (prototypes.unsqueeze(1) - means).norm(dim=2).sum(dim=1)
    near = 1 / far.clamp(min=LEAST_DISTANCE)
    span = near.max() - near.min()
    score = (near - near.min()) / span if float(span) > 0 else torch.zeros_like(near)
    return (score / temperature).softmax(dim=0)


def nearest_prototype_head(prototypes: Tensor) -> tuple[Tensor, Tensor]:
    """(weight [C, d], bias [C]) of a linear head whose largest output is the nearest prototype.

    Its outputs are -||f - m_c||^2 / d but for ||f||^2 / d, which all classes share.
    """
    d = prototypes.shape[1]
    return 2 * prototypes / d, -prototypes.square().sum(dim=1) / d
