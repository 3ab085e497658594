"""Where privacy noise comes from: the operating system. A run's seed is known to the server, which could subtract its noise.

Long vectors take a cipher's key from it instead of every byte: AES-256 in counter mode, a fresh key for each vector, forgotten
after it. Whoever could tell its stream from the operating system's could break the cipher.

Releases take discrete Gaussian noise: whole numbers k with probability proportional to exp(-k^2 / (2 sigma^2)).
Floating-point noise has gaps, and a sum that falls into a gap proves which images were in it (Mironov, CCS 2012). Whole numbers
plus whole noise have none: every value is possible whatever the images are.

Deviations up to a few thousand are drawn by inversion. A uniform number of 189 bits is compared with a table of the distribution
function that is made with Python's whole numbers, so it is the same on every machine. 63 bits settle all but one comparison in
10^13, and the others draw the rest. A larger deviation is put together from smaller ones: x = x0 + a x1 with independent
x0 and x1 of variances 8 a^2 and sigma^2 / a^2 - 8 (Micciancio & Walter, CRYPTO 2017). :func:`sampler_error` says how far off that is.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from rescene.core.errors import RunError

BLOCK = 2**15  # numbers at a time: they stay in the processor's cache
_KEEP = (1 << 52) - 1  # 52 bits of each word, so that the half below is exact too


@dataclass(frozen=True, eq=False)
class Noise:
    """Uniform and normal numbers in float64. With a ``generator`` it is a test mode, which protects nobody."""

    generator: torch.Generator | None = None

    def uniform(self, count: int) -> Tensor:
        """Numbers strictly between 0 and 1."""
        return self._drawn(count, lambda u: u)

    def normal(self, *shape: int) -> Tensor:
        """Standard normal numbers by inversion, each from bits of its own; the largest is about eight deviations."""
        return self._drawn(math.prod(shape), _normal_of).reshape(shape)

    def chosen(self, count: int, rate: float) -> Tensor:
        """Poisson sampling: each of ``count`` records on its own with this probability. Mask [count]."""
        return self.uniform(count) < rate

    def _drawn(self, count: int, law: Callable[[Tensor], Tensor]) -> Tensor:
        found, words = torch.empty(count, dtype=torch.float64), self.words()
        for block in found.split(BLOCK) if count else ():
            block.copy_(law((words(len(block)) & _KEEP).double().add_(0.5).mul_(2.0**-52)))
        return found

    def words(self) -> Callable[[int], Tensor]:
        """A source of 64 random bits at a time: [count] int64."""
        if self.generator is not None:
            return lambda count: torch.randint(-(2**63), 2**63 - 1, (count,), generator=self.generator)
        stream = unforeseen()
        return lambda count: torch.frombuffer(stream(8 * count), dtype=torch.int64)


def unforeseen() -> Callable[[int], bytearray]:
    """A stream of bytes under a key of its own; without the package ``cryptography`` the operating system's own, slower."""
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    except ImportError:
        return lambda count: bytearray(os.urandom(count))
    cipher = Cipher(algorithms.AES(os.urandom(32)), modes.CTR(os.urandom(16))).encryptor()
    return lambda count: bytearray(cipher.update(bytes(count)))


def _normal_of(u: Tensor) -> Tensor:
    return torch.erfinv(u.mul_(2).sub_(1)).mul_(math.sqrt(2))


LEAST, MOST = 1.0, 2.0**40  # deviations that can be drawn
_WORD = 63  # bits of a random word beside its sign
_BITS = 3 * _WORD  # of a uniform number
_WORK = 320  # bits after the point while a table is made
_CELLS = 16  # bits of a word that find the place in a table
_FACTOR = 1448  # a: variance 8 a^2 keeps its table within a processor's cache
_OVERLAP = 8  # variance of x0 in units of a^2
_TABLED = 40 * _FACTOR**2  # largest variance drawn by inversion alone, so that x1 has a variance of at least 32


def discrete_gaussian(count: int, sigma: float, noise: Noise) -> Tensor:
    """``count`` independent numbers, int64; seeded if ``noise`` is."""
    parts = _parts(_variance(sigma))
    found, words = torch.empty(count, dtype=torch.int64), noise.words()
    for block in found.split(BLOCK) if count else ():
        block.zero_()
        for scale, table in parts:
            block.add_(_from_table(table, words, len(block)), alpha=scale)
    return found


def sampler_error(sigma: float) -> float:
    """Total-variation distance of one number's law from the discrete Gaussian, at most; below 2^-169 for every sigma.

    A table of N entries rounds each probability by at most 2^-189 and leaves out a tail of 2^-190: N 2^-189 in all. For a sum
    x0 + a x1 the probability of k is that of the discrete Gaussian times sum_j rho(j - c_k), with rho a Gaussian of variance
    t = 8 v1 / (v1 + 8) >= 6.4, where v1 >= 32 is the variance of x1. By Poisson's summation this factor is constant within
    e = 2 exp(-2 pi^2 t) < 2^-181, up to terms that are far smaller, so the law is off by less than 2 e. Errors of parts add up.
    """
    variance, found = _variance(sigma), 0.0
    while variance > _TABLED:
        found += _largest(Fraction(_OVERLAP * _FACTOR**2)) * 2.0**-_BITS + 2.0**-180
        variance = variance / _FACTOR**2 - _OVERLAP
    return found + _largest(variance) * 2.0**-_BITS


def largest(sigma: float) -> int:
    """No number drawn is larger than this, about 16 sigma; every smaller one can be."""
    return sum(scale * (len(table.exact) - 1) for scale, table in _parts(_variance(sigma)))


def _variance(sigma: float) -> Fraction:
    if not LEAST <= sigma <= MOST:
        raise RunError(
            "E430",
            f"discrete noise of deviation {sigma:g} cannot be drawn",
            why="the deviation must lie between 1 and 2^40 grid steps",
            fix="a finer grid for a deviation below 1, a coarser one above 2^40",
        )
    return Fraction(sigma) ** 2


@dataclass(frozen=True, eq=False)
class _Table:
    """Distribution function of |x|: entry i is the chance of |x| <= i."""

    exact: list[int]  # of 2^_BITS
    leading: Tensor  # their first 63 bits, int64; one more at the end that no word reaches
    places: Tensor  # for each value of a word's first bits, the entries below all such words: where to look first
    crowded: int  # from this word on a cell holds several entries


@lru_cache(maxsize=16)
def _parts(variance: Fraction) -> tuple[tuple[int, _Table], ...]:
    """The scales and tables of the numbers that add up to one of this variance."""
    found, scale = [], 1
    while variance > _TABLED:
        found.append((scale, _table(Fraction(_OVERLAP * _FACTOR**2))))
        variance = variance / _FACTOR**2 - _OVERLAP
        scale *= _FACTOR
    return (*found, (scale, _table(variance)))


@lru_cache(maxsize=16)
def _table(variance: Fraction) -> _Table:
    step, square, weight = _exp_minus(1 / (2 * variance)), _exp_minus(1 / variance), 1 << _WORK
    weights = [weight]  # exp(-k^2 / (2 variance)); times step = exp(-(2 k + 1) / (2 variance)) it is the next
    for _ in range(_largest(variance)):
        weight = weight * step >> _WORK
        step = step * square >> _WORK
        weights.append(2 * weight)
    sums = list(accumulate(weights))
    exact = [(s << _BITS) // sums[-1] for s in sums]
    leading = torch.tensor([min(e >> (_BITS - _WORD), 2**63 - 1) for e in exact] + [2**63 - 1])
    starts = torch.arange(1 << _CELLS) << (_WORD - _CELLS)
    places = torch.searchsorted(leading, starts)
    several = torch.diff(places) > 1
    crowded = int(starts[int(several.int().argmax())]) if bool(several.any()) else int(starts[-1])
    return _Table(exact, leading, places, crowded)


def _largest(variance: Fraction) -> int:
    """The largest |x| in the table; beyond it lies a probability below 2^-190."""
    return math.ceil(math.sqrt(2 * (_BITS + 1) * math.log(2) * float(variance))) + 1


def _exp_minus(x: Fraction) -> int:
    """exp(-x) for 0 <= x <= 1 as a whole number of 2^-_WORK, by its series."""
    total, term, n = 0, 1 << _WORK, 0
    while term:
        total += term if n % 2 == 0 else -term
        n += 1
        term = term * x.numerator // (x.denominator * n)
    return total


def _from_table(table: _Table, words: Callable[[int], Tensor], count: int) -> Tensor:
    """Numbers of a table's law: one bit for the sign, the others for the size."""
    drawn = words(count)
    sign = drawn >> _WORD  # 0 or -1
    word = drawn & (2**_WORD - 1)
    size = table.places.index_select(0, word >> (_WORD - _CELLS))
    entry = table.leading.index_select(0, size)
    size += word > entry
    unsettled = ((word >= table.crowded) | (word == entry)).nonzero().squeeze(1)
    chosen = word[unsettled]
    found = torch.searchsorted(table.leading, chosen)
    for i in (table.leading[found] == chosen).nonzero().squeeze(1).tolist():
        more = words(2) & (2**_WORD - 1)
        uniform = (int(chosen[i]) << 2 * _WORD) | (int(more[0]) << _WORD) | int(more[1])
        found[i] = bisect_right(table.exact, uniform)
    size[unsettled] = found
    return (size ^ sign) - sign
