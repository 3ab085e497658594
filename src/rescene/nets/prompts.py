"""Prompts beside a frozen transformer: for each block a few keys and values more, which each image mixes for itself.

A network with prompts looks at an image twice. The first look, without prompts, gives the query. The second has the image's
own prompts in front of the keys and values of the first blocks (prefix tuning). ``prompts.*`` in a state dict are their values;
a state dict without them is a network without prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rescene.functional.prompt_attention import mixed_prompts, prompt_weights
from rescene.nets.vit import attention_weights

PREFIX = "prompts."  # before the names of their tensors in a state dict


class PromptPool(NamedTuple):
    """Prompts of all tasks, for each of L blocks M of them."""

    keys: Tensor  # [L, M, d], d the number of features
    attention: Tensor  # [L, M, d]
    values: Tensor  # [L, M, length, width]: the first half goes before a block's keys, the second before its values


class Prompts(nn.Module):
    """The part of a network that holds a :class:`PromptPool`."""

    def __init__(self, pool: PromptPool) -> None:
        super().__init__()
        self.keys, self.attention, self.values = (nn.Parameter(part) for part in pool)

    @property
    def pool(self) -> PromptPool:
        """The tensors themselves."""
        return PromptPool(self.keys, self.attention, self.values)


def pool_of(state: Mapping[str, Tensor]) -> PromptPool | None:
    """The prompts in a state dict; None if it holds none."""
    if not any(key.startswith(PREFIX) for key in state):
        return None
    return PromptPool(*(state.get(PREFIX + name, torch.zeros(0)) for name in PromptPool._fields))


def pool_state(pool: PromptPool) -> dict[str, Tensor]:
    """The prompts as a state dict has them.

    >>> list(pool_state(PromptPool(*torch.zeros(3, 1))))
    ['prompts.keys', 'prompts.attention', 'prompts.values']
    """
    return {PREFIX + name: value for name, value in pool._asdict().items()}


def prompted_features(body: nn.Module, x: Tensor, query: Tensor, pool: PromptPool) -> Tensor:
    """Features [n, d] of images x, seen with the prompts that their queries [n, d] mix from the pool."""
    prompts = mixed_prompts(prompt_weights(query, pool.attention, pool.keys), pool.values)
    with prefixed(body, prompts):
        features: Tensor = body(x)
    return features


class Prefix:
    """Prompts [n, length, width] of one block, put in front of its tokens' keys and values by hooks.

    As many empty tokens enter the attention layer, their keys and values are replaced by the prompts, and what the layer gives
    for them is dropped. So the layer itself needs no change.
    """

    def __init__(self, prompts: Tensor) -> None:
        self.keys, self.values = prompts.chunk(2, dim=1)
        self.num = self.keys.shape[1]
        self.is_open = False  # between the two ends of the attention layer

    def widen(self, attention: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Tokens [n, m, d] -> [n, num + m, d]."""
        x, *more = inputs
        self.is_open = True
        return (torch.cat([x.new_zeros(x.shape[0], self.num, x.shape[2]), x], dim=1), *more)

    def fill(self, qkv: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        """Queries, keys and values [n, num + m, 3 d], with the prompts in the place of those of the empty tokens."""
        if not self.is_open:
            raise ValueError("the layer that holds qkv is not the one that is called with the tokens")
        own = torch.cat([torch.zeros_like(self.keys), self.keys, self.values], dim=2)
        return torch.cat([own.to(output.dtype), output[:, self.num :]], dim=1)

    def narrow(self, attention: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        """[n, num + m, d] -> tokens [n, m, d]."""
        self.is_open = False
        return output[:, self.num :]


@contextmanager
def prefixed(body: nn.Module, prompts: Tensor) -> Iterator[None]:
    """Inside, the first L attention layers of ``body`` see the prompts [L, n, length, width].

    The small network of a forecast has no attention layer. There the first layer stands for them, so that work is counted.
    """
    names = attention_layers(body)
    with ExitStack() as hooks:
        for name, own in zip(names, prompts, strict=False):
            prefix, attention = Prefix(own), body.get_submodule(name.rpartition(".")[0])
            hooks.enter_context(attention.register_forward_pre_hook(prefix.widen))
            hooks.enter_context(body.get_submodule(name).register_forward_hook(prefix.fill))
            hooks.enter_context(attention.register_forward_hook(prefix.narrow))
        if not names:
            layer = next(module for module in body.modules() if isinstance(module, nn.Linear))
            hooks.enter_context(layer.register_forward_hook(lambda layer, inputs, output: output + 0 * prompts.sum()))
        yield


def attention_layers(body: nn.Module) -> Sequence[str]:
    """Names of the layers of a body that give queries, keys and values in one."""
    return [name.removesuffix(".weight") for name in attention_weights(dict(body.named_parameters()))]
