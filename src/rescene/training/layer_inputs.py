"""What goes into the layers of a network: second moments of all inputs, layer by layer, in one pass over the images."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Layers = Mapping[str, nn.Module]  # by the name of the layer's weight


def input_layers(net: nn.Module) -> dict[str, nn.Module]:
    """The layers whose output is W x for every input x: linear ones and ungrouped convolutions that pad with zeros."""
    return {f"{name}.weight": module for name, module in net.named_modules() if _is_plain(module)}


def _is_plain(module: nn.Module) -> bool:
    if type(module) is nn.Conv2d:
        return module.groups == 1 and module.padding_mode == "zeros" and not isinstance(module.padding, str)
    return type(module) is nn.Linear


def input_columns(layer: nn.Module, x: Tensor) -> Tensor:
    """The inputs of a layer as columns, [d, number]: of a convolution the patches under its kernel, as its weights see them.

    >>> input_columns(nn.Conv2d(2, 5, 3, padding=1), torch.zeros(4, 2, 6, 6)).shape
    torch.Size([18, 144])
    """
    if not isinstance(layer, nn.Conv2d):
        return x.reshape(-1, x.shape[-1]).T
    assert not isinstance(layer.padding, str)
    patches = F.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride)  # [n, d, places]
    return patches.transpose(0, 1).flatten(1)


@torch.no_grad()
def input_grams(net: nn.Module, layers: Layers, batches: Iterable[Tensor]) -> dict[str, Tensor]:
    """X X^T of the inputs X of each of these layers of ``net``, float64 [d, d], with the network in eval mode."""
    grams: dict[str, Tensor] = {}

    def meet(name: str, layer: nn.Module, x: Tensor) -> None:
        columns = input_columns(layer, x).double()
        product = columns @ columns.T
        grams[name] = grams[name] + product if name in grams else product

    handles = [
        layer.register_forward_pre_hook(lambda layer, inputs, name=name: meet(name, layer, inputs[0]))
        for name, layer in layers.items()
    ]
    net.eval()
    try:
        for x in batches:
            net(x)
    finally:
        for handle in handles:
            handle.remove()
    return grams
