"""Sites as the data have them: a folder for each site, or a column of a table that names them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from rescene.core.errors import DataError, ResceneWarning
from rescene.data import prepared
from rescene.data.images import Dataset, Task
from rescene.data.loading import detect, single_file
from rescene.data.sources.image_folder import list_files, survey
from rescene.data.sources.image_table import column_of
from rescene.data.sources.listing import class_order


def site_names(
    name: str,
    path: str | os.PathLike[str],
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


def _names_at(name: str, path: str | os.PathLike[str], layout: str, columns: Mapping[str, str]) -> tuple[str, ...]:
    place = Path(path).expanduser()
    if not place.exists():
        raise DataError("E201", f"there is nothing at {place}", where=str(place.absolute()), fix="check the path")
    kind = detect(place) if name == "auto" else name
    if kind == prepared.KIND:
        return prepared.sites_of(single_file(place, kind))
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
