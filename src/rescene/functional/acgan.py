"""A GAN whose critic also names the class (AC-GAN: Odena et al., ICML 2017), and what FedCIL adds (Qi et al., ICLR 2023).

s   score of a picture before the sigmoid: is it real      z   logits of its class, y its label
L_real = softplus(-s) + CE(z, y)      L_fake = softplus(s) + CE(z, y)      means over pictures
critic: L_real over real pictures + L_fake over painted ones      generator: L_real over painted ones
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def acgan_loss(scores: Tensor, logits: Tensor, labels: Tensor, *, is_real: bool) -> Tensor:
    """L_real or L_fake of scores [n], logits [n, C] and labels [n]: one number.

    >>> round(acgan_loss(torch.zeros(1), torch.zeros(1, 2), torch.tensor([0]), is_real=True).item(), 4)  # 2 ln 2
    1.3863
    """
    return F.softplus(-scores if is_real else scores).mean() + F.cross_entropy(logits, labels)


def agreement_loss(logits: Tensor, target_logits: Tensor) -> Tensor:
    """KL(softmax(target) || softmax(logits)), mean over the n rows. The target learns too, as in FedCIL's official code.

    >>> agreement_loss(torch.zeros(1, 3), torch.ones(1, 3)).item()
    0.0
    """
    return F.kl_div(logits.log_softmax(dim=1), target_logits.log_softmax(dim=1), reduction="batchmean", log_target=True)


def conditioned(noise: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """The generator's input [n, k + C]: noise [n, k], then one 1 at the place of the label.

    >>> conditioned(torch.tensor([[0.5]]), torch.tensor([1]), 3).tolist()
    [[0.5, 0.0, 1.0, 0.0]]
    """
    return torch.cat([noise, F.one_hot(labels, num_classes).to(noise)], dim=1)


def balanced_picks(labels: Tensor, num: int, generator: torch.Generator) -> Tensor:
    """``num`` places in ``labels``, with repetition: every class that occurs is as likely, and so is every place of a class."""
    _, place, counts = labels.unique(return_inverse=True, return_counts=True)
    chances = (1.0 / counts.float())[place].to(generator.device)
    return torch.multinomial(chances, num, replacement=True, generator=generator).to(labels.device)
