"""Pictures from gradients: what a GLFC client sends about a prototype, and how the proxy server gets the picture back.

A client encodes a picture as the gradient of a small fixed network (the encoder) on it. The proxy knows the encoder, reads
the label off the last layer's gradient and searches for the picture whose gradient is the same (Zhu et al., NeurIPS 2019).
This is a known attack on private images, here used on purpose: whoever sees the gradients and the encoder's seed can do it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap

from rescene.hyperparameters import Hyperparameters, hyper
from rescene.rng import seeded_generator

CHUNK = 32  # prototypes searched for at once; bounds memory, not results
CHANNELS, KERNEL, STRIDES = 12, 5, (2, 2, 1)
# torch.optim.LBFGS's own constants: when a row pauses, and which curvature it trusts
GRADIENT_TOLERANCE, CHANGE_TOLERANCE, LEAST_CURVATURE = 1e-7, 1e-9, 1e-10

Encoder = Mapping[str, Tensor]
Objective = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # points [r, d], rows [r] -> values [r], gradients [r, d]


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


def encoder_gradients(encoder: Encoder, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Gradient of the cross-entropy with respect to the encoder's weights, for each picture by itself.

    images [p, 3, H, W] in [0, 1], labels [p] -> for each weight of shape s a tensor [p, *s]; differentiable in the images.
    """

    def loss(encoder: Encoder, image: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(encode(encoder, image.unsqueeze(0)), label.unsqueeze(0))

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
    for rows in torch.arange(len(labels), device=labels.device).split(CHUNK):
        wanted = {name: values[rows] for name, values in gradients.items()}
        objective = _gradient_distance(encoder, wanted, labels[rows], shape)
        parts.append(minimise(objective, start[rows].flatten(1), settings))
    iterates, losses = (torch.cat(part) for part in zip(*parts, strict=True))
    finite = torch.isfinite(iterates).flatten(1).all(dim=1)
    images = iterates[finite].clamp(0, 1).unflatten(2, (3, *shape))
    return Reconstruction(images, labels[finite], losses[finite])


def _gradient_distance(
    encoder: Encoder, wanted: Mapping[str, Tensor], labels: Tensor, shape: tuple[int, int]
) -> Objective:
    """Squared distance between the encoder gradients of candidate pictures and the wanted ones, with its gradient."""

    def objective(points: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        x = points.detach().requires_grad_(True)
        found = encoder_gradients(encoder, x.unflatten(1, (3, *shape)), labels[rows])
        terms = [(found[name] - wanted[name][rows]).square().flatten(1).sum(dim=1) for name in found]
        values = torch.stack(terms).sum(dim=0)
        (slope,) = torch.autograd.grad(values.sum(), x)
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
    values, _ = objective(search.point, torch.arange(len(start), device=start.device))
    return torch.stack(tuple(last), dim=1), values


class _Search:
    """All rows of one minimisation: where they are, the last move, and the gradient from which it was made."""

    def __init__(self, objective: Objective, start: Tensor, settings: Inversion) -> None:
        self.objective, self.lr, self.max_steps = objective, settings.inversion_lr, settings.inversion_steps
        self.point = start.detach().clone()
        self.move = torch.zeros_like(self.point)
        self.gradient = torch.zeros_like(self.point)
        self.fresh = torch.ones(len(start), dtype=torch.bool, device=start.device)
        memory = min(settings.inversion_history, settings.num_inversions * settings.inversion_steps)
        self.curvature = _Curvature(start, memory)

    def call(self) -> bool:
        """Up to ``max_steps`` steps of every row that has not converged; whether any row moved."""
        rows = torch.arange(len(self.point), device=self.point.device)
        value, gradient = self.objective(self.point, rows)
        going = gradient.abs().amax(dim=1) > GRADIENT_TOLERANCE
        moved = False
        for step in range(self.max_steps):
            rows, value, gradient = rows[going], value[going], gradient[going]
            downhill, move = self._moves(rows, gradient)
            rows, value, move = rows[downhill], value[downhill], move[downhill]
            if len(rows) == 0:
                break
            moved = True
            self.point[rows] += move
            self.move[rows], self.fresh[rows] = move, False
            if step == self.max_steps - 1:
                break
            before = value
            value, gradient = self.objective(self.point[rows], rows)
            going = (gradient.abs().amax(dim=1) > GRADIENT_TOLERANCE) & (move.abs().amax(dim=1) > CHANGE_TOLERANCE)
            going &= (value - before).abs() >= CHANGE_TOLERANCE
        return moved

    def _moves(self, rows: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Which rows still go downhill, and the next move of each."""
        self.curvature.learn(rows, self.move[rows], gradient - self.gradient[rows])
        self.gradient[rows] = gradient
        direction = -self.curvature.inverse_times(rows, gradient)
        length = torch.full_like(gradient[:, 0], self.lr)
        first = (1 / gradient.abs().sum(dim=1)).clamp(max=1) * self.lr  # the very first step knows no scale
        length = torch.where(self.fresh[rows], first, length)
        downhill = (gradient * direction).sum(dim=1) <= -CHANGE_TOLERANCE
        return downhill, length.unsqueeze(1) * direction


class _Curvature:
    """The inverse Hessian of each row as L-BFGS knows it, in compact form (Byrd, Nocedal, Schnabel, 1994, Eq. 3.1).

    s, y [p, m, d]: the last m moves and changes of the gradient, newest last, zero where there is none yet.
    sy [p, m, m]: s_i . y_j for i <= j, zero below; yy [p, m, m]: y_i . y_j; scale [p]: first guess of the inverse Hessian.
    """

    def __init__(self, start: Tensor, memory: int) -> None:
        p, d = start.shape
        self.s, self.y = start.new_zeros(p, memory, d), start.new_zeros(p, memory, d)
        self.sy, self.yy = start.new_zeros(p, memory, memory), start.new_zeros(p, memory, memory)
        self.scale = start.new_ones(p)

    def learn(self, rows: Tensor, s: Tensor, y: Tensor) -> None:
        """Remember the last move of these rows, unless the function did not curve upwards along it."""
        curve = (s * y).sum(dim=1)
        good = curve > LEAST_CURVATURE
        rows, s, y, curve = rows[good], s[good], y[good], curve[good]
        self.scale[rows] = curve / y.square().sum(dim=1)
        self.s[rows] = torch.cat([self.s[rows, 1:], s.unsqueeze(1)], dim=1)
        self.y[rows] = torch.cat([self.y[rows, 1:], y.unsqueeze(1)], dim=1)
        newest = torch.einsum("pmd,pd->pm", self.s[rows], y)
        self.sy[rows] = _shifted(self.sy[rows], newest, torch.zeros_like(newest[:, :-1]))
        newest = torch.einsum("pmd,pd->pm", self.y[rows], y)
        self.yy[rows] = _shifted(self.yy[rows], newest, newest[:, :-1])

    def inverse_times(self, rows: Tensor, g: Tensor) -> Tensor:
        """H g for these rows: [r, d] -> [r, d]."""
        s, y, upper, scale = self.s[rows], self.y[rows], self.sy[rows], self.scale[rows].unsqueeze(1)
        curve = upper.diagonal(dim1=1, dim2=2)
        upper = upper + torch.diag_embed((curve == 0).to(g))  # an empty place must not make the system singular
        u = _solve(upper, torch.einsum("pmd,pd->pm", s, g), upper=True)
        inner = curve * u + scale * (torch.einsum("pij,pj->pi", self.yy[rows], u) - torch.einsum("pmd,pd->pm", y, g))
        v = _solve(upper.transpose(1, 2), inner, upper=False)
        return scale * (g - torch.einsum("pmd,pm->pd", y, u)) + torch.einsum("pmd,pm->pd", s, v)


def _solve(matrix: Tensor, right: Tensor, *, upper: bool) -> Tensor:
    return torch.linalg.solve_triangular(matrix, right.unsqueeze(2), upper=upper).squeeze(2)


def _shifted(products: Tensor, column: Tensor, row: Tensor) -> Tensor:
    """The oldest row and column of [p, m, m] dropped, a new last column [p, m] and row [p, m-1] added."""
    shifted = torch.zeros_like(products)
    shifted[:, :-1, :-1] = products[:, 1:, 1:]
    shifted[:, :, -1] = column
    shifted[:, -1, :-1] = row
    return shifted
