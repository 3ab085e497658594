"""Vision Transformers, pre-norm, with a class token; and prompts beside a frozen one.

Size Small: width 384, depth 12, 6 heads, MLP 1536. Size Mini, for a CPU: width 128 unless another is given, depth 4, a head for
every 32 numbers of the width, MLP four times as wide.

Prompts are for each block a few keys and values more, which each image mixes for itself.
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
from torch.nn import functional as F

from rescene.functional.adapters import mixed_prompts, prompt_weights

INIT_STD = 0.02
MINI_WIDTH, MINI_DEPTH, MINI_HEAD = 128, 4, 32


class VitSize(NamedTuple):
    """How large a Vision Transformer is."""

    width: int
    depth: int
    num_heads: int
    mlp_width: int


SMALL = VitSize(384, 12, 6, 1536)


def mini_size(width: int | None = None) -> VitSize:
    """Size Mini; a width below or beside multiples of 32 has as many heads as divide it.

    >>> mini_size().num_heads, mini_size(8).num_heads, mini_size(48).num_heads
    (4, 1, 1)
    """
    width = MINI_WIDTH if width is None else width
    num_heads = width // MINI_HEAD if width % MINI_HEAD == 0 else 1
    return VitSize(width, MINI_DEPTH, num_heads, 4 * width)


def attention_weights(state: Mapping[str, Tensor]) -> list[str]:
    """Names of the weights [3 d, d] that give queries, keys and values, in the order of the network; none: no attention.

    These are the layers called ``qkv``, here and in timm.

    >>> attention_weights({"body.0.qkv.weight": torch.zeros(6, 2), "body.0.out.weight": torch.zeros(2, 2)})
    ['body.0.qkv.weight']
    """
    return [
        name
        for name, value in state.items()
        if name.endswith(".qkv.weight") and value.ndim == 2 and value.shape[0] == 3 * value.shape[1]
    ]


def patch_size(image_size: int) -> int:
    """4 pixels for images below 64, else 8: an 8 x 8 grid at both 32 and 64 pixels."""
    return 4 if image_size < 64 else 8


class Attention(nn.Module):
    """Multi-head self-attention, tokens [n, m, d] -> [n, m, d], with biases on q, k and v."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, m, d = x.shape
        q, k, v = self.qkv(x).view(n, m, 3, self.num_heads, d // self.num_heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(n, m, d))
        return out


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, num_heads: int, mlp_width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, mlp_width), nn.GELU(), nn.Linear(mlp_width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class VisionTransformer(nn.Module):
    """Images [n, 3, s, s] -> [n, width]: the class token after the final norm. s must be a multiple of the patch."""

    def __init__(self, image_size: int, size: VitSize = SMALL) -> None:
        super().__init__()
        width, depth, num_heads, mlp_width = size
        patch = patch_size(image_size)
        num_tokens = (image_size // patch) ** 2 + 1
        self.feature_size = width
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, num_tokens, width))
        self.blocks = nn.Sequential(*(Block(width, num_heads, mlp_width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(x.shape[0], -1, -1), tokens], dim=1) + self.positions
        # The norm acts on each token by itself, so only the class token needs it.
        features: Tensor = self.norm(self.blocks(tokens)[:, 0])
        return features

    def initialise(self, generator: torch.Generator) -> None:
        """Truncated normal (std 0.02) for weights, class token and positions; zero biases; norms as the identity."""
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                nn.init.trunc_normal_(module.weight, std=INIT_STD, generator=generator)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()
        for token in (self.class_token, self.positions):
            nn.init.trunc_normal_(token, std=INIT_STD, generator=generator)


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
