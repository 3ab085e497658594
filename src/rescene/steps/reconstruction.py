"""Pictures from gradients: what a GLFC client sends about a prototype, and how the proxy server gets the picture back.

A client encodes a picture as the gradient of a small fixed network (the encoder) on it. The proxy knows the encoder, reads
the label off the last layer's gradient and searches for the picture whose gradient is the same (Zhu et al., NeurIPS 2019).
This is a known attack on private images, here used on purpose: whoever sees the gradients and the encoder's seed can do it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap

from rescene.data import Transform
from rescene.hyperparameters import Hyperparameters, hyper
from rescene.nets import counted_flops, tell_flops
from rescene.rng import seeded_generator
from rescene.steps.recording import repeated

CHUNK = 32  # prototypes searched for at once; bounds memory, not results
CHANNELS, KERNEL, STRIDES = 12, 5, (2, 2, 1)
GRADIENT_PASSES = 3  # of the encoder for a gradient with respect to its weights
INVERSION_PASSES = 7  # for the gradient of a distance between such gradients with respect to the pixels (counted: 7.1)
# torch.optim.LBFGS's own constants: when a row pauses, and which curvature it trusts
GRADIENT_TOLERANCE, CHANGE_TOLERANCE, LEAST_CURVATURE = 1e-7, 1e-9, 1e-10

Encoder = Mapping[str, Tensor]
Objective = Callable[[Tensor], tuple[Tensor, Tensor]]  # points [p, d], a problem each -> values [p], gradients [p, d]


class Inversion(Hyperparameters):
    """Settings of the search for pictures."""

    num_inversions: int = hyper(250, "I", "App. A", "L-BFGS calls per prototype", ge=1)
    inversion_lr: float = hyper(0.1, "-", "App. A", "step size of L-BFGS, without line search", gt=0)
    inversion_steps: int = hyper(20, "-", "[public code]", "steps within one L-BFGS call, at most", ge=1)
    inversion_history: int = hyper(100, "-", "[public code]", "steps whose curvature L-BFGS remembers", ge=1)
    num_iterates: int = hyper(
        20, "-", "[public code]", "last iterates of a search kept as monitor images of its prototype", ge=1
    )


class Reconstruction(NamedTuple):
    """Pictures in [0, 1] [p, m, 3, H, W] (m iterates for each of p prototypes), labels [p], last gradient distance [p]."""

    images: Tensor
    labels: Tensor
    losses: Tensor


def perturb(
    net: nn.Module,
    images: Tensor,
    labels: Tensor,
    transform: Transform | None,
    *,
    num_steps: int,
    lr: float,
    weight_decay: float,
) -> Tensor:
    """Pictures moved by plain SGD towards what ``net`` (eval mode) takes for their label; binary cross-entropy.

    images [p, 3, H, W] in [0, 1], labels [p] -> new images, which may leave [0, 1] a little. The network sees them normalised
    by ``transform``, or as they are without one. Each picture moves as if it were alone.
    """
    targets = F.one_hot(labels, len(net.head.bias)).to(images)  # type: ignore[union-attr, arg-type]
    net.eval().requires_grad_(False)
    for _ in range(num_steps):
        x = images.detach().requires_grad_(True)
        logits = net(x if transform is None else transform.normalise(255 * x))
        terms = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
        (slope,) = torch.autograd.grad(terms.mean(dim=1).sum(), x)
        images = images - lr * (slope + weight_decay * images)
    net.requires_grad_(True)
    return images.detach()


def encoder_weights(seed: int, num_classes: int, height: int, width: int) -> dict[str, Tensor]:
    """The LeNet-type encoder: three 5x5 convolutions of 12 channels with sigmoids, one linear layer; uniform(-.5, .5).

    Everybody who knows the seed has the same weights. An encoder with more classes has the same weights plus further rows,
    so the encoder stays fixed while classes arrive. Drawn on the CPU, the same on every device.
    """
    generator = seeded_generator(seed)
    weights, channels = {}, 3
    for i, stride in enumerate(STRIDES):
        weights[f"conv{i}.weight"] = torch.rand(CHANNELS, channels, KERNEL, KERNEL, generator=generator) - 0.5
        weights[f"conv{i}.bias"] = torch.rand(CHANNELS, generator=generator) - 0.5
        channels, height, width = CHANNELS, -(-height // stride), -(-width // stride)
    num_features = CHANNELS * height * width
    rows = torch.stack([torch.rand(num_features + 1, generator=generator) - 0.5 for _ in range(num_classes)])
    return weights | {"head.weight": rows[:, :-1].contiguous(), "head.bias": rows[:, -1].contiguous()}


def encode(encoder: Encoder, x: Tensor) -> Tensor:
    """Logits of the encoder for pictures in [0, 1]: [n, 3, H, W] -> [n, C]."""
    for i, stride in enumerate(STRIDES):
        weight, bias = encoder[f"conv{i}.weight"], encoder[f"conv{i}.bias"]
        x = torch.sigmoid(F.conv2d(x, weight, bias, stride=stride, padding=KERNEL // 2))
    return F.linear(x.flatten(1), encoder["head.weight"], encoder["head.bias"])


@lru_cache(maxsize=64)
def encoder_flops(num_classes: int, height: int, width: int) -> int:
    """FLOPs of encoding one picture, counted on the meta device."""
    encoder = {name: value.to("meta") for name, value in encoder_weights(0, num_classes, height, width).items()}
    return counted_flops(lambda x: encode(encoder, x), torch.empty(1, 3, height, width, device="meta"))


def encoder_gradients(encoder: Encoder, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Gradient of the cross-entropy with respect to the encoder's weights, for each picture by itself.

    images [p, 3, H, W] in [0, 1], labels [p] -> for each weight of shape s a tensor [p, *s]; differentiable in the images.
    """

    def loss(encoder: Encoder, image: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(encode(encoder, image.unsqueeze(0)), label.unsqueeze(0))

    forward = encoder_flops(len(encoder["head.bias"]), *images.shape[2:])
    tell_flops(GRADIENT_PASSES * len(images) * forward)
    gradients: dict[str, Tensor] = vmap(grad(loss), in_dims=(None, 0, 0))(dict(encoder), images, labels)
    return gradients


def labels_from_gradients(gradients: Mapping[str, Tensor]) -> Tensor:
    """The label of each prototype: [p], from the last layer's gradient [p, C, f].

    Row c of it is (q_c - [c = y]) h with softmax outputs q and features h > 0 (sigmoids), so only row y has a negative sum.
    """
    return gradients["head.weight"].sum(dim=2).argmin(dim=1)


def reconstruct(
    encoder: Encoder,
    gradients: Mapping[str, Tensor],
    shape: tuple[int, int],
    settings: Inversion,
    generator: torch.Generator,
) -> Reconstruction:
    """Pictures of height and width ``shape`` whose encoder gradients match the given ones, searched from white noise.

    Each prototype is its own problem and runs as if it were alone; they only share the passes through the encoder. A
    search that leaves the finite numbers is left out of the answer.
    """
    labels = labels_from_gradients(gradients)
    start = torch.randn(len(labels), 3, *shape, generator=generator).to(labels.device)
    parts = []
    for rows in torch.split(torch.arange(len(labels), device=labels.device), CHUNK):
        wanted = {name: values[rows] for name, values in gradients.items()}
        objective = _gradient_distance(encoder, wanted, labels[rows], shape)
        parts.append(minimise(objective, start[rows].flatten(1), settings))
    iterates, losses = (torch.cat(part) for part in zip(*parts, strict=True))
    finite = torch.isfinite(iterates).flatten(1).all(dim=1) & torch.isfinite(losses)
    images = iterates[finite].clamp(0, 1).reshape(-1, iterates.shape[1], 3, *shape)
    return Reconstruction(images, labels[finite], losses[finite])


def _gradient_distance(
    encoder: Encoder, wanted: Mapping[str, Tensor], labels: Tensor, shape: tuple[int, int]
) -> Objective:
    """Squared distance between the encoder gradients of candidate pictures and the wanted ones, with its gradient."""

    def objective(points: Tensor) -> tuple[Tensor, Tensor]:
        x = points.detach().requires_grad_(True)
        found = encoder_gradients(encoder, x.reshape(-1, 3, *shape), labels)
        values = torch.stack([(found[name] - wanted[name]).square().flatten(1).sum(dim=1) for name in found]).sum(dim=0)
        (slope,) = torch.autograd.grad(values.sum(), x)
        forward = encoder_flops(len(encoder["head.bias"]), *shape)
        tell_flops((INVERSION_PASSES - GRADIENT_PASSES) * len(points) * forward)
        return values.detach(), slope

    return objective


def minimise(objective: Objective, start: Tensor, settings: Inversion) -> tuple[Tensor, Tensor]:
    """Many independent minimisations by L-BFGS with a fixed step size, one per row of ``start`` [p, d].

    Each row goes the way that ``torch.optim.LBFGS`` would take it in ``num_inversions`` calls. Returns the points after the
    last ``num_iterates`` calls [p, m, d], m = min(num_iterates, num_inversions), and the values at the last ones [p].
    """
    search = _Search(objective, start, settings)
    last: deque[Tensor] = deque(maxlen=settings.num_iterates)
    moving = True
    for _ in range(settings.num_inversions):
        moving = moving and search.call()  # once no row moves, none ever will
        last.append(search.point.clone())
    return torch.stack(tuple(last), dim=1), search.value


class _Search:
    """All rows of one minimisation: where they are, the last move, and the gradient from which it was made.

    A step treats all rows alike and leaves those as they were that pause, so that on a GPU it is recorded and replayed.
    """

    def __init__(self, objective: Objective, start: Tensor, settings: Inversion) -> None:
        self.objective, self.lr, self.max_steps = objective, settings.inversion_lr, settings.inversion_steps
        self.point = start.detach().clone()
        self.value, self.slope = objective(self.point)
        self.move, self.gradient = torch.zeros_like(start), torch.zeros_like(start)
        self.fresh, self.going, self.moved = (start.new_ones(len(start), dtype=torch.bool) for _ in range(3))
        memory = min(settings.inversion_history, settings.num_inversions * settings.inversion_steps)
        self.curvature = _Curvature(start, memory)
        own = (self.point, self.value, self.slope, self.move, self.gradient, self.fresh, self.going, self.moved)
        self.step = repeated(self._step, [*own, *self.curvature.state])

    def call(self) -> bool:
        """Up to ``max_steps`` steps of every row that has not converged; whether any row moved."""
        self.going.copy_(self.slope.abs().amax(dim=1) > GRADIENT_TOLERANCE)
        self.moved.zero_()
        for _ in range(self.max_steps):
            self.step()
            if not (self.point.is_cuda or self.going.any()):  # asking a GPU would cost more than it saves
                break
        return bool(self.moved.any())

    def _step(self) -> None:
        downhill, move = self._moves()
        active = self.going & downhill
        self.moved |= active
        self.fresh &= ~active
        self.move.copy_(_chosen(active, move, self.move))
        self.point.copy_(_chosen(active, self.point + move, self.point))
        value, slope = self.objective(self.point)
        going = active & (slope.abs().amax(dim=1) > GRADIENT_TOLERANCE) & (move.abs().amax(dim=1) > CHANGE_TOLERANCE)
        self.going.copy_(going & ((value - self.value).abs() >= CHANGE_TOLERANCE))
        self.value.copy_(value)
        self.slope.copy_(slope)

    def _moves(self) -> tuple[Tensor, Tensor]:
        """Which rows still go downhill, and the next move of each."""
        self.curvature.learn(self.going, self.move, self.slope - self.gradient)
        self.gradient.copy_(_chosen(self.going, self.slope, self.gradient))
        direction = -self.curvature.inverse_times(self.slope)
        first = (1 / self.slope.abs().sum(dim=1)).clamp(max=1) * self.lr  # the very first step knows no scale
        length = torch.where(self.fresh, first, self.lr)
        downhill = (self.slope * direction).sum(dim=1) <= -CHANGE_TOLERANCE
        return downhill, length.unsqueeze(1) * direction


class _Curvature:
    """The inverse Hessian of each row as L-BFGS knows it, in compact form (Byrd, Nocedal, Schnabel, 1994, Eq. 3.1).

    s, y [p, m, d]: the last m moves and changes of the gradient; each row overwrites its oldest, zero where there is none.
    sy, yy [p, m, m]: s_i . y_j and y_i . y_j in the same places; scale [p]: first guess of the inverse Hessian.
    """

    def __init__(self, start: Tensor, memory: int) -> None:
        p, d = start.shape
        self.s, self.y = start.new_zeros(p, memory, d), start.new_zeros(p, memory, d)
        self.sy, self.yy = start.new_zeros(p, memory, memory), start.new_zeros(p, memory, memory)
        self.scale = start.new_ones(p)
        self.oldest = torch.zeros(p, dtype=torch.long, device=start.device)
        self.state = (self.s, self.y, self.sy, self.yy, self.scale, self.oldest)

    def learn(self, going: Tensor, s: Tensor, y: Tensor) -> None:
        """Remember the last move of these rows, unless the function did not curve upwards along it."""
        curve = (s * y).sum(dim=1)
        good = going & (curve > LEAST_CURVATURE)
        self.scale.copy_(torch.where(good, curve / y.square().sum(dim=1), self.scale))
        for kept, new in ((self.s, s), (self.y, y)):
            self._put(kept, 1, good, new)
        self._put(self.sy, 2, good, _products(self.s, y))
        for dim in (1, 2):
            self._put(self.yy, dim, good, _products(self.y, y))
        self.oldest.copy_(torch.where(good, (self.oldest + 1) % self.s.shape[1], self.oldest))

    def _put(self, kept: Tensor, dim: int, good: Tensor, new: Tensor) -> None:
        """In the good rows, ``new`` [p, ...] into the oldest place along ``dim``."""
        new = new.unsqueeze(dim)
        place = self.oldest.view(-1, 1, 1).expand_as(new)
        kept.scatter_(dim, place, torch.where(good.view(-1, 1, 1), new, kept.gather(dim, place)))

    def inverse_times(self, g: Tensor) -> Tensor:
        """H g for every row: [p, d] -> [p, d]."""
        s, y, scale = self.s, self.y, self.scale.unsqueeze(1)
        time = (self.oldest.unsqueeze(1) + torch.arange(s.shape[1], device=g.device)) % s.shape[1]
        upper = _in_order(self.sy, time).triu()
        curve = upper.diagonal(dim1=1, dim2=2)
        upper = upper + torch.diag_embed((curve == 0).to(g))  # an empty place must not make the system singular
        u = _solve(upper, _products(s, g).gather(1, time), upper=True)
        changes = torch.einsum("pij,pj->pi", _in_order(self.yy, time), u) - _products(y, g).gather(1, time)
        v = _solve(upper.transpose(1, 2), curve * u + scale * changes, upper=False)
        u, v = (torch.zeros_like(w).scatter(1, time, w) for w in (u, v))  # from order of time to order of places
        return scale * (g - _sums(y, u)) + _sums(s, v)


def _chosen(rows: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """``new`` in these rows, ``old`` in the others: [p], [p, d], [p, d] -> [p, d]."""
    return torch.where(rows.unsqueeze(1), new, old)


def _products(vectors: Tensor, g: Tensor) -> Tensor:
    """[r, m, d], [r, d] -> [r, m]."""
    return torch.bmm(vectors, g.unsqueeze(2)).squeeze(2)


def _sums(vectors: Tensor, weights: Tensor) -> Tensor:
    """[r, m, d], [r, m] -> [r, d]."""
    return torch.bmm(weights.unsqueeze(1), vectors).squeeze(1)


def _in_order(products: Tensor, time: Tensor) -> Tensor:
    """Rows and columns of [r, m, m] from oldest to newest."""
    square = products.gather(1, time.unsqueeze(2).expand_as(products))
    return square.gather(2, time.unsqueeze(1).expand_as(products))


def _solve(matrix: Tensor, right: Tensor, *, upper: bool) -> Tensor:
    solution: Tensor = torch.linalg.solve_triangular(matrix, right.unsqueeze(2), upper=upper)
    return solution.squeeze(2)
