"""Prompts that an image mixes for itself (CODA-Prompt: Smith et al., CVPR 2023), and the loss that Fed-CPrompt learns them with.

q      features of an image from the network without prompts [d]
K, A   a key and an attention vector for each of M prompts, [M, d]         P   the prompts [M, length, width]
w_m    = cos(q * softmax(A_m), K_m), softmax over the d entries            p   = sum_m w_m P_m, the prompt of the image [length, width]
z      features with the prompts that a site learns now                    z_g the same with the prompts that it received
z_o    features with the prompts of earlier tasks alone
C2L    = max(0, sum_i (pull ||z - z_g||^2 - push ||z - z_o||^2) + margin), over the images i of a batch
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

LEAST = 1e-24  # of a squared length: the square root has no slope at 0


def prompt_weights(query: Tensor, attention: Tensor, keys: Tensor) -> Tensor:
    """w: queries [n, d], A and K [..., M, d] -> [..., n, M].

    <q * a, k> = <q, a * k> and ||q * a||^2 = <q^2, a^2>, so that no tensor of n M d numbers is needed.

    >>> prompt_weights(torch.tensor([[3.0, 4.0]]), torch.zeros(1, 2), torch.tensor([[0.0, 2.0]])).item()  # 4 / 5
    0.800000011920929
    """
    a = attention.softmax(dim=-1)
    along = query @ (a * F.normalize(keys, dim=-1)).mT
    length = (query.square() @ a.square().mT).clamp(min=LEAST).sqrt()
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
