"""How an epoch is cut into minibatches."""

from __future__ import annotations

from torch import Tensor


def minibatches(order: Tensor, size: int, smallest: int = 2) -> tuple[Tensor, ...]:
    """``order`` [n > 0] in parts of ``size``. A last part of fewer than ``smallest`` is left out, unless it is the only one.

    BatchNorm normalises by the images of a batch: it needs two, and the statistics of a few are noisy.
    """
    if len(order) == 0:
        raise ValueError("an epoch without images has no minibatch")
    parts: tuple[Tensor, ...] = order.split(size)
    return parts[: num_minibatches(len(order), size, smallest)]


def num_minibatches(num_images: int, size: int, smallest: int = 2) -> int:
    """How many minibatches :func:`minibatches` cuts an epoch of so many images into; none for no image.

    >>> [num_minibatches(n, 4) for n in (0, 1, 4, 5, 6, 8)], [num_minibatches(n, 4, smallest=4) for n in (3, 4, 7, 8)]
    ([0, 1, 1, 1, 2, 2], [1, 1, 1, 2])
    """
    whole, rest = divmod(num_images, size)
    return whole + (rest > 0 and (whole == 0 or rest >= smallest))
