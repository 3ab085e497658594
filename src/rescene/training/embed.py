"""Features and logits of many images, in large batches, without gradients and without changing the network."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from rescene.nets import alike, is_rehearsal

BATCH = {"cpu": 128, "cuda": 2048}  # images at once: what fits the cache, or the memory


@torch.no_grad()
def _in_batches(net: nn.Module, function: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    was_training = net.training
    net.eval()
    if images.is_cuda:
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        images = images.contiguous(memory_format=torch.channels_last)
    batches = images.split(BATCH[images.device.type]) or (images,)
    if is_rehearsal():  # only what the passes cost is asked for: one batch of each size stands for the others
        of_size = {len(batch): function(batch) for batch in alike(batches)}
        parts = [of_size[len(batch)] for batch in batches]
    else:
        parts = [function(batch) for batch in batches]
    net.train(was_training)
    return torch.cat(parts)


def embed(net: nn.Module, images: Tensor, prepare: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
    """phi(x) for every image, in eval mode: [n, 3, H, W] -> [n, d]. ``prepare`` turns a stored batch into network input."""
    return _in_batches(net, lambda batch: net.features(prepare(batch)), images)  # type: ignore[operator]


def class_scores(net: nn.Module, images: Tensor, prepare: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
    """Logits for every image, in eval mode: [n, 3, H, W] -> [n, C]. ``prepare`` as in :func:`embed`."""
    return _in_batches(net, lambda batch: net(prepare(batch)), images)
