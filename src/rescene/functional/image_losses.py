"""What painted images must satisfy: losses of networks and generators that make images.

Images out of a network alone: what synthetic images must satisfy (DeepInversion, CVPR 2020; TARGET, ICCV 2023).

m, v    mean and variance per channel of what flows into a BatchNorm layer     m^, v^   its running statistics
mu      momentum of the average of m and v over synthesis rounds               p, q     outputs of teacher and student
L_bn  = sum over layers of ||v^ - v||_2 + ||m^ - m||_2
L_div = mean over layers and channels of KL(N(m^, v^) || N(m, v))              MFCL (Babakniya et al., NeurIPS 2023)
L_ie  = 1 - H(mean of p over the batch) / ln C                                 0: every class is painted equally often
L_pr  = mean (x - Gaussian blur of x)^2                                        0: no fine noise
L_adv = -(1/n) sum_n KL(p_n || q_n) [argmax p_n = argmax q_n]

A GAN whose critic also names the class (AC-GAN: Odena et al., ICML 2017), and what FedCIL adds (Qi et al., ICLR 2023).

s   score of a picture before the sigmoid: is it real      z   logits of its class, y its label
L_real = softplus(-s) + CE(z, y)      L_fake = softplus(s) + CE(z, y)      means over pictures
critic: L_real over real pictures + L_fake over painted ones      generator: L_real over painted ones
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

TINY = 1e-8  # added to variances
BLUR = 2  # pixels to each side that a blur looks at
MeanAndVariance = tuple[Tensor, Tensor]  # mean [c] and variance [c]


def channel_moments(x: Tensor) -> MeanAndVariance:
    """Mean and biased variance of each channel over batch and space: [n, c, h, w] -> ([c], [c]).

    >>> mean, variance = channel_moments(torch.tensor([1.0, 3.0]).view(2, 1, 1, 1))
    >>> mean.item(), variance.item()
    (2.0, 1.0)
    """
    variance, mean = torch.var_mean(x, dim=(0, 2, 3), correction=0)
    return mean, variance


def blend(current: MeanAndVariance, average: MeanAndVariance | None, momentum: float) -> MeanAndVariance:
    """mu * average + (1 - mu) * current, entry by entry; ``current`` itself while there is no average."""
    if average is None:
        return current
    mean, variance = (momentum * old + (1 - momentum) * new for new, old in zip(current, average, strict=True))
    return mean, variance


def statistics_loss(moments: MeanAndVariance, running: MeanAndVariance) -> Tensor:
    """One layer's part of L_bn: the distances, not squared, of means and of variances. 0 with gradient 0 if they agree.

    >>> statistics_loss((torch.tensor([3.0, 4.0]), torch.ones(2)), (torch.zeros(2), torch.ones(2))).item()
    5.0
    """
    norm = torch.linalg.vector_norm
    distance: Tensor = norm(running[0] - moments[0]) + norm(running[1] - moments[1])
    return distance


def divergence_loss(moments: MeanAndVariance, running: MeanAndVariance) -> Tensor:
    """One layer's part of L_div: how far the batch's Gaussians are from the remembered ones, mean over channels.

    >>> still, wide = (torch.zeros(1), torch.ones(1)), (torch.zeros(1), torch.full((1,), 4.0))
    >>> divergence_loss(still, still).item(), round(divergence_loss(wide, still).item(), 4)  # ln 2 - (1 - 1 / 4) / 2
    (0.0, 0.3181)
    """
    (mean, variance), (kept_mean, kept_variance) = moments, running
    variance, kept_variance = variance + TINY, kept_variance + TINY
    spread = 0.5 * (variance / kept_variance).log()
    distance: Tensor = spread - 0.5 * (1 - (kept_variance + (kept_mean - mean).square()) / variance)
    return distance.mean()


def evenness_loss(logits: Tensor) -> Tensor:
    """L_ie of a batch: logits [n, C] -> one number from 0 (all classes alike) to 1 (one class only); 0 for a single class.

    >>> evenness_loss(torch.tensor([[50.0, 0.0], [0.0, 50.0]])).abs().item() < 1e-6
    True
    """
    if logits.shape[1] == 1:
        return logits.sum() * 0.0
    share = logits.softmax(dim=1).mean(dim=0)
    return 1 + torch.xlogy(share, share).sum() / math.log(logits.shape[1])


def roughness_loss(x: Tensor) -> Tensor:
    """L_pr: the mean squared difference of pictures [n, c, h, w] (sides of 3 at least) and their blur of deviation 1."""
    places = torch.arange(-BLUR, BLUR + 1, dtype=x.dtype, device=x.device)
    line = torch.exp(-places.square() / 2)
    kernel = torch.outer(line, line) / line.sum() ** 2
    channels = x.shape[1]
    weight = kernel.expand(channels, 1, -1, -1)
    blurred = F.conv2d(F.pad(x, (BLUR,) * 4, mode="reflect"), weight, groups=channels)
    return F.mse_loss(x, blurred)


def adversarial_loss(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """L_adv: minus the divergence of the student from the teacher, over the images on which both choose the same class.

    [n, C], [n, C] -> one number, divided by n however many images count. Minimising it looks for images that the student
    gets right but does not understand as the teacher does; where they already disagree there is nothing to look for.
    Gradients flow through both networks, since both see the images.
    """
    p, log_p, log_q = teacher_logits.softmax(1), F.log_softmax(teacher_logits, 1), F.log_softmax(student_logits, 1)
    divergence = (p * (log_p - log_q)).sum(dim=1)
    agree = teacher_logits.argmax(dim=1) == student_logits.argmax(dim=1)
    return -(divergence * agree).mean()


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
