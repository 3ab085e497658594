"""Whole vectors from their exact second moment: what somebody who receives exact sums of a few images can work out.

    S = sum_k z_k z_k'    with n vectors z_k of whole numbers, n small

Every row of S is a whole combination of the z_k, so the rows span the lattice of the z_k. With any basis B of it, S = B' M B, and M has
determinant 1: reduced (Lenstra, Lenstra, Lovasz 1982) it is the identity, and the change of basis gives the z_k, up to sign and order.
All arithmetic is exact, with Python's whole numbers and fractions.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

IntegerRow = list[int]
IntegerMatrix = list[IntegerRow]

DELTA = Fraction(3, 4)  # of Lovasz' condition


def vectors_of(second: IntegerMatrix, most: int = 8) -> IntegerMatrix | None:
    """The vectors with this second moment, each up to its sign; None where there are more than ``most`` or none that are whole."""
    basis = basis_of(second)
    if not 0 < len(basis) <= most:
        return None
    basis = _times(reduced(_gram(basis)), basis)
    inner = _inner(second, basis)
    if inner is None:
        return None
    change = reduced(inner)
    if _times(_times(change, inner), _transposed(change)) != _identity(len(basis)):
        return None
    back = _inverse([[Fraction(x) for x in row] for row in _transposed(change)])
    return None if back is None else [[int(x) for x in row] for row in _times(back, basis)]


def basis_of(rows: IntegerMatrix) -> IntegerMatrix:
    """A basis of the lattice that these rows generate, by Euclid's algorithm on one column after the other.

    >>> basis_of([[2, 4], [3, 6], [0, 0]])
    [[1, 2]]
    """
    left, found = [list(row) for row in rows], []
    for column in range(len(rows[0])):
        while True:
            there = sorted((row for row in left if row[column]), key=lambda row: abs(row[column]))
            if len(there) < 2:
                break
            first = there[0]
            for row in there[1:]:
                times = row[column] // first[column]
                row[:] = [a - times * b for a, b in zip(row, first, strict=True)]
        if there:
            found.append(there[0])
            left = [row for row in left if row is not there[0]]
    return found


def reduced(gram: IntegerMatrix) -> IntegerMatrix:
    """The whole change of basis after which a basis with this Gram matrix is reduced.

    >>> reduced([[1, 7], [7, 50]])
    [[1, 0], [-7, 1]]
    """
    n = len(gram)
    change, k = _identity(n), 1
    mu, norms = _orthogonal(_times(_times(change, gram), _transposed(change)))
    while k < n:
        for j in range(k - 1, -1, -1):
            times = round(mu[k][j])
            if times:
                change[k] = [a - times * b for a, b in zip(change[k], change[j], strict=True)]
                mu[k] = [a - times * b for a, b in zip(mu[k], mu[j], strict=True)]
        if norms[k] >= (DELTA - mu[k][k - 1] ** 2) * norms[k - 1]:
            k += 1
        else:
            change[k], change[k - 1] = change[k - 1], change[k]
            mu, norms = _orthogonal(_times(_times(change, gram), _transposed(change)))
            k = max(k - 1, 1)
    return change


def _orthogonal(gram: IntegerMatrix) -> tuple[list[list[Fraction]], list[Fraction]]:
    """Gram-Schmidt: the coefficients, with ones on the diagonal, and the squared lengths."""
    n = len(gram)
    mu = [[Fraction(int(i == j)) for j in range(n)] for i in range(n)]
    norms: list[Fraction] = []
    for i in range(n):
        for j in range(i):
            rest = gram[i][j] - sum((mu[i][k] * mu[j][k] * norms[k] for k in range(j)), Fraction(0))
            mu[i][j] = rest / norms[j] if norms[j] else Fraction(0)
        norms.append(gram[i][i] - sum((mu[i][k] ** 2 * norms[k] for k in range(i)), Fraction(0)))
    return mu, norms


def _inner(second: IntegerMatrix, basis: IntegerMatrix) -> IntegerMatrix | None:
    """M with S = B' M B; None if it is not whole."""
    columns = _pivots(basis)
    square = _inverse([[Fraction(row[c]) for c in columns] for row in basis])
    if square is None:
        return None
    part = [[second[a][b] for b in columns] for a in columns]
    found = _times(_times(_transposed(square), part), square)
    if any(x.denominator != 1 for row in found for x in row):
        return None
    return [[int(x) for x in row] for row in found]


def _pivots(rows: IntegerMatrix) -> list[int]:
    """Columns in which these independent rows are independent."""
    found: list[int] = []
    for column in range(len(rows[0])):
        trial = [[row[c] for c in (*found, column)] for row in rows]
        if len(basis_of(_transposed(trial))) == len(found) + 1:
            found.append(column)
        if len(found) == len(rows):
            break
    return found


def _inverse(square: list[list[Fraction]]) -> list[list[Fraction]] | None:
    n = len(square)
    rows = [list(row) + [Fraction(int(i == j)) for j in range(n)] for i, row in enumerate(square)]
    for i in range(n):
        pivot = next((r for r in range(i, n) if rows[r][i]), None)
        if pivot is None:
            return None
        rows[i], rows[pivot] = rows[pivot], rows[i]
        rows[i] = [x / rows[i][i] for x in rows[i]]
        for r in range(n):
            if r != i and rows[r][i]:
                rows[r] = [a - rows[r][i] * b for a, b in zip(rows[r], rows[i], strict=True)]
    return [row[n:] for row in rows]


def _gram(rows: IntegerMatrix) -> IntegerMatrix:
    return _times(rows, _transposed(rows))


def _times(a: Sequence[Sequence], b: Sequence[Sequence]) -> list[list]:  # type: ignore[type-arg]
    columns = list(zip(*b, strict=True))
    return [[sum(x * y for x, y in zip(row, column, strict=True)) for column in columns] for row in a]


def _transposed(a: Sequence[Sequence]) -> list[list]:  # type: ignore[type-arg]
    return [list(column) for column in zip(*a, strict=True)]


def _identity(n: int) -> IntegerMatrix:
    return [[int(i == j) for j in range(n)] for i in range(n)]
