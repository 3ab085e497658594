"""Networks of the user's own: an ``nn.Module``, a function that makes one, or a network of timm.

Every network here is a body (pictures -> features) and a linear head that grows. An own network is taken apart once, with a
batch of test pictures: the last ``nn.Linear`` is its head and goes, and what went into it are the features. ``body.net.*``
in a state dict are the parameters under the names that the user's module gives them.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from rescene.core.errors import ConfigError, lines_of
from rescene.core.own_code import RULES, functions_of, hashes_of, short_hash
from rescene.core.plugins import installed, note_registered
from rescene.core.rng import seeded_generator
from rescene.nets.timm_networks import TIMM, own_look, timm_network

OBJECT = "object:"  # before the name of a network or data set that exists in this process only
GROUP = "rescene.models"  # entry points of installed packages
NORMS_OVER_BATCHES = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.RReLU)
LAYERS = (nn.Conv2d, nn.Linear, nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm)  # whose gradients per image are known
FIX = "pictures [n, 3, side, side] in, logits [n, classes] out of a last nn.Linear; or features [n, d] with head=False"
Network = nn.Module | Callable[..., nn.Module]


class OwnModel:
    """A network of one's own for ``rescene.run(..., model=...)``.

    ``network``: an ``nn.Module``, whose weights are the ones to start from, or a function (or class) that makes one; it is
    called anew for each seed, without arguments, or with ``image_size`` and ``num_classes`` where it asks for them.
    ``head``: the name of the linear layer that gives the logits, such as ``"fc"``; None finds it; False says that the network
    gives features and has no such layer. ``mean`` and ``std``: the normalisation that its weights were trained with; without
    them it is measured on the training pictures. ``size``: the side that pictures are resized to before it sees them; None
    leaves them as they are. ``frozen``: its weights stay as they are and only a linear head learns; it needs ``size``.

    >>> OwnModel(nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, 10))).taken_apart(8).feature_size
    16
    """

    def __init__(
        self,
        network: Network,
        head: str | bool | None = None,
        *,
        name: str | None = None,
        mean: tuple[float, float, float] | None = None,
        std: tuple[float, float, float] | None = None,
        size: int | None = None,
        frozen: bool = False,
    ) -> None:
        if not isinstance(network, nn.Module) and not callable(network):
            raise not_usable(
                name or "model",
                f"it is a {type(network).__name__}",
                fix="an nn.Module, or a function that returns one",
            )
        if (mean is None) != (std is None) or (std is not None and min(std) <= 0):
            raise not_usable(name or "model", "mean and std belong together, and std is above zero", fix="give both")
        if frozen and size is None:
            raise not_usable(name or "model", "frozen, but no size is given", fix="size=SIDE of the pictures it sees")
        kind = type(network) if isinstance(network, nn.Module) else network
        self.network, self.head, self.mean, self.std, self.frozen = network, head, mean, std, frozen
        self.name = name or getattr(kind, "__name__", type(kind).__name__).strip("<>")
        self.size = size
        self._parts: dict[int, TakenApart] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnModel:
        return self

    @property
    def is_made(self) -> bool:
        """Whether a function makes it, so that each seed has its own first weights."""
        return not isinstance(self.network, nn.Module)

    def make(self, image_size: int, seed: int = 0) -> nn.Module:
        """The module with its first weights, on the CPU."""
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(seed)
            try:
                made = self._made(image_size)
            except ConfigError:
                raise
            except Exception as error:  # of the user's code
                what = "the function that makes it fails" if self.is_made else "it cannot be copied"
                raise not_usable(self.name, f"{what}: {type(error).__name__}: {lines_of(error)[0]}") from error
        if not isinstance(made, nn.Module):
            raise not_usable(self.name, f"the function gives a {type(made).__name__}, not an nn.Module")
        if any(is_lazy(value) for value in made.state_dict(keep_vars=True).values()):
            raise not_usable(self.name, "a lazy layer has no size yet", fix="call the network once, or give the sizes")
        return made.float()

    def _made(self, image_size: int) -> Any:
        if isinstance(self.network, nn.Module):
            return copy.deepcopy(self.network).cpu()
        return self.network(**self._arguments(image_size))

    def _arguments(self, image_size: int) -> dict[str, int]:
        """``image_size`` and ``num_classes`` where the function cannot do without them."""
        known, given = {"image_size": image_size, "num_classes": 2}, {}
        try:
            parameters = inspect.signature(self.network).parameters.values()
        except (TypeError, ValueError):
            return {}
        for one in parameters:
            if one.name == "image_size":
                given[one.name] = image_size
            elif one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
                if one.name not in known:
                    raise not_usable(
                        self.name, f"the function wants {one.name!r}", fix="only image_size and num_classes are given"
                    )
                given[one.name] = known[one.name]
        return given

    def taken_apart(self, image_size: int) -> TakenApart:
        """The body and what is known of it, for pictures of this size; found once."""
        if image_size not in self._parts:
            self._parts[image_size] = take_apart(self, image_size)
        return self._parts[image_size]

    def describe(self, image_size: int = 32) -> dict[str, Any]:
        """What a run keeps of it, to know it again: class, code, and a hash of each tensor."""
        made = self.make(self.size or image_size)
        used = {type(m) for m in made.modules() if not type(m).__module__.startswith("torch.")}
        classes = sorted(used, key=lambda kind: kind.__qualname__)
        maker = [self.network] if self.is_made and self.network not in used else []
        return {
            "name": self.name,
            "class": f"{type(made).__module__}.{type(made).__qualname__}",
            **hashes_of([*classes, *maker], [f for kind in classes for f in functions_of(kind)]),
            "structure": short_hash(re.sub("0x[0-9a-f]+", "", repr(made)).encode()),
            "made for each seed": self.is_made,
            "head": self.head,
            "normalisation": [self.mean, self.std, self.size],
            "weights": {key: tensor_hash(value) for key, value in made.state_dict().items()},
        }

    def fingerprint(self) -> str:
        """SHA-256 of :meth:`describe`, with the code as earlier versions hashed it: names of objects in their runs hold it."""
        told = {key: value for key, value in self.describe().items() if key not in RULES or key == "code"}
        return hashlib.sha256(repr(told).encode()).hexdigest()


@dataclass(frozen=True, eq=False)
class TakenApart:
    """An own network without its head. ``body`` holds values; ``empty`` is the same on the meta device."""

    model: OwnModel
    image_size: int
    head: str | None  # the name of the layer that was its head
    body: nn.Module
    empty: nn.Module
    feature_size: int
    layered: bool  # every layer is used once and is of a kind whose gradients per image are known
    has_batch_norm: bool
    draws: bool  # draws random numbers while it trains (dropout)

    def __deepcopy__(self, memo: dict[int, Any]) -> TakenApart:
        return self


class OwnBody(nn.Module):
    """Pictures [n, 3, s, s] -> features [n, feature_size], through the user's module."""

    recordable = False  # what its code does besides tensors nobody knows, so no step of it is recorded

    def __init__(self, plan: TakenApart) -> None:
        super().__init__()
        self.plan, self.feature_size, self.layered = plan, plan.feature_size, plan.layered
        self.net = copy.deepcopy(plan.empty)

    def forward(self, x: Tensor) -> Tensor:
        size = self.plan.model.size
        if size is not None and x.shape[-1] != size:
            x = F.interpolate(x, (size, size), mode="bilinear", antialias=size < x.shape[-1])
        out: Tensor = self.net(x)
        return out if out.ndim == 2 else out.mean(dim=(2, 3))

    def initialise(self, generator: torch.Generator) -> None:
        """The module's own first weights; those that a function makes follow the generator."""
        model, body = self.plan.model, self.plan.body
        if model.is_made:
            seed = int(torch.randint(2**31, (), generator=generator, device=generator.device))
            body = without_head(model.make(self.plan.image_size, seed), self.plan.head)
        self.net.load_state_dict(body.state_dict())
        self.settle()

    def settle(self) -> None:
        """Give buffers that no state dict holds their values."""
        device = next((v.device for v in self.net.state_dict().values() if not v.is_meta), torch.device("cpu"))
        kept = set(self.net.state_dict())
        values = dict(self.plan.body.named_buffers())
        for name, _ in list(self.net.named_buffers()):
            if name not in kept:
                parent, _, leaf = name.rpartition(".")
                self.net.get_submodule(parent)._buffers[leaf] = values[name].detach().clone().to(device)


@dataclass
class TracedLayer:
    """A layer at work: its name, how often it was called, and what went in and came out last."""

    layer: nn.Module
    times: int = 0
    taken: Tensor | None = None
    given: Any = None


def take_apart(model: OwnModel, image_size: int) -> TakenApart:
    """Find head and features of a network by looking at what passes through it; E156 for what is not one."""
    side = model.size or image_size
    made = model.make(image_size).eval()
    calls, out = traced(model, made, side)
    head = head_name(model, calls, check_output(model, out))
    features: Any = out if head is None else calls[head].taken
    body = without_head(made, head)
    check_body(model, body, side, features)
    return TakenApart(
        model=model,
        image_size=image_size,
        head=head,
        body=body,
        empty=copy.deepcopy(body).to("meta"),
        feature_size=features.shape[1],
        layered=all(is_plain(call) for name, call in calls.items() if name != head),
        has_batch_norm=any(isinstance(m, NORMS_OVER_BATCHES) for m in body.modules()),
        draws=any(isinstance(m, DROPOUTS) for m in body.modules()),
    )


def test_pictures(side: int) -> Tensor:
    return torch.randn(2, 3, side, side, generator=seeded_generator(0))


def traced(model: OwnModel, net: nn.Module, side: int) -> tuple[dict[str, TracedLayer], Any]:
    """Every layer that has parameters, by name, with what it did; and what the network gives."""
    calls = {name: TracedLayer(m) for name, m in net.named_modules() if isinstance(m, LAYERS)}

    def keep(call: TracedLayer) -> Callable[..., None]:
        def hook(layer: nn.Module, taken: tuple[Any, ...], given: Any) -> None:
            call.times, call.taken, call.given = call.times + 1, taken[0] if taken else None, given

        return hook

    handles = [call.layer.register_forward_hook(keep(call)) for call in calls.values()]
    try:
        with torch.no_grad():
            out = net(test_pictures(side))
    except Exception as error:  # of the user's code
        why = f"it fails on pictures [2, 3, {side}, {side}]: {type(error).__name__}: {lines_of(error)[0]}"
        fix = f"a network for pictures of {side} pixels, or data.image_size=SIDE for another size"
        raise not_usable(model.name, why, fix=fix) from error
    finally:
        for handle in handles:
            handle.remove()
    return calls, out


def check_output(model: OwnModel, out: Any) -> Tensor:
    """One float vector (or map) for each picture, and no probabilities."""
    if not isinstance(out, Tensor):
        raise not_usable(model.name, f"it gives a {type(out).__name__}, not a tensor of logits or features")
    maps = out.ndim == 4 and model.head is False
    if not (out.ndim == 2 or maps) or len(out) != 2 or not out.is_floating_point():
        raise not_usable(model.name, f"for 2 pictures it gives {str(out.dtype)[6:]} {list(out.shape)}")
    if not out.isfinite().all():
        raise not_usable(model.name, "it gives numbers that are not finite")
    if out.ndim == 2 and out.shape[1] > 1:
        for values, words in ((out, "softmax"), (out.exp(), "log_softmax")):
            if bool((values >= 0).all()) and torch.allclose(values.sum(dim=1), torch.ones(2), atol=1e-4):
                raise not_usable(model.name, f"it ends in a {words}", fix="leave it out: the loss has one")
    return out


def head_name(model: OwnModel, calls: Mapping[str, TracedLayer], out: Tensor) -> str | None:
    """The linear layer whose output is the network's; None where the network gives features."""
    linear = {name: call for name, call in calls.items() if isinstance(call.layer, nn.Linear)}
    if model.head is False:
        return None
    if isinstance(model.head, str):
        if model.head not in linear:
            why = f"it has no linear layer {model.head!r}; it has: {', '.join(linear) or 'none'}"
            raise not_usable(model.name, why, fix="head=NAME of one of these, or head=False")
        found = model.head
    else:
        last = [name for name, call in linear.items() if call.given is out]
        if not last:
            why = "its output does not come straight from an nn.Linear, so head and features cannot be told apart"
            raise not_usable(model.name, why, fix='rescene.Model(network, head="NAME"), or head=False for features')
        found = last[0]
    call = linear[found]
    if call.times != 1 or call.taken is None or call.taken.ndim != 2:
        shape = "nothing" if call.taken is None else list(call.taken.shape)
        raise not_usable(model.name, f"its head {found!r} is used {call.times} times, on {shape}", fix=FIX)
    return found


def without_head(made: nn.Module, head: str | None) -> nn.Module:
    """The module whose head lets features through."""
    if head is None:
        return made
    if head == "":  # the whole network is one linear layer
        return nn.Identity()
    parent, _, leaf = head.rpartition(".")
    setattr(made.get_submodule(parent), leaf, nn.Identity())
    return made


def check_body(model: OwnModel, body: nn.Module, side: int, features: Tensor) -> None:
    """Features in both modes, a way back to weights and pictures, and no weight under two names."""
    wanted = features if features.ndim == 2 else features.mean(dim=(2, 3))
    named, single = dict(body.named_parameters(remove_duplicate=False)), dict(body.named_parameters())
    if len(named) != len(single):
        twice = next(name for name in named if name not in single)
        raise not_usable(model.name, f"{twice!r} is a parameter that another layer has too", fix="one layer for each")
    bad = [name for name, value in body.state_dict().items() if not isinstance(value, Tensor)]
    if bad:
        raise not_usable(model.name, f"its state holds {bad[0]!r}, which is no tensor")
    trial = copy.deepcopy(body)
    for mode in (False, True):
        with torch.random.fork_rng(devices=[]):
            try:
                out = trial.train(mode)(x := test_pictures(side).requires_grad_())
                out.float().sum().backward()
            except Exception as error:  # of the user's code
                why = f"without its head it fails while it {'trains' if mode else 'answers'}: {lines_of(error)[0]}"
                raise not_usable(model.name, why, fix=FIX) from error
        out = out if out.ndim == 2 else out.mean(dim=(2, 3))
        if out.shape != wanted.shape or (not mode and not torch.allclose(out, wanted, rtol=1e-3, atol=1e-5)):
            why = f"it does more after its head: without it come {list(out.shape)}, the head takes {list(wanted.shape)}"
            raise not_usable(model.name, why, fix=FIX)
        if x.grad is None:
            raise not_usable(model.name, "no gradient comes back to the pictures", fix="no detach() on the way")


def is_plain(call: TracedLayer) -> bool:
    """Whether a layer's gradients per image have a short way: it is used once, and a convolution is an ordinary one."""
    conv = call.layer
    if isinstance(conv, nn.Conv2d) and (
        conv.groups != 1 or conv.dilation != (1, 1) or isinstance(conv.padding, str) or conv.padding_mode != "zeros"
    ):
        return False
    return call.times == 1


def not_usable(name: str, why: str, *, fix: str = FIX) -> ConfigError:
    return ConfigError("E156", f"the network {name} cannot be used", where="model", why=why, fix=fix)


_OWN: dict[str, OwnModel] = {}


def register_model(name: str, **how: Any) -> Callable[[Any], Any]:
    """Make a network known as ``model.name=NAME``: a decorator for a function that makes it, or for its class.

    ``how`` is what :class:`OwnModel` takes: ``head``, ``mean``, ``std``. A file that does this is a plug-in (``--plugin FILE``);
    an installed package does it by an entry point of the group ``rescene.models``.
    """

    def decorate(network: Any) -> Any:
        enter(OwnModel(network, name=name, **how))
        note_registered(network)
        return network

    return decorate


def enter(model: OwnModel, name: str | None = None) -> str:
    """Make a network known by its name, or under another; a name can be taken once."""
    name = name or model.name
    known = _OWN.setdefault(name, model)
    if known is not model and known.describe() != model.describe():
        raise ConfigError("E169", f"two networks are called {name!r}", where="model.name", fix="another name for one")
    return name


def enter_object(network: Any) -> tuple[str, OwnModel]:
    """A network that was handed over as an object, under a name that holds its fingerprint."""
    model = network if isinstance(network, OwnModel) else OwnModel(network)
    name = f"{OBJECT}{model.name}-{model.fingerprint()[:8]}"
    _OWN[name] = model  # in the place of an earlier one of this name, whose code may be another
    return name, model


def own_names() -> list[str]:
    """Names of networks from plug-ins and installed packages."""
    for entry in installed(GROUP):
        if entry.name not in _OWN:
            _load(entry)
    return sorted(name for name in _OWN if not name.startswith((OBJECT, TIMM)))


def _load(entry: Any) -> None:
    """An entry point names a module that registers networks, or a function that makes one."""
    found = entry.load()
    if callable(found) and entry.name not in _OWN:
        enter(found if isinstance(found, OwnModel) else OwnModel(found, name=entry.name))


def is_own(name: str) -> bool:
    """Whether a network is the user's or timm's."""
    return name.startswith((OBJECT, TIMM)) or name in _OWN or name in own_names()


def own_model(name: str) -> OwnModel:
    """An own network by name. E168 for an object that this process was not given."""
    if name.startswith(TIMM) and name not in _OWN:
        _OWN[name] = timm_model(name)
    if name not in _OWN:
        raise ConfigError(
            "E168",
            f"{name.removeprefix(OBJECT)} was handed over as a Python object, and this process does not have it",
            where="model.name",
            why="a run from objects can go on, predict and export only where the same objects are",
            fix="the same rescene.run(...) call again; or make it a plug-in: rescene.register_model, --plugin FILE",
        )
    return _OWN[name]


def timm_model(name: str) -> OwnModel:
    """``timm:NAME``: its body, its own normalisation, and its size where it takes only one."""
    kind = name.removeprefix(TIMM)
    look = own_look(timm_network(kind, name))
    return OwnModel(lambda: timm_network(kind, name), False, name=name, **look)


def tensor_hash(value: Tensor) -> str:
    values = value.detach().cpu().contiguous().reshape(-1)
    return short_hash(f"{value.dtype} {list(value.shape)}".encode() + values.view(torch.uint8).numpy().tobytes())
