"""Gradients of every image on its own out of one backward pass, for networks made of ordinary layers.

A layer's gradient for image n needs no more than what went into the layer and what came back to it for that image
(Goodfellow, 2015; Rochette, Manoel, Tramel, 2019). It is made layer by layer on the way back and handed on, so that the
gradients of the largest layer are all that is held at a time. Images must not mix: BatchNorm in eval mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from rescene.functional import importance

LAYERS = (nn.Conv2d, nn.Linear, nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm)
GRADIENT_BYTES = {"cpu": 2**28, "cuda": 2**31}  # for the gradients held at a time
Take = Callable[[str, Tensor], object]  # a parameter's name and its gradients [n, *shape]
Meet = Callable[[str, nn.Module, Tensor, Tensor], object]  # a layer, what went in and the gradient of what came out
SumOfLosses = Callable[[Tensor, Tensor], Tensor]  # logits [n, C], labels [n] -> sum over the images


def is_layered(net: nn.Module) -> bool:
    """Whether all parameters belong to layers whose gradients are known here. (A ViT has tokens of its own.)"""
    if not getattr(getattr(net, "body", None), "layered", True):  # a network of the user's that uses a layer twice, say
        return False
    layers = {name for name, module in net.named_modules() if isinstance(module, LAYERS)}
    return all(name.rpartition(".")[0] in layers for name, _ in net.named_parameters())


def image_gradients(net: nn.Module, x: Tensor, y: Tensor, loss: SumOfLosses, take: Take) -> None:
    """``take`` gets the gradient of each image's loss in every parameter, last layers first. Each layer is used once."""

    def pass_on(name: str, layer: nn.Module, seen: Tensor, g: Tensor) -> None:
        for kind, value in _gradients(layer, seen, g).items():
            take(f"{name}.{kind}", value)

    _walk_back(net, x, y, loss, pass_on)


def _walk_back(net: nn.Module, x: Tensor, y: Tensor, loss: SumOfLosses, meet: Meet) -> None:
    """``meet`` every layer on the way back of one backward pass."""
    modules = [(name, module) for name, module in net.named_modules() if isinstance(module, LAYERS)]
    handles = [module.register_forward_hook(_on_the_way_back(name, meet)) for name, module in modules]
    try:
        x = x.detach().requires_grad_()  # so that the way back passes every layer
        torch.autograd.grad(loss(net(x), y), x)
    finally:
        for handle in handles:
            handle.remove()


def gradient_norms(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """||grad CE(f(x_i), y_i)||_2 of every image, over all parameters together: [n]."""
    if not is_layered(net):
        parameters = {name: p.detach() for name, p in net.named_parameters()}
        with sdpa_kernel(SDPBackend.MATH):  # vmap would call the fused attention kernels image by image
            return importance.gradient_norms(lambda v, x: functional_call(net, v, (x,)), parameters, x, y)
    parts = [_squared_norms(net, x[rows], y[rows]) for rows in chunks(net, len(x), x.device)]
    return torch.cat([x.new_zeros(0), *parts]).sqrt()


def _squared_norms(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    total = x.new_zeros(len(x))
    _walk_back(net, x, y, _cross_entropies, lambda _, layer, seen, g: total.add_(_layer_norms(layer, seen, g)))
    return total


def _layer_norms(layer: nn.Module, x: Tensor, g: Tensor) -> Tensor:
    """||gradient in the layer's parameters||^2 of every image: [n]."""
    if isinstance(layer, nn.Conv2d) and layer.bias is None:
        width, size, places = len(layer.weight), layer.weight[0].numel(), g[0, 0].numel()
        if places * (size + width) < size * width:
            # ||sum_t g_t a_t^T||^2 = sum_{s, t} <a_s, a_t> <g_s, g_t>: without making the gradient, which is larger
            patches, back = _patches(layer, x), g.flatten(2)
            return (torch.bmm(patches.mT, patches) * torch.bmm(back.mT, back)).sum(dim=(1, 2))
    return torch.stack([_squared_sum(v.flatten(1), dim=1) for v in _gradients(layer, x, g).values()]).sum(dim=0)


def _cross_entropies(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, reduction="sum")


def mean_squared_gradients(
    net: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], loss: SumOfLosses
) -> dict[str, Tensor]:
    """(1/n) sum_n (d l_n / d theta_i)^2 of every parameter; zero where there is no image."""
    sums = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    count = 0
    for x, y in batches:
        image_gradients(net, x, y, loss, lambda name, g: sums[name].add_(_squared_sum(g)))
        count += len(y)
    return {name: value / max(count, 1) for name, value in sums.items()}


def _squared_sum(g: Tensor, dim: int = 0) -> Tensor:
    """sum g^2 along a dimension, reading the gradients once and writing nothing of their size."""
    norms: Tensor = torch.linalg.vector_norm(g, dim=dim)
    return norms.square()


def chunks(net: nn.Module, num_images: int, device: torch.device) -> list[Tensor]:
    """Positions of the images that are taken at once."""
    sizes = [p.numel() * p.element_size() for p in net.parameters()]
    held = max(sizes) if is_layered(net) else sum(sizes)
    size = max(1, GRADIENT_BYTES.get(device.type, GRADIENT_BYTES["cpu"]) // held)
    return list(torch.arange(num_images, device=device).split(size)) if num_images else []


def _on_the_way_back(name: str, meet: Meet) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
    def hook(layer: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        x = args[0].detach()

        def on_return(g: Tensor) -> None:  # nothing: a hook's answer would replace the gradient
            meet(name, layer, x, g)

        out.register_hook(on_return)

    return hook


def _gradients(layer: nn.Module, x: Tensor, g: Tensor) -> dict[str, Tensor]:
    """[n, *shape] of each of a layer's parameters."""
    found = {}
    if layer.weight is not None:
        found["weight"] = _weight_gradients(layer, x, g)
    if layer.bias is not None:
        found["bias"] = g.sum(dim=_shared(layer, g)) if g.ndim > 2 else g
    return found


def _shared(layer: nn.Module, g: Tensor) -> tuple[int, ...]:
    """The dimensions of an output, other than images, in which all places have the same bias."""
    return tuple(range(1, g.ndim - 1)) if isinstance(layer, (nn.Linear, nn.LayerNorm)) else tuple(range(2, g.ndim))


def _weight_gradients(layer: nn.Module, x: Tensor, g: Tensor) -> Tensor:
    """[n, *shape of the weight] from what went into a layer and the gradient of what came out."""
    if isinstance(layer, nn.Conv2d):
        return torch.bmm(g.flatten(2), _patches(layer, x).mT).view(len(x), *layer.weight.shape)
    if isinstance(layer, nn.Linear):
        tokens, back = (value.reshape(len(value), -1, value.shape[-1]) for value in (x, g))
        return torch.bmm(back.mT, tokens)
    product = g * _normalised(layer, x)
    return product.sum(dim=_shared(layer, g)) if g.ndim > 2 else product


def _patches(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """What each place of the output saw: [n, channels x kernel, places]. One copy, where F.unfold copies image by image."""
    (kh, kw), (sh, sw) = conv.kernel_size, conv.stride
    ph, pw = (int(p) for p in conv.padding)
    seen = F.pad(x, (pw, pw, ph, ph)).unfold(2, kh, sh).unfold(3, kw, sw)  # [n, c, h, w, kh, kw]
    return seen.permute(0, 1, 4, 5, 2, 3).reshape(len(x), -1, seen.shape[2] * seen.shape[3])


def _normalised(layer: nn.Module, x: Tensor) -> Tensor:
    """The input of a norm before its weight and bias."""
    if isinstance(layer, nn.BatchNorm2d):
        return F.batch_norm(x, layer.running_mean, layer.running_var, eps=layer.eps)
    if isinstance(layer, nn.GroupNorm):
        return F.group_norm(x, layer.num_groups, eps=layer.eps)
    assert isinstance(layer, nn.LayerNorm)
    return F.layer_norm(x, layer.normalized_shape, eps=layer.eps)
