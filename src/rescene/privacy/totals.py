"""Sums of whole numbers over sites, of which the server learns the sum alone: what is added, how, and over how many sites.

Numbers are int32 or int64 and are added modulo 2**32 or 2**64, read as signed numbers. In a simulation they are simply added;
across sites ``secure_sum`` masks them first. Both give the same bits.

With ``privacy.honest_sites`` H every site adds noise of deviation sigma / sqrt(H), so the sum has the whole noise once H honest
sites are in it. A site is honest if it adds its noise and does not tell the server its secrets. A sum is opened only with
:func:`threshold` sites in it. The promise then holds as long as at most :func:`most_colluders` sites are not honest. Sites that
missed it have a sum of their own, which needs :func:`late_threshold` sites. A site's numbers are in one opened sum only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from rescene.core.errors import RunError
from rescene.core.record import record

Values = Mapping[str, Tensor]
WHOLE = (torch.int32, torch.int64)
# bytes: a site's keys; two shares to another site; their hashes; one share; a signature
KEYS, SEALED, COMMITTED, SHARE, SIGNATURE = 192, 80, 64, 32, 96


@record
class Total:
    """The sum over these sites. Without sites nothing was opened, and there are no values."""

    values: dict[str, Tensor]
    clients: tuple[int, ...]


def threshold(num_sites: int, quorum: float, honest_sites: int | None) -> int:
    """The fewest sites whose sum may be opened, of ``num_sites`` in the federation, whoever is asked.

    More than half, so that no two disjoint groups can open different sums.

    >>> threshold(10, 0.5, 4), threshold(10, 0.7, 4), threshold(2, 0.5, 2)
    (6, 7, 2)
    """
    least = max(math.ceil(quorum * num_sites - 1e-9), 1)
    return least if honest_sites is None else max(least, num_sites // 2 + 1, honest_sites)


def most_colluders(num_sites: int, least: int, honest_sites: int) -> int:
    """So many sites may tell the server everything without breaking the promise, if sums need ``least`` sites.

    A sum of ``least`` sites must hold H honest ones. And no site's part may be opened alone: for that the server would need
    ``least`` answers to each of two questions, an honest site answers one of them, and a colluding one both.

    >>> most_colluders(10, 6, 4), most_colluders(10, 7, 4), most_colluders(10, 7, 7)
    (1, 3, 0)
    """
    return min(least - honest_sites, 2 * least - num_sites - 1)


def late_threshold(num_sites: int, quorum: float, honest_sites: int, num_late: int) -> int:
    """The fewest of ``num_late`` sites that missed the first sum whose own sum may be opened: H, and room for colluders.

    It stands as many colluding sites as the first sum does. So what is promised of the first sum holds for this one.

    >>> late_threshold(5, 0.5, 2, 2), late_threshold(10, 0.5, 4, 4), late_threshold(10, 0.5, 2, 4)
    (2, 5, 3)
    """
    colluders = most_colluders(num_sites, threshold(num_sites, quorum, honest_sites), honest_sites)
    return max(honest_sites + colluders, (num_late + colluders) // 2 + 1)


def check_part(values: Values, num_sites: int) -> None:
    """One site's part: a flat dict of whole numbers, so small that a sum of ``num_sites`` such parts cannot overflow."""
    for name, value in values.items():
        if not isinstance(value, Tensor) or value.dtype not in WHOLE:
            raise RunError(
                "E435",
                f"{name} cannot be added up over sites",
                why="a sum over sites is made of int32 and int64 tensors",
                fix="let the method send whole numbers to this verb",
            )
        room = torch.iinfo(value.dtype).max // num_sites
        if value.numel() and not -room <= int(value.min()) <= int(value.max()) <= room:
            raise RunError(
                "E436",
                f"{name} has numbers so large that the sum over {num_sites} sites could overflow",
                why=f"a site may send {room} at most",
                fix="a coarser grid, or int64 in the place of int32",
            )


def layout(values: Values) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    """Names, types and shapes, by name: parts are added only if theirs agree. A part that is read from disk has another order."""
    return tuple((name, str(value.dtype), tuple(value.shape)) for name, value in sorted(values.items()))


def added(parts: Iterable[Values]) -> dict[str, Tensor]:
    """The sum modulo 2**32 or 2**64; it does not depend on the order.

    >>> added([{"n": torch.tensor([2**31 - 1], dtype=torch.int32)}, {"n": torch.tensor([1], dtype=torch.int32)}])
    {'n': tensor([-2147483648], dtype=torch.int32)}
    """
    first, *rest = parts
    found = {name: value.clone() for name, value in first.items()}
    for part in rest:
        for name, value in part.items():
            found[name] += value
    return found


def protocol_bytes(num_sites: int) -> tuple[int, int]:
    """What the protocol costs each of so many sites beside its numbers, up and down: keys, shares, signatures, opened shares.

    >>> protocol_bytes(10)
    (2176, 5280)
    """
    if not num_sites:
        return 0, 0
    dealt = (SEALED + COMMITTED) * num_sites
    return KEYS + dealt + 2 * SIGNATURE + SHARE * (num_sites + 1), (KEYS + 2 * SIGNATURE) * num_sites + dealt
