"""Many independent minimisations by L-BFGS side by side, as ``torch.optim.LBFGS`` takes each without a line search."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from rescene.accel.cuda_graph import repeated

# torch.optim.LBFGS's own constants: when a row pauses, and which curvature it trusts
GRADIENT_TOLERANCE, CHANGE_TOLERANCE, LEAST_CURVATURE = 1e-7, 1e-9, 1e-10

Objective = Callable[[Tensor], tuple[Tensor, Tensor]]  # points [p, d], a problem each -> values [p], gradients [p, d]


def minimise(
    objective: Objective, start: Tensor, *, lr: float, calls: int, steps: int, history: int, keep: int
) -> tuple[Tensor, Tensor]:
    """One minimisation per row of ``start`` [p, d], with a fixed step size.

    Each row goes the way that ``torch.optim.LBFGS(lr=lr, max_iter=steps, history_size=history)`` would take it in so many
    ``calls``. Returns the points after the last ``keep`` calls [p, m, d], m = min(keep, calls), and the values at the last
    ones [p].
    """
    search = _Search(objective, start, lr, steps, min(history, calls * steps))
    last: deque[Tensor] = deque(maxlen=keep)
    moving = True
    for _ in range(calls):
        moving = moving and search.call()  # once no row moves, none ever will
        last.append(search.point.clone())
    return torch.stack(tuple(last), dim=1), search.value


class _Search:
    """All rows of one minimisation: where they are, the last move, and the gradient from which it was made.

    A step treats all rows alike and leaves those as they were that pause, so that on a GPU it is recorded and replayed.
    """

    def __init__(self, objective: Objective, start: Tensor, lr: float, max_steps: int, memory: int) -> None:
        self.objective, self.lr, self.max_steps = objective, lr, max_steps
        self.point = start.detach().clone()
        self.value, self.slope = objective(self.point)
        self.move, self.gradient = torch.zeros_like(start), torch.zeros_like(start)
        self.fresh, self.going, self.moved = (start.new_ones(len(start), dtype=torch.bool) for _ in range(3))
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
