"""Who holds which images of a task: the sites as the data have them, or a split.

Natural sites have a folder each, or a column of a table names them. Else there is the paper's capped Dirichlet split, the plain one,
and an even one. A split has its own random stream, so that every method of a comparison sees the same one. For federations far
larger than the data set there is a lazy split: a client's images are drawn when somebody asks for them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rescene.core.errors import ConfigError, DataError, ResceneWarning
from rescene.core.rng import Rng
from rescene.data.images import Dataset, Task
from rescene.data.loading import AnyPath, detect, existing, single_file
from rescene.data.sources.array_files import PREPARED, sites_of
from rescene.data.sources.image_folder import list_files, survey
from rescene.data.sources.image_table import column_of
from rescene.data.sources.listing import class_order


def site_names(
    name: str,
    path: AnyPath,
    *,
    layout: str = "sites",
    columns: Mapping[str, str] | None = None,
    more: Sequence[str] = (),
) -> tuple[str, ...]:
    """The sites that the images at ``path`` come from, in their order, then those that only ``more`` has; no picture is opened.

    Data of one site or of none cannot be split by site (E238).
    """
    found = _names_at(name, path, layout, columns or {})
    for later in more:
        found = tuple(dict.fromkeys([*found, *_names_at("auto", later, layout, columns or {})]))
    check_sites(found, str(path))
    return found


def _names_at(name: str, path: AnyPath, layout: str, columns: Mapping[str, str]) -> tuple[str, ...]:
    place = existing(path)
    kind = detect(place) if name == "auto" else name
    if kind == PREPARED:
        return sites_of(single_file(place, kind))
    if kind in ("csv", "parquet"):
        return class_order(column_of(single_file(place, kind) if kind == "csv" else place, "site", columns))
    if kind in ("folder", "office31"):
        return class_order(file.site for file in list_files(survey(place)[0], layout) if file.site)
    return ()


def check_sites(names: tuple[str, ...], where: str) -> None:
    """A federation has at least two sites (E238)."""
    if len(names) > 1:
        return
    what = f"all images come from one site, {names[0]}" if names else "the images name no sites"
    raise DataError(
        "E238",
        what,
        where=where,
        why="federation.partition=sites leaves every image at its site, and a federation has at least two",
        fix="a folder for each site (<site>/<class>/*) or a table with a column of sites (data.columns.site=NAME);\n"
        "federation.partition=capped federation.num_clients=N splits the images over N simulated sites",
    )


def other_number(asked: int, names: tuple[str, ...], where: str) -> DataError:
    return DataError(
        "E239",
        f"federation.num_clients is {asked}, but the images come from {len(names)} sites",
        where=where,
        why=f"federation.partition=sites leaves every image at its site: {', '.join(names[:8])}",
        fix=f"federation.num_clients={len(names)}, or leave it out; or another federation.partition",
    )


def by_site(dataset: Dataset, task: Task, num_clients: int) -> list[Tensor]:
    """Positions of a task's training images at each site, in the order of ``dataset.sites``; a site may have none."""
    check_sites(dataset.sites, dataset.name)
    if len(dataset.sites) != num_clients:
        raise other_number(num_clients, dataset.sites, dataset.name)
    assert dataset.train.sites is not None
    site = dataset.train.sites[task.train]
    return [task.train[torch.nonzero(site == k).flatten()] for k in range(num_clients)]


def warn_of_unused_sites(dataset: Dataset) -> None:
    """Say that the images name sites, and that the run spreads them over other, simulated ones (W218)."""
    if len(dataset.sites) > 1:
        what = f"the images name {len(dataset.sites)} sites, but the run splits them anew over simulated ones"
        warnings.warn(ResceneWarning("W218", what, fix="federation.partition=sites keeps them"), stacklevel=2)


KINDS = ("capped", "dirichlet", "iid")


def partition(
    labels: Tensor, num_clients: int, *, kind: str, beta: float, seed: int, min_size: int = 1
) -> list[Tensor]:
    """Split by name: ``capped`` (the paper's), ``dirichlet`` (no size cap) or ``iid`` (``beta`` unused)."""
    if kind not in KINDS:
        raise ConfigError("E208", f"unknown partition {kind!r}", fix=f"one of: {', '.join(KINDS)}")
    if kind == "iid":
        return iid_partition(labels, num_clients, seed=seed)
    return dirichlet_partition(labels, num_clients, beta, seed=seed, capped=kind == "capped", min_size=min_size)


def iid_partition(labels: Tensor, num_clients: int, *, seed: int) -> list[Tensor]:
    """Shuffled and cut into parts that differ by at most one image; sorted positions on the labels' device."""
    _check(num_clients)
    order = torch.randperm(len(labels), generator=Rng(seed).at("partition", "iid").generator()).to(labels.device)
    return [part.sort().values for part in order.tensor_split(num_clients)]


def dirichlet_partition(
    labels: Tensor,
    num_clients: int,
    beta: float,
    *,
    seed: int,
    capped: bool = True,
    min_size: int = 1,
    max_draws: int = 1000,
) -> list[Tensor]:
    """Per-class Dirichlet(``beta``) split of one task's ``labels`` [n]; sorted positions into them, one tensor each.

    Disjoint and complete. ``capped``: a client that holds n / num_clients images gets nothing of the next class.
    Redrawn while a client has fewer than ``min_size`` images; after ``max_draws`` the best draw is kept with warning
    W121 (with many clients and a small beta no draw may ever satisfy the rule).
    """
    _check(num_clients)
    if not (math.isfinite(beta) and beta > 0) or max_draws < 1:
        raise ConfigError("E208", f"cannot draw a split with beta={beta}, max_draws={max_draws}", fix="both above 0")
    positions = list(_by_class(labels).values())
    num_images = [len(p) for p in positions]
    best, chosen = (-1, 0), 0
    for draw in range(max_draws):
        rng = _stream(seed, draw)
        sizes = _draw_sizes(rng, num_images, num_clients, beta, capped)
        held = sizes.sum(0)
        score = (int(held.min()), -int((held < min_size).sum()))  # largest minimum, then fewest clients below the rule
        if score > best:
            best, chosen = score, draw
        if score[0] >= min_size:
            break
    else:
        _warn_small(-best[1], num_clients, min_size, max_draws)
    return _deal(_stream(seed, chosen), positions, num_clients, beta, capped, labels.device)


def _check(num_clients: int) -> None:
    if num_clients < 1:
        raise ConfigError("E208", f"a split needs at least one client, not {num_clients}", fix="num_clients: 1 or more")


def _stream(seed: int, draw: int) -> np.random.Generator:
    return np.random.default_rng(Rng(seed).at("partition", draw).integer())


def _by_class(labels: Tensor) -> dict[int, np.ndarray]:
    """Positions of each class present, ascending labels."""
    values = labels.cpu().numpy()
    return {int(c): np.flatnonzero(values == c) for c in np.unique(values)}


def _draw_sizes(
    rng: np.random.Generator, num_images: list[int], num_clients: int, beta: float, capped: bool
) -> np.ndarray:
    """How many images of each class each client gets, [num_classes, num_clients].

    Sizes need no shuffle, so a rejected draw costs microseconds; only the accepted one deals images out.
    """
    shares = rng.dirichlet(np.full(num_clients, beta), size=len(num_images))
    sizes = np.zeros((len(num_images), num_clients), dtype=np.int64)
    cap = sum(num_images) / num_clients if capped else math.inf
    held = np.zeros(num_clients, dtype=np.int64)
    for c, n in enumerate(num_images):
        open_clients = held < cap  # never empty: before the last image the mean holding is below the cap
        share = shares[c] * open_clients
        if not share.sum() > 0:  # all mass on full clients, or an underflow at tiny beta
            share = open_clients.astype(float)
        # the small number keeps rounding in the sum from handing the last client an image it has no share of
        cuts = np.floor(np.cumsum(share / share.sum()) * n + 1e-9).astype(np.int64)
        sizes[c] = np.diff(np.append(cuts[:-1], n), prepend=0)
        held += sizes[c]
    return sizes


def _deal(
    rng: np.random.Generator,
    positions: list[np.ndarray],
    num_clients: int,
    beta: float,
    capped: bool,
    device: torch.device,
) -> list[Tensor]:
    """Repeat the accepted draw of sizes from a fresh stream, then shuffle each class and hand its images out."""
    sizes = _draw_sizes(rng, [len(p) for p in positions], num_clients, beta, capped)
    owner = [np.repeat(np.arange(num_clients), row) for row in sizes]
    shuffled = [rng.permutation(p) for p in positions]
    images = np.concatenate([*shuffled, np.empty(0, dtype=np.int64)])
    owners = np.concatenate([*owner, np.empty(0, dtype=np.int64)])
    return [torch.from_numpy(np.sort(images[owners == k])).to(device) for k in range(num_clients)]


def _warn_small(num_small: int, num_clients: int, min_size: int, max_draws: int) -> None:
    warnings.warn(
        ResceneWarning(
            "W121",
            f"{num_small} of {num_clients} clients hold less than {min_size} images; no draw of {max_draws} did better",
            fix="fewer clients, a larger beta, or a smaller min_size",
        ),
        stacklevel=3,
    )


class LazySplit(Sequence[Tensor]):
    """Client k -> sorted positions of its images of one task. Nothing is drawn in advance and nothing is kept.

    A client draws its class mixture from Dirichlet(``beta``) and then ``size`` different images with that mixture, all from
    an address of its own, so a draw is the same whenever and however often it is made. Clients draw from the same images:
    two of them may hold the same one, unlike in the disjoint splits. A class gives at most all the images it has.
    """

    def __init__(self, positions: Tensor, labels: Tensor, num_clients: int, beta: float, size: int, seed: int) -> None:
        self.positions, self.labels = positions, labels
        self.num_clients, self.beta, self.size = num_clients, beta, size
        self._rng = Rng(seed).at("partition", "lazy")

    def __len__(self) -> int:
        return self.num_clients

    def __getitem__(self, client: Any) -> Any:
        if not 0 <= client < self.num_clients:
            raise IndexError(f"client {client} of {self.num_clients}")
        return self.positions[torch.from_numpy(self._draw(client)).to(self.positions.device)]

    def counts(self, client: int) -> dict[int, int]:
        """Images of each class that this client has any of; no image is drawn for it."""
        sizes = self._sizes(self._stream(client))
        return {label: int(n) for label, n in zip(self._classes, sizes, strict=True) if n}

    def _draw(self, client: int) -> np.ndarray:
        rng = self._stream(client)
        sizes = zip(self._classes.values(), self._sizes(rng), strict=True)
        return np.sort(np.concatenate([rng.choice(own, n, replace=False) for own, n in sizes]))

    def _stream(self, client: int) -> np.random.Generator:
        return np.random.default_rng(self._rng.at(client).integer())

    def _sizes(self, rng: np.random.Generator) -> np.ndarray:
        counts = rng.multinomial(self.size, rng.dirichlet(np.full(len(self._classes), self.beta)))
        return np.minimum(counts, [len(own) for own in self._classes.values()])

    @cached_property
    def _classes(self) -> dict[int, np.ndarray]:
        return _by_class(self.labels)
