"""Networks as values: ``Arch`` says how to build one, a state dict holds its weights, ``Net`` is the two put together.

Every network is a body (images -> features) and a linear head (features -> logits). The head grows with the classes.
State dict keys are stable: ``body.*``, ``head.weight``, ``head.bias``, and ``prompts.*`` where there are prompts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from rescene.core.errors import ConfigError, closest
from rescene.core.record import record
from rescene.core.rng import seeded_generator
from rescene.nets.bodies import NORMS, ConvBody, Identity, Perceptron, convnet_body, resnet_body
from rescene.nets.own_networks import OwnBody, is_own, own_model, own_names
from rescene.nets.vit import PromptPool, Prompts, VisionTransformer, mini_size, patch_size, pool_of, prompted_features

NAMES = ("resnet18", "resnet50", "vit-small", "vit-mini", "convnet", "mlp", "linear")
WITH_WIDTH = ("convnet", "mlp", "vit-mini")
TRANSFORMERS = ("vit-small", "vit-mini")
MIN_IMAGE_SIZE = 8
Body = ConvBody | VisionTransformer | Perceptron | Identity | OwnBody
VECTORS = ("mlp", "linear")  # take a picture as one vector: any size, any number of channels
SHOWN = 3  # keys of a kind in a message
COUNTER = "num_batches_tracked"  # BatchNorm's step counter: it never influences an output


class Net(nn.Module):
    """A body and a linear head: images [n, 3, s, s] -> features [n, feature_size] -> logits [n, num_classes].

    With ``prompts`` a transformer looks twice (:mod:`rescene.nets.vit`).
    """

    def __init__(self, body: Body, num_classes: int) -> None:
        super().__init__()
        self.prompts: Prompts | None = None
        self.feature_size: int = body.feature_size
        self.body = body
        self.head = nn.Linear(body.feature_size, num_classes)

    def features(self, x: Tensor) -> Tensor:
        """The pooled vector before the head, [n, feature_size]."""
        out: Tensor = self.body(x) if self.prompts is None else self._prompted(x, self.prompts)
        return out

    def _prompted(self, x: Tensor, prompts: Prompts) -> Tensor:
        with torch.no_grad():
            query = self.body(x)
        return prompted_features(self.body, x, query, prompts.pool)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [n, num_classes]."""
        out: Tensor = self.head(self.features(x))
        return out


@record
class Arch:
    """Everything needed to build a network again, apart from its weights.

    ``norm`` (batch | group) is ignored by vit-small and vit-mini, which have LayerNorm, and by mlp and linear, which have none.
    ``width`` is the base number of channels of convnet (32 when None), the hidden units of mlp (256) or the numbers of a token of
    vit-mini (128), and must be None for the others. ``name`` may
    also be a network of the user's (:mod:`rescene.nets.own_networks`) or ``timm:NAME``; these have the norms that they have.
    ``channels`` is 3, or what the data's lens gives, which only mlp and linear take.
    """

    name: str
    image_size: int
    norm: str = "batch"
    width: int | None = None
    channels: int = 3

    def __post_init__(self) -> None:
        if not is_own(self.name):
            _check_choice("model.name", self.name, (*NAMES, *own_names()))
        _check_choice("model.norm", self.norm, NORMS)
        _check_width(self.name, self.width)
        _check_channels(self.name, self.channels)  # first: what a lens gives is also small
        _check_image_size(self.name, self.image_size)

    def build(self, num_classes: int, generator: torch.Generator | None = None) -> Net:
        """A fresh network on the generator's device (CPU without one), in training mode.

        All random values come from ``generator``, so the same seed gives the same weights and torch's global random
        state is neither read nor changed. Without a generator the weights are those of seed 0.
        """
        generator = seeded_generator(0) if generator is None else generator
        net = self.skeleton(num_classes)
        # not by to_empty(), which loads torch's compiler
        empty = {k: torch.empty(v.shape, dtype=v.dtype, device=generator.device) for k, v in net.state_dict().items()}
        net.load_state_dict(empty, assign=True)
        net.body.initialise(generator)
        with torch.no_grad():
            net.head.weight.copy_(_head_rows(num_classes, net.feature_size, generator))
            net.head.bias.zero_()
        return net

    def restore(self, state: Mapping[str, Tensor]) -> Net:
        """A new network, in training mode, that holds a clone of these weights on their device and in their dtype.

        The head's size is that of ``head.weight``; the network has prompts if the weights have. BatchNorm's step counters may be
        left out of ``state``. A state of another architecture is a ConfigError naming the keys that do not fit.
        """
        net = _fitting(self, state)
        _check_keys(net.state_dict(), state)
        # A plain dict carries no version, which makes torch start missing step counters at zero (on the CPU).
        net.load_state_dict({key: value.detach().clone() for key, value in state.items()}, assign=True)
        if isinstance(net.body, OwnBody):
            net.body.settle()
        return net.to(state["head.weight"].device)

    def skeleton(self, num_classes: int) -> Net:
        """The network without values (meta device): shapes and keys only, no memory, no random draw."""
        own = OwnBody(own_model(self.name).taken_apart(self.image_size)) if is_own(self.name) else None
        with torch.device("meta"):
            return Net(own or self._body(), num_classes)

    @property
    def has_batch_norm(self) -> bool:
        """Whether a picture's features depend on the other pictures of its batch while the network trains."""
        if is_own(self.name):
            return own_model(self.name).taken_apart(self.image_size).has_batch_norm
        return self.norm == "batch" and self.name not in (*TRANSFORMERS, *VECTORS)

    @property
    def draws(self) -> bool:
        """Whether the network draws random numbers while it trains."""
        return is_own(self.name) and own_model(self.name).taken_apart(self.image_size).draws

    def _body(self) -> Body:
        if self.name == "linear":
            return Identity(self.channels * self.image_size**2)
        if self.name == "mlp":
            return Perceptron(self.channels * self.image_size**2, self.width)
        if self.name == "convnet":
            return convnet_body(norm=self.norm, width=self.width)
        if self.name == "vit-small":
            return VisionTransformer(self.image_size)
        if self.name == "vit-mini":
            return VisionTransformer(self.image_size, mini_size(self.width))
        depth = 18 if self.name == "resnet18" else 50
        return resnet_body(depth, image_size=self.image_size, norm=self.norm)


def build(
    name: str,
    *,
    num_classes: int,
    image_size: int = 32,
    norm: str = "batch",
    width: int | None = None,
    generator: torch.Generator | None = None,
) -> Net:
    """A fresh network by name: resnet18, resnet50, vit-small, vit-mini, convnet, mlp or linear. See ``Arch`` and ``Arch.build``.

    >>> build("convnet", num_classes=10).features(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 128])
    """
    return Arch(name, image_size, norm, width).build(num_classes, generator)


def grow_head(state: Mapping[str, Tensor], num_classes: int, generator: torch.Generator) -> dict[str, Tensor]:
    """A new state, sharing no memory with ``state``, whose head has ``num_classes`` rows.

    Old rows are kept bit for bit; new rows are Kaiming-uniform with zero bias, as in a fresh network. A head that
    already has this size is returned as it is and draws nothing; a smaller one is a ConfigError.
    """
    num_new = num_classes - _head_size(state)
    if num_new < 0:
        raise ConfigError(
            "E135",
            f"cannot shrink a head from {_head_size(state)} to {num_classes} classes",
            where="head.weight",
            why="a head only grows; dropping rows would forget classes silently",
            fix="start from weights with no more classes than the first task has",
        )
    grown = {key: value.detach().clone() for key, value in state.items()}
    if num_new > 0:
        weight, bias = grown["head.weight"], grown["head.bias"]
        rows = _head_rows(num_new, weight.shape[1], generator).to(weight)
        grown["head.weight"] = torch.cat([weight, rows])
        grown["head.bias"] = torch.cat([bias, bias.new_zeros(num_new)])
    return grown


def check_fits(arch: Arch, state: Mapping[str, Tensor]) -> None:
    """Raise a ConfigError that names the keys in which ``state`` differs from ``arch`` (any head and any prompts fit)."""
    _check_keys(_fitting(arch, state).state_dict(), state)


def _fitting(arch: Arch, state: Mapping[str, Tensor]) -> Net:
    """The network without values whose head has as many rows as these weights, and prompts where they have some."""
    net, pool = arch.skeleton(_head_size(state)), pool_of(state)
    if pool is not None:
        net.prompts = Prompts(PromptPool(*(part.to("meta") for part in pool)))
    return net


def is_recordable(net: nn.Module) -> bool:
    """Whether a step of this network may be recorded and its layers be replaced by fused ones: it is one of ours."""
    return getattr(net.body, "recordable", True)


def _head_rows(num_rows: int, feature_size: int, generator: torch.Generator) -> Tensor:
    """Rows as nn.Linear draws them: uniform within 1 / sqrt(feature_size), however many rows there are."""
    rows = torch.empty(num_rows, feature_size, device=generator.device)
    return nn.init.kaiming_uniform_(rows, a=math.sqrt(5), generator=generator)


def _head_size(state: Mapping[str, Tensor]) -> int:
    weight = state.get("head.weight")
    if weight is None or weight.dim() != 2:
        raise _misfit("head.weight", "a matrix", weight)
    return len(weight)


def _check_keys(expected: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    missing = [key for key in expected if key not in state and not key.endswith(COUNTER)]
    other = [key for key in expected if key in state and not _alike(expected[key], state[key])]
    strange = [key for key in state if key not in expected]
    if not (missing or other or strange):
        return
    first = min([*missing, *other], key=list(expected).index, default=None) or strange[0]
    counted = {"missing": missing, "of another form": other, "unknown here": strange}
    told = [
        f"{len(keys)} {words} ({', '.join(keys[:SHOWN])}{', ...' * (len(keys) > SHOWN)})"
        for words, keys in counted.items()
        if keys
    ]
    wanted = _describe(expected[first]) if first in expected else "nothing of that name"
    raise _misfit(first, wanted, state.get(first), f"\nkeys of the weights: {'; '.join(told)}")


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.is_floating_point() == other.is_floating_point()


def _describe(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _misfit(key: str, wanted: str, found: Tensor | None, more: str = "") -> ConfigError:
    return ConfigError(
        "E134",
        f"weights do not fit the network: '{key}'",
        where=key,
        why=f"the network wants {wanted}, the weights hold {_describe(found)}{more}",
        fix="use the model.name, model.norm, model.width and image size that the weights were trained with",
    )


def _check_choice(key: str, word: str, options: tuple[str, ...]) -> None:
    if word not in options:
        guess = closest(word, options)
        fix = f"did you mean '{guess}'? {key}={guess}" if guess else f"{key}={options[0]}"
        raise ConfigError("E130", f"unknown {key} '{word}'", where=key, why=f"known: {', '.join(options)}", fix=fix)


def _check_width(name: str, width: int | None) -> None:
    if width is None or (name in WITH_WIDTH and width >= 1):
        return
    why = (
        "width must be at least 1"
        if name in WITH_WIDTH
        else f"only {', '.join(WITH_WIDTH)} have a choice of width, not {name}"
    )
    raise ConfigError("E131", f"bad model.width {width}", where="model.width", why=why, fix="model.width=null")


def _check_image_size(name: str, image_size: int) -> None:
    if name in VECTORS and image_size >= 1:
        return
    step = patch_size(image_size) if name in TRANSFORMERS else 1
    if image_size < MIN_IMAGE_SIZE or image_size % step:
        why = f"{name} takes squares of at least {MIN_IMAGE_SIZE} pixels" + (
            f", in steps of {step}" if step > 1 else ""
        )
        raise ConfigError("E132", f"bad image size {image_size}", where="image_size", why=why, fix="image_size=32")


def _check_channels(name: str, channels: int) -> None:
    if channels != 3 and name not in VECTORS:
        why = f"{name} takes pictures of three channels, the data's lens gives {channels}"
        raise ConfigError(
            "E130", f"{name} cannot look through a lens", where="model.name", why=why, fix="model.name=linear or mlp"
        )
