"""The subspace that a layer's inputs live in, from random sketches, and updates that leave it alone.

X_i     inputs of one layer at site i, one column each (of a convolution: its patches), [d, n_i]; X = [X_1 ... X_N] of all sites
Omega_i random normal matrix, [n_i, m]; Omega has all of them below each other
A       = sum_i X_i Omega_i = X Omega, the sketch, [d, m]: E[A A^T] = m X X^T, and with m >= rank X the columns of A span those of X
O       orthonormal basis of the principal subspace, [d, k]
W       weights of the layer, [outputs, d]

An update dW with dW O = 0 leaves W x unchanged for every x in the span of O (Bakman et al., ICLR 2024; Saha et al., ICLR 2021).
"""

from __future__ import annotations

import torch
from torch import Tensor


def sketch(gram: Tensor, omega: Tensor) -> Tensor:
    """A = X Omega in law, from X X^T [d, d] and a normal matrix [d, m]: both have independent columns with covariance X X^T.

    So nobody has to draw a number for every input. With an orthogonal ``omega`` A A^T is X X^T itself.

    >>> sketch(torch.diag(torch.tensor([4.0, 9.0])), torch.eye(2)).abs().sum(1).tolist()
    [2.0, 3.0]
    """
    return square_root(gram) @ omega


def square_root(gram: Tensor) -> Tensor:
    """R with R R^T = X X^T, [d, d] -> [d, d]: Cholesky's factor, which takes a small part of the time of eigenvalues.

    A ridge of 1e-14 of the trace makes it possible in float64 where X X^T has no full rank. Where that does not
    suffice (float32, or numbers of very unlike size), eigenvalues are taken.

    >>> root = square_root(torch.tensor([[4.0, 2.0], [2.0, 1.0]]))  # rank 1
    >>> (root @ root.T).round(decimals=4).tolist()
    [[4.0, 2.0], [2.0, 1.0]]
    """
    ridge = torch.full_like(gram.diagonal(), 1e-14) * gram.trace()
    root: Tensor
    root, failed = torch.linalg.cholesky_ex(gram + ridge.diag())
    if failed:
        values, vectors = torch.linalg.eigh(gram)
        root = vectors * values.clamp(min=0).sqrt()
    return root


def extended_subspace(basis: Tensor, total: Tensor, energy: float) -> Tensor:
    """O with as few more directions as hold ``energy`` of the sketch A = ``total``: [d, k] and [d, m] -> [d, k + more].

    The new directions are the leading left singular vectors of (I - O O^T) A. Their number is the smallest with
    ||O^T A||^2 + sigma_1^2 + ... >= energy ||A||^2.

    >>> a = torch.diag(torch.tensor([3.0, 2.0, 1.0]))
    >>> [extended_subspace(torch.zeros(3, 0), a, energy).shape[1] for energy in (0.6, 0.9, 0.99)]
    [1, 2, 3]
    """
    known = basis @ (basis.T @ total)
    wanted = energy * total.square().sum() - known.square().sum()
    if wanted <= 0:
        return basis
    rest = total - known
    squares, u = (found.flip(-1) for found in torch.linalg.eigh(rest @ rest.T))  # sigma^2 and u: faster than their SVD
    room = total.shape[0] - basis.shape[1]  # no more directions than the space has
    num = min(int((squares.cumsum(0) < wanted).sum()) + 1, int((squares > squares[0] * 1e-12).sum()), room)
    joined: Tensor = torch.linalg.qr(torch.cat([basis, u[:, :num]], dim=1)).Q
    return joined


def orthogonal_update(update: Tensor, basis: Tensor) -> Tensor:
    """dW - dW O O^T in the shape of ``update``, [outputs, ...] with d values in a row: it moves no output of an input in the span.

    >>> orthogonal_update(torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0], [0.0]])).tolist()
    [[0.0, 2.0]]
    """
    rows = update.flatten(1).to(basis.dtype)
    return (rows - (rows @ basis) @ basis.T).reshape(update.shape).to(update.dtype)
