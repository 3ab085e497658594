"""Features and logits of many images, in large batches, without gradients and without changing the network."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

BATCH = 512  # on a CPU larger batches only cost memory


@torch.no_grad()
def _in_batches(net: nn.Module, function: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    was_training = net.training
    net.eval()
    parts = [function(batch) for batch in images.split(BATCH)] or [function(images)]
    net.train(was_training)
    return torch.cat(parts)


def embed(net: nn.Module, images: Tensor, prepare: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
    """phi(x) for every image, in eval mode: [n, 3, H, W] -> [n, d]. ``prepare`` turns a stored batch into network input."""
    return _in_batches(net, lambda batch: net.features(prepare(batch)), images)  # type: ignore[operator]


def class_scores(net: nn.Module, images: Tensor, prepare: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
    """Logits for every image, in eval mode: [n, 3, H, W] -> [n, C]. ``prepare`` as in :func:`embed`."""
    return _in_batches(net, lambda batch: net(prepare(batch)), images)
